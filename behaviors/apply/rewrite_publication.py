"""Narrowing by a rewrite: each job writes its partition's files anew, and completion publishes all of them at once.

What a job has staged counts as long as the files that it was made of are in the table as they were, with the deletes
that they had. What came since, or changed, is validated and rewritten by the completion, which then commits everything,
with the schema, on exactly the metadata that it has compared with. Whoever began before that commit and ends after it
adds files without the new columns: these are rewritten in turn.
"""

from __future__ import annotations

import json
import uuid
from time import monotonic
from typing import TYPE_CHECKING, Any

from distop.behavior import JobFailed
from distop.errors import InvalidArgument, UnsafePath
from distop.protocol.frozen import frozen
from distop.protocol.records import OperationRef
from distop.storage import deletion, places
from distop.storage.files import local_path
from distop.tables import plan_table
from distop.tables.iceberg.iceberg_changes import equality_ids, new_files, replaced_files
from distop.tables.iceberg.iceberg_format import NO_SNAPSHOT, place_of, plan_metadata, read_metadata
from distop.tables.iceberg.iceberg_version import IcebergVersion
from distop.tables.iceberg.table_properties import NAME_MAPPING
from distop.tables.table_options import check_options
from distop_behaviors.apply import file_rewrite, type_narrowing
from distop_behaviors.apply.apply_loop import MARK, ROUNDS, Applying, digest_of_mark
from distop_behaviors.apply.apply_report import Outcome, Rewritten, Staged
from distop_behaviors.apply.file_rewrite import Stage
from distop_behaviors.apply.schema_target import Moved, Rewrite, Unsure
from distop_behaviors.validate.certification import check_columns, check_table

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from distop.behavior import JobContext, PartitionPlan, Summary, TableRecord
    from distop.storage.deletion import Place
    from distop.tables.reading.file_facts import PlannedFile
    from distop_behaviors.apply.apply_report import Request
    from distop_behaviors.apply.schema_target import Head, Target

_LOOK_EVERY = 1.0
_NOTHING = ""
"""The snapshot of which no row has been looked at."""


@frozen
class _Unit:
    """What was staged, of which files, as they were in which snapshot."""

    staged: Staged
    stage: Stage
    files: frozenset[str]
    snapshot: str


