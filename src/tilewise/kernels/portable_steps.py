"""The launches that a product on portable kernels is made of, with all their arguments.

`Steps` puts one way to compute a product together: it copies operands, multiplies, and finishes
what lies in parts. Pure; which ways there are, and which is taken, is in ``portable_plan``.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, NamedTuple

from .portable_problem import Operand, Problem
from .portable_table import (
    BYTES_TILES,
    FINISH_TILES,
    INTEGERS_TILE,
    PACK_TILES,
    STORED,
    Kernel,
    fixed_arguments,
)
from .steps import MOST_BLOCKS, Arguments, Number, Pointer, Room, Step, Strides, round_up

__all__ = ["Chunk", "Steps"]

_BYTES = {"u8": 1, "fp16": 2, "bf16": 2, "fp32": 4, "fp64": 8, "i32": 4}

_SUMS_BYTES = 512 << 20  # that lie apart at a time: a part of C of this size fills any GPU

#: And that is a product's in so many turns at most: to plan and to launch more takes long.
_MOST_SUMS_CHUNKS = 1024

_LAUNCH_US = 2.5
_EARLY_US = 1.0  # of a launch that the next one does not wait for
_BYTES_PER_US = 4.0e6  # copied on an H200, read and written
_INTEGERS_RATE = 0.2  # of `portable.multiply_integers`, as `Kernel.rate`


class Chunk(NamedTuple):
    """What is computed at a time: a range of each batch axis, and of the rows of C.

    In a draft one stands for all that are like it, ``times``.
    """

    outer_at: int
    outer: int
    inner_at: int
    inner: int
    row_at: int
    rows: int
    times: int = 1

    @property
    def start(self) -> tuple[int, int, int]:
        return self.outer_at, self.inner_at, self.row_at

    @property
    def matrices(self) -> int:
        return self.outer * self.inner


class Steps:
    """One way to compute a product, put together launch by launch.

    Operands are numbered a, b, c, workspace. C is written along its rows, where it can be: if its
    columns have the unit stride, then ``problem`` is the transposed one, and ``a`` is b's operand.
    A draft counts time and workspace alone.
    """

    def __init__(
        self,
        problem: Problem,
        multiprocessors: int,
        sums_bytes: float = math.inf,
        is_draft: bool = False,
    ) -> None:
        turns = problem.c.col != 1 and problem.c.row == 1 and problem.n > 1
        self.problem = p = problem.transposed if turns else problem
        self.multiprocessors = multiprocessors
        self.steps: list[Step] = []
        self.workspace_bytes = 0
        self.us = 0.0
        self.why = ["C is written by columns"] if turns else []
        self._sums_bytes = min(sums_bytes, _SUMS_BYTES)
        self._sums_at: int | None = None
        self._is_draft = is_draft
        self.a = self._operand(Pointer(int(turns)), p.a, p.m, p.k, p.a_dtype)
        self.b = self._operand(Pointer(int(not turns)), p.b.transposed, p.n, p.k, p.b_dtype)
        self.c = self._operand(Pointer(2), p.c, p.m, p.n, p.c_dtype)

    @property
    def integer_size(self) -> int:
        """The bytes of C's integers as the kernels want it: 0 for bool."""
        return 0 if self.problem.c_dtype == "bool" else self.c.item_bytes

    def c_suits(self, kernel: Kernel) -> bool:
        """Say whether an ordered kernel can write C where it is."""
        if kernel.is_mapped:  # TMA writes whole vectors, over what lies behind a row
            return self.c.is_mappable and self.c.cols % kernel.c_vector == 0
        s, v = self.c.strides, kernel.c_vector
        is_whole = not any(step % v for step in (s.row, s.outer, s.inner))
        return s.col == 1 and (v == 1 or (s.is_aligned and is_whole))

    def pack(self, x: Operand, kernel: Kernel, by_rows: bool, is_expanded: bool) -> Operand:
        """Copy an operand by rows, or by columns, in a kernel's type.

        ``is_expanded``: real numbers take the place of complex ones, two of a along k, four of b.
        """
        col_pairs = int(is_expanded)
        row_pairs = int(is_expanded and x is self.b)
        target = kernel.dtype if kernel.dtype in PACK_TILES else "u8"
        extra: Arguments = {}
        if target != "u8":
            extra = _named("stored size sign", *STORED[x.dtype], _sign_bit(x.dtype))
        if is_expanded:
            extra["reals"] = 2 if x.dtype.startswith("complex") else 1
        copy = replace(
            x,
            rows=x.rows << row_pairs,
            cols=x.cols << col_pairs,
            item_bytes=_BYTES[target],
        )
        name = f"pack_{target}" + "_complex" * is_expanded
        row = round_up(copy.cols if by_rows else copy.rows, 16)
        return self._copy(name, PACK_TILES[target], x, copy, by_rows, row, row, extra)

    def mapped(self, kernel: Kernel, *operands: Operand) -> tuple[Operand, ...]:
        """Return operands of bytes as tensor maps can describe them, copied where need be.

        The copies are one launch; that of an operand without a unit stride is one of its own.
        """
        found, copies = [], []
        for x in operands:
            if x.is_mappable:
                found.append(x)
            elif 1 in (x.strides.row, x.strides.col):
                found.append(self._byte_copy(x))
                copies.append((x, found[-1]))
            else:
                found.append(self.pack(x, kernel, True, False))
        if copies:
            self._pack_bytes(copies)
        return tuple(found)

    def pack_limbs(self, x: Operand, limbs: int, is_reversed: bool) -> Operand:
        """Copy integers as bytes: in each row all lowest ones first, or last, then the others."""
        plane = round_up(x.cols, 16)
        extra = _named("size sign limbs", x.item_bytes, _sign_bit(x.dtype), limbs)
        extra |= _named("limb_first limb_step", 0, plane)
        if is_reversed:
            extra |= _named("limb_first limb_step", plane * (limbs - 1), -plane)
        copy = replace(x, item_bytes=1)
        row = plane * limbs
        return self._copy("pack_limbs", PACK_TILES["limbs"], x, copy, True, row, plane, extra)

    def multiply(
        self,
        kernel: Kernel,
        a: Operand,
        b: Operand,
        terms: int,
        parts: int,
        depth: int,
        is_complex: bool = False,
    ) -> None:
        """Write C by a kernel that needs no more than to write it."""
        for chunk in self._chunks(self.tiles(kernel)):
            self._multiply(kernel, a, b, self.c, chunk, terms, parts, depth, is_complex)

    def multiply_apart(
        self,
        kernel: Kernel,
        a: Operand,
        b: Operand,
        terms: int,
        parts: int,
        depth: int,
        is_complex: bool = False,
        power: int = 0,
    ) -> None:
        """Write sums over parts of K into the workspace, and what they add up to into C.

        The sums get the factor 256^power; those of a power above 0 are added to C.
        """
        row = round_up(self.problem.n << is_complex, kernel.c_vector)
        item_bytes = _BYTES[kernel.sums]
        if self._sums_at is None:  # powers take turns with one place
            self._sums_at = self.workspace_bytes
        place = self._sums_at
        for chunk in self._chunks(self.tiles(kernel) * parts, parts * row * item_bytes):
            matrix = chunk.rows * row
            strides = Strides(outer=matrix * chunk.inner, inner=matrix, row=row, col=1)
            sums = replace(
                self.c,
                pointer=Pointer(3, place),
                strides=strides,
                dtype=kernel.sums,
                item_bytes=item_bytes,
            )
            needed = round_up(parts * chunk.matrices * matrix * item_bytes, Room.STEP)
            self.workspace_bytes = max(self.workspace_bytes, place + needed)
            self._multiply(kernel, a, b, sums, chunk, terms, parts, depth, is_complex)
            self._finish(kernel.sums, sums.pointer, row, parts, chunk, is_complex, power)

    def finish_nothing(self, sums: str, is_complex: bool) -> None:
        """Write beta·C, or zeros."""
        for chunk in self._chunks(_tile_count(self.problem, *FINISH_TILES[""])):
            self._finish(sums, self.c.pointer, self.problem.n, 0, chunk, is_complex, 0)

    def multiply_integers(self) -> None:
        """Write C by the kernel for integers of any type."""
        p, a, b, c = self.problem, self.a, self.b, self.c
        for chunk in self._chunks(_tile_count(p, INTEGERS_TILE, INTEGERS_TILE)):
            tiles_m, tiles_n = _tiles(chunk.rows, p.n, INTEGERS_TILE, INTEGERS_TILE)
            programs = tiles_m * tiles_n * chunk.matrices
            us = self._multiply_us(programs, 2 * INTEGERS_TILE**2 * p.k, _INTEGERS_RATE)
            self._take(us, times=chunk.times)
            if self._is_draft:
                continue
            arguments = (
                _named("a b c", a.at(*chunk.start), b.at(*chunk.start[:2]), c.at(*chunk.start))
                | _named("m n k inner", chunk.rows, p.n, p.k, chunk.inner)
                | a.strides.arguments("a")
                | b.strides.transposed.arguments("b")
                | c.strides.arguments("c")
                | _named("tiles_m tiles_n", tiles_m, tiles_n)
                | _named("a_size a_sign", a.item_bytes, _sign_bit(a.dtype))
                | _named(
                    "b_size b_sign c_size", b.item_bytes, _sign_bit(b.dtype), self.integer_size
                )
                | self._factors(0, False)
            )
            self.steps.append(Step.of("integers", programs, arguments))

    def tiles(self, kernel: Kernel) -> int:
        """Return the number of a kernel's tiles that one matrix has."""
        return _tile_count(self.problem, *kernel.tile[:2])

    def _operand(
        self, pointer: Pointer, strides: Strides, rows: int, cols: int, dtype: str
    ) -> Operand:
        p = self.problem
        item_bytes = STORED[dtype][1] << dtype.startswith("complex")
        return Operand(
            pointer=pointer,
            strides=strides.taken(p.outer, p.inner, rows, cols),
            rows=rows,
            cols=cols,
            dtype=dtype,
            item_bytes=item_bytes,
        )

    def _copy(
        self,
        name: str,
        tile: int,
        x: Operand,
        copy: Operand,
        by_rows: bool,
        row: int,
        width: int,
        extra: Arguments,
    ) -> Operand:
        """Launch a copy of x, in rows of ``row`` elements, ``width`` of them for the programs.

        ``copy`` has the sizes and the type of the result; returned is where it is.
        """
        s = x.strides
        outer = self.problem.outer if s.outer else 1
        inner = self.problem.inner if s.inner else 1
        high = copy.rows if by_rows else copy.cols
        across = (copy.rows, s.row, int(copy.rows > x.rows))
        along = (copy.cols, s.col, int(copy.cols > x.cols))
        # A tile is read along what lies closer together.
        if not x.is_by_rows:
            across, along = along, across
        is_turned = x.is_by_rows != by_rows
        place = Pointer(3, self.workspace_bytes)
        copied_bytes = outer * inner * high * row * copy.item_bytes
        self.workspace_bytes += round_up(copied_bytes, Room.STEP)
        tiles_m, tiles_n = _tiles(high, width, tile, tile)
        programs = tiles_m * tiles_n * outer * inner
        read_bytes = outer * inner * x.rows * x.cols * x.item_bytes
        self._take((read_bytes + copied_bytes) / _BYTES_PER_US)
        self.why.append(f"{'b' if x is self.b else 'a'} is packed")
        if programs > MOST_BLOCKS:
            self.us = math.inf  # there are ways without a copy
        if not self._is_draft:
            arguments = (
                _named("source target rows row_step", x.pointer, place, high, row)
                | _named("across_size across_step along_size along_step", *across[:2], *along[:2])
                | _named("outer_step inner_step inner", s.outer, s.inner, inner)
                | _named("tiles_m tiles_n is_turned", tiles_m, tiles_n, int(is_turned))
                | extra
            )
            if name.endswith("_complex"):
                pairs = (across[2], along[2], int(not x.is_by_rows))
                arguments |= _named("across_pairs along_pairs sums_across", *pairs)
            self.steps.append(Step.of(name, programs, arguments))
        matrix = high * row
        strides = Strides(
            outer=matrix * inner if s.outer else 0,
            inner=matrix if s.inner else 0,
            row=row if by_rows else 1,
            col=1 if by_rows else row,
        )
        return replace(copy, pointer=place, strides=strides)

    def _byte_copy(self, x: Operand) -> Operand:
        """Take room for a copy of bytes, by rows."""
        s = x.strides
        outer = self.problem.outer if s.outer else 1
        inner = self.problem.inner if s.inner else 1
        # Rows that straddle lines are read more slowly, and short ones are not worth the memory.
        row = round_up(x.cols, 128 if x.cols >= 512 else 16)
        matrix = x.rows * row
        strides = Strides(
            outer=matrix * inner if s.outer else 0,
            inner=matrix if s.inner else 0,
            row=row,
            col=1,
        )
        place = Pointer(3, self.workspace_bytes)
        self.workspace_bytes += round_up(outer * inner * matrix, Room.STEP)
        self.why.append(f"{'b' if x is self.b else 'a'} is packed")
        return replace(x, pointer=place, strides=strides)

    def _pack_bytes(self, copies: list[tuple[Operand, Operand]]) -> None:
        """Launch the copies of one or two operands."""
        vector, moved, blocks = 4, 0, [0, 0]
        arguments: Arguments = {}
        # Of one operand, the second part of the launch has no blocks.
        for number, (x, copy) in enumerate((copies[0], copies[-1])):
            s, name = x.strides, ("first", "second")[number]
            inner = self.problem.inner if s.inner else 1
            matrices = inner * (self.problem.outer if s.outer else 1)
            along = s.col == 1
            near, far_step = (x.cols, s.row) if along else (x.rows, s.col)
            if not s.is_aligned or any(i % 4 for i in (near, far_step, s.outer, s.inner)):
                vector = 1
            if number < len(copies):
                tile = BYTES_TILES["k" if along else "n"]
                blocks[number] = matrices * math.prod(_tiles(x.rows, x.cols, *tile))
                moved += matrices * x.rows * (x.cols + copy.strides.row)
            if self._is_draft:
                continue
            arguments |= _named(
                f"{name}_source {name}_target {name}_rows {name}_columns {name}_inner",
                *(x.pointer, copy.pointer, x.rows, x.cols, inner),
            ) | _named(
                f"{name}_outer_step {name}_inner_step {name}_far_step {name}_target_row",
                *(s.outer, s.inner, far_step, copy.strides.row),
            )
            arguments[f"{name}_along"] = int(along)
        self._take(moved / _BYTES_PER_US, _EARLY_US)
        if not self._is_draft:
            arguments["first_blocks"] = blocks[0]
            self.steps.append(Step.of(f"pack_bytes_{vector}", sum(blocks), arguments))

    def _chunks(self, programs: int, row_bytes: int = 0) -> Iterator[Chunk]:
        """Cut C such that a grid holds the programs of a chunk, and the workspace its sums.

        ``programs`` are those of one matrix, ``row_bytes`` those of the sums of one row.
        """
        p = self.problem
        outer_step, inner_step, row_step = p.outer, p.inner, p.m
        most, rows = MOST_BLOCKS // programs, p.m
        if row_bytes:
            sums_bytes = max(
                self._sums_bytes, p.outer * p.inner * p.m * row_bytes / _MOST_SUMS_CHUNKS
            )
            rows = int(sums_bytes // row_bytes)
            most = min(most, rows // p.m)
        if not most:  # one matrix at a time, and of it some tiles' rows
            outer_step, inner_step, row_step = 1, 1, max(rows // 128 * 128, 128)
        else:
            inner_step = min(p.inner, most)
            outer_step = max(most // p.inner, 1)
        for outer, height, outer_times in self._spans(p.outer, outer_step):
            for inner, width, inner_times in self._spans(p.inner, inner_step):
                for row, rows, row_times in self._spans(p.m, row_step):
                    times = outer_times * inner_times * row_times
                    yield Chunk(outer, height, inner, width, row, rows, times)

    def _spans(self, size: int, step: int) -> Iterator[tuple[int, int, int]]:
        """Yield where the parts of an axis begin, how long they are, and how many are like it."""
        count, rest = divmod(size, step)
        if count and self._is_draft:
            yield 0, step, count
        else:
            yield from ((at, step, 1) for at in range(0, count * step, step))
        if rest:
            yield count * step, rest, 1

    def _multiply(
        self,
        kernel: Kernel,
        a: Operand,
        b: Operand,
        c: Operand,
        chunk: Chunk,
        terms: int,
        parts: int,
        depth: int,
        is_complex: bool,
    ) -> None:
        """Launch a kernel over a chunk of C, or of the sums that stand in for it."""
        is_apart = c is not self.c
        # Complex matrices are real ones to the kernels, of twice as many columns.
        twice = 1 + is_complex
        n = self.problem.n * twice
        tiles_m, tiles_n = _tiles(chunk.rows, n, *kernel.tile[:2])
        programs = tiles_m * tiles_n * chunk.matrices * parts
        tile_terms = math.prod(kernel.tile[:2]) * min(depth, terms) * twice
        us = self._multiply_us(programs, 2 * tile_terms, kernel.rate)
        self._take(us, times=chunk.times)
        if self._is_draft:
            return
        if kernel.is_mapped:
            self._multiply_mapped(kernel, a, b, c, chunk, terms, parts, depth)
            return
        a_steps, b_steps, c_steps = a.strides, b.strides.transposed, c.strides
        if is_complex and not is_apart:
            c_steps = replace(c_steps.scaled(2), col=c_steps.col)
        if kernel.is_complex:
            a_steps, b_steps = a_steps.scaled(2), b_steps.scaled(2)
            c_steps = replace(c_steps, col=2 * c_steps.col)
        factors = _named("alpha beta", 1, 0) if is_apart else self._factors(0, False)
        arguments = (
            _named("a b", a.at(*chunk.start), b.at(*chunk.start[:2]))
            | _named("c", c.pointer if is_apart else c.at(*chunk.start))
            | _named("m n k inner", chunk.rows, n, terms * twice, chunk.inner)
            | a_steps.arguments("a")
            | b_steps.arguments("b")
            | c_steps.arguments("c")
            | _named("parts depth", parts, depth * twice)
            | _named("c_part", chunk.matrices * chunk.rows * c.strides.row if is_apart else 0)
            | _named("tiles_m tiles_n wide", tiles_m, tiles_n, int(c.dtype != kernel.narrow))
            | factors
        )
        fixed = fixed_arguments(kernel)
        given = {name: value for name, value in arguments.items() if name not in fixed}
        self.steps.append(Step.of(kernel.name, programs, given))

    def _multiply_mapped(
        self,
        kernel: Kernel,
        a: Operand,
        b: Operand,
        c: Operand,
        chunk: Chunk,
        terms: int,
        parts: int,
        depth: int,
    ) -> None:
        """Launch a kernel of ``hopper_bytes`` over a chunk."""
        a = replace(a, pointer=a.at(*chunk.start), rows=chunk.rows, cols=terms)
        b = replace(b, pointer=b.at(*chunk.start[:2]), cols=terms)
        c = replace(c, rows=chunk.rows)
        batch = chunk.outer, chunk.inner
        if c.pointer.operand == 2:
            c_map = replace(c, pointer=c.at(*chunk.start)).tensor(*batch)
        elif parts == 1:
            c_map = replace(c, cols=c.strides.row).tensor(*batch)
        else:
            matrix = chunk.rows * c.strides.row
            strides = replace(c.strides, outer=matrix * chunk.matrices, inner=matrix)
            c = replace(c, cols=c.strides.row, strides=strides)
            c_map = c.tensor(parts, chunk.matrices)
        tile_m, tile_n, _ = kernel.tile
        programs = math.prod(_tiles(chunk.rows, b.rows, tile_m, tile_n)) * chunk.matrices * parts
        arguments = (
            _named("a b c", a.tensor(*batch), b.tensor(*batch), c_map)
            | _named("m n k", chunk.rows, b.rows, terms)
            | _named("outer inner", *batch)
            | _named("a_outer a_inner", int(a.strides.outer > 0), int(a.strides.inner > 0))
            | _named("b_outer b_inner", int(b.strides.outer > 0), int(b.strides.inner > 0))
            | _named("parts depth", parts, depth)
            # A wave of tiles about as wide as it is high reads the least of a and b.
            | _named("group", max(1, round(math.sqrt(self.multiprocessors * tile_n / tile_m))))
        )
        blocks = min(programs, self.multiprocessors)
        self.steps.append(Step.of(kernel.name, blocks, arguments))

    def _finish(
        self,
        sums: str,
        place: Pointer,
        row: int,
        parts: int,
        chunk: Chunk,
        is_complex: bool,
        power: int,
    ) -> None:
        """Launch what adds up parts, ``row`` numbers to a row, and writes a chunk of C."""
        p = self.problem
        tiles = {width: _tiles(chunk.rows, p.n, *tile) for width, tile in FINISH_TILES.items()}
        is_wide = math.prod(tiles["_wide"]) * chunk.matrices >= 2 * self.multiprocessors
        width = "_wide" if is_wide else ""
        tiles_m, tiles_n = tiles[width]
        is_integer = sums == "i32"
        part = chunk.matrices * chunk.rows * row
        written = chunk.matrices * chunk.rows * p.n * self.c.item_bytes
        us = (parts * part * _BYTES[sums] + written) / _BYTES_PER_US
        self._take(us, times=chunk.times)
        if self._is_draft:
            return
        arguments = (
            _named("sums c", place, self.c.at(*chunk.start))
            | _named("rows cols inner", chunk.rows, p.n, chunk.inner)
            | _named("sums_row parts part_step", row >> is_complex, parts, part)
            | self.c.strides.arguments("c")
            | _named("tiles_m tiles_n", tiles_m, tiles_n)
            | _named("stored", self.integer_size if is_integer else STORED[p.c_dtype][0])
            | self._factors(power, is_complex)
        )
        if is_integer:
            arguments["power"] = power
        name = f"finish_{sums}" + "_complex" * is_complex + width
        self.steps.append(Step.of(name, tiles_m * tiles_n * chunk.matrices, arguments))

    def _factors(self, power: int, is_complex: bool) -> Arguments:
        """Return alpha and beta: the caller's, and 1 for what is added to the power before."""
        updates = self.problem.updates
        factors = _named("alpha beta", Number(0) if updates else 1, Number(1) if updates else 0)
        if power:
            factors["beta"] = 1
        if is_complex:
            imag = (Number(2), Number(3)) if updates else (0, 0)
            factors |= _named("alpha_imag beta_imag", *imag)
        return factors

    def _multiply_us(self, programs: int, work: int, rate: float) -> float:
        """Return how long the busiest multiprocessor takes for its programs."""
        return math.ceil(programs / self.multiprocessors) * work * 132 / (rate * 1e6)

    def _take(self, us: float, launch_us: float = _LAUNCH_US, *, times: int = 1) -> None:
        """Count the time of a launch, or of so many."""
        self.us += times * (us + launch_us)


def _named(names: str, *values: Any) -> Arguments:
    return dict(zip(names.split(), values, strict=True))


def _sign_bit(dtype: str) -> int:
    """Return the sign bit of a signed integer type, as int64; 0 for every other type."""
    if not dtype.startswith("int"):
        return 0
    bits = 8 * STORED[dtype][1]
    return -(1 << 63) if bits == 64 else 1 << (bits - 1)


def _tiles(m: int, n: int, tile_m: int, tile_n: int) -> tuple[int, int]:
    return -(-m // tile_m), -(-n // tile_n)


def _tile_count(p: Problem, tile_m: int, tile_n: int) -> int:
    return math.prod(_tiles(p.m, p.n, tile_m, tile_n))
