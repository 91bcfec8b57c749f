"""Where operands and outputs are: paths as people write them, what lies there, and who reads it.

``A.npy``, ``A.zarr``, ``A.h5``; an array within a file after a colon, ``A.h5:/group/x``; then what
raw bytes are, ``A.npy:bfloat16``; and last ``A.npy:T`` for its transpose. An operand may also be a
store (see `stores`). An output with a path is written beside its final name, which it gets when it
is complete.
"""

from __future__ import annotations

import os
import re
import shutil
import stat
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from .._arrays import check_has_all_elements
from .._memory import format_bytes
from ..errors import DTypeError, FileError
from ..numerics import dtypes
from ..numerics.unread import Unread
from . import hdf5, npy, zarrs
from .flat import Box, FlatFile, FlatOutput, mapped_file, read_at, sync_path, write_error
from .journal import Journal
from .stores import Layout, Readable, StoreMatrix, StoreOutput, Writable, dtype_of, place_of

__all__ = [
    "FileOperand",
    "FilePath",
    "FileResult",
    "Layout",
    "Matrix",
    "Output",
    "Target",
    "open_matrix",
]

FilePath = str | os.PathLike[str]
FileOperand = FilePath | Readable
FileResult = FilePath | Writable
Matrix = FlatFile | StoreMatrix

_PLACE = re.compile(
    r"(?P<path>.{2,}?)(?::(?P<inner>/[^:]*))?(?::(?P<raw>(?!T$)\w+))?(?P<turned>:T)?"
)


class Output(Protocol):
    """An output in the making."""

    nbytes: int

    @property
    def chunks(self) -> tuple[int, ...] | None:
        """What is written as one, along the axes that boxes have; None if anything may be."""

    def write(self, box: Box, values: NDArray[Any]) -> None: ...

    def holds(self, box: Box) -> bool:
        """Whether what was written to a box is there, as far as that is seen without reading."""

    def sync(self) -> None:
        """Return when all that was written is durable."""

    def unread(
        self, shape: tuple[int, ...], folder: Path, part_bytes: int
    ) -> AbstractContextManager[Unread]:
        """Give what was written to look at, copied to ``folder`` by parts if it must be."""

    def commit(self) -> None:
        """Give it its final name."""

    def close(self) -> None: ...


def open_matrix(operand: FileOperand, name: str) -> Matrix:
    """Open an operand, after checking all that can be told without reading its elements.

    Parameters
    ----------
    operand : path or store
    name : str
        What the caller calls it, for messages.

    Raises
    ------
    FileError
        If it is missing, not a regular file, not readable, truncated, or of no kind known here.
    DTypeError
        If its elements cannot be multiplied.
    """
    if not isinstance(operand, (str, os.PathLike)):
        if all(hasattr(operand, x) for x in ("shape", "dtype", "__getitem__")):
            check_has_all_elements(operand, name)
            label = type(operand).__name__
            dtype = dtype_of(operand, f"{name} ({label})")
            dtypes.canonical(dtype, name)
            if isinstance(operand, np.memmap) and (flat := mapped_file(operand, name)) is not None:
                return flat
            place = place_of(operand)
            paths = () if place is None else (place, *hdf5.sources(operand, place))
            return StoreMatrix.of(operand, name, label, dtype, paths=paths)
        raise FileError(
            f"{name} is {type(operand).__name__}, neither a path nor a store; matmul multiplies "
            "arrays, and out=np.memmap(...) sends their product to a file"
        )
    text = os.fspath(operand)
    path, inner, raw, is_turned = _parsed(text, name)
    found = _found(path, inner, raw, name, text)
    if not is_turned:
        return found
    if len(found.shape) > 2:
        found.__exit__()
        raise FileError(f"{name} ({text}): :T turns a matrix, and this has {len(found.shape)} axes")
    return found.transposed()


