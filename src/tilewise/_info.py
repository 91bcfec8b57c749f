"""What a bug report needs to know of a machine: versions, BLAS, memory, devices."""

from __future__ import annotations

import os
import platform
import sys
from importlib import metadata
from typing import TYPE_CHECKING, Any

import numpy as np

from . import __version__, _memory
from .errors import TilewiseError

if TYPE_CHECKING:
    from .runtime.device import DeviceFacts

__all__ = ["collect"]

#: Packages that tilewise uses if they are there.
_OPTIONAL = (
    "ml_dtypes",
    "scikit-learn",
    "numba",
    "cuda-core",
    "triton",
    "torch",
    "dask",
    "zarr",
    "h5py",
)

#: What OpenBLAS, MKL, BLIS and Accelerate read to set their number of threads.
_THREAD_SETTINGS = (
    "OPENBLAS_NUM_THREADS",
    "MKL_NUM_THREADS",
    "BLIS_NUM_THREADS",
    "VECLIB_MAXIMUM_THREADS",
    "OMP_NUM_THREADS",
)


def collect() -> dict[str, Any]:
    """Return names and values, in the order they are best read."""
    size = _memory.format_bytes
    return {
        "tilewise": __version__,
        "python": f"{sys.version.split()[0]} ({platform.python_implementation()})",
        "numpy": np.__version__,
        "blas": _blas(),
        "threads": _threads(),
        "system": platform.platform(),
        "processor": _processor(),
        "memory": f"{size(_memory.available_bytes())} free of {size(_memory.total_bytes())}",
        "devices": _devices(),
        "kernels": _kernels(),
        "optional": {name: version for name in _OPTIONAL if (version := _version(name))},
    }


def _blas() -> str:
    try:
        blas = np.show_config(mode="dicts")["Build Dependencies"]["blas"]
    except Exception:  # an older NumPy, or one built without this record
        return "unknown"
    return f"{blas.get('name', 'unknown')} {blas.get('version', '')}".strip()


def _threads() -> str:
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    settings = [f"{name}={os.environ[name]}" for name in _THREAD_SETTINGS if name in os.environ]
    return f"{usable} cores usable of {os.cpu_count()}" + "".join(f", {text}" for text in settings)


def _processor() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as lines:
            for line in lines:
                if line.startswith("model name"):
                    return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def _devices() -> list[str]:
    from .runtime import device

    try:
        gpus = [device.facts(index) for index in range(device.count())]
    except TilewiseError as error:
        return ["cpu", f"no GPU: {error}"]
    return ["cpu", *(_gpu_text(gpu) for gpu in gpus)]


def _gpu_text(gpu: DeviceFacts) -> str:
    capability = ".".join(map(str, gpu.capability))
    return (
        f"cuda:{gpu.index} {gpu.name}, compute capability {capability}, "
        f"{_memory.format_bytes(gpu.memory_bytes)}, driver of CUDA {gpu.driver_version / 1000:.1f}"
    )


def _kernels() -> dict[str, str]:
    from .kernels import BUILT, manifest

    families = {}
    for path in sorted(BUILT.glob("*/manifest.json")):
        built = manifest(path.parent.name)
        targets = sorted({target for _, target in built})
        families[path.parent.name] = f"{len(built)} for {', '.join(targets)}"
    return families


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
