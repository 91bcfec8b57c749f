"""The .npy format: headers of versions 1 to 3 read (NEP 1), of version 1 written.

The elements behind a header are a flat file's; a part file gets its header and size at once.
"""

from __future__ import annotations

import ast
import math
import os
import struct
from io import BytesIO, FileIO
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import DTypeError, FileError
from ..numerics import dtypes
from .flat import FlatFile, read_at, reserve, stamp, write_at

__all__ = ["create_npy", "element_type", "npy_offset", "open_npy"]

_MAGIC = b"\x93NUMPY"


def open_npy(
    file: FileIO, path: Path, operand: str, label: str, raw: np.dtype[Any] | None
) -> FlatFile:
    """Return the matrix in an open .npy file, after checking all that header and size can tell.

    Parameters
    ----------
    file : FileIO
        Open for reading; it belongs to the matrix from then on.
    path : Path
    operand, label : str
        What the caller calls it, and the path as it was given.
    raw : numpy.dtype, optional
        What elements are that the file has as plain bytes.

    Raises
    ------
    FileError
        If it is not .npy, pickled or truncated.
    DTypeError
        If its elements cannot be multiplied.
    """
    name = f"{operand} ({label})"
    status = os.fstat(file.fileno())
    shape, dtype, is_fortran, offset = _read_header(file, status.st_size, name)
    dtype = element_type(dtype, raw, name, label)
    opened = FlatFile(operand, label, path, file, shape, dtype, is_fortran, offset, stamp(status))
    if offset + opened.nbytes > status.st_size:
        raise FileError(
            f"{name} is truncated: {shape} {dtype} takes {opened.nbytes} bytes after a header "
            f"of {offset}, and the file has {status.st_size - offset}; write it again"
        )
    return opened


def create_npy(part: Path, final: Path, shape: tuple[int, ...], dtype: np.dtype[Any]) -> None:
    """Create a part file with header and final size.

    Raises
    ------
    FileError
        If it cannot be created, or the disk has no room for it.
    """
    header = _header(shape, dtype)
    name = f"out ({final})"
    try:
        file = FileIO(part, "x")
    except OSError as error:
        raise FileError(f"{name} cannot be created: {error.strerror}") from error
    with file:
        reserve(file, len(header) + math.prod(shape) * dtype.itemsize, name, part)
        write_at(file, memoryview(header), 0)


def npy_offset(shape: tuple[int, ...], dtype: np.dtype[Any]) -> int:
    """Return where the elements begin in a file that `create_npy` creates."""
    return len(_header(shape, dtype))


def element_type(
    stored: np.dtype[Any], raw: np.dtype[Any] | None, name: str, label: str
) -> np.dtype[Any]:
    """Return what elements are, of a stored type and perhaps said to be ``raw``; or raise."""
    if raw is not None:
        stored = _reinterpreted(stored, raw, name)
    if stored.type is np.void and stored.names is None and stored.itemsize <= 2:
        example = "bfloat16" if stored.itemsize == 2 else "float8_e4m3fn"
        raise DTypeError(
            f"{name} has raw {stored.itemsize}-byte elements, as files keep bfloat16 and "
            f"float8; say which it is at the end of its name, as in {label}:{example}"
        )
    dtypes.canonical(stored, name)
    return stored


def _read_header(
    file: FileIO, size: int, label: str
) -> tuple[tuple[int, ...], np.dtype[Any], bool, int]:
    """Return shape, dtype, whether F-ordered, and the offset of the data (NEP 1)."""
    if size == 0:
        raise FileError(f"{label} is empty (0 bytes)")
    start = read_at(file, 12, 0)
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
    written = read_at(file, length, begin)
    try:
        text = written.decode("utf-8" if version == 3 else "latin1")
        header = ast.literal_eval(text.strip())
        shape, is_fortran = header["shape"], header["fortran_order"]
        # np.save calls ml_dtypes.float8_e5m2 "<f1", a name that NumPy itself does not know.
        descr: Any = "V1" if header["descr"] == "<f1" else header["descr"]
        dtype = np.lib.format.descr_to_dtype(descr)
    except (
        ValueError,
        SyntaxError,
        TypeError,
        LookupError,
        RecursionError,
        MemoryError,
        Warning,  # of a name that NumPy is going to forget, where warnings are errors
    ):
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