def _found(
    path: Path, inner: str | None, raw: np.dtype[Any] | None, name: str, text: str
) -> Matrix:
    """Open what is at a path, by what it is."""
    label = f"{name} ({text})"
    try:
        mode = path.stat().st_mode
        if stat.S_ISDIR(mode):
            if not zarrs.is_zarr(path):
                raise FileError(f"{label} is a directory, and no Zarr array")
            return zarrs.open_zarr(path, inner, name, text, raw)
        if not stat.S_ISREG(mode):
            raise FileError(f"{label} is a device or pipe; a matrix is read by parts, from a file")
        file = FileIO(path, "r")
    except FileNotFoundError:
        raise FileError(f"{label} does not exist{_misread(text)}") from None
    except FileError:
        raise
    except (OSError, ValueError) as error:  # ValueError: a null byte in the name
        reason = getattr(error, "strerror", None) or error
        raise FileError(f"{label} cannot be opened: {reason}") from error
    try:
        if path.suffix in hdf5.SUFFIXES or read_at(file, 8, 0) == b"\x89HDF\r\n\x1a\n":
            file.close()
            return hdf5.open_hdf5(path, inner, name, text, raw)
        if inner is not None:
            raise FileError(f"{label}: {path} is not HDF5 or Zarr, and holds no {inner}")
        return npy.open_npy(file, path, name, text, raw)
    except BaseException as error:
        file.close()
        if isinstance(error, OSError) and not isinstance(error, FileError):
            raise FileError(f"{label} cannot be read: {error.strerror}") from error
        raise


