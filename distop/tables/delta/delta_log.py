"""Reads the log of a Delta table at a version: protocol, metadata and active files, without a JVM.

The state is that of the newest checkpoint up to the version, plus the commits after it. ``_last_checkpoint`` is only a
hint, and so are checksums and compacted logs: the listing of the log decides. A version that this process has read
before replaces an older checkpoint, if the log still has its commit.
"""

from __future__ import annotations

import json
import re
from dataclasses import field
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote

from distop.errors import InvalidArgument, TableUnavailable
from distop.protocol.frozen import frozen
from distop.protocol.texts import shown
from distop.runtime.lru_cache import LruCache
from distop.tables.delta import checkpoints
from distop.tables.delta.deletion_vectors import DeletionVector, is_count, vector_id, vector_of
from distop.tables.delta.delta_schema import DeltaSchema
from distop.tables.delta.log_files import AHEAD_BYTES, LogFiles, digest_of
from distop.tables.delta.table_features import reader_features
from distop.tables.delta.table_paths import LOG, commit_name, data_path, parse_source, source_of
from distop.tables.reading.file_facts import Gone
from distop.tables.reading.table_folders import advice

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence

    from distop.storage.location import Location

COMMIT = re.compile(r"([0-9]{20})\.json")
"""The names of commits in a log."""
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
    or parsed if the checkpoint has them so; None if there are none. ``vector_id``: identifies the vector in the log;
    ``encoded``: the path as the log has it, percent-encoded.
    """

    path: str
    size: int
    time: int
    values: Mapping[str, str | None]
    statistics: str | Mapping[str, Any] | None
    vector: DeletionVector | None = None
    vector_id: str = ""
    encoded: str = ""

    @property
    def key(self) -> tuple[str, str]:
        """What a ``remove`` of this file must have: its path as in the log, and the id of its vector."""
        return self.encoded, self.vector_id


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
    return _newest(location, location.names_in(LOG))


def _newest(location: Location, names: Collection[str]) -> int:
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
    names = location.names_in(LOG)
    try:
        return _cached(location.text, _newest(location, names), check, names)
    except Gone as error:  # a cleanup of the log between the listing and the reading
        raise TableUnavailable(str(error)) from error


def snapshot_of(source: str, check: Callable[[], None] = lambda: None) -> DeltaSnapshot:
    """The version of a plan with this ``source``.

    Raises Gone if the log no longer has it, InvalidArgument if the log is invalid, TableUnavailable.
    """
    return _cached(*parse_source(source), check)


def _cached(root: str, version: int, check: Callable[[], None], names: Collection[str] | None = None) -> DeltaSnapshot:
    """``names``: those in the log, if it was listed."""
    log = LogFiles(root)
    last = log.find(commit_name(version))
    digest = "" if last is None else digest_of(last)
    kept = last if last is not None and len(last) <= AHEAD_BYTES else None
    del last

    def read() -> DeltaSnapshot:
        return _read(log, version, digest, kept, log.names() if names is None else names, check)

    return _snapshots.get_once((root, version, digest), read, check) if digest else read()


def commits(log: LogFiles, versions: Sequence[int]) -> Iterator[Iterator[Mapping[str, Any]]]:
    """The actions of each of some commits, in order. Raises the errors of :func:`commit`."""
    with log.read_each([commit_name(version) for version in versions]) as found:
        for version in versions:
            try:
                data = next(found)
            except FileNotFoundError:
                raise _gone(log.root, version) from None
            yield lines(data, log.path(commit_name(version)))


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


def _read(
    log: LogFiles, version: int, digest: str, last: bytes | None, names: Collection[str], check: Callable[[], None]
) -> DeltaSnapshot:
    """Read a version. ``last``: its commit, if it was read and is small; ``names``: those in the log."""
    checkpoint = checkpoints.newest(names, version)
    known = {int(found[1]) for found in map(COMMIT.fullmatch, names) if found}
    former = _former(log, version, -1 if checkpoint is None else checkpoint.version, known)
    first = former.version + 1 if former is not None else 0 if checkpoint is None else checkpoint.version + 1
    for needed in range(version, first - 1, -1):
        if needed not in known:
            if needed == version or needed < min(known, default=0):
                raise _gone(log.root, version)
            raise InvalidArgument(
                f"the log of the Delta table {log.root!r} lacks version {needed}: restore the file "
                f"{log.path(commit_name(needed))}"
            )
    replay = _Replay(log, check, former)
    if former is None and checkpoint is not None:
        try:
            replay.apply(checkpoints.actions(checkpoint, log, lines, check))
        except FileNotFoundError:
            raise _gone(log.root, version) from None
    for actions in commits(log, range(first, version + (last is None))):
        replay.apply(actions)
    if last is not None and first <= version:
        replay.apply(lines(last, log.path(commit_name(version))))
    return replay.snapshot(version, digest)


def _former(log: LogFiles, version: int, checkpoint: int, known: Collection[int]) -> DeltaSnapshot | None:
    """The newest version that this process has read, between a checkpoint and another version.

    The log must still have its commit: another table in the same folder has another one.
    """
    found = [
        one
        for one in _snapshots.values()
        if one.root == log.root and checkpoint <= one.version < version and one.version in known
    ]
    newest = max(found, key=lambda one: one.version, default=None)
    return newest if newest is not None and log.digest(newest.version) == newest.digest else None


class _Replay:
    """Applies the actions of a checkpoint and of commits in order. Only the result is interpreted."""

    def __init__(self, log: LogFiles, check: Callable[[], None], former: DeltaSnapshot | None) -> None:
        """``former``: the version to begin with."""
        self._root = log.root
        self._allowed = log.files
        self._check = check
        self._protocol: Mapping[str, Any] | None = None
        self._metadata: Mapping[str, Any] | None = None
        self._active: dict[tuple[str, str], Mapping[str, Any] | AddedFile] = {}
        if former is not None:
            self._protocol, self._metadata = former.protocol, former.metadata
            start = len(f"{log.root}/")
            self._active = {(path[start:], file.vector_id): file for path, file in former.files.items()}

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
            file = self._again(add) if isinstance(add, AddedFile) else self._added(add)
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
        key, encoded = vector_id(add.get("deletionVector")), str(add.get("path"))
        return AddedFile(path, size, time, values, statistics, vector, key, encoded)

    def _again(self, file: AddedFile) -> AddedFile:
        """A file of a former version, whose folder may be a link by now."""
        self._allowed.check((file.path, *([file.vector.path] if file.vector and file.vector.path else ())), below=True)
        return file

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
