"""The command line: ``tilewise mul``, ``plan``, ``check``, ``explain``, ``info``, ``demo``.

Verbs read their arguments, call the library, and print. Results go to standard output, progress
and errors to standard error. Exit codes: 0 done or proven, 1 a check failed, 2 could not, 130
interrupted, 141 what was printed was not read to its end.
"""

from __future__ import annotations

import inspect
import json
import math
import os
import re
import signal
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from . import __version__
from .errors import CheckError, FileError, TilewiseError
from .explain.command import explain_command

if TYPE_CHECKING:
    from .outofcore.files import Matrix

__all__ = ["app", "main"]

app = typer.Typer(
    name="tilewise",
    epilog=(
        "Exit codes: 0 done or proven; 1 a check failed; 2 could not, with the reason; "
        "130 interrupted; 141 nobody reads what is printed."
    ),
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

_Left = Annotated[
    str,
    typer.Argument(
        metavar="A.npy", help="Left matrix, (..., m, k) or (k,): .npy, .zarr or A.h5:/path."
    ),
]
_Right = Annotated[
    str, typer.Argument(metavar="B.npy", help="Right matrix, (..., k, n) or (k,), likewise.")
]
_Memory = Annotated[
    str | None,
    typer.Option(
        help=(
            "What tilewise may hold: 2GiB, 500MB, 50%. Without it, half of the free memory, "
            "rounded down to a power of two."
        )
    ),
]
_DType = Annotated[
    str | None,
    typer.Option(help="Type of the result, computed without overflow on the way: int32, float64."),
]
_Precision = Annotated[
    str | None,
    typer.Option(help="Allow less than the default bound, by name: tf32, fp64-int8; or ieee."),
]
_Devices = Annotated[
    str | None,
    typer.Option(
        help="Where to run: cpu, cuda:0, or several: cuda:0,cuda:1. Without it, tilewise chooses."
    ),
]
_Json = Annotated[bool, typer.Option("--json", help="Print JSON, for programs.")]


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code; bad input gives one line, no traceback."""
    signal.signal(signal.SIGTERM, _terminate)
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # it was closed; else the next file would be opened as it
            setattr(sys, name, os.fdopen(os.open(os.devnull, os.O_WRONLY), "w"))
        elif hasattr(stream := getattr(sys, name), "reconfigure"):
            stream.reconfigure(errors="replace")  # old code pages have no ≤
    try:
        args = list(sys.argv[1:] if argv is None else argv)
        code = app(args=args or ["--help"], prog_name="tilewise", standalone_mode=False)
        sys.stdout.flush()
    except CheckError as error:
        return _fail(_with_notes(error), 1)
    except TilewiseError as error:
        return _fail(_with_notes(error))
    except _Interrupted as error:
        return _fail(str(error), 130)
    except MemoryError as error:
        return _fail(f"not enough memory: {_with_notes(error)}; give a smaller --memory")
    except (KeyboardInterrupt, typer.Abort):
        code = 130
    except SystemExit as ended:
        if not isinstance(ended.__context__, BrokenPipeError):  # Click makes a 1 of it
            raise
        return _unread()
    except BrokenPipeError:
        return _unread()
    except OSError as error:  # of what is printed; files have errors of their own
        _mute(sys.stdout)
        return _fail(f"what is to be printed cannot be written: {error.strerror or error}")
    except Exception as error:
        # Typer's usage errors; their class is Click's or Typer's own, by version.
        if not hasattr(error, "format_message"):
            raise
        verb = getattr(getattr(error, "ctx", None), "command_path", "tilewise")
        return _fail(f"{error.format_message()} ({verb} --help)")
    if code == 130:
        return _fail("interrupted", 130)
    return code or 0


def _verb(function: Callable[..., int | None]) -> Callable[..., int | None]:
    """Make a function a verb, with its docstring for help, wrapped to the terminal's width."""
    paragraphs = inspect.cleandoc(function.__doc__ or "").split("\n\n")
    flowing = (p if p.startswith("\b") else p.replace("\n", " ") for p in paragraphs)
    name = function.__name__.removesuffix("_command")
    return app.command(name, help="\n\n".join(flowing))(function)


class _Interrupted(Exception):
    """Somebody stopped a product; says what there is of it."""


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


@_verb
def mul(
    a: _Left,
    b: _Right,
    out: Annotated[str, typer.Option("--out", "-o", metavar="C.npy", help="Where to write A·B.")],
    memory: _Memory = None,
    dtype: _DType = None,
    precision: _Precision = None,
    devices: _Devices = None,
    verify: Annotated[
        bool,
        typer.Option(
            "--verify",
            help=(
                "Prove the result before it appears. Takes room on the disk for a copy of each "
                ".zarr and chunked .h5."
            ),
        ),
    ] = False,
    as_json: _Json = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Print nothing but errors.")] = False,
) -> None:
    """Multiply two files into a third, within a memory budget.

    The files may be larger than memory. C.npy appears when all of it is written, or not at all;
    a run that was stopped goes on when the same command is given again. With --verify, tiles that
    are found wrong are computed again first.

    \b
    tilewise mul A.npy B.npy -o C.npy
    tilewise mul A.npy B.npy -o C.npy --memory 2GiB --verify
    tilewise mul A.zarr B.h5:/weights -o C.zarr
    tilewise mul A.npy A.npy:T -o C.npy
    tilewise mul counts.npy weights.npy -o sums.npy --dtype int32
    tilewise mul A.npy:bfloat16 B.npy:bfloat16 -o C.npy
    """
    from . import _memory
    from ._progress import shown
    from .numerics.dtypes import is_extension
    from .outofcore.pipeline import Progress, multiply_files

    start = time.perf_counter()
    last = Progress(0, 0, 0, 0, 0.0, 0.0)

    def watch(reached: Progress) -> None:
        nonlocal last
        last = reached
        show(reached)

    try:
        with shown(out, is_quiet=quiet, last="checking" if verify else "") as show:
            plan = multiply_files(
                a,
                b,
                out,
                memory=memory,
                dtype=dtype,
                precision=precision,
                devices=_split(devices),
                verify=verify,
                progress=watch,
            )
    except KeyboardInterrupt as error:
        stays = "; ".join(getattr(error, "__notes__", ["nothing was written"]))
        raise _Interrupted(f"interrupted; {stays}") from error
    seconds = time.perf_counter() - start
    kept, repaired = last.kept_flops, last.repaired_tiles
    share, rate = kept / max(last.flops, 1), (last.flops - kept) / seconds
    if as_json:
        facts = {"out": out, "seconds": seconds, "verified": verify, "kept_share": share}
        _print_json({**facts, "repaired_tiles": repaired, "plan": plan.to_dict()})
    elif not quiet:
        said = f", {share:.0%} of it in an earlier run" if kept else ""
        if repaired:
            of = "" if plan.schedule is None else f" of {plan.schedule.tile_count}"
            said += f", {repaired}{of} tiles computed again (wrong elements found)"
        size = _memory.format_bytes(math.prod(plan.shape) * plan.dtype.itemsize)
        print(
            f"{out}: {plan.shape} {plan.dtype}, {size}, in {seconds:.1f} s "
            f"({rate / 1e9:.1f} GFLOP/s){said}" + (", verified" if verify else "")
        )
        if is_extension(plan.dtype) and out.endswith(".npy"):
            print(f"NumPy reads it as raw bytes: np.load({out!r}).view(ml_dtypes.{plan.dtype})")


@_verb
def plan(
    a: Annotated[str, typer.Argument(metavar="A", help="A file, or a shape: 4096x4096.")],
    b: Annotated[str, typer.Argument(metavar="B", help="A file, or a shape: 4096x4096.")],
    memory: _Memory = None,
    dtype: _DType = None,
    precision: _Precision = None,
    devices: _Devices = None,
    verify: Annotated[
        bool, typer.Option("--verify", help="Count the memory that mul --verify takes.")
    ] = False,
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
    from ._estimate import estimate, in_words
    from .outofcore.planning import plan_files

    with ExitStack() as files:
        operands = [_operand(text, name, dtype, files) for text, name in ((a, "a"), (b, "b"))]
        made = plan_files(
            *operands,
            memory=memory,
            dtype=dtype,
            precision=precision,
            devices=_split(devices),
            verify=verify,
        )
        expected = estimate(made, operands)
    if as_json:
        _print_json({**made.to_dict(), "expected": expected})
        return
    print(made)
    if expected["seconds"]:
        print(in_words(expected))


@_verb
def check(
    a: _Left,
    b: _Right,
    c: Annotated[str, typer.Argument(metavar="C.npy", help="What is said to be A·B.")],
    rounds: Annotated[int, typer.Option(min=1, max=64, help="Random vectors to try.")] = 8,
    memory: Annotated[
        str | None,
        typer.Option(
            help=(
                "What it may hold: 64MiB, 2%. Without it, 256 MiB, or a sixteenth of the three "
                "matrices if that is more."
            )
        ),
    ] = None,
    as_json: _Json = False,
) -> int:
    """Prove that C is A·B, without multiplying again.

    Compares C·x with A·(B·x) for random x, locates what is wrong, and says how sure it is.
    Exit code 0 if C is right, 1 if it is not.

    \b
    tilewise check A.npy B.npy C.npy
    tilewise check A.npy B.npy C.npy --memory 64MiB
    """
    from .numerics.check import check as prove
    from .outofcore.files import open_matrix
    from .outofcore.stores import LARGEST_PART

    with ExitStack() as files:
        named = zip((a, b, c), "abc", strict=True)
        matrices: list[Matrix] = []
        for path, name in named:
            matrices.append(open_matrix(path, name))
            files.enter_context(matrices[-1])
        folder = Path(c).parent
        unread = [files.enter_context(x.unread(folder, LARGEST_PART)) for x in matrices]
        try:
            found = prove(*unread, rounds=rounds, memory=memory)
        except FileError:
            raise
        except TilewiseError as error:
            raise type(error)(f"{error} (a is {a}, b is {b}, c is {c})") from None
    if as_json:
        _print_json(found.to_dict())
    else:
        print(found)
    return 0 if found else 1


_verb(explain_command)


@_verb
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


@_verb
def demo() -> int:
    """Multiply real data, prove it, run the guide's kernel: one minute."""
    from ._demo import main as show

    return show()


def _operand(text: str, name: str, dtype: str | None, files: ExitStack) -> Any:
    """Return what ``plan`` was given: an open file, or the description of one of that shape."""
    from types import SimpleNamespace

    from ._operand import Operand
    from .numerics.dtypes import dtype_named
    from .outofcore.files import open_matrix

    match = re.fullmatch(r"(\d+(?:x\d+)*)(?::(\w+))?", text)
    if match is None:
        try:
            return files.enter_context(open_matrix(text, name))
        except FileError as error:
            if not re.fullmatch(r"\d+\D\d+.*", text):
                raise
            raise FileError(f"{error}; a shape is written as 4096x4096") from None
    shape = tuple(int(size) for size in match[1].split("x"))
    element = dtype_named(match[2] or dtype or "float32")
    return Operand.of(SimpleNamespace(shape=shape, dtype=element, where="file"))


def _split(devices: str | None) -> list[str] | None:
    return None if devices is None else [name.strip() for name in devices.split(",")]


def _print_json(value: Any) -> None:
    print(json.dumps(value, indent=2))  # in ASCII, which no code page and no odd path spoils


def _with_notes(error: BaseException) -> str:
    """Return an error's message, with where it came and what is kept."""
    return "; ".join([str(error), *getattr(error, "__notes__", [])])


def _fail(message: str, code: int = 2) -> int:
    print(f"tilewise: {message}", file=sys.stderr)
    return code


def _unread() -> int:
    """End as programs do whose reader has left, as in ``tilewise plan ... | head -1``."""
    _mute(sys.stdout)
    _mute(sys.stderr)
    return 128 + 13  # SIGPIPE, which Windows has no name for


def _mute(stream: Any) -> None:
    """Let what a stream still holds go nowhere, so that Python does not try again at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def _terminate(*_: object) -> None:
    raise SystemExit(128 + signal.SIGTERM)
