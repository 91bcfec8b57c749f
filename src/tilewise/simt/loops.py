"""Loops of a kernel, and what lanes do that leave them at different times.

A loop that all lanes go round together is a loop of Python's own. Another one keeps a mask of the
lanes still in it. Its variables are slots: what a lane has assigned when it leaves, or ends an
iteration, is merged into them there.

A loop is read again until the types of its variables, at its head, are those that its end gives
back, and until it is known whether lanes part in it.
"""

from __future__ import annotations

import ast
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from . import typing_rules as types
from .flow import assigned_names
from .program import Function
from .statements import End, Statements
from .values import AnyValue, ArrayValue, Region, Specialisation, TupleValue, Value, kind_of

__all__ = ["Loop", "Loops", "NeedsMask"]


@dataclass(slots=True)
class Loop:
    """A loop being written.

    ``slots`` are its variables: name to the value held at the head of the loop. ``masked`` says
    that lanes leave it one by one; ``mask`` then names those still in it.
    """

    node: ast.For | ast.While
    region: Region
    slots: dict[str, AnyValue]
    masked: bool
    mask: str = ""
    seen: dict[str, list[AnyValue]] = field(default_factory=dict)
    returned: bool = False


class NeedsMask(Exception):
    """A loop, written as Python's own, turned out to be left by some lanes only."""

    def __init__(self, loop: Loop) -> None:
        self.loop = loop


