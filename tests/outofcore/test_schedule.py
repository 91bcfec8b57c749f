"""Schedules, without a file in sight: every step is there once, buffers hold what they should."""

from __future__ import annotations

import itertools
import json
import math
import time
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tilewise._operand import batch_slices, pick
from tilewise.outofcore.choice import choose_schedule, least_budget
from tilewise.outofcore.schedule import Job, Schedule, Side, choose_tiles


def job(
    m: int, n: int, k: int, *, itemsize: int = 4, batch: tuple[int, ...] = (), **options: Any
) -> Job:
    given: dict[str, Any] = {
        "panel_bytes": 0,
        "product_bytes": itemsize,
        "sum_itemsize": itemsize,
        "out_itemsize": itemsize,
    }
    return Job(
        batch=batch,
        k=k,
        a=Side(
            m,
            itemsize,
            options.pop("a_along_k", True),
            options.pop("a_batch", batch),
            options.pop("is_inside", False),
            options.pop("a_chunk", (1, 1)),
        ),
        b=Side(
            n,
            itemsize,
            options.pop("b_along_k", False),
            options.pop("b_batch", batch),
            chunk=options.pop("b_chunk", (1, 1)),
        ),
        **(given | options),
    )


@st.composite
def jobs(draw: Any) -> Job:
    m, n, k = (draw(st.integers(1, 400)) for _ in range(3))
    batch = tuple(draw(st.lists(st.integers(1, 3), max_size=2)))
    broadcast = [tuple(1 if draw(st.booleans()) else size for size in batch) for _ in range(2)]
    batch = tuple(np.broadcast_shapes(*broadcast))
    return job(
        m,
        n,
        k,
        itemsize=draw(st.sampled_from([1, 4, 16])),
        batch=batch,
        a_batch=broadcast[0],
        b_batch=broadcast[1][draw(st.integers(0, len(batch))) :] if draw(st.booleans()) else (),
        a_along_k=draw(st.booleans()),
        b_along_k=draw(st.booleans()),
        panel_bytes=draw(st.sampled_from([0, 8, 48])),
        sum_itemsize=draw(st.sampled_from([4, 8])),
        is_inside=draw(st.booleans()),
        a_chunk=draw(st.sampled_from([(1, 1), (1, 100), (30, 20)])),
        b_chunk=draw(st.sampled_from([(1, 1), (64, 64)])),
        staging_bytes=draw(st.sampled_from([0, 5000])),
    )


@settings(deadline=None, max_examples=150)
@given(jobs(), st.floats(1, 30))
def test_a_schedule_does_all_the_work_within_its_budget(job: Job, times: float) -> None:
    budget = int(least_budget(job) * times)
    schedule = choose_schedule(job, budget)
    assert schedule is not None
    assert schedule.held_bytes <= budget
    assert schedule.inner.workspace_bytes * schedule.at_once <= schedule.workspace_bytes
    follow(schedule)


@pytest.mark.parametrize("batch", [(1_000_000,), (1000, 1000), (1000, 1, 1000)])
def test_a_plan_for_a_million_matrices_is_quick(batch: tuple[int, ...]) -> None:
    own = tuple(1 if axis == len(batch) - 1 else size for axis, size in enumerate(batch))
    many = job(5, 6, 7, batch=batch, b_batch=own)
    began = time.process_time()
    for budget in (100, least_budget(many), 100_000, 10_000_000):
        schedule = choose_schedule(many, budget)
        assert (schedule is None) == (budget == 100)
        if schedule is None:
            continue
        assert schedule.tile_count >= 1
        assert schedule.read_bytes >= 4 * 5 * 7 * 1_000_000
    assert time.process_time() - began < 3  # it was minutes


