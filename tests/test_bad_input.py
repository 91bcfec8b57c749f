"""Case group B on host arrays: crashes, limits, and input that must be refused before any work."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import tilewise as tw
from tests.support import (
    INTEGERS,
    exact_integers,
    guarded,
    margins_are_whole,
    small_integers,
    within_bound,
)
from tilewise.errors import BudgetError, DeviceError, DTypeError, OptionError, ShapeError

BF16 = np.dtype(ml_dtypes.bfloat16)
E4M3 = np.dtype(ml_dtypes.float8_e4m3fn)
ONES = np.ones((2, 2))
SHAPE = SimpleNamespace(shape=(2, 2), dtype=np.dtype("f8"))  #: which `plan` takes


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(11)


@pytest.mark.slow
def test_B1_more_than_2_to_the_31_elements() -> None:
    a = np.ones((35783, 65133), np.int8)
    ones = np.ones(65133, np.int8)
    assert (tw.matmul(a, ones, dtype=np.int32) == 65133).all()
    assert (tw.matmul(a, ones[:, np.newaxis], dtype=np.int32) == 65133).all()
    a = np.ones((35783, 65133), np.float32)
    assert (tw.matmul(a, np.ones(65133, np.float32)) == 65133).all()


@pytest.mark.slow
def test_B3_a_dimension_above_2_to_the_31() -> None:
    long = 2**31
    row = np.ones((1, 2), np.float16)
    wide = np.ones((2, long), np.float16)
    assert (tw.matmul(row, wide) == 2).all()
    del wide
    tall = np.ones((long + 1, 1), np.float16)
    assert (tw.matmul(tall, np.ones((1, 1), np.float16)) == 1).all()
    del tall
    deep = np.zeros((1, long + 2), np.int8)
    assert tw.matmul(deep, deep.T)[0, 0] == 0


@pytest.mark.slow
def test_B4_batch_strides_beyond_32_bits() -> None:
    a = np.zeros((2, 49152, 65536), np.int8)
    a[:, 0] = 1
    a[:, -1] = 2
    b = np.ones((65536, 16), np.int8)
    c = tw.matmul(a, b, dtype=np.int32)
    assert (c[:, 0] == 65536).all()
    assert (c[:, -1] == 2 * 65536).all()
    assert not c[:, 1:-1].any()


@pytest.mark.slow
def test_B6_data_beyond_element_2_to_the_31(rng: Any) -> None:
    buffer = np.zeros(2**31 + 4096, np.int8)
    buffer[:4096] = rng.integers(-9, 9, 4096)
    buffer[-4096:] = rng.integers(-9, 9, 4096)
    a, b = buffer[-4096:].reshape(64, 64), buffer[:4096].reshape(64, 64)
    assert np.array_equal(tw.matmul(a, b), exact_integers(a, b, np.int8))


def test_B9_addresses_that_no_vector_load_likes(rng: Any) -> None:
    for dtype in (E4M3, np.float16, np.float32, np.float64):
        a, b = small_integers(rng, (33, 40), dtype), small_integers(rng, (40, 24), dtype)
        expected = a.astype(float) @ b.astype(float)
        item = np.dtype(dtype).itemsize
        for start in range(17):
            elements = np.zeros(start + a.size, dtype)
            elements[start:] = a.ravel()
            assert (tw.matmul(elements[start:].reshape(a.shape), b) == expected).all()
            raw = np.zeros(start + a.nbytes, np.uint8)
            raw[start:] = a.view(np.uint8).ravel()
            assert (tw.matmul(raw[start:].view(dtype).reshape(a.shape), b) == expected).all()
        assert item * a.size == a.nbytes


@pytest.mark.parametrize(
    ("m", "n", "k"),
    [
        (32, 8192, 2048),
        (512, 1024, 9216),
        (1536, 256, 2048),
        (2048, 768, 1024),
        pytest.param(32, 8192, 8192, marks=pytest.mark.slow),
        pytest.param(512, 1024, 147456, marks=pytest.mark.slow),
        pytest.param(2048, 768, 4096, marks=pytest.mark.slow),
        pytest.param(768, 1536, 4096, marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("dtype", [BF16, E4M3], ids=str)
def test_B10_legal_shapes_that_crash_fast_kernels(
    rng: Any, dtype: Any, m: int, n: int, k: int
) -> None:
    a = rng.standard_normal((m, k), np.float32).astype(dtype)
    b = rng.standard_normal((k, n), np.float32).astype(dtype)
    assert within_bound(tw.matmul(a, b, dtype=np.float32), a, b)


def test_B11_float8_has_no_size_that_is_refused(rng: Any) -> None:
    for m, k, n in ((835, 409, 153), (5, 768, 2), (2, 3, 5), (257, 16, 1)):
        a, a_buffer = guarded(rng.standard_normal((m, k)).astype(E4M3))
        b, b_buffer = guarded(rng.standard_normal((k, n)).astype(E4M3))
        got = tw.matmul(a, b)
        assert got.dtype == np.float32
        assert within_bound(got, a, b)
        assert margins_are_whole(a, a_buffer)
        assert margins_are_whole(b, b_buffer)


def test_B12_no_shape_ends_the_process() -> None:
    program = """
