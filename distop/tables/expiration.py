"""Expiration of a table's old versions: the interface :class:`Expiration`, which formats with versions implement.

The work has steps that an operation can repeat: :meth:`Expiration.choose` decides from one state of the table, jobs
read parts of the metadata (:meth:`Expiration.named`), :meth:`Expiration.commit` removes the versions from the metadata,
and :meth:`Expiration.needed` lists what the table needs afterwards. A file may be deleted if a part named it for a
removed version, and nothing that remains needs it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

from distop.errors import InvalidArgument
from distop.protocol.frozen import frozen

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Sequence

    from distop.tables.commits import CommitContext
    from distop.tables.reachability import Reachability, ReadableVersion, TableFile, Unit

REMOVED, KEPT, BOTH = "expired", "kept", "all"
"""The versions that have a part of the metadata: removed ones alone, also a remaining one, or both, by its entries."""


@frozen
class RetentionRule:
    """Which versions remain.

    ``now``: the time of the decision in seconds, frozen; ``older_than``: seconds; ``retain_last``: the number of newest
    versions of each branch that remain. None: the table's own properties decide. ``remove_refs``: also remove branches
    and tags that are older than the table allows. ``shortest``: seconds; a shorter limit of the table is refused.
    """

    now: float
    older_than: float | None = None
    retain_last: int | None = None
    remove_refs: bool = True
    shortest: float = 0.0

    def check_limit(self, what: str, seconds: float) -> None:
        """Raises InvalidArgument if a limit of the table itself is shorter than ``shortest``."""
        if self.shortest and seconds < self.shortest:
            raise InvalidArgument(
                f"{what} lets versions expire after {seconds:g} s, but running readers use versions of the last "
                f"{self.shortest / 3600:g} h: change it, or set allow_recent if nothing reads the table"
            )


@frozen
class Choice:
    """The decision, which the plan freezes.

    ``versions``: their ids; ``refs``: branches and tags; ``files``: those that belong to these versions alone, except
    what units name; ``age``: the least age of a removed version in seconds: younger files are not deleted.
    """

    versions: tuple[str, ...] = ()
    refs: tuple[str, ...] = ()
    files: tuple[TableFile, ...] = ()
    age: float = 0.0


class Expiration(ABC):
    """One state of a table whose old versions can be removed."""

    reachability: Reachability

    def versions(self) -> Sequence[ReadableVersion]:
        """The versions of this state."""
        return self.reachability.versions()

    @abstractmethod
    def choose(self, rule: RetentionRule) -> Choice:
        """The versions to remove from this state."""

    @abstractmethod
    def units(self, choice: Choice) -> Iterator[tuple[Unit, str]]:
        """The parts of the metadata to read, and which versions have them (REMOVED, KEPT, BOTH)."""

    @abstractmethod
    def named(self, unit: Unit, whose: str, choice: Choice, rule: RetentionRule) -> Iterator[tuple[TableFile, bool]]:
        """The files that a part names, and whether the part shows that the file is still needed.

        ``whose``: from :meth:`units`.
        """

    @abstractmethod
    def commit(self, choice: Choice, rule: RetentionRule, context: CommitContext) -> None:
        """Remove the chosen versions and refs from the current metadata, in one commit.

        Versions that the rule would keep now, because a branch or a tag was set to them meanwhile, remain. Without
        anything left to remove, nothing is committed: so an unknown outcome is settled by reading. Raises Conflict if
        others always committed first, and the errors of a publisher.
        """

    @abstractmethod
    def needed(self, covered: Collection[str], rule: RetentionRule, *, data: bool) -> Iterator[str]:
        """The paths of the files that this state needs, without what units of the names ``covered`` have shown.

        ``data``: also of data and delete files.
        """
