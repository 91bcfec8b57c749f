"""Files multiplied by GPUs made of NumPy: everything but the kernels, from call to final name."""

from __future__ import annotations

import itertools
import json
import os
import signal
import subprocess
import sys
import threading
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import h5py
import ml_dtypes
import numpy as np
import pytest
import zarr

import tilewise as tw
from tests.outofcore.fake_device import FakeCuda
from tests.outofcore.fake_gpus import fake_gpus
from tests.outofcore.results import load
from tests.support import no_more_threads_than, small_integers, thread_count
from tilewise import _devices, _streamed
from tilewise._memory import parse_budget
from tilewise._operand import Operand
from tilewise.cli import main
from tilewise.errors import BudgetError, CheckError, DeviceError, FileError, OptionError
from tilewise.outofcore.device_files import OnGpuFiles
from tilewise.outofcore.flat import FlatOutput
from tilewise.outofcore.journal import Journal
from tilewise.outofcore.pipeline import Progress, multiply_files
from tilewise.outofcore.planning import plan_files
from tilewise.runtime import pinned, transfers
from tilewise.runtime.memory import pool

BF16 = np.dtype(ml_dtypes.bfloat16)
TYPES = ("float32", "float64", "float16", BF16, "int8", "uint16", "int64", "complex64", "bool")
OUTPUTS = ["c.npy", "c.zarr", "c.h5"]
SIDE = 700
MEMORY = "1600KiB"


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(66)


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeCuda]:
    with fake_gpus(monkeypatch) as fake:
        yield fake


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def squares(folder: Path, rng: Any) -> Path:
    """Two matrices of small whole numbers and no zero in the product."""
    for name in ("a.npy", "b.npy"):
        np.save(name, rng.integers(1, 4, (SIDE, SIDE)).astype(np.float32))
    return folder


def save(name: str, x: Any) -> str:
    np.save(name, x)
    return f"{name}:{x.dtype.name}" if x.dtype.isbuiltin == 2 else name


def on_gpu(a: Any, b: Any, out: Any = "c.npy", **options: Any) -> Any:
    return multiply_files(a, b, out, **({"devices": "cuda:0"} | options))


def expected() -> Any:
    return np.load("a.npy") @ np.load("b.npy")


def names() -> list[str]:
    return sorted(os.listdir())


def exact(a: Any, b: Any) -> Any:
    if a.dtype == bool:
        return np.matmul(a, b)
    wide = complex if a.dtype.kind == "c" else np.int64 if a.dtype.kind in "iu" else float
    return np.matmul(a.astype(wide), b.astype(wide))


@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_every_type_order_and_byte_order(folder: Path, cuda: Any, rng: Any, dtype: Any) -> None:
    a, b = small_integers(rng, (300, 210), dtype), small_integers(rng, (210, 270), dtype)
    foreign = a.dtype.newbyteorder() if a.dtype.isbuiltin == 1 else a.dtype
    for i, (x, y) in enumerate(
        itertools.product((a, np.asfortranarray(a)), (b.astype(foreign), np.asfortranarray(b)))
    ):
        left, right = save("a.npy", x), save("b.npy", y)
        budget = (200 << 10, 400 << 10, None)[i % 3]
        plan = on_gpu(left, right, memory=budget and budget * a.itemsize)
        assert plan.device == "cuda:0"
        c = np.load("c.npy")
        c = c.view(plan.dtype) if c.dtype.kind == "V" else c
        assert c.tobytes() == exact(a, b).astype(dtype).tobytes(), str(plan)
    assert names() == ["a.npy", "b.npy", "c.npy"]


