"""What chapter 6 of the CUDA programming guide says of its kernel, sentence by sentence.

Two sentences of the (Chinese) chapter are not right as they stand. They are judged as they are
written, for information, and in the form that is true.
"""

from __future__ import annotations

from collections.abc import Callable

from ..evidence import Evidence
from .base import Claim, Judgement, refuted
from .memory import coalesced, conflict_free, one_word_a_half_warp, reads, reused
from .order import barrier_needed, barriers_reached, in_bounds, initialised, race_free
from .shape import (
    block_computes_a_square,
    block_is_warp_multiple,
    block_reads_columns,
    block_reads_rows,
    each_element_written_once,
    half_warp_is_a_row,
    loads_one_a_tile,
    thread_writes,
    threads_below_limit,
    written_at_the_end,
)
from .speed import limited_to

__all__ = ["guide"]

_TIMES = "节省许多全局内存带宽（A 和 B 仅从全局内存读取 (wA / block_size) 次）"
_SQUARE = "每个线程负责计算 C 的一个平方子矩阵 C_sub"
_MULTIPLES = (
    "假设 wA 和 wB 是 16 的倍数（如 5.1.2.1 所建议），则确保了全局内存合并，"
    "因为 a、b 和 c 都是 BLOCK_SIZE 的倍数，BLOCK_SIZE 等于 16"
)
_CONFLICTS = "对于每个半 warp，没有任何共享内存库冲突"


def _side(array: str, axis: int) -> Callable[[Evidence], float]:
    """A side of an array over the width of a block: the number of tiles along it."""

    def tiles(seen: Evidence) -> float:
        return seen.array(array).shape[axis] / seen.trial.block[0]

    return tiles


def _only_if_square(claim: Claim, array: str) -> Claim:
    """A claim that is true of square matrices only, and so not true."""

    def judge(seen: Evidence) -> Judgement:
        judged = claim.judge(seen)
        if judged.outcome == "REFUTED":
            return judged
        shapes = {seen.array(name).shape for name in ("A", "B")}
        side = seen.array(array).shape[0]
        if shapes == {(side, side)}:
            return Judgement(
                "HOLDS", f"{judged.detail}, since A and B are square here", "square matrices only"
            )
        return judged

    return Claim(claim.sentence, judge)


def _threads_compute_squares(array: str) -> Claim:
    """Each *thread* computes a square of more than one element."""

    def judge(seen: Evidence) -> Judgement:
        one = thread_writes(array).judge(seen)
        if one.outcome == "REFUTED":
            return Judgement("HOLDS", one.detail, "this launch")
        return refuted(f"{one.detail}; it is the block that computes a square")

    return Claim(f"each thread computes one square sub-matrix of {array}", judge)


#: The chapter's claims about Muld, in its order, for arrays named as in the chapter.
guide: tuple[Claim, ...] = (
    _threads_compute_squares("C").quoting(_SQUARE, form="as written"),
    block_computes_a_square("C").quoting(_SQUARE, form="corrected"),
    thread_writes("C").quoting("块内的每个线程负责计算 C_sub 的一个元素"),
    block_is_warp_multiple().quoting("每块的线程数是 warp 大小的倍数（参见 5.2）"),
    threads_below_limit().quoting("保持低于每块的最大线程数（参见附录 A）"),
    block_reads_rows("A", "C").quoting(
        "维度为 (wA, block_size) 的子矩阵 A，与 C_sub 具有相同的行索引"
    ),
    block_reads_columns("B", "C").quoting(
        "维度为 (block_size, wA) 的 B 的子矩阵，与 C_sub 具有相同的列索引"
    ),
    loads_one_a_tile("A").quoting(
        "使用一个加载每个矩阵一个元素的线程，将两个相应的平方矩阵加载到共享内存"
    ),
    loads_one_a_tile("B").quoting(
        "使用一个加载每个矩阵一个元素的线程，将两个相应的平方矩阵加载到共享内存"
    ),
    written_at_the_end("C").quoting(
        "每一线程将其中每个乘积的结果累计到寄存器中；执行完毕后，将结果写入全局内存"
    ),
    each_element_written_once("C").quoting("执行完毕后，将结果写入全局内存"),
    reused(lambda seen: seen.trial.block[0], formula="block_size").quoting(
        "有效利用快速的共享内存"
    ),
    _only_if_square(reads("A", _side("A", 1), formula="wA / block_size"), "A").quoting(
        _TIMES, form="as written"
    ),
    reads("A", _side("B", 1), formula="wB / block_size").quoting(_TIMES, form="corrected"),
    _only_if_square(reads("B", _side("A", 1), formula="wA / block_size"), "B").quoting(
        _TIMES, form="as written"
    ),
    reads("B", _side("A", 0), formula="hA / block_size").quoting(_TIMES, form="corrected"),
    barrier_needed(nth=1).quoting(
        "同步以确保两个子矩阵都由块内的所有线程完全加载",
        "the first barrier is needed: both sub-matrices must be loaded by all threads",
    ),
    barrier_needed(nth=2).quoting(
        "再次同步以确保在开始下一次迭代之前两个子集的乘积已经完成",
        "the second barrier is needed: the product must be done before the next tile is loaded",
    ),
    barriers_reached().quoting("__syncthreads() 确保块内所有线程的数据一致性"),
    race_free().quoting("__syncthreads() 确保块内所有线程的数据一致性"),
    initialised().quoting("同步以确保两个子矩阵都由块内的所有线程完全加载"),
    in_bounds().quoting("假设 wA 和 wB 是 16 的倍数（如 5.1.2.1 所建议）"),
    coalesced("A", op="load").quoting(_MULTIPLES),
    coalesced("B", op="load").quoting(_MULTIPLES),
    coalesced("C", op="store").quoting(_MULTIPLES),
    half_warp_is_a_row().quoting("所有线程的 ty 和 k 都是相同的；tx 在 0 到 15 之间变化"),
    conflict_free("As", op="store").quoting("As[ty][tx] → 每个线程访问不同的库"),
    conflict_free("Bs", op="store").quoting("Bs[ty][tx] → 每个线程访问不同的库"),
    conflict_free("Bs", op="load").quoting("Bs[k][tx] → 每个线程访问不同的库"),
    one_word_a_half_warp("As").quoting("As[ty][k] → 每个线程访问同一个库（使用广播）"),
    conflict_free("As", guide=True).quoting(
        _CONFLICTS, "on the guide's own hardware, accesses of As have no bank conflicts"
    ),
    conflict_free("Bs", guide=True).quoting(
        _CONFLICTS, "on the guide's own hardware, accesses of Bs have no bank conflicts"
    ),
    limited_to(0.5).quoting(
        "编写此示例是为了清楚地说明各种 CUDA 编程原则，并非为一般的矩阵乘法提供高性能的内核",
        "the kernel shows principles and is not a fast one: it stays below half of the peak",
        for_information=True,
    ),
)
