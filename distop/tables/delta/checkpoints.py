"""Reads the checkpoints of a Delta log: classic ones, those in several parts, and v2 with sidecars.

A checkpoint has the state of a table at a version, so that earlier commits need not be read. Its rows are returned as
actions in the form of a commit.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote

from distop.errors import InvalidArgument, TableUnavailable
from distop.protocol.frozen import frozen
from distop.protocol.texts import shown
from distop.tables.delta.table_paths import LOG, SIDECARS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from distop.tables.delta.log_files import LogFiles

    Action = Mapping[str, Any]

_NAMED = re.compile(
    r"([0-9]{20})\.checkpoint(?:\.(?P<part>[0-9]{10})\.(?P<parts>[0-9]{10})|\.(?P<uuid>[0-9a-fA-F-]{36}))?"
    r"\.(?P<format>parquet|json)"
)
_ACTIONS = {
    "add": ("path", "partitionValues", "size", "modificationTime", "stats", "stats_parsed", "deletionVector"),
    "metaData": (
        *("id", "name", "description", "format", "schemaString", "partitionColumns", "createdTime", "configuration"),
    ),
    "protocol": ("minReaderVersion", "minWriterVersion", "readerFeatures", "writerFeatures"),
    "sidecar": ("path",),
}
"""The columns that are read, by kind of action."""
_REMOVES = {"remove": ("path", "deletionTimestamp", "size", "deletionVector")}
"""The columns of removed files, which are not part of a table's state."""
_BATCH = 512
"""Rows that are decoded at once: few, because a text that is in the file once may be the value of many rows."""
DECODED_BYTES = 1 << 30
"""Maximum bytes of the columns that are read from one file, decoded."""
_MAX_PARTS = 10_000


@frozen
class Checkpoint:
    """A complete checkpoint: its version and the names of its files."""

    version: int
    names: tuple[str, ...]


def newest(names: Iterable[str], version: int) -> Checkpoint | None:
    """The newest complete checkpoint up to a version; None if there is none."""
    found = _complete(names, version)
    return max(found, key=lambda one: (one.version, len(one.names) == 1), default=None)


def complete(names: Iterable[str], version: int) -> list[Checkpoint]:
    """The complete checkpoints up to a version, the oldest first: one for each version."""
    found = sorted(_complete(names, version), key=lambda one: (one.version, len(one.names) == 1))
    return list({one.version: one for one in found}.values())


def _complete(names: Iterable[str], version: int) -> list[Checkpoint]:
    whole: dict[int, str] = {}
    parts: dict[tuple[int, int], dict[int, str]] = {}
    for name in names:
        found = _NAMED.fullmatch(name)
        if found is None or int(found[1]) > version:
            continue
        if found["part"] is not None:
            if found["format"] == "parquet" and 0 < int(found["parts"]) <= _MAX_PARTS:
                parts.setdefault((int(found[1]), int(found["parts"])), {})[int(found["part"])] = name
        elif found["format"] == "parquet" or found["uuid"] is not None:
            at = int(found[1])
            # A v2 checkpoint has a UUID. The classic name, if it exists as well, is for old readers.
            if found["uuid"] is not None or at not in whole:
                whole[at] = name
    best = [Checkpoint(at, (name,)) for at, name in whole.items()]
    for (at, count), named in parts.items():
        if sorted(named) == list(range(1, count + 1)):
            best.append(Checkpoint(at, tuple(named[n] for n in sorted(named))))
    return best


def actions(
    checkpoint: Checkpoint,
    log: LogFiles,
    lines: Callable[[bytes, str], Iterator[Action]],
    check: Callable[[], None],
    *,
    removes: bool = False,
) -> Iterator[Action]:
    """The actions of a checkpoint. ``lines`` parses a JSON file of the log; ``check`` is called regularly.

    ``removes``: also those of removed files.

    Raises InvalidArgument for an invalid file, and the errors of ``log.read``, ``lines`` and ``check``.
    """
    sidecars: list[str] = []
    wanted = _ACTIONS | _REMOVES if removes else _ACTIONS
    with log.read_each(checkpoint.names) as contents:
        for name, data in zip(checkpoint.names, contents, strict=True):
            path = log.path(name)
            for action in lines(data, path) if name.endswith(".json") else _of_parquet(data, path, check, wanted):
                if "sidecar" in action:
                    sidecars.append(_sidecar(action["sidecar"], path))
                else:
                    yield action
    inner = [f"{SIDECARS}/{name}" for name in sidecars]
    with log.read_each(inner) as contents:
        for name, data in zip(inner, contents, strict=True):
            yield from _of_parquet(data, log.path(name), check, wanted)


