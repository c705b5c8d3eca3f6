"""Narrowing by a rewrite: each job rewrites the files of its partition, and completion publishes all of them.

Staged files are valid as long as the table still has the source files, unchanged and with the same deletes. The
completion validates and rewrites newer or changed files. Then it commits all files and the schema, as a
compare-and-swap on the metadata that it has read. Writers that started before this commit and end after it add files
without the new columns; these are rewritten, too.
"""

from __future__ import annotations

import json
from time import monotonic
from typing import TYPE_CHECKING, Any

from distop.behavior import JobFailed
from distop.errors import InvalidArgument, NotFound, UnreadableRecord, UnsafePath, describe
from distop.protocol.frozen import frozen
from distop.storage.files import local_path
from distop.storage.stage_manifest import read_manifest
from distop.tables import reachability_of
from distop.tables.commits import CommitUnknown, Conflict
from distop.tables.iceberg import iceberg_format, staging_table
from distop.tables.iceberg.iceberg_changes import equality_ids, new_files, replaced_files
from distop.tables.iceberg.iceberg_version import IcebergVersion
from distop.tables.iceberg.metadata_file import read_metadata
from distop.tables.iceberg.new_metadata import Rewrite
from distop.tables.iceberg.snapshot_plan import NO_SNAPSHOT, plan_metadata
from distop.tables.iceberg.table_properties import NAME_MAPPING
from distop.tables.table_options import check_options
from distop_behaviors.apply import file_rewrite, staged_files, type_narrowing
from distop_behaviors.apply.apply_loop import MARK, ROUNDS, TOO_MANY_WRITERS, Applying, digest_of_mark
from distop_behaviors.apply.apply_report import ApplyOutcome, Rewritten, Staged
from distop_behaviors.apply.staged_files import StageFolders
from distop_behaviors.validate.certification import check_columns, check_table

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from distop.behavior import JobContext, OutcomeRow, PartitionPlan, Summary, TableRecord
    from distop.storage.deletion import Place
    from distop.tables.commits import Head
    from distop.tables.reading.file_facts import PlannedFile
    from distop_behaviors.apply.apply_report import CertifiedArgument
    from distop_behaviors.apply.schema_target import RewriteTarget

_CHECK_EVERY = 1.0
_NOTHING = ""
"""The snapshot id for: no row is validated yet."""


@frozen
class _Unit:
    """Staged files, with their source files and the snapshot these were read from."""

    staged: Staged
    stage: StageFolders
    files: frozenset[str]
    snapshot: str


