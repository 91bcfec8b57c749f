"""Plans for a GPU, made without one: planning is pure."""

from __future__ import annotations

import json
import re
import time
from contextlib import suppress
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from tests.support import planned
from tilewise._operand import Operand
from tilewise.errors import BudgetError, DTypeError, ShapeError
from tilewise.runtime.device import DeviceFacts

BF16 = np.dtype(ml_dtypes.bfloat16)


def gpu(capability: tuple[int, int] = (9, 0), name: str = "NVIDIA H200") -> DeviceFacts:
    return DeviceFacts(
        index=0,
        name=name,
        capability=capability,
        multiprocessors=132,
        memory_bytes=140 << 30,
        driver_version=13000,
    )


def on(shape: tuple[int, ...], dtype: Any, where: str = "cuda:0") -> Operand:
    described = Operand.of(np.empty((0,), dtype))
    steps = [int(np.prod(shape[i + 1 :])) * described.dtype.itemsize for i in range(len(shape))]
    return Operand(shape, described.dtype, tuple(steps), True, where)


@pytest.mark.parametrize("dtype", ["float32", "float16", BF16, "float64", "int8", "int64", "bool"])
def test_every_type_has_a_plan_that_prints(dtype: Any) -> None:
    plan = planned(on((7, 300, 200), dtype), on((200, 100), dtype), gpu=gpu())
    assert plan.device == "cuda:0"
    methods = {"float16": "hopper", "bfloat16": "hopper", "float32": "fp16x3"}
    assert plan.method == methods.get(np.dtype(dtype).name, "portable")
    assert "kernels " in str(plan)
    assert json.loads(json.dumps(plan.to_dict()))["kernels"]["launches"]
    assert plan.bits.startswith(("K alone", "exact"))


def test_other_architectures_get_portable_kernels() -> None:
    for capability in ((8, 0), (8, 6), (8, 9), (10, 0), (12, 0)):
        plan = planned(on((64, 64), BF16), on((64, 64), BF16), gpu=gpu(capability))
        assert plan.method == "portable"


def test_bytes_get_hoppers_kernels_where_they_run() -> None:
    for dtype in ("int8", "float8_e4m3fn"):
        a, b = on((2048, 4096), np.dtype(dtype)), on((4096, 2048), np.dtype(dtype))
        plan = planned(a, b, dtype=np.dtype(np.int32) if dtype == "int8" else None, gpu=gpu())
        assert "128x128_mapped" in str(plan)
        copy, product = plan.how.recipe.steps
        assert copy.kernel == "pack_bytes_4"
        assert product.kernel.endswith("nt_128x128_mapped")
        assert "mapped" not in str(planned(a, b, gpu=gpu((8, 9))))


def test_a_budget_that_rules_out_what_is_faster_is_named() -> None:
    square = on((16384, 16384), "int32")
    out = square
    roomy, tight = (
        planned(square, square, out=out, memory_bytes=m, gpu=gpu()) for m in (1 << 31, 1000)
    )
    assert "rules out" not in str(roomy)
    assert "integers one by one" in str(tight)
    said = " ".join(str(tight).split())
    found = re.search(r"memory= rules out what is ([\d.]+) times as fast in [\d.]+ GiB of", said)
    assert found is not None
    assert float(found[1]) > 100
    a, b = on((4096, 4097), "float16"), on((4097, 4096), "float16")
    said = " ".join(str(planned(a, b, memory_bytes=34_000_000, gpu=gpu())).split())
    assert re.search(r"memory= rules out Hopper's own kernels, which take [\d.]+ MiB of w", said)
    assert "rules out" not in str(planned(a, b, gpu=gpu()))


def test_a_product_over_budget_is_cut_before_slower_kernels_are_taken() -> None:
    for dtype, memory_mib in (("int32", 256), ("int64", 256), ("float16", 16), (BF16, 16)):
        a, b, c = on((4096, 8191), dtype), on((8191, 4096), dtype), on((4096, 4096), dtype)
        whole, cut = (
            planned(a, b, out=c, memory_bytes=m << 20, gpu=gpu()) for m in (1 << 14, memory_mib)
        )
        assert whole.workspace_bytes > memory_mib << 20
        assert cut.workspace_bytes <= memory_mib << 20
        assert cut.method == whole.method
        assert re.search(r"\d+ parts; ", str(cut))
        # Before, integers went one by one, hundreds of times slower.
        assert cut.how.recipe.expected_us < 2 * whole.how.recipe.expected_us


