"""Matrices in .npy files, read and written box by box: never loaded whole, never mapped.

Mapped pages count as resident memory until they are released, so boxes are read with pread into
buffers that the caller reuses. An output appears under its name only when all of it is written.
What is read when, and into which buffer, is the schedule's and the pipeline's business.
"""

from __future__ import annotations

import ast
import errno
import math
import os
import re
import secrets
import shutil
import stat
import struct
import threading
from collections.abc import Iterator
from dataclasses import dataclass, replace
from io import BytesIO, FileIO
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from .._memory import format_bytes
from ..errors import DTypeError, FileError
from ..numerics import dtypes

__all__ = ["Box", "NpyFile", "NpyOutput", "open_npy"]

#: A part of an array: one slice with start and stop for each axis.
Box = tuple[slice, ...]

_MAGIC = b"\x93NUMPY"
_RAW_TYPE = re.compile(r"(?P<path>.+):(?P<dtype>bfloat16|float8_\w+)")

# Windows has none of these: there, one thread at a time moves the file's position.
_HAS_PREAD = hasattr(os, "preadv")
_HAS_PWRITE = hasattr(os, "pwrite")
_HAS_ADVICE = hasattr(os, "posix_fadvise")
_position_lock = threading.Lock()

#: One read is at most this long, so that an interrupt is answered soon.
_LONGEST_READ = 64 << 20


@dataclass(frozen=True, slots=True)
class NpyFile:
    """A matrix in an open .npy file: what a plan needs to know of it, and its boxes on demand."""

    name: str  #: operand's name and path, for messages
    path: Path
    file: FileIO
    shape: tuple[int, ...]
    dtype: np.dtype[Any]  #: as stored, byte order included
    is_fortran: bool
    offset: int  #: of the first element, in bytes
    stamp: tuple[int, int]  #: size and modification time when it was opened
    where: str = "file"

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    @property
    def strides(self) -> tuple[int, ...]:
        """Bytes between neighbours along each axis, as those of an array."""
        steps = []
        step = self.dtype.itemsize
        for size in self.shape if self.is_fortran else reversed(self.shape):
            steps.append(step)
            step *= max(size, 1)
        return tuple(steps if self.is_fortran else reversed(steps))

    def read(self, box: Box, buffer: NDArray[np.uint8]) -> NDArray[Any]:
        """Read a box into the start of ``buffer``, and return it as an array over that memory.

        Parameters
        ----------
        box : tuple of slice
            Start and stop for each axis.
        buffer : ndarray of uint8
            At least as many bytes as the box has. The array is C- or F-ordered as the file is.

        Raises
        ------
        FileError
            If the file ends early or cannot be read.
        """
        into = buffer.data
        at = 0
        runs = list(self._runs(box))
        if _HAS_ADVICE and len(runs) > 1:
            # Known beforehand, short stretches are read several at a time: twice as fast.
            for start, run in runs:
                os.posix_fadvise(self.file.fileno(), start, run, os.POSIX_FADV_WILLNEED)
        for start, run in runs:
            while run:
                count = self._read_at(into[at : at + min(run, _LONGEST_READ)], start)
                at, start, run = at + count, start + count, run - count
        return self.view(box, buffer)

    def view(self, box: Box, buffer: NDArray[np.uint8]) -> NDArray[Any]:
        """Return the box that was read into ``buffer`` before."""
        shape = tuple(part.stop - part.start for part in box)
        order: Any = "F" if self.is_fortran else "C"
        length = math.prod(shape) * self.dtype.itemsize
        return buffer[:length].view(self.dtype).reshape(shape, order=order)

    def reshaped(self, shape: tuple[int, ...]) -> NpyFile:
        """Return the same elements under another shape; only C-ordered files have another."""
        assert shape == self.shape or not self.is_fortran, "not a view of an F-ordered file"
        return replace(self, shape=shape)

    def mapped(self) -> NDArray[Any]:
        """Return the whole array as a read-only memory map."""
        if not self.nbytes:
            return np.empty(self.shape, self.dtype)
        order: Any = "F" if self.is_fortran else "C"
        return np.memmap(
            self.path, self.dtype, mode="r", offset=self.offset, shape=self.shape, order=order
        )

    def check_unchanged(self) -> None:
        """Raise FileError if the file was written since it was opened."""
        if _stamp(os.fstat(self.file.fileno())) != self.stamp:
            raise FileError(f"{self.name} was changed while it was read; run again when it rests")

    def is_same_file(self, path: Path) -> bool:
        """Whether ``path`` leads to this very file, by whatever name."""
        try:
            return os.path.samestat(os.fstat(self.file.fileno()), os.stat(path))
        except OSError:
            return False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.file.close()

    def _runs(self, box: Box) -> Iterator[tuple[int, int]]:
        if self.is_fortran:
            return _runs(self.shape[::-1], box[::-1], self.dtype.itemsize, self.offset)
        return _runs(self.shape, box, self.dtype.itemsize, self.offset)

    def _read_at(self, into: memoryview, offset: int) -> int:
        try:
            if _HAS_PREAD:
                count = os.preadv(self.file.fileno(), [into], offset)
            else:
                with _position_lock:
                    self.file.seek(offset)
                    count = self.file.readinto(into) or 0
        except OSError as error:
            raise FileError(f"{self.name} cannot be read at byte {offset}: {error}") from error
        if count == 0:
            raise FileError(f"{self.name} ends at byte {offset}: it was cut while it was read")
        return count


