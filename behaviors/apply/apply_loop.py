"""Judge what the certificate does not cover, swap the schema, look again: the loop of ``apply``.

What was judged is what is changed: the swap compares with the very metadata that was loaded before it was judged.
Every step may be repeated after a crash. A property of the table, written by the swap itself, says which operation made
the change, on which snapshot, and what was before. Whoever writes to the table can write that mark as well: one counts
only if the job's checkpoint, which is fenced by its claim in etcd, has announced it before the swap.
"""

from __future__ import annotations

import hashlib
import json
from time import monotonic, sleep
from typing import TYPE_CHECKING, Any

from distop.behavior import JobFailed, PartitionPlan
from distop.errors import InvalidArgument
from distop.tables.iceberg.iceberg_changes import new_files
from distop.tables.iceberg.iceberg_format import NO_SNAPSHOT, check_opened, plan_metadata, read_metadata
from distop.tables.iceberg.iceberg_version import IcebergVersion
from distop.tables.iceberg.table_properties import NAME_MAPPING
from distop.tables.table_options import check_options
from distop_behaviors.apply.apply_report import Made, Outcome, checks_of
from distop_behaviors.apply.constraints import PREFIX, column_of, wanted
from distop_behaviors.apply.schema_target import Change, Moved, Unsure
from distop_behaviors.validate.batch import Batch
from distop_behaviors.validate.certification import check_columns, check_table
from distop_behaviors.validate.validate_report import Result, sentence

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from distop.behavior import JobContext, TableRecord
    from distop.tables.reading.file_facts import PlannedFile
    from distop_behaviors.apply.apply_report import Request
    from distop_behaviors.apply.schema_target import Head, Target

MARK = "distop.applied"
"""The table property that says who made the last change, as JSON."""
_ANNOUNCED = 512
"""Marks that a checkpoint announces at most: the last ones."""
NEW_FILES = "new-files"
"""What stands for a partition in samples and errors of the files that are looked at here."""
ROUNDS = 20
"""How often another writer may be first."""
_LOOK_EVERY, _SLICE = 1.0, 0.2
"""Seconds from one look at what still came to the next, and between two looks at whether to stop."""


