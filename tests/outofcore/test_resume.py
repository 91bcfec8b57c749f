"""What was finished is kept: runs that stop anywhere, for any reason, and go on."""

from __future__ import annotations

import json
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import zarr

from tests.outofcore.results import load
from tilewise import _cpu
from tilewise.cli import main
from tilewise.errors import FileError
from tilewise.outofcore.journal import Journal
from tilewise.outofcore.pipeline import Progress, multiply_files

SIDE = 700
MEMORY = "1MiB"
OUTPUTS = ["c.npy", "c.zarr", "c.h5"]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder to work in, with two matrices of small whole numbers and no zero in the product."""
    monkeypatch.chdir(tmp_path)
    rng = np.random.default_rng(8)
    for name in ("a.npy", "b.npy"):
        np.save(name, rng.integers(1, 4, (SIDE, SIDE)).astype(np.float32))
    return tmp_path


def expected() -> Any:
    return np.load("a.npy") @ np.load("b.npy")


def stop_at(share: float, out: str, **options: Any) -> None:
    """Multiply until a share of the work is done, then be interrupted."""

    def stop(reached: Progress) -> None:
        if reached.flops >= share * reached.total_flops:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        multiply_files("a.npy", "b.npy", out, memory=MEMORY, progress=stop, **options)


def finished(out: str) -> set[int]:
    lines = Path(f"{out}.journal").read_text().splitlines()[1:]
    done: set[int] = set()
    for line in lines:
        word, tile = line.split()
        (done.add if word == "done" else done.discard)(int(tile))
    return done


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.fixture
def computed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many elements are finished, part by part."""
    sizes: list[int] = []
    finish = _cpu.finish

    def counting(plan: Any, total: Any, out: Any) -> None:
        sizes.append(total.size)
        finish(plan, total, out)

    monkeypatch.setattr(_cpu, "finish", counting)
    return sizes


@pytest.mark.parametrize("out", OUTPUTS)
def test_finished_tiles_are_kept_and_the_rest_is_done(
    folder: Path, out: str, computed: list[int]
) -> None:
    stop_at(0.5, out)
    before = sum(computed)
    assert names(folder) == ["a.npy", "b.npy", f"{out}.journal", f"{out}.part"]
    kept = len(finished(out))
    assert kept > 0
    seen: list[Progress] = []
    plan = multiply_files("a.npy", "b.npy", out, memory=MEMORY, progress=seen.append)
    assert plan.schedule is not None
    tile = plan.schedule.tile_m * plan.schedule.tile_n
    # One tile was being written, and one computed.
    assert sum(computed) - SIDE**2 <= 2 * tile
    assert sum(computed) - before <= SIDE**2 - kept * tile + 2 * tile
    assert seen[0].kept_flops > 0
    assert seen[-1].flops == seen[-1].total_flops
    assert np.array_equal(load(out), expected())
    assert names(folder) == ["a.npy", "b.npy", out]


def test_a_finished_tile_is_not_touched_again(folder: Path) -> None:
    stop_at(0.5, "c.npy")
    part = np.lib.format.open_memmap("c.npy.part", mode="r+")
    part[0, 0] = -7  # in the first tile, and wrong
    part.flush()
    multiply_files("a.npy", "b.npy", "c.npy", memory=MEMORY)
    c = load("c.npy")
    assert c[0, 0] == -7
    c[0, 0] = expected()[0, 0]
    assert np.array_equal(c, expected())


@pytest.mark.parametrize("out", OUTPUTS)
def test_verify_finds_and_repairs_a_finished_tile(
    folder: Path, out: str, computed: list[int]
) -> None:
    stop_at(0.7, out)
    if out.endswith(".npy"):
        part = np.lib.format.open_memmap("c.npy.part", mode="r+")
        part[1, 2] += 9
        part.flush()
    elif out.endswith(".zarr"):
        zarr.open_array("c.zarr.part", mode="r+")[1, 2] = -9
    else:
        with h5py.File("c.h5.part", "r+") as file:
            file["c"][1, 2] = -9
    before = sum(computed)
    plan = multiply_files("a.npy", "b.npy", out, memory=MEMORY, verify=True)
    assert plan.schedule is not None
    assert np.array_equal(load(out), expected())
    tile = plan.schedule.tile_m * plan.schedule.tile_n
    assert before < SIDE**2
    assert sum(computed) <= SIDE**2 + 3 * tile  # the one found, and two that were in flight
    assert names(folder) == ["a.npy", "b.npy", out]


