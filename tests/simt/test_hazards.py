"""Races and other hazards against a definition spelled out pair by pair, on made-up events."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tilewise.simt.events import Access, ArrayInfo, Barrier, Fault, Launch, Site
from tilewise.simt.hazards import BlockClass, Found, Hazard, HazardWatch, element_at, unravel

THREADS = 64


def _array(
    name: str,
    space: Any,
    shape: tuple[int, ...],
    *,
    base: int = 0,
    dtype: Any = np.float32,
    strides: tuple[int, ...] | None = None,
) -> ArrayInfo:
    dtype = np.dtype(dtype)
    if strides is None:
        strides = np.empty(shape, dtype).strides
    spans = sum((n - 1) * abs(s) for n, s in zip(shape, strides, strict=True))
    return ArrayInfo(name, space, dtype, shape, strides, base, spans + dtype.itemsize)


SHARED = _array("As", "shared", (32,))
GLOBAL = _array("C", "global", (64,), base=1 << 21)


@dataclass
class Script:
    """Plays events to a watch, and remembers them for the plain definition."""

    watch: HazardWatch
    arrays: tuple[ArrayInfo, ...] = (SHARED, GLOBAL)
    blocks: list[int] = field(default_factory=lambda: [0, 1])
    grid: int = 8
    sites: dict[str, Site] = field(default_factory=dict)
    waited: dict[int, int] = field(default_factory=dict)
    accesses: list[tuple[Any, ...]] = field(default_factory=list)
    interval: int = 0
    warp_interval: Any = None
    some_lanes: Any = None

    def __post_init__(self) -> None:
        kinds = {"load": "load", "store": "store", "add": "atomic"}
        for number, (array, op) in enumerate(itertools.product(self.arrays, kinds)):
            for copy in (0, 1):
                name = f"{op} {array.name} {copy}"
                self.sites[name] = Site(
                    2 * number + copy,
                    kinds[op],
                    "k",
                    "k.py",
                    10 * number + copy,
                    0,
                    9,
                    name,
                    array.name,
                )
        barrier = Site(90, "barrier", "k", "k.py", 90, 0, 9, "cuda.syncthreads()", None)
        self.sites["barrier"] = barrier
        self.warp_interval = np.zeros((len(self.blocks), THREADS // 32), np.int64)
        self.watch.on_launch(
            Launch(
                "k",
                "k.py",
                (self.grid, 1, 1),
                (THREADS, 1, 1),
                self.arrays,
                {},
                tuple(self.sites.values()),
                128,
            )
        )

    def access(self, what: str, index: Any, active: Any = True, value: Any = 0) -> None:
        op, name, _ = what.split()
        array = next(a for a in self.arrays if a.name == name)
        shape = (len(self.blocks), THREADS)
        index, active = np.broadcast_to(index, shape), np.broadcast_to(active, shape)
        value = np.broadcast_to(np.asarray(value, array.dtype), shape)
        event = Access(
            self.sites[what],
            array,
            op,
            np.array(self.blocks),
            active,
            index * array.dtype.itemsize,
            value,
            np.full(len(self.blocks), self.interval),
            self.warp_interval.copy(),
            None if self.some_lanes is None else self.some_lanes.copy(),
        )
        self.watch.on_access(event)
        for row, thread in zip(*np.nonzero(active), strict=True):
            self.accesses.append(
                (
                    array.name,
                    op,
                    self.sites[what].id,
                    self.blocks[row],
                    int(thread),
                    self.interval,
                    int(self.warp_interval[row, thread // 32]),
                    self.waited.get(thread // 16, 0),
                    int(index[row, thread]),
                )
            )

    def sync_warp(self, warp: int) -> None:
        """All lanes of a warp wait for each other, in every block."""
        self.warp_interval[:, warp] += 1
        if self.some_lanes is not None:
            self.some_lanes[:, :, warp * 32 : warp * 32 + 32] = 0

    def sync_half_warp(self, half: int) -> None:
        """Sixteen lanes of a warp wait for each other, in every block."""
        if self.some_lanes is None:
            self.some_lanes = np.zeros((2, len(self.blocks), THREADS), np.int64)
        lanes = slice(half * 16, half * 16 + 16)
        self.some_lanes[0, :, lanes] += 1
        self.some_lanes[1, :, lanes] = 0xFFFF << (half % 2 * 16)
        self.waited[half] = self.waited.get(half, 0) + 1

    def barrier(self, live: Any = True) -> None:
        shape = (len(self.blocks), THREADS)
        live = np.broadcast_to(live, shape)
        self.watch.on_barrier(
            Barrier(
                self.sites["barrier"],
                np.array(self.blocks),
                live,
                live,
                np.full(len(self.blocks), self.interval),
            )
        )
        self.interval += 1

    def found(self) -> dict[tuple[int, int, bool], Hazard]:
        races = [h for h in self.watch.hazards() if h.second is not None]
        return {(*sorted((h.first.site.id, h.second.site.id)), h.between_blocks): h for h in races}


def _plain_races(accesses: list[tuple[Any, ...]]) -> set[tuple[int, int, bool]]:
    """Every pair of accesses held against the definition, one by one."""
    races = set()
    for one, other in itertools.combinations(accesses, 2):
        array, op, site, block, thread, interval, warp_interval, waited, index = one
        array2, op2, site2, block2, thread2, interval2, warp_interval2, waited2, index2 = other
        if array != array2 or index != index2 or op == op2 == "load" or op == op2 == "add":
            continue
        if block != block2:
            if array == "C":
                races.add((*sorted((site, site2)), True))
        elif thread != thread2 and interval == interval2:
            same_warp = thread // 32 == thread2 // 32
            ordered = same_warp and warp_interval != warp_interval2
            ordered |= thread // 16 == thread2 // 16 and waited != waited2
            if not ordered:
                races.add((*sorted((site, site2)), False))
    return races


TX = np.arange(THREADS)


def test_a_read_of_anothers_write_without_a_barrier_between() -> None:
    script = Script(HazardWatch())
    script.access("store As 0", TX % 32, TX < 32)
    script.access("load As 0", (TX + 1) % 32, TX < 32)
    (hazard,) = script.found().values()
    assert hazard.kind == "read-after-write"
    assert (hazard.first.thread, hazard.second.thread) == ((1, 0, 0), (0, 0, 0))
    assert hazard.first.site.text == "store As 0"
    assert hazard.second.site.text == "load As 0"
    assert hazard.element == (1,)
    assert (hazard.interval, hazard.accesses, hazard.blocks) == (0, 64, 2)


def test_a_barrier_between_them_makes_it_right() -> None:
    script = Script(HazardWatch())
    script.access("store As 0", TX % 32, TX < 32)
    script.barrier()
    script.access("load As 0", (TX + 1) % 32, TX < 32)
    assert script.watch.hazards() == []


def test_a_write_over_what_another_may_still_read() -> None:
    script = Script(HazardWatch())
    script.access("store As 0", TX % 32, TX < 32)
    script.barrier()
    script.access("load As 0", (TX + 1) % 32, TX < 32)
    script.access("store As 0", TX % 32, TX < 32)
    (hazard,) = script.found().values()
    assert hazard.kind == "write-after-read"
    assert hazard.interval == 1


def test_two_readers_are_remembered_so_that_the_second_reader_is_no_alibi() -> None:
    """A shadow that keeps only the last reader takes its write for that reader's own."""
    for reader in (0, 1):
        script = Script(HazardWatch(), blocks=[0])
        script.access("store As 0", TX % 32, TX < 32)
        script.barrier()
        script.access("load As 0", 5, TX < 2)
        script.access("store As 1", 5, reader == TX)
        (hazard,) = script.found().values()
        assert hazard.kind == "write-after-read"
        assert hazard.first.thread == (1 - reader, 0, 0)


