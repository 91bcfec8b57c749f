"""The ladder: every step and mistake says of itself what explain says, and the docs agree."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from tests.explain.support import brief
from tilewise import simt
from tilewise.explain import explain

ROOT = Path(__file__).parent.parent.parent
STEPS = sorted((ROOT / "examples" / "ladder").glob("s*.py"))


def _module(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"ladder_{path.stem}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _kernel(path: Path) -> tuple[Any, int, Any]:
    module = _module(path)
    (kernel,) = (value for value in vars(module).values() if isinstance(value, simt.Kernel))
    size = int(re.search(r"launch\((\d+)\)", path.read_text())[1])
    return kernel, size, module.launch(size)


def _says(path: Path) -> str:
    return re.search(r'explain says: (.+)\n"""', path.read_text())[1]


@pytest.mark.parametrize("path", STEPS, ids=lambda path: path.stem)
def test_explain_says_what_the_step_says(path: Path) -> None:
    kernel, _, (grid, block, arguments) = _kernel(path)
    report = explain(kernel, grid, block, *arguments)
    assert _says(path) in brief(report)
    has_errors = any(finding.severity == "error" for finding in report.findings)
    assert report.exit_code == int(has_errors) == int(_says(path).startswith("error"))


# These touch what is not theirs, so that their values mean nothing.
OUT_OF_RANGE = ("s06_and_for_or", "s08_early_return")


@pytest.mark.parametrize(
    "path", [p for p in STEPS if p.stem not in OUT_OF_RANGE], ids=lambda path: path.stem
)
def test_values_tell_nothing_of_a_missing_barrier(path: Path) -> None:
    """In lockstep every step gives the right product, racy or not."""
    kernel, n, (grid, block, _) = _kernel(path)
    rng = np.random.default_rng(0)
    A, B = rng.integers(-3, 4, (2, n, n)).astype(np.float32)
    C = np.full((n, n), np.nan, np.float32)
    simt.launch(kernel, grid, block, A, B, n, n, C)
    assert np.array_equal(C, A @ B)


def test_the_docs_have_every_step_with_what_explain_says() -> None:
    text = (ROOT / "docs" / "ladder.md").read_text()
    for path in STEPS:
        title = path.read_text().split("\n")[0].strip('"')
        assert f"examples/ladder/{path.name}" in text, path.name
        assert _says(path) in text, path.name
        assert title.partition(": ")[2].rstrip(".") in text, title
