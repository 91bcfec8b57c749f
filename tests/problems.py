"""Random problems whose results are exact, for any device: shapes, types, strides, batches, out=.

Floats are small whole numbers, so that every sum is exact in every order; integers are uniform over
all that their type holds, and wrap.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
from hypothesis import strategies as st

import tilewise as tw
from tests.support import Array, small_integers

TYPES = (
    *("float16", "float32", "float64", "complex64", "complex128"),
    *(ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2),
    *("int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64", "bool"),
)
#: Around the sides of tiles, and anything else up to a few tiles.
SIZES = st.one_of(
    st.integers(0, 20),
    st.sampled_from([31, 32, 33, 63, 64, 65, 127, 128, 129, 191, 192, 193, 255, 256, 257]),
    st.integers(0, 300),
)
LAYOUTS = ("rows", "columns", "padded", "every second", "reversed", "one for all rows")


@dataclass(frozen=True, slots=True)
class Problem:
    """One product, or one update of c, and where its arrays lie."""

    a_shape: tuple[int, ...]
    b_shape: tuple[int, ...]
    dtype: Any
    layouts: tuple[str, str, str]
    """Of a, b and c; c's is that of ``out=``."""
    shifts: tuple[int, int, int]
    """Elements by which a, b and c begin after an aligned address."""
    factors: tuple[int, int] | None
    """alpha and beta of an update; None: a plain product."""
    gives_out: bool
    seed: int


@st.composite
def problems(draw: st.DrawFn) -> Problem:
    m, n, k = draw(SIZES), draw(SIZES), draw(SIZES)
    batch = draw(st.sampled_from([(), (), (), (3,), (2, 3)]))
    own = [tuple(1 if draw(st.booleans()) else size for size in batch) for _ in range(2)]
    # Two operands of no batch, or a batch that one of them may lack.
    a_batch, b_batch = (own[0], batch) if draw(st.booleans()) else (batch, own[1])
    dtype = np.dtype(draw(st.sampled_from(TYPES)))
    layouts = st.sampled_from(LAYOUTS[:4] if dtype.isbuiltin != 1 else LAYOUTS)
    update = draw(st.booleans()) and dtype.kind != "b" and dtype.itemsize > 1
    return Problem(
        a_shape=(*a_batch, m, k),
        b_shape=(*b_batch, k, n),
        dtype=dtype,
        layouts=(draw(layouts), draw(layouts), draw(st.sampled_from(LAYOUTS[:4]))),
        shifts=(draw(st.integers(0, 3)), draw(st.integers(0, 3)), draw(st.integers(0, 3))),
        factors=(draw(st.integers(0, 3)), draw(st.integers(0, 3))) if update else None,
        gives_out=draw(st.booleans()),
        seed=draw(st.integers(0, 2**32 - 1)),
    )


def check(problem: Problem, there: Callable[[Array], Any], back: Callable[[Any], Array]) -> None:
    """Compute a problem on the device that ``there`` copies to, and compare every element."""
    rng = np.random.default_rng(problem.seed)
    a = placed(random(rng, problem.a_shape, problem.dtype), problem.layouts[0], problem.shifts[0])
    b = placed(random(rng, problem.b_shape, problem.dtype), problem.layouts[1], problem.shifts[1])
    result = tw.plan(a, b).dtype
    product = exact(a, b)
    if problem.factors is None:
        expected = product.astype(result)
        if not problem.gives_out:
            assert same(back(tw.matmul(there(a), there(b))), expected), problem
            return
        c = placed(np.zeros(product.shape, result), problem.layouts[2], problem.shifts[2])
        c[...] = poison(result)
        out = there(c)
        tw.matmul(there(a), there(b), out=out)
    else:
        alpha, beta = problem.factors
        old = random(rng, product.shape, result)
        c = placed(old, problem.layouts[2], problem.shifts[2])
        with np.errstate(over="ignore"):
            expected = (
                product * product.dtype.type(alpha)
                + old.astype(product.dtype) * product.dtype.type(beta)
            ).astype(result)
        if beta == 0:
            c[...] = poison(result)
        out = there(c)
        tw.gemm(there(a), there(b), out, alpha=alpha, beta=beta)
    assert same(back(out), expected), problem


def random(rng: np.random.Generator, shape: tuple[int, ...], dtype: Any) -> Array:
    if np.dtype(dtype).kind in "iu":
        limits = np.iinfo(dtype)
        return rng.integers(limits.min, limits.max, shape, dtype, endpoint=True)
    return small_integers(rng, shape, dtype)


def placed(values: Array, layout: str, shift: int) -> Array:
    """Return the values in a buffer of 0xFF, laid out and shifted as asked."""
    *batch, rows, columns = values.shape
    turned = layout == "columns"
    height, width = (columns, rows) if turned else (rows, columns)
    pitch = width + 5 if layout == "padded" else width
    pitch = 2 * width if layout == "every second" else pitch
    count = int(np.prod(batch, dtype=int)) * height * pitch
    buffer = np.empty(shift + count + 8, values.dtype)
    buffer.view(np.uint8)[...] = 0xFF
    view = buffer[shift : shift + count].reshape(*batch, height, pitch)
    view = view[..., ::2] if layout == "every second" else view[..., :width]
    view = view[..., ::-1, :] if layout == "reversed" else view
    view = view.swapaxes(-1, -2) if turned else view
    if layout == "one for all rows" and rows:
        view[..., :1, :] = values[..., :1, :]
        return np.broadcast_to(view[..., :1, :], values.shape)
    view[...] = values
    return view


def poison(dtype: np.dtype[Any]) -> Any:
    """Return NaN, or -1 in the type's bits, or True."""
    return True if dtype.kind == "b" else np.frombuffer(b"\xff" * dtype.itemsize, dtype)[0]


def exact(a: Array, b: Array) -> Array:
    """Return the product in a type that holds it, or that wraps as its own does."""
    if a.dtype.kind == "b":
        return np.matmul(a.astype(int), b.astype(int)) > 0
    if a.dtype.kind in "iu":
        return np.matmul(a.astype(f"{a.dtype.kind}8"), b.astype(f"{a.dtype.kind}8"))
    wide = np.complex128 if a.dtype.kind == "c" else np.float64
    return np.matmul(a.astype(wide), b.astype(wide))


def same(found: Array, expected: Array) -> bool:
    return (
        found.shape == expected.shape
        and found.dtype == expected.dtype
        and bool((found == expected).all())
    )
