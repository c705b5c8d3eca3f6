"""Replaces data files of an Iceberg table, as its own ``rewrite_data_files`` does, in snapshots of several groups.

The new files have the partition spec of the old ones and the sequence number of the snapshot that was read. So equality
deletes that arrive meanwhile apply to them as to the old files, and are not lost. Position deletes and deletion vectors
name old files: a group with new ones is left out of the commit.
"""

from __future__ import annotations

import json
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from distop.errors import InvalidArgument, UnsafePath
from distop.protocol.texts import did_you_mean, plural
from distop.storage import deletion
from distop.storage.confinement import normal_form
from distop.storage.opened_stores import store_of
from distop.storage.places import make_stage
from distop.storage.store_errors import ObjectMissing
from distop.tables.commits import (
    Candidate,
    Conflict,
    FileReplacer,
    GroupStatus,
    Marks,
    Replacement,
    RowsDiffer,
    StagedFileLost,
)
from distop.tables.iceberg import arrow_rewrite, iceberg_jar, iceberg_rows, java_tables, manifest_facts, staging_table
from distop.tables.iceberg.catalog_publisher import CatalogPublisher
from distop.tables.iceberg.folder_publisher import FolderPublisher
from distop.tables.iceberg.iceberg_changes import (
    ancestors,
    entries,
    is_ancestor,
    new_position_deletes,
    referenced_file,
)
from distop.tables.iceberg.iceberg_fields import columns_of
from distop.tables.iceberg.manifest_list import manifests_of
from distop.tables.iceberg.metadata_file import current_metadata_file, read_file, read_metadata
from distop.tables.iceberg.new_metadata import FilesChanged, ReplacedFiles
from distop.tables.iceberg.snapshot_checks import check_opened
from distop.tables.iceberg.snapshot_files import data_files, files_of, partition_types, values_in
from distop.tables.iceberg.staged_metadata import check_staged
from distop.tables.iceberg.written_folders import check_folder
from distop.tables.reading import spark_copy
from distop.tables.reading.arrow_types import SparkOnly
from distop.tables.reading.file_facts import quote

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from distop.protocol.plan import PartitionPlan, Planned
    from distop.protocol.records import TableRecord
    from distop.tables.commits import Head, Layout, ReplacementContext
    from distop.tables.iceberg.metadata_file import MetadataFile
    from distop.tables.staged_files import StagedFiles

TABLE = "table"
"""The folder of the staging table in a stage."""
_LAST_VERSION = 3
_FORMAT = "write.format.default"
_UNSORTED = {"sort-orders": [{"order-id": 0, "fields": []}], "default-sort-order-id": 0}
_OPTIONS = {
    # One task writes one file: the rows are arranged before, and are of one partition.
    "target-file-size-bytes": str(1 << 60),
    "use-table-distribution-and-ordering": "false",
    "distribution-mode": "none",
}
_CODECS = {"none": "uncompressed"}


