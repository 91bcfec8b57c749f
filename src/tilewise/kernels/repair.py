"""What float16 cannot hold: flagged rows and columns of a float32 product, by plain FMA, in Gluon.

`repair` computes the listed rows of C (``flags``), and the listed columns of all other rows, from A
and B themselves. How many there are is known on the device alone: a launch that finds none is done
at once, and a few rows cost what reading the other operand does. Where a row of A or a column of B
holds a NaN, C is NaN, which is written without reading anything.

**Order of summation.** One chain of FMAs over k for each piece of K, from zero, K padded to 16 with
zeros; the chains' sums are added in order. So the bits are those of ``portable.multiply``.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs
# mypy: disable-error-code="untyped-decorator, no-untyped-call, call-arg"

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from .flags import COMPUTED, FILLED, LISTS, list_of

__all__ = ["repair", "write"]

DEPTH = gl.constexpr(8)  # of K, that is in registers at a time
PADDED = gl.constexpr(16)  # what K is a multiple of, in ``portable`` too
STAGES = gl.constexpr(3)
FEW = gl.constexpr(16)  # rows or columns that are worth a tile of their own size


@gluon.jit
def repair(
    a,
    b,
    c,
    a_list,
    b_list,
    a_count,
    b_count,
    b_flag,
    m,
    n,
    k,
    chain_k,
    inner,
    matrices,
    share,
    a_next_outer,
    a_next_inner,
    b_next_outer,
    b_next_inner,
    a_outer,
    a_inner,
    a_row,
    a_col,
    b_outer,
    b_inner,
    b_row,
    b_col,
    c_outer,
    c_inner,
    c_row,
    c_col,
    alpha,
    beta,
    A_ALONG_K: gl.constexpr,
    B_ALONG_K: gl.constexpr,
    PAIRS: gl.constexpr,
):
    """Write the flagged rows of C = alpha·A·B + beta·C, and flagged columns of the other rows.

    ``share`` programs work on each matrix. Lists and counts of A's lie in the order of its own
    matrices, of which ``outer · a_next_outer + inner · a_next_inner`` multiplies. PAIRS is 1 where
    everything is complex, and all sizes are those of the real matrices that stand for it.
    """
    gdc_wait()
    gdc_launch_dependents()
    work = Work(
        a_list,
        b_list,
        a_count,
        b_count,
        b_flag,
        m,
        n,
        k,
        chain_k,
        share,
        a_next_outer,
        a_next_inner,
        b_next_outer,
        b_next_inner,
    )
    left = Operand(a, a_outer, a_inner, a_row, a_col, A_ALONG_K, 0, PAIRS)
    right = Operand(b, b_outer, b_inner, b_col, b_row, B_ALONG_K, PAIRS, PAIRS)
    out = Out(c, c_outer, c_inner, c_row, c_col, alpha, beta, PAIRS)
    step = gl.num_programs(0) // share
    for matrix in range(gl.program_id(0) // share, matrices, step):
        at_outer, at_inner = matrix // inner, matrix % inner
        if work.has_listed(at_outer, at_inner):
            for index in range(2 * LISTS):
                side = work.side(at_outer, at_inner, index)
                if side.is_filled:
                    _fill(work, out, side, at_outer, at_inner)
                elif side.count > FEW:
                    _tiles(work, left, right, out, side, at_outer, at_inner, 128, 128, 2)
                elif side.count > 0:
                    if side.is_whole:
                        _tiles(work, left, right, out, side, at_outer, at_inner, 4, 64, 8)
                    else:
                        _tiles(work, left, right, out, side, at_outer, at_inner, 64, 4, 8)


@gluon.aggregate
class Operand:
    """A, or B transposed: rows over k, in any strides."""

    start: gl.tensor
    outer: gl.tensor
    inner: gl.tensor
    row: gl.tensor
    col: gl.tensor
    ALONG_K: gl.constexpr
    ROW_PAIRS: gl.constexpr
    PAIRS: gl.constexpr

    @gluon.jit
    def places(self, outer, inner, i, j):
        """Return where terms ``j`` of a matrix's rows ``i`` are."""
        at = self.start + outer.to(gl.int64) * self.outer + inner.to(gl.int64) * self.inner
        at = at + ((i >> self.ROW_PAIRS).to(gl.int64) * self.row)[:, None]
        if self.PAIRS:
            # B's element is [[re, im], [-im, re]]: what is where depends on the row, too.
            at += (j & 1)[None, :] ^ (i & self.ROW_PAIRS)[:, None]
        return at + self.steps(j)[None, :]

    @gluon.jit
    def steps(self, j):
        """Return how far on a term, or the pair that it is in, is."""
        return (j >> self.PAIRS).to(gl.int64) * self.col

    @gluon.jit
    def load(self, at, ring, stage, rest, SLICES: gl.constexpr, layout: gl.constexpr):
        """Load a step of K, with zeros where it has no ``rest``; return the place of the next."""
        j = gl.arange(0, DEPTH, gl.SliceLayout(0, layout))
        for i in gl.static_range(SLICES):
            inside = (j < rest - i * DEPTH)[None, :]
            async_copy.async_load(ring.index(stage * SLICES + i), at, mask=inside)
            at += self.steps(gl.to_tensor(DEPTH))
        return at


