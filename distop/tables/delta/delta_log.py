"""Reads the log of a Delta table at a version: protocol, metadata and active files, without a JVM.

The state is that of the newest checkpoint up to the version, plus the commits after it. ``_last_checkpoint`` is only a
hint, and so are checksums and compacted logs: the listing of the log decides.
"""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import field
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote

from distop.errors import InvalidArgument, TableUnavailable
from distop.protocol.frozen import frozen
from distop.protocol.texts import shown
from distop.runtime.lru_cache import LruCache
from distop.storage import files as storage_files
from distop.storage.confinement import TableFiles
from distop.storage.files import METADATA_BYTES, NotRegular, TooLarge
from distop.storage.location import Location
from distop.storage.store_errors import unavailable
from distop.tables.delta import checkpoints
from distop.tables.delta.deletion_vectors import DeletionVector, is_count, vector_id, vector_of
from distop.tables.delta.delta_schema import DeltaSchema
from distop.tables.delta.table_features import reader_features
from distop.tables.delta.table_paths import LOG, commit_name, data_path, parse_source, source_of
from distop.tables.reading.file_facts import Gone
from distop.tables.reading.table_folders import advice

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

COMMIT = re.compile(r"([0-9]{20})\.json")
"""The names of commits in a log."""
_LOG_BYTES = 1 << 30
"""Maximum bytes of all files of a log that are read for one version."""
_CHECKED_EVERY = 1_000
"""Number of actions between two checks whether to stop."""
_PROVIDER = "parquet"
_LONGEST_ID = 255
"""Maximum characters of a table's id, which is a UUID: plans and certificates have it."""
_KINDS = ("protocol", "metaData", "add", "remove")
"""The actions that define a version."""

_snapshots: LruCache[DeltaSnapshot] = LruCache(4)


@frozen
class AddedFile:
    """An active file.

    ``path``: as planned; ``values``: the texts of the partition columns, by their names in files; ``statistics``: JSON,
    or parsed if the checkpoint has them so; None if there are none.
    """

    path: str
    size: int
    time: int
    values: Mapping[str, str | None]
    statistics: str | Mapping[str, Any] | None
    vector: DeletionVector | None = None


@frozen
class DeltaSnapshot:
    """A version of a Delta table. ``digest``: of its commit, "" if that was removed after a checkpoint.

    ``protocol`` and ``metadata``: the actions, as the log has them.
    """

    root: str
    version: int
    digest: str
    table_id: str
    schema: DeltaSchema
    features: frozenset[str]
    files: Mapping[str, AddedFile] = field(default_factory=dict)
    protocol: Mapping[str, Any] = field(default_factory=dict)
    metadata: Mapping[str, Any] = field(default_factory=dict)

    @property
    def source(self) -> str:
        """The ``source`` of plans of this version: its commit file."""
        return source_of(self.root, self.version)

    @property
    def id(self) -> str:
        """The version with the digest of its commit: another table in the same folder has another one."""
        return f"{self.version}-{self.digest or self.table_id}"


def current_version(location: Location) -> int:
    """The newest version of the table in a folder.

    Raises InvalidArgument if it is no Delta table, TableUnavailable if the log cannot be listed.
    """
    names = location.names_in(LOG)
    newest = max((int(found[1]) for found in map(COMMIT.fullmatch, names) if found), default=-1)
    checkpoint = checkpoints.newest(names, 10**20)
    newest = max(newest, checkpoint.version if checkpoint is not None else -1)
    if newest < 0:
        raise InvalidArgument(
            f"the location {location.text!r} has no Delta table: it has no {LOG} with commits{advice(location)}"
        )
    return newest


def current_snapshot(location: Location, check: Callable[[], None] = lambda: None) -> DeltaSnapshot:
    """The newest version of the table in a folder. Raises the errors of :func:`current_version` and :func:`_read`."""
    try:
        return _cached(location.text, current_version(location), check)
    except Gone as error:  # a cleanup of the log between the listing and the reading
        raise TableUnavailable(str(error)) from error


def snapshot_of(source: str, check: Callable[[], None] = lambda: None) -> DeltaSnapshot:
    """The version of a plan with this ``source``.

    Raises Gone if the log no longer has it, InvalidArgument if the log is invalid, TableUnavailable.
    """
    return _cached(*parse_source(source), check)