class IcebergReplacer(FileReplacer):
    """Replaces files of an Iceberg table by path or in a catalog."""

    def __init__(self, table: TableRecord, ctx: ReplacementContext, *, by_catalog: bool) -> None:
        self._table = table
        self._ctx = ctx
        self._publisher: CatalogPublisher | FolderPublisher = (
            CatalogPublisher(table, ctx, ctx.check_cancelled) if by_catalog else FolderPublisher(table, ctx)
        )

    # ------------------------------------------------------------------ planning

    def check(self, planned: Planned, layout: Layout) -> None:
        self._publisher.check_folders(rewritten=True)
        metadata, _ = read_metadata(planned.partitions[0].source)
        if metadata.format_version > _LAST_VERSION:
            raise InvalidArgument(
                f"the files of the Iceberg table {self._table.name!r} are not replaced, because it has the format "
                f"version {metadata.format_version}: versions up to {_LAST_VERSION} are supported"
            )
        if (kind := str(metadata.properties.get(_FORMAT, "parquet")).lower()) != "parquet":
            raise InvalidArgument(
                f"the files of the Iceberg table {self._table.name!r} are not replaced: compact writes Parquet files, "
                f"but the table's file format is {kind}"
            )
        schema = metadata.schema()
        java_tables.check_columns(json.loads(schema.model_dump_json(by_alias=True)))
        names = [field.name for field in schema.fields]
        for name in layout.sort_by:
            if name not in names:
                raise InvalidArgument(f"sort_by names {name!r}{did_you_mean(name, names)}")

    def partition_columns(self, planned: Planned) -> Mapping[str, str]:
        metadata, _ = read_metadata(planned.partitions[0].source)
        return partition_types(metadata)

    def candidates(self, planned: Planned) -> Iterator[Candidate]:
        metadata, io = read_metadata(planned.partitions[0].source)
        snapshot = metadata.current_snapshot()
        if snapshot is None:
            return
        check = self._ctx.check_cancelled
        names: dict[str, tuple[str, str]] = {}
        values: dict[str, Mapping[str, str | None]] = {}
        source = planned.partitions[0].source
        with io.watched():
            for prefix, name, file in data_files(source, metadata, snapshot, io, check, []):
                names[file[0]] = f"{prefix}{name}".rstrip("/"), name
                if name not in values:
                    values[name] = values_in(name)
            manifests = manifests_of(snapshot, io)
            deletes = manifest_facts.delete_counts(manifests, metadata, io, files_of(source, metadata), check)
        for partition in planned.partitions:
            for one in partition.files:
                partition_name, name = names[one[0]]
                yield Candidate(one, partition_name, deletes.get(one[0], 0), values=values[name])

    # ------------------------------------------------------------------ writing

    def rewrite(self, plan: PartitionPlan, layout: Layout, stage: StagedFiles) -> Replacement:
        check_opened(plan.source, (path for path, _, _ in plan.files), ())
        session = spark_copy.session_of(self._ctx.spark)
        iceberg_jar.check_installed(session._jvm)
        raw = staging_table.raw_metadata(session, plan.source)
        spec = self._spec_of(plan)
        self._write_metadata(stage, raw, spec, _location(stage))
        # All readers of the table must be able to read its data files.
        make_stage(stage.data, 0o755)
        check_folder(stage.data)
        self._ctx.status(f"rewriting {plural(len(plan.files), 'file')}")
        try:
            added = self._copied(session, plan, layout, stage, spec)
        except SparkOnly:
            added = self._written_by_spark(session, plan, layout, stage, spec, raw)
        return self._replacement(plan, added, stage)

    def _copied(
        self, session: Any, plan: PartitionPlan, layout: Layout, stage: StagedFiles, spec: int
    ) -> list[tuple[str, int, int]]:
        """Copy the files with Arrow; returns the new ones. Raises SparkOnly, Gone, RowsDiffer, RowsLost, OSError."""
        metadata = read_metadata(plan.source)[0]
        codec = arrow_rewrite.codec_of(metadata, layout)
        partition = iceberg_rows.partition_without_deletes(session, plan.source, plan.files)
        if partition is None:
            raise SparkOnly("rows are deleted")
        names = arrow_rewrite.copied(plan, metadata, codec, layout.outputs, stage, self._ctx)
        staging_table.append_written(session, _location(stage), stage.data, names, partition)
        added = self._added(_StagedTable(stage, plan.partition).metadata()[0], spec, plan)
        self._check_complete(session, plan, added)
        return added

    def _written_by_spark(
        self,
        session: Any,
        plan: PartitionPlan,
        layout: Layout,
        stage: StagedFiles,
        spec: int,
        raw: Mapping[str, Any],
    ) -> list[tuple[str, int, int]]:
        """Write the files with Spark; returns the new ones. Raises RowsDiffer, RowsLost, and Spark's errors."""
        from pyspark.sql import functions as F

        lineage = int(raw["format-version"]) >= java_tables.ROW_LINEAGE
        kinds = dict(columns_of(read_metadata(plan.source)[0].schema()))
        columns = [F.col(quote(name)) for name in (*kinds, *(iceberg_rows.LINEAGE if lineage else ()))]
        if lineage and _has_row_ids(raw):
            kinds |= dict.fromkeys(iceberg_rows.LINEAGE, "bigint")
        piece = spark_copy.piece_bytes(sum(size for _, size, _ in plan.files), layout.outputs)
        frame = iceberg_rows.read(session, plan.source, plan.files, lineage=lineage, piece=piece).select(*columns)
        frame, observation = spark_copy.observed(spark_copy.arranged(frame, layout.outputs, layout.sort_by), kinds)
        codec = {"compression-codec": _CODECS.get(layout.codec, layout.codec)} if layout.codec is not None else {}
        staging_table.write_as_rewrite(session, frame, _location(stage), {**_OPTIONS, **codec})
        file, _ = _StagedTable(stage, plan.partition).metadata()
        added = self._added(file, spec, plan)
        self._check_complete(session, plan, added)
        wanted = spark_copy.seen(observation)
        if added:
            files = [(path, size, 0) for path, size, _ in added]
            back = iceberg_rows.read(session, file.source, files, lineage=lineage).select(*columns)
            found = spark_copy.checksum(back, kinds)
            if found != wanted:
                raise RowsDiffer(f"the checksum of the new files is {found}, but the rows that were read have {wanted}")
        return added

    def _check_complete(self, session: Any, plan: PartitionPlan, added: Sequence[tuple[str, int, int]]) -> None:
        """Raises RowsLost unless the new files have all rows of the old ones, except deleted ones."""
        rows = sum(count for _, _, count in added)
        staging_table.check_complete(self._ctx.check_cancelled, session, plan.source, plan.files, rows)

    def _replacement(
        self, plan: PartitionPlan, added: Sequence[tuple[str, int, int]], stage: StagedFiles
    ) -> Replacement:
        """The replacement of the planned files by these new ones: path, size and rows of each."""
        known = manifest_facts.snapshot_of(plan.source, frozenset(), self._ctx.check_cancelled).files
        rows = sum(count for _, _, count in added)
        total = sum(int(known[path].rows or 0) for path, _, _ in plan.files)
        sizes = tuple(size for _, size, _ in added)
        metadata = read_metadata(plan.source)[0]
        return Replacement(
            plan.partition,
            len(plan.files),
            sum(size for _, size, _ in plan.files),
            rows,
            max(total - rows, 0),
            len(added),
            sum(sizes),
            sizes,
            {
                "read": str(metadata.current_snapshot().snapshot_id),
                "sequence": _last_sequence(metadata),
                "removed": [path for path, _, _ in plan.files],
                "added": [path for path, _, _ in added],
            },
            stage,
        )

    def _spec_of(self, plan: PartitionPlan) -> int:
        """The partition spec of the files of a group. Raises InvalidArgument if they have several."""
        # Read once for all groups, as the numbers of rows are.
        known = manifest_facts.snapshot_of(plan.source, frozenset(), self._ctx.check_cancelled)
        specs = {spec for path, _, _ in plan.files if (spec := known.spec_of(path)) is not None}
        if len(specs) != 1:
            raise InvalidArgument(f"the files of the group {plan.name} do not have one partition spec: {sorted(specs)}")
        return specs.pop()

    def _write_metadata(self, stage: StagedFiles, raw: Mapping[str, Any], spec: int, location: str) -> None:
        for place in (stage.place, stage.data):
            deletion.check_unlinked(place)
        data = staging_table.data_url(str(raw["location"]), stage.data)
        schema = staging_table.schema_of(raw)
        metadata = staging_table.staging_metadata(raw, schema, java_tables.uri(location), data)
        metadata |= {"default-spec-id": spec, **_UNSORTED}
        store = store_of(stage.place)
        store.put(f"{TABLE}/metadata/v1.metadata.json", json.dumps(metadata).encode())
        store.put(f"{TABLE}/metadata/version-hint.text", b"1")

    def _added(self, file: MetadataFile, spec: int, plan: PartitionPlan) -> list[tuple[str, int, int]]:
        """The new files with size and rows. Raises RowsDiffer if they are not of the partition of the old ones."""
        metadata, io = file.content, file.manifests()
        found: list[tuple[str, int, int]] = []
        partitions = set()
        snapshot = metadata.current_snapshot()
        if snapshot is None:
            return found
        with io.watched():
            for manifest, entry in entries(manifests_of(snapshot, io), io, self._ctx.check_cancelled):
                one = entry.data_file
                found.append((one.file_path, one.file_size_in_bytes, one.record_count))
                partitions.add((int(manifest.partition_spec_id), repr(one.partition)))
        if len(partitions) > 1 or any(number != spec for number, _ in partitions):
            raise RowsDiffer(f"the new files of {plan.name} are of other partitions than the old ones")
        return found

    # ------------------------------------------------------------------ committing

    def load(self) -> Head:
        return self._publisher.load()

    def statuses(self, head: Head, replacements: Sequence[Replacement]) -> Sequence[GroupStatus]:
        state = _State(head, self._ctx)
        return [
            state.status(
                one.detail["removed"],
                str(one.detail["read"]),
                int(one.detail.get("sequence", 0)),
                one.group,
                one.digest,
            )
            for one in replacements
        ]

    def may_have(self, head: Head, replacements: Sequence[Replacement]) -> Sequence[bool]:
        state = _State(head, self._ctx)
        return [state.may_have(str(one.detail["read"]), one.group, one.digest) for one in replacements]

    def group_statuses(self, head: Head, plans: Sequence[PartitionPlan]) -> Sequence[GroupStatus]:
        state, found = _State(head, self._ctx), []
        for plan in plans:
            removed = [path for path, _, _ in plan.files]
            sequence = _last_sequence(read_metadata(plan.source)[0])
            found.append(state.status(removed, _read_snapshot(plan), sequence, plan.partition, ""))
        return found

    def committed_versions(self, head: Head, plan: PartitionPlan) -> Mapping[int, str]:
        groups = _State(head, self._ctx).groups_since(_read_snapshot(plan))
        return {group: version for group, (_, version) in groups.items()}

    def replan_remaining(self, head: Head, plan: PartitionPlan) -> PartitionPlan | None:
        live = manifest_facts.snapshot_of(head.source, frozenset(), self._ctx.check_cancelled).files
        files = tuple(file for file in plan.files if file[0] in live)
        if len(files) < min(2, len(plan.files)):
            return None
        return replace(plan, files=files, bytes=sum(file[1] for file in files), source=head.source)

    def commit(self, head: Head, replacements: Sequence[Replacement], marks: Marks) -> str:
        batches = [
            self._batch(head, int(read), [one for one in replacements if str(one.detail["read"]) == read])
            for read in dict.fromkeys(str(one.detail["read"]) for one in replacements)
        ]
        texts = marks.texts(replacements)
        try:
            self._publisher.commit_produced(head, lambda production: production.replaced(batches, texts))
        except FilesChanged as error:
            raise Conflict(str(error)) from error
        current = read_metadata(self.load().source)[0]
        first = replacements[0]
        for one in reversed(current.snapshots):
            if Marks.groups_in(_summary(one), self._ctx.operation).get(first.group) == first.digest:
                return str(one.snapshot_id)
        return ""  # expired meanwhile

    def _batch(self, head: Head, read: int, replacements: Sequence[Replacement]) -> ReplacedFiles:
        metadata, io = read_metadata(head.source)
        removed = frozenset(str(path) for one in replacements for path in one.detail["removed"])
        data, deletes = set(), set()
        check = self._ctx.check_cancelled
        with io.watched():
            manifests = manifests_of(metadata.current_snapshot(), io)
            for manifest, entry in entries(_of_data(manifests), io, check):
                if entry.data_file.file_path in removed:
                    data.add(str(manifest.manifest_path))
            for manifest, entry in entries(_of_deletes(manifests), io, check):
                if referenced_file(entry) in removed:
                    deletes.add(str(manifest.manifest_path))
        staged = [_StagedTable(one.stage, one.group) for one in replacements]
        return ReplacedFiles(read, removed, frozenset(data), frozenset(deletes), staged)


