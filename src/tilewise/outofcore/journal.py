"""Which tiles of an unfinished output are done: a file beside it that outlives a crash.

Its first line says of what product, by which plan; each line after it names a tile that was made
durable before the line was written, or one that must be done again after all. A line that a crash
tore does not count. One process at a time can have a journal.
"""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Callable
from contextlib import suppress
from io import FileIO
from pathlib import Path
from typing import Any, Self

from .._memory import format_bytes
from ..errors import FileError

__all__ = ["Journal", "recorded"]

#: What a product's facts are called where they differ from those of finished tiles.
_NAMES = {
    "result": "the result",
    "budget_bytes": "memory",
    "device": "the device",
    "runs_on": "what runs it",
    "precision": "precision",
    "tilewise": "tilewise",
}


class Journal:
    """The finished tiles of one output. Without a path it remembers, and does not record."""

    def __init__(self, path: Path | None, name: str, unfinished: str) -> None:
        """Open the journal at ``path``, or begin one; ``name`` and ``unfinished`` are for messages.

        Raises
        ------
        FileError
            If another process has it, or it cannot be written.
        """
        self.path = path
        self.done: set[int] = set()
        self._name, self._unfinished = name, unfinished
        self._file: FileIO | None = None
        self._identity: dict[str, Any] | None = None
        self._unsynced: Exception | None = None
        self.is_new = True  #: whether there was none
        if path is None:
            return
        try:
            self._file, self.is_new = _locked(path)
        except BlockingIOError:
            raise FileError(f"{name} is being written by another process") from None
        except OSError as error:
            raise FileError(f"{name} cannot be created: {error.strerror}") from error
        try:
            self._cut(self._read())
        except BaseException:
            self._file.close()
            raise

    def begin(self, identity: dict[str, Any]) -> None:
        """Say of what product the tiles are, or check that those there are of this one.

        Raises
        ------
        FileError
            If there are finished tiles, of other operands or by another plan.
        """
        if self.done and self._identity != identity:
            raise FileError(
                f"{self._unfinished} holds {self.count} of another product: "
                f"{_difference(self._identity or {}, identity)}. Run as before to go on with it, "
                f"or remove it and {self.path} to begin anew"
            )
        if self._identity != identity:
            self._identity = identity
            self._cut(0)
            self._append(json.dumps(identity))

    @property
    def count(self) -> str:
        """How many tiles are done, in words."""
        return "1 finished tile" if len(self.done) == 1 else f"{len(self.done)} finished tiles"

    @property
    def is_lost(self) -> bool:
        """Whether it was removed or replaced: another run may have begun in its place."""
        return self._file is not None and not _is_at(self._file, self.path)

    def check(self) -> None:
        """Raise FileError if it is lost."""
        if self.is_lost:
            raise FileError(
                f"{self.path} was removed or replaced while {self._name} was being written; run "
                "again when nothing else writes there"
            )

    def record(self, tile: int, sync: Callable[[], object]) -> None:
        """Make a tile durable by ``sync``, and remember that it is.

        Raises
        ------
        FileError
            If nobody would know of it; or if an earlier ``sync`` failed, since the system says so
            once and forgets what it could not write: of whatever tile that was.
        """
        if self._unsynced is not None:
            raise FileError(f"{self._name} was not made durable: {self._unsynced}")
        try:
            sync()
        except Exception as error:
            self._unsynced = error
            raise
        self.check()
        self._append(f"done {tile}")
        self.done.add(tile)

    def forget(self, tiles: set[int]) -> None:
        """Remember that tiles must be done again."""
        if known := sorted(tiles & self.done):
            self._append("\n".join(f"redo {tile}" for tile in known))
        self.done -= tiles

    def remove(self) -> None:
        """Remove the journal: the output is complete, or nothing of it is worth keeping.

        Raises
        ------
        FileError
            If it stays.
        """
        if self.path is None or self.is_lost:
            return
        try:
            self.path.unlink()
        except OSError as error:
            raise FileError(
                f"{self.path} cannot be removed: {error.strerror}; remove it yourself"
            ) from error

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._file is not None:
            self._file.close()

    def _append(self, line: str) -> None:
        if self._file is None:
            return
        start, rest = self._file.tell(), f"{line}\n".encode()
        try:
            while rest:  # the last room on a disk takes less, and only the next write says so
                rest = rest[self._file.write(rest) :]
            os.fsync(self._file.fileno())
        except OSError as error:
            with suppress(FileError):  # what follows a part of a line would be lost with it
                self._cut(start)
            raise FileError(f"{self.path} cannot be written: {error.strerror}") from error

    def _cut(self, size: int) -> None:
        """Forget what is behind so many bytes, and go on there."""
        if self._file is None:
            return
        try:
            self._file.truncate(size)
            self._file.seek(size)
        except OSError as error:
            raise FileError(f"{self.path} cannot be written: {error.strerror}") from error

    def _read(self) -> int:
        """Take in what is there, and return how many bytes of it are whole lines."""
        assert self._file is not None
        try:
            text = self._file.readall() or b""
        except OSError as error:
            raise FileError(f"{self.path} cannot be read: {error.strerror}") from error
        whole = text.rfind(b"\n") + 1
        lines = text[:whole].decode(errors="replace").splitlines()
        try:
            self._identity = json.loads(lines[0]) if lines else None
            if lines and not isinstance(self._identity, dict):
                raise ValueError(lines[0])
            for line in lines[1:]:
                word, number = line.split()
                {"done": self.done.add, "redo": self.done.discard}[word](int(number))
        except (ValueError, KeyError, RecursionError):
            raise FileError(
                f"{self.path} is not a journal of tiles; remove it and {self._unfinished} "
                "to begin anew"
            ) from None
        return whole


