"""The plan of an operation: its partitions as they were frozen, in chunks that fit into etcd's values."""

from __future__ import annotations

import json
from dataclasses import dataclass, field, replace
from functools import cache, lru_cache
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from distop.errors import InvalidArgument
from distop.protocol.field_checks import checked, within
from distop.protocol.frozen import frozen
from distop.protocol.identity import plan_digest
from distop.protocol.json_codec import SCHEMA_VERSION, UNREADABLE, dumps, loads
from distop.protocol.operation_options import DEFAULT, Options
from distop.protocol.records import WHOLE, TableRecord

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

MAX_PARTITIONS = 1_000_000
MAX_CHUNK_BYTES = 512 * 1024
CHUNK_PAGE = 4
"""Chunks of a plan read at once: an answer has its limit (T2)."""


WIDE = "@"
"""What the name of a job over several partitions begins with."""


def is_wide(name: str) -> bool:
    """A job of this name is over several partitions. A partition whose column begins so has an ``=`` in its name."""
    return name.startswith(WIDE) and "=" not in name


def files_of(rows: Iterable[Sequence[Any]]) -> tuple[tuple[str, int, int], ...]:
    """A list of files, as JSON has it."""
    return tuple((f[0], int(f[1]), int(f[2])) for f in rows)


@dataclass(frozen=True, slots=True)
class Pinned:
    """Another table that a job reads, as it was when the operation was planned: its files as a partition has them."""

    table: TableRecord
    version: str = ""
    files: tuple[tuple[str, int, int], ...] = ()
    files_at: str = ""
    source: str = ""
    folders: Mapping[str, str] = field(default_factory=dict)
    """As in PartitionPlan."""

    def to_json(self) -> dict[str, Any]:
        data: dict[str, Any] = {"table": self.table.to_json(), "version": self.version}
        if self.files_at:
            data["files_at"] = self.files_at
        else:
            data["files"] = [list(f) for f in self.files]
        if self.source:
            data["source"] = self.source
        if self.folders:
            data["folders"] = dict(self.folders)
        return data

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Pinned:
        return cls(
            TableRecord.from_json(data["table"]),
            data.get("version", ""),
            files_of(data.get("files", ())),
            data.get("files_at", ""),
            data.get("source", ""),
            data.get("folders") or {},
        )


@dataclass(frozen=True, slots=True)
class PartitionPlan:
    """One partition as the plan froze it: its files as (path, size in bytes, mtime in ns; 0: the format never changes a
    file that it has written).
    """

    partition: int
    name: str
    bytes: int = 0
    files: tuple[tuple[str, int, int], ...] = ()
    files_at: str = ""
    """Where the file list stands when it is too large for etcd: a path under the shared directory."""
    values: Mapping[str, Any] = field(default_factory=dict)
    """The partition columns' values as text (None: null), for tables that have them in their paths alone."""
    source: str = ""
    """What the files are to be read through, where they alone do not tell the rows: of Iceberg the metadata file that
    the plan was made of, which says which of their rows are deleted.
    """
    beside: tuple[Pinned, ...] = ()
    """Other tables that the job reads."""
    folders: Mapping[str, str] = field(default_factory=dict)
    """Of a job over several partitions of a catalog: those folders that are not called as their partitions are, each
    with the name of its partition. They are spilled with the files.
    """

    def lists(self) -> list[PartitionPlan | Pinned]:
        """Whatever of it has a list of files."""
        return [self, *self.beside]

    def to_json(self) -> dict[str, Any]:
        data: dict[str, Any] = {"partition": self.partition, "name": self.name, "bytes": self.bytes}
        if self.files_at:
            data["files_at"] = self.files_at
        else:
            data["files"] = [list(f) for f in self.files]
        if self.values:
            data["values"] = dict(self.values)
        if self.source:
            data["source"] = self.source
        if self.beside:
            data["beside"] = [other.to_json() for other in self.beside]
        if self.folders:
            data["folders"] = dict(self.folders)
        return data

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> PartitionPlan:
        return cls(
            int(data["partition"]),
            data["name"],
            int(data.get("bytes", 0)),
            files_of(data.get("files", ())),
            data.get("files_at", ""),
            data.get("values") or {},
            data.get("source", ""),
            tuple(map(Pinned.from_json, data.get("beside", ()))),
            data.get("folders") or {},
        )


@dataclass(frozen=True, slots=True)
class Planned:
    """What ``partitions()`` returns: the frozen partitions (ordinals 0…N−1 in order) and the table's version,
    a text that changes when what was planned changes.
    """

    partitions: Sequence[PartitionPlan]
    version: str = ""
    options: Mapping[str, Any] = field(default_factory=dict)
    """What was found out about the table and each job needs, as options of its record: see Plan."""


