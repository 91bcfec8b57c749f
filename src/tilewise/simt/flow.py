"""Which variables a statement assigns, and which are still wanted after it.

A branch taken by some threads of a block only makes two versions of every variable that it
assigns, and these are merged after it; merging is needed for those alone that are read later.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Sequence

__all__ = ["Liveness", "assigned_names"]

Names = frozenset[str]


def assigned_names(statements: Iterable[ast.AST]) -> Names:
    """Return the names that the statements assign, at any depth."""
    return frozenset(
        node.id
        for statement in statements
        for node in ast.walk(statement)
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)
    )


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
        if isinstance(node, ast.AugAssign) and isinstance(node.target, ast.Name):
            return out | _read(node.value) | {node.target.id}
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


def _read(node: ast.AST) -> Names:
    return frozenset(
        item.id
        for item in ast.walk(node)
        if isinstance(item, ast.Name) and isinstance(item.ctx, ast.Load)
    )