def follow(schedule: Schedule) -> None:
    """Run the steps of a schedule on coverage counts in place of numbers."""
    job = schedule.job
    terms = np.zeros((*job.batch, job.m, job.n), np.int64)
    finished = np.zeros_like(terms)
    holds: dict[tuple[str, int], Any] = {}
    used_before: set[tuple[str, int]] = set()
    read_bytes = flops = 0
    reached = 0
    for step in schedule.steps():
        used = {("a", step.a.slot), ("b", step.b.slot)}
        for side, panel, slots in (
            ("a", step.a, schedule.a_slots),
            ("b", step.b, schedule.b_slots),
        ):
            operand = getattr(job, side)
            assert 0 <= panel.slot < slots
            if panel.is_read:
                # It is read while the step before this one is computed.
                assert (side, panel.slot) not in used_before
                holds[side, panel.slot] = panel.box
                read_bytes += math.prod(p.stop - p.start for p in panel.box) * operand.itemsize
            assert holds[side, panel.slot] == panel.box
        used_before = used
        rows, columns, piece = step.c[-2], step.c[-1], step.a.box[-1]
        assert step.a.box == (*pick(step.c[:-2], job.a.batch), rows, piece)
        assert step.b.box == (*pick(step.c[:-2], job.b.batch), piece, columns)
        assert piece.start == (0 if step.is_first else reached)  # ascending, nothing left out
        reached = piece.stop
        assert step.is_last == (piece.stop == job.k)
        terms[step.c] += piece.stop - piece.start
        flops += 2 * terms[step.c].size * (piece.stop - piece.start)
        finished[step.c] += step.is_last
    assert (terms == job.k).all()
    assert (finished == 1).all()
    assert read_bytes == schedule.read_bytes
    assert flops == schedule.flops
    assert schedule.written_bytes == terms.size * job.out_itemsize
    assert schedule.tile_count * schedule.piece_count == sum(1 for _ in schedule.steps())


@pytest.mark.parametrize("sizes", [(16384, 16384, 16384), (100, 10**6, 130), (10**6, 65, 10**6)])
@pytest.mark.parametrize("options", [{}, {"itemsize": 16}, {"panel_bytes": 48, "sum_itemsize": 8}])
def test_the_least_budget_is_enough_and_less_is_not(
    sizes: tuple[int, int, int], options: dict[str, Any]
) -> None:
    given = job(*sizes, **options)
    schedule = choose_schedule(given, least_budget(given))
    assert schedule is not None
    assert schedule.held_bytes <= least_budget(given)
    assert choose_schedule(given, least_budget(given) - 64) is None


def test_the_bits_depend_on_the_plan_alone() -> None:
    one, other = (choose_schedule(job(3000, 2000, 1000), 4 << 20) for _ in range(2))
    assert one == other
    assert one is not None
    assert list(one.steps()) == list(other.steps())  # type: ignore[union-attr]


def test_traffic_is_near_the_least_possible() -> None:
    """2·m·n·k/√M elements are the least order there is for M elements of memory."""
    n, budget = 100_000, 1 << 30
    schedule = choose_schedule(job(n, n, n), budget)
    assert schedule is not None
    least = 2 * n**3 / math.sqrt(budget / 4) * 4
    assert least < schedule.read_bytes < 3 * least


@pytest.mark.parametrize(
    ("sizes", "budget", "passes"),
    [
        ((400_000, 2000, 2000), 64 << 20, (1, 1)),  # b stays, a streams past
        ((2000, 400_000, 2000), 64 << 20, (1, 1)),
        ((512, 512, 10**7), 64 << 20, (1, 1)),  # c stays
        ((16384, 16384, 16384), 512 << 20, (3, 1)),
    ],
)
def test_what_fits_is_read_once(
    sizes: tuple[int, int, int], budget: int, passes: tuple[int, int]
) -> None:
    schedule = choose_schedule(job(*sizes), budget)
    assert schedule is not None
    assert (schedule.a_passes, schedule.b_passes) == passes
    assert schedule.held_bytes <= budget


def test_files_are_read_in_long_stretches() -> None:
    """The file's order decides the tiles: 4 KiB stretches would cost more than another pass."""
    for a_along_k, b_along_k in itertools.product((True, False), repeat=2):
        given = job(30000, 30000, 30000, a_along_k=a_along_k, b_along_k=b_along_k)
        schedule = choose_schedule(given, 1 << 30)
        assert schedule is not None
        for along_k, tile in ((a_along_k, schedule.tile_m), (b_along_k, schedule.tile_n)):
            assert 4 * (schedule.tile_k if along_k else tile) >= 8 << 10


def test_small_matrices_of_a_batch_go_many_at_a_time() -> None:
    schedule = choose_schedule(job(30, 20, 10, batch=(100, 50)), 10 << 20)
    assert schedule is not None
    assert schedule.at_once > 500
    assert "matrices at once" in str(schedule)
    follow(schedule)