def over(name: str, partitions: Sequence[PartitionPlan]) -> PartitionPlan:
    """A job over all of these partitions, which one planning has made: with their files, and where these lie in folders
    that are not called as their partitions are. ``name``: see :func:`is_wide`.
    """
    files = tuple(file for partition in partitions for file in partition.files)
    folders: dict[str, str] = {}
    for partition in partitions:
        if partition.values:
            own = {file[0].rpartition("/")[0] for file in partition.files}
            folders |= {folder: partition.name for folder in own if not folder.endswith(f"/{partition.name}")}
    return PartitionPlan(0, name, sum(p.bytes for p in partitions), files, source=partitions[0].source, folders=folders)


def pinned(table: TableRecord, planned: Planned) -> Pinned:
    """A table as it was planned, for a job that reads it beside its own (``PartitionPlan.beside``)."""
    whole = over("", planned.partitions)
    found = table.extended(planned.options)
    return Pinned(found, planned.version, whole.files, source=whole.source, folders=whole.folders)


def select(partitions: Sequence[PartitionPlan], names: Sequence[str] | None) -> list[PartitionPlan]:
    """Those of the given names, all of them for None, numbered anew from 0 in their order. Raises InvalidArgument for
    names that are unknown, empty or there twice, and over a million.
    """
    known: set[str] = set()
    for partition in partitions:
        if not partition.name:
            raise InvalidArgument(f"partition {partition.partition} has no name")
        if partition.name in known:
            raise InvalidArgument(f"the partition name {partition.name!r} is there twice")
        known.add(partition.name)
    if names is not None:
        wanted = set(names)
        if unknown := sorted(wanted - known):
            few = ", ".join(repr(name) for name in unknown[:5])
            rest = f" and {len(unknown) - 5} more" if len(unknown) > 5 else ""
            raise InvalidArgument(f"the table has no partition {few}{rest}")
        partitions = [p for p in partitions if p.name in wanted]
    if len(partitions) > MAX_PARTITIONS:
        raise InvalidArgument(f"there are {len(partitions)} partitions: at most {MAX_PARTITIONS} are allowed")
    return [p if p.partition == i else replace(p, partition=i) for i, p in enumerate(partitions)]


@frozen
class Plan:
    """``<root>.plan``: written last, after its chunks. ``digest`` covers the chunks' bytes in order (invariant 13)."""

    count: int
    version: str
    digest: str
    chunks: int
    spilled: int = 0
    """Partitions whose file lists stand in the shared directory: what the cleanup has to remove there."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Of the table, as its catalog had them when it was planned: jobs find them among those of its record. Once for
    all partitions, since a schema may be large.
    """
    beside: tuple[str, ...] = ()
    """The names of other tables that its jobs read, sorted: an executor must serve them, too."""

    def encode(self) -> bytes:
        if self.spilled or self.options or self.beside:
            return self._encode()
        return _plain_plan(self.count, self.version, self.digest, self.chunks)

    def _encode(self) -> bytes:
        data = {
            "v": SCHEMA_VERSION,
            "count": self.count,
            "version": self.version,
            "digest": self.digest,
            "chunks": self.chunks,
        }
        if self.spilled:
            data["spilled"] = self.spilled
        if self.options:
            data["options"] = dict(self.options)
        if self.beside:
            data["beside"] = list(self.beside)
        return dumps(data)

    @classmethod
    def decode(cls, value: bytes) -> Plan:
        return _plan(value) if len(value) <= _SMALL else cls._decode(value)

    @classmethod
    def _decode(cls, value: bytes) -> Plan:
        data = loads(value)
        return checked(
            cls(
                within(int(data["count"]), 0, MAX_PARTITIONS, "count"),
                data.get("version", ""),
                data.get("digest", ""),
                within(int(data.get("chunks", 0)), 0, MAX_PARTITIONS, "chunks"),
                int(data.get("spilled", 0)),
                data.get("options") or {},
                tuple(data.get("beside") or ()),
            )
        )


_ROW = len('{"partition":0}')
"""Bytes of a job in a chunk at least."""


