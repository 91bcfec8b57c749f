"""From evidence to a report: tables, figures under ncu's names, annotated source, limits."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from ..errors import OptionError
from ..simt.hazards import unravel
from ..simt.occupancy import occupancy
from . import pictures
from .evidence import Evidence
from .findings import findings
from .recorder import SiteTotals
from .report import (
    ArrayRow,
    Figures,
    Finding,
    Occupancy,
    Report,
    SiteRow,
    SourceLine,
    Traffic,
    Verdict,
)
from .roofs import roofs
from .story import thread_map, thread_story

__all__ = ["build", "figures"]


def build(evidence: Evidence, verdicts: Sequence[Verdict]) -> Report:
    """Put together the report of a launch."""
    trial, recorder = evidence.trial, evidence.recorder
    limits, why_no_roof = roofs(evidence)
    resident, too_large = _occupancy(evidence)
    found = findings(evidence, too_large)
    first = evidence.partition.classes[0].representative
    return Report(
        kernel=evidence.program.name,
        filename=evidence.program.filename,
        target=evidence.target.name,
        grid=trial.grid,
        block=trial.block,
        arguments=tuple(_argument(name, value) for name, value in trial.arguments.items()),
        verdicts=tuple(verdicts),
        findings=found,
        roofs=limits,
        roofs_missing=why_no_roof,
        occupancy=resident,
        sites=_rows(recorder.totals.values(), evidence),
        compiled_sites=_rows(_compiled(evidence), evidence),
        arrays=_arrays(evidence),
        figures=figures(evidence),
        traffic=_traffic(evidence),
        source=_source(evidence, found),
        bank_maps=pictures.bank_maps(evidence),
        sector_maps=pictures.sector_maps(evidence),
        timeline=pictures.timeline(evidence, found),
        timeline_block=unravel(first, trial.grid),
        barriers_per_block=_barriers_per_block(evidence),
        thread_map=thread_map(trial, first, evidence.followed(first)),
        certificate=evidence.partition.certificate,
        all_data=evidence.holds_for_all_data,
        data_dependence=evidence.data_dependence,
        limits=_limits(evidence),
        not_checked=(why_no_roof,) if why_no_roof else (),
        notes=evidence.launch.notes,
        tell=lambda block, thread: thread_story(trial, block, thread),
    )


def figures(evidence: Evidence) -> tuple[Figures, ...]:
    """The totals under ncu's metric names, as written and as compiled; none for cc 1.x."""
    if evidence.target.half_warps:
        return ()
    return (
        Figures("source", _metrics(evidence.recorder.totals.values(), evidence)),
        Figures("compiled", _metrics(_compiled(evidence), evidence)),
    )


def _compiled(evidence: Evidence) -> list[SiteTotals]:
    """The places with their loads of shared memory merged, as nvcc does."""
    merged = evidence.recorder.merged
    return [merged.get(key, totals) for key, totals in evidence.recorder.totals.items()]


