"""Files of fixed names: whole or not there, whatever happens to the machine, and never behind a link."""

from __future__ import annotations

import errno
import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path


def open_fixed(path: Path, flags: int, mode: int = 0o666) -> int:
    """A descriptor of a file, as ``os.open`` gives it; a link of this name is not followed. ``mode``: of a file that is
    new, before the umask. Raises OSError.
    """
    try:
        return os.open(path, flags | os.O_NOFOLLOW | os.O_CLOEXEC, mode)
    except OSError as error:
        if error.errno != errno.ELOOP:
            raise
        why = f"{path.name} is a symbolic link, which is not followed"
        raise OSError(errno.ELOOP, why, str(path)) from None


def write_whole(path: Path, data: bytes, mode: int = 0o666) -> None:
    """Write or replace a file; it is on the disk when this returns, and never there in part. Raises OSError.

    ``mode``: of a file that is new, before the umask.
    """
    scratch = path.with_suffix(".new")
    with os.fdopen(open_fixed(scratch, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, mode), "wb") as file:
        file.write(data)
        file.flush()
        os.fdatasync(file.fileno())
    scratch.replace(path)
    directory = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)
