"""Errors for planned data files and metadata that no longer exist, or were truncated."""

from __future__ import annotations

from distop.tables.reading.file_facts import Unreadable


def check_length(path: str, size: int, found: int) -> None:
    """Raises Unreadable if a data file does not have the number of bytes in its manifest: its content has changed."""
    if found != size:
        # Do not say how many bytes it has: a link could lead to any file of this process's user.
        raise Unreadable(
            f"the file {path} does not have the {size} bytes that its manifest says: it was truncated or overwritten"
        )


def file_gone(path: str, snapshot: str) -> str:
    """The error text for a planned file that no longer exists."""
    return (
        f"the file {path} is gone: since the operation was planned its snapshot {snapshot} was expired, or the table "
        "was dropped"
    )


def snapshot_gone(source: str, why: str) -> str:
    """The error text for planned metadata, or manifests of it, that no longer exist."""
    return (
        f"the snapshot that the operation was planned on can no longer be read through {source}: it was expired, or "
        f"the table was dropped ({why})"
    )
