"""The command ``tilewise explain``: reads its options, calls the library, prints a report.

:func:`explain_command` is mounted by :mod:`tilewise.cli`, which turns errors into one line and exit
code 2. Nothing heavy is imported before the command runs.
"""

from __future__ import annotations

import ast
import json
import re
import shutil
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from .._files import write_whole
from ..errors import FileError, OptionError

if TYPE_CHECKING:
    from rich.console import RenderableType

    from ..simt import Program
    from .ncu import Comparison
    from .report import Report

__all__ = ["explain_command"]

_GUIDE_SIZE = "64x64x64"
_GUIDE_PARAMETERS = ("A", "B", "wA", "wB", "C")

#: Grid, block and the side of arrays for a kernel of so many axes.
_EXAMPLES = {
    1: ("4", "128", "512"),
    2: ("4,4", "16,16", "64"),
    3: ("2,2,2", "8,8,8", "16"),
}


def explain_command(
    kernels: Annotated[
        list[str],
        typer.Argument(
            metavar="KERNEL",
            help="guide, guide:naive, module:function or file.py:function.",
            show_default=False,
        ),
    ],
    grid: Annotated[str | None, typer.Option(help="Blocks in x, y, z: 4,4.")] = None,
    block: Annotated[str | None, typer.Option(help="Threads of a block: 16,16.")] = None,
    args: Annotated[
        str | None,
        typer.Option(
            help="Arguments: float32[64,64] for an array of random numbers, x.npy for one from a "
            "file, 64, 1.5, float32(1.5); in order, or as name=value."
        ),
    ] = None,
    size: Annotated[
        str | None,
        typer.Option(
            help="Instead of --grid and --args, for kernels with the guide's parameters: "
            f"hAxwAxwB, or one number. The guide's own take {_GUIDE_SIZE} without it."
        ),
    ] = None,
    target: Annotated[
        str, typer.Option(help="sm_80 to sm_120; sm_10 to sm_13 (cc10 to cc13) as in the guide.")
    ] = "sm_90",
    registers: Annotated[
        int | None, typer.Option(min=1, help="Registers a thread, for the occupancy.")
    ] = None,
    max_steps: Annotated[
        int, typer.Option(min=1, help="Loop iterations before a kernel is taken to be endless.")
    ] = 50_000,
    claims: Annotated[
        list[str] | None,
        typer.Option(
            help="What to prove: guide, or claims such as \"coalesced('A'); reads('A', 4)\"."
        ),
    ] = None,
    compare: Annotated[
        bool, typer.Option("--compare", help="Lay the kernels side by side.")
    ] = False,
    thread: Annotated[
        str | None, typer.Option(help="Say what one thread does: BLOCK:THREAD, as 2,3:5,1.")
    ] = None,
    ncu: Annotated[
        Path | None,
        typer.Option(metavar="FILE.csv", help="Lay beside it what ncu --csv has measured."),
    ] = None,
    html: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write a report with pictures.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, for programs.")] = False,
    verbose: Annotated[
        bool, typer.Option("--verbose", "-v", help="Print all tables and the annotated source.")
    ] = False,
) -> int:
    """Prove what a kernel does to memory, and say what limits it. Needs no GPU.

    Exit code 0: proven; 1: a hazard was found, or a claim asked for is refuted; 2: could not.

    \b
    tilewise explain guide
    tilewise explain guide:naive --size 256 --html naive.html
    tilewise explain file.py:scale --grid 4 --block 64 --args "float32[256] 2 256"
    tilewise explain guide:naive guide --compare --html both.html
    tilewise explain guide --size 1024 --ncu report.csv
    """
    if compare and kernels == ["guide"]:
        kernels = ["guide:naive", "guide:Muld", "guide:Muld_any"]
    if compare and len(kernels) < 2:
        raise OptionError("--compare takes two kernels or more: tilewise explain A B --compare")
    options = {
        "target": re.sub(r"^cc", "sm_", target.replace(".", "")),
        "registers": registers,
        "max_steps": max_steps,
    }
    reports = [_report(name, grid, block, args, size, claims, options) for name in kernels]
    compared = None
    if ncu is not None:
        from .ncu import beside, read_ncu

        compared = beside(reports[0], read_ncu(ncu))
    if html is not None:
        from .html import page

        _write(html, page(reports if compare or len(reports) > 1 else reports[0], ncu=compared))
    if as_json:
        _print_json(reports, compared)
    elif thread is not None:
        for report in reports:
            print(report.thread(*_thread(thread)).text)
    else:
        _print_text(reports, compared, compare=compare, verbose=verbose)
    codes = {report.exit_code for report in reports}
    return 1 if 1 in codes else max(codes)


