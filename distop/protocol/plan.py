"""The plan of an operation: its frozen partitions, in chunks that fit into etcd's values."""

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
"""Chunks of a plan that are read at once (T2 limits an answer)."""


WIDE = "@"
"""Prefix of the name of a job over several partitions."""


def is_wide(name: str) -> bool:
    """Whether a job of this name is over several partitions.

    A partition whose column begins with the prefix has an ``=`` in its name.
    """
    return name.startswith(WIDE) and "=" not in name


def files_of(rows: Iterable[Sequence[Any]]) -> tuple[tuple[str, int, int | str], ...]:
    """A list of files from its JSON form."""
    return tuple((f[0], int(f[1]), f[2] if isinstance(f[2], str) else int(f[2])) for f in rows)


@dataclass(frozen=True, slots=True)
class Pinned:
    """Another table that a job reads, frozen when the operation was planned.

    Its files have the form of a partition's.
    """

    table: TableRecord
    version: str = ""
    files: tuple[tuple[str, int, int | str], ...] = ()
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
    """One partition as planned.

    ``files``: (path, size in bytes, stamp). The stamp changes when the file is replaced: its mtime in ns, or the
    version of an object (0: the format never changes a written file).
    """

    partition: int
    name: str
    bytes: int = 0
    files: tuple[tuple[str, int, int | str], ...] = ()
    files_at: str = ""
    """Path of the file list under the shared directory, if it is too large for etcd."""
    values: Mapping[str, Any] = field(default_factory=dict)
    """Values of partition columns as text (None: null), for tables that have them only in paths."""
    source: str = ""
    """What the files must be read through, if they alone do not determine the rows.

    For Iceberg it is the planned metadata file, which lists deleted rows.
    """
    beside: tuple[Pinned, ...] = ()
    """Other tables that the job reads."""
    folders: Mapping[str, str] = field(default_factory=dict)
    """For a job over several partitions of a catalog: folder → name of its partition.

    Only folders whose names differ from their partitions' names. They are spilled with the files.
    """

    def lists(self) -> list[PartitionPlan | Pinned]:
        """All parts with a list of files."""
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
    """The result of ``partitions()``: a table's partitions and its version.

    The partitions have the ordinals 0…N−1, in order. The version is a text that changes when the planned data change.
    """

    partitions: Sequence[PartitionPlan]
    version: str = ""
    options: Mapping[str, Any] = field(default_factory=dict)
    """What planning found out about the table and each job needs, as options of its record: see Plan."""
    removes_table: bool = False
    """The plan removes the table's record when it becomes durable (``Behavior.removes_table``)."""


def over(name: str, partitions: Sequence[PartitionPlan]) -> PartitionPlan:
    """A job over all of these partitions of one planning.

    It has their files, and the folders whose names differ from their partitions' names. ``name``: see :func:`is_wide`.
    """
    files = tuple(file for partition in partitions for file in partition.files)
    folders: dict[str, str] = {}
    for partition in partitions:
        if partition.values:
            own = {file[0].rpartition("/")[0] for file in partition.files}
            folders |= {folder: partition.name for folder in own if not folder.endswith(f"/{partition.name}")}
    return PartitionPlan(0, name, sum(p.bytes for p in partitions), files, source=partitions[0].source, folders=folders)


def pinned(table: TableRecord, planned: Planned) -> Pinned:
    """A planned table as a job's other table (``PartitionPlan.beside``)."""
    whole = over("", planned.partitions)
    found = table.extended(planned.options)
    return Pinned(found, planned.version, whole.files, source=whole.source, folders=whole.folders)


