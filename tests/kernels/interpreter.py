"""Triton's interpreter on NumPy arrays: kernels run on the CPU as they are written, without torch.

The interpreter wants arguments as handles with types, which a `Variant` has. What it gets wrong is
put right here: comparisons of scalars, and rounding and products of bfloat16.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Mapping, Sequence
from functools import cache
from types import ModuleType
from typing import Any

import ml_dtypes
import numpy as np
import triton.language as tl
from triton import knobs
from triton.runtime import interpreter
from triton.runtime.jit import JITFunction

from tilewise.kernels.compile import Variant
from tilewise.kernels.steps import Number, Pointer

_NUMBERS = {
    "i32": (np.int32, tl.int32),
    "i64": (np.int64, tl.int64),
    "fp32": (np.float32, tl.float32),
    "fp64": (np.float64, tl.float64),
}


def interpreted(*names: str) -> tuple[ModuleType, ...]:
    """Import modules anew such that their kernels are interpreted, and leave no trace of it."""
    there = {name: sys.modules.pop(name, None) for name in names}
    with knobs.runtime.scope():
        knobs.runtime.interpret = True
        modules = tuple(importlib.import_module(name) for name in names)
    for name, module in there.items():
        sys.modules.pop(name)
        if module is not None:
            sys.modules[name] = module
    return modules


def run(
    variant: Variant,
    programs: int,
    arguments: Mapping[str, Any],
    addresses: Sequence[int],
    numbers: Sequence[float],
) -> None:
    """Run all programs of a kernel, one after the other.

    ``arguments`` are as for `tilewise.runtime.launch.Launch`; ``addresses`` are those of its
    operands.
    """
    function = variant.function
    assert arguments.keys() == variant.signature.keys()
    given: dict[str, Any] = dict(variant.constexprs)
    for name, kind in variant.signature.items():
        value = arguments[name]
        if isinstance(value, Pointer):
            value = addresses[value.operand] + value.offset_bytes
        elif isinstance(value, Number):
            value = numbers[value.position]
        if kind.startswith("*"):
            pointer = tl.str_to_ty(kind, None)
            handle = interpreter.TensorHandle(np.array([value], np.uint64), pointer)
            given[name] = tl.tensor(handle, pointer)
        else:
            assert value % variant.attrs.get(name, 1) == 0, (variant.name, name, value)
            dtype, kind = _NUMBERS[kind]
            given[name] = tl.tensor(interpreter.TensorHandle(np.array([value], dtype), kind), kind)
    body = function.rewrite()
    patch_language = interpreter._patch_lang
    patches = [patch_language(each) for each in (function.fn, tl.standard.cdiv.fn)]
    interpreter._patch_lang = lambda function: None  # again for each call costs more than the call
    for module, name, (_, interpreted_function) in _library():
        setattr(module, name, interpreted_function)
    interpreter.interpreter_builder.set_grid_dim(programs, 1, 1)
    try:
        for program in range(programs):
            interpreter.interpreter_builder.set_grid_idx(program, 0, 0)
            with np.errstate(all="ignore"):
                body(**given)
    finally:
        for module, name, (compiled_function, _) in _library():
            setattr(module, name, compiled_function)
        interpreter._patch_lang = patch_language
        for each in reversed(patches):
            each.restore()


@cache
def _library() -> tuple[tuple[ModuleType, str, tuple[Any, Any]], ...]:
    """Return the functions of Triton's own library that are written in Triton, in both forms."""
    return tuple(
        (module, name, (value, interpreter.InterpretedFunction(value.fn)))
        for module in (tl, tl.standard)
        for name, value in vars(module).items()
        if isinstance(value, JITFunction)
    )


class _Builder(interpreter.InterpreterBuilder):
    def binary_op(self, left: Any, right: Any, operation: Any) -> Any:
        result = super().binary_op(left, right, operation)
        if result.data.dtype == np.bool_:
            result.dtype = tl.int1
        return result

    def cast_impl(self, source: Any, target: Any) -> Any:
        kinds = (source.dtype.scalar, target.scalar)
        if kinds == (tl.float32, tl.bfloat16):
            return interpreter.TensorHandle(
                source.data.astype(ml_dtypes.bfloat16).view(np.uint16), tl.bfloat16
            )
        return super().cast_impl(source, target)

    def create_dot(self, a: Any, b: Any, total: Any, *options: Any) -> Any:
        if a.dtype.scalar == tl.bfloat16:
            a, b = (self.cast_impl(x, tl.float32) for x in (a, b))
        return super().create_dot(a, b, total, *options)


interpreter.interpreter_builder.__class__ = _Builder
