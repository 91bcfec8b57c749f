"""Whole kernels of the H200 table: every counter that can be known, exactly."""

from __future__ import annotations

import csv
import re
from pathlib import Path
from typing import Any

import pytest

from tests.explain import matmul_kernels
from tilewise.explain.build import figures
from tilewise.explain.evidence import gather

TABLE = Path(__file__).parent.parent / "data" / "ncu_h200.csv"

# Counters of whole kernels that no model of requests can know, and why.
NOT_MODELLED = {
    "l1tex__data_pipe_lsu_wavefronts_mem_shared.sum": "adds barriers",
    "l1tex__t_output_wavefronts_pipe_lsu_mem_global_op_ld.sum": "depends on the hit rate",
    "l1tex__t_output_wavefronts_pipe_lsu_mem_global_op_st.sum": "depends on the hit rate",
    "l1tex__data_pipe_lsu_wavefronts.sum": "depends on the hit rate and on arbitration",
    "l1tex__data_bank_conflicts_type_arbitration.sum": "arbitration between warps",
    "l1tex__t_sector_hit_rate.pct": "the cache is not modelled",
    "lts__t_sectors_srcunit_tex_op_read.sum": "the cache is not modelled",
    "lts__t_sectors_srcunit_tex_op_write.sum": "the cache is not modelled",
    "lts__t_sectors_op_read.sum": "the cache is not modelled",
    "lts__t_sectors_op_write.sum": "the cache is not modelled",
    "dram__bytes_read.sum": "the cache is not modelled",
    "dram__bytes_write.sum": "the cache is not modelled",
    "gpu__time_duration.sum": "time is not modelled",
    "sm__warps_active.avg.pct_of_peak_sustained_active": "time is not modelled",
    "smsp__inst_executed.sum": "integer and control instructions are the compiler's",
    "launch__registers_per_thread": "registers are the compiler's",
    "sm__maximum_warps_per_active_cycle_pct": "compared in tests/simt/test_occupancy.py",
    "launch__occupancy_limit_blocks": "compared in tests/simt/test_occupancy.py",
    "launch__occupancy_limit_registers": "compared in tests/simt/test_occupancy.py",
    "launch__occupancy_limit_shared_mem": "compared in tests/simt/test_occupancy.py",
    "launch__occupancy_limit_warps": "compared in tests/simt/test_occupancy.py",
}

# (rows, counter) that come out differently, and why. Nothing else may differ.
EXCEPTIONS = {
    (r"mm\.guard\d+\.n\d+", "smsp__inst_executed_op_global_ld.sum"): (
        "nvcc predicates the guarded loads: a warp that is wholly outside executes the "
        "instruction and makes no request; the model counts requests"
    )
}

# Of a loaded pipe these are bounded by the model from below: arbitration only adds.
UNDER_LOAD = {
    f"l1tex__{what}_mem_shared_op_{op}.sum"
    for what in ("data_pipe_lsu_wavefronts", "data_bank_conflicts_pipe_lsu")
    for op in ("ld", "st")
}
IDLE_UP_TO = 256


# Of the large launches these are run every time, the others with the slow tests.
QUICK = ("mm.tiled16.n1024", "mm.guard16.n1001")


def _rows() -> list[Any]:
    with TABLE.open(newline="") as lines:
        rows = [row for row in csv.DictReader(lines) if row["group"] == "C"]
    assert len(rows) == 41
    return [
        pytest.param(
            row,
            id=row["id"],
            marks=[pytest.mark.slow] * (row["id"][-4:].isdigit() and row["id"] not in QUICK),
        )
        for row in rows
    ]


@pytest.mark.parametrize("row", _rows())
def test_every_counter_of_a_whole_kernel(row: dict[str, str]) -> None:
    name, n = re.fullmatch(r"mm\.(\w+)\.n(\d+)", row["id"]).groups()
    n, side = int(n), 16 if "16" in name else 32
    matrix = ((n, n), "float32")
    blocks = -(-n // side)
    seen = gather(
        matmul_kernels.of_row(name), (blocks, blocks), (side, side), (matrix, matrix, n, matrix)
    )
    compiled = next(f.metrics for f in figures(seen) if f.level == "compiled")
    wrong = {}
    for metric, text in row.items():
        if not text or ("__" not in metric and not metric.startswith("memory_")):
            continue
        if metric in NOT_MODELLED:
            assert metric not in compiled
            continue
        measured, model = float(text), compiled.get(metric, 0)
        if metric in UNDER_LOAD and n > IDLE_UP_TO:
            assert measured >= model, metric
        elif measured != pytest.approx(model, abs=0.0051):
            wrong[metric] = (model, measured)
    excepted = {metric for rows, metric in EXCEPTIONS if re.fullmatch(rows, row["id"])}
    assert set(wrong) == excepted, wrong
    for model, measured in wrong.values():
        assert measured > model
