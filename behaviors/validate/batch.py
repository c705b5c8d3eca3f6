"""One batch of partitions: statistics, then one fused pass over what they leave open, then samples."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from distop.behavior import JobCancelled
from distop.tables.reading import footer_probe, footers, manifests, nearer, page_headers
from distop.tables.reading.facts import VOID, Unreadable, match, may_match, of_json
from distop_behaviors.reading.session import session_of
from distop_behaviors.validate import failures, scan
from distop_behaviors.validate.bounds import Unfit
from distop_behaviors.validate.expressions import bad_pattern, chosen, condition, references
from distop_behaviors.validate.isolate import Isolated
from distop_behaviors.validate.part import WHERE, Names, Part, Preparation, Tally, counted, undecided
from distop_behaviors.validate.report import Sample
from distop_behaviors.validate.samples import Wish, fetch
from distop_behaviors.validate.scan import Group

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

    from pyspark.sql import Column, SparkSession

    from distop.behavior import JobContext, PartitionPlan
    from distop.tables.reading.facts import FileFacts
    from distop.tables.reading.footers import PlannedFile
    from distop.tables.reading.manifests import Snapshot
    from distop_behaviors.validate.argument import Argument
    from distop_behaviors.validate.report import Result


class Batch:
    """The checks of one argument on some partitions of a table. Spark is not touched unless something needs it."""

    def __init__(self, argument: Argument, ctx: JobContext) -> None:
        self._argument = argument
        self._ctx = ctx
        table = ctx.table
        self._base = table.location if table is not None else ""
        options = table.options if table is not None else {}
        self._types: Mapping[str, str] = options.get("partition_types") or {}
        columns = options.get("columns")
        self._declared = None if columns is None else {name: of_json(kind) for name, kind in columns.items()}
        self._values: dict[str, tuple[Any, ...]] = {}
        """By file, where the values of partition columns are the catalog's, and not in the paths."""
        self._check_names = argument.names()

    @property
    def _session(self) -> SparkSession:
        return session_of(self._ctx.spark)

    def _reader(self, parts: Iterable[Part]) -> SparkSession:
        """The session that reads the files of these parts."""
        facts = (facts for part in parts for facts in part.facts)
        return scan.reading_session(self._ctx.spark, self._argument.statistics, facts)

    def run(self, plans: Sequence[PartitionPlan]) -> Iterator[tuple[PartitionPlan, Result | JobCancelled]]:
        """Each partition with its result, those that need no scan first. Raises what is unexpected."""
        if any(not p.source for p in plans):
            self._ctx.status(f"reading the footers of {sum(len(p.files) for p in plans)} files")
        if self._declared is not None:
            self._values = {f[0]: tuple(p.values.values()) for p in plans for f in p.files}
        names = self._names()
        slow: list[Part] = []
        for part in self._prepared(plans, names):
            if self._files(part) or self._samples_wanted(part):
                slow.append(part)
            else:
                yield self._result(part)
        groups = self._grouped(slow, names)
        for group in groups:
            self._scan(group, names)
        if self._argument.sample and self._argument.statistics != "only":
            self._sample(groups, names)
        yield from map(self._result, slow)

    def _result(self, part: Part) -> tuple[PartitionPlan, Result | JobCancelled]:
        if self._ctx.is_cancelled(part.plan):
            return part.plan, JobCancelled("the job was told to stop")
        limit = self._argument.max_violations
        for tally in part.tallies:
            if limit is not None and tally.violations >= limit:
                tally.violations, tally.exact = limit, False
        return part.plan, part.result()

    def _names(self) -> Names:
        """The columns that the argument names; Spark's parser is asked only where an expression may be run."""
        checks: list[tuple[str, ...]] = []
        failed: dict[int, str] = {}
        parse = self._argument.statistics != "only"
        for n, check in enumerate(self._argument.checks):
            found: tuple[str, ...] = (check.column,) if check.column else ()
            if check.check is not None and parse:
                found = self._references(n, check.check, failed)
            if check.matches is not None and parse:
                why = bad_pattern(self._session, check.matches.pattern)
                if why is not None:
                    failed[n] = why
            checks.append(found)
        where: tuple[str, ...] = ()
        if self._argument.where is not None and parse:
            where = self._references(WHERE, self._argument.where, failed)
        return Names(tuple(checks), where, failed)

    def _references(self, n: int, text: str, failed: dict[int, str]) -> tuple[str, ...]:
        try:
            return references(self._session, text)
        except Unfit as e:
            failed[n] = str(e)
        return ()

    def _prepared(self, plans: Sequence[PartitionPlan], names: Names) -> Iterator[Part]:
        read = iter(self._footers([f for p in plans if not p.source for f in p.files], names))
        sources = dict.fromkeys(p.source for p in plans if p.source)
        snapshots = {source: self._snapshot(source, names) for source in sources}
        known = [_by_source(p, snapshots[p.source]) if p.source else [next(read) for _ in p.files] for p in plans]
        if any(isinstance(fact, Unreadable) for facts in known for fact in facts):
            self._ctx.check_reachable()
            footers.check_store([fact for p, facts in zip(plans, known, strict=True) if not p.source for fact in facts])
        preparation = Preparation(self._argument, names, self._types, self._declared)
        preparation.look_over(fact for facts in known for fact in facts if not isinstance(fact, Unreadable))
        parts = (self._part(preparation, plan, facts) for plan, facts in zip(plans, known, strict=True))
        # Without a source one is done before the next is begun: its result is on its way meanwhile.
        return self._looked_at(list(parts), preparation, snapshots) if sources else parts

    def _footers(self, files: Sequence[PlannedFile], names: Names) -> list[FileFacts | Unreadable]:
        crashing = footer_probe.crashing_footers(files, names.wanted(), self._stop) if self._ctx.again else {}
        read = iter(footers.read_all([f for f in files if f[0] not in crashing], names.wanted(), self._stop))
        return [crashing[f[0]] if f[0] in crashing else next(read) for f in files]

    def _part(self, preparation: Preparation, plan: PartitionPlan, facts: Sequence[FileFacts | Unreadable]) -> Part:
        good = [fact for fact in facts if not isinstance(fact, Unreadable)]
        if len(good) == len(facts):
            return preparation.prepare(plan, good)
        part = Part(plan, [], [Tally() for _ in self._argument.checks])
        part.missing = None
        part.fail(str(next(fact for fact in facts if isinstance(fact, Unreadable))))
        return part

    def _snapshot(self, source: str, names: Names) -> Snapshot | Unreadable:
        """What a table's metadata tell of the files that are read through them."""
        try:
            return manifests.snapshot_of(source, names.wanted(), self._stop)
        except Unreadable as e:
            return e

    def _looked_at(
        self, parts: Sequence[Part], preparation: Preparation, snapshots: Mapping[str, Snapshot | Unreadable]
    ) -> Iterator[Part]:
        """The parts; where a table's metadata left something open that footers may decide, these have been asked."""
        open_ = [undecided(part, self._argument) if part.plan.source else set() for part in parts]
        found: dict[str, FileFacts] = {}
        for source, snapshot in snapshots.items():
            mine = [
                facts
                for part, files in zip(parts, open_, strict=True)
                if part.plan.source == source
                for facts in part.facts
                if facts.path in files
            ]
            if mine and not isinstance(snapshot, Unreadable):
                self._ctx.status(f"reading the footers of {len(mine)} files")
                found |= nearer.look(mine, snapshot.fields, self._stop)
        for part, files in zip(parts, open_, strict=True):
            if files & found.keys():
                yield preparation.prepare(part.plan, [found.get(facts.path, facts) for facts in part.facts])
            else:
                yield part

    def _files(self, part: Part) -> list[PlannedFile]:
        """The files of a partition that have to be scanned."""
        if part.settled:
            return []
        if self._argument.where is not None and self._argument.statistics != "only":
            return [f for f in part.plan.files if f[0] not in part.unreadable]
        pending = {path for t in part.tallies for path in t.pending}
        if self._argument.statistics != "only":
            pending |= {facts.path for facts in part.facts if facts.left is None}
        return [f for f in part.plan.files if f[0] in pending and f[0] not in part.unreadable]

    def _samples_wanted(self, part: Part) -> bool:
        sampled = self._argument.sample > 0 and self._argument.statistics != "only"
        return sampled and any(t.violations and t.error is None for t in part.tallies)

    def _grouped(self, parts: Sequence[Part], names: Names) -> list[list[Part]]:
        """Parts whose columns have the same names and types can be read by one query."""
        groups: dict[Any, list[Part]] = {}
        for part in parts:
            key = (
                part.plan.source,
                tuple(sorted(part.columns.items())),
                part.absent,
                tuple(self._path_columns(part, names).items()),
            )
            groups.setdefault(key, []).append(part)
        return list(groups.values())

    def _path_columns(self, part: Part, names: Names) -> Mapping[str, str]:
        """All partition columns with their types, if one of them is named."""
        named = {*names.where, *(n for check in names.checks for n in check)}
        return part.path_columns if any(may_match(n, part.path_columns) for n in named) else {}

    def _group(self, part: Part, names: Names, files: Sequence[PlannedFile], uncounted: Collection[str] = ()) -> Group:
        of_path = self._path_columns(part, names)
        columns = {n: t for n, t in sorted(part.columns.items()) if not may_match(n, of_path)}
        absent = tuple(n for n in part.absent if not may_match(n, of_path))
        values = self._values if of_path and self._declared is not None else None
        all_rows = any(f[0] in uncounted for f in files)
        return Group(tuple(files), columns, absent, of_path, self._base, part.plan.source, values, all_rows)

    def _column(self, n: int, part: Part) -> Column:
        check, target = self._argument.checks[n], part.tallies[n].target
        return condition(self._session, check, target.path, target.kind, self._argument.null_is)

    def _where(self) -> Column | None:
        text = self._argument.where
        # Functions need a live Spark, and where statistics decided nothing has started it yet.
        return chosen(self._session, text) if text is not None else None

    def _stop(self) -> None:
        self._ctx.check_cancelled()

    def _scan(self, parts: list[Part], names: Names) -> None:
        if self._ctx.again:
            self._look_at_pages(parts)
        files = {p.plan.partition: self._files(p) for p in parts}
        total = sum(map(len, files.values()))
        if not total:
            return
        self._ctx.status(f"scanning {total} files")
        first = parts[0]
        pending = [n for n in range(len(self._check_names)) if any(p.tallies[n].pending for p in parts)]
        checks = {}
        for n in pending:
            owner = next(p for p in parts if p.tallies[n].pending)
            try:
                checks[n] = self._column(n, owner)
            except Exception as e:
                if failures.is_unexpected(e):
                    raise
                for part in parts:
                    part.tallies[n].fail(failures.sentence_of(e))
        pending = list(checks)
        written = {n: text for n in pending if (text := self._argument.checks[n].check) is not None}
        if self._argument.where is not None:
            written[WHERE] = self._argument.where
        uncounted = {facts.path for p in parts for facts in p.facts if facts.left is None}
        isolated = Isolated(
            self._reader(parts),
            lambda some: self._group(first, names, some, uncounted),
            checks,
            self._where(),
            written,
            self._stop,
        )
        active = [p for p in parts if files[p.plan.partition]]
        counts = isolated.count(active, files)
        if isolated.changed:
            self._ctx.check_reachable()
        active = [p for p in active if not p.erred]
        # Iceberg changes no file that it has written.
        planned = [file for p in active if not p.plan.source for file in files[p.plan.partition]]
        changed = footers.changed(planned, self._stop)
        if changed:
            self._ctx.check_reachable()
        for part in active:
            why = next((changed[file[0]] for file in files[part.plan.partition] if file[0] in changed), None)
            if why is not None:
                part.fail(str(why))
            else:
                self._apply(part, files[part.plan.partition], counts)

    def _look_at_pages(self, parts: Sequence[Part]) -> None:
        """Mark files with a damaged page: one of them may have crashed the JVM."""
        for part in parts:
            for path, _, _ in self._files(part) if not part.plan.source else ():
                self._stop()
                try:
                    footers.answered(path, partial(page_headers.check, path, part.columns), self._stop)
                except Unreadable as e:
                    part.mark_unreadable(path, str(e))
                except OSError:
                    pass  # the scan says it, of what was planned

    def _apply(self, part: Part, files: Sequence[PlannedFile], counts: Mapping[str, scan.Counts]) -> None:
        if part.rows is None and not part.unreadable:
            rows = {f[0]: (counts[f[0]].rows if f[0] in counts else None) or 0 for f in files}
            part.rows = sum(rows.values()) if self._argument.where is not None else counted(part.facts, rows)
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
        first = [self._first(n, everywhere) for n in range(len(self._check_names))]
        for parts in map(order, groups):
            wishes = [w for n, files in enumerate(first) if (w := self._wish(n, parts, files)) is not None]
            if not wishes:
                continue
            self._stop()
            self._ctx.status("fetching samples")
            owner = {f[0]: (p, f) for p in parts for f in p.plan.files}
            rows = fetch(self._reader(parts), self._group(parts[0], names, ()), wishes, self._where())
            # What was counted stands; the rows of a sample must be those that were counted.
            owners = [owner[path] for path in dict.fromkeys(row.file for row in rows)]
            changed = footers.changed([file for part, file in owners if not part.plan.source], self._stop)
            for why in changed.values():
                self._ctx.log.warning("no samples of it: %s", why)
            for row in rows:
                if row.file in changed:
                    continue
                part, _ = owner[row.file]
                sample = Sample(partition=part.plan.name, file=row.file, row_index=row.index, values=row.values)
                part.tallies[row.check].samples.append(sample)

    def _first(self, n: int, parts: Sequence[Part]) -> dict[str, int]:
        """The first files that together hold as many violations of the check as are to be shown, with how many."""
        found: dict[str, int] = {}
        known = 0
        for part in parts:
            tally = part.tallies[n]
            for file in part.plan.files if tally.error is None else ():
                if file[0] in tally.files and known < self._argument.sample:
                    found[file[0]] = tally.files[file[0]]
                    known += found[file[0]]
        return found

    def _wish(self, n: int, parts: Sequence[Part], first: Mapping[str, int]) -> Wish | None:
        """What is to be shown of the check from the files of these parts."""
        owners = {file: part for part in parts for file in part.plan.files if file[0] in first}
        if not owners:
            return None
        owner, known = next(iter(owners.values())), sum(first[file[0]] for file in owners)
        return Wish(n, self._column(n, owner), tuple(owners), known, self._argument.sample, self._shown(n, owner))

    def _shown(self, n: int, part: Part) -> tuple[tuple[str, tuple[str, ...], Any], ...]:
        check, target = self._argument.checks[n], part.tallies[n].target
        if check.check is None:
            return ((check.column, target.path, target.kind),)
        shown: list[tuple[str, tuple[str, ...], Any]] = []
        for name in references(self._session, check.check):
            own = match(name, part.plan.values)
            mine = match(name, part.columns)
            if own is not None:
                shown.append((name, (own,), part.path_columns[own]))
            elif mine is not None:
                shown.append((name, (mine,), part.columns[mine]))
            else:
                shown.append((name, (), VOID))
        return tuple(shown)


def _by_source(plan: PartitionPlan, snapshot: Snapshot | Unreadable) -> Sequence[FileFacts | Unreadable]:
    try:
        return [snapshot] if isinstance(snapshot, Unreadable) else snapshot.of(plan)
    except Unreadable as e:
        return [e]
