"""What the rewriting of a kernel passes around: values as text with a type, and what it makes."""

from __future__ import annotations

import ast
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from . import typing_rules as types
from .events import Space
from .program import UNKNOWN, Program

__all__ = ["AnyValue", "ArrayValue", "Declaration", "Product", "Region", "Specialisation"]
__all__ += ["TupleValue", "Value", "code_of", "flag", "kind_of", "named"]


@dataclass(frozen=True, slots=True)
class Product:
    """What a value that is a product was made of, for contraction.

    ``place`` is the stretch of code it stands in; ``calls`` counts the divisions and square roots
    before it.
    """

    x: str
    y: str
    key: tuple[str, ...]
    place: tuple[str, ...]
    calls: int
    negated: bool = False


@dataclass(frozen=True, slots=True)
class Value:
    """A number in a rewritten kernel: the text that computes it, its type, whether it is uniform.

    ``constant`` is its value where that is known beforehand. ``rank`` orders values by when their
    inputs are ready.
    """

    code: str
    type: str
    uniform: bool
    constant: Any = UNKNOWN
    product: Product | None = None
    rank: int = 0


@dataclass(frozen=True, slots=True)
class ArrayValue:
    """An array in a rewritten kernel: a variable that holds its storage."""

    code: str
    type: str
    ndim: int


@dataclass(frozen=True, slots=True)
class TupleValue:
    """Several values: a shape, or what a device function returns."""

    items: tuple[AnyValue, ...]


AnyValue = Value | ArrayValue | TupleValue


@dataclass(slots=True)
class Region:
    """A stretch of code run by the lanes of one mask, which is held in the variable ``mask``."""

    mask: str


@dataclass(frozen=True, slots=True)
class Declaration:
    """A shared or local array as the source declares it; ``base`` is its offset in bytes."""

    name: str
    space: Space
    type: str
    shape: tuple[int, ...]
    base: int


@dataclass(slots=True)
class Specialisation:
    """A kernel rewritten for given argument types; made by :func:`.frontend.specialise`.

    ``entry`` is called as ``entry(machine, mask, *arguments)``; ``source`` is its text.
    """

    program: Program
    entry: Any = None
    source: str = ""
    declarations: dict[int, Declaration] = field(default_factory=dict)
    notes: dict[str, None] = field(default_factory=dict)
    namespace: dict[str, Any] = field(default_factory=dict)
    devices: dict[Any, Any] = field(default_factory=dict)
    shared_bytes: int = 0
    _constants: dict[Any, str] = field(default_factory=dict)

    def declare(self, node: ast.Call, name: str, space: Space, type_: str, shape: Any) -> int:
        """Return the number of the array declared at a node; the same node is one array."""
        if id(node) not in self.declarations:
            size = types.dtype_of(type_).itemsize
            base = -(-self.shared_bytes // size) * size if space == "shared" else 0
            if space == "shared":
                self.shared_bytes = base + size * int(np.prod(shape))
            self.declarations[id(node)] = Declaration(name, space, type_, shape, base)
        return list(self.declarations).index(id(node))

    def constant(self, value: Any) -> str:
        """Return a name in the namespace for a constant."""
        key = (type(value), repr(value), getattr(value, "dtype", None))
        name = self._constants.setdefault(key, f"constant{len(self._constants)}")
        self.namespace[name] = value
        return name


def code_of(value: AnyValue) -> str:
    """The text of a value of any kind."""
    if isinstance(value, TupleValue):
        return f"({''.join(f'{code_of(item)}, ' for item in value.items)})"
    return value.code


def flag(name: str) -> str:
    """What says, in an environment, whether a lane has assigned the variable of this name."""
    return f"{name}?"


def kind_of(value: AnyValue) -> Any:
    """What the text written for a value depends on."""
    if isinstance(value, TupleValue):
        return tuple(kind_of(item) for item in value.items)
    if isinstance(value, ArrayValue):
        return value.code, value.type, value.ndim
    return value.type, value.uniform


def named(value: AnyValue, name: str, rank: int) -> AnyValue:
    """The same kind of value, found under a name (a tuple's items by their place in it)."""
    if isinstance(value, TupleValue):
        items = (named(item, f"{name}[{place}]", rank) for place, item in enumerate(value.items))
        return TupleValue(tuple(items))
    if isinstance(value, ArrayValue):
        return ArrayValue(name, value.type, value.ndim)
    return Value(name, value.type, value.uniform, rank=rank)