def begin_with(plan: Plan, chunks: Sequence[bytes]) -> list[int]:
    """The first ordinal in each of a plan's chunks. Raises ValueError where they are not the chunks that were planned,
    or of a form that is not known here.
    """
    if plan_digest(chunks) != plan.digest:
        raise ValueError("does not fit its digest: its chunks are not the ones planned")
    starts = first_ordinals(plan, chunks)
    sizes = [end - start for start, end in pairwise([*starts, plan.count])] if starts else []
    room = [len(chunk) // _ROW for chunk in chunks]
    # Whoever opens it keeps a number for each job: a count alone must not take memory.
    if starts[:1] not in ([], [0]) or not all(0 < size <= most for size, most in zip(sizes, room, strict=False)):
        raise ValueError(f"has chunks that do not hold its {plan.count} jobs")
    return starts


def first_ordinals(plan: Plan, chunks: Sequence[bytes]) -> list[int]:
    """As :func:`begin_with`, of chunks that are known to fit the plan's digest: it was made of them here."""
    first = json.JSONDecoder().raw_decode
    try:
        return [int(first(chunk.decode(), 1)[0]["partition"]) for chunk in chunks] if plan.count else []
    except UNREADABLE as error:
        raise ValueError("has chunks of a form that this release does not know: use a later release") from error


@frozen
class Gate:
    """``distOpOpen…``: the key's existence is the gate. ``count``: the jobs of the plan behind it, as a hint with which
    those of a small operation are claimed before its plan is read; 0: the plan tells. ``options`` and ``where`` are the
    operation's, ``beside`` the plan's: whoever claims behind this gate has read them here.
    """

    count: int = 0
    options: Options = DEFAULT
    where: Mapping[str, str] = field(default_factory=dict)
    beside: tuple[str, ...] = ()

    def tables(self, own: str) -> tuple[str, ...]:
        """All tables that the jobs of an operation on this table touch."""
        return (own, *self.beside)

    def encode(self) -> bytes:
        if not self.where and not self.beside and self.options == DEFAULT:
            return _plain_gate(self.count)
        data: dict[str, Any] = {"v": SCHEMA_VERSION}
        if self.count:
            data["count"] = self.count
        if self.options != DEFAULT:
            data["options"] = self.options.to_json()
        if self.where:
            data["where"] = dict(self.where)
        if self.beside:
            data["beside"] = list(self.beside)
        return dumps(data)

    @classmethod
    def decode(cls, value: bytes) -> Gate:
        """Whatever stands there: what cannot be read gives no hint."""
        return _gate(value) if len(value) <= _SMALL else cls._decode(value)

    @classmethod
    def _decode(cls, value: bytes) -> Gate:
        try:
            data = loads(value)
            return checked(
                cls(
                    within(int(data.get("count", 0)), 0, MAX_PARTITIONS, "count")
                    if int(data.get("v", 0)) <= SCHEMA_VERSION
                    else 0,
                    Options.from_json(data["options"]) if "options" in data else DEFAULT,
                    dict(data.get("where") or {}),
                    tuple(data.get("beside") or ()),
                )
            )
        except UNREADABLE:
            return cls()


_SMALL = 200
"""Bytes of a record of which thousands may be alike, and which is read once."""


@lru_cache(maxsize=64)
def _plan(value: bytes) -> Plan:
    return Plan._decode(value)


@lru_cache(maxsize=256)
def _gate(value: bytes) -> Gate:
    return Gate._decode(value)


@lru_cache(maxsize=64)
def _plain_plan(count: int, version: str, digest: str, chunks: int) -> bytes:
    return Plan(count, version, digest, chunks)._encode()


@lru_cache(maxsize=256)
def _plain_gate(count: int) -> bytes:
    return dumps({"v": SCHEMA_VERSION, **({"count": count} if count else {})})


def encode_chunk(partitions: Iterable[PartitionPlan]) -> bytes:
    """A chunk of the plan: a JSON array."""
    return dumps([p.to_json() for p in partitions])


def decode_chunk(value: bytes) -> list[PartitionPlan]:
    """The reverse of :func:`encode_chunk`."""
    return [PartitionPlan.from_json(item) for item in loads(value)]


@cache
def whole_plan() -> tuple[Plan, list[bytes]]:
    """The plan of an operation on no table, and its only chunk: one job for everything."""
    chunk = encode_chunk([PartitionPlan(0, WHOLE)])
    return Plan(1, "", plan_digest([chunk]), 1), [chunk]


def chunked(partitions: Sequence[PartitionPlan], limit: int = MAX_CHUNK_BYTES) -> list[bytes]:
    """The plan's partitions as encoded chunks of at most ``limit`` bytes each (a larger single one stands alone)."""
    chunks: list[bytes] = []
    rows: list[bytes] = []
    size = 2
    for partition in partitions:
        row = dumps(partition.to_json())
        if rows and size + len(row) + 1 > limit:
            chunks.append(b"[" + b",".join(rows) + b"]")
            rows, size = [], 2
        rows.append(row)
        size += len(row) + 1
    if rows:
        chunks.append(b"[" + b",".join(rows) + b"]")
    return chunks
