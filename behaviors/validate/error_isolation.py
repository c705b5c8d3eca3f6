"""Runs the scan, and if it fails, finds the file, check or partition that causes the failure.

The cause gets the verdict ``error``; all others keep the verdicts that they have without it. Errors of Spark itself are
raised, because they are not caused by the data. If the store refuses all files, no check fails: the batch raises
TableUnavailable, because another executor may have access.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from distop.behavior import TableUnavailable
from distop.errors import TableBusy
from distop.protocol.texts import plural
from distop.storage.storage_options import in_object_store
from distop.tables.reading import row_counts, store_refusals
from distop.tables.reading.file_facts import Gone
from distop_behaviors.validate import scan, spark_errors
from distop_behaviors.validate.partition_state import WHERE

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from pyspark.sql import Column, SparkSession

    from distop.tables.reading.file_facts import PlannedFile
    from distop_behaviors.validate.partition_state import Part
    from distop_behaviors.validate.scan import Counts, FileGroup, Scanned


class IsolatedScan:
    """The scan of one group of partitions, in which errors are isolated.

    ``group_of`` creates the group of some of the files. ``expressions``: those of the argument, by check and for
    :data:`WHERE`. ``check_stop`` raises if the job must stop.
    """

    def __init__(
        self,
        session: SparkSession,
        group_of: Callable[[Sequence[PlannedFile]], FileGroup],
        checks: Mapping[int, Column],
        where: Column | None,
        expressions: Mapping[int, str],
        check_stop: Callable[[], None],
    ) -> None:
        self._session = session
        self._group_of = group_of
        self._checks = dict(checks)
        self._where = where
        self._expressions = dict(expressions)
        self._check_stop = check_stop
        self._single_check = False
        """Whether this counts one of several checks of the same rows, each in a separate query."""
        self._store_readable = False
        """Whether Spark is known to have read at least one file of the store."""
        self.changed = False
        """Whether a file differs from the plan or cannot be read: the whole table may be gone."""

    def count(self, parts: Sequence[Part], files: Mapping[int, Sequence[PlannedFile]]) -> dict[str, Counts]:
        """The counts by file. Failing partitions and checks are marked in ``parts``, and have no counts.

        ``files``: the files to read of each partition, by the partition's ordinal.
        """
        files = {ordinal: list(some) for ordinal, some in files.items()}
        left = [p for p in parts if not p.settled]
        attempts = False
        analysed = not self._expressions
        while left:
            self._check_stop()
            checks = {n: c for n, c in self._checks.items() if any(p.tallies[n].error is None for p in left)}
            group = self._group_of([f for p in left for f in files[p.plan.partition]])
            try:
                if not analysed:
                    # First, because later errors would quote the conditions that are built from the expressions.
                    analysed = True
                    if self._mark_refused_expressions(left, group):
                        left = [p for p in left if not p.settled]
                        continue
                return self._count_once(left, files, group, checks, attempts=attempts)
            except Exception as e:
                self._check_stop()
                if isinstance(e, Gone):
                    self.changed = True
                    for part in left:
                        part.fail(str(e))
                    return {}
                if spark_errors.is_unexpected(e):
                    raise
                self._store_readable = check_store(
                    self._session, group, e, self._check_stop, readable=self._store_readable
                )
                found = self._mark_cause(e, left, files, group, checks)
                if not found and attempts:
                    return self._divide(e, left, files)
                attempts = attempts or not found
                left = [p for p in left if not p.settled]
                for part in left:
                    ordinal = part.plan.partition
                    files[ordinal] = [file for file in files[ordinal] if file[0] not in part.unreadable]
        return {}

    def _count_once(
        self,
        parts: Sequence[Part],
        files: Mapping[int, Sequence[PlannedFile]],
        group: FileGroup,
        checks: Mapping[int, Column],
        *,
        attempts: bool,
    ) -> dict[str, Counts]:
        """Run the query; ``attempts``: in the form that counts rows on which a check throws."""
        if attempts:
            scanned = scan.count_attempts(self._session, group, checks, self._where)
            self._mark_throwing(parts, files, scanned.counts)
        else:
            # An expression may have a constant of the current day, such as '12:30' as a timestamp.
            lasting = not self._expressions
            scanned = scan.count(self._session, group, checks, self._where, lasting=lasting)
        self._mark_unread(parts, files, group, scanned)
        return scanned.counts

    def _mark_cause(
        self,
        error: Exception,
        parts: Sequence[Part],
        files: Mapping[int, Sequence[PlannedFile]],
        group: FileGroup,
        checks: Mapping[int, Column],
    ) -> bool:
        """Mark the cause if the error, the files or Spark's analyser show it; returns whether it was found."""
        found = False
        broken = group.reader.broken_file(error, group.files)
        of_parts = [file for part in parts for file in files[part.plan.partition]]
        missing = group.reader.not_present(self._session, of_parts, self._check_stop)
        for part in parts:
            paths = [path for path, _, _ in files[part.plan.partition]]
            if lost := next((missing[path] for path in paths if path in missing), None):
                part.fail(str(lost))
                found = self.changed = True
            elif broken is not None and broken in paths:
                why = spark_errors.why_unreadable(error)
                part.mark_unreadable(broken, f"the file {broken} cannot be read: {why}")
                found = self.changed = True
        if found:
            return True
        try:
            scan.relation(self._session, group)
        except Exception as e:
            if spark_errors.is_unexpected(e):
                raise
            return False  # no condition is the cause: the files cannot be read together
        return self._mark_refused_conditions(parts, group, checks)

    def _mark_refused_conditions(self, parts: Sequence[Part], group: FileGroup, checks: Mapping[int, Column]) -> bool:
        found = False
        for n, column in checks.items():
            why = scan.condition_error(self._session, group, column)
            if why is not None:
                found = True
                for part in parts:
                    part.tallies[n].fail(why)
        return found

    def _mark_refused_expressions(self, parts: Sequence[Part], group: FileGroup) -> bool:
        """Mark the expressions of the argument that Spark does not accept."""
        found = False
        for n, text in self._expressions.items():
            why = scan.expression_error(self._session, group, text)
            if why is None:
                continue
            found = True
            for part in parts:
                if n == WHERE:
                    part.fail(f"where: {why}")
                else:
                    part.tallies[n].fail(why)
        return found

    def _mark_unread(
        self, parts: Sequence[Part], files: Mapping[int, Sequence[PlannedFile]], group: FileGroup, scanned: Scanned
    ) -> None:
        """Mark files of which Spark did not read all rows.

        If the total does not match the facts, each file is counted by a separate query: ``where`` may skip rows, and
        facts do not count the rows that some delete files remove.
        """
        if unplanned := scanned.counts.keys() - {file[0] for file in group.files}:
            # Its rows are not in the counts of the planned files.
            for part in parts:
                part.fail(f"Spark has read the file {min(unplanned)}, which is not in the plan")
            return
        facts = []
        for part in parts:
            of_part = {file[0] for file in files[part.plan.partition]}
            facts += [one for one in part.facts if one.path in of_part]
        expected = row_counts.expected_rows(facts, deleted=group.reader.counts_deleted_rows)
        if scanned.read is not None and scanned.read == expected:
            return
        found = None
        if group.all_rows and self._where is None:
            found = {path: counts.rows or 0 for path, counts in scanned.counts.items()}
        wrong = scan.misread_files(self._session, group, facts, found)
        misread = [(part, file) for part in parts for file in files[part.plan.partition] if file[0] in wrong]
        changed = group.reader.changed([file for _, file in misread], self._check_stop)
        for part, file in misread:
            if file[0] in changed:
                part.fail(str(changed[file[0]]))
                self.changed = True
            else:
                part.mark_unreadable(file[0], wrong[file[0]])

    def _mark_throwing(
        self, parts: Sequence[Part], files: Mapping[int, Sequence[PlannedFile]], counts: Mapping[str, Counts]
    ) -> None:
        reasons: dict[int, str] = {}
        for part in parts:
            for file in files[part.plan.partition]:
                found = counts.get(file[0])
                if found is None:
                    continue
                if found.where_threw:
                    reason = reasons.setdefault(WHERE, self._reason(file, None))
                    part.fail(f"where: fails on {plural(found.where_threw, 'row')} of the file {file[0]}: {reason}")
                for n, threw in found.threw.items():
                    if threw and part.tallies[n].error is None:
                        if n not in reasons:
                            reasons[n] = self._reason(file, n)
                        text = f"fails on {plural(threw, 'row')} of the file {file[0]}: {reasons[n]}"
                        part.tallies[n].fail(text)

    def _reason(self, file: PlannedFile, check: int | None) -> str:
        """Spark's error message for the check (None: ``where``) on this file alone."""
        group = self._group_of([file])
        try:
            if check is None:
                scan.count(self._session, group, {}, self._where)
            else:
                scan.count(self._session, group, {check: self._checks[check]}, self._where)
        except Exception as e:
            if spark_errors.is_unexpected(e):
                raise
            return spark_errors.message_of(e)
        return "an error without a message"

    def _divide(
        self, error: Exception, parts: Sequence[Part], files: Mapping[int, Sequence[PlannedFile]]
    ) -> dict[str, Counts]:
        """Run each check alone, then split the partitions in halves, until the cause is isolated."""
        checks = [n for n in self._checks if any(p.tallies[n].error is None and p.tallies[n].pending for p in parts)]
        if len(checks) > 1:
            return self._count_each_check(error, checks, parts, files)
        if len(parts) == 1:
            return self._mark_unchecked(error, parts[0], files[parts[0].plan.partition])
        middle = len(parts) // 2
        return {**self.count(parts[:middle], files), **self.count(parts[middle:], files)}

    def _count_each_check(
        self, error: Exception, checks: Sequence[int], parts: Sequence[Part], files: Mapping[int, Sequence[PlannedFile]]
    ) -> dict[str, Counts]:
        """Count each check by itself.

        Some checks fail before they read a row, or exceed Spark's limits, alone or together.
        """
        merged: dict[str, Counts] = {}
        for n in checks:
            self._check_stop()
            expressions = {of: text for of, text in self._expressions.items() if of in (n, WHERE)}
            check = {n: self._checks[n]}
            one = IsolatedScan(self._session, self._group_of, check, self._where, expressions, self._check_stop)
            one._single_check, one._store_readable = True, True
            for path, counts in one.count(parts, files).items():
                kept = merged.setdefault(path, counts)
                kept.violations.update(counts.violations)
            self.changed = self.changed or one.changed
        for part in parts if self._where is not None else ():
            # The number of rows that ``where`` selects in the partition is unknown.
            if all(part.tallies[n].error is not None for n in checks):
                text = f"the files of partition {part.plan.name} cannot be checked: {spark_errors.message_of(error)}"
                for file in files[part.plan.partition]:
                    part.mark_unreadable(file[0], text)
        return merged

    def _mark_unchecked(self, error: Exception, part: Part, files: Sequence[PlannedFile]) -> dict[str, Counts]:
        """Mark one partition whose last check, or whose ``where``, still fails alone."""
        text = f"the files of partition {part.plan.name} cannot be checked: {spark_errors.message_of(error)}"
        # Checks that statistics have decided keep their verdicts.
        if self._single_check:
            for n in self._checks:
                if part.tallies[n].pending:
                    part.tallies[n].mark_unreadable(text)
        else:
            for file in files:
                part.mark_unreadable(file[0], text)
        return {}


