"""Expressions of a kernel, computed on values that are only partly known.

One half of :mod:`tilewise.explain.dataflow`, which has the statements and says what it is for.
"""

from __future__ import annotations

import ast
import itertools
import math
import operator
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ..simt import typing_rules
from ..simt.dialect import element_type
from ..simt.events import SiteKind
from ..simt.memory import SECTOR_BYTES
from ..simt.program import UNKNOWN, Function, Program
from .values import NOTHING, STILL, Deps, Value, constant, join, unknown

__all__ = ["Array", "Expressions", "Known", "Scope", "itemsize"]

Dim = tuple[int, int, int]

_AXES = {"x": 0, "y": 1, "z": 2}
_UNKNOWN: Deps = frozenset({"unknown"})
_ORDER: dict[type[ast.cmpop], Callable[[int, int], bool]] = {
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
}


@dataclass(frozen=True, slots=True)
class Array:
    """An array that a name stands for, or a part of one that is left after an index.

    ``axes`` is how many the whole array has.
    """

    name: str
    space: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    code: str | None
    axes: int
    deps: Deps = NOTHING
    offset: Value = constant(0)  # noqa: RUF009 - frozen


Known = Value | Array | tuple[Any, ...]
Scope = dict[str, Known]


class Expressions:
    """Evaluates expressions; subclasses say what to do at a decision, a site and a call."""

    def __init__(self, program: Program, grid: Dim, block: Dim) -> None:
        self.program = program
        self.grid = grid
        self.block = block
        self.function: Function = program.kernel
        #: What has been stored to each array, as far as later loads depend on it.
        self.contents: dict[str, Deps] = {}

    # What a subclass decides.

    def touch(self, node: ast.AST, kind: SiteKind, part: Array) -> None:
        """Learn that a site touches an element."""
        raise NotImplementedError

    def store(self, part: Array, deps: Deps) -> None:
        """Learn what is stored to an element."""
        raise NotImplementedError

    def barrier(self, name: str, node: ast.Call) -> None:
        """Learn of a barrier."""
        raise NotImplementedError

    def bound(self, index: Value, array: Array) -> None:
        """Learn that an index is held against the first axis of an array."""
        raise NotImplementedError

    def threshold(self, difference: Value) -> None:
        """Learn that it matters whether a number is negative."""
        raise NotImplementedError

    def pin(self, value: Value) -> Value:
        """Return the number as one that is the same in all blocks, which must then agree on it."""
        raise NotImplementedError

    def under(self, conditions: Sequence[Value]) -> AbstractContextManager[None]:
        """Evaluate what is only reached if some conditions come out one way."""
        raise NotImplementedError

    def count(self, code: str, *, fused: int = 0, single: int = 0) -> None:
        """Learn of floating-point instructions."""
        raise NotImplementedError

    def call(self, function: Function, scope: Scope) -> Known:
        """Run a device function."""
        raise NotImplementedError

    # Expressions.

    def number(self, node: ast.expr, scope: Scope) -> Value:
        """Evaluate an expression that is a number; whatever else is unknown."""
        known = self.evaluate(node, scope)
        return known if isinstance(known, Value) else unknown(_UNKNOWN)

    def evaluate(self, node: ast.expr, scope: Scope) -> Known:
        method: Callable[[Any, Scope], Known] | None
        method = getattr(self, f"_{type(node).__name__.lower()}", None)
        return method(node, scope) if method else self._all_of(node, scope)

    def _constant(self, node: ast.Constant, scope: Scope) -> Known:
        return _outside(node.value)

    def _name(self, node: ast.Name, scope: Scope) -> Known:
        if node.id in scope:
            return scope[node.id]
        found = self.function.resolve(node)
        return unknown(_UNKNOWN) if found is UNKNOWN else _outside(found)

    def _tuple(self, node: ast.Tuple, scope: Scope) -> Known:
        return tuple(self.evaluate(item, scope) for item in node.elts)

    def _attribute(self, node: ast.Attribute, scope: Scope) -> Known:
        owner = self.function.intrinsic(node.value)
        if owner in ("threadIdx", "blockIdx", "blockDim", "gridDim") and node.attr in _AXES:
            return self._index(owner, _AXES[node.attr])
        whole = self.function.intrinsic(node)
        if whole == "laneid":
            return Value(STILL, 0, 31, 0, frozenset({"thread"}), "i4")
        if whole == "warpsize":
            return constant(32)
        if isinstance(node.value, ast.Name):
            array = scope.get(node.value.id)
            if isinstance(array, Array):
                return _array_attribute(array, node.attr)
        found = self.function.resolve(node)
        return self._all_of(node, scope) if found is UNKNOWN else _outside(found)

    def _index(self, owner: str, axis: int) -> Value:
        if owner == "threadIdx":
            return Value(STILL, 0, self.block[axis] - 1, 0, frozenset({"thread"}), "i4")
        if owner == "blockDim":
            return constant(self.block[axis])
        if owner == "gridDim":
            return constant(self.grid[axis], frozenset({"grid"}), step=1)
        x, y, z = (int(i == axis) for i in range(3))
        return Value((x, y, z), 0, 0, 0, frozenset({"block"}), "i4")

    def _subscript(self, node: ast.Subscript, scope: Scope) -> Known:
        owner = self.evaluate(node.value, scope)
        if isinstance(owner, tuple):
            index = self.number(node.slice, scope)
            if index.is_constant and -len(owner) <= index.number < len(owner):
                chosen: Known = owner[index.number]
                return chosen
            return unknown(index.deps.union(*(v.deps for v in owner if isinstance(v, Value))))
        if not isinstance(owner, Array):
            return self._all_of(node, scope)
        part = self.element(owner, node.slice, scope)
        if part.shape:
            return part
        self.touch(node, "load", part)
        return unknown(part.offset.deps | self.loaded(part), part.code)

    def element(self, array: Array, index: ast.expr, scope: Scope) -> Array:
        """The element (or, after fewer indices than axes, the part) of an array at an index."""
        for item in index.elts if isinstance(index, ast.Tuple) else [index]:
            if not array.shape:
                break
            value, stride = self.number(item, scope), array.strides[0]
            self.bound(value, array)
            # The stride of a row follows from a shape, and so changes with it by whole sectors.
            inner = not array.deps or abs(stride) == itemsize(array)
            step = constant(stride) if inner else constant(stride, array.deps, SECTOR_BYTES)
            array = replace(
                array,
                shape=array.shape[1:],
                strides=array.strides[1:],
                offset=array.offset + value * step,
            )
        return array

    def loaded(self, array: Array) -> Deps:
        """What an element of an array depends on besides its index."""
        stored = self.contents.get(array.name, NOTHING)
        return stored | {f"data:{array.name}"} if array.space == "global" else stored

    def _binop(self, node: ast.BinOp, scope: Scope) -> Known:
        return self.operate(node.op, node.left, node.right, scope)

    def operate(
        self, op: ast.operator, left_node: ast.expr, right_node: ast.expr, scope: Scope
    ) -> Value:
        """Return ``left op right``, and count the instruction if it is on floats."""
        left, right = self.number(left_node, scope), self.number(right_node, scope)
        name = type(op).__name__
        code = _binary(name, left.code, right.code)
        deps = left.deps | right.deps
        if code is not None and typing_rules.is_float(code):
            products = isinstance(op, (ast.Add, ast.Sub)) and any(
                isinstance(side, ast.BinOp) and isinstance(side.op, ast.Mult)
                for side in (left_node, right_node)
            )
            # The compiler contracts a product and a sum into one instruction.
            self.count(code, fused=1, single=-1) if products else self.count(code, single=1)
            return self._function_of([left, right], code)
        result: Value | None = None
        if isinstance(op, ast.Add):
            result = left + right
        elif isinstance(op, ast.Sub):
            result = left - right
        elif isinstance(op, ast.Mult):
            result = left * right
            if result.block is None and left.block is not None and right.block is not None:
                result = self.pin(left) * self.pin(right)
        elif right.is_constant and right.number > 0:
            result = _by_constant(op, left, right)
        if result is None or not self._fits(result, code):
            result = self._function_of([left, right], code)
        return replace(result, deps=deps, code=code)

    def _fits(self, value: Value, code: str | None) -> bool:
        """Whether a number is within the range of an integer type in every block, unwrapped."""
        if code is None or code == "i8" or not typing_rules.is_integer(code):
            return True
        if value.block is None:
            return False
        ends = [(c * (extent - 1)) for c, extent in zip(value.block, self.grid, strict=True)]
        limits = np.iinfo(typing_rules.dtype_of(code))
        low = value.low + sum(min(0, end) for end in ends)
        high = value.high + sum(max(0, end) for end in ends)
        return bool(limits.min <= low and high <= limits.max)

    def _unaryop(self, node: ast.UnaryOp, scope: Scope) -> Known:
        operand = self.number(node.operand, scope)
        if isinstance(node.op, ast.USub) and not operand.is_float:
            return replace(constant(0) - operand, code=operand.code)
        if isinstance(node.op, ast.UAdd):
            return operand
        if isinstance(node.op, ast.Not):
            if operand.is_constant and not operand.deps:
                return constant(not operand.number)
            return self._function_of([self.truth(operand)], "b1")
        return self._function_of([operand], operand.code)

    def _boolop(self, node: ast.BoolOp, scope: Scope) -> Known:
        """Each operand is evaluated where those before it have not decided."""
        decided: list[Value] = []
        for operand in node.values:
            with self.under(decided):
                decided.append(self.truth(self.number(operand, scope)))
        return self._function_of(decided, "b1")

    def _compare(self, node: ast.Compare, scope: Scope) -> Known:
        left, decided = self.number(node.left, scope), list[Value]()
        for op, comparator in zip(node.ops, node.comparators, strict=True):
            with self.under(decided):
                right = self.number(comparator, scope)
            decided.append(self._decision(op, left, right))
            left = right
        return self._function_of(decided, "b1")

    def _decision(self, op: ast.cmpop, left: Value, right: Value) -> Value:
        """The outcome of one comparison: the same in all blocks that agree on its threshold."""
        difference = left - right
        constants = left.is_constant and right.is_constant
        if left.is_float or right.is_float or not isinstance(op, tuple(_ORDER)):
            left, right = self.pin(left), self.pin(right)
            block = None if None in (left.block, right.block) else STILL
            return Value(block, 0, 1, 1, difference.deps, "b1")
        if constants and not difference.deps:
            return constant(_ORDER[type(op)](left.number, right.number))
        if isinstance(op, (ast.Lt, ast.GtE, ast.Eq, ast.NotEq)):
            self.threshold(difference)
        if isinstance(op, (ast.LtE, ast.Gt, ast.Eq, ast.NotEq)):
            self.threshold(difference - constant(1))
        block = None if difference.block is None else STILL
        return Value(block, 0, 1, difference.step, difference.deps, "b1")

    def truth(self, value: Value) -> Value:
        """The number as a condition."""
        if value.block != STILL:
            value = self.pin(value)
        return value

    def _ifexp(self, node: ast.IfExp, scope: Scope) -> Known:
        test = self.truth(self.number(node.test, scope))
        with self.under([test]):
            body, other = self.number(node.body, scope), self.number(node.orelse, scope)
        if test.is_constant and not test.deps:
            return body if test.number else other
        chosen = self.merge([body, other]).with_deps(test.deps)
        return chosen if test.block == STILL else replace(chosen, block=None)

    def _call(self, node: ast.Call, scope: Scope) -> Known:
        name = self.function.intrinsic(node.func)
        if name is not None:
            return self._intrinsic(name, node, scope)
        found = self.function.resolve(node.func)
        device = None if found is UNKNOWN else self.program.function(found)
        arguments = [self.evaluate(argument, scope) for argument in node.args]
        if device is not None:
            return self.call(device, dict(zip(device.parameters, arguments, strict=False)))
        numbers = [a if isinstance(a, Value) else unknown(_UNKNOWN) for a in arguments]
        if found in (min, max) and len(numbers) > 1:
            for left, right in itertools.pairwise(numbers):
                self._decision(ast.Lt(), left, right)
            if any(n.block != numbers[0].block for n in numbers):
                return self.merge(numbers)
            low, high = (found(n.low for n in numbers), found(n.high for n in numbers))
            return replace(join(numbers), low=low, high=high)
        if found in (int, abs) and numbers and not numbers[0].is_float:
            return numbers[0] if found is int else self._function_of(numbers, numbers[0].code)
        if len(numbers) == 1 and (cast := element_type(found)) is not None:
            whole = not typing_rules.is_float(cast) and not numbers[0].is_float
            whole = whole and self._fits(numbers[0], cast)
            return replace(numbers[0], code=cast) if whole else self._function_of(numbers, cast)
        code = "i8" if found in (int, len, round) else "b1" if found is bool else None
        if getattr(found, "__module__", None) in ("math", "numpy"):
            code = "f8"
            self.count(code, single=1)
        return self._function_of(numbers, code)

    def _intrinsic(self, name: str, node: ast.Call, scope: Scope) -> Known:
        if name in ("grid", "gridsize"):
            number = self.number(node.args[0], scope)
            count = number.number if number.is_constant else 1
            axes = tuple(self._along(name, i) for i in range(max(1, min(3, count))))
            return axes if len(axes) > 1 else axes[0]
        if name in ("shared.array", "local.array"):
            return self._declared(name.partition(".")[0], node, scope)
        if name.startswith("atomic."):
            return self._atomic(node, scope)
        if name.startswith("sync"):
            self.barrier(name, node)
        numbers = [self.number(argument, scope) for argument in node.args]
        if name == "fma":
            code = join(numbers).code
            self.count(code or "f8", fused=1)
            return self._function_of(numbers, code)
        # Shuffles and votes: what the other lanes of the warp bring.
        return self._function_of([*numbers, Value(deps=frozenset({"thread"}))], None)

    def _along(self, name: str, axis: int) -> Value:
        width = constant(self.block[axis])
        if name == "gridsize":
            return self._index("gridDim", axis) * width
        value = self._index("blockIdx", axis) * width + self._index("threadIdx", axis)
        return replace(value, code="i8")

    def _declared(self, space: str, node: ast.Call, scope: Scope) -> Known:
        words = {word.arg: word.value for word in node.keywords}
        given = dict(zip(("shape", "dtype"), node.args, strict=False)) | words
        known = self.evaluate(given["shape"], scope) if "shape" in given else ()
        sizes = known if isinstance(known, tuple) else (known,)
        shape = tuple(v.number for v in sizes if isinstance(v, Value) and v.is_constant)
        code = element_type(self.function.resolve(given["dtype"])) if "dtype" in given else None
        if code is None or len(shape) != len(sizes):
            return unknown(_UNKNOWN)
        strides = np.empty(shape, typing_rules.dtype_of(code)).strides
        # Arrays are told apart by where they are declared; the machine names them by variable.
        return Array(
            f"{space}:{node.lineno}:{node.col_offset}", space, shape, strides, code, len(shape)
        )

    def _atomic(self, node: ast.Call, scope: Scope) -> Known:
        array = self.evaluate(node.args[0], scope)
        values = [self.number(argument, scope) for argument in node.args[2:]]
        deps = NOTHING.union(*(value.deps for value in values))
        if not isinstance(array, Array) or len(node.args) < 2:
            return unknown(deps | _UNKNOWN)
        part = self.element(array, node.args[1], scope)
        self.touch(node, "atomic", part)
        self.store(part, deps | {"thread"})
        return unknown(part.offset.deps | deps | self.loaded(part), part.code)

    def _all_of(self, node: ast.AST, scope: Scope) -> Known:
        """An expression that is not understood: its parts are visited, it may be anything."""
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.expr):
                self.evaluate(child, scope)
        return unknown(_UNKNOWN)

    def _function_of(self, values: list[Value], code: str | None) -> Value:
        """A number that is computed from others in a way that tells nothing else of it."""
        if code is not None and typing_rules.is_float(code):
            return _mixed(values, code)  # no address: blocks need not agree on it
        return _mixed([self.pin(value) for value in values], code)

    def merge(self, values: list[Value]) -> Value:
        """A number that is one of several, by a choice that is the same in all blocks."""
        merged = join(values)
        if merged.block is None and all(value.block is not None for value in values):
            merged = join(self.pin(value) for value in values)
        return merged


