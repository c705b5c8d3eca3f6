"""A version of a Delta table for certificates, and the files that are new since a version."""

from __future__ import annotations

import re
import sys
from typing import TYPE_CHECKING

from distop.tables.delta import delta_schema
from distop.tables.delta.delta_log import commits, file_key
from distop.tables.delta.log_files import LogFiles
from distop.tables.reading.file_facts import Gone
from distop.tables.table_version import TableVersion

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping, Sequence

    from distop.tables.delta.delta_log import DeltaSnapshot
    from distop.tables.reading.file_facts import PlannedFile
    from distop.tables.table_version import Field

_ID = re.compile(r"([0-9]{1,20})-(.+)")


class DeltaVersion(TableVersion):
    """A version of a Delta table. Ids of fields are those of column mapping, or made of the fields' names."""

    def __init__(self, snapshot: DeltaSnapshot) -> None:
        self.version = snapshot.id
        self.table_id = snapshot.table_id
        self.metadata_file = snapshot.source
        self.schema_id = delta_schema.schema_number(snapshot.schema.text)
        self._snapshot = snapshot

    def names(self) -> Sequence[str]:
        return list(self._snapshot.schema.columns)

    def fields(self, tops: Collection[str]) -> Mapping[str, Field]:
        return self._snapshot.schema.ids(tops)

    def name_of(self, field_id: int) -> str | None:
        return self._snapshot.schema.name_of(field_id)

    def new_files(self, since: str, check: Callable[[], None]) -> Sequence[PlannedFile] | None:
        """Files that a later commit has added.

        A file that only got its first deletion vector has no new rows. One with another vector may have: a restored
        version has less deleted rows. None if the log no longer has the commits, or is another table's.
        """
        snapshot = self._snapshot
        if since == snapshot.id:
            return []
        found = _ID.fullmatch(since)
        if found is None or int(found[1]) > snapshot.version:
            return None
        added: set[str] = set()
        known: set[tuple[str, str]] = set()
        if LogFiles(snapshot.root).digest(int(found[1])) != found[2]:
            return None
        try:
            for each in commits(LogFiles(snapshot.root, sys.maxsize), range(int(found[1]) + 1, snapshot.version + 1)):
                check()
                actions = list(each)
                removed, now = _keys(actions, "remove"), _keys(actions, "add")
                whole = {path for path, vector in removed if not vector}
                added |= {path for path, vector in now if not (vector and path in whole)}
                # The former version had these with deleted rows, even if a commit says that they were whole.
                added |= {path for path, vector in removed - known if vector}
                known |= now
        except Gone:
            return None
        paths = {f"{snapshot.root}/{path}" for path in added}
        return [(file.path, file.size, 0) for path, file in sorted(snapshot.files.items()) if path in paths]


def _keys(actions: Sequence[Mapping[str, object]], kind: str) -> set[tuple[str, str]]:
    return {file_key(found) for action in actions if isinstance(found := action.get(kind), dict)}