def test_tiles_keep_to_the_chunks_of_the_files() -> None:
    given = job(20_000, 20_000, 20_000, a_chunk=(1000, 500), b_chunk=(300, 2000))
    schedule = choose_schedule(given, 1 << 30)
    assert schedule is not None
    assert schedule.tile_m % 1000 == 0
    assert schedule.tile_n % 300 == 0
    assert schedule.tile_k % 2000 == 0
    assert schedule.job.a.elements(given.k, schedule.tile_m, schedule.tile_k) == 20_000**2
    # Where a chunk is larger than what fits, tiles are smaller and it is read more often.
    schedule = choose_schedule(given, 2 << 20)
    assert schedule is not None
    assert schedule.job.a.elements(given.k, schedule.tile_m, schedule.tile_k) > 20_000**2
    follow(choose_schedule(job(300, 200, 400, a_chunk=(64, 64)), 200 << 10))  # type: ignore[arg-type]


def test_matrices_that_lie_inside_one_another_are_read_together() -> None:
    given = job(2000, 1000, 1500, batch=(40,), a_along_k=False, is_inside=True)
    schedule = choose_schedule(given, 64 << 20)
    assert schedule is not None
    assert schedule.at_once == 40
    assert schedule.tile_m < 2000
    assert schedule.held_bytes <= 64 << 20
    follow(choose_schedule(job(200, 100, 150, batch=(4,), is_inside=True), 500 << 10))  # type: ignore[arg-type]


def test_what_is_done_is_not_done_again() -> None:
    schedule = choose_schedule(job(300, 200, 400), 200 << 10)
    assert schedule is not None
    every = list(schedule.steps())
    assert sorted({step.tile for step in every}) == list(range(schedule.tile_count))
    done = set(range(0, schedule.tile_count, 2))
    rest = list(schedule.steps(done))
    assert [(s.c, s.a.box, s.tile) for s in rest] == [
        (s.c, s.a.box, s.tile) for s in every if s.tile not in done
    ]
    held: dict[Any, Any] = {}
    for step in rest:  # what is skipped is not taken for read
        for side, panel in (("a", step.a), ("b", step.b)):
            if panel.is_read:
                held[side, panel.slot] = panel.box
            assert held[side, panel.slot] == panel.box


def test_parts_of_tiles_keep_to_one_grid() -> None:
    for sizes in ((3000, 2000, 1000), (5000, 5000, 70), (100, 9000, 900)):
        schedule = choose_schedule(job(*sizes), 1 << 20)
        assert schedule is not None
        inner = schedule.inner
        for size, tile, part in (
            (sizes[0], schedule.tile_m, inner.tile_m),
            (sizes[1], schedule.tile_n, inner.tile_n),
        ):
            assert tile >= size or tile % part == 0


def test_schedule_prints_for_people_and_goes_to_json() -> None:
    schedule = choose_schedule(job(16384, 16384, 16384), 512 << 20)
    assert schedule is not None
    text = str(schedule)
    for word in ("tiles", "memory", "reads", "writes"):
        assert f"\n{word} " in f"\n{text}"
    facts = json.loads(json.dumps(schedule.to_dict()))
    assert facts["read_bytes"] == schedule.read_bytes
    assert facts["tiles"] == schedule.tile_count


def test_batch_slices_cover_the_batch_once() -> None:
    for batch, at_once in (((), 1), ((7,), 3), ((2, 3, 5), 1), ((2, 3, 5), 7), ((4, 6), 100)):
        count = np.zeros(batch, int)
        for at in batch_slices(batch, at_once):
            assert count[at].size <= at_once
            count[at] += 1
        assert (count == 1).all()


@pytest.mark.parametrize("sizes", [(1, 1, 1), (727, 577, 859), (4096, 1, 3), (3, 10**6, 2)])
def test_tiles_fit_and_cover(sizes: tuple[int, int, int]) -> None:
    for budget in (100, 5000, 10**6, 10**9):
        tiles = choose_tiles(*sizes, panel_bytes=8, tile_bytes=12, budget_bytes=budget)
        assert tiles is not None
        assert tiles.workspace_bytes <= budget
        if tiles.count < 10**4:
            rows, columns = sizes[:2]
            covered = sum((i.stop - i.start) * (j.stop - j.start) for i, j in tiles)
            assert covered == rows * columns
        assert sum(p.stop - p.start for p in tiles.pieces()) == sizes[2]
    assert choose_tiles(*sizes, panel_bytes=8, tile_bytes=12, budget_bytes=27) is None
