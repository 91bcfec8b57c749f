"""Cases where larger-than-memory products hurt people, as far as a CPU and files go."""

from __future__ import annotations

import os
import tracemalloc
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import tilewise as tw
from tests.support import small_integers, within_bound
from tilewise.errors import BudgetError
from tilewise.outofcore.planning import plan_files

MIB = 1 << 20

#: What ufuncs on strided arrays take for themselves: 8192 elements of each of three operands.
NUMPYS_OWN = 16 * 3 * 8192


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(14)


def peak_of(call: Any) -> int:
    tracemalloc.start()
    call()
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return peak


def test_D2_an_answer_larger_than_memory_is_refused_with_its_size_and_goes_to_a_file(
    folder: Path, rng: np.random.Generator
) -> None:
    x = np.zeros((203_743, 58), np.float32)
    with pytest.raises(
        BudgetError, match=r"takes 154\.65 GiB, .*out=np\.memmap\(\.\.\.\) to write"
    ):
        tw.matmul(x, x.T, memory="16GiB")
    x = small_integers(rng, (3000, 58), "float32")
    c = np.lib.format.open_memmap("c.npy", mode="w+", dtype="f4", shape=(3000, 3000))
    np.save("x.npy", x)
    assert peak_of(lambda: tw.multiply_files("x.npy", x.T, c, memory="4MiB")) < 4 * MIB + NUMPYS_OWN
    assert np.array_equal(c, x @ x.T)


def test_D4_what_is_read_is_what_was_planned_and_near_the_least(
    folder: Path, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    large = SimpleNamespace(shape=(20_000, 20_000), dtype=np.dtype("float64"), where="file")
    plan = plan_files(large, large, memory="1GiB")  # type: ignore[arg-type]
    assert plan.schedule is not None
    least = 2 * 20_000**3 / np.sqrt((1 << 30) / 8) * 8
    assert plan.schedule.read_bytes < 3 * least

    n = 1000  # a twentieth of the side, in the same share of memory
    budget = (1 << 30) // 400
    a, b = rng.standard_normal((2, n, n))
    np.save("a.npy", a)
    np.save("b.npy", b)
    read = []
    preadv = os.preadv

    def counting(fd: int, buffers: list[Any], offset: int) -> int:
        read.append(preadv(fd, buffers, offset))
        return read[-1]

    monkeypatch.setattr(os, "preadv", counting)
    plan = tw.multiply_files("a.npy", "b.npy", "c.npy", memory=budget)
    assert plan.schedule is not None
    assert sum(read) == plan.schedule.read_bytes
    exact = a.astype(np.longdouble) @ b[:, :7].astype(np.longdouble)
    allowed = (n + 2) * 2.0**-53 * (abs(a) @ abs(b[:, :7]))
    assert (abs(np.load("c.npy")[:, :7] - exact) <= allowed).all()


def test_D5_a_mapped_file_times_its_transpose_is_read_as_a_file(
    folder: Path, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    x = rng.integers(0, 2, (500, 3000)).astype(np.uint8)
    np.save("x.npy", x)
    mapped = np.load("x.npy", mmap_mode="r")
    with monkeypatch.context() as patch:
        patch.setattr(np.memmap, "__getitem__", None)
        plan = tw.multiply_files(mapped, mapped.T, "c.npy", dtype="int32", memory="1MiB")
    assert "x.npy (500, 3000) uint8 @ " in str(plan)
    assert np.array_equal(np.load("c.npy"), x.astype(float) @ x.T.astype(float))
    tw.multiply_files(mapped[100:300], mapped[:, ::2].T[:, :50].repeat(2, 0), "c.npy")
    assert np.array_equal(np.load("c.npy"), x[100:300] @ x[:50, ::2].T.repeat(2, 0))
    tw.multiply_files(mapped[7:300], mapped.T[:, 9:80], "c.npy")
    assert np.array_equal(np.load("c.npy"), x[7:300] @ x[9:80].T)
    tw.multiply_files(mapped[:, 1::2], mapped.T[::2], "c.npy")  # not in one stretch
    assert np.array_equal(np.load("c.npy"), x[:, 1::2] @ x.T[::2])
    with pytest.raises(tw.TilewiseError, match="is the same file as a"):
        tw.multiply_files(mapped, mapped.T, "x.npy")
    np.save("y.npy", 1 - x)
    os.replace("y.npy", "x.npy")  # the map is of the file that had the name before
    tw.multiply_files(mapped, mapped.T, "c.npy", dtype="int32")
    assert np.array_equal(np.load("c.npy"), x.astype(float) @ x.T.astype(float))


@pytest.mark.parametrize("step", [1, 2])
def test_D9_an_operand_is_never_copied_whole(rng: np.random.Generator, step: int) -> None:
    a = rng.integers(-2, 3, (4000, 2000 * step), np.int8).astype(np.float32)[:, ::step]
    b = small_integers(rng, (2000, 20), "float32")
    out = np.empty((4000, 20), np.float32)
    peak = peak_of(lambda: tw.matmul(a, b, out=out, memory="4MiB"))
    assert peak < 4 * MIB + NUMPYS_OWN
    assert peak < a.nbytes / 4
    assert np.array_equal(out, a @ b)


@pytest.mark.parametrize("mode", ["r", "c"])
@pytest.mark.parametrize("dtype", [">f4", "<f4"])
def test_D10_mapped_files_at_odd_offsets(
    folder: Path, rng: np.random.Generator, mode: Any, dtype: str
) -> None:
    a = rng.standard_normal((500, 300)).astype(dtype)
    b = rng.standard_normal((300, 200)).astype(dtype)
    mapped = []
    for name, x in (("a.bin", a), ("b.bin", b)):
        Path(name).write_bytes(bytes(13) + x.tobytes())
        mapped.append(np.memmap(name, dtype, mode=mode, offset=13, shape=x.shape))
    assert within_bound(tw.matmul(*mapped), a, b)
    for memory in ("500KiB", "100MiB"):
        tw.multiply_files(*mapped, "c.npy", memory=memory)
        assert within_bound(np.load("c.npy"), a, b)


def test_F10_operands_that_may_only_be_read(folder: Path, rng: np.random.Generator) -> None:
    a = small_integers(rng, (300, 200), "float32")
    b = small_integers(rng, (200, 250), "float32")
    np.save("a.npy", a)
    os.chmod("a.npy", 0o444)
    b.flags.writeable = False
    tw.multiply_files("a.npy", b, "c.npy", memory="300KiB")
    assert np.array_equal(np.load("c.npy"), a @ b)
    out = np.lib.format.open_memmap("c.npy", mode="r")
    with pytest.raises(tw.TilewiseError, match=r"out \(memmap\) \(shape .*is read-only"):
        tw.multiply_files("a.npy", b, out, memory="300KiB")
