"""The job for checks of the whole table: unique keys, and references to another table."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

from distop.behavior import JobCancelled
from distop.protocol.texts import plural
from distop.tables.reading import row_counts
from distop.tables.reading.file_facts import Ambiguous, Unreadable
from distop_behaviors.reading.check_session import session_of
from distop_behaviors.validate import error_isolation, key_queries, scan, spark_errors
from distop_behaviors.validate.partition_result import CheckResult, Result, Sample, error_text, worst
from distop_behaviors.validate.partition_state import row_count
from distop_behaviors.validate.referenced_table import Side
from distop_behaviors.validate.table_checks import TABLE
from distop_behaviors.validate.typed_bounds import Unfit
from distop_behaviors.validate.violation_columns import column_references, where_condition, where_true

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pyspark.sql import DataFrame, SparkSession

    from distop.behavior import JobContext, PartitionPlan, Pinned
    from distop.tables.reading.file_facts import FileFacts
    from distop_behaviors.validate.partition_state import CheckColumn
    from distop_behaviors.validate.validate_argument import Argument, Check


PARTS = 2
"""Groups of files without a common key, for each core."""
MOST_PARTS = 32
"""Maximum number of such groups: each is a branch of the query's plan."""


class _CheckError(Exception):
    """The check gets the verdict ``error``; the text has the reason."""


