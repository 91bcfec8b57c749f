"""``tilewise demo``: one minute from real data to a proven product and a kernel that runs.

Everything printed is computed while it runs; nothing is prepared but the data set.
"""

from __future__ import annotations

import shlex
import sys
import tempfile
import time
from contextlib import chdir
from typing import Any

import numpy as np
from numpy.typing import NDArray

from . import cli
from .errors import TilewiseError
from .guide import BLOCK_SIZE, Mul
from .numerics.check import check

__all__ = ["main"]

#: Below this the similarities would be worth nothing: 98.9 % of the digits find their kind.
_LEAST_ACCURACY = 0.98

#: Digits whose products the guide's kernel computes: a million threads, one for each pair.
_GUIDE_DIGITS = 1024

Matrix = NDArray[np.float32]


def main() -> int:
    """Run the demonstration; return 0, or 1 if anything in it is not as it should be."""
    start = time.perf_counter()
    try:
        pixels, labels = _digits()
    except ImportError:
        raise TilewiseError(
            "the demo multiplies scikit-learn's digits: pip install 'tilewise[demo]'"
        ) from None
    with tempfile.TemporaryDirectory(prefix="tilewise-demo-") as folder, chdir(folder):
        is_right = _multiply_and_check(pixels) and _classify(labels) and _run_guide(pixels)
    if not is_right:
        print("\nThis is not as it should be: please report it, with the output of tilewise info.")
        return 1
    print(
        f"\nDone in {time.perf_counter() - start:.0f} s. Now with your own matrices:\n"
        "  tilewise mul A.npy B.npy -o C.npy       .npy files of any size\n"
        "  tilewise plan 50000x50000 50000x50000   what a product would take\n"
        "  python: import tilewise as tw; tw.matmul(a, b)"
    )
    return 0


def _digits() -> tuple[Matrix, NDArray[Any]]:
    from sklearn.datasets import load_digits

    data = load_digits()
    return data.data.astype(np.float32), data.target


def _multiply_and_check(pixels: Matrix) -> bool:
    count = len(pixels)
    _heading(
        f"{count} handwritten digits, 8 x 8 pixels each. Which look alike?",
        "The cosines between all of them are one product of two files, X times its transpose.",
        "The result is larger than the 8 MB allowed here, so it is computed in tiles.",
    )
    x = pixels / np.linalg.norm(pixels, axis=1, keepdims=True)
    np.save("digits.npy", x)
    np.save("transposed.npy", x.T)
    if _tilewise("mul digits.npy transposed.npy -o cosines.npy --memory 8MB"):
        return False

    _heading(
        "Is that right?",
        f"Multiplying by random vectors tells, at the cost of a few rows and not of {count}.",
    )
    return _tilewise("check digits.npy transposed.npy cosines.npy") == 0


def _classify(labels: NDArray[Any]) -> bool:
    _heading(
        "Does it mean anything?",
        "Let each digit take the label of the one most like it, other than itself.",
    )
    cosines = np.load("cosines.npy")
    np.fill_diagonal(cosines, -1)
    right = labels[cosines.argmax(axis=1)] == labels
    print(f"  {right.sum()} of {right.size} are recognised: {right.mean():.2%}")
    return bool(right.mean() > _LEAST_ACCURACY)


def _run_guide(pixels: Matrix) -> bool:
    n = _GUIDE_DIGITS
    blocks = n // BLOCK_SIZE
    _heading(
        "What does a GPU do?",
        "Mul and Muld, the matrix product of the CUDA programming guide, chapter 6, in Python,",
        f"on a simulated GPU: {blocks} x {blocks} blocks of {BLOCK_SIZE} x {BLOCK_SIZE} threads, "
        f"one for each pair of {n} digits.",
    )
    counts = np.ascontiguousarray(pixels[:n])
    np.save("counts.npy", counts)
    np.save("counts-transposed.npy", counts.T)
    if _tilewise("mul counts.npy counts-transposed.npy -o products.npy"):
        return False
    products = np.load("products.npy")
    by_guide = _by_guide(counts)
    is_same = by_guide.tobytes() == products.tobytes()
    print(
        f"  whole numbers, pixel by pixel: {n * n:,} threads and tilewise mul "
        + ("agree to the last bit" if is_same else "DIFFER")
    )
    x = np.load("digits.npy")[:n]
    found = check(x, x.T, _by_guide(x))
    print(
        f"  cosines: the kernel's rounding errors are at most {found.ratio:.0%} of what is promised"
        if found
        else f"  cosines: {found}"
    )
    return is_same and bool(found)


def _by_guide(x: Matrix) -> Matrix:
    n, size = x.shape
    result = np.full((n, n), np.nan, np.float32)
    Mul(x, np.ascontiguousarray(x.T), n, size, n, result)
    return result


def _heading(question: str, *lines: str) -> None:
    print(f"\n{question}")
    for line in lines:
        print(f"  {line}")


def _tilewise(command: str) -> int:
    print(f"  $ tilewise {command}")
    sys.stdout.flush()
    return cli.main(shlex.split(command))
