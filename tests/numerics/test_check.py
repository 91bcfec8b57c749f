"""`check` finds what is wrong, says where, and leaves right results alone (cases A3, A4, A27, E14).

References are NumPy's BLAS in the type of the test, which honest products come from; what is wrong
is made wrong here, by hand.
"""

from __future__ import annotations

import json
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tilewise.errors import DTypeError, OptionError, ShapeError
from tilewise.numerics import check as checking
from tilewise.numerics import room
from tilewise.numerics.bounds import bound
from tilewise.numerics.check import Check, check
from tilewise.numerics.verdict import runs


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(3)


def normal(rng: np.random.Generator, m: int, n: int, dtype: Any = np.float32) -> Any:
    x = rng.standard_normal((m, n))
    if np.dtype(dtype).kind == "c":
        x = x + 1j * rng.standard_normal((m, n))
    return x.astype(dtype)


def half_product(a: Any, b: Any) -> Any:
    """a @ b as a float16 library should: summed in float32, rounded once."""
    with np.errstate(over="ignore"):
        return (a.astype(np.float32) @ b.astype(np.float32)).astype(np.float16)


def rows_of(found: Check) -> list[int]:
    assert found.where is not None
    return [row for run in found.where.rows for row in run]


def columns_of(found: Check) -> list[int]:
    assert found.where is not None
    return [column for run in found.where.columns for column in run]


def first_of(found: Check) -> tuple[int, ...]:
    assert not found
    assert found.first is not None
    return found.first.index


# Case A3


def six_bad_results(rng: np.random.Generator) -> list[tuple[Any, Any, Any, tuple[int, int]]]:
    a, b = normal(rng, 65, 47), normal(rng, 47, 51)
    good = a @ b
    one_nan, one_inf, unwritten = good.copy(), good.copy(), good.copy()
    one_nan[40, 33] = np.nan
    one_inf[64, 50] = np.inf
    unwritten[:, -1] = 0
    square_a, square_b = normal(rng, 64, 64), normal(rng, 64, 64)
    square = square_a @ square_b
    return [
        (a, b, one_nan, (40, 33)),
        (a, b, np.full_like(good, np.nan), (0, 0)),
        (a, b, one_inf, (64, 50)),
        (a, b, unwritten, (0, 50)),
        (square_a, square_b, square.T.copy(), (0, 1)),
        (square_a, square_b, square_b @ square_a, (0, 0)),
    ]


@pytest.mark.parametrize("case", range(6))
def test_A3_a_bad_result_is_rejected_and_its_first_bad_index_named(
    rng: np.random.Generator, way: str, case: int
) -> None:
    a, b, c, first = six_bad_results(rng)[case]
    found = check(a, b, c)
    assert found.verdict == "wrong"
    assert first_of(found) == first
    assert f"c[{first[0]}, {first[1]}]" in str(found)


def test_A3_the_good_results_are_accepted(rng: np.random.Generator, way: str) -> None:
    for a, b, *_ in six_bad_results(rng):
        assert check(a, b, a @ b)


def test_A4_a_kernel_that_wrote_half_of_each_tile_is_wrong(rng: np.random.Generator) -> None:
    a, b = normal(rng, 1024, 1024), normal(rng, 1024, 1024)
    c = (a @ b).reshape(8, 128, 1024)
    c[:, 64:] = np.nan  # registers for 64 of the 128 rows of a tile
    found = check(a, b, c.reshape(1024, 1024))
    assert first_of(found) == (64, 0)
    assert rows_of(found) == [row for row in range(1024) if row % 128 >= 64]
    assert columns_of(found) == list(range(1024))
    c[:, 64:] = 0
    found = check(a, b, c.reshape(1024, 1024))
    assert first_of(found) == (64, 0)
    assert min(rows_of(found)) == 64


# Case A27


def flip(c: Any, index: tuple[int, int], bit: int) -> Any:
    flipped = c.copy()
    word = flipped.view(f"u{c.dtype.itemsize}")
    word[index] ^= word.dtype.type(1 << bit)
    return flipped


