"""Reads Parquet footers in a separate process, because pyarrow aborts on some.

Starting the process takes as long as starting Python, so it is used only for files that may have crashed a process
before.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import TYPE_CHECKING

from distop.runtime import secret_settings
from distop.tables.reading import parquet_footers
from distop.tables.reading.file_facts import Unreadable

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from distop.tables.reading.file_facts import PlannedFile

_CHECKED_EVERY = 0.5
"""Seconds between two calls of ``check``."""


def crashing_footers(
    files: Sequence[PlannedFile], wanted: frozenset[str], check: Callable[[], None] = lambda: None
) -> dict[str, Unreadable]:
    """Files whose footers crash the process that reads them, by path.

    ``check`` is called twice a second; it raises to stop the probe.
    """
    found: dict[str, Unreadable] = {}
    left = list(files)
    while left:
        seen, code = _read(left, wanted, check)
        if code == 0 or not seen:
            break  # if no file was started, Python itself cannot start
        path = left[seen - 1][0]
        found[path] = Unreadable(
            f"the file {path} is not a readable Parquet file: its footer is damaged and crashes the reader "
            f"({f'signal {-code}' if code < 0 else f'exit code {code}'})"
        )
        left = left[seen:]
    return found


def _read(files: Sequence[PlannedFile], wanted: frozenset[str], check: Callable[[], None]) -> tuple[int, int]:
    """How many files were started, and the exit code of the process that read them."""
    command = [sys.executable, "-P", "-m", "distop.tables.parquet.footer_probe"]
    asked = json.dumps([list(files), sorted(wanted)])
    with subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env=secret_settings.environment(os.environ),
    ) as process:
        output = ""
        try:
            while True:
                try:
                    output, _ = process.communicate(asked or None, timeout=_CHECKED_EVERY)
                    break
                except subprocess.TimeoutExpired:
                    asked = ""
                    check()
        except BaseException:
            process.kill()
            raise
    return len(output.splitlines()), process.returncode


def main() -> int:
    """Read the footers of the files given on stdin as JSON.

    Prints an empty line before each file, so the caller knows how far this process came.
    """
    files, wanted = json.load(sys.stdin)
    for path, size, stamp in files:
        sys.stdout.write("\n")
        sys.stdout.flush()
        parquet_footers.read_all([(path, size, stamp)], frozenset(wanted))
    return 0


if __name__ == "__main__":
    sys.exit(main())
