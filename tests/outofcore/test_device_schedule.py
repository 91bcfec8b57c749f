"""Schedules of GPUs, without a GPU: every element of C once, every panel there, budgets kept."""

from __future__ import annotations

import itertools
import json
import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tilewise._operand import pick
from tilewise.outofcore.device_choice import candidates, choose, deal, least_bytes, resident
from tilewise.outofcore.device_job import Factor, Job, Rates
from tilewise.outofcore.device_schedule import Launch, Load, Schedule
from tilewise.outofcore.device_time import expected


@st.composite
def jobs(draw: Any) -> Job:
    """Products of a few hundred elements a side, stacks and operands that repeat included."""
    batch = tuple(draw(st.lists(st.integers(1, 4), max_size=2)))
    most = 300 if not batch else 40
    m, n = draw(st.integers(1, most)), draw(st.integers(1, most))
    k = draw(st.integers(1, 200))
    own = [tuple(1 if draw(st.booleans()) else size for size in batch) for _ in range(2)]
    batch = tuple(np.broadcast_shapes(*own))

    def factor(size: int, batch: tuple[int, ...]) -> Factor:
        return Factor(
            size=size,
            itemsize=draw(st.sampled_from([1, 2, 4, 8])),
            along_k=draw(st.booleans()),
            batch=batch,
            repeats_size=size > 1 and draw(st.integers(0, 9)) == 0,
            repeats_k=k > 1 and draw(st.integers(0, 9)) == 0,
        )

    return Job(
        batch=batch,
        k=k,
        a=factor(m, own[0]),
        b=factor(n, own[1][draw(st.integers(0, 1)) * len(own[1]) :] if batch else ()),
        sum_itemsize=draw(st.sampled_from([4, 8])),
        along_n=draw(st.booleans()),
        piece=draw(st.sampled_from([0, 16, 64])),
    )


def every(job: Job, budget: int) -> Iterator[Schedule]:
    fitting = (s for s in resident(job, are_files=True) if s.held_bytes <= budget)
    yield from itertools.chain(fitting, itertools.islice(candidates(job, budget), 40))


def follow(schedule: Schedule, done: frozenset[int] = frozenset()) -> None:
    """Follow a schedule on names of panels in place of numbers, as late as a device may be.

    Tiles that are ``done`` are there before it begins.
    """
    job = schedule.job
    terms = np.zeros((*job.batch, job.m, job.n), np.int64)
    writes = np.zeros_like(terms)
    slots: dict[tuple[int, int], list[tuple[int, Any]]] = {}
    last_use: dict[tuple[int, int], int] = {}
    held: dict[int, Any] = {}  # which part of C is in a slot
    before: list[Any] = [None, None]  # what the last launch has read of a and of b
    number = 0
    for tile, box in schedule.tiles():
        if tile in done:
            terms[box] = job.k
            writes[box] = 1
    for each in schedule.operations(done):
        if isinstance(each, Load):
            place = (each.side, each.slot)
            if each.after >= 0 or schedule.order != "corner":
                assert each.after == last_use.get(place, -1), "a load waits for the last reader"
            if schedule.order != "corner":
                slots[place] = []
            slots.setdefault(place, []).append((each.at, each.box))
            assert each.slot < (schedule.b_slots if each.side else schedule.a_slots)
            continue
        read: list[Any] = []
        for side, x, slot, at, part in (
            (0, job.a, each.a_slot, each.a_at, each.c[-2]),
            (1, job.b, each.b_slot, each.b_at, each.c[-1]),
        ):
            place = (0 if job.is_gram else side, slot)
            last_use[place] = number
            loads = slots[place]
            read.append((place, at, part, each.k, list(loads)))
            own = pick(each.c[:-2], x.batch)
            assert all(box[:-2] == own for _, box in loads[-1:])
            covered: set[int] = set()
            for start, box in loads:
                axis = box[-2:][(side if not job.is_gram else 0)]
                if x.repeats_size:
                    assert axis == slice(0, 1)
                    covered |= set(range(part.stop))
                else:
                    assert schedule.order != "corner" or start == axis.start
                    covered |= set(range(axis.start, axis.stop))
                    if schedule.order != "corner":
                        assert (at, axis) == (0, part)
            assert covered >= set(range(part.start, part.stop)), "a panel is not there"
        if each.same >= 0:
            assert read[each.same] == before[each.same], "it has something else there"
        before = read
        if each.is_first:
            held[each.c_slot] = each.c
        assert held[each.c_slot] == each.c
        assert each.c_slot < schedule.c_slots
        assert np.prod(each.shape) * job.sum_itemsize <= schedule.c_slot_bytes
        terms[each.c] += each.k
        writes[each.c] += each.is_last
        number += 1
    assert (terms == job.k).all(), "every term of every element, once"
    assert (writes == 1).all(), "every element of C is written once"