def _location(stage: StagedFiles) -> str:
    """The location of the staging table of a stage."""
    return f"{stage.place.location}/{TABLE}"


class _State:
    """A state of the table: its files, what this operation has committed, and new position deletes."""

    def __init__(self, head: Head, ctx: ReplacementContext) -> None:
        self._check = ctx.check_cancelled
        self._metadata, self._io = read_metadata(head.source)
        has = self._metadata.current_snapshot() is not None
        self._live = manifest_facts.snapshot_of(head.source, frozenset(), self._check).files if has else {}
        self._operation = ctx.operation
        self._deletes: dict[str, Any] = {}
        self._reverted: dict[int, int] | None = None
        """The groups in snapshots of this operation that are not before the current one, with sequence numbers."""

    def groups_since(self, read: str) -> dict[int, tuple[str, str]]:
        """The groups that snapshots of this operation after ``read`` have replaced, with digest and snapshot.

        Earlier ones may be of another operation of the same name: its number begins anew with a new etcd. Without
        ``read`` among the ancestors, all of them count.
        """
        known = {str(one.snapshot_id): one for one in self._metadata.snapshots}
        current = self._metadata.current_snapshot()
        at = str(current.snapshot_id) if current is not None else ""
        found: dict[int, tuple[str, str]] = {}
        while at in known and at != read:
            marks = Marks.groups_in(_summary(known[at]), self._operation)
            found = {group: (digest, at) for group, digest in marks.items()} | found
            at = str(known.pop(at).parent_snapshot_id)
        return found

    def may_have(self, read: str, group: int, digest: str) -> bool:
        """Whether a snapshot may have the new files of a group, also one that is not an ancestor of the current one.

        Each snapshot has the next sequence number. So it shows whether one was expired since ``read``, whose files
        later snapshots have. In format version 1 nothing does.
        """
        known = {str(one.snapshot_id): one for one in self._metadata.snapshots}
        start = (known[read].sequence_number or 0) if read in known else 0
        if not start or self._lacks_snapshots_since(start):
            return True
        later = [one for one in known.values() if (one.sequence_number or 0) > start]
        return any(Marks.groups_in(_summary(one), self._operation).get(group) == digest for one in later)

    def _lacks_snapshots_since(self, start: int) -> bool:
        """Whether a snapshot with a sequence number above this one was expired."""
        later = [one for one in self._metadata.snapshots if (one.sequence_number or 0) > start]
        return len(later) != _last_sequence(self._metadata) - start

    def status(self, removed: Sequence[str], read: str, sequence: int, group: int, digest: str) -> GroupStatus:
        """The status of a group.

        ``sequence``: the table's last sequence number when the group was read; 0 in format version 1. ``digest``: of
        its new files, "" for a group of a plan.
        """
        live = all(path in self._live for path in removed)
        if not live and (done := self.groups_since(read).get(group)) is not None:
            return GroupStatus.COMMITTED if digest in ("", done[0]) else GroupStatus.REPLACED
        if self._rolled_back(sequence, group):
            return GroupStatus.ROLLED_BACK
        if not live:
            return GroupStatus.REMOVED
        if not is_ancestor(self._metadata, read):
            return GroupStatus.DIVERGED
        if digest and sequence and self._lacks_snapshots_since(sequence):
            # One of them may have had these new files, which whoever expired it deletes.
            return GroupStatus.DIVERGED
        if read not in self._deletes:
            self._deletes[read] = new_position_deletes(self._metadata, self._io, read, self._check)
        deletes = self._deletes[read]
        if deletes is None or any(one.applies_to(path) for one in deletes for path in removed):
            return GroupStatus.DELETED
        return GroupStatus.PENDING

    def _rolled_back(self, sequence: int, group: int) -> bool:
        """Whether a snapshot of this operation has replaced a group, and is not before the current one.

        Without sequence numbers, one of an earlier operation of the same name counts as well.
        """
        if self._reverted is None:
            known = {str(one.snapshot_id): one for one in self._metadata.snapshots}
            for one in ancestors(self._metadata):
                known.pop(one, None)
            self._reverted = {}
            for snapshot in known.values():
                for number in Marks.groups_in(_summary(snapshot), self._operation):
                    newest = max(self._reverted.get(number, 0), snapshot.sequence_number or 0)
                    self._reverted[number] = newest
        return group in self._reverted and (not sequence or self._reverted[group] > sequence)


