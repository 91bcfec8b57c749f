"""What portable kernels there are, and what each relies on: one table for compiler and planner.

Pure data. The device code is in ``portable``, ``packing`` and ``hopper_bytes``; which kernel runs
when is decided in ``portable_plan``.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = [
    "BYTES_TILES",
    "EVERYWHERE",
    "FINISH_TILES",
    "INTEGERS_TILE",
    "KERNELS",
    "PACK_TILES",
    "STORED",
    "Kernel",
    "fixed_arguments",
]

#: Code for sm_80 is what 8.6, 8.7 and 8.9 run too. Where a kernel is missing below, it spills.
EVERYWHERE = ("sm_80", "sm_90a", "sm_100a", "sm_120a", "compute_80")
_BEFORE_BLACKWELL = ("sm_80", "sm_90a", "compute_80")
_BLACKWELL = ("sm_100a", "sm_120a")
_BUT_SM_100 = ("sm_80", "sm_90a", "sm_120a", "compute_80")
_BUT_SM_120 = ("sm_80", "sm_90a", "sm_100a", "compute_80")
_HOPPER = ("sm_90a",)
_MUCH_SHARED = ("sm_90a", "sm_100a")
_WITH_FLOAT8 = ("sm_89", "sm_90a", "sm_100a", "sm_120a")

#: Sides of the tiles of the other kernels; of copies, by the type that they write. To finish, small
#: tiles occupy the device where there are few elements, of many parts.
INTEGERS_TILE = 16
FINISH_TILES = {"": (2, 64), "_wide": (8, 128)}
PACK_TILES = {"u8": 128, "limbs": 32, "fp16": 64, "bf16": 64, "fp32": 64, "fp64": 64}
#: Rows and columns of `hopper_bytes.pack_bytes`, by whether it reads along K or across.
BYTES_TILES = {"k": (16, 512), "n": (128, 128)}

#: How numbers of NumPy's types are stored, as the kernels ask for it, and their bytes; of complex
#: ones, each part.
STORED = {f"{sign}int{8 * size}": (0, size) for sign in ("", "u") for size in (1, 2, 4, 8)}
STORED |= {"bool": (0, 1), "float16": (1, 2), "bfloat16": (2, 2), "float32": (3, 4)}
STORED |= {"float64": (4, 8), "float8_e4m3fn": (5, 1), "float8_e5m2": (6, 1)}
STORED |= {"complex64": (3, 4), "complex128": (4, 8)}


@dataclass(frozen=True, slots=True)
class Kernel:
    """One compiled kernel that multiplies.

    ``dtype`` is Triton's name of the operands' type. ``order`` is what a and b are read along: "nn"
    k and n, "nt" k and k, "tn" m and n, "any" reads any strides. ``vector`` elements are read at
    once: addresses, strides and the size along rows are multiples of that; so are C's of
    ``c_vector``. ``rate``, in 10^12 operations a second, is what an H200 does of large squares.
    Where it ``is_mapped``, operands and C go through tensor maps, and it is in ``hopper_bytes``.
    """

    dtype: str
    order: str
    tile: tuple[int, int, int]
    warps: int
    stages: int
    rate: float
    vector: int = 1
    c_vector: int = 1
    registers: int | None = None
    is_complex: bool = False
    is_mapped: bool = False
    targets: tuple[str, ...] = EVERYWHERE

    @property
    def name(self) -> str:
        kind = f"{self.dtype}_complex" if self.is_complex else self.dtype
        how = "mapped" if self.is_mapped else self.vector
        return f"{kind}_{self.order}_{self.tile[0]}x{self.tile[1]}_{how}"

    @property
    def sums(self) -> str:
        """The type of its sums."""
        return {"fp64": "fp64", "i8": "i32"}.get(self.dtype, "fp32")

    @property
    def narrow(self) -> str | None:
        """NumPy's name of the other type it can write: that of its operands."""
        return {"fp16": "float16", "bf16": "bfloat16"}.get(self.dtype)


