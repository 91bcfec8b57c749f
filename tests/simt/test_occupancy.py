"""Occupancy: the columns ncu printed on an H200, hand-worked cases, and refusals."""

from __future__ import annotations

import csv
import re
from pathlib import Path

import pytest

from tilewise.errors import OptionError
from tilewise.simt.occupancy import TARGETS, occupancy

TABLE = Path(__file__).parent.parent / "data" / "ncu_h200.csv"

# The driver picks the carve-out for each kernel by a rule it does not publish; ncu's limit by
# shared memory follows from it. These are the choices that the table shows, by kernel family.
CARVEOUT_KIB = {"tiled16": 64, "guard16": 64, "naive16": 32, "naive_guard16": 32} | {
    "tiled32": 32,
    "guard32": 32,
    "naive32": 8,
}


def _kernels() -> list[dict[str, str]]:
    with TABLE.open(newline="") as lines:
        return [row for row in csv.DictReader(lines) if row["group"] == "C"]


def test_every_occupancy_column_of_the_h200_is_reproduced() -> None:
    rows = _kernels()
    assert len(rows) == 41
    for row in rows:
        family = row["id"].split(".")[1]
        side = 16 if "16" in family else 32
        got = occupancy(
            side * side,
            registers=int(row["launch__registers_per_thread"]),
            shared_bytes=int(row["launch__shared_mem_per_block_static"]),
            carveout_kib=CARVEOUT_KIB[re.match(r"(naive_)?[a-z]+(16|32)", family)[0]],
        )
        assert {f"launch__occupancy_limit_{name}": n for name, n in got.limits.items()} == {
            name: int(row[name]) for name in row if name.startswith("launch__occupancy_limit_")
        }, row["id"]
        assert 100 * got.fraction == float(row["sm__maximum_warps_per_active_cycle_pct"])


def test_the_driver_never_picks_a_carveout_that_costs_blocks() -> None:
    for row in _kernels():
        side = 16 if "16" in row["id"] else 32
        shared = int(row["launch__shared_mem_per_block_static"])
        registers = int(row["launch__registers_per_thread"])
        at_largest = occupancy(side * side, registers=registers, shared_bytes=shared)
        assert 100 * at_largest.fraction == float(row["sm__maximum_warps_per_active_cycle_pct"])


# Worked by hand from the limits in docs/facts.md.
BY_HAND = [
    # target, threads, registers, shared bytes, blocks, limits that bind
    ("sm_90", 256, 32, 2048, 8, ("warps", "registers")),
    ("sm_90", 256, 33, 2048, 6, ("registers",)),  # 40 · 32 = 1280 a warp, 51 → 48 warps
    ("sm_90", 256, 255, 0, 1, ("registers",)),
    ("sm_90", 32, 16, 0, 32, ("blocks",)),
    ("sm_90", 32, None, 0, 32, ("blocks",)),  # what is not known limits nothing
    ("sm_90", 1024, 32, 0, 2, ("warps", "registers")),
    ("sm_90", 128, None, 100 * 1024, 2, ("shared_mem",)),
    ("sm_80", 256, 32, 2048, 8, ("warps", "registers")),
    ("sm_80", 128, None, 82 * 1024, 1, ("shared_mem",)),
    ("sm_86", 256, 32, 2048, 6, ("warps",)),
    ("sm_86", 1024, 32, 0, 1, ("warps",)),
    ("sm_86", 32, 16, 0, 16, ("blocks",)),
    ("sm_89", 32, 16, 0, 24, ("blocks",)),
    ("sm_100", 256, 64, 0, 4, ("registers",)),
    ("sm_120", 256, 32, 16 * 1024, 5, ("shared_mem",)),
    ("sm_10", 256, 10, 2048, 3, ("warps", "registers")),  # the guide's kernel on its hardware
    ("sm_10", 256, 11, 2048, 2, ("registers",)),
    ("sm_13", 256, 16, 2048, 4, ("warps", "registers")),
]


@pytest.mark.parametrize(("target", "threads", "registers", "shared", "blocks", "by"), BY_HAND)
def test_occupancy_by_hand(
    target: str, threads: int, registers: int | None, shared: int, blocks: int, by: tuple[str, ...]
) -> None:
    got = occupancy(threads, registers=registers, shared_bytes=shared, target=target)
    assert (got.blocks, got.limited_by) == (blocks, by)
    assert got.warps == blocks * -(-threads // 32)
    assert 0 < got.fraction <= 1


def test_a_block_that_no_multiprocessor_can_hold_is_refused() -> None:
    with pytest.raises(OptionError, match="a block of 1056 threads cannot be launched on sm_90"):
        occupancy(1056)
    with pytest.raises(OptionError, match="a block of 1024 threads cannot be launched on sm_10"):
        occupancy(1024, target="sm_10")
    with pytest.raises(OptionError, match="a block of 0 threads"):
        occupancy(0)
    with pytest.raises(OptionError, match=r"232449 bytes of shared memory .* 232448 of sm_90"):
        occupancy(256, shared_bytes=227 * 1024 + 1)
    assert occupancy(256, shared_bytes=227 * 1024).blocks == 1


def test_unknown_targets_and_carveouts_are_refused_with_the_known_ones() -> None:
    with pytest.raises(OptionError, match=r"'sm_91' is not known; known are sm_10, .*sm_120"):
        occupancy(256, target="sm_91")
    with pytest.raises(OptionError, match="can be 0, 8, 16, 32, 64, 100 KiB, not 48"):
        occupancy(256, target="sm_86", carveout_kib=48)


def test_registers_too_many_for_one_block_leave_none() -> None:
    assert occupancy(1024, registers=255).blocks == 0


@pytest.mark.parametrize("target", TARGETS)
def test_more_of_anything_never_raises_occupancy(target: str) -> None:
    previous = None
    for registers in range(1, 129):
        now = occupancy(192, registers=registers, target=target).blocks
        assert previous is None or now <= previous
        previous = now
    previous = None
    for shared in range(0, TARGETS[target].shared_bytes_per_block, 777):
        now = occupancy(192, shared_bytes=shared, target=target).blocks
        assert previous is None or now <= previous
        previous = now
