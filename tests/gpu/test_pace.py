"""Blocks that keep pace: they count to the end, change no bit, and never wait for ever.

A few blocks take the tiles of products that are small; that it spares memory is seen in benchmarks.
"""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from tests.gpu import test_float32 as float32
from tests.gpu import test_hopper as hopper
from tests.gpu.stacks import Stack, carry_out, need_hopper, normal, operands
from tilewise.kernels.hopper_float32_plan import choices as choices_of_float32
from tilewise.kernels.hopper_plan import choices, launches, paced
from tilewise.kernels.steps import LONGEST_CHAIN, Pointer, Step

pytestmark = pytest.mark.gpu

_STRETCH = 512


@pytest.fixture(autouse=True)
def on_hopper(request: pytest.FixtureRequest) -> None:
    need_hopper(request.config, "hopper")
    need_hopper(request.config, "hopper_float32")


def counted(steps: tuple[Step, ...], workspace: np.ndarray) -> tuple[int, Step]:
    """Return what the blocks of a product have counted, and their launch."""
    (step,) = (step for step in steps if isinstance(step.arguments.get("m"), int) and pace(step))
    place = pace(step)
    assert place is not None
    return int(workspace[place.offset_bytes :][:4].view(np.int32)[0]), step


def pace(step: Step) -> Pointer | None:
    place = step.arguments.get("progress")
    return place if isinstance(place, Pointer) else None


@pytest.mark.parametrize("blocks", [2, 4, 7])
@pytest.mark.parametrize("k", [40, 1100, LONGEST_CHAIN + 700])
def test_blocks_of_16_bits_that_wait_give_the_same_bits(k: int, blocks: int) -> None:
    ways = set()
    a, b = operands(520, 520, k, "bf16", "NN")
    normal(a, 1), normal(b, 2)
    c = Stack.dense(520, 520, "bf16")
    p = hopper.problem(a, b, c)
    for choice in choices(p, multiprocessors=blocks):
        if choice.parts > 1 or choice.strips:
            continue
        kept = paced(choice)
        steps = launches(p, kept)
        found, workspace = carry_out("hopper", steps, kept.workspace_bytes, (a, b, c))
        free = hopper.result(p, choice, a, b, c)
        np.testing.assert_array_equal(found.view(np.uint16), free.view(np.uint16), str(choice))
        waves = math.ceil(kept.tiles / kept.programs)
        every = waves * kept.programs * math.ceil(k / _STRETCH)
        assert counted(steps, workspace)[0] == every, choice
        ways.add(choice.kernel.way)
    assert ways == ({"promoted"} if k > LONGEST_CHAIN else {"mapped", "paired"})


@pytest.mark.parametrize("precision", [None, "tf32"])
@pytest.mark.parametrize("dtype", ["fp32", "c64"])
@pytest.mark.parametrize("k", [40, 1100])
def test_blocks_of_float32_that_wait_give_the_same_bits(
    k: int, dtype: str, precision: str | None
) -> None:
    a, b = operands(600, 530, k, dtype, "NT")
    normal(a, 1), normal(b, 2)
    a.view[0, 0, 128:256, 3] = float32.TINY  # a tile that no block has need of
    c = Stack.dense(600, 530, dtype)
    p = float32.problem(a, b, c, dtype=dtype, precision=precision)
    for few, all_at_once in zip(choices_of_float32(p, 2), choices_of_float32(p), strict=True):
        if not any(map(pace, few.steps)):  # few tiles, of the widest kind
            continue
        found, workspace = carry_out("hopper_float32", few.steps, few.workspace_bytes, (a, b, c))
        float32.same_bits(found, float32.carried_out(all_at_once, a, b, c))
        count, step = counted(few.steps, workspace)
        assert count % (step.grid[0] * math.ceil(step.arguments["k"] / _STRETCH)) == 0 < count


def test_blocks_that_never_run_at_once_do_not_wait_for_ever() -> None:
    """A grid that no GPU holds at once: the first blocks end before the last begin."""
    n, k, blocks = 64 * 26, 2048, 600
    a, b = operands(n, n, k, "bf16", "NN")
    normal(a, 1), normal(b, 2)
    c = Stack.dense(n, n, "bf16")
    p = hopper.problem(a, b, c)
    (choice,) = (
        choice
        for choice in choices(p, multiprocessors=blocks)
        if choice.kernel.tile == "64x64" and not choice.strips
    )
    assert choice.programs == blocks < choice.tiles
    found = hopper.result(p, paced(choice), a, b, c)
    np.testing.assert_array_equal(found, hopper.result(p, choice, a, b, c))

    a, b, c = (normal(Stack.dense(n, n, "fp32"), i) for i in range(3))
    first, *_ = choices_of_float32(float32.problem(a, b, c), 40)
    assert any(map(pace, first.steps))
    steps = tuple(
        replace(step, grid=(blocks,)) if step.kernel == "multiply" else step for step in first.steps
    )
    float32.same_bits(
        float32.carried_out(replace(first, steps=steps), a, b, c),
        float32.carried_out(first, a, b, c),
    )
