"""matmul on host arrays: np.matmul's semantics, every type, layout and size; cases A, B and E."""

from __future__ import annotations

import itertools
import os
import threading
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import tilewise as tw
from tests.support import (
    COMPLEX,
    FLOATS,
    INTEGERS,
    exact_integers,
    guarded,
    margins_are_whole,
    small_integers,
    within_bound,
)
from tilewise import _cpu, _overlap
from tilewise.errors import DTypeError, OptionError, ShapeError
from tilewise.numerics import limbs

BF16 = np.dtype(ml_dtypes.bfloat16)
E4M3 = np.dtype(ml_dtypes.float8_e4m3fn)
E5M2 = np.dtype(ml_dtypes.float8_e5m2)
NARROW = ("float16", BF16, E4M3, E5M2)
EVERY = (*FLOATS, BF16, E4M3, E5M2, *COMPLEX, *INTEGERS, "bool", "longdouble")


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(20261129)


def as_exact(a: Any, b: Any) -> Any:
    """The product of small whole numbers, by float64 or complex128 or or-and."""
    if a.dtype == bool:
        return np.matmul(a.astype(int), b.astype(int)) > 0
    wide = "complex128" if a.dtype.kind == "c" else "float64"
    return np.matmul(a.astype(wide), b.astype(wide))


@pytest.mark.parametrize("dtype", EVERY, ids=str)
@pytest.mark.parametrize(
    ("a_shape", "b_shape"),
    [
        ((3,), (3,)),
        ((5, 3), (3,)),
        ((3,), (3, 4)),
        ((4, 3, 2), (2,)),
        ((2,), (5, 2, 3)),
        ((0, 3), (3, 4)),
        ((4, 3), (3, 0)),
        ((4, 0), (0, 5)),
        ((1, 1), (1, 1)),
        ((17, 33), (33, 15)),
        ((2, 1, 5, 3), (4, 3, 2)),
        ((0, 5, 3), (0, 3, 4)),
        ((3, 1, 7, 8), (1, 2, 8, 9)),
        ((2, 0), (0,)),
    ],
)
def test_shapes_and_values_are_numpys(
    rng: Any, dtype: Any, a_shape: tuple[int, ...], b_shape: tuple[int, ...]
) -> None:
    a, b = small_integers(rng, a_shape, dtype), small_integers(rng, b_shape, dtype)
    got = tw.matmul(a, b)
    expected = as_exact(a, b)
    assert got.shape == expected.shape
    assert type(got) is type(np.matmul(np.ones(a_shape), np.ones(b_shape))) or got.shape == ()
    if np.dtype(dtype).kind in "iub":
        assert got.dtype == np.dtype(dtype)
    assert (np.asarray(got).astype(expected.dtype) == expected).all()


@pytest.mark.parametrize("dtype", ["float32", "float64", "complex64", "complex128"])
def test_plain_blas_operands_have_the_bits_of_np_matmul(rng: Any, dtype: str) -> None:
    a = rng.standard_normal((3, 65, 130)).astype(dtype)
    b = rng.standard_normal((130, 31)).astype(dtype)
    for x, y in ((a, b), (a[0], b), (a[0].T, a[0]), (a[0], b[:, 0]), (b[:, 0], b)):
        assert np.array_equal(tw.matmul(x, y), np.matmul(x, y))


@pytest.mark.parametrize("dtype", INTEGERS)
def test_integers_wrap_as_numpy_wraps(rng: Any, dtype: str) -> None:
    info = np.iinfo(dtype)
    a = rng.integers(info.min, info.max, (19, 300), dtype=dtype, endpoint=True)
    b = rng.integers(info.min, info.max, (300, 23), dtype=dtype, endpoint=True)
    a[0], a[1], b[:, 0], b[:, 1] = info.min, info.max, info.min, info.max
    assert tw.plan(a, b).method == "limbs"
    assert np.array_equal(tw.matmul(a, b), exact_integers(a, b, dtype))