class _StagedTable:
    """The staging table of a stage, as a commit reads it."""

    def __init__(self, stage: StagedFiles, group: int) -> None:
        self._stage = stage
        self._group = group

    def metadata(self) -> tuple[MetadataFile, list[str]]:
        """The metadata file of the staging table, and its manifests. Raises UnsafePath and InvalidArgument."""
        from distop.storage.location import Location

        deletion.check_own(self._stage.place)
        location = _location(self._stage)
        name = current_metadata_file(Location.of(location)).rpartition("/")[2]
        found = store_of(self._stage.place).head(f"{TABLE}/metadata/{name}")
        file = read_file(f"{self._stage.place.location}/{found.key}")
        return file, check_staged(file, self._stage.data.location)

    def check_file(self, path: str) -> None:
        """Raises UnsafePath for a data file that is outside this stage or a link, StagedFileLost if it is missing."""
        found, folder = normal_form(path), f"{normal_form(self._stage.data.location)}/"
        if not found.startswith(folder):
            raise UnsafePath(f"the staging table has the file {path}, which is not in {folder}: nothing was changed")
        try:
            store_of(self._stage.data).head(found.removeprefix(folder))
        except ObjectMissing as error:
            raise StagedFileLost(self._group, f"the new file {path} is missing before its commit") from error


