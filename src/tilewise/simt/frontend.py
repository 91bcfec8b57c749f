"""From a kernel's source to masked NumPy code: the way in, functions and what they return.

A kernel is rewritten once for each combination of argument types. All lanes of the blocks that run
together walk through one text; where they would part, both ways are walked, each under a mask:

* Control that is the same for all lanes (an ``if`` or a loop on sizes) stays Python control flow.
* An ``if`` on a varying condition runs both branches under masks. A variable that a branch assigns
  is a new name in there, and is merged after it, if it is still wanted: ``x3 = pick(m1, x1, x3)``.
* A loop that lanes leave at different times keeps the mask of those still in it; whatever a lane
  has assigned when it leaves, or at the end of an iteration, is merged into the loop's variables.

Types are found on the way. A loop is read again until the types of its variables, at its head, are
those that its end gives back; a function until nothing new is learnt about its products.

The pieces, each standing on the one before: :mod:`.expressions`, :mod:`.calls`,
:mod:`.statements` (branches, merging), :mod:`.loops`, and functions here.
"""

from __future__ import annotations

import ast
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from .lanes import NAMESPACE
from .loops import Loops, NeedsMask
from .program import Function, Program
from .statements import End
from .values import (
    AnyValue,
    ArrayValue,
    Specialisation,
    TupleValue,
    Value,
    code_of,
    flag,
    kind_of,
    named,
)

__all__ = ["specialise"]


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
        written = _write(spec, program.kernel, arguments, "kernel")
        exec(compile(spec.source, f"<simt {program.name}>", "exec"), spec.namespace)
        spec.entry = spec.namespace[written.name]
        program.specialisations[arguments] = spec
    return spec


@dataclass(frozen=True, slots=True)
class _Written:
    """A function that has been rewritten: what its text is called, and what it returns."""

    name: str
    returned: AnyValue | None


def _write(
    spec: Specialisation, function: Function, arguments: Sequence[AnyValue], name: str
) -> _Written:
    """Rewrite one function; its text is appended to the specialisation's source."""
    reading = _Reader(spec, function, name)
    for _ in range(12):
        earlier, reading = reading, _Reader(spec, function, name)
        reading.learn_from(earlier)
        reading.read(arguments)
        if reading.learnt() == earlier.learnt():
            break
    spec.notes.update(reading.notes)
    parameters = ", ".join(("M", "mask", *map(_parameter, function.parameters)))
    prologue = [f"    {local} = {code}" for local, code in sorted(reading.prologue.items())]
    text = [f"def {name}({parameters}):", *prologue, *reading.lines, "    return None"]
    spec.source += "\n".join(text) + "\n\n"
    return _Written(name, reading.returned)


class _Reader(Loops):
    """Writes one function; one object a reading."""

    def __init__(self, spec: Specialisation, function: Function, name: str) -> None:
        super().__init__(spec, function)
        self.name = name
        self.top = self.region
        self.divergent_return = False
        self.known_divergent_return = False
        self.seen_returns: list[AnyValue] = []
        self.bare_return = False
        self.returned: AnyValue | None = None

    # -- a function

    def learn_from(self, earlier: _Reader) -> None:
        self.known_blocked = frozenset(earlier.blocked)
        self.known_uses = earlier.uses
        self.known_divergent_return = earlier.divergent_return
        self.masked = set(earlier.masked)
        self.returned = earlier.returned

    def learnt(self) -> Any:
        returned = None if self.returned is None else kind_of(self.returned)
        return self.blocked, self.uses, self.divergent_return, returned, self.masked

    def read(self, arguments: Sequence[AnyValue]) -> None:
        tree = self.function.tree
        is_kernel = self.name == "kernel"
        self.env = {}
        for name, value in zip(self.function.parameters, arguments, strict=True):
            self.env[name] = named(value, _parameter(name), 0)
        for name in sorted(self.unsure):
            self.env[flag(name)] = self.number(False, tree)
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
        key = (id(function), tuple(kind_of(named(value, "", 0)) for value in values))
        if key not in self.spec.devices:
            name = f"device_{len(self.spec.devices)}_{function.name}"
            self.spec.devices[key] = _write(self.spec, function, values, name)
        device = self.spec.devices[key]
        codes = ", ".join(("M", self.region.mask, *map(code_of, values)))
        call = f"{device.name}({codes})"
        if device.returned is None:
            self.emit(call)
            return None
        result = self.fresh("r")
        self.emit(f"{result} = {call}")
        return named(device.returned, result, self.count << 8)

    def _argument(self, node: ast.expr) -> AnyValue:
        value = self.any(node)
        if not isinstance(value, Value):
            return value
        if value.product is not None:
            self.note(
                node, "a product that is handed over is rounded; a compiler may fuse it later"
            )
        return self.use(value)

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
                raise NeedsMask(loop)
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
            slot = named(self.returned, "result", 0)
            with self.written() as lines:
                self._assign_result(slot, value)
            self.lines.extend(line.removeprefix("    ") for line in lines)
            self.emit("return result")

    def _return_slot(self, value: AnyValue, mask: str) -> None:
        """Merge what the lanes of a mask return into ``result``."""
        assert self.returned is not None
        slot = named(self.returned, "result", 0)
        if isinstance(slot, TupleValue):
            parts = [self.fresh("part") for _ in slot.items]
            self.emit(f"{', '.join(parts)}, = result")
            inner = TupleValue(
                tuple(named(i, p, 0) for i, p in zip(slot.items, parts, strict=True))
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
            self.emit(f"result = ({''.join(f'{code_of(item)}, ' for item in inner.items)})")
        else:
            self._assign_slot(slot, value)


def _is_none(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and node.value is None


def _parameter(name: str) -> str:
    """What a parameter is called in the text; no other name there ends like this."""
    return f"{name}_p"
