"""Options and skips shared by every test."""

from __future__ import annotations

import signal

import pytest
from hypothesis import HealthCheck, settings

from tilewise.errors import DeviceError

# A machine that is busy with other things draws examples slowly, which is no fault of a test.
settings.register_profile("busy", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("busy")

# A suite that runs in the background inherits a SIGINT that is ignored, and would not see its own.
signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--require-gpu", action="store_true", help="fail a GPU test where there is no GPU"
    )


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip a test only for the device it names and this machine lacks."""
    needed = 2 if item.get_closest_marker("multigpu") else 1
    if needed == 1 and item.get_closest_marker("gpu") is None:
        return
    from tilewise.runtime import device

    try:
        there = device.count()
    except DeviceError as error:
        missing(item.config, str(error))
    if there < needed:
        missing(item.config, f"{needed} GPUs are needed, and there is {there}")


def missing(config: pytest.Config, reason: str) -> None:
    """Skip for want of ``reason``, or fail where a GPU was required."""
    if config.getoption("--require-gpu"):
        pytest.fail(reason, pytrace=False)
    pytest.skip(reason)
