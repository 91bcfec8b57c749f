"""Multiply matrices from Python: right for every legal input, with a stated error bound.

``matmul`` has np.matmul's semantics, ``plan`` says beforehand what would run and why, ``check``
proves a result without recomputing it, ``explain`` shows what a GPU kernel does to memory, and
``guide`` holds the two functions all of it grew from. Importing this imports NumPy and nothing that
touches CUDA.
"""

from __future__ import annotations

from ._api import gemm, matmul, plan
from .errors import TilewiseError

__all__ = ["TilewiseError", "gemm", "matmul", "plan"]

__version__ = "0.1.0.dev0"
