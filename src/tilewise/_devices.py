"""Which device multiplies: what ``devices=`` names, where operands are, and what is worth a GPU.

How a product is cut for the GPUs found here is planned elsewhere (`_plan`, `_streamed`).
"""

from __future__ import annotations

import math
import os
import re
from typing import TYPE_CHECKING, Any

import numpy as np

from . import _memory
from .errors import DeviceError, OptionError

if TYPE_CHECKING:
    from ._streamed import Machine
    from .runtime.device import DeviceFacts

__all__ = ["device_names", "gpu_for", "machine_beside", "machine_for"]

#: Multiplications below which host operands stay on the CPU unless a GPU is asked for: to look for
#: one, and to start it, takes longer than they do.
_OFFERED_WORK = 1 << 34


def device_names(devices: Any) -> tuple[str, ...]:
    """Return the devices in ``devices=``, each by its full name, or raise OptionError."""
    names = (devices,) if isinstance(devices, str) else devices
    try:
        names = tuple(names)
    except TypeError:
        names = (devices,)
    if not names or not all(isinstance(name, str) for name in names):
        raise OptionError(
            f"devices={devices!r} is not a device; give 'cpu', 'cuda:0' or a list of such names"
        )
    found = []
    for name in names:
        match = re.fullmatch(r"cpu|cuda(?::(\d+))?", name)
        if match is None:
            raise OptionError(f"device {name!r} is not 'cpu', 'cuda:0', 'cuda:1' and so on")
        found.append("cpu" if name == "cpu" else f"cuda:{int(match[1] or 0)}")
    if len(set(found)) < len(found):
        raise OptionError(f"devices={list(names)} names a device twice; name each once")
    return tuple(found)


def gpu_for(where: str, devices: tuple[str, ...] | None) -> DeviceFacts | None:
    """Return the facts of the GPU that device operands are on, or None for the CPU."""
    if not where.startswith("cuda"):
        return None
    if len(devices or ()) > 1:
        raise OptionError(
            f"devices={list(devices or ())}: operands in device memory are multiplied where they "
            "are; several devices share operands in host memory"
        )
    asked = devices[0] if devices else where
    from .runtime.device import facts, index_of

    try:
        index = index_of(where if asked == "cpu" else asked)
    except DeviceError as error:
        raise DeviceError(f"device {asked!r} was asked for, and {error}") from None
    if asked == "cpu" or where != f"cuda:{index}":
        raise DeviceError(
            f"devices={asked!r} was asked for, and the operands are on {where}; copy them there, "
            "or leave devices out"
        )
    return facts(index)


def machine_for(x: Any, y: Any, names: tuple[str, ...] | None, memory: Any) -> Machine | None:
    """Return what host operands are to be multiplied on, or None for the CPU alone.

    If nobody says, a GPU is thought of when there is enough work, and there is one.
    """
    if names == ("cpu",):
        return None
    if names is None:
        if type(x) is type(y) is np.ndarray and x.size * y.size < _OFFERED_WORK:
            return None  # at once: there are no more multiplications than pairs of elements
        m, n = x.shape[-2:-1] or (1,), y.shape[1:][-1:] or (1,)
        work = max(math.prod(x.shape) * n[0], m[0] * math.prod(y.shape))
        if work < _OFFERED_WORK or getattr(x, "where", "memory") != "memory":
            return None
    from .runtime import device, driver

    if names is None and not driver.is_usable():
        return None
    found = []
    for name in names or ("cuda:0",):
        if name == "cpu":
            raise OptionError(
                f"devices={list(names or ())}: the CPU does not share a product with a GPU; name "
                "one or the other"
            )
        try:
            found.append(device.index_of(name))
        except DeviceError as error:
            raise DeviceError(f"device {name!r} was asked for, and {error}") from None
    is_gram = (
        type(x) is type(y) is np.ndarray
        and x.__array_interface__["data"][0] == y.__array_interface__["data"][0]
    )
    gpus = tuple(map(device.facts, found))
    return _machine(gpus, memory, is_gram=is_gram, is_offer=names is None)


def machine_beside(where: str, names: tuple[str, ...] | None, memory: Any) -> Machine:
    """Return what multiplies arrays of which some are on the GPU ``where``: that one."""
    gpu = gpu_for(where, names)
    assert gpu is not None
    return _machine((gpu,), memory)


def _machine(
    gpus: tuple[DeviceFacts, ...], memory: Any, *, is_gram: bool = False, is_offer: bool = False
) -> Machine:
    from ._streamed import Machine
    from .runtime import device
    from .runtime.memory import kept_bytes

    free = tuple(device.free_bytes(gpu.index) + kept_bytes(gpu.index) for gpu in gpus)
    return Machine(
        gpus=gpus,
        device_bytes=tuple(
            _device_budget(free_bytes, memory, gpu.memory_bytes)
            for gpu, free_bytes in zip(gpus, free, strict=True)
        ),
        free_bytes=free,
        cores=_cores(),
        is_gram=is_gram,
        is_offer=is_offer,
    )


def _device_budget(free_bytes: int, memory: Any, whole_bytes: int) -> int:
    """Return what may be taken of a device: what is asked for, as far as it is free.

    If nobody asks, a little of what is free is left, and the rest counted in few steps: so plans
    are found again, and files begun so are gone on with when somewhat less is free.
    """
    asked = _memory.parse_budget(memory, whole_bytes)
    if asked is not None and asked <= free_bytes * 63 // 64:
        return asked
    step = 1 << max(free_bytes.bit_length() - 5, 0)
    return free_bytes * 15 // 16 // step * step


def _cores() -> int:
    """Return how many cores this process may use, as far as the system says so."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
