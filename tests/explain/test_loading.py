"""Finding a kernel by name: in files and modules, with numba, and without it."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from tests.explain.ladder import path_of
from tilewise import guide, simt
from tilewise.errors import FileError, KernelError
from tilewise.explain import explain, loading
from tilewise.explain.loading import load


def written(folder: Path, source: str, name: str = "mine.py") -> str:
    (folder / name).write_text(source)
    return str(folder / name)


@pytest.fixture
def without_numba(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loading, "_numba_is_installed", lambda: False)


def test_the_guides_kernels_have_names() -> None:
    assert load("guide") is load("guide:Muld") is guide.Muld
    assert load("guide:naive") is guide.naive


def test_the_only_kernel_of_a_file_needs_no_name() -> None:
    kernel = load(str(path_of("s05_pitch_17")))
    assert isinstance(kernel, simt.Kernel)
    assert kernel.py_func.__name__ == "padded"


def test_a_module_is_imported_from_where_one_stands(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "a_package"
    package.mkdir()
    (package / "__init__.py").write_text("")
    written(package, "def k(x):\n    x[0] = 1\n", "inside.py")
    monkeypatch.chdir(tmp_path)
    assert load("a_package.inside:k").__name__ == "k"
    assert str(tmp_path) not in sys.path


def test_a_file_finds_the_modules_beside_it(tmp_path: Path) -> None:
    written(tmp_path, "SIDE = 8\n", "beside_me.py")
    name = written(tmp_path, "from beside_me import SIDE\ndef k(x):\n    x[SIDE] = 1\n")
    assert load(f"{name}:k").__globals__["SIDE"] == 8
    assert str(tmp_path) not in sys.path


_EVERYTHING = """
import numba
from numba import boolean, cuda, f4, float32, int32, types, void
import numba.cuda
TWO = float32(2)

@cuda.jit(void(float32[:], float32[:]), fastmath=True)
def k(x, y):
    s = cuda.shared.array(32, dtype=numba.float32)
    z = cuda.local.array(2, f4)
    b = cuda.shared.array(32, boolean)
    i = numba.cuda.threadIdx.x
    s[i] = x[i] * TWO + float32(1)
    z[0] = s[i]
    b[i] = int32(3) > 2
    y[i] = z[0] if b[i] else types.float32(0)
"""


def test_a_file_that_wants_numba_gets_its_words(tmp_path: Path, without_numba: None) -> None:
    """Types, signatures and decorators; nothing of it touches a GPU or compiles."""
    before = {name: sys.modules.get(name) for name in ("numba", "numba.cuda", "numba.types")}
    kernel = load(f"{written(tmp_path, _EVERYTHING)}:k")
    assert {name: sys.modules.get(name) for name in before} == before
    report = explain(kernel, 1, 32, ((32,), "float32"), ((32,), "float32"))
    assert report.exit_code == 0
    assert "float64" not in " ".join(report.notes)


def test_what_the_stand_in_lacks_is_said(tmp_path: Path, without_numba: None) -> None:
    name = written(tmp_path, "from numba import cuda, njit\n@cuda.jit\ndef k(x):\n    x[0] = 1\n")
    with pytest.raises(KernelError, match=r"mine.py:1 \(from numba import cuda, njit\): numba is "):
        load(f"{name}:k")


def test_what_the_stand_in_lacks_is_taken_from_numba(tmp_path: Path) -> None:
    pytest.importorskip("numba.cuda")
    name = written(
        tmp_path,
        "from numba import cuda, njit\n"
        "@njit\n"
        "def plus(x):\n    return x + 1\n"
        "@cuda.jit\n"
        "def k(x):\n    x[cuda.grid(1)] = N\n"
        "N = 3.0\n",
    )
    assert explain(load(f"{name}:k"), 1, 32, ((32,), "float32")).exit_code == 0


@pytest.mark.parametrize(
    ("source", "error", "said"),
    [
        ("def f(x):\n    return (\n", FileError, r"mine.py:2: this is not Python: .*: return \("),
        ("a\x00b\n", FileError, "mine.py: this is not Python"),
        ("import no_such_thing\n", KernelError, "mine.py:1 .*: no_such_thing is not installed"),
        ("x = 1\ny = x / 0\n", KernelError, r"mine.py:2 \(y = x / 0\): .* ZeroDivisionError"),
        ("import sys\nsys.exit(3)\n", KernelError, r"mine.py:2 \(sys.exit\(3\)\): .* SystemExit"),
        ("def f(x):\n    pass\n", KernelError, "has no function 'k'; it has no kernel"),
    ],
)
def test_a_file_that_cannot_be_loaded_is_named_with_its_line(
    tmp_path: Path, source: str, error: type[Exception], said: str
) -> None:
    name = written(tmp_path, source)
    with pytest.raises(error, match=said) as caught:
        load(f"{name}:k")
    assert "\n" not in str(caught.value)


def test_what_a_file_prints_does_not_mix_with_the_report(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    name = written(tmp_path, "print(1)\ndef k(x):\n    x[0] = 1\n")
    load(f"{name}:k")
    printed: Any = capsys.readouterr()
    assert (printed.out, printed.err) == ("", "1\n")


def test_a_file_that_has_changed_is_read_again(tmp_path: Path) -> None:
    template = "from numba import cuda\n@cuda.jit\ndef k(x):\n    x[cuda.grid(1)] = {}\n"
    texts = []
    for value in ("1", "cuda.blockIdx.x"):
        name = written(tmp_path, template.format(value))
        report = explain(load(f"{name}:k"), 1, 32, ((32,), "float32"))
        texts.append(report.source[-1].text.strip())
    assert texts == ["x[cuda.grid(1)] = 1", "x[cuda.grid(1)] = cuda.blockIdx.x"]
