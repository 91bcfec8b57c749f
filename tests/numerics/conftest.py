"""Both ways `check` has of looking at a product: recomputing it, and sums over random signs."""

from __future__ import annotations

import pytest

from tilewise.numerics import room


@pytest.fixture
def sums_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make `check` use random signs however small the product is."""
    monkeypatch.setattr(room, "_recomputes", lambda m, n, k, result: result.kind == "b")


@pytest.fixture(params=["recomputed", "sums"])
def way(request: pytest.FixtureRequest) -> str:
    """Run a test once in each way."""
    if request.param == "sums":
        request.getfixturevalue("sums_only")
    return str(request.param)
