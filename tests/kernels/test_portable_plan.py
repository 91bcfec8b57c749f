"""What is planned for portable kernels, without running any: sizes, budgets, bits, refusals."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tilewise import kernels
from tilewise.errors import BudgetError, DeviceError, DTypeError
from tilewise.kernels.portable_plan import Problem, choose, every_way
from tilewise.kernels.portable_table import KERNELS, STORED
from tilewise.kernels.steps import Strides, chains

FLOATS = ("float16", "bfloat16", "float8_e4m3fn", "float32", "float64", "complex64", "complex128")


def problem(m: int, n: int, k: int, dtype: str = "float32", result: str = "") -> Problem:
    return Problem(
        m=m,
        n=n,
        k=k,
        a=Strides(0, 0, k, 1),
        b=Strides(0, 0, n, 1),
        c=Strides(0, 0, n, 1),
        a_dtype=dtype,
        b_dtype=dtype,
        c_dtype=result or ("float32" if "float8" in dtype else dtype),
    )


@pytest.mark.parametrize("sizes", [(0, 3, 4), (3, 0, 4)])
def test_nothing_is_launched_for_an_empty_result(sizes: tuple[int, int, int]) -> None:
    assert choose(problem(*sizes)).steps == ()
    assert choose(replace(problem(3, 4, 5), outer=0)).steps == ()


@pytest.mark.parametrize("capability", [(8, 0), (8, 6), (8, 9), (9, 0), (10, 0), (10, 3), (12, 0)])
@pytest.mark.parametrize("dtype", STORED)
def test_every_type_has_a_way_on_every_architecture(
    dtype: str, capability: tuple[int, int]
) -> None:
    for sizes in ((1, 1, 1), (4096, 4096, 4096), (128, 128, 100_000)):
        choice = choose(problem(*sizes, dtype), capability=capability)
        assert choice.steps
        assert all(0 < step.grid[0] < 2**31 for step in choice.steps)


@pytest.mark.parametrize("dtype", STORED)
def test_all_but_float8_need_no_workspace_below_the_longest_chain(dtype: str) -> None:
    if "float8" not in dtype:
        assert choose(problem(300, 200, 1000, dtype), workspace_bytes=0).workspace_bytes == 0


def test_a_budget_that_holds_no_way_is_refused_with_its_size() -> None:
    with pytest.raises(
        BudgetError, match=r"300x20000 by 20000x200 takes at least .* leaves 1 B for it"
    ):
        choose(problem(300, 200, 20000), workspace_bytes=1)


def test_types_without_a_kernel_are_refused() -> None:
    with pytest.raises(DTypeError, match="no GPU kernel takes float8_e3m4"):
        choose(problem(3, 4, 5, "float8_e3m4"))


@pytest.mark.parametrize("dtype", FLOATS)
def test_how_k_is_cut_depends_on_k_alone(dtype: str) -> None:
    for k in (16, 16384, 16385, 100_000, 10_000_000):
        cuts = set()
        for m, n in ((1, 1), (16, 8192), (5000, 3)):
            for way in every_way(problem(m, n, k, dtype)):
                for step in way.steps:
                    if "depth" in step.arguments:
                        cuts.add((step.arguments["parts"], step.arguments["depth"]))
        parts, depth = chains(k)
        assert cuts == {(parts, depth * (2 if dtype.startswith("complex") else 1))}


def test_all_kernels_of_a_type_walk_k_alike() -> None:
    for dtype in {kernel.dtype for kernel in KERNELS} - {"i8"}:
        assert len({kernel.tile[2] for kernel in KERNELS if kernel.dtype == dtype}) == 1


@pytest.mark.parametrize(
    ("sizes", "dtype"),
    [
        ((2**31 + 1, 1, 1), "float16"),
        ((1, 2**33, 2), "int8"),
        ((1, 1, 2**31 + 2), "int8"),
        ((73_728, 36_864, 128), "bfloat16"),
    ],
)
def test_B3_B5_sizes_beyond_32_bits(sizes: tuple[int, int, int], dtype: str) -> None:
    for way in every_way(problem(*sizes, dtype)):
        for step in way.steps:
            assert 0 < step.grid[0] < 2**31
            for name in ("tiles_m", "tiles_n", "inner", "parts"):
                assert step.arguments.get(name, 0) < 2**31


def test_more_matrices_than_a_grid_has_blocks_are_several_launches() -> None:
    many = replace(
        problem(3, 3, 3),
        outer=5,
        inner=2**30,
        a=Strides(9 << 30, 9, 3, 1),
        b=Strides(9 << 30, 9, 3, 1),
        c=Strides(9 << 30, 9, 3, 1),
    )
    choice = choose(many)
    assert len(choice.steps) == 5
    assert [step.arguments["c"].offset_bytes for step in choice.steps] == [
        4 * 9 * i << 30 for i in range(5)
    ]


def test_large_products_go_to_fast_kernels_and_small_ones_in_one_launch() -> None:
    for dtype, kernel in (
        ("float32", "fp32_tn_128x128_4"),
        ("float64", "fp64_nn_64x64_2"),
        ("float16", "fp16_nn_128x128_8"),
    ):
        assert choose(problem(8192, 8192, 8192, dtype)).steps[-1].kernel == kernel
        assert len(choose(problem(100, 100, 100, dtype)).steps) == 1
    for dtype, result, kernel in (
        ("int8", "int32", "i8_nt_192x128_mapped"),
        ("float8_e5m2", "float32", "fp8e5_nt_192x128_mapped"),
    ):
        assert choose(problem(8192, 8192, 8192, dtype, result)).steps[-1].kernel == kernel
    blackwell = choose(problem(8192, 8192, 8192, "int8", "int32"), capability=(10, 0))
    assert blackwell.steps[-1].kernel == "i8_nt_128x256_16"


def test_hopper_copies_bytes_only_where_no_map_describes_them() -> None:
    by_k = replace(problem(1024, 1024, 1024, "int8", "int32"), b=Strides(0, 0, 1, 1024))
    assert [step.kernel for step in choose(by_k).steps] == ["i8_nt_64x128_mapped"]
    for a, b, vector, blocks in (
        (Strides(0, 0, 1024, 1), Strides(0, 0, 1024, 1), 4, (64, 0)),
        (Strides(0, 0, 1, 1024), Strides(0, 0, 1, 1024), 4, (64, 0)),
        (Strides(0, 0, 1032, 1), Strides(0, 0, 1028, 1), 4, (128, 64)),
        (Strides(0, 0, 1, 1029), Strides(0, 0, 1, 1024, is_aligned=False), 1, (64, 128)),
    ):
        pack, last = choose(replace(by_k, a=a, b=b)).steps
        assert (pack.kernel, pack.grid[0]) == (f"pack_bytes_{vector}", sum(blocks))
        assert pack.arguments["first_blocks"] == blocks[0]
        assert last.kernel == "i8_nt_64x128_mapped"


def test_hoppers_float8_kernels_leave_out_a_k_whose_pieces_they_cannot_step_through() -> None:
    for k, is_mapped in ((16384, True), (100_000, True), (204_800, False)):
        assert is_mapped == (chains(k)[1] % 128 == 0)
        ways = every_way(problem(64, 64, k, "float8_e4m3fn"))
        kernels = {step.kernel for way in ways for step in way.steps}
        assert any(kernel.endswith("_mapped") for kernel in kernels) == is_mapped


def test_what_is_built_computes_on_the_units_that_there_are() -> None:
    try:
        there = kernels.manifest("portable")
    except DeviceError as error:
        pytest.skip(str(error))
    units = {"fp64": "DMMA", "fp32": "FFMA", "i8": "IGMMA", "fp16": "HGMMA", "bf16": "HGMMA"}
    for kernel in KERNELS:
        if "sm_90a" in kernel.targets:
            built = there[kernel.name, "sm_90a"]
            unit = units.get(kernel.dtype, "QGMMA")
            assert built.instructions[unit] > 0, kernel.name
            copied = built.instructions.keys() & {"UTMALDG", "UTMASTG"}
            assert len(copied) == (2 if kernel.is_mapped else 0), kernel.name
            assert kernel.dtype != "fp64" or built.rewritten == built.instructions["DMMA"]
    for (name, target), built in there.items():
        assert built.stack_bytes == 0, (name, target)
        if name.startswith("i8") and target in ("sm_80", "compute_80"):
            assert built.rewritten > 0, "sums are clamped"
