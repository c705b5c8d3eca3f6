"""Reads footers in a process of its own: pyarrow ends the process over some that are damaged.

That takes as long as starting Python does. So it is for files over which a process may have died already.
"""

from __future__ import annotations

import json
import subprocess
import sys
from typing import TYPE_CHECKING

from distop_behaviors.reading import footers
from distop_behaviors.reading.facts import Unreadable

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from distop_behaviors.reading.footers import PlannedFile

_ASKED_EVERY = 0.5
"""Seconds between two looks at whether to go on."""


def deadly(
    files: Sequence[PlannedFile], wanted: frozenset[str], check: Callable[[], None] = lambda: None
) -> dict[str, Unreadable]:
    """The files whose footers end the process that reads them, by path. ``check`` is called now and then, and raises
    where that is to stop.
    """
    found: dict[str, Unreadable] = {}
    left = list(files)
    while left:
        seen, code = _read(left, wanted, check)
        if code == 0 or not seen:
            break  # without a first file it is Python itself that does not start
        path = left[seen - 1][0]
        found[path] = Unreadable(
            f"the file {path} is not a readable Parquet file: its footer is damaged and crashes the reader "
            f"({f'signal {-code}' if code < 0 else f'exit code {code}'})"
        )
        left = left[seen:]
    return found


def _read(files: Sequence[PlannedFile], wanted: frozenset[str], check: Callable[[], None]) -> tuple[int, int]:
    """How many of the files were begun, and how the process that read them ended."""
    command = [sys.executable, "-P", "-m", "distop_behaviors.reading.footer_probe"]
    asked = json.dumps([list(files), sorted(wanted)])
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as process:
        told = ""
        try:
            while True:
                try:
                    told, _ = process.communicate(asked or None, timeout=_ASKED_EVERY)
                    break
                except subprocess.TimeoutExpired:
                    asked = ""
                    check()
        except BaseException:
            process.kill()
            raise
    return len(told.splitlines()), process.returncode


def main() -> int:
    """Read the footers of the files that stand on the standard input, and print a line before each."""
    files, wanted = json.load(sys.stdin)
    for path, size, mtime_ns in files:
        sys.stdout.write("\n")
        sys.stdout.flush()
        footers.read_all([(path, size, mtime_ns)], frozenset(wanted))
    return 0


if __name__ == "__main__":
    sys.exit(main())
