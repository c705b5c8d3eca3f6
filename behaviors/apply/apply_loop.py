"""The loop of ``apply``: validate files that the certificate does not cover, swap the schema, validate again.

The swap is a compare-and-swap on the metadata that was validated. Each step may be repeated after a crash. The swap
also writes a mark, a property of the table: which operation made the change, on which snapshot, and the old values.
Every writer of the table can write such a mark, so a mark counts only if the job's checkpoint, which its claim in etcd
fences, has announced it before the swap.
"""

from __future__ import annotations

import hashlib
import json
from time import monotonic, sleep
from typing import TYPE_CHECKING, Any

from distop.behavior import JobFailed, PartitionPlan
from distop.errors import InvalidArgument
from distop.protocol.texts import plural
from distop.tables import reader_of
from distop.tables.commits import CommitUnknown, Conflict
from distop.tables.iceberg.table_properties import NAME_MAPPING
from distop_behaviors.apply.apply_report import ApplyOutcome, Made, checks_of
from distop_behaviors.apply.constraints import column_of, schema_changes
from distop_behaviors.apply.schema_target import SchemaChange, rules_of
from distop_behaviors.validate.batch import PartitionBatch
from distop_behaviors.validate.certification import check_columns, check_table
from distop_behaviors.validate.validate_report import sentence

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from distop.behavior import JobContext, TableRecord
    from distop.tables.commits import Head
    from distop.tables.reading.file_facts import PlannedFile
    from distop_behaviors.apply.apply_report import CertifiedArgument
    from distop_behaviors.apply.constraints import Widened
    from distop_behaviors.apply.schema_target import HeadSchema, SwapTarget
    from distop_behaviors.validate.certificate import Certificate
    from distop_behaviors.validate.partition_result import Result

MARK = "distop.applied"
"""The table property that holds the mark of the last change, as JSON."""
_ANNOUNCED = 512
"""Maximum number of marks in a checkpoint: the last ones."""
NEW_FILES = "new-files"
"""The name of the partition of new files, in samples and errors."""
ROUNDS = 20
"""Maximum number of attempts, if other writers commit first."""
TOO_MANY_WRITERS = (
    f"other writers committed first in {ROUNDS} attempts, so nothing was changed: apply again when fewer jobs write to "
    "the table"
)
_CHECK_EVERY, _SLICE = 1.0, 0.2
"""Seconds between two checks for late commits, and between two checks whether the job must stop."""


