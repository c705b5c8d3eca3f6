"""One table of a key check: its files, its key columns, and its rows in Spark."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from distop.tables import check_reachable, reader_of
from distop.tables.reading.file_facts import Unreadable, folded, match, resolve, split_path, type_at
from distop_behaviors.validate import disjoint_files, scan
from distop_behaviors.validate.partition_columns import PartitionColumns
from distop_behaviors.validate.partition_state import CheckColumn
from distop_behaviors.validate.typed_bounds import Unfit, check_path_value, family

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from pyspark.sql import DataFrame, SparkSession

    from distop.behavior import PartitionPlan, Pinned, TableRecord
    from distop.tables.reading.file_facts import FileFacts, PlannedFile, SparkType

MOST_BYTES = 256 * 1024 * 1024
"""Maximum bytes of files whose keys one Spark task groups."""


class Side:
    """The planned files of a table or of some of its partitions (``planned``), with their facts.

    ``wanted``: the named columns, in any case. ``spark``: returns the session. Raises Unreadable if a file cannot be
    read, TableUnavailable if the table cannot be reached, and the errors of ``stop``.
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
        # A table without files still has columns: the reader gives facts that belong to no file.
        self.facts = [one for one in facts if one.path in self._files]
        of_path = self.reader.partition_columns()
        self._columns = PartitionColumns(facts, dict.fromkeys(of_path), of_path, self.reader.declared)
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

    def find(self, text: str) -> CheckColumn | None:
        """The path and type of a column, which is then read with the rows; None if no file has it.

        Raises Ambiguous, and Unfit if it cannot be read.
        """
        own = self._columns.in_path(text)
        if own is not None:
            kind = self._columns.of_path[own]
            self._check_values(own, kind)
            self._of_path = True
            return CheckColumn((own,), kind)
        found = self._columns.find(text) or self._columns.find(split_path(text)[0])
        path = resolve(text, {found[0]: found[1]}) if found is not None else None
        if found is None or path is None:
            return None
        if found[2] is not None:
            raise Unfit(found[2])
        self._needed[found[0]] = found[1]
        return CheckColumn(path, type_at(path, {found[0]: found[1]}))

    def _check_values(self, column: str, kind: str) -> None:
        """Raises Unfit if a partition value is not of the declared type."""
        if column not in self._wrong:
            self._wrong[column] = None
            for value in dict.fromkeys(self.reader.values(path).get(column) for path in self._files):
                try:
                    if value is not None:
                        check_path_value(column, value, kind)
                except Unfit as e:
                    self._wrong[column] = e
                    break
        wrong = self._wrong[column]
        if wrong is not None:
            raise wrong

    def with_keys(self, targets: Sequence[CheckColumn]) -> list[FileFacts]:
        """The files in which a row may have a value in all of these columns, by their statistics."""
        return [facts for facts in self.facts if all(self._may_hold(facts, target) for target in targets)]

    def _may_hold(self, facts: FileFacts, target: CheckColumn) -> bool:
        if match(target.path[0], self._columns.of_path) is not None:
            return self.reader.values(facts.path)[target.path[0]] is not None
        mine = match(target.path[0], facts.columns)
        # A file without the column holds NULL: distop refuses catalog columns with a default.
        if mine is None or facts.live_rows == 0:
            return False
        chunks = facts.chunks.get((mine,)) if len(target.path) == 1 else None
        return not chunks or any(chunk.nulls != chunk.rows for chunk in chunks)

    def parts(self, files: Sequence[FileFacts], targets: Sequence[CheckColumn], bins: int) -> list[list[FileFacts]]:
        """The files in ``bins`` even groups without a common key.

        Empty if the ranges of the files do not prove that, or if a group would be too large for one Spark task.
        """
        if len(files) < bins:
            return []
        columns = [self._ranges(files, target) for target in targets]
        return disjoint_files.disjoint_bins(files, columns, lambda facts: self._files[facts.path][1], bins, MOST_BYTES)

    def _ranges(self, files: Sequence[FileFacts], target: CheckColumn) -> list[disjoint_files.ValueRange | None]:
        own = match(target.path[0], self._columns.of_path)
        if own is None:
            return disjoint_files.value_ranges(files, target.path)
        if target.kind != "string" and family(target.kind) != "whole":
            return [None] * len(files)  # different texts may be the same value
        read = str if target.kind == "string" else int
        values = [self.reader.values(facts.path)[own] for facts in files]
        return [None if value is None else (read(value), read(value)) for value in values]

    def size(self, files: Sequence[FileFacts]) -> int:
        """The size of these files in bytes."""
        return sum(self._files[facts.path][1] for facts in files)

    def rows(self, session: SparkSession, files: Sequence[FileFacts], absent: Sequence[str] = ()) -> DataFrame:
        """The rows of these files with the found columns. Raises Gone, Unreadable, and Spark's errors."""
        return scan.relation(session, self.group(files, absent))

    def group(self, files: Sequence[FileFacts], absent: Sequence[str] = ()) -> scan.FileGroup:
        """These files as one relation, in which ``absent`` columns are NULL."""
        of_path: Mapping[str, Any] = self._columns.of_path if self._of_path else {}
        columns = {n: t for n, t in sorted(self._needed.items()) if match(n, of_path) is None}
        planned = tuple(self._planned(files))
        return scan.FileGroup(planned, columns, self.reader, tuple(absent), of_path)

    def check_unchanged(self, files: Sequence[FileFacts]) -> None:
        """Raises Unreadable if a file differs from the plan, TableUnavailable if the table cannot be reached."""
        self._raise_first(self.reader.changed(self._planned(files), self._stop))

    def check_present(self, session: SparkSession, files: Sequence[FileFacts]) -> None:
        """Like :meth:`check_unchanged`, after an error that a missing file may have caused."""
        self._raise_first(self.reader.not_present(session, self._planned(files), self._stop))

    def _planned(self, files: Sequence[FileFacts]) -> list[PlannedFile]:
        return [self._files[facts.path] for facts in files]

    def _raise_first(self, wrong: Mapping[str, Unreadable]) -> None:
        for why in wrong.values():
            self._check_reachable()
            raise why
