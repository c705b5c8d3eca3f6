"""Reads Parquet footers with pyarrow, in parallel threads, and nothing but footers."""

from __future__ import annotations

import json
import os
import re
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass
from operator import gt
from typing import TYPE_CHECKING, Any, TypeVar

from distop.errors import TableUnavailable
from distop.protocol.frozen import frozen
from distop.storage.files import NotRegular, check_regular, local_path, open_filesystem
from distop.tables.reading import parquet_tail, store_errors
from distop.tables.reading.file_facts import Chunk, FileFacts, Leaf, Unreadable, folded

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from concurrent.futures import Future

    import pyarrow as pa

    from distop.tables.reading.file_facts import PlannedFile
    from distop.tables.reading.parquet_tail import Footer

THREADS = 8
CHECKED_EVERY = 512
"""Files looked at between two looks at whether to go on."""
CHECKED_AFTER = 1.0
"""Seconds of waiting for a file between two such looks."""
LONGEST_READ = 300.0
"""Seconds for which a file is waited for. The clients of object stores give up before; a file system may never."""
KEPT_FILES = 20_000

T = TypeVar("T")

_FIELD_ID = b"PARQUET:field_id"
"""How pyarrow calls it."""

_kept: dict[tuple[Any, ...], FileFacts] = {}

_SOUND_BYTES = re.compile(r"parquet-cpp-arrow|parquet-rs|parquet-mr version 1\.1[0-9]")
"""Writers whose bounds of decimals in byte arrays compare as numbers; older ones compared bytes as unsigned."""

_SIGNED = {8: "tinyint", 16: "smallint", 32: "int", 64: "bigint"}
_UNSIGNED = {8: "smallint", 16: "int", 32: "bigint", 64: "decimal(20,0)"}
_DIGITS = {"milliseconds": 3, "microseconds": 6}


def unchanged(path: str, size: int, mtime_ns: int) -> None:
    """Raises Unreadable where the file is not as it was planned."""
    try:
        if parquet_tail.is_remote(path):
            from pyarrow import fs

            filesystem, inner = open_filesystem(path)
            info = filesystem.get_file_info(inner)
            if info.type != fs.FileType.File:
                raise FileNotFoundError
            found = (info.size, info.mtime_ns or 0)
        else:
            status = os.stat(path)  # noqa: PTH116
            check_regular(path, status.st_mode)
            found = (status.st_size, status.st_mtime_ns)
    except FileNotFoundError:
        raise Unreadable(f"the file {path} is gone since the operation was planned") from None
    except NotRegular as e:
        raise Unreadable(str(e)) from None
    except OSError as e:
        raise Unreadable(f"the file {path} cannot be read: {e.strerror or e}") from e
    if found != (size, mtime_ns):
        raise Unreadable(f"the file {path} has changed since the operation was planned")


def read_all(
    files: Sequence[PlannedFile],
    wanted: frozenset[str | int],
    check: Callable[[], None] = lambda: None,
    *,
    immutable: bool = False,
) -> list[FileFacts | Unreadable]:
    """The facts of each planned file, in order, or why it cannot be read. ``check`` is called now and then, and raises
    where the reading is to stop.

    ``wanted``: the top-level columns (``file_facts.folded``) whose statistics are needed, or the ids of single values.
    What was read of a file is kept for the next operation: each time, size and modification time are compared with the
    plan's first, unless the files are ``immutable``, and their paths are all there is to know.
    """
    found: list[FileFacts | Unreadable | None] = []
    for n in range(0, len(files), CHECKED_EVERY):
        check()
        found += [_kept.get((*f, wanted)) for f in files[n : n + CHECKED_EVERY]]
    if not immutable:
        remembered = [i for i, facts in enumerate(found) if facts is not None]
        wrong = changed([files[i] for i in remembered], check)
        for i in remembered:
            found[i] = wrong.get(files[i][0], found[i])
    unread = [i for i, facts in enumerate(found) if facts is None]
    if unread:
        schemas = _Schemas(wanted)
        with _pool() as pool:
            n, size = 0, THREADS
            while n < len(unread):
                check()
                page = unread[n : n + size]
                reading = [(i, pool.submit(_read, files[i], schemas, immutable)) for i in page]
                for i, one in reading:
                    found[i] = _waited_for(_At(files[i][0]), one, check)
                if n == 0 and len(unread) > size and (cause := refusal([found[i] for i in page])) is not None:
                    for i in unread[size:]:
                        found[i] = Unreadable(
                            f"the file {files[i][0]} was not read, because the store refused the first files: {cause}"
                        )
                    break
                n, size = n + size, CHECKED_EVERY
    return [f for f in found if f is not None]