@settings(deadline=None, max_examples=40)
@given(
    a_type=st.sampled_from(INTEGERS),
    b_type=st.sampled_from(INTEGERS),
    shape=st.tuples(*[st.integers(1, 40)] * 3),
    scale=st.integers(0, 63),
    seed=st.integers(0, 2**32),
)
def test_integer_products_of_any_magnitude_are_exact(
    a_type: str, b_type: str, shape: tuple[int, int, int], scale: int, seed: int
) -> None:
    m, k, n = shape
    rng = np.random.default_rng(seed)
    operands = []
    for dtype, size in ((a_type, (m, k)), (b_type, (k, n))):
        info = np.iinfo(dtype)
        low, high = max(info.min, -(1 << scale)), min(info.max, 1 << scale)
        operands.append(rng.integers(low, high, size, dtype=dtype, endpoint=True))
    a, b = operands
    expected = np.promote_types(a_type, b_type)
    got = tw.matmul(a, b)
    assert got.dtype == expected
    if expected.kind in "iu":
        assert np.array_equal(got, exact_integers(a, b, expected))
    else:  # uint64 with a signed type is float64, by NumPy's rule
        assert within_bound(got, a.astype(float), b.astype(float), 2.0**-53)


@pytest.mark.parametrize("result", ["int8", "int16", "int32", "int64"])
@pytest.mark.parametrize("other", ["uint64", "uint8", "bool"])
@pytest.mark.parametrize("size", [2, 40])
def test_uint64_with_a_signed_result_type_wraps_exactly(
    rng: Any, result: str, other: str, size: int
) -> None:
    a = rng.integers(0, 2**64, (size, size), np.uint64)
    a[0, 0] = 2**64 - 1
    b = rng.integers(0, 2, (size, size)).astype(other)
    assert np.array_equal(tw.matmul(a, b, dtype=result), exact_integers(a, b, result))


@pytest.mark.parametrize("dtype", NARROW, ids=str)
def test_narrow_floats_are_summed_in_float32_and_rounded_once(rng: Any, dtype: Any) -> None:
    a = rng.standard_normal((70, 3000)).astype(dtype)
    b = rng.standard_normal((3000, 50)).astype(dtype)
    wide = tw.matmul(a, b, dtype=np.float32)
    assert wide.dtype == np.float32
    assert within_bound(wide, a, b)
    default = tw.matmul(a, b)
    assert default.dtype == (np.float32 if np.dtype(dtype).itemsize == 1 else dtype)
    assert np.array_equal(default, wide.astype(default.dtype))


LAYOUTS = {
    "C": lambda x: x,
    "F": lambda x: np.asfortranarray(x),
    "every second row": lambda x: np.repeat(x, 2, axis=-2)[..., ::2, :],
    "every third column": lambda x: np.repeat(x, 3, axis=-1)[..., ::3],
    "rows reversed": lambda x: x[..., ::-1, :].copy()[..., ::-1, :],
    "columns reversed": lambda x: x[..., ::-1].copy()[..., ::-1],
    "both reversed": lambda x: x[..., ::-1, ::-1].copy()[..., ::-1, ::-1],
    "guarded": lambda x: guarded(x)[0],
    "misaligned": lambda x: _misaligned(x),
    "big endian": lambda x: x.astype(x.dtype.newbyteorder(">")),
    "read-only": lambda x: _read_only(x),
}


def _misaligned(x: Any) -> Any:
    raw = np.empty(x.nbytes + 1, np.uint8)[1:]
    raw[...] = x.reshape(-1).view(np.uint8)
    return raw.view(x.dtype).reshape(x.shape)


def _read_only(x: Any) -> Any:
    x = x.copy()
    x.flags.writeable = False
    return x


