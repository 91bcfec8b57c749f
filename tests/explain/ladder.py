"""Reports of the ladder's kernels, each made once."""

from __future__ import annotations

import importlib.util
import re
from functools import lru_cache
from pathlib import Path

from tilewise import simt
from tilewise.explain import explain
from tilewise.explain.report import Report

__all__ = ["STEPS", "path_of", "report_of"]

_FOLDER = Path(__file__).parent.parent.parent / "examples" / "ladder"
STEPS = tuple(sorted(path.stem for path in _FOLDER.glob("s*.py")))


def path_of(step: str) -> Path:
    """The file of a step, such as ``s01_guide``."""
    return _FOLDER / f"{step}.py"


@lru_cache
def report_of(step: str) -> Report:
    """What explain says of a step, launched as its file launches it."""
    path = path_of(step)
    spec = importlib.util.spec_from_file_location(f"shown_{step}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    (kernel,) = (value for value in vars(module).values() if isinstance(value, simt.Kernel))
    grid, block, arguments = module.launch(int(re.search(r"launch\((\d+)\)", path.read_text())[1]))
    return explain(kernel, grid, block, *arguments)
