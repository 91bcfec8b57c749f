"""A disk that fails once, at any moment: that is said, and what was not written is done again."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tilewise.errors import FileError
from tilewise.outofcore.pipeline import multiply_files

from ..support import small_integers
from .results import load

MEMORY = "120KiB"

#: Calls of the system by which an output is made, but for those on a file that Python has open.
CALLS = ("chmod", "fsync", "mkdir", "posix_fallocate", "pwrite", "replace", "unlink")


class Disk:
    """Calls of the system that fail, one of them, after so many of all."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls, self.fails_at = 0, -1
        for name in CALLS:
            monkeypatch.setattr(os, name, self._failing(getattr(os, name)))

    def _failing(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*given: Any, **options: Any) -> Any:
            self.calls += 1
            if self.calls - 1 == self.fails_at:
                raise OSError(errno.EIO, os.strerror(errno.EIO))
            return call(*given, **options)

        return counted


def error_of(work: Callable[[], object]) -> str:
    try:
        work()
    except FileError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("out", ["c.npy", "c.h5", "c.zarr"])
def test_what_could_not_be_written_is_not_taken_for_done(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, out: str
) -> None:
    rng = np.random.default_rng(8)
    a, b = small_integers(rng, (64, 150), "float32"), small_integers(rng, (150, 150), "float32")
    paths = tmp_path / "a.npy", tmp_path / "b.npy"
    for path, x in zip(paths, (a, b), strict=True):
        np.save(path, x)
    (tmp_path / "disk").mkdir()
    c = tmp_path / "disk" / out
    disk = Disk(monkeypatch)
    plan = multiply_files(*paths, c, memory=MEMORY)
    assert plan.schedule is not None
    assert plan.schedule.tile_count == 3
    errors, calls = 0, disk.calls
    for number in range(0, calls, 1 + calls // 40):
        multiply_files(paths[0], 3 * b, c)
        disk.calls, disk.fails_at = 0, number
        if said := error_of(partial(multiply_files, *paths, c, memory=MEMORY)):
            assert "Input/output error" in said
            is_complete = "is complete, but" in said
            assert np.array_equal(load(c), a @ b if is_complete else a @ (3 * b))
            errors += 1
        disk.fails_at = -1
        multiply_files(*paths, c, memory=MEMORY)
        assert np.array_equal(load(c), a @ b), number
        assert os.listdir(c.parent) == [out]
    assert errors > 10
