"""Operands and outputs in Zarr, HDF5 and a caller's own stores: right, aligned, within budget."""

from __future__ import annotations

import itertools
import math
import os
import re
import subprocess
import sys
import threading
import tracemalloc
import warnings
from pathlib import Path
from typing import Any

import h5py
import ml_dtypes
import numpy as np
import pytest
import zarr
from hypothesis import given, settings
from hypothesis import strategies as st

import tilewise as tw
from tests.outofcore.results import load
from tests.support import small_integers
from tilewise._memory import format_bytes, parse_budget
from tilewise.cli import main
from tilewise.errors import BudgetError, DTypeError, FileError, OptionError, ShapeError
from tilewise.outofcore.files import open_matrix
from tilewise.outofcore.pipeline import Progress, multiply_files
from tilewise.outofcore.stores import Readable, StoreMatrix, Writable, parts


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(12)


class Rows:
    """A store of the plainest kind, that remembers what it was asked for."""

    def __init__(self, array: Any, chunks: Any = None) -> None:
        self.array, self.shape, self.dtype = array, array.shape, array.dtype
        self.asked: list[tuple[slice, ...]] = []
        if chunks is not None:
            self.chunks = chunks

    def __getitem__(self, box: Any) -> Any:
        self.asked.append(box)
        return self.array[box]

    def __setitem__(self, box: Any, values: Any) -> None:
        self.array[box] = values


def save(kind: str, name: str, array: Any, chunks: Any = None) -> str:
    """Store an array as ``kind`` says, and return the path of it."""
    if kind == "npy":
        np.save(f"{name}.npy", array)
        return f"{name}.npy"
    if kind in ("zarr2", "zarr3"):
        zarr.create_array(
            f"{name}.zarr", data=array, chunks=chunks or "auto", zarr_format=int(kind[-1])
        )
        return f"{name}.zarr"
    with h5py.File(f"{name}.h5", "w") as file:
        if kind == "flat":
            file["group/x"] = array
        else:
            file.create_dataset(
                "group/x", data=array, chunks=chunks or True, compression="gzip", shuffle=True
            )
    return f"{name}.h5:/group/x"


@pytest.mark.parametrize("out", ["c.npy", "c.zarr", "c.h5"])
@pytest.mark.parametrize("kinds", [("zarr3", "gzip"), ("flat", "zarr2"), ("npy", "zarr3")])
@pytest.mark.parametrize("memory", ["1MiB", "100MiB"])
def test_every_kind_of_file(
    folder: Path, rng: np.random.Generator, kinds: tuple[str, str], out: str, memory: str
) -> None:
    a = small_integers(rng, (331, 257), "float32")
    b = small_integers(rng, (257, 299), ">f8")
    paths = save(kinds[0], "a", a, (100, 64)), save(kinds[1], "b", b, (50, 70))
    plan = multiply_files(*paths, out, memory=memory, verify=True)
    assert plan.schedule is not None
    assert plan.schedule.is_whole == (memory == "100MiB")
    c = load(out)
    assert c.dtype == plan.dtype == np.float64
    assert np.array_equal(c, a @ b)
    assert sorted(os.listdir()) == sorted({out, *(path.partition(":")[0] for path in paths)})


@pytest.mark.parametrize(
    ("a_shape", "b_shape"),
    [
        ((300,), (300, 500)),
        ((5000, 30), (30,)),
        ((7000,), (7000,)),
        ((5, 1, 90, 80), (6, 80, 70)),
        ((1, 1, 90, 80), (1, 80, 70)),
        ((300, 30, 20), (20, 25)),
        ((3, 150, 160), (160, 140)),
        ((4, 70), (3, 70, 60)),
        ((70,), (3, 70, 1)),
        ((1, 70), (70,)),
        ((1, 1), (1, 1)),
        ((300, 0), (0, 300)),
        ((0, 30), (30, 30)),
    ],
)
@pytest.mark.parametrize("out", ["c.zarr", "c.h5"])
def test_shapes_are_those_of_matmul(
    folder: Path, rng: np.random.Generator, a_shape: Any, b_shape: Any, out: str
) -> None:
    a, b = small_integers(rng, a_shape, "float32"), small_integers(rng, b_shape, "float32")
    expected = np.matmul(a, b)
    for memory, (x, y) in (("400KiB", (Rows(a), Rows(b))), ("10MiB", (Rows(a, a_shape), Rows(b)))):
        if 0 in a_shape:
            x = Rows(a)
        multiply_files(x, y, out, memory=memory)
        c = load(out)
        assert (c.shape, c.dtype) == (expected.shape, expected.dtype)
        assert np.array_equal(c, expected)


@pytest.mark.parametrize("out", ["c.npy", "c.zarr", "c.h5", "store"])
@pytest.mark.parametrize("dtype", ["float64", ">f8", np.float64])
def test_a_type_that_is_asked_for_is_written_as_itself(
    folder: Path, rng: np.random.Generator, out: str, dtype: Any
) -> None:
    a = small_integers(rng, (40, 30), "float32")
    target = Rows(np.full((40, 40), np.nan)) if out == "store" else out
    plan = multiply_files(Rows(a), Rows(a.T), target, dtype=dtype)
    c = target.array if isinstance(target, Rows) else load(out)
    assert c.dtype == plan.dtype == np.float64
    assert np.array_equal(c, a @ a.T)


@pytest.mark.parametrize("dtype", ["int8", ">i2", "float16", "bool", "complex64", ">f8", "uint64"])
@pytest.mark.parametrize("kind", ["zarr2", "zarr3", "gzip", "flat"])
def test_every_type(folder: Path, rng: np.random.Generator, dtype: str, kind: str) -> None:
    a, b = small_integers(rng, (60, 50), dtype), small_integers(rng, (50, 40), dtype)
    out = "c.h5" if kind in ("gzip", "flat") else "c.zarr"
    multiply_files(save(kind, "a", a), save(kind, "b", b), out)
    c = load(out)
    assert c.dtype == np.matmul(a, b).dtype
    assert np.array_equal(c, np.matmul(a, b))


