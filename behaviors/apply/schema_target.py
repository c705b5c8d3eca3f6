"""The interface for changing a table's schema: load the current metadata, and compare-and-swap it.

The table's format says whether its schema can be changed, and how (:mod:`distop.tables.formats`). Iceberg tables by
path use :mod:`distop_behaviors.apply.hadoop_commit`, those of a catalog :mod:`distop_behaviors.apply.catalog_commit`,
Delta tables :mod:`distop_behaviors.apply.delta_commit`. To add another kind, implement :class:`SwapTarget` in a module,
and add it to :func:`target_of`; to narrow columns as well, implement :class:`RewriteTarget`. ``swap`` must compare the
whole loaded metadata, by its file or by snapshot *and* schema. Comparing the schema alone, as Iceberg's
``UpdateSchema`` does with a REST catalog, would accept commits that were not validated.

This module alone asks which format a table has.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import field
from typing import TYPE_CHECKING, Protocol

from distop.errors import InvalidArgument
from distop.protocol.frozen import frozen
from distop.tables import changes_of
from distop_behaviors.apply.constraints import DELTA, ICEBERG

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping, Sequence

    from distop.behavior import JobContext, TableRecord
    from distop.tables.commits import Head
    from distop.tables.iceberg.new_metadata import Rewrite
    from distop.tables.reading.file_facts import PlannedFile
    from distop.tables.table_version import TableVersion
    from distop_behaviors.apply.constraints import ConstraintRules, SchemaChanges


class HeadSchema(ABC):
    """The schema and the files of loaded metadata. ``snapshot``: the version in plans of it."""

    version: TableVersion
    snapshot: str

    @abstractmethod
    def required(self, field_id: int) -> bool:
        """Whether a column, which exists, is required."""

    def has_type(self, field_id: int, spark: str) -> bool:
        """Whether a column, which exists, has this type of Spark. Only for formats that widen columns."""
        raise NotImplementedError

    @abstractmethod
    def files(self, check: Callable[[], None]) -> Sequence[PlannedFile]:
        """All data files. ``check`` raises to stop."""

    @abstractmethod
    def check_change(self, required: Collection[int], wanted: SchemaChanges) -> None:
        """Raises InvalidArgument if the table cannot get these required columns, by their ids, and properties."""


@frozen
class SchemaChange:
    """A change of a schema.

    ``required`` and ``optional``: field ids of columns that become so. ``properties``: table properties to set, or
    (None) to remove. ``widened``: Spark's types by the field ids of columns that get them without a rewrite.
    """

    required: tuple[int, ...] = ()
    optional: tuple[int, ...] = ()
    properties: Mapping[str, str | None] | None = None
    widened: Mapping[int, str] = field(default_factory=dict)


class SwapTarget(Protocol):
    """A table whose metadata can be swapped."""

    def check_folders(self, *, rewritten: bool) -> None:
        """Raises UnsafePath if other users may change a folder on a disk that a change would write into.

        Raises InvalidArgument for an object store in which two writers may both create the same file.
        ``rewritten``: the change also writes data files. Each write checks this again.
        """

    def load(self) -> Head:
        """The current metadata, not cached. Raises TableUnavailable if there is no table."""

    def schema(self, head: Head) -> HeadSchema:
        """The schema of the loaded metadata. Raises InvalidArgument and TableUnavailable if it cannot be read."""

    def swap(self, head: Head, change: SchemaChange) -> None:
        """Make the change if the metadata is still ``head``. Raises Conflict, CommitUnknown, and unexpected errors."""


class RewriteTarget(SwapTarget, Protocol):
    """A table whose data files can be replaced together with its schema."""

    def rewrite(self, head: Head, rewrite: Rewrite) -> None:
        """Replace data files and the schema in one commit, if the metadata is still ``head``.

        Raises the errors of ``swap``.
        """

    def roll_back(
        self, head: Head, schema: int, snapshot: int | None, kept: frozenset[str], change: Mapping[str, str | None]
    ) -> None:
        """Return to an earlier schema and snapshot in one commit, but keep the data files ``kept``.

        ``snapshot`` None: the current snapshot stays. Raises the errors of ``swap``.
        """


def rules_of(table: TableRecord) -> ConstraintRules:
    """How the table's format keeps certified checks. Raises InvalidArgument if the table's schema cannot be changed."""
    return DELTA if changes_of(table).delta else ICEBERG


def target_of(table: TableRecord, ctx: JobContext, *, stoppable: bool = True) -> SwapTarget:
    """The target for changing this table's schema.

    ``stoppable``: waiting for a catalog ends if the job must stop. Raises InvalidArgument if the table's schema cannot
    be changed, TableUnavailable if its catalog is not configured on this executor.
    """
    if changes_of(table).delta:
        from distop_behaviors.apply.delta_commit import DeltaTarget

        return DeltaTarget(table, ctx)
    return rewrite_target_of(table, ctx, stoppable=stoppable)


def rewrite_target_of(table: TableRecord, ctx: JobContext, *, stoppable: bool = True) -> RewriteTarget:
    """The target for rewriting an Iceberg table with another schema.

    Raises the errors of :func:`target_of`, and InvalidArgument for a Delta table.
    """
    changes = changes_of(table)
    if changes.delta:
        raise InvalidArgument(f"the Delta table {table.name!r} cannot be rewritten: only Iceberg tables are supported")
    if not changes.by_catalog:
        from distop_behaviors.apply.hadoop_commit import HadoopTarget

        return HadoopTarget(table, ctx)
    from distop_behaviors.apply.catalog_commit import CatalogTarget

    return CatalogTarget(table, ctx, ctx.check_cancelled if stoppable else lambda: None)