import numpy as np, tilewise as tw
rng = np.random.default_rng(0)
shapes = [(64, 14688, 1536)] + [
    (int(rng.integers(1, 80)), 1468 + int(rng.integers(-9, 9)), 153 + int(rng.integers(-9, 9)))
    for _ in range(60)
]
for m, k, n in shapes:
    assert not tw.matmul(np.zeros((m, k), np.float16), np.zeros((k, n), np.float16)).any()
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=100, check=False
    )
    assert done.returncode == 0, done.stderr


def test_B13_broadcast_operands_are_taken_and_never_expanded(rng: Any) -> None:
    import tracemalloc

    column = small_integers(rng, (3000,), np.float32)
    matrix = small_integers(rng, (40, 3000), np.float32)
    for b in (
        np.broadcast_to(column[:, np.newaxis], (3000, 3000)),
        np.broadcast_to(column, (3000, 3000)),
        np.broadcast_to(np.float32(2), (3000, 3000)),
    ):
        memory = 40 * 3000 * 4 + (4 << 20)
        tracemalloc.start()
        got = tw.matmul(matrix, b, memory=memory)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert np.array_equal(got, matrix.astype(float) @ b.astype(float))
        assert peak < memory + (1 << 20)  # 36 MB if the operand were expanded


def test_B14_every_transpose(rng: Any) -> None:
    a = small_integers(rng, (20, 20), np.float32)
    b = small_integers(rng, (20, 20), np.float32)
    for x in (a, a.T):
        for y in (b, b.T):
            assert np.array_equal(tw.matmul(x, y), x.astype(float) @ y.astype(float))
    cube = small_integers(rng, (6, 6, 6), np.float32)
    for order in ((0, 2, 1), (2, 1, 0), (1, 0, 2)):
        view = cube.transpose(order)
        expected = np.matmul(view.astype(float), cube.astype(float))
        assert np.array_equal(tw.matmul(view, cube), expected)


def test_B15_empty_operands_give_empty_results() -> None:
    for dtype in ("float32", "float16", "int32", "bool"):
        for a, b, expected in (
            ((0, 5, 3), (0, 3, 4), (0, 5, 4)),
            ((0, 2100), (2100, 2100), (0, 2100)),
            ((4, 7), (7, 0), (4, 0)),
        ):
            assert tw.matmul(np.ones(a, dtype), np.ones(b, dtype)).shape == expected
        assert not tw.matmul(np.ones((4, 0), dtype), np.ones((0, 3), dtype)).any()