def test_what_verify_repairs_is_said_and_no_longer_counts_as_kept(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    stop_at(0.5, "c.npy")
    kept = len(finished("c.npy"))
    part = np.lib.format.open_memmap("c.npy.part", mode="r+")
    part[0, 0] += 9  # in the first tile
    part.flush()
    command = ["mul", "a.npy", "b.npy", "-o", "c.npy", "--memory", MEMORY, "--verify"]
    assert main([*command, "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["repaired_tiles"] == 1
    tiles = facts["plan"]["schedule"]["tiles"]
    assert facts["kept_share"] == pytest.approx((kept - 1) / tiles, abs=0.05)

    stop_at(0.5, "c.npy")
    part = np.lib.format.open_memmap("c.npy.part", mode="r+")
    part[:] += 9  # in all of it, as far as it is finished
    part.flush()
    assert main(command) == 0
    out = capsys.readouterr().out
    assert f", {kept} of {tiles} tiles computed again (wrong elements found), verified" in out
    assert "in an earlier run" not in out
    assert np.array_equal(load("c.npy"), expected())


@pytest.mark.parametrize("is_zero", [False, True])
@pytest.mark.parametrize("loss", ["gone", "cut"])
def test_a_tile_whose_chunk_is_lost_is_done_again(
    folder: Path, computed: list[int], loss: str, is_zero: bool
) -> None:
    if is_zero:  # chunks of zeros are as much there as others
        np.save("a.npy", np.zeros((SIDE, SIDE), np.float32))
    stop_at(0.7, "c.zarr")
    kept, before = len(finished("c.zarr")), sum(computed)
    chunks = [path for path in sorted(Path("c.zarr.part").glob("c/*/*")) if path.is_file()]
    if loss == "gone":
        chunks[0].unlink()  # of the first tile
    else:
        os.truncate(chunks[0], chunks[0].stat().st_size - 4)
    plan = multiply_files("a.npy", "b.npy", "c.zarr", memory=MEMORY)
    assert plan.schedule is not None
    tile = plan.schedule.tile_m * plan.schedule.tile_n
    assert np.array_equal(load("c.zarr"), expected())
    assert sum(computed) - before <= SIDE**2 - (kept - 1) * tile + tile
    assert sum(computed) - before >= SIDE**2 - kept * tile - tile


def test_a_stop_while_it_is_checked_costs_nothing(
    folder: Path, computed: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    from tilewise.numerics import check

    def stop(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(check, "check", stop)
        with pytest.raises(KeyboardInterrupt):
            multiply_files("a.npy", "b.npy", "c.npy", memory=MEMORY, verify=True)
    computed.clear()
    seen: list[Progress] = []
    multiply_files("a.npy", "b.npy", "c.npy", memory=MEMORY, verify=True, progress=seen.append)
    assert not computed
    assert [x.kept_flops for x in seen] == [2 * SIDE**3]
    assert np.array_equal(load("c.npy"), expected())


def test_verify_repairs_in_stacks_and_in_one_call(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = np.random.default_rng(5)
    finish, execute, wrong = _cpu.finish, _cpu.OnCpu.multiply, [True]

    def once_wrong(plan: Any, total: Any, out: Any, *rest: Any) -> None:
        finish(plan, total, out, *rest)
        if wrong and total.shape[-1] > 1:
            wrong.clear()
            out[..., 0, 0] += 50

    def once_wrong_too(*arguments: Any) -> Any:
        result = execute(*arguments)
        if wrong:
            wrong.clear()
            result[..., 0, 0] += 50
        return result

    monkeypatch.setattr(_cpu, "finish", once_wrong)
    monkeypatch.setattr(_cpu.OnCpu, "multiply", once_wrong_too)
    for a_shape, b_shape, memory in (
        ((6, 150, 160), (160, 140), "300KiB"),  # one tall matrix
        ((6, 150, 160), (6, 160, 140), "300KiB"),
        ((60, 30, 20), (60, 20, 30), "150KiB"),  # many matrices in a tile
        ((90, 80), (80, 70), "10MiB"),
    ):
        a, b = rng.integers(1, 4, a_shape).astype("f4"), rng.integers(1, 4, b_shape).astype("f4")
        np.save("x.npy", a)
        np.save("y.npy", b)
        wrong[:] = [True]
        multiply_files("x.npy", "y.npy", "c.npy", memory=memory, verify=True)
        assert not wrong
        assert np.array_equal(load("c.npy"), np.matmul(a, b))


@pytest.mark.parametrize("name", ["a", "b"])
def test_a_changed_input_is_refused(folder: Path, name: str) -> None:
    stop_at(0.5, "c.npy")
    before = Path("c.npy.part").read_bytes()
    np.save(f"{name}.npy", np.ones((SIDE, SIDE), np.float32))
    message = rf"holds \d+ finished tiles? of another product: {name} was changed since\. Run as"
    with pytest.raises(FileError, match=message):
        multiply_files("a.npy", "b.npy", "c.npy", memory=MEMORY)
    assert Path("c.npy.part").read_bytes() == before
    for leftover in ("c.npy.part", "c.npy.journal"):  # as the message says
        Path(leftover).unlink()
    multiply_files("a.npy", "b.npy", "c.npy", memory=MEMORY)
    assert np.array_equal(load("c.npy"), expected())


@pytest.mark.parametrize("kind", ["npy", "zarr", "h5"])
def test_an_input_changed_under_its_old_time_is_refused(folder: Path, kind: str) -> None:
    b = np.load("b.npy")
    if kind == "zarr":
        zarr.create_array("b.zarr", data=b, chunks=b.shape, compressors=None)
    elif kind == "h5":
        with h5py.File("b.h5", "w") as file:
            file.create_dataset("x", data=b, chunks=b.shape)

    def stop(reached: Progress) -> None:
        if reached.flops > reached.total_flops / 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        multiply_files(
            "a.npy", f"b.{kind}", "c.npy", memory="8MiB" if kind != "npy" else MEMORY, progress=stop
        )
    path = Path("b.zarr/c/0/0" if kind == "zarr" else f"b.{kind}")
    before = path.stat()
    with path.open("r+b") as file:
        file.seek(-8, os.SEEK_END)
        file.write(bytes(8))
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    after = path.stat()
    assert (after.st_size, after.st_mtime_ns) == (before.st_size, before.st_mtime_ns)
    with pytest.raises(FileError, match=r"of another product: b was changed since\. Run as"):
        multiply_files("a.npy", f"b.{kind}", "c.npy")


def test_another_file_or_the_same_turned_is_refused(folder: Path) -> None:
    np.save("d.npy", np.load("b.npy"))
    stop_at(0.5, "c.npy")
    with pytest.raises(FileError, match=r"of another product: b is another file\. Run as"):
        multiply_files("a.npy", "d.npy", "c.npy", memory=MEMORY)
    with pytest.raises(FileError, match=r": b is another array of its file, or turned\. Run as"):
        multiply_files("a.npy", "b.npy:T", "c.npy", memory=MEMORY)
    multiply_files("a.npy", "b.npy", "c.npy", memory=MEMORY)
    assert np.array_equal(load("c.npy"), expected())


def test_another_plan_is_refused_and_no_budget_is_the_one_before(folder: Path) -> None:
    stop_at(0.5, "c.npy")
    message = r"of another product: memory was 1\.00 MiB and is 2\.00 MiB\. Run"
    with pytest.raises(FileError, match=message):
        multiply_files("a.npy", "b.npy", "c.npy", memory="2MiB")
    with pytest.raises(
        FileError, match=r"the result was \(700, 700\) float32 and is .* float64\. "
    ):
        multiply_files("a.npy", "b.npy", "c.npy", memory=MEMORY, dtype="float64")
    first, *rest = Path("c.npy.journal").read_text().splitlines(keepends=True)
    identity = json.loads(first)
    identity["plan"]["tile_n"] += 1  # as another version might have it
    Path("c.npy.journal").write_text("".join([json.dumps(identity) + "\n", *rest]))
    with pytest.raises(FileError, match=r"of another product: the plan differs\. Run as"):
        multiply_files("a.npy", "b.npy", "c.npy")
    Path("c.npy.journal").write_text("".join([first, *rest]))
    plan = multiply_files("a.npy", "b.npy", "c.npy")
    assert plan.schedule is not None
    assert plan.schedule.budget_bytes == 1 << 20
    assert np.array_equal(load("c.npy"), expected())


def test_a_zarr_operand_that_changed_is_noticed(folder: Path) -> None:
    zarr.create_array("a.zarr", data=np.load("a.npy"), chunks=(300, 300))
    zarr.create_array("b.zarr", data=np.load("b.npy"), chunks=(300, 300))

    def stop(reached: Progress) -> None:
        if reached.flops > reached.total_flops / 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        multiply_files("a.zarr", "b.zarr", "c.zarr", memory="4MiB", progress=stop)
    zarr.open_array("b.zarr", mode="r+")[0, 0] = 5
    with pytest.raises(FileError, match="b was changed since"):
        multiply_files("a.zarr", "b.zarr", "c.zarr", memory="4MiB")


def test_operands_that_nothing_tells_apart_are_begun_anew(
    folder: Path, computed: list[int]
) -> None:
    a, b = np.load("a.npy"), np.load("b.npy")

    def stop(reached: Progress) -> None:
        if reached.flops > reached.total_flops / 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        multiply_files(a, "b.npy", "c.npy", memory=MEMORY, progress=stop)
    assert names(folder) == ["a.npy", "b.npy"]
    computed.clear()
    multiply_files(a, "b.npy", "c.npy", memory=MEMORY)
    assert sum(computed) == SIDE**2
    assert np.array_equal(load("c.npy"), a @ b)


def test_a_stop_before_anything_is_begun_leaves_nothing(folder: Path, monkeypatch: Any) -> None:
    def interrupted(_: int) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", interrupted)  # first of the journal's line
        with pytest.raises(KeyboardInterrupt):
            multiply_files("a.npy", "b.npy", "c.npy", memory=MEMORY)
    assert names(folder) == ["a.npy", "b.npy"]


@pytest.mark.parametrize("out", OUTPUTS)
@pytest.mark.parametrize("loss", ["part", "short", "torn", "begun"])
def test_what_a_crash_leaves_behind_is_no_obstacle(folder: Path, out: str, loss: str) -> None:
    stop_at(0.5, out)
    part, journal = Path(f"{out}.part"), Path(f"{out}.journal")
    if loss == "part":
        part.rename("elsewhere")
    elif loss == "begun":  # while it was created, and before any tile
        os.truncate(part / "zarr.json" if part.is_dir() else part, 96)
        journal.write_text(journal.read_text().partition("\n")[0] + "\n")
    elif loss == "short":
        meta = part / "zarr.json" if part.is_dir() else part
        os.truncate(meta, 1000 if part.is_file() else 0)
    else:
        with journal.open("ab") as file:
            file.write(b"done 1")  # without its end: of tile 1, or of tile 17
    multiply_files("a.npy", "b.npy", out, memory=MEMORY)
    assert np.array_equal(load(out), expected())
    assert not part.exists()
    assert not journal.exists()


def test_a_journal_that_is_left_over_keeps_no_other_product_away(folder: Path) -> None:
    stop_at(0.5, "c.npy")
    os.replace("c.npy.part", "c.npy")  # as a run does that is killed before it removes the journal
    plan = multiply_files("b.npy", "a.npy", "c.npy")
    assert plan.schedule is not None
    assert plan.schedule.budget_bytes > 1 << 20, "the budget of a run that has ended is not its own"
    assert np.array_equal(load("c.npy"), np.load("b.npy") @ np.load("a.npy"))
    assert names(folder) == ["a.npy", "b.npy", "c.npy"]


@pytest.mark.parametrize("out", OUTPUTS)
def test_a_part_of_something_else_is_not_removed(folder: Path, out: str) -> None:
    stop_at(0.5, out)
    Path(f"{out}.journal").rename("elsewhere")
    with pytest.raises(FileError, match=r"which is there already and not known as a part of it"):
        multiply_files("a.npy", "b.npy", out, memory=MEMORY)
    assert Path(f"{out}.part").exists()
    Path("elsewhere").rename(f"{out}.journal")
    multiply_files("a.npy", "b.npy", out, memory=MEMORY)
    assert np.array_equal(load(out), expected())


def test_a_run_that_another_makes_way_for_begins(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stop_at(0.5, "c.npy")
    real, names_seen = Path.exists, []

    def exists(self: Path) -> bool:
        found = real(self)
        if self.suffix in (".part", ".journal"):
            names_seen.append(self.name)
            if len(names_seen) == 1:  # the other run completes its result just now
                os.replace("c.npy.part", "c.npy")
                os.unlink("c.npy.journal")
        return found

    monkeypatch.setattr(Path, "exists", exists)
    multiply_files("a.npy", "b.npy", "c.npy", memory=MEMORY)
    assert names_seen
    assert np.array_equal(load("c.npy"), expected())


@pytest.mark.parametrize("text", ["dear diary\n", "5\ndone 0\n", "[" * 100_000 + "\n"])
def test_a_journal_of_something_else_is_refused(folder: Path, text: str) -> None:
    Path("c.npy.journal").write_text(text)
    with pytest.raises(FileError, match="is not a journal of tiles; remove it and"):
        multiply_files("a.npy", "b.npy", "c.npy", memory=MEMORY)
    assert Path("c.npy.journal").read_text() == text


def test_one_process_at_a_time_writes_an_output(folder: Path) -> None:
    with (
        Journal(Path("c.npy.journal"), "out (c.npy)", "c.npy.part"),
        pytest.raises(FileError, match=r"out \(c\.npy\) is being written by another process"),
    ):
        multiply_files("a.npy", "b.npy", "c.npy", memory=MEMORY)
    multiply_files("a.npy", "b.npy", "c.npy", memory=MEMORY)


@pytest.mark.parametrize("out", ["c.npy", "c.h5"])
def test_a_run_whose_files_were_removed_leaves_those_of_the_next_alone(
    folder: Path, out: str
) -> None:
    def begin_anew(_: Progress) -> None:
        if finished(out):
            os.remove(f"{out}.part")
            os.remove(f"{out}.journal")
            with pytest.raises(KeyboardInterrupt):
                multiply_files("b.npy", "a.npy", out, memory=MEMORY, progress=stop)

    def stop(_: Progress) -> None:
        if finished(out):
            raise KeyboardInterrupt

    with pytest.raises(FileError, match=r"journal was removed or replaced while out .* was being"):
        multiply_files("a.npy", "b.npy", out, memory=MEMORY, progress=begin_anew)
    assert not Path(out).exists()
    assert finished(out)
    multiply_files("b.npy", "a.npy", out, memory=MEMORY)
    assert np.array_equal(load(out), np.load("b.npy") @ np.load("a.npy"))


@pytest.mark.parametrize("is_replaced", [True, False])
def test_a_part_that_is_not_its_own_gets_no_name(folder: Path, is_replaced: bool) -> None:
    def disturb(reached: Progress) -> None:
        if reached.flops == reached.total_flops:
            os.remove("c.npy.part")
            if is_replaced:
                shutil.copy("a.npy", "c.npy.part")

    with pytest.raises(FileError, match=r"out .* cannot be completed: .*c\.npy\.part"):
        multiply_files("a.npy", "b.npy", "c.npy", memory=MEMORY, progress=disturb)
    assert not Path("c.npy").exists()


def durable() -> None:
    """Whatever is recorded here is durable already."""


def test_a_journal_keeps_whole_lines_and_their_order(tmp_path: Path) -> None:
    path = tmp_path / "x.journal"
    with Journal(path, "x", "x.part") as journal:
        journal.begin({"a": 1})
        for tile in (3, 1, 2):
            journal.record(tile, durable)
        journal.forget({1, 9})
    text = path.read_text()
    assert [json.loads(text.splitlines()[0]), *text.splitlines()[1:]] == [
        {"a": 1},
        "done 3",
        "done 1",
        "done 2",
        "redo 1",
    ]
    for cut in range(len(text)):  # whatever of it a crash left
        path.write_text(text[:cut])
        with Journal(path, "x", "x.part") as journal:
            whole = text[: text[:cut].rfind("\n") + 1].splitlines()[1:]
            assert journal.done == {int(line.split()[1]) for line in whole}
            journal.begin({"a": 1})
            journal.record(7, durable)
        assert path.read_text().endswith("\ndone 7\n")


def test_a_journal_forgets_all_at_once(tmp_path: Path, monkeypatch: Any) -> None:
    syncs: list[int] = []
    path = tmp_path / "x.journal"
    with Journal(path, "x", "x.part") as journal:
        journal.begin({"a": 1})
        for tile in range(100):
            journal.record(tile, durable)
        monkeypatch.setattr(os, "fsync", syncs.append)
        journal.forget(set(range(50, 200)))
    assert len(syncs) == 1
    with Journal(path, "x", "x.part") as journal:
        assert journal.done == set(range(50))


def test_nothing_is_recorded_after_something_could_not_be_synced(tmp_path: Path) -> None:
    def fails() -> None:
        raise FileError("out cannot be written: Input/output error")

    path = tmp_path / "x.journal"
    with Journal(path, "x", "x.part") as journal:
        journal.begin({"a": 1})
        journal.record(1, durable)
        with pytest.raises(FileError, match="out cannot be written"):
            journal.record(2, fails)
        with pytest.raises(FileError, match="x was not made durable: out cannot be written"):
            journal.record(3, durable)  # of which the system will say nothing more
    with Journal(path, "x", "x.part") as journal:
        assert journal.done == {1}


def test_a_line_that_found_no_room_is_not_half_there(tmp_path: Path) -> None:
    path = tmp_path / "x.journal"
    most, limits = resource.RLIMIT_FSIZE, resource.getrlimit(resource.RLIMIT_FSIZE)
    with Journal(path, "x", "x.part") as journal:
        journal.begin({"a": 1})
        journal.record(1, durable)
        resource.setrlimit(most, (path.stat().st_size + 4, limits[1]))  # of the seven of "done 2"
        try:
            with pytest.raises(FileError, match=r"x\.journal cannot be written: File too large"):
                journal.record(2, durable)
        finally:
            resource.setrlimit(most, limits)
        journal.record(3, durable)  # as another thread does that had finished meanwhile
    with Journal(path, "x", "x.part") as journal:
        assert journal.done == {1, 3}


class Killed:
    """Runs of the command line that are killed at some moment."""

    def __init__(self, folder: Path, out: str) -> None:
        self.folder, self.out = folder, out
        self.command = [sys.executable, "-m", "tilewise", "mul", "a.npy", "b.npy", "-o", out]
        self.command += ["--memory", MEMORY, "--quiet"]
        self.environment = os.environ | {"OPENBLAS_NUM_THREADS": "1"}

    def run(self, seconds: float | None = None) -> bool:
        """Start it, kill it after some time, and return whether it had ended before."""
        process = subprocess.Popen(self.command, env=self.environment)
        try:
            return process.wait(seconds) == 0
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGKILL)
            process.wait()
            return False

    def is_begun(self, plan: Any) -> set[int]:
        """Return the tiles of which something stands in the unfinished output."""
        part = Path(f"{self.out}.part")
        if not part.exists():
            return set()
        try:
            x = load(part)
        except (OSError, EOFError, ValueError, KeyError):
            assert not finished(self.out), "killed while it was created, before any tile"
            return set()
        return {step.tile for step in plan.schedule.steps() if x[step.c].any()}


#: The command line, killed when it has done a step of writing an output for the nth time.
KILLED = """
import os, signal, sys
from tilewise.cli import main
from tilewise.outofcore import flat, journal, zarrs

def dies_after(owner, method, count):
    real = getattr(owner, method)
    def dies(*given):
        nonlocal count
        result = real(*given)
        count -= 1
        if not count:
            os.kill(os.getpid(), signal.SIGKILL)
        return result
    setattr(owner, method, dies)

if "KILLED" in os.environ:
    method, nth = os.environ["KILLED"].split()
    for owner in (journal.Journal, flat.FlatOutput, zarrs.ZarrOutput):
        if hasattr(owner, method):
            dies_after(owner, method, int(nth))
sys.exit(main())
"""

#: Where runs die, each going on from the one before, and how many tiles of 11 are done by then.
STEPS = [
    ("begin 1", 0),  # the journal says of what product it is, and there is no part
    ("sync 2", 1),  # what is durable, and not recorded, is done again
    ("record 3", 4),
    ("commit 1", 11),  # the result has its name, and its journal is left over
]


@pytest.mark.parametrize("out", OUTPUTS)
def test_killed_at_every_step_and_finished_it_has_the_same_bits(folder: Path, out: str) -> None:
    plan = multiply_files("a.npy", "b.npy", out, memory=MEMORY)
    c, tiles = load(out).tobytes(), dict(plan.schedule.tiles())
    command = [sys.executable, "-c", KILLED, "mul", "a.npy", "b.npy", "-o", out, "--quiet"]
    for step, done in STEPS:
        run = subprocess.run([*command, "--memory", MEMORY], env={**os.environ, "KILLED": step})
        assert run.returncode == -signal.SIGKILL, step
        assert len(finished(out)) == done, step
        assert load(out).tobytes() == c, step  # of the run before: whole, until it is replaced
        if Path(f"{out}.part").exists():
            part, recorded = load(f"{out}.part"), finished(out)
            assert all(
                np.array_equal(part[tiles[tile]], expected()[tiles[tile]]) for tile in recorded
            )
            begun = {tile for tile, box in tiles.items() if part[box].any()}
            assert len(begun - recorded) <= 1, step  # the one that was being written
    assert not subprocess.run([*command, "--memory", MEMORY]).returncode
    assert load(out).tobytes() == c
    assert names(folder) == ["a.npy", "b.npy", out]


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("out", OUTPUTS)
def test_killed_at_twenty_random_moments(folder: Path, out: str) -> None:
    rng = random.Random(20)
    killed = Killed(folder, out)
    plan = multiply_files("a.npy", "b.npy", out, memory=MEMORY)
    c = load(out).tobytes()
    start = time.perf_counter()
    assert killed.run()
    whole = time.perf_counter() - start
    were_stopped = 0
    for _ in range(20):
        moment = rng.uniform(0.2, 1)
        Path(out).unlink() if Path(out).is_file() else os.rename(out, f"old{moment}")
        if not killed.run(moment * whole):
            were_stopped += 1
            journal = Path(f"{out}.journal")
            if journal.exists() and journal.stat().st_size:
                # Of the one tile that is written, something may be there before it is recorded.
                assert len(killed.is_begun(plan) - finished(out)) <= 1
            assert killed.run()
        assert load(out).tobytes() == c
        assert not list(folder.glob(f"{out}.*"))
    assert were_stopped


def test_a_rerun_on_the_command_line_says_what_is_kept(folder: Path, capsys: Any) -> None:
    stop_at(0.5, "c.npy")
    np.save("a.npy", np.ones((SIDE, SIDE), np.float32))
    assert main(["mul", "a.npy", "b.npy", "-o", "c.npy", "--memory", MEMORY]) == 2
    err = capsys.readouterr().err
    assert err.startswith("tilewise: ")
    assert "a was changed since" in err
    assert err.count("\n") == 1
