"""Removes whole partitions of an Iceberg table by a snapshot that deletes their files from the metadata."""

from __future__ import annotations

from datetime import UTC, date, datetime, timedelta
from operator import methodcaller
from typing import TYPE_CHECKING, Any

from distop.errors import InvalidArgument, TableUnavailable
from distop.protocol.plan import PartitionPlan
from distop.protocol.texts import did_you_mean
from distop.storage.store_errors import unavailable
from distop.tables.commits import COMPLETION, OPERATION, commit_with_retries
from distop.tables.iceberg.catalog_publisher import CatalogPublisher
from distop.tables.iceberg.folder_publisher import FolderPublisher
from distop.tables.iceberg.iceberg_changes import entries
from distop.tables.iceberg.manifest_list import manifests_of
from distop.tables.iceberg.metadata_file import read_file
from distop.tables.iceberg.snapshot_files import PartitionNames, files_of
from distop.tables.partition_removal import (
    DAY,
    HOUR,
    MONTH,
    VALUE,
    YEAR,
    PartitionRemoval,
    RemovedFiles,
    ValuedPartition,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator

    from distop.protocol.records import TableRecord
    from distop.tables.commits import CommitContext
    from distop.tables.iceberg.metadata_file import MetadataFile

_EPOCH_DAY, _EPOCH = date(1970, 1, 1), datetime(1970, 1, 1)  # noqa: DTZ001 -- a time without a zone
_IN_UTC = ("timestamptz", "timestamptz_ns")
_UNITS = {"hour": HOUR, "day": DAY, "month": MONTH, "year": YEAR}


class IcebergPartitionRemoval(PartitionRemoval):
    """The current snapshot of a table in a folder or a catalog."""

    def __init__(
        self, table: TableRecord, context: CommitContext, check: Callable[[], None], *, by_catalog: bool
    ) -> None:
        self._context = context
        self._check = check
        self._publisher: FolderPublisher | CatalogPublisher = (
            CatalogPublisher(table, context, check) if by_catalog else FolderPublisher(table, context)
        )
        self._publisher.check_folders(rewritten=False)
        self._file = read_file(self._publisher.load().source)
        self.state = self._file.source

    def partitions(self, column: str) -> Iterator[ValuedPartition]:
        metadata = self._file.content
        fields = {
            spec_id: found
            for spec_id, spec in metadata.specs().items()
            if (found := _field_of(spec, column, metadata)) is not None
        }
        if metadata.default_spec_id not in fields:
            names = [field.name for field in metadata.spec().fields]
            raise InvalidArgument(
                f"the Iceberg table at {metadata.location!r} is not partitioned by {column!r} itself, or by its hour, "
                f"day, month or year{did_you_mean(column, names)} (its partition fields: {', '.join(names) or 'none'})"
            )
        names_of = {spec_id: PartitionNames(spec, metadata) for spec_id, spec in metadata.specs().items()}
        groups: dict[str, tuple[Any, str, int, list[tuple[str, int, int]]]] = {}
        self.unpartitioned = 0
        for spec_id, file in self._files(self._file):
            if spec_id not in fields:
                self.unpartitioned += 1
                continue
            naming = names_of[spec_id]
            name = naming.prefix + naming.name(file.partition)
            at = fields[spec_id][0]
            if name not in groups:
                groups[name] = (file.partition[at], naming.text(file.partition, at), spec_id, [])
            groups[name][3].append((file.file_path, file.file_size_in_bytes, 0))
        for name, (value, text, spec_id, files) in groups.items():
            _, unit, kind = fields[spec_id]
            plan = PartitionPlan(0, name, sum(f[1] for f in files), tuple(files), source=self._file.source)
            yield ValuedPartition(plan, _python(value, unit, kind), unit, utc=kind in _IN_UTC, text=text)

    def _files(self, file: MetadataFile) -> Iterator[tuple[int, Any]]:
        """The data files of the current snapshot, each with the id of its partition spec."""
        snapshot = file.content.current_snapshot()
        if snapshot is not None:
            yield from self._entries(file, snapshot)

    def _removed_by(self, snapshot: Any, file: MetadataFile) -> frozenset[str]:
        """The paths of the data files that a snapshot has removed."""
        return frozenset(one.file_path for _, one in self._entries(file, snapshot, removed=True))

    def _entries(self, file: MetadataFile, snapshot: Any, *, removed: bool = False) -> Iterator[tuple[int, Any]]:
        """The data files of a snapshot, or those that it has removed, each with the id of its partition spec."""
        metadata, io = file.content, file.manifests()
        allowed = files_of(file.source, metadata)
        try:
            with io.watched():
                data = [manifest for manifest in manifests_of(snapshot, io) if manifest.content == 0]
                if removed:
                    data = [manifest for manifest in data if manifest.added_snapshot_id == snapshot.snapshot_id]
                allowed.check(manifest.manifest_path for manifest in data)
                for manifest, entry in entries(data, io, self._check, removed=removed):
                    allowed.check((entry.data_file.file_path,))
                    yield manifest.partition_spec_id, entry.data_file
        except OSError as error:
            raise unavailable(f"cannot read the manifests of {metadata.location!r}: {error}", error) from error

    def remove(self, paths: Collection[str], planned: PartitionPlan) -> RemovedFiles:
        wanted = frozenset(paths)
        known = _snapshots_in(planned.source)

        def attempt() -> RemovedFiles:
            head = self._publisher.load()
            file = read_file(head.source)
            if (done := self._done(file, known)) is not None:
                return RemovedFiles(wanted & self._removed_by(done, file), str(done.snapshot_id))
            left = wanted & {one.file_path for _, one in self._files(file)}
            if not left:
                return RemovedFiles(left, str(file.content.current_snapshot_id))
            self._publisher.commit_produced(head, methodcaller("deleted", left, COMPLETION))
            now = read_file(self._publisher.load().source).content.current_snapshot_id
            return RemovedFiles(left, str(now))

        return commit_with_retries(attempt, self._context)

    def _done(self, file: MetadataFile, planned: Collection[int]) -> Any:
        """The snapshot of this operation, also if it is not before the current one; None if there is none."""
        for one in file.content.snapshots:
            if one.snapshot_id in planned or one.summary is None:
                continue
            if one.summary.get(OPERATION) == self._context.operation:
                return one
        return None


def _snapshots_in(source: str) -> frozenset[int]:
    """The ids of the snapshots in a metadata file; none if it is gone."""
    try:
        return frozenset(one.snapshot_id for one in read_file(source).content.snapshots)
    except (InvalidArgument, TableUnavailable):
        return frozenset()


def _field_of(spec: Any, column: str, metadata: Any) -> tuple[int, str, str] | None:
    """The position of the partition field for a column, its unit, and the column's type; None if there is none.

    ``column``: the name of the field, or of its column.
    """
    for n, field in enumerate(spec.fields):
        transform = str(field.transform)
        unit = VALUE if transform == "identity" else _UNITS.get(transform)
        try:
            source = metadata.schema().find_field(field.source_id)
        except ValueError:
            continue
        if unit is not None and column in (field.name, source.name):
            return n, unit, str(source.field_type)
    return None


def _python(value: Any, unit: str, kind: str) -> Any:
    """A partition's value, in whose manifests days and times are numbers since 1970."""
    if value is None or unit != VALUE or isinstance(value, str | date):
        return value
    if kind == "date":
        return _EPOCH_DAY + timedelta(days=int(value))
    if kind in ("timestamp", "timestamptz"):
        found = _EPOCH + timedelta(microseconds=int(value))
        return found.replace(tzinfo=UTC) if kind == "timestamptz" else found
    return value
