"""What a rerun needs, stored beside the history record.

It is the argument, the spec, and the partitions that are not done. It is written and deleted with the record.
Partitions are kept by name, which is the same in all operations. A rerun plans again, so it reads the current files: a
repaired file is judged again.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from distop.protocol.frozen import frozen
from distop.protocol.json_codec import dumps, loads
from distop.protocol.record_reading import read
from distop.protocol.records import MAX_ARGUMENT_BYTES, Spec
from distop.protocol.txn import Get, Put

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Sequence

    from distop.protocol.keys import Keys
    from distop.protocol.records import OperationRef
    from distop.protocol.txn import GetResult

MAX_FINISH_BYTES = 1_300_000
"""Maximum bytes of all values of a finish: etcd accepts 1.5 MiB in a request (T2)."""
MAX_KEPT_JOBS = 50_000
"""Operations with more jobs have more names than a start accepts, so none are collected."""


@frozen
class Kept:
    """What a rerun is made of. ``failed`` and ``unfinished``: names of partitions, sorted by ordinal."""

    arg: bytes
    spec: Spec
    failed: tuple[str, ...]
    unfinished: tuple[str, ...]
    """Partitions without an end when the operation was cancelled, by a person or after failures."""


def encode_rows(named: Iterable[tuple[int, str]], failed: Collection[int]) -> bytes | None:
    """The partitions that are not done, in the form of a plan's chunk.

    None if a start would not accept so many names.
    """
    rows: list[dict[str, object]] = []
    size = 0
    for ordinal, name in named:
        size += len(name.encode(errors="surrogatepass")) + 3
        if size > MAX_ARGUMENT_BYTES:
            return None
        rows.append({"partition": ordinal, "name": name, **({"failed": True} if ordinal in failed else {})})
    return dumps(rows)


def writes(keys: Keys, ref: OperationRef, arg: bytes, spec: Spec, rows: bytes) -> tuple[Put, ...]:
    """The writes that accompany the history record.

    The spec is kept without the names that its start asked for: the rows contain the needed ones.
    """
    return (
        Put(keys.beside_history(ref, "arg"), arg),
        Put(keys.beside_history(ref, "spec"), replace(spec, partitions=None).encode()),
        Put(keys.history_chunk(ref, 0), rows),
    )


def reads(keys: Keys, ref: OperationRef) -> tuple[Get, Get, Get]:
    """The reads whose answers :func:`decode` takes."""
    return (
        Get(keys.beside_history(ref, "arg")),
        Get(keys.beside_history(ref, "spec")),
        Get(keys.history_chunk(ref, 0)),
    )


def decode(found: Sequence[GetResult]) -> Kept | None:
    """The kept values; None if nothing was kept. Raises UnreadableRecord."""
    arg, spec, rows = (answer.kv for answer in found)
    if arg is None or spec is None or rows is None:
        return None
    failed, unfinished = read(_decode_rows, rows)
    return Kept(arg.value, read(Spec.decode, spec), failed, unfinished)


def _decode_rows(value: bytes) -> tuple[tuple[str, ...], tuple[str, ...]]:
    known = loads(value)
    failed = tuple(row["name"] for row in known if row.get("failed"))
    return failed, tuple(row["name"] for row in known if not row.get("failed"))
