"""``tilewise mul`` on files against np.matmul in memory: time, and peak memory of the process.

The full size takes minutes, and 3 GiB of memory and of ``TMPDIR``. For a quick look,
``python -m benchmarks.files 4096 64MiB`` takes another size and budget, and saves nothing.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from benchmarks.harness import Benchmark
from tilewise._memory import parse_budget

#: The command line, followed by its peak memory (VmHWM begins at exec; ru_maxrss does not).
_CHILD = """
import sys
from tilewise.cli import main
code = main(sys.argv[1:])
with open("/proc/self/status") as status:
    print(next(line.split()[1] for line in status if line.startswith("VmHWM")))
sys.exit(code)
"""

#: Python, NumPy and BLAS's own buffers, beside the budget.
_INTERPRETER_MIB = 150


def main() -> None:
    measure(16384, "512MiB").save()


def measure(side: int, budget: str) -> Benchmark:
    """Multiply two square float32 matrices both ways, and return the figures."""
    bench = Benchmark("files", "tilewise mul of .npy files against np.matmul in memory")
    with tempfile.TemporaryDirectory(prefix="tilewise-files-") as folder:
        files = [str(Path(folder, name)) for name in ("A.npy", "B.npy", "C.npy")]
        a, b = (_normal(side, seed) for seed in range(2))
        for name, x in zip(files, (a, b), strict=False):
            np.save(name, x)
        peaks_mib = []

        def multiply_files() -> None:
            command = ["mul", *files[:2], "-o", files[2], "--memory", budget, "--quiet"]
            done = subprocess.run(
                [sys.executable, "-c", _CHILD, *command], stdout=subprocess.PIPE, check=True
            )
            peaks_mib.append(int(done.stdout) / 1024)

        def check() -> None:
            multiply_files()
            subprocess.run([sys.executable, "-m", "tilewise", "check", *files], check=True)

        case = f"float32 {side}^3, {budget}"
        medians = bench.compare(
            case,
            {"tilewise mul": multiply_files, "np.matmul": lambda: np.matmul(a, b)},
            check=check,
            inputs="standard normal",
            repeats=3,
        )
        bench.claim(case, "time, np.matmul's", medians["tilewise mul"] / medians["np.matmul"], 1.3)
        limit = (parse_budget(budget) or 0) / 2**20 + _INTERPRETER_MIB
        bench.claim(case, "peak memory", max(peaks_mib), limit, "MiB")
    return bench


def _normal(side: int, seed: int) -> NDArray[np.float32]:
    return np.random.default_rng(seed).standard_normal((side, side), dtype=np.float32)


if __name__ == "__main__":
    if len(sys.argv) == 3:
        measure(int(sys.argv[1]), sys.argv[2])
    else:
        main()
