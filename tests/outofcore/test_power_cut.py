"""What a power cut leaves: of each file what was synced last, of each folder the names it had then.

No disk has to keep more, so a run is cut after each thing it makes durable, and goes on from there.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tilewise.outofcore.pipeline import Progress, multiply_files

from ..support import small_integers
from .results import load

MEMORY = "240KiB"

#: A folder: what its names lead to, a file's bytes or a folder.
Tree = dict[str, Any]


class Disk:
    """What is durable of a folder, after each sync that changed it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.cuts: list[Tree] = []
        self._files: dict[int, bytes] = {}
        self._folders: dict[int, dict[str, int]] = {}
        for path in (folder, *folder.rglob("*")):  # what was there long before
            self._keep(path)

    def fsync(self, descriptor: int) -> None:
        """Take the place of `os.fsync`."""
        path = Path(os.readlink(f"/proc/self/fd/{descriptor}"))
        if not path.is_relative_to(self.folder):
            return
        self._keep(path)
        tree = self._tree(self.folder.stat().st_ino)
        if not self.cuts or self.cuts[-1] != tree:
            self.cuts.append(tree)

    def _keep(self, path: Path) -> None:
        status = path.stat()
        if stat.S_ISDIR(status.st_mode):
            inside = list(os.scandir(path))
            self._folders[status.st_ino] = {x.name: x.inode() for x in inside}
            for x in inside:
                if x.is_dir():
                    self._folders.setdefault(
                        x.inode(), {}
                    )  # its name is kept; what is in it is not
        else:
            self._files[status.st_ino] = path.read_bytes()

    def _tree(self, folder: int) -> Tree:
        return {
            name: self._tree(inode) if inode in self._folders else self._files.get(inode, b"")
            for name, inode in self._folders[folder].items()
        }


def lay_out(tree: Tree, folder: Path) -> None:
    folder.mkdir()
    for name, what in tree.items():
        if isinstance(what, dict):
            lay_out(what, folder / name)
        else:
            (folder / name).write_bytes(what)


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="asks Linux what is synced")
@pytest.mark.parametrize("out", ["c.npy", "c.h5", "c.zarr"])
def test_after_a_power_cut_at_any_moment_it_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, out: str
) -> None:
    rng = np.random.default_rng(8)
    a = small_integers(rng, (2, 150, 150), "float32")
    b = small_integers(rng, (2, 150, 150), "float32")
    names = (tmp_path / "a.npy", tmp_path / "b.npy")
    for path, x in zip(names, (a, b), strict=True):
        np.save(path, x)
    (tmp_path / "before").mkdir()
    multiply_files(names[0], 3 * b, tmp_path / "before" / out)
    disk = Disk(tmp_path / "before")
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", disk.fsync)
        plan = multiply_files(*names, tmp_path / "before" / out, memory=MEMORY)
    assert plan.schedule is not None
    count = plan.schedule.tile_count
    assert count > 3
    kept = set()
    for number, tree in enumerate(disk.cuts):
        folder = tmp_path / f"after{number}"
        lay_out(tree, folder)
        recorded = tree[f"{out}.journal"].count(b"done") if f"{out}.journal" in tree else 0
        is_complete = f"{out}.part" not in tree and recorded == count
        assert np.array_equal(load(folder / out), a @ b if is_complete else a @ (3 * b))
        seen: list[Progress] = []
        multiply_files(*names, folder / out, memory=MEMORY, progress=seen.append)
        if not is_complete:
            assert bool(seen[0].kept_flops) == (recorded > 0)
            kept.add(recorded)
        assert np.array_equal(load(folder / out), a @ b)
        assert os.listdir(folder) == [out]
    assert kept == set(range(count + 1))