class NpyOutput:
    """A .npy file in the making, under a temporary name beside its final one.

    Leaving the ``with`` block without `commit` removes it, whatever was there before stays.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        shape: tuple[int, ...],
        dtype: np.dtype[Any],
        grid: tuple[int, ...] | None = None,
    ) -> None:
        """Create the file with its final size, so that a full disk shows before any work.

        Parameters
        ----------
        path : path
            Final name; ends in .npy. What is there is replaced by `commit`.
        shape, dtype
            Of the array that the file will hold, in C order.
        grid : tuple of int, optional
            The shape that boxes refer to, if another one with the same elements.

        Raises
        ------
        FileError
            If it cannot be created, or the disk has no room for it.
        """
        self.path = check_output_path(path)
        self.dtype = dtype
        self.grid = shape if grid is None else grid
        self.nbytes = math.prod(shape) * dtype.itemsize
        header = _header(shape, dtype)
        self._offset = len(header)
        self.part = self.path.with_name(f"{self.path.name}.part-{secrets.token_hex(4)}")
        try:
            self._file = FileIO(self.part, "x+")
        except OSError as error:
            raise FileError(f"{self._name} cannot be created: {error.strerror}") from error
        try:
            self._reserve(self._offset + self.nbytes)
            self._write_at(memoryview(header), 0)
            if self.path.exists():
                os.chmod(self.part, stat.S_IMODE(self.path.stat().st_mode))
        except BaseException:
            self.discard()
            raise

    def write(self, box: Box, values: NDArray[Any]) -> None:
        """Write the values of a box, an array of its shape and of the file's dtype."""
        flat = np.ascontiguousarray(values).reshape(-1).view(np.uint8).data
        at = 0
        for start, run in _runs(self.grid, box, self.dtype.itemsize, self._offset):
            self._write_at(flat[at : at + run], start)
            at += run

    def mapped(self) -> NDArray[Any]:
        """Return what is written so far as a read-only memory map."""
        if not self.nbytes:
            return np.empty(self.grid, self.dtype)
        return np.memmap(self.part, self.dtype, mode="r", offset=self._offset, shape=self.grid)

    def commit(self) -> None:
        """Make the data durable, then give the file its final name."""
        try:
            os.fsync(self._file.fileno())
            self._file.close()
            os.replace(self.part, self.path)
        except OSError as error:
            raise FileError(f"{self._name} cannot be completed: {error}") from error

    def discard(self) -> None:
        """Remove the file under its temporary name; nothing happens after `commit`."""
        if hasattr(self, "_file"):
            self._file.close()
        self.part.unlink(missing_ok=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.discard()

    def __del__(self) -> None:
        # A signal can arrive after the file is there and before the with statement is entered.
        if hasattr(self, "part"):
            self.discard()

    @property
    def _name(self) -> str:
        return f"out ({self.path})"

    def _reserve(self, size: int) -> None:
        try:
            os.posix_fallocate(self._file.fileno(), 0, size)
            return
        except AttributeError:  # macOS and Windows
            pass
        except OSError as error:
            if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP, errno.ENOSYS):
                raise self._no_room(error) from error
        if size > shutil.disk_usage(self.path.parent).free:
            raise self._no_room(OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)))
        try:
            self._file.truncate(size)
        except OSError as error:
            raise self._no_room(error) from error

    def _write_at(self, data: memoryview, offset: int) -> None:
        try:
            while data:
                if _HAS_PWRITE:
                    count = os.pwrite(self._file.fileno(), data, offset)
                else:
                    with _position_lock:
                        self._file.seek(offset)
                        count = self._file.write(data)
                data, offset = data[count:], offset + count
        except OSError as error:
            raise self._no_room(error) from error

    def _no_room(self, error: OSError) -> FileError:
        needed = format_bytes(self._offset + self.nbytes)
        free = format_bytes(shutil.disk_usage(self.path.parent).free)
        return FileError(
            f"{self._name} needs {needed} and {self.path.parent} has {free} free: {error.strerror}"
        )


