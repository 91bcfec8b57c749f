"""`check` for every element type, for Inf and NaN, batches, odd layouts and files."""

from __future__ import annotations

import subprocess
import sys
import tracemalloc
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import tilewise as tw
from tests.support import INTEGERS, exact_integers
from tilewise.errors import BudgetError
from tilewise.numerics.bounds import bound
from tilewise.numerics.check import Check, check
from tilewise.numerics.room import Room

BF16 = np.dtype(ml_dtypes.bfloat16)
E4M3 = np.dtype(ml_dtypes.float8_e4m3fn)
E5M2 = np.dtype(ml_dtypes.float8_e5m2)


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(5)


def wrong_only_at(found: Check, index: tuple[int, ...]) -> bool:
    assert not found
    assert found.first is not None
    assert found.where is not None
    return found.first.index == index and found.where.elements == 1


# Integers and bools


def full_range(rng: np.random.Generator, shape: tuple[int, ...], dtype: Any) -> Any:
    limits = np.iinfo(dtype)
    return rng.integers(limits.min, limits.max, shape, dtype=dtype, endpoint=True)


@pytest.mark.parametrize("dtype", INTEGERS)
def test_integers_are_exact_with_their_wrap(rng: np.random.Generator, way: str, dtype: str) -> None:
    a, b = full_range(rng, (11, 13), dtype), full_range(rng, (13, 9), dtype)
    c = exact_integers(a, b, dtype)
    found = check(a, b, c)
    assert found
    assert (found.verdict, found.ratio, found.smallest_error) == ("exact", 0, 0)
    for bit in range(8 * c.dtype.itemsize):
        bad = c.copy()
        word = bad.view(f"u{c.dtype.itemsize}")
        word[7, 4] ^= word.dtype.type(1 << bit)
        found = check(a, b, bad)
        assert wrong_only_at(found, (7, 4)), bit
        assert found.first is not None
        assert (found.first.got, found.first.expected) == (int(bad[7, 4]), int(c[7, 4]))


@pytest.mark.parametrize(
    ("a_type", "b_type", "result"),
    [
        ("int8", "int8", "int32"),
        ("uint8", "int8", "int64"),
        ("uint8", "int16", "int16"),
        ("uint64", "uint64", "int64"),
        ("bool", "bool", "int64"),
    ],
)
def test_integers_in_another_result_type(
    rng: np.random.Generator, way: str, a_type: str, b_type: str, result: str
) -> None:
    def draw(shape: tuple[int, int], dtype: str) -> Any:
        return rng.random(shape) < 0.5 if dtype == "bool" else full_range(rng, shape, dtype)

    a, b = draw((20, 30), a_type), draw((30, 10), b_type)
    c = exact_integers(a, b, result)
    assert check(a, b, c).verdict == "exact"
    c[3, 3] += 1
    assert wrong_only_at(check(a, b, c), (3, 3))


def test_pairs_of_wrong_top_bits_do_not_hide_each_other(
    rng: np.random.Generator, sums_only: None
) -> None:
    # Modulo 2^64 an odd number times 2^63 is 2^63: odd vectors alone see none of these.
    a, b = full_range(rng, (20, 30), "int64"), full_range(rng, (30, 25), "int64")
    c = exact_integers(a, b, "int64")
    rows, columns = np.ix_([2, 9], [3, 17])
    c.view("u8")[rows, columns] ^= np.uint64(1 << 63)
    found = check(a, b, c)
    assert not found
    assert found.where is not None
    assert found.where.elements == 4


def test_a_single_wrong_top_bit_is_never_missed(rng: np.random.Generator, sums_only: None) -> None:
    a, b = full_range(rng, (9, 8), "int64"), full_range(rng, (8, 7), "int64")
    c = exact_integers(a, b, "int64")
    c.view("u8")[4, 5] ^= np.uint64(1 << 63)
    for seed in range(60):
        assert wrong_only_at(check(a, b, c, rounds=1, seed=seed), (4, 5))


@pytest.mark.parametrize("density", [0.02, 0.2])
def test_bools_are_or_of_ands(rng: np.random.Generator, way: str, density: float) -> None:
    a, b = rng.random((40, 50)) < density, rng.random((50, 30)) < density
    c = (a.astype(int) @ b.astype(int)) > 0
    assert check(a, b, c).verdict == "exact"
    for index in zip(*np.unravel_index([0, 555, 1199], c.shape), strict=True):
        bad = c.copy()
        bad[index] = not bad[index]
        assert wrong_only_at(check(a, b, bad), tuple(map(int, index)))