def flips_are_caught(a: Any, b: Any, bits: range, at: list[tuple[int, int]]) -> int:
    """Flip single bits of a right result; return how many flips were above the stated size."""
    c = a @ b
    clean = check(a, b, c)
    assert clean
    above = 0
    for index in at:
        for bit in bits:
            bad = flip(c, index, bit)
            size = abs(float(bad[index]) - float(c[index]))
            if size > clean.smallest_error or not np.isfinite(size):
                above += 1
                found = check(a, b, bad)
                assert first_of(found) == index, (index, bit, size)
                assert found.where is not None
                assert found.where.elements == 1
    return above


@pytest.mark.parametrize(("dtype", "bits"), [("f4", range(8, 32, 3)), ("f8", range(16, 64, 6))])
def test_A27_a_flipped_bit_above_the_stated_size_is_caught(
    rng: np.random.Generator, dtype: str, bits: range
) -> None:
    a, b = normal(rng, 600, 500, dtype), normal(rng, 500, 700, dtype)
    assert flips_are_caught(a, b, bits, [(0, 0), (317, 555), (599, 699)]) > 8


@pytest.mark.slow
def test_A27_4096_cubed(rng: np.random.Generator) -> None:
    a, b = normal(rng, 4096, 4096), normal(rng, 4096, 4096)
    mid_mantissa_and_exponent = range(11, 31, 2)
    assert flips_are_caught(a, b, mid_mantissa_and_exponent, [(1234, 3210)]) >= 4


@pytest.mark.parametrize(("dtype", "products"), [("f4", 500), ("f8", 250), ("f2", 250)])
def test_A27_a_thousand_clean_products_raise_no_alarm(
    rng: np.random.Generator, sums_only: None, dtype: str, products: int
) -> None:
    largest = 0.0
    for _ in range(products):
        m, k, n = rng.integers(20, 80, 3)
        scales = 10.0 ** rng.uniform(-6, 6, (m, 1))
        if dtype == "f2":
            scales = scales ** (1 / 3)
        a, b = (scales * normal(rng, m, k, "f8")).astype(dtype), normal(rng, k, n, dtype)
        found = check(a, b, half_product(a, b) if dtype == "f2" else a @ b)
        assert found, found
        largest = max(largest, found.ratio)
    assert 0 < largest <= 1


@pytest.mark.slow
def test_A27_a_thousand_larger_clean_products_raise_no_alarm(rng: np.random.Generator) -> None:
    for _ in range(1000):
        m, k, n = rng.integers(500, 700, 3)
        a = (10.0 ** rng.uniform(-6, 6, (m, 1)) * normal(rng, m, k, "f8")).astype("f4")
        b = normal(rng, k, n)
        assert check(a, b, a @ b)


# Case E14


def test_E14_honest_half_precision_is_rounding(rng: np.random.Generator) -> None:
    a, b = normal(rng, 511, 511, "f2"), normal(rng, 511, 511, "f2")
    found = check(a, b, half_product(a, b))
    assert found.verdict == "rounding"
    assert 0.3 < found.ratio <= 1
    assert "rounding" in str(found)
    assert f"{found.ratio:.3g} of that at most" in str(found)


def test_E14_honest_half_precision_of_positive_data_is_rounding(rng: np.random.Generator) -> None:
    a, b = (rng.random((2048, 2048), np.float32).astype(np.float16) for _ in "ab")
    c = half_product(a, b)
    found = check(a, b, c)
    assert found.verdict == "rounding"
    assert 0.3 < found.ratio <= 1
    c[64:128, 256:320] = half_product(a[64:128, :-1], b[:-1, 256:320])
    found = check(a, b, c)
    assert not found
    assert found.where is not None
    assert (found.where.tile, found.where.tile_shape) == ((1, 4), (64, 64))


@pytest.mark.parametrize(("n", "tile"), [(511, (1, 7)), (1023, (2, 15)), (1023, (15, 15))])
def test_E14_a_tile_one_term_short_is_named(
    rng: np.random.Generator, n: int, tile: tuple[int, int]
) -> None:
    a, b = normal(rng, n, n, "f2"), normal(rng, n, n, "f2")
    c = half_product(a, b)
    rows, columns = (slice(64 * i, min(64 * i + 64, n)) for i in tile)
    c[rows, columns] = half_product(a[rows, :-1], b[:-1, columns])
    found = check(a, b, c)
    assert not found
    assert found.where is not None
    assert (found.where.tile, found.where.tile_shape) == (tile, (64, 64))
    assert f"tile ({tile[0]}, {tile[1]}) of 64×64" in str(found)