class Narrowing(Applying):
    """One job, or the completion, of an ``apply`` that rewrites its table."""

    def __init__(self, request: CertifiedArgument, table: TableRecord, target: RewriteTarget, ctx: JobContext) -> None:
        super().__init__(request, table, target, ctx)
        self._rewritable = target
        self._narrowed = type_narrowing.columns_to_narrow(self._wanted.narrowed, self._certificate)
        self._folder: str | None = None
        self._announced_here: list[str] = []
        """The digests of the marks that this completion has announced."""
        self._committed: Sequence[_Unit] = ()
        """The units of the last commit that this completion has tried."""

    def check(self, metadata: Any, io: Any) -> None:
        """Raises InvalidArgument if the table cannot be rewritten, TableUnavailable if it cannot be read."""
        check_columns(self._certificate, IcebergVersion("", metadata))
        type_narrowing.check_narrowable(metadata, self._narrowed)
        deletes = equality_ids(metadata, io, self._ctx.check_cancelled)
        type_narrowing.check_no_equality_deletes(deletes, self._narrowed)

    # --------------------------------------------------------------------- job

    def stage(self, plan: PartitionPlan) -> ApplyOutcome:
        """Rewrite the files of a partition, after validating those that the certificate does not cover.

        Raises JobFailed, with an outcome, if a row violates a check.
        """
        check_table(self._certificate, self._table)
        self._ctx.stage_of(plan)  # creates the stage of this attempt
        stage = self._stage_at(self._ctx.stage_place_of(plan))
        # Planning has checked that this metadata can be rewritten.
        metadata, io = read_metadata(plan.source)
        self._validate(metadata, io, plan.source, plan.files)
        ids = type_narrowing.new_ids(metadata, self._narrowed)
        staged = self._rewrite_files(plan.source, plan.files, ids, stage)
        if plan.files:
            names, rows = file_rewrite.files_in(stage, self._ctx.check_cancelled)
            # Iceberg has counted the rows of the large files, and checks them when it reads them.
            output = self._ctx.manifest(names, partition=plan, in_table=rows, checksums=False)
            staged = staged.model_copy(update={"output": output})
        self.outcome.staged = staged
        self.outcome.verdict = "staged"
        return self.outcome

    def discard(self) -> None:
        """Remove the files that this attempt has staged, unless they are published."""
        stage = self._stage_at(self._ctx.stage_place)
        staged_files.discard(stage, self._live() if stage.begun() else frozenset(), self._ctx.log)

    # -------------------------------------------------------------- completion

    def publish(self, summary: Summary) -> ApplyOutcome:
        """Commit the files that the jobs have staged, and return the outcome.

        Raises the errors of :meth:`Applying.run`. If it fails after the change, the outcome has the change.
        """
        source = next(plan.source for plan in summary.partitions())
        pinned = read_metadata(source)[0]
        units = self._units(summary, pinned)
        while self.outcome.rounds < ROUNDS:
            self._ctx.check_cancelled()
            head = self.load()
            mark = self._mark(head)
            if mark is not None:
                if self._is_own(head):
                    self._keep_published()
                self._covered = str(mark["snapshot"]) if self._is_own(head) else _NOTHING
                self.outcome.rewritten = Rewritten.model_validate(mark["rewritten"])
                self.settle(mark)
                self.outcome.verdict = "applied"
                return self.outcome
            self.outcome.rounds += 1
            metadata, io = read_metadata(head.source)
            self.check(metadata, io)
            if (metadata.current_schema_id, metadata.last_column_id) != (
                pinned.current_schema_id,
                pinned.last_column_id,
            ):
                raise JobFailed(
                    "another writer has changed the table's schema since planning, so nothing was changed: start a new "
                    "operation",
                    self.outcome,
                )
            units = self._current_units(head, metadata, io, units)
            self._commit_units(head, metadata, units)
        raise JobFailed(TOO_MANY_WRITERS, self.outcome)

    def _shared(self) -> Place:
        if self._ctx.shared is None:
            raise InvalidArgument("rewriting a table needs a shared directory, but there is none: set --shared-dir")
        return self._ctx.shared

    def _stage_at(self, place: Place) -> StageFolders:
        return StageFolders.of(place, self._shared(), self._ctx.space, self._table_folder())

    def _table_folder(self) -> str:
        """The table's folder. Raises InvalidArgument if it is neither on a disk nor in S3."""
        if self._folder is None:
            location = iceberg_format.FORMAT.place_of(self._table, self._ctx.check_cancelled, lambda: self._ctx.spark)
            type_narrowing.check_rewritable(location)
            folder = local_path(location)
            self._folder = location.rstrip("/") if folder is None else str(folder)
        return self._folder

    def _units(self, summary: Summary, metadata: Any) -> list[_Unit]:
        """The staged files of the jobs, according to their stages.

        A job is left out if its stage is missing, has other source files, or is not as its outcome has committed it:
        the completion rewrites its files. Raises InvalidArgument for a stage that was written for another argument.
        """
        outcomes = {row.partition: row for row in summary.outcomes() if row.success}
        ids = type_narrowing.new_ids(metadata, self._narrowed)
        wanted_for = staged_files.purpose_of(self._certificate.digest, self._narrowed)
        units, covered = [], set[str]()
        for plan in summary.partitions():
            files = frozenset(path for path, _, _ in plan.files)
            if not files or plan.partition not in outcomes:
                continue
            outcome, found = outcomes[plan.partition], None
            if outcome.stage is not None and self._is_whole(outcome):
                stage = self._stage_at(outcome.stage)
                now = metadata.current_schema_id, metadata.last_column_id
                found = staged_files.staged_data(stage, files, *now, ids, wanted_for)
            if found is None:
                self._ctx.log.warning("No valid staged files of partition %s; rewriting its files again", plan.name)
                continue
            staged, snapshot = found
            if not covered.isdisjoint(files):
                raise InvalidArgument(
                    f"the plan of {self._ctx.operation} has files of partition {plan.name} in two partitions"
                )
            covered |= files
            units.append(_Unit(staged, stage, files, snapshot))
        return units

    def _is_whole(self, outcome: OutcomeRow) -> bool:
        """Whether a stage has exactly the files that the job's outcome has committed."""
        try:
            output = ApplyOutcome.model_validate(outcome.result).staged
            if output is None or output.output is None:
                return False
            assert outcome.stage is not None
            manifest = read_manifest(outcome.stage, output.output, self._stage_at(outcome.stage).data)
            for file in manifest.files:
                self._ctx.check_cancelled()
                manifest.check(file, contents=not file.in_table)
        except (ValueError, NotFound, UnreadableRecord, UnsafePath) as error:
            self._ctx.log.warning("The staged files of partition %s are not usable: %s", outcome.name, describe(error))
            return False
        return True

    def _keep_published(self) -> None:
        """Keep the data files of the stages that this completion has committed."""
        for unit in self._committed:
            try:
                self._ctx.keep_table_data(unit.stage.place)
            except (OSError, InvalidArgument) as error:
                self._ctx.log.info("The table is read later to find its staged files: %s", describe(error))
        self._committed = ()

    def _live(self) -> frozenset[str]:
        """The folders with files of any version of the table."""
        files = reachability_of(self._table, self._ctx.check_cancelled, lambda: self._ctx.spark).all_files(removed=True)
        return staged_files.live_folders(file.path for file in files)

    def _files(self, head: Head) -> list[PlannedFile]:
        options = check_options(self._table.options, "iceberg")
        planned = plan_metadata(head.source, self._table, options, self._ctx.check_cancelled)
        return [file for partition in planned.partitions for file in partition.files]

    def _validate(self, metadata: Any, io: Any, source: str, files: Sequence[PlannedFile]) -> None:
        new = new_files(metadata, io, self._certificate.version, self._ctx.check_cancelled)
        paths = None if new is None else {path for path, _, _ in new}
        self.judge_files(source, [f for f in files if paths is None or f[0] in paths], _snapshot(metadata))

    def _rewrite_files(
        self, source: str, files: Sequence[PlannedFile], ids: Mapping[int, int], stage: StageFolders
    ) -> Staged:
        """Rewrite files by :func:`file_rewrite.stage`. Raises JobFailed, with an outcome, if rows are missing."""
        try:
            return file_rewrite.stage(self._ctx, source, files, self._narrowed, ids, stage, self._certificate.digest)
        except staging_table.RowsLost as error:
            self.outcome.verdict = "error"
            raise JobFailed(str(error), self.outcome) from error

    def _new_stage(self) -> StageFolders:
        return self._stage_at(self._ctx.completion_stage())

    def _current_units(self, head: Head, metadata: Any, io: Any, units: Sequence[_Unit]) -> list[_Unit]:
        """The units that are still valid, and a new one for all other files of the table."""
        changed = {
            snapshot: replaced_files(metadata, io, snapshot, self._ctx.check_cancelled)
            for snapshot in {unit.snapshot for unit in units}
        }
        kept = []
        for unit in units:
            of_unit = changed[unit.snapshot]
            if of_unit is not None and not unit.files & of_unit:
                kept.append(unit)
        covered = frozenset[str]().union(*(unit.files for unit in kept))
        rest = [file for file in self._files(head) if file[0] not in covered]
        if rest:
            self._validate(metadata, io, head.source, rest)
            ids = type_narrowing.new_ids(metadata, self._narrowed)
            stage = self._new_stage()
            staged = self._rewrite_files(head.source, rest, ids, stage)
            kept.append(_Unit(staged, stage, frozenset(path for path, _, _ in rest), _snapshot(metadata)))
        return kept

    def _commit_units(self, head: Head, metadata: Any, units: Sequence[_Unit]) -> None:
        schema = metadata.schema()
        ids = type_narrowing.new_ids(metadata, self._narrowed)
        required = [i for i in self._required().values() if not schema.find_field(i).required]
        units = [unit for unit in units if unit.staged.files]
        written = [unit.staged for unit in units]
        properties = self._properties(head, ids)
        mark = {
            "operation": self._ctx.operation,
            "certificate": self._certificate.digest,
            "before": _snapshot(metadata),
            "schema": metadata.current_schema_id,
            "narrowed": {str(old): new for old, new in ids.items()},
            "required": required,
            "properties": {n: head.properties.get(n) for n, v in properties.items() if head.properties.get(n) != v},
            "rewritten": {
                "files": sum(s.files for s in written),
                "rows": sum(s.rows for s in written),
                "bytes": sum(s.bytes for s in written),
            },
        }
        raw = staging_table.raw_metadata(self._ctx.spark, head.source)

        def with_mark(snapshot: str) -> Mapping[str, str | None]:
            text = json.dumps({**mark, "snapshot": snapshot}, ensure_ascii=False, sort_keys=True)
            self._announced_here.append(digest_of_mark(text))
            return {**properties, MARK: text}

        self._ctx.status("committing the new schema and files")
        rewrite = Rewrite(
            schema=type_narrowing.new_schema(staging_table.schema_of(raw), self._narrowed, ids, required),
            staged=[unit.stage for unit in units],
            replaced=None,
            properties=with_mark,
        )
        self._committed = units
        self._rewrite(head, rewrite)

    def _rewrite(self, head: Head, rewrite: Rewrite) -> None:
        try:
            self._rewritable.rewrite(head, rewrite)
        except (Conflict, CommitUnknown) as error:
            self._ctx.log.info("Could not commit the rewrite; loading the table again: %s", error)

    def _properties(self, head: Head, ids: Mapping[int, int]) -> dict[str, str]:
        found = {}
        for name, value in self._wanted.properties.items():
            content = json.loads(value)
            content["field_ids"] = {column: ids.get(i, i) for column, i in content["field_ids"].items()}
            found[name] = json.dumps(content, ensure_ascii=False, sort_keys=True)
        mapping = type_narrowing.new_name_mapping(head.properties.get(NAME_MAPPING), ids)
        return found | ({NAME_MAPPING: mapping} if mapping is not None else {})

    # ------------------------------------------------------------------- marks

    def _announced(self) -> list[str]:
        return self._announced_here

    def _is_own(self, head: Head) -> bool:
        return super()._mark(head) is not None

    def _mark(self, head: Head) -> Mapping[str, Any] | None:
        """The mark of this completion, or of an earlier attempt if the table has its change.

        A completion has no checkpoint, so a mark of an earlier attempt may be forged. It proves nothing about rows, and
        nothing is reverted because of it.
        """
        if (own := super()._mark(head)) is not None:
            return own
        try:
            mark = json.loads(head.properties.get(MARK, "null"))
            mine = {"operation": self._ctx.operation, "certificate": self._certificate.digest}
            if not isinstance(mark, dict) or not mine.items() <= mark.items():
                return None
            Rewritten.model_validate(mark["rewritten"])
            metadata = read_metadata(head.source)[0]
            former = staging_table.schema_of(json.loads(metadata.model_dump_json()), int(mark["schema"]))
            ids = {int(old): int(new) for old, new in mark["narrowed"].items()}
            whole = isinstance(mark["required"], list) and isinstance(mark["properties"], dict)
            stands = whole and not self._undone(head, metadata, ids)
        except (ValueError, LookupError, TypeError, AttributeError, StopIteration):
            return None
        return mark if stands and {one.id for one in self._narrowed} <= {f["id"] for f in former["fields"]} else None

    def _undone(self, head: Head, metadata: Any, ids: Mapping[int, int]) -> list[str]:
        """The parts of the change that the table does not have. ``ids``: new field ids by old ones."""
        schema = metadata.schema()
        undone = self._widened(schema, ids)
        for field_id in self._required().values():
            name = schema.find_column_name(ids.get(field_id, field_id))
            if name is None or not schema.find_field(ids.get(field_id, field_id)).required:
                undone.append(str(name))
        wanted = self._properties(head, ids)
        return undone + [name for name, value in wanted.items() if head.properties.get(name) != value]

    def _widened(self, schema: Any, ids: Mapping[int, int]) -> list[str]:
        """The columns that do not have their new types."""
        names = {one.id: schema.find_column_name(ids[one.id]) for one in self._narrowed}
        return [
            one.name
            for one in self._narrowed
            if names[one.id] is None or str(schema.find_field(ids[one.id]).field_type) != one.type
        ]

    # ------------------------------------------------------------------ settle

    def settle(self, mark: Mapping[str, Any]) -> None:
        """Rewrite late commits, of writers that started before the change, until ``settle_seconds`` have passed.

        It checks at least once. Raises JobFailed if a row of a late commit violates a check.
        """
        until = monotonic() + self._settle_seconds
        while self.outcome.rounds < ROUNDS + int(self._settle_seconds):
            last = monotonic() >= until
            head = self.load()
            metadata, io = read_metadata(head.source)
            self._check_narrowed(metadata, mark)
            clean = self._rewrite_late_files(head, metadata, io, mark)
            if last and clean:
                self.outcome.snapshot = self._covered
                self.outcome.changes = self._changes_made(mark)
                return
            self.outcome.rounds += not clean
            self._wait(min(_CHECK_EVERY, max(0.0, until - monotonic())) if clean else 0)
        raise JobFailed(
            "the change was committed, but writers that started before it keep adding files without the new columns: "
            "stop them, and apply again",
            self.outcome,
        )

    def _rewrite_late_files(self, head: Head, metadata: Any, io: Any, mark: Mapping[str, Any]) -> bool:
        """Rewrite files without the new columns; returns whether there were none."""
        found = new_files(metadata, io, self._covered, self._ctx.check_cancelled)
        files = self._files(head) if found is None else found
        ids = {int(old): int(new) for old, new in mark["narrowed"].items()}
        late = [file for file in files if not file_rewrite.has_fields(file[0], ids.values())]
        current = [file for file in files if file not in late]
        if not self.judge_files(head.source, current, _snapshot(metadata), current=head.source):
            return False
        if not late:
            self._covered = _snapshot(metadata)
            return True
        stage = self._new_stage()
        view = file_rewrite.view(self._ctx, head.source, int(mark["schema"]), stage.place)
        try:
            if not self.judge_files(view, late, _snapshot(metadata), current=head.source):
                return False
            staged = self._rewrite_files(view, late, ids, stage)
        except JobFailed as failed:
            self.outcome.changes = self._changes_made(mark)
            if self._rolled_back(head, metadata, io, mark, late):
                self.outcome.reverted = True
                raise JobFailed(f"the change was reverted: {failed}", self.outcome) from failed
            raise JobFailed(
                f"the change was committed, but the rows of {late[0][0]} are missing in the new column: {failed}",
                self.outcome,
            ) from failed
        paths = frozenset(path for path, _, _ in late)
        self._rewrite(head, Rewrite(None, [stage] if staged.files else [], paths, lambda _: {}))
        assert self.outcome.rewritten is not None
        self.outcome.rewritten.late += len(late)
        return False

    def _rolled_back(
        self, head: Head, metadata: Any, io: Any, mark: Mapping[str, Any], late: Sequence[PlannedFile]
    ) -> bool:
        """Roll back to the snapshot before the change, with the late files. False if others have committed more."""
        since = str(mark["snapshot"])
        if not self._is_own(head):
            return False
        if {f[0] for f in new_files(metadata, io, since) or ()} != {f[0] for f in late}:
            return False
        if since != NO_SNAPSHOT and replaced_files(metadata, io, since) != frozenset():
            return False
        snapshot = None if mark["before"] == since else int(mark["before"])
        try:
            self._rewritable.roll_back(
                head,
                int(mark["schema"]),
                snapshot,
                frozenset(f[0] for f in late),
                {**self._old_properties(mark), MARK: None},
            )
        except (Conflict, CommitUnknown):
            return False
        return True

    def _check_narrowed(self, metadata: Any, mark: Mapping[str, Any]) -> None:
        """Raises InvalidArgument if another writer has reverted the change."""
        ids = {int(old): int(new) for old, new in mark["narrowed"].items()}
        if undone := self._widened(metadata.schema(), ids):
            raise InvalidArgument(f"another writer has reverted the change of {', '.join(undone)}: apply again")


def _snapshot(metadata: Any) -> str:
    current = metadata.current_snapshot()
    return str(current.snapshot_id) if current is not None else NO_SNAPSHOT