# Floats that are not BLAS's, and mixtures


@pytest.mark.parametrize(
    ("operand", "result", "sums"),
    [
        ("f2", "f4", "f4"),
        (BF16, BF16, "f4"),
        (BF16, "f4", "f4"),
        (E4M3, "f4", "f4"),
        (E5M2, "f4", "f4"),
        (E5M2, E5M2, "f4"),
        ("f8", "f4", "f8"),
        ("f4", "f8", "f8"),
        ("f8", "f2", "f8"),
        ("F", "D", "D"),
        ("f4", "F", "F"),
        ("i1", "f4", "f4"),
        ("i8", "f8", "f8"),
        ("u8", "D", "D"),
        ("?", "f4", "f4"),
        (">f4", ">f4", "f4"),
        (">i4", ">i4", "i4"),
    ],
    ids=str,
)
def test_every_type_of_operand_and_result(
    rng: np.random.Generator, way: str, operand: Any, result: Any, sums: str
) -> None:
    def draw(shape: tuple[int, int]) -> Any:
        dtype = np.dtype(operand)
        if dtype.itemsize == 8 and dtype.kind in "iu":
            return full_range(rng, shape, dtype)
        x = 2 * rng.standard_normal(shape)
        return (np.abs(x) > 2 if dtype.kind == "b" else x).astype(dtype)

    a, b = draw((30, 24)), draw((24, 20))
    wide = a.astype(sums) @ b.astype(sums)
    c = wide.astype(result)
    found = check(a, b, c)
    assert found, found
    bad = c.copy()
    bad[11, 7] = (2 * np.abs(wide).max()).astype(result)
    assert wrong_only_at(check(a, b, bad), (11, 7))
    one_term_short = (a[:, :-1].astype(sums) @ b[:-1].astype(sums)).astype(result)
    assert not check(a, b, one_term_short)


def test_a_complex_product_may_be_wrong_in_either_part(rng: np.random.Generator, way: str) -> None:
    a = (rng.standard_normal((20, 30)) + 1j * rng.standard_normal((20, 30))).astype("F")
    b = (rng.standard_normal((30, 10)) + 1j * rng.standard_normal((30, 10))).astype("F")
    c = a @ b
    for error in (1, 1j):
        bad = c.copy()
        bad[19, 9] += error
        found = check(a, b, bad)
        assert wrong_only_at(found, (19, 9))
        assert found.first is not None
        assert abs(found.first.got - found.first.expected - error) < 1e-4
    assert not check(a, b, c.conj())
    assert not check(a, b, a.conj() @ b)


# Inf and NaN


@pytest.mark.parametrize("dtype", ["f4", "f8", "f2", BF16, "F"], ids=str)
@pytest.mark.parametrize("special", [np.nan, np.inf, -np.inf])
def test_what_inf_and_nan_make_of_a_result_is_expected(
    rng: np.random.Generator, way: str, dtype: Any, special: float
) -> None:
    a = rng.standard_normal((12, 15)).astype(dtype)
    b = rng.standard_normal((15, 14)).astype(dtype)
    a[3, 4] = special
    b[7, 8] = special
    b[4, 2] = 0  # 0·Inf
    a[5, 7] = 0
    sums = np.dtype("f4" if np.dtype(dtype).itemsize < 4 else dtype)
    with np.errstate(invalid="ignore"):
        c = (a.astype(sums) @ b.astype(sums)).astype(dtype)
    assert check(a, b, c)
    assert not np.isfinite(c[3].astype(complex)).any()
    for index in ((3, 0), (0, 8), (3, 8)):
        bad = c.copy()
        bad[index] = 1
        assert wrong_only_at(check(a, b, bad), index)
    for value in (np.nan, np.inf, -np.inf):
        bad = c.copy()
        bad[11, 13] = value
        assert wrong_only_at(check(a, b, bad), (11, 13))
    if np.isinf(special) and dtype != "F":
        bad = c.copy()
        bad[3, 0] = -c[3, 0]
        assert wrong_only_at(check(a, b, bad), (3, 0))
        bad[3, 0] = np.nan
        assert wrong_only_at(check(a, b, bad), (3, 0))


