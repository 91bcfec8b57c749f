"""Files on a GPU: the bits of operands in memory, within budgets, whatever happens in between."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import tilewise as tw
from tests.gpu.support import EXACT, INEXACT, PoolHigh, in_memory, random
from tests.support import small_integers, within_bound
from tilewise import _streamed
from tilewise._memory import parse_budget
from tilewise.errors import BudgetError, FileError
from tilewise.outofcore import planning
from tilewise.outofcore.pipeline import Progress, multiply_files
from tilewise.outofcore.planning import plan_files
from tilewise.runtime import device
from tilewise.runtime.memory import pool, workspace

pytestmark = pytest.mark.gpu


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(2027)


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def save(name: str, x: Any) -> str:
    np.save(name, x)
    return f"{name}:{x.dtype.name}" if x.dtype.isbuiltin == 2 else name


def on_gpu(a: Any, b: Any, out: Any = "c.npy", **options: Any) -> Any:
    """Multiply files, within the memory of the device that was planned; return the plan."""
    for_device = pool(0)
    for_device.trim()
    high = PoolHigh()
    plan = multiply_files(a, b, out, **({"devices": "cuda:0"} | options))
    if isinstance(plan.how, planning.OnFiles):
        return plan
    held = sum(part.schedule.held_bytes for part in plan.schedule.streams.parts)
    assert high.used_bytes() <= held + (1 << 20)
    if options.get("memory") is not None:
        assert high.held_bytes() <= 1.05 * parse_budget(options["memory"]) + 100e6
    return plan


def loaded(plan: Any, name: str = "c.npy") -> Any:
    c = np.load(name)
    return c.view(plan.dtype) if c.dtype.kind == "V" else c


@pytest.mark.usefixtures("cuts_everything")
@pytest.mark.parametrize("dtype", [*INEXACT, *EXACT], ids=str)
def test_bits_are_those_of_device_operands(rng: Any, dtype: Any) -> None:
    a, b = random(rng, (700, 520), dtype), random(rng, (520, 900), dtype)
    expected = in_memory(a, b)
    for i, memory in enumerate((700 << 10, 1500 << 10, 20 << 20, None)):
        x, y = (np.asfortranarray(z) if i & bit else z for z, bit in ((a, 1), (b, 2)))
        if x.dtype.isbuiltin == 1 and i == 3:
            x = x.astype(x.dtype.newbyteorder())
        left, right = save("a.npy", x), save("b.npy", y)
        plan = on_gpu(left, right, memory=memory and memory * a.itemsize)
        assert plan.device == "cuda:0"
        assert loaded(plan).tobytes() == expected.tobytes(), (memory, str(plan))


@pytest.mark.usefixtures("cuts_everything")
@pytest.mark.parametrize("dtype", ["float64", "int8"])
def test_long_k_keeps_its_order_of_sums(rng: Any, dtype: Any) -> None:
    a, b = random(rng, (300, 20_000), dtype), random(rng, (20_000, 260), dtype)
    left, right = save("a.npy", a), save("b.npy", b)
    expected = in_memory(a, b)
    seen = set()
    for memory in (1, 8, 20):
        plan = on_gpu(left, right, memory=memory * 128 * 20_000 * a.itemsize)
        seen.add(plan.schedule.streams.parts[0].schedule.pieces > 1)
        assert loaded(plan).tobytes() == expected.tobytes()
    assert seen == {False, True}


@pytest.mark.usefixtures("cuts_everything")
@pytest.mark.parametrize(
    ("a_shape", "b_shape"),
    [
        ((40, 70, 60), (40, 60, 50)),
        ((40, 70, 60), (60, 50)),
        ((5, 1, 70, 60), (8, 60, 50)),
        ((200, 300), (300, 4)),
        ((300,), (6, 300, 500)),
        ((9, 300, 500), (500,)),
        ((5000,), (5000,)),
    ],
    ids=str,
)
def test_batches_and_vectors(rng: Any, a_shape: Any, b_shape: Any) -> None:
    a, b = random(rng, a_shape, "float32"), random(rng, b_shape, "float32")
    left, right = save("a.npy", a), save("b.npy", b)
    expected = in_memory(a, b)
    for memory in ("1MiB", None):
        plan = on_gpu(left, right, memory=memory)
        assert loaded(plan).shape == np.matmul(a, b).shape
        assert loaded(plan).tobytes() == expected.tobytes()


class Matrix:
    """A store of two methods, whose chunks are kept to."""

    def __init__(self, x: Any, chunks: tuple[int, ...]) -> None:
        self.x, self.shape, self.dtype, self.chunks = x, x.shape, x.dtype, chunks
        self.boxes: list[Any] = []

    def __getitem__(self, box: Any) -> Any:
        self.boxes.append(box)
        return self.x[box]

    def __setitem__(self, box: Any, values: Any) -> None:
        self.boxes.append(box)
        self.x[box] = values


@pytest.mark.usefixtures("cuts_everything")
def test_stores_are_read_and_written_along_their_chunks(rng: Any) -> None:
    a, b = random(rng, (1500, 900), "float32"), random(rng, (900, 1100), "float32")
    for chunks in ((96, 128), (1500, 50)):
        x, y = Matrix(a, chunks), Matrix(b, (100, 100))
        out = Matrix(np.full((1500, 1100), np.nan, np.float32), chunks)
        on_gpu(x, y, out)
        assert out.x.tobytes() == in_memory(a, b).tobytes()
        assert sum((p.stop - p.start) * (q.stop - q.start) for p, q in x.boxes) == a.size
        for p, q in x.boxes:
            assert p.start % chunks[0] == q.start % chunks[1] == 0


@pytest.mark.usefixtures("cuts_everything")
def test_shares_of_two_devices_meet_in_one_file(rng: Any, monkeypatch: Any) -> None:
    facts = device.facts(0)
    machine = _streamed.Machine((facts,) * 2, (1 << 30,) * 2, 16, False, False)
    monkeypatch.setattr(planning, "_machine", lambda *_: machine)
    for shapes in (((900, 500), (500, 700)), ((300, 500), (500, 2000)), ((8, 90, 80), (8, 80, 70))):
        a, b = (random(rng, shape, "float32") for shape in shapes)
        left, right = save("a.npy", a), save("b.npy", b)

        def stop(reached: Progress) -> None:
            if 0 < reached.flops < reached.total_flops:
                raise KeyboardInterrupt

        with suppress(KeyboardInterrupt):
            multiply_files(left, right, "c.npy", devices="cuda:0", progress=stop)
        plan = multiply_files(left, right, "c.npy", devices="cuda:0")
        assert len(plan.schedule.streams.parts) == 2
        assert loaded(plan).tobytes() == in_memory(a, b).tobytes()


CHILD = """
import os, signal, sys
from tilewise.cli import main
from tilewise.outofcore import flat
from tilewise.outofcore.journal import Journal

