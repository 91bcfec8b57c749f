"""Products of device arrays: case groups A, B and E on a GPU, between guard bands."""

from __future__ import annotations

import itertools
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import tilewise as tw
from tests.gpu.support import download, upload
from tests.support import (
    exact_integers,
    guarded,
    margins_are_whole,
    small_integers,
    within_bound,
)
from tilewise.errors import DTypeError, ShapeError

pytestmark = pytest.mark.gpu

BF16 = np.dtype(ml_dtypes.bfloat16)
E4M3 = np.dtype(ml_dtypes.float8_e4m3fn)
E5M2 = np.dtype(ml_dtypes.float8_e5m2)
FLOATS = ("float16", BF16, "float32", "float64", "complex64", "complex128")
INTEGERS = ("int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64")


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(2026)


def exact(a: Any, b: Any) -> Any:
    if a.dtype == bool:
        return np.matmul(a.astype(int), b.astype(int)) > 0
    wide = np.complex128 if a.dtype.kind == "c" else np.float64
    return np.matmul(a.astype(wide), b.astype(wide))


def multiply(a: Any, b: Any, **options: Any) -> Any:
    """Multiply on the GPU between guard bands, into a poisoned result; return it on the host."""
    plan = tw.plan(a, b, **{k: v for k, v in options.items() if k == "dtype"})
    a_in, b_in = guarded(a)[0], guarded(b)[0]
    c_in, c_buffer = guarded(np.zeros(plan.shape, plan.dtype))
    c_in.view(np.uint8)[...] = 0xFF
    out = upload(c_in)
    assert tw.matmul(upload(a_in), upload(b_in), out=out, **options) is out
    result = download(out)
    if plan.dtype.isbuiltin == 1 and c_in.size:
        around = out.base if out.base is not None else out
        memory = np.frombuffer(_bytes_around(around, c_in, c_buffer), np.uint8)
        inside = np.zeros(c_buffer.nbytes, bool)
        offsets = np.arange(c_buffer.nbytes).reshape(*c_buffer.shape, -1)
        margin = 3
        cut = tuple(slice(margin, margin + size) for size in c_in.shape)
        inside[offsets[cut].ravel()] = True
        assert (memory[~inside] == 0xFF).all(), "a margin of out was written"
    return result


def _bytes_around(view: Any, inside: Any, buffer: Any) -> bytes:
    import cupy

    start = inside.__array_interface__["data"][0] - buffer.__array_interface__["data"][0]
    memory = cupy.cuda.MemoryPointer(view.data.mem, view.data.ptr - view.data.mem.ptr - start)
    return bytes(cupy.ndarray((buffer.nbytes,), np.uint8, memory).get())


def as_result(values: Any, dtype: Any) -> Any:
    if np.dtype(dtype).kind in "iu":
        return values.astype(np.int64).astype(dtype)
    return values.astype(dtype)


@pytest.mark.parametrize("dtype", [*FLOATS, E4M3, E5M2, *INTEGERS, "bool"], ids=str)
def test_A5_sizes_around_every_tile(rng: Any, dtype: Any) -> None:
    sizes = (1, 2, 3, 7, 8, 15, 16, 17, 31, 32, 33, 100, 127, 129)
    shapes = list(itertools.product(sizes, repeat=3))
    some = [shapes[i] for i in rng.choice(len(shapes), 40, replace=False)]
    some += [(33, 32, 32), (256, 128, 256), (35, 79, 19), (3000, 64, 64), (3, 3, 431)]
    for m, n, k in some:
        a, b = small_integers(rng, (m, k), dtype), small_integers(rng, (k, n), dtype)
        got = multiply(a, b)
        assert (got == as_result(exact(a, b), got.dtype)).all(), (m, n, k)


def test_A2_A7_no_foreign_data_and_no_unwritten_element(rng: Any) -> None:
    for dtype in ("float32", "float16"):
        for m, k, n in ((1000, 1000, 1000), (1000, 1001, 999), (500, 500, 500)):
            a, b = small_integers(rng, (m, k), dtype), small_integers(rng, (k, n), dtype)
            results = [multiply(a, b) for _ in range(3)]
            assert (results[0] == exact(a, b).astype(dtype)).all()
            assert len({result.tobytes() for result in results}) == 1