@pytest.mark.parametrize("dtype", ["float32", "float64", "complex64", "int16", "float16"])
def test_every_mix_of_layouts_is_right(rng: Any, dtype: str) -> None:
    a, b = small_integers(rng, (13, 21), dtype), small_integers(rng, (21, 11), dtype)
    expected = as_exact(a, b).astype(dtype)
    for a_layout, b_layout in itertools.product(LAYOUTS.values(), repeat=2):
        out = np.full((11, 39), 0, dtype).T[::3]
        x, y = a_layout(a), b_layout(b)
        assert np.array_equal(tw.matmul(x, y), expected)
        assert tw.matmul(x, y, out=out) is out
        assert np.array_equal(out, expected)


@pytest.mark.parametrize("dtype", ["float32", "int32", "float16", "bool"])
def test_a_small_budget_changes_the_tiles_and_not_the_result(rng: Any, dtype: str) -> None:
    a, b = small_integers(rng, (3, 200, 300), dtype), small_integers(rng, (300, 150), dtype)
    a, b = a[..., ::-1], b[::-1]  # so that float32 goes by panels too
    result_bytes = 3 * 200 * 150 * np.dtype(dtype).itemsize
    memory = result_bytes + 200_000
    plan = tw.plan(a, b, memory=memory)
    assert plan.how.tiles.count > 1
    assert plan.held_bytes <= memory
    expected = as_exact(a, b)
    assert (plan(a, b).astype(expected.dtype) == expected).all()


def test_batches_are_cut_to_the_workspace_and_broadcast_operands_stay_small(rng: Any) -> None:
    a = small_integers(rng, (5, 1, 60, 80), np.int16)
    b = small_integers(rng, (1, 7, 80, 50), np.int16)
    plan = tw.plan(a, b, memory=5 * 7 * 60 * 50 * 2 + 2_000_000)
    assert 1 < plan.how.matrices_at_once < 35
    assert np.array_equal(plan(a, b), np.matmul(a, b))


def test_dtype_asks_for_a_result_type_without_overflow_on_the_way() -> None:
    a = np.full((2, 300), 100, np.int8)
    assert tw.matmul(a, a.T, dtype=np.int32)[0, 0] == 3_000_000
    assert tw.matmul(a, a.T, dtype="int64").dtype == np.int64
    half = np.full((1, 4096), 60, np.float16)
    assert tw.matmul(half, half.T, dtype=np.float32)[0, 0] == 4096 * 3600
    assert tw.matmul(half, half.T)[0, 0] == np.inf
    big = np.array([[1e30]])
    assert tw.matmul(big, 1e-30 * big, dtype=np.float32)[0, 0] == np.float32(1e30)
    assert tw.matmul(a > 0, (a > 0).T, dtype=np.int16)[0, 0] == 300
    assert (
        tw.matmul(np.ones((2, 2), np.float32), np.ones((2, 2), np.float32), dtype="bfloat16").dtype
        == BF16
    )


@pytest.mark.parametrize(
    ("a_type", "b_type", "expected"),
    [
        ("float32", "float64", "float64"),
        ("float16", "float32", "float32"),
        (BF16, "float32", "float32"),
        (BF16, "float16", "float32"),
        (BF16, "int32", "float64"),
        (E4M3, E5M2, "float32"),
        (E4M3, BF16, "float32"),
        ("int8", "float32", "float32"),
        ("int32", "float32", "float64"),
        ("complex64", "float64", "complex128"),
        ("bool", "int8", "int8"),
        ("uint8", "int8", "int16"),
        ("uint64", "int64", "float64"),
    ],
    ids=str,
)
def test_B18_mixed_types_promote_as_numpy_promotes(
    rng: Any, a_type: Any, b_type: Any, expected: str
) -> None:
    a, b = small_integers(rng, (9, 30), a_type), small_integers(rng, (30, 8), b_type)
    got = tw.matmul(a, b)
    assert got.dtype == np.dtype(expected)
    reference = np.matmul(a.astype("complex128"), b.astype("complex128"))
    assert (got.astype("complex128") == reference).all()


