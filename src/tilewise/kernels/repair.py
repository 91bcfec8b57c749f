"""What float16 cannot hold: flagged rows and columns of a float32 product, by plain FMA, in Gluon.

`list_flagged` makes lists of what `split` or a product flagged; `repair` computes the listed rows
and columns of C from A and B themselves. How many there are is known on the device alone: a launch
that finds none is done at once, and a few rows cost what reading the other operand does.

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

__all__ = ["FLAGS", "list_flagged", "list_rows", "list_tile", "repair", "write"]

FLAGS = gl.constexpr(128)  # that are counted together: the side of the tiles that may be left out
DEPTH = gl.constexpr(8)  # of K, that is in registers at a time
PADDED = gl.constexpr(16)  # what K is a multiple of, in ``portable`` too
FEW = gl.constexpr(16)  # rows that are worth a tile of their own size


@gluon.jit
def list_flagged(
    a_flag,
    b_flag,
    a_list,
    b_list,
    a_count,
    b_count,
    a_tile,
    b_tile,
    m,
    n,
    a_tiles,
):
    """List flagged rows of A and columns of B, in any order, and count them by matrix and by tile.

    Counts of matrices are 0 before. The first ``a_tiles`` programs are for A.
    """
    gdc_wait()
    gdc_launch_dependents()
    tile = gl.program_id(0)
    if tile < a_tiles:
        list_tile(a_flag, a_list, a_count, a_tile, tile, m)
    else:
        list_tile(b_flag, b_list, b_count, b_tile, tile - a_tiles, n)


@gluon.jit
def list_tile(flag, to, count, of_tile, tile, rows):
    """List what is flagged of one tile's rows."""
    warps: gl.constexpr = gl.num_warps()
    layout: gl.constexpr = gl.BlockedLayout([FLAGS // (32 * warps)], [32], [warps], [0])
    tiles = gl.cdiv(rows, FLAGS)
    matrix = tile // tiles
    i = (tile % tiles) * FLAGS + gl.arange(0, FLAGS, layout)
    flagged = gl.load(flag + matrix * rows + i, mask=i < rows, other=0) != 0
    one = flagged.to(gl.int32)
    total = gl.sum(one, 0)
    gl.store(of_tile + tile, total)
    if total > 0:
        first = gl.atomic_add(count + matrix, total)
        place = gl.associative_scan(one, 0, _add) - one
        gl.store(to + matrix * rows + first + place, i, mask=flagged)


@gluon.jit
def list_rows(flag, to, count, of_tile, matrix, i, rows, flagged):
    """Flag rows, and list those that nobody flagged before; every thread has one of them."""
    was = gl.atomic_xchg(flag + matrix * rows + i, 1, mask=flagged)
    is_new = flagged & (was == 0)
    place = gl.atomic_add(count + matrix + 0 * i, 1, mask=is_new)
    gl.store(to + matrix * rows + place, i, mask=is_new)
    gl.atomic_add(of_tile + matrix * gl.cdiv(rows, FLAGS) + i // FLAGS, 1, mask=is_new)


@gluon.jit
def _add(x, y):
    return x + y


@gluon.jit
def repair(
    a,
    b,
    c,
    a_list,
    b_list,
    a_count,
    b_count,
    a_flag,
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
    """Write the flagged rows of C = alpha·A·B + beta·C, and the flagged columns of all others.

    ``share`` programs work on each matrix. Lists and counts of A's lie in the order of its own
    matrices, of which ``outer · a_next_outer + inner · a_next_inner`` multiplies. PAIRS is 1 where
    everything is complex, and all sizes are those of the real matrices that stand for it.
    """
    gdc_wait()
    gdc_launch_dependents()
    step = gl.num_programs(0) // share
    for matrix in range(gl.program_id(0) // share, matrices, step):
        outer = matrix // inner
        within = matrix % inner
        of_a = outer * a_next_outer + within * a_next_inner
        of_b = outer * b_next_outer + within * b_next_inner
        rows = gl.load(a_count + of_a)
        columns = gl.load(b_count + of_b)
        a_at = a + outer.to(gl.int64) * a_outer + within.to(gl.int64) * a_inner
        b_at = b + outer.to(gl.int64) * b_outer + within.to(gl.int64) * b_inner
        c_at = c + outer.to(gl.int64) * c_outer + within.to(gl.int64) * c_inner
        left = Operand(a_at, m, a_row, a_col, c_row, A_ALONG_K, False, PAIRS)
        right = Operand(b_at, n, b_col, b_row, c_col, B_ALONG_K, True, PAIRS)
        task = Task(c_at, a_flag + of_a * m, k, chain_k, alpha, beta)
        # From both ends, so that a few rows and a few columns are different programs' work.
        one = gl.program_id(0) % share
        _sides(task, left, right, a_list + of_a * m, rows, one, share)
        _sides(task, right, left, b_list + of_b * n, columns, share - 1 - one, share)


@gluon.aggregate
class Operand:
    """A, or B transposed: rows over k, in any strides, with C's step from row to row."""

    start: gl.tensor
    rows: gl.tensor
    row: gl.tensor
    col: gl.tensor
    c: gl.tensor
    ALONG_K: gl.constexpr
    IS_B: gl.constexpr
    PAIRS: gl.constexpr

    @gluon.jit
    def places(self, i):
        """Return where rows begin."""
        if self.IS_B:
            i = i >> self.PAIRS
        return self.start + i.to(gl.int64) * self.row

    @gluon.jit
    def across(self, i, j):
        """Return how far on from there k is ``j``; for complex B that depends on the row, too."""
        part = j & self.PAIRS
        if self.IS_B:
            part = part ^ (i & self.PAIRS)
        return (j >> self.PAIRS).to(gl.int64) * self.col + part

    @gluon.jit
    def in_c(self, i):
        at = i.to(gl.int64) * self.c
        if self.IS_B:
            at = (i >> self.PAIRS).to(gl.int64) * self.c + (i & self.PAIRS)
        return at


@gluon.aggregate
class Task:
    """What is computed of one matrix, whichever side is listed."""

    c: gl.tensor
    a_flag: gl.tensor
    k: gl.tensor
    chain_k: gl.tensor
    alpha: gl.tensor
    beta: gl.tensor


@gluon.jit
def _sides(task, x, y, to, count, first, share):
    """Compute the listed rows of x with all of y, in tiles that suit their number."""
    if count > FEW:
        _tiles(task, x, y, to, count, first, share, 128, 128, 4, 1)
    else:
        _tiles(task, x, y, to, count, first, share, 16, 64, 8, 2)


@gluon.jit
def _tiles(
    task,
    x,
    y,
    to,
    count,
    first,
    share,
    ROWS: gl.constexpr,
    COLS: gl.constexpr,
    SLICES: gl.constexpr,
    AT_ONCE: gl.constexpr,
):
    """Compute the listed rows of x with all of y: tile ``first`` and every ``share``-th from there.

    ``SLICES`` times DEPTH of K are loaded at a time, two steps ahead.
    """
    stages: gl.constexpr = 3
    step: gl.constexpr = SLICES * DEPTH
    sums: gl.constexpr = _sums_layout(ROWS)
    x_read: gl.constexpr = _read_layout(ROWS, x.ALONG_K)
    y_read: gl.constexpr = _read_layout(COLS, y.ALONG_K)
    x_ring = _ring(stages * SLICES, ROWS)
    y_ring = _ring(stages * SLICES, COLS)
    total = gl.allocate_shared_memory(
        gl.float32, [ROWS, COLS], gl.SwizzledSharedLayout(4, 1, 8, [1, 0])
    )
    of_x: gl.constexpr = gl.DotOperandLayout(0, sums, 0)
    of_y: gl.constexpr = gl.DotOperandLayout(1, sums, 0)
    x_i = gl.arange(0, ROWS, gl.SliceLayout(1, x_read))
    y_i = gl.arange(0, COLS, gl.SliceLayout(1, y_read))
    x_j = gl.arange(0, DEPTH, gl.SliceLayout(0, x_read))
    y_j = gl.arange(0, DEPTH, gl.SliceLayout(0, y_read))
    tiles_y = gl.cdiv(y.rows, COLS)
    for tile in range(first, gl.cdiv(count, ROWS) * tiles_y, share):
        row = tile // tiles_y * ROWS
        col = tile % tiles_y * COLS
        x_row = gl.load(to + row + x_i, mask=row + x_i < count, other=0)
        # Rows beyond the last are computed like others, and not written.
        y_row = gl.minimum(col + y_i, y.rows - 1)
        if x.IS_B:
            listed = row + gl.arange(0, ROWS, gl.SliceLayout(1, of_x))
            b_row = gl.load(to + listed, mask=listed < count, other=0)
            sign = _sign(b_row[:, None], gl.arange(0, DEPTH, gl.SliceLayout(0, of_x))[None, :])
        else:
            b_row = col + gl.arange(0, COLS, gl.SliceLayout(0, of_y))
            sign = _sign(b_row[None, :], gl.arange(0, DEPTH, gl.SliceLayout(1, of_y))[:, None])
        x_at = x.places(x_row)[:, None] + x.across(x_row[:, None], x_j[None, :])
        y_at = y.places(y_row)[:, None] + y.across(y_row[:, None], y_j[None, :])
        for begin in range(0, task.k, task.chain_k):
            end = gl.minimum(begin + task.chain_k, task.k)
            chain = gl.zeros([ROWS, COLS], gl.float32, sums)
            for ahead in gl.static_range(stages - 1):
                rest = end - (begin + ahead * step)
                x_at = _load(x, x_at, x_ring, ahead, x_j, rest, SLICES)
                y_at = _load(y, y_at, y_ring, ahead, y_j, rest, SLICES)
                async_copy.commit_group()
            slot = 0
            for done in range(begin, end, step):
                async_copy.wait_group(stages - 2)
                # Loops that are not unrolled: else more is held in registers than there are.
                there = gl.minimum(gl.cdiv(end - done, PADDED) * (PADDED // DEPTH), SLICES)
                for pair in range(0, there, AT_ONCE):
                    for i in gl.static_range(AT_ONCE):
                        u = x_ring.index(slot * SLICES + pair + i).load(of_x)
                        v = y_ring.index(slot * SLICES + pair + i).permute((1, 0)).load(of_y)
                        if x.PAIRS:
                            if x.IS_B:
                                u = u * sign
                            else:
                                v = v * sign
                        chain = gl.dot_fma(u, v, chain)
                # Into the slot that was read a step ago, which all threads have left.
                into = (slot + stages - 1) % stages
                rest = end - (done + (stages - 1) * step)
                x_at = _load(x, x_at, x_ring, into, x_j, rest, SLICES)
                y_at = _load(y, y_at, y_ring, into, y_j, rest, SLICES)
                async_copy.commit_group()
                slot = (slot + 1) % stages
            async_copy.wait_group(0)
            # What was loaded ahead belongs to the next chain, whose terms are whole steps on.
            x_at -= x.across(0, gl.to_tensor((stages - 1) * step))
            y_at -= y.across(0, gl.to_tensor((stages - 1) * step))
            if begin > 0:
                chain = total.load(sums) + chain
            total.store(chain)
        _finish(task, x, y, to, row, col, count, total)


@gluon.jit
def _load(operand, at, ring, slot, j, rest, SLICES: gl.constexpr):
    """Load a step of K, with zeros where it has no ``rest``; return the place of the next."""
    for i in gl.static_range(SLICES):
        inside = (j < rest - i * DEPTH)[None, :]
        async_copy.async_load(ring.index(slot * SLICES + i), at, mask=inside)
        at += operand.across(0, gl.to_tensor(DEPTH))
    return at


@gluon.jit
def _sign(i, k):
    """Return the sign of what stands for complex B: [[re, im], [-im, re]] over k and i."""
    return gl.where((k & 1) > (i & 1), -1.0, 1.0)


@gluon.jit
def _ring(SLOTS: gl.constexpr, ROWS: gl.constexpr):
    """Return room for operands, k by k, in which reading along k meets few conflicts."""
    layout: gl.constexpr = gl.SwizzledSharedLayout(4, 1, min(8, ROWS // 4), [0, 1])
    return gl.allocate_shared_memory(gl.float32, [SLOTS, ROWS, DEPTH], layout)


@gluon.jit
def _finish(task, x, y, to, row, col, count, total):
    """Write a tile, some rows at a time, since the addresses of all would not fit into registers.

    Flagged rows of A are not for the side that lists columns.
    """
    layout: gl.constexpr = gl.BlockedLayout([1, 1], [1, 32], [8, 1], [1, 0])
    slabs = total.reinterpret(gl.float32, [total.shape[0] // 16, 16, total.shape[1]], total.layout)
    j = col + gl.arange(0, total.shape[1], gl.SliceLayout(0, layout))
    for slab in range(total.shape[0] // 16):
        i = row + slab * 16 + gl.arange(0, 16, gl.SliceLayout(1, layout))
        x_row = gl.load(to + i, mask=i < count, other=0)
        inside = (i < count)[:, None] & (j < y.rows)[None, :]
        if x.IS_B:
            flagged = gl.load(task.a_flag + j, mask=j < y.rows, other=1)
            inside = inside & (flagged == 0)[None, :]
        at = task.c + x.in_c(x_row)[:, None] + y.in_c(j)[None, :]
        write(at, inside, slabs.index(slab).load(layout), task.alpha, task.beta)


@gluon.jit
def write(at, inside, x, alpha, beta):
    """Write alpha·x + beta·C, as ``portable.multiply`` does: 0 times anything is 0 here."""
    x = gl.where(alpha == 0.0, 0.0, x * alpha)
    if beta != 0.0:
        x = gl.fma(gl.load(at, mask=inside, other=0.0), beta, x)
    gl.store(at, x, mask=inside)


@gluon.constexpr_function
def _sums_layout(rows):
    """Return which threads sum what: such that shared memory is read without conflicts."""
    if rows == 16:
        return gl.BlockedLayout([2, 2], [8, 4], [1, 8], [1, 0])
    return gl.BlockedLayout([4, 4], [4, 8], [4, 2], [1, 0])


@gluon.constexpr_function
def _read_layout(rows, along_k):
    """Return how rows over DEPTH of k are read."""
    if along_k:
        return gl.BlockedLayout([1, 1], [4, 8], [8, 1], [1, 0])
    lanes, warps = min(rows, 32), max(1, min(rows // 32, 8))
    return gl.BlockedLayout([1, 1], [lanes, 32 // lanes], [warps, 8 // warps], [0, 1])