class KeyChecks:
    """The checks of the whole table of one argument, on the job that has all files."""

    def __init__(self, argument: Argument, plan: PartitionPlan, ctx: JobContext) -> None:
        assert ctx.table is not None
        self._argument = argument
        self._plan = plan
        self._ctx = ctx
        self._table = ctx.table
        self._beside = {other.table.name: other for other in plan.beside}
        self._absent: list[str] = []
        """Columns that ``where`` names but no file has."""

    def run(self) -> Result | JobCancelled:
        """The result of these checks, in their order. Raises TableUnavailable and unexpected errors."""
        if self._ctx.is_cancelled(self._plan):
            return JobCancelled("the job was asked to stop")
        checks = [check for check in self._argument.checks if check.wide]
        missing: list[str] | None = None
        rows: int | None = 0
        try:
            side = self._side()
            missing = self._absent
            found = [self._result(check, side) for check in checks]
            rows = self._rows(side)
        except (Unreadable, _CheckError) as e:
            found = [self._error_result(check, str(e)) for check in checks]
        if self._ctx.is_cancelled(self._plan):
            return JobCancelled("the job was asked to stop")
        return Result(worst(check.verdict for check in found), rows, found, missing)

    @property
    def _session(self) -> SparkSession:
        return session_of(self._ctx.spark)

    def _reader(self, files: Sequence[FileFacts]) -> SparkSession:
        """The session that reads these files."""
        return scan.reading_session(self._ctx.spark, self._argument.statistics, files)

    def _stop(self) -> None:
        self._ctx.check_cancelled()
        if self._ctx.is_cancelled(self._plan):
            raise JobCancelled("the job was asked to stop")

    def _side(self) -> Side:
        """The table itself. Raises Unreadable, and _CheckError if ``where`` is wrong."""
        self._ctx.status(f"reading the metadata of {plural(len(self._plan.files), 'file')}")
        wanted = [column for check in self._argument.checks if check.wide for column in check.key]
        side = Side(self._table, self._plan, wanted, self._stop, lambda: self._ctx.spark)
        for column in wanted:
            with contextlib.suppress(Unfit, Ambiguous):  # each check reports it itself
                side.find(column)
        text = self._argument.where
        if text is None or self._argument.statistics == "only":
            return side
        try:
            for name in column_references(self._session, text):
                if side.find(name) is None:
                    self._absent.append(name)
        except (Unfit, Ambiguous) as e:
            raise _CheckError(f"where: {e}") from e
        if side.facts:
            why = scan.expression_error(self._session, side.group(side.facts, self._absent), text)
            if why is not None:
                raise _CheckError(f"where: {why}")
        return side

    def _rows(self, side: Side) -> int | None:
        """The number of rows, if it is known without counting."""
        return row_count(side.facts, {}) if self._argument.where is None else None

    def _new(self, check: Check) -> CheckResult:
        result = CheckResult(scope="table" if self._plan.name == TABLE else "chosen")
        if check.references is not None:
            other = self._beside[check.references.table]
            result.against = {"table": other.table.name, "version": other.version}
        return result

    def _error_result(self, check: Check, text: str) -> CheckResult:
        result = self._new(check)
        result.verdict, result.exact, result.error = "error", False, error_text(text)
        return result

    def _result(self, check: Check, side: Side) -> CheckResult:
        result = self._new(check)
        self._stop()
        try:
            if check.references is not None:
                self._check_references(check, side, result)
            else:
                self._check_unique(check, side, result)
        except (Unfit, Ambiguous, Unreadable, _CheckError) as e:
            return self._error_result(check, str(e))
        limit = self._argument.max_violations
        if limit is not None and result.violations >= limit:
            result.violations, result.exact = limit, False
        if result.violations:
            result.verdict = "violated"
        return result

    def _targets(self, side: Side, names: Sequence[str], whose: str = "the table's files") -> list[CheckColumn]:
        """The columns' paths and types. Raises _CheckError if no file has a column, Unfit, and Ambiguous."""
        targets = []
        for name in names:
            target = side.find(name)
            if target is None:
                raise _CheckError(f"none of {whose} has the column {name!r}")
            targets.append(target)
        return targets

    def _files_to_read(
        self, side: Side, targets: Sequence[CheckColumn], result: CheckResult, *, fewest: int
    ) -> list[FileFacts]:
        """The files that must be read; none if statistics decide the check.

        ``fewest``: the number of rows with a key that the check needs to be violated.
        """
        mode = self._argument.statistics
        files = side.facts if mode == "never" else side.with_keys(targets)
        if mode != "never" and not any(f.contradiction for f in files):
            rows = [f.rows for f in files if f.rows is not None]
            if len(rows) == len(files) and sum(rows) < fewest:
                files = []
        result.files_statistics = len(side.facts) - len(files)
        if files and mode == "only":
            result.verdict, result.exact = "unknown", False
            return []
        result.files_scanned = len(files)
        if self._ctx.again:
            # One of the files may have crashed the JVM.
            for facts in files:
                self._stop()
                side.reader.check_data(facts.path, {target.path[0] for target in targets}, self._stop)
        return list(files)

    def _check_unique(self, check: Check, side: Side, result: CheckResult) -> None:
        targets = self._targets(side, check.key)
        key_queries.check_comparable("unique", check.key, [t.kind for t in targets])
        files = self._files_to_read(side, targets, result, fewest=2)
        if not files:
            return
        try:
            # The session first: columns need a running Spark, and this may start it, which has a status of its own.
            session = self._reader(files)
            self._ctx.status(f"looking for duplicate keys in {plural(len(files), 'file')}")
            parts = self._parts(session, side, files, targets)
            key = key_queries.key_columns(targets)
            found = key_queries.count_duplicates(parts, key, side.size(files))
            result.violations = found.violations
            self._check_read(found, (side, files))
            if found.violations and self._argument.sample:
                self._stop()
                self._ctx.status("fetching samples")
                rows = self._selected_rows(session, side, files)
                shown = key_queries.sample_duplicates(
                    rows, key, side.reader, found.examples, self._argument.sample, targets
                )
                result.samples = self._samples(check, side, shown)
        except Exception as e:
            raise self._cause_of(e, (side, files)) from e
        side.check_unchanged(files)

    def _check_references(self, check: Check, side: Side, result: CheckResult) -> None:
        assert check.references is not None
        other = self._beside[check.references.table]
        there = self._other(other, check.references.theirs())
        targets = self._targets(side, check.key)
        partners = self._targets(there, check.references.theirs(), f"the files of the table {other.table.name!r}")
        key_queries.check_comparable("references", check.key, [t.kind for t in targets])
        kinds = [
            key_queries.common_type(a, x.kind, b, y.kind)
            for a, x, b, y in zip(check.key, targets, check.references.theirs(), partners, strict=True)
        ]
        files = self._files_to_read(side, targets, result, fewest=1)
        if not files:
            return
        able = there.facts if self._argument.statistics == "never" else there.with_keys(partners)
        try:
            session = self._reader([*files, *able])
            self._ctx.status(f"looking up the keys of {plural(len(files), 'file')} in {other.table.name}")
            rows, key = self._selected_rows(session, side, files), key_queries.key_columns(targets, kinds)
            known = there.rows(session, able) if able else None
            others = key_queries.ReferencedRows(known, key_queries.key_columns(partners, kinds), there.size(able))
            size = side.size(files)
            found = key_queries.count_orphans(rows, key, others, size)
            result.violations = found.violations
            self._check_read(found, (side, files), (there, able))
            if result.violations and self._argument.sample:
                self._stop()
                self._ctx.status("fetching samples")
                limit = self._argument.sample
                shown = key_queries.sample_orphans(rows, key, others, size, side.reader, limit, targets)
                result.samples = self._samples(check, side, shown)
        except Exception as e:
            raise self._cause_of(e, (side, files), (there, able)) from e
        side.check_unchanged(files)
        there.check_unchanged(able)

    def _other(self, other: Pinned, columns: Sequence[str]) -> Side:
        try:
            return Side(other.table, other, columns, self._stop, lambda: self._ctx.spark)
        except Unreadable as e:
            raise _CheckError(f"the table {other.table.name!r}: {e}") from e

    def _parts(
        self, session: SparkSession, side: Side, files: Sequence[FileFacts], targets: Sequence[CheckColumn]
    ) -> list[DataFrame]:
        """The rows of these files: several frames if statistics prove that these have no common key, else one."""
        parts: list[list[FileFacts]] = []
        if self._argument.statistics != "never":
            size, cores = side.size(files), session.sparkContext.defaultParallelism
            wanted = min(max(cores * PARTS, size // key_queries.PART_BYTES), MOST_PARTS)
            # With more cores than groups, a shuffle uses more of them.
            parts = side.parts(files, targets, wanted) if cores <= MOST_PARTS else []
        return [self._selected_rows(session, side, part) for part in parts or [list(files)]]

    def _check_read(self, found: key_queries.KeyViolations, *read: tuple[Side, Sequence[FileFacts]]) -> None:
        """Raises Unreadable if Spark did not read all rows of these files.

        A condition that skips rows and a join with an empty table also read fewer rows. So if the total does not match,
        each file is counted by a separate query.
        """
        session = self._session
        expected = [row_counts.expected_rows(files, deleted=side.reader.counts_deleted_rows) for side, files in read]
        rows = sum(one for one in expected if one is not None)
        if None not in expected and rows == row_counts.of_frame(found.frame):
            return
        for side, files in read:
            if files:
                side.check_unchanged(files)  # otherwise a replaced file would be reported as damaged
                wrong = scan.misread_files(session, side.group(files, self._absent), files)
                for why in wrong.values():
                    raise Unreadable(why)

    def _selected_rows(self, session: SparkSession, side: Side, files: Sequence[FileFacts]) -> DataFrame:
        rows = side.rows(session, files, self._absent)
        text = self._argument.where
        return where_true(rows, where_condition(session, text)) if text is not None else rows

    def _samples(self, check: Check, side: Side, rows: Sequence[key_queries.SampleRow]) -> list[Sample]:
        return [
            Sample(
                partition=side.reader.partition_of(row.file) or self._plan.name,
                file=row.file,
                row_index=row.index,
                values=dict(zip(check.key, row.values, strict=True)),
            )
            for row in rows
        ]

    def _cause_of(self, error: Exception, *read: tuple[Side, Sequence[FileFacts]]) -> Exception:
        """The exception to raise for a failed query: _CheckError, or the error itself if the data is not the cause.

        Raises Unreadable if a file differs from the plan.
        """
        self._stop()
        if isinstance(error, Unreadable):
            return error
        if spark_errors.is_unexpected(error):
            return error
        for side, files in read:
            group = side.group(files)
            error_isolation.check_store(self._session, group, error, self._stop)
            side.check_present(self._session, files)
            broken = side.reader.broken_file(error, group.files)
            if broken is not None:
                return _CheckError(f"the file {broken} cannot be read: {spark_errors.why_unreadable(error)}")
        return _CheckError(f"Spark cannot read the rows: {spark_errors.message_of(error)}")