def test_E14_single_precision_is_rounding(rng: np.random.Generator) -> None:
    a, b = normal(rng, 1000, 500), normal(rng, 500, 500)
    found = check(a, b, a @ b)
    assert found.verdict == "rounding"
    assert 0 < found.ratio < 0.1


# What it finds, and what it says


@pytest.mark.parametrize("dtype", ["f4", "f8", "f2", "F", "D"])
def test_each_kind_of_damage_is_found_and_located(
    rng: np.random.Generator, way: str, dtype: str
) -> None:
    a, b = normal(rng, 90, 80, dtype), normal(rng, 80, 100, dtype)
    good = half_product(a, b) if dtype == "f2" else a @ b
    good[np.abs(good) < 1] = 0  # damage below is far above every bound
    good = np.where(good == 0, a @ b, good).astype(dtype)

    zero_row, zero_column, swapped, swapped_in_row, tile = (good.copy() for _ in range(5))
    zero_row[17] = 0
    zero_column[:, 99] = 0
    swapped[[3, 70], [4, 90]] = good[[70, 3], [90, 4]]
    swapped_in_row[5, [4, 9]] = good[5, [9, 4]]
    tile[32:64, 64:96] = (a[32:64, :-1] @ b[:-1, 64:96]).astype(dtype)

    found = check(a, b, zero_row)
    assert rows_of(found) == [17]
    assert len(columns_of(found)) > 95
    found = check(a, b, zero_column)
    assert columns_of(found) == [99]
    assert len(rows_of(found)) > 85
    found = check(a, b, swapped)
    assert (rows_of(found), columns_of(found)) == ([3, 70], [4, 90])
    assert first_of(found) == (3, 4)
    found = check(a, b, swapped_in_row)
    assert (rows_of(found), columns_of(found)) == ([5], [4, 9])
    found = check(a, b, tile)
    assert found.where is not None
    assert (found.where.tile, found.where.tile_shape) == ((1, 2), (32, 32))


@pytest.mark.parametrize("dtype", ["f4", "f8", "F"])
def test_an_error_just_above_the_stated_size_is_seen_wherever_it_is(
    rng: np.random.Generator, sums_only: None, dtype: str
) -> None:
    a, b = normal(rng, 70, 60, dtype), normal(rng, 60, 50, dtype)
    c = a @ b
    size = check(a, b, c).smallest_error
    for _ in range(60):
        i, j = rng.integers(70), rng.integers(50)
        bad = c.copy()
        bad[i, j] += 1.1 * size * rng.choice([-1, 1])
        found = check(a, b, bad)
        assert first_of(found) == (i, j)
        assert found.first is not None
        assert abs(found.first.expected - c[i, j]) < size


@pytest.mark.parametrize(("dtype", "times"), [("f4", 2), ("f8", 4)])
def test_the_stated_size_is_of_the_order_of_the_promise(
    rng: np.random.Generator, dtype: str, times: float
) -> None:
    a, b = normal(rng, 900, 1000, dtype), normal(rng, 1000, 800, dtype)
    c = a @ b
    found = check(a, b, c)
    allowed = bound(1000, a.dtype, b.dtype, c.dtype).of(abs(a) @ abs(b)).max()
    assert allowed <= found.smallest_error < times * allowed
    assert found.confidence == 1 - 4.0**-8
    typical = float(np.sqrt(np.square(c, dtype=float).mean()))
    assert found.smallest_relative == pytest.approx(found.smallest_error / typical, rel=1e-6)


