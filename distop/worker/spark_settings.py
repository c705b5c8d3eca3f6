"""The private properties file with the settings of Spark's JVM. It exists only while a JVM starts."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from distop.storage import deletion
from distop.storage.deletion import Place

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

FILE = "spark-settings.properties"
"""The file's name in the work directory."""
_ESCAPED = {"\\": "\\\\", "\n": "\\n", "\r": "\\r", "\t": "\\t", "\f": "\\f"}


def remove(work_dir: Path) -> None:
    """Remove the file, after the JVM has read it or was killed during its start. Raises OSError."""
    deletion.delete(Place(str(work_dir)), FILE)


def write(work_dir: Path, settings: Mapping[str, str]) -> Path:
    """Create the file, readable only for our user. Raises OSError."""
    remove(work_dir)
    path = work_dir / FILE
    text = "".join(f"{_escape(name, key=True)}={_escape(value)}\n" for name, value in settings.items())
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    with os.fdopen(descriptor, "w", encoding="ascii") as file:
        file.write(text)
    return path


def _escape(text: str, *, key: bool = False) -> str:
    """Escape a key or value for java.util.Properties."""
    out: list[str] = []
    for n, character in enumerate(text):
        if character in _ESCAPED:
            out.append(_ESCAPED[character])
        elif character == " " and (key or n == 0):
            out.append("\\ ")
        elif key and character in "=:#!":
            out.append(f"\\{character}")
        elif " " <= character <= "~":
            out.append(character)
        else:
            units = character.encode("utf-16-be", "surrogatepass")
            out += [f"\\u{units[i] << 8 | units[i + 1]:04x}" for i in range(0, len(units), 2)]
    return "".join(out)