def changed(files: Sequence[PlannedFile], check: Callable[[], None]) -> dict[str, Unreadable]:
    """What is wrong with the files that are not as they were planned, by path and in their order.

    Raises TableUnavailable where a file does not answer, and what ``check`` raises.
    """
    found: dict[str, Unreadable] = {}
    if not files:
        return found
    with _pool() as pool:
        for n in range(0, len(files), CHECKED_EVERY):
            check()
            page = files[n : n + CHECKED_EVERY]
            # A store answers many at once; a disk has answered before another thread has begun.
            parts = [page] if local_path(page[0][0]) is not None else [[file] for file in page]
            looks = [(at, pool.submit(_changed, part, at)) for part in parts for at in (_At(part[0][0]),)]
            for at, look in looks:
                wrong: dict[str, Unreadable] = _waited_for(at, look, check)
                found |= wrong
    return found


def _changed(files: Sequence[PlannedFile], at: _At) -> dict[str, Unreadable]:
    found: dict[str, Unreadable] = {}
    for file in files:
        at.path, at.since = file[0], time.monotonic()
        try:
            unchanged(*file)
        except Unreadable as e:
            found[file[0]] = e
    return found


def answered(path: str, read: Callable[[Callable[[], None]], T], check: Callable[[], None]) -> T:
    """What ``read`` returns, or raises. It runs in a thread, and calls its argument after each part that it has read.

    Raises TableUnavailable where a part takes too long, and what ``check`` raises.
    """
    at = _At(path)

    def progress() -> None:
        at.since = time.monotonic()

    with _pool(1) as pool:
        return _waited_for(at, pool.submit(read, progress), check)


@contextmanager
def _pool(threads: int = THREADS) -> Iterator[ThreadPoolExecutor]:
    """Threads that read. Those that hang when an error ends the reading are left to themselves."""
    pool = ThreadPoolExecutor(threads, "footers")
    try:
        yield pool
    except BaseException:
        pool.shutdown(wait=False, cancel_futures=True)
        raise
    pool.shutdown()


@dataclass(slots=True)
class _At:
    """At which file a thread is, and when it last went on, by the monotonic clock."""

    path: str
    since: float = 0.0


def _waited_for(at: _At, reading: Future[T], check: Callable[[], None]) -> T:
    """What comes of reading the file that a thread is ``at``.

    Raises TableUnavailable where nothing comes of it, and what ``check`` raises.
    """
    since = time.monotonic()
    while not reading.done() and not wait([reading], CHECKED_AFTER).done:
        check()
        if time.monotonic() - max(since, at.since) >= LONGEST_READ:
            raise TableUnavailable(
                f"the file {at.path} did not answer within {LONGEST_READ:g} s: check whether this machine can read it"
            )
    return reading.result()


def refusal(found: Sequence[FileFacts | Unreadable | None]) -> str | None:
    """The one cause for which the store refuses all of these files, or None.

    None where a file was read, where the causes differ, or where an error does not concern the store.
    """
    causes = {
        store_errors.cause_of_python_error(facts.__cause__) if isinstance(facts, Unreadable) else None
        for facts in found
    }
    return causes.pop() if len(found) > 1 and len(causes) == 1 else None


def check_store(facts: Sequence[FileFacts | Unreadable]) -> None:
    """Raises TableUnavailable where the store refuses all of these files for one cause.

    Such a refusal says nothing about the files, and another node may have access.
    """
    asked = facts[:THREADS]
    cause = refusal(asked)
    if cause is not None and all(isinstance(fact, Unreadable) for fact in facts):
        raise TableUnavailable(
            f"cannot read any file of this batch (files: {len(facts)}) from this executor: {cause} ({asked[0]})"
        )


def _read(file: PlannedFile, schemas: _Schemas, immutable: bool) -> FileFacts | Unreadable:
    try:
        facts = _open(file[0], schemas) if immutable else _of_planned(file, schemas)
    except Unreadable as e:
        return e
    if immutable or tells_apart(file):
        if len(_kept) >= KEPT_FILES:
            _kept.clear()
        _kept[(*file, schemas.wanted)] = facts
    return facts