def test_an_empty_out_of_any_kind_is_taken() -> None:
    class Mine(np.ndarray[Any, Any]):
        owner = "me"

    for shape in ((0, 3), (4, 3)):
        out = np.full(shape, np.nan).view(Mine)
        assert tw.matmul(np.ones((shape[0], 2)), np.ones((2, 3)), out=out) is out
        assert (out == 2).all()


@pytest.mark.parametrize(
    ("a", "b", "words"),
    [
        ((5, 3, 1), (3, 1, 4), r"batch axes.*\(5,\) against \(3,\)"),
        (
            (3, 4),
            (5, 6),
            r"a \(shape \(3, 4\).*b \(shape \(5, 6\).*a has 4.*axis 0 of b has 5",
        ),
        ((3,), (4,), "axis 0 of a has 3 elements and axis 0 of b has 4"),
        ((2, 3, 4), (2, 5, 4), "axis 2 of a has 4 elements and axis 1 of b has 5"),
        ((), (3, 3), "a is a scalar"),
        ((3, 3), (), "b is a scalar"),
    ],
)
def test_B16_shapes_that_do_not_go_together(a: Any, b: Any, words: str) -> None:
    for dtype in ("float64", "float16", "int32"):
        with pytest.raises(ShapeError, match=words) as caught:
            tw.matmul(np.ones(a, dtype), np.ones(b, dtype))
        assert isinstance(caught.value, ValueError)
    assert (tw.matmul(ONES, ONES) == 2).all()


@pytest.mark.parametrize("dtype", INTEGERS)
def test_B17_integer_products(rng: Any, dtype: str) -> None:
    info = np.iinfo(dtype)
    low, high = max(info.min, -(10**6)), min(info.max, 10**6)
    a = rng.integers(low, high, (300, 400), dtype=dtype, endpoint=True)
    b = rng.integers(low, high, (400, 50), dtype=dtype, endpoint=True)
    with np.errstate(over="ignore"):
        assert np.array_equal(tw.matmul(a, b), np.matmul(a, b))


def test_B17_bool_is_or_and(rng: Any) -> None:
    a, b = rng.random((300, 400)) < 0.01, rng.random((400, 50)) < 0.01
    got = tw.matmul(a, b)
    assert got.dtype == bool
    assert np.array_equal(got, np.matmul(a, b))


def test_B19_vector_operands(rng: Any) -> None:
    for dtype in ("float64", "float16", "int64"):
        for a, b, shape in (
            ((7,), (7,), ()),
            ((5, 7), (7,), (5,)),
            ((7,), (7, 6), (6,)),
            ((4, 3, 2), (2,), (4, 3)),
            ((2,), (5, 2, 3), (5, 3)),
        ):
            x, y = small_integers(rng, a, dtype), small_integers(rng, b, dtype)
            got = tw.matmul(x, y)
            assert got.shape == shape
            assert (got == np.matmul(x.astype(float), y.astype(float))).all()


def test_B20_a_long_thin_float16_operand() -> None:
    tall = np.ones((8388353, 1), np.float16)
    assert (tw.matmul(tall, np.ones((1, 2), np.float16)) == 1).all()
    assert not tw.matmul(np.zeros_like(tall), np.ones((1, 2), np.float16)).any()


def random_products(seed: int, count: int, largest: int) -> None:
    rng = np.random.default_rng(seed)
    types = ["float16", BF16, "float32", "float64", "complex64", "int8", "uint16", "int32", "int64"]
    for _ in range(count):
        m, n, k = (int(size) for size in rng.integers(0, largest, 3))
        dtype = types[rng.integers(len(types))]
        operands = []
        for shape in ((m, k), (k, n)):
            x = small_integers(rng, shape, dtype)
            if rng.random() < 0.5:
                x = np.asfortranarray(x)
            if rng.random() < 0.3 and min(shape):
                x = x[::-1] if rng.random() < 0.5 else x[:, ::-1]
            operands.append(guarded(x, margin=int(rng.integers(1, 4)))[0])
        a, b = operands
        wide = np.complex128 if dtype == "complex64" else np.float64
        expected = np.matmul(a.astype(wide), b.astype(wide))
        assert (tw.matmul(a, b).astype(wide) == _wrapped(expected, dtype)).all(), (seed, m, n, k)