def test_a_thread_does_not_race_with_itself() -> None:
    script = Script(HazardWatch())
    for _ in range(3):
        script.access("store As 0", TX % 32, TX < 32)
        script.access("load As 0", TX % 32, TX < 32)
        script.access("store C 0", TX, np.array([[True], [False]]))
        script.access("load C 0", TX, np.array([[True], [False]]))
    assert script.watch.hazards() == []


def test_equal_values_written_twice_are_kept_apart() -> None:
    for values, harmless in ((7.0, True), (TX, False)):
        script = Script(HazardWatch(), blocks=[0])
        script.access("store As 0", 3, value=values)
        script.access("store C 0", 3, value=values)
        assert [h.kind for h in script.watch.hazards()] == ["write-after-write"] * 2
        assert [h.same_value for h in script.watch.hazards()] == [harmless] * 2


@pytest.mark.parametrize("other", ["load As 0", "add As 0"])
def test_only_two_writes_can_be_harmless(other: str) -> None:
    """A 0 that is stored where others read, or what others add, agrees with nothing."""
    for first, second in ((other, "store As 0"), ("store As 0", other)):
        script = Script(HazardWatch(), blocks=[0])
        script.access("store As 1", TX % 32, TX < 32, value=5)
        script.barrier()
        script.access(first, TX % 32, TX < 32)
        script.access(second, (TX + 1) % 32, TX < 32)
        assert [h.same_value for h in script.watch.hazards()] == [False]