def _has_row_ids(raw: Mapping[str, Any]) -> bool:
    """Whether the rows of the current snapshot have ids: after an upgrade, those of its next commit are the first."""
    current = raw.get("current-snapshot-id")
    return any(one["snapshot-id"] == current and "first-row-id" in one for one in raw.get("snapshots", ()))


def _of_data(manifests: Sequence[Any]) -> list[Any]:
    from pyiceberg.manifest import ManifestContent

    return [manifest for manifest in manifests if manifest.content == ManifestContent.DATA]


def _of_deletes(manifests: Sequence[Any]) -> list[Any]:
    from pyiceberg.manifest import ManifestContent

    return [manifest for manifest in manifests if manifest.content != ManifestContent.DATA]


def _read_snapshot(plan: PartitionPlan) -> str:
    """The id of the snapshot that a plan was read from; "" if there was none."""
    current = read_metadata(plan.source)[0].current_snapshot()
    return str(current.snapshot_id) if current is not None else ""


def _last_sequence(metadata: Any) -> int:
    """The sequence number of the newest snapshot; 0 in format version 1, which has none."""
    return int(getattr(metadata, "last_sequence_number", 0) or 0)


def _summary(snapshot: Any) -> Mapping[str, Any]:
    return dict(snapshot.summary.additional_properties) if snapshot.summary is not None else {}
