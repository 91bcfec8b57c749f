"""What is planned for float32 on Hopper, without running any of it: launches, places, parts."""

from __future__ import annotations

import importlib.util
import itertools
import math
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tilewise.errors import BudgetError
from tilewise.kernels.hopper_float32_plan import LEAST_K, Choice, Problem, choices, choose
from tilewise.kernels.hopper_float32_table import LISTS
from tilewise.kernels.steps import (
    LONGEST_CHAIN,
    Number,
    Pointer,
    Step,
    Strides,
    Tensor,
    chains,
    round_up,
)
from tilewise.numerics import schemes

NAMES = ("split_rows", "split_pieces", "multiply", "repair")
TF32_NAMES = ("split_rows", "split_rows", "list_flagged", "multiply", "repair")
SKINNY_NAMES = ("split_rows", "skinny", "list_flagged", "repair")
COLUMNS_NAMES = ("judge_rows", "split_pieces", "repair", "few_columns")


def dense(rows: int, columns: int, *, by_rows: bool = True) -> Strides:
    return Strides(0, 0, columns, 1) if by_rows else Strides(0, 0, 1, rows)


def square(m: int, n: int, k: int, **more: object) -> Problem:
    p = Problem(m=m, n=n, k=k, a=dense(m, k), b=dense(k, n), c=dense(m, n))
    return replace(p, **more)  # type: ignore[arg-type]


def stacked(outer: int, inner: int, m: int, n: int, k: int, shared: str = "") -> Problem:
    def strides(name: str, rows: int, columns: int) -> Strides:
        matrix = 0 if name == shared else rows * columns
        return Strides(inner * matrix, matrix, columns, 1)

    return Problem(
        m=m,
        n=n,
        k=k,
        a=strides("a", m, k),
        b=strides("b", k, n),
        c=strides("c", m, n),
        outer=outer,
        inner=inner,
    )


def places(step: Step) -> dict[str, tuple[int, int]]:
    """Return each pointer of a launch: which of a, b, c and workspace, and the offset."""
    return {
        name: (step.operands[x.operand], x.offset_bytes)
        for name, x in step.arguments.items()
        if isinstance(x, Pointer | Tensor)
    }


def named(choice: Choice, start: str) -> Step:
    return next(step for step in choice.steps if step.kernel.startswith(start))


def by_tiles(p: Problem) -> Choice:
    """Return the choice whose operands are both split before they are multiplied."""
    return next(iter(choices(p)))


PROBLEMS = {
    "tiles": square(256, 256, 512),
    "odd": square(129, 131, 97),
    "one row": square(1, 700, 64),
    "by columns": square(300, 200, 1000, a=dense(300, 1000, by_rows=False)),
    "beta": square(128, 128, 128, updates=True),
    "long K": square(128, 128, LONGEST_CHAIN + 1),
    "tf32": square(512, 512, 3000, precision="tf32"),
    "complex": square(100, 100, 100, dtype="c64"),
    "complex tf32": square(100, 100, 100, dtype="c64", precision="tf32"),
    "batch": stacked(3, 5, 64, 70, 33),
    "shared a": stacked(3, 5, 64, 70, 33, "a"),
    "shared b": stacked(3, 5, 64, 70, 33, "b"),
}


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")
@pytest.mark.parametrize("why", PROBLEMS)
def test_every_launch_is_of_a_kernel_with_those_arguments(why: str) -> None:
    from tilewise.kernels import hopper_float32

    variants = {variant.name: variant for variant in hopper_float32.variants()}
    ways = [way for choice in choices(PROBLEMS[why]) for way in (choice, *(choice.kept or ()))]
    for step in (step for way in ways for step in way.steps):
        variant = variants[step.kernel]
        assert step.arguments.keys() == variant.signature.keys(), step.kernel
        for name, x in step.arguments.items():
            kind = variant.signature[name]
            is_null = name == "progress" and x == 0
            is_pointer = isinstance(x, Pointer) or is_null
            assert is_pointer == kind.startswith("*"), (step.kernel, name)
            assert isinstance(x, Tensor) == kind.startswith("tensordesc"), (step.kernel, name)
            if isinstance(x, int) and kind == "i32":
                assert -(2**31) <= x < 2**31, (step.kernel, name)
        assert 0 < step.grid[0] < 2**31
        assert step.numbers == sum(isinstance(x, Number) for x in step.arguments.values())


