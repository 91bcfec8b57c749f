"""Which of Hopper's kernels compute a product of bfloat16 or float16, how, and how long it takes.

Pure: shapes, types and strides in, names, grids and arguments out. `choose` weighs tiles, and the
two ways of adding up a long K; `launches` spells a choice out for `runtime.launch`. The times it
weighs by are fitted to measurements, and ``hopper_times.json`` says where those come from. The
device code is in ``hopper``.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Literal

from tilewise.runtime.arguments import Argument, Number, Pointer, Tensor

__all__ = [
    "KERNELS",
    "TIMES",
    "Choice",
    "Kernel",
    "Problem",
    "Step",
    "Strides",
    "Times",
    "chains",
    "choices",
    "choose",
    "launches",
]

Way = Literal["mapped", "any", "promoted"]
_Arguments = dict[str, Argument]

#: The longest K that is one chain of sums. Large products run at full rate only so: the tiles that
#: are fastest leave no registers for a second accumulator.
LONGEST_CHAIN = 16384
#: A longer K is cut into pieces of this, or of more if there were more than MOST_PIECES then.
#: 66 pieces of a 128x128 result, in tiles of 64x128, occupy the 132 multiprocessors of an H200.
LEAST_PIECE = 1536
MOST_PIECES = 128

#: Where the times of one machine are kept; written by ``python -m benchmarks hopper``.
TIMES = Path(__file__).parent / "hopper_times.json"

_TILE_K = 64
_ITEM_BYTES = 2
_VECTOR = 8  # elements in the 16 bytes that strides and addresses are multiples of for TMA
_LINE = 64  # elements in 128 bytes: rows of packed operands start on lines
PACKED_TILE = (4, 1024)
SUMMED_TILE = (4, 32)
_MOST_BLOCKS = 2**31 - 1
_MOST_STEP = 2**39  # a tensor map holds steps of less than 2^40 bytes

#: Rows, columns and stages of each kernel's tiles. Stages fill the shared memory that is left
#: beside the buffers of C. Tiles of less than 64 rows read no more rows of A than they have.
_TILES: dict[Way, tuple[tuple[int, int, int], ...]] = {
    "mapped": (
        *((128, 256, 4), (192, 128, 4), (128, 128, 6)),
        *((64, 128, 8), (64, 64, 12), (32, 64, 12), (16, 64, 12)),
    ),
    "any": ((128, 256, 4), (192, 128, 4), (64, 128, 7), (64, 64, 10), (16, 64, 10)),
    "promoted": ((192, 128, 4),),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Kernel:
    """One compiled kernel that multiplies.

    ``way`` is how C comes about: "mapped" writes it by TMA, in the operands' type; "any" writes any
    strides, float32 too, adds beta·C, and can leave pieces of K apart; "promoted" is "any" that
    adds the pieces up in registers.
    """

    dtype: str
    tile_m: int
    tile_n: int
    stages: int
    a_along_k: bool
    b_along_k: bool
    way: Way

    @property
    def name(self) -> str:
        order = f"{'k' if self.a_along_k else 'm'}{'k' if self.b_along_k else 'n'}"
        return f"{self.dtype}_{order}_{self.tile_m}x{self.tile_n}x{self.stages}_{self.way}"

    @property
    def rows(self) -> int:
        """Rows of C that a tile computes, whether it reads as many or not."""
        return max(64, self.tile_m)


KERNELS = tuple(
    Kernel(
        dtype=dtype,
        tile_m=tile_m,
        tile_n=tile_n,
        stages=stages,
        a_along_k=a_along_k,
        b_along_k=b_along_k,
        way=way,
    )
    for dtype in ("bf16", "fp16")
    for a_along_k in (True, False)
    for b_along_k in (True, False)
    for way, tiles in _TILES.items()
    for tile_m, tile_n, stages in tiles
    if a_along_k or tile_m >= 64  # TMA writes short rows of k×m without the gaps that wgmma wants
)


@dataclass(frozen=True, slots=True)
class Strides:
    """Steps of a stack of matrices from one element to the next, in elements, along each axis.

    ``is_aligned`` says whether the first element's address is a multiple of 16 bytes.
    """

    outer: int
    inner: int
    row: int
    col: int
    is_aligned: bool = True

    @property
    def transposed(self) -> Strides:
        return replace(self, row=self.col, col=self.row)


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """C = alpha·A·B + beta·C over two batch axes, a: m×k, b: k×n, c: m×n, none of them empty.

    ``dtype`` is that of A and B, ``out`` that of C or "fp32". Strides of 0 along a batch axis
    share one matrix; a batch axis of size 1 has any.
    """

    m: int
    n: int
    k: int
    a: Strides
    b: Strides
    c: Strides
    outer: int = 1
    inner: int = 1
    dtype: str = "bf16"
    out: str = "bf16"
    has_beta: bool = False

    @property
    def transposed(self) -> Problem:
        """The same product as Cᵀ = Bᵀ·Aᵀ."""
        a, b, c = self.b.transposed, self.a.transposed, self.c.transposed
        return replace(self, m=self.n, n=self.m, a=a, b=b, c=c)


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """How a problem is computed, and what that is expected to take.

    ``is_transposed``: rows and columns change places first. ``packs_a`` and ``packs_b`` are then of
    the transposed problem. Chains are ``piece_k`` of K long, and ``parts`` of them are left apart,
    to be added up by a launch of their own. ``group`` rows of tiles are walked at a time.
    """

    kernel: Kernel
    is_transposed: bool
    packs_a: bool
    packs_b: bool
    piece_k: int
    parts: int
    group: int
    blocks: int
    expected_us: float
    workspace_bytes: int
    why: str


@dataclass(frozen=True, slots=True)
class Step:
    """One launch: a kernel's name, its grid, and an argument for each parameter.

    The launch is given ``operands``, out of a, b, c and the workspace (0 to 3), in this order, to
    which its arguments refer by position, and the first ``numbers`` of alpha and beta.
    """

    kernel: str
    grid: tuple[int]
    arguments: Mapping[str, Argument]
    operands: tuple[int, ...]
    numbers: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Times:
    """What the time of a product is made of, on one kind of GPU.

    A tile costs ``tile_us`` and, for each 64 of K, ``step_us``; with more than one tile for each of
    ``multiprocessors`` the chip's power allows ``flop_per_us`` in all. Memory and L2 cache give
    ``memory_bytes_per_us`` and ``cache_bytes_per_us``; operands whose rows do not start on lines of
    128 bytes count ``broken_line`` times there. Writing C element by element costs
    ``any_us`` for each element of a tile, adding up pieces in registers ``promoted`` times the
    steps, a launch ``launch_us``.
    """

    launch_us: float
    memory_bytes_per_us: float
    cache_bytes_per_us: float
    flop_per_us: float
    broken_line: float
    any_us: float
    promoted: float
    multiprocessors: int
    tiles: Mapping[str, tuple[float, float]]  #: step_us and tile_us, by what a tile computes

    @classmethod
    def read(cls, path: Path = TIMES) -> Times:
        return cls(**json.loads(path.read_text())["times"])


def choose(problem: Problem, multiprocessors: int = 132, times: Times | None = None) -> Choice:
    """Return the way to compute a product that is expected to be the fastest.

    Parameters
    ----------
    problem : Problem
    multiprocessors : int
        Of the device.
    times : Times, optional
        By default those of an H200.

    Returns
    -------
    Choice
        Its bits are the same whichever it is: they depend on the operands and K alone.
    """
    every = choices(problem, multiprocessors, times)
    return min(every, key=lambda choice: choice.expected_us)


def choices(
    problem: Problem, multiprocessors: int = 132, times: Times | None = None
) -> Iterator[Choice]:
    """Yield every way to compute a product; see `choose`."""
    times = times or _default_times()
    # C is best written along its rows; reading a few rows of A instead of a few columns of B can be
    # worth more.
    c, m, n = problem.c, problem.m, problem.n
    is_transposed = m > 1 and (n == 1 or abs(c.row) < abs(c.col))
    yield from _choices(problem, is_transposed, multiprocessors, times)
    if min(m, n) < 64:
        yield from _choices(problem, not is_transposed, multiprocessors, times)


def chains(k: int) -> tuple[int, int]:
    """Return into how many chains K is cut, and the length of all but the last.

    This is what the order of summation depends on, and it sees nothing but K.
    """
    if k <= LONGEST_CHAIN:
        return 1, _round_up(k, _TILE_K)
    piece = max(LEAST_PIECE, _round_up(math.ceil(k / MOST_PIECES), _TILE_K))
    return math.ceil(k / piece), piece


def launches(problem: Problem, choice: Choice) -> tuple[Step, ...]:
    """Return what is launched for a choice, in order, on one stream.

    The workspace, ``choice.workspace_bytes`` on an address that is a multiple of 256, is for this
    product alone until it is done.
    """
    p = problem.transposed if choice.is_transposed else problem
    kernel = choice.kernel
    room = _Room()
    steps: list[Step] = []
    a, b, c = Pointer(0), Pointer(1), Pointer(2)
    if choice.is_transposed:
        a, b = b, a
    common: _Arguments = {"m": p.m, "n": p.n, "k": p.k, "outer": p.outer, "inner": p.inner}
    common["group"] = choice.group
    # B is described as its transpose, n×k, like A.
    for name, pointer, strides, rows, packs, along_k in (
        ("a", a, p.a, p.m, choice.packs_a, kernel.a_along_k),
        ("b", b, p.b.transposed, p.n, choice.packs_b, kernel.b_along_k),
    ):
        if packs:
            step, pointer, strides = _pack(p, pointer, strides, rows, along_k, room)
            steps.append(step)
        common[name] = _tensor(p, pointer, strides, rows, p.k, along_k)
        outer, inner = _stacked(p, strides)
        common |= {f"{name}_outer": int(outer > 1), f"{name}_inner": int(inner > 1)}
    if kernel.way == "mapped":
        mapped: _Arguments = {"c": _tensor(p, c, p.c, p.m, p.n, True), "alpha": Number(0)}
        return (*steps, _step(kernel.name, choice.blocks, common | mapped))
    out: _Arguments = {
        "c": c,
        "alpha": Number(0),
        "beta": Number(1),
        "is_wide": int(p.out == "fp32"),
        "c_outer": p.c.outer,
        "c_inner": p.c.inner,
        "c_row": p.c.row,
        "c_col": p.c.col,
    }
    common |= {"pieces": choice.parts, "piece_k": choice.piece_k}
    if choice.parts == 1:
        return (*steps, _step(kernel.name, choice.blocks, common | out | {"c_piece": 0}))
    row = _round_up(p.n, _VECTOR)
    piece, matrix = p.m * row, p.m * row * choice.parts
    parts = room.take(4 * matrix * p.outer * p.inner)
    apart: _Arguments = {
        "c": parts,
        "alpha": 1.0,
        "beta": 0.0,
        "is_wide": 1,
        "c_outer": matrix * p.inner,
        "c_inner": matrix,
        "c_piece": piece,
        "c_row": row,
        "c_col": 1,
    }
    sums: _Arguments = {
        "parts": parts,
        "part_matrix": matrix,
        "part_piece": piece,
        "part_row": row,
        "m": p.m,
        "n": p.n,
        "inner": p.inner,
        "pieces": choice.parts,
    }
    high, wide = SUMMED_TILE
    tiles = math.ceil(p.m / high) * math.ceil(p.n / wide) * p.outer * p.inner
    steps.append(_step(kernel.name, choice.blocks, common | apart))
    return (*steps, _step(f"add_pieces_{p.dtype}", tiles, sums | out))


@dataclass(slots=True)
class _Room:
    """The workspace, as it is taken piece by piece."""

    nbytes: int = 0

    def take(self, nbytes: int) -> Pointer:
        pointer = Pointer(3, self.nbytes)
        self.nbytes = _round_up(self.nbytes + nbytes, 256)
        return pointer


def _choices(
    problem: Problem, is_transposed: bool, multiprocessors: int, times: Times
) -> Iterator[Choice]:
    p = problem.transposed if is_transposed else problem
    pieces, piece_k = chains(p.k)
    is_plain = pieces == 1 and not p.has_beta and p.out == p.dtype
    # TMA reads to the element, but writes rows in whole vectors, over what lies behind C.
    is_mapped = is_plain and p.n % _VECTOR == 0 and _fits_tma(p.c, p, p.m, p.n)
    a_along_k, a_fits = _order(p.a, p, p.m)
    b_along_k, b_fits = _order(p.b.transposed, p, p.n)
    for kernel in KERNELS:
        if (kernel.dtype, kernel.a_along_k, kernel.b_along_k) != (p.dtype, a_along_k, b_along_k):
            continue  # packing keeps the order of the axes
        if (kernel.way == "mapped") != is_mapped or (kernel.way == "promoted" and pieces == 1):
            continue
        if kernel.tile_m < kernel.rows and p.m > kernel.tile_m:
            continue
        parts = pieces if kernel.way == "any" else 1
        items = math.ceil(p.m / kernel.rows) * math.ceil(p.n / kernel.tile_n)
        items *= p.outer * p.inner * parts
        choice = Choice(
            kernel=kernel,
            is_transposed=is_transposed,
            packs_a=not a_fits,
            packs_b=not b_fits,
            piece_k=piece_k,
            parts=parts,
            # A wave of tiles about as wide as it is high reads the least of A and B.
            group=max(1, round(math.sqrt(multiprocessors * kernel.tile_n / kernel.rows))),
            blocks=min(items, multiprocessors),
            expected_us=0.0,
            workspace_bytes=0,
            why="",
        )
        us, nbytes, why = _weigh(p, choice, items, multiprocessors, times)
        yield replace(choice, expected_us=us, workspace_bytes=nbytes, why=why)


def _weigh(
    p: Problem, choice: Choice, items: int, multiprocessors: int, times: Times
) -> tuple[float, int, str]:
    """Return the microseconds of a choice, the bytes of its workspace, and what it is bound by."""
    kernel = choice.kernel
    rows, columns = kernel.rows, kernel.tile_n
    waves = math.ceil(items / multiprocessors)
    share = multiprocessors / times.multiprocessors
    step_us, tile_us = times.tiles[f"{rows}x{columns}"]
    if kernel.way == "promoted":
        step_us *= times.promoted
    if kernel.way != "mapped":
        tile_us += times.any_us * rows * columns
    steps = math.ceil((choice.piece_k if choice.parts > 1 else p.k) / _TILE_K)
    flop = 2 * waves * multiprocessors * rows * columns * steps * _TILE_K

    room, us = _Room(), times.launch_us
    moved = p.m * p.n * p.outer * p.inner * (4 if p.out == "fp32" else 2) * (1 + p.has_beta)
    lines = 0.0
    for packs, along_k, strides, high, tile in (
        (choice.packs_a, kernel.a_along_k, p.a, p.m, kernel.tile_m),
        (choice.packs_b, kernel.b_along_k, p.b.transposed, p.n, columns),
    ):
        nbytes = math.prod(_stacked(p, strides)) * high * p.k * _ITEM_BYTES
        moved += nbytes
        pitch = strides.row if along_k else strides.col
        lines += tile * (1 if packs or pitch % _LINE == 0 else times.broken_line)
        if packs:
            room.take(_packed_bytes(p, strides, high, along_k))
            us += times.launch_us + 2 * nbytes / times.memory_bytes_per_us
    if choice.parts > 1:
        parts_bytes = 4 * p.outer * p.inner * choice.parts * p.m * _round_up(p.n, _VECTOR)
        room.take(parts_bytes)
        us += times.launch_us + parts_bytes / times.memory_bytes_per_us
        moved += parts_bytes
    cached = items * steps * lines * _TILE_K * _ITEM_BYTES
    bounds = {
        "the multiprocessors": waves * (tile_us + steps * step_us),
        "power": flop / (times.flop_per_us * share) if waves > 1 else 0.0,
        "memory": moved / times.memory_bytes_per_us,
        "the L2 cache": cached / (times.cache_bytes_per_us * share),
    }
    # Where two bounds are close, both are felt: a power mean instead of the largest.
    us += sum(bound**8 for bound in bounds.values()) ** (1 / 8)
    largest = max(bounds, key=lambda name: bounds[name])
    why = f"{items} tiles of {rows}x{columns} in {waves} waves, bound by {largest}"
    return us, room.nbytes, why


@lru_cache(maxsize=1)
def _default_times() -> Times:
    return Times.read()


def _step(kernel: str, blocks: int, arguments: Mapping[str, Argument]) -> Step:
    """Return a launch of arguments that refer to operands by the numbers of `Step.operands`."""
    given = arguments.values()
    used = sorted({x.operand for x in given if isinstance(x, Pointer | Tensor)})
    local = {
        name: replace(x, operand=used.index(x.operand)) if isinstance(x, Pointer | Tensor) else x
        for name, x in arguments.items()
    }
    return Step(kernel, (blocks,), local, tuple(used), sum(isinstance(x, Number) for x in given))


def _pack(
    p: Problem, source: Pointer, strides: Strides, rows: int, along_k: bool, room: _Room
) -> tuple[Step, Pointer, Strides]:
    """Return the launch that packs an operand, given as rows×k; where the copy is; its strides."""
    high, wide = (rows, p.k) if along_k else (p.k, rows)
    outer, inner = _stacked(p, strides)
    target = room.take(_packed_bytes(p, strides, rows, along_k))
    pitch = _round_up(wide, _LINE)
    arguments: _Arguments = {
        "source": source,
        "target": target,
        "rows": high,
        "columns": wide,
        "inner": inner,
        "count": outer * inner,
        "source_outer": strides.outer,
        "source_inner": strides.inner,
        "source_row": strides.row if along_k else strides.col,
        "source_col": strides.col if along_k else strides.row,
        "target_row": pitch,
    }
    tiles = math.ceil(high / PACKED_TILE[0]) * math.ceil(wide / PACKED_TILE[1]) * outer * inner
    packed = Strides(
        outer=high * pitch * inner if outer > 1 else 0,
        inner=high * pitch if inner > 1 else 0,
        row=pitch if along_k else 1,
        col=1 if along_k else pitch,
    )
    return _step("pack_16", min(tiles, _MOST_BLOCKS), arguments), target, packed


def _packed_bytes(p: Problem, strides: Strides, rows: int, along_k: bool) -> int:
    high, wide = (rows, p.k) if along_k else (p.k, rows)
    return math.prod(_stacked(p, strides)) * high * _round_up(wide, _LINE) * _ITEM_BYTES


def _tensor(
    p: Problem, pointer: Pointer, strides: Strides, rows: int, columns: int, along_columns: bool
) -> Tensor:
    """Describe a stack of matrices for a tensor map: (outer, inner, far axis, unit-stride axis)."""
    far, near = (rows, columns) if along_columns else (columns, rows)
    # The step of an axis of size 1 is never taken, and has to be one that TMA accepts.
    step = (strides.row if along_columns else strides.col) if far > 1 else _round_up(near, _VECTOR)
    outer, inner = _stacked(p, strides)
    return Tensor(
        pointer.operand,
        (outer, inner, far, near),
        (
            strides.outer if outer > 1 else far * step,
            strides.inner if inner > 1 else far * step,
            step,
            1,
        ),
        _ITEM_BYTES,
        pointer.offset_bytes,
    )


def _order(strides: Strides, p: Problem, rows: int) -> tuple[bool, bool]:
    """Say whether an operand, given as rows×k, is read along k, and whether TMA can read it."""
    if _fits_tma(strides, p, rows, p.k):
        return True, True
    if _fits_tma(strides.transposed, p, p.k, rows):
        return False, True
    # Then it is packed, along the axis on which its elements lie closest.
    far = [
        size > 1 and (abs(step) or math.inf)
        for size, step in ((rows, strides.row), (p.k, strides.col))
    ]
    return rows == 1 or (p.k > 1 and far[1] <= far[0]), False


def _fits_tma(strides: Strides, p: Problem, rows: int, columns: int) -> bool:
    """Say whether TMA can read or write a stack of matrices along their columns."""
    if not strides.is_aligned or (columns > 1 and strides.col != 1):
        return False
    sizes = (p.outer, p.inner), _stacked(p, strides)
    far = [
        step
        for size, step in zip(sizes[1], (strides.outer, strides.inner), strict=True)
        if size > 1
    ]
    if rows > 1:
        far.append(strides.row)
    is_apart = rows == 1 or strides.row >= columns
    return is_apart and all(0 < step < _MOST_STEP and step % _VECTOR == 0 for step in far)


def _stacked(p: Problem, strides: Strides) -> tuple[int, int]:
    """Return along how much of each batch axis an operand has a matrix of its own."""
    return p.outer if strides.outer else 1, p.inner if strides.inner else 1


def _round_up(size: int, step: int) -> int:
    return -(-size // step) * step
