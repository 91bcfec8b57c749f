"""What a kernel's places depend on: values that are partly known, and the source they come from."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.explain.support import kernel_from
from tilewise import guide
from tilewise.explain.dataflow import Flow, analyse
from tilewise.explain.values import STILL, Value, constant, join
from tilewise.simt import cuda, program

float32 = np.float32
THREAD = Value(STILL, 0, 31, 0, frozenset({"thread"}))


def _flow(kernel: Any, *arguments: Any, grid: Any = (4, 3, 1), block: Any = (16, 16, 1)) -> Flow:
    source = program(kernel)
    return analyse(source, grid, block, dict(zip(source.parameters, arguments, strict=True)))


def _at(kernel: Any, flow: Flow, text: str, kind: str = "load") -> Any:
    (site,) = (s for s in program(kernel).sites if (s.text, s.kind) == (text, kind))
    return flow.sites[site.id]


# Values. One is true of a number n(b, x, s): b a block, x a thread, s a multiple of the step.


@settings(max_examples=200, deadline=None)
@given(
    ops=st.lists(st.tuples(st.sampled_from("+-*/%"), st.integers(1, 40)), max_size=6),
    coefficient=st.integers(-50, 50),
    block=st.integers(0, 7),
    x=st.integers(0, 31),
)
def test_arithmetic_on_values_holds_for_every_block_and_thread(
    ops: list[tuple[str, int]], coefficient: int, block: int, x: int
) -> None:
    value = Value((coefficient, 0, 0), 0, 31, 0, frozenset({"thread", "block"}))
    number, first = coefficient * block + x, x
    for op, by in ops:
        if op == "+":
            value, number, first = value + constant(by), number + by, first + by
        elif op == "-":
            value, number, first = value - constant(by), number - by, first - by
        elif op == "*":
            value, number, first = value * constant(by), number * by, first * by
        else:
            found = value.over(by) if op == "/" else value.modulo(by)
            if found is None:
                return
            value = found
            number = number // by if op == "/" else number % by
            first = first // by if op == "/" else first % by
    # ``first`` is the number in block 0: the others differ by the coefficients alone.
    assert value.block is not None
    assert number - value.block[0] * block == first
    assert value.low <= first <= value.high


def test_a_step_says_what_sizes_can_change() -> None:
    width = constant(1024, frozenset({"arg:n"}), step=8)
    assert (THREAD + width).step == 8
    assert (THREAD * constant(4)).step == 0
    # Rows of any width that is congruent modulo 8 begin a multiple of 8 apart.
    assert (THREAD * width).step == 8
    assert (width * constant(4)).step == 32
    assert width.over(16).step == 1
    assert (width * constant(2)).over(16).step == 1
    assert constant(0, step=16).over(4).step == 4
    assert width.modulo(8).step == 0
    assert width.modulo(3).step == 1


def test_one_of_several_values_is_no_more_than_all_of_them_say() -> None:
    a, b = Value((4, 0, 0), 0, 3, 0, frozenset({"thread"})), constant(7)
    both = join([a, b])
    assert (both.block, both.low, both.high) == (None, 0, 7)
    assert both.deps == frozenset({"thread"})
    assert join([a, a]) == a
    assert join([constant(0), constant(16)]).step == 16


# Kernels.


def test_the_guides_kernel() -> None:
    A = np.zeros((48, 64), float32)
    B, C = np.zeros((64, 64), float32), np.zeros((48, 64), float32)
    flow = _flow(guide.Muld, A, B, 64, 64, C)
    assert flow.opaque is None
    assert flow.tainted == {}
    load = _at(guide.Muld, flow, "A[row, m * BLOCK_SIZE + tx]")
    assert load.offset.block == (0, 16 * 64 * 4, 0)
    assert load.offset.step % 32 == 0
    assert load.guard == frozenset()
    tile = _at(guide.Muld, flow, "As[ty, k]")
    assert tile.offset.block == STILL
    assert (tile.offset.low, tile.offset.high, tile.offset.step) == (0, 4 * 255, 0)
    assert "arg:wA" in tile.repeat
    (product,) = flow.arithmetic
    assert (product.fused, product.single, product.code, product.times) == (1, 0, "f4", 1)


def test_a_guard_is_a_comparison_whose_outcome_blocks_can_differ_in() -> None:
    def kernel(A, n):  # type: ignore[no-untyped-def]
        i = cuda.blockIdx.x * 16 + cuda.threadIdx.x
        if i < n:
            A[i] = 1

    flow = _flow(kernel, np.zeros(50, float32), 50, block=(16, 1, 1))
    store = _at(kernel, flow, "A[i]", "store")
    assert store.guard == frozenset({"block", "thread", "arg:n"})
    assert any((g.block, g.low, g.high) == ((16, 0, 0), -50, -35) for g in flow.guards)


TAINTED = {
    "an address": ("C[index[i]] = 1", "C[index[i]]"),
    "a bound": ("for k in range(index[i]):\n        C[k] = 1", "range(index[i])"),
    "a branch": ("if index[i] > 3:\n        C[i] = 1", "index[i] > 3"),
    "a loop": ("while index[i] > 3:\n        C[i] = 1\n        break", "index[i] > 3"),
    "through a variable": ("j = index[i] + 1\n    C[j * 2] = 1", "C[j * 2]"),
    "through a choice": ("j = 1 if index[i] > 3 else 2\n    C[j] = 1", "C[j]"),
    "through control": ("j = 1\n    if index[i] > 3:\n        j = 2\n    C[j] = 1", "index[i] > 3"),
    "through a loop": (
        "j = 0\n    for k in range(3):\n        j = index[j]\n    C[i] = 1", "index[j]"
    ),
    "after a way out": ("if index[i] > 3:\n        return\n    C[i] = 1", "index[i] > 3"),
    "a load by choice": ("C[i] = index[i] if index[i + 1] > 0 else 0", "index[i]"),
    "a load after and": ("C[i] = index[0] > 0 and index[i] > 0", "index[i]"),
    "a load in a chain": ("C[i] = 0 < index[0] < index[i]", "index[i]"),
    "a skipped load": ("x = index[i] if index[i + 1] > 0 else 0\n    C[x] = 1", "C[x]"),
}  # fmt: skip
CLEAN = {
    "a value that is stored": "C[i] = index[i]",
    "a value that is summed": "s = 0\n    for k in range(4):\n        s += index[k]\n    C[i] = s",
    "a choice of values": "C[i] = index[i] if i > 3 else 0",
    "an index by the thread": "C[i * 2 % 7] = index[(i + 1) % 8]",
}


def _kernel(body: str) -> Any:
    return kernel_from(
        "import numpy as np\nfrom tilewise.simt import cuda\n\n"
        f"def kernel(index, C):\n    i = cuda.threadIdx.x\n    {body}\n",
        "kernel",
    )


@pytest.mark.parametrize("what", TAINTED)
def test_what_loaded_values_decide_is_seen(what: str) -> None:
    body, text = TAINTED[what]
    kernel = _kernel(body)
    flow = _flow(kernel, np.zeros(64, np.int64), np.zeros(64, np.int64), block=(8, 1, 1))
    assert text in flow.tainted.values(), flow.tainted


@pytest.mark.parametrize("what", CLEAN)
def test_what_loaded_values_do_not_decide_is_not(what: str) -> None:
    flow = _flow(
        _kernel(CLEAN[what]), np.zeros(64, np.int64), np.zeros(64, np.int64), block=(8, 1, 1)
    )
    assert flow.tainted == {}


FLAG = True


def test_what_an_outside_constant_rules_out_is_not_looked_at() -> None:
    def kernel(index, C):  # type: ignore[no-untyped-def]
        i = cuda.threadIdx.x
        if not FLAG:
            C[index[i]] = 1
        if FLAG:
            C[i] = 1
        else:
            C[index[i]] = 1

    flow = _flow(kernel, np.zeros(64, np.int64), np.zeros(64, np.int64), block=(8, 1, 1))
    assert flow.tainted == {}
    (stored,) = (site for site in flow.sites.values() if site.offset is not None)
    assert stored.index == frozenset({"thread"})


def test_loops_are_learnt_until_nothing_new_comes() -> None:
    def kernel(A, n):  # type: ignore[no-untyped-def]
        i = cuda.threadIdx.x
        step = 1
        while i < n:
            A[i] = 1
            i += step
            step = step * 2

    flow = _flow(kernel, np.zeros(99, float32), 99, block=(8, 1, 1))
    store = _at(kernel, flow, "A[i]", "store")
    assert store.offset.low <= 0
    assert math.isinf(store.offset.high)
    assert {"thread", "arg:n"} <= store.index


def test_what_is_not_understood_is_taken_to_depend_on_everything() -> None:
    def kernel(A, C):  # type: ignore[no-untyped-def]
        votes = cuda.ballot_sync(0xFFFFFFFF, A[cuda.threadIdx.x] > float32(0))
        C[int(votes) % 4] = 1

    flow = _flow(kernel, np.zeros(32, float32), np.zeros(4, float32), block=(32, 1, 1))
    assert flow.tainted


def test_arithmetic_is_counted_where_its_executions_can_be() -> None:
    def kernel(A, C, x):  # type: ignore[no-untyped-def]
        i = cuda.threadIdx.x
        s = A[i] * A[i] + A[i]
        for _ in range(5):
            s = s * x
        if i > 3:
            s = s + x
        C[i] = s - x

    flow = _flow(kernel, np.zeros(32, float32), np.zeros(32, float32), float32(2), block=(32, 1, 1))
    counted = [(a.fused, a.single, a.times, a.site is None) for a in flow.arithmetic]
    assert counted == [(1, 0, 1, False), (0, 1, 5, False), (0, 1, 1, True), (0, 1, 1, False)]


def test_syncwarp_is_noticed() -> None:
    def kernel(C):  # type: ignore[no-untyped-def]
        C[cuda.threadIdx.x] = 1
        cuda.syncwarp()

    assert _flow(kernel, np.zeros(32, float32), block=(32, 1, 1)).warp_sync
    assert not _flow(guide.naive, *[np.zeros((16, 16), float32)] * 2, 16, 16,
                     np.zeros((16, 16), float32)).warp_sync  # fmt: skip
