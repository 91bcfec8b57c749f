"""Kernels in Python → cubins and PTX, ahead of time, on a machine without a GPU.

Here a kernel is described (`Variant`), and what is described is compiled, checked and written
beside its manifest; a file that is still right is left alone, so the folder is its own cache.
Device code is in the families, the compilers are called in `toolchain`, and `tilewise.kernels`
reads the result:

    python -m tilewise.kernels.compile [--family hopper] [--target sm_90a] [--jobs 2]
"""

from __future__ import annotations

import argparse
import atexit
import hashlib
import importlib
import inspect
import json
import multiprocessing
import os
import re
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

from tilewise._files import write_whole
from tilewise.errors import OptionError
from tilewise.kernels import BUILT, TARGETS, file_name, toolchain
from tilewise.simt import occupancy

__all__ = ["FAMILIES", "Report", "Variant", "broken_rules", "build", "compile_variant", "main"]

#: The modules that hold device code; each has ``variants()``, and its last name is the family's.
FAMILIES = (
    "tilewise.kernels.portable",
    "tilewise.kernels.hopper",
    "tilewise.kernels.hopper_float32",
    "tilewise.guide",
)

#: Raised when what is written changes in form, so that every kernel is built again.
_FORMAT = 2


@dataclass(frozen=True, kw_only=True)
class Variant:
    """One kernel, specialised, to be compiled once for each of its targets.

    Parameters
    ----------
    name : str
        The stem of its files, unique in its family, such as ``"bf16_nn_128x256x64x4"``.
    function : callable
        A ``triton.jit`` or ``gluon.jit`` function, or plain Python in the numba-cuda dialect over
        `tilewise.simt.cuda`.
    compiler : {"triton", "gluon", "numba"}
    signature : mapping of str to str
        The type of each run-time argument: ``"*bf16"``, ``"i64"``, ``"fp32"``,
        ``"tensordesc<bf16[128,64],NVMMASharedLayout(...)>"``; for numba its own, such as
        ``"float32[:, ::1]"``, in the order of the arguments.
    constexprs : mapping of str to object
        The value of each compile-time argument.
    attrs : mapping of str to int
        What an argument is known to be divisible by: pointers in bytes, integers as they are.
    options : mapping of str to object
        ``num_warps``, ``num_stages``, ``num_ctas``, ``maxnreg`` and so on, as ``triton.compile``
        takes them. ``enable_fp_fusion`` has to be said: its default changes between versions.
    targets : tuple of str
        Out of `tilewise.kernels.TARGETS`.
    rewrite_ptx : callable, optional
        A function ``rewrite_ptx(ptx, target) -> (ptx, count)``, called between the compiler and
        the assembler; the count is kept in the manifest, and the function raises if it is not what
        it should be. With a count of 0 the compiler's own cubin is taken.
    """

    name: str
    function: Any
    compiler: Literal["triton", "gluon", "numba"]
    signature: Mapping[str, str]
    targets: tuple[str, ...]
    constexprs: Mapping[str, Any] = field(default_factory=dict)
    attrs: Mapping[str, int] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)
    rewrite_ptx: Callable[[str, str], tuple[str, int]] | None = None

    def __post_init__(self) -> None:
        if not re.fullmatch(r"\w+", self.name):
            raise OptionError(f"kernel name {self.name!r} is not a file stem of letters and digits")
        unknown = [target for target in self.targets if target not in TARGETS]
        if unknown or not self.targets:
            raise OptionError(f"{self.name}: targets {unknown} are not among {', '.join(TARGETS)}")
        if self.compiler != "numba" and "enable_fp_fusion" not in self.options:
            raise OptionError(f"{self.name}: options must say enable_fp_fusion")
        stray = [name for name in self.attrs if name not in self.signature]
        if stray:
            raise OptionError(f"{self.name}: attrs name {stray}, which are no run-time arguments")


@dataclass(frozen=True, kw_only=True)
class Report:
    """What a build did: kernels compiled and kept, and what failed, by ``family/name target``."""

    compiled: tuple[str, ...]
    kept: tuple[str, ...]
    failed: Mapping[str, str]
    seconds: float