def _wrapped(values: Any, dtype: Any) -> Any:
    if np.dtype(dtype).kind in "iu":
        return values.astype(np.int64).astype(dtype).astype(float)
    return values.astype(dtype).astype(values.dtype)


def test_B21_many_random_products_in_one_process() -> None:
    random_products(seed=1, count=150, largest=120)


@pytest.mark.slow
def test_B21_two_thousand_random_products() -> None:
    random_products(seed=2, count=2000, largest=700)


BOUND = tw.plan(ONES, ONES).bound
REFUSED: list[tuple[Callable[[], Any], type[Exception], str]] = [
    (lambda: tw.matmul(np.ones((3, 4)), np.ones((5, 6))), ShapeError, "axis 1 of a"),
    (lambda: tw.matmul(np.float64(3), ONES), ShapeError, "a is a scalar"),
    (lambda: tw.matmul([[1, 2], [3]], ONES), ShapeError, "a is not a rectangular array"),
    (lambda: tw.matmul(np.ones((2, 2), object), ONES), DTypeError, "a has dtype object"),
    (lambda: tw.matmul(ONES, np.array([["x", "y"]] * 2)), DTypeError, "b has dtype <U1.*text"),
    (lambda: tw.matmul(ONES, np.array([[b"x"] * 2] * 2)), DTypeError, "b has dtype .*text"),
    (lambda: tw.matmul(np.zeros((2, 2), "f4,f4"), ONES), DTypeError, "one of its fields"),
    (lambda: tw.matmul(np.zeros((2, 2), "M8[s]"), ONES), DTypeError, "dates or times"),
    (lambda: tw.matmul(np.zeros((2, 2), "V2"), ONES), DTypeError, "ml_dtypes.bfloat16"),
    (lambda: tw.matmul(ONES.view(np.matrix), ONES), DTypeError, "np.matrix"),
    (lambda: tw.matmul(np.ma.masked_array(ONES, ONES > 1), ONES), DTypeError, r"a.filled\(0\)"),
    (lambda: tw.matmul(ONES, ONES, out=np.ma.zeros((3, 3))), DTypeError, "Pass out.data"),
    (lambda: tw.matmul(None, ONES), DTypeError, "a .NoneType. is not an array"),
    (lambda: tw.matmul(SHAPE, ONES), DTypeError, "a .SimpleNamespace. is not an array"),
    (lambda: tw.matmul(ONES, {}), DTypeError, "b .dict. is not an array"),
    (lambda: tw.matmul(ONES, ONES, dtype=np.int32), DTypeError, "does not become int32"),
    (lambda: tw.matmul(1j * ONES, ONES, dtype=float), DTypeError, "does not become float64"),
    (lambda: tw.matmul(ONES, ONES, dtype="nonsense"), OptionError, "dtype='nonsense'"),
    (lambda: tw.matmul(ONES, ONES, dtype="a"), OptionError, "dtype='a' is not an element type"),
    (lambda: tw.matmul(ONES, ONES, dtype=object), DTypeError, "such as 'float64'"),
    (lambda: tw.matmul(ONES, ONES, dtype=ONES), OptionError, r"dtype=array\(\[\[1., 1.\], \["),
    (lambda: tw.matmul(ONES, ONES, precision="half"), OptionError, "precision='half'"),
    (lambda: tw.matmul(ONES, ONES, precision="tf32"), OptionError, "for float32"),
    (lambda: tw.matmul(ONES, ONES, memory=float("nan")), OptionError, "memory=nan"),
    (lambda: tw.matmul(ONES, ONES, memory=-1), OptionError, "memory=-1"),
    (lambda: tw.matmul(ONES, ONES, memory="2 flops"), OptionError, "'2 flops'"),
    (lambda: tw.matmul(ONES, ONES, memory="120%"), OptionError, "'120%'"),
    (lambda: tw.matmul(ONES, ONES, memory=True), OptionError, "memory=True"),
    (lambda: tw.matmul(ONES, ONES, memory=31), BudgetError, "takes 32 B.*allows 31 B"),
    (lambda: tw.matmul(ONES, ONES, devices="cuda:9"), DeviceError, "cuda:9"),
    (lambda: tw.matmul(ONES, ONES, devices=[]), OptionError, "devices="),
    (lambda: tw.matmul(ONES, ONES, devices=3), OptionError, "devices=3"),
    (lambda: tw.matmul(ONES, ONES, devices=["cpu", "cpu"]), OptionError, "a device twice"),
    (lambda: tw.matmul(ONES, ONES, stream=object()), OptionError, "stream="),
    (lambda: tw.matmul(ONES, ONES, out=np.ones((3, 1))), ShapeError, "out "),
    (lambda: tw.matmul(ONES, ONES, out=np.ones((2, 2), "f4")), DTypeError, "out "),
    (lambda: tw.matmul([ONES], [ONES, ONES]), ShapeError, "two lists"),
    (lambda: tw.gemm(ONES, ONES, np.ones((3, 3))), ShapeError, "c .*exactly"),
    (lambda: tw.gemm(ONES, ONES, np.ones((2, 2), "f4")), DTypeError, "c .*convert the operands"),
    (lambda: tw.gemm(ONES, ONES, ONES.copy(), alpha="2"), OptionError, "alpha="),
    (lambda: tw.gemm(ONES, ONES, ONES.copy(), beta=1j), OptionError, "beta="),
    (lambda: tw.gemm(*[np.ones((2, 2), int)] * 3, alpha=0.5), OptionError, "alpha=0.5"),
    (lambda: tw.check(ONES, np.ones((3, 3)), ONES), ShapeError, "axis 1 of a has 2 elements"),
    (lambda: tw.check(np.ones(()), ONES, ONES), ShapeError, "a is a scalar"),
    (lambda: tw.check([ONES], [ONES], [ONES]), OptionError, "a is a list of arrays"),
    (lambda: tw.check(ONES, ONES, ONES, bound=tw.plan(ONES, ONES)), OptionError, r"\).bound"),
    (lambda: tw.check(*[ONES > 1] * 3, bound=BOUND), OptionError, "allows rounding, and c .bool"),
    (lambda: tw.plan(ONES, np.ones((3, 3))), ShapeError, "axis"),
    (lambda: tw.plan(ONES, ONES)(ONES, ONES.astype("f4")), ShapeError, "not what this plan is for"),
    (lambda: tw.plan(ONES, ONES)(ONES.T, ONES), ShapeError, "strides"),
]