@pytest.mark.parametrize("out", ["c.zarr", "c.h5", "c.npy"])
@pytest.mark.parametrize("name", ["bfloat16", "float8_e4m3fn"])
def test_raw_floats_say_what_they_are(
    folder: Path, rng: np.random.Generator, name: str, out: str
) -> None:
    dtype = getattr(ml_dtypes, name)
    a = small_integers(rng, (60, 50), "float32", -1, 1).astype(dtype)
    bits = a.view(f"u{a.itemsize}")
    left, right = save("zarr3", "a", bits), save("gzip", "b", bits.T)
    plan = multiply_files(f"{left}:{name}", f"{right}:{name}", out, dtype=dtype)
    assert plan.dtype == dtype
    c = load(out).view(dtype)
    assert np.array_equal(c, (a.astype("f4") @ a.T.astype("f4")).astype(dtype))
    multiply_files(f"{left}:{name}", f"{right}:{name}", f"again_{out}", dtype=dtype, verify=True)


@pytest.mark.parametrize("kind", [tuple, list, np.array])
def test_a_store_is_read_along_its_chunks(
    folder: Path, rng: np.random.Generator, kind: Any
) -> None:
    a = small_integers(rng, (1000, 800), "float32")
    b = small_integers(rng, (800, 900), "float32")
    left, right = Rows(a, kind((200, 160))), Rows(b, kind((160, 90)))
    plan = multiply_files(left, right, "c.npy", memory="3MiB")
    assert plan.schedule is not None
    assert not plan.schedule.is_whole
    assert np.array_equal(load("c.npy"), a @ b)
    for store in (left, right):
        for box in store.asked:
            for part, size, chunk in zip(box, store.shape, store.chunks, strict=True):
                assert part.start % chunk == 0
                assert part.stop % chunk == 0 or part.stop == size
    read = sum(a[box].nbytes for box in left.asked) + sum(b[box].nbytes for box in right.asked)
    assert read == plan.schedule.read_bytes


