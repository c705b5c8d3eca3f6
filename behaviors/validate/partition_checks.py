"""One partition: the columns of its checks, what statistics decide, and which files are left to scan. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from distop.protocol.frozen import frozen
from distop.tables.reading.file_facts import (
    VOID,
    Ambiguous,
    ddl,
    folded,
    follow,
    holds,
    match,
    problem,
    resolve,
    split_path,
    type_at,
    widest,
)
from distop_behaviors.validate import statistics
from distop_behaviors.validate.typed_bounds import Unfit, canonical, check_path_value
from distop_behaviors.validate.validate_report import CheckResult, Result, Sample, Verdict, error_text, worst
from distop_behaviors.validate.violation_columns import check_applicable

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from distop.behavior import PartitionPlan
    from distop.tables.reading.file_facts import FileFacts, SparkType
    from distop_behaviors.validate.validate_argument import Argument, Check


WHERE = -1
"""The number of ``where`` among the numbers of checks."""


@frozen
class Names:
    """The column names in the argument: of each check, and of ``where``.

    The names of an expression are known only after it was parsed. ``failed``: the error by check (or :data:`WHERE`) if
    it could not be parsed.
    """

    checks: tuple[tuple[str, ...], ...]
    where: tuple[str, ...] = ()
    failed: Mapping[int, str] = field(default_factory=dict)

    def wanted(self) -> frozenset[str]:
        """The top-level columns whose statistics may decide a check, normalized by ``facts.folded``."""
        first = {split_path(name)[0] for names in self.checks for name in names}
        return frozenset(folded(n) for n in first | {name for names in self.checks for name in names})


@dataclass(slots=True)
class Target:
    """The path and type of a check's column in this partition.

    A ``check`` expression has none.
    """

    path: tuple[str, ...] = ()
    kind: SparkType = VOID


@dataclass(slots=True)
class Tally:
    """The state of one check in one partition.

    ``pending``: files that only a scan can decide.
    """

    violations: int = 0
    exact: bool = True
    at_least: int = 0
    """Violations that statistics prove in the pending files. A scan finds the exact number."""
    unreadable: bool = False
    """True if a pending file cannot be read. ``error`` holds the cause; proved violations still count."""
    by_statistics: int = 0
    scanned: int = 0
    pending: set[str] = field(default_factory=set)
    nearer: set[str] = field(default_factory=set)
    """Files that statistics did not decide, but closer facts may decide."""
    error: str | None = None
    unknown: bool = False
    missing: list[str] = field(default_factory=list)
    target: Target = field(default_factory=Target)
    files: dict[str, int] = field(default_factory=dict)
    """Violations by file, for samples."""
    samples: list[Sample] = field(default_factory=list)

    def fail(self, text: str) -> None:
        """Give the check the verdict ``error``. The first reason is kept."""
        self.unreadable = False
        self.error = self.error or error_text(text)
        self.pending.clear()

    def mark_unreadable(self, text: str) -> None:
        """Mark a pending file as unreadable. Violations that statistics prove still count."""
        if self.error is None:
            self.fail(text)
            self.unreadable, self.exact = True, False
            self.violations += self.at_least

    def result(self) -> CheckResult:
        erred = self.error is not None and not (self.unreadable and self.violations)
        verdict: Verdict
        if erred:
            verdict = "error"
        elif self.violations:
            verdict = "violated"
        else:
            verdict = "unknown" if self.unknown else "valid"
        return CheckResult(
            verdict=verdict,
            violations=0 if erred else self.violations,
            exact=self.exact and not erred and not self.unknown,
            samples=[] if erred else self.samples,
            files_statistics=self.by_statistics,
            files_scanned=self.scanned,
            error=self.error,
            missing=self.missing,
        )


@dataclass(slots=True, eq=False)
class Part:
    """The state of one partition during a validation.

    ``columns``: the needed columns with their types, merged over all files. ``absent``: columns that expressions name
    but no file has. ``missing``: those that ``where`` names; None if the files could not be read. ``rows``: None until
    they are counted (rows of ``where``, or of files whose facts have no row count). ``path_columns``: the types of the
    partition columns; string if the value is not of the declared type.
    """

    plan: PartitionPlan
    facts: list[FileFacts]
    tallies: list[Tally]
    columns: dict[str, SparkType] = field(default_factory=dict)
    absent: tuple[str, ...] = ()
    missing: list[str] | None = field(default_factory=list)
    rows: int | None = 0
    path_columns: Mapping[str, str] = field(default_factory=dict)
    unreadable: set[str] = field(default_factory=set)
    """Files that cannot be read."""

    def fail(self, text: str) -> None:
        """Give all checks of this partition the verdict ``error``."""
        self.rows = 0
        for tally in self.tallies:
            tally.fail(text)

    def mark_unreadable(self, path: str, text: str) -> None:
        """Mark one file as unreadable.

        Checks that statistics have decided for it keep their verdicts.
        """
        self.unreadable.add(path)
        for tally in self.tallies:
            if path in tally.pending:
                tally.mark_unreadable(text)
        if self.erred:
            self.rows = 0

    @property
    def erred(self) -> bool:
        """True if all checks have the verdict ``error`` for this partition."""
        return all(t.error is not None and not (t.unreadable and t.violations) for t in self.tallies)

    @property
    def settled(self) -> bool:
        """True if no scan is needed.

        No file is pending, and the number of rows is known or cannot be found.
        """
        erred = all(t.error is not None for t in self.tallies)
        return erred or not (any(t.pending for t in self.tallies) or (self.rows is None and not self.unreadable))

    def result(self) -> Result:
        checks = [t.result() for t in self.tallies]
        verdict = worst(c.verdict for c in checks)
        return Result(verdict=verdict, rows=self.rows, checks=checks, missing=self.missing)


def row_count(facts: Sequence[FileFacts], found: Mapping[str, int]) -> int | None:
    """The number of rows in these files, or None if it is unknown.

    ``found``: rows by file that a scan has counted.
    """
    rows = [f.left if f.left is not None else found.get(f.path) for f in facts]
    return None if None in rows else sum(n or 0 for n in rows)


def needs_closer_facts(part: Part, argument: Argument) -> set[str]:
    """The files whose closer facts may avoid a scan, or decide more with ``only``.

    Files that are scanned in any case are not among them.
    """
    if argument.statistics == "never" or (argument.statistics == "auto" and argument.where is not None):
        return set()
    undecided = {path for tally in part.tallies if tally.error is None for path in tally.nearer}
    if argument.statistics == "auto":
        undecided -= {facts.path for facts in part.facts if facts.left is None}
        for tally in part.tallies:
            undecided -= tally.pending - tally.nearer
    # Files of a column that a scan cannot read: only facts can decide them.
    return undecided.union(*(tally.nearer for tally in part.tallies if tally.error is not None))


class Columns:
    """The columns of a partition: of its files, merged, and of its path.

    ``declared``: the columns of the table's catalog. If given, the partition has no others.
    """

    def __init__(
        self,
        facts: Sequence[FileFacts],
        values: Mapping[str, Any],
        types: Mapping[str, str],
        declared: Mapping[str, SparkType] | None = None,
    ) -> None:
        self.declared = declared
        self.of_path = {name: canonical(types.get(name, "string")) for name in values}
        self._unfit: dict[str, Unfit] = {}
        for name, value in values.items():
            try:
                if value is not None and self.of_path[name] != "string":
                    check_path_value(name, value, self.of_path[name])
            except Unfit as e:
                self._unfit[name] = e
                self.of_path[name] = "string"
        self._facts = facts
        self._merged: dict[str, tuple[str, SparkType, str | None] | None] = {}

    def in_path(self, name: str) -> str | None:
        """The partition column of this name.

        Raises Ambiguous, and Unfit if its value is not of its type.
        """
        own = match(name, self.of_path)
        if own in self._unfit:
            raise self._unfit[own]
        return own

    def find(self, name: str) -> tuple[str, SparkType, str | None] | None:
        """(name, type, problem) of a top-level column of the files; None if no file has it. Raises Ambiguous."""
        if name not in self._merged:
            self._merged[name] = self._merge(name)
        return self._merged[name]

    def _as_declared(self, name: str, declared: Mapping[str, SparkType]) -> tuple[str, SparkType, str | None] | None:
        mine = match(name, declared)
        if mine is None:
            return None
        kind = declared[mine]
        if why := problem(kind):
            return mine, kind, f"the column {mine!r} cannot be read: {why}"
        for facts in self._facts:
            own = match(mine, facts.columns)
            if own is not None and not holds(kind, facts.columns[own]):
                text = f"the column {own!r} is {_say(facts.columns[own])} in the file {facts.path}, but {ddl(kind)} in"
                return mine, kind, f"{text} the catalog"
        return mine, kind, None

    def _merge(self, name: str) -> tuple[str, SparkType, str | None] | None:
        if self.declared is not None:
            return self._as_declared(name, self.declared)
        found: tuple[str, SparkType, str | None] | None = None
        first = ""
        for facts in self._facts:
            mine = match(name, facts.columns)
            if mine is None:
                continue
            kind = facts.columns[mine]
            if found is None:
                why = problem(kind)
                text = f"the column {mine!r} of the file {facts.path} cannot be read: {why}" if why else None
                found, first = (mine, kind, text), facts.path
                continue
            both = widest(found[1], kind)
            if both is None:
                text = (
                    f"the column {mine!r} is {_say(kind)} in the file {facts.path}, but {_say(found[1])} in {first}: "
                    "no type holds both"
                )
                return found[0], found[1], text
            found = (found[0], both, found[2])
        return found


def _say(kind: SparkType) -> str:
    return "of a type that Spark cannot read" if problem(kind) else ddl(kind)


@frozen
class _Resolved:
    """The columns of the checks in files of one schema.

    It keeps the schema: comparisons are by identity.
    """

    schema: Mapping[str, SparkType]
    columns: Mapping[str, SparkType]
    targets: Sequence[Target]
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
        self._hulls: dict[int, FileFacts] = {}
        """By the identity of a schema."""

    def look_over(self, files: Iterable[FileFacts]) -> None:
        """Merge the statistics of files that share a schema, to decide once which checks all of them pass."""
        if self._declared is not None or self._argument.statistics == "never":
            return
        sharing: dict[int, list[FileFacts]] = {}
        for facts in files:
            sharing.setdefault(id(facts.columns), []).append(facts)
        self._hulls = {
            schema: statistics.merged_facts(those)
            for schema, those in sharing.items()
            if len(those) > 1
            and all(f.leaves is those[0].leaves and not f.contradiction and f.rows is not None for f in those)
        }

    def prepare(self, plan: PartitionPlan, facts: list[FileFacts]) -> Part:
        """Resolve the columns of a partition, and decide by statistics what they prove.

        Needs no scan.
        """
        argument = self._argument
        part = Part(plan, facts, [Tally() for _ in argument.checks])
        columns = Columns(facts, plan.values, self._types, self._declared)
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
        hull = self._hulls.get(id(schema))
        if hull is None:
            return frozenset()
        pairs = enumerate(zip(self._argument.checks, tallies, strict=True))
        decided = {n: statistics.decide(check, hull, tally.target.path) for n, (check, tally) in pairs}
        return frozenset(n for n, decision in decided.items() if decision.verdict == "pass")

    def _schema(self, plan: PartitionPlan, facts: Sequence[FileFacts]) -> Mapping[str, SparkType] | None:
        """The schema that all files share.

        None if they differ, or if the argument names a partition column.
        """
        if not facts or any(f.columns is not facts[0].columns for f in facts):
            return None
        return None if any(folded(name) in self._named for name in plan.values) else facts[0].columns

    def _resolve(self, part: Part, columns: Columns) -> None:
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


def _resolve_where(part: Part, columns: Columns, names: Names) -> list[str]:
    """The columns that ``where`` names but this partition does not have."""
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


def _need(part: Part, columns: Columns, name: str) -> bool:
    """Add a top-level column to the needed ones; False if no file has it.

    Raises Unfit if it cannot be read.
    """
    if columns.in_path(name) is not None:
        return True
    found = columns.find(name)
    if found is None:
        return False
    if found[2] is not None:
        raise Unfit(found[2])
    part.columns[found[0]] = found[1]
    return True


def _resolve_check(part: Part, tally: Tally, check: Check, columns: Columns, names: Sequence[str], mode: str) -> None:
    try:
        if check.kind == "check":
            tally.missing.extend(n for n in names if not _need(part, columns, n))
            return
        text = check.column
        own = columns.in_path(text)
        if own is not None:
            tally.target = Target((own,), columns.of_path[own])
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
        tally.target = Target(path, kind)
        if found[2] is None:
            part.columns[found[0]] = found[1]
    except (Unfit, Ambiguous) as e:
        tally.fail(str(e) if "file" in str(e) else f"{e} (partition {part.plan.name})")


def _decide(part: Part, tally: Tally, check: Check, argument: Argument, columns: Columns, *, shared: bool) -> None:
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
        if facts.path in tally.pending and statistics.nearer(check, facts, tally.target.path):
            tally.nearer.add(facts.path)
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


def _readable(part: Part, tally: Tally, check: Check, columns: Columns) -> bool:
    if check.kind == "check" or not tally.target.path or match(tally.target.path[0], columns.of_path) is not None:
        return True
    return tally.target.path[0] in part.columns


def _count(tally: Tally, path: str, decision: statistics.Decision, argument: Argument) -> None:
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


def _by_declared(check: Check, facts: FileFacts, target: Target) -> statistics.Decision:
    """Decide by the column that the catalog declares, even if a file has others of this name.

    A readable column that a file does not have is NULL in its rows. A column that cannot be read may have a default.
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


def _by_path(check: Check, value: str | None, facts: FileFacts) -> statistics.Decision:
    """Decide by the value of a partition column. Reads no data."""
    if check.kind == "not_null":
        if value is not None:
            return statistics.PASS
        if facts.contradiction or facts.rows is None:
            return statistics.UNKNOWN
        return statistics.Decision("violated", facts.rows)
    return statistics.PASS if value is None else statistics.UNKNOWN
