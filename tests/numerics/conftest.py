"""Both ways `check` has of looking at a product: recomputing it, and sums over random signs."""

from __future__ import annotations

import pytest

from tilewise.numerics import room


@pytest.fixture
def sums_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make `check` use random signs however small the product is."""
    for limit in ("RECOMPUTED_WORK", "RECOMPUTED_SIDE", "RECOMPUTED_INTEGER_WORK"):
        monkeypatch.setattr(room, limit, 0)


@pytest.fixture(params=["recomputed", "sums"])
def way(request: pytest.FixtureRequest) -> str:
    """Run a test once in each way."""
    if request.param == "sums":
        request.getfixturevalue("sums_only")
    return str(request.param)
