"""One partition: which columns its checks need, what statistics decide of it, and what is left to scan. Pure."""

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
from distop_behaviors.validate.typed_bounds import Unfit, canonical, path_value
from distop_behaviors.validate.validate_report import CheckResult, Result, Sample, Verdict, error_text, worst
from distop_behaviors.validate.violation_columns import fit

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from distop.behavior import PartitionPlan
    from distop.tables.reading.file_facts import FileFacts, SparkType
    from distop_behaviors.validate.validate_argument import Argument, Check


WHERE = -1
"""Stands for ``where`` among the numbers of checks."""


@frozen
class Names:
    """The columns that the argument names: by each check, and by ``where``. Of ``check`` they are known only where
    its expression has been parsed; ``failed`` says of which checks (or of :data:`WHERE`) it could not be.
    """

    checks: tuple[tuple[str, ...], ...]
    where: tuple[str, ...] = ()
    failed: Mapping[int, str] = field(default_factory=dict)

    def wanted(self) -> frozenset[str]:
        """Top-level columns whose statistics may decide something (``facts.folded``)."""
        first = {split_path(name)[0] for names in self.checks for name in names}
        return frozenset(folded(n) for n in first | {name for names in self.checks for name in names})


@dataclass(slots=True)
class Target:
    """Where a check looks in this partition: the column's path and type (of ``check``: none)."""

    path: tuple[str, ...] = ()
    kind: SparkType = VOID


@dataclass(slots=True)
class Tally:
    """One check in one partition, while it is being decided. ``pending``: files that only a scan can decide."""

    violations: int = 0
    exact: bool = True
    at_least: int = 0
    """Violations that statistics prove in the pending files; a scan finds the exact number."""
    unreadable: bool = False
    """Whether a pending file could not be read. ``error`` has the cause; proved violations still count."""
    by_statistics: int = 0
    scanned: int = 0
    pending: set[str] = field(default_factory=set)
    nearer: set[str] = field(default_factory=set)
    """Files that statistics left open, and of which closer facts may tell more."""
    error: str | None = None
    unknown: bool = False
    missing: list[str] = field(default_factory=list)
    target: Target = field(default_factory=Target)
    files: dict[str, int] = field(default_factory=dict)
    """Violations by file, for samples."""
    samples: list[Sample] = field(default_factory=list)

    def fail(self, text: str) -> None:
        """Mark the check as failed with an error; the first reason is kept."""
        self.unreadable = False
        self.error = self.error or error_text(text)
        self.pending.clear()

    def mark_unreadable(self, text: str) -> None:
        """Mark a pending file as unreadable.

        Violations that the statistics prove still count.
        """
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
    """A partition at work. ``columns``: what is needed of its data, merged over its files; ``absent``: columns that
    expressions name and none of them has; ``missing``: those of them that ``where`` names, None where the files
    could not be read; ``rows``: None as long as they have not been counted (those of ``where``, or of files that
    do not tell); ``path_columns``: the types of its
    partition columns, of text where the value is none of the declared type.
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
    """Its files that cannot be read."""

    def fail(self, text: str) -> None:
        """Nothing can be said of this partition."""
        self.rows = 0
        for tally in self.tallies:
            tally.fail(text)

    def mark_unreadable(self, path: str, text: str) -> None:
        """Mark one file as unreadable.

        Checks that the statistics have decided for this file keep their verdicts.
        """
        self.unreadable.add(path)
        for tally in self.tallies:
            if path in tally.pending:
                tally.mark_unreadable(text)
        if self.erred:
            self.rows = 0

    @property
    def erred(self) -> bool:
        """Whether no check has a verdict for this partition."""
        return all(t.error is not None and not (t.unreadable and t.violations) for t in self.tallies)

    @property
    def settled(self) -> bool:
        """Whether a scan can add nothing.

        Nothing is pending, and the number of rows is known or cannot be known any more.
        """
        erred = all(t.error is not None for t in self.tallies)
        return erred or not (any(t.pending for t in self.tallies) or (self.rows is None and not self.unreadable))

    def result(self) -> Result:
        checks = [t.result() for t in self.tallies]
        verdict = worst(c.verdict for c in checks)
        return Result(verdict=verdict, rows=self.rows, checks=checks, missing=self.missing)


def counted(facts: Sequence[FileFacts], found: Mapping[str, int]) -> int | None:
    """The rows of these files; ``found``: those that were counted. None where some must be."""
    rows = [f.left if f.left is not None else found.get(f.path) for f in facts]
    return None if None in rows else sum(n or 0 for n in rows)


def undecided(part: Part, argument: Argument) -> set[str]:
    """The files whose closer facts may spare a scan, or with ``only`` tell more: not those that are scanned anyhow."""
    if argument.statistics == "never" or (argument.statistics == "auto" and argument.where is not None):
        return set()
    open_ = {path for tally in part.tallies if tally.error is None for path in tally.nearer}
    if argument.statistics == "auto":
        open_ -= {facts.path for facts in part.facts if facts.left is None}
        for tally in part.tallies:
            open_ -= tally.pending - tally.nearer
    # Those of a column that no scan reads: facts alone can tell.
    return open_.union(*(tally.nearer for tally in part.tallies if tally.error is not None))


class Columns:
    """The columns of a partition's files together, and of its path. ``declared``: those that the table's catalog has,
    which are then all that there are.
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
                    path_value(name, value, self.of_path[name])
            except Unfit as e:
                self._unfit[name] = e
                self.of_path[name] = "string"
        self._facts = facts
        self._merged: dict[str, tuple[str, SparkType, str | None] | None] = {}

    def in_path(self, name: str) -> str | None:
        """The partition column of this name. Raises Ambiguous, and Unfit where its value is none of its type."""
        own = match(name, self.of_path)
        if own in self._unfit:
            raise self._unfit[own]
        return own

    def find(self, name: str) -> tuple[str, SparkType, str | None] | None:
        """(name, type, problem) of a top-level column of the files; None where none has it. Raises Ambiguous."""
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
                text = f"the column {own!r} is {_say(facts.columns[own])} in the file {facts.path}, and {ddl(kind)} in"
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
                    f"the column {mine!r} is {_say(kind)} in the file {facts.path}, which does not go with "
                    f"{_say(found[1])} in {first}"
                )
                return found[0], found[1], text
            found = (found[0], both, found[2])
        return found