@pytest.mark.parametrize("dtype", ["float16", BF16], ids=str)
def test_A6_rows_that_are_no_multiple_of_16(rng: Any, dtype: Any) -> None:
    for m in (1744, 1752, 1760):
        a, b = small_integers(rng, (m, 584), dtype), small_integers(rng, (584, 4720), dtype)
        expected = exact(a, b)
        for a_order, b_order in itertools.product("CF", repeat=2):
            x = upload(np.asarray(a, order=a_order))
            y = upload(np.asarray(b, order=b_order))
            assert (download(tw.matmul(x, y, dtype=np.float32)) == expected).all()
            assert (download(tw.matmul(x, y)) == expected.astype(dtype)).all()


@pytest.mark.parametrize("dtype", [*FLOATS, "int8"], ids=str)
def test_A8_A9_outer_products_and_every_short_k(rng: Any, dtype: Any) -> None:
    for m, n in ((1, 128), (130, 77), (1, 1)):
        a, b = small_integers(rng, (m, 1), dtype), small_integers(rng, (1, n), dtype)
        assert (multiply(a, b).astype("complex128") == exact(a, b)).all()
    for k in range(71):
        x, y = upload(np.ones((128, k), dtype)), upload(np.ones((128, k), dtype))
        assert (download(tw.matmul(x, y.T)).astype(complex) == k).all()


def test_A11_out_may_overlap_an_operand(rng: Any) -> None:
    a = upload(np.ones((2, 999, 999)))
    tw.matmul(a, a, out=a)
    assert (download(a) == 999).all()
    b = small_integers(rng, (2000, 2000), np.float32)
    expected = exact(b, b.T)
    x = upload(b)
    tw.matmul(x, x.T, out=x)
    assert (download(x) == expected).all()
    whole = small_integers(rng, (41, 40), np.float32)
    square = small_integers(rng, (40, 40), np.float32)
    x = upload(whole)
    tw.matmul(upload(square), x[:40], out=x[1:])
    assert (download(x)[1:] == exact(square, whole[:40])).all()


def test_A13_A14_A15_strides(rng: Any) -> None:
    for dtype in ("float16", "float32", "float64", "complex64", "int16"):
        base = small_integers(rng, (60, 80), dtype)
        eye = np.eye(4, dtype=dtype)
        assert (download(tw.matmul(upload(base)[::2, 1:5], upload(eye))) == base[::2, 1:5]).all()
        b = small_integers(rng, (80, 9), dtype)
        for view in (
            base[::-1],
            base[:, ::-1],
            base[::-1, ::-1],
            base[50:0:-2],
            base[:, ::-1][::3],
        ):
            assert (multiply_view(view, b) == exact(view, b)).all()
        turned = base[::-1, ::-1].T
        assert (multiply_view(turned, base) == exact(turned, base)).all()
    b = small_integers(rng, (4, 6), np.float32)
    a = small_integers(rng, (5, 4), np.float32)
    odd = np.lib.stride_tricks.as_strided(a, (1, 5, 4), (123456, *a.strides))
    assert (multiply_view(odd, b) == exact(a, b)).all()


def multiply_view(a: Any, b: Any) -> Any:
    """Multiply views as they are, strides and all."""
    x, y = upload(a), upload(b)
    assert x.strides == a.strides
    return download(tw.matmul(x, y))


def test_A16_orders_of_operands_and_out(rng: Any) -> None:
    for dtype in ("float32", "float16", "float64"):
        for shapes in (((2, 3), (3, 4)), ((1024, 512), (512,)), ((256, 64), (64, 128))):
            for orders in itertools.product("CF", repeat=3):
                a = np.asarray(small_integers(rng, shapes[0], dtype), order=orders[0])
                b = np.asarray(small_integers(rng, shapes[1], dtype), order=orders[1])
                expected = exact(a, b)
                out = upload(np.full(expected.shape, np.nan, dtype, order=orders[2]))
                tw.matmul(upload(a), upload(b), out=out)
                assert (download(out) == expected).all()