def check_store(
    session: SparkSession,
    group: scan.FileGroup,
    error: Exception,
    stop: Callable[[], None],
    *,
    readable: bool = False,
) -> bool:
    """Probe a few files of a group after an error that the store may have caused.

    ``readable``: Spark is known to have read a file of the store, so that no file is probed. Returns True if one of
    them can be read, and False if the store is not the cause. Raises TableUnavailable if the store refuses all of them
    for the same cause, TableBusy if it may answer later, unexpected errors, and the errors of ``stop``.
    """
    cause = store_refusals.cause_of_spark_error(error)
    text = f"({spark_errors.message_of(error)})"
    stored = in_object_store(group.files[0][0])
    if stored and cause in store_refusals.TRANSIENT:
        raise TableBusy(f"{cause} {text}")
    passing = stored and cause in store_refusals.TRANSIENT_FOR_SOME
    single = len(group.files) == 1
    if cause is None or (single and not passing):
        return readable
    readable = readable or single
    for file in () if readable else store_refusals.evenly_spaced(group.files):
        stop()
        try:
            scan.count(session, replace(group, files=(file,), all_rows=True), {}, None)
        except Exception as e:
            if spark_errors.is_unexpected(e):
                raise
            if store_refusals.cause_of_spark_error(e) == cause:
                continue
        readable = True
        break
    if readable and passing:
        # The store has failed for some of its files, which says nothing about them.
        raise TableBusy(f"{cause} {text}")
    if readable:
        return True
    text = f"Spark on this executor cannot read any of {plural(len(group.files), 'file')}: {cause} {text}"
    raise store_refusals.error_of_cause(cause, text) if stored else TableUnavailable(text)
