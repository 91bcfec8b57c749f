"""float32's kernels for Hopper, compiled: on the tensor cores, without a spill, within limits."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from typing import Any

import pytest

from tilewise import kernels
from tilewise.errors import DeviceError
from tilewise.kernels import compile as compiler

SHARED_BYTES = 227 * 1024  # of a block, on compute capability 9.0


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")
@pytest.mark.parametrize(
    "name",
    [
        *("multiply", "split_rows_2_long", "judge_rows_k", "repair_mn"),
        *("skinny_n_mapped_64x64x6", "few_columns_k_mapped_16x64x9"),
    ],
)
def test_a_kernel_compiles_within_the_limits(name: str) -> None:
    from tilewise.kernels import hopper_float32

    variant = next(each for each in hopper_float32.variants() if each.name == name)
    check(name, compiler.compile_variant(variant, "sm_90a")[1])


def test_every_kernel_that_was_built_does() -> None:
    try:
        built = kernels.manifest("hopper_float32")
    except DeviceError as error:
        pytest.skip(str(error))
    for (name, _), kernel in built.items():
        check(name, {slot: getattr(kernel, slot) for slot in kernels.Built.__slots__})


def check(name: str, entry: Mapping[str, Any]) -> None:
    counts = entry["instructions"]
    assert entry["stack_bytes"] == 0, name
    assert not {"LDL", "STL"} & counts.keys(), name
    assert entry["shared_bytes"] + entry["static_shared_bytes"] <= SHARED_BYTES, name
    assert entry["starts_early"], name
    if name.startswith("multiply"):
        # Two consumers, of 64 of K in steps of 16, for each product of parts; or for the first
        # chain, and for others.
        is_less = "tf32" in name
        times = 3 if not is_less else 2 if "any" in name and "128x128" in name else 1
        assert counts["HGMMA"] == 2 * 4 * times, name
        assert ("UTMASTG" in counts) != ("any" in name), name
    elif name.startswith("skinny"):
        # Three consumers, for three products of parts.
        assert counts["HGMMA"] == 3 * 4 * 3, name
        assert counts["UTMALDG"] >= 2, name
        assert ("LDGSTS" in counts) == ("any" in name), name
    elif name.startswith("few_columns"):
        # Two consumers of wide tiles, or three.
        assert counts["HGMMA"] == (2 if "64x64" in name else 3) * 4 * 3, name
        assert counts["UTMALDG"] >= 2, name
        assert ("LDGSTS" in counts) == ("any" in name), name
    elif name.startswith("repair"):
        assert counts["FFMA"] >= 1000, name
        assert counts["LDGSTS"], name
    elif name != "add_chains":
        assert not {"HGMMA", "FFMA"} & counts.keys(), name
