"""The public calls: check, adopt, plan, run, give back."""

from __future__ import annotations

import os
from functools import lru_cache
from types import NoneType
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from . import _arrays, _cpu, _memory, _repeat
from ._devices import device_names, gpu_for, machine_for
from ._operand import Operand
from ._plan import Plan, make_plan
from ._run import run_on_device, run_on_host
from .errors import BudgetError, DTypeError, OptionError, ShapeError
from .numerics import dtypes

if TYPE_CHECKING:
    from ._streamed import Machine

__all__ = ["gemm", "matmul", "plan"]

Array = NDArray[Any]

#: What a plan has to know of a result that goes into host memory: that it has a place.
_IN_HOST_MEMORY = ((), np.dtype(np.uint8), ())


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
        pair, and give a list.
    out : array (..., m, n), optional
        Where to write: exactly the result's shape and dtype, any strides. It may overlap an
        operand; the result is then right all the same.
    dtype : dtype, optional
        The result's type, computed without overflow on the way: int8 matrices with
        ``dtype=np.int32`` give exact sums.
    precision : {None, "ieee", "tf32", "fp64-int8"}
        "tf32" allows 11 bits of each float32 operand, "fp64-int8" a bound relative to rows and
        columns for float64; the plan says what is given, and the CPU never gives less. "ieee" is
        for float32 by chains of fused multiply-adds where a GPU would use its tensor cores.
    stream : object, optional
        Of operands in device memory: where the product is put, anything with ``__cuda_stream__``.
        By default the stream their library works on now (torch, CuPy), or CUDA's default stream.
    memory : int or str, optional
        Budget for what tilewise itself holds, on the host and on each device: the result, unless
        ``out`` is given without ``verify``, and its workspace; on a GPU that multiplies host
        operands, what of them is there at a time. Bytes, or text such as "2GiB" or "80%".
    devices : str or list of str, optional
        "cpu", "cuda:0", or for host operands several GPUs. By default operands are multiplied
        where they are, and large ones on the host by a GPU if that is expected to be done well
        before the CPU; the plan says which, and why.
    verify : bool
        Check the result by `check` before it is returned or written.

    Returns
    -------
    array (..., m, n)
        Of the operands' kind, where they are; ``out`` itself if it was given; a scalar for two
        vectors. Host operands block until the result is complete; device operands return at once,
        with the product in the order of the stream.

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
    if type(a) is not np.ndarray and memory is None and devices is None and verify is False:
        asked = _repeat.question(a, b, dtype, precision)
        done = _repeat.product(a, b, out, stream, asked)
        if done is not None:
            return done
    if _arrays.is_group(a) or _arrays.is_group(b):
        _check_group(a, b, out)
        outs = [None] * len(a) if out is None else out
        return [
            matmul(
                x,
                y,
                out=z,
                dtype=dtype,
                precision=precision,
                stream=stream,
                memory=memory,
                devices=devices,
                verify=verify,
            )
            for x, y, z in zip(a, b, outs, strict=True)
        ]
    there = _arrays.on_device(a, b, out, stream)
    if there is None:
        x, y = _arrays.adopt(a, "a"), _arrays.adopt(b, "b")
        made = _plan_for(x, y, out, False, dtype, precision, memory, devices, verify)
        return run_on_host(made, x, y, out, a, b)
    p, q, target, handle = there
    made = _plan_for(p, q, target, False, dtype, precision, memory, devices, verify)
    return run_on_device(made, p, q, out, target, a, b, handle, asked)


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
    there = _arrays.on_device(a, b, c, stream, "c")
    if there is None:
        x, y = _arrays.adopt(a, "a"), _arrays.adopt(b, "b")
        made = _plan_for(x, y, c, True, None, precision, None, None, False)
        target = _arrays.adopt_out(c, made.shape, made.dtype, "c")
        _update_on_host(made, x, y, target, *_scalars(alpha, beta, made))
        return c
    from . import _gpu

    p, q, r, handle = there
    if r is None:
        raise DTypeError("c is None; pass the array that the product is added to")
    made = _plan_for(p, q, r, True, None, precision, None, None, False)
    _arrays.check_out(r, made.shape, made.dtype, "c", not r.is_readonly)
    alpha, beta = _scalars(alpha, beta, made)
    if alpha == 0:  # BLAS's rule: the product is not formed, so a NaN in it does not show
        p, q = p.without_terms(is_left=True), q.without_terms(is_left=False)
        made = _plan_for(p, q, r, True, None, precision, None, None, False)
    _gpu.multiply(made, p, q, r, handle, alpha, beta)
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
        return plan_paths(a, b, dtype, memory, devices, precision, verify)
    there = _arrays.on_device(a, b, out, stream)
    if there is None:
        x, y, target = _described(a, "a"), _described(b, "b"), out
    else:
        x, y, target, _ = there
    return _plan_for(x, y, target, False, dtype, precision, memory, devices, verify)


def _update_on_host(made: Plan, x: Array, y: Array, target: Array, alpha: Any, beta: Any) -> None:
    if _arrays.overlap(target, x):
        x = x.copy()
    if _arrays.overlap(target, y):
        y = y.copy()
    if alpha == 0:  # BLAS's rule: the product is not formed, so a NaN in it does not show
        _cpu.scale(made, target, beta)
    else:
        _cpu.execute(made, x, y, target, _cpu.Epilogue(alpha, beta))