def _say(kind: SparkType) -> str:
    return "of a type that Spark does not read" if problem(kind) else ddl(kind)


@frozen
class _Resolved:
    """Where the checks look in files of one schema (kept, so that it stays the same object)."""

    schema: Mapping[str, SparkType]
    columns: Mapping[str, SparkType]
    targets: Sequence[Target]
    missing: Sequence[Sequence[str]]
    where_missing: Sequence[str]
    absent: tuple[str, ...]
    passed: frozenset[int]
    """The checks that each file of the schema passes, by its statistics."""


class Preparation:
    """Prepares the partitions of a table for one argument. Columns are resolved once for the partitions whose files
    share a schema, which are nearly all, unless a partition column is named or something is wrong. ``types`` are those
    of partition columns, ``declared`` those of the others where a catalog has them.
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
        """Of files that share a schema, and will be prepared: what they pass together is decided once, not for each."""
        if self._declared is not None or self._argument.statistics == "never":
            return
        sharing: dict[int, list[FileFacts]] = {}
        for facts in files:
            sharing.setdefault(id(facts.columns), []).append(facts)
        self._hulls = {
            schema: statistics.hull(those)
            for schema, those in sharing.items()
            if len(those) > 1
            and all(f.leaves is those[0].leaves and not f.contradiction and f.rows is not None for f in those)
        }

    def prepare(self, plan: PartitionPlan, facts: list[FileFacts]) -> Part:
        """Everything that needs no scan: resolves columns, and decides by statistics what they prove."""
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
        part.rows = counted(facts, {}) if argument.where is None else None
        return part

    def _passed(self, schema: Mapping[str, SparkType], tallies: Sequence[Tally]) -> frozenset[int]:
        hull = self._hulls.get(id(schema))
        if hull is None:
            return frozenset()
        pairs = enumerate(zip(self._argument.checks, tallies, strict=True))
        decided = {n: statistics.decide(check, hull, tally.target.path) for n, (check, tally) in pairs}
        return frozenset(n for n, decision in decided.items() if decision.verdict == "pass")

    def _schema(self, plan: PartitionPlan, facts: Sequence[FileFacts]) -> Mapping[str, SparkType] | None:
        """What all of the files share, where all that is named is in them."""
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
    """The columns that ``where`` names and this partition has not."""
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
    """Note that a top-level column is needed; False where there is none. Raises Unfit where it cannot be read."""
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
            fit(check, tally.target.kind)
            return
        found = columns.find(text) or columns.find(split_path(text)[0])
        path = resolve(text, {found[0]: found[1]}) if found is not None else None
        if found is None or path is None:
            if found is not None and problem(found[1]) and columns.declared is not None:
                raise Unfit(found[2] or "")  # a field of what cannot be read
            tally.missing.append(text)
            return
        kind = type_at(path, {found[0]: found[1]})
        if found[2] is not None and (check.kind != "not_null" or mode == "never"):
            raise Unfit(found[2])
        fit(check, kind)
        tally.target = Target(path, kind)
        if found[2] is None:
            part.columns[found[0]] = found[1]
    except (Unfit, Ambiguous) as e:
        tally.fail(str(e) if "file" in str(e) else f"{e} (partition {part.plan.name})")


def _decide(part: Part, tally: Tally, check: Check, argument: Argument, columns: Columns, *, shared: bool) -> None:
    """``shared``: the files have one schema and the check names no partition column, so that its target is its path in
    each of them.
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
            decision = statistics.masked(decision)
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
    if statistics.sure(decision):
        tally.by_statistics += 1
        if decision.violations:
            tally.violations += decision.violations
            tally.files[path] = decision.violations
        return
    tally.pending.add(path)
    tally.at_least += decision.violations
    enough = argument.max_violations is not None and decision.violations >= argument.max_violations
    if decision.violations and (argument.statistics == "only" or enough):
        # Not exact: the file stays pending, and is scanned where that is allowed.
        tally.violations += decision.violations
        tally.at_least -= decision.violations
        tally.exact = False


def _by_declared(check: Check, facts: FileFacts, target: Target) -> statistics.Decision:
    """By the column that the catalog means, whatever else a file has of this name. What stands in the rows of a file
    that does not have it is known of columns alone that can be read: of others it may be a default.
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
    """Decide from the one value that a partition column has; no data is read."""
    if check.kind == "not_null":
        if value is not None:
            return statistics.PASS
        if facts.contradiction or facts.rows is None:
            return statistics.UNKNOWN
        return statistics.Decision("violated", facts.rows)
    return statistics.PASS if value is None else statistics.UNKNOWN