def _mapped(dtype: str, tile_m: int, stages: int, rate: float) -> Kernel:
    """Return a kernel of ``hopper_bytes``; stages fill the shared memory beside the sums."""
    tile = (tile_m, 128, 128)
    return Kernel(
        dtype,
        "nt",
        tile,
        4,
        stages,
        rate,
        vector=16,
        c_vector=4,
        is_mapped=True,
        targets=_HOPPER,
    )


#: Rows of the tiles, stages and rates of the kernels in ``hopper_bytes``.
_MAPPED = {
    "i8": ((192, 4, 1430), (128, 5, 1400), (64, 8, 1140)),
    "fp8e4nv": ((192, 4, 1300), (128, 5, 1200), (64, 8, 900)),
    "fp8e5": ((192, 4, 1300), (128, 5, 1200), (64, 8, 900)),
}

#: All kernels of a type walk K in the same steps: padding with zeros may turn -0 into 0.
KERNELS = (
    Kernel("fp32", "tn", (128, 128, 16), 8, 3, 48, vector=4, registers=128),
    Kernel("fp32", "tn", (64, 64, 16), 4, 3, 44, vector=4, registers=128),
    Kernel("fp32", "nn", (64, 64, 16), 4, 3, 42, vector=4),
    Kernel("fp32", "any", (64, 64, 16), 4, 3, 34),
    Kernel("fp32", "any", (64, 32, 16), 4, 3, 25, is_complex=True),
    *(
        Kernel("fp64", "nn", tile, 4, 3, 56, vector=2, c_vector=2, registers=168, targets=targets)
        for tile, targets in (((64, 64, 32), _BEFORE_BLACKWELL), ((64, 32, 32), _BLACKWELL))
    ),
    *(
        Kernel(
            "fp64", order, (64, 64, 32), 4, 3, rate, 2, c_vector=2, registers=168, targets=_HOPPER
        )
        for order, rate in (("nt", 56), ("tn", 54))
    ),
    Kernel("fp64", "any", (64, 64, 32), 4, 2, 30),
    Kernel("fp64", "any", (32, 32, 32), 4, 2, 20, is_complex=True, targets=_BUT_SM_120),
    *(
        Kernel(dtype, order, (128, 128, 64), 8, 3, 550, vector=8, c_vector=8, targets=targets)
        for dtype in ("fp16", "bf16")
        for order, targets in (("nn", _BUT_SM_100), ("nt", EVERYWHERE), ("tn", EVERYWHERE))
    ),
    *(
        Kernel(dtype, "nn", (128, 64, 64), 4, 3, 450, vector=8, c_vector=8, targets=("sm_100a",))
        for dtype in ("fp16", "bf16")
    ),
    *(Kernel(dtype, "any", (64, 64, 64), 4, 3, 120) for dtype in ("fp16", "bf16")),
    *(
        Kernel(dtype, "nt", (128, 128, 128), 8, 3, 830, vector=16, targets=_WITH_FLOAT8)
        for dtype in ("fp8e4nv", "fp8e5")
    ),
    Kernel("i8", "nt", (128, 256, 128), 8, 3, 1040, vector=16, targets=_MUCH_SHARED),
    Kernel("i8", "nt", (128, 128, 128), 8, 3, 850, vector=16),
    Kernel("i8", "nt", (64, 64, 128), 4, 4, 700, vector=16),
    Kernel("i8", "nt", (64, 64, 128), 4, 4, 380, vector=8, targets=_BUT_SM_100),
    *(_mapped(dtype, *tile) for dtype, tiles in _MAPPED.items() for tile in tiles),
)


def fixed_arguments(kernel: Kernel) -> dict[str, int]:
    """Return those arguments of ``portable.multiply`` that are compiled into a kernel."""
    fixed = {}
    if kernel.order != "any":
        fixed = {"alpha": 1, "beta": 0, "c_col": 1}
        fixed["a_col" if kernel.order[0] == "n" else "a_row"] = 1
        fixed["b_col" if kernel.order[1] == "n" else "b_row"] = 1
    if kernel.narrow is None:
        fixed["wide"] = 1
    return fixed
