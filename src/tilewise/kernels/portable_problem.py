"""What the plans of the portable kernels speak of: a product, and operands in memory.

Pure. The steps that compute a product are put together in ``portable_steps``.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from .portable_table import Kernel
from .steps import Pointer, Product, Strides, Tensor

__all__ = ["Operand", "Problem"]

#: NumPy's names of types, and that of the kernels which read them as they are.
_READ_BY = {"float16": "fp16", "bfloat16": "bf16", "float32": "fp32", "float64": "fp64"}
_READ_BY |= {"float8_e4m3fn": "fp8e4nv", "float8_e5m2": "fp8e5"}
_READ_BY |= {"int8": "i8", "uint8": "i8", "bool": "i8"}
_READ_BY |= {"complex64": "fp32_complex", "complex128": "fp64_complex"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem(Product):
    """A product of any types, which go by their NumPy names, and of any strides.

    Elements are aligned to their own size. Where C is complex, the imaginary parts of alpha and
    beta are `Number` 2 and 3.
    """

    a_dtype: str
    b_dtype: str
    c_dtype: str

    @property
    def transposed(self) -> Problem:
        """The same product as Cᵀ = Bᵀ·Aᵀ."""
        return replace(
            self,
            m=self.n,
            n=self.m,
            a=self.b.transposed,
            b=self.a.transposed,
            c=self.c.transposed,
            a_dtype=self.b_dtype,
            b_dtype=self.a_dtype,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Operand:
    """A stack of matrices of rows×cols in memory: a, c, or b transposed, so that k is last.

    ``dtype`` is NumPy's name of what it was; ``item_bytes`` are those of an element as it is.
    """

    pointer: Pointer
    strides: Strides
    rows: int
    cols: int
    dtype: str
    item_bytes: int

    @property
    def is_by_rows(self) -> bool:
        """Whether what follows in memory is mostly of the same row."""
        near, far = abs(self.strides.col), abs(self.strides.row)
        return self.cols > 1 and (far == 0 or 0 < near <= far)

    @property
    def is_mappable(self) -> bool:
        """Whether a tensor map can describe it, along its rows."""
        return self.strides.suits_map(self.rows, self.cols, self.item_bytes)

    def suits(self, kernel: Kernel, by_rows: bool) -> bool:
        """Whether a kernel can read it as it is, along its rows or else its columns."""
        is_read = _READ_BY.get(self.dtype) == kernel.dtype + "_complex" * kernel.is_complex
        if kernel.order == "any" or not is_read:
            return is_read
        if kernel.is_mapped:
            return self.is_mappable
        s, v = self.strides, kernel.vector
        near, near_step, far_step = self.cols, s.col, s.row
        if not by_rows:
            near, near_step, far_step = self.rows, s.row, s.col
        is_whole = not any(step % v for step in (near, far_step, s.outer, s.inner))
        return s.is_aligned and near_step == 1 and is_whole

    def at(self, outer: int = 0, inner: int = 0, row: int = 0, col: int = 0) -> Pointer:
        """Return the address of an element."""
        s = self.strides
        elements = outer * s.outer + inner * s.inner + row * s.row + col * s.col
        return self.pointer.moved(elements * self.item_bytes)

    def from_column(self, col: int) -> Operand:
        """Return the operand without its first columns."""
        return replace(self, pointer=self.at(col=col))

    def tensor(self, outer: int, inner: int) -> Tensor:
        """Describe ``outer`` by ``inner`` matrices, or one where they share it, for a map."""
        sizes = (outer, inner, self.rows, self.cols)
        return Tensor.mapped(self.pointer, self.strides, sizes, self.item_bytes)
