"""multiply_files: right for every type and order, within its budget, all or nothing."""

from __future__ import annotations

import itertools
import os
import re
import subprocess
import sys
import threading
import tracemalloc
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import tilewise as tw
from tests.support import COMPLEX, FLOATS, INTEGERS, small_integers, within_bound
from tilewise import _cpu
from tilewise.cli import main
from tilewise.errors import (
    BudgetError,
    CheckError,
    DeviceError,
    DTypeError,
    FileError,
    OptionError,
    ShapeError,
)
from tilewise.numerics import check
from tilewise.outofcore.pipeline import Progress, multiply_files
from tilewise.outofcore.planning import plan_files

#: What ufuncs on strided arrays take for themselves: 8192 elements of each of three operands.
NUMPYS_OWN = 16 * 3 * 8192

NARROW = ("bfloat16", "float8_e4m3fn", "float8_e5m2")


class Folder:
    """Operands saved, products loaded, and the look at what is left behind."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def save(self, name: str, array: Any) -> str:
        np.save(self.path / name, array)
        raw = f":{array.dtype.name}" if array.dtype.isbuiltin == 2 else ""
        return f"{self.path / name}{raw}"

    def multiply(self, a: Any, b: Any, **options: Any) -> tuple[Any, Any]:
        plan = multiply_files(
            self.save("a.npy", a), self.save("b.npy", b), self.path / "c.npy", **options
        )
        c = np.load(self.path / "c.npy")
        return plan, c.view(plan.dtype) if c.dtype.kind == "V" else c

    def names(self) -> list[str]:
        return sorted(path.name for path in self.path.iterdir())


@pytest.fixture
def folder(tmp_path: Path) -> Folder:
    return Folder(tmp_path)


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(11)


@pytest.mark.parametrize("orders", ["CC", "CF", "FC", "FF"])
@pytest.mark.parametrize(
    "dtype", [*FLOATS, *COMPLEX, *INTEGERS, *NARROW, "longdouble", ">f4", ">i2", ">c16", "bool"]
)
def test_tiles_of_every_type_and_order(
    folder: Folder, rng: np.random.Generator, dtype: str, orders: Any
) -> None:
    element = np.dtype(getattr(ml_dtypes, dtype) if dtype in NARROW else dtype)
    # Sums stay exact in every type but float8, whose product is float32, and integers, which wrap.
    low, high = (-90, 90) if element.kind in "iu" else (-1, 1)
    a = small_integers(rng, (131, 257), element, low, high)
    b = small_integers(rng, (257, 199), element, low, high)
    a, b = (np.asarray(x, order=order) for x, order in zip((a, b), orders, strict=True))
    plan, c = folder.multiply(a, b, memory="1MiB" if a.itemsize > 8 else "400KiB")
    assert not plan.schedule.is_whole
    if element.kind in "iub":
        expected = (a @ b).astype(plan.dtype)  # NumPy's own loop, not BLAS
    else:
        wide = np.complex128 if element.kind == "c" else np.float64
        expected = (a.astype(wide) @ b.astype(wide)).astype(plan.dtype)
    assert c.dtype == plan.dtype == expected.dtype
    assert np.array_equal(c, expected)


@pytest.mark.parametrize("memory", ["200KiB", "1MiB", "100MiB"])
@pytest.mark.parametrize(
    ("a_shape", "b_shape"),
    [
        ((300,), (300, 2000)),
        ((20000, 3), (3,)),
        ((70000,), (70000,)),
        ((5, 1, 90, 80), (6, 80, 70)),
        ((40, 5, 30, 20), (40, 1, 20, 25)),
        ((200, 30, 20), (20, 25)),
        ((3, 150, 160), (160, 140)),
        ((150, 160), (3, 160, 140)),
        ((1, 1), (1, 1)),
        ((300, 0), (0, 300)),
        ((0, 300), (300, 300)),
        ((3, 0, 5), (5, 2)),
    ],
)
def test_shapes_are_those_of_matmul(
    folder: Folder, rng: np.random.Generator, a_shape: Any, b_shape: Any, memory: str
) -> None:
    for dtype, order in itertools.product(("float32", "int16"), "CF"):
        a = np.asarray(small_integers(rng, a_shape, dtype), order=order)  # type: ignore[call-overload]
        b = small_integers(rng, b_shape, dtype)
        _, c = folder.multiply(a, b, memory=memory)
        expected = np.matmul(a, b)
        assert (c.shape, c.dtype) == (expected.shape, expected.dtype)
        assert np.array_equal(c, expected)


def test_float_sums_stay_within_the_bound(folder: Folder, rng: np.random.Generator) -> None:
    for dtype, unit, out_unit in (
        (np.float32, 2.0**-24, 0.0),
        (np.complex64, 2.0**-24, 0.0),
        (np.float16, 2.0**-24, 2.0**-11),
        (ml_dtypes.bfloat16, 2.0**-24, 2.0**-8),
    ):
        a = rng.standard_normal((150, 3000)).astype(dtype)
        b = rng.standard_normal((3000, 120)).astype(dtype)
        plan, c = folder.multiply(a, b, memory="400KiB")
        assert plan.schedule.piece_count > 1
        assert within_bound(c, a, b, unit, out_unit)


def test_what_fits_has_the_bits_of_matmul(folder: Folder, rng: np.random.Generator) -> None:
    a = rng.standard_normal((300, 200)).astype(np.float32)
    b = np.asfortranarray(rng.standard_normal((200, 100)).astype(np.float32))
    plan, c = folder.multiply(a, b, memory="10MiB")
    assert plan.schedule.is_whole
    assert c.tobytes() == np.matmul(a, b).tobytes()


def test_the_same_plan_has_the_same_bits(folder: Folder, rng: np.random.Generator) -> None:
    a = rng.standard_normal((300, 900)).astype(np.float32)
    b = rng.standard_normal((900, 200)).astype(np.float32)
    (one, c), (other, d) = (folder.multiply(a, b, memory="500KiB") for _ in range(2))
    assert one == other
    assert c.tobytes() == d.tobytes()


def test_inf_and_nan_come_out_where_they_should(folder: Folder, rng: np.random.Generator) -> None:
    a, b = np.ones((300, 200), np.float32), np.ones((200, 250), np.float32)
    a[5, 150], a[200, 3], b[100, 7] = np.inf, np.nan, -np.inf
    _, c = folder.multiply(a, b, memory="200KiB")
    with np.errstate(invalid="ignore"):
        assert np.array_equal(c, a @ b, equal_nan=True)


def test_dtype_is_the_type_of_the_result(folder: Folder, rng: np.random.Generator) -> None:
    a, b = (rng.integers(-128, 128, (300, 300)).astype(np.int8) for _ in range(2))
    plan, c = folder.multiply(a, b, dtype="int32", memory="300KiB")
    assert c.dtype == plan.dtype == np.int32
    assert np.array_equal(c, a.astype(np.int32) @ b.astype(np.int32))
    plan, c = folder.multiply(a.astype("f4"), b.astype("f4"), dtype="bfloat16", memory="600KiB")
    assert c.dtype == ml_dtypes.bfloat16
    assert np.array_equal(c, (a.astype("f4") @ b.astype("f4")).astype(c.dtype))


def test_stacks_in_fortran_order_are_read_in_long_stretches(
    folder: Folder, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neighbours in such a file belong to different matrices."""
    a = np.asfortranarray(small_integers(rng, (60, 150, 160), "float32"))
    b = np.asfortranarray(small_integers(rng, (60, 160, 70), "float32"))
    lengths = []
    preadv = os.preadv

    def counting(fd: int, buffers: list[Any], offset: int) -> int:
        lengths.append(sum(len(buffer) for buffer in buffers))
        return preadv(fd, buffers, offset)

    monkeypatch.setattr(os, "preadv", counting)
    plan, c = folder.multiply(a, b, memory="9MiB")
    assert not plan.schedule.is_whole
    assert np.array_equal(c, np.matmul(a, b))
    assert np.mean(lengths) >= 60 * 4