@dataclass(frozen=True, slots=True)
class Target:
    """Where an output goes, and in what form."""

    name: str  #: for messages
    kind: Literal["npy", "hdf5", "zarr", "store"]
    final: Path | None = None  #: through symbolic links; None for a store
    inner: str = "/"  #: of a dataset in an HDF5 file
    store: Any = None

    @classmethod
    def of(cls, out: FileResult, verify: bool = False) -> Target:
        """Return where ``out`` leads; FileError if it cannot be written, or read to ``verify``."""
        if not isinstance(out, (str, os.PathLike)):
            if hasattr(out, "__setitem__") and hasattr(out, "shape") and hasattr(out, "dtype"):
                if verify and not hasattr(out, "__getitem__"):
                    raise FileError(
                        f"out is {type(out).__name__}, which has no __getitem__, and verify reads "
                        "the result back; give it one, or leave verify out"
                    )
                return cls(f"out ({type(out).__name__})", "store", store=out)
            raise FileError(
                f"out is {type(out).__name__}, neither a path nor a store that can be written"
            )
        given, inner, raw, is_turned = _parsed(os.fspath(out), "out")
        name = f"out ({os.fspath(out)})"
        if is_turned:
            raise FileError(f"{name}: a result is not written turned; for C.T multiply B.T by A.T")
        if raw is not None:
            raise FileError(f"{name}: what the result's elements are, dtype= says (--dtype)")
        try:
            final = Path(os.path.realpath(given))
        except ValueError as error:  # a null byte in the name
            raise FileError(f"{name} cannot be created: {error}") from error
        kind = _kind_of_output(given)
        if kind == "npy" and inner is not None:
            raise FileError(f"{name}: a .npy file holds one array and no {inner}; leave that out")
        if kind is None:
            if final.is_dir():
                raise FileError(
                    f"{name} is a directory; name a file in it, such as {given / 'C.npy'}"
                )
            raise FileError(
                f"{name} has no known ending; end its name in .npy, .zarr or "
                f"{' or '.join(hdf5.SUFFIXES[:2])}"
            )
        if kind != "zarr" and final.is_dir():
            raise FileError(f"{name} is a directory; name a file in it, such as {given / 'C.npy'}")
        if kind != "zarr" and final.exists() and not final.is_file():
            raise FileError(
                f"{name} is a device or pipe; an output is written by parts, into a file"
            )
        if kind == "zarr" and inner is not None:
            given, final, inner = given / inner.strip("/"), final / inner.strip("/"), None
            if zarrs.format_of_group(final.parent) is None:
                raise FileError(
                    f"{name} cannot be created: {given.parent} is not a Zarr group; make it one "
                    "with zarr.create_group, or name the array that is to be written alone"
                )
        if not final.parent.is_dir():
            raise FileError(f"{name} cannot be created: {final.parent} is not a directory")
        if kind == "zarr" and zarrs.is_array(final.parent):
            raise FileError(f"{name} cannot be created: {final.parent} is a Zarr array itself")
        target = cls(name, kind, final, inner or "/c")
        try:
            os.stat(final.with_name(f"{final.name}.journal"))  # the longest of its names
        except FileNotFoundError:
            pass
        except OSError as error:
            raise FileError(f"{name} cannot be created: {error.strerror}") from error
        if final.exists() and (lost := target._lost_by_replacing()):
            raise FileError(f"{name} {lost}; give the result another name")
        return target

    def check_apart(self, x: Matrix) -> None:
        """Refuse a place that is what an operand is read from, or is in it."""
        if self.final is not None and x.is_same_file(self.final):
            raise FileError(
                f"{self.name} is the same file as {x.name}; inputs are never overwritten, so "
                "give the result another name"
            )
        if self.final is not None and any(map(x.is_same_file, self.final.parents)):
            raise FileError(
                f"{self.name} is within {x.name}, which would change while it is read; give the "
                "result a place of its own"
            )
        if self.store is not None and _is_of(x, self.store):
            raise FileError(
                f"{self.name} is {x.name}, or shares its memory or file, and is written while "
                "that is read; give the result a place of its own"
            )

    @property
    def is_flat(self) -> bool:
        """Whether any stretch of it can be written: it has no chunks."""
        return self.kind in ("npy", "hdf5")

    @property
    def part(self) -> Path | None:
        """Where the output is until it is complete."""
        return None if self.final is None else self.final.with_name(f"{self.final.name}.part")

    @property
    def is_begun(self) -> bool:
        """Whether something is where the output is until it is complete."""
        return self.part is not None and self.part.exists()

    @property
    def journal_path(self) -> Path | None:
        return None if self.final is None else self.final.with_name(f"{self.final.name}.journal")

    @property
    def folder(self) -> Path:
        """Where there is room for what belongs to the output."""
        return Path.cwd() if self.final is None else self.final.parent

    def journal(self) -> Journal:
        """Open the journal of this output.

        Raises
        ------
        FileError
            As `Journal` does, or if what is in the part's place was not begun with one.
        """
        journal = Journal(self.journal_path, self.name, str(self.part))
        # Nobody else writes there now; before, what was seen could be gone when it was looked up.
        if self.part is not None and self.is_begun:
            is_own = self.part.is_dir() if self.kind == "zarr" else self.part.is_file()
            if journal.is_new or not is_own:
                with journal:
                    if journal.is_new:
                        journal.remove()
                raise FileError(
                    f"{self.name} would be written as {self.part}, which is there already and not "
                    "known as a part of it; move it away"
                )
        return journal

    def create(self, layout: Layout, part_bytes: int) -> Output:
        """Begin an output anew, with its final size, so that a full disk shows before any work."""
        if self.part is not None and self.final is not None:
            try:
                self.discard()
                if self.kind == "npy":
                    npy.create_npy(self.part, self.final, layout.shape, layout.dtype)
                elif self.kind == "hdf5":
                    hdf5.create_hdf5(self.part, self.final, self.inner, layout)
                else:
                    zarrs.create_zarr(self.part, self.final, layout)
                sync_path(self.final.parent)  # or a crash could lose part and journal by name
            except BaseException as error:
                with suppress(OSError):  # what was wrong is said, and the next run discards it
                    self.discard()
                if isinstance(error, OSError) and not isinstance(error, FileError):
                    raise write_error(self.name, self.part, layout.nbytes, error) from error
                raise
        return self.reopen(layout, part_bytes)

    def reopen(self, layout: Layout, part_bytes: int) -> Output:
        """Go on with an output that was begun, or raise FileError if it is not there."""
        if self.part is None or self.final is None:
            return StoreOutput(self.store, layout, self.name, part_bytes)
        if self.kind == "zarr":
            return zarrs.ZarrOutput(self.part, self.final, layout, part_bytes)
        if self.kind == "npy":
            offset = npy.npy_offset(layout.shape, layout.dtype)
        else:
            offset = hdf5.hdf5_offset(self.part, self.inner)
        return FlatOutput(self.part, self.final, layout.grid, layout.dtype, offset)

    def check_room_to_verify(self, a: Matrix, b: Matrix, result_bytes: int) -> None:
        """Raise FileError if the disk has no room for the output beside what a check copies."""
        copied = [(x.name, x.nbytes) for x in (a, b) if isinstance(x, StoreMatrix)]
        if self.kind in ("zarr", "store"):
            copied.append((self.name, result_bytes))
        copies = sum(size for _, size in copied)
        output = 0
        if self.part is not None:
            begun = self.part.rglob("*") if self.part.is_dir() else [self.part]
            there = sum(path.stat().st_size for path in begun if path.is_file())
            output = max(result_bytes - there, 0)
        free = shutil.disk_usage(self.folder).free
        if copies and output + copies > free:
            names = ", ".join(name for name, _ in copied)
            raise FileError(
                f"{self.name} needs {format_bytes(output, is_needed=True)}, and to verify it "
                f"{format_bytes(copies, is_needed=True)} for copies of what is no flat file "
                f"({names}); {self.folder} has {format_bytes(free)} free. Make room, or do "
                "without verify (--verify)"
            )

    def discard(self) -> None:
        """Remove what there is of an output that was not completed."""
        if self.part is not None:
            if self.kind == "zarr" and self.final is not None:
                zarrs.put_back(self.part, self.final)
                if self.is_begun:
                    shutil.rmtree(self.part)
            else:
                self.part.unlink(missing_ok=True)

    def _lost_by_replacing(self) -> str:
        """Say what is at the output's place that another result must not replace."""
        assert self.final is not None
        if self.kind == "hdf5" and not hdf5.holds_only(self.final, self.inner):
            return f"holds more than {self.inner}, and a result gets an HDF5 file of its own"
        if self.kind == "zarr" and not zarrs.is_array(self.final):
            return "is there, and is not a Zarr array"
        return ""