def build(
    modules: Iterable[str] = FAMILIES,
    *,
    folder: Path = BUILT,
    targets: Iterable[str] = TARGETS,
    only: str = "",
    jobs: int = 2,
    progress: Callable[[str], None] = lambda line: None,
) -> Report:
    """Compile what is not there yet, for each module's variants and their targets.

    Parameters
    ----------
    modules : iterable of str
        Modules with ``variants()``.
    folder : Path
        Where to: ``folder/family/name.target.cubin`` and ``folder/family/manifest.json``.
    targets : iterable of str
        Leave out the others.
    only : str
        Leave out kernels whose name does not contain it.
    jobs : int
        Processes to compile in; 1 compiles in this one.

    Returns
    -------
    Report
        A kernel that does not compile or breaks a rule (`broken_rules`) is in ``failed``; the
        others are built all the same.
    """
    started = time.perf_counter()
    wanted = set(targets)
    kept: list[str] = []
    todo: list[tuple[str, Variant, str]] = []
    for module in modules:
        variants = _variants(module)
        place = folder / _family(module)
        place.mkdir(parents=True, exist_ok=True)
        if wanted == set(TARGETS) and not only:
            _forget(place, {(v.name, target) for v in variants for target in v.targets})
        there = _read_entries(place)
        for variant in variants:
            if only not in variant.name:
                continue
            for target in variant.targets:
                if target not in wanted:
                    continue
                entry = there.get((variant.name, target))
                if entry is not None and _is_right(place, entry, _key(variant, target)):
                    kept.append(_label(module, variant, target))
                else:
                    todo.append((module, variant, target))
    compiled: list[str] = []
    failed: dict[str, str] = {}
    for module, variant, target, result in _compile_all(todo, jobs):
        label = _label(module, variant, target)
        if isinstance(result, str):
            failed[label] = result
            progress(f"FAILED {label}: {result}")
            continue
        code, entry = result
        broken = broken_rules(entry)
        if broken:
            failed[label] = "; ".join(broken)
        compiled.append(label)
        _store(folder / _family(module), entry, code)
        progress(
            f"{label}: {len(code) >> 10} KiB, {entry['registers']} registers, "
            f"{entry['shared_bytes']} B shared" + (f"  BROKEN: {failed[label]}" if broken else "")
        )
    return Report(
        compiled=tuple(compiled),
        kept=tuple(kept),
        failed=failed,
        seconds=time.perf_counter() - started,
    )


def compile_variant(
    variant: Variant, target: str, made: toolchain.Made | None = None
) -> tuple[bytes, dict[str, Any]]:
    """Return one kernel's code for one target and its entry in the manifest.

    ``made`` is what was compiled for another target of the same architecture.
    """
    made = made or toolchain.compile_code(variant, target)
    code = made.ptx.encode() if target.startswith("compute_") else made.cubin
    return code, {
        "name": variant.name,
        "target": target,
        "entry": made.entry,
        "parameters": made.parameters,
        "null_pointers": made.null_pointers,
        "warps": made.warps,
        "blocks": int(variant.options.get("num_ctas", 1)),
        "starts_early": bool(variant.options.get("launch_pdl", False)),
        "shared_bytes": made.shared_bytes,
        **toolchain.resource_usage(made.cubin, target),
        "rewritten": made.rewritten,
        "code_bytes": len(code),
        "code_sha256": hashlib.sha256(code).hexdigest(),
        "compiler": toolchain.compiler_version(variant.compiler),
        "key": _key(variant, target),
    }


def broken_rules(entry: Mapping[str, Any]) -> list[str]:
    """Say what makes a compiled kernel unfit to ship: spills, too much shared memory."""
    broken = []
    if entry["stack_bytes"]:
        broken.append(f"it spills to {entry['stack_bytes']} bytes of stack")
    shared = entry["shared_bytes"] + entry["static_shared_bytes"]
    limit = _shared_limit(entry["target"])
    if shared > limit:
        broken.append(f"it takes {shared} bytes of shared memory and {entry['target']} has {limit}")
    return broken


