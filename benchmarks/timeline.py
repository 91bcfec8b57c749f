"""A time line of one product of host arrays on a GPU: what its threads and lanes did, and when.

    python -m benchmarks.timeline 16384 16384 16384 --save trace.json

Operands are normal float32 in pageable memory. The pipeline is watched from outside, so nothing in
it knows of this; watching costs it a few per cent. The picture shows, for each part of the time,
how busy the bus and the kernels were, in tenths, and how many threads did what, on average. The
file is in Chrome's trace format (https://ui.perfetto.dev shows it).
"""

from __future__ import annotations

import argparse
import json
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple
from unittest import mock

import numpy as np

import tilewise as tw
from benchmarks.host import normal
from tilewise.errors import DeviceError
from tilewise.outofcore import device_pipeline, slices
from tilewise.runtime import device, driver, pinned, transfers

_COLUMNS = 72
_MARKS = 1 << 14  # events of a GPU: two for each slice, two or so for each launch
_LANES = ("in", "compute", "out")
#: What a thread does, as the picture names it; what is left of a task is calls and locks.
_DOINGS = ("gather", "scatter", "wait", "hand over")


class Span(NamedTuple):
    """Something that took time: seconds since the product began."""

    row: str
    name: str
    start: float
    stop: float
    nbytes: int = 0


class Recorder:
    """The spans of one product; those of a thread do not overlap: what is inside cuts the outer."""

    def __init__(self) -> None:
        self.spans: list[Span] = []
        self.begun = time.perf_counter()
        self.here = threading.local()

    @contextmanager
    def span(self, name: str, nbytes: int = 0) -> Iterator[None]:
        row = f"thread {threading.get_ident()}"
        outer: list[list[Any]] = self.here.__dict__.setdefault("open", [])
        start = time.perf_counter()
        if outer:
            self.add(row, outer[-1][0], outer[-1][1], start)
        outer.append([name, start])
        try:
            yield
        finally:
            stop = time.perf_counter()
            self.add(row, name, outer.pop()[1], stop, nbytes)
            if outer:
                outer[-1][1] = stop

    def add(self, row: str, name: str, start: float, stop: float, nbytes: int = 0) -> None:
        self.spans.append(Span(row, name, start - self.begun, stop - self.begun, nbytes))


def main(arguments: Sequence[str] = ()) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("sizes", nargs="*", type=int, default=[4096], help="m, n and k, or one")
    parser.add_argument("--memory", help="a budget, such as 2GiB")
    parser.add_argument("--devices", default="cuda:0", help="such as cuda:0,cuda:1")
    parser.add_argument("--reuse", action="store_true", help="write into a result from before")
    parser.add_argument("--save", help="a file for the trace")
    given = parser.parse_args(arguments)
    try:
        device.count()
    except DeviceError as error:
        print(f"timeline: not run, {error}")
        return
    m, n, k = given.sizes if len(given.sizes) == 3 else given.sizes[:1] * 3
    a, b = normal(m, k, seed=1), normal(k, n, seed=2)
    options = {"devices": given.devices.split(","), "memory": given.memory}
    out = np.zeros((m, n), np.float32) if given.reuse else None
    plan = tw.plan(a, b, out=out, **options)
    print(plan)
    for _ in range(2):
        plan(a, b, out=out)
    start = time.perf_counter()
    plan(a, b, out=out)
    alone = time.perf_counter() - start
    with watched() as recorder:
        plan(a, b, out=out)
        took = time.perf_counter() - recorder.begun
    print(f"\n{1e3 * alone:.1f} ms; watched, {1e3 * took:.1f} ms\n")
    print(picture(recorder.spans, took))
    print(totals(recorder.spans))
    if given.save:
        with open(given.save, "w", encoding="utf-8") as file:
            json.dump(chrome(recorder.spans), file)


@contextmanager
def watched() -> Iterator[Recorder]:
    """Note what host products do meanwhile."""
    recorder = Recorder()
    run = device_pipeline._Run

    def noted(real: Callable[..., Any], name: str) -> Callable[..., Any]:
        def task(*given: Any) -> Any:
            recorder.here.task = name
            with recorder.span("hand over"):
                return real(*given)

        return task

    @contextmanager
    def lend(*given: Any) -> Iterator[Any]:
        with ExitStack() as stack:
            with recorder.span("pin"):
                ring = stack.enter_context(real_lend(*given))
            yield ring

    real_lend = pinned.lend
    with ExitStack() as stack:
        marks = [stack.enter_context(_timing_events(i)) for i in range(device.count())]
        for target, name, made in (
            (run, "_gather", noted(run._gather, "gather")),
            (run, "_scatter", noted(run._scatter, "scatter")),
            (run, "__init__", noted(run.__init__, "prepare")),
            (pinned, "lend", lend),
            (transfers, "Gpu", _watched_gpu(recorder, marks)),
            (slices, "np", _Watching(recorder)),
        ):
            stack.enter_context(mock.patch.object(target, name, made))
        recorder.begun = time.perf_counter()
        yield recorder


