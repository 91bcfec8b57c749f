"""How long a product of files should take: from the rates of this machine, measured just now."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from ._memory import format_bytes
from ._operand import Operand

if TYPE_CHECKING:
    from ._plan import Plan
    from .outofcore.files import Matrix

__all__ = ["duration", "estimate", "in_words"]

#: For how long small matrices are multiplied, and files read, to learn a rate.
_RATE_SECONDS = 0.2
_SAMPLE_BYTES = 64 << 20
_STRETCH_BYTES = 4 << 20


def estimate(plan: Plan, files: Sequence[Matrix | Operand] = ()) -> dict[str, Any]:
    """Return the seconds that a plan should take, and what it will wait for.

    Parameters
    ----------
    plan : Plan
        Of a product of files.
    files : sequence of operands, optional
        Both of them; those that are there are read for a moment. Without one nobody knows the disk,
        and the time is that of the arithmetic.
    """
    flops = 2 * math.prod(plan.batch) * plan.m * plan.n * plan.k
    on_gpus = getattr(plan.schedule, "beside_disk", None)
    if on_gpus is None:
        rate, beside_disk = _compute_rate(plan), "compute"
        rated = "of a small product just now"
    else:
        seconds, beside_disk = on_gpus()
        rate, rated = flops / seconds, f"of {plan.device}"
    moved = plan.moved_bytes
    m, k, n = _tile(plan)
    panels = zip(files, ((m, k), (k, n)), strict=False)
    rates = [
        found
        for file, panel in panels
        if not isinstance(file, Operand) and (found := _read_rate(file, panel))
    ]
    disk = min(rates, default=None)
    compute_seconds = flops / rate
    disk_seconds = 0.0 if disk is None else moved / disk
    return {
        "seconds": max(compute_seconds, disk_seconds),
        "limit": "disk" if disk_seconds > compute_seconds else beside_disk,
        "flops_per_s": rate,
        "rated": rated,
        "disk_bytes_per_s": disk,
        "least_disk_bytes_per_s": moved * rate / max(flops, 1),
    }


def in_words(expected: dict[str, Any]) -> str:
    """Return the lines ``time`` and ``limit`` for people."""
    words = {"disk": "the disk", "bus": "the bus", "compute": "arithmetic"}
    least = format_bytes(int(expected["least_disk_bytes_per_s"]))
    gigaflops = expected["flops_per_s"] / 1e9
    time_line = f"time       about {duration(expected['seconds'])}, at the {gigaflops:.3g} GFLOP/s "
    time_line += expected["rated"]
    if expected["disk_bytes_per_s"] is None:
        limit = f"{words[expected['limit']]}, if the disk moves {least} in a second; else the disk"
    else:
        disk = format_bytes(int(expected["disk_bytes_per_s"]))
        time_line += f", and the {disk}/s of these files"
        limit = f"{words[expected['limit']]}: it would take {least}/s to keep up"
    return f"{time_line}\nlimit      {limit}"


def duration(seconds: float) -> str:
    """Return a time span as people say it: ``3.2 minutes``."""
    for unit, size in (("days", 86400), ("hours", 3600), ("minutes", 60), ("s", 1)):
        if seconds >= 2 * size:
            return f"{seconds / size:.1f} {unit}"
    return f"{max(seconds, 1e-3):.3f} s"


def _tile(plan: Plan) -> tuple[int, int, int]:
    """Return what is multiplied at a time, of m, k and n."""
    if plan.schedule is None:
        return plan.m, plan.k, plan.n
    m, n, k = plan.schedule.tile
    return m, k, n


def _compute_rate(plan: Plan) -> float:
    """Return the operations a second of a small product of the plan's kind, added to a sum."""
    from ._api import matmul

    most = 1024 if plan.method in ("blas", "panels", "or-and") else 256
    m, k, n = (max(min(size, most), 1) for size in _tile(plan))
    x, y = np.ones((m, k), plan.a.dtype), np.ones((k, n), plan.b.dtype)
    total = np.zeros((m, n), plan.dtype)
    seconds: list[float] = []
    while sum(seconds) < _RATE_SECONDS:
        start = time.perf_counter()
        product = matmul(x, y, dtype=plan.dtype)
        if k < plan.k:
            total += product
        seconds.append(time.perf_counter() - start)
    return 2 * m * k * n / min(seconds)


def _read_rate(file: Matrix, panel: tuple[int, int]) -> float | None:
    """Return the bytes a second of panels from a file, not from the memory it may be cached in."""
    from .outofcore.flat import FlatFile
    from .outofcore.stores import parts

    if not file.nbytes:
        return None
    chunks = file.chunks or (1,)
    most = max(_STRETCH_BYTES // file.dtype.itemsize, 1)
    if isinstance(file, FlatFile):
        if hasattr(os, "posix_fadvise"):
            descriptor = file.file.fileno()
            os.posix_fadvise(descriptor, file.offset, _SAMPLE_BYTES, os.POSIX_FADV_DONTNEED)
        if len(file.shape) == 2:
            rows = min(panel[0], max(most // panel[1], 1))
            chunks, most = (rows, min(panel[1], most)), 1
        else:
            file = replace(file, shape=(math.prod(file.shape),), is_fortran=False)
    everything = tuple(slice(0, size) for size in file.shape)
    largest = max(_STRETCH_BYTES, math.prod(chunks) * file.dtype.itemsize)
    buffer = np.empty(largest, np.uint8)
    read = 0
    start = time.perf_counter()
    for i, part in enumerate(parts(everything, chunks, most)):
        if i == 1:  # the first one opens what there is to open
            read, start = 0, time.perf_counter()
        read += file.read(part, buffer).nbytes
        if read >= _SAMPLE_BYTES or (i and time.perf_counter() - start > _RATE_SECONDS):
            break
    return read / (time.perf_counter() - start)
