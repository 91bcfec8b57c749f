"""The public calls: check, adopt, plan, run, give back."""

from __future__ import annotations

import math
import os
from collections import Counter
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from . import _arrays, _cpu, _repeat
from ._devices import device_names, gpu_for, machine_beside, machine_for
from ._operand import Operand
from ._overlap import meeting, meets, overlap
from ._plan import Plan, make_plan
from ._request import Request, array_key, layout, request
from ._run import run_across, run_on_device, run_on_host
from .errors import BudgetError, DTypeError, OptionError, ShapeError, TilewiseError
from .numerics import dtypes

if TYPE_CHECKING:
    from ._streamed import Machine

__all__ = ["gemm", "matmul", "plan"]

Array = NDArray[Any]


def matmul(
    a: Any,
    b: Any,
    /,
    *,
    out: Any = None,
    dtype: Any = None,
    precision: str | None = None,
    stream: Any = None,
    memory: Any = None,
    devices: Any = None,
    verify: bool = False,
) -> Any:
    """Return the matrix product ``out = a @ b``, by np.matmul's rules.

    Parameters
    ----------
    a : array_like (..., m, k) or (k,)
    b : array_like (..., k, n) or (k,)
        Numbers of any NumPy type, bfloat16 or float8; any strides, alignment and byte order.
        Batch axes broadcast and are never expanded. Two lists of arrays are multiplied pair by
        pair, once all pairs are found to be in order, and give a list. A dask array gives a dask
        array, computed later, to whose tasks options apply one by one (docs/larger.md).
    out : array (..., m, n), optional
        Where to write: exactly the result's shape and dtype, any strides, on the host or on the
        operands' GPU. It may overlap an operand; the result is then computed beside it. Of lists,
        no array may overlap one of another pair.
    dtype : dtype, optional
        The result's type, computed without overflow on the way: int8 matrices with
        ``dtype=np.int32`` give exact sums.
    precision : {None, "ieee", "tf32", "fp64-int8"}
        "tf32" allows 11 bits of each float32 operand, "fp64-int8" a bound relative to rows and
        columns for float64; the plan says what is given, and the CPU never gives less. "ieee" is
        for float32 by chains of fused multiply-adds where a GPU would use its tensor cores.
    stream : object, optional
        Of arrays in device memory: where the product is put, or, with others on the host, what it
        comes after; anything with ``__cuda_stream__``. By default the stream their library works
        on now (torch, CuPy), or CUDA's default stream.
    memory : int or str, optional
        Budget for what tilewise itself holds, on the host and on each device: the result, unless
        ``out`` takes it as it is computed; copies, such as of operands that ``out`` overlaps;
        workspace; what ``verify`` takes; on a GPU, what is there at a time of arrays on the host.
        Bytes, or text such as "2GiB" or "80%", which is of the device that all arrays are on, and
        otherwise of this machine's memory and of each device's. Of lists it is for all pairs
        together.
    devices : str or list of str, optional
        "cpu", "cuda:0", or for host operands several GPUs. By default operands are multiplied
        where they are, on the GPU if any array is on one, and large ones on the host by a GPU if
        that is expected to be done well before the CPU; the plan says which, and why.
    verify : bool
        Check the result by `check` before it is returned or written.

    Returns
    -------
    array (..., m, n)
        Of the operands' kind, where they are (on the host NumPy's, if their library has no arrays
        of its type); of one operand on the host and one on a GPU, on the host, of that one's kind;
        ``out`` itself if it was given; a scalar for two vectors. With an array on the host the call
        blocks until the result is complete. Without, it returns at once, with the product in the
        order of the stream, unless ``stream`` was not given and an array is of a library whose
        stream is not known (neither torch nor CuPy), or ``out`` of another.

    Raises
    ------
    ShapeError, DTypeError, OptionError, BudgetError, DeviceError
        Before any work, naming the operand and what to do.
    CheckError
        If ``verify`` found the result wrong; ``out`` in host memory is then untouched.

    Notes
    -----
    Each element obeys the bound that ``tilewise.plan(a, b)`` prints (docs/numerics.md).
    """
    asked = None
    if memory is None and devices is None and verify is False:
        if type(a) is not np.ndarray:
            asked = _repeat.question(a, b, dtype, precision)
            done = _repeat.product(a, b, out, stream, asked)
            if done is not None:
                return done
        elif (
            precision is None
            and stream is None
            and _arrays.are_plain(a, b, out)
            and machine_for(a, b, None, None) is None
        ):
            return _product_on_cpu(a, b, out, dtype)
    options = _Options(dtype, precision, memory, devices, verify)
    if _arrays.is_group(a) or _arrays.is_group(b):
        results = []
        for number, run in enumerate(_group(a, b, out, stream, options)):
            with _naming(number):
                results.append(run())
        return results
    if any(map(_arrays.is_dask, (a, b, out))):
        from . import distributed

        return distributed.matmul(a, b, out=out, stream=stream, **options.asked)
    return _Product.of(a, b, out, stream, options).run(asked)


