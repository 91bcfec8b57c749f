"""Compiled kernels: which there are, for which architecture, and how each is called.

The device code is in one file a family; `tilewise.kernels.compile` turns it into the files that are
read here. Nothing of this needs a compiler or a GPU, and importing it imports neither.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from tilewise.errors import DeviceError

__all__ = ["BUILT", "TARGETS", "Built", "Parameter", "find", "manifest", "targets_for"]

#: Where compiled kernels lie: a folder a family, each with its manifest.json.
BUILT = Path(__file__).parent / "built"

#: What kernels are compiled for. A cubin of ``sm_90a``, ``sm_100a`` or ``sm_120a`` runs on that one
#: architecture; those of ``sm_8x`` on later minor versions too; PTX of ``compute_80`` everywhere
#: above, compiled by the driver at its first use.
TARGETS = ("sm_80", "sm_86", "sm_89", "sm_90a", "sm_100a", "sm_120a", "compute_80")


@dataclass(frozen=True, slots=True, kw_only=True)
class Parameter:
    """One argument of a kernel, as its source has it.

    ``type`` is a number's (``i32``, ``i64``, ``fp32``, ...), ``pointer``, ``tensor map`` (passed as
    a 128-byte CUtensorMap, its shape as int32 and its strides as int64) or ``array`` (numba's: two
    null pointers, items, bytes an item, the pointer, shape and byte strides, all of 64 bits).
    ``rank`` is that of a map or an array; ``divisible_by`` is what the kernel was compiled to rely
    on; ``tensor_map`` holds what encodes a map: ``data_type``, ``swizzle`` and ``block_size``,
    which come from the compiler and nowhere else.
    """

    name: str
    type: str
    rank: int = 0
    divisible_by: int = 1
    tensor_map: Mapping[str, Any] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Built:
    """One kernel compiled for one target: where its code is, what it takes, what it uses.

    ``null_pointers`` are passed after the parameters. ``warps`` counts all warps of a block,
    workers included; ``blocks`` those of a cluster; ``starts_early`` marks a kernel that waits in
    its code for what it depends on (programmatic dependent launch). ``shared_bytes`` is dynamic
    shared memory and ``static_shared_bytes`` the other kind; ``stack_bytes`` is local memory a
    thread, 0 unless it spills. ``rewritten`` counts the instructions replaced between the compiler
    and the assembler, and ``instructions`` (sm_90a alone) those SASS instructions that tell how it
    computes.
    """

    family: str
    name: str
    target: str
    path: Path
    entry: str
    parameters: tuple[Parameter, ...]
    null_pointers: int
    warps: int
    blocks: int
    starts_early: bool
    shared_bytes: int
    static_shared_bytes: int
    registers: int
    stack_bytes: int
    rewritten: int
    instructions: Mapping[str, int]
    code_bytes: int
    code_sha256: str
    compiler: str

    def code(self) -> bytes:
        """Return the cubin or PTX, after comparing it with what was written at the build."""
        try:
            code = self.path.read_bytes()
        except OSError:
            code = b""
        if hashlib.sha256(code).hexdigest() != self.code_sha256:
            raise DeviceError(
                f"kernel {self.family}/{self.name} for {self.target} is damaged or missing "
                f"({self.path}); reinstall tilewise, or run make kernels in a checkout"
            )
        return code


def find(family: str, name: str, capability: tuple[int, int], folder: Path = BUILT) -> Built:
    """Return the kernel to run on a device of a compute capability.

    Raises
    ------
    DeviceError
        If nothing was compiled for that architecture, naming it, or no kernels are there at all.
    """
    there = manifest(family, folder)
    targets = targets_for(capability)
    for target in targets:
        built = there.get((name, target))
        if built is not None:
            return built
    have = sorted(target for other, target in there if other == name)
    if not have:
        raise DeviceError(f"there is no kernel {family}/{name}; run make kernels in a checkout")
    major, minor = capability
    raise DeviceError(
        f"no kernel for compute capability {major}.{minor}: {family}/{name} was compiled for "
        f"{', '.join(have)}, and this device runs {', '.join(targets) or 'none of any'}"
    )


def targets_for(capability: tuple[int, int]) -> tuple[str, ...]:
    """Return the targets whose code runs on a compute capability, the best first.

    Source: CUDA C++ Programming Guide, "Binary compatibility" and "PTX compatibility".
    """
    major, minor = capability
    cubins = [f"sm_{major}{minor}a", *(f"sm_{major}{lower}" for lower in range(minor, -1, -1))]
    ptx = [target for target in TARGETS if target.startswith("compute_")]
    runnable = [target for target in ptx if int(target[8:]) <= 10 * major + minor]
    return (*(target for target in cubins if target in TARGETS), *runnable)


def manifest(family: str, folder: Path = BUILT) -> Mapping[tuple[str, str], Built]:
    """Return the compiled kernels of a family, by name and target."""
    path = folder / family / "manifest.json"
    try:
        changed = path.stat().st_mtime_ns
    except OSError:
        raise DeviceError(
            f"there are no compiled kernels of the family {family!r} ({path} is missing); "
            "run make kernels in a checkout, or reinstall tilewise"
        ) from None
    return _read_manifest(path, changed)


@lru_cache(maxsize=64)
def _read_manifest(path: Path, changed: int) -> Mapping[tuple[str, str], Built]:
    entries = json.loads(path.read_text())["kernels"]
    return {(entry["name"], entry["target"]): _built(path.parent, entry) for entry in entries}


def _built(folder: Path, entry: dict[str, Any]) -> Built:
    fields = dict(entry)
    del fields["key"]
    fields["parameters"] = tuple(Parameter(**fields) for fields in entry["parameters"])
    return Built(
        family=folder.name, path=folder / file_name(entry["name"], entry["target"]), **fields
    )


def file_name(name: str, target: str) -> str:
    """Return the name of a compiled kernel's file."""
    return f"{name}.{target}.{'ptx' if target.startswith('compute_') else 'cubin'}"