def _cached(root: str, version: int, check: Callable[[], None]) -> DeltaSnapshot:
    log = LogFiles(root)
    digest = log.digest(version)
    if not digest:
        return _read(log, version, digest, check)
    return _snapshots.get_once((root, version, digest), lambda: _read(log, version, digest, check), check)


class LogFiles:
    """Opens files of a table's log, and limits their size."""

    def __init__(self, root: str) -> None:
        self.root = root
        self.files = TableFiles(root)
        self._left = _LOG_BYTES

    def path(self, name: str) -> str:
        """The path or URL of a file below the log."""
        return f"{self.root}/{LOG}/{name}"

    def read(self, name: str) -> bytes:
        """The bytes of a file below the log.

        Raises FileNotFoundError, InvalidArgument for a link or a file that is too large, TableUnavailable.
        """
        path = self.path(name)
        self.files.check((path,), below=True)
        try:
            found = storage_files.read(path, min(METADATA_BYTES, self._left), follow=False)
        except FileNotFoundError:
            raise
        except (NotRegular, TooLarge) as error:
            raise InvalidArgument(str(error)) from error
        except OSError as error:
            raise unavailable(f"cannot read the file {path}: {error.strerror or error}", error) from error
        self._left -= len(found)
        return found

    def names(self) -> frozenset[str]:
        """The names in the log. Raises InvalidArgument and TableUnavailable."""
        return Location.of(self.root).names_in(LOG)

    def digest(self, version: int) -> str:
        """A digest of a version's commit; "" if the log does not have it."""
        try:
            data = self.read(commit_name(version))
        except FileNotFoundError:
            return ""
        return hashlib.blake2b(data, digest_size=8).hexdigest()


def commit(log: LogFiles, version: int) -> Iterator[Mapping[str, Any]]:
    """The actions of a commit. Raises Gone if the log no longer has it, InvalidArgument and TableUnavailable."""
    name = commit_name(version)
    try:
        data = log.read(name)
    except FileNotFoundError:
        raise _gone(log.root, version) from None
    return lines(data, log.path(name))


def _gone(root: str, version: int) -> Gone:
    return Gone(
        f"the log of the Delta table {root} no longer has version {version}: the log was cleaned up, or the table was "
        "dropped; start the operation again"
    )


def lines(data: bytes, path: str) -> Iterator[Mapping[str, Any]]:
    """The actions in a file of the log. ``path``: of the file, for the error. Raises InvalidArgument."""
    try:
        for line in data.decode().split("\n"):
            if line.strip():
                found = json.loads(line)
                if not isinstance(found, dict):
                    raise TypeError
                yield found
    except (ValueError, TypeError, RecursionError) as error:
        raise InvalidArgument(
            f"the file {path} of a Delta table's log is damaged: a line is not a JSON object; restore the file"
        ) from error


def _read(log: LogFiles, version: int, digest: str, check: Callable[[], None]) -> DeltaSnapshot:
    names = log.names()
    checkpoint = checkpoints.newest(names, version)
    known = {int(found[1]) for found in map(COMMIT.fullmatch, names) if found}
    first = 0 if checkpoint is None else checkpoint.version + 1
    for needed in range(version, first - 1, -1):
        if needed not in known:
            if needed == version or needed < min(known, default=0):
                raise _gone(log.root, version)
            raise InvalidArgument(
                f"the log of the Delta table {log.root!r} lacks version {needed}: restore the file "
                f"{log.path(commit_name(needed))}"
            )
    replay = _Replay(log, check)
    if checkpoint is not None:
        try:
            replay.apply(checkpoints.actions(checkpoint, log, lines, check))
        except FileNotFoundError:
            raise _gone(log.root, version) from None
    for number in range(first, version + 1):
        replay.apply(commit(log, number))
    return replay.snapshot(version, digest)


