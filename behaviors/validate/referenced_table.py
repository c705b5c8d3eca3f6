"""One of the tables that a check of keys looks at: its files, where the key's columns are, and its rows in Spark."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from distop.tables import check_reachable, reader_of
from distop.tables.reading.file_facts import Unreadable, folded, match, resolve, split_path, type_at
from distop_behaviors.validate import disjoint_files, scan
from distop_behaviors.validate.partition_checks import Columns, Target
from distop_behaviors.validate.typed_bounds import Unfit, family, path_value

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from pyspark.sql import DataFrame, SparkSession

    from distop.behavior import PartitionPlan, Pinned, TableRecord
    from distop.tables.reading.file_facts import FileFacts, PlannedFile, SparkType

MOST_BYTES = 256 * 1024 * 1024
"""Of files, whose keys one Spark task groups."""


class Side:
    """All files of a table, or of some of its partitions, as they were planned (``planned``). ``wanted``: the columns
    that are named, in any case; ``spark`` gives the session. Raises Unreadable where one of the files cannot be read,
    TableUnavailable where the table is not there, and what ``stop`` raises.
    """

    def __init__(
        self,
        table: TableRecord,
        planned: PartitionPlan | Pinned,
        wanted: Sequence[str],
        stop: Callable[[], None],
        spark: Callable[[], Any],
    ) -> None:
        self.reader = reader_of(table, [planned])
        self._table = table
        self._spark = spark
        self._stop = stop
        self._files = {file[0]: file for file in planned.files}
        try:
            facts = self._read(planned.files, wanted, stop)
        except Unreadable:
            self._check_reachable()
            raise
        # A table without files has columns all the same.
        self.facts = [one for one in facts if one.path in self._files]
        of_path = self.reader.partition_columns()
        self._columns = Columns(facts, dict.fromkeys(of_path), of_path, self.reader.declared)
        self._wrong: dict[str, Unfit | None] = {}
        self._needed: dict[str, SparkType] = {}
        self._of_path = False

    def _read(self, files: Sequence[PlannedFile], wanted: Sequence[str], stop: Callable[[], None]) -> list[FileFacts]:
        names = frozenset(folded(n) for name in wanted for n in (name, split_path(name)[0]))
        found = []
        for facts in self.reader.facts(files, names, stop):
            if isinstance(facts, Unreadable):
                raise facts
            found.append(facts)
        return found

    def _check_reachable(self) -> None:
        check_reachable(self._table, self._spark)

    def find(self, text: str) -> Target | None:
        """Where a column is, which is read from then on; None where none of the files has it. Raises Ambiguous, and
        Unfit where it cannot be read.
        """
        own = self._columns.in_path(text)
        if own is not None:
            kind = self._columns.of_path[own]
            self._check_values(own, kind)
            self._of_path = True
            return Target((own,), kind)
        found = self._columns.find(text) or self._columns.find(split_path(text)[0])
        path = resolve(text, {found[0]: found[1]}) if found is not None else None
        if found is None or path is None:
            return None
        if found[2] is not None:
            raise Unfit(found[2])
        self._needed[found[0]] = found[1]
        return Target(path, type_at(path, {found[0]: found[1]}))

    def _check_values(self, column: str, kind: str) -> None:
        """Raises Unfit where a partition's value is none of the declared type."""
        if column not in self._wrong:
            self._wrong[column] = None
            for value in dict.fromkeys(self.reader.values(path).get(column) for path in self._files):
                try:
                    if value is not None:
                        path_value(column, value, kind)
                except Unfit as e:
                    self._wrong[column] = e
                    break
        wrong = self._wrong[column]
        if wrong is not None:
            raise wrong

    def with_keys(self, targets: Sequence[Target]) -> list[FileFacts]:
        """The files in which a row may have a value in all of these columns: statistics tell of which none has."""
        return [facts for facts in self.facts if all(self._may_hold(facts, target) for target in targets)]

    def _may_hold(self, facts: FileFacts, target: Target) -> bool:
        if match(target.path[0], self._columns.of_path) is not None:
            return self.reader.values(facts.path)[target.path[0]] is not None
        mine = match(target.path[0], facts.columns)
        # Of a catalog's columns those that have a default are not read at all.
        if mine is None or facts.left == 0:
            return False
        chunks = facts.chunks.get((mine,)) if len(target.path) == 1 else None
        return not chunks or any(chunk.nulls != chunk.rows for chunk in chunks)

    def parts(self, files: Sequence[FileFacts], targets: Sequence[Target], bins: int) -> list[list[FileFacts]]:
        """The files in so many even parts, no two of which have a key of these columns in common; empty where their
        ranges do not tell, or the parts would be too large for one Spark task each.
        """
        if len(files) < bins:
            return []
        columns = [self._ranges(files, target) for target in targets]
        return disjoint_files.spread(files, columns, lambda facts: self._files[facts.path][1], bins, MOST_BYTES)

    def _ranges(self, files: Sequence[FileFacts], target: Target) -> list[disjoint_files.Range | None]:
        own = match(target.path[0], self._columns.of_path)
        if own is None:
            return disjoint_files.ranges(files, target.path)
        if target.kind != "string" and family(target.kind) != "whole":
            return [None] * len(files)  # other texts may be the same value
        read = str if target.kind == "string" else int
        values = [self.reader.values(facts.path)[own] for facts in files]
        return [None if value is None else (read(value), read(value)) for value in values]

    def size(self, files: Sequence[FileFacts]) -> int:
        """The bytes of these files."""
        return sum(self._files[facts.path][1] for facts in files)

    def rows(self, session: SparkSession, files: Sequence[FileFacts], absent: Sequence[str] = ()) -> DataFrame:
        """The rows of these files, with the columns that were found. Raises what Spark raises, Gone and Unreadable."""
        return scan.relation(session, self.group(files, absent))

    def group(self, files: Sequence[FileFacts], absent: Sequence[str] = ()) -> scan.Group:
        """These files as one relation, in which ``absent`` columns are NULL."""
        of_path: Mapping[str, Any] = self._columns.of_path if self._of_path else {}
        columns = {n: t for n, t in sorted(self._needed.items()) if match(n, of_path) is None}
        planned = tuple(self._planned(files))
        return scan.Group(planned, columns, self.reader, tuple(absent), of_path)

    def check_unchanged(self, files: Sequence[FileFacts]) -> None:
        """Raises Unreadable where a file is not as it was planned, TableUnavailable where the table is not there."""
        self._raise_first(self.reader.changed(self._planned(files), self._stop))

    def check_present(self, session: SparkSession, files: Sequence[FileFacts]) -> None:
        """As :meth:`check_unchanged`, after an error, which may be due to a file that is gone."""
        self._raise_first(self.reader.not_present(session, self._planned(files), self._stop))

    def _planned(self, files: Sequence[FileFacts]) -> list[PlannedFile]:
        return [self._files[facts.path] for facts in files]

    def _raise_first(self, wrong: Mapping[str, Unreadable]) -> None:
        for why in wrong.values():
            self._check_reachable()
            raise why