def _of_planned(file: PlannedFile, schemas: _Schemas) -> FileFacts:
    """The facts of the file that was planned: where another one takes its place before the footer is read, or while it
    is, the sizes or times tell so afterwards. Raises Unreadable.
    """
    unchanged(*file)
    try:
        return _open(file[0], schemas)
    finally:
        unchanged(*file)


def tells_apart(file: PlannedFile) -> bool:
    """Whether a file that is replaced by one of the same size would be known by its time. Object stores tell whole
    seconds, or no time.
    """
    return file[2] % 1_000_000_000 != 0


def _open(path: str, schemas: _Schemas) -> FileFacts:
    import pyarrow as pa

    try:
        return _facts(path, parquet_tail.read(path), schemas)
    except (pa.ArrowException, OSError, ValueError) as e:
        reason = str(e).strip().split("\n")[0]
        raise Unreadable(f"the file {path} is not a readable Parquet file: {reason}") from e


def columns_of(schema: Any) -> Mapping[str, Any]:
    """The top-level columns of a file's Parquet schema, with Spark's types. Raises Unreadable."""
    return _Schemas(frozenset()).of("", schema).columns


@frozen
class _Schema:
    """What is wanted of the files of one schema. ``places``: the numbers of their leaves. ``every_leaf``: the path of
    each leaf in Parquet's spelling, and whether it is inside a list.
    """

    of: Any
    columns: dict[str, Any]
    leaves: dict[tuple[str, ...], Leaf]
    places: dict[tuple[str, ...], int]
    ids: dict[int, tuple[str, ...]]
    every_leaf: Sequence[tuple[str, bool]]


class _Schemas:
    """The last schema seen: the files of a table mostly share one."""

    def __init__(self, wanted: frozenset[str | int]) -> None:
        self.wanted = wanted
        self._last: _Schema | None = None

    def of(self, path: str, schema: Any) -> _Schema:
        last = self._last
        if last is not None and last.of.equals(schema):
            return last
        columns: dict[str, Any] = {}
        leaves: dict[tuple[str, ...], Leaf] = {}
        places: dict[tuple[str, ...], int] = {}
        arrow = schema.to_arrow_schema()
        ids = dict(_ids(arrow, ()))
        index = 0
        for field in arrow:
            where: list[tuple[tuple[str, ...], int]] = []
            columns[field.name], index = _spark_type(field.type, schema, index, (field.name,), where)
            named = folded(field.name) in self.wanted
            for leaf_path, leaf_index in where:
                if named or ids.get(leaf_path) in self.wanted:
                    leaves[leaf_path] = _leaf(schema.column(leaf_index), leaf_path)
                    places[leaf_path] = leaf_index
        if index != len(schema):
            raise Unreadable(f"the file {path} has a schema that is not understood")
        every_leaf = [(leaf.path, leaf.max_repetition_level > 0) for leaf in map(schema.column, range(index))]
        spelled = Counter(leaf for leaf, _ in every_leaf)
        for leaf_path, leaf_index in [*places.items()]:
            # ``a.b`` may be a name or a path: the chunks of the two cannot be told apart.
            if spelled[every_leaf[leaf_index][0]] > 1:
                del leaves[leaf_path], places[leaf_path]
        self._last = _Schema(schema, columns, leaves, places, {i: p for p, i in ids.items()}, every_leaf)
        return self._last


def _ids(fields: Any, path: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], int]]:
    """The ids that Iceberg gave to fields outside of lists, by their paths; structs have ids, too."""
    import pyarrow.types as t

    for field in fields:
        found = (field.metadata or {}).get(_FIELD_ID)
        if found is not None:
            yield (*path, field.name), int(found)
        if t.is_struct(field.type):
            yield from _ids([field.type.field(i) for i in range(field.type.num_fields)], (*path, field.name))