def test_equal_values_from_two_places_and_two_blocks_are_kept_apart() -> None:
    for second, harmless in ((1.0, True), (2.0, False)):
        script = Script(HazardWatch())
        script.access("store C 0", 5, TX == 0, value=1.0)
        script.access("store C 1", 5, TX == 1, value=second)
        assert len(script.found()) == 4
        across = script.found()[(*sorted(script.sites[f"store C {i}"].id for i in (0, 1)), False)]
        assert across.same_value is harmless


def test_atomics_race_with_plain_accesses_only() -> None:
    script = Script(HazardWatch(), blocks=[0])
    script.access("store C 0", TX)
    script.access("add C 0", 3)
    assert len(script.found()) == 1
    script = Script(HazardWatch())
    script.access("add C 0", 3)
    script.access("add C 1", 3)
    assert script.watch.hazards() == []


def test_syncwarp_orders_the_lanes_of_one_warp_only() -> None:
    for reader, racy in ((1, False), (33, True)):
        script = Script(HazardWatch(), blocks=[0])
        script.access("store As 0", 4, TX == 0)
        script.warp_interval += 1
        script.access("load As 0", 4, reader == TX)
        assert bool(script.found()) is racy


def test_blocks_are_concurrent_whatever_barriers_they_pass() -> None:
    script = Script(HazardWatch())
    script.access("store C 0", 9, (TX == 3) & np.array([[True], [False]]))
    script.barrier()
    script.access("load C 0", 9, (TX == 4) & np.array([[False], [True]]))
    (hazard,) = script.found().values()
    assert hazard.between_blocks
    assert hazard.interval is None
    assert {hazard.first.block, hazard.second.block} == {(0, 0, 0), (1, 0, 0)}
    assert {hazard.first.thread, hazard.second.thread} == {(3, 0, 0), (4, 0, 0)}


def test_reads_of_shared_memory_that_nothing_wrote() -> None:
    script = Script(HazardWatch())
    script.access("store As 0", TX, TX < 30)
    script.barrier()
    script.access("load As 0", TX % 32, TX < 32)
    (hazard,) = script.watch.hazards()
    assert (hazard.kind, hazard.element, hazard.accesses) == ("uninitialised read", (30,), 4)
    assert hazard.second is None


def test_blocks_that_run_later_start_with_fresh_shared_memory() -> None:
    script = Script(HazardWatch())
    script.access("store As 0", TX % 32, TX < 32, value=1)
    script.barrier()
    script.blocks = [2, 3]
    script.interval = 0
    script.access("load As 0", TX % 32, TX < 32)
    (hazard,) = script.watch.hazards()
    assert hazard.kind == "uninitialised read"


def test_threads_that_left_before_a_barrier_are_counted_once() -> None:
    script = Script(HazardWatch())
    for _ in range(3):
        script.barrier(live=np.array([[True], [False]]) | (TX < 5))
    (hazard,) = script.watch.hazards()
    assert (hazard.kind, hazard.accesses, hazard.blocks) == ("exit before barrier", 59, 1)
    assert hazard.first.block == (1, 0, 0)
    assert hazard.first.thread == (5, 0, 0)


