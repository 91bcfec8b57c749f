"""How long a product of files should take: learnt on pieces of its own size."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tilewise import _api, _estimate
from tilewise._operand import Operand
from tilewise.outofcore.files import open_matrix
from tilewise.outofcore.flat import FlatFile
from tilewise.outofcore.planning import plan_files


@pytest.fixture
def seen(monkeypatch: Any) -> dict[str, set[Any]]:
    """The boxes that are read, and the matrices that are multiplied, to learn rates."""
    monkeypatch.setattr(_estimate, "_RATE_SECONDS", 0.01)
    found: dict[str, set[Any]] = {"read": set(), "multiplied": set()}
    read, multiply = FlatFile.read, _api.matmul

    def reads(self: FlatFile, box: Any, buffer: Any) -> Any:
        found["read"].add(tuple(part.stop - part.start for part in box))
        return read(self, box, buffer)

    def multiplies(a: Any, b: Any, **options: Any) -> Any:
        found["multiplied"].add((a.shape, b.shape))
        return multiply(a, b, **options)

    monkeypatch.setattr(FlatFile, "read", reads)
    monkeypatch.setattr(_api, "matmul", multiplies)
    return found


@pytest.mark.parametrize("memory", ["512KiB", "1GiB"])
def test_rates_are_those_of_the_plans_own_panels(
    tmp_path: Path, seen: dict[str, set[Any]], memory: str
) -> None:
    for name, order in (("A.npy", "C"), ("B.npy", "F")):
        np.save(tmp_path / name, np.ones((900, 900), "float32", order))
    with (
        open_matrix(tmp_path / "A.npy", "a") as a,
        open_matrix(tmp_path / "B.npy", "b") as b,
    ):
        plan = plan_files(a, b, memory=memory)
        expected = _estimate.estimate(plan, [a, b])
    assert expected["seconds"] > 0
    assert expected["limit"] in ("disk", "compute")
    schedule = plan.schedule
    assert schedule is not None
    m, k, n = (900,) * 3
    if memory == "512KiB":
        m, k, n = schedule.tile_m, schedule.tile_k, schedule.tile_n
        assert max(m, n) < 900
    assert seen["multiplied"] == {((m, k), (k, n))}
    assert {(m, k), (k, n)} & seen["read"]


def test_without_files_it_is_the_arithmetic_that_counts() -> None:
    plan = plan_files(*(Operand((2000, 2000), np.dtype("f4"), (8000, 4)) for _ in range(2)))
    expected = _estimate.estimate(plan, [plan.a, plan.b])
    assert expected["disk_bytes_per_s"] is None
    assert expected["limit"] == "compute"
