"""Calls in a kernel: the words of ``cuda``, casts, ``math``, a few builtins, device functions."""

from __future__ import annotations

import ast
import builtins
import math
from collections.abc import Callable
from typing import Any

from . import typing_rules as types
from .dialect import element_type
from .events import Space
from .expressions import Expressions
from .lanes import MATH, is_exact
from .program import UNKNOWN
from .values import AnyValue, ArrayValue, TupleValue, Value

__all__ = ["Calls"]

_MATH = {getattr(math, name): name for name in MATH if hasattr(math, name)}
_TESTS = {math.isnan: "isnan", math.isinf: "isinf", math.isfinite: "isfinite"}
_SHUFFLES = {
    "shfl_sync": "index", "shfl_up_sync": "up", "shfl_down_sync": "down", "shfl_xor_sync": "xor",
}  # fmt: skip
_VOTES = {"all_sync": "b1", "any_sync": "b1", "eq_sync": "b1", "ballot_sync": "i4"}
_TWO_ARGUMENTS = frozenset({"atan2", "copysign", "fmod", "hypot", "nextafter", "pow", "remainder"})
#: Those that are one instruction; the others are, or may be, calls and branches.
_PLAIN = frozenset({"floor", "ceil", "trunc", "fabs", "copysign"})
_UNORDERED = frozenset({"threadfence", "threadfence_block", "threadfence_system"})


_Writer = Callable[[ast.Call, list[Value]], AnyValue]


