"""Expressions of a kernel, typed as numba types them and written as NumPy code over lanes.

:class:`Expressions` turns one expression into a :class:`Value`: a piece of Python text with its
type, and whether it is the same for all lanes. Where the text cannot stand in an expression (a
load, a guarded operand) statements are written first. Statements proper are in :mod:`.frontend`.

Contraction. ``x + a*b`` in one float type becomes one FMA, by the rules that numba-cuda's compiler
was seen to follow (docs/facts.md): a product is fused if every use of it is an addition or
subtraction in the same straight stretch of code, or its only use is one in a nested ``if``; of two
products that are added, the one whose inputs were ready first is fused; in ``a*b - c*d`` the first.
Sums are fused by NVVM, differences by ptxas, for which a division or square root in between is a
branch that ends the stretch.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np

from ..errors import KernelError
from . import typing_rules as types
from .dialect import refusal
from .events import SiteKind
from .lanes import cast, wrap
from .program import UNKNOWN, Function
from .values import AnyValue, ArrayValue, Product, Region, Specialisation, TupleValue, Value

__all__ = ["Expressions"]


_INFIX = {"Add": "+", "Sub": "-", "Mult": "*", "BitAnd": "&", "BitOr": "|", "BitXor": "^"}
_COMPARE = {"Lt": "<", "LtE": "<=", "Gt": ">", "GtE": ">=", "Eq": "==", "NotEq": "!="}
_FOLDED = {"Add": np.add, "Sub": np.subtract, "Mult": np.multiply, "Div": np.true_divide}
_CALLED = {"FloorDiv": "floordiv", "Mod": "modulo", "LShift": "shift_left", "RShift": "shift_right"}


class Expressions:
    """Writes the expressions of one function; the base of :class:`.frontend.Statements`."""

    def __init__(self, spec: Specialisation, function: Function) -> None:
        self.spec = spec
        self.function = function
        self.env: dict[str, AnyValue] = {}
        self.lines: list[str] = []
        self.prologue: dict[str, str] = {}
        self.notes: dict[str, None] = {}
        self.region = Region("mask")
        self.place: tuple[str, ...] = ("body",)
        self.calls = 0
        self.count = 0
        #: What earlier readings of this function have learnt of its products.
        self.blocked: set[tuple[str, ...]] = set()
        self.uses: dict[tuple[str, ...], set[tuple[int, tuple[str, ...]]]] = {}
        self.known_blocked: frozenset[tuple[str, ...]] = frozenset()
        self.known_uses: Mapping[tuple[str, ...], set[tuple[int, tuple[str, ...]]]] = {}

    # -- writing

    def error(self, node: ast.AST, message: str) -> KernelError:
        """Return the error that refuses a node."""
        return self.function.error(node, message)

    def emit(self, line: str) -> None:
        self.lines.append(line)

    @contextmanager
    def written(self) -> Iterator[list[str]]:
        """Collect what is written within, indented, instead of writing it."""
        outer, self.lines = self.lines, []
        inner = self.lines
        try:
            yield inner
        finally:
            self.lines = outer
            inner[:] = [f"    {line}" for line in inner]

    def fresh(self, hint: str = "t") -> str:
        self.count += 1
        return f"{hint.replace('?', '_is_set')}_{self.count}"

    def named(self, value: Value, hint: str = "t") -> Value:
        """Return the value with a plain name or literal as its text, so that it can be repeated."""
        if value.code.isidentifier() or value.constant is not UNKNOWN:
            return value
        name = self.fresh(hint)
        self.emit(f"{name} = {value.code}")
        return replace(value, code=name)

    def note(self, node: ast.AST, message: str) -> None:
        line = getattr(node, "lineno", self.function.tree.lineno)
        self.notes[f"{self.function.filename}:{line}: {message}"] = None

    def site(self, node: ast.AST, kind: SiteKind) -> int:
        site = self.spec.program.site(node, kind)
        assert site is not None, ast.dump(node)
        return site.id

    # -- values

    def any(self, node: ast.expr) -> AnyValue:
        """Write an expression of any kind."""
        method = getattr(self, f"_{type(node).__name__}", None)
        if method is None:
            raise self.error(node, refusal(node))
        result: AnyValue = method(node)
        return result

    def value(self, node: ast.expr) -> Value:
        """Write an expression that must be a number."""
        result = self.any(node)
        if isinstance(result, Value):
            return result
        kind = "an array" if isinstance(result, ArrayValue) else "a tuple"
        raise self.error(node, f"{self.function.text(node)} is {kind}, where a number is needed")

    def use(self, value: Value) -> Value:
        """Mark a value as used for something that is not an addition."""
        if value.product is not None:
            self.blocked.add(value.product.key)
            value = replace(value, product=None)
        return value

    def number(self, constant: Any, node: ast.AST) -> Value:
        """Make a value of a constant."""
        kind = types.type_of_scalar(constant)
        if kind is None:
            raise self.error(node, f"{constant!r} is not a number the GPU has")
        if types.is_float(kind):
            constant = types.dtype_of(kind).type(constant)
            return Value(self.spec.constant(constant), kind, True, constant)
        constant = bool(constant) if kind == "b1" else int(constant)
        return Value(f"({constant})" if constant < 0 else repr(constant), kind, True, constant)

    def cast(self, value: Value, target: str) -> Value:
        """Convert a value to a type."""
        value = self.use(value)
        if value.type == target:
            return value
        if value.constant is not UNKNOWN:
            converted = cast(value.type, target)(value.constant)
            if types.is_float(target):
                return Value(self.spec.constant(converted), target, True, converted)
            text = f"({converted})" if converted < 0 else repr(converted)
            return Value(text, target, True, converted)
        same = types.is_integer(value.type) and value.type[0] == target[0]
        if same and value.type[1] < target[1]:
            return replace(value, type=target)
        return replace(value, code=f"{value.type}_to_{target}({value.code})", type=target)

    def varying(self, value: Value) -> Value:
        """Make a value an array, if it is not."""
        if not value.uniform:
            return value
        if value.constant is not UNKNOWN:
            lifted = np.array([value.constant], types.dtype_of(_held(value.type)))
            return Value(self.spec.constant(lifted), value.type, False)
        return Value(f"lift_{value.type}({value.code})", value.type, False, rank=value.rank)

    def truth(self, value: Value) -> Value:
        """Convert a value to a condition."""
        return self.cast(value, "b1")

    def index(self, node: ast.expr) -> str:
        value = self.value(node)
        if not types.is_integer(value.type) and value.type != "b1":
            raise self.error(
                node, f"index {self.function.text(node)} is a {types.name_of(value.type)}; "
                "an index must be an integer"
            )  # fmt: skip
        return self.cast(value, "i8").code

    # -- leaves

    def _Constant(self, node: ast.Constant) -> Value:
        if not isinstance(node.value, (bool, int, float)):
            raise self.error(node, f"{node.value!r} is not a number the GPU has")
        return self.number(node.value, node)

    def _Name(self, node: ast.Name) -> AnyValue:
        if node.id in self.function.variables:
            return self.variable(node)
        return self._outside(node)

    def _outside(self, node: ast.expr) -> AnyValue:
        found = self.function.resolve(node)
        text = self.function.text(node)
        if found is UNKNOWN:
            raise self.error(node, f"{text} is not defined")
        if isinstance(found, tuple):
            return TupleValue(tuple(self.number(item, node) for item in found))
        if self.function.intrinsic(node) == "warpsize":
            return Value("32", "i4", True, 32)
        if self.function.intrinsic(node) == "laneid":
            return self._special("lane", "M.lane", "i4", uniform=False)
        if isinstance(found, np.ndarray):
            raise self.error(node, f"{text} is an outside array; pass it as an argument")
        if types.type_of_scalar(found) is None:
            raise self.error(node, f"{text} is not a number, and cannot be used as a value")
        return self.number(found, node)

    def _special(self, name: str, code: str, kind: str, uniform: bool) -> Value:
        self.prologue[name] = code
        return Value(name, kind, uniform)

    def _Attribute(self, node: ast.Attribute) -> AnyValue:
        vector = self.function.intrinsic(node.value)
        if vector in ("threadIdx", "blockIdx", "blockDim", "gridDim"):
            if node.attr not in ("x", "y", "z"):
                raise self.error(node, f"cuda.{vector} has x, y and z, not {node.attr}")
            name = f"{vector}_{node.attr}"
            code = f"M.{vector}[{'xyz'.index(node.attr)}]"
            return self._special(name, code, "i4", uniform=vector.endswith("Dim"))
        if self.function.resolve(node) is not UNKNOWN:
            return self._outside(node)
        if self.function.resolve(node.value) is not UNKNOWN:
            raise self.error(node, f"{self.function.text(node)} is not part of the dialect")
        owner = self.any(node.value)
        if isinstance(owner, ArrayValue):
            if node.attr == "ndim":
                return self.number(owner.ndim, node)
            if node.attr == "size":
                return Value(f"{owner.code}.size", "i8", True)
            if node.attr == "shape":
                axes = (f"{owner.code}.shape[{axis}]" for axis in range(owner.ndim))
                return TupleValue(tuple(Value(axis, "i8", True) for axis in axes))
        raise self.error(node, f".{node.attr} is not part of the dialect")

    def _Tuple(self, node: ast.Tuple) -> TupleValue:
        return TupleValue(tuple(self.any(item) for item in node.elts))

    # -- operators

    def _BinOp(self, node: ast.BinOp) -> Value:
        left, right = self.value(node.left), self.value(node.right)
        return self.binary(node, type(node.op).__name__, left, right)

    def binary(self, node: ast.AST, operator: str, left: Value, right: Value) -> Value:
        """Write ``left operator right``."""
        try:
            result, left_type, right_type = types.binary(operator, left.type, right.type)
        except (TypeError, KeyError) as error:
            why = str(error) if isinstance(error, TypeError) else "no such operator"
            raise self.error(node, f"{self.function.text(node)}: {why}") from None
        if result == "f8" and "f4" in (left.type, right.type):
            other = right if left.type == "f4" else left
            self.note(
                node,
                f"{self.function.text(node)} is computed in float64: a float32 meets "
                f"{'an' if other.type[0] == 'i' else 'a'} {types.name_of(other.type)}",
            )
        known = left.constant is not UNKNOWN and right.constant is not UNKNOWN
        if known and operator in _FOLDED and types.is_float(result):
            # A product of constants is a constant, and never fused.
            pair = (cast(v.type, result)(v.constant) for v in (left, right))
            return self.number(_FOLDED[operator](*pair), node)
        if operator in ("Add", "Sub") and types.is_float(result):
            return self._sum(node, operator, result, left, right)
        if operator == "Pow" and types.is_integer(right_type) and right.constant is not UNKNOWN:
            return self._repeated_product(node, self.cast(left, left_type), right.constant)
        a, b = self.cast(left, left_type), self.cast(right, right_type)
        uniform, rank = a.uniform and b.uniform, max(a.rank, b.rank) + 1
        if operator == "Mult" and types.is_float(result):
            return self._product(a, b)
        if operator == "Div":
            self.calls += 1
            return Value(f"truediv({a.code}, {b.code})", result, uniform, rank=rank)
        if operator == "Pow":
            if types.is_float(result):
                self.note(node, "** of floats comes from the host's library, to the last bit or so")
            return Value(f"power({result!r}, {a.code}, {b.code})", result, uniform, rank=rank)
        if operator in ("FloorDiv", "Mod") and types.is_float(result):
            self.calls += 1  # there is a division in it
        if operator in ("FloorDiv", "Mod") and b.constant is UNKNOWN:
            # numba asks whether the divisor is 0: the compiler sees a branch here.
            self.count += 1
            self.place = (*self.place[:-1], f"divided.{self.count}")
        if (
            operator in ("FloorDiv", "Mod")
            and types.is_integer(result)
            and b.constant in (UNKNOWN, 0)
        ):
            b = self.named(b)
            if not isinstance(node, ast.Call) or operator == "FloorDiv":  # divmod divides once
                site = self.site(node, "division")
                self.emit(f"M.divide({site}, {self.region.mask}, {b.code})")
        if operator in _CALLED:
            code = f"{_CALLED[operator]}({result!r}, {a.code}, {b.code})"
            return Value(code, result, uniform, rank=rank)
        if operator not in _INFIX:
            raise self.error(node, f"{self.function.text(node)}: no such operator on the GPU")
        code = f"({a.code} {_INFIX[operator]} {b.code})"
        if uniform and types.is_integer(result) and operator in types.ARITHMETIC:
            if known:
                folded = wrap(result, eval(code, {}))  # two literals, written by number()
                return self.number(folded, node) if result == "i8" else Value(
                    repr(folded), result, True, folded
                )  # fmt: skip
            code = f"wrap_{result}{code}"
        return Value(code, result, uniform, rank=rank)

    def _product(self, a: Value, b: Value) -> Value:
        a, b = self.named(self.use(a)), self.named(self.use(b))
        key = (a.type, *sorted((a.code, b.code)))
        product = Product(a.code, b.code, key, self.place, self.calls)
        rank = max(a.rank, b.rank) + 1
        return Value(
            f"({a.code} * {b.code})", a.type, a.uniform and b.uniform, product=product, rank=rank
        )

    def _repeated_product(self, node: ast.AST, base: Value, exponent: int) -> Value:
        """``base ** n`` for a literal n, multiplied out as numba does."""
        if not types.is_float(base.type) or abs(exponent) > 64:
            power = f"power({base.type!r}, {base.code}, {exponent})"
            return Value(power, base.type, base.uniform, rank=base.rank + 1)
        result: Value | None = None
        factor, left = base, abs(exponent)
        while left:
            if left & 1:
                result = factor if result is None else self._product(result, factor)
            left >>= 1
            if left:
                factor = self.named(self._product(factor, factor))
        if result is None:
            return self.number(types.dtype_of(base.type).type(1), node)
        if exponent < 0:
            wide = self.cast(result, "f8")
            inverse = Value(f"truediv(float64(1), {wide.code})", "f8", wide.uniform, rank=wide.rank)
            return self.cast(inverse, base.type)
        return result

    def _sum(self, node: ast.AST, operator: str, kind: str, left: Value, right: Value) -> Value:
        """Write a float sum or difference, with one product fused if the compiler would."""
        candidates = [side for side in (left, right) if self._fusible(node, operator, side, kind)]
        if len(candidates) == 2:
            first = min(candidates, key=lambda side: side.rank) if operator == "Add" else left
            self.note(
                node,
                f"{self.function.text(node)} joins two products, of which one is fused: simt fuses "
                "the one whose inputs are ready first, as numba-cuda 0.30 was seen to do",
            )
            candidates = [first]
        rank = max(left.rank, right.rank) + 1
        uniform = left.uniform and right.uniform
        if kind == "f2" and (left.product or right.product):
            self.note(node, "float16: a product is rounded by itself; fusing is not modelled")
        if kind == "f8" and any(s.product and s.type == "f4" for s in (left, right)):
            self.note(
                node,
                "a float32 product in a float64 sum is rounded first; where the sum is a float32 "
                "right away, numba-cuda 0.30 was seen to add in float32, and fuse",
            )
        if not candidates:
            a, b = (self._addend(node, side, kind) for side in (left, right))
            code = f"({a} {_INFIX[operator]} {b})"
            return Value(code, kind, uniform, rank=rank)
        fused = candidates[0]
        product = fused.product
        assert product is not None
        other = self._addend(node, right if fused is left else left, kind)
        minus = product.negated != (operator == "Sub" and fused is right)
        x = f"-{product.x}" if minus else product.x
        z = f"-{other}" if operator == "Sub" and fused is left else other
        return Value(f"fma_{kind}({x}, {product.y}, {z})", kind, uniform, rank=rank)

    def _addend(self, node: ast.AST, value: Value, kind: str) -> str:
        """The text of a value that is added as it is; not a use that keeps it from being fused."""
        if value.product is not None and value.type == kind:
            self.uses.setdefault(value.product.key, set()).add((id(node), self.place))
            return value.code
        return self.cast(value, kind).code

    def _fusible(self, node: ast.AST, operator: str, value: Value, kind: str) -> bool:
        product = value.product
        if product is None or value.type != kind or kind == "f2":
            return False
        uses = self.uses.setdefault(product.key, set())
        uses.add((id(node), self.place))
        known = self.known_uses.get(product.key, uses)
        here = all(place == product.place for _, place in known)
        nested = len(known) == 1 and _only_ifs_between(product.place, self.place)
        by_ptxas = operator == "Sub" or product.negated
        apart = not (here or nested) or (by_ptxas and product.calls != self.calls)
        if product.key in self.known_blocked or apart:
            self.note(
                node,
                "a product that is used in several ways or places is rounded by itself here, as "
                "numba-cuda 0.30 was seen to do; another compiler may fuse it",
            )
            return False
        return True

    def _UnaryOp(self, node: ast.UnaryOp) -> Value:
        operand, operator = self.value(node.operand), type(node.op).__name__
        if operator == "Not":
            value = self.truth(operand)
            if value.constant is not UNKNOWN:
                return self.number(not value.constant, node)
            return replace(value, code=f"(not {value.code})" if value.uniform else f"~{value.code}")
        try:
            result = types.unary(operator, operand.type)
        except TypeError as error:
            raise self.error(node, str(error)) from None
        if operator == "UAdd":
            return operand if operand.type == result else self.cast(operand, result)
        if types.is_float(result):
            product = operand.product
            if operand.constant is not UNKNOWN:
                return self.number(-operand.constant, node)
            if product is not None:
                product = replace(product, negated=not product.negated)
            return replace(operand, code=f"(-{operand.code})", product=product)
        if operand.constant is not UNKNOWN and result == "i8" and operator == "USub":
            return self.number(wrap("i8", -operand.constant), node)
        if result == "b1":
            return replace(operand, code=f"(not {operand.code})" if operand.uniform
                           else f"~{operand.code}", constant=UNKNOWN)  # fmt: skip
        narrow = operand.type if operand.type != "b1" else "i8"
        value = self.cast(operand, narrow)
        sign = "-" if operator == "USub" else "~"
        code = f"wrap({narrow!r}, {sign}{value.code})"  # the narrow type first, then 64 bits
        return self.cast(replace(value, code=code, constant=UNKNOWN), result)

    def _Compare(self, node: ast.Compare) -> Value:
        left = self.value(node.left)
        result: Value | None = None
        for position, (operator, right_node) in enumerate(
            zip(node.ops, node.comparators, strict=True)
        ):
            name = type(operator).__name__
            if name not in _COMPARE:
                raise self.error(node, f"{self.function.text(node)}: no such comparison")
            if result is None:
                right = self.value(right_node)
            else:  # a < b < c reads c only where a < b
                with self.guard(self.truth(result), True, right_node):
                    right = self.value(right_node)
            if position + 1 < len(node.ops):
                right = self.named(right)
            kind = types.comparison_operands(left.type, right.type)
            a, b = self.cast(left, kind), self.cast(right, kind)
            code = f"({a.code} {_COMPARE[name]} {b.code})"
            step = Value(code, "b1", a.uniform and b.uniform, rank=max(a.rank, b.rank) + 1)
            result = step if result is None else self._logical("And", result, step)
            left = right
        assert result is not None
        return result

    def _logical(self, operator: str, left: Value, right: Value) -> Value:
        uniform = left.uniform and right.uniform
        word = {"And": ("and", "&"), "Or": ("or", "|")}[operator][0 if uniform else 1]
        code = f"({left.code} {word} {right.code})"
        return Value(code, "b1", uniform, rank=max(left.rank, right.rank) + 1)

    def _BoolOp(self, node: ast.BoolOp) -> Value:
        is_and = isinstance(node.op, ast.And)
        result = self.value(node.values[0])
        for operand in node.values[1:]:
            if result.constant is not UNKNOWN:
                if bool(result.constant) == is_and:
                    result = self.value(operand)
                continue
            left = self.named(self.use(result))
            condition = self.named(self.truth(left))
            if condition.uniform:
                taken = condition.code if is_and else f"not {condition.code}"
                result = self._two_ways(taken, operand, left)
                continue
            with self.guard(condition, is_and, operand):
                right = self.use(self.value(operand))
            if left.type == right.type == "b1":
                result = self._logical("And" if is_and else "Or", left, right)
            else:
                ways = (right, left) if is_and else (left, right)
                result = self._choose(condition, *ways)
        return result

    def _IfExp(self, node: ast.IfExp) -> Value:
        condition = self.named(self.truth(self.value(node.test)))
        if condition.constant is not UNKNOWN:
            return self.value(node.body if condition.constant else node.orelse)
        if condition.uniform:
            return self._two_ways(condition.code, node.body, node.orelse)
        with self.guard(condition, True, node.body):
            if_true = self.named(self.use(self.value(node.body)))
        with self.guard(condition, False, node.orelse):
            if_false = self.use(self.value(node.orelse))
        return self._choose(condition, if_true, if_false)

    def _choose(self, condition: Value, if_true: Value, if_false: Value) -> Value:
        kind = types.unify(if_true.type, if_false.type)
        a, b = (self.varying(self.cast(value, kind)).code for value in (if_true, if_false))
        rank = max(condition.rank, if_true.rank, if_false.rank) + 1
        return Value(f"choose({condition.code}, {a}, {b})", kind, False, rank=rank)

    def _two_ways(self, condition: str, first: ast.expr, second: ast.expr | Value) -> Value:
        """Write a choice that all lanes make alike: an ``if`` of Python's own."""
        with self.written() as first_lines:
            a = self.use(self.value(first))
        with self.written() as second_lines:
            b = second if isinstance(second, Value) else self.use(self.value(second))
        kind, uniform = types.unify(a.type, b.type), a.uniform and b.uniform
        name = self.fresh("way")
        for lines, value in ((first_lines, a), (second_lines, b)):
            converted = self.cast(value, kind)
            code = converted.code if uniform else self.varying(converted).code
            lines.append(f"    {name} = {code}")
        for line in (f"if {condition}:", *first_lines, "else:", *second_lines):
            self.emit(line)
        return Value(name, kind, uniform, rank=max(a.rank, b.rank) + 1)

    @contextmanager
    def guard(self, condition: Value, expected: bool, operand: ast.expr) -> Iterator[None]:
        """Narrow the mask, for an operand that only some lanes evaluate, where that can matter."""
        matters = any(
            isinstance(n, (ast.Subscript, ast.Call, ast.FloorDiv, ast.Mod))
            or self.spec.program.site(n, "variable")
            for n in ast.walk(operand)
        )
        if not matters or condition.constant is not UNKNOWN:
            yield
            return
        outer, self.region = self.region, Region(self.fresh("m"))
        function = "both" if expected else "but_not"
        lifted = self.varying(condition).code
        self.emit(f"{self.region.mask} = {function}({outer.mask}, {lifted})")
        try:
            yield
        finally:
            self.region = outer

    # -- memory

    def _Subscript(self, node: ast.Subscript) -> AnyValue:
        base, indices = self.subscript(node)
        if isinstance(base, TupleValue):
            position = self.value(indices[0]).constant if len(indices) == 1 else UNKNOWN
            if not isinstance(position, int) or not -len(base.items) <= position < len(base.items):
                raise self.error(node, "a tuple's index must be a constant within it")
            return base.items[position]
        codes = self.indices(node, base, indices)
        return self.load(node, base, codes)

    def subscript(self, node: ast.Subscript) -> tuple[ArrayValue | TupleValue, list[ast.expr]]:
        """Return what is subscripted, and its index expressions; A[i][j] is A[i, j]."""
        indices: list[ast.expr] = []
        owner: ast.expr = node
        while isinstance(owner, ast.Subscript):
            inner = owner.slice.elts if isinstance(owner.slice, ast.Tuple) else [owner.slice]
            indices = [*inner, *indices]
            owner = owner.value
        base = self.any(owner)
        if isinstance(base, Value):
            raise self.error(
                node, f"{self.function.text(owner)} is a number, not an array: it has no elements"
            )
        return base, indices

    def indices(self, node: ast.AST, array: ArrayValue, indices: Sequence[ast.expr]) -> list[str]:
        if any(isinstance(index, ast.Slice) for index in indices) or len(indices) != array.ndim:
            raise self.error(
                node, f"{self.function.text(node)}: this array has {array.ndim} "
                f"{'axis' if array.ndim == 1 else 'axes'}, and every one needs an integer index; "
                "slices and views are not part of the dialect"
            )  # fmt: skip
        return [self.index(index) for index in indices]

    def load(self, node: ast.AST, array: ArrayValue, codes: Sequence[str]) -> Value:
        name = self.fresh("v")
        where = ", ".join((str(self.site(node, "load")), self.region.mask, *codes))
        self.emit(f"{name} = {array.code}.load({where})")
        return Value(name, array.type, False, rank=self.count << 8)

    def store(self, node: ast.AST, array: ArrayValue, codes: Sequence[str], value: Value) -> None:
        value = self.cast(value, array.type)
        site = str(self.site(node, "store"))
        where = ", ".join((site, self.region.mask, value.code, *codes))
        self.emit(f"{array.code}.store({where})")

    def _Call(self, node: ast.Call) -> AnyValue:
        raise NotImplementedError  # in calls.py

    def variable(self, node: ast.Name) -> AnyValue:
        raise NotImplementedError  # in statements.py


def _held(kind: str) -> str:
    """The type of arrays that hold varying values of a type: integers take 64 bits."""
    return f"{kind[0]}8" if types.is_integer(kind) else kind


def _only_ifs_between(outer: tuple[str, ...], inner: tuple[str, ...]) -> bool:
    """Whether ``inner`` is ``outer``, or a stretch of code in an ``if`` within it."""
    extra = inner[len(outer) :]
    same = inner[: len(outer)] == outer
    return same and all(not step.startswith("loop") for step in extra)