def test_errors_of_one_sign_add_up_where_signs_would_hide_them() -> None:
    # Each element is off by about as much as its own rounding, in 256 of a million elements: few
    # draws of random signs make them stand out.
    for seed in range(3):
        rng = np.random.default_rng(seed)
        a, b = (rng.random(shape).astype("f2") for shape in ((1024, 2048), (2048, 1024)))
        c = half_product(a, b)
        c[64:80, 128:144] = half_product(a[64:80, :-1], b[:-1, 128:144])
        found = check(a, b, c)
        assert not found
        tile = check(a[64:80], b[:, 128:144], c[64:80, 128:144])  # small enough to be recomputed
        assert found.where is not None
        assert tile.where is not None
        assert found.where.elements == tile.where.elements
        assert rows_of(found) == [64 + row for row in rows_of(tile)]


@pytest.mark.parametrize("axis", [0, 1])
def test_errors_that_may_cancel_in_one_sum_are_apart_in_the_other(
    rng: np.random.Generator, sums_only: None, axis: int
) -> None:
    # Opposite errors in a small column cancel in half of the columns' sums. The rows' sums have
    # to see them, each alone, beside columns a billion times larger; and the other way round.
    a, b = normal(rng, 80, 60), normal(rng, 60, 80)
    a, b = (a, b.copy()) if axis else (b.T.copy(), a.T.copy())
    b[:, ::2] *= 1e9
    c = a @ b
    c[[3, 5], 7] += [1, -1]
    if not axis:
        a, b, c = b.T, a.T, c.T
    for seed in range(20):
        assert not check(a, b, c, rounds=1, seed=seed), seed


def test_where_everything_is_wrong_the_first_element_is_still_named(
    rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch, sums_only: None
) -> None:
    a, b = normal(rng, 120, 120), normal(rng, 120, 120)
    monkeypatch.setattr(checking, "LOOKING_WORK", 20_000)
    found = check(a, b, (a @ b).T.copy())
    assert first_of(found) == (0, 1)
    assert rows_of(found) == list(range(120))
    assert found.where is not None
    assert not found.where.is_complete
    assert "at least" in str(found)


def test_the_same_call_gives_the_same_verdict(rng: np.random.Generator, sums_only: None) -> None:
    a, b = normal(rng, 40, 50), normal(rng, 50, 60)
    c = a @ b
    c[3, 5] += 0.5
    assert check(a, b, c) == check(a, b, c)
    assert check(a, b, c, seed=1) == check(a, b, c, seed=1)
    right = a @ b
    # Which elements are recomputed is the seed's choice; the worst of all is often among them.
    found = [check(a, b, right, seed=seed) for seed in range(8)]
    assert len({(x.ratio, x.recomputed) for x in found}) > 1


def test_the_operands_are_left_as_they_are(rng: np.random.Generator, way: str) -> None:
    for dtype in ("f4", "f8", "D"):
        a, b = normal(rng, 30, 40, dtype), normal(rng, 40, 20, dtype)
        a[3, 4], b[5, 6] = np.inf, np.nan
        with np.errstate(all="ignore"):
            c = a @ b
        copies = a.copy(), b.copy(), c.copy()
        for x in (a, b, c):
            x.flags.writeable = False
        assert check(a, b, c)
        for x, copy in zip((a, b, c), copies, strict=True):
            assert np.array_equal(x, copy, equal_nan=True)


def test_a_given_bound_is_what_the_result_is_held_to(rng: np.random.Generator) -> None:
    a, b = normal(rng, 20, 30), normal(rng, 30, 10)
    c = a @ b
    exact = a.astype("f8") @ b.astype("f8")
    c[2, 3] = exact[2, 3] * (1 + 3e-6)
    strict = bound(30, a.dtype, b.dtype, np.dtype("f8"))
    assert check(a, b, c)
    assert not check(a, b, c, bound=strict)
    with pytest.raises(OptionError, match="K = 31"):
        check(a, b, c, bound=bound(31, a.dtype, b.dtype, c.dtype))