class Calls(Expressions):
    """Writes the calls of one function."""

    def _Call(self, node: ast.Call) -> AnyValue:
        result = self.call(node, wanted=True)
        if result is None:
            raise self.error(node, f"{self.function.text(node)} has no value")
        return result

    def call(self, node: ast.Call, wanted: bool) -> AnyValue | None:
        """Write a call; ``wanted`` says whether its value is used."""
        called = self.function.resolve(node.func)
        text = self.function.text(node.func)
        word = self.function.intrinsic(node.func)
        if called is UNKNOWN:
            raise self.error(node, f"{text} is not defined, or not part of the dialect")
        if node.keywords and word not in ("shared.array", "local.array"):
            raise self.error(node, f"{text}: pass arguments by position, not by name")
        if word is not None:
            return self._word(node, word, wanted)
        if self.spec.program.function(called) is not None:
            return self._device_function(node, called)
        if called is builtins.len and len(node.args) == 1:
            return self._len(node)
        try:
            writer = self._writer(called)
        except TypeError:  # not hashable, so no function of ours
            writer = None
        if writer is None:
            name = getattr(called, "__name__", "")
            instead = (
                "write to an array what is to be printed"
                if called is builtins.print
                else f"use math.{name}"
                if name in MATH and hasattr(math, name)
                else "use functions of math, min, max, abs, number types such as np.float32, or a "
                "device function of your own"
            )
            raise self.error(node, f"{text} cannot be called in a kernel; {instead}")
        values = [self.value(argument) for argument in node.args]
        try:
            return writer(node, values)
        except (TypeError, ValueError):  # on unpacking values
            raise self.error(
                node, f"{self.function.text(node)}: wrong number of arguments"
            ) from None

    def _writer(self, called: Any) -> _Writer | None:
        if called in _MATH:
            return lambda node, values: self._math(node, _MATH[called], values)
        if called in _TESTS:
            return lambda node, values: self._test(_TESTS[called], *values)
        table: dict[Any, _Writer] = {
            builtins.min: lambda node, values: self._extreme(node, "minimum", values),
            builtins.max: lambda node, values: self._extreme(node, "maximum", values),
            builtins.abs: lambda node, values: self._absolute(*values),
            builtins.int: lambda node, values: self._int(*values),
            builtins.float: lambda node, values: self._float(node, *values),
            builtins.bool: lambda node, values: self.truth(*values),
            builtins.round: lambda node, values: self._round(*values),
            builtins.pow: lambda node, values: self._pow(node, *values),
            builtins.divmod: lambda node, values: self._divmod(node, *values),
        }
        if called in table:
            return table[called]
        kind = element_type(called) if isinstance(called, type) or not callable(called) else None
        if kind is None and type(called).__module__.startswith("numba"):
            kind = element_type(called)
        return None if kind is None else (lambda node, values: self._convert(kind, *values))

    # -- the words of cuda

    def _word(self, node: ast.Call, word: str, wanted: bool) -> AnyValue | None:
        if word in ("grid", "gridsize"):
            return self._grid(node, word)
        if word in ("shared.array", "local.array"):
            return self._declare(node, "array", word)
        if word.startswith("atomic."):
            return self._atomic(node, word.removeprefix("atomic."), wanted)
        mask = self.region.mask
        if word in _UNORDERED:
            self.note(
                node,
                "an order that a fence makes with flags or atomics is not followed: what threads "
                "hand over by it counts as a race",
            )
            return None
        values = [self.use(self.value(argument)) for argument in node.args]
        if word == "syncthreads":
            self._arity(node, 0)
            site = self.site(node, "barrier")
            if site not in self.spec.program.removed:
                self.emit(f"M.barrier({site}, {mask})")
            return None
        if word.startswith("syncthreads_"):
            self._arity(node, 1)
            site = self.site(node, "barrier")
            predicate = self.varying(self.truth(values[0])).code
            removed = site in self.spec.program.removed
            how = word.removeprefix("syncthreads_")
            return self._bound(f"M.counted({how!r}, {site}, {mask}, {predicate}, {removed})", "i4")
        if word == "syncwarp":
            self._arity(node, min(len(values), 1))
            named = self.cast(values[0], "i8").code if values else "0xffffffff"
            self.emit(f"M.syncwarp({mask}, {node.lineno}, {named})")
            return None
        if word in _SHUFFLES:
            return self._shuffle(node, word, values)
        if word in _VOTES:
            self._arity(node, 2)
            members, condition = self.cast(values[0], "i8"), self.varying(self.truth(values[1]))
            how = word.removesuffix("_sync")
            code = f"M.vote({how!r}, {mask}, {node.lineno}, {members.code}, {condition.code})"
            return self._bound(code, _VOTES[word])
        if word == "activemask":
            return self._bound(f"M.active_lanes({mask})", "u4")
        if word == "lanemask_lt":
            return Value("M.lanes_below", "u4", False)
        return self._bit_function(node, word, values)

    def _shuffle(self, node: ast.Call, word: str, values: list[Value]) -> Value:
        self._arity(node, 3)
        members, value, lane = values
        if value.type not in ("i4", "i8", "f4", "f8"):
            raise self.error(
                node, f"{word} moves int32, int64, float32 and float64, as numba's does, and not "
                f"{types.name_of(value.type)}: convert it"
            )  # fmt: skip
        moved = (self.cast(members, "i8"), self.varying(value), self.cast(lane, "i8"))
        codes = ", ".join(item.code for item in moved)
        how = _SHUFFLES[word]
        code = f"M.shuffle({how!r}, {value.type!r}, {self.region.mask}, {node.lineno}, {codes})"
        return self._bound(code, value.type)

    def _bit_function(self, node: ast.Call, word: str, values: list[Value]) -> Value:
        if word in ("popc", "clz", "ffs", "brev"):
            self._arity(node, 1)
            value = values[0]
            if not types.is_integer(value.type):
                raise self.error(node, f"{word} takes an integer")
            if word == "brev":
                value = self.cast(value, "u8" if value.type == "u8" else "u4")  # int64 too
            code = f"{word}({value.type!r}, {value.code})"
            kind = "u4" if word == "ffs" else value.type
            return Value(code, kind, value.uniform, rank=value.rank + 1)
        if word == "fma":
            self._arity(node, 3)
            kind = "f4" if all(value.type == "f4" for value in values) else "f8"
            codes = ", ".join(self.cast(value, kind).code for value in values)
            uniform = all(value.uniform for value in values)
            return Value(f"fma_{kind}({codes})", kind, uniform, rank=self.count << 8)
        if word == "cbrt":
            return self._math(node, "cbrt", values)
        if word == "selp":
            self._arity(node, 3)
            condition = self.varying(self.truth(values[0]))
            return self._choose(condition, values[1], values[2])
        raise self.error(node, f"cuda.{word} cannot be called")

    def _bound(self, code: str, kind: str) -> Value:
        """Run ``code`` now, in its place, and give its result a name."""
        name = self.fresh("r")
        self.emit(f"{name} = {code}")
        return Value(name, kind, False, rank=self.count << 8)

    def _arity(self, node: ast.Call, count: int) -> None:
        if len(node.args) != count:
            text = self.function.text(node)
            raise self.error(
                node, f"{text} takes {count} argument{'s' * (count != 1)}, got {len(node.args)}"
            )

    def _grid(self, node: ast.Call, word: str) -> AnyValue:
        self._arity(node, 1)
        axes = self.value(node.args[0]).constant
        if axes not in (1, 2, 3):
            raise self.error(node, f"cuda.{word} takes the literal 1, 2 or 3")
        uniform = word == "gridsize"
        parts = tuple(
            self._special(f"{word}_{'xyz'[axis]}", f"M.{word}[{axis}]", "i8", uniform)
            for axis in range(axes)
        )
        return parts[0] if axes == 1 else TupleValue(parts)

    def _declare(self, node: ast.Call, name: str, word: str) -> ArrayValue:
        """Declare a shared or local array; ``name`` is the variable that it is assigned to."""
        keywords = {item.arg: item.value for item in node.keywords}
        shape_node = node.args[0] if node.args else keywords.get("shape")
        type_node = node.args[1] if len(node.args) > 1 else keywords.get("dtype")
        if shape_node is None or type_node is None:
            raise self.error(node, f"cuda.{word} takes a shape and a dtype")
        shape_value = self.any(shape_node)
        items = shape_value.items if isinstance(shape_value, TupleValue) else (shape_value,)
        constants = (item.constant if isinstance(item, Value) else UNKNOWN for item in items)
        shape = tuple(extent for extent in constants if type(extent) is int)
        if not shape or len(shape) != len(items):
            raise self.error(
                node, f"the shape of cuda.{word} must be integers known when the kernel is "
                "compiled: literals, or names from outside the function"
            )  # fmt: skip
        if any(extent < 1 for extent in shape):
            raise self.error(
                node, f"cuda.{word} of shape {shape}: every extent must be 1 or more "
                "(dynamic shared memory, shape 0, is not supported)"
            )  # fmt: skip
        resolved = type_node.value if isinstance(type_node, ast.Constant) else None
        kind = element_type(resolved or self.function.resolve(type_node))
        if kind is None:
            text = self.function.text(type_node)
            raise self.error(node, f"{text} is not an element type, such as np.float32")
        space: Space = "shared" if word == "shared.array" else "local"
        number = self.spec.declare(node, name, space, kind, shape)
        code = f"array{number}"
        self.prologue[code] = f"M.{space}({number})"
        if space == "local":
            self.emit(f"{code}.declared({self.region.mask})")
        return ArrayValue(code, kind, len(shape))

    def _atomic(self, node: ast.Call, how: str, wanted: bool) -> Value | None:
        values = 2 if how in ("cas", "compare_and_swap") else 1
        indexed = how != "compare_and_swap"
        self._arity(node, 1 + indexed + values)
        array = self.any(node.args[0])
        if not isinstance(array, ArrayValue):
            raise self.error(node, f"cuda.atomic.{how} takes an array first")
        allowed = {"inc": ("u4", "u8"), "dec": ("u4", "u8")}.get(how, ("i4", "i8", "u4", "u8"))
        if how in ("add", "sub", "max", "min", "nanmax", "nanmin"):
            allowed = (*allowed, "f4", "f8")
        if array.type not in allowed:
            raise self.error(
                node, f"cuda.atomic.{how} works on {', '.join(map(types.name_of, allowed))}, "
                f"not on {types.name_of(array.type)}"
            )  # fmt: skip
        if array.type[0] == "f" and how in ("add", "sub"):
            self.note(
                node,
                "atomics on floats are done in the order of threads and blocks; on a GPU the "
                "order, and so the rounding, differs from run to run",
            )
        where = node.args[1] if indexed else ast.copy_location(ast.Constant(0), node)
        indices = where.elts if isinstance(where, ast.Tuple) else [where]
        codes = self.indices(node, array, indices)
        operands = [self.cast(self.value(arg), array.type).code for arg in node.args[1 + indexed :]]
        packed = operands[0] if len(operands) == 1 else f"({', '.join(operands)})"
        site = self.site(node, "atomic")
        arguments = ", ".join((repr(how), str(site), self.region.mask, packed, str(wanted), *codes))
        call = f"{array.code}.atomic({arguments})"
        if wanted:
            return self._bound(call, array.type)
        self.emit(call)
        return None

    # -- functions of numbers

    def _len(self, node: ast.Call) -> Value:
        owner = self.any(node.args[0])
        if isinstance(owner, ArrayValue):
            return Value(f"{owner.code}.shape[0]", "i8", True)
        if isinstance(owner, TupleValue):
            return self.number(len(owner.items), node)
        raise self.error(node, f"{self.function.text(node)}: a number has no length")

    def _convert(self, kind: str, value: Value) -> Value:
        return value if value.type == kind else self.cast(value, kind)

    def _math(self, node: ast.AST, name: str, values: list[Value]) -> Value:
        if len(values) != (2 if name in _TWO_ARGUMENTS else 1):
            raise ValueError(name)
        kinds = [value.type if types.is_float(value.type) else "f8" for value in values]
        kind = max(kinds)
        if kind == "f2" and name in _TWO_ARGUMENTS:
            kind = "f4"
        if name not in _PLAIN:
            self.calls += 1
        if not is_exact(name):
            self.note(
                node,
                f"math.{name} comes from the host's library; the GPU's may differ in the last bits",
            )
        codes = ", ".join(self.cast(value, kind).code for value in values)
        uniform = all(value.uniform for value in values)
        rank = max(value.rank for value in values) + 1
        return Value(f"{name}_{kind}({codes})", kind, uniform, rank=rank)

    def _test(self, name: str, value: Value) -> Value:
        if not types.is_float(value.type):
            value = self.cast(value, "f8")
        return Value(f"{name}({self.use(value).code})", "b1", value.uniform, rank=value.rank + 1)

    def _extreme(self, node: ast.Call, name: str, values: list[Value]) -> Value:
        if len(values) < 2:
            raise self.error(node, "min and max take two numbers or more")
        result = self.use(values[0])
        pair = len(values) == 2 and values[0].type == values[1].type
        for value in values[1:]:
            kind = types.unify(result.type, value.type)
            a, b = self.cast(result, kind), self.cast(value, kind)
            code = f"{name}({kind!r}, {a.code}, {b.code}, {pair})"
            uniform, rank = a.uniform and b.uniform, max(a.rank, b.rank) + 1
            result = self.named(Value(code, kind, uniform, rank=rank))
        return result

    def _absolute(self, value: Value) -> Value:
        value = self.cast(value, "i8") if value.type == "b1" else self.use(value)
        code = f"absolute({value.type!r}, {value.code})"
        return Value(code, value.type, value.uniform, rank=value.rank + 1)

    def _int(self, value: Value) -> Value:
        return self.use(value) if types.is_integer(value.type) else self.cast(value, "i8")

    def _float(self, node: ast.Call, value: Value) -> Value:
        if value.type == "b1":
            raise self.error(node, "float() of a bool is not part of the dialect")
        return value if types.is_float(value.type) else self.cast(value, "f8")

    def _round(self, value: Value) -> Value:
        wide = self.cast(value, "f8")
        rounded = Value(f"rint({wide.code})", "f8", wide.uniform, rank=wide.rank + 1)
        return self.cast(rounded, "i8")

    def _pow(self, node: ast.Call, base: Value, exponent: Value) -> Value:
        return self.binary(node, "Pow", base, exponent)

    def _divmod(self, node: ast.Call, left: Value, right: Value) -> TupleValue:
        if types.unify(left.type, right.type) == "f8":  # of uint64 and a signed integer too
            left, right = self.cast(left, "f8"), self.cast(right, "f8")
        left, right = self.named(left), self.named(right)
        operators = ("FloorDiv", "Mod")
        return TupleValue(tuple(self.binary(node, name, left, right) for name in operators))

    def _device_function(self, node: ast.Call, called: Any) -> AnyValue | None:
        raise NotImplementedError  # in frontend.py, which writes functions
