"""Removes old snapshots from an Iceberg table's metadata, without a JVM, and tells which files they alone had."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from distop.clock import time
from distop.storage.confinement import own_folder
from distop.tables.commits import commit_with_retries
from distop.tables.expiration import KEPT, REMOVED, Choice, Expiration
from distop.tables.iceberg.catalog_publisher import CatalogPublisher
from distop.tables.iceberg.folder_publisher import FolderPublisher
from distop.tables.iceberg.metadata_change import next_metadata
from distop.tables.iceberg.metadata_file import read_file
from distop.tables.iceberg.snapshot_retention import Expired, check_enabled, expired, log_without

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator

    from distop.protocol.records import TableRecord
    from distop.tables.commits import CommitContext, Head
    from distop.tables.expiration import RetentionRule
    from distop.tables.iceberg.iceberg_reachability import IcebergReachability
    from distop.tables.iceberg.metadata_file import MetadataFile
    from distop.tables.reachability import TableFile, Unit


class IcebergExpiration(Expiration):
    """The state of a metadata file. ``by_catalog``: the table's commits go to its catalog."""

    reachability: IcebergReachability

    def __init__(
        self, table: TableRecord, reachability: IcebergReachability, check: Callable[[], None], *, by_catalog: bool
    ) -> None:
        """Raises InvalidArgument if the table's properties forbid to delete its files."""
        self.reachability = reachability
        self._table = table
        self._check = check
        self._by_catalog = by_catalog
        self._metadata = read_file(reachability.source).content
        check_enabled(self._metadata)

    def choose(self, rule: RetentionRule) -> Choice:
        found = expired(self._metadata, rule)
        ids = {str(one) for one in found.snapshots}
        times = [one.timestamp_ms / 1000 for one in self._metadata.snapshots if one.snapshot_id in found.snapshots]
        files = tuple(self.reachability.named(ids)) if ids else ()
        other = {file.path for file in self.reachability.named({v.id for v in self.versions()} - ids)}
        return Choice(
            tuple(version.id for version in self.versions() if version.id in ids),
            tuple(sorted(found.refs)),
            tuple(file for file in files if file.path not in other),
            max(0.0, rule.now - max(times, default=rule.now)),
        )

    def units(self, choice: Choice) -> Iterator[tuple[Unit, str]]:
        """The manifests of the removed snapshots alone; and, if there are some, those of the others."""
        removed = set(choice.versions)
        kept = list(self.reachability.units({version.id for version in self.versions()} - removed))
        names = {unit.name for unit in kept}
        own = [unit for unit in self.reachability.units(removed) if unit.name not in names]
        yield from ((unit, REMOVED) for unit in own)
        if own:
            yield from ((unit, KEPT) for unit in kept)

    def named(self, unit: Unit, whose: str, choice: Choice, rule: RetentionRule) -> Iterator[tuple[TableFile, bool]]:
        yield from ((file, whose == KEPT) for file in self.reachability.files(unit))

    def commit(self, choice: Choice, rule: RetentionRule, context: CommitContext) -> None:
        wanted = Expired(frozenset(map(int, choice.versions)), frozenset(choice.refs))
        publisher: FolderPublisher | CatalogPublisher = (
            CatalogPublisher(self._table, context, self._check)
            if self._by_catalog
            else FolderPublisher(self._table, context)
        )

        def attempt() -> None:
            head = publisher.load()
            metadata = read_file(head.source).content
            own_folder(head.source, str(metadata.location))
            check_enabled(metadata)
            now = expired(metadata, rule)
            left = Expired(wanted.snapshots & now.snapshots, wanted.refs & now.refs)
            if left.snapshots or left.refs:
                self._publish(publisher, head, left)

        commit_with_retries(attempt, context)

    @staticmethod
    def _publish(publisher: FolderPublisher | CatalogPublisher, head: Head, left: Expired) -> None:
        if isinstance(publisher, FolderPublisher):
            publisher.commit(head, _without(head.base, left, time.time()))
        else:
            publisher.commit(head, lambda metadata: list(_updates(metadata, left)), exact=True)

    def needed(self, covered: Collection[str], rule: RetentionRule, *, data: bool) -> Iterator[str]:
        for unit in self.reachability.units():
            yield unit.name
            if data and unit.name not in covered:
                for file in self.reachability.files(unit):
                    yield file.path
        for file in (*self.reachability.named(), *self.reachability.roots()):
            yield file.path


def _without(file: MetadataFile, removed: Expired, now: float) -> str:
    """The text of the next metadata file, without these snapshots, their statistics, and these refs."""
    gone = removed.snapshots

    def change(metadata: dict[str, Any]) -> None:
        metadata["snapshots"] = [one for one in metadata["snapshots"] if one["snapshot-id"] not in gone]
        if "refs" in metadata:
            metadata["refs"] = {name: ref for name, ref in metadata["refs"].items() if name not in removed.refs}
        for key in ("statistics", "partition-statistics"):
            if metadata.get(key):
                metadata[key] = [one for one in metadata[key] if one["snapshot-id"] not in gone]
        if metadata.get("snapshot-log"):
            metadata["snapshot-log"] = log_without(
                metadata["snapshot-log"], lambda entry: int(entry["snapshot-id"]), gone
            )

    return next_metadata(file, change, now)


def _updates(metadata: Any, left: Expired) -> Iterator[Any]:
    """The table updates of the catalog protocol. Statistics of removed snapshots go with them."""
    from pyiceberg.table import update

    for name in sorted(left.refs):
        yield update.RemoveSnapshotRefUpdate.model_validate({"ref-name": name})
    for one in metadata.partition_statistics:
        if one.snapshot_id in left.snapshots:
            yield update.RemovePartitionStatisticsUpdate.model_validate({"snapshot-id": one.snapshot_id})
    if left.snapshots:
        yield update.RemoveSnapshotsUpdate.model_validate({"snapshot-ids": sorted(left.snapshots)})