def _facts(path: str, footer: Footer, schemas: _Schemas) -> FileFacts:
    metadata = footer.metadata
    schema = schemas.of(path, metadata.schema)
    groups = [metadata.row_group(i) for i in range(metadata.num_row_groups)]
    why = _contradiction(groups, schema, footer.size)
    if why:
        raise Unreadable(f"the file {path} cannot be read: its footer contradicts itself: {why}")
    rows = sum(group.num_rows for group in groups)
    if rows != metadata.num_rows:
        why = f"it counts {metadata.num_rows} rows, and its row groups hold {rows}"
    elif named := [leaf.path for leaf in schema.leaves.values() if _bounds_of_nulls(groups, schema.places[leaf.path])]:
        why = f"{'.'.join(named[0])!r} has only NULLs in a row group, and a minimum and a maximum"
    if why:
        kinds = schema.columns, schema.leaves
        missing = max(metadata.num_rows - rows, 0)
        return FileFacts(path, rows, *kinds, ids=schema.ids, contradiction=why, missing=missing)
    sound = bool(_SOUND_BYTES.match(metadata.created_by or ""))
    chunks = {
        leaf.path: tuple(_chunk(g, schema.places[leaf.path], leaf, sound) for g in groups if g.num_rows)
        for leaf in schema.leaves.values()
    }
    return FileFacts(path, rows, schema.columns, schema.leaves, chunks, ids=schema.ids)


def _contradiction(groups: Sequence[Any], schema: _Schema, size: int) -> str:
    """How the row groups of a file of ``size`` bytes contradict its schema, each other or themselves; "" where they do
    not.

    The values and places of all columns are compared: readers find a row group by the places of all its columns. Paths
    and NULLs are compared for the columns whose statistics are used, because they take as long as all else together.
    """
    begins: list[int] = []
    ends: list[int] = []
    for group in groups:
        rows, count = group.num_rows, group.num_columns
        if rows < 0:
            return f"a row group has {rows} rows"
        if count != len(schema.every_leaf):
            return f"a row group has {count} column chunks, but the schema has {len(schema.every_leaf)} columns"
        for n, (path, repeated) in enumerate(schema.every_leaf):
            column = group.column(n)
            values = column.num_values
            if values != rows and not (repeated and values > rows > 0):
                return f"{path!r} has {values} values in a row group of {rows} rows"
            if not rows:
                continue
            begin, dictionary = column.data_page_offset, column.dictionary_page_offset
            if dictionary and 0 < dictionary < begin:
                begin = dictionary
            end = begin + column.total_compressed_size
            if begin < 0 or end <= begin:
                return f"the pages of {path!r} take {end - begin} bytes from byte {begin} on"
            if end > size:
                return f"the pages of {path!r} end beyond the file's {size} bytes"
            begins.append(begin)
            ends.append(end)
        for leaf_path, n in schema.places.items():
            why = _contradiction_of_column(group.column(n), rows, schema.every_leaf[n][0], schema.leaves[leaf_path])
            if why:
                return why
    begins.sort()
    ends.sort()
    # Without an overlap, each chunk ends before the next one begins.
    return "two column chunks share pages" if any(map(gt, ends, begins[1:])) else ""


def _contradiction_of_column(column: Any, rows: int, path: str, leaf: Leaf) -> str:
    """The same for one leaf column whose statistics are used. ``path``: its path in Parquet's spelling."""
    if column.path_in_schema != path:
        return f"a row group has a column chunk of {column.path_in_schema!r} in the place of {path!r}"
    statistics = column.statistics
    nulls = statistics.null_count if statistics is not None and statistics.has_null_count else 0
    if not 0 <= nulls <= rows:
        return f"{path!r} has {nulls} NULLs in a row group of {rows} rows"
    if nulls and not leaf.optional:
        return f"{path!r} is a required column, but has {nulls} NULLs in a row group"
    return ""


def _bounds_of_nulls(groups: Sequence[Any], index: int) -> bool:
    """A row group counts only NULLs in a column, and has a minimum and a maximum of it."""
    found = ((group.num_rows, group.column(index).statistics) for group in groups if group.num_rows)
    return any(s is not None and s.has_null_count and s.null_count == rows and s.has_min_max for rows, s in found)


def _chunk(group: Any, index: int, leaf: Leaf, sound: bool) -> Chunk:
    """The statistics of one leaf column in one row group. The leaf is not inside a list."""
    statistics = group.column(index).statistics
    if statistics is None:
        return Chunk(group.num_rows, None)
    nulls = statistics.null_count if statistics.has_null_count else None
    bounded = statistics.has_min_max and leaf.kind != "other"
    if bounded and leaf.kind == "decimal" and statistics.physical_type not in ("INT32", "INT64"):
        bounded = sound and statistics.physical_type == "FIXED_LEN_BYTE_ARRAY"
    if not bounded:
        return Chunk(group.num_rows, nulls)
    return Chunk(group.num_rows, nulls, _number(statistics.min_raw, leaf), _number(statistics.max_raw, leaf))


