"""The one door to CUDA: is there a driver, is it new enough, may this process use it?

Without a driver some later calls of CUDA's Python packages do not fail but hang, so nothing of them
is touched before `require` has passed.
"""

from __future__ import annotations

import ctypes
import os
import sys
import threading
from collections.abc import Callable
from typing import Any

from tilewise.errors import DeviceError

__all__ = ["LEAST_VERSION", "LIBRARY", "check", "error_text", "is_usable", "probe", "require"]

#: The least driver, as cuDriverGetVersion counts: CUDA 13.0, which is release 580. Kernels for
#: sm_90a and above come from an assembler of CUDA 13, whose cubins no older driver loads.
LEAST_VERSION = 13000

#: The name by which the system finds the driver.
LIBRARY = "nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1"

_SUCCESS = 0
_NOT_INITIALIZED = 3
_NO_DEVICE = 100

#: Statuses that a context never recovers from, such as an illegal address or a launch that timed
#: out: every later call in the process gives them too. Source: CUresult in the driver's reference.
_LOST = (700, 702, 710, 714, 715, 716, 717, 718, 719)

_lock = threading.Lock()
_driver: Any = None
_is_forked = False


def require() -> Any:
    """Return the module ``cuda.bindings.driver``, ready to be called.

    Raises
    ------
    DeviceError
        If there is no driver, it is too old, it has no device, the Python packages are missing, or
        this process was forked from one that used CUDA; the message says which and what to do.
    """
    if _driver is not None and not _is_forked:
        return _driver
    return _open()


def is_usable() -> bool:
    """Say whether this process can use a GPU."""
    try:
        require()
    except DeviceError:
        return False
    return True


def probe(load: Callable[[str], Any] = ctypes.CDLL) -> int:
    """Return the version of the driver, after initialising it.

    Parameters
    ----------
    load : callable
        Opens a shared library by name, or raises OSError.

    Raises
    ------
    DeviceError
        If the driver is missing, too old, has no device or does not start.
    """
    try:
        library = load(LIBRARY)
    except OSError:
        raise DeviceError(
            f"there is no NVIDIA driver on this machine ({LIBRARY} was not found); install one of "
            "release 580 or later, or use devices='cpu'"
        ) from None
    status = int(library.cuInit(0))
    if status == _NO_DEVICE:
        shown = os.environ.get("CUDA_VISIBLE_DEVICES")
        hint = "" if shown is None else f"; CUDA_VISIBLE_DEVICES is {shown!r}"
        raise DeviceError(f"the NVIDIA driver finds no GPU{hint}")
    if status == _NOT_INITIALIZED:
        raise _forked()
    if status != _SUCCESS:
        raise DeviceError(f"the NVIDIA driver does not start: cuInit gives error {status}")
    version, count = ctypes.c_int(), ctypes.c_int()
    library.cuDriverGetVersion(ctypes.byref(version))
    if version.value < LEAST_VERSION:
        raise DeviceError(
            f"the NVIDIA driver is of CUDA {_dotted(version.value)}, and tilewise's kernels need "
            f"CUDA {_dotted(LEAST_VERSION)} (release 580) or later; update the driver"
        )
    library.cuDeviceGetCount(ctypes.byref(count))
    if count.value == 0:
        raise DeviceError("the NVIDIA driver finds no GPU")
    return version.value


def check(result: Any, doing: str) -> Any:
    """Return what a driver call gave after its status, or raise naming what was being done."""
    status, *values = result
    if status != _SUCCESS:
        raise DeviceError(f"{doing} failed: {error_text(status)}")
    return values[0] if len(values) == 1 else values


def error_text(status: Any) -> str:
    """Return a status of the driver as its name and what it means."""
    _, text = require().cuGetErrorString(status)
    meaning = text.decode() if isinstance(text, bytes) else "unknown"
    advice = ""
    if int(status) in _LOST:
        advice = "; no GPU can be used in this process any more, start a new one"
    return f"{getattr(status, 'name', status)} ({meaning}){advice}"


def _open() -> Any:
    global _driver
    with _lock:
        if _is_forked:
            raise _forked()
        if _driver is None:
            probe()
            try:
                import cuda.core  # noqa: F401  both packages, or neither is of use
                from cuda.bindings import driver
            except ImportError:
                raise DeviceError(
                    "there is an NVIDIA driver, and the packages that reach it are not installed: "
                    "pip install 'tilewise[cuda]'"
                ) from None
            if hasattr(os, "register_at_fork"):
                os.register_at_fork(after_in_child=_mark_forked)
            _driver = driver
        return _driver


def _mark_forked() -> None:
    global _is_forked
    _is_forked = True


def _forked() -> DeviceError:
    return DeviceError(
        "this process was forked from one that had used CUDA, which CUDA does not survive; start "
        "processes with multiprocessing.get_context('spawn') or 'forkserver'"
    )


def _dotted(version: int) -> str:
    return f"{version // 1000}.{version % 1000 // 10}"