@pytest.mark.parametrize("dtype", INTEGERS)
def test_A17_A18_B17_integers_wrap(rng: Any, dtype: str) -> None:
    info = np.iinfo(dtype)
    a = rng.integers(info.min, info.max, (70, 300), dtype=dtype, endpoint=True)
    b = rng.integers(info.min, info.max, (300, 50), dtype=dtype, endpoint=True)
    assert np.array_equal(multiply(a, b), exact_integers(a, b, dtype))
    x = np.array([info.max, 3], dtype)
    assert download(tw.matmul(upload(x), upload(x))) == exact_integers(x[None], x[:, None], dtype)


def test_A19_a_wider_result_type_is_exact() -> None:
    a, b = upload(np.full((2, 300), 100, np.int8)), upload(np.full((300, 2), 100, np.int8))
    for dtype, value in ((None, -64), (np.int16, -14656), (np.int32, 3_000_000)):
        assert (download(tw.matmul(a, b, dtype=dtype)) == value).all()


def test_A20_conjugate_transposes(rng: Any) -> None:
    import torch

    a = torch.ones((1, 2, 1), dtype=torch.complex128, device="cuda")
    b = torch.full((1, 3, 1), 1 + 2j, dtype=torch.complex128, device="cuda")
    got = tw.matmul(a, b.transpose(1, 2).conj())
    assert (got == 1 - 2j).all()
    c = torch.from_numpy(rng.standard_normal((5, 5)) + 1j * rng.standard_normal((5, 5))).cuda()
    x = c.cpu().numpy()
    assert within_bound(tw.matmul(c.conj(), c.T).cpu().numpy(), x.conj(), x.T, 2.0**-53)


def test_A22_A23_tall_operands_and_huge_batches(rng: Any) -> None:
    import cupy

    for m in (2097153, 4266126, 6291456):
        for dtype in (np.float32, np.float16):
            assert (tw.matmul(cupy.ones((m, 2), dtype), cupy.ones((2, 2), dtype)) == 2).all()
    points = cupy.asarray(rng.standard_normal((400, 400, 2, 1)).astype(np.float32))
    assert (tw.matmul(cupy.eye(2, dtype=np.float32), points) == points).all()
    turn = cupy.asarray(rng.integers(-9, 9, (3, 3), dtype=np.int32))
    pixels = cupy.asarray(rng.integers(0, 256, (480, 640, 3, 1), dtype=np.int32))
    assert (tw.matmul(turn, pixels) == cupy.einsum("ij,abjk->abik", turn, pixels)).all()


@pytest.mark.parametrize("dtype", [*FLOATS], ids=str)
def test_A24_beta_zero_never_reads_c(rng: Any, dtype: Any) -> None:
    for size in (3, 200):
        eye = np.eye(size, dtype=dtype)
        a, nan = upload(eye), upload(np.full((size, size), np.nan, dtype))
        c = upload(np.full((size, size), np.nan, dtype))
        tw.gemm(a, a, c, beta=0)
        assert (download(c) == eye).all()
        c = upload(np.full((size, size), 2, dtype))
        tw.gemm(nan, a, c, alpha=0, beta=3)
        assert (download(c) == 6).all()
        x, y = small_integers(rng, (size, 30), dtype), small_integers(rng, (30, size), dtype)
        c = upload(np.full((size, size), 2, dtype))
        tw.gemm(upload(x), upload(y), c, alpha=2, beta=-1)
        assert (download(c).astype("complex128") == 2 * exact(x, y) - 2).all()


def test_A25_wrong_outs_are_refused() -> None:
    import cupy

    a = cupy.ones((2, 2))
    for out, error in ((cupy.ones((3, 1)), ShapeError), (cupy.ones((2, 2), "i4"), DTypeError)):
        with pytest.raises(error, match="out"):
            tw.matmul(a, a, out=out)
    assert (tw.matmul(a, a) == 2).all()


