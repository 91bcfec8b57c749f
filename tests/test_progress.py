"""What people see of a long product: a bar with rate, limit and time left, or a line at times."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tilewise import _progress
from tilewise.cli import main
from tilewise.outofcore.pipeline import Progress


def reached(share: float, seconds: float, waited: float = 0, kept: float = 0) -> Progress:
    total = 10**12
    return Progress(
        flops=int(share * total),
        total_flops=total,
        read_bytes=10**6,
        written_bytes=10**5,
        seconds=seconds,
        waited_seconds=waited,
        kept_flops=int(kept * total),
    )


def test_rate_limit_and_time_left_are_those_of_this_run() -> None:
    now = reached(0.75, 10, kept=0.25)
    assert now.flops_per_s == 0.5e11
    assert now.seconds_left == 5
    assert now.limit == "compute"
    assert reached(0.5, 10, waited=6).limit == "disk"
    assert reached(0, 0).flops_per_s == 0


def test_without_a_terminal_a_line_every_half_minute(capsys: Any) -> None:
    with _progress.shown("C.npy", is_quiet=False, last="checking") as report:
        for share in range(1, 101):
            report(reached(share / 100, share * 0.9, waited=share * 0.8))
    out, err = capsys.readouterr()
    assert not out
    lines = err.splitlines()
    assert len(lines) == 3
    assert lines[2] == "C.npy: 100%, checking"
    line = r"C\.npy: 34%, 11\.1 GFLOP/s, limited by disk, 59\.4 s left"
    assert re.fullmatch(line, lines[0])


def test_quietly_nothing_is_said(capsys: Any) -> None:
    with _progress.shown("C.npy", is_quiet=True) as report:
        for share in range(1, 101):
            report(reached(share / 100, share * 0.9))
    assert capsys.readouterr() == ("", "")


def test_on_a_terminal_a_bar(tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    np.save("X.npy", np.ones((300, 300)))
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "120")
    assert main(["mul", "X.npy", "X.npy", "-o", "C.npy", "--memory", "600KiB"]) == 0
    err = capsys.readouterr().err
    assert re.search(r"\d GFLOP/s, limited by (disk|compute), [\d.]+ \w+ left", err)
    assert "C.npy" in err