@pytest.mark.parametrize(
    ("a_shape", "b_shape"),
    [
        ((20, 30, 25), (20, 25, 35)),
        ((20, 30, 25), (25, 35)),
        ((3, 1, 30, 25), (4, 25, 35)),
        ((130, 25), (6, 25, 300)),
        ((4, 30, 25), (1, 25, 35)),
        ((25,), (6, 25, 35)),
        ((6, 30, 25), (25,)),
        ((9000,), (9000,)),
        ((40, 1), (1, 50)),
    ],
    ids=str,
)
def test_batches_and_vectors(folder: Path, cuda: Any, rng: Any, a_shape: Any, b_shape: Any) -> None:
    a, b = small_integers(rng, a_shape, "float32"), small_integers(rng, b_shape, "float32")
    save("a.npy", a), save("b.npy", b)
    if a.ndim > 1:
        zarr.create_array("a.zarr", data=a, chunks=tuple(max(n // 2, 1) for n in a.shape))
    runs = [("a.npy", "c.npy", 1 << 20), ("a.npy", "c.zarr", None)]
    for left, out, budget in [*runs, *[("a.zarr", "c.npy", None)] * (a.ndim > 1)]:
        on_gpu(left, "b.npy", out, memory=budget)
        c = load(out)
        assert c.shape == np.matmul(a, b).shape
        assert (c == np.matmul(a, b)).all()


@pytest.mark.parametrize(
    ("a_shape", "b_shape"),
    [((1, 130, 33), (33, 300)), ((4, 130, 33), (1, 33, 300)), ((1, 1, 130, 33), (1, 33, 300))],
    ids=str,
)
def test_a_lone_matrix_of_a_stack_in_fortran_order(
    folder: Path, cuda: Any, rng: Any, a_shape: Any, b_shape: Any
) -> None:
    a, b = small_integers(rng, a_shape, "float32"), small_integers(rng, b_shape, "float32")
    is_lone = a.size == a.shape[-2] * a.shape[-1]
    save("a.npy", np.asfortranarray(a) if is_lone else a), save("b.npy", np.asfortranarray(b))
    on_gpu("a.npy", "b.npy")
    assert np.array_equal(np.load("c.npy"), exact(a, b))


def test_K_in_pieces_and_a_transpose_read_once(folder: Path, cuda: Any, rng: Any) -> None:
    a = small_integers(rng, (40, 20_000), "float64")
    b = small_integers(rng, (20_000, 30), "float64")
    plan = on_gpu(save("a.npy", a), save("b.npy", b), memory=2 << 20)
    assert plan.schedule.streams.parts[0].schedule.pieces > 1
    assert (np.load("c.npy") == a @ b).all()
    x = small_integers(rng, (400, 90), "float32")
    seen: list[Progress] = []
    plan = on_gpu(save("x.npy", x), "x.npy:T", progress=seen.append)
    assert plan.schedule.read_bytes == seen[-1].read_bytes == x.nbytes
    assert (np.load("c.npy") == x @ x.T).all()


@pytest.mark.parametrize("out", OUTPUTS)
@pytest.mark.parametrize("kind", ["zarr", "h5"])
def test_chunks_are_read_and_written_whole(
    squares: Path, cuda: Any, monkeypatch: Any, kind: str, out: str
) -> None:
    a, b = np.load("a.npy"), np.load("b.npy")
    if kind == "zarr":
        zarr.create_array("a.zarr", data=a, chunks=(64, 130))
        left = "a.zarr"
    else:
        with h5py.File("a.h5", "w") as file:
            file.create_dataset("x", data=a, chunks=(64, 130), compression="gzip")
        left = "a.h5:/x"
    written: list[Any] = []
    real = zarr.Array.__setitem__

    def noting(self: Any, box: Any, values: Any) -> None:
        written.append((box, self.chunks))
        real(self, box, values)

    monkeypatch.setattr(zarr.Array, "__setitem__", noting)
    for memory in ("4MiB", "64MiB"):
        written.clear()
        plan = on_gpu(left, "b.npy", out, memory=memory)
        assert (load(out) == a @ b).all()
        steps = plan.schedule.streams.parts[0].schedule
        assert steps.tile_m % 64 == 0 or steps.tile_m == SIDE
        for box, chunks in written:
            for part, chunk in zip(box, chunks, strict=True):
                assert part.start % chunk == 0
                assert part.stop % chunk == 0 or part.stop == SIDE
    assert bool(written) == (out == "c.zarr")


def test_a_chunk_larger_than_a_slice_is_read_once(squares: Path, cuda: Any) -> None:
    x = Watched(np.load("a.npy"), (SIDE, SIDE))
    plan = on_gpu(x, "b.npy", devices="cuda:0")
    assert plan.schedule.streams.threads.slice_bytes >= 4 * SIDE**2
    assert x.boxes == [(slice(0, SIDE), slice(0, SIDE))]
    assert (np.load("c.npy") == expected()).all()
    with pytest.raises(BudgetError, match=r"is computed with at least .* MiB, and memory= allows"):
        on_gpu(Watched(np.load("a.npy"), (SIDE, SIDE)), "b.npy", memory="3MiB")


class Watched:
    """A store of two methods, which one thread at a time may ask."""

    def __init__(self, x: Any, chunks: Any = None) -> None:
        self.x, self.shape, self.dtype = x, x.shape, x.dtype
        if chunks is not None:
            self.chunks = chunks
        self.boxes: list[Any] = []
        self._busy = threading.Lock()

    def __getitem__(self, box: Any) -> Any:
        assert self._busy.acquire(blocking=False)
        self.boxes.append(box)
        values = self.x[box].copy()
        self._busy.release()
        return values

    def __setitem__(self, box: Any, values: Any) -> None:
        assert self._busy.acquire(blocking=False)
        self.x[box] = values
        self._busy.release()


@pytest.mark.parametrize("chunks", [None, (64, 90)])
def test_stores_of_two_methods(squares: Path, cuda: Any, chunks: Any) -> None:
    x, y = Watched(np.load("a.npy"), chunks), Watched(np.load("b.npy"), chunks)
    out = Watched(np.full((SIDE, SIDE), np.nan, np.float32), chunks)
    on_gpu(x, y, out, memory="2MiB")
    assert (out.x == expected()).all()
    assert names() == ["a.npy", "b.npy"]


def test_two_gpus_share_tiles_and_record_them(squares: Path, cuda: Any) -> None:
    devices = ["cuda:0", "cuda:1"]
    for out in OUTPUTS:
        stop_at(0.5, out, devices=devices, memory="2MiB")
        kept = finished(out)
        seen: list[Progress] = []
        plan = multiply_files("a.npy", "b.npy", out, progress=seen.append)
        assert plan.device == "cuda:0, cuda:1"
        assert seen[0].kept_flops > 0
        assert {tile for tile, _ in plan.schedule.tiles()} == set(range(plan.schedule.tile_count))
        assert 0 < len(kept) < plan.schedule.tile_count
        assert (load(out) == expected()).all()
    assert names() == sorted(["a.npy", "b.npy", *OUTPUTS])


def stop_at(share: float, out: str, **options: Any) -> None:
    """Multiply until a share of the work is done, then be interrupted."""

    def stop(reached: Progress) -> None:
        if reached.flops >= share * reached.total_flops:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        on_gpu("a.npy", "b.npy", out, progress=stop, **({"memory": MEMORY} | options))


def finished(out: str) -> set[int]:
    done: set[int] = set()
    for line in Path(f"{out}.journal").read_text().splitlines()[1:]:
        word, tile = line.split()
        (done.add if word == "done" else done.discard)(int(tile))
    return done


@pytest.fixture
def copied_out(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The bytes that came back from a GPU, copy by copy."""
    sizes: list[int] = []
    real = transfers.Gpu.copy_out

    def counting(self: Any, *copy: int) -> None:
        sizes.append(copy[4] * copy[5])
        real(self, *copy)

    monkeypatch.setattr(transfers.Gpu, "copy_out", counting)
    return sizes


@pytest.mark.parametrize("memory", [MEMORY, "64MiB"])
@pytest.mark.parametrize("out", OUTPUTS)
def test_finished_tiles_are_kept_and_the_rest_is_done(
    squares: Path, cuda: Any, copied_out: list[int], out: str, memory: str
) -> None:
    stop_at(0.3, out, memory=memory)
    assert names() == ["a.npy", "b.npy", f"{out}.journal", f"{out}.part"]
    kept = finished(out)
    copied_out.clear()
    seen: list[Progress] = []
    plan = multiply_files("a.npy", "b.npy", out, progress=seen.append)  # where, and in what, it was
    assert plan.device == "cuda:0"
    boxes = dict(plan.schedule.tiles())
    elements = {
        tile: np.prod([part.stop - part.start for part in box]) for tile, box in boxes.items()
    }
    rest = sum(elements[tile] for tile in set(boxes) - kept)
    assert 0 < rest < SIDE**2
    assert sum(copied_out) == 4 * rest
    assert seen[0].kept_flops == 2 * SIDE * (SIDE**2 - rest)
    assert seen[-1].flops == seen[-1].total_flops == 2 * SIDE**3
    assert seen[-1].written_bytes == 4 * rest
    assert (load(out) == expected()).all()
    assert names() == ["a.npy", "b.npy", out]


def test_panels_that_no_tile_needs_are_not_read_again(squares: Path, cuda: Any) -> None:
    plan = on_gpu("a.npy", "b.npy")
    assert plan.schedule.streams.parts[0].schedule.order == "corner"
    os.unlink("c.npy")
    stop_at(0.9, "c.npy", memory=None)
    seen: list[Progress] = []
    on_gpu("a.npy", "b.npy", progress=seen.append)
    assert seen[-1].read_bytes < plan.schedule.read_bytes
    assert (np.load("c.npy") == expected()).all()


CHILD = """
import os, random, signal, sys
import pytest
from tests.outofcore.fake_gpus import fake_gpus
from tilewise.cli import main
from tilewise.outofcore import flat, stores
from tilewise.outofcore.journal import Journal

left = int(sys.argv[1])
os.fsync = lambda _: None

def dying(real):
    def call(*given, **named):
        global left
        left -= 1
        if left == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return real(*given, **named)
    return call

for owner, name in (
    (flat.FlatOutput, "write"), (flat.FlatOutput, "sync"), (flat.FlatFile, "read_into"),
    (stores.StoreOutput, "write"), (Journal, "record"), (os, "replace"),
):
    setattr(owner, name, dying(getattr(owner, name)))
with pytest.MonkeyPatch.context() as patch, fake_gpus(patch):
    sys.exit(main(sys.argv[2:]))
"""


class Killed:
    """Runs of the command line that are killed at some event: a read, a write, a line recorded."""

    def __init__(self, out: str) -> None:
        root = str(Path(__file__).parents[2])
        self.out = out
        self.environment = os.environ | {"PYTHONPATH": os.pathsep.join([root, *sys.path])}
        self.command = ["mul", "a.npy", "b.npy", "-o", out, "--memory", MEMORY, "--quiet"]
        self.command += ["--devices", "cuda:0"]

    def run(self, events: int) -> int:
        child = [sys.executable, "-c", CHILD, str(events), *self.command]
        return subprocess.run(child, env=self.environment, check=False).returncode

    def check_what_is_recorded(self) -> set[int]:
        """Return which tiles are, after comparing what stands in their places."""
        if not Path(f"{self.out}.part").exists():
            return set()
        part, tiles, done = load(f"{self.out}.part"), dict(tiles_of()), finished(self.out)
        for tile in done:
            assert (part[tiles[tile]] == expected()[tiles[tile]]).all()
        return done


@pytest.mark.parametrize("out", OUTPUTS[:2])
def test_killed_and_finished_it_has_the_same_bytes(squares: Path, out: str, rng: Any) -> None:
    killed = Killed(out)
    for events in (60, int(rng.integers(5, 50))):
        assert killed.run(events) == -signal.SIGKILL
        assert not Path(out).exists()
        killed.check_what_is_recorded()
    assert killed.run(0) == 0
    assert load(out).tobytes() == expected().tobytes()
    assert names() == ["a.npy", "b.npy", out]


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("out", OUTPUTS)
def test_killed_at_twenty_random_moments(squares: Path, out: str, rng: Any) -> None:
    killed, done, kills = Killed(out), set(), 0
    while kills < 20:
        code = killed.run(int(rng.integers(2, 60)))
        if code == 0:
            assert load(out).tobytes() == expected().tobytes()
            assert names() == ["a.npy", "b.npy", out]
            Path(out).unlink() if Path(out).is_file() else os.rename(out, f"../old{kills}")
            done = set()
            continue
        assert code == -signal.SIGKILL
        kills += 1
        before, done = done, killed.check_what_is_recorded()
        assert before <= done, "what was finished stays"
    assert killed.run(0) == 0
    assert load(out).tobytes() == expected().tobytes()


def tiles_of() -> Any:
    with pytest.MonkeyPatch.context() as patch, fake_gpus(patch):
        return tw.plan("a.npy", "b.npy", memory=MEMORY, devices="cuda:0").schedule.tiles()


def test_a_tile_is_recorded_when_all_of_it_is_durable(
    squares: Path, cuda: Any, monkeypatch: Any
) -> None:
    written: list[Any] = []
    durable: set[int] = set()
    recorded = []
    write, sync, append = FlatOutput.write, FlatOutput.sync, Journal._append
    lock = threading.Lock()

    def noting_write(self: Any, box: Any, values: Any) -> None:
        write(self, box, values)
        with lock:
            written.append(box)

    def noting_sync(self: Any) -> None:
        with lock:
            before = len(written)
        sync(self)
        durable.update(range(before))

    def noting_line(self: Any, line: str) -> None:
        word, _, tile = line.partition(" ")
        if word == "done":
            rows, columns = tiles[int(tile)]
            missing = np.ones((SIDE, SIDE), bool)
            for i in durable:
                missing[written[i]] = False
            assert not missing[rows, columns].any()
            recorded.append(int(tile))
        append(self, line)

    tiles = dict(tw.plan("a.npy", "b.npy", memory=MEMORY, devices="cuda:0").schedule.tiles())
    monkeypatch.setattr(FlatOutput, "write", noting_write)
    monkeypatch.setattr(FlatOutput, "sync", noting_sync)
    monkeypatch.setattr(Journal, "_append", noting_line)
    on_gpu("a.npy", "b.npy", memory=MEMORY)
    assert sorted(recorded) == sorted(tiles)


@pytest.mark.parametrize("out", OUTPUTS)
def test_verify_finds_and_repairs_a_finished_tile(
    squares: Path, cuda: Any, copied_out: list[int], out: str
) -> None:
    stop_at(0.6, out)
    kept = finished(out)
    plan = tw.plan("a.npy", "b.npy", memory=MEMORY, devices="cuda:0")
    rows, columns = dict(plan.schedule.tiles())[min(kept)]
    spot = rows.start + 1, columns.start + 2
    if out.endswith(".npy"):
        part = np.lib.format.open_memmap("c.npy.part", mode="r+")
        part[spot] += 9
        part.flush()
    elif out.endswith(".zarr"):
        zarr.open_array("c.zarr.part", mode="r+")[spot] = -9
    else:
        with h5py.File("c.h5.part", "r+") as file:
            file["c"][spot] = -9
    copied_out.clear()
    seen: list[Progress] = []
    on_gpu("a.npy", "b.npy", out, memory=MEMORY, verify=True, progress=seen.append)
    assert seen[-1].repaired_tiles == 1
    assert (load(out) == expected()).all()
    tile = (rows.stop - rows.start) * (columns.stop - columns.start)
    others = sum(
        np.prod([part.stop - part.start for part in box])
        for i, box in plan.schedule.tiles()
        if i not in kept
    )
    assert sum(copied_out) == 4 * (others + tile)
    assert names() == ["a.npy", "b.npy", out]


def test_a_result_that_stays_wrong_is_not_handed_over(
    squares: Path, cuda: Any, monkeypatch: Any
) -> None:
    real = FlatOutput.write

    def wrong(self: Any, box: Any, values: Any) -> None:
        values[..., 0, 0] += 50
        real(self, box, values)

    monkeypatch.setattr(FlatOutput, "write", wrong)
    with pytest.raises(CheckError, match="found a wrong result, which was not written"):
        on_gpu("a.npy", "b.npy", memory=MEMORY, verify=True)
    assert "c.npy" not in names()


def test_a_disk_that_fills_up_costs_only_what_was_unfinished(
    squares: Path, cuda: Any, monkeypatch: Any
) -> None:
    pwrite, calls = os.pwrite, itertools.count()

    def fills_up(fd: int, data: Any, offset: int) -> int:
        if next(calls) > 1000:
            raise OSError(28, "No space left on device")
        return pwrite(fd, data, offset)

    before = thread_count()
    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", fills_up)
        with pytest.raises(FileError, match=r"needs 1\.87 MiB and .* has .* free: No") as raised:
            on_gpu("a.npy", "b.npy", memory=MEMORY)
    assert raised.value.__notes__[0].startswith("while cuda:0 gave back c[")
    assert "finished tile" in raised.value.__notes__[-1]
    assert no_more_threads_than(before)
    assert finished("c.npy")
    on_gpu("a.npy", "b.npy", memory=MEMORY)
    assert (np.load("c.npy") == expected()).all()


@pytest.mark.parametrize("event", ["cut", "touch", "interrupt", "store", "bus", "memory"])
def test_whatever_happens_all_is_given_back_and_finished_tiles_stay(
    squares: Path, cuda: Any, monkeypatch: Any, event: str
) -> None:
    happened: list[str] = []
    left: Any = "a.npy"

    def happen(reached: Progress) -> None:
        if reached.flops > reached.total_flops / 4 and not happened:
            happened.append(event)
            if event == "interrupt":
                raise KeyboardInterrupt
            if event == "cut":
                os.truncate("a.npy", 1000)
            elif event == "touch":
                os.utime("a.npy", (1, 1))

    class Failing(Watched):
        def __getitem__(self, box: Any) -> Any:
            if len(self.boxes) > 3:
                raise ZeroDivisionError("no such place")
            return super().__getitem__(box)

    error: type[BaseException]
    error, message = {
        "cut": (FileError, "it was cut while it was read"),
        "touch": (FileError, "was changed while it was read"),
        "interrupt": (KeyboardInterrupt, None),
        "store": (FileError, r"a \(Failing\) cannot be read at \[.* no such place"),
        "bus": (DeviceError, "the bus is cut"),
        "memory": (BudgetError, "cuda:0's part of the product needs"),
    }[event]
    if event == "store":
        left = Failing(np.load("a.npy"))
    before, free = thread_count(), cuda.free_bytes[0]
    with monkeypatch.context() as patch:
        if event == "bus":
            real = transfers.Gpu.copy_in

            def dies(self: Any, *copy: int) -> None:
                if finished("c.npy"):
                    raise DeviceError("the bus is cut")
                real(self, *copy)

            patch.setattr(transfers.Gpu, "copy_in", dies)
        if event == "memory":  # another program has it, since it was last seen
            stop_at(0.3, "c.npy")
            patch.setattr(_devices, "_device_budget", lambda *_: 1600 << 10)
            pool(0).trim()
            cuda.free_bytes[0] = 1000
        with pytest.raises(error, match=message) as raised:
            on_gpu(left, "b.npy", memory=MEMORY, progress=happen)
        if event == "memory":
            cuda.free_bytes[0] = free
    assert no_more_threads_than(before)
    assert "c.npy" not in names()
    notes = " ".join(raised.value.__notes__)
    if event == "store":
        assert "while cuda:0 was given a[" in notes
        assert names() == ["a.npy", "b.npy"]  # nothing tells whether it is the same again
        return
    assert "finished tile" in notes
    assert finished("c.npy")
    if event in ("interrupt", "bus", "memory"):
        on_gpu("a.npy", "b.npy", memory=MEMORY)
        assert (np.load("c.npy") == expected()).all()
    else:
        with pytest.raises(FileError, match="of another product: a was changed since|truncated"):
            on_gpu("a.npy", "b.npy", memory=MEMORY)


def test_another_device_is_said_and_refused(squares: Path, cuda: Any) -> None:
    stop_at(0.3, "c.npy")
    with pytest.raises(FileError, match=r"the device was cuda:0 and is cpu"):
        multiply_files("a.npy", "b.npy", "c.npy", devices="cpu")
    with pytest.raises(FileError, match=r"memory was .* and is"):
        on_gpu("a.npy", "b.npy", memory="3MiB")
    plan = multiply_files("a.npy", "b.npy", "c.npy")
    assert plan.device == "cuda:0"
    assert (np.load("c.npy") == expected()).all()


def test_it_goes_on_where_a_little_less_of_the_device_is_free(squares: Path, cuda: Any) -> None:
    stop_at(0.3, "c.npy", memory=None)
    assert finished("c.npy")
    pool(0).trim()
    taken = 40 << 20
    cuda.free_bytes[0] -= taken
    multiply_files("a.npy", "b.npy", "c.npy")
    cuda.free_bytes[0] += taken
    assert (np.load("c.npy") == expected()).all()


@pytest.mark.parametrize("memory", [MEMORY, None])
def test_it_goes_on_where_what_it_needs_of_the_device_is_free_and_its_budget_is_not(
    squares: Path, cuda: Any, memory: Any
) -> None:
    stop_at(0.3, "c.npy", memory=memory)
    begun = finished("c.npy")
    assert begun
    pool(0).trim()
    plan = tw.plan("a.npy", "b.npy", devices="cuda:0", memory=memory)
    (part,) = plan.schedule.streams.parts
    needed, free = part.schedule.held_bytes, cuda.free_bytes[0]
    assert needed < part.schedule.budget_bytes
    cuda.free_bytes[0] = needed - 1
    with pytest.raises(FileError, match=r"memory was .* and is"):
        multiply_files("a.npy", "b.npy", "c.npy", memory=memory)
    assert finished("c.npy") == begun
    cuda.free_bytes[0] = needed
    multiply_files("a.npy", "b.npy", "c.npy", memory=memory)
    cuda.free_bytes[0] += free - needed
    assert (np.load("c.npy") == expected()).all()


def test_a_device_that_is_gone_is_named_with_what_was_begun_there(
    squares: Path, cuda: Any, monkeypatch: Any
) -> None:
    stop_at(0.3, "c.npy")
    journal = Path("c.npy.journal")
    journal.write_text(journal.read_text().replace('"device": "cuda:0"', '"device": "cuda:7"'))
    with pytest.raises(DeviceError, match="cuda:7") as raised:
        multiply_files("a.npy", "b.npy", "c.npy")
    assert "c.npy.part was begun there; remove it and" in raised.value.__notes__[-1]
    assert finished("c.npy")


def test_budgets_of_host_and_device_are_kept(squares: Path, cuda: Any, monkeypatch: Any) -> None:
    least: list[int] = []
    allocate = cuda._allocate

    def watching(*given: Any) -> Any:
        done = allocate(*given)
        least.append(cuda.free_bytes[0])
        return done

    monkeypatch.setattr(cuda, "_allocate", watching)
    on_gpu("a.npy", "b.npy", memory=MEMORY)  # what is imported on the way stays
    pinned.release()
    held = []
    lend = pinned.lend

    def lending(nbytes: int, *rest: Any) -> Any:
        held.append(nbytes)
        return lend(nbytes, *rest)

    monkeypatch.setattr(pinned, "lend", lending)
    for left in ("a.npy", Watched(np.load("a.npy"), (70, 70))):
        for memory in (1600 << 10, 3 << 20):
            least.clear()
            plan = on_gpu(left, "b.npy", memory=memory)
            assert (1 << 30) - min(least) <= memory
            assert held[-1] <= plan.held_bytes <= memory
            assert (np.load("c.npy") == expected()).all()
    with pytest.raises(BudgetError):
        on_gpu("a.npy", "b.npy", memory="10KiB")
    assert "c.npy.part" not in names()


@pytest.mark.parametrize(("k", "memory"), [(500, "8MiB"), (2000, "64MiB")])
def test_D6_memory_of_the_device_does_not_grow_with_the_files(
    cuda: Any, k: int, memory: str
) -> None:
    held = []
    b = Operand((k, k), np.dtype("f4"), (4 * k, 4))
    for m in (100_000, 200_000, 400_000, 10_000_000):
        a = Operand((m, k), np.dtype("f4"), (4 * k, 4))
        plan = plan_files(a, b, memory=memory, devices="cuda:0")
        assert isinstance(plan.how, OnGpuFiles)
        held.append(plan.how.schedule.streams.parts[0].schedule.held_bytes)
    assert max(held) <= parse_budget(memory) <= 1.1 * min(held)


def test_memory_of_the_host_does_not_grow_with_the_files(folder: Path, cuda: Any, rng: Any) -> None:
    save("b.npy", small_integers(rng, (200, 200), "float32"))
    peaks = []
    for m in (5000, 5000, 40_000):  # the first run imports
        save("a.npy", rng.integers(-2, 3, (m, 200)).astype(np.float32))
        device_bytes = cuda.free_bytes[0]
        tracemalloc.start()
        on_gpu("a.npy", "b.npy", memory="2MiB")
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
        assert device_bytes - cuda.free_bytes[0] < 3 << 20
    # The fake device's memory and its products are the host's, and of one size each time.
    assert peaks[2] < 1.25 * peaks[1] + (1 << 20)


def test_a_gpu_is_taken_where_that_is_expected_to_be_faster(
    squares: Path, cuda: Any, monkeypatch: Any
) -> None:
    assert tw.plan("a.npy", "b.npy").device == "cpu"
    monkeypatch.setattr(_devices, "_OFFERED_WORK", 0)
    monkeypatch.setattr(_streamed, "_WORTH_IT", 1e9)
    plan = multiply_files("a.npy", "b.npy", "c.npy")
    assert plan.device == "cuda:0"
    assert "no device was asked for: cuda:0 is expected to take" in plan.why[-1]
    assert (np.load("c.npy") == expected()).all()
    assert multiply_files("a.npy", "b.npy", "c.npy", devices="cpu").device == "cpu"
    save("s.npy", np.asfortranarray(np.ones((3, 40, 50), np.float32)))
    save("t.npy", np.ones((50, 60), np.float32))
    assert multiply_files("s.npy", "t.npy", "c.npy").device == "cpu"
    with pytest.raises(DeviceError, match=r"a \(s\.npy\) is a stack in Fortran order"):
        on_gpu("s.npy", "t.npy")
    save("w.npy", np.ones((40, 50), np.longdouble))
    assert multiply_files("w.npy", "t.npy", "c.npy").device == "cpu"
    monkeypatch.setattr(_streamed, "_WORTH_IT", 0.0)
    assert tw.plan("a.npy", "b.npy").device == "cpu"
    with pytest.raises(OptionError, match="the CPU does not share a product with a GPU"):
        on_gpu("a.npy", "b.npy", devices=["cpu", "cuda:0"])


def test_where_nothing_is_multiplied_no_gpu_is_needed(folder: Path, cuda: Any) -> None:
    for m, k, n in ((4, 0, 5), (0, 3, 5)):
        save("a.npy", np.ones((m, k), "f4"))
        save("b.npy", np.ones((k, n), "f4"))
        assert on_gpu("a.npy", "b.npy").device == "cpu"
        assert (np.load("c.npy") == np.zeros((m, n))).all()


def test_a_plan_says_where_everything_goes_and_runs(squares: Path, cuda: Any, capsys: Any) -> None:
    plan = tw.plan("a.npy", "b.npy", memory=MEMORY, devices="cuda:0", verify=True)
    text = str(plan)
    for word in ("kernels ", "tiles ", "on device ", "bus  ", "disk  ", "expected  ", "on host "):
        assert word in text
    assert "disk       a.npy " in text
    assert str(plan.schedule) in text.replace("a.npy", "a").replace("b.npy", "b") or plan.schedule
    facts = json.loads(json.dumps(plan.to_dict()))
    assert facts["schedule"]["tiles"] == plan.schedule.tile_count
    assert facts["streams"]["devices"][0]["limit"]
    assert plan.moved_bytes == plan.schedule.read_bytes + 4 * SIDE**2
    assert plan("a.npy", "b.npy", out="c.npy") == "c.npy"
    assert (np.load("c.npy") == expected()).all()
    assert main(["plan", "a.npy", "b.npy", "--devices", "cuda:0", "--memory", MEMORY]) == 0
    said = capsys.readouterr().out
    assert "GFLOP/s of cuda:0, and the" in said
    assert "/s to keep up" in said
    assert main(["plan", "20000x20000", "20000x20000", "--devices", "cuda:0,cuda:1"]) == 0
    assert "on cuda:1  c[" in capsys.readouterr().out
    command = ["mul", "a.npy", "b.npy", "-o", "d.npy", "--devices", "cuda:0,cuda:1", "--json"]
    assert main([*command, "--memory", MEMORY]) == 0
    assert json.loads(capsys.readouterr().out)["plan"]["device"] == "cuda:0, cuda:1"
    assert (np.load("d.npy") == expected()).all()


def test_progress_says_what_limits(squares: Path, cuda: Any, monkeypatch: Any) -> None:
    import time

    from tilewise.outofcore.flat import FlatFile

    seen: list[Progress] = []
    on_gpu("a.npy", "b.npy", memory=MEMORY, progress=seen.append)
    done = [reached.flops for reached in seen]
    assert done == sorted(done)
    assert seen[-1].flops == 2 * SIDE**3
    assert {reached.limit for reached in seen} <= {"disk", "bus", "compute"}
    real = FlatFile.read_into

    def slow(self: Any, box: Any, into: Any) -> None:
        time.sleep(0.02)
        real(self, box, into)

    monkeypatch.setattr(FlatFile, "read_into", slow)
    threads = set()

    def note(reached: Progress) -> None:
        seen.append(reached)
        threads.add(threading.get_ident())

    on_gpu("a.npy", "b.npy", memory=MEMORY, progress=note)
    assert seen[-1].limit == "disk"
    assert threads == {threading.get_ident()}
