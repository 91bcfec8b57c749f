"""Streams of other libraries, as the number the driver knows them by."""

from __future__ import annotations

from typing import Any

from tilewise.errors import DeviceError, OptionError

from . import driver
from .device import current

__all__ = ["DEFAULT", "follow", "handle_of", "identity", "synchronize"]

#: CUDA's default stream, by the name that means it whatever a process was compiled with.
DEFAULT = 1

_WITHOUT_TIMING = 2  # CU_EVENT_DISABLE_TIMING

#: The null, the legacy default and the per-thread default stream have no device of their own.
_WITHOUT_DEVICE = (0, 1, 2)


def handle_of(stream: Any, index: int) -> int:
    """Return the handle of ``stream``, after seeing that it belongs to device ``index``.

    Parameters
    ----------
    stream : object or None
        Anything with ``__cuda_stream__``; None is CUDA's default stream.
    index : int
        The device that the operands are on.

    Raises
    ------
    OptionError
        If it is no stream.
    DeviceError
        If it is another device's, or closed.
    """
    if stream is None:
        return DEFAULT
    protocol: Any = getattr(stream, "__cuda_stream__", None)
    try:
        version, handle = protocol() if callable(protocol) else protocol
        handle = int(handle)
    except (TypeError, ValueError):
        raise OptionError(
            f"stream={stream!r} is not a stream: it has no usable __cuda_stream__; pass one of "
            "cuda.core, CuPy, numba or torch, or wrap a handle with "
            "cuda.core.Stream.from_handle(handle)"
        ) from None
    if version != 0:
        raise OptionError(f"stream={stream!r} speaks version {version} of __cuda_stream__, not 0")
    if handle not in _WITHOUT_DEVICE:
        cuda = driver.require()
        status, device = cuda.cuStreamGetDevice(handle)
        if status != 0:
            raise DeviceError(f"stream={stream!r} cannot be used: {driver.error_text(status)}")
        if int(device) != index:
            raise DeviceError(
                f"stream={stream!r} is of device cuda:{int(device)} and the operands are on "
                f"cuda:{index}; pass a stream of that device"
            )
    return handle


def identity(handle: int, index: int) -> int | None:
    """Return a number that no other stream of this process has or will have; handles come back.

    None stands for a stream whose work now goes into a CUDA graph.
    """
    with current(index) as cuda:
        status, mode = cuda.cuStreamIsCapturing(handle)
        # While another stream is captured, the default one answers with an error; it is harmless.
        if status == 0 and int(mode) != 0:
            return None
        return int(driver.check(cuda.cuStreamGetId(handle), "asking for a stream's identity"))


def follow(handle: int, other: int, index: int) -> None:
    """Let what comes on a stream wait for what is on another now."""
    with current(index) as cuda:
        doing = f"ordering streams of cuda:{index}"
        event = driver.check(cuda.cuEventCreate(_WITHOUT_TIMING), doing)
        try:
            driver.check(cuda.cuEventRecord(event, other), doing)
            driver.check(cuda.cuStreamWaitEvent(handle, event, 0), doing)
        finally:
            cuda.cuEventDestroy(event)


def synchronize(handle: int, index: int) -> None:
    """Wait for what is on a stream, and raise what any of it did wrong."""
    with current(index) as cuda:
        driver.check(cuda.cuStreamSynchronize(handle), f"waiting for a stream of cuda:{index}")
