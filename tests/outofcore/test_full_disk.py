"""A disk that is or becomes full: said at once where it can be, and nothing finished is lost."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zarr

from tilewise import _cpu
from tilewise.errors import FileError
from tilewise.outofcore.pipeline import Progress, multiply_files

SIZE = 6 << 20


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 6 MiB, which only root can make."""
    folder = tmp_path / "disk"
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={SIZE}", "tilewise", str(folder)]
    if shutil.which("mount") is None:
        pytest.skip("no mount on this system")
    made = subprocess.run(command, capture_output=True, text=True, check=False)
    if made.returncode:
        pytest.skip(f"no small file system can be made here: {made.stderr.strip()}")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


@pytest.fixture
def operands(tmp_path: Path) -> tuple[Path, Path]:
    """Two matrices elsewhere, whose product takes 4 MiB."""
    rng = np.random.default_rng(6)
    paths = tmp_path / "a.npy", tmp_path / "b.npy"
    for path in paths:
        np.save(path, rng.integers(1, 4, (1024, 1024)).astype(np.float32))
    return paths


def product(operands: tuple[Path, Path]) -> Any:
    return np.load(operands[0]) @ np.load(operands[1])


@pytest.mark.parametrize("name", ["c.npy", "c.h5", "c.zarr"])
def test_what_has_no_room_is_not_begun(
    disk: Path, operands: tuple[Path, Path], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    (disk / "other").write_bytes(bytes(3 << 20))
    monkeypatch.setattr(_cpu, "add_product", None)
    message = r"out \(.*\) needs 4\.\d\d MiB and .* has \d\.\d\d [MK]iB free: No space left"
    with pytest.raises(FileError, match=message):
        multiply_files(*operands, disk / name, memory="2MiB")
    assert [path.name for path in disk.iterdir()] == ["other"]


@pytest.mark.parametrize("name", ["c.npy", "c.h5"])
def test_room_once_given_is_not_lost(disk: Path, operands: tuple[Path, Path], name: str) -> None:
    def fill(reached: Progress) -> None:
        if not (disk / "other").exists():
            with (disk / "other").open("wb") as other, pytest.raises(OSError, match="No space"):
                other.write(bytes(SIZE))

    multiply_files(*operands, disk / name, memory="2MiB", progress=fill)
    (disk / "other").unlink()
    if name == "c.npy":
        assert np.array_equal(np.load(disk / name), product(operands))


def test_a_disk_that_fills_up_costs_only_what_was_unfinished(
    disk: Path, operands: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fill(reached: Progress) -> None:
        if reached.flops > reached.total_flops / 3 and not (disk / "other").exists():
            free = shutil.disk_usage(disk).free
            (disk / "other").write_bytes(bytes(free - (300 << 10)))

    message = r"out \(.*c\.zarr\) needs 4\.00 MiB and .* has .* free: No space left on device"
    with pytest.raises(FileError, match=message) as raised:
        multiply_files(*operands, disk / "c.zarr", memory="2MiB", progress=fill)
    said = " ".join(raised.value.__notes__)
    assert "on tile " in said
    assert "stay in" in said
    kept = (disk / "c.zarr.journal").read_text().count("done")
    assert kept > 0

    (disk / "other").unlink()
    sizes: list[int] = []
    finish = _cpu.finish

    def counting(plan: Any, total: Any, out: Any) -> None:
        sizes.append(total.size)
        finish(plan, total, out)

    monkeypatch.setattr(_cpu, "finish", counting)
    plan = multiply_files(*operands, disk / "c.zarr", memory="2MiB")
    assert plan.schedule is not None
    tile = plan.schedule.tile_m * plan.schedule.tile_n
    assert sum(sizes) <= 1024**2 - (kept - 1) * tile
    assert np.array_equal(zarr.open_array(disk / "c.zarr", mode="r")[:], product(operands))
    assert [path.name for path in disk.iterdir()] == ["c.zarr"]


def test_room_for_the_copies_of_a_check_is_counted_before_any_work(
    disk: Path, operands: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(_cpu, "add_product", None)
        message = (
            r"out \(.*c\.zarr\) needs 4\.00 MiB, and to verify it 4\.00 MiB for copies of what "
            r"is no flat file \(out \(.*c\.zarr\)\); .* has 6\.00 MiB free\. Make room"
        )
        with pytest.raises(FileError, match=message):
            multiply_files(*operands, disk / "c.zarr", memory="2MiB", verify=True)
        assert not list(disk.iterdir())
        a = np.load(operands[0])  # not a file, so copied
        with pytest.raises(FileError, match=r"4\.00 MiB, .* 4\.00 MiB .* \(a \(ndarray\)\); "):
            multiply_files(a, operands[1], disk / "c.npy", memory="2MiB", verify=True)
        assert not list(disk.iterdir())
    multiply_files(*operands, disk / "c.npy", memory="2MiB", verify=True)  # read as it is
    assert np.array_equal(np.load(disk / "c.npy"), product(operands))


def test_what_is_begun_counts_as_room_for_a_check(
    disk: Path, operands: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    def stop(reached: Progress) -> None:
        if reached.flops > reached.total_flops / 3:
            raise KeyboardInterrupt

    a = np.load(operands[0])[:512]  # a result of 2 MiB, and a copy of it
    np.save(operands[0], a)
    with pytest.raises(KeyboardInterrupt):
        multiply_files(*operands, disk / "c.zarr", memory="2MiB", progress=stop)
    begun = sum(path.stat().st_size for path in (disk / "c.zarr.part").rglob("?") if path.is_file())
    (disk / "other").write_bytes(bytes(SIZE - (4 << 20) - (200 << 10)))
    assert begun > 200 << 10
    multiply_files(*operands, disk / "c.zarr", memory="2MiB", verify=True)
    assert np.array_equal(zarr.open_array(disk / "c.zarr", mode="r")[:], product(operands))