def gemm(
    a: Any,
    b: Any,
    c: Any,
    /,
    *,
    alpha: Any = 1,
    beta: Any = 0,
    precision: str | None = None,
    stream: Any = None,
) -> Any:
    """Compute ``c = alpha·a·b + beta·c`` in place, and return ``c``.

    Parameters
    ----------
    a : array_like (..., m, k) or (k,)
    b : array_like (..., k, n) or (k,)
    c : array (..., m, n)
        Exactly the product's shape and dtype, any strides; it may overlap an operand.
    alpha, beta : number
        Of the product's kind: whole numbers for integer matrices, real ones for real matrices.
        They are rounded to the type in which sums are held, and integers wrap.
        With ``beta=0`` c is written and never read; with ``alpha=0`` a and b are never read.
    precision, stream
        As for `matmul`.

    Raises
    ------
    ShapeError, DTypeError, OptionError
        Before any work; c is untouched.
    """
    there = _arrays.on_device(a, b, c, stream, updates=True)
    if there is None:
        x, y = _arrays.adopt(a, "a"), _arrays.adopt(b, "b")
        made = _planned(x, y, _arrays.adopt(c, "c"), _Options(precision=precision), updates=True)
        target = _arrays.adopt_out(c, made.shape, made.dtype, "c")
        _cpu.update(made, x, y, target, *_scalars(alpha, beta, made))
        return c
    from . import _gpu

    p, q, r, index, handle, blocks, _ = there
    if r is None:
        raise DTypeError("c is None; pass the array that the product is added to")
    made = _planned(p, q, r, _Options(precision=precision), updates=True)
    _arrays.check_out(r, made.shape, made.dtype, "c", not r.is_readonly)
    alpha, beta = _scalars(alpha, beta, made)
    if alpha == 0:  # BLAS's rule: the product is not formed, so a NaN in it does not show
        p, q = p.without_terms(is_left=True), q.without_terms(is_left=False)
        made = _planned(p, q, r, _Options(precision=precision), updates=True)
    _gpu.multiply(made, p, q, r, handle, alpha, beta)
    if blocks:
        from .runtime import streams

        streams.synchronize(handle, index)
    return c


def plan(
    a: Any,
    b: Any,
    /,
    *,
    out: Any = None,
    dtype: Any = None,
    precision: str | None = None,
    stream: Any = None,
    memory: Any = None,
    devices: Any = None,
    verify: bool = False,
) -> Plan:
    """Return what `matmul` would do with these arguments, and why; nothing is computed.

    Operands may be arrays, or anything with ``shape`` and ``dtype``: no element is read. The plan
    prints for people, ``plan.to_dict()`` is for programs, and ``plan(a, b, out=c)`` runs it. Two
    paths give the plan for the product of files (`multiply_files`), whose ``out`` is a path too.

    Raises
    ------
    ShapeError, DTypeError, OptionError, BudgetError, DeviceError
        As `matmul` would.
    """
    if isinstance(a, (str, os.PathLike)) or isinstance(b, (str, os.PathLike)):
        from .outofcore.planning import plan_paths

        if stream is not None:
            raise _arrays.no_stream(stream)
        return plan_paths(
            a,
            b,
            out,
            dtype=dtype,
            memory=memory,
            devices=devices,
            precision=precision,
            verify=verify,
        )
    if _arrays.is_group(a) or _arrays.is_group(b):
        raise OptionError("a plan is for one product; plan each pair of a group")
    there = _arrays.on_device(a, b, out, stream, take=_described)
    if there is None:
        x, y = _described(a, "a"), _described(b, "b")
        target = None if out is None else _described(out, "out")
    else:
        x, y, target, *_ = there
    made = _planned(x, y, target, _Options(dtype, precision, memory, devices, verify))
    if type(target) is Operand:
        _arrays.check_out(target, made.shape, made.dtype, "out", True)
    elif type(target) is np.ndarray:
        _arrays.adopt_out(out, made.shape, made.dtype, "out")
    return made