class Loops(Statements):
    """Writes the statements of one function, but for returns."""

    def __init__(self, spec: Specialisation, function: Function) -> None:
        super().__init__(spec, function)
        self.loops: list[Loop] = []
        #: Loops, by their nodes' ids, that need a mask.
        self.masked: set[int] = set()

    def _While_statement(self, node: ast.While) -> End:
        return self._loop(node, lambda loop: self._while(node, loop))

    def _For_statement(self, node: ast.For) -> End:
        if not isinstance(node.target, ast.Name):
            raise self.error(node, "a loop variable must be a plain name")
        call = node.iter
        is_range = isinstance(call, ast.Call) and self.function.resolve(call.func) is range
        if not isinstance(call, ast.Call) or not is_range or not 1 <= len(call.args) <= 3:
            raise self.error(
                node, f"for loops run over range(...), not over {self.function.text(node.iter)}"
            )
        bounds = [self.named(self._bound_of_range(argument)) for argument in call.args]
        kind = types.range_type(*(bound.type for bound in bounds))
        values = [self.named(self.cast(bound, "i8"), "to") for bound in bounds]
        if len(values) == 1:
            values = [self.number(0, node), *values]
        if len(values) == 2:
            values = [*values, self.number(1, node)]
        if values[2].constant == 0:
            raise self.error(node, "a step of 0 never ends")
        return self._loop(node, lambda loop: self._for(node, loop, kind, values))

    def _bound_of_range(self, node: ast.expr) -> Value:
        value = self.value(node)
        if types.is_float(value.type):
            raise self.error(
                node, f"range takes integers; {self.function.text(node)} is a "
                f"{types.name_of(value.type)}"
            )  # fmt: skip
        return value

    def _loop(self, node: ast.For | ast.While, write: Any) -> End:
        """Write a loop, again and again until the types at its head are stable."""
        if node.orelse:
            raise self.error(node.orelse[0], "else after a loop is not part of the dialect")
        wanted = self.live.head[id(node)] | self.live.after[id(node)]
        names = self._with_flags(assigned_names([node]) & wanted)
        entry = {name: self.env.get(name) for name in names}
        slots = {n: self._join([v], True, n) for n, v in entry.items() if v is not None}
        start = (dict(self.env), self.place, set(self.blocked), _copied(self.uses))
        notes, jumped = dict(self.notes), self.jumped
        for _ in range(40):
            env, self.place, blocked, uses = start
            self.env, self.blocked, self.uses = dict(env), set(blocked), _copied(uses)
            self.notes, self.jumped = dict(notes), jumped
            masked = id(node) in self.masked
            if masked:
                slots = {name: _varying_slot(slot) for name, slot in slots.items()}
            loop = Loop(node, self.region, slots, masked)
            self.env.update(slots)
            self.loops.append(loop)
            depth, outer_lines, region = len(self.loops), self.lines, self.region
            try:
                with self.written() as lines:
                    write(loop)
            except NeedsMask as needed:
                if needed.loop is not loop:
                    raise
                self.masked.add(id(node))
                self.lines, self.region = outer_lines, region
                continue
            finally:
                del self.loops[depth - 1 :]
            seen = loop.seen
            after = {
                name: self._join(
                    [entry[name], slots.get(name), *seen.get(name, [])], not masked, name
                )
                for name in names
                if seen.get(name) or name in slots
            }
            if {n: kind_of(v) for n, v in after.items()} == {
                n: kind_of(v) for n, v in slots.items()
            }:
                break
            slots = after
        else:
            raise self.error(node, "the types of this loop's variables do not settle")
        for name, slot in slots.items():
            self._assign_slot(slot, entry[name])
        self.lines.extend(line.removeprefix("    ") for line in lines)
        self.env = {**start[0], **slots}
        self.count += 1
        self.place = (*start[1][:-1], f"after.{self.count}")
        if loop.returned:
            self.jumped = True
            self.emit(f"{self.region.mask} = but_not({self.region.mask}, gone)")
        return "falls"

    def _end_of_pass(self, loop: Loop, mask: str | None) -> None:
        """Write what a lane keeps of the loop's variables when it ends an iteration, or leaves."""
        for name in self._with_flags(assigned_names([loop.node])):
            value = self.env.get(name)
            if value is None:
                continue
            if name in loop.slots:
                if value != loop.slots[name]:
                    loop.seen.setdefault(name, []).append(value)
                    if _fits(value, loop.slots[name]):
                        self._assign_slot(loop.slots[name], value, mask)
            elif name in self.live.head[id(loop.node)] | self.live.after[id(loop.node)]:
                loop.seen.setdefault(name, []).append(value)

    def _while(self, node: ast.While, loop: Loop) -> None:
        if loop.masked:
            loop.mask = self.fresh("lanes")
            self.emit(f"{loop.mask} = {self.region.mask}")
        self.emit(f"while M.tick({node.lineno}):")
        with self._within("loop", Region(loop.mask) if loop.masked else None) as lines:
            condition = self.named(self.truth(self.value(node.test)), "c")
            if condition.uniform:
                self.emit(f"if not {condition.code}:")
                self.emit("    break")
            elif not loop.masked:
                raise NeedsMask(loop)
            else:
                self.emit(f"{loop.mask} = both({loop.mask}, {condition.code})")
            self._body(node, loop)
        self.lines.extend(lines)

    def _for(self, node: ast.For, loop: Loop, kind: str, bounds: Sequence[Value]) -> None:
        assert isinstance(node.target, ast.Name)
        start, _, step = bounds
        uniform = all(bound.uniform for bound in bounds)
        if not uniform and not loop.masked:
            raise NeedsMask(loop)
        if loop.masked:
            loop.mask = self.fresh("lanes")
            self.emit(f"{loop.mask} = {self.region.mask}")
        counter = self.fresh(node.target.id)
        codes = ", ".join(bound.code for bound in bounds)
        if uniform:
            self.emit(f"for {counter} in M.range({node.lineno}, {codes}):")
        else:
            trips, turn = self.fresh("trips"), self.fresh("turn")
            self.emit(f"{trips} = M.trips({node.lineno}, {loop.mask}, {codes})")
            self.emit(f"for {turn} in M.range({node.lineno}, 0, M.most({loop.mask}, {trips}), 1):")
        with self._within("loop") as lines:
            if not uniform:
                self.emit(f"{loop.mask} = both({loop.mask}, {turn} < {trips})")
                reached = f"{start.code} + {turn} * {step.code}"
                unsigned = kind == "u8" and not (start.uniform and step.uniform)
                self.emit(f"{counter} = {f'i8_to_u8({reached})' if unsigned else reached}")
            alike = uniform or (start.uniform and step.uniform)
            self._bind(node.target.id, Value(counter, kind, alike, rank=self.count << 8))
            self._body(node, loop)
        self.lines.extend(lines)

    def _body(self, node: ast.For | ast.While, loop: Loop) -> None:
        if not loop.masked:
            loop.region = self.region
            if self.block(node.body) == "falls":
                self._end_of_pass(loop, None)
            return
        self.emit(f"if not some({loop.mask}):")
        self.emit("    break")
        inside = self.fresh("m")
        self.emit(f"{inside} = {loop.mask}")
        outer, self.region = self.region, Region(inside)
        loop.region = self.region
        jumped, self.jumped = self.jumped, False
        if self.block(node.body) == "falls":
            self._end_of_pass(loop, inside)
        self.jumped = jumped
        self.region = outer

    def _Break_statement(self, node: ast.Break) -> End:
        return self._leave(node, out=True)

    def _Continue_statement(self, node: ast.Continue) -> End:
        return self._leave(node, out=False)

    def _leave(self, node: ast.stmt, out: bool) -> End:
        loop = self.loops[-1]
        if not loop.masked and self.region is not loop.region:
            raise NeedsMask(loop)
        mask = self.region.mask
        self._end_of_pass(loop, mask if loop.masked else None)
        if not loop.masked:
            self.emit("break" if out else "continue")
            return "jumps"
        if out:
            self.emit(f"{loop.mask} = but_not({loop.mask}, {mask})")
        return self._emptied()

    def _emptied(self) -> End:
        self.emit(f"{self.region.mask} = EMPTY")
        self.jumped = True
        return "empties"


def _copied(uses: dict[Any, set[Any]]) -> dict[Any, set[Any]]:
    return {key: set(value) for key, value in uses.items()}


def _fits(value: AnyValue, slot: AnyValue) -> bool:
    """Whether a slot can hold a value yet; if not, the loop is about to be read again."""
    if isinstance(value, TupleValue) and isinstance(slot, TupleValue):
        pairs = zip(value.items, slot.items, strict=False)
        return len(value.items) == len(slot.items) and all(_fits(v, s) for v, s in pairs)
    if isinstance(value, Value) and isinstance(slot, Value):
        return value.uniform or not slot.uniform
    return value == slot


def _varying_slot(slot: AnyValue) -> AnyValue:
    if isinstance(slot, TupleValue):
        return TupleValue(tuple(_varying_slot(item) for item in slot.items))
    if isinstance(slot, ArrayValue):
        return slot
    return Value(slot.code, slot.type, False, rank=slot.rank)
