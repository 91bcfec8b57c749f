"""Matrices whose elements lie in a file as plain bytes, one after the other, from some offset on.

Such are .npy files and contiguous HDF5 datasets. They are read and written box by box, never loaded
whole, never mapped: mapped pages count as resident memory until they are released, and one that was
cut off meanwhile ends the process. Boxes are read with pread into buffers that the caller reuses.
"""

from __future__ import annotations

import errno
import math
import os
import shutil
import stat
import tempfile
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from functools import partial
from io import FileIO
from pathlib import Path
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from .._memory import format_bytes
from .._operand import c_strides
from ..errors import FileError
from ..numerics.unread import Unread

__all__ = [
    "Box",
    "FlatFile",
    "FlatOutput",
    "check_room",
    "mapped_file",
    "read_at",
    "reserve",
    "spool",
    "stamp",
    "sync_path",
    "write_at",
    "write_error",
]

#: A part of an array: one slice with start and stop for each axis.
Box = tuple[slice, ...]

#: Which file it is, and what changes when it is written; see `stamp`.
Stamp = tuple[int, int, int, int]

# Windows has none of these: there, one thread at a time moves the file's position.
_HAS_PREAD = hasattr(os, "preadv")
_HAS_PWRITE = hasattr(os, "pwrite")
_HAS_ADVICE = hasattr(os, "posix_fadvise")
_position_lock = threading.Lock()

#: What a system says that has no room for what is written.
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)

#: Bytes at either end of a map that are compared with the file.
_SAMPLE = 4096

#: One read is at most this long, so that an interrupt is answered soon.
_LONGEST_READ = 64 << 20


@dataclass(frozen=True, slots=True)
class FlatFile:
    """A matrix in an open file: what a plan needs to know of it, and its boxes on demand."""

    operand: str  #: what the caller calls it: "a", "b"
    label: str  #: the path as it was given
    path: Path
    file: FileIO
    shape: tuple[int, ...]
    dtype: np.dtype[Any]  #: as stored, byte order included
    is_fortran: bool
    offset: int  #: of the first element, in bytes
    stamp: Stamp  #: when it was opened
    where: str = "file"
    chunks: None = None  #: any stretch can be read

    @property
    def name(self) -> str:
        return f"{self.operand} ({self.label})"

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
            _fill(self.file, self.name, start, into[at : at + run])
            at += run
        return self.view(box, buffer)

    def read_into(self, box: Box, into: NDArray[Any]) -> None:
        """Copy a box into an array of its shape, in the machine's byte order, of any strides."""
        if not (into.flags.f_contiguous if self.is_fortran else into.flags.c_contiguous):
            np.copyto(into, self.read(box, np.empty(into.nbytes, np.uint8)))
            return
        order: Any = "F" if self.is_fortran else "C"
        self.read(box, into.reshape(-1, order=order).view(np.uint8))
        if not self.dtype.isnative:
            into.byteswap(inplace=True)

    def view(self, box: Box, buffer: NDArray[np.uint8]) -> NDArray[Any]:
        """Return the box that was read into ``buffer`` before."""
        shape = tuple(part.stop - part.start for part in box)
        order: Any = "F" if self.is_fortran else "C"
        length = math.prod(shape) * self.dtype.itemsize
        return buffer[:length].view(self.dtype).reshape(shape, order=order)

    def as_panels(self, shape: tuple[int, ...], part_bytes: int) -> FlatFile:
        """Return the same elements under the shape that panels refer to.

        In C order, unless the shapes differ by axes of length 1 alone. Nothing is held beside the
        buffers that `read` gets, so ``part_bytes`` does not matter.
        """
        is_view = [n for n in shape if n != 1] == [n for n in self.shape if n != 1]
        assert is_view or not self.is_fortran, "not a view of an F-ordered file"
        return replace(self, shape=shape)

    def transposed(self) -> FlatFile:
        """Return the same elements with the axes in the other order."""
        is_fortran = len(self.shape) > 1 and not self.is_fortran
        return replace(self, shape=self.shape[::-1], is_fortran=is_fortran)

    def unread(self, folder: Path, part_bytes: int) -> AbstractContextManager[Unread]:
        """Give the whole array to look at; folder and bytes are for what must be copied for it."""
        fill = partial(_fill, self.file, self.name)
        return nullcontext(Unread(fill, self.dtype, self.shape, self.strides, self.offset))

    def identity(self) -> dict[str, Any]:
        """Return what tells this content from other content, for a journal."""
        return {
            "stamp": list(self.stamp),
            "offset": self.offset,
            "shape": list(self.shape),
            "dtype": str(self.dtype),
            "order": "F" if self.is_fortran else "C",
        }

    def check_unchanged(self) -> None:
        """Raise FileError if the file was written or replaced since it was opened."""
        if not self.is_same_file(self.path):
            raise FileError(
                f"{self.name} was removed or replaced while it was read; run again when it rests"
            )
        if stamp(os.fstat(self.file.fileno())) != self.stamp:
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


