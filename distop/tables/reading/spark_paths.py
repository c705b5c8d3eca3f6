"""Paths of files as Spark takes them and as it names them, and which file an error of Spark is about."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING
from urllib.parse import unquote, urlsplit

from distop.tables.reading.file_facts import Unreadable

if TYPE_CHECKING:
    from collections.abc import Sequence

    from distop.tables.reading.file_facts import PlannedFile

READING = re.compile(r"while reading file (\S+?)\.?(?:\s|$)")
"""How Spark's own file formats name the file that a task could not read."""
_SPECIAL = re.compile(r"[][{}?*\\]")
"""Characters by which Spark takes a path for a pattern."""


def plain_path(uri: str) -> str:
    """Spark's ``file:///a%20b`` as the local path ``/a b``; other schemes as they are, unescaped."""
    if uri.startswith("file:"):
        return unquote(urlsplit(uri).path)
    return unquote(uri)


def spark_path(path: str) -> str:
    """A planned path as Spark is to take it: one without a scheme would be looked for in Hadoop's default file system,
    while its footer is read here. Hadoop unescapes nothing in it."""
    return f"file://{path}" if path.startswith("/") else path


def pattern_of(path: str) -> str:
    """The pattern that matches this planned path alone.

    Raises Unreadable if Hadoop cannot match the path. Without patterns (``__globPaths__``) Spark reads files more than
    once: for each path with a special character it lists all paths again.
    """
    pattern = _SPECIAL.sub(r"\\\g<0>", path)
    if pattern != path and ":" in path.partition("://")[2 if "://" in path else 0]:
        raise Unreadable(
            f"Spark cannot read the file {path}: its path has a ':' and one of ?*[]{{}}\\, which Hadoop cannot match: "
            "rename it"
        )
    return spark_path(pattern)


def broken_file(error: Exception, files: Sequence[PlannedFile]) -> str | None:
    """Which of the files Spark could not read, where it says so."""
    named = {plain_path(m) for m in READING.findall(str(error))}
    return next((f[0] for f in files if f[0] in named), None)
