"""Claims: the chapter's on the guide's kernel, on its mutants, and how far each reaches."""

from __future__ import annotations

import inspect
from typing import Any

import numpy as np
import pytest

from tests.explain.support import floats, kernel_from
from tilewise import guide, simt
from tilewise.errors import OptionError
from tilewise.explain import claims, explain
from tilewise.explain.report import Report, Verdict
from tilewise.simt import cuda

float32 = np.float32


def _explain(kernel: Any, m: int = 64, k: int = 64, n: int = 64, **options: Any) -> Report:
    """C (m×n) = A (m×k) · B (k×n), with the guide's parameters."""
    grid, block = (-(-n // 16), -(-m // 16)), (16, 16)
    return explain(kernel, grid, block, floats(m, k), floats(k, n), k, n, floats(m, n), **options)


def _one(claim: claims.Claim, kernel: Any = guide.Muld, **options: Any) -> Verdict:
    (verdict,) = _explain(kernel, claims=[claim], **options).verdicts
    return verdict


# The chapter.


def test_the_chapter_is_proven_of_its_kernel() -> None:
    report = _explain(guide.Muld, 64, 32, 96, claims=claims.guide)
    assert report.exit_code == 0
    assert report.findings == ()
    decisive = [v for v in report.verdicts if v.decides_exit]
    assert len(decisive) == 29
    assert {v.outcome for v in decisive} == {"PROVED"}
    assert all(v.original for v in report.verdicts)


def test_what_the_chapter_says_wrongly_is_refuted_beside_what_is_true() -> None:
    report = _explain(guide.Muld, 64, 32, 96, claims=claims.guide)
    as_written = [v for v in report.verdicts if v.form == "as written"]
    corrected = [v for v in report.verdicts if v.form == "corrected"]
    assert [v.outcome for v in as_written] == ["REFUTED"] * 3
    assert [v.outcome for v in corrected] == ["PROVED"] * 3
    assert [v.original for v in as_written] == [v.original for v in corrected]
    assert not any(v.decides_exit for v in as_written)
    assert "each element of A is read 6 times, not 2" in as_written[1].detail
    assert "each element of B is read 4 times, not 2" in as_written[2].detail


def test_on_square_matrices_the_chapters_count_holds_by_accident() -> None:
    report = _explain(guide.Muld, claims=claims.guide)
    counts = [v for v in report.verdicts if v.form == "as written" and "times" in v.claim]
    assert [v.outcome for v in counts] == ["HOLDS"] * 2
    assert {v.scope for v in counts} == {"square matrices only"}


@pytest.mark.parametrize("target", ["sm_10", "sm_11", "sm_12", "sm_13", "sm_80", "sm_120"])
def test_the_chapter_is_proven_on_other_hardware_too(target: str) -> None:
    report = _explain(guide.Muld, claims=claims.guide, target=target)
    assert report.exit_code == 0
    decisive = {v.outcome for v in report.verdicts if v.decides_exit}
    assert decisive == {"PROVED"}


# Mutants of the guide's kernel: what is changed, into what, what becomes of it and on which line.

SOURCE = inspect.getsource(guide)
BODY = inspect.getsource(guide.Muld.py_func)
LOADS_A = "As[ty, tx] = A[row, m * BLOCK_SIZE + tx]"
LOADS_B = "Bs[ty, tx] = B[m * BLOCK_SIZE + ty, col]"
PRODUCT = "Csub += As[ty, k] * Bs[k, tx]"
BARRIER = "        cuda.syncthreads()\n"
FIRST = f"{BARRIER}        for k"
SECOND = PRODUCT + BODY.partition(PRODUCT)[2].partition(BARRIER)[0] + BARRIER

# (name, old, new, finding or None, line that is named, claims of the chapter that are refuted)
MUTANTS: list[tuple[str, str, str, str | None, str, tuple[str, ...]]] = [
    ("first barrier dropped", FIRST, "        for k", "read-after-write", LOADS_A, ("no two",)),
    ("second barrier dropped", SECOND, f"{PRODUCT}\n", "write-after-read", LOADS_A, ("no two",)),
    ("barrier in a condition", FIRST, f"        if tx < 8:\n    {FIRST}", "barrier divergence",
     "cuda.syncthreads()", ("all running",)),
    ("one tile not loaded", LOADS_B, f"if m > 0:\n            {LOADS_B}", "uninitialised read",
     PRODUCT, ("shared memory, local arrays",)),
    ("half a tile loaded", LOADS_A, f"if tx < 8:\n            {LOADS_A}", "uninitialised read",
     PRODUCT, ("shared memory, local arrays", "each thread loads one element of A")),
    ("one row too far", "A[row, m", "A[row + 1, m", "out of range", "A[row + 1, m",
     ("every access",)),
    ("one word too far", "As[ty, k]", "As[ty, k + 1]", "out of range", "As[ty, k + 1]",
     ("every access",)),
    ("one column too far", "C[row, col] = Csub", "C[row, col + 1] = Csub", "out of range",
     "C[row, col + 1]", ("every access", "each element of C")),
    ("all blocks in one place", "C[row, col] = Csub", "C[ty, tx] = Csub", "write-after-write",
     "C[ty, tx]", ("no two", "each element of C")),
    ("a column for a row", "C[row, col] = Csub", "C[row, ty] = Csub", "write-after-write",
     "C[row, ty]", ("no two", "each element of C", "each block")),
    ("written in every step", "        for k", "        C[row, col] = Csub\n        for k", None,
     "C[row, col]", ("sums are kept",)),
    ("summed up in global memory", PRODUCT, "C[row, col] += As[ty, k] * Bs[k, tx]", None,
     "C[row, col]", ("sums are kept",)),
    ("one tile too few", "range(wA // BLOCK_SIZE)", "range(wA // BLOCK_SIZE - 1)", None,
     LOADS_A, ("A is read wB", "B is read hA", "a block reads the rows")),
    ("one step too few", "range(BLOCK_SIZE)", "range(BLOCK_SIZE - 1)", None, PRODUCT,
     ("what is loaded from global",)),
    ("tile transposed", "As[ty, tx] = A", "As[tx, ty] = A", None, "As[tx, ty]",
     ("stores to As", "on the guide's own hardware, accesses of As")),
    ("read down a column", "As[ty, k] * Bs[k, tx]", "As[k, ty] * Bs[tx, k]", None,
     "Bs[tx, k]", ("loads from Bs", "on the guide's own hardware, accesses of Bs")),
    ("pitch 17", "As = cuda.shared.array((BLOCK_SIZE, BLOCK_SIZE)",
     "As = cuda.shared.array((BLOCK_SIZE, 17)", None, LOADS_A, ("stores to As",)),
    ("x along the rows of A", "A[row, m * BLOCK_SIZE + tx]",
     "A[cuda.blockIdx.y * 16 + tx, m * BLOCK_SIZE + ty]", None, "A[cuda", ("loads from A",)),
    ("stored transposed", "C[row, col] = Csub", "C[col, row] = Csub", None, "C[col, row]",
     ("stores to C", "a block reads the rows")),
    ("every other column", "cuda.blockIdx.x * BLOCK_SIZE + tx\n",
     "(cuda.blockIdx.x * BLOCK_SIZE + 2 * tx) % wB\n", None, "B[m", ("loads from B",)),
]  # fmt: skip


def _mutant(old: str, new: str) -> Any:
    """The guide's kernel with one change, at its own line numbers."""
    assert BODY.count(old) >= 1, old
    return kernel_from(SOURCE.replace(BODY, BODY.replace(old, new, 1)), "Muld").py_func


def _relative(source: str) -> str:
    return source.replace("from .", "from tilewise.")


SOURCE = _relative(SOURCE)


@pytest.mark.parametrize(
    ("old", "new", "finding", "line", "refuted"),
    [mutant[1:] for mutant in MUTANTS],
    ids=[mutant[0].replace(" ", "_") for mutant in MUTANTS],
)
def test_every_mutant_is_refuted_at_its_line(
    old: str, new: str, finding: str | None, line: str, refuted: tuple[str, ...]
) -> None:
    kernel = _mutant(old, new)
    report = _explain(kernel, claims=claims.guide)
    assert report.exit_code == 1
    text = {line.number: line.text for line in report.source}
    named = [p.line for f in report.findings for p in (f.first, f.second) if p is not None]
    if finding is not None:
        found = [f for f in report.findings if (f.kind, f.severity) == (finding, "error")]
        assert found
        assert all(f.advice and str(f.first.line) in f.message for f in found)
    wrong = [v for v in report.verdicts if v.outcome == "REFUTED" and v.decides_exit]
    for claim in refuted:
        assert any(v.claim.startswith(claim) for v in wrong), claim
    named += [v.line for v in wrong if v.line is not None]
    assert any(line in text[number] for number in named)


def test_the_right_kernel_is_clean_where_its_mutants_are_not() -> None:
    report = _explain(_mutant(PRODUCT, PRODUCT), claims=claims.guide)
    assert report.exit_code == 0
    assert report.findings == ()


@pytest.mark.parametrize("dropped", [FIRST, SECOND], ids=["first", "second"])
def test_a_race_is_found_though_the_values_are_right(dropped: str) -> None:
    kept = "        for k" if dropped == FIRST else f"{PRODUCT}\n"
    kernel = _mutant(dropped, kept)
    A, B = np.random.default_rng(0).integers(-4, 5, (2, 64, 64)).astype(float32)
    C = np.zeros((64, 64), float32)
    simt.launch(kernel, (4, 4), (16, 16), A, B, 64, 64, C)
    assert np.array_equal(C, A @ B)
    assert _explain(kernel).exit_code == 1


def test_a_missing_guard_is_found_at_sizes_that_need_it() -> None:
    source = _relative(SOURCE).replace(
        "A[row, a] if row < hA and a < wA else np.float32(0)", "A[row, a]"
    )
    kernel = kernel_from(source, "Muld_any").py_func
    assert _explain(kernel, 48, 48, 48).exit_code == 0
    report = _explain(kernel, 50, 37, 61)
    (finding,) = (f for f in report.findings if f.severity == "error")
    assert (finding.kind, finding.array) == ("out of range", "A")
    assert _explain(guide.Muld_any, 50, 37, 61).exit_code == 0


# How far a verdict reaches.


def test_banks_are_proved_for_every_size_and_sectors_for_multiples_of_8() -> None:
    assert _one(claims.conflict_free("As")).scope == "all data, every size"
    assert _one(claims.coalesced("A")).scope == "all data, every width that is a multiple of 8"
    odd = _explain(guide.Muld_any, 41, 41, 41, claims=[claims.conflict_free("As")])
    assert odd.verdicts[0].scope == "all data, every size"


def test_a_width_that_is_no_multiple_of_8_is_refuted_with_its_sectors() -> None:
    """On today's hardware 8 floats suffice; 16 is the rule of the guide's."""
    for n, outcome in ((40, "PROVED"), (41, "REFUTED"), (44, "REFUTED"), (48, "PROVED")):
        verdict = _explain(guide.Muld_any, 16, n, n, claims=[claims.coalesced("B")]).verdicts[0]
        assert verdict.outcome == outcome, n
        if outcome == "REFUTED":
            assert "sectors of 32 bytes" in verdict.detail


def test_banks_that_change_with_the_size_are_proved_for_these_sizes_only() -> None:
    def strided(A, s, C):  # type: ignore[no-untyped-def]
        staged = cuda.shared.array(1024, float32)
        tx = cuda.threadIdx.x
        staged[tx * s] = A[tx]
        cuda.syncthreads()
        C[tx] = staged[tx * s]

    for stride, outcome in ((1, "PROVED"), (2, "REFUTED"), (17, "PROVED")):
        report = explain(
            strided, 1, 32, floats(32), stride, floats(32), claims=[claims.conflict_free("staged")]
        )
        assert report.verdicts[0].outcome == outcome
        if outcome == "PROVED":
            assert report.verdicts[0].scope == "all data, this grid and these sizes"


def test_what_data_decide_only_holds() -> None:
    def picked(A, index, C):  # type: ignore[no-untyped-def]
        i = cuda.grid(1)
        C[i] = A[index[i]]

    index = np.arange(256)
    report = explain(picked, 4, 64, floats(256), index, floats(256), claims=claims.default)
    assert {v.outcome for v in report.verdicts} == {"HOLDS"}
    assert all("A[index[i]]" in v.detail for v in report.verdicts)
    assert report.exit_code == 0
    index[7] = 300
    report = explain(picked, 4, 64, floats(256), index, floats(256))
    assert report.exit_code == 1
    assert report.findings[0].scope == "this launch"
    assert "A[300]" in report.findings[0].message


def test_harmless_same_value_writes_are_kept_apart() -> None:
    def flag(A, C):  # type: ignore[no-untyped-def]
        if A[cuda.grid(1)] > float32(-1e9):
            C[0] = float32(1)

    report = explain(flag, 2, 32, floats(64), floats(1), claims=[claims.race_free()])
    assert {f.severity for f in report.findings} == {"note"}
    assert all("all write the same value" in f.message for f in report.findings)
    assert report.verdicts[0].outcome == "HOLDS"
    assert report.exit_code == 0


def test_equal_values_of_many_blocks_are_compared_by_tracing_them_all() -> None:
    def marked(A, C, value):  # type: ignore[no-untyped-def]
        C[0] = value
        C[cuda.threadIdx.x + 1] = float32(cuda.blockIdx.x)

    report = explain(marked, 3, 32, floats(32), floats(33), float32(1))
    severities = {f.first.text: f.severity for f in report.findings if "write" in f.kind}
    assert severities == {"C[0]": "note", "C[cuda.threadIdx.x + 1]": "error"}
    assert "every block was traced, to compare the values" in report.certificate


# Single claims.


def test_a_barrier_that_nothing_needs_is_refuted() -> None:
    doubled = _mutant(FIRST, f"{BARRIER}{FIRST}")
    report = _explain(doubled, claims=[claims.barrier_needed(nth=1), claims.barrier_needed(nth=2)])
    assert [v.outcome for v in report.verdicts] == ["REFUTED", "REFUTED"]
    assert _one(claims.barrier_needed(nth=3), doubled).outcome == "PROVED"


def test_a_barrier_is_named_by_its_line() -> None:
    line = min(s.line for s in simt.program(guide.Muld).sites if s.kind == "barrier")
    verdict = _one(claims.barrier_needed(line))
    assert (verdict.outcome, verdict.line) == ("PROVED", line)
    assert "without it" in verdict.detail
    assert "read-after-write" in verdict.detail


def test_reads_takes_a_number_or_a_function() -> None:
    assert _one(claims.reads("A", times=4)).outcome == "PROVED"
    assert _one(claims.reads("A", times=3)).outcome == "REFUTED"
    width = claims.reads("A", times=lambda seen: seen.array("B").shape[1] / 16, formula="wB / 16")
    assert _one(width).outcome == "PROVED"
    assert width.sentence == "A is read wB / 16 times"


def test_reads_that_are_right_on_average_only_are_refuted() -> None:
    def lopsided(A, C):  # type: ignore[no-untyped-def]
        i = cuda.grid(1)
        C[i] = A[i // 2 * 2]

    report = explain(lopsided, 2, 32, floats(64), floats(64), claims=[claims.reads("A", times=1)])
    assert report.verdicts[0].outcome == "REFUTED"
    assert "between 0 and 2" in report.verdicts[0].detail


def test_blocks_that_are_no_multiple_of_a_warp() -> None:
    report = explain(
        guide.naive, (1, 1), (10, 10), floats(16, 16), floats(16, 16), 16, 16, floats(16, 16),
        claims=[claims.block_is_warp_multiple(), claims.threads_below_limit()],
    )  # fmt: skip
    assert [v.outcome for v in report.verdicts] == ["REFUTED", "PROVED"]
    assert "3 warps and 4 threads over: 28 lanes stay empty" in report.verdicts[0].detail


def test_1024_threads_are_too_many_for_the_guides_hardware() -> None:
    matrix = floats(32, 32)
    report = explain(
        guide.naive, (1, 1), (32, 32), matrix, matrix, 32, 32, matrix,
        target="sm_10", claims=[claims.threads_below_limit()],
    )  # fmt: skip
    assert report.verdicts[0].outcome == "REFUTED"
    assert "at most 512 on sm_10" in report.verdicts[0].detail


def test_a_claim_of_ones_own() -> None:
    few = claims.Claim(
        "no more than 10 barriers a block",
        lambda seen: claims.Judgement("PROVED", f"{seen.followed(0).barriers} barriers"),
    )
    verdict = _one(few)
    assert (verdict.claim, verdict.detail) == ("no more than 10 barriers a block", "8 barriers")


def test_a_claim_that_does_not_apply_is_not_checked_and_exits_2() -> None:
    report = _explain(guide.Muld, claims=[claims.conflict_free("A")])
    assert report.verdicts[0].outcome == "NOT CHECKED"
    assert "A is in global memory" in report.verdicts[0].detail
    assert report.exit_code == 2


@pytest.mark.parametrize(
    ("claim", "message"),
    [
        (claims.coalesced("Q"), "Muld has no array 'Q'; its arrays are A, B, C, As, Bs"),
        (claims.reads("Q", times=1), "has no array 'Q'"),
        (claims.each_element_written_once("Q"), "has no array 'Q'"),
        (claims.thread_writes("Q"), "has no array 'Q'"),
        (claims.barrier_needed(3), "has no barrier on line 3; its barriers stand on lines"),
    ],
)
def test_claims_about_what_is_not_there_are_refused(claim: claims.Claim, message: str) -> None:
    with pytest.raises(OptionError, match=message.replace("(", r"\(")):
        _explain(guide.Muld, claims=[claim])


def test_barrier_needed_takes_one_of_line_and_nth() -> None:
    for wrong in ({}, {"line": 3, "nth": 1}, {"nth": 0}):
        with pytest.raises(OptionError, match="takes a line, or nth= from 1"):
            claims.barrier_needed(**wrong)
    verdict = _one(claims.barrier_needed(nth=5))
    assert (verdict.outcome, verdict.detail) == ("REFUTED", "Muld has 2 barriers")


def test_a_band_that_is_read_in_part_says_which_part() -> None:
    report = _explain(guide.Muld, 65, 65, 65, claims=claims.guide)
    (band,) = [v for v in report.verdicts if "reads the rows of A" in v.claim]
    assert band.outcome == "REFUTED"
    assert "reads rows 0–15 of A, of each only elements 0–63 of its 65" in band.detail