class _Options(NamedTuple):
    """Options of `matmul`, as the caller wrote them."""

    dtype: Any = None
    precision: Any = None
    memory: Any = None
    devices: Any = None
    verify: Any = False
    taken_bytes: int = 0  #: of ``memory``, by other products

    @property
    def asked(self) -> dict[str, Any]:
        """The options by the names that `matmul` has for them."""
        return dict(zip(self._fields[:-1], self[:-1], strict=True))


class _Product(NamedTuple):
    """A product that is planned, and not yet computed."""

    plan: Plan
    given: tuple[Any, Any, Any]  #: a, b and out, as the caller has them
    seen: tuple[Any, Any, Any]  #: the same as arrays in host or device memory
    there: _arrays.OnDevice | None = None  #: if one of them is in device memory

    @classmethod
    def of(cls, a: Any, b: Any, out: Any, stream: Any, options: _Options) -> _Product:
        there = _arrays.on_device(a, b, out, stream)
        if there is None:
            x, y = _arrays.adopt(a, "a"), _arrays.adopt(b, "b")
            target = None if out is None else _arrays.adopt(out, "out")
            return cls(_planned(x, y, target, options), (a, b, out), (x, y, target))
        return cls(_planned(*there[:3], options), (a, b, out), there[:3], there)

    @property
    def result_bytes(self) -> int:
        """What is held of the result."""
        made = self.plan
        held = math.prod(made.shape) * made.dtype.itemsize
        return held if made.asked.out is None else 0

    @property
    def place(self) -> str:
        """Where the result is held."""
        is_on_host = self.there is None or self.there.is_mixed
        return "memory" if is_on_host else self.plan.a.where

    def replanned(self, options: _Options) -> _Product:
        return self._replace(plan=_planned(*self.seen, options))

    def check_out(self) -> None:
        """Raise unless ``out`` can take the result."""
        out, target, made = self.given[2], self.seen[2], self.plan
        if type(target) is np.ndarray:
            _arrays.adopt_out(out, made.shape, made.dtype, "out")
        elif out is not None:
            _arrays.check_out(target, made.shape, made.dtype, "out", not target.is_readonly)

    def run(self, asked: Hashable = None) -> Any:
        (a, b, out), (x, y, target), there = self.given, self.seen, self.there
        if there is None:
            return run_on_host(self.plan, x, y, out, a, b, any(self.plan.asked.overlaps))
        if there.is_mixed:
            return run_across(self.plan, there, out, a, b)
        return run_on_device(
            self.plan, x, y, out, target, a, b, there.stream, asked, blocks=there.blocks
        )


def _product_on_cpu(a: Array, b: Array, out: Array | None, dtype: Any) -> Any:
    """Return ``a @ b`` of NumPy arrays, with no option but the result's type and its place.

    So most calls are, and what `_Product` makes of one takes longer than a small product does.
    """
    place, overlaps = None, (False, False)
    if out is not None:
        place = array_key(out)
        if overlap(out, a, b):  # one look at both is enough for most
            overlaps = overlap(out, a), overlap(out, b)
    named = None if dtype is None else dtypes.dtype_named(dtype)
    made = _cpu_plan(array_key(a), array_key(b), place, overlaps, named)
    return run_on_host(made, a, b, out, a, b, any(overlaps))