@pytest.mark.parametrize(("dtype", "size"), [("f4", 1e20), ("f8", 1e160), ("f2", 300)])
def test_overflow_of_the_exact_product_may_be_inf(way: str, dtype: str, size: float) -> None:
    a, b = np.ones((20, 25), dtype), np.ones((25, 30), dtype)
    a[4] = size
    b[:, 6] = size
    with np.errstate(over="ignore"):
        c = (a.astype("f4") @ b.astype("f4")).astype(dtype) if dtype == "f2" else a @ b
    assert c[4, 6] == np.inf
    assert check(a, b, c)
    for index, value in (((4, 6), -np.inf), ((4, 6), np.nan), ((4, 7), np.inf), ((4, 6), 60000)):
        bad = c.copy()
        bad[index] = value
        assert wrong_only_at(check(a, b, bad), index)


def test_partial_sums_that_overflow_may_leave_inf_or_not(way: str) -> None:
    a = np.ones((17, 40), np.float32)
    b = np.ones((40, 17), np.float32)
    a[2, :4] = 1.5e38, 1.5e38, 1.5e38, -1.5e38  # the sum is 3e38, and 4.5e38 is too much
    exact = a.astype("f8") @ b.astype("f8")
    for value in (exact[2, 5], np.inf):
        c = exact.astype(np.float32)
        c[2, 5] = value
        assert check(a, b, c)
    for value in (-np.inf, np.nan, 2e38):
        c[2, 5] = value
        assert wrong_only_at(check(a, b, c), (2, 5))


@pytest.mark.parametrize(("dtype", "size"), [("f4", 1e25), ("f8", 1e200), ("F", 1e25)])
def test_terms_of_both_signs_that_overflow_may_leave_nan(way: str, dtype: str, size: float) -> None:
    a, b = np.ones((17, 40), dtype), np.ones((40, 17), dtype)
    a[2, :3], b[:3, 5] = (size, 2 * size, -2 * size), size
    a[4, :3] = size, 2 * size, 2 * size  # of one sign: Inf, never NaN
    with np.errstate(over="ignore", invalid="ignore"):
        c = np.matmul(a, b)
    c[2, 5], c[4, 5] = np.nan, np.inf
    assert check(a, b, c)
    for value in (np.inf, -np.inf):
        c[2, 5] = value
        assert check(a, b, c)
    c[2, 5], c[4, 5] = np.nan, np.nan
    assert wrong_only_at(check(a, b, c), (4, 5))
    c[4, 5], c[3, 3] = np.inf, np.nan
    assert wrong_only_at(check(a, b, c), (3, 3))


def test_finite_operands_whose_terms_overflow_pass_their_own_check() -> None:
    a, b = np.array([[1e25, 2e25]], "f4"), np.array([[1e25], [-1e25]], "f4")
    c = np.array([[1e30 + 1e30j]], "F")
    for x, y in ((a, b), (c, c)):
        with np.errstate(over="ignore", invalid="ignore"):
            assert not np.isfinite(tw.matmul(x, y, verify=True)).any()


def test_much_overflow_does_not_blur_the_rest(rng: np.random.Generator, sums_only: None) -> None:
    a, b = (rng.uniform(0, 32, shape).astype("f2") for shape in ((90, 260), (260, 80)))
    with np.errstate(over="ignore"):
        c = (a.astype("f4") @ b.astype("f4")).astype("f2")
    assert 0.2 < np.isinf(c).mean() < 0.8
    found = check(a, b, c)
    assert found, found
    assert found.smallest_error < 100  # the last place of 65504 is 32
    bad = c.copy()
    index = tuple(int(x) for x in np.argwhere(np.isfinite(c))[1000])
    bad[index] -= 320
    assert wrong_only_at(check(a, b, bad), index)


def test_an_inf_of_the_operands_may_meet_an_overflow(way: str) -> None:
    # Without a fused multiply-add −9e76 is −Inf, and Inf − Inf is NaN; with one the sum is Inf.
    a, b = np.ones((18, 20), np.float32), np.ones((20, 19), np.float32)
    a[3, :2], b[1, 4] = (np.inf, -3e38), 3e38
    exact = a.astype("f8") @ b.astype("f8")
    for value in (np.inf, np.nan):
        c = exact.astype(np.float32)
        c[3, 4] = value
        assert check(a, b, c)
    c[3, 4] = -3e38
    assert wrong_only_at(check(a, b, c), (3, 4))


