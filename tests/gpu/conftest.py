"""What GPU tests share: the kernels they launch, and memory with guards around it."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.conftest import missing
from tilewise import _api, _streamed, kernels
from tilewise.errors import DeviceError
from tilewise.outofcore import device_choice
from tilewise.runtime import device

#: Where tests/kernels/test_compile.py puts the test kernels; a GPU machine needs no compiler then.
BUILT = Path(__file__).parent / "built"


@pytest.fixture(scope="session")
def built(request: pytest.FixtureRequest) -> Callable[[str], kernels.Built]:
    """Return a function that finds a kernel of tests/gpu/kernels.py for device 0."""
    try:
        for kernel in kernels.manifest("kernels", BUILT).values():
            kernel.code()
    except DeviceError as error:
        if importlib.util.find_spec("triton") is None:
            missing(request.config, f"Triton is not installed, and {error}")
        from tilewise.kernels.compile import build

        report = build(["tests.gpu.kernels"], folder=BUILT)
        assert not report.failed, report.failed
    capability = device.facts(0).capability
    return lambda name: kernels.find("kernels", name, capability, BUILT)


@pytest.fixture
def cuts_everything(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Cut products of any size, which otherwise only larger ones are worth."""
    monkeypatch.setattr(_streamed, "_STREAMED_BYTES", 0)
    monkeypatch.setattr(device_choice, "_PANEL_BYTES", 1)
    monkeypatch.setattr(device_choice, "_LINE_BYTES", 1)
    _api._cached_plan.cache_clear()
    yield
    _api._cached_plan.cache_clear()
