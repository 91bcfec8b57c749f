"""The compiler of kernels: what it writes, when it compiles again, what it refuses."""

from __future__ import annotations

import ast
import dataclasses
import importlib.util
import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.gpu import sanitized
from tilewise import guide, kernels
from tilewise.errors import DeviceError, KernelError, OptionError
from tilewise.kernels import compile as compiler

MODULE = "tests.gpu.kernels"
HERE = ("sm_90a", "compute_80")

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="Triton is not installed"
)


@pytest.fixture(scope="module")
def folder() -> Path:
    """Build the test kernels where the GPU tests look for them, and return the place."""
    place = Path(__file__).parents[1] / "gpu" / "built"
    report = compiler.build([MODULE], folder=place, jobs=2)
    assert not report.failed
    return place


@pytest.fixture
def copied(folder: Path, tmp_path: Path) -> Path:
    """Return a copy of the built kernels that a test may damage."""
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    return tmp_path


def variant(name: str) -> compiler.Variant:
    module = importlib.import_module(MODULE)
    return next(variant for variant in module.variants() if variant.name == name)


def rebuilt(place: Path) -> list[str]:
    report = compiler.build([MODULE], folder=place, targets=HERE, jobs=1)
    assert not report.failed
    return sorted(report.compiled)


def test_what_is_built_stays(copied: Path) -> None:
    assert rebuilt(copied) == []


@pytest.mark.parametrize("damage", [b"", b"\x7fELF"])
def test_a_damaged_file_is_built_again(copied: Path, damage: bytes) -> None:
    path = copied / "kernels" / "axpy.sm_90a.cubin"
    whole = path.read_bytes()
    path.write_bytes(damage)
    with pytest.raises(DeviceError, match=r"kernels/axpy for sm_90a is damaged .* make kernels"):
        kernels.manifest("kernels", copied)["axpy", "sm_90a"].code()
    assert rebuilt(copied) == ["kernels/axpy sm_90a"]
    assert path.read_bytes() == whole


def test_a_lost_file_is_built_again(copied: Path) -> None:
    (copied / "kernels" / "axpy.compute_80.ptx").unlink()
    assert rebuilt(copied) == ["kernels/axpy compute_80"]


def test_a_damaged_manifest_is_written_again(copied: Path) -> None:
    manifest = copied / "kernels" / "manifest.json"
    manifest.write_text(manifest.read_text()[:-100])
    report = compiler.build([MODULE], folder=copied, targets=HERE, only="axpy", jobs=1)
    assert sorted(report.compiled) == ["kernels/axpy compute_80", "kernels/axpy sm_90a"]
    assert {name for name, _ in kernels.manifest("kernels", copied)} == {"axpy"}


def test_a_kernel_that_is_no_more_is_removed(copied: Path) -> None:
    manifest = copied / "kernels" / "manifest.json"
    stray = copied / "kernels" / "gone.sm_90a.cubin"
    stray.write_bytes(b"old")
    entries = json.loads(manifest.read_text())["kernels"]
    manifest.write_text(json.dumps({"kernels": [*entries, {**entries[0], "name": "gone"}]}))
    compiler.build([MODULE], folder=copied, jobs=1)
    assert not stray.exists()
    assert ("gone", entries[0]["target"]) not in kernels.manifest("kernels", copied)


def test_the_key_changes_with_what_the_code_depends_on() -> None:
    axpy = variant("axpy")
    hog = {"function": variant("hog").function, "signature": {"x": "*fp32"}, "attrs": {}}
    others = [
        dataclasses.replace(axpy, constexprs={"tile": 512}),
        dataclasses.replace(axpy, attrs={"x": 16}),
        dataclasses.replace(axpy, signature={**axpy.signature, "n": "i32"}),
        dataclasses.replace(axpy, options={**axpy.options, "num_warps": 8}),
        dataclasses.replace(axpy, options={**axpy.options, "enable_fp_fusion": False}),
        dataclasses.replace(axpy, **hog),
        dataclasses.replace(axpy, rewrite_ptx=truncating),
    ]
    keys = [compiler._key(each, "sm_90a") for each in (axpy, *others)]
    keys.append(compiler._key(axpy, "sm_80"))
    assert len(set(keys)) == len(keys)
    assert compiler._key(variant("axpy"), "sm_90a") == keys[0]


