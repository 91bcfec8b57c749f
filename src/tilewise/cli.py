"""The command line: ``tilewise mul``, ``plan``, ``check``, ``explain``, ``info``, ``demo``.

Verbs read their arguments, call the library, and print. Results go to standard output, progress
and errors to standard error. Exit codes: 0 done or proven, 1 a check failed, 2 could not, 130
interrupted.
"""

from __future__ import annotations

import json
import math
import os
import re
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Annotated, Any

import typer

from . import __version__
from .errors import CheckError, TilewiseError
from .explain.command import explain_command

if TYPE_CHECKING:
    from ._plan import Plan
    from .outofcore.pipeline import Report

__all__ = ["app", "main"]

#: For how long ``plan`` multiplies small matrices to learn the rate of this machine.
_RATE_SECONDS = 0.2

app = typer.Typer(
    name="tilewise",
    epilog=(
        "Exit codes: 0 done or proven; 1 a check failed; 2 could not, with the reason; "
        "130 interrupted."
    ),
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

_Left = Annotated[str, typer.Argument(metavar="A.npy", help="Left matrix, (..., m, k) or (k,).")]
_Right = Annotated[str, typer.Argument(metavar="B.npy", help="Right matrix, (..., k, n) or (k,).")]
_Memory = Annotated[
    str | None,
    typer.Option(
        help="What tilewise may hold: 2GiB, 500MB, 50%. Without it, half of the free memory."
    ),
]
_DType = Annotated[
    str | None,
    typer.Option(help="Type of the result, computed without overflow on the way: int32, float64."),
]
_Precision = Annotated[
    str | None, typer.Option(help="Allow less than the default bound, by name: tf32, fp64-int8.")
]
_Devices = Annotated[
    str | None, typer.Option(help="Where to run: cpu. Without it, tilewise chooses.")
]
_Json = Annotated[bool, typer.Option("--json", help="Print JSON, for programs.")]


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code; bad input gives one line, no traceback."""
    signal.signal(signal.SIGTERM, _terminate)
    try:
        args = list(sys.argv[1:] if argv is None else argv)
        code = app(args=args or ["--help"], prog_name="tilewise", standalone_mode=False)
        sys.stdout.flush()
    except CheckError as error:
        return _fail(str(error), 1)
    except TilewiseError as error:
        return _fail(str(error))
    except MemoryError as error:
        return _fail(f"not enough memory: {error}; give a smaller --memory")
    except (KeyboardInterrupt, typer.Abort):
        code = 130
    except BrokenPipeError:  # as in ``tilewise plan ... | head -1``
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except Exception as error:
        # Typer's usage errors; their class is Click's or Typer's own, by version.
        if not hasattr(error, "format_message"):
            raise
        return _fail(f"{error.format_message()} (tilewise --help)")
    if code == 130:
        return _fail("interrupted; nothing was written", 130)
    return code or 0


def _print_version(is_asked: bool) -> None:
    if is_asked:
        print(f"tilewise {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Print the version."
        ),
    ] = False,
) -> None:
    """Multiply matrices: right for every legal input, larger than memory, and explained."""


@app.command()
def mul(
    a: _Left,
    b: _Right,
    out: Annotated[str, typer.Option("--out", "-o", metavar="C.npy", help="Where to write A·B.")],
    memory: _Memory = None,
    dtype: _DType = None,
    precision: _Precision = None,
    devices: _Devices = None,
    verify: Annotated[
        bool, typer.Option("--verify", help="Prove the result before it appears.")
    ] = False,
    as_json: _Json = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Print nothing but errors.")] = False,
) -> None:
    """Multiply two .npy files into a third, within a memory budget.

    The files may be larger than memory. C.npy appears when all of it is written, or not at all.

    \b
    tilewise mul A.npy B.npy -o C.npy
    tilewise mul A.npy B.npy -o C.npy --memory 2GiB --verify
    tilewise mul counts.npy weights.npy -o sums.npy --dtype int32
    tilewise mul A.npy:bfloat16 B.npy:bfloat16 -o C.npy
    """
    from . import _memory
    from .outofcore.pipeline import multiply_files

    start = time.perf_counter()
    with _progress_bar(out, is_shown=not quiet and sys.stderr.isatty()) as progress:
        plan = multiply_files(
            a,
            b,
            out,
            memory=memory,
            dtype=dtype,
            precision=precision,
            devices=_split(devices),
            verify=verify,
            progress=progress,
        )
    seconds = time.perf_counter() - start
    if as_json:
        _print_json({"out": out, "seconds": seconds, "verified": verify, "plan": plan.to_dict()})
    elif not quiet:
        flops = plan.schedule.flops if plan.schedule is not None else 0
        size = _memory.format_bytes(os.stat(out).st_size)
        print(
            f"{out}: {plan.shape} {plan.dtype}, {size}, in {seconds:.1f} s "
            f"({flops / seconds / 1e9:.1f} GFLOP/s)" + (", verified" if verify else "")
        )
        if plan.dtype.isbuiltin != 1:
            print(f"NumPy reads it as raw bytes: np.load({out!r}).view(ml_dtypes.{plan.dtype})")


@app.command()
def plan(
    a: Annotated[str, typer.Argument(metavar="A", help="A .npy file, or a shape: 4096x4096.")],
    b: Annotated[str, typer.Argument(metavar="B", help="A .npy file, or a shape: 4096x4096.")],
    memory: _Memory = None,
    dtype: _DType = None,
    precision: _Precision = None,
    devices: _Devices = None,
    as_json: _Json = False,
) -> None:
    """Say what mul would do, and why.

    Tiles, bytes, time, error bound and bits, for files or shapes; nothing is multiplied.
    A shape stands for a file of float32, or of the type that --dtype or the shape itself names.

    \b
    tilewise plan A.npy B.npy --memory 2GiB
    tilewise plan 50000x50000 50000x50000 --dtype float64 --memory 8GiB
    tilewise plan 10000x50000:uint8 50000x10000:uint8 --dtype int32
    """
    from ._memory import format_bytes
    from .outofcore.pipeline import plan_files

    with ExitStack() as files:
        left, right = (_operand(text, name, dtype, files) for text, name in ((a, "a"), (b, "b")))
        made = plan_files(
            left,
            right,
            memory=memory,
            dtype=dtype,
            precision=precision,
            devices=_split(devices),
        )
    expected = _expected(made)
    if as_json:
        _print_json({**made.to_dict(), "expected": expected})
        return
    print(made)
    if expected["seconds"]:
        disk = format_bytes(int(expected["disk_bytes_per_s"]))
        print(
            f"time       about {_duration(expected['seconds'])}, at the "
            f"{expected['flops_per_s'] / 1e9:.3g} GFLOP/s of a small product just now\n"
            f"limit      arithmetic, if the disk moves {disk} in a second; else the disk"
        )


@app.command()
def check(
    a: _Left,
    b: _Right,
    c: Annotated[str, typer.Argument(metavar="C.npy", help="What is said to be A·B.")],
    rounds: Annotated[int, typer.Option(min=1, help="Random vectors to try.")] = 8,
    as_json: _Json = False,
) -> int:
    """Prove that C is A·B, without multiplying again.

    Compares C·x with A·(B·x) for random x, locates what is wrong, and says how sure it is.
    Exit code 0 if C is right, 1 if it is not.

    \b
    tilewise check A.npy B.npy C.npy
    """
    from .numerics.check import check as prove
    from .outofcore.files import open_npy

    with open_npy(a, "a") as left, open_npy(b, "b") as right, open_npy(c, "c") as result:
        found = prove(left.mapped(), right.mapped(), result.mapped(), rounds=rounds)
    if as_json:
        _print_json(found.to_dict())
    else:
        print(found)
    return 0 if found else 1


app.command("explain")(explain_command)


@app.command()
def info(as_json: _Json = False) -> None:
    """Print what a bug report needs.

    Versions, BLAS and its threads, memory, devices, kernels.
    """
    from ._info import collect

    facts = collect()
    if as_json:
        _print_json(facts)
        return
    for name, value in facts.items():
        if isinstance(value, dict):
            value = [f"{key} {text}" for key, text in value.items()] or ["none"]
        for line in value if isinstance(value, list) else [value]:
            print(f"{name:<10} {line}")
            name = ""


@app.command()
def demo() -> int:
    """Multiply real data, prove it, run the guide's kernel: one minute."""
    from ._demo import main as show

    return show()


@contextmanager
def _progress_bar(out: str, *, is_shown: bool) -> Iterator[Report | None]:
    """Show how far a product has come, on standard error."""
    if not is_shown:
        yield None
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    from ._memory import format_bytes

    with Progress(
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        TextColumn("{task.percentage:.0f} %"),
        TextColumn("{task.fields[rate]}"),
        TimeRemainingColumn(),
        console=Console(stderr=True),
        transient=True,
    ) as bar:
        start = time.perf_counter()
        task = bar.add_task(out, total=None, rate="")

        def report(reached: Any) -> None:
            rate = reached.flops / (time.perf_counter() - start) / 1e9
            bar.update(
                task,
                total=reached.total_flops,
                completed=reached.flops,
                rate=f"{rate:.0f} GFLOP/s, {format_bytes(reached.read_bytes)} read",
            )

        yield report


def _operand(text: str, name: str, dtype: str | None, files: ExitStack) -> Any:
    """Return what ``plan`` was given: an open file, or the description of one of that shape."""
    from types import SimpleNamespace

    from ._plan import Operand
    from .numerics.dtypes import dtype_named
    from .outofcore.files import open_npy

    match = re.fullmatch(r"(\d+(?:x\d+)*)(?::(\w+))?", text)
    if match is None:
        return files.enter_context(open_npy(text, name))
    shape = tuple(int(size) for size in match[1].split("x"))
    element = dtype_named(match[2] or dtype or "float32")
    return Operand.of(SimpleNamespace(shape=shape, dtype=element, where="file"))


def _expected(made: Plan) -> dict[str, float]:
    """Return the seconds a plan should take, from the rate of a small product of its kind."""
    import numpy as np

    from . import matmul

    side = 1024 if made.method in ("blas", "panels", "or-and") else 256
    x, y = (np.ones((side, side), operand.dtype) for operand in (made.a, made.b))
    seconds: list[float] = []
    while sum(seconds) < _RATE_SECONDS:
        start = time.perf_counter()
        matmul(x, y, dtype=made.dtype)
        seconds.append(time.perf_counter() - start)
    rate = 2 * side**3 / min(seconds)
    flops = 2 * math.prod(made.batch) * made.m * made.n * made.k
    return {
        "seconds": flops / rate,
        "flops_per_s": rate,
        "disk_bytes_per_s": made.moved_bytes * rate / max(flops, 1),
    }


def _duration(seconds: float) -> str:
    for unit, size in (("days", 86400), ("hours", 3600), ("minutes", 60), ("s", 1)):
        if seconds >= 2 * size:
            return f"{seconds / size:.1f} {unit}"
    return f"{max(seconds, 1e-3):.3f} s"


def _split(devices: str | None) -> list[str] | None:
    return None if devices is None else [name.strip() for name in devices.split(",")]


def _print_json(value: Any) -> None:
    print(json.dumps(value, indent=2, ensure_ascii=False))


def _fail(message: str, code: int = 2) -> int:
    print(f"tilewise: {message}", file=sys.stderr)
    return code


def _terminate(*_: object) -> None:
    raise SystemExit(128 + signal.SIGTERM)