def _report(
    name: str,
    grid: str | None,
    block: str | None,
    args: str | None,
    size: str | None,
    claims: Sequence[str] | None,
    options: dict[str, Any],
) -> Report:
    from .. import simt
    from . import explain
    from .loading import is_of_the_guide, load
    from .words import listed

    kernel = load(name)
    source = simt.program(kernel)
    parameters = source.parameters
    if size is None and args is None and is_of_the_guide(name):
        size = _GUIDE_SIZE
    if size is not None:
        if args is not None:
            raise OptionError("--size and --args both say what the arguments are; give one")
        extents, arguments = _sized(name, parameters, size, block)
        blocks: tuple[int, ...] = _extent("--grid", grid) if grid is not None else extents
    else:
        missing = [
            option
            for option, given in (("--grid", grid), ("--block", block), ("--args", args))
            if given is None
        ]
        if grid is None or block is None or args is None:
            raise OptionError(
                f"{listed(missing)} must be given to launch "
                f"{name}({', '.join(parameters)}); for example {_example(source)}"
            )
        blocks = _extent("--grid", grid)
        arguments = _arguments(name, parameters, args)
    threads = _extent("--block", block) if block is not None else (16, 16)
    return explain(kernel, blocks, threads, *arguments, claims=_claims(claims, name), **options)


def _example(source: Program) -> str:
    """Options that may launch a kernel: what it indexes is an array, all else a number."""
    ranks: dict[str, int] = {}
    indices: set[str] = set()
    axes = 1
    for node in ast.walk(source.kernel.tree):
        match node:
            case ast.Subscript(owner, index):
                rank = _axes(index)
                while isinstance(owner, ast.Subscript):
                    rank, owner = rank + _axes(owner.slice), owner.value
                if isinstance(owner, ast.Name):
                    ranks[owner.id] = max(rank, ranks.get(owner.id, 0))
                within = (each for each in ast.walk(index) if isinstance(each, ast.Subscript))
                indices |= {each.value.id for each in within if isinstance(each.value, ast.Name)}
            case ast.Call(ast.Attribute(ast.Attribute(attr="atomic")), [ast.Name(name), index, *_]):
                ranks[name] = _axes(index)
            case ast.Attribute(ast.Name(name), "shape" | "size"):
                ranks.setdefault(name, 1)
            case ast.Attribute(ast.Attribute(), "y" | "z" as axis):
                axes = max(axes, " yz".index(axis) + 1)
            case ast.Call(ast.Attribute(attr="grid"), [ast.Constant(int(count))]):
                axes = max(axes, count)
    grid, block, side = _EXAMPLES[min(axes, 3)]
    words = []
    for name in source.parameters:
        dtype = "int32" if name in indices else "float32"
        extents = ",".join([side] * ranks.get(name, 0))
        words.append(f"{name}={dtype}[{extents}]" if extents else f"{name}={side}")
    return f'--grid {grid} --block {block} --args "{" ".join(words)}"'


def _axes(index: ast.expr) -> int:
    return len(index.elts) if isinstance(index, ast.Tuple) else 1