def recorded(path: Path | None) -> dict[str, Any]:
    """Return what a journal says its product is; nothing if there is none that can be read."""
    if path is None:
        return {}
    try:
        with path.open(encoding="utf-8") as file:
            said = json.loads(file.readline())
    except (OSError, ValueError, RecursionError):
        return {}
    return said if isinstance(said, dict) else {}


def _locked(path: Path) -> tuple[FileIO, bool]:
    """Open a file that no other process has open this way, and say whether there was none before.

    The lock ends with the process.
    """
    while True:
        is_new = not path.exists()
        file = FileIO(os.open(path, os.O_RDWR | os.O_CREAT, 0o666), "r+")
        try:
            _lock(file)
            if _is_at(file, path):  # whoever had it may have removed it before the lock was free
                return file, is_new
        except BaseException:
            file.close()
            raise
        file.close()


def _is_at(file: FileIO, path: Path | None) -> bool:
    try:
        return path is not None and os.path.samestat(os.fstat(file.fileno()), path.stat())
    except OSError:
        return False


def _lock(file: FileIO) -> None:
    try:
        import fcntl
    except ImportError:  # Windows
        import msvcrt

        try:
            file.seek(1 << 40)  # far behind what is read and written
            msvcrt.locking(file.fileno(), msvcrt.LK_NBLCK, 1)  # type: ignore[attr-defined]
        except OSError:
            raise BlockingIOError from None
        file.seek(0)
    else:
        try:
            fcntl.flock(file.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            # Some file systems of clusters have no locks: there, nobody watches.
            if error.errno not in (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP):
                raise


def _difference(before: dict[str, Any], now: dict[str, Any]) -> str:
    """Say what is not as it was, in a user's words."""
    said = []
    for name in ("a", "b"):
        was, is_now = before.get(name), now[name]
        if was == is_now:
            continue
        was_stamp, stamp = (x.get("stamp") or [None] for x in (was or {}, is_now or {}))
        if was_stamp[0] != stamp[0]:
            said.append(f"{name} is another file")
        elif was_stamp != stamp:
            said.append(f"{name} was changed since")
        else:
            said.append(f"{name} is another array of its file, or turned")
    for key, name in _NAMES.items():
        was, is_now = before.get(key), now[key]
        if was != is_now and key == "budget_bytes":
            was, is_now = (size and format_bytes(size) for size in (was, is_now))
        if was != is_now:
            said.append(f"{name} was {was or 'not given'} and is {is_now or 'not given'}")
    return "; ".join(said) or "the plan differs"