def _sidecar(found: Any, checkpoint: str) -> str:
    given = found.get("path") if isinstance(found, dict) else None
    name = unquote(given) if isinstance(given, str) else ""
    if not name or "/" in name or "\0" in name or name in (".", ".."):
        raise InvalidArgument(
            f"the checkpoint {checkpoint} has the sidecar {shown(given)}: only the name of a file in {LOG}/{SIDECARS} "
            "is supported"
        )
    return name


def _of_parquet(
    data: bytes, path: str, check: Callable[[], None], wanted: Mapping[str, Sequence[str]]
) -> Iterator[Action]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        with pq.ParquetFile(pa.BufferReader(data), coerce_int96_timestamp_unit="us") as file:
            columns = _columns(file.schema_arrow, wanted)
            _check_size(_stated_size(file.metadata, columns), path)
            decoded = 0
            for batch in file.iter_batches(_BATCH, columns=columns, use_threads=False):
                check()
                decoded += batch.nbytes
                _check_size(decoded, path)
                for kind in batch.schema.names:
                    for value in _values(batch.column(kind).drop_null()):
                        yield {kind: _plain(kind, value)}
    except (pa.ArrowException, OSError, ValueError, OverflowError) as error:
        reason = str(error).strip().split("\n")[0]
        raise TableUnavailable(f"cannot read the checkpoint {path} of a Delta table: {reason}; restore it") from error


def _columns(schema: Any, wanted: Mapping[str, Sequence[str]]) -> list[str]:
    """The columns to read. ``stats_parsed`` only if there are no statistics as JSON."""
    found = []
    for kind, fields in wanted.items():
        if kind not in schema.names:
            continue
        own = schema.field(kind).type
        known = {own.field(n).name for n in range(own.num_fields)} if hasattr(own, "num_fields") else set()
        left_out = "stats_parsed" if "stats" in known else "stats"
        found += [f"{kind}.{field}" for field in fields if field in known and field != left_out]
    return found


def _values(rows: Any) -> list[dict[str, Any]]:
    """The rows of a column as dictionaries, without parsed statistics that Python has no values for."""
    import pyarrow as pa

    try:
        return list(rows.to_pylist())
    except (ValueError, OverflowError):  # a date before the year 1 or after 9999
        kept = [field for field in rows.type if field.name != "stats_parsed"]
        return list(pa.StructArray.from_arrays([rows.field(one.name) for one in kept], fields=kept).to_pylist())


def _stated_size(metadata: Any, columns: list[str]) -> int:
    """Bytes of the columns according to the footer. Texts that many rows have count once."""
    prefixes = tuple(f"{column}." for column in columns)
    size = 0
    for n in range(metadata.num_row_groups):
        group = metadata.row_group(n)
        for at in range(group.num_columns):
            column = group.column(at)
            if f"{column.path_in_schema}.".startswith(prefixes):
                size += column.total_uncompressed_size
    return size


def _check_size(size: int, path: str) -> None:
    if size > DECODED_BYTES:
        raise InvalidArgument(
            f"the checkpoint {path} of a Delta table has {size} bytes of data, but at most {DECODED_BYTES} are "
            "supported"
        )


def _plain(kind: str, value: dict[str, Any]) -> dict[str, Any]:
    """A row with its maps as dictionaries."""
    for key in {"add": ("partitionValues",), "metaData": ("configuration",)}.get(kind, ()):
        if value.get(key) is not None:
            value[key] = dict(value[key])
    given = value.get("format") if kind == "metaData" else None
    if isinstance(given, dict) and given.get("options") is not None:
        given["options"] = dict(given["options"])
    return value
