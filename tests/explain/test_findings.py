"""What a finding says of what was wrong, and of whom."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.explain.support import floats
from tilewise.errors import KernelError
from tilewise.explain import explain
from tilewise.simt import cuda

float32 = np.float32


def guarded(C, n):  # type: ignore[no-untyped-def]
    i = cuda.grid(1)
    if i < n:
        x = float32(1.5)
    C[i] = x


def loop_of_no_turns(C, n):  # type: ignore[no-untyped-def]
    i = cuda.grid(1)
    for k in range(n):
        x = float32(k)
    C[i] = x


def private(C, n):  # type: ignore[no-untyped-def]
    i = cuda.grid(1)
    parts = cuda.local.array(4, float32)
    for k in range(3):
        parts[k] = C[i]
    C[i] = parts[i % n]


def by_data(A, C):  # type: ignore[no-untyped-def]
    i = cuda.grid(1)
    if A[i] > 0:
        x = A[i]
    C[i] = x


def same_guard_twice(C, n):  # type: ignore[no-untyped-def]
    i = cuda.grid(1)
    if i < n:
        x = C[i]
    y = x if i < n else float32(0)
    if i < n:
        C[i] = x + y


def _errors(kernel: Any, *arguments: Any) -> Any:
    report = explain(kernel, 4, 32, *arguments)
    return report, [f for f in report.findings if f.severity == "error"]


def test_a_variable_that_a_branch_did_not_assign() -> None:
    report, (finding,) = _errors(guarded, floats(128), 70)
    assert (report.exit_code, finding.kind, finding.scope) == (1, "unassigned variable", "all data")
    line = guarded.__code__.co_firstlineno + 4
    place = (finding.first.line, finding.first.text, finding.first.block, finding.first.thread)
    assert place == (line, "x", (2, 0, 0), (6, 0, 0))
    assert (finding.accesses, finding.blocks) == (58, 2)
    assert f"thread 6 of block 2 reads x on line {line}" in finding.message
    assert "0 in numba-cuda" in finding.message
    assert "threads read x before anything is assigned to it" in str(report)
    assert {v.outcome for v in report.verdicts} == {"PROVED", "REFUTED"}
    assert "reads x, which it has not assigned" in report.to_html()


def squared(C, n):  # type: ignore[no-untyped-def]
    i = cuda.grid(1)
    if i < n:
        x = C[i]
    C[i] = x * x


def test_a_variable_read_twice_on_a_line_is_one_finding() -> None:
    _, (finding,) = _errors(squared, floats(128), 70)
    assert (finding.accesses, finding.blocks) == (2 * 58, 2)


def test_a_variable_of_a_loop_that_does_not_run() -> None:
    assert _errors(loop_of_no_turns, floats(128), 3)[1] == []
    _, (finding,) = _errors(loop_of_no_turns, floats(128), 0)
    assert (finding.accesses, finding.blocks) == (128, 4)


def test_an_element_of_a_local_array_that_nobody_wrote() -> None:
    assert _errors(private, floats(128), 3)[1] == []
    report, (finding,) = _errors(private, floats(128), 4)
    assert (finding.kind, finding.array, finding.element) == ("uninitialised read", "parts", (3,))
    assert (finding.accesses, finding.first.thread) == (32, (3, 0, 0))
    assert "which it has not written since it declared parts" in finding.message
    (refuted,) = (v for v in report.verdicts if v.outcome == "REFUTED")
    assert (
        refuted.claim
        == "shared memory, local arrays and variables are written before they are read"
    )
    assert refuted.detail == finding.message


def test_a_branch_on_data_is_seen_in_every_block() -> None:
    A = np.ones(128, float32)
    assert _errors(by_data, A, floats(128))[1] == []
    A[100] = -1
    _, (finding,) = _errors(by_data, A, floats(128))
    assert (finding.first.block, finding.first.thread) == ((3, 0, 0), (4, 0, 0))
    assert (finding.accesses, finding.scope) == (1, "this launch")


@pytest.mark.parametrize("n", [0, 70, 128])
def test_what_is_read_under_the_guard_it_was_assigned_under_is_fine(n: int) -> None:
    assert _errors(same_guard_twice, floats(128), n)[1] == []


def factorial(n):  # type: ignore[no-untyped-def]
    return 1 if n < 2 else n * factorial(n - 1)


def recursive(C, n):  # type: ignore[no-untyped-def]
    C[0] = factorial(n)


def test_a_function_that_calls_itself_is_refused() -> None:
    line = factorial.__code__.co_firstlineno + 1
    with pytest.raises(KernelError, match=f":{line}: in factorial: factorial calls itself"):
        explain(recursive, 1, 1, floats(1), 3)


def null_of_block(A, C):  # type: ignore[no-untyped-def]
    if cuda.blockIdx.x < 2:
        b = cuda.blockIdx.x
    C[cuda.grid(1)] = A[b * 32 + cuda.threadIdx.x]


def test_blocks_that_assign_nothing_all_read_where_the_null_is() -> None:
    report = explain(null_of_block, 8, 32, floats(256), floats(256))
    (finding,) = (f for f in report.findings if f.severity == "error")
    assert (finding.kind, finding.accesses) == ("unassigned variable", 6 * 32)
    (read,) = (row for row in report.arrays if row.name == "A")
    assert read.reads_range == (0, 7)


def half_a_warp_waits(C, D):  # type: ignore[no-untyped-def]
    t = cuda.threadIdx.x
    C[t] = t
    if t < 16:
        cuda.syncwarp(0xFFFF)
    D[t] = C[31 - t]


def test_global_memory_is_ordered_by_a_whole_warp_only() -> None:
    report = explain(half_a_warp_waits, 1, 32, floats(32), floats(32))
    assert {f.kind for f in report.findings if f.severity == "error"} == {"read-after-write"}