@pytest.mark.parametrize("dtype", ["int32", "float16", "float32", "float64", "float8_e4m3fn"])
@pytest.mark.parametrize("k", [37, 20001])
def test_a_refusal_over_a_large_odd_batch_is_quick(dtype: str, k: int) -> None:
    def odd(rows: int, columns: int, kind: Any) -> Operand:
        """A million matrices whose two batch axes do not merge, nor a third."""
        kind = np.dtype(kind)
        steps = [columns, rows * columns + 3, 200 * (rows * columns + 5)]
        steps.append(200 * steps[-1] + 7)
        strides = tuple(kind.itemsize * step for step in (*reversed(steps), 1))
        return Operand((25, 200, 200, rows, columns), kind, strides, True, "cuda:0")

    result = "float32" if "float8" in dtype else dtype
    a, b, c = odd(37, k, dtype), odd(k, 37, dtype), odd(37, 37, result)
    began = time.process_time()
    with suppress(BudgetError):  # integers need no workspace
        planned(a, b, out=c, memory_bytes=5, gpu=gpu())
    assert time.process_time() - began < 2


def test_C9_a_slow_float64_is_named_with_the_alternative_and_its_bound() -> None:
    slow = gpu((8, 9), "NVIDIA GeForce RTX 4090")
    plan = planned(on((8192, 8192), "float64"), on((8192, 8192), "float64"), gpu=slow)
    text = " ".join(str(plan).split())
    assert "float64 runs at 1/64 of float32's rate on NVIDIA GeForce RTX 4090" in text
    assert "float32 operands" in text
    assert "(K+2)·2⁻²⁴·|A||B|" in text
    fast = planned(on((8192, 8192), "float64"), on((8192, 8192), "float64"), gpu=gpu())
    assert "1/64" not in str(fast)


def test_batches_that_do_not_merge_are_run_one_after_another() -> None:
    a = Operand(
        (2, 3, 4, 5, 6), np.dtype("f4"), (9999 * 4, 3000 * 4, 400 * 4, 24, 4), True, "cuda:0"
    )
    plan = planned(a, on((6, 7), "float32"), gpu=gpu())
    assert len(plan.how.recipe.offsets) == 2
    assert plan.how.recipe.offsets[1][0] == 9999 * 4
    merged = planned(on((2, 3, 4, 5, 6), "float32"), on((6, 7), "float32"), gpu=gpu())
    assert merged.how.recipe.offsets == ((0, 0, 0),)


def test_host_operands_are_counted_with_their_copies_and_broadcasts_once() -> None:
    wide = Operand((1000, 1000), np.dtype("f4"), (0, 4), True)
    other = on((1000, 1000), "float32", "memory")
    plan = planned(wide, other, gpu=gpu(), precision="ieee")
    assert plan.held_bytes == 4000 + 4_000_000 + 4_000_000
    with pytest.raises(BudgetError, match="memory= leaves 0 B for it"):
        planned(wide, wide, gpu=gpu(), memory_bytes=4_000_000)
    there = on((1000, 1000), "float16")
    assert planned(there, there, gpu=gpu()).held_bytes == 2_000_000
    assert planned(there, there, gpu=gpu(), out=there).held_bytes == 0


def test_out_is_checked_before_anything_runs() -> None:
    a = on((4, 4), "float32")
    with pytest.raises(ShapeError, match="out"):
        planned(a, a, out=on((4, 5), "float32"), gpu=gpu())
    with pytest.raises(DTypeError, match="out"):
        planned(a, a, out=on((4, 4), "float64"), gpu=gpu())
    with pytest.raises(ShapeError, match="^c "):
        planned(a, a, out=on((4, 5), "float32"), updates=True, gpu=gpu())


def test_vectors_are_matrices_of_one_row_or_column() -> None:
    for a, b, shape in (((5,), (5,), ()), ((5,), (2, 5, 3), (2, 3)), ((2, 4, 5), (5,), (2, 4))):
        plan = planned(on(a, "float32"), on(b, "float32"), gpu=gpu())
        assert plan.shape == shape


def test_plans_are_hashable_and_find_their_launches_by_identity() -> None:
    a = on((64, 64), "float16")
    plan = planned(a, a, gpu=gpu())
    assert len({plan, plan}) == 1
    assert hash(plan.how.recipe) == hash(plan.how.recipe)


