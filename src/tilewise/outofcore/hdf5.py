"""HDF5 datasets, through h5py: which bytes of the file they are where they are contiguous.

A contiguous dataset is a flat file with an offset and is read and written as one, without HDF5's
lock. So is an output: its file is complete, but for the elements, before the first tile, and no
crash can tear what HDF5 knows about it. Chunked and virtual datasets are read as stores.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from io import FileIO
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from ..errors import FileError
from ..numerics.dtypes import is_extension
from .flat import FlatFile, reserve, stamp, write_error
from .npy import element_type
from .stores import Layout, StoreMatrix

__all__ = [
    "SUFFIXES",
    "create_hdf5",
    "hdf5_offset",
    "holds_only",
    "is_apart",
    "open_hdf5",
    "sources",
]

#: Endings of the names of HDF5 files.
SUFFIXES = (".h5", ".hdf5", ".he5", ".nxs")


def open_hdf5(
    path: Path, inner: str | None, operand: str, label: str, raw: np.dtype[Any] | None
) -> FlatFile | StoreMatrix:
    """Return a dataset as an operand: ``inner`` by its path in the file, or the only one there is.

    Raises
    ------
    FileError
        If h5py is not installed, the file cannot be opened, or has not that dataset.
    DTypeError
        If its elements cannot be multiplied.
    """
    name = f"{operand} ({label})"
    h5py = _h5py(name)
    try:
        file = h5py.File(path, "r")
    except OSError as error:
        raise FileError(f"{name} cannot be opened as HDF5: {error}") from error
    try:
        dataset = _dataset(h5py, file, inner, name)
        dtype = element_type(dataset.dtype, raw, name, label)
        place = Path(os.fsdecode(dataset.file.filename))  # another file's, behind an external link
        offset = dataset.id.get_offset() if dataset.size else None
        if offset is None or dataset.external or dataset.is_virtual:
            paths = (place, *sources(dataset, place))
            return StoreMatrix.of(
                dataset,
                operand,
                label,
                dtype,
                paths=paths,
                # An element of a file that is not there has the fill value.
                stamp=lambda: [
                    *(x for path in paths if path.exists() for x in stamp(os.stat(path))),
                    dataset.name,
                ],
                close=file.close,
            )
        flat = FileIO(place, "r")
        status = os.fstat(flat.fileno())
        shape = tuple(int(size) for size in dataset.shape)
    except BaseException:
        file.close()
        raise
    file.close()
    opened = FlatFile(operand, label, place, flat, shape, dtype, False, offset, stamp(status))
    if offset + opened.nbytes > status.st_size:
        flat.close()
        raise FileError(f"{name} is truncated: its elements end beyond the end of the file")
    return opened


def create_hdf5(part: Path, final: Path, inner: str, layout: Layout) -> None:
    """Create a file with one contiguous dataset, whose elements have their places already.

    Raises
    ------
    FileError
        If it cannot be created, or the disk has no room for it.
    """
    name = f"out ({final})"
    h5py = _h5py(name)
    h5d, dtype = h5py.h5d, layout.dtype
    if is_extension(dtype):
        dtype = np.dtype(f"V{dtype.itemsize}")
    how = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
    how.set_layout(h5d.CONTIGUOUS)
    how.set_alloc_time(h5d.ALLOC_TIME_EARLY)
    how.set_fill_time(h5d.FILL_TIME_NEVER)
    links = h5py.h5p.create(h5py.h5p.LINK_CREATE)
    links.set_create_intermediate_group(True)
    try:
        with h5py.File(part, "x") as file:
            space = h5py.h5s.create_simple(layout.shape)
            kind = h5py.h5t.py_create(dtype, logical=True)
            h5d.create(file.id, inner.encode(), kind, space, how, links)
    except (OSError, RuntimeError) as error:  # RuntimeError: what cannot be written at its end
        said = re.search(r"errno = (\d+)", str(error))  # by the system, amid much of HDF5's own
        if said is None:
            raise FileError(f"{name} cannot be created: {error}") from error
        cause = OSError(number := int(said[1]), os.strerror(number))
        raise write_error(name, part, layout.nbytes, cause) from error
    with FileIO(part, "r+") as flat:
        reserve(flat, os.fstat(flat.fileno()).st_size, name, part)


def hdf5_offset(part: Path, inner: str) -> int:
    """Return where the elements of a dataset that `create_hdf5` created begin."""
    h5py = _h5py(f"out ({part})")
    try:
        with h5py.File(part, "r") as file:
            return int(file[inner].id.get_offset() or 0)
    except (OSError, KeyError) as error:
        raise FileError(f"{part} is not the output that was begun: {error}") from error


def holds_only(path: Path, inner: str) -> bool:
    """Whether an HDF5 file holds nothing that replacing it by one dataset would lose."""
    h5py = _h5py(f"out ({path})")
    try:
        with h5py.File(path, "r") as file:
            place = file
            for step in inner.strip("/").split("/"):  # links and groups count, which visits skip
                if list(place) != [step] or len(place.attrs):
                    return False
                place = place[step]
            return isinstance(place, h5py.Dataset) and not len(place.attrs)
    except (OSError, RuntimeError, KeyError):
        return False


def sources(dataset: Any, place: Path) -> Iterator[Path]:
    """Yield the other files that a dataset in a file has its elements in, if it is such a one."""
    if getattr(dataset, "is_virtual", False):
        names = [source.file_name for source in dataset.virtual_sources()]
    else:
        names = [name for name, *_ in getattr(dataset, "external", None) or ()]
    for name in dict.fromkeys(names):
        if name != ".":  # its own
            yield place.parent / name


def is_apart(x: FlatFile | StoreMatrix, store: Any) -> bool:
    """Whether ``x`` and a store of the same file are two datasets that the caller has open.

    A file that is opened here must rest while it is read, all of it.
    """
    own: Any = getattr(x, "store", None)
    if any(not hasattr(y, "id") or not hasattr(y, "file") for y in (own, store)) or x.stamp:
        return False
    from h5py import h5o

    return bool(h5o.get_info(own.id).addr != h5o.get_info(store.id).addr)


def _h5py(name: str) -> ModuleType:
    try:
        import h5py
    except ImportError:
        raise FileError(f"{name} is HDF5, read by h5py: pip install 'tilewise[hdf5]'") from None
    module: ModuleType = h5py
    return module


def _dataset(h5py: ModuleType, file: Any, inner: str | None, name: str) -> Any:
    if inner is None:
        found = _datasets(h5py, file)
        if len(found) == 1:
            return file[found[0]]
        said = f"has {len(found)} datasets: {', '.join(f'/{x}' for x in found[:10])}"
        if not found:
            raise FileError(f"{name} has no dataset")
        raise FileError(f"{name} {said}; name one, as in {name.split('(')[1][:-1]}:/{found[0]}")
    try:
        dataset = file[inner]
    except KeyError:
        found = _datasets(h5py, file)
        there = ", ".join(f"/{x}" for x in found[:10]) or "none"
        raise FileError(f"{name} has no dataset {inner}; there: {there}") from None
    if not isinstance(dataset, h5py.Dataset):
        raise FileError(f"{name}: {inner} is a group, not a dataset")
    return dataset


def _datasets(h5py: ModuleType, file: Any) -> list[str]:
    found: list[str] = []
    try:
        file.visititems(lambda path, x: found.append(path) if isinstance(x, h5py.Dataset) else None)
    except (RuntimeError, KeyError) as error:  # what h5py makes of damaged links and groups
        raise FileError(f"{file.filename} is damaged: {error}") from error
    return found