def open_npy(path: str | os.PathLike[str], name: str) -> NpyFile:
    """Open a matrix in a .npy file, after checking all that its header and size can tell.

    Parameters
    ----------
    path : path
        A .npy file of format version 1 to 3. A path that ends in ``:bfloat16`` or the name of
        another ml_dtypes float says what raw elements are: NumPy stores such types as plain bytes.
    name : str
        The operand's name, for messages.

    Raises
    ------
    FileError
        If it is missing, not a regular file, not readable, not .npy, pickled or truncated.
    DTypeError
        If its elements cannot be multiplied.
    """
    try:
        text = os.fspath(path)
    except TypeError:
        raise FileError(
            f"{name} is {type(path).__name__}, not a path; matmul multiplies arrays, and "
            "out=np.memmap(...) sends their product to a file"
        ) from None
    raw = None
    if (match := _RAW_TYPE.fullmatch(text)) is not None:
        text, raw = match["path"], dtypes.dtype_named(match["dtype"])
    label = f"{name} ({text})"
    file = _open(Path(text), label)
    try:
        status = os.fstat(file.fileno())
        shape, dtype, is_fortran, offset = _read_header(file, status.st_size, label)
        if raw is not None:
            dtype = _reinterpreted(dtype, raw, label)
        if dtype.type is np.void and dtype.names is None and dtype.itemsize <= 2:
            example = "bfloat16" if dtype.itemsize == 2 else "float8_e4m3fn"
            raise DTypeError(
                f"{label} has raw {dtype.itemsize}-byte elements, as .npy files keep bfloat16 and "
                f"float8; say which it is at the end of its name, as in {text}:{example}"
            )
        dtypes.canonical(dtype, label)
        opened = NpyFile(label, Path(text), file, shape, dtype, is_fortran, offset, _stamp(status))
        if offset + opened.nbytes > status.st_size:
            raise FileError(
                f"{label} is truncated: {shape} {dtype} takes {opened.nbytes} bytes after a header "
                f"of {offset}, and the file has {status.st_size - offset}; write it again"
            )
    except BaseException:
        file.close()
        raise
    return opened


def check_output_path(path: str | os.PathLike[str]) -> Path:
    """Return where an output goes (through symbolic links), or raise if it cannot be written."""
    try:
        given = Path(os.fspath(path))
    except TypeError:
        raise FileError(f"out is {type(path).__name__}, not a path") from None
    final = Path(os.path.realpath(given))
    label = f"out ({given})"
    if final.is_dir():
        raise FileError(f"{label} is a directory; name a file in it, such as {given / 'C.npy'}")
    if given.suffix != ".npy":
        raise FileError(f"{label} would be a .npy file; end its name in .npy")
    if final.exists() and not final.is_file():
        raise FileError(f"{label} is a device or pipe; an output is written by parts, into a file")
    if not final.parent.is_dir():
        raise FileError(f"{label} cannot be created: {final.parent} is not a directory")
    return final


def _open(path: Path, label: str) -> FileIO:
    try:
        mode = path.stat().st_mode
        if stat.S_ISDIR(mode):
            is_zarr = any((path / mark).exists() for mark in (".zarray", "zarr.json"))
            what = "a Zarr store, and this version reads .npy files" if is_zarr else "a directory"
            raise FileError(f"{label} is {what}")
        if not stat.S_ISREG(mode):
            raise FileError(f"{label} is a device or pipe; a matrix is read by parts, from a file")
        return FileIO(path, "r")
    except FileNotFoundError:
        raise FileError(f"{label} does not exist") from None
    except FileError:
        raise
    except (OSError, ValueError) as error:  # ValueError: a null byte in the name
        reason = getattr(error, "strerror", None) or error
        raise FileError(f"{label} cannot be opened: {reason}") from error