class Applying:
    """One attempt to apply a certificate. The methods that end in a step of its own are called by :meth:`run` alone."""

    def __init__(self, request: Request, table: TableRecord, target: Target, ctx: JobContext) -> None:
        self._certificate = request.certificate
        self._settle_seconds = request.settle_seconds
        self._checks = checks_of(request.certificate)
        self._wanted = wanted(request.certificate)
        self._table = table
        self._target = target
        self._ctx = ctx
        self._covered = request.certificate.version
        """The snapshot all of whose rows are known to hold what was certified."""
        self.outcome = Outcome()

    def run(self) -> Outcome:
        """What was done. Raises JobFailed, with an outcome, where a row is in the way or others were always first;
        InvalidArgument where the certificate is none of this table, or not any more; TableUnavailable.
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
        raise JobFailed(
            f"another writer was first {ROUNDS} times: nothing was changed; try again when fewer write to the table",
            self.outcome,
        )

    # ------------------------------------------------------------------- steps

    def load(self) -> Head:
        """The current metadata."""
        self._ctx.status("reading the table's metadata")
        return self._target.load()

    def judge(self, head: Head) -> bool:
        """Look at what the certificate does not cover of this metadata; False: it must be loaded again. Raises
        JobFailed.
        """
        metadata, io = read_metadata(head.source)
        check_columns(self._certificate, IcebergVersion(head.source, metadata))
        current = metadata.current_snapshot()
        snapshot = str(current.snapshot_id) if current is not None else NO_SNAPSHOT
        found = new_files(metadata, io, self._covered, self._ctx.check_cancelled)
        if found is None:
            options = check_options(self._table.options, "iceberg")
            planned = plan_metadata(head.source, self._table, options, self._ctx.check_cancelled)
            found = [file for partition in planned.partitions for file in partition.files]
        if not self.judge_files(head.source, found, snapshot, current=head.source):
            return False
        self._covered = self.outcome.snapshot = snapshot
        return True

    def judge_files(self, source: str, found: Sequence[PlannedFile], snapshot: str, *, current: str = "") -> bool:
        """Look at these files of a metadata file; ``current``: where another one is, by now, False says that they could
        not be read. Raises JobFailed.
        """
        if not found:
            return True
        self._ctx.status(f"looking at {len(found)} files that are new")
        check_opened(source, (path for path, _, _ in found), ())
        result = self._look_at(PartitionPlan(0, NEW_FILES, files=tuple(found), source=source))
        if result.verdict == "error" and current and self._target.load().source != current:
            return False  # a file may have been replaced meanwhile, and removed
        self.outcome.files += len(found)
        self.outcome.rows += result.rows or 0
        self.outcome.answer = result.compact()
        if result.verdict != "valid":
            self.outcome.verdict = result.verdict
            self.outcome.snapshot = snapshot
            raise JobFailed(
                f"what came since {self._certificate.operation} is not valid: "
                f"{sentence(self._checks.names(), result.checks)}",
                self.outcome,
            )
        return True

    def commit(self, head: Head) -> None:
        """Swap the schema, if the table is what was judged. Whether it took place is seen when it is loaded again."""
        self._ctx.check_cancelled()
        change, mark = self._change(head)
        announced = list(dict.fromkeys([*self._announced(), digest_of_mark(mark)]))[-_ANNOUNCED:]
        # From here on the job goes on from what stands in the table, and only its end may take that back. One whose job
        # is another's by now cannot save it.
        if not self._ctx.progress.save({"snapshot": self._covered, "marks": announced}, force=True):
            raise RuntimeError("that the schema is about to be changed could not be written down: nothing was changed")
        self._ctx.status("changing the schema")
        try:
            self._target.swap(head, change)
        except (Moved, Unsure) as error:
            self._ctx.log.info("the schema was not changed yet: %s", error)

    def settle(self, mark: Mapping[str, Any]) -> None:
        """Look at what is still committed by those who began before the change: at least once, and until so many
        seconds are over. Raises JobFailed where it breaks the promise, which is then taken back.
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
                self.outcome.changes = self._made(mark)
                self.revert()
                self.outcome.reverted = True
                raise JobFailed(f"the change was taken back, since {failed}", self.outcome) from failed
            if last and seen:
                self.outcome.changes = self._made(mark)
                return
            self._wait(min(_LOOK_EVERY, max(0.0, until - monotonic())))

    def revert(self) -> None:
        """Take back what this operation changed, if it did and nobody has since. Raises Moved where others are always
        first.
        """
        for left in reversed(range(ROUNDS)):
            head = self._target.load()
            mark = self._mark(head)
            if mark is None:
                return
            change = Change(
                optional=tuple(self._still_required(head, mark)),
                properties={**self._former(mark), MARK: None},
            )
            self._ctx.log.warning("taking back what was applied")
            try:
                self._target.swap(head, change)
            except Unsure:
                continue
            except Moved:
                if not left:
                    raise

    # ------------------------------------------------------------------- parts

    def _look_at(self, plan: PartitionPlan) -> Result:
        for _, result in Batch(self._checks, self._ctx).run([plan]):
            if isinstance(result, Exception):
                raise result
            return result
        raise AssertionError("a batch of one partition gave no result")

    def _mark(self, head: Head) -> Mapping[str, Any] | None:
        """What this operation left in the table, where it has made the change."""
        text = head.properties.get(MARK)
        if text is None or digest_of_mark(text) not in self._announced():
            return None
        mark: Mapping[str, Any] = json.loads(text)
        # A checkpoint lies where submitters write: it must not speak of another operation's change.
        return mark if mark.get("operation") == self._ctx.operation else None

    def _announced(self) -> list[str]:
        """The digests of the marks that attempts at this job were about to write."""
        checkpoint = self._ctx.progress.load()
        marks = checkpoint.get("marks") if isinstance(checkpoint, dict) else None
        return [mark for mark in marks if isinstance(mark, str)] if isinstance(marks, list) else []

    def _change(self, head: Head) -> tuple[Change, str]:
        """What is to be changed, and the mark in it."""
        schema = read_metadata(head.source)[0].schema()
        required = [i for i in self._required().values() if not schema.find_field(i).required]
        mark = {
            "operation": self._ctx.operation,
            "certificate": self._certificate.digest,
            "snapshot": self._covered,
            "required": required,
            "properties": {
                name: head.properties.get(name)
                for name, value in self._wanted.properties.items()
                if head.properties.get(name) != value
            },
        }
        text = json.dumps(mark, ensure_ascii=False, sort_keys=True)
        return Change(required=tuple(required), properties={**self._wanted.properties, MARK: text}), text

    def _required(self) -> dict[str, int]:
        """The columns that are to be required: by the names of their checks, their field ids."""
        return {
            check: self._certificate.columns[column_of(check, text, self._certificate)].id
            for check, text in self._wanted.required.items()
        }

    def _check_stands(self, head: Head) -> None:
        """Raises InvalidArgument where somebody else has undone the change meanwhile."""
        schema = read_metadata(head.source)[0].schema()
        names = {field_id: schema.find_column_name(field_id) for field_id in self._required().values()}
        undone = [str(name) for i, name in names.items() if name is None or not schema.find_field(i).required]
        undone += [name for name, value in self._wanted.properties.items() if head.properties.get(name) != value]
        if undone:
            raise InvalidArgument(f"somebody else has undone the change meanwhile: {', '.join(undone)}")

    def _former(self, mark: Mapping[str, Any]) -> dict[str, str | None]:
        """The former values of the properties that an apply sets, and of no others: a mark stands in the table, and its
        digest where submitters write.
        """
        own = {*self._wanted.properties, NAME_MAPPING}
        found = mark["properties"].items()
        return {name: value for name, value in found if name in own and isinstance(value, str | None)}

    def _still_required(self, head: Head, mark: Mapping[str, Any]) -> list[int]:
        schema = read_metadata(head.source)[0].schema()
        own = set(self._required().values())
        known = [i for i in mark["required"] if i in own and schema.find_column_name(i) is not None]
        return [i for i in known if schema.find_field(i).required]

    def _made(self, mark: Mapping[str, Any]) -> list[Made]:
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
        for name in self._wanted.properties:
            check = name.removeprefix(PREFIX)
            made.append(Made(check=check, property=name, before="other" if name in mark["properties"] else "same"))
        return made

    def _wait(self, seconds: float) -> None:
        until = monotonic() + seconds
        while (left := until - monotonic()) > 0:
            self._ctx.check_cancelled()
            sleep(min(_SLICE, left))


def digest_of_mark(text: str) -> str:
    """What announces a mark."""
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()
