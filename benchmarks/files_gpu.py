"""Files multiplied on a GPU against what users of CuPy and torch write: load, multiply, save.

Needs a GPU, CuPy, torch and 12 GiB of ``TMPDIR``; ``python -m benchmarks.files_gpu 4096`` takes
another size, and saves nothing. Operands are normal float32, and in the system's cache; all results
are durable when a call ends. A sample of each of ours is compared with float64 first, and all of it
with NaN. What the files alone take is timed beside: read and written by as many threads, into
nothing and from nothing.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

import tilewise as tw
from benchmarks.harness import Benchmark
from benchmarks.host import compare, normal
from tilewise.errors import DeviceError
from tilewise.runtime import device

_SIDES = (16384, 32768)

_THREADS = 12
_SLICE_BYTES = 8 << 20


def main(arguments: Sequence[str] = ()) -> None:
    try:
        device.count()
    except DeviceError as error:
        print(f"files_gpu: not run, {error}")
        return
    bench = Benchmark("files_gpu", "files multiplied on a GPU, against CuPy and torch")
    for side in map(int, arguments or _SIDES):
        with tempfile.TemporaryDirectory(prefix="tilewise-files-") as folder:
            files = [str(Path(folder, name)) for name in ("A.npy", "B.npy", "C.npy")]
            measure(bench, side, files)
    if not arguments:
        bench.save()


def measure(bench: Benchmark, side: int, files: list[str]) -> None:
    import cupy
    import torch

    a, b = normal(side, side, seed=1), normal(side, side, seed=2)
    for name, x in zip(files, (a, b), strict=False):
        np.save(name, x)
    print(tw.plan(*files[:2], devices="cuda:0"), flush=True)

    def by_cupy() -> None:
        x, y = (cupy.asarray(np.load(name)) for name in files[:2])
        save(files[2], cupy.asnumpy(x @ y))
        del x, y
        cupy.get_default_memory_pool().free_all_blocks()

    def by_torch() -> None:
        x, y = (torch.from_numpy(np.load(name)).cuda() for name in files[:2])
        save(files[2], (x @ y).cpu().numpy())
        del x, y
        torch.cuda.empty_cache()

    def check() -> None:
        Path(files[2]).write_bytes(b"")
        tw.multiply_files(*files, devices="cuda:0")
        compare(np.load(files[2], mmap_mode="r"), a, b)

    calls: dict[str, Callable[[], object]] = {
        "tilewise": lambda: tw.multiply_files(*files, devices="cuda:0"),
        "files alone": lambda: read_and_write(files),
        "cupy": by_cupy,
        "torch": by_torch,
    }
    case = f"float32 {side}^3"
    times = bench.compare(
        case, calls, check=check, inputs="standard normal, cached files", repeats=2
    )
    ours = times["tilewise"]
    bench.claim(case, "our time, of CuPy's", ours / times["cupy"], 1 / 2)
    bench.claim(case, "our time, of torch's", ours / times["torch"], 1 / 2)
    bench.claim(case, "our time, of the files' alone", ours / times["files alone"], 1.5)


def save(name: str, x: NDArray[np.float32]) -> None:
    with open(name, "wb") as file:
        np.save(file, x)
        file.flush()
        os.fsync(file.fileno())


def read_and_write(files: list[str]) -> None:
    """Read two files, and write a third of their size beside what is there."""
    nbytes = os.path.getsize(files[0])
    part = f"{files[2]}.part"
    with open(files[0], "rb") as a, open(files[1], "rb") as b, open(part, "wb") as c:
        os.posix_fallocate(c.fileno(), 0, nbytes)

        def work(first: int) -> None:
            buffer = memoryview(bytearray(_SLICE_BYTES))
            for start in range(first, nbytes, _THREADS * _SLICE_BYTES):
                for file in (a, b):
                    size = os.preadv(file.fileno(), [buffer], start)
                os.pwrite(c.fileno(), buffer[:size], start)

        with ThreadPoolExecutor(_THREADS) as pool:
            list(pool.map(work, range(0, _THREADS * _SLICE_BYTES, _SLICE_BYTES)))
        os.fsync(c.fileno())
    os.replace(part, files[2])


if __name__ == "__main__":
    main(sys.argv[1:])
