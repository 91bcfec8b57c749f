"""Zarr arrays of formats 2 and 3, through zarr 3.

An output is a folder under another name until it is complete. Its chunks are files that no two
tiles share, so that each tile can be made durable by itself; they are not compressed, since sums of
floats do not get smaller by it.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import math
import os
import shutil
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .._shield import shielded
from ..errors import DTypeError, FileError
from .flat import Box, check_room, stamp, sync_path, write_error
from .npy import element_type
from .stores import Layout, StoreMatrix, StoreOutput

__all__ = [
    "ZarrOutput",
    "create_zarr",
    "format_of_group",
    "is_array",
    "is_zarr",
    "open_zarr",
    "put_back",
]


#: Where the array that an output replaces is for a moment: in the output's folder, so that whatever
#: happens nothing else has to be found and cleared away. Zarr takes no notice of it.
_REPLACED = ".replaced"


def is_zarr(path: Path) -> bool:
    """Whether a folder is a Zarr array or group."""
    return any((path / mark).exists() for mark in ("zarr.json", ".zarray", ".zgroup"))


def open_zarr(
    path: Path, inner: str | None, operand: str, label: str, raw: np.dtype[Any] | None
) -> StoreMatrix:
    """Return an array as an operand: ``inner`` by its path in the group, or the only one there is.

    Raises
    ------
    FileError
        If zarr is not installed, or the folder has not that array.
    DTypeError
        If its elements cannot be multiplied.
    """
    name = f"{operand} ({label})"
    zarr = _zarr(name)
    try:
        if is_array(path) and inner is None:
            array = zarr.open_array(path, mode="r")
        else:  # what is there, not what was there when metadata was consolidated
            group = zarr.open_group(path, mode="r", use_consolidated=False)
            array = group[_array_in(path, inner, name)]
        stored = np.dtype(array.dtype)
    except FileError:
        raise
    except Exception as error:  # zarr's own classes, KeyError and ValueError, by what is wrong
        raise FileError(f"{name} cannot be opened as Zarr: {error}") from error
    folder = path / array.path
    dtype = element_type(stored, raw, name, label)
    return StoreMatrix.of(
        array, operand, label, dtype, paths=(folder,), stamp=lambda: _folder_stamp(folder)
    )


def create_zarr(part: Path, final: Path, layout: Layout) -> None:
    """Create the folder of an output, with its metadata and without a chunk.

    Raises
    ------
    FileError
        If zarr is not installed, the folder cannot be created, or the disk has no room.
    DTypeError
        If Zarr has no such elements.
    """
    name = f"out ({final})"
    zarr = _zarr(name)
    check_room(layout.nbytes, name, part)
    try:
        create = partial(
            zarr.create_array,
            part,
            shape=layout.shape,
            dtype=layout.stored_dtype,
            chunks=tuple(max(size, 1) for size in layout.chunks) if layout.shape else "auto",
            compressors=None,
            # A group holds arrays of its own format alone.
            zarr_format=format_of_group(final.parent) or layout.zarr_format,
        )
        shielded(create)  # zarr's own threads would go on where an interrupt had cleared up
    except OSError as error:
        raise FileError(f"{name} cannot be created: {error}") from error
    except ValueError as error:
        raise DTypeError(
            f"{name}: Zarr has no elements of type {layout.dtype}; write to .npy, or choose "
            "another with dtype= (--dtype)"
        ) from error
    for path in (*part.glob("*.json"), *part.glob(".z*"), part):
        sync_path(path)


class ZarrOutput(StoreOutput):
    """An output in a folder of chunks, under another name until it is complete."""

    def __init__(self, part: Path, final: Path, layout: Layout, part_bytes: int) -> None:
        """Open the folder that `create_zarr` made.

        Raises
        ------
        FileError
            If it is not there.
        """
        name = f"out ({final})"
        put_back(part, final)
        try:
            array = _zarr(name).open_array(part, mode="r+")
            # What is not there is not done; so chunks of zeros are written like any.
            array = array.with_config({"write_empty_chunks": True})
        except (OSError, ValueError) as error:
            raise FileError(f"{part} is not the output that was begun: {error}") from error
        super().__init__(array, layout, name, part_bytes)
        self.part, self.final = part, final
        self._unsynced: set[Path] = set()
        for torn in part.rglob("*.partial"):  # what zarr was writing when it was stopped
            torn.unlink()

    def write(self, box: Box, values: NDArray[Any]) -> None:
        """Write the values of a box."""
        shielded(partial(super().write, box, values))  # as it is created
        self._unsynced.update(self._files(box))

    def holds(self, box: Box) -> bool:
        """Whether the chunks of a box are there, with all their bytes."""
        size = math.prod(self.store.chunks) * self.dtype.itemsize
        try:
            return all(path.stat().st_size == size for path in self._files(box))
        except FileNotFoundError:
            return False

    def sync(self) -> None:
        """Return when all that was written is durable."""
        # Of a file in a folder that is new, the folder's own name must outlive a crash too.
        folders = {
            folder
            for chunk in self._unsynced
            for folder in chunk.parents
            if folder.is_relative_to(self.part)
        }
        for path in (*self._unsynced, *folders):
            try:
                sync_path(path)
            except OSError as error:
                raise write_error(self._name, self.part, self.nbytes, error) from error
        self._unsynced.clear()

    def commit(self) -> None:
        """Make all durable, then give the folder its final name."""
        self.sync()
        try:
            if self.final.exists():  # a folder replaces no folder that is not empty
                os.replace(self.final, self.part / _REPLACED)
            try:
                os.replace(self.part, self.final)
            except BaseException:
                put_back(self.part, self.final)
                raise
        except OSError as error:
            raise FileError(f"{self._name} cannot be completed: {error}") from error
        with suppress(OSError):  # it is whole and has its name, which a crash may take again
            sync_path(self.final.parent)
        shutil.rmtree(self.final / _REPLACED, ignore_errors=True)  # it does no harm

    def _files(self, box: Box) -> Iterator[Path]:
        """Yield the files of the chunks that a box is in."""
        at = [part for axis, part in enumerate(box) if axis not in self._added]
        numbers = (
            range(part.start // size, -(-part.stop // size))
            for part, size in zip(at, self.store.chunks, strict=True)
        )
        encode = self.store.metadata.encode_chunk_key
        return (self.part / encode(key) for key in itertools.product(*numbers))

    def _refused(self, part: Box, error: Exception) -> FileError:
        if isinstance(error, OSError) and error.errno is not None:
            return write_error(self._name, self.part, self.nbytes, error)
        return super()._refused(part, error)


def put_back(part: Path, final: Path) -> None:
    """Give an array its name again if a run was killed after taking it and before replacing it."""
    if (part / _REPLACED).exists() and not final.exists():
        os.replace(part / _REPLACED, final)


def is_array(folder: Path) -> bool:
    """Whether a folder is a Zarr array, and no group of them."""
    return (folder / ".zarray").exists() or _node_type(folder) == "array"


def format_of_group(folder: Path) -> int | None:
    """Return the format of the Zarr group that a folder is, or None if it is none."""
    if _node_type(folder) == "group":
        return 3
    return 2 if (folder / ".zgroup").exists() else None


def _node_type(folder: Path) -> object:
    """Return what a folder says it is, in format 3."""
    try:
        meta = json.loads((folder / "zarr.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return meta.get("node_type") if isinstance(meta, dict) else None


def _zarr(name: str) -> ModuleType:
    try:
        import zarr
    except ImportError:
        raise FileError(f"{name} is Zarr, read by zarr: pip install 'tilewise[zarr]'") from None
    if int(zarr.__version__.partition(".")[0]) < 3:
        raise FileError(
            f"{name} is Zarr, read by zarr 3 (this is {zarr.__version__}): "
            "pip install 'tilewise[zarr]'"
        )
    module: ModuleType = zarr
    return module


def _array_in(group: Path, inner: str | None, name: str) -> str:
    """Return the path in a group of the array that is meant.

    The group itself is not asked, which would warn of the journal of a run that was stopped.
    """
    if inner is not None and is_array(group / inner.strip("/")):
        return inner.strip("/")
    found = []
    for root, folders, _ in os.walk(group):
        if is_array(Path(root)):
            folders.clear()
            unfinished = root.removesuffix(".part")  # such a run's, if its journal is there
            if root == unfinished or not Path(f"{unfinished}.journal").exists():
                found.append(Path(root).relative_to(group).as_posix())
    if inner is None and len(found) == 1:
        return found[0]
    there = ", ".join(f"/{path}" for path in sorted(found)[:10]) or "none"
    if inner is not None:
        raise FileError(f"{name} has no array {inner}; there: {there}")
    raise FileError(f"{name} is a group; name one of its arrays (there: {there}) after :")


def _folder_stamp(folder: Path) -> list[int | str]:
    """Return which folder it is, and a digest of the names and stamps of all files in it."""
    digest = hashlib.sha256()
    for root, folders, names in os.walk(folder):
        folders.sort()
        for name in sorted(names):
            path = os.path.join(root, name)
            line = f"{os.path.relpath(path, folder)}\0{stamp(os.stat(path))}\n"
            digest.update(line.encode(errors="surrogateescape"))
    return [folder.stat().st_ino, digest.hexdigest()]