@pytest.mark.parametrize(("dtype", "huge"), [("f4", 3e38), ("f8", 1e308)])
def test_a_huge_wrong_element_does_not_overflow_out_of_sight(
    rng: np.random.Generator, way: str, dtype: str, huge: float
) -> None:
    a, b = (1e-6 * rng.standard_normal(shape) for shape in ((30, 40), (40, 20)))
    c = a.astype(dtype) @ b.astype(dtype)
    c[29, 0] = huge
    assert wrong_only_at(check(a.astype(dtype), b.astype(dtype), c), (29, 0))


def test_a_nan_in_place_of_zero_is_seen(rng: np.random.Generator, way: str) -> None:
    a, b = rng.standard_normal((30, 40)), rng.standard_normal((40, 20))
    a[5] = 0
    c = a @ b
    c[5, 6] = np.nan
    assert wrong_only_at(check(a, b, c), (5, 6))


def test_float64_beyond_its_own_products_is_judged(way: str) -> None:
    a, b = np.full((18, 20), 1e-200), np.full((20, 19), 1e-200)
    a[0, :2], b[:2, 0] = (1e200, 1e-200), (1e-200, 1e200)
    c = a @ b
    assert c[0, 0] == 2.0
    assert check(a, b, c)
    bad = c.copy()
    bad[0, 0] = 1.0  # what scaling whole rows would make of it
    assert wrong_only_at(check(a, b, bad), (0, 0))


# Shapes and layouts


SHAPES = [
    ((5,), (5,)),
    ((5,), (5, 3)),
    ((4, 5), (5,)),
    ((2, 1, 4, 5), (3, 5, 6)),
    ((7, 3, 5), (5, 2)),
    ((5,), (2, 5, 3)),
    ((40, 8, 8), (40, 8, 8)),
    ((3, 40, 50), (1, 50, 30)),
    ((1, 1), (1, 1)),
    ((17, 1), (1, 19)),
]


@pytest.mark.parametrize("dtype", ["f4", "i4", "F"])
@pytest.mark.parametrize(("left", "right"), SHAPES)
def test_vectors_and_batches(
    rng: np.random.Generator, way: str, left: Any, right: Any, dtype: str
) -> None:
    a, b = (
        (5 * rng.standard_normal(left)).astype(dtype),
        (5 * rng.standard_normal(right)).astype(dtype),
    )
    c = np.asarray(a @ b)
    assert check(a, b, c), (left, right)
    bad = c.copy()
    index = tuple(int(rng.integers(size)) for size in c.shape)
    bad[index] += 20
    found = check(a, b, bad)
    assert wrong_only_at(found, index)
    assert str(found.first).startswith(f"c[{', '.join(map(str, index))}] is" if index else "c is")


def test_several_wrong_matrices_are_counted(rng: np.random.Generator, way: str) -> None:
    a, b = rng.standard_normal((6, 20, 21)), rng.standard_normal((21, 22))
    c = a @ b
    c[2, 3, 4] += 1
    c[5, 6, 7] += 1
    found = check(a, b, c)
    assert found.first is not None
    assert found.where is not None
    assert (found.first.index, found.where.batch) == ((2, 3, 4), (2,))
    assert found.notes == ("2 of 6 matrices are wrong",)
    assert "matrix [2]" in str(found)


@pytest.mark.parametrize(
    ("left", "right"), [((0, 5), (5, 3)), ((4, 0), (0, 3)), ((3, 0, 5), (5, 2)), ((0,), (0,))]
)
def test_empty_operands(left: Any, right: Any) -> None:
    a, b = np.ones(left), np.ones(right)
    found = check(a, b, a @ b)
    assert found.verdict == "exact"
    if np.size(a @ b):
        assert not check(a, b, a @ b + 1e-300)


def test_layouts_make_no_difference(rng: np.random.Generator, way: str) -> None:
    a, b = rng.standard_normal((50, 60)), rng.standard_normal((60, 40))
    c = a @ b
    wide = np.zeros((100, 120))
    wide[::2, ::-2] = a
    for left, right, result in (
        (np.asfortranarray(a), b, c),
        (a, np.asfortranarray(b), np.asfortranarray(c)),
        (wide[::2, ::-2], b[::-1][::-1], c),
        (a.tolist(), b.tolist(), c.tolist()),
        (np.ones((50, 1)), np.ones((1, 40)), np.broadcast_to(1.0, (50, 40))),
    ):
        assert check(left, right, result)
    bad = np.asfortranarray(c)
    bad[12, 34] += 1
    assert wrong_only_at(check(np.asfortranarray(a), np.asfortranarray(b), bad), (12, 34))


