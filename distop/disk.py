"""Files that are whole or not there, whatever happens to the machine."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path


def write_whole(path: Path, data: bytes, mode: int = 0o666) -> None:
    """Write or replace a file; it is on the disk when this returns, and never there in part. Raises OSError.

    ``mode``: of a file that is new, before the umask.
    """
    scratch = path.with_suffix(".new")
    with open(os.open(scratch, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, mode), "wb") as file:  # noqa: PTH123
        file.write(data)
        file.flush()
        os.fdatasync(file.fileno())
    scratch.replace(path)
    directory = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)
