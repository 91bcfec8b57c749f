"""How long a schedule of a GPU is expected to take, and what limits it: bytes over rates.

Pure. What a rate is, is in ``device_job``; by these times `device_choice` takes a schedule.
"""

from __future__ import annotations

import math

from .cuts import count
from .device_job import Rates, Store
from .device_schedule import Schedule

__all__ = ["expected"]

#: A line that is copied on the host takes as long as so many bytes more (docs/facts.md).
_LINE_BYTES = 1 << 10


def expected(schedule: Schedule, rates: Rates, compute_s: float | None = None) -> tuple[float, str]:
    """Return the time that all is expected to take, and what limits it."""
    read, written = sum(_read(schedule)), schedule.written_bytes
    bounds = {
        "compute": schedule.compute_s if compute_s is None else compute_s,
        "the bus": max(read, written) / rates.bus_bytes,
        "the host's memory": _copied(schedule) / rates.host_bytes,
        "hand-offs between threads": schedule.launches * rates.launch_s,
        "the files": (read + written) / rates.disk_bytes + _stretches(schedule) * rates.stretch_s,
    }
    limit = max(bounds, key=lambda name: bounds[name])
    first = sum(
        math.prod(store.lead) * store.lines * store.pitch for store in _first_stores(schedule)
    )
    if limit == "the files":  # they are read all the time, the first panels among the rest
        first = 0
    # Nothing is computed while the first panels come, and nothing else while the last part of C
    # leaves; and a lone buffer is not filled while it is read, or emptied while it is written.
    job = schedule.job
    last = 0
    if job.c_strides is None:
        last = job.c_store(schedule.tile_m, schedule.tile_n).nbytes * schedule.at_once
    alone = (first + last) / min(rates.bus_bytes, rates.disk_bytes)
    lines = count(job.m, schedule.tile_m), count(job.n, schedule.tile_n)
    if schedule.order == "corner":  # each panel brings more work than the one before it
        alone += bounds["compute"] / (1 if schedule.loads_first else min(3, max(lines)))
    outer = {"rows": 0, "columns": 1}.get(schedule.order)
    if outer is not None:
        # With a second buffer, the next line's panel comes while the last panels of the other
        # operand, which are there already, are multiplied.
        is_double = (schedule.a_slots, schedule.b_slots)[outer] > 1
        meanwhile = 2 * bounds["compute"] / schedule.launches if is_double else 0.0
        alone += (lines[outer] - 1) * max(first / rates.bus_bytes - meanwhile, 0.0)
    if schedule.c_slots == 1 and not schedule.holds_c:
        alone += written / rates.bus_bytes
    return rates.start_s + bounds[limit] + alone, limit


def _read(schedule: Schedule) -> tuple[int, int]:
    """Return bytes read of a and b, by formula; what goes back and forth counts whole."""
    job = schedule.job
    a, b = (
        x.nbytes(x.size, job.k) * max(math.prod(x.batch), 1) * passes
        for x, passes in zip((job.a, job.b), _passes(schedule), strict=True)
    )
    return a, 0 if job.is_gram else b


def _copied(schedule: Schedule) -> float:
    """Return what the host's memory takes as long as, in bytes copied in one stretch."""
    job, (a, b), c = schedule.job, _read(schedule), schedule.written_bytes
    copied = [
        (a, job.store(0, schedule.tile_m, schedule.tile_k), job.store(0, job.m, job.k)),
        (b, job.store(1, schedule.tile_n, schedule.tile_k), job.store(1, job.n, job.k)),
        (c, job.c_store(schedule.tile_m, schedule.tile_n), job.c_store(job.m, job.n)),
    ]
    lines = sum(
        nbytes * _LINE_BYTES / (part.width * part.itemsize)
        for nbytes, part, whole in copied
        if part.width < whole.width
    )
    return a + b + c * (1 + job.is_fresh) + lines


def _passes(schedule: Schedule) -> tuple[int, int]:
    """Return how often each operand is read; what goes back and forth counts whole."""
    rows, columns = count(schedule.job.m, schedule.tile_m), count(schedule.job.n, schedule.tile_n)
    a_passes = b_passes = 1
    if schedule.order != "corner":
        if schedule.pieces > 1 or (schedule.order == "columns" and schedule.a_slots < rows):
            a_passes = columns
        if schedule.pieces > 1 or (schedule.order == "rows" and schedule.b_slots < columns):
            b_passes = rows
    return a_passes, b_passes


def _stretches(schedule: Schedule) -> int:
    """Return in how many stretches operands in files are read, and a result is written."""
    job = schedule.job
    columns = count(job.n, schedule.tile_n)
    found = job.matrices * (count(job.m, schedule.tile_m) if columns == 1 else job.m * columns)
    for x, tile, passes in zip(
        (job.a, job.b), (schedule.tile_m, schedule.tile_n), _passes(schedule), strict=True
    ):
        panels = 1 if schedule.loads_first else count(x.size, tile)
        if x.along_k:
            each = panels if schedule.pieces == 1 else x.size * schedule.pieces
        else:
            each = schedule.pieces if panels == 1 else job.k * panels
        found += max(math.prod(x.batch), 1) * passes * each
    return found


def _first_stores(schedule: Schedule) -> list[Store]:
    job = schedule.job
    lead = (schedule.at_once,) if schedule.at_once > 1 else ()
    stores = []
    if not job.a.is_there:
        stores.append(job.store(0, schedule.tile_m, schedule.tile_k, lead=lead))
    if not (job.is_gram or job.b.is_there):
        stores.append(job.store(1, schedule.tile_n, schedule.tile_k, lead=lead))
    return stores
