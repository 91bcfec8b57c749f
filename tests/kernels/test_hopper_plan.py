"""The plan of Hopper's kernels: what is launched is a whole product, within its operands' memory.

No kernel runs here. `carry_out` does in NumPy what each launch is documented to do, on flat memory
with margins, so that strides, offsets, workspace and batches are tested without a GPU.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.lib.stride_tricks import as_strided
from numpy.typing import NDArray

from tilewise.kernels import hopper_plan
from tilewise.kernels.hopper_plan import Problem, choices, choose, launches
from tilewise.kernels.hopper_table import KERNELS, Kernel, Times
from tilewise.kernels.steps import (
    Number,
    Pointer,
    Room,
    Strides,
    Tensor,
    chains,
)

MARGIN = 64


def dense(rows: int, columns: int, *, by_rows: bool = True) -> Strides:
    return Strides(0, 0, columns, 1) if by_rows else Strides(0, 0, 1, rows)


def problem(m: int, n: int, k: int, layout: str = "NN", **others: Any) -> Problem:
    a = dense(m, k, by_rows=layout[0] == "N")
    b = dense(k, n, by_rows=layout[1] == "N")
    return Problem(m=m, n=n, k=k, a=a, b=b, c=others.pop("c", dense(m, n)), **others)


def tile(choice: hopper_plan.Choice) -> str:
    return f"{choice.kernel.tile_m}x{choice.kernel.tile_n}"


@given(
    st.tuples(st.integers(1, 5000), st.integers(1, 5000), st.integers(1, 40000)),
    st.sampled_from(["NN", "NT", "TN", "TT"]),
    st.sampled_from([0, 2, 7]),
)
@settings(max_examples=50, deadline=None)
def test_every_choice_sums_in_the_order_that_k_alone_decides(
    sizes: tuple[int, int, int], layout: str, outer: int
) -> None:
    p = problem(*sizes, layout, outer=max(outer, 1))
    count, length = chains(p.k)
    for choice in choices(p):
        assert choice.piece_k == length
        if count > 1:
            assert choice.parts == count or choice.kernel.way == "promoted"
        assert choice.parts in (1, count)


@pytest.mark.parametrize(
    ("sizes", "fastest"),
    [
        ((512, 512, 512), "64x64"),
        ((1024, 1024, 1024), "64x128"),
        ((2048, 2048, 2048), "128x256"),
        ((4096, 4096, 4096), "128x256"),
        ((8192, 8192, 8192), "192x128"),
        ((16, 8192, 8192), "16x64"),
        ((64, 7168, 2112), "64x64"),
        ((128, 4096, 7168), "64x64"),
        ((8192, 64, 8192), "64x64"),
        ((3072, 3072, 3072), "192x128"),
        ((4097, 4097, 4097), "128x256"),
        ((777, 3333, 5555), "128x256"),
    ],
)
def test_the_tiles_that_were_measured_fastest_are_chosen(
    sizes: tuple[int, int, int], fastest: str
) -> None:
    assert tile(choose(problem(*sizes))) == fastest


@pytest.mark.parametrize("pitch", [4097, 4160])
def test_what_sticks_out_over_whole_tiles_is_a_product_of_its_own(pitch: int) -> None:
    n = 4097
    strides = Strides(0, 0, pitch, 1)
    p = Problem(m=n, n=n, k=n, a=strides, b=strides, c=strides)
    choice = choose(p)
    assert (choice.rows, choice.cols) == ((0, n), (0, 4096))
    (strip,) = choice.strips
    assert (strip.rows, strip.cols) == ((0, n), (4096, n))
    assert choice.kernel.way == ("mapped" if pitch % 8 == 0 else "any")
    assert strip.kernel.way == "any"
    assert choice.packs_a == choice.packs_b == (pitch == n)
    whole = min(x.expected_us for x in choices(p) if not x.strips)
    assert choice.expected_us < 0.985 * whole


def test_a_few_columns_are_read_as_a_few_rows() -> None:
    for m, n in ((1, 8192), (8192, 1), (9, 8192), (8192, 9)):
        choice = choose(problem(m, n, 8192, "NT"))
        assert tile(choice) == "16x64"
        assert choice.is_transposed == (m > n)


def test_operands_that_the_copy_engine_reads_are_not_packed() -> None:
    for layout in ("NN", "NT", "TN", "TT"):
        choice = choose(problem(72, 136, 200, layout))
        assert not choice.packs_a
        assert not choice.packs_b
        assert choice.kernel.way == "mapped"
        assert choice.workspace_bytes == 0


@pytest.mark.parametrize(
    ("strides", "why"),
    [
        (Strides(0, 0, 201, 1), "rows 402 bytes apart"),
        (Strides(0, 0, 400, 2), "every second column"),
        (Strides(0, 0, -200, 1), "rows in reverse"),
        (Strides(0, 0, 0, 1), "one row for all"),
        (Strides(0, 0, 8, 1), "rows that overlap"),
        (Strides(0, 0, 200, 1, is_aligned=False), "an odd address"),
        (Strides(4, 0, 200, 1), "matrices 8 bytes apart"),
    ],
)
def test_operands_that_it_cannot_read_are_packed(strides: Strides, why: str) -> None:
    p = Problem(m=72, n=136, k=200, a=strides, b=dense(200, 136), c=dense(72, 136), outer=2)
    choice = choose(p)
    assert choice.packs_a, why
    assert not choice.packs_b
    assert choice.kernel.a_along_k


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ({"c": Strides(0, 0, 137, 1)}, "rows 274 bytes apart"),
        ({"c": Strides(0, 0, 272, 2)}, "every second column"),
        ({"c": Strides(0, 0, -136, 1)}, "rows in reverse"),
        ({"n": 135, "c": Strides(0, 0, 136, 1)}, "rows end within 16 bytes"),
        ({"updates": True}, "beta reads C"),
        ({"out": "fp32"}, "another type"),
    ],
)
def test_results_that_it_cannot_write_are_written_by_element(
    given: dict[str, Any], why: str
) -> None:
    assert choose(problem(72, given.pop("n", 136), 200, **given)).kernel.way == "any", why


def test_a_column_major_result_is_the_transposed_product() -> None:
    choice = choose(problem(720, 1360, 200, c=dense(720, 1360, by_rows=False)))
    assert choice.is_transposed
    assert choice.kernel.is_mapped


def test_what_is_expected_says_what_binds() -> None:
    for sizes, bound in (
        ((8192, 8192, 8192), "power"),
        ((16, 8192, 8192), "memory"),
        ((256, 256, 256), "the multiprocessors"),
    ):
        choice = choose(problem(*sizes))
        assert choice.why.endswith(f"bound by {bound}")
        assert choice.expected_us > 0


def test_there_are_times_for_every_tile() -> None:
    times = Times.read()
    assert {kernel.tile for kernel in KERNELS} == set(times.tiles)
    assert all(step > 0 and once > 0 for step, once in times.tiles.values())


def test_names_tell_kernels_apart() -> None:
    assert len({kernel.name for kernel in KERNELS}) == len(KERNELS)


some_sizes = st.integers(1, 70) | st.sampled_from([65, 129, 136, 194, 257, 264])


@st.composite
def steps(draw: st.DrawFn, rows: int, columns: int, *, repeats: bool) -> tuple[int, int, int, int]:
    """Strides of a stack in which no two elements share a place, unless ``repeats``."""
    axes = draw(st.permutations(["row", "col", "outer", "inner"]))
    sizes = {"row": rows, "col": columns, "outer": draw(st.just(2)), "inner": draw(st.just(3))}
    step, found = 1, {}
    for axis in axes:
        step *= draw(st.sampled_from([1, 1, 1, 2, 3]))
        if draw(st.booleans()):
            step = -(-step // 8) * 8
        found[axis] = step * draw(st.sampled_from([1, 1, 1, -1]))
        step *= sizes[axis]
        if repeats and draw(st.integers(0, 5)) == 0:
            found[axis] = 0
    return found["outer"], found["inner"], found["row"], found["col"]


@given(st.data(), st.sampled_from(["fp16", "fp32"]), st.booleans(), st.booleans())
@settings(max_examples=100, deadline=None)
def test_launches_make_the_product_and_touch_nothing_else(
    data: st.DataObject, out: str, updates: bool, is_long: bool
) -> None:
    m, n, k = data.draw(st.tuples(some_sizes, some_sizes, st.integers(1, 70)))
    k = k + 130 if is_long else k
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32)))
    outer, inner = data.draw(st.sampled_from([(1, 1), (2, 1), (1, 3), (2, 3)]))
    a, b, c = (
        Memory(
            data.draw(steps(rows, columns, repeats=repeats)), (outer, inner, rows, columns), kind
        )
        for rows, columns, repeats, kind in (
            (m, k, True, np.float16),
            (k, n, True, np.float16),
            (m, n, False, np.float32 if out == "fp32" else np.float16),
        )
    )
    for x in (a, b):
        x.view[...] = rng.integers(-1, 2, x.view.shape)
    alpha, beta = (0.5, 2.0) if updates else (1.0, 0.0)
    expected = alpha * np.matmul(a.view, b.view, dtype=np.float64)
    if updates:
        c.view[...] = rng.integers(-8, 9, c.view.shape)
        expected += beta * c.view
    p = Problem(
        m=m,
        n=n,
        k=k,
        a=a.strides,
        b=b.strides,
        c=c.strides,
        outer=outer,
        inner=inner,
        dtype="fp16",
        out=out,
        updates=updates,
    )
    before = c.flat.copy()
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(
            "tilewise.kernels.steps.LONGEST_CHAIN", 128
        )  # so that a K of 131 has three pieces
        patched.setattr("tilewise.kernels.steps.LEAST_PIECE", 64)
        for choice in choices(p, data.draw(st.sampled_from([2, 132]))):
            c.flat[...] = before
            carry_out(p, choice, (a, b, c), (alpha, beta))
            np.testing.assert_array_equal(c.view, expected.astype(c.flat.dtype))
    c.view[...] = np.nan
    assert np.isnan(c.flat).all(), "the margins of C changed"


@pytest.mark.parametrize("layout", ["NN", "NT", "TN", "TT"])
def test_launches_by_maps_make_the_product(layout: str) -> None:
    m, n, k = 200, 264, 72
    rng = np.random.default_rng(1)
    a, b, c = (
        Memory((0, 0, columns, 1) if order == "N" else (0, 0, 1, rows), (1, 1, rows, columns), kind)
        for rows, columns, order, kind in (
            (m, k, layout[0], np.float16),
            (k, n, layout[1], np.float16),
            (m, n, "N", np.float16),
        )
    )
    for x in (a, b):
        x.view[...] = rng.integers(-1, 2, x.view.shape)
    p = Problem(m=m, n=n, k=k, a=a.strides, b=b.strides, c=c.strides, dtype="fp16", out="fp16")
    ways = set()
    for choice in choices(p, 2):
        c.view[...] = np.nan
        carry_out(p, choice, (a, b, c), (1.0, 0.0))
        np.testing.assert_array_equal(c.view, np.matmul(a.view, b.view, dtype=np.float64))
        ways |= {part.kernel.way for part in (choice, *choice.strips)}
    assert ways == {"mapped", "paired"}


class Memory:
    """A stack of matrices somewhere in an array whose other elements are NaN."""

    def __init__(
        self, strides: tuple[int, int, int, int], shape: tuple[int, ...], kind: type
    ) -> None:
        spans = [(size - 1) * step for size, step in zip(shape, strides, strict=True)]
        self.first = MARGIN - sum(min(span, 0) for span in spans)
        self.flat = np.full(sum(abs(span) for span in spans) + 1 + 2 * MARGIN, np.nan, kind)
        self.view = strided(self.flat, self.first, shape, strides)
        self.strides = Strides(*strides, is_aligned=self.first * self.flat.itemsize % 16 == 0)


def strided(
    flat: NDArray[Any], first: int, shape: tuple[int, ...], strides: tuple[int, ...]
) -> NDArray[Any]:
    """View ``flat`` from an element on; every element of the view must lie in it."""
    ends = [first, first]
    for size, step in zip(shape, strides, strict=True):
        ends[step > 0] += (size - 1) * step
    assert 0 <= ends[0] <= ends[1] < len(flat), "outside of the memory"
    return as_strided(flat[first:], shape, [step * flat.itemsize for step in strides])


def carry_out(
    p: Problem,
    choice: hopper_plan.Choice,
    memory: tuple[Memory, Memory, Memory],
    numbers: tuple[float, float],
) -> None:
    """Do what the launches of a choice do, on NaN-filled workspace."""
    workspace = np.full(choice.workspace_bytes // 2, np.nan, np.float16)
    for step in launches(p, choice):
        flats = [workspace if i == 3 else memory[i].flat for i in step.operands]
        firsts = [0 if i == 3 else memory[i].first for i in step.operands]

        def flat_of(
            x: Pointer | Tensor, kind: type, flats: Any = flats, firsts: Any = firsts
        ) -> tuple[NDArray[Any], int]:
            flat = flats[x.operand].view(kind)
            assert x.offset_bytes % flat.itemsize == 0
            return flat, firsts[x.operand] + x.offset_bytes // flat.itemsize

        values = {
            name: numbers[x.position] if isinstance(x, Number) else x
            for name, x in step.arguments.items()
        }
        used = {x.position for x in step.arguments.values() if isinstance(x, Number)}
        assert used == set(range(step.numbers))
        if step.kernel == "pack_16":
            _pack(values, flat_of)
        elif step.kernel.startswith("add_pieces"):
            _add_pieces(p, values, flat_of)
        else:
            kernel = next(kernel for kernel in KERNELS if kernel.name == step.kernel)
            _multiply(kernel, values, flat_of)


def _pack(x: Mapping[str, Any], flat_of: Any) -> None:
    source, first = flat_of(x["source"], np.float16)
    target, start = flat_of(x["target"], np.float16)
    shape = (x["count"] // x["inner"], x["inner"], x["rows"], x["columns"])
    steps = (x["source_outer"], x["source_inner"], x["source_row"], x["source_col"])
    pitch = x["target_row"]
    assert pitch % 64 == 0
    matrix = x["rows"] * pitch
    place = (x["inner"] * matrix, matrix, pitch, 1)
    strided(target, start, (*shape[:3], pitch), place)[...] = 0
    strided(target, start, shape, place)[...] = strided(source, first, shape, steps)


def _multiply(kernel: Kernel, x: Mapping[str, Any], flat_of: Any) -> None:
    m, n, k = x["m"], x["n"], x["k"]
    a = _stack(x, "a", flat_of, (m, k) if kernel.a_along_k else (k, m))
    b = _stack(x, "b", flat_of, (n, k) if kernel.b_along_k else (k, n))
    a = a if kernel.a_along_k else np.swapaxes(a, 2, 3)
    b = np.swapaxes(b, 2, 3) if kernel.b_along_k else b
    if kernel.is_mapped:
        c, first = flat_of(x["c"], np.float16)
        _check_map(x["c"])
        assert n % 8 == 0, "the copy engine writes 16 bytes at a time"
        c = strided(c, first, x["c"].shape, x["c"].strides)
        c[...] = x["alpha"] * np.matmul(a, b, dtype=np.float64)
        return
    length, pieces = x["piece_k"], x["pieces"]
    kind = np.float32 if x["is_wide"] else np.float16
    c, first = flat_of(x["c"], kind)
    shape = (x["outer"], x["inner"], m, n)
    for i in range(pieces):
        span = slice(i * length, (i + 1) * length) if pieces > 1 else slice(None)
        assert pieces == 1 or i * length < k
        steps = (x["c_outer"], x["c_inner"], x["c_row"], x["c_col"])
        view = strided(c, first + i * x["c_piece"], shape, steps)
        product = x["alpha"] * np.matmul(a[..., span], b[..., span, :], dtype=np.float64)
        view[...] = product + (x["beta"] * view if x["beta"] else 0)


def _stack(x: Mapping[str, Any], name: str, flat_of: Any, shape: tuple[int, int]) -> NDArray[Any]:
    tensor = x[name]
    flat, first = flat_of(tensor, np.float16)
    _check_map(tensor)
    assert first * flat.itemsize % 16 == 0
    assert tensor.shape[2:] == shape
    view = strided(flat, first, tensor.shape, tensor.strides)
    rows = [np.arange(x[axis]) * x[f"{name}_{axis}"] for axis in ("outer", "inner")]
    return view[rows[0][:, None], rows[1]]


def _check_map(tensor: Tensor) -> None:
    assert tensor.strides[-1] == 1
    for size, step in zip(tensor.shape, tensor.strides[:-1], strict=False):
        assert size >= 1
        assert 0 < step < 2**39
        assert step * tensor.item_bytes % 16 == 0


def _add_pieces(p: Problem, x: Mapping[str, Any], flat_of: Any) -> None:
    parts, first = flat_of(x["parts"], np.float32)
    kind = np.float32 if x["is_wide"] else np.float16
    c, start = flat_of(x["c"], kind)
    shape = (p.outer, p.inner, x["m"], x["n"])
    steps = (x["part_matrix"] * p.inner, x["part_matrix"], x["part_row"], 1)
    total = sum(
        strided(parts, first + i * x["part_piece"], shape, steps).astype(np.float64)
        for i in range(x["pieces"])
    )
    steps = (x["c_outer"], x["c_inner"], x["c_row"], x["c_col"])
    view = strided(c, start, shape, steps)
    view[...] = x["alpha"] * total + (x["beta"] * view if x["beta"] else 0)


@pytest.mark.parametrize("n", [1000, 3000, 5000, 7000, 8200])
def test_rows_off_the_sectors_of_the_cache_are_read_by_pairs(n: int) -> None:
    choice = choose(problem(n, n, n))
    assert choice.kernel.way == "paired"
    assert (choice.packs_a, choice.packs_b) == (False, False)


@pytest.mark.parametrize("n", [1024, 2000, 4000, 6000, 8192, 10000])
def test_rows_on_sectors_are_not(n: int) -> None:
    assert not any(choice.kernel.way == "paired" for choice in choices(problem(n, n, n)))
    assert choose(problem(n, n, n)).kernel.way == "mapped"


def test_rows_off_sectors_are_packed_where_there_are_no_pairs() -> None:
    p = problem(8200, 8200, 8200, updates=True)
    small, large = choose(problem(1000, 1000, 1000, updates=True)), choose(p)
    assert (small.packs_a, small.packs_b) == (False, False)
    assert (large.packs_a, large.packs_b) == (True, True)
    frugal = choose(p, workspace_bytes=1 << 20)
    assert (frugal.packs_a, frugal.packs_b) == (False, False)
    assert frugal.workspace_bytes == Room.STEP  # in which blocks count
    assert frugal.expected_us > large.expected_us


def test_blocks_that_would_drift_apart_wait_for_each_other() -> None:
    assert not choose(problem(2048, 2048, 2048)).is_paced
    p = problem(16384, 16384, 16384)
    choice = choose(p)
    assert choice.is_paced
    clear, multiply, *strips = launches(p, choice)
    assert clear.kernel == "clear"
    word, same = clear.arguments["progress"], multiply.arguments["progress"]
    assert isinstance(word, Pointer)
    assert isinstance(same, Pointer)
    assert word.offset_bytes == same.offset_bytes <= choice.workspace_bytes - 4
    assert clear.operands[word.operand] == multiply.operands[same.operand] == 3  # the workspace
    assert all(step.arguments["progress"] == 0 for step in strips)


def test_blocks_do_not_wait_where_there_is_no_memory_to_count_in() -> None:
    p = problem(16384, 16384, 16384)
    choice = choose(p, workspace_bytes=0)
    assert choice.workspace_bytes == 0
    assert all(step.arguments["progress"] == 0 for step in launches(p, choice))


def test_too_little_workspace_gives_what_takes_the_least() -> None:
    p = problem(4097, 4097, 4097)
    assert choose(p, workspace_bytes=0) == choose(p)


def test_strips_and_bulk_cover_a_result_once() -> None:
    for m, n in ((65, 257), (193, 129), (300, 264), (4097, 4097), (2050, 1025)):
        for choice in choices(problem(m, n, 72)):
            covered = np.zeros((m, n), np.int8)
            for part in (choice, *choice.strips):
                covered[slice(*part.rows), slice(*part.cols)] += 1
            assert (covered == 1).all()


def test_a_last_wave_that_is_half_empty_is_left_to_smaller_tiles() -> None:
    p = problem(5000, 5000, 5000)  # 20x20 tiles of 256x256, by 66 pairs of blocks at a time
    every = [choice for choice in choices(p) if choice.kernel.tile == "256x256 by two"]
    ends = {(choice.rows[1], choice.cols[1]) for choice in every if not choice.packs_a}
    assert {(5000, 5000), (19 * 256, 5000), (5000, 19 * 256)} <= ends
    for choice in every:
        covered = np.zeros((5000, 5000), np.int8)
        for part in (choice, *choice.strips):
            covered[slice(*part.rows), slice(*part.cols)] += 1
        assert (covered == 1).all()
    assert choose(p).strips
    even = choices(problem(8 * 256, 8 * 256, 5000))  # 64 pairs
    assert not any(choice.strips for choice in even if choice.kernel.tile == "256x256 by two")


def test_the_workspace_is_what_packing_and_pieces_take() -> None:
    choice = choose(problem(4097, 4097, 4097))
    packed_bytes = 4097 * math.ceil(4097 / 64) * 64 * 2
    assert choice.workspace_bytes == 2 * math.ceil(packed_bytes / 256) * 256
