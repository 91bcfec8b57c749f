"""Which variables a statement assigns, which are wanted after it, and which may not be there yet.

A branch taken by some threads of a block only makes two versions of every variable that it
assigns, and these are merged after it; merging is needed for those alone that are read later.
Whether a thread that reads a variable has assigned it is followed where the source leaves it open.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

__all__ = ["Liveness", "assigned_names", "unsure_reads"]

Names = frozenset[str]


def assigned_names(statements: Iterable[ast.AST]) -> Names:
    """Return the names that the statements assign, at any depth."""
    nodes = [node for statement in statements for node in ast.walk(statement)]
    declared = {
        id(node.target) for node in nodes if isinstance(node, ast.AnnAssign) and not node.value
    }
    return frozenset(
        node.id
        for node in nodes
        if isinstance(node, ast.Name)
        and isinstance(node.ctx, ast.Store)
        and id(node) not in declared
    )


def unsure_reads(
    body: Sequence[ast.stmt], parameters: Iterable[str], variables: Names
) -> tuple[ast.Name, ...]:
    """Return the reads of variables that some path through a function reaches unassigned.

    Any branch may be taken, and any loop run zero times.
    """
    found: dict[int, ast.Name] = {}
    _Paths(variables, found).block(body, frozenset(parameters))
    return tuple(found.values())


class Liveness:
    """For every statement of a function, the variables that may be read after it.

    ``after[id(statement)]`` are those wanted once the statement is done; ``head[id(loop)]`` those
    wanted whenever the loop is about to decide whether to go on.
    """

    def __init__(self, function: ast.FunctionDef) -> None:
        self.after: dict[int, Names] = {}
        self.head: dict[int, Names] = {}
        empty: Names = frozenset()
        self._block(function.body, empty, empty, empty)

    def _block(
        self, body: Sequence[ast.stmt], out: Names, on_break: Names, on_next: Names
    ) -> Names:
        for statement in reversed(body):
            self.after[id(statement)] = out
            out = self._before(statement, out, on_break, on_next)
        return out

    def _before(self, node: ast.stmt, out: Names, on_break: Names, on_next: Names) -> Names:
        if isinstance(node, ast.If):
            taken = self._block(node.body, out, on_break, on_next)
            other = self._block(node.orelse, out, on_break, on_next)
            return _read(node.test) | taken | other
        if isinstance(node, (ast.While, ast.For)):
            return self._loop(node, out)
        if isinstance(node, ast.Break):
            return on_break
        if isinstance(node, ast.Continue):
            return on_next
        if isinstance(node, ast.Return):
            return _read(node)
        return (out - assigned_names([node])) | _read(node)

    def _loop(self, node: ast.While | ast.For, out: Names) -> Names:
        if isinstance(node, ast.While):
            each, once, target = _read(node.test), frozenset[str](), frozenset[str]()
        else:
            each, once, target = frozenset[str](), _read(node.iter), assigned_names([node.target])
        head = out | each
        while True:
            again = head | (self._block(node.body, head, out, head) - target)
            if again == head:
                break
            head = again
        self.head[id(node)] = head
        return head | once


@dataclass(frozen=True, slots=True)
class _Paths:
    """Walks the paths through a function, with what is assigned on all that lead to a place.

    That is None where none does. ``out`` gathers what is assigned at the breaks of a loop.
    """

    variables: Names
    found: dict[int, ast.Name]
    out: tuple[list[Names], ...] = ()

    def block(self, body: Sequence[ast.stmt], known: Names | None) -> Names | None:
        for statement in body:
            if known is None:
                return None
            known = self._after(statement, known)
        return known

    def _after(self, node: ast.stmt, known: Names) -> Names | None:
        if isinstance(node, ast.If):
            self._note(node.test, known)
            return _met([self.block(node.body, known), self.block(node.orelse, known)])
        if isinstance(node, (ast.While, ast.For)):
            breaks: list[Names] = []
            inner = _Paths(self.variables, self.found, (*self.out, breaks))
            if isinstance(node, ast.While):
                self._note(node.test, known)
                inner.block(node.body, known)
                endless = isinstance(node.test, ast.Constant) and bool(node.test.value)
                return _met([*breaks, None if endless else known])
            self._note(node.iter, known)
            inner.block(node.body, known | assigned_names([node.target]))
            return known
        self._note(node, known)
        if isinstance(node, ast.Break) and self.out:
            self.out[-1].append(known)
        if isinstance(node, (ast.Break, ast.Continue, ast.Return)):
            return None
        return known | assigned_names([node])

    def _note(self, node: ast.AST, known: Names) -> None:
        for name in _reads(node):
            if name.id in self.variables - known:
                self.found[id(name)] = name


def _met(paths: Iterable[Names | None]) -> Names | None:
    """What is assigned where paths meet; None for one that does not get there."""
    known = [path for path in paths if path is not None]
    return frozenset.intersection(*known) if known else None


def _reads(node: ast.AST) -> Iterator[ast.Name]:
    for item in ast.walk(node):
        if isinstance(item, ast.AugAssign) and isinstance(item.target, ast.Name):
            yield item.target
        elif isinstance(item, ast.Name) and isinstance(item.ctx, ast.Load):
            yield item


def _read(node: ast.AST) -> Names:
    return frozenset(item.id for item in _reads(node))
