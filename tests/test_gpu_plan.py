"""Plans for a GPU, made without one: planning is pure."""

from __future__ import annotations

import json
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from tilewise._plan import Operand, make_plan
from tilewise.errors import BudgetError, DTypeError, ShapeError
from tilewise.runtime.device import DeviceFacts

BF16 = np.dtype(ml_dtypes.bfloat16)


def gpu(capability: tuple[int, int] = (9, 0), name: str = "NVIDIA H200") -> DeviceFacts:
    return DeviceFacts(
        index=0,
        name=name,
        capability=capability,
        multiprocessors=132,
        l2_bytes=60 << 20,
        memory_bytes=140 << 30,
        shared_bytes_per_block=227 << 10,
        driver_version=13000,
    )


def on(shape: tuple[int, ...], dtype: Any, where: str = "cuda:0") -> Operand:
    described = Operand.of(np.empty((0,), dtype))
    steps = [int(np.prod(shape[i + 1 :])) * described.dtype.itemsize for i in range(len(shape))]
    return Operand(shape, described.dtype, tuple(steps), True, where)


@pytest.mark.parametrize("dtype", ["float32", "float16", BF16, "float64", "int8", "int64", "bool"])
def test_every_type_has_a_plan_that_prints(dtype: Any) -> None:
    plan = make_plan(on((7, 300, 200), dtype), on((200, 100), dtype), gpu=gpu())
    assert plan.device == "cuda:0"
    assert plan.method == (
        "hopper" if np.dtype(dtype).name in ("float16", "bfloat16") else "portable"
    )
    assert "kernels " in str(plan)
    assert json.loads(json.dumps(plan.to_dict()))["kernels"]["launches"]
    assert plan.bits.startswith(("K alone", "exact"))


def test_other_architectures_get_portable_kernels() -> None:
    for capability in ((8, 0), (8, 6), (8, 9), (10, 0), (12, 0)):
        plan = make_plan(on((64, 64), BF16), on((64, 64), BF16), gpu=gpu(capability))
        assert plan.method == "portable"


def test_bytes_get_hoppers_kernels_where_they_run() -> None:
    for dtype in ("int8", "float8_e4m3fn"):
        a, b = on((2048, 4096), np.dtype(dtype)), on((4096, 2048), np.dtype(dtype))
        plan = make_plan(a, b, dtype=np.dtype(np.int32) if dtype == "int8" else None, gpu=gpu())
        assert "128x128_mapped" in str(plan)
        assert plan.recipe is not None
        copy, product = plan.recipe.steps
        assert copy.kernel == "pack_bytes_4"
        assert product.kernel.endswith("nt_128x128_mapped")
        assert "mapped" not in str(make_plan(a, b, gpu=gpu((8, 9))))


def test_C9_a_slow_float64_is_named_with_the_alternative_and_its_bound() -> None:
    slow = gpu((8, 9), "NVIDIA GeForce RTX 4090")
    plan = make_plan(on((8192, 8192), "float64"), on((8192, 8192), "float64"), gpu=slow)
    text = " ".join(str(plan).split())
    assert "float64 runs at 1/64 of float32's rate on NVIDIA GeForce RTX 4090" in text
    assert "float32 operands" in text
    assert "(K+2)·2⁻²⁴·|A||B|" in text
    fast = make_plan(on((8192, 8192), "float64"), on((8192, 8192), "float64"), gpu=gpu())
    assert "1/64" not in str(fast)


def test_batches_that_do_not_merge_are_run_one_after_another() -> None:
    a = Operand(
        (2, 3, 4, 5, 6), np.dtype("f4"), (9999 * 4, 3000 * 4, 400 * 4, 24, 4), True, "cuda:0"
    )
    plan = make_plan(a, on((6, 7), "float32"), gpu=gpu())
    assert plan.recipe is not None
    assert len(plan.recipe.offsets) == 2
    assert plan.recipe.offsets[1][0] == 9999 * 4
    merged = make_plan(on((2, 3, 4, 5, 6), "float32"), on((6, 7), "float32"), gpu=gpu())
    assert merged.recipe is not None
    assert merged.recipe.offsets == ((0, 0, 0),)


def test_host_operands_are_counted_with_their_copies_and_broadcasts_once() -> None:
    wide = Operand((1000, 1000), np.dtype("f4"), (0, 4), True)
    plan = make_plan(wide, on((1000, 1000), "float32", "memory"), gpu=gpu())
    assert plan.held_bytes == 4000 + 4_000_000 + 4_000_000
    with pytest.raises(BudgetError, match="memory= allows"):
        make_plan(wide, wide, gpu=gpu(), memory_bytes=4_000_000)


def test_out_is_checked_before_anything_runs() -> None:
    a = on((4, 4), "float32")
    with pytest.raises(ShapeError, match="out"):
        make_plan(a, a, out=on((4, 5), "float32"), gpu=gpu())
    with pytest.raises(DTypeError, match="out"):
        make_plan(a, a, out=on((4, 4), "float64"), gpu=gpu())


def test_vectors_are_matrices_of_one_row_or_column() -> None:
    for a, b, shape in (((5,), (5,), ()), ((5,), (2, 5, 3), (2, 3)), ((2, 4, 5), (5,), (2, 4))):
        plan = make_plan(on(a, "float32"), on(b, "float32"), gpu=gpu())
        assert plan.shape == shape


def test_plans_are_hashable_and_find_their_launches_by_identity() -> None:
    a = on((64, 64), "float16")
    plan = make_plan(a, a, gpu=gpu())
    assert len({plan, plan}) == 1
    assert hash(plan.recipe) == hash(plan.recipe)


def test_an_operand_is_aligned_only_if_every_run_of_its_batch_is() -> None:
    half = np.dtype("f2")
    for far, is_mapped in ((80000 * 2, True), (80004 * 2, False)):
        a = Operand((2, 3, 4, 64, 64), half, (far, 20000 * 2, 4096 * 2, 128, 2), True, "cuda:0")
        plan = make_plan(a, on((64, 64), "float16"), gpu=gpu())
        assert plan.recipe is not None
        assert len(plan.recipe.offsets) == 2
        packs = any(step.kernel.startswith("pack") for step in plan.recipe.steps)
        assert packs is not is_mapped
