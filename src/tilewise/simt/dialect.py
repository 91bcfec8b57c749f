"""The words of the dialect: a stand-in for numba's ``cuda``, and how a kernel's names are resolved.

``from tilewise.simt import cuda`` gives kernel sources every name they need without numba. The
members only mean something inside a kernel; used anywhere else they say so. A kernel that imports
numba's own ``cuda`` is understood as well: its members are recognised by identity, in whatever
numba the kernel's author has imported.
"""

from __future__ import annotations

import ast
import inspect
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NoReturn, overload

import numpy as np

from ..errors import KernelError
from . import typing_rules

if TYPE_CHECKING:
    from .machine import Kernel

__all__ = ["INTRINSICS", "Intrinsic", "cuda", "element_type", "english", "intrinsic_of", "refusal"]

_VECTORS = ("threadIdx", "blockIdx", "blockDim", "gridDim")
_ATOMICS = (
    *("add", "sub", "max", "min", "nanmax", "nanmin", "and_", "or_", "xor"),
    *("inc", "dec", "exch", "cas", "compare_and_swap"),
)

#: Every name under ``cuda`` that a kernel may use, dotted.
INTRINSICS: tuple[str, ...] = (
    *_VECTORS,
    *("laneid", "warpsize", "grid", "gridsize"),
    *("shared.array", "local.array"),
    *(f"atomic.{name}" for name in _ATOMICS),
    *("syncthreads", "syncthreads_count", "syncthreads_and", "syncthreads_or", "syncwarp"),
    *("threadfence", "threadfence_block", "threadfence_system"),
    *("shfl_sync", "shfl_up_sync", "shfl_down_sync", "shfl_xor_sync"),
    *("all_sync", "any_sync", "eq_sync", "ballot_sync", "activemask", "lanemask_lt"),
    *("popc", "brev", "clz", "ffs", "fma", "cbrt", "selp"),
)


class Intrinsic:
    """One name of the dialect, such as ``cuda.threadIdx``: it has a meaning in a kernel only."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __repr__(self) -> str:
        return f"<cuda.{self._name} of tilewise.simt>"

    def __call__(self, *_: Any, **__: Any) -> NoReturn:
        self._refuse()

    def __getattr__(self, attribute: str) -> NoReturn:
        if attribute in ("x", "y", "z"):
            self._refuse()
        raise AttributeError(f"cuda.{self._name} has no attribute {attribute}")

    def _refuse(self) -> NoReturn:
        raise KernelError(
            f"cuda.{self._name} has a meaning only inside a kernel; launch the function that uses "
            "it, as kernel[grid, block](...) or with tilewise.simt.launch"
        )


class _Namespace:
    """``cuda.shared``, ``cuda.local``, ``cuda.atomic``, and ``cuda`` itself."""

    def __init__(self, prefix: str = "") -> None:
        self._prefix = prefix
        for name in INTRINSICS:
            member = name.removeprefix(prefix)
            if name.startswith(prefix) and "." not in member:
                setattr(self, member, Intrinsic(name))

    def __repr__(self) -> str:
        return f"<{f'cuda.{self._prefix}'.rstrip('.')} of tilewise.simt>"

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"cuda.{self._prefix}{name} is not part of tilewise.simt's dialect")


class _Cuda(_Namespace):
    """The stand-in for the module ``numba.cuda``."""

    def __init__(self) -> None:
        super().__init__()
        self.shared = _Namespace("shared.")
        self.local = _Namespace("local.")
        self.atomic = _Namespace("atomic.")

    @overload
    def jit(self, function: Callable[..., Any], /) -> Kernel: ...

    @overload
    def jit(self, signature: Any = None, /, **options: Any) -> Callable[..., Any]: ...

    def jit(self, function: Any = None, /, **options: Any) -> Any:
        """Make ``function`` a kernel that is launched as ``kernel[grid, block](*args)``.

        Options of numba's decorator are accepted and ignored, but for ``device=True``, which gives
        the function back as it is.
        """
        if not inspect.isfunction(function):  # called with options or a signature
            return lambda decorated: self.jit(decorated, **options)
        if options.get("device"):
            return function
        from .machine import Kernel

        return Kernel(function)


cuda = _Cuda()


def intrinsic_of(value: Any) -> str | None:
    """Return the dotted name under ``cuda`` of a value that a kernel's name refers to.

    "" stands for the module ``cuda``, a name such as "shared" for a namespace; None for a value
    that is no word of the dialect.
    """
    if isinstance(value, Intrinsic):
        return value._name
    if isinstance(value, _Namespace):
        return str(value._prefix).rstrip(".")
    numba_cuda = sys.modules.get("numba.cuda")
    if numba_cuda is None:
        return None
    if value is numba_cuda:
        return ""
    for name in (*INTRINSICS, "shared", "local", "atomic"):
        found: Any = numba_cuda
        for part in name.split("."):
            found = getattr(found, part, None)
        if found is value and not isinstance(value, (int, float)):
            return name
    return None


def element_type(value: Any) -> str | None:
    """Return the type named by ``value``: a NumPy or numba scalar type, a dtype, or its name."""
    name = getattr(value, "name", None)
    if type(value).__module__.startswith("numba") and isinstance(name, str):
        value = {"boolean": "bool"}.get(name, name)
    if not isinstance(value, (str, type, np.dtype)):
        return None
    try:
        return typing_rules.type_of_dtype(np.dtype(value))
    except TypeError:
        return None


def english(node: ast.AST) -> str:
    """Return what a construct is called, for a message that refuses it."""
    words = {
        "Call": "this call", "Lambda": "a lambda", "ListComp": "a comprehension",
        "JoinedStr": "a formatted string", "Dict": "a dictionary", "List": "a list",
        "Set": "a set", "NamedExpr": "an assignment inside an expression", "Slice": "a slice",
        "Starred": "a starred expression", "GeneratorExp": "a generator", "Await": "await",
        "Yield": "yield", "Try": "try", "With": "with", "Raise": "raise", "Assert": "assert",
        "Import": "import", "ImportFrom": "import", "FunctionDef": "a nested function",
        "ClassDef": "a class", "Delete": "del", "Global": "global", "Nonlocal": "nonlocal",
        "Match": "match", "AsyncFor": "async for", "AsyncWith": "async with",
    }  # fmt: skip
    return words.get(type(node).__name__, type(node).__name__)


def refusal(node: ast.AST) -> str:
    """Return the message that refuses a construct, and says what to write instead."""
    return f"{english(node)} is not part of the dialect{_INSTEAD.get(type(node).__name__, '')}"


_ARRAY = "; a thread's own array is cuda.local.array(shape, dtype)"
_OUTSIDE = "; write it outside of the kernel"
_NO_EXCEPTIONS = "; a kernel raises nothing: write a mark to an array"
_INSTEAD: dict[str, str] = {
    **dict.fromkeys(("List", "ListComp", "Dict", "DictComp", "Set", "SetComp"), _ARRAY),
    **dict.fromkeys(("Import", "ImportFrom", "ClassDef"), _OUTSIDE),
    **dict.fromkeys(("FunctionDef", "Lambda"), f"{_OUTSIDE}, as a function that it calls"),
    **dict.fromkeys(("Try", "Raise", "Assert"), _NO_EXCEPTIONS),
    "JoinedStr": "; print on the host what the kernel writes to an array",
    "Match": "; write if and elif",
    "NamedExpr": "; assign in a statement of its own",
}