def main(arguments: Sequence[str] | None = None) -> int:
    """Build kernels; the command line of this module."""
    parser = argparse.ArgumentParser(
        prog="python -m tilewise.kernels.compile",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    families = [_family(module) for module in FAMILIES]
    parser.add_argument("--family", action="append", choices=families, help="default: all")
    parser.add_argument("--target", action="append", choices=TARGETS, help="default: all")
    parser.add_argument("--only", default="", help="kernels whose name contains this")
    parser.add_argument("--jobs", type=int, default=2, help="processes (default: 2)")
    parser.add_argument("--output", type=Path, default=BUILT, help="folder (default: the package)")
    given = parser.parse_args(arguments)
    modules = [m for m in FAMILIES if not given.family or _family(m) in given.family]
    try:
        report = build(
            modules,
            folder=given.output,
            targets=given.target or TARGETS,
            only=given.only,
            jobs=given.jobs,
            progress=lambda line: print(line, flush=True),
        )
    except OptionError as error:
        print(error, file=sys.stderr)
        return 2
    total = sum(path.stat().st_size for path in given.output.rglob("*.*") if path.is_file())
    print(
        f"{len(report.compiled)} compiled, {len(report.kept)} already there, "
        f"{len(report.failed)} failed in {report.seconds:.0f} s; {total / 1e6:.1f} MB"
    )
    return 1 if report.failed else 0


def _compile_all(
    todo: Sequence[tuple[str, Variant, str]], jobs: int
) -> Iterator[tuple[str, Variant, str, tuple[bytes, dict[str, Any]] | str]]:
    # PTX that travels and the cubin of its own architecture are made at once.
    together: dict[tuple[str, str, int], list[tuple[str, Variant, str]]] = {}
    for module, variant, target in todo:
        key = module, variant.name, toolchain.architecture(target)
        together.setdefault(key, []).append((module, variant, target))
    if jobs <= 1 or len(together) <= 1:
        for (module, name, _), wanted in together.items():
            made = _compile_named(module, name, [target for *_, target in wanted])
            for item, result in zip(wanted, made, strict=True):
                yield *item, result
        return
    # A fresh interpreter each: compilers have threads, and a fork would copy their locks.
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(jobs, context, _end_quietly) as pool:
        running: dict[Future[Any], list[tuple[str, Variant, str]]] = {
            pool.submit(_compile_named, module, name, [target for *_, target in wanted]): wanted
            for (module, name, _), wanted in together.items()
        }
        for future in as_completed(running):
            for item, result in zip(running[future], future.result(), strict=True):
                yield *item, result


def _end_quietly() -> None:
    """Let this process end before Triton's bindings print pages about objects that they leak."""
    atexit.register(os._exit, 0)


def _compile_named(
    module: str, name: str, targets: Sequence[str]
) -> list[tuple[bytes, dict[str, Any]] | str]:
    """Compile a variant by its name, since functions do not travel to another process."""
    variant = next(variant for variant in _variants(module) if variant.name == name)
    try:
        # All targets are of one architecture; where PTX is among them, its cubin is the others'.
        made = toolchain.compile_code(variant, min(targets))
        return [compile_variant(variant, target, made) for target in targets]
    except Exception as error:  # whatever a compiler raises belongs to this kernel alone
        return [f"{type(error).__name__}: {error}"] * len(targets)


@lru_cache
def _variants(module: str) -> tuple[Variant, ...]:
    toolchain.triton_or_refuse()
    variants: tuple[Variant, ...] = tuple(importlib.import_module(module).variants())
    names = [variant.name for variant in variants]
    twice = {name for name in names if names.count(name) > 1}
    if twice:
        raise OptionError(f"{module} has two variants of one name: {', '.join(sorted(twice))}")
    return variants


def _key(variant: Variant, target: str) -> str:
    """Return a digest of everything that the code of a variant depends on."""
    rewrite = ""
    if variant.rewrite_ptx is not None:
        module = inspect.getmodule(variant.rewrite_ptx)
        assert module is not None
        rewrite = f"{variant.rewrite_ptx.__qualname__} {inspect.getsource(module)}"
    compiler = toolchain.compiler_version(variant.compiler)
    source = toolchain.source_key(variant, target)
    parts = (_FORMAT, variant.name, variant.compiler, compiler, target, source, rewrite)
    return hashlib.sha256(repr(parts).encode()).hexdigest()


def _is_right(place: Path, entry: Mapping[str, Any], key: str) -> bool:
    """Say whether a kernel was built from what is here now and its file is what was written."""
    if entry["key"] != key or broken_rules(entry):
        return False
    try:
        code = (place / file_name(entry["name"], entry["target"])).read_bytes()
    except OSError:
        return False
    return bool(hashlib.sha256(code).hexdigest() == entry["code_sha256"])


def _read_entries(place: Path) -> dict[tuple[str, str], dict[str, Any]]:
    try:
        entries = json.loads((place / "manifest.json").read_text())["kernels"]
        return {(entry["name"], entry["target"]): entry for entry in entries}
    except (OSError, ValueError, KeyError, TypeError):
        return {}  # none yet, or damaged: everything is built again


def _store(place: Path, entry: Mapping[str, Any], code: bytes) -> None:
    with _locked(place):
        write_whole(place / file_name(entry["name"], entry["target"]), code)
        entries = _read_entries(place)
        entries[entry["name"], entry["target"]] = dict(entry)
        _write_entries(place, entries)


def _forget(place: Path, wanted: set[tuple[str, str]]) -> None:
    """Remove kernels that the family no longer has."""
    with _locked(place):
        entries = _read_entries(place)
        if entries.keys() - wanted:
            _write_entries(place, {key: entries[key] for key in entries.keys() & wanted})
        names = {file_name(*key) for key in wanted}
        for path in place.glob("*.*.*"):
            if path.name not in names:
                path.unlink(missing_ok=True)


def _write_entries(place: Path, entries: Mapping[tuple[str, str], Mapping[str, Any]]) -> None:
    ordered = [entries[key] for key in sorted(entries)]
    lines = ",\n".join(json.dumps(entry) for entry in ordered)
    write_whole(place / "manifest.json", f'{{"kernels": [\n{lines}\n]}}\n'.encode())


@contextmanager
def _locked(place: Path) -> Iterator[None]:
    """Hold a family's folder against other builds."""
    import fcntl  # there is none on Windows, where nothing is built

    with open(place / ".lock", "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _family(module: str) -> str:
    return module.rpartition(".")[2]


def _label(module: str, variant: Variant, target: str) -> str:
    return f"{_family(module)}/{variant.name} {target}"


def _shared_limit(target: str) -> int:
    """Return the most shared memory of a block; for PTX, that of the least device it runs on."""
    runs_on = TARGETS if target.startswith("compute_") else (target,)
    machines = {f"sm_{toolchain.architecture(other)}" for other in runs_on}
    return min(occupancy.TARGETS[machine].shared_bytes_per_block for machine in machines)


if __name__ == "__main__":
    status = main()
    sys.stdout.flush()
    os._exit(status)  # as in `_end_quietly`