class _Watching:
    """NumPy, of which copies are noted."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder

    def __getattr__(self, name: str) -> Any:
        return getattr(np, name)

    def copyto(self, target: Any, source: Any) -> None:
        with self._recorder.span(self._recorder.here.task, source.nbytes):
            np.copyto(target, source)


def _watched_gpu(recorder: Recorder, marks: Sequence[Iterator[int]]) -> type[transfers.Gpu]:
    class Watched(transfers.Gpu):
        """A GPU whose lanes are marked before and after each piece of work."""

        def __init__(self, *given: int) -> None:
            with recorder.span("open"):
                super().__init__(*given)
            self._marks: list[tuple[str, int, int, int]] = []
            self._begun: dict[str, int] = {}
            with self.attached():
                self._zero = self._mark("in")
                driver.check(self._cuda.cuEventSynchronize(self._zero), "waiting")
                self._zero_s = time.perf_counter()

        def allocate(self, nbytes: int, what: str) -> int:
            with recorder.span("allocate", nbytes):
                return super().allocate(nbytes, what)

        def finish(self, event: Any) -> None:
            with recorder.span("wait"):
                super().finish(event)

        def copy_in(self, *given: int) -> None:
            before = self._mark("in")
            super().copy_in(*given)
            self._marks.append(("in", given[4] * given[5], before, self._mark("in")))

        def copy_out(self, *given: int) -> None:
            before = self._mark("out")
            super().copy_out(*given)
            self._marks.append(("out", given[4] * given[5], before, self._mark("out")))

        def wait(self, lane: Any, event: Any) -> None:
            super().wait(lane, event)
            self._begun[lane] = self._mark(lane)

        def record(self, event: Any, lane: Any) -> None:
            super().record(event, lane)
            if lane == "compute":
                after = self._mark(lane)
                self._marks.append((lane, 0, self._begun.get(lane, after), after))
                self._begun[lane] = after

        def close(self) -> None:
            with self.attached():
                for lane in self._streams.values():
                    self._cuda.cuStreamSynchronize(lane)
                for lane, nbytes, before, after in self._marks:
                    start, stop = (self._seconds(mark) for mark in (before, after))
                    recorder.add(f"cuda:{self.index} {lane}", lane, start, stop, nbytes)
            with recorder.span("close"):
                super().close()

        def _mark(self, lane: Any) -> int:
            event = next(marks[self.index])
            self._quick.record(event, self._streams[lane])
            return event

        def _seconds(self, mark: int) -> float:
            ms = driver.check(self._cuda.cuEventElapsedTime(self._zero, mark), "reading a clock")
            return self._zero_s + 1e-3 * float(ms)

    return Watched


@contextmanager
def _timing_events(index: int) -> Iterator[Iterator[int]]:
    """Make the events of a GPU before anything is timed."""
    with device.current(index) as cuda:
        made = [int(driver.check(cuda.cuEventCreate(0), "making an event")) for _ in range(_MARKS)]
    try:
        yield iter(made)
    finally:
        with device.current(index) as cuda:
            for event in made:
                cuda.cuEventDestroy(event)


def picture(spans: Sequence[Span], took: float) -> str:
    """Return one line for each lane and doing, over the time that all took."""
    lines = []
    for row in sorted({span.row for span in spans if span.row.startswith("cuda")}):
        busy = _over_time([span for span in spans if span.row == row], took)
        lines.append(f"{row:>16}  {''.join(_digit(10 * each) for each in busy)}")
    for name in _DOINGS:
        busy = _over_time([span for span in spans if span.name == name], took)
        lines.append(f"{name:>16}  {''.join(_digit(each) for each in busy)}")
    others = sorted({s.name for s in spans} - {*_DOINGS, *_LANES})
    for name in others:
        found = [span for span in spans if span.name == name]
        busy = _over_time(found, took)
        lines.append(f"{name:>16}  {''.join('#' if each > 0 else ' ' for each in busy)}")
    ruler = "".join(f"{1e3 * took * i / 6:<{_COLUMNS // 6}.1f}" for i in range(6))
    lines.append(f"{'ms':>16}  {ruler}{1e3 * took:.1f}")
    return "\n".join(lines) + "\n"


def totals(spans: Sequence[Span]) -> str:
    """Return a table: how often each thing was done, for how long in all, at which rate."""
    lines = [f"{'':>16}  {'times':>6} {'sum ms':>8} {'first ms':>9} {'last ms':>8} {'GB/s':>6}"]
    for name in sorted({s.row if s.row.startswith("cuda") else s.name for s in spans}):
        found = [s for s in spans if name in (s.row, s.name)]
        seconds = sum(s.stop - s.start for s in found)
        nbytes = sum(s.nbytes for s in found)
        rate = f"{1e-9 * nbytes / seconds:6.1f}" if nbytes and seconds else ""
        lines.append(
            f"{name:>16}  {len(found):>6} {1e3 * seconds:>8.1f} "
            f"{1e3 * min(s.start for s in found):>9.1f} {1e3 * max(s.stop for s in found):>8.1f} "
            f"{rate}"
        )
    return "\n".join(lines) + "\n"


def chrome(spans: Sequence[Span]) -> list[dict[str, Any]]:
    """Return spans as complete events of Chrome's trace format."""
    return [
        {
            "name": span.name,
            "ph": "X",
            "pid": "device" if span.row.startswith("cuda") else "host",
            "tid": span.row,
            "ts": 1e6 * span.start,
            "dur": 1e6 * (span.stop - span.start),
            "args": {"bytes": span.nbytes},
        }
        for span in spans
    ]


def _over_time(spans: Sequence[Span], took: float) -> list[float]:
    """Return how many of the spans there were in each column, on average."""
    width = took / _COLUMNS
    busy = [0.0] * _COLUMNS
    for span in spans:
        for i in range(max(int(span.start / width), 0), _COLUMNS):
            start, stop = max(span.start, i * width), min(span.stop, (i + 1) * width)
            if span.stop <= i * width:
                break
            busy[i] += max(stop - start, 0.0) / width
    return busy


def _digit(value: float) -> str:
    """Return a number as one character: a space for none, letters from 10 on."""
    rounded = round(value)
    if rounded == 0:
        return " " if value < 0.05 else "."
    return "0123456789abcdefghijklmnopqrstuvwxyz"[min(rounded, 35)]


if __name__ == "__main__":
    main(sys.argv[1:])
