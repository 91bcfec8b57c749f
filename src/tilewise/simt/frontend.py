"""From a kernel's source to masked NumPy code: statements, control flow, functions.

A kernel is rewritten once for each combination of argument types. All lanes of the blocks that run
together walk through one text; where they would part, both ways are walked, each under a mask:

* Control that is the same for all lanes (an ``if`` or a loop on sizes) stays Python control flow.
* An ``if`` on a varying condition runs both branches under masks. A variable that a branch assigns
  is a new name in there, and is merged after it, if it is still wanted: ``x3 = pick(m1, x1, x3)``.
* A loop that lanes leave at different times keeps the mask of those still in it; whatever a lane
  has assigned when it leaves, or at the end of an iteration, is merged into the loop's variables.

Types are found on the way. A loop is read again until the types of its variables, at its head, are
those that its end gives back; a function until nothing new is learnt about its products.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import reduce
from typing import Any, Literal

from . import typing_rules as types
from .calls import Calls
from .expressions import english
from .flow import Liveness, assigned_names
from .lanes import NAMESPACE
from .program import UNKNOWN, Function, Program
from .values import AnyValue, ArrayValue, Region, Specialisation, TupleValue, Value

__all__ = ["specialise"]

#: How a block of statements ends: on to what follows; by a jump of Python's own, so that nothing
#: written after it runs; or with every lane of its mask gone elsewhere.
End = Literal["falls", "jumps", "empties"]


def specialise(program: Program, arguments: tuple[Value | ArrayValue, ...]) -> Specialisation:
    """Rewrite a kernel for arguments of these types, or return the rewriting made before.

    Raises
    ------
    KernelError
        For a construct that is not part of the dialect, naming file, line and what to do.
    """
    spec: Specialisation | None = program.specialisations.get(arguments)
    if spec is None:
        spec = Specialisation(program)
        spec.namespace.update(NAMESPACE)
        written = _Written(spec, program.kernel, arguments, "kernel")
        exec(compile(spec.source, f"<simt {program.name}>", "exec"), spec.namespace)
        spec.entry = spec.namespace[written.name]
        program.specialisations[arguments] = spec
    return spec


class _Written:
    """One function, rewritten; its text is appended to the specialisation's source."""

    def __init__(
        self, spec: Specialisation, function: Function, arguments: Sequence[AnyValue], name: str
    ) -> None:
        self.name = name
        returned: AnyValue | None = None
        reading = Statements(spec, function, name)
        for _ in range(12):
            again = Statements(spec, function, name)
            again.learn_from(reading)
            again.read(arguments)
            settled = again.learnt() == reading.learnt()
            reading = again
            if settled:
                break
        returned = reading.returned
        spec.notes.update(reading.notes)
        parameters = ", ".join(("M", "mask", *map(_parameter, function.parameters)))
        prologue = [f"    {local} = {code}" for local, code in sorted(reading.prologue.items())]
        text = [f"def {name}({parameters}):", *prologue, *reading.lines, "    return None"]
        spec.source += "\n".join(text) + "\n\n"
        self.returned = returned


@dataclass(slots=True)
class _Loop:
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
    left: bool = False
    returned: bool = False


class _NeedsMask(Exception):
    """A loop, written as Python's own, turned out to be left by some lanes only."""

    def __init__(self, loop: _Loop) -> None:
        self.loop = loop