def mapped_file(x: np.memmap[Any, Any], operand: str) -> FlatFile | None:
    """Return the stretch of a file under a memory map or a view of one, such as a transpose.

    It is read as other files are, not through the map. None if it does not lie there in one
    stretch, or if what was written to the map is in no file.
    """
    root = x
    while isinstance(root.base, np.memmap):
        root = root.base
    is_fortran = bool(x.flags.f_contiguous and not x.flags.c_contiguous)
    if root.filename is None or root.mode == "c" or not (x.flags.c_contiguous or is_fortran):
        return None
    path = Path(root.filename)
    start = int(x.__array_interface__["data"][0]) - int(root.__array_interface__["data"][0])
    offset = root.offset + start
    flat = np.asarray(x).reshape(-1, order="F" if is_fortran else "C").view(np.uint8)
    try:
        file = FileIO(path, "r")
    except OSError:
        return None
    for at in (0, max(flat.size - _SAMPLE, 0)):
        sample = flat[at : at + _SAMPLE].tobytes()
        try:
            is_same = read_at(file, len(sample), offset + at) == sample
        except OSError:
            is_same = False
        if not is_same:
            file.close()  # another file has the name by now
            return None
    opened = stamp(os.fstat(file.fileno()))
    return FlatFile(operand, str(path), path, file, x.shape, x.dtype, is_fortran, offset, opened)


class FlatOutput:
    """An output in the making, in a part file that has its final size and header already."""

    chunks: None = None  #: any stretch can be written

    def __init__(
        self, part: Path, final: Path, grid: tuple[int, ...], dtype: np.dtype[Any], offset: int
    ) -> None:
        """Open the part file of an output.

        Parameters
        ----------
        part, final : Path
            Where it is now, and the name it gets by `commit`.
        grid : tuple of int
            The shape that boxes refer to, in C order.
        dtype : numpy.dtype
        offset : int
            Bytes before the first element.

        Raises
        ------
        FileError
            If the part file is not there, or shorter than it should be.
        """
        self.part, self.final = part, final
        self.grid, self.dtype = grid, dtype
        self.nbytes = math.prod(grid) * dtype.itemsize
        self._name = f"out ({final})"
        self._offset = offset
        try:
            self._file = FileIO(part, "r+")
        except OSError as error:
            raise FileError(f"{self._name} cannot be written: {error.strerror}") from error
        if os.fstat(self._file.fileno()).st_size < offset + self.nbytes:
            self.close()
            raise FileError(f"{part} is shorter than the output it is a part of")

    def write(self, box: Box, values: NDArray[Any]) -> None:
        """Write the values of a box, an array of its shape and of the file's dtype."""
        try:
            _write_box(self._file, self.grid, self._offset, box, values)
        except OSError as error:
            raise write_error(self._name, self.part, self.nbytes, error) from error

    def holds(self, box: Box) -> bool:
        """Whether a box is there: the file has had its whole size since it was opened."""
        return True

    def sync(self) -> None:
        """Return when all that was written is durable."""
        try:
            os.fsync(self._file.fileno())
        except OSError as error:
            raise write_error(self._name, self.part, self.nbytes, error) from error

    def unread(
        self, shape: tuple[int, ...], folder: Path, part_bytes: int
    ) -> AbstractContextManager[Unread]:
        """Give what is written so far to look at, under the shape of the result."""
        fill = partial(_fill, self._file, self._name)
        strides = c_strides(shape, self.dtype.itemsize)
        return nullcontext(Unread(fill, self.dtype, shape, strides, self._offset))

    def commit(self) -> None:
        """Make the data durable, then give the file its final name."""
        self.sync()
        try:
            if not os.path.samestat(os.fstat(self._file.fileno()), os.stat(self.part)):
                raise FileError(f"{self._name} cannot be completed: {self.part} was replaced")
            self.close()
            if self.final.exists():
                os.chmod(self.part, stat.S_IMODE(self.final.stat().st_mode))
            os.replace(self.part, self.final)
            with suppress(OSError):  # it is whole and has its name, which a crash may take again
                sync_path(self.final.parent)
        except FileError:
            raise
        except OSError as error:
            raise FileError(f"{self._name} cannot be completed: {error}") from error

    def close(self) -> None:
        self._file.close()