def _number(raw: Any, leaf: Leaf) -> Any:
    """A physical value as one that compares: unsigned where it is, decimals unscaled."""
    if leaf.kind == "decimal" and isinstance(raw, bytes):
        return int.from_bytes(raw, "big", signed=True)
    if leaf.kind == "uint" and isinstance(raw, int) and raw < 0:
        return raw + (1 << (64 if leaf.bits == 64 else 32))
    return raw


def _spark_type(
    kind: pa.DataType, schema: Any, index: int, path: tuple[str, ...], where: list[tuple[tuple[str, ...], int]]
) -> tuple[Any, int]:
    """The type and the index of the leaf after it; ``where`` collects the leaves that are outside of lists."""
    import pyarrow.types as t

    if isinstance(kind, _extension()):
        extension: Any = kind
        kind = extension.storage_type
    if t.is_struct(kind):
        fields = []
        for i in range(kind.num_fields):
            child = kind.field(i)
            inner, index = _spark_type(child.type, schema, index, (*path, child.name), where)
            fields.append((child.name, inner))
        return ("struct", tuple(fields)), index
    if t.is_map(kind):
        key, index = _spark_type(kind.key_type, schema, index, path, [])
        item, index = _spark_type(kind.item_type, schema, index, path, [])
        return ("map", key, item), index
    if t.is_list(kind) or t.is_large_list(kind) or t.is_fixed_size_list(kind):
        inner, index = _spark_type(kind.value_type, schema, index, path, [])
        return ("array", inner), index
    column = schema.column(index)
    if column.max_repetition_level == 0:
        where.append((path, index))
    return _primitive(column)[1], index + 1


def _extension() -> type:
    import pyarrow as pa

    return pa.BaseExtensionType  # type: ignore[no-any-return]


def _leaf(column: Any, path: tuple[str, ...]) -> Leaf:
    kind, spark, bits, scale = _primitive(column)
    return Leaf(path, kind, spark if isinstance(spark, str) else "", bits, scale, column.max_definition_level > 0)


def _primitive(column: Any) -> tuple[str, Any, int, int]:
    """(kind, Spark type, bits, scale) of a leaf, by Spark's rules for Parquet."""
    logical = json.loads(column.logical_type.to_json())
    name, physical = logical["Type"], column.physical_type
    if name == "Int":
        bits, signed = logical["bitWidth"], logical["isSigned"]
        return ("int", _SIGNED[bits], bits, 0) if signed else ("uint", _UNSIGNED[bits], bits, 0)
    if name == "Decimal":
        precision, scale = logical["precision"], logical["scale"]
        if precision > 38:
            return "other", ("unreadable", f"Spark has no decimal of {precision} digits"), 0, 0
        return "decimal", f"decimal({precision},{scale})", 0, scale
    if name == "Date":
        return "date", "date", 32, 0
    if name in ("Timestamp", "Time"):
        unit = logical["timeUnit"]
        if name == "Time" or unit not in _DIGITS:
            what = f"{name.lower()}s in {unit}"
            return "other", ("unreadable", f"Spark does not read {what}"), 64, 0
        return "timestamp", "timestamp" if logical["isAdjustedToUTC"] else "timestamp_ntz", 64, _DIGITS[unit]
    if name in ("String", "Enum", "JSON"):
        return "string", "string", 0, 0
    if name == "Float16":
        return "other", ("unreadable", "Spark does not read 16-bit floats"), 16, 0
    plain = {
        "BOOLEAN": ("bool", "boolean", 1, 0),
        "INT32": ("int", "int", 32, 0),
        "INT64": ("int", "bigint", 64, 0),
        "FLOAT": ("float", "float", 32, 0),
        "DOUBLE": ("float", "double", 64, 0),
        # Spark reads the old 96-bit timestamps; their bounds mean nothing.
        "INT96": ("other", "timestamp", 96, 0),
    }
    return plain.get(physical, ("binary", "binary", 0, 0))
