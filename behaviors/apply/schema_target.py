"""Where a schema is changed: the current metadata of a table, and a swap of it.

Which tables have a schema that is changed, and by whom, their format tells (:mod:`distop.tables.formats`). A table by
path has :mod:`distop_behaviors.apply.hadoop_commit`, one of a catalog :mod:`distop_behaviors.apply.catalog_commit`.
Another one is another module that offers a :class:`Target`, and its place in :func:`target_of`. Its ``swap`` must
compare the whole metadata that was loaded, by its file or by the snapshot *and* the schema: that the schema alone is
the same, which is all that Iceberg's own ``UpdateSchema`` asks of a REST catalog, would let a commit pass that nobody
has looked at.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

from distop.protocol.frozen import frozen
from distop.tables import changes_of

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from distop.behavior import JobContext, TableRecord
    from distop_behaviors.apply.file_rewrite import Stage


class Moved(Exception):
    """The metadata is not what was loaded any more: nothing was changed."""


class Unsure(Exception):
    """Nobody knows whether the swap took place: what is loaded next tells."""


@frozen
class Head:
    """The metadata of a table as it was loaded. ``source``: the file that it is in, as a plan names it. ``base``: what
    the target compares with.
    """

    source: str
    properties: Mapping[str, str]
    base: Any


@frozen
class Change:
    """What is to be other than before: by their field ids, columns that are to be required, and that are not; table
    properties to set, and (None) to remove.
    """

    required: tuple[int, ...] = ()
    optional: tuple[int, ...] = ()
    properties: Mapping[str, str | None] | None = None


@frozen
class Rewrite:
    """Data files that take the place of others. ``schema``: what is to be the current one, as JSON. ``staged``: where
    the new files are. ``replaced``: the paths of the data files that go; None: all
    of them, and all deletes. ``properties``: what is to be set, and (None) removed, told the snapshot that this makes.
    """

    schema: Mapping[str, Any] | None
    staged: Sequence[Stage]
    replaced: frozenset[str] | None
    properties: Callable[[str], Mapping[str, str | None]]


class Target(Protocol):
    """A table whose metadata can be swapped."""

    def check_folders(self, *, rewritten: bool) -> None:
        """Raises UnsafePath where others may change a folder on a disk in which a change would be written by paths.
        ``rewritten``: data files are written, too. It is looked at again before each writing.
        """

    def load(self) -> Head:
        """The current metadata, read anew. Raises TableUnavailable where there is no table."""

    def swap(self, head: Head, change: Change) -> None:
        """Change it, if it is still what was loaded. Raises Moved, Unsure, and what is unexpected."""

    def rewrite(self, head: Head, rewrite: Rewrite) -> None:
        """Replace data files, and the schema with them, in one commit, if the table is still what was loaded. Raises as
        ``swap`` does.
        """

    def roll_back(
        self, head: Head, schema: int, snapshot: int | None, kept: frozenset[str], change: Mapping[str, str | None]
    ) -> None:
        """Make a former schema and snapshot (None: it is still this one) the current ones again, with the data files
        ``kept`` of the present one, in one commit. Raises as ``swap`` does.
        """


def target_of(table: TableRecord, ctx: JobContext, *, stoppable: bool = True) -> Target:
    """Where this table's schema is changed; ``stoppable``: what waits for a catalog stops where the job is to. Raises
    InvalidArgument for a table that has no schema to change, TableUnavailable where its catalog is not configured here.
    """
    if not changes_of(table).by_catalog:
        from distop_behaviors.apply.hadoop_commit import HadoopTarget

        return HadoopTarget(table, ctx)
    from distop_behaviors.apply.catalog_commit import CatalogTarget

    return CatalogTarget(table, ctx, ctx.check_cancelled if stoppable else lambda: None)