def test_inf_and_nan_come_out_where_they_belong_without_a_warning() -> None:
    for dtype in ("float16", "float32", "float64"):
        a = np.array([[np.inf, 1], [np.nan, 0], [0, np.inf], [1, 2]], dtype)[::-1]
        b = np.array([[1], [0]], dtype)[:, ::-1]
        expected = np.array([[1], [np.nan], [np.nan], [np.inf]], dtype)
        for x, y in ((a, b), (a.copy(), b.copy())):  # by panels, and by one call of BLAS
            for call in (tw.matmul, tw.plan(x, y)):
                assert np.array_equal(call(x, y), expected, equal_nan=True)


def test_nested_lists_memory_maps_and_buffers_are_operands(rng: Any, tmp_path: Any) -> None:
    assert np.array_equal(tw.matmul([[1, 2], [3, 4]], [[1], [1]]), [[3], [7]])
    path = tmp_path / "a.bin"
    a = small_integers(rng, (6, 5), np.float32)
    path.write_bytes(b"x" * 13 + a.astype(">f4").tobytes())
    mapped = np.memmap(path, ">f4", "r", 13, (6, 5))
    assert np.array_equal(tw.matmul(mapped, a.T), a @ a.T)
    assert type(tw.matmul(mapped, a.T)) is np.ndarray
    buffer = memoryview(bytearray(a.tobytes())).cast("B").cast("f", (6, 5))
    assert np.array_equal(tw.matmul(buffer, a.T), a @ a.T)


