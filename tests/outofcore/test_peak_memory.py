"""The budget as the operating system sees it: the peak of a process that does nothing else."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

MIB = 1 << 20

#: Python, NumPy, the command line and BLAS's own buffers.
INTERPRETER_MIB = 150

#: ru_maxrss would be that of this process, which the child starts as; VmHWM begins at exec.
CHILD = """
import sys
from tilewise.cli import main
code = main(sys.argv[1:])
with open("/proc/self/status") as status:
    peak_kib = next(int(line.split()[1]) for line in status if line.startswith("VmHWM"))
print(f"peak {peak_kib}", file=sys.stderr)
sys.exit(code)
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="VmHWM is in Linux's /proc")
@pytest.mark.parametrize(
    ("m", "n", "k", "options"),
    [
        (25_600, 256, 2_048, ["--verify"]),  # a tall operand of 200 MiB streams past
        (256, 256, 102_400, ["--verify"]),  # two of 100 MiB, over all of K
        (7_168, 7_168, 64, []),  # a result of 196 MiB
    ],
)
def test_peak_memory_is_within_the_budget(
    tmp_path: Path, m: int, n: int, k: int, options: list[str]
) -> None:
    rng = np.random.default_rng(4)
    operands = []
    for name, shape in (("a.npy", (m, k)), ("b.npy", (k, n))):
        operands.append(rng.integers(-2, 3, shape, np.int8).astype(np.float32))
        np.save(tmp_path / name, operands[-1])
    command = ["mul", "a.npy", "b.npy", "-o", "c.npy", "--memory", "64MiB", *options]
    done = subprocess.run(
        [sys.executable, "-c", CHILD, *command],
        cwd=tmp_path,
        env=os.environ | {"OPENBLAS_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    peak = int(done.stderr.split()[-1]) << 10
    assert peak < (64 + INTERPRETER_MIB) * MIB
    c = np.load(tmp_path / "c.npy")
    rows = [0, m // 2, m - 1]
    assert np.array_equal(c[rows], operands[0][rows] @ operands[1])
