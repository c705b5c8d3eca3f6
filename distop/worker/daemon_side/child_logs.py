"""The log files of the children: ``<work_dir>/logs/child-<n>.log``; old ones are removed."""

from __future__ import annotations

import os
import re
from typing import TYPE_CHECKING, BinaryIO

from distop.runtime import secret_settings
from distop.storage.files import open_fixed

if TYPE_CHECKING:
    from pathlib import Path

KEEP = 10
"""Number of kept files besides the new one."""
TAIL = 2_000
"""Characters from the end of a dead child's log that the error text quotes."""
MAX_BYTES = 32 * 1024 * 1024
"""A log larger than this is truncated; its end is kept in ``child-<n>.log.old``."""

_NAME = re.compile(r"child-(\d+)\.log")


def new_log(work_dir: Path) -> Path:
    """The path of the next log file. Removes all older files but :data:`KEEP`."""
    folder = work_dir / "logs"
    folder.mkdir(parents=True, exist_ok=True)
    numbers = sorted(int(m[1]) for path in folder.iterdir() if (m := _NAME.fullmatch(path.name)))
    for number in numbers[: max(0, len(numbers) - KEEP)]:
        (folder / f"child-{number}.log").unlink(missing_ok=True)
        (folder / f"child-{number}.log.old").unlink(missing_ok=True)
    return folder / f"child-{(numbers[-1] if numbers else 0) + 1}.log"


def open_for_append(path: Path) -> BinaryIO:
    """Open the log file for a child's output. Raises OSError."""
    return os.fdopen(open_fixed(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT), "ab")


def tail(path: Path, characters: int = TAIL) -> str:
    """The end of a log without secrets; "" if it cannot be read."""
    try:
        with path.open("rb") as file:
            end, longest = file.seek(0, os.SEEK_END), secret_settings.longest()
            start = file.seek(max(0, end - 4 * (characters + longest)))
            text = secret_settings.redact(file.read().decode(errors="replace"))
            # The first characters may be the end of a secret, which redact() does not recognize.
            return text[longest if start else 0 :][-characters:].strip()
    except OSError:
        return ""


def truncate_if_large(path: Path, limit: int = MAX_BYTES) -> None:
    """Truncate a log that is too large. Its writers append, so this is safe while they write."""
    try:
        if path.stat().st_size > limit:
            kept = open_fixed(path.with_name(path.name + ".old"), os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            with os.fdopen(kept, "w") as file:
                file.write(tail(path, 1_000_000))
            os.truncate(path, 0)
    except OSError:
        pass