def test_a_file_may_be_both_operands(folder: Folder, rng: np.random.Generator) -> None:
    a = small_integers(rng, (300, 300), "float32")
    path = folder.save("a.npy", a)
    multiply_files(path, path, folder.path / "c.npy", memory="300KiB")
    assert np.array_equal(np.load(folder.path / "c.npy"), a @ a)


@pytest.mark.parametrize("dtype", ["float32", "float16", "int8", "int64", ">c16", "bool"])
def test_what_is_held_is_what_was_planned(
    folder: Folder, rng: np.random.Generator, dtype: str
) -> None:
    a = small_integers(rng, (400, 500), dtype)
    b = small_integers(rng, (500, 300), dtype)
    if dtype == "int64":  # of full length, which are cut into the most limbs
        a, b = a << 60, b << 60
    folder.multiply(a, b, memory="1MiB")  # what is imported on the way stays
    paths = [folder.save(name, x) for name, x in (("a.npy", a), ("b.npy", b))]
    tracemalloc.start()
    plan = multiply_files(*paths, folder.path / "c.npy", memory="1MiB")
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert not plan.schedule.is_whole
    assert peak <= plan.held_bytes + NUMPYS_OWN
    assert plan.held_bytes <= 1 << 20


def test_D5_a_matrix_of_bits_times_its_transpose(folder: Folder, rng: np.random.Generator) -> None:
    x = rng.integers(0, 2, (600, 4000)).astype(np.uint8)
    paths = [folder.save(name, array) for name, array in (("x.npy", x), ("xt.npy", x.T))]
    tracemalloc.start()
    plan = multiply_files(*paths, folder.path / "c.npy", dtype=np.int32, memory="2MiB")
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < (2 << 20) + NUMPYS_OWN
    assert plan.schedule.read_bytes < 8 * x.nbytes
    c = np.load(folder.path / "c.npy")
    assert c.dtype == np.int32
    assert np.array_equal(c, x.astype(float) @ x.T.astype(float))