def test_the_verdict_is_for_people_and_for_programs(rng: np.random.Generator, way: str) -> None:
    a, b = normal(rng, 30, 40), normal(rng, 40, 20)
    c = a @ b
    for result in (c, np.full_like(c, np.nan)):
        found = check(a, b, result)
        facts = json.loads(json.dumps(found.to_dict(), allow_nan=False))
        assert facts["ok"] is bool(found) is found.ok
        assert facts["verdict"] == found.verdict
        assert facts["rounds"] == (8 if way == "sums" else 0)
        assert str(found).startswith("right" if found else "WRONG at all 30 rows, all 20 columns")
    assert facts["where"]["rows"] == [[0, 30]]
    assert facts["first"] == {
        "index": [0, 0],
        "got": "nan",
        "expected": pytest.approx(float(c[0, 0]), rel=1e-5),
        "allowed": pytest.approx(found.first.allowed),
    }


@pytest.mark.parametrize(
    ("shapes", "message"),
    [
        (((3, 4), (5, 6), (3, 6)), "do not go together"),
        (((3, 4), (4, 6), (6, 3)), r"should have the shape of a @ b, \(3, 6\)"),
        (((2, 3, 4), (3, 4, 6), (3, 3, 6)), "do not broadcast"),
        (((), (4, 6), (4, 6)), "scalar"),
        (((4,), (4,), (1,)), r"\(\)"),
    ],
)
def test_shapes_that_do_not_fit_are_refused(shapes: Any, message: str) -> None:
    with pytest.raises(ShapeError, match=message):
        check(*(np.ones(shape) for shape in shapes))


def test_types_and_options_that_do_not_fit_are_refused() -> None:
    ones = np.ones((2, 2))
    for a, c in ((ones, ones.astype(int)), (ones * 1j, ones), (ones.astype(object), ones)):
        with pytest.raises(DTypeError):
            check(a, ones, c)
    with pytest.raises(DTypeError, match="longdouble"):
        check(ones.astype(np.longdouble), ones, ones)
    for options in ({"rounds": 0}, {"rounds": 1.5}, {"rounds": 65}, {"seed": -1}, {"seed": "x"}):
        with pytest.raises(OptionError):
            check(ones, ones, ones, **options)


def test_more_rounds_make_it_surer(rng: np.random.Generator, sums_only: None) -> None:
    a, b = normal(rng, 30, 40), normal(rng, 40, 20)
    assert check(a, b, a @ b, rounds=1).confidence == 0.75
    assert check(a, b, a @ b, rounds=20).confidence == 1 - 4.0**-20


def test_runs_are_consecutive() -> None:
    assert runs(np.array([0, 1, 2, 5, 7, 8])) == (range(3), range(5, 6), range(7, 9))
    assert runs(np.array([], np.int64)) == ()


@settings(max_examples=60, deadline=None)
@given(
    st.integers(0, 2**32 - 1),
    st.sampled_from(["f4", "f8", "f2", "F", "D"]),
    st.sampled_from(["normal", "positive", "whole", "sparse", "wide", "subnormal", "one huge"]),
)
def test_an_honest_product_is_never_called_wrong(seed: int, dtype: str, kind: str) -> None:
    rng = np.random.default_rng(seed)
    m, k, n = rng.integers(1, 60, 3)

    def draw(shape: tuple[int, int]) -> Any:
        x = rng.standard_normal(shape)
        if kind == "positive":
            x = np.abs(x)
        elif kind == "whole":
            x = np.rint(4 * x)
        elif kind == "sparse":
            x[rng.random(shape) < 0.9] = 0
        elif kind == "wide":
            x *= 2.0 ** rng.integers(-5, 5, shape) if dtype == "f2" else 10.0 ** rng.integers(-9, 9)
        elif kind == "subnormal":
            x *= {"f2": 2.0**-10, "f4": 1e-21, "F": 1e-21, "f8": 1e-161, "D": 1e-161}[dtype]
        elif kind == "one huge":
            x[rng.integers(shape[0]), rng.integers(shape[1])] = 1000
        return (x + 1j * x[::-1] if dtype in "FD" else x).astype(dtype)

    a, b = draw((m, k)), draw((k, n))
    c = half_product(a, b) if dtype == "f2" else a @ b
    assert check(a, b, c)
    with patch.object(room, "_recomputes", return_value=False):
        assert check(a, b, c)


def test_names_of_files_are_refused() -> None:
    with pytest.raises(DTypeError, match="b is the text 'B.npy'; check compares arrays"):
        check(np.eye(2), "B.npy", np.eye(2))