def constants_of_modules(source: str) -> list[str]:
    """Return what device code of a module names as ``module.CONSTANT``."""
    tree = ast.parse(source)
    imports = [x for x in ast.walk(tree) if isinstance(x, ast.ImportFrom) and x.module is None]
    modules = {name.asname or name.name for each in imports for name in each.names}
    return [
        ast.unparse(x)
        for function in ast.walk(tree)
        if isinstance(function, ast.FunctionDef)
        and any(ast.unparse(each).endswith(".jit") for each in function.decorator_list)
        for x in ast.walk(function)
        if isinstance(x, ast.Attribute) and isinstance(x.value, ast.Name)
        if x.value.id in modules and x.attr.isupper()
    ]


def test_constants_of_other_modules_are_imported_by_name() -> None:
    """Triton's digest of a function has nothing of others: after a change old code would stay."""
    source = "from . import pace\n@gluon.jit\ndef f():\n    return pace.STRETCH"
    assert constants_of_modules(source) == ["pace.STRETCH"]
    for path in Path(kernels.__file__).parent.glob("*.py"):
        assert constants_of_modules(path.read_text()) == [], path.name


def test_one_process_writes_what_two_write(folder: Path, tmp_path: Path) -> None:
    compiler.build([MODULE], folder=tmp_path, targets=["sm_90a"], only="axpy", jobs=1)
    alone = kernels.manifest("kernels", tmp_path)["axpy", "sm_90a"]
    assert alone.code() == kernels.manifest("kernels", folder)["axpy", "sm_90a"].code()


def test_the_manifest_says_how_to_launch(folder: Path) -> None:
    there = kernels.manifest("kernels", folder)
    axpy = there["axpy", "sm_90a"]
    assert [(p.name, p.type, p.divisible_by) for p in axpy.parameters] == [
        ("x", "pointer", 16),
        ("y", "pointer", 16),
        ("n", "i64", 1),
        ("alpha", "fp32", 1),
    ]
    assert (axpy.entry, axpy.warps, axpy.null_pointers, axpy.shared_bytes) == ("_axpy", 4, 2, 0)
    assert axpy.instructions["FFMA"] == 8
    source = there["copy", "sm_90a"].parameters[0]
    assert (source.type, source.rank) == ("tensor map", 2)
    # CU_TENSOR_MAP_DATA_TYPE_BFLOAT16 and CU_TENSOR_MAP_SWIZZLE_128B
    assert source.tensor_map == {"data_type": 9, "swizzle": 3, "block_size": [64, 64]}
    assert there["hog", "sm_90a"].shared_bytes == 64 * 1024
    scale = there["scale", "sm_90a"]
    assert [(p.name, p.type, p.rank) for p in scale.parameters] == [
        ("x", "array", 2),
        ("factor", "fp32", 0),
    ]
    assert scale.null_pointers == 0
    assert "numba-cuda" in scale.compiler


def test_travelling_ptx_states_an_old_instruction_set(folder: Path) -> None:
    for name in ("axpy", "scale"):
        text = kernels.manifest("kernels", folder)[name, "compute_80"].code().decode()
        assert "\n.version 8.0\n.target sm_80\n" in text


def test_the_guides_kernel_keeps_the_loads_of_its_source() -> None:
    """What explain counts in the source is what the hardware does: 32 loads, 2 stores a tile."""
    muld = next(each for each in guide.variants() if each.name == "Muld")
    _, entry = compiler.compile_variant(muld, "sm_90a")
    counts = entry["instructions"]
    assert (counts["LDS"], counts["STS"], counts["FFMA"]) == (32, 2, 16)
    assert (counts["LDG"], counts["STG"]) == (2, 1)
    assert entry["static_shared_bytes"] == 2 * 16 * 16 * 4


def test_a_spilling_kernel_is_refused() -> None:
    hog = variant("hog")
    starved = dataclasses.replace(hog, options={**hog.options, "maxnreg": 24})
    _, entry = compiler.compile_variant(starved, "sm_90a")
    (broken,) = compiler.broken_rules(entry)
    assert "spills to" in broken
    assert entry["instructions"]["LDL"] > 0


def test_more_shared_memory_than_there_is_is_refused() -> None:
    big = dataclasses.replace(variant("hog"), constexprs={"tile": 256})
    _, entry = compiler.compile_variant(big, "sm_90a")
    (broken,) = [rule for rule in compiler.broken_rules(entry) if "shared" in rule]
    assert broken == "it takes 262144 bytes of shared memory and sm_90a has 232448"
    fits = {**entry, "shared_bytes": 101376, "stack_bytes": 0}
    assert not compiler.broken_rules({**fits, "target": "compute_80"})
    assert compiler.broken_rules({**fits, "target": "compute_80", "shared_bytes": 101377})


