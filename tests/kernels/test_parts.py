"""Products cut into parts: each part of C once, from the right places, within the workspace."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tilewise.errors import BudgetError
from tilewise.kernels.parts import in_parts
from tilewise.kernels.steps import Choice, Pointer, Product, Step, Strides

ITEMS = (8, 8, 8)


def packed(p: Product, most: float, *, spare: bool = False) -> Choice:
    """Return a way that copies both operands; with ``spare``, one of no workspace, if need be."""
    stacks = [math.prod(x.stack(p.outer, p.inner)) for x in (p.a, p.b)]
    needed = 8 * p.k * (stacks[0] * p.m + stacks[1] * p.n)
    is_spare = spare and needed > most
    arguments = {
        **{name: Pointer(i) for i, name in enumerate("abc")},
        **{name: getattr(p, name) for name in ("outer", "inner", "m", "n", "k")},
        **p.a.arguments("a"),
        **p.b.arguments("b"),
        **p.c.arguments("c"),
    }
    return Choice(
        steps=(Step.of("spare" if is_spare else "multiply", 1, arguments),),
        workspace_bytes=0 if is_spare else needed,
        expected_us=p.outer * p.inner * p.m * p.n * (1000.0 if is_spare else 1.0),
        why="packed",
    )


def carried_out(choice: Choice, buffers: list[np.ndarray]) -> None:
    """Do what the launches say, adding to C."""
    for step in choice.steps:
        x = step.arguments
        a, b, c = (
            np.lib.stride_tricks.as_strided(
                buffers[i][x[name].offset_bytes // 8 :],
                (x["outer"], x["inner"], *sides),
                [8 * x[f"{name}_{axis}"] for axis in ("outer", "inner", "row", "col")],
            )
            for i, (name, sides) in enumerate(
                (("a", (x["m"], x["k"])), ("b", (x["k"], x["n"])), ("c", (x["m"], x["n"])))
            )
        )
        c += a @ b


@given(
    st.integers(1, 3),
    st.integers(1, 4),
    st.integers(1, 600),
    st.integers(1, 600),
    st.integers(1, 5),
    st.booleans(),
    st.integers(1, 30),
)
def test_every_element_is_computed_once_from_its_row_and_column(
    outer: int, inner: int, m: int, n: int, k: int, is_shared: bool, share: int
) -> None:
    rng = np.random.default_rng(m * n)
    a = rng.integers(-9, 9, (outer, inner, k, m)).astype(float).swapaxes(-1, -2)
    b = rng.integers(-9, 9, (1 if is_shared else outer, inner, k, n)).astype(float)
    c = np.zeros((outer, inner, m, n + 3))
    strides = [Strides(*(step // 8 for step in x.strides)) for x in (a, b, c)]
    if is_shared:
        strides[1] = replace(strides[1], outer=0)
    p = Product(m=m, n=n, k=k, a=strides[0], b=strides[1], c=strides[2], outer=outer, inner=inner)
    limit = packed(p, math.inf).workspace_bytes // share
    try:
        choice = in_parts(p, ITEMS, limit, packed)
    except BudgetError:
        assert share > 1
        choice = in_parts(p, ITEMS, limit, partial(packed, spare=True))
    assert choice.workspace_bytes <= limit
    carried_out(choice, [a.base.reshape(-1), b.reshape(-1), c.reshape(-1)])
    np.testing.assert_array_equal(c[..., :n], a @ b)
    assert not c[..., n:].any()


def test_what_is_not_aligned_in_every_part_is_known() -> None:
    seen = set()

    def fastest(p: Product, most: float) -> Choice:
        seen.add((p.inner, p.m, p.a.is_aligned, p.c.is_aligned))
        return packed(p, most)

    p = Product(
        m=140,
        n=3,
        k=7,
        a=Strides(0, 1001, 7, 1),
        b=Strides(0, 0, 3, 1),
        c=Strides(0, 420, 3, 1),
        inner=2,
    )
    in_parts(p, ITEMS, packed(replace(p, m=128, inner=1), math.inf).workspace_bytes, fastest)
    # The second matrix begins at 1001 elements of 8 bytes, its row 128 as far on as before.
    assert {(2, 140, True, True), (1, 140, True, True), (1, 12, True, True)} <= seen
    assert {(1, 140, False, True), (1, 12, False, True)} <= seen
    assert not any(inner == 2 and not is_aligned for inner, _, is_aligned, _ in seen)


def test_the_axis_that_takes_most_is_cut() -> None:
    p = Product(
        m=4096,
        n=256,
        k=10,
        a=Strides(0, 40960, 10, 1),
        b=Strides(0, 0, 256, 1),
        c=Strides(0, 4096 * 256, 256, 1),
    )
    whole = packed(p, math.inf).workspace_bytes
    choice = in_parts(p, ITEMS, whole // 2 + 8 * 10 * 256, packed)
    assert [step.arguments["m"] for step in choice.steps] == [2048, 2048]
    shared = replace(p, m=64, n=8192, b=Strides(0, 0, 8192, 1), inner=50)
    choice = in_parts(shared, ITEMS, packed(shared, math.inf).workspace_bytes * 0.7, packed)
    assert {(step.arguments["inner"], step.arguments["n"]) for step in choice.steps} == {(50, 4096)}


def test_a_refusal_names_the_product_and_what_its_least_part_takes() -> None:
    p = Product(
        m=1000,
        n=1000,
        k=8,
        a=Strides(0, 0, 8, 1),
        b=Strides(0, 0, 1000, 1),
        c=Strides(0, 0, 1000, 1),
    )
    with pytest.raises(BudgetError, match=r"1000x8 by 8x1000 takes at least 16.00 KiB .* 3.00 KiB"):
        in_parts(p, ITEMS, 3 << 10, packed)
