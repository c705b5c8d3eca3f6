"""Removes whole partitions of a Delta table by a commit of ``remove`` actions, without a JVM."""

from __future__ import annotations

import time
from datetime import date, datetime
from typing import TYPE_CHECKING, Any

from distop.errors import InvalidArgument
from distop.protocol.plan import PartitionPlan
from distop.protocol.texts import did_you_mean
from distop.tables.commits import COMPLETION, FENCE, OPERATION, commit_with_retries
from distop.tables.delta import metadata_commit
from distop.tables.delta.delta_log import commit
from distop.tables.delta.delta_plan import partition_name
from distop.tables.delta.log_files import LogFiles
from distop.tables.delta.log_publisher import LogPublisher
from distop.tables.delta.table_paths import data_path, parse_source
from distop.tables.partition_removal import PartitionRemoval, RemovedFiles, ValuedPartition
from distop.tables.reading.file_facts import Gone

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator

    from distop.protocol.records import TableRecord
    from distop.tables.commits import CommitContext
    from distop.tables.delta.delta_log import AddedFile, DeltaSnapshot

_OPERATION = "distop expire-partitions"
"""The name of the operation in the table's history."""
_APPEND_ONLY = "delta.appendOnly"


class DeltaPartitionRemoval(PartitionRemoval):
    """The newest version of a table in a folder."""

    def __init__(self, table: TableRecord, context: CommitContext) -> None:
        """Raises InvalidArgument for a table whose rows may not be deleted, or with an unknown writer feature."""
        self._context = context
        self._publisher = LogPublisher(table, context)
        self._publisher.check_folders(rewritten=False)
        self._snapshot: DeltaSnapshot = self._publisher.load().base
        self.state = self._snapshot.source
        self._check(self._snapshot)

    @staticmethod
    def _check(snapshot: DeltaSnapshot) -> None:
        metadata_commit.check_writable(snapshot, advice="delete the rows with Delta's DELETE")
        if metadata_commit.configuration(snapshot).get(_APPEND_ONLY, "").lower() == "true":
            raise InvalidArgument(
                f"the Delta table {snapshot.root!r} has the property {_APPEND_ONLY}, which forbids to delete rows"
            )

    def partitions(self, column: str) -> Iterator[ValuedPartition]:
        schema = self._snapshot.schema
        if column not in schema.partition_columns:
            known = tuple(schema.partition_columns)
            raise InvalidArgument(
                f"{column!r} is not a partition column of the Delta table {self._snapshot.root!r}"
                f"{did_you_mean(column, known)} (it has: {', '.join(known) or 'none'})"
            )
        groups: dict[str, list[AddedFile]] = {}
        for file in self._snapshot.files.values():
            groups.setdefault(partition_name(schema, file.values), []).append(file)
        for name, files in groups.items():
            planned = tuple((file.path, file.size, 0) for file in files)
            size = sum(file.size for file in files)
            plan = PartitionPlan(0, name, size, planned, source=self._snapshot.source)
            text = files[0].values.get(schema.physical[column]) or None
            value = None if text is None else _value(text, schema.columns[column])
            yield ValuedPartition(plan, value, text=text or "")

    def remove(self, paths: Collection[str], planned: PartitionPlan) -> RemovedFiles:
        wanted = frozenset(paths)
        looked_at = parse_source(planned.source)[1]

        def attempt() -> RemovedFiles:
            nonlocal looked_at
            snapshot: DeltaSnapshot = self._publisher.load().base
            self._check(snapshot)
            for version in range(looked_at + 1, snapshot.version + 1):
                if (done := self._removed_by(version, snapshot.root)) is not None:
                    return RemovedFiles(wanted & done, str(version))
            looked_at = snapshot.version
            left = [snapshot.files[path] for path in sorted(wanted) if path in snapshot.files]
            if not left:
                return RemovedFiles(frozenset(), str(snapshot.version))
            self._publisher.commit(snapshot, self._commit(snapshot, left))
            return RemovedFiles(frozenset(file.path for file in left), str(snapshot.version + 1))

        return commit_with_retries(attempt, self._context)

    def _removed_by(self, version: int, root: str) -> frozenset[str] | None:
        """The files that a commit of this operation has removed; None for other and for missing commits."""
        log = LogFiles(root)
        own, encoded = False, list[object]()
        try:
            for action in commit(log, version):
                own = own or self._is_own(action.get("commitInfo"))
                removed = action.get("remove")
                if isinstance(removed, dict):
                    encoded.append(removed.get("path"))
        except Gone:
            return None
        return frozenset(data_path(root, path, log.files) for path in encoded) if own else None

    def _is_own(self, info: Any) -> bool:
        """Whether a commit's information names this operation."""
        parameters = info.get("operationParameters") if isinstance(info, dict) else None
        named = parameters.get(OPERATION) if isinstance(parameters, dict) else None
        return named == self._context.operation and info.get("operation") == _OPERATION

    def _commit(self, snapshot: DeltaSnapshot, files: list[AddedFile]) -> bytes:
        now = int(time.time() * 1000)
        operation = self._context.operation
        info = self._publisher.info(snapshot, _OPERATION, {OPERATION: operation, FENCE: COMPLETION})
        info["operationMetrics"] = {
            "numRemovedFiles": str(len(files)),
            "numRemovedBytes": str(sum(file.size for file in files)),
        }
        done = {"appId": f"distop/{operation}", "version": 1, "lastUpdated": now}
        removes = ({"remove": metadata_commit.remove_action(file, now, data_change=True)} for file in files)
        return metadata_commit.actions_text(info, [{"txn": done}, *removes])


def _value(text: str, kind: Any) -> Any:
    """A partition's value; the text itself if it is not of the column's type."""
    try:
        if kind == "date":
            return date.fromisoformat(text)
        if kind in ("timestamp", "timestamp_ntz"):
            return datetime.fromisoformat(text)
    except ValueError:
        pass
    return text
