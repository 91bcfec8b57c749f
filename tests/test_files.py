"""Small files are written whole or not at all."""

from __future__ import annotations

import os
import stat
import sys
from pathlib import Path

import pytest

from tilewise._files import write_whole


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_a_file_is_replaced_by_the_whole_of_the_new_one(tmp_path: Path) -> None:
    path = tmp_path / "page.html"
    write_whole(path, b"one")
    write_whole(path, b"the other")
    assert path.read_bytes() == b"the other"
    assert names(tmp_path) == ["page.html"]


def test_what_fails_leaves_what_was_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "page.html"
    write_whole(path, b"one")

    def refuse(*_: object) -> None:
        raise OSError("no")

    monkeypatch.setattr(os, "replace", refuse)
    with pytest.raises(OSError, match="no"):
        write_whole(path, b"the other")
    assert path.read_bytes() == b"one"
    assert names(tmp_path) == ["page.html"]


def test_who_writes_meanwhile_is_not_disturbed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, replace = tmp_path / "page.html", os.replace

    def after_another(*names: Path) -> None:
        monkeypatch.setattr(os, "replace", replace)
        write_whole(path, b"the other")
        replace(*names)

    monkeypatch.setattr(os, "replace", after_another)
    write_whole(path, b"one")
    assert path.read_bytes() == b"one"
    assert names(tmp_path) == ["page.html"]


@pytest.mark.skipif(sys.platform == "win32", reason="links and pipes of POSIX")
def test_links_and_devices_stay_what_they_are(tmp_path: Path) -> None:
    link, target = tmp_path / "link", tmp_path / "target"
    link.symlink_to(target)
    write_whole(link, b"one")
    assert link.is_symlink()
    assert target.read_bytes() == b"one"
    write_whole(Path(os.devnull), b"nothing")
    assert stat.S_ISCHR(os.stat(os.devnull).st_mode)
    mask = os.umask(0o077)
    try:
        write_whole(tmp_path / "private", b"one")
    finally:
        os.umask(mask)
    assert stat.S_IMODE((tmp_path / "private").stat().st_mode) == 0o600
