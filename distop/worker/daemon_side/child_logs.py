"""The log files of the children: ``<work_dir>/logs/child-<n>.log``, the last few of them kept."""

from __future__ import annotations

import os
import re
from typing import TYPE_CHECKING, BinaryIO

from distop.runtime import secret_settings
from distop.storage.files import open_fixed

if TYPE_CHECKING:
    from pathlib import Path

KEEP = 10
"""Files that are kept besides the new one."""
TAIL = 2_000
"""Characters of a dead child's log that go into the error text."""
MAX_BYTES = 32 * 1024 * 1024
"""A child's log that grows beyond this starts anew; its end is kept beside it."""

_NAME = re.compile(r"child-(\d+)\.log")


def new_log(work_dir: Path) -> Path:
    """The path of the next log file; older ones beyond :data:`KEEP` are removed."""
    folder = work_dir / "logs"
    folder.mkdir(parents=True, exist_ok=True)
    numbers = sorted(int(m[1]) for path in folder.iterdir() if (m := _NAME.fullmatch(path.name)))
    for number in numbers[: max(0, len(numbers) - KEEP)]:
        (folder / f"child-{number}.log").unlink(missing_ok=True)
        (folder / f"child-{number}.log.old").unlink(missing_ok=True)
    return folder / f"child-{(numbers[-1] if numbers else 0) + 1}.log"


def appended(path: Path) -> BinaryIO:
    """The log file, open for a child to append to. Raises OSError."""
    return os.fdopen(open_fixed(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT), "ab")


def tail(path: Path, characters: int = TAIL) -> str:
    """The end of a log without secret values, or "" where it cannot be read."""
    try:
        with path.open("rb") as file:
            end, longest = file.seek(0, os.SEEK_END), secret_settings.longest()
            begin = file.seek(max(0, end - 4 * (characters + longest)))
            text = secret_settings.redact(file.read().decode(errors="replace"))
            # The first characters that were read may be the end of a secret.
            return text[longest if begin else 0 :][-characters:].strip()
    except OSError:
        return ""


def bound(path: Path, limit: int = MAX_BYTES) -> None:
    """Start a log anew once it is too large. Its writers append, so truncating it under them is sound."""
    try:
        if path.stat().st_size > limit:
            kept = open_fixed(path.with_name(path.name + ".old"), os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            with os.fdopen(kept, "w") as file:
                file.write(tail(path, 1_000_000))
            os.truncate(path, 0)
    except OSError:
        pass
