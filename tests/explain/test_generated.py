"""Random kernels: what is legal is found clean, and what is found clean has one result only."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.explain.support import all_blocks, hazard_counts, totals
from tests.simt import oracle
from tests.simt.generated import compiled, kernel_source
from tests.simt.test_against_oracle import SHAPES, arguments, bits
from tilewise import simt
from tilewise.errors import KernelError
from tilewise.explain.evidence import gather

SEEDS = st.integers(0, 2**32)
SIZES = st.integers(1, 14)


def _launch(seed: int, shape: Any) -> tuple[Any, Any, list[Any]]:
    grid, block = shape
    return grid, block, arguments(seed, int(np.prod(grid) * np.prod(block)), 11)


@settings(max_examples=30, deadline=None)
@given(seed=SEEDS, statements=SIZES, shape=st.sampled_from(SHAPES))
def test_legal_kernels_are_found_clean(seed: int, statements: int, shape: Any) -> None:
    grid, block, args = _launch(seed, shape)
    seen = gather(compiled(kernel_source(seed, statements)), grid, block, args)
    # What threads that have returned would have written is read all the same, by design. What is
    # divided by 0 is a matter of values, which are looked at in the blocks that are run alone.
    found = [hazard for hazard in seen.hazards if hazard.kind != "division by zero"]
    assert {hazard.kind for hazard in found} <= {"uninitialised read", "exit before barrier"}
    recorder, watch = all_blocks(seen)
    assert totals(seen.recorder) == totals(recorder)
    every = [hazard for hazard in watch.hazards() if hazard.kind != "division by zero"]
    assert hazard_counts(found) == hazard_counts(every)


@settings(max_examples=30, deadline=None)
@given(seed=SEEDS, which=st.integers(0, 5), shape=st.sampled_from(SHAPES))
def test_without_a_barrier_either_a_race_is_found_or_the_bits_are_the_same(
    seed: int, which: int, shape: Any
) -> None:
    """Lanes in lockstep and one thread at a time are two schedules of many."""
    source = kernel_source(seed, 10)
    barriers = [m.start() for m in re.finditer(r"cuda\.syncthreads\(\)", source)]
    if not barriers:
        return
    at = barriers[which % len(barriers)]
    source = source[:at] + "pass" + source[at + len("cuda.syncthreads()") :]
    kernel = compiled(source)
    grid, block, args = _launch(seed, shape)
    seen = gather(kernel, grid, block, args)
    if any(hazard.second is not None for hazard in seen.hazards):
        return
    expected, found = _launch(seed, shape)[2], _launch(seed, shape)[2]
    try:
        oracle.run(kernel, grid, block, *expected)
    except oracle.Fault:
        return
    simt.launch(kernel, grid, block, *found)
    for want, have in zip(expected, found, strict=True):
        if isinstance(want, np.ndarray):
            np.testing.assert_array_equal(bits(have), bits(want), err_msg=source)


def test_the_mutants_do_bring_races() -> None:
    """The test above is not empty: many of its mutants are refused as racy."""
    racy = 0
    for seed in range(40):
        source = kernel_source(seed, 10)
        if "cuda.syncthreads()" not in source:
            continue
        grid, block, args = _launch(seed, ((2,), (8,)))
        try:
            seen = gather(compiled(source.replace("cuda.syncthreads()", "pass")), grid, block, args)
        except KernelError:
            continue
        racy += any(hazard.second is not None for hazard in seen.hazards)
    assert racy > 5