def _metrics(rows: Iterable[SiteTotals], evidence: Evidence) -> dict[str, float]:
    metrics: dict[str, float] = {}
    everything = list(rows)
    for op, kind in (("load", "ld"), ("store", "st")):
        shared = [t for t in everything if (t.array.space, t.op) == ("shared", op)]
        moved = [t for t in everything if (t.array.space, t.op) == ("global", op)]
        wavefronts = sum(t.cost for t in shared)
        sectors = sum(t.cost for t in moved)
        pipe = "l1tex_data_pipe_lsu_wavefronts_mem_shared_op"
        metrics |= {
            f"smsp__inst_executed_op_shared_{kind}.sum": sum(t.requests for t in shared),
            f"smsp__sass_{pipe}_{kind}.sum": wavefronts,
            f"l1tex__data_pipe_lsu_wavefronts_mem_shared_op_{kind}.sum": wavefronts,
            f"l1tex__data_bank_conflicts_pipe_lsu_mem_shared_op_{kind}.sum": sum(
                t.conflicts for t in shared
            ),
            f"smsp__inst_executed_op_global_{kind}.sum": sum(t.requests for t in moved),
            f"l1tex__t_requests_pipe_lsu_mem_global_op_{kind}.sum": sum(t.requests for t in moved),
            f"l1tex__t_sectors_pipe_lsu_mem_global_op_{kind}.sum": sectors,
            f"l1tex__t_set_accesses_pipe_lsu_mem_global_op_{kind}.sum": sum(t.lines for t in moved),
        }
        if sectors:
            ratio = sum(t.distinct_bytes for t in moved) / sectors
            name = f"smsp__sass_average_data_bytes_per_sector_mem_global_op_{kind}.ratio"
            metrics[name] = round(ratio, 2)
    for space, name in (
        ("shared", "memory_l1_wavefronts_shared"),
        ("global", "memory_l2_theoretical_sectors_global"),
    ):
        of = [t for t in everything if t.array.space == space]
        metrics[name] = sum(t.source_cost for t in of)
        metrics[f"{name}_ideal"] = sum(t.source_ideal for t in of)
    metrics["memory_l1_tag_requests_global"] = sum(
        t.lines for t in everything if t.array.space == "global"
    )
    metrics["launch__shared_mem_per_block_static"] = evidence.launch.shared_bytes
    if evidence.registers is not None:
        metrics["launch__registers_per_thread"] = evidence.registers
    return metrics


def _rows(rows: Iterable[SiteTotals], evidence: Evidence) -> tuple[SiteRow, ...]:
    old = evidence.target.half_warps
    units = {"shared": "steps", "global": "transactions"} if old else {}
    units = {"shared": "wavefronts", "global": "sectors"} | units
    return tuple(
        SiteRow(
            line=t.site.line,
            text=t.site.text,
            op=t.op,
            array=t.array.name,
            space=t.array.space,
            unit=units[t.array.space],
            lanes=t.lanes,
            requests=t.requests,
            cost=t.cost,
            ideal=t.ideal,
            conflicts=t.conflicts,
            lines=t.lines,
            bytes=t.bytes,
            moved=t.moved,
            per_request=t.cost / max(1, t.requests),
            histogram=dict(sorted(t.histogram.items())),
        )
        for t in sorted(rows, key=lambda t: t.site.id)
    )


def _arrays(evidence: Evidence) -> tuple[ArrayRow, ...]:
    coverage = {c.array.name: c for c in evidence.coverage}
    rows = []
    for array in evidence.launch.arrays:
        if array.space == "local":
            continue
        loads = [t for t in evidence.touching(array.name) if t.op != "store"]
        stores = [t for t in evidence.touching(array.name) if t.op != "load"]
        covered = coverage.get(array.name)
        size = int(np.prod(array.shape))
        blocks = 1 if array.space == "global" else int(np.prod(evidence.trial.grid))
        rows.append(
            ArrayRow(
                name=array.name,
                space=array.space,
                shape=array.shape,
                dtype=array.dtype.name,
                bytes=array.nbytes,
                load_lanes=sum(t.lanes for t in loads),
                store_lanes=sum(t.lanes for t in stores),
                load_cost=sum(t.cost for t in loads),
                store_cost=sum(t.cost for t in stores),
                unit="sectors" if array.space == "global" else "wavefronts",
                reads_per_element=sum(t.lanes for t in loads) / max(1, size * blocks),
                reads_range=evidence.reads_range(array.name),
                never_written=None if covered is None else covered.never,
                written_once=None if covered is None else covered.once,
                written_more=None if covered is None else covered.many,
            )
        )
    return tuple(rows)