class Statements(Calls):
    """Writes the statements of one function; one object a reading."""

    def __init__(self, spec: Specialisation, function: Function, name: str) -> None:
        super().__init__(spec, function)
        self.name = name
        self.live = Liveness(function.tree)
        self.loops: list[_Loop] = []
        self.masked: set[int] = set()
        self.top = self.region
        self.jumped = False  # whether lanes have left the current block early
        self.divergent_return = False
        self.known_divergent_return = False
        self.seen_returns: list[AnyValue] = []
        self.bare_return = False
        self.returned: AnyValue | None = None

    # -- a function

    def learn_from(self, earlier: Statements) -> None:
        self.known_blocked = frozenset(earlier.blocked)
        self.known_uses = earlier.uses
        self.known_divergent_return = earlier.divergent_return
        self.masked = set(earlier.masked)
        self.returned = earlier.returned

    def learnt(self) -> Any:
        returned = None if self.returned is None else _kind(self.returned)
        return self.blocked, self.uses, self.divergent_return, returned, self.masked

    def read(self, arguments: Sequence[AnyValue]) -> None:
        tree = self.function.tree
        is_kernel = self.name == "kernel"
        self.env = {}
        for name, value in zip(self.function.parameters, arguments, strict=True):
            self.env[name] = _named(value, _parameter(name), 0)
        with self.written() as body:
            if self.known_divergent_return:
                self.emit("gone = EMPTY")
                if not is_kernel and self.returned is not None:
                    self.emit(f"result = {self._initial(self.returned)}")
            end = self.block(tree.body)
            if not is_kernel and self.seen_returns:
                if self.bare_return or end == "falls":
                    raise self.error(
                        tree, f"{self.function.name} returns a value on some paths only"
                    )
                if end == "empties":
                    self.emit("return result")
        self.lines = body
        if is_kernel and self.seen_returns:
            raise self.error(tree, "a kernel returns nothing: write results to an array")
        if self.seen_returns:
            uniform = not self.divergent_return
            self.returned = self._join(self.seen_returns, uniform, "result")

    def _device_function(self, node: ast.Call, called: Any) -> AnyValue | None:
        function = self.spec.program.function(called)
        assert function is not None
        if len(node.args) != len(function.parameters):
            raise self.error(
                node, f"{function.name} takes {len(function.parameters)} arguments, "
                f"got {len(node.args)}"
            )  # fmt: skip
        values = [self._argument(argument) for argument in node.args]
        key = (id(function), tuple(_kind(_named(value, "", 0)) for value in values))
        if key not in self.spec.devices:
            self.spec.devices[key] = None  # being written
            name = f"device_{len(self.spec.devices)}_{function.name}"
            self.spec.devices[key] = _Written(self.spec, function, values, name)
        device = self.spec.devices[key]
        if device is None:
            raise self.error(node, f"{function.name} calls itself; recursion is not supported")
        codes = ", ".join(("M", self.region.mask, *map(_code, values)))
        call = f"{device.name}({codes})"
        if device.returned is None:
            self.emit(call)
            return None
        result = self.fresh("r")
        self.emit(f"{result} = {call}")
        return _named(device.returned, result, self.count << 8)

    def _argument(self, node: ast.expr) -> AnyValue:
        value = self.any(node)
        return self.use(value) if isinstance(value, Value) else value

    # -- blocks

    def block(self, body: Iterable[ast.stmt]) -> End:
        """Write statements up to the first that none of the lanes get beyond."""
        for statement in body:
            method = getattr(self, f"_{type(statement).__name__}_statement", None)
            if method is None:
                raise self.error(statement, f"{english(statement)} is not part of the dialect")
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

    # -- merging variables

    def _join(self, values: Sequence[AnyValue | None], uniform: bool, hint: str) -> AnyValue:
        """Return the slot that can hold any of the values; a Value's text is a new name."""
        known = [value for value in values if value is not None]
        first = known[0]
        if isinstance(first, ArrayValue):
            if all(value == first for value in known):
                return first
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
        raise self.error(
            self.function.tree,
            f"{hint} is an array or tuple on one path and something else on another",
        )

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
        return self.any(node)

    def _assign(self, target: ast.expr, value: AnyValue) -> None:
        if isinstance(target, ast.Name):
            self.env[target.id] = self._copy(value, target.id)
        elif isinstance(target, ast.Tuple):
            if not isinstance(value, TupleValue) or len(value.items) != len(target.elts):
                raise self.error(target, f"cannot unpack into {len(target.elts)} names")
            # Copied first: in a, b = b, a the right side is complete before the left is assigned.
            copies = [self._copy(item, "t") for item in value.items]
            for inner, copy in zip(target.elts, copies, strict=True):
                self._assign(inner, copy)
        elif isinstance(target, ast.Subscript):
            array, indices = self.subscript(target)
            if not isinstance(array, ArrayValue) or not isinstance(value, Value):
                raise self.error(target, "only an element of an array can be assigned a number")
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
            old = self.value(ast.copy_location(ast.Name(node.target.id, ast.Load()), node.target))
            new = self.binary(node, operator, old, self.value(node.value))
            self.env[node.target.id] = self._copy(new, node.target.id)
        elif isinstance(node.target, ast.Subscript):
            array, indices = self.subscript(node.target)
            if not isinstance(array, ArrayValue):
                raise self.error(node, "only an element of an array can be assigned a number")
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
                            where = mask if name in defined else None
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
        for name in sorted(wanted):
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

    # -- loops

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
        names = sorted(assigned_names([node]) & wanted)
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
            loop = _Loop(node, self.region, slots, masked)
            self.env.update(slots)
            self.loops.append(loop)
            depth, outer_lines, region = len(self.loops), self.lines, self.region
            try:
                with self.written() as lines:
                    write(loop)
            except _NeedsMask as needed:
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
            if {n: _kind(v) for n, v in after.items()} == {n: _kind(v) for n, v in slots.items()}:
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

    def _end_of_pass(self, loop: _Loop, mask: str | None) -> None:
        """Write what a lane keeps of the loop's variables when it ends an iteration, or leaves."""
        for name in assigned_names([loop.node]):
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

    def _while(self, node: ast.While, loop: _Loop) -> None:
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
                raise _NeedsMask(loop)
            else:
                self.emit(f"{loop.mask} = both({loop.mask}, {condition.code})")
            self._body(node, loop)
        self.lines.extend(lines)

    def _for(self, node: ast.For, loop: _Loop, kind: str, bounds: Sequence[Value]) -> None:
        assert isinstance(node.target, ast.Name)
        start, _, step = bounds
        uniform = all(bound.uniform for bound in bounds)
        if not uniform and not loop.masked:
            raise _NeedsMask(loop)
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
                self.emit(f"{counter} = {start.code} + {turn} * {step.code}")
                if start.uniform and step.uniform:
                    self.env[node.target.id] = Value(counter, kind, True, rank=self.count << 8)
                else:
                    self.env[node.target.id] = Value(counter, kind, False, rank=self.count << 8)
            else:
                self.env[node.target.id] = Value(counter, kind, True, rank=self.count << 8)
            self._body(node, loop)
        self.lines.extend(lines)

    def _body(self, node: ast.For | ast.While, loop: _Loop) -> None:
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
            raise _NeedsMask(loop)
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

    def _Return_statement(self, node: ast.Return) -> End:
        value = None
        if node.value is not None and not _is_none(node.value):
            value = self._argument(node.value)
            if isinstance(value, ArrayValue):
                raise self.error(node, "a device function cannot return an array")
            self.seen_returns.append(value)
        else:
            self.bare_return = True
        if self.region is self.top:
            self._return_together(value)
            return "jumps"
        for loop in self.loops:
            if not loop.masked:
                raise _NeedsMask(loop)
        self.divergent_return = True
        mask = self.region.mask
        if self.name == "kernel":
            self.emit(f"M.leave({mask})")
        elif self.returned is not None and value is not None:
            self._return_slot(value, mask)
        self.emit(f"gone = either(gone, {mask})")
        for loop in self.loops:
            self.emit(f"{loop.mask} = but_not({loop.mask}, {mask})")
            loop.returned = True
        return self._emptied()

    def _return_together(self, value: AnyValue | None) -> None:
        if value is None:
            self.emit("return None")
        elif self.returned is None:
            self.emit("return None  # the type is not known before the next reading")
        elif self.known_divergent_return:
            self._return_slot(value, self.region.mask)
            self.emit("return result")
        else:
            slot = _named(self.returned, "result", 0)
            with self.written() as lines:
                self._assign_result(slot, value)
            self.lines.extend(line.removeprefix("    ") for line in lines)
            self.emit("return result")

    def _return_slot(self, value: AnyValue, mask: str) -> None:
        """Merge what the lanes of a mask return into ``result``."""
        assert self.returned is not None
        slot = _named(self.returned, "result", 0)
        if isinstance(slot, TupleValue):
            parts = [self.fresh("part") for _ in slot.items]
            self.emit(f"{', '.join(parts)}, = result")
            inner = TupleValue(
                tuple(_named(i, p, 0) for i, p in zip(slot.items, parts, strict=True))
            )
            self._assign_slot(inner, value, mask)
            self.emit(f"result = ({', '.join(parts)},)")
        else:
            self._assign_slot(slot, value, mask)

    def _assign_result(self, slot: AnyValue, value: AnyValue) -> None:
        if isinstance(slot, TupleValue):
            inner = self._join([slot], True, "part")
            self._assign_slot(inner, value)
            assert isinstance(inner, TupleValue)
            self.emit(f"result = ({''.join(f'{_code(item)}, ' for item in inner.items)})")
        else:
            self._assign_slot(slot, value)


