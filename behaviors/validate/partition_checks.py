"""Prepares one partition for its checks: resolves columns, and decides what statistics prove. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

from distop.protocol.frozen import frozen
from distop.tables.reading.file_facts import Ambiguous, folded, follow, match, problem, resolve, split_path, type_at
from distop_behaviors.validate import statistics
from distop_behaviors.validate.partition_columns import PartitionColumns
from distop_behaviors.validate.partition_state import WHERE, CheckColumn, Part, Tally, row_count
from distop_behaviors.validate.typed_bounds import Unfit
from distop_behaviors.validate.violation_columns import check_applicable

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from distop.behavior import PartitionPlan
    from distop.tables.reading.file_facts import FileFacts, SparkType
    from distop_behaviors.validate.partition_state import Names
    from distop_behaviors.validate.validate_argument import Argument, Check


@frozen
class _Resolved:
    """The columns of the checks in files of one schema, which are recognized by the identity of ``schema``."""

    schema: Mapping[str, SparkType]
    columns: Mapping[str, SparkType]
    targets: Sequence[CheckColumn]
    missing: Sequence[Sequence[str]]
    where_missing: Sequence[str]
    absent: tuple[str, ...]
    passed: frozenset[int]
    """The checks that every file of the schema passes by its statistics."""


class Preparation:
    """Prepares the partitions of a table for the checks of one argument.

    Columns are resolved once for all partitions whose files share a schema (nearly all), unless the argument names a
    partition column or a check fails. ``types``: the types of the partition columns. ``declared``: the types of the
    other columns, if a catalog declares them.
    """

    def __init__(
        self,
        argument: Argument,
        names: Names,
        types: Mapping[str, str],
        declared: Mapping[str, SparkType] | None = None,
    ) -> None:
        self._declared = declared
        self._argument = argument
        self._names = names
        self._types = types
        self._named = {folded(n) for named in (names.where, *names.checks) for n in named}
        self._resolved: _Resolved | None = None
        self._merged: dict[int, FileFacts] = {}
        """Merged facts by the identity of a schema."""

    def merge(self, files: Iterable[FileFacts]) -> None:
        """Merge the facts of files that share a schema, to decide once which checks all of them pass."""
        if self._declared is not None or self._argument.statistics == "never":
            return
        sharing: dict[int, list[FileFacts]] = {}
        for facts in files:
            sharing.setdefault(id(facts.columns), []).append(facts)
        self._merged = {
            schema: statistics.merged_facts(those)
            for schema, those in sharing.items()
            if len(those) > 1
            and all(f.leaves is those[0].leaves and not f.contradiction and f.rows is not None for f in those)
        }

    def prepare(self, plan: PartitionPlan, facts: list[FileFacts]) -> Part:
        """Resolve the columns of a partition, and decide its checks by statistics, as far as possible."""
        argument = self._argument
        part = Part(plan, facts, [Tally() for _ in argument.checks])
        columns = PartitionColumns(facts, plan.values, self._types, self._declared)
        part.path_columns = columns.of_path
        schema = self._schema(plan, facts)
        known = self._resolved
        if known is not None and schema is known.schema:
            part.columns, part.missing, part.absent = dict(known.columns), list(known.where_missing), known.absent
            for tally, target, missing in zip(part.tallies, known.targets, known.missing, strict=True):
                tally.target, tally.missing = target, list(missing)
        else:
            self._resolve(part, columns)
            if schema is not None and all(tally.error is None for tally in part.tallies):
                self._resolved = _Resolved(
                    schema,
                    dict(part.columns),
                    [t.target for t in part.tallies],
                    [list(t.missing) for t in part.tallies],
                    list(part.missing or ()),
                    part.absent,
                    self._passed(schema, part.tallies),
                )
        known = self._resolved
        passed = known.passed if known is not None and schema is known.schema else frozenset()
        for n, (check, tally) in enumerate(zip(argument.checks, part.tallies, strict=True)):
            if n in passed:
                tally.by_statistics += len(facts)
            elif tally.error is None:
                _decide(part, tally, check, argument, columns, shared=schema is not None and self._declared is None)
        part.rows = row_count(facts, {}) if argument.where is None else None
        return part

    def _passed(self, schema: Mapping[str, SparkType], tallies: Sequence[Tally]) -> frozenset[int]:
        merged = self._merged.get(id(schema))
        if merged is None:
            return frozenset()
        pairs = enumerate(zip(self._argument.checks, tallies, strict=True))
        decided = {n: statistics.decide(check, merged, tally.target.path) for n, (check, tally) in pairs}
        return frozenset(n for n, decision in decided.items() if decision.verdict == "pass")

    def _schema(self, plan: PartitionPlan, facts: Sequence[FileFacts]) -> Mapping[str, SparkType] | None:
        """The schema that all files share; None if they differ, or if the argument names a partition column."""
        if not facts or any(f.columns is not facts[0].columns for f in facts):
            return None
        return None if any(folded(name) in self._named for name in plan.values) else facts[0].columns

    def _resolve(self, part: Part, columns: PartitionColumns) -> None:
        names = self._names
        part.missing = _resolve_where(part, columns, names)
        absent: dict[str, None] = dict.fromkeys(part.missing)
        for n, (check, tally) in enumerate(zip(self._argument.checks, part.tallies, strict=True)):
            if n in names.failed:
                tally.fail(names.failed[n])
            if tally.error is None:
                _resolve_check(part, tally, check, columns, names.checks[n], self._argument.statistics)
                if check.kind == "check":
                    absent.update(dict.fromkeys(tally.missing))
        part.absent = tuple(absent)


def _resolve_where(part: Part, columns: PartitionColumns, names: Names) -> list[str]:
    """The columns in ``where`` that this partition does not have."""
    if WHERE in names.failed:
        part.fail(f"where: {names.failed[WHERE]}")
        return []
    missing = []
    for name in names.where:
        try:
            if not _need(part, columns, name):
                missing.append(name)
        except (Unfit, Ambiguous) as e:
            part.fail(f"where: {e}")
    return missing


def _need(part: Part, columns: PartitionColumns, name: str) -> bool:
    """Add a top-level column to the needed ones; False if no file has it. Raises Unfit if it cannot be read."""
    if columns.in_path(name) is not None:
        return True
    found = columns.find(name)
    if found is None:
        return False
    if found[2] is not None:
        raise Unfit(found[2])
    part.columns[found[0]] = found[1]
    return True


def _resolve_check(
    part: Part, tally: Tally, check: Check, columns: PartitionColumns, names: Sequence[str], mode: str
) -> None:
    try:
        if check.kind == "check":
            tally.missing.extend(n for n in names if not _need(part, columns, n))
            return
        text = check.column
        own = columns.in_path(text)
        if own is not None:
            tally.target = CheckColumn((own,), columns.of_path[own])
            check_applicable(check, tally.target.kind)
            return
        found = columns.find(text) or columns.find(split_path(text)[0])
        path = resolve(text, {found[0]: found[1]}) if found is not None else None
        if found is None or path is None:
            if found is not None and problem(found[1]) and columns.declared is not None:
                raise Unfit(found[2] or "")  # a field of a column that cannot be read
            tally.missing.append(text)
            return
        kind = type_at(path, {found[0]: found[1]})
        if found[2] is not None and (check.kind != "not_null" or mode == "never"):
            raise Unfit(found[2])
        check_applicable(check, kind)
        tally.target = CheckColumn(path, kind)
        if found[2] is None:
            part.columns[found[0]] = found[1]
    except (Unfit, Ambiguous) as e:
        tally.fail(str(e) if "file" in str(e) else f"{e} (partition {part.plan.name})")


def _decide(
    part: Part, tally: Tally, check: Check, argument: Argument, columns: PartitionColumns, *, shared: bool
) -> None:
    """Decide a check by statistics for each file of a partition.

    ``shared``: the files share a schema and the check names no partition column, so its path is the same in each file.
    """
    own = match(check.column, columns.of_path) if check.column and not shared else None
    path = tally.target.path if shared else ()
    for facts in part.facts:
        if argument.statistics == "never":
            decision = statistics.UNKNOWN
        elif own is not None:
            decision = _by_path(check, part.plan.values[own], facts)
        elif columns.declared is not None and check.kind != "check":
            decision = _by_declared(check, facts, tally.target)
        else:
            decision = statistics.decide(check, facts, path)
        if argument.where is not None:
            decision = statistics.for_some_rows(decision)
        _count(tally, facts.path, decision, argument)
        if facts.path in tally.pending and statistics.precise_facts_may_decide(check, facts, tally.target.path):
            tally.for_precise_facts.add(facts.path)
    if argument.max_violations is not None and tally.violations >= argument.max_violations and tally.pending:
        tally.pending.clear()
        tally.exact = False
    if argument.statistics == "only" and tally.pending:
        tally.pending.clear()
        tally.unknown = True
        tally.exact = False
    if tally.pending and not _readable(part, tally, check, columns):
        found = columns.find(tally.target.path[0])
        tally.mark_unreadable(found[2] or "" if found else "")


def _readable(part: Part, tally: Tally, check: Check, columns: PartitionColumns) -> bool:
    if check.kind == "check" or not tally.target.path or match(tally.target.path[0], columns.of_path) is not None:
        return True
    return tally.target.path[0] in part.columns


def _count(tally: Tally, path: str, decision: statistics.StatisticsDecision, argument: Argument) -> None:
    if statistics.is_final(decision):
        tally.by_statistics += 1
        if decision.violations:
            tally.violations += decision.violations
            tally.files[path] = decision.violations
        return
    tally.pending.add(path)
    tally.at_least += decision.violations
    enough = argument.max_violations is not None and decision.violations >= argument.max_violations
    if decision.violations and (argument.statistics == "only" or enough):
        # Not exact: the file stays pending, and is scanned if the argument allows it.
        tally.violations += decision.violations
        tally.at_least -= decision.violations
        tally.exact = False


def _by_declared(check: Check, facts: FileFacts, target: CheckColumn) -> statistics.StatisticsDecision:
    """Decide by the column that the catalog declares, even if a file has others with this name.

    A readable column that a file lacks is NULL in its rows. A column that cannot be read may have a default.
    """
    if facts.contradiction or facts.rows is None:
        return statistics.UNKNOWN
    try:
        own = follow(target.path, facts.columns) if target.path else None
    except Ambiguous:
        return statistics.UNKNOWN
    if own is not None:
        return statistics.decide(check, facts, own)
    return statistics.missing(check, facts) if problem(target.kind) is None else statistics.UNKNOWN


def _by_path(check: Check, value: str | None, facts: FileFacts) -> statistics.StatisticsDecision:
    """Decide by the value of a partition column, without reading data."""
    if check.kind == "not_null":
        if value is not None:
            return statistics.PASS
        if facts.contradiction or facts.rows is None:
            return statistics.UNKNOWN
        return statistics.StatisticsDecision("violated", facts.rows)
    return statistics.PASS if value is None else statistics.UNKNOWN