def _traffic(evidence: Evidence) -> tuple[Traffic, ...]:
    totals = list(evidence.recorder.totals.values())
    device = [t for t in totals if t.array.space == "global"]
    staged = [t for t in totals if t.array.space == "shared" and t.op == "load"]
    once = sum({t.array.name: t.array.nbytes for t in device}.values())
    asked = sum(t.bytes for t in device)
    bars = [
        Traffic("every array once", once, "the least that must be moved"),
        Traffic("moved to and from the L1 cache", sum(t.moved for t in device), "whole sectors"),
        Traffic("asked for by threads", asked, "each thread's loads and stores of global memory"),
    ]
    if staged:
        stores = sum(t.bytes for t in device if t.op != "load")
        direct = sum(t.bytes for t in staged) + stores
        ratio = direct / max(1, asked)
        bars.append(
            Traffic(
                "without shared memory",
                direct,
                f"were every load of shared memory one of global: {ratio:.1f} times as much",
            )
        )
    return tuple(bars)


def _source(evidence: Evidence, found: Sequence[Finding]) -> tuple[SourceLine, ...]:
    lines = []
    for function in evidence.program.functions:
        text = function.source.splitlines()
        for number in range(function.tree.lineno, (function.tree.end_lineno or 0) + 1):
            here = [
                t
                for t in evidence.recorder.totals.values()
                if t.site.line == number and t.site.filename == function.filename
            ]
            barriers = sum(
                count
                for site, count in evidence.recorder.barriers.items()
                if evidence.program.sites[site].line == number
            )
            lines.append(
                SourceLine(
                    number,
                    text[number - 1],
                    sum(t.cost for t in here if t.array.space == "global"),
                    sum(t.cost for t in here if t.array.space == "shared"),
                    sum(t.requests for t in here),
                    sum(t.cost - t.ideal for t in here),
                    barriers,
                    tuple(i for i, f in enumerate(found) if _concerns(f, number)),
                )
            )
    return tuple(lines)


def _concerns(finding: Finding, line: int) -> bool:
    return any(
        place is not None and place.line == line for place in (finding.first, finding.second)
    )


def _occupancy(evidence: Evidence) -> tuple[Occupancy | None, str]:
    try:
        got = occupancy(
            evidence.threads,
            registers=evidence.registers,
            shared_bytes=evidence.launch.shared_bytes,
            target=evidence.target.name,
        )
    except OptionError as error:
        return None, str(error)
    too_large = ""
    if not got.blocks:  # what else a block has too much of was refused
        too_large = (
            f"a block of {got.threads} threads of {got.registers} registers cannot be launched on "
            f"{got.target}, where a multiprocessor has {evidence.target.registers}"
        )
    unknown = "" if evidence.registers else ", registers unknown and taken to limit nothing"
    return (
        Occupancy(
            threads=got.threads,
            registers=got.registers,
            shared_bytes=got.shared_bytes,
            blocks=got.blocks,
            warps=got.warps,
            max_warps=got.max_warps,
            fraction=got.fraction,
            limits={str(name): blocks for name, blocks in got.limits.items()},
            limited_by=got.limited_by,
            sentence=f"{got.blocks} block{'s' * (got.blocks != 1)}, {got.warps} of "
            f"{got.max_warps} warps ({100 * got.fraction:.0f} %), limited by "
            f"{' and '.join(got.limited_by)}{unknown}",
        ),
        too_large,
    )


def _barriers_per_block(evidence: Evidence) -> int:
    blocks = int(np.prod(evidence.trial.grid))
    return sum(evidence.recorder.barriers.values()) // blocks


def _argument(name: str, value: Any) -> str:
    if isinstance(value, np.ndarray):
        return f"{name}: {value.dtype.name} {'×'.join(map(str, value.shape))}"
    return f"{name} = {value}"


def _limits(evidence: Evidence) -> tuple[str, ...]:
    said = [
        "counts are of requests: cache hits, latency and the time a kernel takes are not modelled",
        "wavefronts are those of an idle pipe; under load arbitration adds up to a fifth",
        "array bases are taken to be aligned to 256 bytes, as device memory is",
    ]
    if evidence.target.name not in ("sm_90", "sm_10", "sm_11", "sm_12", "sm_13"):
        said.append(
            f"the rules were measured on sm_90; {evidence.target.name} is taken to be like it"
        )
    if any(t.op not in ("load", "store") for t in evidence.recorder.totals.values()):
        said.append("atomics are in the tables, and not in the figures of loads and stores")
    return tuple(said)
