"""What the package exports, imports and weighs."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import tilewise

ROOT = Path(__file__).parents[1]

EXPORTED = {
    "TilewiseError",
    "check",
    "explain",
    "gemm",
    "guide",
    "matmul",
    "multiply_files",
    "plan",
}


def test_exported_names() -> None:
    assert set(tilewise.__all__) == EXPORTED
    assert all(hasattr(tilewise, name) for name in EXPORTED)


def test_import_brings_numpy_and_nothing_heavy() -> None:
    program = """
import sys, numpy
before = set(sys.modules)
import tilewise
new = {name.partition(".")[0] for name in set(sys.modules) - before}
print(sorted(new - set(sys.stdlib_module_names) - {"numpy", "tilewise"}))
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "[]"


def test_import_is_quick() -> None:
    program = """
import time, numpy
start = time.process_time(); import tilewise; print(time.process_time() - start)
"""
    run = [sys.executable, "-c", program]
    times = [float(subprocess.run(run, capture_output=True, check=True).stdout) for _ in range(5)]
    assert min(times) < 0.150


def test_no_module_outgrows_its_room() -> None:
    sizes = {
        path.relative_to(ROOT): len(path.read_text().splitlines())
        for path in (ROOT / "src").rglob("*.py")
    }
    assert {str(path): size for path, size in sizes.items() if size > 600} == {}


def test_numerics_and_simt_load_no_room_above_them() -> None:
    source = ROOT / "src" / "tilewise"
    allowed = {
        "numerics/check.py": {"_arrays", "_memory", "_operand"},
        "numerics/room.py": {"_memory"},
    }
    for room in ("numerics", "simt"):
        for path in (source / room).glob("*.py"):
            found = set()
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.ImportFrom) and node.level != 1:
                    parts = ["tilewise"] * (node.level == 2) + (node.module or "").split(".")
                    names = [each.name for each in node.names]
                    if parts[0] == "tilewise":
                        found |= {name for name in parts[1:2] if name} or set(names)
            here = str(path.relative_to(source))
            assert found <= {"errors", room, *allowed.get(here, ())}, here


def test_explain_is_the_function_whatever_was_imported_first() -> None:
    for first in ("import tilewise.explain", "from tilewise.explain import claims", "pass"):
        program = f"{first}\nimport tilewise as tw\nfrom tilewise.explain import claims\n"
        program += "assert callable(tw.explain) and claims.guide\n"
        subprocess.run([sys.executable, "-c", program], check=True)


def test_names_that_are_imported_later_are_listed_and_found() -> None:
    assert set(dir(tilewise)) >= EXPORTED
    with pytest.raises(AttributeError, match="no attribute 'multiply'"):
        tilewise.multiply  # noqa: B018