class _Replay:
    """Applies the actions of a checkpoint and of commits in order. Only the result is interpreted."""

    def __init__(self, log: LogFiles, check: Callable[[], None]) -> None:
        self._root = log.root
        self._allowed = log.files
        self._check = check
        self._protocol: Mapping[str, Any] | None = None
        self._metadata: Mapping[str, Any] | None = None
        self._active: dict[tuple[str, str], Mapping[str, Any]] = {}

    def apply(self, actions: Iterable[Mapping[str, Any]]) -> None:
        """Apply the actions of one commit, or of a checkpoint. Raises InvalidArgument."""
        added: dict[tuple[str, str], Mapping[str, Any]] = {}
        for n, action in enumerate(actions):
            if n % _CHECKED_EVERY == 0:
                self._check()
            found = {kind: self._object(value, kind) for kind, value in action.items() if value and kind in _KINDS}
            self._protocol = found.get("protocol", self._protocol)
            self._metadata = found.get("metaData", self._metadata)
            if "remove" in found:
                self._active.pop(file_key(found["remove"]), None)
            if "add" in found:
                added[file_key(found["add"])] = found["add"]
        # A commit that deletes rows removes a file and adds it with its deletion vector.
        self._active |= added

    def snapshot(self, version: int, digest: str) -> DeltaSnapshot:
        """The state after all actions.

        Raises InvalidArgument if it is incomplete, has an unknown reader feature, a file that may not belong to the
        table, or a file twice.
        """
        if self._protocol is None or self._metadata is None:
            raise InvalidArgument(f"the log of the Delta table {self._root!r} has no protocol, or no metadata")
        # A table with an unknown feature is refused before anything else is interpreted.
        features = reader_features(self._protocol, self._root)
        table_id, given = self._metadata.get("id"), self._metadata.get("format") or {}
        if not isinstance(table_id, str) or not 0 < len(table_id) <= _LONGEST_ID:
            raise self._invalid("table id")
        provider = self._object(given, "format").get("provider", _PROVIDER)
        if provider != _PROVIDER:
            raise InvalidArgument(
                f"the Delta table {self._root!r} has files of the format {shown(provider)}: only parquet is supported"
            )
        schema = DeltaSchema(self._metadata, features, self._root)
        found: dict[str, AddedFile] = {}
        for n, add in enumerate(self._active.values()):
            if n % _CHECKED_EVERY == 0:
                self._check()
            file = self._added(add)
            if file.path in found:
                raise InvalidArgument(f"the log of the Delta table {self._root!r} has the file {file.path!r} twice")
            found[file.path] = file
        return DeltaSnapshot(
            self._root, version, digest, table_id, schema, features, found, self._protocol, self._metadata
        )

    def _added(self, add: Mapping[str, Any]) -> AddedFile:
        path = data_path(self._root, add.get("path"), self._allowed)
        size, time, values = add.get("size"), add.get("modificationTime"), add.get("partitionValues")
        statistics = add.get("stats") or add.get("stats_parsed")
        if not (is_count(size) and isinstance(time, int) and isinstance(values, dict) and _are_texts(values)):
            raise self._invalid(f"entry for the file {path!r}")
        if not (statistics is None or isinstance(statistics, str | dict)):
            raise self._invalid(f"entry for the file {path!r}")
        vector = add.get("deletionVector")
        if vector is not None:
            vector = vector_of(self._root, self._object(vector, "deletionVector"), self._allowed)
        return AddedFile(path, size, time, values, statistics, vector)

    def _object(self, found: Any, what: str) -> Mapping[str, Any]:
        if not isinstance(found, dict):
            raise self._invalid(what)
        return found

    def _invalid(self, what: str) -> InvalidArgument:
        return InvalidArgument(f"the log of the Delta table {self._root!r} has an invalid {what}")


def file_key(found: Mapping[str, Any]) -> tuple[str, str]:
    """The identity of an ``add`` or ``remove`` in its table: the file's path, and its deletion vector."""
    return unquote(str(found.get("path"))), vector_id(found.get("deletionVector"))


def _are_texts(values: Mapping[Any, Any]) -> bool:
    return all(_is_text(name) and (value is None or _is_text(value)) for name, value in values.items())


def _is_text(value: Any) -> bool:
    """Whether a value of JSON is a text, without half of a surrogate pair."""
    return isinstance(value, str) and (value.isascii() or not any(0xD800 <= ord(char) < 0xE000 for char in value))
