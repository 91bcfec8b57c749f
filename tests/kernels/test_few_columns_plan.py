"""The plan of the kernels for few columns: what they are told makes up the whole product.

No kernel runs here: launches are turned into those of the product transposed, which
``test_skinny_plan`` carries out in NumPy.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.kernels.test_skinny_plan import Memory, add, given_of, multiply, product
from tilewise.kernels.few_columns_plan import (
    MOST_COLUMNS,
    Choice,
    choices,
    choose,
    launches,
    name_of,
    suits,
)
from tilewise.kernels.hopper_float32_plan import Problem
from tilewise.kernels.skinny_table import KERNELS
from tilewise.kernels.steps import LONGEST_CHAIN, Pointer, Room, Step, Tensor

#: What is called otherwise in the product transposed.
SWAPPED = {
    "m": "n",
    "tiles_m": "tiles_n",
    "c_row": "c_col",
    "a": "b",
    "a_flag": "b_flag",
    **{f"a_{name}": f"b_{name}" for name in ("outer", "inner", "next_outer", "next_inner")},
    "a_row": "b_col",
    "a_col": "b_row",
    "a_scale": "b_scale",
}


def transposed(step: Step) -> Step:
    """Return the launch for few rows that does the same to the product transposed."""
    kernel = next(kernel for kernel in KERNELS if name_of(kernel) == step.kernel)
    names = SWAPPED | {other: name for name, other in SWAPPED.items()}
    arguments = {names.get(name, name): x for name, x in step.arguments.items()}
    return replace(step, kernel=kernel.name, arguments=arguments)


def check(p: Problem, a: Memory, b: Memory, c: Memory) -> None:
    """Carry out every choice for the transpose of a product of few rows."""
    few = p.transposed
    rest: dict[str, Any] = {
        **{SWAPPED.get(name, name): x for name, x in given_of(p).items() if name[0] == "a"},
        **{f"a_{name}": given_of(p)[f"b_{name}"] for name in ("next_outer", "next_inner")},
        **{name: Pointer(3) for name in ("a_scale", "b_scale", "a_flag", "b_flag")},
        "alpha": 1.0,
        "beta": 0.0,
        "a": Pointer(0),
        "c": Pointer(2),
    }
    stacked = [slice(None) if step else slice(1) for step in (p.a.outer, p.a.inner)]
    rows = a.view[tuple(stacked)].reshape(-1, p.m, p.k)
    for choice in choices(few):
        c.flat[...] = np.nan
        room = Room()
        steps = launches(few, choice, rest, room)
        sums = Memory((1, 1, 1, room.nbytes // 4 + 1), (0, 0, 0, 1))
        for step in steps:
            if step.kernel == "add_chains":
                add(step, sums, c)
            else:
                multiply(transposed(step), rows, b, sums if len(steps) > 1 else c)
        np.testing.assert_array_equal(c.view, a.view @ b.view, str(choice))
        c.view[...] = np.nan
        assert np.isnan(c.flat).all(), "written outside"


@given(
    st.tuples(st.integers(1, 128), st.integers(1, 300), st.integers(32, 200)),
    st.tuples(st.integers(1, 3), st.integers(1, 3)),
    st.sampled_from(["NN", "NT", "TN", "TT"]),
    st.sampled_from(["", "a", "b"]),
    st.sampled_from([0, 1]),
)
@settings(max_examples=25, deadline=None)
def test_every_choice_computes_the_product(
    shape: tuple[int, int, int], batch: tuple[int, int], layout: str, shared: str, pad: int
) -> None:
    check(*product(shape, batch, layout, shared, pad))


@pytest.mark.parametrize("shared", ["", "a", "b"])
def test_chains_of_a_long_k_are_added_up(shared: str) -> None:
    check(*product((3, 66, LONGEST_CHAIN + 40), (1, 2), "NT", shared))


@pytest.mark.parametrize(("pad", "is_mapped"), [(0, True), (1, False), (2, False), (4, True)])
def test_tma_reads_a_where_it_can(pad: int, is_mapped: bool) -> None:
    p = product((16, 640, 640), (1, 1), "TN", pad=pad)[0].transposed
    choice = choose(p)
    assert choice.kernel.is_mapped == is_mapped
    assert choice.kernel.along_k
    (step,) = launches(p, choice, {**given_of(p), "a": Pointer(0), "b": Pointer(3)}, Room())
    assert isinstance(step.arguments["a"], Tensor) == is_mapped


def width(choice: Choice) -> int:
    """Return the columns of a tile."""
    return choice.size[0]


def test_tiles_are_no_wider_than_they_need_to_be() -> None:
    for n, columns in ((1, 16), (16, 16), (17, 32), (32, 32), (33, 64), (64, 64), (128, 64)):
        p = product((n, 64, 64), (1, 1), "TN")[0].transposed
        wide = replace(p, m=8192, k=8192, a=replace(p.a, row=8192))
        assert width(choose(wide)) == columns, n


def test_what_these_kernels_are_not_for() -> None:
    p = product((16, 64, 64), (1, 1), "NN")[0].transposed
    assert suits(p)
    assert not suits(replace(p, precision="tf32"))
    assert not suits(replace(p, dtype="c64"))
    assert not suits(replace(p, outer=2**20, inner=2**8))
    assert not suits(replace(p, n=MOST_COLUMNS + 1))
