"""What is changed in PTX: products joined, in order; sums that wrap."""

from __future__ import annotations

import pytest

from tilewise.errors import KernelError
from tilewise.kernels.ptx import fuse_float64, wrap_int32


def product(total: int, a: str, b: str) -> str:
    both = f"{{ %d{total}, %d{total + 1} }}"
    return (
        f"mma.sync.aligned.m8n8k4.row.col.f64.f64.f64.f64 {both}, {{ %{a} }}, {{ %{b} }}, {both};"
    )


def block(first: int = 0) -> list[str]:
    """Return two chains of four products that share their fragments of B."""
    return [
        product(first + 2 * half, f"a{half}{step}", f"b{step}")
        for step in range(4)
        for half in range(2)
    ]


def test_two_chains_of_four_become_one_product() -> None:
    text = "\n".join(["$L__BB0_1:", *block(), "\tret;"])
    fused, count = fuse_float64(text, "sm_90a")
    assert count == 1
    assert "m8n8k4" not in fused
    lines = [line for line in fused.splitlines() if line.strip()]
    assert lines[1].strip() == (
        "mma.sync.aligned.m16n8k16.row.col.f64.f64.f64.f64 { %d0, %d1, %d2, %d3 }, "
        "{ %a00, %a10, %a01, %a11, %a02, %a12, %a03, %a13 }, { %b0, %b1, %b2, %b3 }, "
        "{ %d0, %d1, %d2, %d3 };"
    )


def test_eight_steps_are_two_products_in_their_order() -> None:
    later = [line.replace("%a", "%x").replace("%b", "%y") for line in block()]
    fused, count = fuse_float64("\n".join([*block(), *later]), "sm_90a")
    assert count == 2
    assert fused.index("%a00") < fused.index("%x00")


@pytest.mark.parametrize("between", ["$L__BB0_2:", "\t@%p1 bra \t$L__BB0_3;", "\tbra.uni $L;"])
def test_products_of_two_blocks_are_not_joined(between: str) -> None:
    _, count = fuse_float64("\n".join([*block(), between, *block(4)]), "sm_90a")
    assert count == 2
    halves = [
        product(2 * half, f"a{half}{step}", f"b{step}") for half in range(2) for step in range(4)
    ]
    with pytest.raises(KernelError, match="no second half"):
        fuse_float64("\n".join([*halves[:4], between, *halves[4:]]), "sm_90a")


def test_what_cannot_be_fused_is_an_error() -> None:
    with pytest.raises(KernelError, match="no second half"):
        fuse_float64("\n".join(block()[::2]), "sm_90a")
    with pytest.raises(KernelError, match="no float64 products"):
        fuse_float64("ret;", "sm_90a")
    stray = product(0, "a", "b").replace("{ %d0, %d1 };", "{ %d2, %d3 };")
    with pytest.raises(KernelError, match="is not the sum of"):
        fuse_float64(stray, "sm_90a")


@pytest.mark.parametrize("target", ["sm_80", "sm_100a", "compute_80"])
def test_other_targets_are_left_alone(target: str) -> None:
    text = "\n".join(block())
    assert fuse_float64(text, target) == (text, 0)


def test_int8_products_wrap() -> None:
    clamping = "mma.sync.aligned.m16n8k32.row.col.satfinite.s32.s8.s8.s32 { %r1 }, { %r2 };"
    wrapping, count = wrap_int32(f"{clamping}\n{clamping}", "sm_80")
    assert count == 2
    assert wrapping == f"{clamping}\n{clamping}".replace(".satfinite", "")
