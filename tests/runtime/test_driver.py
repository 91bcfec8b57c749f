"""The door to CUDA: what it says where there is none."""

from __future__ import annotations

import ctypes
import subprocess
import sys
import textwrap
from typing import Any

import pytest

from tilewise.errors import DeviceError
from tilewise.runtime import driver


class Library:
    """The four calls of a driver that `probe` makes."""

    def __init__(self, status: int = 0, version: int = 13000, count: int = 1) -> None:
        self._status, self._version, self._count = status, version, count

    def __call__(self, name: str) -> Library:
        return self

    def cuInit(self, flags: int) -> int:
        return self._status

    def cuDriverGetVersion(self, out: Any) -> int:
        out._obj.value = self._version
        return 0

    def cuDeviceGetCount(self, out: Any) -> int:
        out._obj.value = self._count
        return 0


def test_a_driver_that_will_do() -> None:
    assert driver.probe(Library(version=13020)) == 13020


def no_library(name: str) -> ctypes.CDLL:
    raise OSError(f"{name}: cannot open shared object file")


@pytest.mark.parametrize(
    ("load", "message"),
    [
        (
            no_library,
            r"there is no NVIDIA driver on this machine \((libcuda|nvcuda).*devices='cpu'",
        ),
        (Library(status=100), "the NVIDIA driver finds no GPU"),
        (Library(count=0), "the NVIDIA driver finds no GPU"),
        (Library(status=3), "was forked .*get_context"),
        (Library(status=803), "cuInit gives error 803"),
        (Library(version=12080), r"is of CUDA 12\.8, and .* need CUDA 13\.0 \(release 580\)"),
    ],
)
def test_a_driver_that_will_not_do_is_named(load: Any, message: str) -> None:
    with pytest.raises(DeviceError, match=message):
        driver.probe(load)


def test_hidden_devices_are_mentioned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "7")
    with pytest.raises(DeviceError, match="CUDA_VISIBLE_DEVICES is '7'"):
        driver.probe(Library(status=100))


def in_a_process(code: str) -> str:
    ran = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, timeout=60
    )
    assert ran.returncode == 0, ran.stderr
    return ran.stdout


def test_asking_again_answers_again() -> None:
    """Some calls of CUDA's packages hang the second time where there is no driver; ours do not."""
    printed = in_a_process(
        """
        from tilewise import errors
        from tilewise.runtime import device, driver, launch, memory, streams
        def missing(name):
            raise OSError(name)
        probe = driver.probe
        driver.probe = lambda: probe(missing)
        for _ in range(3):
            for ask in (driver.require, device.count, lambda: device.facts(0),
                        lambda: memory.allocate(1, 0, 1), lambda: streams.synchronize(1, 0)):
                try:
                    ask()
                except errors.DeviceError as error:
                    print(str(error)[:28])
        print(driver.is_usable())
        """
    )
    assert printed == "there is no NVIDIA driver on\n" * 15 + "False\n"


def test_importing_the_runtime_touches_no_cuda() -> None:
    printed = in_a_process(
        """
        import sys
        from tilewise import kernels
        from tilewise.runtime import device, driver, launch, memory, streams
        heavy = {"cuda.core", "cuda.bindings", "triton", "numba", "torch", "cupy"}
        print(sorted(heavy & set(sys.modules)))
        """
    )
    assert printed == "[]\n"


def test_without_the_packages_it_says_what_to_install() -> None:
    printed = in_a_process(
        """
        import sys
        sys.modules["cuda.core"] = None
        from tilewise import errors
        from tilewise.runtime import driver
        driver.probe = lambda: 13000
        try:
            driver.require()
        except errors.DeviceError as error:
            print(error)
        """
    )
    assert "pip install 'tilewise[cuda]'" in printed


def test_F14_a_forked_process_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(driver, "_driver", object())
    assert driver.require() is driver._driver
    monkeypatch.setattr(driver, "_is_forked", True)
    with pytest.raises(DeviceError, match="was forked from one that had used CUDA"):
        driver.require()
