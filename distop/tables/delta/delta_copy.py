"""Copies a version of a Delta table: a log of its own at another place, without a JVM.

The log has paths below the table's folder only, so data files and files of deletion vectors are copied as they are, and
the first commit adds the copies. A later copy to the same place is one more commit.
"""

from __future__ import annotations

import hashlib
import json
import uuid
from typing import TYPE_CHECKING, Any

from distop.errors import InvalidArgument, TableUnavailable
from distop.storage.deletion import Place
from distop.storage.files import local_path
from distop.storage.location import Location
from distop.tables import commit_file
from distop.tables.delta import metadata_commit
from distop.tables.delta.delta_log import COMMIT, commit, current_snapshot
from distop.tables.delta.log_files import LogFiles
from distop.tables.delta.table_paths import LOG, commit_name
from distop.tables.pinned_files import PinnedFiles
from distop.tables.reading.parquet_footers import size_and_stamp
from distop.tables.table_copy import MARK, TableCopy

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from distop.tables.delta.delta_log import AddedFile, DeltaSnapshot

KNOWN = metadata_commit.KNOWN - {"domainMetadata", "clustering", "rowTracking"}
"""The features of tables that can be copied: what these need is in the actions of files, and in the metadata."""
_OPERATION = "EXPORT"


class DeltaCopy(TableCopy):
    """A version of a table."""

    def __init__(self, snapshot: DeltaSnapshot, check: Callable[[], None]) -> None:
        """Raises InvalidArgument for a table that cannot be copied, TableUnavailable."""
        metadata_commit.check_writable(snapshot, KNOWN, "export it without 'register'")
        self.origin = snapshot.source
        self._snapshot = snapshot
        files: dict[str, int] = {file.path: file.size for file in snapshot.files.values()}
        vectors = {file.vector.path for file in snapshot.files.values() if file.vector and file.vector.path}
        for path in sorted(vectors):
            check()
            try:
                files[path] = size_and_stamp(path)[0]
            except OSError as error:
                raise TableUnavailable(f"cannot read the deletion vectors {path}: {error}") from error
        pinned = [(path, size, 0) for path, size in files.items()]
        self.pinned = PinnedFiles(snapshot.root, str(snapshot.version), pinned)

    def write(self, place: Place, check: Callable[[], None]) -> None:
        commit_file.check_suitable(place.location)
        location = str(local_path(place.location) or place.location)
        former = self._former(location, check)
        actions = list(self._actions(location, former))
        if former is not None and not actions:
            return
        mark = self._mark(location)
        info = {
            "timestamp": max((file.time for file in self._snapshot.files.values()), default=0),
            "operation": _OPERATION,
            "operationParameters": {MARK: mark},
            "engineInfo": "distop",
        }
        number = 0 if former is None else former.version + 1
        lines = [{"commitInfo": info}, *actions]
        data = "".join(json.dumps(one, separators=(",", ":"), ensure_ascii=False) + "\n" for one in lines).encode()
        commit_file.create(Place(place.anchor, f"{place.path}/{LOG}" if place.path else LOG), commit_name(number), data)

    def _former(self, location: str, check: Callable[[], None]) -> DeltaSnapshot | None:
        """The table at the new place; None if there is none. Raises InvalidArgument if somebody else has changed it."""
        at = Location.of(location)
        if not any(COMMIT.fullmatch(name) for name in at.names_in(LOG)):
            return None
        former = current_snapshot(at, check)
        info: Mapping[str, Any] = next(
            (one["commitInfo"] for one in commit(LogFiles(former.root), former.version) if "commitInfo" in one), {}
        )
        if info.get("operation") != _OPERATION or MARK not in (info.get("operationParameters") or {}):
            raise InvalidArgument(
                f"the table in {location} has been changed since it was exported: export to another place"
            )
        return former

    def _actions(self, location: str, former: DeltaSnapshot | None) -> Iterator[dict[str, Any]]:
        """The actions of the commit, always the same ones; none if the former table is the same."""
        snapshot = self._snapshot
        metadata = {**snapshot.metadata, "id": str(uuid.uuid5(uuid.NAMESPACE_URL, f"{snapshot.table_id} {location}"))}
        if former is None or former.protocol != snapshot.protocol:
            yield {"protocol": dict(snapshot.protocol)}
        if former is None or dict(former.metadata) != metadata:
            yield {"metaData": metadata}
        there = {file.key: file for file in former.files.values()} if former is not None else {}
        here = {file.key: file for file in snapshot.files.values()}
        for key, file in there.items():
            if key not in here:
                yield {"remove": metadata_commit.remove_action(file, file.time, data_change=True)}
        for key, file in here.items():
            if key not in there:
                yield {"add": _added(file)}

    def _mark(self, location: str) -> str:
        parts = [self._snapshot.id, location]
        return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


def _added(file: AddedFile) -> dict[str, Any]:
    found: dict[str, Any] = {
        "path": file.encoded,
        "partitionValues": dict(file.values),
        "size": file.size,
        "modificationTime": file.time,
        "dataChange": True,
    }
    if isinstance(file.statistics, str):
        found["stats"] = file.statistics
    elif file.statistics is not None and isinstance(file.statistics.get("numRecords"), int):
        # Of a checkpoint: its bounds are not those of JSON.
        found["stats"] = json.dumps({"numRecords": file.statistics["numRecords"], "tightBounds": False})
    if (vector := file.vector) is not None:
        kind, rest = file.vector_id[:1], file.vector_id[1:]
        text, _, offset = rest.rpartition("@")
        found["deletionVector"] = {
            "storageType": kind,
            "pathOrInlineDv": text,
            "sizeInBytes": vector.size,
            "cardinality": vector.rows,
            **({"offset": int(offset)} if offset.isdigit() else {}),
        }
    return found
