"""``explain`` as a whole: what it returns, its schema, its exit code, and bad input."""

from __future__ import annotations

import dataclasses
import json
import pickle
import re
import subprocess
import sys
from typing import Any

import numpy as np
import pytest

from tests.explain.support import floats
from tilewise import guide, simt
from tilewise.errors import KernelError, OptionError
from tilewise.explain import claims, explain
from tilewise.explain.report import SCHEMA, Report, Verdict
from tilewise.simt import cuda

float32 = np.float32


def _muld(n: int = 64, **options: Any) -> Report:
    matrix = floats(n, n)
    return explain(
        guide.Muld, (n // 16, n // 16), (16, 16), matrix, matrix, n, n, matrix, **options
    )


def test_the_numbers_of_the_guides_kernel() -> None:
    report = _muld(1024, registers=32)
    figures = {f.level: f.metrics for f in report.figures}
    q = 2_097_152
    assert figures["source"]["smsp__inst_executed_op_shared_ld.sum"] == 32 * q
    assert figures["compiled"]["smsp__inst_executed_op_shared_ld.sum"] == 20 * q
    assert figures["compiled"]["memory_l1_wavefronts_shared"] == 24 * q + 4_194_304
    for level in figures.values():
        assert level["l1tex__t_sectors_pipe_lsu_mem_global_op_ld.sum"] == 16_777_216
    assert report.roofs is not None
    assert report.roofs.binding == "shared memory pipe"
    assert min(r.fraction for r in report.roofs.roofs) == pytest.approx(0.1428, abs=1e-3)
    assert "14 %" in report.roofs.sentence
    assert "9.6 of 66.9 TFLOP/s" in report.roofs.sentence
    assert report.roofs.flops == 2 * 1024**3
    assert report.occupancy is not None
    assert (report.occupancy.blocks, report.occupancy.fraction) == (8, 1.0)
    assert report.exit_code == 0


def test_the_report_is_plain_json_under_a_versioned_schema() -> None:
    report = _muld(claims=claims.guide)
    data = json.loads(report.to_json())
    assert data["schema"] == SCHEMA == "tilewise.explain/1"
    assert data["exit_code"] == 0
    fields = {f.name for f in dataclasses.fields(Report)} - {"tell"}
    assert set(data) == fields | {"schema", "exit_code"}
    assert data["verdicts"][0]["outcome"] == "REFUTED"
    assert data["grid"] == [4, 4, 1]
    assert len(data["thread_map"]["elements"]) == 256


def test_a_report_prints_itself_as_text_and_as_a_page() -> None:
    report = _muld()
    assert "Muld" in str(report)
    assert "14 %" in str(report)
    assert report.to_html().startswith("<!doctype html>")
    assert "Muld" in report._repr_html_()


def test_the_same_launch_gives_the_same_report() -> None:
    assert _muld().to_json() == _muld().to_json()


def _with(*verdicts: Verdict) -> int:
    return dataclasses.replace(_muld(16), verdicts=verdicts, findings=()).exit_code


def test_exit_codes() -> None:
    fine = Verdict(claim="a", outcome="PROVED")
    holds = Verdict(claim="a", outcome="HOLDS")
    wrong = Verdict(claim="a", outcome="REFUTED")
    open_ = Verdict(claim="a", outcome="NOT CHECKED")
    aside = Verdict(claim="a", outcome="REFUTED", decides_exit=False)
    assert _with() == _with(fine, holds) == _with(fine, aside) == 0
    assert _with(fine, wrong) == _with(open_, wrong) == 1
    assert _with(fine, open_) == 2


def test_the_source_is_annotated_line_by_line() -> None:
    report = _muld()
    lines = {line.text.strip(): line for line in report.source}
    load = lines["As[ty, tx] = A[row, m * BLOCK_SIZE + tx]"]
    assert (load.sectors, load.wavefronts, load.requests) == (2048, 512, 1024)
    product = lines["Csub += As[ty, k] * Bs[k, tx]"]
    assert (product.sectors, product.wavefronts) == (0, 16384)
    barriers = [line for line in report.source if line.barriers]
    assert [line.barriers for line in barriers] == [64, 64]
    assert sum(line.sectors for line in report.source) == sum(
        s.cost for s in report.sites if s.space == "global"
    )


def test_findings_are_tied_to_lines_and_to_intervals() -> None:
    source = simt.program(guide.Muld)
    line = min(s.line for s in source.sites if s.kind == "barrier")
    matrix = floats(64, 64)
    report = explain(source.without_barrier(line), (4, 4), (16, 16), matrix, matrix, 64, 64, matrix)
    race = report.findings[0]
    assert race.second is not None
    for place in (race.first, race.second):
        annotated = next(s for s in report.source if s.number == place.line)
        assert 0 in annotated.findings
    assert [i.number for i in report.timeline if 0 in i.findings] == [race.interval] == [0]
    assert report.timeline[0].barrier == max(s.line for s in source.sites if s.kind == "barrier")


def test_traffic_beside_the_least_and_beside_no_shared_memory() -> None:
    bars = {bar.label: bar.bytes for bar in _muld(1024).traffic}
    assert bars["every array once"] == 3 * 4 * 1024**2
    assert bars["asked for by threads"] == (2 * 64 + 1) * 4 * 1024**2
    assert bars["moved to and from the L1 cache"] == 32 * (16_777_216 + 131_072)
    assert bars["without shared memory"] == (2 * 1024 + 1) * 4 * 1024**2


def test_bank_and_sector_maps_are_of_the_worst_request() -> None:
    def skewed(A, C):  # type: ignore[no-untyped-def]
        staged = cuda.shared.array(256, float32)
        tx = cuda.threadIdx.x
        staged[tx] = A[tx]
        if tx < 32:
            C[tx] = staged[8 * tx]

    report = explain(skewed, 1, 64, floats(64), floats(32))
    load = next(b for b in report.bank_maps if b.op == "load")
    assert (load.wavefronts, load.ideal) == (8, 1)
    assert "bank 0 of 32 is asked for 8 different words" in load.sentence
    assert {word.bank for word in load.words} == {0, 8, 16, 24}
    assert [w.wavefront for w in load.words if w.bank == 0] == [*range(8)]
    assert load.words[5].element == "staged[40]"


def test_a_wide_load_is_served_by_quarters_and_a_repeating_one_by_halves() -> None:
    def wide(A, C):  # type: ignore[no-untyped-def]
        staged = cuda.shared.array(32, np.float64)
        tx = cuda.threadIdx.x
        staged[tx] = A[tx]
        cuda.syncthreads()
        C[tx] = staged[tx // 2] + staged[tx]

    doubles = ((32,), "float64")
    report = explain(wide, 1, 32, doubles, doubles)
    paired, straight = (
        next(b for b in report.bank_maps if b.op == "load" and b.text == text)
        for text in ("staged[tx // 2]", "staged[tx]")
    )
    assert (paired.groups, paired.wavefronts) == (((0, 31),), 1)
    assert (straight.groups, straight.wavefronts) == (((0, 15), (16, 31)), 2)


def test_the_guides_own_hardware_counts_transactions_and_steps() -> None:
    report = _muld(target="sm_10")
    units = {(row.space, row.unit) for row in report.sites}
    assert units == {("global", "transactions"), ("shared", "steps")}
    loads = next(row for row in report.sites if row.array == "A")
    assert loads.per_request == 2
    assert report.roofs is None
    assert "sm_10 is not modelled" in report.roofs_missing
    assert report.figures == ()
    assert report.occupancy is not None
    assert report.occupancy.limits["warps"] == 3


def test_bases_are_aligned_as_on_a_device_and_views_are_where_they_are() -> None:
    """A view that begins 4 bytes into its buffer does so on the device as well."""
    base = np.zeros(33 + 32, float32)[:65]

    def copied(A, C):  # type: ignore[no-untyped-def]
        C[cuda.threadIdx.x] = A[cuda.threadIdx.x]

    for view, sectors in ((base[:32], 4), (base[1:33], 5), (base[8:40], 4)):
        report = explain(copied, 1, 32, view, floats(32))
        assert next(r for r in report.sites if r.op == "load").cost == sectors


def test_views_of_one_buffer_race_where_they_overlap() -> None:
    def shifted(A, C):  # type: ignore[no-untyped-def]
        C[cuda.threadIdx.x] = A[cuda.threadIdx.x]

    buffer = np.zeros(40, float32)
    report = explain(shifted, 1, 32, buffer[:32], buffer[1:33])
    assert {f.kind for f in report.findings} == {"write-after-read"}
    apart = explain(shifted, 1, 8, buffer[:8], buffer[8:16])
    assert apart.exit_code == 0
    memory = bytearray(160)  # NumPy does not know that what is made of it twice is one
    for one, other in (
        (np.frombuffer(memory, float32), np.frombuffer(memory, float32)),
        (buffer, np.lib.stride_tricks.as_strided(buffer, (39,), (4,))),
    ):
        assert explain(shifted, 1, 32, one[:32], other[1:33]).exit_code == 1
        assert explain(shifted, 1, 8, one[:8], other[8:16]).exit_code == 0


def reversed_tile(A, i):  # type: ignore[no-untyped-def]
    tile = cuda.shared.array(32, float32)
    tile[cuda.threadIdx.x] = A[i]
    cuda.syncthreads()
    return tile[31 - cuda.threadIdx.x]


def test_an_array_under_another_name_is_that_array() -> None:
    def renamed(A, C):  # type: ignore[no-untyped-def]
        i = cuda.grid(1)
        source, target = A, C
        target[i // 2] = source[i]

    memory = np.zeros(2 * 256 // 4 + 64, float32)
    aligned = memory[-memory.ctypes.data % 256 // 4 :][:64]  # what need not be moved
    report = explain(renamed, 2, 32, floats(64), aligned)
    assert [f.kind for f in report.findings if f.severity == "error"] == ["write-after-write"]
    assert report.arrays[1].written_more == 32
    assert not memory.any()


def test_shared_arrays_of_one_name_in_two_functions_are_two() -> None:
    def kernel(A, C):  # type: ignore[no-untyped-def]
        tile = cuda.shared.array(64, float32)
        tx = cuda.threadIdx.x
        tile[tx] = A[tx]
        C[tx] = reversed_tile(A, tx) + tile[tx]

    report = explain(kernel, 1, 32, floats(32), floats(32))
    assert report.findings == ()
    assert [a.shape for a in report.arrays if a.name == "tile"] == [(64,), (32,)]


def test_a_thread_that_is_not_there_is_refused() -> None:
    report = _muld()
    with pytest.raises(OptionError, match=r"block=\(4, 0, 0\) is not in this launch"):
        report.thread(block=(4, 0), thread=(0, 0))
    with pytest.raises(OptionError, match=r"thread=\(0, 16, 0\) is not in this launch"):
        report.thread(block=(0, 0), thread=(0, 16))


def test_a_report_can_be_pickled_all_but_what_runs_the_kernel() -> None:
    report = _muld()
    again = pickle.loads(pickle.dumps(report))
    assert again == report
    assert again.to_json() == report.to_json()
    with pytest.raises(OptionError, match="pickled or copied cannot trace a thread any more"):
        again.thread(block=(0, 0), thread=(0, 0))


def test_a_block_that_cannot_be_launched_is_an_error() -> None:
    for options, said in (
        ({"registers": 65}, r"1024 threads of 65 registers .* sm_90, .* has 65536"),
        ({"target": "sm_13"}, r"1024 threads cannot be launched on sm_13: 1 to 512 can"),
    ):
        report = explain(fine, 1, 1024, floats(1024), floats(1024), **options)  # type: ignore[arg-type]
        (finding,) = report.findings
        assert (finding.kind, report.exit_code) == ("cannot be launched", 1)
        assert re.search(said, finding.message)
        assert "no multiprocessor can hold a block" in str(report)
    assert explain(fine, 1, 1024, floats(1024), floats(1024), registers=64).exit_code == 0


# Bad input: one clear line each.


def unknown_construct(A, C):  # type: ignore[no-untyped-def]
    C[0] = sum([A[i] for i in range(4)])


def endless(A, C):  # type: ignore[no-untyped-def]
    i = 0
    while A[i] == A[i]:
        C[i] = A[i]


def fine(A, C):  # type: ignore[no-untyped-def]
    C[cuda.grid(1)] = A[cuda.grid(1)]


BAD = [
    ((3, 1, 32), {}, KernelError, "a kernel is a Python function; got 3"),
    ((unknown_construct, 1, 32, floats(32), floats(32)), {}, KernelError, "unknown_construct"),
    ((fine, 1, 32, floats(32)), {}, KernelError, r"fine\(A, C\) takes 2 arguments, got 1"),
    ((fine, 1, 32, floats(32), "C"), {}, KernelError, "argument C of fine is a str"),
    ((fine, 1, 32, floats(32), ((32,), "complex64")), {}, KernelError, "dtype complex64"),
    ((fine, 1, 32, floats(32), (32, 32, 32)), {}, OptionError, r"argument C=\(32, 32, 32\)"),
    ((fine, 1, 32, floats(32), ((-1,), "float32")), {}, OptionError, "given as"),
    ((fine, 1, 32, floats(32), ((32,), "flood")), {}, OptionError, "given as"),
    ((fine, 0, 32, floats(32), floats(32)), {}, OptionError, "grid=0"),
    ((fine, 1, 0, floats(32), floats(32)), {}, OptionError, "block=0"),
    ((fine, 1, 2048, floats(32), floats(32)), {}, OptionError, "block=2048"),
    ((fine, 1, 32, floats(32), floats(32)), {"target": "sm_91"}, OptionError, "sm_91"),
    ((fine, 1, 32, floats(32), floats(32)), {"registers": 256}, OptionError, "has 1 to 255"),
    ((fine, 1, 32, floats(32), floats(32)), {"registers": 0}, OptionError, "has 1 to 255"),
    ((fine, 1, 32, floats(32), floats(32)), {"registers": "8"}, OptionError, "has 1 to 255"),
    ((endless, 1, 1, np.ones(4, float32), floats(4)), {"max_steps": 500}, KernelError,
     "taken to be endless; pass a larger max_steps to explain"),
]  # fmt: skip


@pytest.mark.parametrize(("arguments", "options", "error", "message"), BAD)
def test_bad_input_is_refused_in_one_line(
    arguments: Any, options: Any, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message) as caught:
        explain(*arguments, **options)
    assert "\n" not in str(caught.value)


def test_errors_in_a_kernel_name_its_line() -> None:
    line = unknown_construct.__code__.co_firstlineno + 1
    with pytest.raises(KernelError, match=f"test_explain.py:{line}"):
        explain(unknown_construct, 1, 32, floats(32), floats(32))


def test_a_launch_with_nothing_in_it_says_so() -> None:
    report = explain(fine, 1, 32, floats(0), floats(0))
    assert report.exit_code == 1
    assert report.findings[0].kind == "out of range"


def test_importing_explain_is_cheap() -> None:
    code = (
        "import sys, time, tilewise, numpy\n"
        "before = set(sys.modules)\n"
        "import tilewise.explain\n"
        "new = set(sys.modules) - before\n"
        "assert not new, new\n"
        "assert tilewise.explain.__name__ == 'explain'\n"
        "from tilewise.explain import claims\n"
        "assert callable(tilewise.explain) and claims.guide\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_integers_divided_by_zero_are_a_warning_about_this_launch() -> None:
    def share(total, counts, out):  # type: ignore[no-untyped-def]
        i = cuda.grid(1)
        out[i] = total[i] // counts[i]

    counts = np.arange(256, dtype=np.int32)
    report = explain(share, 4, 64, counts, counts, counts)
    (finding,) = report.findings
    assert (finding.kind, finding.severity, finding.scope) == (
        "division by zero",
        "warning",
        "this launch",
    )
    assert "thread 0 of block 0 divides an integer by 0" in finding.message
    assert "1 division in 1 traced block" in finding.message
    assert finding.first is not None
    assert finding.first.text == "total[i] // counts[i]"
    assert report.exit_code == 0
    assert "warning Thread 0 of block 0 divides" in str(report)
    assert not explain(share, 4, 64, counts, counts + 1, counts).findings