def test_an_operand_is_aligned_only_if_every_run_of_its_batch_is() -> None:
    half = np.dtype("f2")
    for far, is_mapped in ((80000 * 2, True), (80004 * 2, False)):
        a = Operand((2, 3, 4, 64, 64), half, (far, 20000 * 2, 4096 * 2, 128, 2), True, "cuda:0")
        plan = planned(a, on((64, 64), "float16"), gpu=gpu())
        assert len(plan.how.recipe.offsets) == 2
        packs = any(step.kernel.startswith("pack") for step in plan.how.recipe.steps)
        assert packs is not is_mapped


@pytest.mark.parametrize(("m", "n"), [(1, 1), (1, 5000), (16, 8192), (700, 3), (4096, 4096)])
def test_how_float32_is_computed_depends_on_k_alone(m: int, n: int) -> None:
    for k, method in ((31, "portable"), (32, "fp16x3"), (5000, "fp16x3"), (40000, "fp16x3")):
        plan = planned(on((3, m, k), "float32"), on((k, n), "float32"), gpu=gpu())
        assert plan.method == method
        assert plan.bound.factor == (k + 2) * 2.0**-24
    for k, method in ((15, "portable"), (16, "fp16x3")):
        plan = planned(on((m, k), "complex64"), on((k, n), "complex64"), gpu=gpu())
        assert plan.method == method
        assert plan.bound.factor == (2 * k + 2) * 2.0**-24


def test_a_plan_says_how_float32_is_computed() -> None:
    a = on((300, 300), "float32")
    text = " ".join(str(planned(a, a, gpu=gpu())).split())
    assert "method fp16x3, sums in float32" in text
    assert "three products of float16 on the tensor cores" in text
    assert "recomputed by chains of FMAs" in text
    assert "(K+2)·2⁻²⁴" in text


def test_precision_is_followed_by_name() -> None:
    a = on((300, 300), "float32")
    ieee, less = (planned(a, a, gpu=gpu(), precision=p) for p in ("ieee", "tf32"))
    assert ieee.method == "portable"
    assert ieee.workspace_bytes == 0
    assert ieee.bound == planned(a, a, gpu=gpu()).bound
    assert less.method == "tf32"
    assert less.bound.factor == 2.0**-10 + 302 * 2.0**-24
    assert "full bound" not in str(less)
    large = on((4096, 4096), "float32")
    full, less = (planned(large, large, gpu=gpu(), precision=p) for p in (None, "tf32"))
    assert less.workspace_bytes < full.workspace_bytes
    for there, k in ((gpu((8, 0)), 300), (gpu(), 8)):
        full = planned(on((9, k), "float32"), on((k, 9), "float32"), gpu=there, precision="tf32")
        assert full.method == "portable"
        assert full.bound.factor == (k + 2) * 2.0**-24
        assert "allows less; this gives the full bound" in str(full)


def test_no_budget_changes_how_float32_is_computed() -> None:
    a = on((4096, 4096), "float32")
    result = 4 * 4096**2
    whole = planned(a, a, gpu=gpu())
    for room in (whole.workspace_bytes - 1, whole.workspace_bytes // 8):
        plan = planned(a, a, gpu=gpu(), memory_bytes=result + room)
        assert plan.method == "fp16x3"
        assert plan.workspace_bytes <= room
        assert len(plan.how.recipe.steps) > len(whole.how.recipe.steps)
    with pytest.raises(BudgetError, match="'ieee'"):
        planned(a, a, gpu=gpu(), memory_bytes=result + 1000)
    assert planned(a, a, gpu=gpu(), memory_bytes=result, precision="ieee").method == "portable"


def test_float32_leaves_room_for_large_operands() -> None:
    a = on((100_000, 100_000), "float32")
    plan = planned(a, a, gpu=gpu())
    assert plan.method == "fp16x3"
    assert plan.workspace_bytes <= gpu().memory_bytes // 8


def test_a_tight_budget_gets_the_same_family_with_less_workspace() -> None:
    a, b, out = on((128, 100_000), BF16), on((100_000, 128), BF16), on((128, 128), BF16)
    free = planned(a, b, out=out, gpu=gpu())
    tight = planned(a, b, out=out, gpu=gpu(), memory_bytes=free.workspace_bytes // 2)
    assert free.method == tight.method == "hopper"
    assert tight.workspace_bytes <= free.workspace_bytes // 2
    assert tight.bits == free.bits