def _read_header(
    file: FileIO, size: int, label: str
) -> tuple[tuple[int, ...], np.dtype[Any], bool, int]:
    """Return shape, dtype, whether F-ordered, and the offset of the data (NEP 1)."""
    if size == 0:
        raise FileError(f"{label} is empty (0 bytes)")
    start = file.read(12) or b""
    if not start.startswith(_MAGIC):
        raise FileError(f"{label} is {_kind_of(start)}; write a matrix with np.save")
    broken = FileError(f"{label} has a broken .npy header; write it again with np.save")
    if len(start) < 12:
        raise broken
    version = start[6]
    if version not in (1, 2, 3):
        raise FileError(f"{label} has .npy format version {version}, and 1 to 3 are known")
    if version == 1:
        (length,), begin = struct.unpack("<H", start[8:10]), 10
    else:
        (length,), begin = struct.unpack("<I", start[8:12]), 12
    if begin + length > size or length > 1 << 20:
        raise broken
    file.seek(begin)
    try:
        text = (file.read(length) or b"").decode("utf-8" if version == 3 else "latin1")
        header = ast.literal_eval(text.strip())
        shape, is_fortran = header["shape"], header["fortran_order"]
        # np.save calls ml_dtypes.float8_e5m2 "<f1", a name that NumPy itself does not know.
        descr: Any = "V1" if header["descr"] == "<f1" else header["descr"]
        dtype = np.lib.format.descr_to_dtype(descr)
    except (ValueError, SyntaxError, TypeError, KeyError, RecursionError, MemoryError):
        raise broken from None
    if (
        not isinstance(shape, tuple)
        or not all(isinstance(n, int) and n >= 0 for n in shape)
        or not isinstance(is_fortran, bool)
    ):
        raise broken
    if dtype.hasobject:
        raise FileError(
            f"{label} holds pickled Python objects, which are never loaded; save an array of "
            "numbers, for example with .astype(float)"
        )
    return shape, dtype, is_fortran and len(shape) > 1, begin + length


def _kind_of(start: bytes) -> str:
    for magic, kind in (
        (b"PK", "a .npz or zip archive, not a .npy file"),
        (b"\x89HDF", "an HDF5 file, not a .npy file"),
    ):
        if start.startswith(magic):
            return kind
    return f"not a .npy file (it begins with {start[:8]!r})"


def _reinterpreted(stored: np.dtype[Any], raw: np.dtype[Any], label: str) -> np.dtype[Any]:
    if stored == raw:
        return stored
    is_raw = stored.type is np.void or stored.kind in "iu"
    if not is_raw or stored.itemsize != raw.itemsize or not stored.isnative:
        raise DTypeError(f"{label} holds {stored}, whose elements are not raw {raw}")
    return raw


def _header(shape: tuple[int, ...], dtype: np.dtype[Any]) -> bytes:
    header = BytesIO()
    descr = f"<V{dtype.itemsize}" if dtypes.as_numpy(dtype) != dtype else dtype.str
    np.lib.format.write_array_header_1_0(
        header, {"descr": descr, "fortran_order": False, "shape": shape}
    )
    return header.getvalue()


def _runs(
    shape: tuple[int, ...], box: Box, itemsize: int, offset: int
) -> Iterator[tuple[int, int]]:
    """Yield (offset, length) in bytes of the stretches of a C-ordered file that make up a box."""
    if any(part.stop <= part.start for part in box):
        return
    axis = len(shape)
    run = itemsize
    while axis and box[axis - 1] == slice(0, shape[axis - 1]):
        axis -= 1
        run *= shape[axis]
    step = run
    if axis:
        axis -= 1
        offset += box[axis].start * step
        run = (box[axis].stop - box[axis].start) * step
        step *= shape[axis]
    starts = np.array([offset])
    for part, size in zip(box[:axis][::-1], shape[:axis][::-1], strict=True):
        steps = np.arange(part.start, part.stop) * step
        starts = (steps[:, np.newaxis] + starts).reshape(-1)
        step *= size
    for start in starts.tolist():
        yield start, run


def _stamp(status: os.stat_result) -> tuple[int, int]:
    return status.st_size, status.st_mtime_ns
