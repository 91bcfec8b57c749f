"""What makes many small products quick: one BLAS thread, and no wait for the disk."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
from threadpoolctl import threadpool_limits


@pytest.fixture(autouse=True, scope="package")
def one_blas_thread() -> Iterator[None]:
    """On a busy machine the threads of one small product wait for each other."""
    with threadpool_limits(1, user_api="blas"):
        yield


@pytest.fixture(autouse=True)
def no_fsync(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fsync", lambda _: None)
