"""Blocks that stay keep near each other in K, so that the L2 cache has for one what another read.

Blocks that take one tile after the other drift apart, since nothing holds them together; after some
hundreds of tiles each reads most of its operands from memory for itself, which takes time, and
power that tensor cores would have had. So each says when it begins a stretch of K, and one that is
ahead waits for the others: but never for long, since some of them may not run yet. Bits do not
depend on any of it.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs
# mypy: disable-error-code="untyped-decorator, no-untyped-call"

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

__all__ = ["Pace"]

# Of K. What blocks read in two of them should fit into the L2 cache.
STRETCH = gl.constexpr(512)
# Looks, each of which takes a microsecond or less, as we think.
PATIENCE = gl.constexpr(256)


@gluon.aggregate
class Pace:
    """How many stretches all blocks have begun: in global memory, from zero, or null if not kept.

    A block's tiles are those of ``index`` program_id(0), and num_programs(0) on, each of ``k``.
    """

    progress: gl.tensor
    k: gl.tensor

    @gluon.jit
    def patience(self):
        """Return how often a block looks for the others, at first."""
        return gl.where(self.progress.to(gl.int64) != 0, PATIENCE, 0)

    @gluon.jit
    def begin(self, index, k, patience):
        """Begin a tile's stretch, if one begins at ``k``, once the average block began the last.

        Returns how often the block will look next time: half as often, if that was in vain.
        """
        if (k % STRETCH == 0) & (patience > 0):
            enough = (index - gl.program_id(0)) * gl.cdiv(self.k, STRETCH)
            enough += k // STRETCH * gl.num_programs(0)
            # What this returns is left alone: two blocks of a pair would wait for each other's.
            gl.atomic_add(self.progress, 1, sem="relaxed")
            seen = gl.load(self.progress, volatile=True)
            looks = patience
            while (seen < enough) & (looks > 0):
                seen = gl.load(self.progress, volatile=True)
                looks -= 1
            if seen < enough:
                patience = gl.maximum(patience // 2, 1)
        return patience

    @gluon.jit
    def skip(self, patience):
        """Say that a block has no need of a tile."""
        if patience > 0:
            gl.atomic_add(self.progress, gl.cdiv(self.k, STRETCH), sem="relaxed")

    @gluon.jit
    def finish(self, tiles, patience):
        """Say that a block has none of the last of so many tiles, where others have."""
        if gl.program_id(0) > (tiles - 1) % gl.num_programs(0):
            self.skip(patience)
