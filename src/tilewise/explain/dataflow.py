"""What a kernel's addresses, bounds and branches depend on, read off its source.

The kernel is run once on :class:`~tilewise.explain.values.Value` in place of numbers, every branch
taken and every loop repeated until nothing new is learnt. The result answers two questions: does
anything loaded from memory decide where memory is touched (if not, what is seen of one launch
holds for all data), and how do blocks differ (if only by a shift of their addresses and by
comparisons that come out the same, one block stands for many). Whatever is not understood is taken
to depend on everything, so an answer is never better than the truth.
"""

from __future__ import annotations

import ast
import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from ..simt import typing_rules
from ..simt.arguments import buffers
from ..simt.events import SiteKind
from ..simt.memory import SECTOR_BYTES
from ..simt.program import Function, Program
from .expressions import Array, Expressions, Known, Scope
from .values import NOTHING, STILL, Deps, Value, constant, is_data, join, unknown

__all__ = ["Arithmetic", "Flow", "Guard", "SiteFlow", "analyse"]

Dim = tuple[int, int, int]


@dataclass(slots=True)
class SiteFlow:
    """What one place in the source depends on.

    ``index`` decides which element is touched, ``guard`` whether a thread gets there at all,
    ``repeat`` how often, and ``value`` what is stored there. ``offset`` is the byte offset from
    the array's first element, None at a barrier or branch.
    """

    index: Deps = NOTHING
    guard: Deps = NOTHING
    repeat: Deps = NOTHING
    value: Deps = NOTHING
    offset: Value | None = None
    buffer: tuple[int, int] | None = None
    """Which buffer of global memory it touches; views of one share it."""
    unbounded: bool = False
    """Whether it is left to the execution to show that blocks agree on what is within range."""

    @property
    def deps(self) -> Deps:
        return self.index | self.guard | self.repeat


@dataclass(frozen=True, slots=True)
class Guard:
    """A decision that can differ between blocks: the sign of ``block · blockIdx + rest``.

    With ``exact`` it is not only the sign that matters.
    """

    block: Dim
    low: float
    high: float
    exact: bool = False


@dataclass(frozen=True, slots=True)
class Arithmetic:
    """The floating-point instructions of one statement, and how often it is executed.

    It is executed as often as the access at ``site``, times ``times``; ``site`` is None where
    that cannot be told.
    """

    line: int
    code: str
    fused: int
    single: int
    site: int | None
    times: int


@dataclass(slots=True)
class Flow:
    """Everything :func:`analyse` found.

    ``opaque`` says why blocks cannot stand for one another, None where they can; ``tainted`` are
    the lines where something loaded from memory decides an address, a bound or a branch.
    """

    sites: dict[int, SiteFlow] = field(default_factory=dict)
    guards: set[Guard] = field(default_factory=set)
    arithmetic: list[Arithmetic] = field(default_factory=list)
    opaque: str | None = None
    tainted: dict[int, str] = field(default_factory=dict)
    warp_sync: bool = False


def analyse(program: Program, grid: Dim, block: Dim, arguments: Mapping[str, Any]) -> Flow:
    """Return what the program's sites depend on in a launch with these arguments.

    Parameters
    ----------
    program : Program
    grid, block : (x, y, z)
    arguments : mapping of str to ndarray or number
        By parameter name. Of arrays only shape, strides and dtype are looked at.
    """
    reader = _Reader(program, grid, block, arguments)
    arrays = [a for a in arguments.values() if isinstance(a, np.ndarray)]
    family = SECTOR_BYTES // min((a.dtype.itemsize for a in arrays), default=4)
    scope: Scope = {}
    for name, argument in arguments.items():
        deps = frozenset({f"arg:{name}"})
        if isinstance(argument, np.ndarray):
            code = typing_rules.type_of_dtype(argument.dtype)
            shape, strides = argument.shape, argument.strides
            scope[name] = Array(name, "global", shape, strides, code, len(shape), deps)
        else:
            scope[name] = constant(argument, deps, family)
    reader.call(program.kernel, scope)
    reader.keep_in_step()
    return reader.flow