class Applying:
    """One attempt to apply a certificate. :meth:`run` calls the other public methods."""

    def __init__(self, request: CertifiedArgument, table: TableRecord, target: SwapTarget, ctx: JobContext) -> None:
        self._certificate = request.certificate
        self._settle_seconds = request.settle_seconds
        self._checks = checks_of(request.certificate)
        self._wanted = schema_changes(request.certificate, rules_of(table))
        self._table = table
        self._target = target
        self._ctx = ctx
        self._covered = request.certificate.version
        """The last snapshot whose rows are all validated."""
        self.outcome = ApplyOutcome()

    def run(self) -> ApplyOutcome:
        """Apply the certificate and return the outcome.

        Raises JobFailed, with an outcome, if a row violates a check or if other writers always committed first;
        InvalidArgument if the certificate does not belong to this table or is outdated; TableUnavailable.
        """
        check_table(self._certificate, self._table)
        while self.outcome.rounds < ROUNDS:
            self._ctx.check_cancelled()
            head = self.load()
            mark = self._mark(head)
            if mark is not None:
                self._covered = str(mark["snapshot"])
                self.settle(mark)
                self.outcome.verdict = "applied"
                return self.outcome
            self.outcome.rounds += 1
            if self.judge(head):
                self.commit(head)
        raise JobFailed(TOO_MANY_WRITERS, self.outcome)

    # ------------------------------------------------------------------- steps

    def load(self) -> Head:
        """The current metadata."""
        self._ctx.status("reading the table's metadata")
        return self._target.load()

    def judge(self, head: Head) -> bool:
        """Validate the files of this metadata that the certificate does not cover.

        Returns False if the metadata must be loaded again. Raises JobFailed.
        """
        schema = self._target.schema(head)
        check_columns(self._certificate_after(schema), schema.version)
        schema.check_change(self._required().values(), self._wanted)
        found = schema.version.new_files(self._covered, self._ctx.check_cancelled)
        if found is None:
            found = schema.files(self._ctx.check_cancelled)
        if not self.judge_files(head.source, found, schema.snapshot, current=head.source):
            return False
        self._covered = self.outcome.snapshot = schema.snapshot
        return True

    def judge_files(self, source: str, found: Sequence[PlannedFile], snapshot: str, *, current: str = "") -> bool:
        """Validate these files of the state of the table with this ``source``, as in plans. Raises JobFailed.

        ``current``: the source of the current state. Returns False if files could not be read and it has changed since.
        """
        if not found:
            return True
        self._ctx.status(f"validating {plural(len(found), 'new file')}")
        plan = PartitionPlan(0, NEW_FILES, files=tuple(found), source=source)
        # The files may be of cached metadata whose files were checked earlier.
        reader_of(self._table, [plan]).check_allowed(found)
        result = self._run_checks(plan)
        if result.verdict == "error" and current and self._target.load().source != current:
            return False  # a commit may have replaced a file, which was then removed
        self.outcome.files += len(found)
        self.outcome.rows += result.rows or 0
        self.outcome.answer = result.compact()
        if result.verdict != "valid":
            self.outcome.verdict = result.verdict
            self.outcome.snapshot = snapshot
            raise JobFailed(
                f"files that are newer than {self._certificate.operation} are not valid: "
                f"{sentence(self._checks.names(), result.checks)}",
                self.outcome,
            )
        return True

    def commit(self, head: Head) -> None:
        """Swap the schema if the table is still the validated one. The next load shows whether it happened."""
        self._ctx.check_cancelled()
        change, mark = self._change(head)
        announced = list(dict.fromkeys([*self._announced(), digest_of_mark(mark)]))[-_ANNOUNCED:]
        # From here on, further attempts continue from the table's schema, and only a cleanup reverts it. An attempt
        # that has lost its claim cannot save this checkpoint.
        if not self._ctx.progress.save({"snapshot": self._covered, "marks": announced}, force=True):
            raise RuntimeError("the checkpoint before the change of the schema could not be saved: nothing was changed")
        self._ctx.status("changing the schema")
        try:
            self._target.swap(head, change)
        except (Conflict, CommitUnknown) as error:
            self._ctx.log.info("Could not change the schema; loading the table again: %s", error)

    def settle(self, mark: Mapping[str, Any]) -> None:
        """Validate late commits, of writers that started before the change, until ``settle_seconds`` have passed.

        It checks at least once. Raises JobFailed if a row violates a check, after reverting the change.
        """
        until = monotonic() + self._settle_seconds
        while True:
            self._ctx.check_cancelled()
            last = monotonic() >= until
            head = self.load()
            self._check_stands(head)
            try:
                seen = self.judge(head)
            except JobFailed as failed:
                self.outcome.changes = self._changes_made(mark)
                self.revert()
                self.outcome.reverted = True
                raise JobFailed(f"the change was reverted: {failed}", self.outcome) from failed
            if last and seen:
                self.outcome.changes = self._changes_made(mark)
                return
            self._wait(min(_CHECK_EVERY, max(0.0, until - monotonic())))

    def revert(self) -> None:
        """Revert the change of this operation, unless it was replaced since.

        Raises Conflict if other writers always commit first.
        """
        for left in reversed(range(ROUNDS)):
            head = self._target.load()
            mark = self._mark(head)
            if mark is None:
                return
            change = SchemaChange(
                optional=tuple(self._still_required(head, mark)),
                properties={**self._old_properties(mark), MARK: None},
            )
            self._ctx.log.warning("Reverting the change of the table's schema")
            try:
                self._target.swap(head, change)
            except CommitUnknown:
                continue
            except Conflict:
                if not left:
                    raise

    # ------------------------------------------------------------------- parts

    def _run_checks(self, plan: PartitionPlan) -> Result:
        for _, result in PartitionBatch(self._checks, self._ctx).run([plan]):
            if isinstance(result, Exception):
                raise result
            return result
        raise AssertionError("a batch of one partition gave no result")

    def _mark(self, head: Head) -> Mapping[str, Any] | None:
        """The mark of this operation in the table, or None if it has not changed the schema."""
        text = head.properties.get(MARK)
        if text is None or digest_of_mark(text) not in self._announced():
            return None
        mark: Mapping[str, Any] = json.loads(text)
        # Submitters can write checkpoints, so the mark itself must name this operation.
        return mark if mark.get("operation") == self._ctx.operation else None

    def _announced(self) -> list[str]:
        """The digests of the marks that attempts of this job have announced."""
        checkpoint = self._ctx.progress.load()
        marks = checkpoint.get("marks") if isinstance(checkpoint, dict) else None
        return [mark for mark in marks if isinstance(mark, str)] if isinstance(marks, list) else []

    def _change(self, head: Head) -> tuple[SchemaChange, str]:
        """The change, and the mark in it."""
        schema = self._target.schema(head)
        required = [i for i in self._required().values() if not schema.required(i)]
        widened = {one.id: one.type for one in self._wanted.widened if not schema.has_type(one.id, one.type)}
        mark = {
            "operation": self._ctx.operation,
            "certificate": self._certificate.digest,
            "snapshot": self._covered,
            "required": required,
            **({"widened": sorted(widened)} if widened else {}),
            "properties": {
                name: head.properties.get(name)
                for name, value in self._wanted.properties.items()
                if head.properties.get(name) != value
            },
        }
        text = json.dumps(mark, ensure_ascii=False, sort_keys=True)
        properties = {**self._wanted.properties, MARK: text}
        return SchemaChange(required=tuple(required), properties=properties, widened=widened), text

    def _certificate_after(self, schema: HeadSchema) -> Certificate:
        """The certificate with the types of columns that are widened already."""
        types = {one.name: one.type for one in self._wanted.widened if self._has_type(schema, one)}
        if not types:
            return self._certificate
        now = schema.version.fields(list(types))
        columns = {
            name: column.model_copy(update={"type": now[name].type}) if name in types and name in now else column
            for name, column in self._certificate.columns.items()
        }
        return self._certificate.model_copy(update={"columns": columns})

    @staticmethod
    def _has_type(schema: HeadSchema, one: Widened) -> bool:
        return schema.version.name_of(one.id) is not None and schema.has_type(one.id, one.type)

    def _required(self) -> dict[str, int]:
        """The field ids of the columns that become required, by the names of their checks."""
        return {
            check: self._certificate.columns[column_of(check, text, self._certificate)].id
            for check, text in self._wanted.required.items()
        }

    def _check_stands(self, head: Head) -> None:
        """Raises InvalidArgument if another writer has reverted the change."""
        schema = self._target.schema(head)
        names = {field_id: schema.version.name_of(field_id) for field_id in self._required().values()}
        undone = [str(name) for i, name in names.items() if name is None or not schema.required(i)]
        undone += [one.name for one in self._wanted.widened if not self._has_type(schema, one)]
        undone += [name for name, value in self._wanted.properties.items() if head.properties.get(name) != value]
        if undone:
            raise InvalidArgument(f"another writer has reverted the change of {', '.join(undone)}: apply again")

    def _old_properties(self, mark: Mapping[str, Any]) -> dict[str, str | None]:
        """The old values of the properties that apply sets.

        Other properties are ignored: writers of the table can forge a mark, and submitters its digest.
        """
        own = {*self._wanted.properties, NAME_MAPPING}
        found = mark["properties"].items()
        return {name: value for name, value in found if name in own and isinstance(value, str | None)}

    def _still_required(self, head: Head, mark: Mapping[str, Any]) -> list[int]:
        schema = self._target.schema(head)
        own = set(self._required().values())
        known = [i for i in mark["required"] if i in own and schema.version.name_of(i) is not None]
        return [i for i in known if schema.required(i)]

    def _changes_made(self, mark: Mapping[str, Any]) -> list[Made]:
        made = [
            Made(check=check, column=self._wanted.required[check], before="other" if i in mark["required"] else "same")
            for check, i in self._required().items()
        ]
        narrowed = mark.get("narrowed", {})
        for one in self._wanted.narrowed:
            before = "other" if str(one.id) in narrowed else "same"
            made.append(
                Made.model_validate({"check": one.check, "column": one.name, "type": one.type, "before": before})
            )
        for two in self._wanted.widened:
            before = "other" if two.id in mark.get("widened", ()) else "same"
            made.append(
                Made.model_validate({"check": two.check, "column": two.name, "type": two.type, "before": before})
            )
        for name in self._wanted.properties:
            check = self._wanted.checks[name]
            made.append(Made(check=check, property=name, before="other" if name in mark["properties"] else "same"))
        return made

    def _wait(self, seconds: float) -> None:
        until = monotonic() + seconds
        while (left := until - monotonic()) > 0:
            self._ctx.check_cancelled()
            sleep(min(_SLICE, left))


def digest_of_mark(text: str) -> str:
    """The digest that announces a mark in a checkpoint."""
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()