def test_D6_memory_does_not_grow_with_the_operand(folder: Folder, rng: np.random.Generator) -> None:
    b = SimpleNamespace(shape=(2000, 2000), dtype=np.dtype("float32"))
    held = []
    for m in (100_000, 200_000, 400_000):
        a = SimpleNamespace(shape=(m, 2000), dtype=np.dtype("float32"))
        held.append(plan_files(a, b, memory="64MiB").held_bytes)  # type: ignore[arg-type]
    assert max(held) <= 1.05 * min(held)

    b = small_integers(rng, (200, 200), "float32")
    peaks = []
    for m in (20_000, 20_000, 40_000, 80_000):  # the first run imports
        a = small_integers(rng, (m, 200), "int8").astype("float32")
        paths = [folder.save(name, x) for name, x in (("a.npy", a), ("b.npy", b))]
        tracemalloc.start()
        plan = multiply_files(*paths, folder.path / "c.npy", memory="4MiB")
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
        assert np.array_equal(np.load(folder.path / "c.npy"), a @ b)
        assert plan.schedule.read_bytes == a.nbytes + b.nbytes
        assert peaks[-1] < (4 << 20) + NUMPYS_OWN
    assert max(peaks[1:]) < 1.1 * min(peaks[1:])


def test_D7_a_plan_fits_its_budget_and_so_does_the_run(
    folder: Folder, rng: np.random.Generator
) -> None:
    large = SimpleNamespace(shape=(50_000, 50_000), dtype=np.dtype("float64"), where="file")
    plan = plan_files(large, large, memory="8GiB")  # type: ignore[arg-type]
    assert 4 << 30 < plan.held_bytes <= 8 << 30
    a, b = rng.standard_normal((2, 1200, 1200))
    plan, c = folder.multiply(a, b, memory="3MiB")
    assert plan.held_bytes <= 3 << 20
    exact = a.astype(np.longdouble) @ b[:, :5].astype(np.longdouble)
    allowed = 1202 * 2.0**-53 * (abs(a) @ abs(b[:, :5]))
    assert (abs(c[:, :5] - exact) <= allowed).all()


