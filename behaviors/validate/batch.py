"""One batch of partitions: statistics, then one scan of the undecided files for all checks, then samples."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from distop.behavior import JobCancelled
from distop.protocol.texts import plural
from distop.tables import readers_of
from distop.tables.reading.file_facts import VOID, Unreadable, match, may_match
from distop_behaviors.reading.check_session import session_of
from distop_behaviors.validate import scan, spark_errors
from distop_behaviors.validate.error_isolation import IsolatedScan
from distop_behaviors.validate.partition_checks import Preparation
from distop_behaviors.validate.partition_result import Sample
from distop_behaviors.validate.partition_state import WHERE, Names, Part, Tally, needs_precise_facts, row_count
from distop_behaviors.validate.row_samples import SampleRequest, fetch
from distop_behaviors.validate.scan import FileGroup
from distop_behaviors.validate.typed_bounds import Unfit
from distop_behaviors.validate.violation_columns import column_references, pattern_error, violation_at, where_condition

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

    from pyspark.sql import Column, SparkSession

    from distop.behavior import JobContext, PartitionPlan
    from distop.tables.reader import Reader
    from distop.tables.reading.file_facts import FileFacts, PlannedFile
    from distop_behaviors.validate.partition_result import Result
    from distop_behaviors.validate.validate_argument import Argument


class PartitionBatch:
    """The checks of one argument on some partitions of a table. Spark starts only if it is needed."""

    def __init__(self, argument: Argument, ctx: JobContext) -> None:
        self._argument = argument
        self._ctx = ctx

    def run(self, plans: Sequence[PartitionPlan]) -> Iterator[tuple[PartitionPlan, Result | JobCancelled]]:
        """Each partition with its result; partitions without a scan come first. Raises unexpected errors."""
        assert self._ctx.table is not None
        for reader, mine in readers_of(self._ctx.table, plans):
            yield from _Planned(self._argument, self._ctx, reader).run(mine)


class _Planned:
    """Partitions that were planned from the same version of the table."""

    def __init__(self, argument: Argument, ctx: JobContext, reader: Reader) -> None:
        self._argument = argument
        self._ctx = ctx
        self._reader = reader
        self._types = reader.partition_columns()
        self._declared = reader.declared
        self._check_names = argument.names()

    @property
    def _session(self) -> SparkSession:
        return session_of(self._ctx.spark)

    def _reading(self, parts: Iterable[Part]) -> SparkSession:
        """The session that reads the files of these parts."""
        facts = (facts for part in parts for facts in part.facts)
        return scan.reading_session(self._ctx.spark, self._argument.statistics, facts)

    def run(self, plans: Sequence[PartitionPlan]) -> Iterator[tuple[PartitionPlan, Result | JobCancelled]]:
        """Each partition with its result; partitions without a scan come first."""
        names = self._names()  # Spark may start here, which has a status of its own
        self._status(self._reader.facts_from, sum(len(p.files) for p in plans))
        slow: list[Part] = []
        for part in self._prepared(plans, names):
            if self._files_to_scan(part) or self._samples_wanted(part):
                slow.append(part)
            else:
                yield self._result(part)
        groups = self._grouped(slow, names)
        for group in groups:
            self._scan(group, names)
        if self._argument.sample and self._argument.statistics != "only":
            self._sample(groups, names)
        yield from map(self._result, slow)

    def _status(self, read: str, files: int) -> None:
        if read:
            self._ctx.status(f"reading the {read} of {plural(files, 'file')}")

    def _result(self, part: Part) -> tuple[PartitionPlan, Result | JobCancelled]:
        if self._ctx.is_cancelled(part.plan):
            return part.plan, JobCancelled("the job was asked to stop")
        limit = self._argument.max_violations
        for tally in part.tallies:
            if limit is not None and tally.violations >= limit:
                tally.violations, tally.exact = limit, False
        return part.plan, part.result()

    def _names(self) -> Names:
        """The columns that the argument names. Spark parses an expression only if it may run it."""
        checks: list[tuple[str, ...]] = []
        failed: dict[int, str] = {}
        parse = self._argument.statistics != "only"
        for n, check in enumerate(self._argument.checks):
            found: tuple[str, ...] = (check.column,) if check.column else ()
            if check.check is not None and parse:
                found = self._references(n, check.check, failed)
            if check.matches is not None and parse:
                why = pattern_error(self._session, check.matches.pattern)
                if why is not None:
                    failed[n] = why
            checks.append(found)
        where: tuple[str, ...] = ()
        if self._argument.where is not None and parse:
            where = self._references(WHERE, self._argument.where, failed)
        return Names(tuple(checks), where, failed)

    def _references(self, n: int, text: str, failed: dict[int, str]) -> tuple[str, ...]:
        try:
            return column_references(self._session, text)
        except Unfit as e:
            failed[n] = str(e)
        return ()

    def _prepared(self, plans: Sequence[PartitionPlan], names: Names) -> Iterator[Part]:
        known = self._facts(plans, names)
        if any(isinstance(fact, Unreadable) for facts in known for fact in facts):
            self._ctx.check_reachable()
        preparation = Preparation(self._argument, names, self._types, self._declared)
        preparation.merge(fact for facts in known for fact in facts if not isinstance(fact, Unreadable))
        parts = (self._part(preparation, plan, facts) for plan, facts in zip(plans, known, strict=True))
        # Without precise facts, partitions are prepared one by one, so that each result is reported at once.
        return self._with_precise_facts(list(parts), preparation, names) if self._reader.precise_facts_from else parts

    def _facts(self, plans: Sequence[PartitionPlan], names: Names) -> list[list[FileFacts | Unreadable]]:
        """The facts of the files of each partition; the files of all partitions are read together."""
        files = [file for plan in plans for file in plan.files]
        wanted, again = names.wanted(), self._ctx.again
        read = iter(self._reader.facts(files, wanted, self._stop, again=again) if files else ())
        return [
            [next(read) for _ in plan.files] if plan.files else self._reader.facts((), wanted, self._stop)
            for plan in plans
        ]

    def _part(self, preparation: Preparation, plan: PartitionPlan, facts: Sequence[FileFacts | Unreadable]) -> Part:
        good = [fact for fact in facts if not isinstance(fact, Unreadable)]
        if len(good) == len(facts):
            return preparation.prepare(plan, good)
        part = Part(plan, [], [Tally() for _ in self._argument.checks])
        part.missing = None
        part.fail(str(next(fact for fact in facts if isinstance(fact, Unreadable))))
        return part

    def _with_precise_facts(self, parts: Sequence[Part], preparation: Preparation, names: Names) -> Iterator[Part]:
        """The parts, decided by precise facts if the first facts were not enough."""
        undecided = [needs_precise_facts(part, self._argument) for part in parts]
        wanted = [f for part, files in zip(parts, undecided, strict=True) for f in part.facts if f.path in files]
        found: dict[str, FileFacts] = {}
        if wanted:
            self._status(self._reader.precise_facts_from, len(wanted))
            found = self._reader.precise_facts(wanted, names.wanted(), self._stop)
        for part, files in zip(parts, undecided, strict=True):
            if files & found.keys():
                yield preparation.prepare(part.plan, [found.get(facts.path, facts) for facts in part.facts])
            else:
                yield part

    def _files_to_scan(self, part: Part) -> list[PlannedFile]:
        """The files of a partition that have to be scanned."""
        if part.settled:
            return []
        if self._argument.where is not None and self._argument.statistics != "only":
            return [f for f in part.plan.files if f[0] not in part.unreadable]
        pending = {path for t in part.tallies for path in t.pending}
        if self._argument.statistics != "only":
            pending |= {facts.path for facts in part.facts if facts.live_rows is None}
        return [f for f in part.plan.files if f[0] in pending and f[0] not in part.unreadable]

    def _samples_wanted(self, part: Part) -> bool:
        sampled = self._argument.sample > 0 and self._argument.statistics != "only"
        return sampled and any(t.violations and t.error is None for t in part.tallies)

    def _grouped(self, parts: Sequence[Part], names: Names) -> list[list[Part]]:
        """The parts in groups with the same column names and types; one query reads each group."""
        groups: dict[Any, list[Part]] = {}
        for part in parts:
            key = (
                tuple(sorted(part.columns.items())),
                part.absent,
                tuple(self._path_columns(part, names).items()),
            )
            groups.setdefault(key, []).append(part)
        return list(groups.values())

    def _path_columns(self, part: Part, names: Names) -> Mapping[str, str]:
        """All partition columns with their types if the argument names one of them; otherwise none."""
        named = {*names.where, *(n for check in names.checks for n in check)}
        return part.path_columns if any(may_match(n, part.path_columns) for n in named) else {}

    def _group(
        self, part: Part, names: Names, files: Sequence[PlannedFile], uncounted: Collection[str] = ()
    ) -> FileGroup:
        of_path = self._path_columns(part, names)
        columns = {n: t for n, t in sorted(part.columns.items()) if not may_match(n, of_path)}
        absent = tuple(n for n in part.absent if not may_match(n, of_path))
        all_rows = any(f[0] in uncounted for f in files)
        return FileGroup(tuple(files), columns, self._reader, absent, of_path, all_rows)

    def _column(self, n: int, part: Part) -> Column:
        check, target = self._argument.checks[n], part.tallies[n].target
        return violation_at(self._session, check, target.path, target.kind, self._argument.null_is)

    def _where(self) -> Column | None:
        text = self._argument.where
        # pyspark's functions need a running Spark, which has not been started if statistics decided everything.
        return where_condition(self._session, text) if text is not None else None

    def _stop(self) -> None:
        self._ctx.check_cancelled()

    def _scan(self, parts: list[Part], names: Names) -> None:
        if self._ctx.again:
            self._mark_damaged_files(parts)
        files = {p.plan.partition: self._files_to_scan(p) for p in parts}
        total = sum(map(len, files.values()))
        if not total:
            return
        session = self._reading(parts)  # Spark may start here, which has a status of its own
        self._ctx.status(f"scanning {plural(total, 'file')}")
        isolated = self._isolated_scan(session, parts, names)
        active = [p for p in parts if files[p.plan.partition]]
        counts = isolated.count(active, files)
        if isolated.changed:
            self._ctx.check_reachable()
        self._apply_unless_changed([p for p in active if not p.erred], files, counts)

    def _isolated_scan(self, session: SparkSession, parts: Sequence[Part], names: Names) -> IsolatedScan:
        """The scan of the pending checks of these parts."""
        checks = self._conditions(parts)
        expressions = {n: text for n in checks if (text := self._argument.checks[n].check) is not None}
        if self._argument.where is not None:
            expressions[WHERE] = self._argument.where
        uncounted = {facts.path for p in parts for facts in p.facts if facts.live_rows is None}
        return IsolatedScan(
            session,
            lambda some: self._group(parts[0], names, some, uncounted),
            checks,
            self._where(),
            expressions,
            self._stop,
        )

    def _conditions(self, parts: Sequence[Part]) -> dict[int, Column]:
        """The conditions of the pending checks; a check fails if Spark does not accept its condition."""
        checks = {}
        for n in range(len(self._check_names)):
            owner = next((p for p in parts if p.tallies[n].pending), None)
            if owner is None:
                continue
            try:
                checks[n] = self._column(n, owner)
            except Exception as e:
                if spark_errors.is_unexpected(e):
                    raise
                for part in parts:
                    part.tallies[n].fail(spark_errors.message_of(e))
        return checks

    def _apply_unless_changed(
        self, parts: Sequence[Part], files: Mapping[int, Sequence[PlannedFile]], counts: Mapping[str, scan.Counts]
    ) -> None:
        """Apply the counts to each part, except if a file has changed: then the part fails."""
        changed = self._reader.changed([file for p in parts for file in files[p.plan.partition]], self._stop)
        if changed:
            self._ctx.check_reachable()
        for part in parts:
            why = next((changed[file[0]] for file in files[part.plan.partition] if file[0] in changed), None)
            if why is not None:
                part.fail(str(why))
            else:
                self._apply(part, files[part.plan.partition], counts)

    def _mark_damaged_files(self, parts: Sequence[Part]) -> None:
        """Mark damaged files as unreadable before Spark reads them: one of them may have crashed the JVM."""
        for part in parts:
            for path, _, _ in self._files_to_scan(part):
                self._stop()
                try:
                    self._reader.check_data(path, part.columns, self._stop)
                except Unreadable as e:
                    part.mark_unreadable(path, str(e))
                except OSError:
                    pass  # the scan reports it

    def _apply(self, part: Part, files: Sequence[PlannedFile], counts: Mapping[str, scan.Counts]) -> None:
        if part.rows is None and not part.unreadable:
            rows = {f[0]: (counts[f[0]].rows if f[0] in counts else None) or 0 for f in files}
            part.rows = sum(rows.values()) if self._argument.where is not None else row_count(part.facts, rows)
        for n, tally in enumerate(part.tallies):
            if tally.error is not None:
                continue
            for path in tally.pending:
                found = counts[path].violations.get(n, 0) if path in counts else 0
                tally.scanned += 1
                tally.violations += found
                if found:
                    tally.files[path] = found
            tally.pending.clear()

    def _sample(self, groups: Sequence[Sequence[Part]], names: Names) -> None:
        def order(parts: Iterable[Part]) -> list[Part]:
            return sorted(parts, key=lambda part: part.plan.partition)

        everywhere = order(part for parts in groups for part in parts)
        first = [self._first_files(n, everywhere) for n in range(len(self._check_names))]
        for parts in map(order, groups):
            requests = [w for n, files in enumerate(first) if (w := self._sample_request(n, parts, files)) is not None]
            if not requests:
                continue
            self._stop()
            self._ctx.status("fetching samples")
            owner = {f[0]: (p, f) for p in parts for f in p.plan.files}
            rows = fetch(self._reading(parts), self._group(parts[0], names, ()), requests, self._where())
            # A sample must be a row that was counted, and not of a file that was replaced after the count.
            owners = [owner[path] for path in dict.fromkeys(row.file for row in rows)]
            changed = self._reader.changed([file for _, file in owners], self._stop)
            for why in changed.values():
                self._ctx.log.warning("Cannot fetch samples from a changed file; the counts stay: %s", why)
            for row in rows:
                if row.file in changed:
                    continue
                part, _ = owner[row.file]
                sample = Sample(partition=part.plan.name, file=row.file, row_index=row.index, values=row.values)
                part.tallies[row.check].samples.append(sample)

    def _first_files(self, n: int, parts: Sequence[Part]) -> dict[str, int]:
        """The first files that together have enough violations for the check's samples, with their counts."""
        found: dict[str, int] = {}
        known = 0
        for part in parts:
            tally = part.tallies[n]
            for file in part.plan.files if tally.error is None else ():
                if file[0] in tally.files and known < self._argument.sample:
                    found[file[0]] = tally.files[file[0]]
                    known += found[file[0]]
        return found

    def _sample_request(self, n: int, parts: Sequence[Part], first: Mapping[str, int]) -> SampleRequest | None:
        """The request for the check's samples in the files of these parts; None if it needs none."""
        owners = {file: part for part in parts for file in part.plan.files if file[0] in first}
        if not owners:
            return None
        owner, known = next(iter(owners.values())), sum(first[file[0]] for file in owners)
        return SampleRequest(
            n, self._column(n, owner), tuple(owners), known, self._argument.sample, self._sample_columns(n, owner)
        )

    def _sample_columns(self, n: int, part: Part) -> tuple[tuple[str, tuple[str, ...], Any], ...]:
        check, target = self._argument.checks[n], part.tallies[n].target
        if check.check is None:
            return ((check.column, target.path, target.kind),)
        shown: list[tuple[str, tuple[str, ...], Any]] = []
        for name in column_references(self._session, check.check):
            own = match(name, part.plan.values)
            mine = match(name, part.columns)
            if own is not None:
                shown.append((name, (own,), part.path_columns[own]))
            elif mine is not None:
                shown.append((name, (mine,), part.columns[mine]))
            else:
                shown.append((name, (), VOID))
        return tuple(shown)