@gluon.aggregate
class Out:
    """C, and how results get there."""

    start: gl.tensor
    outer: gl.tensor
    inner: gl.tensor
    row: gl.tensor
    col: gl.tensor
    alpha: gl.tensor
    beta: gl.tensor
    PAIRS: gl.constexpr

    @gluon.jit
    def columns(self, outer, inner, j):
        """Return where columns of a matrix begin."""
        at = self.start + outer.to(gl.int64) * self.outer + inner.to(gl.int64) * self.inner
        return at + ((j >> self.PAIRS).to(gl.int64) * self.col + (j & self.PAIRS))


@gluon.aggregate
class Work:
    """What there is to do, and how it is shared out."""

    a_list: gl.tensor
    b_list: gl.tensor
    a_count: gl.tensor
    b_count: gl.tensor
    b_flag: gl.tensor
    m: gl.tensor
    n: gl.tensor
    k: gl.tensor
    chain_k: gl.tensor
    share: gl.tensor
    a_next_outer: gl.tensor
    a_next_inner: gl.tensor
    b_next_outer: gl.tensor
    b_next_inner: gl.tensor

    @gluon.jit
    def has_listed(self, outer, inner):
        """Say whether a matrix has anything to do, having waited for memory once."""
        rows = self.a_count + self.of_a(outer, inner) * (LISTS + 1)
        columns = self.b_count + self.of_b(outer, inner) * (LISTS + 1)
        listed = 0
        for which in gl.static_range(LISTS):
            listed |= gl.load(rows + which) | gl.load(columns + which)
        return listed != 0

    @gluon.jit
    def of_a(self, outer, inner):
        """Return which matrix of A multiplies."""
        return outer * self.a_next_outer + inner * self.a_next_inner

    @gluon.jit
    def of_b(self, outer, inner):
        return outer * self.b_next_outer + inner * self.b_next_inner

    @gluon.jit
    def side(self, outer, inner, index):
        """Return a matrix's rows of a list with all columns, or the rows that are not flagged with
        columns of a list.
        """
        which = index // 2
        is_whole = index % 2 == 0
        at = self.of_a(outer, inner)
        listed = gl.load(self.a_count + at * (LISTS + 1) + which)
        rest = gl.load(self.a_count + at * (LISTS + 1) + LISTS)
        first = self.a_list + at * LISTS * self.m
        at = self.of_b(outer, inner)
        columns = gl.load(self.b_count + at * (LISTS + 1) + which)
        # From both ends, so that a few rows and a few columns are different programs' work.
        one = gl.program_id(0) % self.share
        return Side(
            gl.where(is_whole, one, self.share - 1 - one),
            gl.where(is_whole, listed, columns),
            gl.where(is_whole, first + which * self.m, first + (self.m - 1)),
            gl.where(is_whole, 1, -1),
            gl.where(is_whole, listed, rest),
            self.b_list + (at * LISTS + which) * self.n,
            self.b_flag + at * self.n,
            is_whole,
            which == FILLED,
            gl.where(is_whole, self.n, columns),
        )


@gluon.aggregate
class Side:
    """A list of rows, forward or backward; and one of columns, unless they are all.

    ``count`` of them are listed; this program's first tile is ``first``.
    """

    first: gl.tensor
    count: gl.tensor
    row_list: gl.tensor
    next: gl.tensor
    rows: gl.tensor
    column_list: gl.tensor
    column_flag: gl.tensor
    is_whole: gl.tensor
    is_filled: gl.tensor
    columns: gl.tensor

    @gluon.jit
    def row(self, i):
        """Return the numbers of rows; beyond the last, the last."""
        return gl.load(self.row_list + gl.minimum(i, self.rows - 1) * self.next)

    @gluon.jit
    def column(self, j):
        j = gl.minimum(j, self.columns - 1)
        if not self.is_whole:
            j = gl.load(self.column_list + j)
        return j

    @gluon.jit
    def holds(self, number):
        """Say of columns' numbers whether no other list has them now."""
        which = gl.where(self.is_filled, FILLED, COMPUTED)
        return self.is_whole | (list_of(gl.load(self.column_flag + number)) == which)