def test_B1_more_than_2_to_the_31_elements() -> None:
    import cupy

    for dtype, result in ((np.float32, None), (np.int8, np.int32)):
        a = cupy.ones((35783, 65133), dtype)
        ones = cupy.ones(65133, dtype)
        assert (tw.matmul(a, ones, dtype=result) == 65133).all()
        assert (tw.matmul(a, ones[:, None], dtype=result) == 65133).all()


def test_B4_B6_offsets_beyond_32_bits(rng: Any) -> None:
    import cupy

    buffer = cupy.zeros(2**31 + 4096, np.int8)
    values = cupy.asarray(rng.integers(-9, 9, 8192), dtype=np.int8)
    buffer[:4096], buffer[-4096:] = values[:4096], values[4096:]
    a, b = buffer[-4096:].reshape(64, 64), buffer[:4096].reshape(64, 64)
    assert np.array_equal(tw.matmul(a, b).get(), exact_integers(a.get(), b.get(), np.int8))
    del buffer, a, b
    a = cupy.zeros((2, 49152, 65536), np.int8)
    a[:, 0], a[:, -1] = 1, 2
    c = tw.matmul(a, cupy.ones((65536, 16), np.int8), dtype=np.int32)
    assert (c[:, 0] == 65536).all()
    assert (c[:, -1] == 131072).all()
    assert not c[:, 1:-1].any()


def test_B3_B5_dimensions_and_results_beyond_32_bits(rng: Any) -> None:
    import cupy
    import torch

    wide = cupy.ones((2, 2**31), np.float16)
    assert (tw.matmul(cupy.ones((1, 2), np.float16), wide) == 2).all()
    del wide
    cupy.get_default_memory_pool().free_all_blocks()
    a = torch.randint(-2, 3, (73728, 128), device="cuda").to(torch.bfloat16)
    b = torch.randint(-2, 3, (128, 36864), device="cuda").to(torch.bfloat16)
    c = tw.matmul(a, b)
    for row in (0, 58254, 73727):
        assert torch.equal(
            c[row].double(), (a[row].double() @ b.double()).to(torch.bfloat16).double()
        )


def test_B9_misaligned_operands(rng: Any) -> None:
    for dtype in ("float16", "float32", "float64"):
        a, b = small_integers(rng, (33, 40), dtype), small_integers(rng, (40, 24), dtype)
        for start in range(17):
            padded = np.zeros(start + a.size, dtype)
            padded[start:] = a.ravel()
            view = padded[start:].reshape(a.shape)
            assert (download(tw.matmul(upload(view), upload(b))) == exact(a, b)).all()


def test_B10_B11_shapes_that_crash_fast_kernels(rng: Any) -> None:
    for dtype, (m, n, k) in itertools.product(
        (BF16, E4M3),
        (
            (32, 8192, 8192),
            (512, 1024, 14745),
            (1536, 256, 2048),
            (2048, 768, 4096),
            (5, 2, 768),
            (8352, 1536, 1024),
            (2, 5, 3),
        ),
    ):
        a = rng.standard_normal((m, k), np.float32).astype(dtype)
        b = rng.standard_normal((k, n), np.float32).astype(dtype)
        got = download(tw.matmul(upload(a), upload(b), dtype=np.float32)).astype(float)
        plan = tw.plan(upload(a), upload(b), dtype=np.float32)
        size = np.abs(a.astype(np.float64)) @ np.abs(b.astype(np.float64))
        assert (abs(got - exact(a, b)) <= plan.bound.of(size)).all(), (dtype, m, n, k)


