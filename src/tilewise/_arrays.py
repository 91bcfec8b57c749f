"""Operands in, results out: the only module that knows other libraries' arrays.

Whatever a caller hands over becomes a NumPy view of the same memory; a result goes back as the kind
of array the operands were. No array library is imported that the caller has not imported.
"""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from types import ModuleType
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ._libraries import check_torch, extension_dtype, known_library, library_name
from ._memory import no_room
from .errors import (
    DeviceError,
    DTypeError,
    OptionError,
    ShapeError,
    TilewiseError,
    describe,
)
from .numerics.dtypes import is_extension

if TYPE_CHECKING:
    from .runtime.arrays import DeviceArray

__all__ = [
    "adopt",
    "adopt_out",
    "are_plain",
    "check_has_all_elements",
    "check_out",
    "common_library",
    "empty_like",
    "give_back",
    "is_dask",
    "is_group",
    "is_on_gpu",
    "no_stream",
    "on_device",
]

#: DLPack device types that are host memory: CPU, CUDA pinned host, ROCm pinned host.
_DLPACK_HOST = (1, 3, 11)
#: And those of a GPU: CUDA, CUDA managed.
_DLPACK_GPU = (2, 13)


def are_plain(a: Any, b: Any, out: Any) -> bool:
    """Whether operands and ``out``, if there is one, are NumPy arrays that need no adoption."""
    return type(a) is type(b) is np.ndarray and (out is None or type(out) is np.ndarray)


def adopt(x: Any, name: str) -> NDArray[Any]:
    """Return the host array ``x`` as a plain ndarray over the same memory.

    Parameters
    ----------
    x : array_like
        A NumPy array, a nested sequence of numbers, or anything with DLPack, the buffer protocol
        or ``__array__``, in host memory.
    name : str
        The operand's name, for messages.

    Raises
    ------
    DTypeError
        For np.matrix, masked, sparse and dask arrays and tensors that require grad.
    DeviceError
        For an array in device memory.
    ShapeError
        For a ragged sequence.
    """
    if type(x) is np.ndarray:
        return x
    if isinstance(x, np.ndarray):
        if isinstance(x, np.matrix):
            raise DTypeError(f"{name} is an np.matrix, whose * differs; pass np.asarray({name})")
        check_has_all_elements(x, name)
        return x.view(np.ndarray)
    if is_dask(x):
        raise DTypeError(
            f"{name} is a dask {type(x).__name__}; only matmul takes dask arrays, one pair at a "
            f"time, and nothing else of dask; pass {name}.compute()"
        )
    library = library_name(x)
    check_has_all_elements(x, name)
    if library == "torch":
        return _adopt_torch(x, name)
    if hasattr(x, "__cuda_array_interface__"):
        raise _on_device(x, name)
    device = _dlpack_device(x, name)
    if device is not None:
        if device[0] not in _DLPACK_HOST:
            raise _on_device(x, name)
        try:
            return np.from_dlpack(x)
        except (BufferError, RuntimeError, TypeError) as error:
            if not hasattr(x, "__array__"):
                raise DTypeError(f"{name} ({type(x).__name__}): {error}") from error
    if isinstance(x, type):
        raise DTypeError(f"{name} is the class {x.__name__}; pass an array")
    if isinstance(x, (str, os.PathLike)):
        raise DTypeError(
            f"{name} is the text {os.fspath(x)!r}; matmul multiplies arrays, and multiply_files "
            "(or tilewise mul) files"
        )
    try:
        adopted = np.asarray(x)
    except ValueError as error:
        raise ShapeError(f"{name} is not a rectangular array: {error}") from error
    except TilewiseError:
        raise
    except Exception as error:
        raise DTypeError(f"{name} ({type(x).__name__}) is not an array: {error}") from error
    if adopted.dtype != object or (adopted.shape and hasattr(x, "dtype")):
        return adopted
    largest = max((v for v in adopted.flat if isinstance(v, int)), key=abs, default=0)
    if abs(largest) >= 2**63:
        raise DTypeError(
            f"{name} ({type(x).__name__}) holds {largest}, a whole number beyond 64 bits, "
            "which no element type has; make it an array of floats, or of smaller numbers"
        )
    raise DTypeError(
        f"{name} ({type(x).__name__}) is not an array of numbers; tilewise multiplies NumPy "
        "arrays, nested sequences, and anything with DLPack, __array__ or the buffer protocol"
    )