@gluon.jit
def _tiles(
    work,
    left,
    right,
    out,
    side,
    outer,
    inner,
    ROWS: gl.constexpr,
    COLS: gl.constexpr,
    SLICES: gl.constexpr,
):
    """Compute this program's tiles of a side, ``SLICES`` times DEPTH of K at a time."""
    step: gl.constexpr = SLICES * DEPTH
    sums: gl.constexpr = _sums_layout(ROWS, COLS)
    of_a: gl.constexpr = gl.DotOperandLayout(0, sums, 0)
    of_b: gl.constexpr = gl.DotOperandLayout(1, sums, 0)
    a_read: gl.constexpr = _read_layout(ROWS, left.ALONG_K)
    b_read: gl.constexpr = _read_layout(COLS, right.ALONG_K)
    a_ring = _ring(STAGES * SLICES, ROWS)
    b_ring = _ring(STAGES * SLICES, COLS)
    total = gl.allocate_shared_memory(gl.float32, [ROWS, COLS], _total_layout(ROWS, COLS))
    a_k = gl.arange(0, DEPTH, gl.SliceLayout(0, a_read))
    b_k = gl.arange(0, DEPTH, gl.SliceLayout(0, b_read))
    across = gl.cdiv(side.columns, COLS)
    for tile in range(side.first, gl.cdiv(side.rows, ROWS) * across, work.share):
        row = tile // across * ROWS
        col = tile % across * COLS
        i = side.row(row + gl.arange(0, ROWS, gl.SliceLayout(1, a_read)))
        a_at = left.places(outer, inner, i, a_k)
        j = side.column(col + gl.arange(0, COLS, gl.SliceLayout(1, b_read)))
        b_at = right.places(outer, inner, j, b_k)
        if left.PAIRS:
            number = side.column(col + gl.arange(0, COLS, gl.SliceLayout(0, of_b)))
            is_odd = gl.arange(0, DEPTH, gl.SliceLayout(1, of_b)) % 2 != 0
            signs = gl.where(is_odd[:, None] & (number % 2 == 0)[None, :], -1.0, 1.0)
        for stage in gl.static_range(STAGES - 1):
            a_at = left.load(a_at, a_ring, stage, work.k - stage * step, SLICES, a_read)
            b_at = right.load(b_at, b_ring, stage, work.k - stage * step, SLICES, b_read)
            async_copy.commit_group()
        stage = 0
        for begin in range(0, work.k, work.chain_k):
            end = gl.minimum(begin + work.chain_k, work.k)
            chain = gl.zeros([ROWS, COLS], gl.float32, sums)
            for done in range(begin, end, step):
                async_copy.wait_group(STAGES - 2)
                # Into the stage that was read a step ago, ahead of the products, which take longer.
                into = gl.where(stage == 0, STAGES, stage) - 1
                rest = work.k - done - (STAGES - 1) * step
                a_at = left.load(a_at, a_ring, into, rest, SLICES, a_read)
                b_at = right.load(b_at, b_ring, into, rest, SLICES, b_read)
                async_copy.commit_group()
                there = gl.cdiv(end - done, PADDED) * (PADDED // DEPTH)
                if (ROWS * COLS <= 256) & (there >= SLICES):
                    # What a few sums take is the time to shared memory, unless reads run ahead.
                    for part in gl.static_range(SLICES):
                        u, v = _slices(a_ring, b_ring, stage * SLICES + part, of_a, of_b)
                        if left.PAIRS:
                            v = v * signs
                        chain = gl.dot_fma(u, v, chain)
                else:
                    # Not unrolled: else more is held in registers than there are.
                    for part in range(gl.minimum(there, SLICES)):
                        u, v = _slices(a_ring, b_ring, stage * SLICES + part, of_a, of_b)
                        if left.PAIRS:
                            v = v * signs
                        chain = gl.dot_fma(u, v, chain)
                stage = gl.where(stage + 1 == STAGES, 0, stage + 1)
            if begin > 0:
                chain = total.load(sums) + chain
            total.store(chain)
        async_copy.wait_group(0)
        _finish(out, side, outer, inner, row, col, total)


@gluon.jit
def _slices(a_ring, b_ring, slot, of_a: gl.constexpr, of_b: gl.constexpr):
    """Return DEPTH of k of both operands."""
    return a_ring.index(slot).load(of_a), b_ring.index(slot).permute((1, 0)).load(of_b)


@gluon.jit
def _ring(SLOTS: gl.constexpr, ROWS: gl.constexpr):
    """Return room for operands, k by k, in which reading along k meets few conflicts."""
    layout: gl.constexpr = gl.SwizzledSharedLayout(4, 1, min(8, ROWS // 4), [0, 1])
    return gl.allocate_shared_memory(gl.float32, [SLOTS, ROWS, DEPTH], layout)


@gluon.jit
def _finish(out, side, outer, inner, row, col, total):
    """Write a tile, some rows at a time, since the addresses of all would not fit in registers."""
    layout: gl.constexpr = gl.BlockedLayout([1, 1], [1, 32], [8, 1], [1, 0])
    high: gl.constexpr = min(total.shape[0], 16)
    wide: gl.constexpr = total.shape[1]
    slabs = total.reinterpret(gl.float32, [total.shape[0] // high, high, wide], total.layout)
    j = col + gl.arange(0, wide, gl.SliceLayout(0, layout))
    number = side.column(j)
    is_column = (j < side.columns) & side.holds(number)
    at = out.columns(outer, inner, number)
    for slab in range(total.shape[0] // high):
        i = row + slab * high + gl.arange(0, high, gl.SliceLayout(1, layout))
        inside = (i < side.rows)[:, None] & is_column[None, :]
        place = at[None, :] + (side.row(i).to(gl.int64) * out.row)[:, None]
        write(place, inside, slabs.index(slab).load(layout), out.alpha, out.beta)


@gluon.jit
def _fill(work, out, side, outer, inner):
    """Write this program's tiles of a side of NaN."""
    layout: gl.constexpr = gl.BlockedLayout([1, 1], [1, 32], [8, 1], [1, 0])
    high: gl.constexpr = 16
    wide: gl.constexpr = 256
    nan = gl.full([high, wide], 0x7FFFFFFF, gl.int32, layout).to(gl.float32, bitcast=True)
    across = gl.cdiv(side.columns, wide)
    for tile in range(side.first, gl.cdiv(side.rows, high) * across, work.share):
        i = tile // across * high + gl.arange(0, high, gl.SliceLayout(1, layout))
        j = tile % across * wide + gl.arange(0, wide, gl.SliceLayout(0, layout))
        number = side.column(j)
        is_column = (j < side.columns) & side.holds(number)
        inside = (i < side.rows)[:, None] & is_column[None, :]
        at = out.columns(outer, inner, number)[None, :]
        at += (side.row(i).to(gl.int64) * out.row)[:, None]
        write(at, inside, nan, out.alpha, out.beta)


@gluon.jit
def write(at, inside, x, alpha, beta):
    """Write alpha·x + beta·C, as ``portable.multiply`` does: 0 times anything is 0 here."""
    x = gl.where(alpha == 0.0, 0.0, x * alpha)
    if beta != 0.0:
        x = gl.fma(gl.load(at, mask=inside, other=0.0), beta, x)
    gl.store(at, x, mask=inside)


@gluon.constexpr_function
def _total_layout(rows, columns):
    """Return how sums lie in shared memory on their way to C."""
    return gl.SwizzledSharedLayout(4, 1, 8 if min(rows, columns) >= 32 else 1, [1, 0])


@gluon.constexpr_function
def _sums_layout(rows, columns):
    """Return which threads sum what: such that shared memory is read without conflicts."""
    if rows == 4:
        return gl.BlockedLayout([1, 1], [1, 32], [4, 2], [1, 0])
    if columns == 4:
        return gl.BlockedLayout([1, 1], [32, 1], [2, 4], [0, 1])
    return gl.BlockedLayout([4, 4], [4, 8], [4, 2], [1, 0])


@gluon.constexpr_function
def _read_layout(rows, along_k):
    """Return how rows over DEPTH of k are read."""
    if along_k:
        return gl.BlockedLayout([1, 1], [4, 8], [8, 1], [1, 0])
    lanes, warps = min(rows, 32), max(1, min(rows // 32, 8))
    return gl.BlockedLayout([1, 1], [lanes, 32 // lanes], [warps, 8 // warps], [0, 1])