@contextmanager
def spool(
    shape: tuple[int, ...],
    dtype: np.dtype[Any],
    parts: Iterator[tuple[Box, NDArray[Any]]],
    folder: Path,
    name: str,
) -> Iterator[Unread]:
    """Give boxes that make up an array to look at, from a nameless file that is gone afterwards.

    Raises
    ------
    FileError
        If there is no room for it in ``folder``.
    """
    size = math.prod(shape) * dtype.itemsize
    copy = f"a copy of {name} to check with"
    with ExitStack() as stack:
        try:
            file = stack.enter_context(tempfile.TemporaryFile(dir=folder, buffering=0))
        except OSError as error:
            raise FileError(f"{folder} takes no {copy[2:]}: {error.strerror}") from error
        if size:
            reserve(file, size, copy, folder / "copy")
        for box, values in parts:
            try:
                _write_box(file, shape, 0, box, values)
            except OSError as error:
                raise write_error(copy, folder / "copy", size, error) from error
        fill = partial(_fill, file, copy)
        yield Unread(fill, dtype, shape, c_strides(shape, dtype.itemsize), 0)


def reserve(file: FileIO, size: int, name: str, part: Path) -> None:
    """Give a new file its final size, so that a full disk shows before any work."""
    try:
        os.posix_fallocate(file.fileno(), 0, size)
        return
    except AttributeError:  # macOS and Windows
        pass
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP, errno.ENOSYS):
            raise write_error(name, part, size, error) from error
    check_room(size, name, part)
    try:
        file.truncate(size)
    except OSError as error:
        raise write_error(name, part, size, error) from error


def check_room(size: int, name: str, part: Path) -> None:
    """Raise FileError if the disk of a part has less than ``size`` bytes free."""
    if size > shutil.disk_usage(part.parent).free:
        full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        raise write_error(name, part, size, full)


def write_error(name: str, part: Path, needed: int, error: OSError) -> FileError:
    """Return the error for an output of ``needed`` bytes that could not be written."""
    reason = error.strerror or error  # of some libraries' own there is only the text
    if error.errno not in _NO_ROOM:
        return FileError(f"{name} cannot be written: {reason}")
    free = format_bytes(shutil.disk_usage(part.parent).free)
    return FileError(
        f"{name} needs {format_bytes(needed)} and {part.parent} has {free} free: {reason}"
    )


def read_at(file: FileIO, size: int, offset: int) -> bytes:
    """Read so many bytes, or to the end; a system may give a part at a time."""
    given = b""
    while len(given) < size:
        if _HAS_PREAD:
            some = os.pread(file.fileno(), size - len(given), offset + len(given))
        else:
            with _position_lock:
                file.seek(offset + len(given))
                some = file.read(size - len(given)) or b""
        if not some:
            break
        given += some
    return given


def write_at(file: FileIO, data: memoryview, offset: int) -> None:
    """Write all of ``data``, of which a system may take a part at a time."""
    while data:
        if _HAS_PWRITE:
            count = os.pwrite(file.fileno(), data, offset)
        else:
            with _position_lock:
                file.seek(offset)
                count = file.write(data)
        data, offset = data[count:], offset + count


def sync_path(path: Path) -> None:
    """Make a file durable, or the names in a folder where the system lets that be asked for."""
    try:
        descriptor = os.open(path, os.O_RDWR if os.name == "nt" else os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
    except OSError as error:
        if error.errno in (errno.EIO, *_NO_ROOM) or not path.is_dir():
            raise


def stamp(status: os.stat_result) -> Stamp:
    """Return what tells a file from others, and from what it was: inode, size, two times.

    The time of change is the system's own: it tells that a file was written even where the time of
    modification was put back. The device's number is left out, since it may be another one after
    a restart.
    """
    return status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns


def _fill(file: FileIO, name: str, offset: int, into: memoryview) -> None:
    """Read as many bytes as ``into`` has."""
    while into:
        try:
            if _HAS_PREAD:
                count = os.preadv(file.fileno(), [into[:_LONGEST_READ]], offset)
            else:
                with _position_lock:
                    file.seek(offset)
                    count = file.readinto(into[:_LONGEST_READ]) or 0
        except OSError as error:
            raise FileError(f"{name} cannot be read at byte {offset}: {error}") from error
        if count == 0:
            raise FileError(f"{name} ends at byte {offset}: it was cut while it was read")
        into, offset = into[count:], offset + count


def _write_box(
    file: FileIO, shape: tuple[int, ...], offset: int, box: Box, values: NDArray[Any]
) -> None:
    """Write a box of a C-ordered array that begins at ``offset``."""
    flat = np.ascontiguousarray(values).reshape(-1).view(np.uint8).data
    for start, run in _runs(shape, box, values.itemsize, offset):
        write_at(file, flat[:run], start)
        flat = flat[run:]


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