# Files and memory


@pytest.mark.parametrize(("dtype", "per_index"), [("f4", 3 * 1024), ("f8", 6 * 1024)])
def test_memory_is_what_is_stated(rng: np.random.Generator, dtype: str, per_index: int) -> None:
    m, k, n = 6000, 2000, 400
    a = rng.standard_normal((m, k), np.float32).astype(dtype)
    b = rng.standard_normal((k, n), np.float32).astype(dtype)
    c = a @ b
    tracemalloc.start()
    assert check(a, b, c)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak <= 2**26 + per_index * (m + k + n)


@pytest.mark.parametrize("dtype", ["f4", "F", "i4"])
def test_a_budget_is_kept_by_parts_that_find_as_much(
    rng: np.random.Generator, sums_only: None, dtype: str
) -> None:
    a, b = (rng.integers(-9, 9, shape).astype(dtype) for shape in ((130, 300), (300, 150)))
    c = a @ b
    bad = c.copy()
    bad[100:104, 140] += 1000
    check(a[:9], b[:, :9], c[:9, :9])  # what is imported on the way
    kinds = (a.dtype, b.dtype, c.dtype)
    most = Room.of((130, 150, 300), (), kinds, bound(300, *kinds, device="cuda")).nbytes
    for memory in (900 << 10, 1500 << 10):
        tracemalloc.start()
        assert check(a, b, c, memory=memory)
        found = check(a, b, bad, memory=memory)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak <= memory < most
        assert found.where is not None
        assert (found.where.rows, found.where.columns) == ((range(100, 104),), (range(140, 141),))
    with pytest.raises(BudgetError, match=r"130x300 @ 300x150 takes at least .*30.00 KiB; raise"):
        check(a, b, c, memory="30KiB")


@pytest.mark.parametrize("sizes", [(10**7, 100, 100), (100, 10**7, 100), (100, 100, 10**7)])
@pytest.mark.parametrize("dtype", ["f4", "D", "i8"])
def test_a_long_side_takes_little_memory_if_nobody_says(
    dtype: str, sizes: tuple[int, int, int]
) -> None:
    m, n, k = sizes
    kinds = (np.dtype(dtype),) * 3
    room = Room.of(sizes, (), kinds, bound(k, *kinds))
    assert room.nbytes <= max(2**28, kinds[0].itemsize * (m * n + m * k + k * n) // 16)


def test_thin_products_are_recomputed_where_that_is_quicker() -> None:
    kinds = (np.dtype("f4"),) * 3
    for m, n, k, recomputes in (
        *((10**6, 64, 64, True), (64, 64, 10**6, True), (3000, 64, 3000, True)),
        *((3000, 3000, 64, False), (10**6, 200, 200, False), (4096, 4096, 4096, False)),
    ):
        assert Room.of((m, n, k), (), kinds, bound(k, *kinds)).recomputes is recomputes


def test_files_are_read_in_panels_and_their_pages_given_back(tmp_path: Path) -> None:
    program = """
import resource, sys
import numpy as np
from tilewise.numerics.check import check

def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

m, k, n = 65536, 512, 128
rng = np.random.default_rng(0)
b = rng.standard_normal((k, n), np.float32)
a = np.lib.format.open_memmap("a.npy", "w+", np.float32, (m, k))
c = np.lib.format.open_memmap("c.npy", "w+", np.float32, (m, n))
for i in range(0, m, 4096):
    a[i : i + 4096] = rng.standard_normal((4096, k), np.float32)
    c[i : i + 4096] = a[i : i + 4096] @ b
np.save("b.npy", b)
c[60000, 33] += 1
del a, b, c
"""
    subprocess.run([sys.executable, "-c", program], cwd=tmp_path, check=True)
    program = (
        program.partition("m, k, n")[0]
        + """
files = [np.load(name, mmap_mode="r") for name in ("a.npy", "b.npy", "c.npy")]
before = peak()
found = check(*files)
assert found.first.index == (60000, 33) and found.where.elements == 1, found
print(peak() - before)
"""
    )
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path, check=True, capture_output=True, text=True
    )
    # The files are 160 MiB; state is about 3 KiB for each of 66,176 rows, columns and terms.
    assert int(done.stdout) <= 2**26 + 3 * 1024 * 66_176
