"""How far a product of files has come, on standard error: a bar on a terminal, else a line a time.

A product that takes less than `LINE_SECONDS` says nothing where nobody looks.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from ._estimate import duration

if TYPE_CHECKING:
    from .outofcore.pipeline import Progress, Report

__all__ = ["shown"]

#: Time between two lines, where standard error is no terminal.
LINE_SECONDS = 30.0


@contextmanager
def shown(out: str, *, is_quiet: bool, last: str = "") -> Iterator[Report]:
    """Yield what to call with each `Progress`; ``last`` is what follows when all is computed."""
    if is_quiet:
        yield lambda _: None
    elif not sys.stderr.isatty():
        yield _line_by_line(out, last)
    else:
        with _bar(out, last) as report:
            yield report


def _line_by_line(out: str, last: str) -> Callable[[Progress], None]:
    said_at = 0.0

    def report(reached: Progress) -> None:
        nonlocal said_at
        is_done = reached.flops >= reached.total_flops
        if (said_at and last) if is_done else reached.seconds - said_at >= LINE_SECONDS:
            said_at = reached.seconds
            share = reached.flops / max(reached.total_flops, 1)
            print(f"{out}: {share:.0%}, {_pace(reached, last)}", file=sys.stderr, flush=True)

    return report


@contextmanager
def _bar(out: str, last: str) -> Iterator[Callable[[Progress], None]]:
    from rich.console import Console
    from rich.progress import BarColumn, TextColumn
    from rich.progress import Progress as Bar

    with Bar(
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        TextColumn("{task.percentage:.0f} %"),
        TextColumn("{task.fields[pace]}", markup=False),
        console=Console(stderr=True),
        transient=True,
    ) as bar:
        task = bar.add_task(out, total=None, pace="")

        def report(reached: Progress) -> None:
            pace = _pace(reached, last)
            bar.update(task, total=reached.total_flops, completed=reached.flops, pace=pace)

        yield report


def _pace(reached: Progress, last: str) -> str:
    if last and reached.flops >= reached.total_flops:
        return last
    return (
        f"{reached.flops_per_s / 1e9:.3g} GFLOP/s, limited by {reached.limit}, "
        f"{duration(reached.seconds_left)} left"
    )
