"""Small files, written whole or not at all. Matrices are written by :mod:`.outofcore.files`."""

from __future__ import annotations

import os
import secrets
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
    aside = path.with_name(f".{path.name}.{secrets.token_hex(4)}")  # of this call, and no other
    with open(aside, "xb") as file:
        try:
            file.write(data)
            file.close()  # before the new name: Windows renames no open file
            os.replace(aside, path)
        except BaseException:
            file.close()
            aside.unlink(missing_ok=True)
            raise