def test_out_of_range_tells_the_next_row_from_the_end_of_the_buffer() -> None:
    matrix = _array("M", "global", (4, 10), base=1 << 22)
    script = Script(HazardWatch(), arrays=(matrix,), blocks=[0])
    columns, rows = np.broadcast_to(TX, (1, THREADS)), np.full((1, THREADS), 2)
    fault = Fault(script.sites["load M 0"], matrix, np.array([0]), columns >= 10, (rows, columns))
    assert script.watch.on_fault(fault)
    (hazard,) = script.watch.hazards()
    assert (hazard.kind, hazard.element, hazard.accesses) == ("out of range", (2, 10), 54)
    assert hazard.in_buffer == 10  # M[2, 10..19] is M[3, 0..9]


def test_the_first_hazard_stops_a_watch_that_only_asks_whether() -> None:
    script = Script(HazardWatch(stop_early=True))
    script.access("store As 0", TX % 32, TX < 32)
    with pytest.raises(Found) as found:
        script.access("load As 0", (TX + 1) % 32, TX < 32)
    assert found.value.hazard.kind == "read-after-write"


def test_elements_of_other_sizes_share_bytes() -> None:
    wide = _array("W", "shared", (8,), dtype=np.float64)
    narrow = _array("N", "shared", (16,), dtype=np.int32)
    script = Script(HazardWatch(), arrays=(wide, narrow), blocks=[0])
    script.access("store W 0", 3, TX == 0)
    script.access("store N 0", 7, TX == 1)
    (hazard,) = script.found().values()
    assert hazard.kind == "write-after-write"
    assert hazard.element == (7,)


def test_coverage_counts_threads_and_not_stores() -> None:
    script = Script(HazardWatch())
    script.access("store C 0", TX % 32 + 32 * np.array([[0], [1]]), TX < 31)
    script.access("store C 0", TX % 32 + 32 * np.array([[0], [1]]), TX < 31)
    script.access("add C 0", 0, TX < 2)
    (coverage,) = script.watch.coverage()
    assert (coverage.never, coverage.once, coverage.many) == (2, 61, 1)
    assert (coverage.first_never, coverage.first_many) == ((31,), (0,))


def test_blocks_that_are_stood_for_are_covered_and_race_where_they_overlap() -> None:
    for shift, counts in ((64, (0, 64, 0)), (60, (3, 58, 3))):
        members = np.arange(4)
        crowd = BlockClass(0, members, dict.fromkeys(range(20), shift * members))
        script = Script(HazardWatch([crowd]), blocks=[0])
        script.access("store C 0", TX, TX < 16)
        (coverage,) = script.watch.coverage()
        assert (coverage.never, coverage.once, coverage.many) == counts
        many = coverage.many
        assert len(script.found()) == bool(many)
        if many:
            (hazard,) = script.found().values()
            assert (hazard.first.block, hazard.second.block) == ((0, 0, 0), (1, 0, 0))
            assert (hazard.first.thread, hazard.second.thread) == ((15, 0, 0), (0, 0, 0))
            assert hazard.element == (15,)
            assert hazard.accesses == many


def _draw_events(data: st.DataObject, script: Script, steps: int, *more: str) -> None:
    names = sorted(name for name in script.sites if name != "barrier")
    for _ in range(steps):
        what = data.draw(st.sampled_from([*names, "barrier", "syncwarp", *more]))
        if what == "barrier":
            script.barrier()
        elif what == "syncwarp":
            script.sync_warp(data.draw(st.integers(0, 1)))
        elif what == "half a syncwarp":
            script.sync_half_warp(data.draw(st.integers(0, 3)))
        else:
            seed = data.draw(st.integers(0, 2**32 - 1))
            rng = np.random.default_rng(seed)
            shape = (len(script.blocks), THREADS)
            active = rng.random(shape) < data.draw(st.sampled_from([0.02, 0.1, 0.5]))
            script.access(what, rng.integers(0, 32, shape), active, rng.integers(0, 2, shape))