def select(partitions: Sequence[PartitionPlan], names: Sequence[str] | None) -> list[PartitionPlan]:
    """The partitions of the given names (None: all), renumbered from 0 in their order.

    Raises InvalidArgument for unknown, empty or duplicate names, and for over a million partitions.
    """
    known: set[str] = set()
    for partition in partitions:
        if not partition.name:
            raise InvalidArgument(f"partition {partition.partition} has no name")
        if partition.name in known:
            raise InvalidArgument(f"the partition name {partition.name!r} is a duplicate")
        known.add(partition.name)
    if names is not None:
        wanted = set(names)
        if unknown := sorted(wanted - known):
            few = ", ".join(repr(name) for name in unknown[:5])
            rest = f" and {len(unknown) - 5} more" if len(unknown) > 5 else ""
            raise InvalidArgument(f"the table has no partition {few}{rest}")
        partitions = [p for p in partitions if p.name in wanted]
    if len(partitions) > MAX_PARTITIONS:
        raise InvalidArgument(
            f"the table has {len(partitions)} partitions: an operation may have at most {MAX_PARTITIONS}"
        )
    return [p if p.partition == i else replace(p, partition=i) for i, p in enumerate(partitions)]


@frozen
class Plan:
    """``<root>.plan``: written last, after its chunks. ``digest`` covers the chunks' bytes in order (invariant 13)."""

    count: int
    version: str
    digest: str
    chunks: int
    spilled: int = 0
    """The number of partitions whose file lists are in the shared directory; the cleanup deletes these."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Options of the table that planning read from its catalog; jobs find them in its record.

    They are stored once for all partitions, because a schema may be large.
    """
    beside: tuple[str, ...] = ()
    """The names of other tables that its jobs read, sorted: an executor must serve them as well."""
    removes_table: bool = False
    """The transaction that wrote the plan has removed the table's record."""

    def encode(self) -> bytes:
        if self.spilled or self.options or self.beside or self.removes_table:
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
        if self.removes_table:
            data["removes_table"] = True
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
                bool(data.get("removes_table", False)),
            )
        )


_ROW = len('{"partition":0}')
"""Minimum bytes of a job in a chunk."""


def begin_with(plan: Plan, chunks: Sequence[bytes]) -> list[int]:
    """The first ordinal in each of a plan's chunks.

    Raises ValueError if the chunks are not the planned ones, or have an unknown form.
    """
    if plan_digest(chunks) != plan.digest:
        raise ValueError("does not match its digest: its chunks are not the planned ones")
    starts = first_ordinals(plan, chunks)
    sizes = [end - start for start, end in pairwise([*starts, plan.count])] if starts else []
    room = [len(chunk) // _ROW for chunk in chunks]
    # Executors keep a number for each job, so the count must be limited by the chunks' real size.
    if starts[:1] not in ([], [0]) or not all(0 < size <= most for size, most in zip(sizes, room, strict=False)):
        raise ValueError(f"has chunks that do not contain its {plan.count} jobs")
    return starts


def first_ordinals(plan: Plan, chunks: Sequence[bytes]) -> list[int]:
    """As :func:`begin_with`, for chunks that are known to match the plan's digest."""
    first = json.JSONDecoder().raw_decode
    try:
        return [int(first(chunk.decode(), 1)[0]["partition"]) for chunk in chunks] if plan.count else []
    except UNREADABLE as error:
        raise ValueError("has chunks in a form that this release does not know: use a later release") from error


@frozen
class Gate:
    """``distOpOpen…``: jobs may be claimed while the key exists.

    ``count``: the number of jobs in the plan, as a hint: small operations are claimed before their plan is read; 0:
    only the plan shows it. ``options`` and ``where`` are the operation's, ``beside`` the plan's: executors read them
    here before they claim.
    """

    count: int = 0
    options: Options = DEFAULT
    where: Mapping[str, str] = field(default_factory=dict)
    beside: tuple[str, ...] = ()

    def tables(self, own: str) -> tuple[str, ...]:
        """All tables that the jobs of an operation on this table read or write."""
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
        """The gate; an unreadable value gives no hint."""
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
"""Maximum bytes of a record whose decoded form is cached: thousands may be equal."""


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
    """The plan of an operation on no table: one job for everything; and its only chunk."""
    chunk = encode_chunk([PartitionPlan(0, WHOLE)])
    return Plan(1, "", plan_digest([chunk]), 1), [chunk]


def chunked(partitions: Sequence[PartitionPlan], limit: int = MAX_CHUNK_BYTES) -> list[bytes]:
    """The partitions as encoded chunks of at most ``limit`` bytes each.

    A larger partition gets a chunk of its own.
    """
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
