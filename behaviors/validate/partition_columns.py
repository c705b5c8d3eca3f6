"""The columns of one partition: of its files, merged, and of its path. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from distop.tables.reading.file_facts import ddl, holds, match, problem, widest
from distop_behaviors.validate.typed_bounds import Unfit, canonical, check_path_value

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from distop.tables.reading.file_facts import FileFacts, SparkType


class PartitionColumns:
    """The columns of a partition: of its files, merged, and of its path.

    ``values``: of the partition columns, as texts; ``types``: of these columns. ``declared``: the columns of the
    table's catalog; if given, the partition has no others.
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
        """The partition column with this name. Raises Ambiguous, and Unfit if its value does not have its type."""
        own = match(name, self.of_path)
        if own in self._unfit:
            raise self._unfit[own]
        return own

    def find(self, name: str) -> tuple[str, SparkType, str | None] | None:
        """Name, type and problem of a top-level column of the files; None if no file has it. Raises Ambiguous."""
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
                text = f"the column {own!r} is {_text(facts.columns[own])} in the file {facts.path}, but {ddl(kind)} in"
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
                    f"the column {mine!r} is {_text(kind)} in the file {facts.path}, but {_text(found[1])} in {first}: "
                    "no type holds both"
                )
                return found[0], found[1], text
            found = (found[0], both, found[2])
        return found


def _text(kind: SparkType) -> str:
    return "of a type that Spark cannot read" if problem(kind) else ddl(kind)
