"""Changes the schema of a Delta table by a commit in its log, without a JVM.

The commit is the file of the next version, which is created only if nobody has created it: so it asserts the version
that was loaded. It changes protocol and metadata, and no rows. A Delta writer that began before it fails, because it
compares both.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from distop.errors import InvalidArgument
from distop.tables.delta import metadata_commit
from distop.tables.delta.delta_version import DeltaVersion
from distop.tables.delta.log_publisher import LogPublisher
from distop.tables.delta.metadata_commit import CHECK_CONSTRAINTS, CONSTRAINT, INVARIANTS
from distop_behaviors.apply.schema_target import HeadSchema, SchemaChange

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping, Sequence

    from distop.tables.commits import Head
    from distop.tables.delta.delta_log import DeltaSnapshot
    from distop.tables.reading.file_facts import PlannedFile
    from distop_behaviors.apply.constraints import SchemaChanges

_OPERATION = "distop apply"
"""The name of the operation in the table's history."""


class DeltaHeadSchema(HeadSchema):
    """The schema and files of a version."""

    def __init__(self, snapshot: DeltaSnapshot) -> None:
        self.version = DeltaVersion(snapshot)
        self.snapshot = snapshot.id
        self._snapshot = snapshot

    def required(self, field_id: int) -> bool:
        return self._snapshot.schema.required(self._top(field_id))

    def has_type(self, field_id: int, spark: str) -> bool:
        return bool(self._snapshot.schema.columns[self._top(field_id)] == spark)

    def files(self, check: Callable[[], None]) -> Sequence[PlannedFile]:
        return [(file.path, file.size, 0) for file in self._snapshot.files.values()]

    def check_change(self, required: Collection[int], wanted: SchemaChanges) -> None:
        """Also for an unknown writer feature, and for a constraint of another condition under the same name."""
        metadata_commit.check_writable(self._snapshot)
        for field_id in required:
            self._top(field_id)
        for one in wanted.widened:
            if not self.has_type(one.id, one.type):
                metadata_commit.check_widening(self._snapshot, self._top(one.id), one.type)
        present = metadata_commit.configuration(self._snapshot)
        for name, sql in wanted.properties.items():
            if name in present and present[name] != sql:
                raise InvalidArgument(
                    f"the table has another constraint {name.removeprefix(CONSTRAINT)!r} already: {present[name]}; "
                    "drop it first, or validate the check under another name"
                )

    def _top(self, field_id: int) -> str:
        """The name of a column at the top level of the table. Raises InvalidArgument for a nested one."""
        name = self.version.name_of(field_id)
        if name is None or name not in self._snapshot.schema.columns:
            raise InvalidArgument(
                f"the column {name or field_id!r} is inside another column: in a Delta table, only columns at the top "
                "level can be changed"
            )
        return name


class DeltaTarget(LogPublisher):
    """A Delta table in a folder."""

    def schema(self, head: Head) -> DeltaHeadSchema:
        """See Target."""
        return DeltaHeadSchema(head.base)

    def swap(self, head: Head, change: SchemaChange) -> None:
        """See Target. Also raises TableUnavailable if the store refuses, UnsafePath, and InvalidArgument."""
        snapshot: DeltaSnapshot = head.base
        info = self.info(snapshot, _OPERATION, {"operation": self._ctx.operation})
        self.commit(snapshot, metadata_commit.commit_text(info, *_changed(snapshot, change)))


def _changed(snapshot: DeltaSnapshot, change: SchemaChange) -> tuple[Mapping[str, Any] | None, Mapping[str, Any]]:
    """The protocol (None if it stays) and the metadata after a change. Raises InvalidArgument."""
    schema, properties = DeltaHeadSchema(snapshot), change.properties or {}
    nullable = {schema.version.name_of(i): False for i in change.required}
    nullable |= {schema.version.name_of(i): True for i in change.optional}
    needed = {INVARIANTS} if change.required else set()
    if any(name.startswith(CONSTRAINT) and value is not None for name, value in properties.items()):
        needed.add(CHECK_CONSTRAINTS)
    protocol = metadata_commit.with_features(snapshot, needed)
    metadata = metadata_commit.changed_metadata(
        snapshot,
        {name: value for name, value in nullable.items() if name is not None},
        {str(schema.version.name_of(i)): kind for i, kind in change.widened.items()},
        properties,
    )
    return protocol, metadata