@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_half_warps_that_wait_are_ordered_within_themselves(data: st.DataObject) -> None:
    script = Script(HazardWatch(), arrays=(SHARED,))
    _draw_events(data, script, data.draw(st.integers(1, 8)), *["half a syncwarp"] * 4)
    assert set(script.found()) == _plain_races(script.accesses)


@pytest.mark.parametrize("passed", [1, 1023, 1024, 5000])
def test_however_often_half_a_warp_waits_the_other_half_does_not(passed: int) -> None:
    script = Script(HazardWatch(), blocks=[0])
    for _ in range(passed):
        script.sync_half_warp(0)
    script.access("store As 0", 4, TX == 0)
    script.sync_half_warp(0)
    script.access("load As 0", 4, TX == 1)
    assert not script.found()
    script.access("load As 0", 4, TX == 16)
    assert script.found()


@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_races_are_those_of_the_plain_definition(data: st.DataObject) -> None:
    script = Script(HazardWatch())
    _draw_events(data, script, data.draw(st.integers(1, 8)))
    found = script.found()
    assert set(found) == _plain_races(script.accesses)
    for hazard in found.values():
        _assert_witness(hazard, script)


def _assert_witness(hazard: Hazard, script: Script) -> None:
    """Both threads really touch that element there, and their kinds fit."""
    touched = {
        (array, site, block, thread, index): op
        for array, op, site, block, thread, _, _, _, index in script.accesses
    }
    ops = []
    for actor in (hazard.first, hazard.second):
        place = (hazard.array.name, actor.site.id, actor.block[0], actor.thread[0])
        ops.append(touched[(*place, *hazard.element)])
    assert ops != ["load", "load"]
    assert ops != ["add", "add"]
    assert ops == ["store", "store"] or not hazard.same_value
    assert (hazard.first.block, hazard.first.thread) != (hazard.second.block, hazard.second.thread)
    if hazard.kind == "read-after-write":
        assert ops[1] == "load"
    if hazard.kind == "write-after-read":
        assert ops[0] == "load"


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), shift=st.integers(0, 3))
def test_blocks_stood_for_give_what_blocks_traced_give(seed: int, shift: int) -> None:
    """The same offsets in every block, but for a shift: traced four times, or once."""
    rng = np.random.default_rng(seed)
    members = np.arange(4)
    events = [
        (
            rng.choice(["store C 0", "load C 0", "add C 0", "store C 1"]),
            rng.integers(0, 40, (1, THREADS)),
            rng.random((1, THREADS)) < 0.1,
        )
        for _ in range(3)
    ]
    traced = Script(HazardWatch(), blocks=[0, 1, 2, 3])
    crowd = BlockClass(0, members, dict.fromkeys(range(20), 4 * shift * members))
    stood_for = Script(HazardWatch([crowd]), blocks=[0])
    for what, index, active in events:
        traced.access(what, index + shift * members[:, None], active)
        stood_for.access(what, index, active)
    all_found, some_found = traced.found(), stood_for.found()
    assert set(all_found) == set(some_found)
    for key, hazard in all_found.items():
        assert hazard.accesses == some_found[key].accesses
        assert hazard.blocks == some_found[key].blocks
    assert traced.watch.coverage() == stood_for.watch.coverage()


@pytest.mark.parametrize("strides", [(40, 4), (4, 16), (-40, 4), (40, -4), (-4, -16), (0, 4)])
def test_an_element_is_found_again_from_its_offset(strides: tuple[int, int]) -> None:
    array = _array("M", "global", (4, 10), strides=strides)
    for index in np.ndindex(*array.shape):
        offset = sum(i * s for i, s in zip(index, strides, strict=True))
        got = element_at(array, offset)
        assert sum(i * s for i, s in zip(got, strides, strict=True)) == offset
        if 0 not in strides:
            assert got == index


def test_linear_ids_run_along_x_first() -> None:
    assert [unravel(i, (2, 3, 4)) for i in (0, 1, 2, 6, 23)] == [
        (0, 0, 0), (1, 0, 0), (0, 1, 0), (0, 0, 1), (1, 2, 3)
    ]  # fmt: skip