def check_has_all_elements(x: Any, name: str) -> None:
    """Raise DTypeError for masked and sparse arrays."""
    if isinstance(x, np.ma.MaskedArray):
        raise DTypeError(
            f"{name} is a masked array; its mask has no meaning in a product. "
            f"Pass {name}.data, or of an operand {name}.filled(0)"
        )
    if not isinstance(x, np.ndarray) and (hasattr(x, "nnz") or library_name(x) == "sparse"):
        raise DTypeError(f"{name} is sparse ({type(x).__name__}); pass {name}.toarray()")


def adopt_out(out: Any, shape: tuple[int, ...], dtype: np.dtype[Any], name: str) -> NDArray[Any]:
    """Return ``out`` as an ndarray that can be written, after checking it in full.

    Raises
    ------
    ShapeError, DTypeError
        If its shape or dtype is not exactly the result's (foreign byte order is taken), if it
        cannot be written, or if several of its elements share one place in memory.
    """
    view = adopt(out, name)
    is_copy = type(out) is not np.ndarray and not np.shares_memory(view, adopt(out, name))
    if is_copy and view.size:
        raise DTypeError(f"{name} ({type(out).__name__}) cannot be written in place; pass an array")
    check_out(view, shape, dtype, name, view.flags.writeable)
    return view


def check_out(
    view: Any, shape: tuple[int, ...], dtype: np.dtype[Any], name: str, is_writeable: bool
) -> None:
    """Raise unless ``view``, in host or device memory, can take a result."""
    if view.shape != shape:
        raise ShapeError(f"{describe(name, view)} must have exactly the result's shape {shape}")
    if view.dtype != dtype and view.dtype.newbyteorder("=") != dtype:
        others = "ask for another result with dtype=" if name == "out" else "convert the operands"
        raise DTypeError(
            f"{describe(name, view)} must have exactly the result's dtype {dtype}; pass one that "
            f"has, or {others}"
        )
    if not is_writeable:
        raise DTypeError(f"{describe(name, view)} is read-only; pass an array that can be written")
    if type(view) is np.ndarray and view.flags.forc:
        return  # at once: contiguous elements have a place each
    reach = view.dtype.itemsize
    for step, size in sorted(zip(map(abs, view.strides), shape, strict=True)):
        if size > 1 and step < reach and 0 not in shape:
            raise ShapeError(
                f"{describe(name, view)} has elements that share memory; "
                "pass an array with a place for every element"
            )
        reach += step * (size - 1)


def give_back(result: Any, *operands: Any) -> Any:
    """Return ``result`` as an array of the operands' library; NumPy's stays as it is.

    So it does where the library has no arrays of its type, or narrows it, as JAX does where 64 bits
    are not enabled.
    """
    library = common_library(*operands)
    if library is None:
        return result
    if library.__name__ == "torch":
        ways = [partial(_to_torch, torch=library)]
    else:
        others = (x for x in operands if not isinstance(x, np.ndarray))
        named = [x.__array_namespace__() for x in others if hasattr(x, "__array_namespace__")]
        found = (getattr((*named, library)[0], name, None) for name in ("from_dlpack", "asarray"))
        ways = [way for way in found if way is not None]
    for make in ways:
        with suppress(AttributeError, BufferError, RuntimeError, TypeError, ValueError):
            made = make(np.asarray(result))
            is_of_type = result.dtype.name in str(getattr(made, "dtype", result.dtype.name))
            if is_of_type and _place(made, "the result") is None:
                return made
    return result


def common_library(*operands: Any) -> ModuleType | None:
    """Return the library whose arrays the operands are; None for NumPy's and plain Python's.

    Operands of one library beside NumPy arrays are of that library. Two such libraries are refused,
    since neither kind of result would be expected.
    """
    names = {library_name(x) for x in operands if not isinstance(x, np.ndarray)}
    names -= {"builtins", "numpy", "array"}
    if len(names) > 1:
        raise DTypeError(
            f"operands of different libraries ({', '.join(sorted(names))}) have no common kind of "
            "result; convert one of them"
        )
    return sys.modules.get(names.pop()) if names else None


