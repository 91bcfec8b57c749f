"""explain on the guide's kernel: the chapter proven, report and JSON included."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import numpy as np

from benchmarks.harness import Benchmark
from tilewise import guide, simt
from tilewise.explain import claims, explain
from tilewise.explain.report import Report

#: Seconds that an analysis may take, by the side of the matrices.
LIMITS_S = {64: 0.2, 256: 1.0, 1024: 3.0}
MEMORY_MB = 500


def main() -> None:
    bench = Benchmark("explain", "explain on the guide's kernel, the whole chapter proven")
    for n, limit_s in LIMITS_S.items():
        case = f"Muld {n}^3"
        calls: dict[str, Any] = {"explain": lambda n=n: _report(n).to_json()}
        if n <= 256:
            calls["simt alone"] = lambda n=n: _execute(n)
        medians = bench.compare(
            case,
            calls,
            check=lambda n=n: _is_right(_report(n), n),
            inputs="normal",
            repeats=5,
        )
        bench.claim(case, "time", medians["explain"], limit_s, "s")
    bench.claim("Muld 1024^3", "peak memory", _peak_mb(1024), MEMORY_MB, "MB")
    bench.save()


def _report(n: int) -> Report:
    matrix = ((n, n), "float32")
    return explain(
        guide.Muld,
        (n // 16, n // 16),
        (16, 16),
        *(matrix, matrix, n, n, matrix),
        claims=claims.guide,
        registers=32,
    )


def _execute(n: int) -> None:
    a, b, c = np.ones((3, n, n), np.float32)
    simt.launch(guide.Muld, (n // 16, n // 16), (16, 16), a, b, n, n, c)


def _is_right(report: Report, n: int) -> None:
    loads = 2 * n * n * (n // 16)
    metrics = next(f.metrics for f in report.figures if f.level == "source")
    assert report.exit_code == 0
    assert metrics["l1tex__t_sectors_pipe_lsu_mem_global_op_ld.sum"] == loads // 8
    assert metrics["smsp__inst_executed_op_shared_ld.sum"] == 2 * n**3 // 32


def _peak_mb(n: int) -> float:
    """The peak resident memory of a process that does nothing else."""
    code = (
        "import json, resource, sys\n"
        "from benchmarks.explain import _report\n"
        f"_report({n}).to_json()\n"
        "peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        "print(json.dumps(peak / (2**20 if sys.platform == 'darwin' else 2**10)))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return float(json.loads(done.stdout))


if __name__ == "__main__":
    main()