@lru_cache(maxsize=4096)
def _cpu_plan(
    a: tuple[Any, ...],
    b: tuple[Any, ...],
    out: tuple[Any, ...] | None,
    overlaps: tuple[bool, bool],
    dtype: np.dtype[Any] | None,
) -> Plan:
    """Return the CPU's plan for NumPy arrays of these keys, found again without a request."""
    place = None if out is None else Operand(*out)
    asked = request(Operand(*a), Operand(*b), place, dtype=dtype, overlaps=overlaps)
    return _cached_plan(asked, None)


def _group(a: Any, b: Any, out: Any, stream: Any, options: _Options) -> list[Callable[[], Any]]:
    """Return what computes the products of a group, once all of them are planned and checked."""
    if not (_arrays.is_group(a) and _arrays.is_group(b)) or len(a) != len(b):
        sizes = [f"a list of {len(x)}" if _arrays.is_group(x) else "one operand" for x in (a, b)]
        raise ShapeError(
            f"a grouped product needs two lists of equally many arrays, and a is {sizes[0]}, "
            f"b is {sizes[1]}; stack the arrays (np.stack) if a list was meant as one operand"
        )
    if out is not None and (type(out) not in (list, tuple) or len(out) != len(a)):
        raise ShapeError(f"out of a grouped product is a list of {len(a)} arrays")
    outs = [None] * len(a) if out is None else out
    is_plain = out is None and options[2:] == _Options()[2:]
    group: list[_Product] = []
    runs: list[Callable[[], Any]] = []
    for number, (x, y, z) in enumerate(zip(a, b, outs, strict=True)):
        asked = None
        if is_plain and type(x) is not np.ndarray:
            asked = _repeat.question(x, y, options.dtype, options.precision)
            if _repeat.knows(x, y, asked):
                more = {"dtype": options.dtype, "precision": options.precision}
                runs.append(partial(matmul, x, y, stream=stream, **more))
                continue
        with _naming(number):
            group.append(_Product.of(x, y, z, stream, options._replace(memory=None)))
            group[-1].check_out()
        runs.append(partial(group[-1].run, asked))
    taken = meeting([product.seen for product in group])
    if taken is not None:
        raise ShapeError(
            f"out[{taken}] shares memory with an array of another pair, which would be read, or "
            "written, after it; give it a place of its own"
        )
    if options.memory is None:
        return runs
    # Pairs are computed one after the other, and their results are there all the while.
    held = Counter[str]()
    for product in group:
        held[product.place] += product.result_bytes
    for number, product in enumerate(group):
        others = held[product.place] - product.result_bytes
        with _naming(number):
            runs[number] = product.replanned(options._replace(taken_bytes=others)).run
    return runs


@contextmanager
def _naming(number: int) -> Iterator[None]:
    """Say of which pair of a group an error is."""
    try:
        yield
    except TilewiseError as error:
        error.args = (f"pair {number} of the group: {error}",)
        raise


def _planned(x: Any, y: Any, out: Any, options: _Options, *, updates: bool = False) -> Plan:
    """Return the plan for adopted operands, made once for each request."""
    dtype, precision, memory, devices, verify, taken_bytes = options
    names = None if devices is None else device_names(devices)
    gpus = [z.where for z in (x, y, out) if hasattr(z, "owner")]
    is_mixed = bool(gpus) and len(gpus) < 3 - (out is None)
    machine = None
    if is_mixed:
        machine = machine_beside(gpus[0], names, memory)
    elif not (gpus or updates):
        machine = machine_for(x, y, names, memory)
    place, overlaps = None, (False, False)
    if out is not None:
        # Where the result goes matters to what writes it there: how it lies, and beside what.
        place, overlaps = _place(out, x, y)
    asked = request(
        layout(x),
        layout(y),
        place,
        dtype=dtype,
        precision=precision,
        memory=memory,
        devices=names,
        verify=verify,
        updates=updates,
        overlaps=overlaps,
        is_mixed=is_mixed,
        whole_bytes=_whole_bytes(x, memory) if gpus and not is_mixed else None,
        taken_bytes=taken_bytes,
    )
    return _cached_plan(asked, machine)


