"""Array libraries that are asked about their arrays in device memory themselves: torch and CuPy.

DLPack takes twenty times as long, and CuPy's loses the sign of a stride. None of them is imported
here: an array comes only from a library that its caller has imported.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from .errors import DeviceError, DTypeError

if TYPE_CHECKING:
    from .runtime.arrays import DeviceArray

__all__ = [
    "Library",
    "Recogniser",
    "check_torch",
    "extension_dtype",
    "known_library",
    "library_name",
]

#: Gives the addresses of three arrays; see `Library.recogniser`.
Recogniser = Callable[[Any, Any, Any], tuple[int, int, int] | None]

#: Makes, of plain tensors, a function that says whether as many others are like them.
_Guard = Callable[[Sequence[Any]], Callable[..., bool]]


class Library(Protocol):
    """What is asked of a library about its arrays in device memory."""

    array: type  #: its plain arrays; one of a type derived from it may be more than it seems
    stream: Callable[[int], int]  #: the handle of a device's current stream; 0 is the default one

    def adopt(self, x: Any, name: str, is_out: bool) -> DeviceArray:
        """Return what ``x`` is, or raise; nothing is ordered on any stream."""

    def recogniser(self, a: Any, b: Any, c: Any) -> Recogniser:
        """Return a function that gives the addresses of three arrays like these.

        It gives None for others: arrays of another shape, with other strides, of another type, on
        another device, at an address that is a multiple of 16 where these are at none (or the
        other way round), and arrays that `adopt` refuses or copies. A RuntimeError of the library's
        says the same. Where c is None its address is 0, and no array is like it.
        """

    def empty(self, shape: tuple[int, ...], dtype: np.dtype[Any], index: int) -> Any:
        """Return a new array on a device."""

    def maker(self, example: Any, beside: Any) -> Callable[[Any], tuple[Any, int]]:
        """Return a function that makes arrays like ``example``, and says where they begin.

        It is given an array of the device and dtype of ``beside``.
        """


@lru_cache(maxsize=64)
def known_library(name: str) -> Library | None:
    """Return the library of this name, if it is one of these."""
    known: dict[str, Callable[[Any], Library]] = {"torch": _Torch, "cupy": _Cupy}
    return known[name](sys.modules[name]) if name in known else None


def library_name(x: Any) -> str:
    """Return the name of the package that the type of ``x`` is of."""
    return type(x).__module__.partition(".")[0]


def check_torch(x: Any, name: str) -> None:
    """Raise for tensors that are more, or less, than a strided array of numbers."""
    if x.requires_grad:
        raise DTypeError(
            f"{name} requires grad, and tilewise records no gradients; pass {name}.detach()"
        )
    if str(x.layout) != "torch.strided":
        raise DTypeError(f"{name} is sparse ({x.layout}); pass {name}.to_dense()")
    if x.is_nested:
        raise DTypeError(f"{name} is a nested tensor; pass {name}.unbind(), a list of matrices")


def extension_dtype(dtype_name: str, name: str) -> np.dtype[Any]:
    """Return the dtype of ml_dtypes with this name, of an operand that is called ``name``."""
    try:
        import ml_dtypes
    except ImportError:
        raise DTypeError(
            f"{name} is {dtype_name}, which NumPy knows through ml_dtypes: pip install ml_dtypes"
        ) from None
    scalar = getattr(ml_dtypes, dtype_name, None)
    if scalar is None:
        raise DTypeError(f"{name} has dtype {dtype_name}, which cannot be multiplied")
    dtype: np.dtype[Any] = np.dtype(scalar)
    return dtype


class _Torch:
    def __init__(self, torch: Any) -> None:
        self.array: Any = torch.Tensor
        self._torch = torch
        # torch's own compiled code calls the first; the second makes an object, in 4 µs.
        self.stream: Callable[[int], int] = getattr(
            torch._C,
            "_cuda_getCurrentRawStream",
            lambda index: int(torch.cuda.current_stream(index).cuda_stream),
        )
        self._guard = _trusted_guard(torch) or _plain_guard

    def adopt(self, x: Any, name: str, is_out: bool) -> DeviceArray:
        from .runtime.arrays import DeviceArray

        check_torch(x, name)
        if x.is_conj() or x.is_neg():
            if is_out:
                raise DTypeError(
                    f"{name} is a lazily conjugated or negated view, and cannot be written "
                    "through; pass the tensor that it is a view of"
                )
            x = x.resolve_conj().resolve_neg()
        item, pointer = x.element_size(), x.data_ptr()
        if not pointer and x.numel():
            raise DeviceError(
                f"{name} (shape {tuple(x.shape)}) has no memory: its storage was freed"
            )
        strides = tuple([step * item for step in x.stride()])
        dtype = _torch_dtype(x.dtype, name)
        return DeviceArray(pointer, tuple(x.shape), strides, dtype, x.device.index, False, x)

    def recogniser(self, a: Any, b: Any, c: Any) -> Recogniser:
        # torch's guard takes no tensor twice, and does not survive a nested one.
        is_square, is_new, kind = a is b, c is None, self.array
        rest = () if c is None else (c,)
        are_alike = self._guard((a, *rest) if is_square else (a, b, *rest))
        aligned = tuple(x is None or x.data_ptr() & 15 == 0 for x in (a, b, c))

        def recognise(a: Any, b: Any, c: Any) -> tuple[int, int, int] | None:
            if (
                (a is b) is not is_square
                or (c is None) is not is_new
                or type(a) is not kind
                or type(b) is not kind
                or a.is_nested
                or b.is_nested
            ):
                return None
            if c is None:
                if not (are_alike(a) if is_square else are_alike(a, b)):
                    return None
            elif (
                type(c) is not kind
                or c.is_nested
                or not (are_alike(a, c) if is_square else are_alike(a, b, c))
            ):
                return None
            # This raises where there is no memory: in sparse tensors, and in traced ones.
            a_at, b_at, c_at = a.data_ptr(), b.data_ptr(), 0 if c is None else c.data_ptr()
            if not (a_at and b_at and (is_new or c_at)):
                return None
            if (a_at & 15 == 0, b_at & 15 == 0, c_at & 15 == 0) != aligned:
                return None
            return a_at, b_at, c_at

        return recognise

    def empty(self, shape: tuple[int, ...], dtype: np.dtype[Any], index: int) -> Any:
        kind = getattr(self._torch, dtype.name)
        return self._torch.empty(shape, dtype=kind, device=f"cuda:{index}")

    def maker(self, example: Any, beside: Any) -> Callable[[Any], tuple[Any, int]]:
        shape, strides = example.shape, example.stride()
        options = {} if example.dtype is beside.dtype else {"dtype": example.dtype}

        def make(beside: Any) -> tuple[Any, int]:
            made = beside.new_empty_strided(shape, strides, **options)
            return made, made.data_ptr()

        return make


class _Cupy:
    def __init__(self, cupy: Any) -> None:
        self.array: Any = cupy.ndarray
        self._cupy = cupy
        self.stream: Callable[[int], int] = lambda index: int(
            cupy.cuda.get_current_stream(index).ptr
        )

    def adopt(self, x: Any, name: str, is_out: bool) -> DeviceArray:
        from .runtime.arrays import DeviceArray

        return DeviceArray(x.data.ptr, x.shape, x.strides, x.dtype, x.data.device_id, False, x)

    def recogniser(self, a: Any, b: Any, c: Any) -> Recogniser:
        described = [self._described(x) for x in (a, b, c)]

        def recognise(a: Any, b: Any, c: Any) -> tuple[int, int, int] | None:
            if [self._described(x) for x in (a, b, c)] != described:
                return None
            return a.data.ptr, b.data.ptr, 0 if c is None else c.data.ptr

        return recognise

    def _described(self, x: Any) -> tuple[Any, ...] | None:
        if type(x) is not self.array:
            return () if x is None else None  # nothing is described as another library's array is
        return x.shape, x.strides, x.dtype, x.data.device_id, x.data.ptr & 15 == 0

    def empty(self, shape: tuple[int, ...], dtype: np.dtype[Any], index: int) -> Any:
        if self._cupy.cuda.runtime.getDevice() == index:
            return self.array(shape, dtype)
        with self._cupy.cuda.Device(index):
            return self.array(shape, dtype)

    def maker(self, example: Any, beside: Any) -> Callable[[Any], tuple[Any, int]]:
        shape, dtype, index = example.shape, example.dtype, example.data.device_id

        def make(beside: Any) -> tuple[Any, int]:
            made = self.empty(shape, dtype, index)
            return made, made.data.ptr

        return make


@lru_cache(maxsize=64)
def _torch_dtype(dtype: Any, name: str) -> np.dtype[Any]:
    text = str(dtype).removeprefix("torch.")
    try:
        known: np.dtype[Any] = np.dtype(text)
    except TypeError:
        return extension_dtype(text, name)
    return known


def _trusted_guard(torch: Any) -> _Guard | None:
    """Return torch's own guard, if it tells apart what has to be told apart; else None.

    Code that torch compiled is guarded by it at every call: are these tensors plain ones of the
    types, devices, shapes and strides that it was compiled for? It answers for three tensors in
    the time that one takes to be asked for two of these. It is no public part of torch, hence the
    trial; and it takes no tensor twice, nor a nested one, which ends the process.
    """

    def guard(examples: Sequence[Any]) -> Callable[..., bool]:
        check: Callable[..., bool] = torch._C._dynamo.guards.TensorGuards(
            *examples,
            dynamic_dims_sizes=[[*x.shape] for x in examples],
            dynamic_dims_strides=[[*x.stride()] for x in examples],
        ).check
        return check

    try:
        plain = torch.zeros((3, 3), device="cpu")
        pairs = torch.zeros((3, 3), device="cpu", dtype=torch.complex64)
        steps = torch.zeros((3, 6), device="cpu")[:, ::2]
        alike = [(plain, plain.clone()), (steps, steps.new_empty_strided((3, 3), (6, 2)))]
        apart = [
            (plain, plain.T),
            (plain, plain[:, :2]),
            (plain, plain[None]),
            (plain, plain.int()),
            (plain, plain.to("meta")),
            (plain, plain.to_sparse()),
            (plain, plain.clone().requires_grad_()),
            (plain, torch.nn.Parameter(plain, requires_grad=False)),
            (pairs, pairs.conj()),
            (steps, pairs.conj().imag),
        ]
        for grad_mode in (torch.enable_grad, torch.no_grad):
            with grad_mode():
                if not all(guard([x, x])(x, y) for x, y in alike) or any(
                    guard([x, x])(*tensors) for x, y in apart for tensors in ((x, y), (y, x))
                ):
                    return None
    except Exception:  # whatever becomes of it in a later version, there is another way
        return None
    return guard


def _plain_guard(examples: Sequence[Any]) -> Callable[..., bool]:
    described = [(x.dtype, x.shape, x.stride(), x.get_device()) for x in examples]

    def are_alike(*tensors: Any) -> bool:
        for x, (dtype, shape, strides, index) in zip(tensors, described, strict=True):
            if (
                x.dtype is not dtype
                or x.shape != shape
                or x.stride() != strides
                or x.get_device() != index
                or not x.is_cuda
                or x.requires_grad
                or x.is_neg()
                or (dtype.is_complex and x.is_conj())
            ):
                return False
        return True

    return are_alike