class OnDevice(NamedTuple):
    """Arrays of which some or all are in the memory of one GPU; the others are NumPy arrays.

    What is there is complete for what follows on the stream. ``blocks`` says that a product has to
    be done before it is handed over: a library of the arrays works on a stream that is not known,
    and would read the result, or write to operands, too soon.
    """

    a: Any
    b: Any
    out: Any
    gpu: int
    stream: int
    blocks: bool
    is_mixed: bool  #: whether one of them is in host memory


def on_device(
    a: Any,
    b: Any,
    out: Any,
    stream: Any,
    *,
    take: Callable[[Any, str], Any] = adopt,
    updates: bool = False,
) -> OnDevice | None:
    """Return arrays of which one at least is in device memory; None stands for host memory.

    The stream is the one given, or the one that their library works on now (torch, CuPy), or CUDA's
    default stream.

    Parameters
    ----------
    a, b, out : array_like
    stream : object or None
    take : callable
        Makes what it should be of an array in host memory, given its name too.
    updates : bool
        Whether out, which is ``c`` then, is read too, and has to be where the operands are.

    Raises
    ------
    DTypeError, OptionError, DeviceError
        Naming the operand. A stream beside arrays in host memory is refused.
    """
    out_name = "c" if updates else "out"
    places = _places_of(a, b, out, out_name)
    there = {place for place in places.values() if place is not None}
    if not there:
        if stream is not None:
            raise no_stream(stream)
        return None
    is_mixed = None in places.values()
    if len(there) > 1 or (is_mixed and updates):
        said = ", ".join(
            f"{name} is in host memory" if index is None else f"{name} is on cuda:{index}"
            for name, index in places.items()
        )
        needed = "be in one place" if updates else "not be on different GPUs"
        raise DeviceError(f"{said}; operands and {out_name} must {needed}: copy one of them there")
    from .runtime import driver, streams

    driver.require()
    (index,) = there
    given = (("a", a), ("b", b), (out_name, out))
    operands = [x for name, x in given[:2] if places[name] is not None]
    library = common_library(*(operands or [out]))
    known = None if library is None else known_library(library.__name__)
    if stream is None and known is not None:
        handle = known.stream(index) or streams.DEFAULT
    else:
        handle = streams.handle_of(stream, index)
    seen = {
        name: take(x, name)
        if places[name] is None
        else _adopt_device(x, name, handle, name == out_name)
        for name, x in given
        if name in places
    }
    is_apart = out is not None and library_name(out) != library_name(a)
    blocks = is_mixed or (stream is None and (known is None or is_apart))
    return OnDevice(seen["a"], seen["b"], seen.get(out_name), index, handle, blocks, is_mixed)


def empty_like(
    a: Any, b: Any, shape: tuple[int, ...], dtype: np.dtype[Any], index: int, stream: int
) -> tuple[Any, DeviceArray]:
    """Return a new device array of the operands' library, not yet written, in both its forms.

    BudgetError if its library has no room for it.
    """
    try:
        return _new_like(a, b, shape, dtype, index, stream)
    except Exception as error:  # CuPy's is a MemoryError, torch's and JAX's a RuntimeError
        told = isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError"
        if isinstance(error, TilewiseError) or not (told or "RESOURCE_EXHAUSTED" in str(error)):
            raise
        nbytes = math.prod(shape) * dtype.itemsize
        raise no_room(f"{shape} {dtype}", nbytes, f"cuda:{index}") from error


def _new_like(
    a: Any, b: Any, shape: tuple[int, ...], dtype: np.dtype[Any], index: int, stream: int
) -> tuple[Any, DeviceArray]:
    library = common_library(a, b)
    known = None if library is None else known_library(library.__name__)
    if known is not None:
        made = known.empty(shape, dtype, index)
        return made, _adopt_device(made, "the result", stream, True)
    namespace = getattr(a, "__array_namespace__", lambda: None)()
    if namespace is None:
        raise DeviceError(
            f"{type(a).__module__} has no way to make a new array that tilewise knows; pass out="
        )
    if hasattr(namespace, dtype.name):
        made = namespace.empty(shape, dtype=getattr(namespace, dtype.name), device=a.device)
        target = _adopt_device(made, "the result", stream, True)
        if target.dtype == dtype:  # else it narrows, as JAX does where 64 bits are not enabled
            return made, target
    raise DTypeError(
        f"{library_name(a)} makes no array of {dtype}, which the result is; ask for another with "
        "dtype=, or pass out="
    )