class Narrowing(Applying):
    """One job, or the completion, of an application that rewrites its table."""

    def __init__(self, request: Request, table: TableRecord, target: Target, ctx: JobContext) -> None:
        super().__init__(request, table, target, ctx)
        self._narrowed = type_narrowing.needed(self._wanted.narrowed, self._certificate)
        self._folder: str | None = None
        self._announced_here: list[str] = []
        """The marks that this completion was about to write."""

    def check(self, metadata: Any, io: Any) -> None:
        """Raises InvalidArgument where this table cannot be rewritten so, TableUnavailable where it cannot be read."""
        check_columns(self._certificate, IcebergVersion("", metadata))
        type_narrowing.check_narrowable(metadata, self._narrowed)
        deletes = equality_ids(metadata, io, self._ctx.check_cancelled)
        type_narrowing.check_no_equality_deletes(deletes, self._narrowed)

    # --------------------------------------------------------------------- job

    def stage(self, plan: PartitionPlan) -> Outcome:
        """Write the files of a partition anew, after a look at those that the certificate does not cover. Raises
        JobFailed, with an outcome, where a row is in the way.
        """
        check_table(self._certificate, self._table)
        stage = self._stage_at(self._ctx.stage_place)
        # Whether it can be rewritten was looked at when this metadata was planned from.
        metadata, io = read_metadata(plan.source)
        self._validate(metadata, io, plan.source, plan.files)
        ids = type_narrowing.new_ids(metadata, self._narrowed)
        self._ctx.stage_of(plan)  # made by this attempt
        self.outcome.staged = self._written_anew(plan.source, plan.files, ids, stage)
        self.outcome.verdict = "staged"
        return self.outcome

    def discard(self) -> None:
        """Remove what this attempt has staged, unless it was published."""
        stage = self._stage_at(self._ctx.stage_place)
        file_rewrite.discard(stage, self._live() if stage.begun() else frozenset(), self._ctx.log)

    # -------------------------------------------------------------- completion

    def publish(self, summary: Summary) -> Outcome:
        """Commit what the jobs have staged. Raises as :meth:`Applying.run` does; the outcome of a change that stands
        although it fails says so.
        """
        source = next(plan.source for plan in summary.partitions())
        pinned = read_metadata(source)[0]
        units = self._units(summary, pinned)
        while self.outcome.rounds < ROUNDS:
            self._ctx.check_cancelled()
            head = self.load()
            mark = self._mark(head)
            if mark is not None:
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
                    "the table's schema was changed by somebody else since it was planned: nothing was changed; start "
                    "it again",
                    self.outcome,
                )
            units = self._brought_up(head, metadata, io, units)
            self._commit_units(head, metadata, units)
        raise JobFailed(
            f"another writer was first {ROUNDS} times: nothing was changed; try again when fewer write to the table",
            self.outcome,
        )

    def sweep(self) -> None:
        """Remove what all attempts have staged, and those of earlier operations, but for the data files that are the
        table's. What cannot be removed is logged, and left to the next operation.
        """
        if self._ctx.shared is None or local_path(self._ctx.shared.location) is None:
            return  # nothing could be staged
        series, log = places.series_of(self._ctx.shared, self._ctx.operation), self._ctx.log
        mine, live = OperationRef.parse(self._ctx.operation).instance, None
        try:
            for instance in places.instances(series, mine):
                for place in file_rewrite.stages_below(series.below(str(instance))):
                    live = self._live() if live is None else live
                    file_rewrite.discard(self._stage_at(place), live, log)
                self._remove_emptied(series.below(str(instance)))
        except (OSError, UnsafePath) as error:
            log.warning("Could not remove what is staged in %s: %s", series.location, error)

    @staticmethod
    def _remove_emptied(operation: Place) -> None:
        for name in deletion.names(operation):
            deletion.delete(operation, name, only_empty=True)
        deletion.delete(operation.parent, operation.name, only_empty=True)

    def _shared(self) -> Place:
        shared = self._ctx.shared
        if shared is None or local_path(shared.location) is None:
            where = "there is none" if shared is None else f"this one is {shared.location}"
            raise InvalidArgument(f"a table is rewritten with a shared directory on a disk, and {where}")
        return shared

    def _stage_at(self, place: Place) -> Stage:
        if self._folder is None:
            location = place_of(self._table, self._ctx.check_cancelled, lambda: self._ctx.spark)
            folder = local_path(location)
            if folder is None:
                raise InvalidArgument(f"a table is rewritten on a local path, and this one lies at {location}")
            self._folder = str(folder)
        return Stage.of(place, self._shared(), self._ctx.space, self._folder)

    def _units(self, summary: Summary, metadata: Any) -> list[_Unit]:
        """What executors have staged, as the stages themselves say. A job whose stage is missing, or was made of other
        files, is left out: the completion does its work. Raises InvalidArgument for one that was made for another
        argument.
        """
        stages = {row.partition: row.stage for row in summary.outcomes() if row.success}
        ids = type_narrowing.new_ids(metadata, self._narrowed)
        wanted_for = file_rewrite.made_for(self._certificate.digest, self._narrowed)
        units, covered = [], set[str]()
        for plan in summary.partitions():
            files = frozenset(path for path, _, _ in plan.files)
            if not files or plan.partition not in stages:
                continue
            place, found = stages[plan.partition], None
            if place is not None:
                stage = self._stage_at(place)
                now = metadata.current_schema_id, metadata.last_column_id
                found = file_rewrite.written_in(stage, files, *now, ids, wanted_for)
            if found is None:
                self._ctx.log.warning("Partition %s is written again: no executor has staged its files", plan.name)
                continue
            staged, snapshot = found
            if not covered.isdisjoint(files):
                raise InvalidArgument(f"the plan of {self._ctx.operation} has files of partition {plan.name} twice")
            covered |= files
            units.append(_Unit(staged, stage, files, snapshot))
        return units

    def _live(self) -> frozenset[str]:
        planned = plan_table(self._table)
        return file_rewrite.live_files(path for partition in planned.partitions for path, _, _ in partition.files)

    def _files(self, head: Head) -> list[PlannedFile]:
        options = check_options(self._table.options, "iceberg")
        planned = plan_metadata(head.source, self._table, options, self._ctx.check_cancelled)
        return [file for partition in planned.partitions for file in partition.files]

    def _validate(self, metadata: Any, io: Any, source: str, files: Sequence[PlannedFile]) -> None:
        new = new_files(metadata, io, self._certificate.version, self._ctx.check_cancelled)
        paths = None if new is None else {path for path, _, _ in new}
        self.judge_files(source, [f for f in files if paths is None or f[0] in paths], _snapshot(metadata))

    def _written_anew(self, source: str, files: Sequence[PlannedFile], ids: Mapping[int, int], stage: Stage) -> Staged:
        """What :func:`file_rewrite.stage` wrote. Raises JobFailed, with an outcome, where it is not all rows."""
        try:
            return file_rewrite.stage(self._ctx, source, files, self._narrowed, ids, stage, self._certificate.digest)
        except file_rewrite.RowsLost as error:
            self.outcome.verdict = "error"
            raise JobFailed(str(error), self.outcome) from error

    def _scratch(self) -> Stage:
        operation = f"{places.STAGE}/{places.operation_path(self._ctx.operation)}"
        stage = self._stage_at(places.staging(self._shared()).below(f"{operation}/completion/{uuid.uuid4().hex}"))
        deletion.make_new(stage.place)
        return stage

    def _brought_up(self, head: Head, metadata: Any, io: Any, units: Sequence[_Unit]) -> list[_Unit]:
        """The units that still count, and one of everything else that is in the table."""
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
            stage = self._scratch()
            staged = self._written_anew(head.source, rest, ids, stage)
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
        raw = file_rewrite.raw_metadata(self._ctx.spark, head.source)

        def told(snapshot: str) -> Mapping[str, str | None]:
            text = json.dumps({**mark, "snapshot": snapshot}, ensure_ascii=False, sort_keys=True)
            self._announced_here.append(digest_of_mark(text))
            return {**properties, MARK: text}

        self._ctx.status("changing the schema, and the files with it")
        rewrite = Rewrite(
            schema=type_narrowing.new_schema(file_rewrite.schema_of(raw), self._narrowed, ids, required),
            staged=[unit.stage for unit in units],
            replaced=None,
            properties=told,
        )
        self._rewrite(head, rewrite)

    def _rewrite(self, head: Head, rewrite: Rewrite) -> None:
        try:
            self._target.rewrite(head, rewrite)
        except (Moved, Unsure) as error:
            self._ctx.log.info("the table was not changed yet: %s", error)

    def _properties(self, head: Head, ids: Mapping[int, int]) -> dict[str, str]:
        found = {}
        for name, value in self._wanted.properties.items():
            told = json.loads(value)
            told["field_ids"] = {column: ids.get(i, i) for column, i in told["field_ids"].items()}
            found[name] = json.dumps(told, ensure_ascii=False, sort_keys=True)
        mapping = type_narrowing.mapped(head.properties.get(NAME_MAPPING), ids)
        return found | ({NAME_MAPPING: mapping} if mapping is not None else {})

    # ------------------------------------------------------------------- marks

    def _announced(self) -> list[str]:
        return self._announced_here

    def _is_own(self, head: Head) -> bool:
        return super()._mark(head) is not None

    def _mark(self, head: Head) -> Mapping[str, Any] | None:
        """The mark of this completion; or one that may be of an earlier one, which left no checkpoint, if the table is
        what it says. Anybody may have written the latter: it covers no row, and nothing is taken back by it.
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
            former = file_rewrite.schema_of(json.loads(metadata.model_dump_json()), int(mark["schema"]))
            ids = {int(old): int(new) for old, new in mark["narrowed"].items()}
            whole = isinstance(mark["required"], list) and isinstance(mark["properties"], dict)
            stands = whole and not self._undone(head, metadata, ids)
        except (ValueError, LookupError, TypeError, AttributeError, StopIteration):
            return None
        return mark if stands and {one.id for one in self._narrowed} <= {f["id"] for f in former["fields"]} else None

    def _undone(self, head: Head, metadata: Any, ids: Mapping[int, int]) -> list[str]:
        """What of the change is not in the table; ``ids``: of the columns, by the former ones."""
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
        """Rewrite what is still committed by those who began before the change: look at least once, and until so many
        seconds are over. Raises JobFailed where a row of it does not fit.
        """
        until = monotonic() + self._settle_seconds
        while self.outcome.rounds < ROUNDS + int(self._settle_seconds):
            last = monotonic() >= until
            head = self.load()
            metadata, io = read_metadata(head.source)
            self._check_narrowed(metadata, mark)
            clean = self._late(head, metadata, io, mark)
            if last and clean:
                self.outcome.snapshot = self._covered
                self.outcome.changes = self._made(mark)
                return
            self.outcome.rounds += not clean
            self._wait(min(_LOOK_EVERY, max(0.0, until - monotonic())) if clean else 0)
        raise JobFailed(
            f"the change stands, and others who began before it were first {ROUNDS} times: files without the new "
            "columns may be in the table; have them end, and apply again",
            self.outcome,
        )

    def _late(self, head: Head, metadata: Any, io: Any, mark: Mapping[str, Any]) -> bool:
        """Bring in what was written without the new columns; True: there was nothing of it."""
        found = new_files(metadata, io, self._covered, self._ctx.check_cancelled)
        files = self._files(head) if found is None else found
        ids = {int(old): int(new) for old, new in mark["narrowed"].items()}
        late = [file for file in files if not file_rewrite.has_fields(file[0], ids.values())]
        of_now = [file for file in files if file not in late]
        if not self.judge_files(head.source, of_now, _snapshot(metadata), current=head.source):
            return False
        if not late:
            self._covered = _snapshot(metadata)
            return True
        stage = self._scratch()
        view = file_rewrite.view(self._ctx, head.source, int(mark["schema"]), stage.place)
        try:
            if not self.judge_files(view, late, _snapshot(metadata), current=head.source):
                return False
            staged = self._written_anew(view, late, ids, stage)
        except JobFailed as failed:
            self.outcome.changes = self._made(mark)
            if self._taken_back(head, metadata, io, mark, late):
                self.outcome.reverted = True
                raise JobFailed(f"the change was taken back, since {failed}", self.outcome) from failed
            raise JobFailed(
                f"the change stands, and the rows of {late[0][0]} are not in its new column, since {failed}",
                self.outcome,
            ) from failed
        paths = frozenset(path for path, _, _ in late)
        self._rewrite(head, Rewrite(None, [stage] if staged.files else [], paths, lambda _: {}))
        assert self.outcome.rewritten is not None
        self.outcome.rewritten.late += len(late)
        return False

    def _taken_back(
        self, head: Head, metadata: Any, io: Any, mark: Mapping[str, Any], late: Sequence[PlannedFile]
    ) -> bool:
        """Go back to the snapshot before the change, with what came late, where nothing else was committed since."""
        since = str(mark["snapshot"])
        if not self._is_own(head):
            return False
        if {f[0] for f in new_files(metadata, io, since) or ()} != {f[0] for f in late}:
            return False
        if since != NO_SNAPSHOT and replaced_files(metadata, io, since) != frozenset():
            return False
        snapshot = None if mark["before"] == since else int(mark["before"])
        try:
            self._target.roll_back(
                head, int(mark["schema"]), snapshot, frozenset(f[0] for f in late), {**self._former(mark), MARK: None}
            )
        except (Moved, Unsure):
            return False
        return True

    def _check_narrowed(self, metadata: Any, mark: Mapping[str, Any]) -> None:
        """Raises InvalidArgument where somebody else has undone the change meanwhile."""
        ids = {int(old): int(new) for old, new in mark["narrowed"].items()}
        if undone := self._widened(metadata.schema(), ids):
            raise InvalidArgument(f"somebody else has undone the change meanwhile: {', '.join(undone)}")


def _snapshot(metadata: Any) -> str:
    current = metadata.current_snapshot()
    return str(current.snapshot_id) if current is not None else NO_SNAPSHOT