@pytest.mark.parametrize(("call", "error", "words"), REFUSED)
def test_bad_input_is_refused_by_name(call: Callable[[], Any], error: Any, words: str) -> None:
    with pytest.raises(error, match=words) as caught:
        call()
    assert isinstance(caught.value, tw.TilewiseError)
    assert "\n" not in str(caught.value)


def test_B22_the_next_product_works_after_every_refusal(rng: Any) -> None:
    a = small_integers(rng, (64, 64), np.float32)
    expected = a.astype(float) @ a.astype(float)
    for _ in range(20):
        for call, error, _words in REFUSED:
            with pytest.raises(error):
                call()
            assert np.array_equal(tw.matmul(a, a), expected)


def test_a_result_larger_than_the_machine_is_refused_with_numbers_and_the_way_out() -> None:
    tall = np.broadcast_to(np.float32(1), (10**7, 3))
    with pytest.raises(BudgetError, match=r"363.80 TiB.*np.memmap") as caught:
        tw.matmul(tall, tall.T)
    assert isinstance(caught.value, MemoryError)


@pytest.mark.parametrize(
    ("name", "wider"),
    [
        ("int4", "int8"),
        ("uint2", "int8"),
        ("float4_e2m1fn", "float32"),
        ("float8_e8m0fnu", "float32"),
    ],
)
def test_types_without_a_product_are_told_which_one_holds_them(name: str, wider: str) -> None:
    narrow = np.ones((2, 2)).astype(getattr(ml_dtypes, name))
    with pytest.raises(DTypeError, match=rf"has dtype {name}.*\.astype\(np\.{wider}\)"):
        tw.matmul(narrow, narrow)
    assert (tw.matmul(narrow.astype(wider), narrow.astype(wider)) == 2).all()