def no_stream(stream: Any) -> OptionError:
    """Return the error for a stream beside operands in host memory."""
    return OptionError(
        f"stream={stream!r} was given, and the operands are in host memory; host products block "
        "until done and take no stream"
    )


def is_dask(x: Any) -> bool:
    """Whether ``x`` is one of dask's collections."""
    return library_name(x) == "dask"


def is_on_gpu(x: Any, name: str) -> bool:
    """Whether the array ``x`` is in the memory of a GPU."""
    return _place(x, name) is not None


def is_group(x: Any) -> bool:
    """Whether ``x`` is a list of operands (arrays), and not a nested list of numbers."""
    return (
        type(x) in (list, tuple)
        and len(x) > 0
        and all(hasattr(item, "shape") and hasattr(item, "dtype") and item.shape for item in x)
    )


def _places_of(a: Any, b: Any, out: Any, out_name: str) -> dict[str, int | None]:
    """Return the GPU whose memory each of the arrays is in, or None for host memory."""
    if are_plain(a, b, out):
        return {}
    named = (("a", a), ("b", b), (out_name, out))
    return {name: _place(x, name) for name, x in named if x is not None or name != out_name}


def _adopt_device(x: Any, name: str, stream: int, is_out: bool = False) -> DeviceArray:
    """Return the device array ``x``, complete for what follows on ``stream``.

    torch and CuPy are asked for what they know of an array: DLPack takes twenty times as long, and
    CuPy's loses the sign of a stride.
    """
    from .runtime import arrays, streams

    library = known_library(library_name(x))
    if library is None:
        return arrays.view(x, name, stream)
    found = library.adopt(x, name, is_out)
    last = library.stream(found.index) or streams.DEFAULT
    if last != stream:
        streams.follow(stream, last, found.index)
    return found


def _place(x: Any, name: str) -> int | None:
    """Return the GPU whose memory ``x`` is in; None for the host's, and for what is no array."""
    if isinstance(x, (np.ndarray, list, tuple)):
        return None
    if library_name(x) == "torch":
        return x.device.index if x.device.type == "cuda" else None
    device = _dlpack_device(x, name)
    if device is not None:
        return device[1] if device[0] in _DLPACK_GPU else None
    if hasattr(x, "__cuda_array_interface__"):
        return _adopt_unordered(x).index
    return None


def _dlpack_device(x: Any, name: str) -> tuple[int, int] | None:
    """Return the kind and the number of the device that ``x`` is on; None if it has no DLPack."""
    if isinstance(x, type) or not hasattr(x, "__dlpack_device__"):
        return None
    try:
        kind, index = x.__dlpack_device__()
        return int(kind), int(index)
    except Exception as error:  # whatever its library raises, such as for one on several devices
        raise DeviceError(
            f"{name} ({type(x).__name__}) is on no device that DLPack knows: {error}; copy it to "
            "one, or to the host"
        ) from error


def _adopt_unordered(x: Any) -> DeviceArray:
    from .runtime.arrays import view

    return view(x, "an operand", None)


def _on_device(x: Any, name: str) -> DeviceError:
    return DeviceError(
        f"{name} ({type(x).__name__}) is in the memory of a device that tilewise does not multiply "
        "on; copy it to the host, or to an NVIDIA GPU"
    )


def _adopt_torch(x: Any, name: str) -> NDArray[Any]:
    check_torch(x, name)
    if x.device.type != "cpu":
        raise _on_device(x, name)
    x = x.resolve_conj().resolve_neg()
    torch = sys.modules["torch"]
    try:
        return np.asarray(x.numpy())
    except TypeError:
        # NumPy has no such type: pass the bits, and read them as the type of ml_dtypes.
        extension = extension_dtype(str(x.dtype).removeprefix("torch."), name)
        carrier = torch.int16 if extension.itemsize == 2 else torch.uint8
        return np.asarray(x.view(carrier).numpy()).view(extension)


def _to_torch(result: NDArray[Any], torch: ModuleType) -> Any:
    if not is_extension(result.dtype):
        return torch.from_numpy(result)
    carrier = np.int16 if result.dtype.itemsize == 2 else np.uint8
    return torch.from_numpy(result.view(carrier)).view(getattr(torch, result.dtype.name))
