"""The living definition of a GPU for thread-level Python kernels, on NumPy.

A kernel is a plain Python function in the dialect of numba-cuda. :func:`launch` runs it, thousands
of threads at once, with the results that a GPU's threads would give, and errors where they would go
wrong. ``cuda`` stands in for ``numba.cuda`` in kernel sources; ``program`` gives what a static
analysis needs of a kernel's source. Nothing here needs numba, or a GPU.

What is not modelled: the order in which a GPU's threads race; the payload of a NaN; bits of
``math.exp`` and its like, which differ from library to library; the fusing of float16 products;
shifts by more than the width. A launch's notes say where a kernel meets one of these.
"""

from __future__ import annotations

from .dialect import cuda
from .events import Access, ArrayInfo, Barrier, Fault, Launch, Observer, Site
from .machine import MAX_STEPS, Kernel, launch
from .program import Program, program

__all__ = [
    "MAX_STEPS",
    "Access",
    "ArrayInfo",
    "Barrier",
    "Fault",
    "Kernel",
    "Launch",
    "Observer",
    "Program",
    "Site",
    "cuda",
    "launch",
    "program",
]
