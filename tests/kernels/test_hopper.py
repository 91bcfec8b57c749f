"""Hopper's kernels, compiled: on the tensor cores, fed by the copy engine, within their limits."""

from __future__ import annotations

import importlib.util

import pytest

from tilewise import kernels
from tilewise.errors import DeviceError
from tilewise.kernels import compile as compiler
from tilewise.kernels.hopper_table import KERNELS

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="Triton is not installed"
)

SHARED_BYTES = 227 * 1024  # of a block, on compute capability 9.0


def variants() -> dict[str, compiler.Variant]:
    from tilewise.kernels import hopper

    return {variant.name: variant for variant in hopper.variants()}


def test_there_is_a_variant_for_every_kernel_that_a_plan_names() -> None:
    passes = {"clear", "pack_16", "add_pieces_bf16", "add_pieces_fp16"}
    assert variants().keys() == {kernel.name for kernel in KERNELS} | passes


@pytest.mark.parametrize(
    "name",
    [
        "bf16_kk_128x256x4_mapped",  # the most shared memory
        "fp16_mn_192x128x4_promoted",  # the most accumulators for their registers
        "bf16_kn_16x64x10_any",  # tiles shorter than an instruction
    ],
)
def test_a_kernel_multiplies_on_tensor_cores_without_spilling(name: str) -> None:
    _, entry = compiler.compile_variant(variants()[name], "sm_90a")
    check(entry["name"], entry)


def test_every_kernel_that_was_built_does() -> None:
    try:
        built = kernels.manifest("hopper")
    except DeviceError as error:
        pytest.skip(str(error))
    for (name, _), kernel in built.items():
        check(
            name,
            {
                "stack_bytes": kernel.stack_bytes,
                "shared_bytes": kernel.shared_bytes + kernel.static_shared_bytes,
                "instructions": kernel.instructions,
                "starts_early": kernel.starts_early,
            },
        )


def check(name: str, entry: dict[str, object]) -> None:
    assert entry["stack_bytes"] == 0, name
    assert entry["shared_bytes"] <= SHARED_BYTES, name  # type: ignore[operator]
    assert entry["starts_early"], name
    counts = entry["instructions"]
    assert isinstance(counts, dict)
    assert not {"LDL", "STL"} & counts.keys(), name
    if name.startswith(("clear", "pack", "add_pieces")):
        return
    assert counts["HGMMA"] % 4 == 0, name  # 64 of K a step, 16 an instruction
    assert counts["UTMALDG"] >= 2, name
    assert not {"HMMA", "LDGSTS"} & counts.keys(), name
    is_mapped = name.endswith(("_mapped", "_paired"))
    assert ("UTMASTG" in counts) == is_mapped, name
    assert ("STG" in counts) != is_mapped, name
