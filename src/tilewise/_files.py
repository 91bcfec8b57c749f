"""Small files, written whole or not at all. Matrices are written by :mod:`.outofcore.files`."""

from __future__ import annotations

import os
from pathlib import Path

__all__ = ["write_whole"]


def write_whole(path: Path, data: bytes) -> None:
    """Write a file aside and rename it: a reader sees the old one or the new one, whole.

    A link keeps its target's name; a device or pipe is written as it is. OSError if it cannot be.
    """
    path = path.resolve()
    if path.exists() and not path.is_file():
        path.write_bytes(data)
        return
    aside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with open(aside, "xb") as file:
            file.write(data)
        os.replace(aside, path)
    except BaseException:
        aside.unlink(missing_ok=True)
        raise