def test_B13_B14_B15_broadcasts_transposes_and_nothing(rng: Any) -> None:
    import cupy

    row = cupy.asarray(small_integers(rng, (300,), np.float32))
    a = cupy.asarray(small_integers(rng, (40, 300), np.float32))
    for b in (
        cupy.broadcast_to(row[:, None], (300, 300)),
        cupy.broadcast_to(row, (300, 300)),
        cupy.broadcast_to(cupy.ones((), np.float32), (300, 300)),
    ):
        assert (tw.matmul(a, b).get() == exact(a.get(), b.get())).all()
    cube = cupy.asarray(small_integers(rng, (6, 6, 6), np.float32))
    for order in ((0, 2, 1), (2, 1, 0), (1, 0, 2)):
        view = cube.transpose(order)
        assert (tw.matmul(view, cube).get() == exact(view.get(), cube.get())).all()
    for shapes in (((0, 5, 3), (0, 3, 4)), ((0, 2100), (2100, 2100)), ((4, 7), (7, 0))):
        got = tw.matmul(*(cupy.ones(shape, np.float32) for shape in shapes))
        assert got.shape == np.matmul(*(np.ones(shape) for shape in shapes)).shape
    assert not tw.matmul(cupy.ones((4, 0)), cupy.ones((0, 3))).any()


def test_batches_of_many_axes(rng: Any) -> None:
    for dtype in ("float32", "float16", "int32"):
        a = small_integers(rng, (2, 3, 4, 2, 9, 8), dtype)[:, ::-1, ::2]
        b = small_integers(rng, (3, 1, 2, 8, 7), dtype)
        assert (multiply_view(a, b) == exact(a, b)).all()
        many = small_integers(rng, (70000, 4, 3), dtype)
        assert (
            multiply_view(many, many[:1].swapaxes(1, 2)) == exact(many, many[:1].swapaxes(1, 2))
        ).all()


@pytest.mark.parametrize(
    ("a_type", "b_type", "expected"),
    [
        ("float32", "float64", "float64"),
        ("float16", "float32", "float32"),
        ("int8", "float32", "float32"),
        ("complex64", "float64", "complex128"),
        ("uint8", "int8", "int16"),
        ("bool", "int8", "int8"),
    ],
)
def test_B18_mixed_types_promote(rng: Any, a_type: str, b_type: str, expected: str) -> None:
    a, b = small_integers(rng, (9, 30), a_type), small_integers(rng, (30, 8), b_type)
    got = multiply(a, b)
    assert got.dtype == np.dtype(expected)
    assert (got == np.matmul(a.astype("complex128"), b.astype("complex128"))).all()


def test_B19_vectors(rng: Any) -> None:
    for dtype in ("float64", "float16", "int64"):
        for shapes in (
            ((7,), (7,)),
            ((5, 7), (7,)),
            ((7,), (7, 6)),
            ((4, 3, 2), (2,)),
            ((2,), (5, 2, 3)),
        ):
            x, y = (small_integers(rng, shape, dtype) for shape in shapes)
            got = download(tw.matmul(upload(x), upload(y)))
            assert (got == np.matmul(x.astype(float), y.astype(float))).all()


def test_B21_B22_random_products_and_refusals_between(rng: Any) -> None:
    import cupy

    types = ["float16", "float32", "float64", "complex64", "int8", "uint16", "int32", "int64"]
    for _ in range(400):
        m, n, k = (int(size) for size in rng.integers(0, 300, 3))
        dtype = types[rng.integers(len(types))]
        a, b = small_integers(rng, (m, k), dtype), small_integers(rng, (k, n), dtype)
        if rng.random() < 0.5:
            a = np.asfortranarray(a)
        if rng.random() < 0.5:
            b = np.asfortranarray(b)
        got = multiply(a, b)
        assert (got == as_result(exact(a, b), dtype)).all(), (dtype, m, n, k)
        if rng.random() < 0.1:
            with pytest.raises(ShapeError):
                tw.matmul(cupy.ones((3, 4)), cupy.ones((5, 6)))