left = int(sys.argv[1])

def dying(real):
    def call(*given):
        global left
        left -= 1
        if left == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return real(*given)
    return call

for owner, name in (
    (flat.FlatOutput, "write"), (flat.FlatOutput, "sync"), (flat.FlatFile, "read_into"),
    (Journal, "record"),
):
    setattr(owner, name, dying(getattr(owner, name)))
code = main(sys.argv[2:])
with open("/proc/self/status") as status:
    print(next(line.split()[1] for line in status if line.startswith("VmHWM")))
sys.exit(code)
"""


def child(*command: str, events: int = 0) -> subprocess.CompletedProcess[str]:
    """Run the command line; it is killed at the event of that number, if there is one."""
    program = [sys.executable, "-c", CHILD, str(events), *command, "--quiet"]
    root = str(Path(__file__).parents[2])
    path = os.pathsep.join([root, *sys.path])
    return subprocess.run(
        program,
        env=os.environ | {"PYTHONPATH": path},
        stdout=subprocess.PIPE,
        text=True,
        check=False,
        timeout=60,
    )


def finished(journal: str) -> set[int]:
    lines = Path(journal).read_text().splitlines()[1:]
    return {int(line.split()[1]) for line in lines if line.startswith("done")}


def test_killed_and_finished_it_has_the_same_bytes(rng: Any) -> None:
    a, b = random(rng, (4000, 3000), "float32"), random(rng, (3000, 5000), "float32")
    save("a.npy", a), save("b.npy", b)
    expected = in_memory(a, b)
    command = ["mul", "a.npy", "b.npy", "-o", "c.npy", "--memory", "64MiB", "--devices", "cuda:0"]
    tiles = dict(tw.plan("a.npy", "b.npy", memory="64MiB", devices="cuda:0").schedule.tiles())
    before: set[int] = set()
    for events in (20, 12):
        assert child(*command, events=events).returncode == -signal.SIGKILL
        assert not Path("c.npy").exists()
        part = np.lib.format.open_memmap("c.npy.part", mode="r")
        done = finished("c.npy.journal")
        assert before <= done
        before = done
        for tile in done:
            assert (part[tiles[tile]] == expected[tiles[tile]]).all()
    assert child(*command).returncode == 0
    assert np.load("c.npy").tobytes() == expected.tobytes()
    assert sorted(os.listdir()) == ["a.npy", "b.npy", "c.npy"]


def test_peak_memory_of_the_process_does_not_know_the_files(rng: Any) -> None:
    peaks = []
    for n in (1024, 12_288):
        x = rng.standard_normal((n, n), np.float32)
        save("x.npy", x)
        done = child("mul", "x.npy", "x.npy:T", "-o", "c.npy", "--devices", "cuda:0")
        assert done.returncode == 0
        peaks.append(int(done.stdout.split()[-1]) << 10)
    # Pinned memory comes in full: 192 MiB of it. The files have 1.1 GiB.
    assert peaks[1] - peaks[0] < 300 << 20
    rows = [0, 5000, n - 1]
    c = np.load("c.npy", mmap_mode="r")
    assert within_bound(c[rows], x[rows], x.T)


def test_a_gpu_is_taken_where_that_is_expected_to_be_faster(rng: Any) -> None:
    a, b = random(rng, (6000, 6000), "float32"), random(rng, (6000, 6000), "float32")
    left, right = save("a.npy", a), save("b.npy", b)
    large = SimpleNamespace(shape=(40_000, 40_000), dtype=np.dtype("float32"), where="file")
    plan = plan_files(large, large)  # type: ignore[arg-type]
    assert plan.device == "cuda:0"
    assert "no device was asked for: cuda:0 is expected to take" in plan.why[-1]
    assert "disk  " in str(plan)
    assert tw.plan(left, right, devices="cpu").device == "cpu"
    plan = on_gpu(left, right, verify=True)
    assert plan.verify
    assert loaded(plan).tobytes() == in_memory(a, b).tobytes()


def test_a_corrupted_tile_is_found_and_computed_again(rng: Any) -> None:
    a, b = random(rng, (3000, 2000), "float32"), random(rng, (2000, 3000), "float32")
    left, right = save("a.npy", a), save("b.npy", b)
    seen: list[Progress] = []

    def stop(reached: Progress) -> None:
        if reached.flops > reached.total_flops / 4:
            raise KeyboardInterrupt

    before = threading.active_count()
    with pytest.raises(KeyboardInterrupt):
        multiply_files(left, right, "c.npy", devices="cuda:0", memory="32MiB", progress=stop)
    assert threading.active_count() == before
    with pytest.raises(FileError, match="the device was cuda:0 and is cpu"):
        multiply_files(left, right, "c.npy", devices="cpu")
    tile = min(finished("c.npy.journal"))
    plan = tw.plan(left, right, devices="cuda:0", memory="32MiB")
    box = dict(plan.schedule.tiles())[tile]
    part = np.lib.format.open_memmap("c.npy.part", mode="r+")
    part[tuple(axis.start for axis in box)] += 10
    part.flush()
    plan = multiply_files(left, right, "c.npy", verify=True, progress=seen.append)
    assert plan.device == "cuda:0"
    assert seen[-1].repaired_tiles == 1
    assert loaded(plan).tobytes() == in_memory(a, b).tobytes()


def test_D2_a_product_with_its_own_transpose_goes_to_a_file(rng: Any) -> None:
    x = small_integers(rng, (20_000, 58), "float32")
    seen: list[Progress] = []
    plan = on_gpu(save("x.npy", x), "x.npy:T", memory="512MiB", progress=seen.append)
    assert plan.schedule.written_bytes == 4 * 20_000**2
    c = np.load("c.npy", mmap_mode="r")
    assert (c[[0, 777, 19_999]] == x[[0, 777, 19_999]] @ x.T).all()


def test_D4_D7_float64_within_a_small_budget(rng: Any) -> None:
    n, budget = 6000, 100 << 20
    a, b = random(rng, (n, n), "float64"), random(rng, (n, n), "float64")
    seen: list[Progress] = []
    plan = on_gpu(save("a.npy", a), save("b.npy", b), memory=budget, progress=seen.append)
    assert seen[-1].read_bytes == plan.schedule.read_bytes
    assert seen[-1].written_bytes == 8 * n * n
    least = 2 * n**3 / np.sqrt(budget / 8) * 8
    assert plan.schedule.read_bytes <= 1.5 * least + a.nbytes + b.nbytes
    c = np.load("c.npy", mmap_mode="r")
    assert within_bound(c[:60], a[:60], b, 2.0**-53)
    assert c.tobytes() == in_memory(a, b).tobytes()


def test_D5_bytes_stay_bytes(rng: Any) -> None:
    x = rng.integers(0, 2, (3000, 20_000)).astype(np.uint8)
    seen: list[Progress] = []
    plan = on_gpu(save("x.npy", x), "x.npy:T", dtype="int32", memory="256MiB", progress=seen.append)
    assert seen[-1].read_bytes == plan.schedule.read_bytes == x.nbytes
    rows = x[::200]
    assert (np.load("c.npy")[::200] == rows.astype(float) @ x.T.astype(float)).all()


def test_D6_D13_memory_is_flat_and_given_back(rng: Any) -> None:
    save("b.npy", small_integers(rng, (500, 500), "float32"))
    peaks = []
    for m in (50_000, 100_000, 200_000):
        save("a.npy", rng.integers(-2, 3, (m, 500), np.int8).astype(np.float32))
        pool(0).trim()
        high = PoolHigh()
        multiply_files("a.npy", "b.npy", "c.npy", devices="cuda:0", memory="8MiB")
        peaks.append(high.used_bytes())
    assert max(peaks) <= 1.05 * min(peaks)
    assert max(peaks) <= 8 << 20
    pool(0).trim()
    assert pool(0).held_bytes == 0


def test_D10_memory_maps_of_any_offset_and_byte_order(rng: Any) -> None:
    a, b = random(rng, (900, 700), ">f4"), random(rng, (700, 800), "<f4")
    mapped = []
    for name, x in (("a.bin", a), ("b.bin", b)):
        Path(name).write_bytes(bytes(13) + x.tobytes())
        mapped.append(np.memmap(name, x.dtype, mode="r", offset=13, shape=x.shape))
    plan = on_gpu(*mapped, memory="8MiB")
    assert loaded(plan).tobytes() == in_memory(a.astype("f4"), b).tobytes()


def test_D14_memory_that_another_takes_is_named_and_nothing_is_lost(rng: Any) -> None:
    import cupy

    a, b = random(rng, (4000, 4000), "float32"), random(rng, (4000, 4000), "float32")
    left, right = save("a.npy", a), save("b.npy", b)

    def stop(reached: Progress) -> None:
        if reached.flops > reached.total_flops / 4:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        multiply_files(left, right, "c.npy", devices="cuda:0", memory="1GiB", progress=stop)
    workspace(0).release()
    pool(0).trim()
    held = []
    try:
        step = 8 << 30
        while step >= 32 << 20:
            try:
                held.append(cupy.cuda.Memory(step))
            except cupy.cuda.runtime.CUDARuntimeError:
                step //= 2
        with pytest.raises((BudgetError, FileError), match=r"free|memory was"):
            multiply_files(left, right, "c.npy")
        assert finished("c.npy.journal")
    finally:
        held.clear()
    plan = multiply_files(left, right, "c.npy")
    assert loaded(plan).tobytes() == in_memory(a, b).tobytes()