def _copied(uses: dict[Any, set[Any]]) -> dict[Any, set[Any]]:
    return {key: set(value) for key, value in uses.items()}


def _is_literal(value: Value) -> bool:
    return value.constant is not UNKNOWN


def _is_none(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and node.value is None


def _kind(value: AnyValue) -> Any:
    """What the text written for a value depends on."""
    if isinstance(value, TupleValue):
        return tuple(_kind(item) for item in value.items)
    if isinstance(value, ArrayValue):
        return value.code, value.type, value.ndim
    return value.type, value.uniform


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


def _parameter(name: str) -> str:
    """What a parameter is called in the text; no other name there ends like this."""
    return f"{name}_p"


def _named(value: AnyValue, name: str, rank: int) -> AnyValue:
    """The same kind of value, found under a name (a tuple's items by their place in it)."""
    if isinstance(value, TupleValue):
        items = (_named(item, f"{name}[{place}]", rank) for place, item in enumerate(value.items))
        return TupleValue(tuple(items))
    if isinstance(value, ArrayValue):
        return ArrayValue(name, value.type, value.ndim)
    return Value(name, value.type, value.uniform, rank=rank)


def _code(value: AnyValue) -> str:
    if isinstance(value, TupleValue):
        return f"({''.join(f'{_code(item)}, ' for item in value.items)})"
    return value.code