def test_E1_E4_float32_is_float32(rng: Any) -> None:
    import cupy

    assert tw.matmul(cupy.asarray([1024.5], np.float32), cupy.ones((1, 1), np.float32))[0] == 1024.5
    a = (50 * rng.random((100_000, 4))).astype(np.float32)
    b = (50 * rng.random((4, 4))).astype(np.float32)
    assert within_bound(download(tw.matmul(upload(a), upload(b))), a, b)
    a, b = (rng.standard_normal((512, 512)).astype(np.float32) for _ in range(2))
    got = download(tw.matmul(upload(a), upload(b)))
    assert np.linalg.norm(got - exact(a, b)) <= 1e-6 * np.linalg.norm(exact(a, b))


def test_E6_E13_E16_no_overflow_on_the_way_no_lost_range_no_reduced_complex(rng: Any) -> None:
    ones = np.ones((3, 4096), np.float16)
    b = np.repeat(np.array([64, -64], np.float16), 2048)[:, np.newaxis]
    assert not download(tw.matmul(upload(ones), upload(b))).any()
    a, b = np.array([[1e200, 1e-200]]), np.array([[1e-200], [1e200]])
    assert download(tw.matmul(upload(a), upload(b)))[0, 0] == 2.0
    z = (rng.standard_normal((256, 256)) + 1j * rng.standard_normal((256, 256))).astype("F")
    assert within_bound(download(tw.matmul(upload(z), upload(z))), z, z)


@pytest.mark.parametrize("dtype", ["float16", BF16, "float32", "float64", E4M3], ids=str)
@pytest.mark.parametrize("k", [64, 777, 20000])
def test_E9_E17_bits_depend_on_row_column_and_k_alone(rng: Any, dtype: Any, k: int) -> None:
    a = upload(rng.standard_normal((300, k)).astype(dtype))
    b = upload(rng.standard_normal((k, 260)).astype(dtype))
    whole = download(tw.matmul(a, b, dtype=np.float32 if dtype != "float64" else None))

    def bits(x: Any, y: Any) -> bytes:
        wide = np.float32 if dtype != "float64" else None
        return download(tw.matmul(x, y, dtype=wide)).tobytes()

    assert {bits(a, b) for _ in range(5)} == {whole.tobytes()}
    for row in (0, 17, 299):
        assert bits(a[row : row + 1], b) == whole[row].tobytes()
        assert bits(a[row], b) == whole[row].tobytes()
    assert bits(a[100:164], b[:, 40:140]) == np.ascontiguousarray(whole[100:164, 40:140]).tobytes()
    assert bits(a[:, :].reshape(3, 100, k), b) == whole.tobytes()


def test_the_plan_says_what_ran() -> None:
    import cupy

    a = cupy.ones((256, 256), np.float16)
    plan = tw.plan(a, a)
    assert plan.device == "cuda:0"
    assert plan.bits.startswith("K alone")
    assert "kernels" in str(plan)
    assert (plan(a, a) == 256).all()
    out = cupy.empty((256, 256), np.float16)
    again = tw.plan(a, a, out=out)
    assert again(a, a, out=out) is out
    assert (out == 256).all()


def test_host_operands_go_to_a_gpu_that_is_asked_for(rng: Any) -> None:
    for dtype in ("float32", "float16", "int32"):
        a, b = small_integers(rng, (3, 90, 70), dtype), small_integers(rng, (70, 50), dtype)
        got = tw.matmul(a[:, ::-1], b, devices="cuda:0")
        assert type(got) is np.ndarray
        assert (got == exact(a[:, ::-1], b)).all()
        wide = np.broadcast_to(b[:, :1], (70, 50))
        assert (tw.matmul(a, wide, devices="cuda:0") == exact(a, wide)).all()


def test_verify_checks_device_results(rng: Any) -> None:
    a = upload(rng.standard_normal((300, 200)).astype(np.float32))
    assert tw.matmul(a, a.T, verify=True).shape == (300, 300)


def test_margins_of_operands_are_not_touched(rng: Any) -> None:
    a, buffer = guarded(small_integers(rng, (33, 17), np.float32))
    x = upload(a)
    tw.matmul(x, x.T)
    assert (download(x) == a).all()
    assert margins_are_whole(a, buffer)