@pytest.mark.slow
def test_B5_more_elements_than_int32_counts(folder: Folder, rng: np.random.Generator) -> None:
    n = 46_341  # the least whose square is 2^31 or more
    a = rng.integers(-128, 128, (n, 64)).astype(np.int8)
    b = rng.integers(-128, 128, (64, n)).astype(np.int8)
    paths = [folder.save(name, x) for name, x in (("a.npy", a), ("b.npy", b))]
    plan = multiply_files(*paths, folder.path / "c.npy", memory="256MiB")
    assert plan.held_bytes <= 256 << 20
    c = np.load(folder.path / "c.npy", mmap_mode="r")
    assert c.shape == (n, n)
    rows = [0, 1, n // 2, n - 2, n - 1]
    assert np.array_equal(c[rows], (a[rows].astype(np.int64) @ b.astype(np.int64)).astype(np.int8))


def test_a_progress_that_cannot_be_called_is_refused_first(
    folder: Folder, rng: np.random.Generator
) -> None:
    a = rng.standard_normal((4, 4))
    for name in ("a.npy", "b.npy"):
        np.save(folder.path / name, a)
    paths = [folder.path / name for name in ("a.npy", "b.npy", "c.npy")]
    wrong: Any = 5
    with pytest.raises(OptionError, match="progress=5 cannot be called; give a function of a Prog"):
        multiply_files(*paths, progress=wrong)
    with pytest.raises(OptionError, match="progress=5 cannot be called"):
        tw.plan(*paths[:2])(*paths[:2], out=paths[2], progress=wrong)
    assert folder.names() == ["a.npy", "b.npy"]


def test_progress_counts_up_to_everything(folder: Folder, rng: np.random.Generator) -> None:
    a, b = rng.standard_normal((2, 400, 400)).astype(np.float32)
    for memory in ("500KiB", "10MiB"):
        seen: list[Progress] = []
        plan, c = folder.multiply(a, b, memory=memory, progress=seen.append)
        done = [reached.flops for reached in seen]
        assert done == sorted(done)
        assert seen[-1].flops == seen[-1].total_flops == 2 * 400**3
        assert seen[-1].read_bytes == plan.schedule.read_bytes
        assert seen[-1].written_bytes == c.nbytes
        assert len(seen) == plan.schedule.tile_count * plan.schedule.piece_count


def test_without_a_budget_half_of_the_free_memory(
    folder: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tilewise import _memory

    x = np.ones((4, 4))
    for free, budget in ((9 << 30, 4 << 30), (8 << 30, 4 << 30), (7 << 30, 2 << 30)):
        monkeypatch.setattr(_memory, "available_bytes", lambda free=free: free)
        plan, _ = folder.multiply(x, x)
        assert plan.schedule.budget_bytes == budget


def test_what_does_not_go_together_is_refused_before_any_work(folder: Folder) -> None:
    x = folder.save("x.npy", np.ones((4, 5), np.float32))
    out = folder.path / "c.npy"
    large = folder.save("large.npy", np.ones((300, 300)))
    long = folder.save("long.npy", np.ones((300, 300), np.longdouble))
    for error, a, b, options, message in (
        (ShapeError, x, x, {}, r"x\.npy \(shape \(4, 5\).* and .*x\.npy .*\(4, 5\).* do not go"),
        (ShapeError, folder.save("s.npy", np.float32(3)), x, {}, r"s\.npy is a scalar"),
        (DeviceError, large, large, {"devices": "cuda:0"}, "cuda:0"),
        (OptionError, large, large, {"precision": "fp16"}, "precision='fp16'"),
        (OptionError, large, large, {"memory": "much"}, "memory='much' is not a budget"),
        (OptionError, large, large, {"memory": float("nan")}, "memory=nan is not a budget"),
        (OptionError, large, large, {"memory": -1}, "memory=-1 is less than nothing"),
        (OptionError, large, large, {"dtype": "float33"}, "float33"),
        (DTypeError, large, large, {"dtype": "int8"}, "int8"),
        (
            DTypeError,
            long,
            large,
            {"verify": True},
            "long.npy @ .*large.npy is summed in",
        ),
        (BudgetError, large, large, {"memory": "4KiB"}, "smallest tiles .* take .* KiB, and"),
        (FileError, large, folder.path / "none.npy", {}, r"b \(.*none\.npy\) does not exist"),
    ):
        with pytest.raises(error, match=message):
            multiply_files(a, b, out, **options)
    assert folder.names() == ["large.npy", "long.npy", "s.npy", "x.npy"]


def test_an_operand_is_never_overwritten(folder: Folder) -> None:
    x = np.ones((4, 4))
    path = folder.path / "a.npy"
    folder.save("a.npy", x)
    before = path.read_bytes()
    os.link(path, folder.path / "hard.npy")
    (folder.path / "soft.npy").symlink_to(path)
    for out in ("a.npy", "hard.npy", "soft.npy"):
        with pytest.raises(FileError, match=r"is the same file as a \(.*inputs are never overw"):
            multiply_files(path, folder.save("b.npy", x), folder.path / out)
    assert path.read_bytes() == before


def test_the_data_is_durable_before_the_name_is_given(
    folder: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    done = []

    def sync(descriptor: int) -> None:
        done.append(Path(os.readlink(f"/proc/self/fd/{descriptor}")).name)

    monkeypatch.setattr(os, "fsync", sync)
    replace = os.replace
    monkeypatch.setattr(os, "replace", lambda *names: done.append("rename") or replace(*names))
    x = np.ones((400, 400))
    plan, _ = folder.multiply(x, x, memory="800KiB")
    # What is computed, first the tiles and then the lines that say so; last, and only then, a name.
    assert done == [
        "c.npy.journal",
        folder.path.name,
        *["c.npy.part", "c.npy.journal"] * plan.schedule.tile_count,
        "c.npy.part",
        "rename",
        folder.path.name,
    ]


def test_a_wrong_result_is_not_written(folder: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(3)
    a, b = rng.standard_normal((2, 300, 300)).astype(np.float32)
    plan, _ = folder.multiply(a, b, memory="300KiB", verify=True)
    assert "verify" in str(plan)
    (folder.path / "c.npy").unlink()
    finish = _cpu.finish

    def corrupt(plan: Any, total: Any, out: Any) -> None:
        finish(plan, total, out)
        out[0, 0] += 1

    monkeypatch.setattr(_cpu, "finish", corrupt)
    with pytest.raises(CheckError, match="found a wrong result, which was not written: WRONG at"):
        folder.multiply(a, b, memory="300KiB", verify=True)
    assert "c.npy" not in folder.names()


def test_no_thread_to_be_had_is_an_error_of_the_caller(
    folder: Folder, rng: np.random.Generator, monkeypatch: Any
) -> None:
    a, start = small_integers(rng, (300, 300), np.dtype("float32")), threading.Thread.start

    def refused(self: threading.Thread) -> None:
        if self.name == "tilewise-write":
            raise RuntimeError("can't start new thread")
        start(self)

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refused)
        with pytest.raises(tw.TilewiseError, match="no thread left .*: can't start new thread; "):
            folder.multiply(a, a, memory="200KiB")
    assert not {"tilewise-read", "tilewise-write"} & {x.name for x in threading.enumerate()}
    assert folder.names() == ["a.npy", "b.npy"]
    assert np.array_equal(folder.multiply(a, a, memory="200KiB")[1], a @ a)


def test_a_thread_multiplies_files_after_the_main_thread_has_ended(folder: Folder) -> None:
    a = np.arange(360_000.0).reshape(600, 600) % 7
    one, out = folder.save("a.npy", a), str(folder.path / "c.npy")
    program = f"""
import threading
from tilewise import multiply_files
options = {{"memory": "1MiB", "verify": True}}
threading.Thread(target=multiply_files, args=({one!r}, {one!r}, {out!r}), kwargs=options).start()
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert done.stderr == ""
    assert np.array_equal(np.load(out), a @ a)


def test_an_interrupt_as_python_leaves_what_stops_the_threads_leaves_none_behind(
    folder: Folder,
) -> None:
    """It comes before the first line of `__exit__`, where nothing can catch it."""
    one, out = folder.save("a.npy", np.ones((200, 200))), str(folder.path / "c.npy")
    program = f"""
import sys, threading
from tilewise import multiply_files

def interrupt(frame, event, argument):
    if event == "call" and frame.f_code.co_name == "__exit__":
        if type(frame.f_locals.get("self")).__name__ == "_Worker":
            raise KeyboardInterrupt  # once: then it is no longer called

sys.setprofile(interrupt)
try:
    multiply_files({one!r}, {one!r}, {out!r}, memory="400KiB")
except KeyboardInterrupt as error:
    kept = error  # and all that its traceback holds
    print([x.name for x in threading.enumerate()])
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=50
    )
    assert (done.stdout, done.stderr) == ("['MainThread']\n", "")


def test_verify_keeps_the_budget(folder: Folder, rng: np.random.Generator) -> None:
    a, b = rng.standard_normal((2, 600, 600)).astype(np.float32)
    memory = 2 << 20
    folder.multiply(a[:9], b, verify=True)  # what is imported on the way
    operands = folder.save("a.npy", a), folder.save("b.npy", b)
    tracemalloc.start()
    plan = multiply_files(*operands, folder.path / "c.npy", memory=memory, verify=True)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert memory / 2 < plan.verify_bytes <= plan.held_bytes <= memory
    assert peak <= memory + NUMPYS_OWN


def test_a_budget_too_small_to_verify_in_is_refused_before_any_work(folder: Folder) -> None:
    long = np.zeros((300, 20_000), np.int8), np.zeros((20_000, 300), "f2")
    plan, _ = folder.multiply(*long, memory="512KiB")
    assert plan.held_bytes <= 512 << 10
    said = r"a check of 300x20000 @ 20000x300 takes at least 1\.\d+ MiB, .* allows 512\.00 KiB"
    with pytest.raises(BudgetError, match=said):
        folder.multiply(*long, memory="512KiB", verify=True)
    assert folder.names() == ["a.npy", "b.npy", "c.npy"]


def test_a_long_thin_product_is_verified_in_little_memory(folder: Folder) -> None:
    long = np.ones((17, 100_000), np.int8), np.ones((100_000, 17), "f4")
    plan, c = folder.multiply(*long, memory="1MiB", verify=True)
    assert plan.verify_bytes <= 1 << 20
    assert (c == 100_000).all()


@pytest.mark.parametrize("name", ["a.npy", "b.npy", "c.npy.part"])
def test_what_is_cut_while_it_is_checked_is_named(
    folder: Folder, monkeypatch: pytest.MonkeyPatch, capsys: Any, name: str
) -> None:
    honest = check.check

    def cut(*operands: Any, **options: Any) -> Any:
        os.truncate(folder.path / name, 200)
        return honest(*operands, **options)

    monkeypatch.setattr(check, "check", cut)
    said = f"{name.removesuffix('.part')}) ends at byte"
    with pytest.raises(FileError, match=re.escape(said)):
        folder.multiply(*np.ones((2, 90, 90)), verify=True)
    if name == "a.npy":
        folder.save(name, np.ones((90, 90)))
        monkeypatch.chdir(folder.path)
        assert main(["check", name, "b.npy", "b.npy"]) == 2
        assert said in capsys.readouterr().err


@pytest.mark.parametrize("event", ["raise", "cut", "touch", "replace", "remove", "interrupt"])
def test_whatever_happens_threads_end_and_finished_tiles_stay(
    folder: Folder, rng: np.random.Generator, event: str
) -> None:
    a, b = rng.standard_normal((2, 600, 600)).astype(np.float32)
    happened = []

    def happen(reached: Progress) -> None:
        if reached.flops > reached.total_flops / 4 and not happened:
            happened.append(event)
            if event == "raise":
                raise ZeroDivisionError
            if event == "interrupt":
                raise KeyboardInterrupt
            if event == "cut":
                os.truncate(folder.path / "a.npy", 1000)
            elif event == "touch":
                os.utime(folder.path / "a.npy", (1, 1))
            elif event == "replace":
                np.save(folder.path / "other.npy", a)
                os.replace(folder.path / "other.npy", folder.path / "a.npy")
            else:
                (folder.path / "a.npy").unlink()

    error, message = {
        "raise": (ZeroDivisionError, None),
        "interrupt": (KeyboardInterrupt, None),
        "cut": (FileError, "it was cut while it was read"),
        "touch": (FileError, "was changed while it was read"),
        "replace": (FileError, "was removed or replaced while it was read"),
        "remove": (FileError, "was removed or replaced while it was read"),
    }[event]
    threads = threading.active_count()
    with pytest.raises(error, match=message) as raised:
        folder.multiply(a, b, memory="300KiB", progress=happen)
    assert threading.active_count() == threads
    assert "c.npy" not in folder.names()
    assert re.search(r"finished tiles? of \d+ stay in .*c\.npy\.part", raised.value.__notes__[-1])
    paths = [folder.path / name for name in ("a.npy", "b.npy", "c.npy")]
    if event in ("raise", "interrupt"):
        multiply_files(*paths, memory="300KiB")
        _, expected = folder.multiply(a, b, memory="300KiB")
        assert np.load(paths[2]).tobytes() == expected.tobytes()
    else:  # what was computed from the old file does not go with the new one
        np.save(paths[0], a)
        with pytest.raises(
            FileError, match=r"of another product: a (was changed since|is another file)\. Run"
        ):
            multiply_files(*paths, memory="300KiB")


def test_a_disk_that_fills_up_stops_the_work(
    folder: Folder, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    a, b = rng.standard_normal((2, 600, 600)).astype(np.float32)
    pwrite, calls = os.pwrite, itertools.count()

    def fills_up(fd: int, data: Any, offset: int) -> int:
        if next(calls) > 300:
            raise OSError(28, "No space left on device")
        return pwrite(fd, data, offset)

    monkeypatch.setattr(os, "pwrite", fills_up)
    with pytest.raises(
        FileError, match=r"out \(.*c\.npy\) needs 1\.37 MiB and .* has .* free: No"
    ) as raised:
        folder.multiply(a, b, memory="300KiB")
    assert raised.value.__notes__[0].startswith("on tile ")
    monkeypatch.undo()
    _, c = folder.multiply(a, b, memory="300KiB")
    assert folder.names() == ["a.npy", "b.npy", "c.npy"]
    assert within_bound(c, a, b)


def test_H2_no_switch_of_ours_is_in_the_environment() -> None:
    """Arguments alone decide; what reads the environment only tells or describes."""
    import ast

    import tilewise

    package = Path(tilewise.__file__).parent
    readers = set()
    for path in package.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            name = getattr(node, "attr", getattr(node, "id", None))
            if name in ("environ", "getenv", "environb"):
                readers.add(path.relative_to(package).as_posix())
    # `tilewise info` prints thread settings; the driver's error says what hides the GPUs.
    assert readers <= {"_info.py", "runtime/driver.py"}


@pytest.mark.parametrize(
    ("option", "off", "on", "refused"),
    [
        ("verify", [False, 0], [True, 1], ["", "false", "0", "no"]),
        ("precision", [None], ["ieee"], ["", "0", "false", 0, False, True]),
        ("devices", [None], ["cpu", ["cpu"]], ["", "0", "false", 0, False, []]),
        ("memory", [None], ["1GiB", 2**30, "50%"], ["", "false", False, True, "-1"]),
    ],
)
def test_H2_switches_are_off_when_they_say_so(
    folder: Folder, option: str, off: list[Any], on: list[Any], refused: list[Any]
) -> None:
    x = np.ones((5, 5))
    plans = {}
    for value in off + on:
        plans[str(value)], _ = folder.multiply(x, x, **{option: value})
    if option == "verify":
        assert [plan.verify for plan in plans.values()] == [False] * len(off) + [True] * len(on)
    for value in refused:
        with pytest.raises((OptionError, DeviceError)):
            folder.multiply(x, x, **{option: value})
    with pytest.raises(BudgetError):
        folder.multiply(x, x, memory=0)


def test_an_operand_is_no_place_for_the_result(tmp_path: Path) -> None:
    x = small_integers(np.random.default_rng(3), (300, 300), np.dtype("f8"))
    y = x.copy()
    on_disk = np.lib.format.open_memmap(tmp_path / "m.npy", "w+", "f8", (300, 300))
    on_disk[...] = x
    on_disk.flush()
    for a, b, out in (
        (y, y, y),
        (y, x, y[:]),
        (x, y, y[::-1]),
        (str(tmp_path / "m.npy"), x, on_disk),
    ):
        with pytest.raises(FileError, match="is written while that is read"):
            multiply_files(a, b, out, memory="400KiB")
    assert np.array_equal(y, x)
    assert np.array_equal(np.load(tmp_path / "m.npy"), x)
    out = np.zeros((300, 300))
    multiply_files(y, x, out, memory="400KiB")
    assert np.array_equal(out, x @ x)
