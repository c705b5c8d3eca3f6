"""Converts paths of files to and from Spark's form, and finds the file that an error of Spark names."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING
from urllib.parse import unquote, urlsplit

from distop.tables.reading.file_facts import Unreadable

if TYPE_CHECKING:
    from collections.abc import Sequence

    from distop.tables.reading.file_facts import PlannedFile

READING = re.compile(r"while reading file (\S+?)\.?(?:\s|$)")
"""The file that a task could not read, in errors of Spark's own file formats."""
_SPECIAL = re.compile(r"[][{}?*\\]")
"""Characters that have a meaning in Spark's path patterns."""


def plain_path(uri: str) -> str:
    """The local path ``/a b`` for Spark's ``file:///a%20b``; URLs of other schemes are only unescaped."""
    if uri.startswith("file:"):
        return unquote(urlsplit(uri).path)
    return unquote(uri)


def spark_path(path: str) -> str:
    """A planned path for Spark, with a scheme: without one, Hadoop would use its default file system.

    Hadoop does not unescape it.
    """
    return f"file://{path}" if path.startswith("/") else path


def pattern_of(path: str) -> str:
    """The pattern that matches only this planned path.

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
    """The one of these files that Spark could not read; None if the error does not name one."""
    named = {plain_path(m) for m in READING.findall(str(error))}
    return next((f[0] for f in files if f[0] in named), None)
