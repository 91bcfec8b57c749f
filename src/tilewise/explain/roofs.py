"""The limits on a kernel's speed: arithmetic, memory, the shared-memory pipe, issue.

Each roof is the least number of cycles for which one resource of a multiprocessor is busy. No
kernel is faster than its lowest roof; how far below it one stays is latency, which is not modelled.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from .evidence import Evidence
from .report import Roof, Roofs

__all__ = ["DEVICES", "Device", "roofs"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """A product of an architecture; nominal figures from its maker (docs/facts.md).

    ``lanes`` is how many multiply-adds of a type a multiprocessor begins in a cycle.
    """

    name: str
    multiprocessors: int
    ghz: float
    tbs: float
    lanes: Mapping[str, int]
    schedulers: int = 4


DEVICES: dict[str, Device] = {
    "sm_80": Device(
        name="A100", multiprocessors=108, ghz=1.41, tbs=2.039, lanes={"f4": 64, "f8": 32}
    ),
    "sm_86": Device(
        name="RTX 3090", multiprocessors=82, ghz=1.695, tbs=0.936, lanes={"f4": 128, "f8": 2}
    ),
    "sm_89": Device(
        name="RTX 4090", multiprocessors=128, ghz=2.52, tbs=1.008, lanes={"f4": 128, "f8": 2}
    ),
    "sm_90": Device(
        name="H200", multiprocessors=132, ghz=1.98, tbs=4.8, lanes={"f4": 128, "f8": 64}
    ),
    "sm_100": Device(
        name="B200", multiprocessors=148, ghz=1.965, tbs=8.0, lanes={"f4": 128, "f8": 64}
    ),
    "sm_120": Device(
        name="RTX 5090", multiprocessors=170, ghz=2.407, tbs=1.792, lanes={"f4": 128, "f8": 2}
    ),
}

_PIPE, _ISSUE, _FLOAT, _MEMORY = "shared memory pipe", "issue", "float arithmetic", "memory"


def roofs(evidence: Evidence) -> tuple[Roofs | None, str]:
    """Return the roofs of a launch, or None and why there are none."""
    device = DEVICES.get(evidence.target.name)
    if device is None:
        return None, f"the timing of {evidence.target.name} is not modelled"
    work = _Work.of(evidence, device)
    if not work.instructions:
        return None, "no floating-point instruction whose executions can be counted was found"
    compiled = _cycles(work, _wavefronts(evidence, merged=True), device)
    source = _cycles(work, _wavefronts(evidence, merged=False), device)
    busy = compiled[_FLOAT]
    binding = max(compiled, key=lambda name: compiled[name])
    peak = 2e-3 * device.multiprocessors * device.lanes["f4"] * device.ghz
    rows = tuple(
        Roof(
            name=name,
            cycles=cycles,
            fraction=busy / cycles if cycles else 1.0,
            tflops=peak * busy / cycles if cycles else peak,
            detail=_detail(name, work, evidence, device),
        )
        for name, cycles in sorted(compiled.items(), key=lambda item: -item[1])
    )
    fraction, as_written = busy / compiled[binding], busy / max(source.values())
    return (
        Roofs(
            device=device.name,
            level="compiled",
            flops=work.flops,
            intensity=work.flops / max(1, work.compulsory_bytes),
            peak_tflops=peak,
            bandwidth_tbs=device.tbs,
            roofs=rows,
            binding=binding,
            sentence=_sentence(binding, fraction, as_written, peak, device),
            next_step=_next_step(binding, fraction, evidence),
            not_counted=work.missing,
        ),
        "",
    )


@dataclass(frozen=True, slots=True)
class _Work:
    """What a launch computes and must move."""

    flops: int
    instructions: int
    """Floating-point instructions of warps."""
    weighted: float
    """Cycles of a multiprocessor that they take, were there only one."""
    compulsory_bytes: int
    missing: tuple[str, ...]

    @classmethod
    def of(cls, evidence: Evidence, device: Device) -> _Work:
        recorder = evidence.recorder
        flops, instructions, weighted = 0, 0, 0.0
        missing = []
        for item in evidence.flow.arithmetic:
            if item.site is None or item.code not in device.lanes:
                missing.append(f"the arithmetic on line {item.line}")
                continue
            lanes, warps = recorder.executions(item.site)
            flops += lanes * item.times * (2 * item.fused + item.single)
            count = warps * item.times * (item.fused + item.single)
            instructions += count
            weighted += count * 32 / device.lanes[item.code]
        moved = [t.array for t in recorder.totals.values() if t.array.space == "global"]
        touched = {array.name: array for array in moved}
        return cls(
            flops,
            instructions,
            weighted,
            sum(array.nbytes for array in touched.values()),
            tuple(dict.fromkeys(missing)),
        )


@dataclass(frozen=True, slots=True)
class _Pipe:
    """Requests and wavefronts of a launch."""

    wavefronts: int
    requests: int


def _wavefronts(evidence: Evidence, *, merged: bool) -> _Pipe:
    """Passes through the pipe: wavefronts of shared memory, and one at least a global request."""
    recorder = evidence.recorder
    wavefronts = requests = 0
    for key, totals in recorder.totals.items():
        if merged:
            totals = recorder.merged.get(key, totals)
        requests += totals.requests
        wavefronts += totals.cost if totals.array.space == "shared" else totals.requests
    return _Pipe(wavefronts, requests)


def _cycles(work: _Work, pipe: _Pipe, device: Device) -> dict[str, float]:
    """Cycles that each resource of a multiprocessor is busy, with the work spread evenly."""
    bytes_a_cycle = device.tbs * 1e3 / device.ghz
    each = device.multiprocessors
    return {
        _FLOAT: work.weighted / each,
        _PIPE: pipe.wavefronts / each,
        _ISSUE: (work.instructions + pipe.requests) / device.schedulers / each,
        _MEMORY: work.compulsory_bytes / bytes_a_cycle,
    }


def _detail(name: str, work: _Work, evidence: Evidence, device: Device) -> str:
    pipe = _wavefronts(evidence, merged=True)
    if name == _FLOAT:
        return f"{work.instructions:,} instructions of warps, {device.lanes['f4']} lanes a cycle"
    if name == _PIPE:
        return (
            f"{pipe.wavefronts:,} wavefronts of shared and global accesses for "
            f"{work.instructions:,} arithmetic instructions, one wavefront a cycle"
        )
    if name == _ISSUE:
        return (
            f"{work.instructions:,} arithmetic and {pipe.requests:,} memory instructions at least, "
            f"{device.schedulers} a cycle"
        )
    return f"{work.compulsory_bytes:,} bytes, every array moved once, at {device.tbs} TB/s"


def _sentence(binding: str, fraction: float, as_written: float, peak: float, device: Device) -> str:
    said = f"{binding} binds: at most {100 * fraction:.0f} % of {device.name}'s float32 peak"
    said += f", {peak * fraction:.1f} of {peak:.1f} TFLOP/s"
    if round(100 * as_written) != round(100 * fraction):
        said += (
            f" (with loads of shared memory merged as nvcc does; {100 * as_written:.0f} % with "
            "each as it is written, as numba-cuda does)"
        )
    return said


def _next_step(binding: str, fraction: float, evidence: Evidence) -> str:
    totals = list(evidence.recorder.totals.values())
    shared = [t for t in totals if t.array.space == "shared"]
    conflicts = [t for t in shared if t.cost > t.ideal]
    if binding == _PIPE and conflicts:
        worst = max(conflicts, key=lambda t: t.cost - t.ideal)
        return (
            f"remove the bank conflicts of line {worst.site.line} ({worst.site.text}): "
            f"{worst.cost:,} wavefronts where {worst.ideal:,} would do"
        )
    if binding == _PIPE and shared:
        # An r × c tile of results needs r + c loaded numbers for r·c multiply-adds, not 2·r·c.
        gains = [(side, min(1.0, fraction * side)) for side in (4, 8)]
        reach = ", with ".join(f"{side}×{side} to about {100 * g:.0f} %" for side, g in gains)
        return (
            "let each thread compute more elements, so that a number loaded from shared memory is "
            f"used more than once: r×c results need r + c loads instead of 2·r·c, which lifts this "
            f"roof with {reach}"
        )
    if binding == _PIPE:
        return (
            "stage tiles of the operands in shared memory, so that each element is loaded from "
            "global memory once a block and not once a thread"
        )
    if binding == _MEMORY:
        return (
            "memory binds even if every array is moved once: only moving fewer bytes helps, by "
            "smaller types or by doing more with what is loaded"
        )
    if binding == _ISSUE:
        return "load 16 bytes at a time, and unroll: fewer instructions for the same arithmetic"
    return "arithmetic binds: what is left is to keep it fed, or tensor cores"