def test_an_output_has_chunks_that_no_two_tiles_share(
    folder: Path, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    a, b = (small_integers(rng, (1200, 1200), "float32") for _ in range(2))
    written = []
    put = zarr.Array.__setitem__

    def remembering(self: Any, box: Any, values: Any) -> None:
        written.append(box)
        put(self, box, values)

    monkeypatch.setattr(zarr.Array, "__setitem__", remembering)
    for memory in ("2MiB", "12MiB"):
        written.clear()
        plan = multiply_files(Rows(a), Rows(b), "c.zarr", memory=memory)
        assert plan.schedule is not None
        assert not plan.schedule.is_whole
        chunks = zarr.open_array("c.zarr", mode="r").chunks
        for box in written:
            for part, chunk in zip(box, chunks, strict=True):
                assert part.start % chunk == 0
                assert part.stop % chunk == 0 or part.stop == 1200
        assert min(chunks) >= 16
        assert 8 << 10 < math.prod(chunks) * 4 <= 4 << 20
        assert np.array_equal(load("c.zarr"), a @ b)


def test_an_output_has_the_format_of_its_operands(folder: Path) -> None:
    x = np.ones((4, 4))
    two, three, none = save("zarr2", "two", x), save("zarr3", "three", x), save("npy", "none", x)
    for a, b, kind in ((two, three, 2), (three, none, 3), (none, none, 3)):
        multiply_files(a, b, "c.zarr")
        assert zarr.open_array("c.zarr", mode="r").metadata.zarr_format == kind


@pytest.mark.parametrize("kind", ["zarr3", "gzip"])
def test_what_is_held_is_what_was_planned(
    folder: Path, rng: np.random.Generator, kind: str
) -> None:
    a, b = (small_integers(rng, (700, 700), "float32") for _ in range(2))
    paths = save(kind, "a", a, (100, 100)), save(kind, "b", b, (100, 100))
    multiply_files(*paths, "c.zarr", memory="2MiB")  # what is imported on the way stays
    tracemalloc.start()
    plan = multiply_files(*paths, "c.zarr", memory="2MiB")
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert plan.schedule is not None
    assert not plan.schedule.is_whole
    assert plan.held_bytes <= 2 << 20
    assert peak <= plan.held_bytes + (512 << 10)


def test_a_chunk_larger_than_the_budget_is_refused_with_the_numbers(folder: Path) -> None:
    x = Rows(np.ones((1000, 1000)), (1000, 1000))
    with pytest.raises(BudgetError, match=r"take 2\d\.\d+ MiB, 22\.\d+ MiB of it for chunks, and"):
        multiply_files(x, x, "c.npy", memory="5MiB")
    assert not os.listdir()


def test_stores_of_the_callers_own(folder: Path, rng: np.random.Generator) -> None:
    a = small_integers(rng, (300, 200), "float32")
    b = small_integers(rng, (200, 250), "float32")
    for out in (np.full((300, 250), np.nan, np.float32), Rows(np.zeros((300, 250), ">f4"))):
        multiply_files(Rows(a), np.asfortranarray(b), out, memory="300KiB", verify=True)
        assert np.array_equal(np.asarray(getattr(out, "array", out)), a @ b)
    zarr.create_array("a.zarr", data=a, chunks=(64, 64))
    with h5py.File("b.h5", "w") as file:
        file["b"] = b
        made = zarr.create_array("c.zarr", shape=(300, 250), chunks=(70, 60), dtype="f4")
        multiply_files(zarr.open_array("a.zarr", mode="r"), file["b"], made, memory="600KiB")
    assert np.array_equal(load("c.zarr"), a @ b)
    assert sorted(os.listdir()) == ["a.zarr", "b.h5", "c.zarr"]
    with pytest.raises(ShapeError, match=r"out \(Rows\) has shape \(3, 3\), the result \(300, 25"):
        multiply_files(Rows(a), Rows(b), Rows(np.zeros((3, 3), "f4")))
    with pytest.raises(DTypeError, match=r"out \(Rows\) has dtype float64, and the result float32"):
        multiply_files(Rows(a), Rows(b), Rows(np.zeros((300, 250))))


def test_a_plan_for_files_can_be_made_called_and_watched(
    folder: Path, rng: np.random.Generator
) -> None:
    a = small_integers(rng, (300, 200), "float32")
    left, right = save("zarr3", "a", a, (50, 50)), save("npy", "b", a.T)
    plan = tw.plan(left, Path(right), memory="500KiB", verify=True)
    assert "a.zarr (300, 200) float32 @ b.npy (200, 300) float32" in str(plan)
    assert "a.zarr once" in str(plan)
    assert not os.path.exists("c.npy")
    seen: list[Progress] = []
    assert plan(left, right, out="c.npy", progress=seen.append) == "c.npy"
    assert np.array_equal(np.load("c.npy"), a @ a.T)
    assert seen[-1].flops == seen[-1].total_flops == 2 * 300 * 300 * 200
    save("npy", "b", a.T[:, :299])
    with pytest.raises(ShapeError, match=r"b\.npy \(200, 299\).* is not what this plan is for"):
        plan(left, right, out="c.npy")
    with pytest.raises(OptionError, match="progress= is for products of files"):
        tw.plan(a, a.T)(a, a.T, progress=seen.append)
    with pytest.raises(FileError, match="out is NoneType, neither a path nor a store"):
        plan(left, right)
    for call in (tw.matmul, lambda x, y: tw.plan(a, a.T)(x, y)):
        with pytest.raises(DTypeError, match=r"a is the text 'a\.zarr'; .* multiply_files"):
            call(left, right)


def test_arrays_within_files_are_found_by_path_or_by_being_alone(folder: Path) -> None:
    x = np.ones((3, 4))
    zarr.open_group("g.zarr", mode="w").create_array("in/x", data=x)
    with h5py.File("x.h5", "w") as file:
        file["in/x"] = x
        file["soft"] = h5py.SoftLink("/in/x")
    for path in (
        "g.zarr",
        "g.zarr:/",
        "g.zarr:/in/x",
        "g.zarr/in/x",
        "x.h5",
        "x.h5:/in/x",
        "x.h5:/soft",
    ):
        with open_matrix(path, "a") as found:
            assert (found.shape, found.dtype) == ((3, 4), x.dtype)
    zarr.open_group("g.zarr", mode="r+").create_array("y", data=x)
    with h5py.File("x.h5", "r+") as file:
        file["y"] = x
    for path, words in (
        ("g.zarr", r"a \(g\.zarr\) is a group; name one of its arrays \(there: /in/x, /y\)"),
        ("g.zarr:/z", r"a \(g\.zarr:/z\) has no array /z; there: /in/x, /y"),
        ("x.h5", r"a \(x\.h5\) has 2 datasets: /in/x, /y; name one, as in x\.h5:/in/x"),
        ("x.h5:/z", r"a \(x\.h5:/z\) has no dataset /z; there: /in/x, /y"),
        ("x.h5:/in", r"/in is a group, not a dataset"),
    ):
        with pytest.raises(FileError, match=words):
            open_matrix(path, "a")


@pytest.mark.parametrize("kind", ["npy", "flat", "gzip", "zarr2", "zarr3"])
def test_a_matrix_times_its_transpose(folder: Path, rng: np.random.Generator, kind: str) -> None:
    x = small_integers(rng, (300, 170), "float32")
    path = save(kind, "x", x, (40, 50))
    for memory in ("600KiB", "10MiB"):
        plan = multiply_files(path, f"{path}:T", "c.npy", memory=memory, verify=True)
        assert plan.schedule is not None
        assert plan.schedule.is_whole == (memory == "10MiB")
        assert np.array_equal(load("c.npy"), x @ x.T)
    multiply_files(f"{path}:T", path, "c.npy", memory="600KiB")
    assert np.array_equal(load("c.npy"), x.T @ x)
    assert main(["check", f"{path}:T", path, "c.npy"]) == 0


def test_what_cannot_be_turned_is_refused(folder: Path, rng: np.random.Generator) -> None:
    v, x = small_integers(rng, (5,), "float32"), small_integers(rng, (2, 5, 5), "float32")
    multiply_files(f"{save('npy', 'v', v)}:T", x[0], "c.npy")
    assert np.array_equal(load("c.npy"), v @ x[0])
    with pytest.raises(FileError, match=r"a \(x\.npy:T\): :T turns a matrix, and this has 3 axes"):
        multiply_files(f"{save('npy', 'x', x)}:T", v, "c.npy")
    with pytest.raises(FileError, match="a result is not written turned"):
        multiply_files("v.npy", x[0], "c.npy:T")
    h = small_integers(rng, (6, 4), "float32").astype(ml_dtypes.bfloat16)
    np.save("h.npy", h)
    multiply_files("h.npy:bfloat16:T", "h.npy:bfloat16", "c.npy", dtype="f4")
    assert np.array_equal(load("c.npy"), h.T.astype("f4") @ h.astype("f4"))


def test_hdf5_that_does_not_lie_in_one_stretch(folder: Path, rng: np.random.Generator) -> None:
    a = small_integers(rng, (120, 90), "float32")
    with h5py.File("other.h5", "w", userblock_size=1024) as file:
        file["x"] = a
    a[:60].tofile("raw.bin")
    with h5py.File("a.h5", "w") as file:
        file["link"] = h5py.ExternalLink("other.h5", "/x")
        layout = h5py.VirtualLayout((240, 90), "f4")
        layout[:120] = layout[120:] = h5py.VirtualSource("other.h5", "/x", shape=(120, 90))
        file.create_virtual_dataset("virtual", layout)
        file.create_dataset("external", (60, 90), "f4", external=[("raw.bin", 0, a.nbytes // 2)])
        file["compact"] = a[:2, :2]
        file.create_dataset("late", (60, 90), "f4", fillvalue=2)  # nothing was ever written
    for name, expected in (
        ("link", a),
        ("virtual", np.concatenate([a, a])),
        ("external", a[:60]),
        ("compact", a[:2, :2]),
        ("late", np.full((60, 90), 2, "f4")),
    ):
        multiply_files(f"a.h5:/{name}", np.eye(expected.shape[1], dtype="f4"), "c.npy")
        assert np.array_equal(np.load("c.npy"), expected), name


def test_files_behind_an_hdf5_dataset_are_operands_too(folder: Path) -> None:
    a = np.ones((300, 300))
    with h5py.File("source.h5", "w") as file:
        file["x"] = a
    a.tofile("raw.npy")
    np.save("b.npy", a)
    layout = h5py.VirtualLayout(a.shape, "f8")
    layout[...] = h5py.VirtualSource("source.h5", "/x", shape=a.shape)
    with h5py.File("a.h5", "w") as file:
        file.create_virtual_dataset("virtual", layout)
        file.create_dataset("external", a.shape, "f8", external=[("raw.npy", 0, a.nbytes)])

    def stop(_: Progress) -> None:
        if "done" in Path(f"{name}.npy.journal").read_text():
            raise KeyboardInterrupt

    for name, behind in (("virtual", "source.h5:/x"), ("external", "raw.npy")):
        with h5py.File("a.h5") as file:
            for operand in (f"a.h5:/{name}", file[name]):
                with pytest.raises(FileError, match=r"is the same file as a .* never overwritten"):
                    multiply_files(operand, "b.npy", behind)
        with pytest.raises(KeyboardInterrupt):
            multiply_files(f"a.h5:/{name}", "b.npy", f"{name}.npy", memory="400KiB", progress=stop)
        os.utime(behind.removesuffix(":/x"))
        with pytest.raises(FileError, match="a was changed since"):
            multiply_files(f"a.h5:/{name}", "b.npy", f"{name}.npy", memory="400KiB")


def test_names_that_lead_nowhere_are_refused(folder: Path) -> None:
    x = save("npy", "x", np.eye(4))
    for a, out, words in (
        (x, "c\0.npy", r"out \(.*\) cannot be created: .*null (byte|character)"),
        ("a\0.npy", "c.npy", r"a \(.*\) cannot be opened: .*null (byte|character)"),
        ("n" * 5000, "c.npy", r"a \(n*\) cannot be opened: File name too long"),
        (x, "n" * 300 + ".npy", r"out \(n*.npy\) cannot be opened: File name too long"),
        (x, "n" * 245 + ".npy", r"out \(.*n*.npy\) cannot be created: File name too long"),
        (x, "c.npy:/c", r"out \(c.npy:/c\): a .npy file holds one array and no /c; leave"),
        ("", "c.npy", "a is given no name"),
        (b"x.npy", "c.npy", "a is bytes, neither a path nor a store"),
        (x, None, "out is NoneType, neither a path nor a store"),
    ):
        with pytest.raises(FileError, match=words):
            multiply_files(a, x, out)  # type: ignore[arg-type]
    assert os.listdir() == ["x.npy"]


def test_operands_without_all_their_elements_are_refused(folder: Path) -> None:
    masked = np.ma.masked_array(np.ones((3, 3)), np.eye(3))

    class Sparse(Rows):
        nnz = 1

    for a, message in ((masked, "a is a masked array"), (Sparse(np.eye(3)), "a is sparse")):
        with pytest.raises(DTypeError, match=message):
            multiply_files(a, np.eye(3), "C.npy")
    assert not list(folder.iterdir())


def test_a_type_that_zarr_does_not_have_is_refused(folder: Path) -> None:
    a = np.eye(3, dtype=np.longdouble)
    if a.dtype == np.float64:
        pytest.skip("longdouble is float64 here")
    with pytest.raises(DTypeError, match="Zarr has no elements"):
        multiply_files(a, a, "C.zarr")
    assert not list(folder.iterdir())


def test_what_follows_a_path_in_another_order_is_explained(folder: Path) -> None:
    np.save("A.npy", np.eye(3))
    for text in ("A.npy:T:bfloat16", "A.npy:x/y"):
        with pytest.raises(FileError, match=r"A\.npy does, and what may follow it"):
            open_matrix(text, "a")


@pytest.mark.parametrize("size", [1025, 20000, 100_001, 218_450, 1_234_567])
def test_the_budget_that_a_message_asks_for_is_enough(folder: Path, size: int) -> None:
    assert (parse_budget(format_bytes(size, is_needed=True)) or 0) >= size
    a = np.ones((300, size // 100))
    with pytest.raises(BudgetError) as refused:
        multiply_files(a, a.T, "C.npy", memory=1)
    needed = re.search(r"take ([\d.]+) (\w+)", str(refused.value))
    assert needed is not None
    multiply_files(a, a.T, "C.npy", memory="".join(needed.groups()))


def test_an_output_replaces_its_like_and_nothing_else(folder: Path) -> None:
    x = save("npy", "x", np.eye(4))
    for out in ("c.h5", "c.h5:/deep/c", "c.zarr"):
        name = out.partition(":")[0]
        for _ in range(2):
            multiply_files(x, x, out)
        if out != "c.zarr":
            with h5py.File(name, "r+") as file:
                file["precious"] = 1
            with pytest.raises(FileError, match="holds more than .*, and a result gets an HDF5"):
                multiply_files(x, x, out)
            os.unlink(name)
    multiply_files(x, x, "c.h5")
    with h5py.File("c.h5", "r+") as file:
        file["c"].attrs["units"] = "m"
    with pytest.raises(FileError, match="holds more than /c"):
        multiply_files(x, x, "c.h5")
    for more in ("group", "soft link", "external link", "type"):
        multiply_files(x, x, f"{more}.h5:/c")
        with h5py.File(f"{more}.h5", "r+") as file:
            if more == "group":
                file.create_group("meta").attrs["units"] = "m"
            elif more == "type":
                file["t"] = np.dtype("f4")
            else:
                target = h5py.SoftLink("/c") if more == "soft link" else h5py.ExternalLink("o", "/")
                file["link"] = target
        with pytest.raises(FileError, match="holds more than /c"):
            multiply_files(x, x, f"{more}.h5:/c")
    Path("c.zarr.old").mkdir()
    Path("c.zarr.old/precious").touch()
    multiply_files(x, x, "c.zarr")
    assert Path("c.zarr.old/precious").exists()
    zarr.open_group("g.zarr", mode="w").create_array("x", data=np.ones(3))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that this is not part of the format
        zarr.consolidate_metadata("g.zarr")
    multiply_files(x, x, "g.zarr/c")
    multiply_files(x, x, "g.zarr:/c")
    multiply_files("g.zarr:/c", x, "c.npy")
    group = zarr.open_group("g.zarr", mode="r", use_consolidated=False)
    assert sorted(name for name, _ in group.members()) == ["c", "x"]
    Path("f.zarr").mkdir()
    Path("f.zarr/precious").touch()
    for out in ("g.zarr", "f.zarr"):
        with pytest.raises(FileError, match="is there, and is not a Zarr array; give the result"):
            multiply_files(x, x, out)
    with pytest.raises(FileError, match=r"is the same file as a \(g\.zarr/c\)"):
        multiply_files("g.zarr/c", x, "g.zarr/c")


@pytest.mark.parametrize("moment", ["taken away", "replaced"])
def test_killed_while_it_replaces_an_array_it_leaves_nothing_behind(
    folder: Path, moment: str
) -> None:
    a = np.eye(40)
    np.save("a.npy", a)
    zarr.create_array("c.zarr", data=5 * a)
    program = f"""
import os, shutil
from tilewise import multiply_files
replace, rmtree = os.replace, shutil.rmtree
def replacing(source, target):
    {moment == "taken away"} and target.name == "c.zarr" and os._exit(9)
    replace(source, target)
def removing(path, **options):
    path.parent.name == "c.zarr" and os._exit(9)
    rmtree(path, **options)
os.replace, shutil.rmtree = replacing, removing
multiply_files("a.npy", "a.npy", "c.zarr")
"""
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 9
    assert Path("c.zarr").exists() == (moment == "replaced")
    multiply_files("a.npy", "a.npy", "c.zarr")
    assert np.array_equal(load("c.zarr"), a)
    assert sorted(os.listdir()) == ["a.npy", "c.zarr"]
    assert not list(Path("c.zarr").glob(".*"))


def test_what_a_killed_run_took_away_is_there_until_it_is_replaced(folder: Path) -> None:
    zarr.create_array("c.zarr", data=5 * np.eye(4))
    Path("c.zarr.part").mkdir()
    os.replace("c.zarr", "c.zarr.part/.replaced")
    Path("c.zarr.journal").touch()
    seen = []

    class Looks(Rows):
        def __getitem__(self, box: Any) -> Any:
            seen.append(np.array_equal(load("c.zarr"), 5 * np.eye(4)))
            return super().__getitem__(box)

    multiply_files(Looks(np.eye(4)), np.eye(4), "c.zarr")
    assert seen
    assert all(seen)


@pytest.mark.parametrize("fixed", ["c.zarr", "c.zarr.part"])
def test_what_cannot_be_replaced_stays(folder: Path, monkeypatch: Any, fixed: str) -> None:
    a, real = np.ones((8, 8)), os.replace
    zarr.create_array("c.zarr", data=5 * a)

    def replace(source: Path, target: Path) -> None:
        if source.parent == folder and source.name == fixed:
            raise PermissionError(1, "not permitted")
        real(source, target)

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", replace)
        with pytest.raises(FileError, match="cannot be completed: .* not permitted"):
            multiply_files(a, a, "c.zarr")
    assert np.array_equal(load("c.zarr"), 5 * a)
    assert [path.name for path in folder.iterdir()] == ["c.zarr"]
    multiply_files(a, a, "c.zarr")
    assert np.array_equal(load("c.zarr"), a @ a)


def test_an_open_array_is_known_by_where_it_is(folder: Path) -> None:
    x = np.arange(16.0).reshape(4, 4)
    y = zarr.create_array("z.zarr", data=x)
    zarr.open_group("g.zarr", mode="w").create_array("in", data=x)
    inside = zarr.open_group("g.zarr", mode="r+")["in"]
    np.save("n.npy", x)
    os.link("n.npy", "hard.npy")
    Path("soft.npy").symlink_to("n.npy")
    Path("soft.zarr").symlink_to("z.zarr")
    mapped = np.load("n.npy", mmap_mode="r+")
    with h5py.File("h.h5", "w") as file:
        file["x"], file["y"] = x, x
        file.create_dataset("chunked", data=x, chunks=(2, 2))
        file["again"] = h5py.SoftLink("/chunked")
        h = file["x"]
        cases: list[tuple[Any, Any]] = [
            (y, "z.zarr"),
            (y, "soft.zarr"),
            ("z.zarr", zarr.open_array("z.zarr", mode="r+")),
            (y, zarr.open_array("soft.zarr", mode="r+")),
            ("g.zarr:/in", inside),
            (inside, "g.zarr/in"),
            *((view, n) for n in ("n.npy", "hard.npy", "soft.npy") for view in (
                mapped[::2, ::2], np.asarray(mapped), np.load("n.npy", mmap_mode="c")
            )),
            ("hard.npy", mapped),
            (np.asarray(mapped), np.load("soft.npy", mmap_mode="r+")),
            (h, "h.h5"),
            (h, "h.h5:/x"),
            (file["chunked"], file["again"]),
        ]  # fmt: skip
        before = sorted(os.listdir())
        for operand, out in cases:
            for a, b in ((operand, np.ones((4, 4))), (np.ones((4, 4)), operand)):
                if getattr(operand, "shape", None) == (2, 2):
                    a, b = operand, operand
                with pytest.raises(FileError, match="same file as|its memory or file|holds more"):
                    multiply_files(a, b, out)
        assert sorted(os.listdir()) == before
        multiply_files(h, file["y"], file["chunked"])  # of one file, each in a place of its own
        assert np.array_equal(file["chunked"][...], x @ x)
        multiply_files(y, inside, "c.npy")
    with h5py.File("h.h5", "r+") as file:
        for place in ("x", "y"):  # its file would be seen to change
            with pytest.raises(FileError, match="shares its memory or file"):
                multiply_files("h.h5:/x", x, file[place])
    assert np.array_equal(np.load("n.npy"), x)
    assert np.array_equal(np.load("c.npy"), x @ x)


def spoil_chunk(path: str, chunk: tuple[int, int]) -> None:
    if path.endswith(".zarr"):
        Path(path, "c", *map(str, chunk)).write_bytes(b"no chunk of yours")
        return
    with h5py.File("a.h5") as file:
        x = file["group/x"]
        start = tuple(i * size for i, size in zip(chunk, x.chunks, strict=True))
        place = x.id.get_chunk_info_by_coord(start).byte_offset
    with open("a.h5", "r+b") as raw:
        raw.seek(place)
        raw.write(bytes(60))


@pytest.mark.parametrize("kind", ["zarr3", "gzip"])
@pytest.mark.parametrize("memory", ["2MiB", "64MiB"])
def test_a_chunk_that_cannot_be_read_is_named(folder: Path, kind: str, memory: str) -> None:
    x = np.random.default_rng(1).standard_normal((600, 600))
    path = save(kind, "a", x, (100, 150))
    spoil_chunk(path, (3, 2))
    threads = threading.active_count()
    with pytest.raises(
        FileError, match=r"a \(a\..*\) cannot be read at chunk \(3, 2\), \[300:400, 300:\d+\]: \w+:"
    ) as raised:
        multiply_files(path, Rows(x), "c.npy", memory=memory)
    if memory == "2MiB":
        assert any(note.startswith("on tile ") for note in raised.value.__notes__)
    assert threading.active_count() <= threads + 2 * (kind == "zarr3")  # zarr keeps its own
    with pytest.raises(FileError, match=r"at chunk \(3, 2\), \[300:\d+, 300:\d+\]"):
        multiply_files(f"{path}:T", Rows(x), "c.npy", memory=memory)
    assert main(["mul", path, path, "-o", "c.npy", "--memory", memory]) == 2


class Failing(Rows):
    """A store that fails on some requests."""

    def __init__(self, array: Any, error: BaseException, after: int = 3) -> None:
        super().__init__(array)
        self.error, self.after = error, after

    def __getitem__(self, box: Any) -> Any:
        if len(self.asked) == self.after:
            raise self.error
        return super().__getitem__(box)

    def __setitem__(self, box: Any, values: Any) -> None:
        self.asked.append(box)
        if len(self.asked) > self.after:
            raise self.error
        super().__setitem__(box, values)


@pytest.mark.parametrize(
    ("error", "raised", "words"),
    [
        (ConnectionError("the line is dead"), FileError, "ConnectionError: the line is dead"),
        (ValueError(7), FileError, "ValueError: 7"),
        (MemoryError("none left"), MemoryError, "none left"),
        (SystemExit(3), tw.TilewiseError, r"a thread at work on tile \d+ ended: SystemExit\(3\)"),
        (KeyboardInterrupt(), tw.TilewiseError, "a thread at work .* ended: KeyboardInterrupt"),
    ],
)
@pytest.mark.parametrize("side", ["a", "out"])
def test_a_store_that_raises_or_ends_its_thread_is_an_error_of_the_caller(
    folder: Path, error: BaseException, raised: Any, words: str, side: str
) -> None:
    x = np.ones((400, 400), np.float32)
    a = Failing(x, error) if side == "a" else Rows(x)
    out = Failing(np.zeros_like(x), error) if side == "out" else "c.npy"
    threads = threading.active_count()
    with pytest.raises(raised, match=words) as caught:
        multiply_files(a, Rows(x), out, memory="400KiB")
    assert "tile" in f"{caught.value} {getattr(caught.value, '__notes__', '')}"
    assert threading.active_count() == threads
    assert not os.listdir()
    multiply_files(Rows(x), Rows(x), "c.npy", memory="400KiB")  # and the next product works


def test_a_store_that_gives_something_else_is_refused(folder: Path) -> None:
    x = np.ones((400, 400), np.float32)
    for wrong in (lambda y: y[:1], lambda y: y.astype("f8")):
        store = Rows(x)
        store.__class__ = type(
            "Lying", (Rows,), {"__getitem__": lambda self, box, wrong=wrong: wrong(self.array[box])}
        )
        with pytest.raises(FileError, match=r"a \(Lying\) gave \(.*\) float.* for \[.*\], which"):
            multiply_files(store, x, "c.npy", memory="400KiB")


@pytest.mark.parametrize("module", ["h5py", "zarr"])
def test_a_missing_library_is_named_with_its_extra(
    folder: Path, module: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    kind, out = ("flat", "c.h5") if module == "h5py" else ("zarr3", "c.zarr")
    path, x = save(kind, "a", np.eye(3)), save("npy", "x", np.eye(3))
    extra = "hdf5" if module == "h5py" else "zarr"
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(FileError, match=rf"pip install 'tilewise\[{extra}\]'"):
        multiply_files(path, x, "c.npy")
    with pytest.raises(FileError, match=rf"out \(.*\) is .*pip install 'tilewise\[{extra}\]'"):
        multiply_files(x, x, out)
    assert not any(name.startswith("c.") for name in os.listdir())


@settings(deadline=None, max_examples=200)
@given(data=st.data())
def test_parts_cover_a_box_once_along_its_chunks(data: Any) -> None:
    sizes = data.draw(st.lists(st.integers(1, 9), min_size=1, max_size=3))
    chunks = tuple(data.draw(st.integers(1, 5)) for _ in sizes)
    box = []
    for size in sizes:
        start = data.draw(st.integers(0, size - 1))
        box.append(slice(start, data.draw(st.integers(start + 1, size))))
    most = data.draw(st.integers(1, 200))
    count = np.zeros(sizes, int)
    for part in parts(tuple(box), chunks, most):
        count[part] += 1
        assert count[part].size <= max(most, math.prod(chunks))
        for piece, whole, chunk in zip(part, box, chunks, strict=True):
            assert piece.start % chunk == 0 or piece.start == whole.start
            assert piece.stop % chunk == 0 or piece.stop == whole.stop
    assert count.sum() == count[tuple(box)].sum() == count[tuple(box)].size
    assert count.max() == 1


def test_any_box_of_a_store(rng: np.random.Generator) -> None:
    x = small_integers(rng, (5, 6, 7), "int16")
    matrix = StoreMatrix.of(Rows(x, (2, 3, 4)), "a", "x", x.dtype)
    assert matrix.strides == x.strides
    for most in (2, 60, 10_000):
        cut = matrix.as_panels(x.shape, most)
        for box in itertools.product(*[(slice(0, n), slice(1, n - 1)) for n in x.shape]):
            buffer = np.full(x.nbytes + 8, 0xFF, np.uint8)
            assert np.array_equal(cut.read(box, buffer), x[box])
            assert np.array_equal(cut.view(box, buffer), x[box])


@pytest.mark.parametrize("kind", ["zarr", "h5"])
def test_a_store_on_disk_that_is_removed_meanwhile_is_an_error_that_names_it(
    tmp_path: Path, kind: str
) -> None:
    path = tmp_path / f"a.{kind}"
    if kind == "zarr":
        zarr.create_array(path, data=np.ones((4, 4)), chunks=(2, 2))
    else:
        with h5py.File(path, "w") as file:
            file.create_dataset("x", data=np.ones((4, 4)), chunks=(2, 2))
    with open_matrix(path, "a") as a:
        a.check_unchanged()
        path.rename(tmp_path / "elsewhere")
        with pytest.raises(FileError, match=r"a \(.*\) was changed while it was read"):
            a.check_unchanged()


class WriteOnly:
    """A store that takes a result and gives nothing back."""

    shape, dtype = (6, 6), np.dtype(np.float64)

    def __init__(self) -> None:
        self.values = np.zeros(self.shape)

    def __setitem__(self, box: Any, values: Any) -> None:
        self.values[box] = values


class Forgetful(WriteOnly):
    """A store that answers, with nothing."""

    def __getitem__(self, box: Any) -> Any:
        return None


class Broken(WriteOnly):
    """A store that cannot be read."""

    def __getitem__(self, box: Any) -> Any:
        raise ZeroDivisionError("by nobody")


def test_a_result_that_cannot_be_read_back_is_not_verified(folder: Path) -> None:
    x = np.arange(36.0).reshape(6, 6)
    np.save("a.npy", x)
    out = WriteOnly()
    with pytest.raises(FileError, match=r"out is WriteOnly, which has no __getitem__, and verify"):
        multiply_files("a.npy", "a.npy", out, verify=True)
    with pytest.raises(FileError, match=r"out is WriteOnly, which has no __getitem__, and verify"):
        tw.plan("a.npy", "a.npy", verify=True)("a.npy", "a.npy", out=out)
    assert not out.values.any()
    multiply_files("a.npy", "a.npy", out)
    assert np.array_equal(out.values, x @ x)


def test_a_store_that_gives_nothing_is_named_with_the_box(folder: Path) -> None:
    np.save("a.npy", np.ones((6, 6)))
    gave = r"gave \(\) object for \[0:6, 0:6\], which has \(6, 6\) float64"
    with pytest.raises(FileError, match=rf"a \(Forgetful\) {gave}"):
        multiply_files(Forgetful(), "a.npy", "c.npy")
    with pytest.raises(FileError, match=rf"out \(Forgetful\) {gave}"):
        multiply_files("a.npy", "a.npy", Forgetful(), verify=True)
    message = r"out \(Broken\) cannot be read back at \[0:6, 0:6\]: ZeroDivisionError: by nobody"
    with pytest.raises(FileError, match=message):
        multiply_files("a.npy", "a.npy", Broken(), verify=True)
    assert [path.name for path in folder.iterdir()] == ["a.npy"]


def test_masked_elements_of_a_store_are_refused(folder: Path) -> None:
    x = np.ones((300, 300))
    missing = np.zeros(x.shape, bool)
    multiply_files(Rows(np.ma.masked_array(x, missing)), x, "c.npy")  # as netCDF4 gives them
    assert np.array_equal(load("c.npy"), x @ x)
    missing[200, 100] = True
    for memory in ("400KiB", None):
        with pytest.raises(DTypeError, match=r"a \(Rows\) gave masked elements at \["):
            multiply_files(Rows(np.ma.masked_array(x, missing)), x, "d.npy", memory=memory)


def test_a_store_may_give_the_other_byte_order_and_no_other_type(folder: Path) -> None:
    class Other(WriteOnly):
        gives = ">f8"

        def __getitem__(self, box: Any) -> Any:
            return np.arange(36.0).reshape(6, 6)[box].astype(self.gives)

    np.save("a.npy", np.eye(6))
    multiply_files(Other(), "a.npy", "c.npy")
    assert np.array_equal(np.load("c.npy"), np.arange(36.0).reshape(6, 6))
    Other.gives = "<i8"  # as wide, and not raw bytes of a float64
    with pytest.raises(FileError, match=r"a \(Other\) gave \(6, 6\) int64 for \[0:6, 0:6\]"):
        multiply_files(Other(), "a.npy", "c.npy")


def test_an_empty_dataset_is_no_operand(folder: Path) -> None:
    with h5py.File("x.h5", "w") as file:
        file["nothing"] = h5py.Empty("f4")
        file["a"] = np.ones((2, 2), "f4")
        for call in (
            lambda: multiply_files(file["nothing"], file["a"], "c.npy"),
            lambda: tw.matmul(file["nothing"], file["a"]),
            lambda: tw.check(file["a"], file["nothing"], file["a"]),
            lambda: tw.gemm(file["a"], file["a"], np.ones((2, 2), "f4"), alpha=file["nothing"]),
        ):
            with pytest.raises(tw.TilewiseError):
                call()
    with pytest.raises(ShapeError, match=r"a \(x\.h5:/nothing\) is empty"):
        multiply_files("x.h5:/nothing", "x.h5:/a", "c.npy")
    assert [path.name for path in folder.iterdir()] == ["x.h5"]


@pytest.mark.parametrize(
    "out",
    [
        [[1, 2], [3]], 3.0, "C.txt", "no/such/C.npy", "A.npy", "C.npy:T", "C.npy:bfloat16", len,
        np.zeros((2, 3)), np.zeros((4, 4), "f4"), ".", "C\0.npy", {},
    ],
)  # fmt: skip
def test_a_plan_refuses_what_the_product_could_not_be_written_to(folder: Path, out: Any) -> None:
    np.save("A.npy", np.ones((4, 4)))
    for call in (tw.plan, lambda *operands, out: multiply_files(*operands, out)):
        with pytest.raises((FileError, ShapeError, DTypeError)) as caught:
            call("A.npy", "A.npy", out=out)
        assert str(caught.value).startswith("out (") or "out is" in str(caught.value)
    assert [path.name for path in folder.iterdir()] == ["A.npy"]


@pytest.mark.parametrize("name", ["C.npy", "C.h5", "C.zarr"])
def test_a_plan_for_an_output_is_the_one_that_runs(folder: Path, name: str) -> None:
    np.save("A.npy", np.ones((1 << 10, 1 << 10), "f2"))
    expected = tw.plan("A.npy", "A.npy", out=name, memory="2MiB")
    assert expected == multiply_files("A.npy", "A.npy", name, memory="2MiB")
    assert expected.schedule is not None
    assert (expected.schedule.job.staging_bytes > 0) == (name == "C.zarr")


@pytest.mark.parametrize(
    ("name", "value", "match"),
    [
        ("dtype", "f5", r"'f5' for a dtype"),
        ("dtype", object(), "for a dtype, which is none of NumPy's"),
        ("dtype", None, "None for a dtype"),
        ("shape", 4, "4 for a shape, which is no tuple of sizes"),
        ("shape", (4, -4), "for a shape"),
        ("shape", (4.0, 4), "for a shape"),
        ("shape", None, "is empty"),
    ],
)
def test_a_store_that_is_not_described_is_refused_by_name(
    folder: Path, name: str, value: Any, match: str
) -> None:
    x, store = np.ones((4, 4)), Rows(np.ones((4, 4)))
    setattr(store, name, value)
    for a, out, operand in ((store, "c.npy", "a"), (x, store, "out")):
        with pytest.raises((ShapeError, DTypeError), match=rf"{operand} \(Rows\) .*{match}"):
            multiply_files(a, x, out)
    assert list(folder.iterdir()) == []


def test_an_array_that_cannot_take_the_result_is_refused_before_any_work(folder: Path) -> None:
    class Unread(Rows):
        def __getitem__(self, box: Any) -> Any:
            raise AssertionError("nothing is read")

    x, closed = Unread(np.ones((4, 4))), np.zeros((4, 4))
    closed.flags.writeable = False
    for out, match in (
        (closed, r"out \(ndarray\) .* is read-only"),
        (np.lib.stride_tricks.as_strided(np.zeros(4), (4, 4), (0, 8)), "elements that share memo"),
    ):
        with pytest.raises((ShapeError, DTypeError), match=match):
            multiply_files(x, x, out)


@pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, np.uint16])
def test_a_store_takes_bfloat16_as_itself_or_as_raw_bytes(
    folder: Path, rng: np.random.Generator, dtype: Any
) -> None:
    a = small_integers(rng, (50, 60), np.dtype(ml_dtypes.bfloat16))
    for out in (np.zeros((50, 50), dtype), Rows(np.zeros((50, 50), dtype))):
        multiply_files(a, a.T, out, verify=True)
        found = np.asarray(getattr(out, "array", out)).view(a.dtype)
        assert np.array_equal(found, (a.astype("f4") @ a.T.astype("f4")).astype(a.dtype))


@pytest.mark.parametrize("out", ["a.zarr/c.npy", "a.zarr/c.zarr", "a.zarr:/x", "a.zarr/c/x.npy"])
def test_nothing_is_written_within_an_operand(folder: Path, out: str) -> None:
    a = np.ones((8, 8))
    zarr.create_array("a.zarr", data=a, chunks=(4, 4))
    before = sorted(folder.rglob("*"))
    for operand in ("a.zarr", zarr.open_array("a.zarr", mode="r")):
        with pytest.raises(
            FileError, match=r"out .* (is within a \(|cannot be created: .*a\.zarr)"
        ):
            multiply_files(operand, a, out)
    assert sorted(folder.rglob("*")) == before


def test_an_array_in_a_group_has_the_format_of_the_group(folder: Path) -> None:
    x = np.arange(16.0).reshape(4, 4)
    for number in (2, 3):
        group = zarr.create_group(f"g{number}.zarr", zarr_format=number)
        group.create_array("x", data=x)
        other = save(f"zarr{5 - number}", f"other{number}", x)
        multiply_files(other, other, f"g{number}.zarr:/c")
        found = zarr.open_group(f"g{number}.zarr", mode="r")["c"]
        assert np.array_equal(np.asarray(found[...]), x @ x)  # type: ignore[index]


def test_an_array_is_written_to_no_folder_that_would_not_know_it(folder: Path) -> None:
    x = np.eye(4)
    zarr.create_array("x.zarr", data=x)
    Path("plain.zarr").mkdir()
    for out, words in (
        ("x.zarr:/c", r"x\.zarr is not a Zarr group; make it one"),
        ("x.zarr/c.zarr", r"x\.zarr is a Zarr array itself"),
        ("plain.zarr:/c", r"plain\.zarr is not a Zarr group"),
        ("none.zarr:/c", r"none\.zarr is not a Zarr group"),
    ):
        with pytest.raises(FileError, match=rf"out \({out}\) cannot be created: .*{words}"):
            multiply_files(x, x, out)


def test_an_operand_is_not_asked_to_be_written_to() -> None:
    assert not hasattr(Readable, "__setitem__")  # it is what type checkers ask of an operand
    assert not hasattr(Writable, "__getitem__")


def test_what_a_stopped_run_left_in_a_group_does_not_hide_its_only_array(folder: Path) -> None:
    group = zarr.create_group("g.zarr")
    group.create_array("x", data=np.eye(4))
    group.create_array("c.part", data=np.zeros((4, 4)))
    Path("g.zarr/c.journal").touch()
    with open_matrix("g.zarr", "a") as found:
        assert np.array_equal(
            found.read((slice(0, 4), slice(0, 4)), np.empty(128, "u1")), np.eye(4)
        )
    zarr.create_group("h.zarr").create_array("x.part", data=np.eye(4))  # a caller's own name
    with open_matrix("h.zarr", "a") as found:
        assert found.shape == (4, 4)


@pytest.mark.parametrize(("k", "kib"), [(300, 900), (400, 700), (500, 900)])
def test_chunks_of_a_prime_number_make_no_slivers(
    tmp_path: Path, rng: np.random.Generator, k: int, kib: int
) -> None:
    a, b = (small_integers(rng, shape, "float32") for shape in ((642, k), (k, 395)))
    stored = zarr.create_array(tmp_path / "b.zarr", data=b, chunks=(k // 3, 131))
    out = tmp_path / "c.zarr"
    plan = multiply_files(a, stored, out, memory=kib << 10)
    assert plan.schedule is not None
    assert min(plan.schedule.parts) >= 16
    c = zarr.open_array(out, mode="r")
    assert c.nchunks < 200
    assert np.array_equal(c[:], a @ b)