@settings(deadline=None, max_examples=80)
@given(jobs(), st.integers(0, 10**6), st.integers(1, 60))
def test_a_schedule_does_all_the_work_with_what_is_there(job: Job, which: int, times: int) -> None:
    budget = least_bytes(job) * times
    made = list(every(job, budget))
    for schedule in {made[(which + i) % len(made)] for i in range(4)} if made else ():
        assert schedule.held_bytes <= budget
        follow(schedule)


def test_launches_know_what_stays() -> None:
    for schedule in candidates(square(4096), 64 << 20):
        launches = [x for x in schedule.operations() if isinstance(x, Launch)]
        stays = [x.same == (0 if schedule.order == "rows" else 1) for x in launches]
        tile = schedule.tile_m if schedule.order == "rows" else schedule.tile_n
        assert len(launches) - sum(stays) == -(-4096 // tile)


@settings(deadline=None, max_examples=80)
@given(jobs(), st.integers(0, 10**6), st.integers(1, 60), st.randoms())
def test_a_schedule_goes_on_where_it_was(job: Job, which: int, times: int, rng: Any) -> None:
    made = list(every(job, least_bytes(job) * times))
    for schedule in {made[(which + i) % len(made)] for i in range(4)} if made else ():
        tiles = [tile for tile, _ in schedule.tiles()]
        assert tiles == list(range(len(tiles)))
        done = frozenset(rng.sample(tiles, rng.randint(0, len(tiles))))
        follow(schedule, done)
        operations = list(schedule.operations(done))
        launched = {each.tile for each in operations if isinstance(each, Launch)}
        assert launched == set(tiles) - done
        assert launched or not operations, "nothing is read for nothing"


def test_a_panel_that_no_tile_needs_is_not_read() -> None:
    schedule = next(resident(square(40_000)))
    tiles = list(schedule.tiles())
    number, (rows, columns) = tiles[-1]
    read = sum(
        math.prod(part.stop - part.start for part in each.box)
        for each in schedule.operations(frozenset(range(number)))
        if isinstance(each, Load)
    )
    assert read == 40_000 * (rows.stop - rows.start + columns.stop - columns.start)


@settings(deadline=None, max_examples=80)
@given(jobs(), st.integers(1, 6))
def test_devices_share_c_without_gap_or_overlap(job: Job, count: int) -> None:
    shares = deal(job, count)
    assert 1 <= len(shares) <= count
    written = np.zeros((*job.batch, job.m, job.n), int)
    for part, origin in shares:
        written[origin] += 1
        assert tuple(x.stop - x.start for x in origin) == (*part.batch, part.m, part.n)
    assert (written == 1).all()


def square(n: int, itemsize: int = 4, **options: Any) -> Job:
    a = Factor(size=n, itemsize=itemsize, along_k=True)
    b = Factor(size=n, itemsize=itemsize, along_k=False)
    return Job(batch=(), k=n, a=a, b=b, sum_itemsize=itemsize, **options)


def without_workspace(schedule: Schedule) -> Schedule | None:
    """Kernels that need no workspace."""
    return schedule if schedule.held_bytes <= schedule.budget_bytes else None


@pytest.mark.parametrize("n", [4096, 16384, 40000])
def test_what_fits_is_read_once(n: int) -> None:
    chosen = choose(square(n), 120 << 30, Rates(), without_workspace)
    assert chosen is not None
    assert chosen.order == "corner"
    assert chosen.read_bytes == 2 * 4 * n * n
    assert chosen.written_bytes == 4 * n * n


@pytest.mark.parametrize(
    ("m", "n", "along_k", "along_n", "tile"),
    [
        (4096, 4096, (True, False), True, (1024, 4096)),
        (4096, 4096, (True, True), False, (4096, 1024)),
        (8192, 2048, (True, False), True, (2048, 2048)),
        (4096, 4096, (False, False), True, (2048, 2048)),  # panels of a would be cut lines
        (2048, 6144, (True, False), True, (2048, 2048)),  # the larger one is to be cut
        (16384, 16384, (True, False), True, (4096, 4096)),
    ],
)
def test_a_product_that_is_not_large_is_cut_where_memory_is_not(
    m: int, n: int, along_k: tuple[bool, bool], along_n: bool, tile: tuple[int, int]
) -> None:
    a, b = (Factor(size=x, itemsize=4, along_k=y) for x, y in zip((m, n), along_k, strict=True))
    job = Job(batch=(), k=max(m, n) if m == n else 4096, a=a, b=b, sum_itemsize=4, along_n=along_n)
    chosen = choose(job, 120 << 30, Rates(), without_workspace)
    assert chosen is not None
    assert (chosen.tile_m, chosen.tile_n) == tile


def test_a_product_with_its_own_transpose_is_read_once() -> None:
    job = square(8192, is_gram=True)
    job = replace(job, b=job.a)
    chosen = choose(job, 120 << 30, Rates(), without_workspace)
    assert chosen is not None
    assert chosen.read_bytes == 4 * 8192**2
    follow(replace(chosen, job=replace(job, k=1)))


@pytest.mark.parametrize("along_k", [(True, False), (True, True), (False, False), (False, True)])
@pytest.mark.parametrize("is_gram", [False, True])
def test_files_that_fit_are_read_and_written_in_long_stretches(
    along_k: tuple[bool, bool], is_gram: bool
) -> None:
    a = Factor(size=8_000, itemsize=4, along_k=along_k[0])
    b = Factor(size=8_000, itemsize=4, along_k=along_k[1])
    job = Job(batch=(), k=12_000, a=a, b=a if is_gram else b, sum_itemsize=4, is_gram=is_gram)
    disk = Rates(disk_bytes=3e9, stretch_s=1e-5)
    chosen = choose(job, 100 << 30, disk, lambda schedule: replace(schedule, compute_s=0.2))
    assert chosen is not None
    assert chosen.read_bytes == 4 * 12_000 * 8_000 * (1 if is_gram else 2)
    assert chosen.tile_n == 8_000, "whole rows of C"
    assert chosen.loads_first == (is_gram or not along_k[0])
    assert chosen.tile_m < 8_000, "which are recorded part by part"
    follow(replace(chosen, job=replace(job, k=1)))


@pytest.mark.parametrize("budget", [1 << 28, 1 << 30, 2 << 30])
@pytest.mark.parametrize("piece", [0, 1536])
def test_a_budget_is_kept_and_used(budget: int, piece: int) -> None:
    fast = Rates(flops=200e12)
    chosen = choose(square(32768, piece=piece), budget, fast, without_workspace)
    assert chosen is not None
    assert chosen.held_bytes <= budget
    tight = choose(square(32768, piece=piece), budget // 2, fast, without_workspace)
    assert tight is not None
    assert chosen.read_bytes < tight.read_bytes
    assert expected(chosen, fast)[0] < expected(tight, fast)[0]


def test_a_tile_of_c_that_stays_moves_less_than_a_panel_over_all_of_k() -> None:
    fast = Rates(flops=200e12)
    whole = choose(square(65536), 1 << 30, fast, without_workspace)
    cut = choose(square(65536, piece=1536), 1 << 30, fast, without_workspace)
    assert whole is not None
    assert cut is not None
    assert cut.pieces == 43
    assert cut.read_bytes < whole.read_bytes


def test_workspace_that_does_not_fit_makes_tiles_smaller() -> None:
    budget = 1 << 30

    def fit(schedule: Schedule) -> Schedule | None:
        operands = schedule.a_store.slot_bytes + schedule.b_store.slot_bytes
        made = replace(schedule, workspace_bytes=operands)
        return made if made.held_bytes <= budget else None

    free = choose(square(32768), budget, Rates(), without_workspace)
    tight = choose(square(32768), budget, Rates(), fit)
    assert free is not None
    assert tight is not None
    assert tight.held_bytes <= budget
    assert tight.read_bytes > free.read_bytes


def test_lines_are_long_where_that_costs_nothing_else() -> None:
    """Panels of rows of a pass, and not of columns of b, if both have their rows in memory."""
    chosen = choose(square(32768), 2 << 30, Rates(), without_workspace)
    assert chosen is not None
    assert chosen.order == "columns"
    turned = square(32768)
    factors = {name: replace(getattr(turned, name), along_k=name == "b") for name in "ab"}
    chosen = choose(replace(turned, along_n=False, **factors), 2 << 30, Rates(), without_workspace)
    assert chosen is not None
    assert chosen.order == "rows"


def test_a_launch_in_parts_leaves_room_for_longer_panels() -> None:
    """Of an operand that stays, all of which a launch would take as much again for."""
    budget = 2 << 30

    def fit(parts: int) -> Any:
        def fitted(schedule: Schedule) -> Schedule | None:
            a, b = schedule.a_store.slot_bytes, schedule.b_store.slot_bytes
            made = replace(schedule, workspace_bytes=min(a, b) + max(a, b) // parts, compute_s=0.4)
            return made if made.held_bytes <= budget else None

        return fitted

    rates = Rates(flops=2 * 32768**3 / 0.35)
    whole, parts = (choose(square(32768), budget, rates, fit(n), 1.0) for n in (1, 2))
    assert whole is not None
    assert parts is not None
    assert parts.read_bytes < 0.9 * whole.read_bytes


def test_too_small_a_budget_has_no_schedule() -> None:
    job = square(100_000, 8)
    assert choose(job, least_bytes(job) // 2, Rates(), without_workspace) is None


def test_small_matrices_of_a_batch_go_together() -> None:
    factor = Factor(size=3, itemsize=4, along_k=True, batch=(480, 640))
    vector = Factor(size=1, itemsize=4, along_k=True, batch=(480, 640))
    job = Job(batch=(480, 640), k=3, a=factor, b=vector, sum_itemsize=4)
    chosen = choose(job, 1 << 30, Rates(), without_workspace)
    assert chosen is not None
    assert len([x for x in chosen.operations() if isinstance(x, Launch)]) < 20
    follow(chosen)


@settings(max_examples=60, deadline=None)
@given(jobs(), st.lists(st.integers(1, 12), max_size=3), st.data())
def test_operations_are_counted_without_being_enumerated(
    job: Job, batch: list[int], data: st.DataObject
) -> None:
    own = [tuple(1 if data.draw(st.booleans()) else size for size in batch) for _ in "ab"]
    factors = (replace(x, batch=each) for x, each in zip((job.a, job.b), own, strict=True))
    a, b = (replace(x, size=min(x.size, 40)) for x in factors)
    job = replace(job, batch=tuple(np.broadcast_shapes(*own)), a=a, b=b, k=min(job.k, 20))
    schedule = Schedule(
        job=job,
        order=data.draw(st.sampled_from(["rows", "columns"])),
        tile_m=a.size,
        tile_n=b.size,
        tile_k=job.k,
        a_slots=data.draw(st.integers(1, 3)),
        b_slots=data.draw(st.integers(1, 3)),
        c_slots=2,
        budget_bytes=0,
        at_once=data.draw(st.integers(1, 20)),
    )
    if schedule.at_once == 1:  # then slots are for all panels of one matrix, or for two of them
        m, n = (data.draw(st.integers(1, min(size, 5))) for size in (a.size, b.size))
        k = data.draw(st.integers(1, job.k))
        slots = [data.draw(st.sampled_from([1, 2, -(-x.size // t)])) for x, t in ((a, m), (b, n))]
        schedule = replace(
            schedule, tile_m=m, tile_n=n, tile_k=k, a_slots=slots[0], b_slots=slots[1]
        )

    def kind(each: Load | Launch) -> Any:
        is_load = isinstance(each, Load)
        return each.shape, each.side if is_load else (each.k, each.is_last, each.same)

    found: Counter[Any] = Counter()
    for each, times in schedule.kinds():
        found[kind(each)] += times
    assert found == Counter(map(kind, schedule.operations()))
    assert schedule.tile_count == len(list(schedule.tiles()))


@pytest.mark.parametrize("budget", [10**6, 4 * 10**6])
@pytest.mark.parametrize(("size", "least"), [(2, 2000), (64, 7), (128, 2), (180, 1)])
def test_a_million_small_matrices_are_planned_at_once(
    monkeypatch: pytest.MonkeyPatch, size: int, least: int, budget: int
) -> None:
    operations = Schedule.operations

    def few(schedule: Schedule, done: Any = ()) -> Iterator[Any]:
        assert schedule.job.matrices // schedule.at_once < 1000
        return operations(schedule, done)

    monkeypatch.setattr(Schedule, "operations", few)
    a = Factor(size=size, itemsize=4, along_k=True, batch=(10**6,))
    job = Job(batch=(10**6,), k=size, a=a, b=a, sum_itemsize=4)
    best = choose(job, budget, Rates(), without_workspace)
    assert best is not None
    assert best.at_once >= least
    assert best.at_once > 1 or best.held_bytes > budget / 3
    assert best.tile_count == -(-(10**6) // best.at_once)
    assert best.read_bytes == 2 * 10**6 * size**2 * 4


def test_a_product_of_a_million_tiles_is_planned_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    operations = Schedule.operations

    def few(schedule: Schedule, done: Any = ()) -> Iterator[Any]:
        assert schedule.launches < 1000
        return operations(schedule, done)

    monkeypatch.setattr(Schedule, "operations", few)
    for size, k, budget in ((65536, 65536, 200 << 20), (10**6, 100, 32 << 20), (10**6, 100, 10**6)):
        a = Factor(size=size, itemsize=4, along_k=True)
        job = Job(batch=(), k=k, a=a, b=replace(a, along_k=False), sum_itemsize=4)
        best = choose(job, budget, Rates(), without_workspace)
        assert best is not None
        tiles = -(-size // best.tile_m) * -(-size // best.tile_n)
        assert best.tile_count == best.launches == tiles > 1000


def test_schedules_print_and_are_plain_data() -> None:
    for schedule in every(square(4096, piece=1024), 200 << 20):
        assert "MiB of" in str(schedule)
        assert json.loads(json.dumps(schedule.to_dict()))["order"] == schedule.order
