"""Commits of tables: what a publisher of a format loads, and how a commit can end without success."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

from distop.protocol.frozen import frozen

if TYPE_CHECKING:
    from collections.abc import Mapping


class Conflict(Exception):
    """A commit failed because the table has changed since it was loaded."""


class CommitUnknown(Exception):
    """It is unknown whether a commit succeeded: load the table again to find out."""


@frozen
class Head:
    """The loaded state of a table.

    ``source``: its metadata file's path, like in a plan. ``base``: the publisher's own value for the compare-and-swap.
    """

    source: str
    properties: Mapping[str, str]
    base: Any


class CommitContext(Protocol):
    """What a publisher needs of a job or a completion (``distop.behavior.JobContext``)."""

    operation: str

    @property
    def spark(self) -> Any: ...

    def check_cancelled(self) -> None: ...

    def check_reachable(self) -> None: ...