def _sized(
    name: str, parameters: Sequence[str], size: str, block: str | None
) -> tuple[tuple[int, int], list[Any]]:
    """The grid and the arguments of a product of this size."""
    if len(parameters) != len(_GUIDE_PARAMETERS):
        raise OptionError(
            f"--size is for kernels with the guide's parameters ({', '.join(_GUIDE_PARAMETERS)}); "
            f"{name} has ({', '.join(parameters)}): give --grid, --block and --args"
        )
    sizes = _extent("--size", size)
    if len(sizes) == 1:
        sizes = sizes * 3
    if len(sizes) != 3:
        raise OptionError(f"--size {size} must be hAxwAxwB, as 64x32x128, or one number for all")
    if 0 in sizes:
        raise OptionError(f"--size {size}: a matrix has a row and a column at least")
    height_a, width_a, width_b = sizes
    across, down = (*(_extent("--block", block) if block else (16, 16)), 1)[:2]
    arguments = [
        ((height_a, width_a), "float32"),
        ((width_a, width_b), "float32"),
        width_a,
        width_b,
        ((height_a, width_b), "float32"),
    ]
    return (-(-width_b // max(1, across)), -(-height_a // max(1, down))), arguments


def _extent(option: str, text: str) -> tuple[int, ...]:
    """``4,4`` or ``4x4``."""
    if not re.fullmatch(r"\d+([,x]\d+){0,2}", text):
        raise OptionError(f"{option} {text!r} must be one to three numbers, as 4,4 or 4x4")
    return tuple(int(number) for number in re.split("[,x]", text))


def _arguments(name: str, parameters: Sequence[str], text: str) -> list[Any]:
    """The arguments as ``explain`` takes them, in the kernel's order."""
    # What stands in brackets may have blanks within.
    words = re.findall(r"(?:\[[^\]]*\]|\([^)]*\)|[^\s,;])+", text)
    named: dict[str, Any] = {}
    placed: list[Any] = []
    for word in words:
        match = re.fullmatch(r"(\w+)=(.+)", word)
        if match is None:
            placed.append(_argument(word))
        elif match[1] not in parameters:
            raise OptionError(
                f"--args: {name} has no parameter {match[1]!r}; it has {', '.join(parameters)}"
            )
        else:
            named[match[1]] = _argument(match[2])
    rest = [parameter for parameter in parameters if parameter not in named]
    if len(rest) != len(placed):
        given = f"{len(placed)} by place and {len(named)} by name" if named else str(len(placed))
        raise OptionError(
            f"--args: {name}({', '.join(parameters)}) takes {len(parameters)} arguments, "
            f"got {given}"
        )
    named |= dict(zip(rest, placed, strict=True))
    return [named[parameter] for parameter in parameters]


def _argument(word: str) -> Any:
    import numpy as np

    wrong = OptionError(
        f"--args: {word!r} is not an argument; give float32[64,64] for an array, x.npy for one "
        "from a file, 64, 1.5 or True for a number, float32(1.5) for one of that type"
    )
    if word.endswith(".npy"):
        try:
            return np.load(word, allow_pickle=False)
        except (OSError, ValueError) as error:
            raise FileError(f"--args: {word} cannot be read as an array: {error}") from None
    match = re.fullmatch(r"([a-z]+\d*)(?:\[([\d,x\s]+)\]|\(([^()]+)\))", word)
    if match is None:
        try:
            value = ast.literal_eval(word)
        except (SyntaxError, ValueError):
            raise wrong from None
        if not isinstance(value, (bool, int, float)):
            raise wrong
        return value
    try:
        dtype = np.dtype(match[1])
    except TypeError:
        raise OptionError(f"--args: {word}: there is no type {match[1]!r}") from None
    if match[2] is not None:
        shape = tuple(int(number) for number in re.findall(r"\d+", match[2]))
        return (shape, dtype)
    try:
        return dtype.type(ast.literal_eval(match[3].strip()))
    except (SyntaxError, TypeError, ValueError, OverflowError):
        raise wrong from None


def _claims(texts: Sequence[str] | None, name: str) -> Sequence[Any] | None:
    """What is to be proven; the chapter's claims for the guide's own kernel."""
    if texts is None:
        if name not in ("guide", "guide:Muld"):
            return None
        texts = ["guide"]
    from . import claims

    wanted: list[Any] = []
    for text in ";".join(texts).split(";"):
        if text.strip() in ("guide", "default"):
            wanted += getattr(claims, text.strip())
        elif text.strip():
            wanted.append(_claim(text.strip()))
    return wanted


def _claim(text: str) -> Any:
    """One claim, read as a call with literal arguments: nothing is evaluated."""
    from . import claims

    known = [
        name
        for name in claims.__all__
        if name.islower() and name not in ("check", "default", "guide")
    ]
    try:
        call = ast.parse(text, mode="eval").body
    except SyntaxError:
        call = None
    if isinstance(call, ast.Name):
        call = ast.Call(call, [], [])
    if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Name):
        raise OptionError(f"--claims: {text!r} is not a claim; write it as conflict_free('As')")
    if call.func.id not in known:
        raise OptionError(
            f"--claims: there is no claim {call.func.id!r}; there are {', '.join(known)}"
        )
    try:
        values = [ast.literal_eval(value) for value in call.args]
        named = {str(item.arg): ast.literal_eval(item.value) for item in call.keywords}
        return getattr(claims, call.func.id)(*values, **named)
    except (TypeError, ValueError) as error:
        raise OptionError(f"--claims: {text!r}: {error}") from None


def _thread(text: str) -> tuple[tuple[int, ...], tuple[int, ...]]:
    block, separator, thread = text.partition(":")
    if not separator:
        raise OptionError(f"--thread {text!r} must be BLOCK:THREAD, as 2,3:5,1")
    return _extent("--thread", block), _extent("--thread", thread)


def _print_text(
    reports: Sequence[Report], compared: Comparison | None, *, compare: bool, verbose: bool
) -> None:
    from . import text

    if compare:
        _print(text.side_by_side(reports))
    else:
        for number, report in enumerate(reports):
            if number:
                print()
            _print(text.render(report, verbose=verbose))
    if compared is not None:
        _print(text.against_ncu(compared))


def _print(rendered: RenderableType) -> None:
    """Print to the terminal in its colours, or to a file without any."""
    from . import text

    if not sys.stdout.isatty():
        # An old code page has no ✔: better a question mark than an error.
        if hasattr(sys.stdout, "reconfigure"):
            sys.stdout.reconfigure(errors="replace")
        sys.stdout.write(text.to_text(rendered))
        return
    from rich.console import Console

    width = min(text.WIDTH, shutil.get_terminal_size().columns)
    Console(width=width, highlight=False).print(rendered)


def _print_json(reports: Sequence[Report], compared: Comparison | None) -> None:
    values: dict[str, Any]
    if len(reports) == 1:
        values = reports[0].to_dict()
    else:
        values = {"reports": [report.to_dict() for report in reports]}
    if compared is not None:
        values["ncu"] = asdict(compared)
    print(json.dumps(values, indent=2))  # in ASCII, which no code page spoils


def _write(path: Path, content: str) -> None:
    try:
        write_whole(path, content.encode())
    except OSError as error:
        raise FileError(f"{path} cannot be written: {error.strerror}") from None
    print(f"{path}: written", file=sys.stderr)