class _Reader(Expressions):
    """Runs a kernel's statements on partly known values, and fills in a :class:`Flow`."""

    def __init__(
        self, program: Program, grid: Dim, block: Dim, arguments: Mapping[str, Any]
    ) -> None:
        super().__init__(program, grid, block)
        found = buffers(arguments.values())
        self._buffers = {name: found.get(id(value)) for name, value in arguments.items()}
        self.flow = Flow()
        self._recording = True
        self._guard: Deps = NOTHING
        self._repeat: Deps = NOTHING
        self._floats: Counter[tuple[str, str]] = Counter()
        self._returned: list[Known] = []
        self._anchor: tuple[int | None, int] = (None, 1)
        self._unbounded = False
        self._blind = False  # under a condition that blocks may decide in ways not known

    def keep_in_step(self) -> None:
        """Let blocks agree on how far apart two places are that touch a buffer one of them writes.

        Only then do threads of a block meet there in all blocks of a class, if they do in one.
        """
        sites = self.flow.sites
        written = {seen.buffer for i, seen in sites.items() if self.program.sites[i].kind != "load"}
        for one, other in itertools.combinations(sites.values(), 2):
            if one.buffer == other.buffer and one.buffer in written - {None}:
                assert one.offset is not None
                assert other.offset is not None
                self.pin(one.offset - other.offset)

    def touch(self, node: ast.AST, kind: SiteKind, part: Array) -> None:
        offset = part.offset
        if self._blind:
            self._give_up(node, "a choice depends on the block in a way that is not understood")
        if offset.block is None:
            self._give_up(node, "an address depends on the block in a way that is not understood")
        if part.space != "global" and offset.block != STILL:
            offset = self.pin(offset)
        self._at(node, kind, offset, part)
        self._unbounded = False

    def store(self, part: Array, deps: Deps) -> None:
        deps |= part.offset.deps | self._guard | self._repeat
        self.contents[part.name] = self.contents.get(part.name, NOTHING) | deps

    def barrier(self, name: str, node: ast.Call) -> None:
        if name == "syncwarp":
            self.flow.warp_sync = True
        else:
            self._at(node, "barrier", None)

    def bound(self, index: Value, array: Array) -> None:
        # A flat index is seen again in the offset, so its range can be taken from the execution.
        if array.axes == 1 and math.isinf(index.high - index.low):
            self._unbounded = True
        else:
            self.threshold(index)
            self.threshold(index - constant(array.shape[0]))

    def threshold(self, difference: Value) -> None:
        if self._recording and difference.block not in (None, STILL):
            self.flow.guards.add(Guard(difference.block, difference.low, difference.high))

    def pin(self, value: Value) -> Value:
        if value.block in (None, STILL):
            return value
        # Noted even while a loop is being learnt: what is pinned there stays pinned.
        self.flow.guards.add(Guard(value.block, 0, 0, exact=True))
        return replace(value, block=STILL, low=-math.inf, high=math.inf)

    @contextmanager
    def under(self, conditions: Sequence[Value]) -> Iterator[None]:
        guard, blind = self._guard, self._blind
        self._guard = guard.union(*(condition.deps for condition in conditions))
        self._blind |= any(condition.block is None for condition in conditions)
        yield
        self._guard, self._blind = guard, blind

    def count(self, code: str, *, fused: int = 0, single: int = 0) -> None:
        self._floats[code, "fused"] += fused
        self._floats[code, "single"] += single

    def call(self, function: Function, scope: Scope) -> Known:
        caller, returned, floats = self.function, self._returned, self._floats
        self.function, self._returned, self._floats = function, [], Counter()
        self._suite(function.tree.body, scope)
        results, self.function, self._returned = self._returned, caller, returned
        self._floats = floats
        numbers = [r for r in results if isinstance(r, Value)]
        if len(numbers) == len(results) and numbers:
            return self.merge(numbers)
        return results[0] if len(results) == 1 else unknown(frozenset({"unknown"}))

    def _at(
        self, node: ast.AST, kind: SiteKind, offset: Value | None, part: Array | None = None
    ) -> None:
        """Note what a site depends on, here and now."""
        site = self.program.site(node, kind)
        if site is None or not self._recording:
            return
        index = NOTHING if offset is None else offset.deps
        seen = self.flow.sites.setdefault(site.id, SiteFlow(offset=offset))
        if offset is not None and seen.offset is not None and offset != seen.offset:
            seen.offset = join([seen.offset, offset])
            if seen.offset.block is None:
                self._give_up(node, "one place touches memory in ways that differ between blocks")
        seen.index |= index
        seen.guard |= self._guard
        seen.repeat |= self._repeat
        seen.unbounded |= self._unbounded
        if part is not None and part.space == "global":
            seen.buffer = self._buffers[part.name]
        if is_data(seen.deps):
            self.flow.tainted.setdefault(site.line, site.text)

    def _give_up(self, node: ast.AST, why: str) -> None:
        if self._recording and self.flow.opaque is None:
            self.flow.opaque = f"line {getattr(node, 'lineno', '?')}: {why}"

    # Statements.

    def _suite(self, body: Sequence[ast.stmt], scope: Scope) -> None:
        """Run statements; each stretch without a way out is executed as one."""
        outer = self._anchor
        start = 0
        for position, statement in enumerate(body):
            if position == start:
                end = next((i + 1 for i in range(start, len(body)) if _leaves(body[i])), len(body))
                own = self._first_site(body[start:end])
                self._anchor = outer if own is None and start == 0 else (own, 1)
                start = end
            self._statement(statement, scope)
        self._anchor = outer

    def _first_site(self, body: Sequence[ast.stmt]) -> int | None:
        """A site that is executed once whenever these statements are."""
        for statement in body:
            if isinstance(statement, (ast.Assign, ast.AugAssign, ast.AnnAssign, ast.Expr)):
                for node in _always(statement):
                    site = self.program.site(node, "load") or self.program.site(node, "store")
                    if site is not None:
                        return site.id
        return None

    def _statement(self, node: ast.stmt, scope: Scope) -> None:
        if isinstance(node, ast.If):
            self._if(node, scope)
        elif isinstance(node, ast.For):
            self._for(node, scope)
        elif isinstance(node, ast.While):
            self._while(node, scope)
        else:
            self._floats.clear()
            if isinstance(node, ast.Assign):
                value = self.evaluate(node.value, scope)
                for target in node.targets:
                    self._assign(target, value, scope)
            elif isinstance(node, ast.AugAssign):
                self._augmented(node, scope)
            elif isinstance(node, ast.AnnAssign) and node.value is not None:
                self._assign(node.target, self.evaluate(node.value, scope), scope)
            elif isinstance(node, ast.Expr):
                self.evaluate(node.value, scope)
            elif isinstance(node, ast.Return) and node.value is not None:
                self._returned.append(self._controlled(self.evaluate(node.value, scope)))
            self._note_arithmetic(node)

    def _note_arithmetic(self, node: ast.stmt) -> None:
        if self._recording:
            for code in sorted({code for code, _ in self._floats}):
                fused, single = (self._floats[code, kind] for kind in ("fused", "single"))
                if fused or single:
                    self.flow.arithmetic.append(
                        Arithmetic(node.lineno, code, fused, single, *self._anchor)
                    )

    def _assign(self, target: ast.expr, value: Known, scope: Scope) -> None:
        if isinstance(target, ast.Name):
            scope[target.id] = self._controlled(value)
        elif isinstance(target, (ast.Tuple, ast.List)):
            whole = isinstance(value, tuple) and len(value) == len(target.elts)
            for position, item in enumerate(target.elts):
                part = value[position] if whole else unknown(_deps(value))  # type: ignore[index]
                self._assign(item, part, scope)
        elif isinstance(target, ast.Subscript):
            array = self.evaluate(target.value, scope)
            if isinstance(array, Array):
                part = self.element(array, target.slice, scope)
                self.touch(target, "store", part)
                self.store(part, _deps(value))
                site = self.program.site(target, "store")
                if site is not None and site.id in self.flow.sites:
                    self.flow.sites[site.id].value |= _deps(value)

    def _augmented(self, node: ast.AugAssign, scope: Scope) -> None:
        read = node.target
        if isinstance(read, ast.Name):
            read = ast.copy_location(ast.Name(read.id, ast.Load()), read)
        self._assign(node.target, self.operate(node.op, read, node.value, scope), scope)

    def _controlled(self, value: Known) -> Known:
        """A value that is only set where and as often as control comes by."""
        if isinstance(value, Value):
            return value.with_deps(self._guard)
        if isinstance(value, tuple):
            return tuple(self._controlled(item) for item in value)
        return value

    def _decide(self, node: ast.stmt, test: ast.expr, scope: Scope) -> Value:
        """Evaluate the condition of a statement, on which blocks and data now bear."""
        condition = self.truth(self.number(test, scope))
        if condition.block is None:
            self._give_up(node, "a branch depends on the block in a way that is not understood")
        if self._recording and is_data(condition.deps):
            self.flow.tainted.setdefault(node.lineno, self.function.text(test))
        return condition

    def _if(self, node: ast.If, scope: Scope) -> None:
        condition = self._decide(node, node.test, scope)
        if condition.is_constant and not condition.deps:
            self._suite(node.body if condition.number else node.orelse, scope)
            return
        guard, anchor = self._guard, self._anchor
        self._guard, self._anchor = guard | condition.deps, (None, 1)
        taken, other = dict(scope), dict(scope)
        self._suite(node.body, taken)
        self._suite(node.orelse, other)
        # Beyond a way out, only those are left who did not take it.
        self._guard = guard | condition.deps if _leaves(node) else guard
        self._anchor = anchor
        self._merge(scope, taken, other)

    def _merge(self, scope: Scope, *paths: Scope) -> None:
        unsure = {read.id for read in self.function.unsure}
        for name in dict.fromkeys(name for path in paths for name in path):
            values = [path[name] for path in paths if name in path]
            if len(values) < len(paths) and name in unsure:
                values.append(constant(0))  # what is read unassigned
            first = values[0]
            if all(value == first for value in values):
                scope[name] = first
            elif all(isinstance(value, Value) for value in values):
                scope[name] = self.merge(values)  # type: ignore[arg-type]
            else:
                scope[name] = unknown(NOTHING.union(*map(_deps, values)) | {"unknown"})

    def _for(self, node: ast.For, scope: Scope) -> None:
        bounds: list[Value] = []
        if isinstance(node.iter, ast.Call) and self.function.resolve(node.iter.func) is range:
            bounds = [self.number(argument, scope) for argument in node.iter.args]
        if not bounds:
            self._give_up(node, "a loop that is not over a range")
            bounds = [unknown(frozenset({"unknown"}))]
        start = bounds[0] if len(bounds) > 1 else constant(0)
        stop = bounds[min(1, len(bounds) - 1)]
        stride = bounds[2] if len(bounds) > 2 else constant(1)
        span = self.truth(stop - start)
        deps = start.deps | stop.deps | stride.deps
        if span.block is None:
            self._give_up(node, "a loop's bound depends on the block in a way not understood")
        if self._recording and is_data(deps):
            self.flow.tainted.setdefault(node.lineno, self.function.text(node.iter))
        variable = _loop_variable(start, stop, stride, deps)
        times = None
        fixed = start.is_constant and stop.is_constant and stride.is_constant
        if fixed and stride.number and not _leaves(node):
            times = len(range(start.number, stop.number, stride.number))
        site, already = self._anchor
        anchor = (None, 1) if times is None else (site, already * times)
        self._loop(
            node, scope, deps, anchor, lambda inner: self._assign(node.target, variable, inner)
        )

    def _while(self, node: ast.While, scope: Scope) -> None:
        condition = self._decide(node, node.test, dict(scope))
        self._loop(
            node,
            scope,
            condition.deps,
            (None, 1),
            lambda inner: self._hold(self._decide(node, node.test, inner)),
        )

    def _hold(self, condition: Value) -> None:
        """Within a loop, control depends on its condition as it turns out to be."""
        self._govern(condition.deps)

    def _govern(self, deps: Deps) -> None:
        if "thread" in deps or is_data(deps):
            self._guard |= deps
        else:
            self._repeat |= deps

    def _loop(
        self,
        node: ast.For | ast.While,
        scope: Scope,
        deps: Deps,
        anchor: tuple[int | None, int],
        begin: Callable[[Scope], None],
    ) -> None:
        """Repeat a loop's body until nothing new is learnt, then once for the record."""
        guard, repeat, outer = self._guard, self._repeat, self._anchor
        recording, self._recording = self._recording, False
        self._govern(deps)
        self._anchor = anchor
        head, rounds = dict(scope), 0
        while True:
            inner, known = dict(head), dict(self.contents)
            begin(inner)
            self._suite(node.body, inner)
            again: Scope = dict(scope)
            self._merge(again, head, inner)
            again = {
                name: self._carried(head.get(name), value, deps, rounds)
                for name, value in again.items()
            }
            if again == head and known == self.contents:
                break
            head, rounds = again, rounds + 1
        self._recording = recording
        if recording:
            inner = dict(head)
            begin(inner)
            self._suite(node.body, inner)
        self._repeat, self._anchor = repeat, outer
        leaves = any(isinstance(n, ast.Return) for n in ast.walk(node))
        self._guard = self._guard if leaves else guard
        self._suite(node.orelse, head)
        scope.update(head)

    def _carried(self, before: Known | None, after: Known, deps: Deps, rounds: int) -> Known:
        """What a variable is at the head of a loop that may have changed it."""
        if before is None or before == after or not isinstance(after, Value):
            return after
        after = after.with_deps(deps)
        if isinstance(before, Value) and rounds > 1:
            low = after.low if after.low == before.low else -math.inf
            high = after.high if after.high == before.high else math.inf
            after = replace(after, low=low, high=high, step=1)
        return after