def _plan_for(
    x: Any,
    y: Any,
    out: Any,
    updates: bool,
    dtype: Any,
    precision: str | None,
    memory: Any,
    devices: Any,
    verify: bool,
) -> Plan:
    """Return the plan for adopted operands, made once for each set of layouts and options."""
    if not isinstance(precision, (str, NoneType)):
        raise OptionError(f"precision={precision!r} is not text; None is the default bound")
    names = None if devices is None else device_names(devices)
    is_on_gpu = hasattr(x, "owner")
    machine = None if is_on_gpu or updates else machine_for(x, y, names, memory)
    # Where the result goes matters to what writes it there, or copies it: how it lies there.
    has_layout = is_on_gpu or (machine is not None and type(out) is np.ndarray)
    return _cached_plan(
        _key(x),
        _key(y),
        None if out is None else _key(out) if has_layout else _IN_HOST_MEMORY,
        updates,
        None if dtype is None else dtypes.dtype_named(dtype),
        precision,
        None if memory is None else _memory.parse_budget(memory),
        names,
        machine,
        _switch(verify, "verify"),
    )


def _key(x: Any) -> tuple[Any, ...]:
    """Return what a plan depends on, of an operand, in the order of `Operand`'s fields."""
    if type(x) is np.ndarray:
        return x.shape, x.dtype, x.strides, x.flags.aligned
    if type(x) is Operand:
        return x.shape, x.dtype, x.strides, x.aligned, x.where, x.name
    return x.shape, x.dtype, x.strides, x.aligned, x.where


@lru_cache(maxsize=4096)
def _cached_plan(
    a: tuple[Any, ...],
    b: tuple[Any, ...],
    out: tuple[Any, ...] | None,
    updates: bool,
    dtype: np.dtype[Any] | None,
    precision: str | None,
    memory_bytes: int | None,
    devices: tuple[str, ...] | None,
    machine: Machine | None,
    verify: bool,
) -> Plan:
    left, right = Operand(*a), Operand(*b)

    def made(gpu: Any) -> Plan:
        return make_plan(
            left,
            right,
            dtype=dtype,
            precision=precision,
            memory_bytes=memory_bytes,
            out=None if out is None else Operand(*out),
            updates=updates,
            verify=verify,
            gpu=gpu,
            machine=None if gpu is None else machine,
            blas=_blas(),
        )

    if machine is None:
        return made(gpu_for(left.where, devices))
    if not machine.is_offer:
        return made(machine.gpus[0])
    on_cpu = made(None)
    try:
        on_gpu = made(machine.gpus[0])
    except (BudgetError, DTypeError):  # no room there, or no kernel
        return on_cpu
    from ._streamed import faster

    return faster(on_gpu, on_cpu, machine)


@lru_cache(maxsize=1)
def _blas() -> str:
    """Say which BLAS NumPy was built with; how many threads it takes is its own setting."""
    try:
        blas = np.show_config(mode="dicts")["Build Dependencies"]["blas"]
    except Exception:  # an older NumPy, or one built without this record
        return "NumPy's BLAS"
    return f"NumPy's BLAS ({blas.get('name', 'unknown')} {blas.get('version', '')})".replace(
        " )", ")"
    )


def _described(x: Any, name: str) -> Any:
    """Return an operand for planning: the array, or what has a shape and a dtype and no data."""
    is_array = isinstance(x, np.ndarray) or any(
        hasattr(x, protocol) for protocol in ("__array__", "__dlpack__", "__array_interface__")
    )
    if not is_array and hasattr(x, "shape") and hasattr(x, "dtype"):
        return Operand.of(x)
    return _arrays.adopt(x, name)


def _check_group(a: Any, b: Any, out: Any) -> None:
    if not (_arrays.is_group(a) and _arrays.is_group(b)) or len(a) != len(b):
        sizes = [f"a list of {len(x)}" if _arrays.is_group(x) else "one operand" for x in (a, b)]
        raise ShapeError(
            f"a grouped product needs two lists of equally many arrays, and a is {sizes[0]}, "
            f"b is {sizes[1]}; stack the arrays (np.stack) if a list was meant as one operand"
        )
    if out is not None and (type(out) not in (list, tuple) or len(out) != len(a)):
        raise ShapeError(f"out of a grouped product is a list of {len(a)} arrays")


def _scalars(alpha: Any, beta: Any, made: Plan) -> tuple[Any, Any]:
    compute = made.compute_dtype
    return _scalar(alpha, "alpha", compute), _scalar(beta, "beta", compute)


def _scalar(value: Any, name: str, compute: np.dtype[Any]) -> Any:
    """Return ``alpha`` or ``beta`` as a number of the type the sums are, or raise."""
    number = np.asarray(value)
    if number.shape or number.dtype.kind not in "biufc":
        raise OptionError(f"{name}={value!r} is not a number")
    if compute.kind == "b" and value in (0, 1):
        return bool(value)
    allowed = {"b": "b", "i": "biu", "u": "biu", "f": "biuf", "c": "biufc"}
    if number.dtype.kind not in allowed[compute.kind]:
        raise OptionError(
            f"{name}={value!r} is not of the product's kind: c is summed in {compute}; "
            "convert the operands, or choose a number of that kind"
        )
    if compute.kind in "iu":  # integers wrap, and so does what they are scaled by
        return (int(number) + 2**63) % 2**64 - 2**63
    with np.errstate(all="ignore"):  # beyond that type it is Inf, and so are results
        return compute.type(number)


def _switch(value: Any, name: str) -> bool:
    """Return an on-off option; text such as "false" would silently switch it on."""
    if value is True or value is False:
        return value
    if isinstance(value, (int, np.bool_)) and value in (0, 1):
        return bool(value)
    raise OptionError(f"{name}={value!r} is not True or False")