def truncating(ptx: str, target: str) -> tuple[str, int]:
    return ptx.replace("fma.rn.f32", "fma.rz.f32"), ptx.count("fma.rn.f32")


def test_ptx_can_be_rewritten_before_it_is_assembled() -> None:
    changed = dataclasses.replace(variant("axpy"), rewrite_ptx=truncating)
    code, entry = compiler.compile_variant(changed, "sm_90a")
    plain, _ = compiler.compile_variant(variant("axpy"), "sm_90a")
    assert entry["rewritten"] == entry["instructions"]["FFMA"] == 8
    assert code != plain


def test_scratch_memory_is_refused() -> None:
    function = importlib.import_module(MODULE)._scratch
    with pytest.raises(KernelError, match="bytes of global scratch memory"):
        compiler.compile_variant(dataclasses.replace(variant("hog"), function=function), "sm_90a")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"signature": {"x": "*fp32"}, "attrs": {}}, "the kernel takes x, y, n, alpha, tile"),
        ({"constexprs": {"tile": 1024, "n": 3}}, "the kernel takes x, y, n, alpha, tile"),
    ],
)
def test_a_wrong_signature_is_refused(change: dict[str, object], message: str) -> None:
    with pytest.raises(KernelError, match=message):
        compiler.compile_variant(dataclasses.replace(variant("axpy"), **change), "sm_90a")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"name": "a/b"}, "not a file stem"),
        ({"targets": ("sm_90",)}, r"targets \['sm_90'\] are not among"),
        ({"targets": ()}, "are not among"),
        ({"options": {}}, "options must say enable_fp_fusion"),
        ({"attrs": {"tile": 16}}, "attrs name"),
    ],
)
def test_a_wrong_variant_is_refused(change: dict[str, object], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        dataclasses.replace(variant("axpy"), **change)


def test_one_bad_kernel_does_not_stop_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bad = dataclasses.replace(variant("axpy"), name="bad", signature={"x": "*fp32"}, attrs={})
    monkeypatch.setattr(compiler, "_variants", lambda module: (bad, variant("axpy")))
    report = compiler.build([MODULE], folder=tmp_path, targets=["sm_90a"], jobs=1)
    assert report.compiled == ("kernels/axpy sm_90a",)
    assert [*report.failed] == ["kernels/bad sm_90a"]


def test_without_a_compiler_it_says_what_to_install() -> None:
    code = (
        "import sys; sys.modules['triton'] = None\n"
        "from tilewise.kernels import compile\n"
        "sys.exit(compile.main(['--family', 'portable']))"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert ran.returncode == 2
    assert "pip install 'tilewise[kernels]'" in ran.stderr


def test_its_help_keeps_the_command_on_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        compiler.main(["--help"])
    assert "\n    python -m tilewise.kernels.compile [" in capsys.readouterr().out


def test_without_kernels_it_says_to_make_them(tmp_path: Path) -> None:
    with pytest.raises(DeviceError, match="run make kernels"):
        kernels.manifest("portable", tmp_path)


def families() -> list[str]:
    return [module for module in compiler.FAMILIES if importlib.util.find_spec(module)]


@pytest.mark.parametrize("module", families())
def test_every_kernel_is_built_and_fit_to_ship(module: str) -> None:
    place = kernels.BUILT / module.rpartition(".")[2]
    entries = compiler._read_entries(place)
    for each in compiler._variants(module):
        for target in each.targets:
            entry = entries.get((each.name, target))
            assert entry is not None, f"{each.name} for {target} is not built; run make kernels"
            assert compiler._is_right(place, entry, compiler._key(each, target)), (
                f"{each.name} for {target} is out of date or unfit; run make kernels"
            )


@pytest.mark.parametrize("family", sanitized.JOBS)
def test_the_sanitizer_is_shown_every_kernel(family: str) -> None:
    """On one of the architectures, Hopper, by what each job is going to launch."""
    modules = [module for module in families() if compiler._family(module) == family]
    every = {v.name for m in modules for v in compiler._variants(m) if "sm_90a" in v.targets}
    shown = set().union(*(job.names for job in sanitized.JOBS[family]()))
    assert shown == every


def test_all_kernels_together_are_small() -> None:
    assert sum(path.stat().st_size for path in kernels.BUILT.rglob("*.*")) <= 40e6