def _loop_variable(start: Value, stop: Value, stride: Value, deps: Deps) -> Value:
    if not stride.is_constant or stride.number == 0:
        return unknown(deps, "i8")
    low, high = start.low, stop.high - 1
    if stride.number < 0:
        low, high = stop.low + 1, start.high
    fixed = start.step == stop.step == stride.step == 0
    # With bounds that no size changes, every value that the variable takes is seen in a launch.
    step = 0 if fixed else math.gcd(start.step, stride.number)
    return Value(start.block, low, max(low, high), step, deps, "i8")


def _leaves(statement: ast.stmt) -> bool:
    """Whether a statement contains a way out of those that follow it."""
    return any(isinstance(n, (ast.Return, ast.Break, ast.Continue)) for n in ast.walk(statement))


def _always(node: ast.AST) -> Iterator[ast.AST]:
    """The nodes of a statement that are evaluated whenever it is."""
    yield node
    children = list(ast.iter_child_nodes(node))
    if isinstance(node, ast.IfExp):
        children = [node.test]
    elif isinstance(node, ast.BoolOp):
        children = children[:2]
    for child in children:
        yield from _always(child)


def _deps(value: Known) -> Deps:
    if isinstance(value, Value):
        return value.deps
    if isinstance(value, tuple):
        return NOTHING.union(*map(_deps, value))
    return value.deps