@pytest.mark.parametrize("why", PROBLEMS)
def test_what_is_in_the_workspace_does_not_overlap(why: str) -> None:
    p = PROBLEMS[why]
    choice = by_tiles(p)
    names = TF32_NAMES if p.precision else NAMES
    assert len(choice.steps) == len(names)
    assert all(s.kernel.startswith(name) for s, name in zip(choice.steps, names, strict=True))
    reals = 2 if p.dtype == "c64" else 1
    m, n, depth = p.m, p.n * reals, round_up(p.k * reals, schemes.PIECE)
    a_rows = m * (p.outer if p.a.outer else 1) * (p.inner if p.a.inner else 1)
    b_rows = n * (p.outer if p.b.outer else 1) * (p.inner if p.b.inner else 1)
    parts = 1 if p.precision else 2
    rows, pieces = choice.steps[:2]
    multiply, listed = named(choice, "multiply"), choice.steps[2] if p.precision else pieces
    sizes = {
        places(rows)["target"]: 2 * parts * a_rows * depth,
        places(rows)["scale"]: 4 * a_rows,
        places(listed)["a_flag"]: 4 * a_rows,
        places(pieces)["target"]: 2 * parts * b_rows * depth,
        places(pieces)["scale"]: 4 * b_rows * (1 if p.precision else depth // schemes.PIECE),
        places(listed)["b_flag"]: 4 * b_rows,
        places(listed)["a_list"]: 4 * LISTS * a_rows,
        places(listed)["b_list"]: 4 * LISTS * b_rows,
        places(listed)["a_count"]: 4 * (LISTS + 1) * (a_rows // m),
        places(listed)["b_count"]: 4 * (LISTS + 1) * (b_rows // n),
        places(listed)["a_tile"]: 4 * (a_rows // m) * -(-m // 128),
        places(listed)["b_tile"]: 4 * (b_rows // n) * -(-n // 128),
    }
    assert len(sizes) == 12
    ends = sorted((at, at + size) for (operand, at), size in sizes.items() if operand == 3)
    assert len(ends) == 12
    for (_, end), (start, _) in itertools.pairwise([*ends, (choice.workspace_bytes,) * 2]):
        assert end <= start
    # What one launch writes, the next reads; what counts from zero is set to it.
    assert places(multiply)["a"] == places(rows)["target"]
    assert places(multiply)["b"] == places(pieces)["target"]
    assert places(multiply)["a_scale"] == places(rows)["scale"]
    assert places(multiply)["b_scale"] == places(pieces)["scale"]
    if p.precision:
        assert places(pieces)["flag"] == places(listed)["b_flag"]
        assert pieces.arguments["clear_count"] == 0  # of what the first launch has set already
    else:
        assert places(multiply)["a_flagged"] == places(listed)["a_tile"]
        assert places(multiply)["b_flagged"] == places(listed)["b_tile"]
    assert places(rows)["flag"] == places(listed)["a_flag"]
    cleared = places(rows)["cleared"][1]
    clear_end = cleared + 4 * int(rows.arguments["clear_count"])  # type: ignore[arg-type]
    for name in ("a_count", "b_count", "b_tile", "b_flag"):
        place = places(listed)[name]
        assert cleared <= place[1] < place[1] + sizes[place] <= clear_end
    repaired = places(named(choice, "repair"))
    for name in ("a_list", "b_list", "a_count", "b_count", "b_flag"):
        assert repaired[name] == places(listed)[name]
    assert [repaired[name] for name in "abc"] == [(0, 0), (1, 0), (2, 0)]


@pytest.mark.parametrize("why", PROBLEMS)
def test_a_product_goes_on_from_what_is_left_of_an_operand(why: str) -> None:
    p = PROBLEMS[why]
    choice = by_tiles(p)
    assert choice.kept is not None
    splits, rest = choice.steps[:2], choice.steps[-2:]
    without_a, without_b = (each.steps for each in choice.kept)
    assert without_a[-2:] == without_b[-2:] == rest
    assert without_a[1] == splits[1]
    # Instead of splitting A, all that counts from zero is set to it, and nothing else.
    assert places(without_a[0]) == places(splits[0])
    assert dict(without_a[0].arguments) == {**splits[0].arguments, "count": 0}
    # Without splitting B, but with what its columns were flagged with, and listing that.
    assert without_b[0].kernel == splits[0].kernel
    listed = without_b[1]
    assert listed.kernel == "list_flagged"
    cleared, flag = places(without_b[0])["cleared"], places(listed)["b_flag"]
    words = int(without_b[0].arguments["clear_count"])  # type: ignore[arg-type]
    columns = p.n * (2 if p.dtype == "c64" else 1) * math.prod(p.b.stack(p.outer, p.inner))
    assert cleared[1] >= flag[1] + 4 * columns
    all_words = int(splits[0].arguments["clear_count"])  # type: ignore[arg-type]
    assert cleared[1] + 4 * words == places(splits[0])["cleared"][1] + 4 * all_words
    assert all(each.expected_us < choice.expected_us for each in choice.kept)


@pytest.mark.parametrize(("m", "n"), [(512, 128), (512, 72), (128, 512), (72, 512)])
def test_what_is_left_lies_alike_whatever_the_size_of_the_smaller(m: int, n: int) -> None:
    def kept(m: int, n: int, k: int = 300, **more: object) -> object:
        # As in the slots of a schedule: of C alone, rows are as long as it is wide.
        p = square(m, n, k, a=Strides(0, 0, k, 1), b=Strides(0, 0, 640, 1), **more)
        found = by_tiles(p).kept
        assert found is not None
        return found[0 if m > n else 1].left

    other = (m, 96) if m > n else (96, n)
    assert kept(m, n) == kept(*other)
    assert kept(m, n) != kept(m, n, 301)
    assert kept(m, n) != kept(m, n, precision="tf32")
    assert kept(m, n) != kept(*(x + 128 for x in (m, n)))


@pytest.mark.parametrize("why", [why for why, p in PROBLEMS.items() if p.dtype == "fp32"])
def test_few_rows_need_no_workspace_for_b(why: str) -> None:
    p = PROBLEMS[why]
    if p.precision is not None:
        assert not any(step.kernel.startswith("skinny") for way in choices(p) for step in way.steps)
        return
    tiles, skinny, *_ = choices(p)
    names = [step.kernel for step in skinny.steps if step.kernel != "add_chains"]
    for name, start in zip(names, SKINNY_NAMES, strict=True):
        assert name.startswith(start)
    assert ("add_chains" in [step.kernel for step in skinny.steps]) == (p.k > LONGEST_CHAIN)
    rows, multiply = named(skinny, "split_rows"), named(skinny, "skinny")
    listed, repaired = places(named(skinny, "list_flagged")), places(named(skinny, "repair"))
    assert places(multiply)["a"] == places(rows)["target"]
    assert places(multiply)["a_scale"] == places(rows)["scale"]
    assert places(multiply)["a_flag"] == places(rows)["flag"] == listed["a_flag"]
    assert places(multiply)["b_flag"] == listed["b_flag"]
    b_rows = p.n * (p.outer if p.b.outer else 1) * (p.inner if p.b.inner else 1)
    cleared, count = places(rows)["cleared"][1], int(rows.arguments["clear_count"])  # type: ignore[arg-type]
    assert cleared <= listed["b_flag"][1] <= cleared + 4 * (count - b_rows)
    assert repaired["a_list"] == listed["a_list"]
    if p.k <= LONGEST_CHAIN:
        assert skinny.workspace_bytes < tiles.workspace_bytes


@pytest.mark.parametrize("why", [why for why, p in PROBLEMS.items() if p.dtype == "fp32"])
def test_few_columns_need_no_workspace_for_a(why: str) -> None:
    p = replace(PROBLEMS[why], n=70, c=replace(PROBLEMS[why].c, row=70))
    if p.precision is not None:
        assert not any(step.kernel.startswith("few") for way in choices(p) for step in way.steps)
        return
    tiles, _, few = choices(p)
    names = [step.kernel for step in few.steps if step.kernel != "add_chains"]
    for name, start in zip(names, COLUMNS_NAMES, strict=True):
        assert name.startswith(start)
    assert (few.steps[-1].kernel == "add_chains") == (p.k > LONGEST_CHAIN)
    rows, pieces = places(few.steps[0]), places(few.steps[1])
    multiply = places(named(few, "few_columns"))
    assert rows["source"] == (0, 0)
    assert multiply["b"] == pieces["target"]
    assert multiply["a_scale"] == rows["scale"]
    assert multiply["b_scale"] == pieces["scale"]
    assert multiply["a_flag"] == rows["flag"] == pieces["a_flag"]
    assert multiply["b_flag"] == pieces["b_flag"]
    # What lists and counts is the same as of tiles.
    for name in ("split_pieces", "repair"):
        mine, theirs = named(few, name), named(tiles, name)
        assert mine.kernel == theirs.kernel
        assert mine.arguments.keys() == theirs.arguments.keys()
    assert {at for at in places(named(few, "repair")).values() if at[0] == 3} < {
        *rows.values(),
        *pieces.values(),
    }
    cleared, count = rows["cleared"][1], int(few.steps[0].arguments["clear_count"])  # type: ignore[arg-type]
    assert cleared <= pieces["b_flag"][1] < cleared + 4 * count
    if p.k <= LONGEST_CHAIN:
        assert few.workspace_bytes < tiles.workspace_bytes


def test_few_columns_are_left_to_what_never_writes_a() -> None:
    def is_of_columns(m: int, n: int, k: int, layout: str = "NN") -> bool:
        a, b = dense(m, k, by_rows=layout[0] == "N"), dense(k, n, by_rows=layout[1] == "N")
        choice = choose(square(m, n, k, a=a, b=b))
        return any(step.kernel.startswith("few_columns") for step in choice.steps)

    for layout in ("NN", "NT", "TN", "TT"):
        for n in (1, 16, 64):
            assert is_of_columns(8192, n, 8192, layout)
            assert is_of_columns(1024, n, 4096, layout)
        assert not is_of_columns(16, 8192, 8192, layout)
    assert not is_of_columns(2048, 2048, 2048)
    assert not is_of_columns(8192, 512, 8192)


def test_as_many_programs_list_rows_as_there_are_tiles() -> None:
    pieces = named(by_tiles(square(100000, 1, 64)), "split_pieces")
    assert pieces.grid == (pieces.arguments["a_tiles"],) == (782,)


def test_few_rows_are_left_to_what_reads_b_once() -> None:
    def is_skinny(m: int, n: int, k: int, layout: str = "NN") -> bool:
        a, b = dense(m, k, by_rows=layout[0] == "N"), dense(k, n, by_rows=layout[1] == "N")
        choice = choose(square(m, n, k, a=a, b=b))
        return any(step.kernel.startswith("skinny") for step in choice.steps)

    for layout in ("NN", "NT", "TN", "TT"):
        assert is_skinny(16, 8192, 8192, layout)
        assert is_skinny(64, 7168, 2112, layout)
        assert is_skinny(1, 4096, 4096, layout)
    assert not is_skinny(2048, 2048, 2048)
    assert not is_skinny(8192, 8192, 8192)
    # Measured on an H200, without the list and the repair: 72 and 29 µs.
    assert 65 < choose(square(16, 8192, 8192)).expected_us < 85
    assert 22 < choose(square(64, 7168, 2112)).expected_us < 40


def test_tma_writes_only_what_it_can() -> None:
    def way(p: Problem) -> str:
        return named(by_tiles(p), "multiply").kernel

    assert way(square(200, 200, 200)) == "multiply"
    less = square(200, 200, 200, precision="tf32")
    assert way(less).startswith("multiply_tf32")
    assert way(replace(less, n=201)).startswith("multiply_any_tf32")
    assert way(replace(less, k=LONGEST_CHAIN + 1)).startswith("multiply_any_tf32")
    assert way(square(200, 102, 200, dtype="c64")) == "multiply"
    for p in (
        square(200, 201, 200),
        square(200, 200, 200, updates=True),
        square(200, 200, 200, c=Strides(0, 0, 201, 1)),
        square(200, 200, 200, c=Strides(0, 0, 400, 2)),
        square(200, 200, 200, c=Strides(0, 0, -200, 1)),
        square(200, 200, 200, c=Strides(0, 0, 200, 1, is_aligned=False)),
        square(200, 101, 200, dtype="c64", c=Strides(0, 0, 101, 1)),
        square(200, 200, 200, c=dense(200, 200, by_rows=False)),
    ):
        assert way(p) == "multiply_any", p


def test_bits_depend_on_k_alone() -> None:
    for k in (LEAST_K, 100, LONGEST_CHAIN, LONGEST_CHAIN + 1, 300000):
        seen = set()
        for m, n in ((1, 1), (64, 9000), (5000, 130)):
            every = list(choices(square(m, n, k)))
            assert len(every) == (3 if n <= 128 else 2)
            for step in (step for choice in every for step in choice.steps):
                seen |= {(name, step.arguments.get(name)) for name in ("threshold", "chain_k")}
        threshold, chain = float(schemes.fp16x3_threshold(k)), chains(k)[1]
        assert seen == {
            *(("threshold", threshold), ("chain_k", chain)),
            *(("threshold", None), ("chain_k", None)),
        }


@given(
    st.integers(1, 3),
    st.integers(1, 4),
    st.integers(1, 700),
    st.integers(1, 700),
    st.integers(32, 300),
    st.integers(1, 12),
)
@settings(max_examples=40, deadline=None)
def test_parts_within_a_budget_cover_all_of_c_once(
    outer: int, inner: int, m: int, n: int, k: int, share: int
) -> None:
    p = stacked(outer, inner, m, n, k)
    whole = choose(p)
    limit = whole.workspace_bytes // share
    try:
        parts = choose(p, workspace_bytes=limit)
    except BudgetError:
        assert share > 1
        return
    assert parts.workspace_bytes <= limit
    covered: dict[tuple[int, int], int] = {}
    for step in parts.steps:
        if step.kernel.startswith("repair"):
            x = step.arguments
            first = places(step)["c"][1] // 4
            matrices, inside = int(x["matrices"]), int(x["inner"])  # type: ignore[arg-type]
            for matrix in range(matrices):
                at = first + matrix // inside * p.c.outer + matrix % inside * p.c.inner
                assert (at, at) not in covered
                key = (at // (m * n), at % (m * n))
                covered[key] = int(x["m"]) * int(x["n"])  # type: ignore[arg-type]
    assert sum(covered.values()) == outer * inner * m * n
    if share == 1:
        assert parts == whole


def test_a_budget_too_small_is_refused_with_what_it_takes() -> None:
    with pytest.raises(BudgetError, match=r"100x100 by 100x100 takes at least .* of workspace"):
        choose(square(100, 100, 100), workspace_bytes=1000)


def test_larger_products_are_expected_to_take_longer() -> None:
    times = [choose(square(n, n, n)).expected_us for n in (512, 1024, 2048, 4096, 8192)]
    assert times == sorted(times)
    # Measured on an H200: 4.75 ms at 8192, 0.65 ms at 4096.
    assert 4000 < times[4] < 6000
    assert 550 < times[3] < 800
    half = choose(square(8192, 8192, 8192, precision="tf32")).expected_us
    assert half < 0.6 * times[4]
