"""Statements of a kernel: assignments, branches, and the merging of what branches assign.

A branch that only some lanes take is written under a mask of its own. What it assigns are new
names, merged afterwards into *slots*: the values that hold, from there on, what either way left.

A variable that may be read unassigned has a flag beside it, a variable like others: false at first,
true once assigned, and merged along the same ways.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import reduce
from typing import Literal

from . import typing_rules as types
from .calls import Calls
from .dialect import english, refusal
from .flow import Liveness, assigned_names
from .program import UNKNOWN, Function
from .values import AnyValue, ArrayValue, Region, Specialisation, TupleValue, Value, code_of, flag

__all__ = ["End", "Statements"]

#: How a block of statements ends: on to what follows; by a jump of Python's own, so that nothing
#: written after it runs; or with every lane of its mask gone elsewhere.
End = Literal["falls", "jumps", "empties"]


class Statements(Calls):
    """Writes the statements of one function, but for loops and returns."""

    def __init__(self, spec: Specialisation, function: Function) -> None:
        super().__init__(spec, function)
        self.live = Liveness(function.tree)
        self.unsure = frozenset(name.id for name in function.unsure)
        self.jumped = False  # whether lanes have left the current block early

    # -- blocks

    def block(self, body: Iterable[ast.stmt]) -> End:
        """Write statements up to the first that none of the lanes get beyond."""
        for statement in body:
            method = getattr(self, f"_{type(statement).__name__}_statement", None)
            if method is None:
                raise self.error(statement, refusal(statement))
            end: End = method(statement)
            if end != "falls":
                return end
        return "falls"

    @contextmanager
    def _within(self, step: str, region: Region | None = None) -> Iterator[list[str]]:
        """Write a nested block: its own lines, variables, place and perhaps region."""
        env, place, outer = dict(self.env), self.place, self.region
        self.count += 1
        self.place = (*place, f"{step}.{self.count}")
        self.region = region or outer
        with self.written() as lines:
            yield lines
            if not lines:
                lines.append("pass")
        # What follows is another stretch of code than what went before.
        self.count += 1
        self.env, self.region, self.place = env, outer, (*place[:-1], f"after.{self.count}")

    # -- variables

    def variable(self, node: ast.Name) -> AnyValue:
        """Read a variable; whoever reads along is told of lanes that have not assigned it."""
        if node.id not in self.env:
            raise self.error(node, f"{node.id} is used before anything is assigned to it")
        site = self.spec.program.site(node, "variable")
        if site is not None:
            assigned = code_of(self.env[flag(node.id)])
            self.emit(f"M.assigned({site.id}, {self.region.mask}, {assigned})")
        return self.env[node.id]

    def _bind(self, name: str, value: AnyValue) -> None:
        """Let a variable be a value from here on."""
        self.env[name] = value
        if name in self.unsure:
            self.env[flag(name)] = self.number(True, self.function.tree)

    def _with_flags(self, names: Iterable[str]) -> list[str]:
        """The variables, and the flags of those that may be read unassigned."""
        flags = (flag(name) for name in names if name in self.unsure)
        return sorted([*names, *flags])

    def _join(self, values: Sequence[AnyValue | None], uniform: bool, hint: str) -> AnyValue:
        """Return the slot that can hold any of the values; a Value's text is a new name."""
        known = [value for value in values if value is not None]
        first, wrong = known[0], "an array or tuple on one path and something else on another"
        if isinstance(first, ArrayValue):
            if all(value == first for value in known):
                return first
            if all(isinstance(value, ArrayValue) for value in known):
                wrong = "one array on one path and another on another; give each a name of its own"
        elif isinstance(first, TupleValue):
            others = [value for value in known if isinstance(value, TupleValue)]
            if len(others) == len(known) and len({len(value.items) for value in others}) == 1:
                columns = zip(*(value.items for value in others), strict=True)
                return TupleValue(tuple(self._join(column, uniform, hint) for column in columns))
        else:
            numbers = [value for value in known if isinstance(value, Value)]
            if len(numbers) == len(known):
                for value in numbers:
                    self.use(value)
                kind = reduce(types.unify, (value.type for value in numbers))
                same = uniform and all(value.uniform for value in numbers)
                return Value(self.fresh(hint), kind, same, rank=self.count << 8)
        raise self.error(self.function.tree, f"{hint} is {wrong}")

    def _assign_slot(self, slot: AnyValue, value: AnyValue | None, mask: str | None = None) -> None:
        """Write ``slot = value``, converted, for all lanes or those of a mask."""
        if isinstance(slot, TupleValue):
            parts = value.items if isinstance(value, TupleValue) else (None,) * len(slot.items)
            for inner, part in zip(slot.items, parts, strict=True):
                self._assign_slot(inner, part, mask)
        elif isinstance(slot, Value):
            if value is None:
                code = self._initial(slot)
            else:
                assert isinstance(value, Value)
                converted = self.cast(value, slot.type)
                code = (converted if slot.uniform else self.varying(converted)).code
            if mask is not None:
                code = f"pick({mask}, {code}, {slot.code})"
            if code != slot.code:
                self.emit(f"{slot.code} = {code}")

    def _initial(self, slot: AnyValue) -> str:
        """The text of what a variable holds on a path that does not assign it: numba's null."""
        if isinstance(slot, TupleValue):
            return f"({''.join(f'{self._initial(item)}, ' for item in slot.items)})"
        assert isinstance(slot, Value)
        nought = Value("0", "i8", True, 0)
        converted = self.cast(nought, slot.type)
        return (converted if slot.uniform else self.varying(converted)).code

    # -- simple statements

    def _Expr_statement(self, node: ast.Expr) -> End:
        if isinstance(node.value, ast.Call):
            self.call(node.value, wanted=False)
        elif not isinstance(node.value, ast.Constant):
            self.any(node.value)
        return "falls"

    def _Pass_statement(self, node: ast.Pass) -> End:
        return "falls"

    def _Assign_statement(self, node: ast.Assign) -> End:
        value = self._assigned(node.value, node.targets[0])
        for target in node.targets:
            self._assign(target, value)
        return "falls"

    def _AnnAssign_statement(self, node: ast.AnnAssign) -> End:
        if node.value is not None:
            self._assign(node.target, self._assigned(node.value, node.target))
        return "falls"

    def _assigned(self, node: ast.expr, target: ast.expr) -> AnyValue:
        if isinstance(node, ast.Call) and isinstance(target, ast.Name):
            word = self.function.intrinsic(node.func)
            if word in ("shared.array", "local.array"):
                return self._declare(node, target.id, word)
        if isinstance(node, ast.Tuple) and isinstance(target, ast.Tuple):
            pairs = zip(node.elts, target.elts, strict=False)
            if len(node.elts) == len(target.elts):
                return TupleValue(tuple(self._assigned(*pair) for pair in pairs))
        return self.any(node)

    def _assign(self, target: ast.expr, value: AnyValue) -> None:
        if isinstance(target, ast.Name):
            self._bind(target.id, self._copy(value, target.id))
        elif isinstance(target, ast.Tuple):
            if not isinstance(value, TupleValue) or len(value.items) != len(target.elts):
                raise self.error(target, f"cannot unpack into {len(target.elts)} names")
            # Copied first: in a, b = b, a the right side is complete before the left is assigned.
            copies = [self._copy(item, "t") for item in value.items]
            for inner, copy in zip(target.elts, copies, strict=True):
                self._assign(inner, copy)
        elif isinstance(target, ast.Subscript):
            array, indices = self.subscript(target)
            if not isinstance(array, ArrayValue):
                raise self.error(target, "a tuple's items cannot be assigned")
            if not isinstance(value, Value):
                raise self.error(target, "an element is a number; this is an array or a tuple")
            held = self.named(value)
            self.store(target, array, self.indices(target, array, indices), held)
        else:
            raise self.error(target, f"cannot assign to {english(target)}")

    def _copy(self, value: AnyValue, name: str) -> AnyValue:
        """Give a value a name of its own, which nothing else will ever be assigned to."""
        if isinstance(value, TupleValue):
            return TupleValue(tuple(self._copy(item, name) for item in value.items))
        if isinstance(value, ArrayValue) or _is_literal(value):
            return value
        copy = self.fresh(name)
        self.emit(f"{copy} = {value.code}")
        return Value(copy, value.type, value.uniform, product=value.product, rank=value.rank)

    def _AugAssign_statement(self, node: ast.AugAssign) -> End:
        operator = type(node.op).__name__
        if isinstance(node.target, ast.Name):
            new = self.binary(node, operator, self.value(node.target), self.value(node.value))
            self._bind(node.target.id, self._copy(new, node.target.id))
        elif isinstance(node.target, ast.Subscript):
            array, indices = self.subscript(node.target)
            if not isinstance(array, ArrayValue):
                raise self.error(node, "a tuple's items cannot be assigned")
            codes = [self._fixed(code) for code in self.indices(node.target, array, indices)]
            old = self.load(node.target, array, codes)
            new = self.binary(node, operator, old, self.value(node.value))
            self.store(node.target, array, codes, new)
        else:
            raise self.error(node, f"cannot assign to {english(node.target)}")
        return "falls"

    def _fixed(self, code: str) -> str:
        name = self.fresh("at")
        self.emit(f"{name} = {code}")
        return name

    # -- branches

    def _If_statement(self, node: ast.If) -> End:
        condition = self.named(self.truth(self.value(node.test)), "c")
        if _is_literal(condition):
            return self.block(node.body if condition.constant else node.orelse)
        if condition.uniform:
            return self._uniform_if(node, condition)
        return self._varying_if(node, condition)

    def _uniform_if(self, node: ast.If, condition: Value) -> End:
        with self._within("if") as first:
            first_end, first_env = self.block(node.body), self.env
        with self._within("if") as second:
            second_end, second_env = self.block(node.orelse), self.env
        ends = (first_end, second_end)
        falling = [env for end, env in zip(ends, (first_env, second_env), strict=True)
                   if end == "falls"]  # fmt: skip
        slots = self._merged(node, falling)
        for lines, end, env in ((first, first_end, first_env), (second, second_end, second_env)):
            if end != "jumps":
                self._append(lines, slots, env if end == "falls" else self.env)
        for line in (f"if {condition.code}:", *first, "else:", *second):
            self.emit(line)
        self.env.update(slots)
        if "falls" in ends:
            return "falls"
        return "jumps" if ends == ("jumps", "jumps") else "empties"

    def _varying_if(self, node: ast.If, condition: Value) -> End:
        outer, jumped = self.region.mask, self.jumped
        first_mask, second_mask = self.fresh("m"), self.fresh("m")
        self.jumped = False
        with self._within("if", Region(first_mask)) as first:
            first_end, first_env = self.block(node.body), self.env
        with self._within("if", Region(second_mask)) as second:
            second_end, second_env = self.block(node.orelse), self.env
        parted, self.jumped = self.jumped, jumped or self.jumped
        branches = (
            (first, first_end, first_env, first_mask),
            (second, second_end, second_env, second_mask),
        )
        slots = self._merged(node, [env for _, end, env, _ in branches if end == "falls"], False)
        before = self.env
        for name, slot in slots.items():
            self._assign_slot(slot, before.get(name))
        defined = {name for name in slots if name in before}
        for lines, end, env, mask in branches:
            if end == "falls":
                with self.written() as merges:
                    for name, slot in slots.items():
                        if env.get(name) != before.get(name) or name not in before:
                            where = mask if name in defined or name in self.unsure else None
                            self._assign_slot(slot, env.get(name), where)
                defined |= {name for name in slots if name in env}
                lines.extend(merges)
        self.emit(f"{first_mask} = both({outer}, {condition.code})")
        if node.orelse or parted:
            self.emit(f"{second_mask} = but_not({outer}, {condition.code})")
        for lines, mask, body in (
            (first, first_mask, node.body),
            (second, second_mask, node.orelse),
        ):
            if body:
                self.emit(f"if some({mask}):")
                self.lines.extend(lines)
        if parted:
            self.emit(f"{outer} = either({first_mask}, {second_mask})")
        self.env.update(slots)
        return "falls" if "falls" in (first_end, second_end) else "empties"

    def _merged(
        self, node: ast.If, falling: Sequence[dict[str, AnyValue]], uniform: bool = True
    ) -> dict[str, AnyValue]:
        """Make slots for the variables that an ``if`` assigns and that are wanted after it."""
        wanted = assigned_names([*node.body, *node.orelse]) & self.live.after[id(node)]
        slots: dict[str, AnyValue] = {}
        for name in self._with_flags(wanted):
            values = [env.get(name) for env in falling]
            if any(value is not None for value in values):
                if not uniform and name in self.env:
                    values.append(self.env[name])
                slots[name] = self._join(values, uniform, name)
        return slots

    def _append(
        self, lines: list[str], slots: dict[str, AnyValue], env: dict[str, AnyValue]
    ) -> None:
        with self.written() as merges:
            for name, slot in slots.items():
                self._assign_slot(slot, env.get(name))
        lines.extend(merges)


def _is_literal(value: Value) -> bool:
    return value.constant is not UNKNOWN