def _place(out: Any, x: Any, y: Any) -> tuple[Operand, tuple[bool, bool]]:
    """Describe where a result goes, and say whether it shares memory with each operand."""
    a, b = (Operand not in (type(out), type(z)) and meets(out, z) for z in (x, y))
    return layout(out), (a, b)


def _whole_bytes(x: Any, memory: Any) -> int | None:
    """Return the memory that a share of it is of: that of the GPU where operands are."""
    if not isinstance(memory, str):
        return None
    from .runtime.device import facts

    return facts(x.index).memory_bytes


@lru_cache(maxsize=4096)
def _cached_plan(asked: Request, machine: Machine | None) -> Plan:
    if machine is None:
        return make_plan(asked, gpu=gpu_for(asked.a.where, asked.devices))
    if not machine.is_offer:
        return make_plan(asked, gpu=machine.gpus[0], machine=machine)
    on_cpu = make_plan(asked)
    try:
        on_gpu = make_plan(asked, gpu=machine.gpus[0], machine=machine)
    except (BudgetError, DTypeError):  # no room there, or no kernel
        return on_cpu
    from ._streamed import faster

    return faster(on_gpu, on_cpu, machine)


def _described(x: Any, name: str) -> Any:
    """Return an operand for planning: the array, or what has a shape and a dtype and no data."""
    is_array = isinstance(x, np.ndarray) or any(
        hasattr(x, protocol) for protocol in ("__array__", "__dlpack__", "__array_interface__")
    )
    if is_array or not (hasattr(x, "shape") and hasattr(x, "dtype")):
        return _arrays.adopt(x, name)
    _arrays.check_has_all_elements(x, name)
    try:
        described = Operand.of(x)._replace(where="memory", name="")
    except (TypeError, ValueError) as error:
        raise DTypeError(
            f"{name} ({type(x).__name__}) has shape {x.shape!r} and dtype {x.dtype!r}, which do "
            f"not describe an array: {error}"
        ) from None
    if any(size < 0 for size in described.shape):
        raise ShapeError(f"{name} has shape {described.shape}; a size cannot be negative")
    return described


def _scalars(alpha: Any, beta: Any, made: Plan) -> tuple[Any, Any]:
    compute = made.compute_dtype
    return _scalar(alpha, "alpha", compute), _scalar(beta, "beta", compute)


def _scalar(value: Any, name: str, compute: np.dtype[Any]) -> Any:
    """Return ``alpha`` or ``beta`` as a number of the type the sums are, or raise."""
    if type(value) is int and value in (0, 1) and compute.kind in "fc":
        return compute.type(value)  # as most are: at once
    try:
        number = np.asarray(value)
    except Exception as error:  # whatever a caller's object raises
        raise OptionError(f"{name}={value!r} is not a number: {error}") from error
    kind = number.dtype.kind
    if kind == "O" and isinstance(value, int):  # beyond 64 bits
        kind, number = "i", np.asarray(value % 2**64 if compute.kind in "iu" else _as_float(value))
    if number.shape or kind not in "biufc":
        raise OptionError(
            f"{name}={value!r:.80} is not a number: give one of Python's (int, float, complex) or "
            "of NumPy's"
        )
    if compute.kind == "b" and value in (0, 1):
        return bool(value)
    allowed = {"b": "b", "i": "biu", "u": "biu", "f": "biuf", "c": "biufc"}
    if kind not in allowed[compute.kind]:
        raise OptionError(
            f"{name}={value!r:.80} is not of the product's kind: c is summed in {compute}; "
            "convert the operands, or choose a number of that kind"
        )
    if compute.kind in "iu":  # integers wrap, and so does what they are scaled by
        return (int(number) + 2**63) % 2**64 - 2**63
    with np.errstate(all="ignore"):  # beyond that type it is Inf, and so are results
        return compute.type(number)


def _as_float(value: int) -> float:
    try:
        return float(value)
    except OverflowError:
        return math.inf if value > 0 else -math.inf