@pytest.mark.parametrize("name", ["x.npy", Path("x.npy"), "linked.npy", Path("hard.npy")], ids=str)
def test_two_maps_of_one_file_share_it(
    rng: Any, tmp_path: Path, monkeypatch: Any, name: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    x = rng.integers(-3, 4, (300, 300)).astype("f8")
    np.save("x.npy", x)
    os.symlink("x.npy", "linked.npy")
    os.link("x.npy", "hard.npy")
    read = np.load("x.npy", mmap_mode="r")
    place = np.lib.format.open_memmap(name, "r+")
    tw.matmul(read, read, out=np.asarray(place))
    assert np.array_equal(place, x @ x)


def test_maps_share_what_both_have_of_a_file(rng: Any, tmp_path: Path) -> None:
    x = rng.integers(-3, 4, (200, 100)).astype("f8")
    np.save(tmp_path / "x.npy", x)
    one = np.load(tmp_path / "x.npy", mmap_mode="r")
    other = np.load(tmp_path / "x.npy", mmap_mode="r+")
    assert not _overlap.overlap(other[:100], one[100:])
    assert not _overlap.overlap(other[:, ::2], one[:, 1::2])
    assert _overlap.overlap(other[:101], one[100:])
    assert not _overlap.overlap(other + 1, one)  # what is computed of a map is none
    for view in (np.asarray, np.frombuffer, np.lib.stride_tricks.as_strided):
        assert _overlap.overlap(view(other), one)
    place = other[100:]
    tw.matmul(one[:100], one[50:150], out=place)
    assert np.array_equal(place, x[:100] @ x[50:150])


def test_cuts_into_limbs_are_not_searched_for_each_length(rng: Any) -> None:
    widest = np.array([[-(2**63), 2**63 - 1]])
    for k in range(513, 560):
        a, b = np.tile(widest, (20, 280))[:, :k], np.tile(widest.T, (280, 20))[:k]
        assert np.array_equal(tw.matmul(a, b), exact_integers(a, b, "int64"))
        if k == 513:
            searched = limbs.choose_cut.cache_info().misses
    assert limbs.choose_cut.cache_info().misses == searched


def test_threads_do_not_disturb_each_other(rng: Any) -> None:
    a = rng.integers(-(2**40), 2**40, (40, 60))
    expected = np.matmul(a, a.T)
    wrong = []

    def work() -> None:
        for _ in range(20):
            if not np.array_equal(tw.matmul(a, a.T), expected):
                wrong.append(1)

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def _too_near(x: Any) -> Any:
    """Return an array of the shape of ``x`` whose rows begin nearer than they are long."""
    steps = (x.strides[0] - x.itemsize, x.itemsize)
    return np.lib.stride_tricks.as_strided(x.copy(), x.shape, steps)


#: What is refused of operands and an out like those of a product that was just computed.
AFTER = [
    (lambda a, b, c: (a, b, _read_only(c)), {}, DTypeError, "out .* is read-only"),
    (lambda a, b, c: (a, b, _too_near(c)), {}, ShapeError, "share memory"),
    (lambda a, b, c: (a, b, c.astype("f8")), {}, DTypeError, "exactly the result's dtype"),
    (lambda a, b, c: (a, b, c[:5]), {}, ShapeError, "exactly the result's shape"),
    (lambda a, b, c: (a[:, :5], b, c), {}, ShapeError, "^a .*shape"),
    (lambda a, b, c: (a, np.ma.masked_array(b, b > 0), c), {}, DTypeError, "^b is a masked"),
    (lambda a, b, c: (a, b, c), {"stream": 7}, OptionError, "stream=7"),
]


@pytest.mark.parametrize("is_planned", [False, True])
@pytest.mark.parametrize(("change", "options", "error", "words"), AFTER)
def test_a_product_like_one_before_is_looked_at_as_that_was(
    rng: Any, is_planned: bool, change: Any, options: Any, error: Any, words: str
) -> None:
    a, b, c = (small_integers(rng, (6, 6), np.float32) for _ in "abc")
    call = tw.plan(a, b) if is_planned else tw.matmul
    for _ in range(2):
        call(a, b, out=c)
        assert np.array_equal(c, a @ b)
        x, y, z = change(a, b, c)
        with pytest.raises(error, match=words):
            call(x, y, out=z, **options)


def test_an_out_of_one_layout_may_lie_beside_an_operand_or_over_it(
    rng: Any, monkeypatch: Any
) -> None:
    monkeypatch.setattr(_cpu, "_WORKSPACE_BYTES", 4096)  # so tiles are written before all is read
    n = 59
    a, b = (small_integers(rng, (n, n), np.float16) for _ in "ab")
    expected, place = as_exact(a, b), np.empty((2 * n, n), np.float16)
    for call in (tw.matmul, tw.plan(a, b)):
        for start in (n, 20, 0, n):
            place[start : start + n] = b
            call(a, place[start : start + n], out=place[:n])
            assert np.array_equal(place[:n], expected)
        for view in (lambda x: x, lambda x: x[:]):
            whole = b.copy()
            assert np.array_equal(call(a, view(whole), out=whole), expected)


def test_guard_bands_are_neither_read_nor_written(rng: Any) -> None:
    for dtype in ("float32", "float64", "float16", "int32", "complex64"):
        a, a_buffer = guarded(small_integers(rng, (33, 17), dtype))
        b, b_buffer = guarded(small_integers(rng, (17, 9), dtype))
        c, c_buffer = guarded(np.zeros((33, 9), dtype))
        expected = as_exact(a, b).astype(dtype)
        tw.matmul(a, b, out=c)
        assert np.array_equal(c, expected)
        for inside, buffer in ((a, a_buffer), (b, b_buffer), (c, c_buffer)):
            assert margins_are_whole(inside, buffer)


@pytest.mark.parametrize("dtype", ["float32", "float16", "complex64", "int64", "bool"])
def test_as_many_axes_as_numpy_has_and_more_than_broadcast_shapes_knows(dtype: str) -> None:
    a = np.ones((*(1,) * 58, 2, 1, 1, 2, 20, 20), dtype)
    b = np.ones((2, 1, 20, 20), dtype)
    c = tw.matmul(a, b)
    assert c.shape == (*(1,) * 58, 2, 1, 2, 2, 20, 20)
    assert (c == (1 if dtype == "bool" else 20)).all()
    assert tw.check(a, b, c)
    with pytest.raises(ShapeError, match="do not broadcast"):
        tw.matmul(a, np.ones((3, 20, 20), dtype))