def _parsed(text: str, name: str) -> tuple[Path, str | None, np.dtype[Any] | None, bool]:
    """Return the path in what a caller wrote, the array within, what raw elements are, and :T."""
    if not text:
        raise FileError(f"{name} is given no name; give a file's")
    match = _PLACE.fullmatch(text)
    try:
        if match is None or Path(text).exists() or "\0" in text:
            return Path(text), None, None, False
    except OSError as error:  # such as a name that is too long
        raise FileError(f"{name} ({text}) cannot be opened: {error.strerror}") from error
    steps = [step for step in (match["inner"] or "").split("/") if step]
    inner = "/" + "/".join(steps) if steps else None
    is_turned = match["turned"] is not None
    if match["raw"] is None:
        return Path(match["path"]), inner, None, is_turned
    if match["raw"] not in dtypes.EXTENSION_NAMES:
        raise DTypeError(
            f"{name} ({text}): {match['raw']!r} is not a type that files keep as raw bytes, such "
            "as bfloat16 or float8_e4m3fn; other files say themselves what they hold, and T is the "
            "transpose"
        )
    return Path(match["path"]), inner, dtypes.dtype_named(match["raw"]), is_turned


def _misread(text: str) -> str:
    """Say how to write what follows a path, where a name that is not there begins with one."""
    path, colon, rest = text.partition(":")
    if not colon or not Path(path).exists():
        return ""
    return (
        f"; {path} does, and what may follow it is, in this order: :/x (an array in it), "
        f":bfloat16 (what raw bytes are), :T (its transpose), and not :{rest}"
    )


def _kind_of_output(path: Path) -> Literal["npy", "hdf5", "zarr"] | None:
    if path.suffix == ".npy":
        return "npy"
    if path.suffix in hdf5.SUFFIXES:
        return "hdf5"
    if any(parent.suffix == ".zarr" for parent in (path, *path.parents)):
        return "zarr"
    return None


def _is_of(x: Matrix, store: Any) -> bool:
    """Whether a store is, or is in the place of, what an operand is read from."""
    own = getattr(x, "store", None)
    if own is store or (
        isinstance(own, np.ndarray)
        and isinstance(store, np.ndarray)
        and np.may_share_memory(own, store)
    ):
        return True
    path = place_of(store)
    if path is None or getattr(store, "mode", None) == "c" or not x.is_same_file(path):
        return False
    return not hdf5.is_apart(x, store)