def _mixed(values: list[Value], code: str | None) -> Value:
    """A number of which only the dependences follow from those it is computed from."""
    block = STILL if all(value.block == STILL for value in values) else None
    step = 0 if all(value.step == 0 for value in values) else 1
    deps = NOTHING.union(*(value.deps for value in values))
    low, high = (0.0, 1.0) if code == "b1" else (-math.inf, math.inf)
    return Value(block, low, high, step, deps, code)


def itemsize(array: Array) -> int:
    """Bytes of an element."""
    return typing_rules.dtype_of(array.code).itemsize if array.code else 1


def _array_attribute(array: Array, name: str) -> Known:
    # Sizes of one family of launches are congruent modulo the elements of a sector.
    step = SECTOR_BYTES // itemsize(array) if array.deps else 0
    if name == "shape":
        return tuple(constant(n, array.deps, step) for n in array.shape)
    if name == "strides":
        return tuple(constant(n, array.deps, 1) for n in array.strides)
    if name == "size":
        return constant(math.prod(array.shape), array.deps, step)
    if name == "ndim":
        return constant(len(array.shape))
    return unknown(array.deps | _UNKNOWN)


def _outside(value: Any) -> Known:
    """What an outside name or a literal stands for."""
    if isinstance(value, (int, float, np.number, np.bool_)):
        return constant(value)  # type: ignore[arg-type]
    if isinstance(value, tuple):
        return tuple(_outside(item) for item in value)
    return unknown(_UNKNOWN)


def _binary(name: str, left: str | None, right: str | None) -> str | None:
    if left is None or right is None:
        return None
    try:
        return typing_rules.binary(name, left, right)[0]
    except TypeError:
        return None


def _by_constant(op: ast.operator, left: Value, right: Value) -> Value | None:
    """``left op right`` for a positive constant: division, remainder, shifts, low bits."""
    number = right.number
    if isinstance(op, ast.FloorDiv):
        return left.over(number)
    if isinstance(op, ast.Mod):
        return left.modulo(number)
    if isinstance(op, ast.RShift) and number < 63:
        return left.over(1 << number)
    if isinstance(op, ast.LShift) and number < 63:
        return left * constant(1 << number)
    if isinstance(op, ast.BitAnd) and number & (number + 1) == 0:
        return left.modulo(number + 1)
    return None
