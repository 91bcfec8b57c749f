"""The demonstration: a minute, real data, and every claim on its screen checked."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import pytest

from tilewise import _demo
from tilewise.cli import main


def test_demo_multiplies_proves_classifies_and_runs_the_guide(
    capsys: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["demo"]) == 0
    out, err = capsys.readouterr()
    assert not err
    assert "cosines.npy: (1797, 1797) float32" in out
    assert re.search(r"^right: what differs is rounding$", out, re.MULTILINE)
    found = re.search(r"(\d+) of 1797 are recognised: (\d+\.\d+)%", out)
    assert found is not None
    assert float(found[2]) > 98
    assert round(100 * int(found[1]) / 1797, 2) == float(found[2])
    assert "1,048,576 threads and tilewise mul agree to the last bit" in out
    assert max(map(len, out.splitlines())) <= 110
    assert not any(tmp_path.iterdir())


def test_demo_says_so_when_something_is_wrong(capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_demo, "_GUIDE_DIGITS", 16)
    right = _demo.Mul

    def almost(A: Any, B: Any, hA: int, wA: int, wB: int, C: Any) -> None:
        right(A, B, hA, wA, wB, C)
        C[3, 4] += 1

    monkeypatch.setattr(_demo, "Mul", almost)
    assert main(["demo"]) == 1
    out = capsys.readouterr().out
    assert "DIFFER" in out
    assert "WRONG at row 3, column 4" in out
    assert "please report it" in out


def test_demo_without_its_data_says_what_to_install(
    capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    assert main(["demo"]) == 2
    out, err = capsys.readouterr()
    assert not out
    assert (
        err == "tilewise: the demo multiplies scikit-learn's digits: pip install 'tilewise[demo]'\n"
    )
