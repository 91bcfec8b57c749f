"""Multiply matrices from Python: right for every legal input, with a stated error bound.

``matmul`` has np.matmul's semantics, ``plan`` says beforehand what would run and why, ``check``
proves a result without recomputing it, ``multiply_files`` takes matrices larger than the memory,
``explain`` shows what a GPU kernel does to memory, and ``guide`` holds the two functions all of it
grew from. Importing this imports NumPy and nothing that touches CUDA.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from ._api import gemm, matmul, plan
from .errors import TilewiseError

# The function of this name, not the package it lives in: `from tilewise.explain import claims`
# finds the package all the same.
from .explain import explain

if TYPE_CHECKING:
    from . import guide
    from .numerics.check import check
    from .outofcore.pipeline import multiply_files

__all__ = [
    "TilewiseError",
    "check",
    "explain",
    "gemm",
    "guide",
    "matmul",
    "multiply_files",
    "plan",
]

__version__ = "0.1.0.dev0"

#: Public names that are imported when they are first used.
_LATER = {"check": ".numerics.check", "multiply_files": ".outofcore.pipeline", "guide": ".guide"}


def __getattr__(name: str) -> Any:
    if name not in _LATER:
        raise AttributeError(f"module 'tilewise' has no attribute {name!r}")
    module = import_module(_LATER[name], __name__)
    value = globals()[name] = module if name == "guide" else getattr(module, name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