class Broken:
    """An object that says to be an array, and raises what it likes when it is read."""

    def __array__(self, dtype: Any = None, copy: Any = None) -> Any:
        raise RuntimeError("nothing here")


NESTED: list[Any] = []
NESTED.append(NESTED)
NO_ARRAYS = {
    "ragged": [[1, 2], [3]],
    "ragged within": [[[1, 2], [3, 4]], [[1, 2], [3]]],
    "itself": NESTED,
    "None": None,
    "names": [["a", "b"], ["c", "d"]],
    "objects": np.array([[1, None], [2, 3]], object),
    "masked": np.ma.masked_array(ONES, ONES > 2),
    "np.matrix": ONES.view(np.matrix),
    "dates": np.zeros((2, 2), "M8[s]"),
    "records": np.zeros((2, 2), "i4,f4"),
    "a mapping": {"a": 1},
    "a number": 3.0,
    "a module": np,
    "broken": Broken(),
}
CALLS: dict[str, Callable[[Any], Any]] = {
    "matmul a": lambda x: tw.matmul(x, ONES),
    "matmul b": lambda x: tw.matmul(ONES, x),
    "matmul group": lambda x: tw.matmul([ONES], [x]),
    "gemm a": lambda x: tw.gemm(x, ONES, ONES.copy()),
    "gemm c": lambda x: tw.gemm(ONES, ONES, x),
    "check a": lambda x: tw.check(x, ONES, ONES),
    "check b": lambda x: tw.check(ONES, x, ONES),
    "check c": lambda x: tw.check(ONES, ONES, x),
    "explain": lambda x: tw.explain(tw.guide.naive, 1, 2, x, ONES, 2, 2, ONES),
}


@pytest.mark.parametrize(
    ("call", "name"),
    # explain looks at no more of an np.matrix than at any array.
    [(c, n) for c in CALLS for n in NO_ARRAYS if (c, n) != ("explain", "np.matrix")],
)
def test_what_is_no_array_of_numbers_is_refused_by_every_call(call: str, name: str) -> None:
    with pytest.raises(tw.TilewiseError) as caught:
        CALLS[call](NO_ARRAYS[name])
    assert str(caught.value)


@pytest.mark.parametrize("value", [*NO_ARRAYS.values(), "abc", ONES, 2j])
@pytest.mark.parametrize("scalar", ["alpha", "beta"])
def test_a_scale_that_is_no_number_leaves_c_alone(scalar: str, value: Any) -> None:
    c = ONES.copy()
    if type(value) is float:
        value = [value]
    with pytest.raises(OptionError, match=f"{scalar}="):
        tw.gemm(ONES, ONES, c, **{scalar: value})
    assert (c == 1).all()


@pytest.mark.parametrize("claims", [3, "races", [None], tw.explain, [[]]])
def test_what_is_no_claim_is_refused(claims: Any) -> None:
    with pytest.raises(OptionError, match="claim"):
        tw.explain(tw.guide.naive, 1, 2, ONES, ONES, 2, 2, ONES, claims=claims)
    with pytest.raises(OptionError, match="target"):
        tw.explain(tw.guide.naive, 1, 2, ONES, ONES, 2, 2, ONES, target=[claims])
