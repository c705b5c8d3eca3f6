"""What stands beside the history record of an operation that may be rerun: its argument, its spec, and which of its
partitions are not done. It is written with the record and goes with it.

Partitions are kept by name, which is what they are called from operation to operation: a rerun plans anew, so that it
reads the files as they are by then (whoever repairs a file wants to see it judged again).
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
"""What a finish writes at most, all its values together: etcd takes 1.5 MiB in a request (T2)."""
MAX_KEPT_JOBS = 50_000
"""More names than a start takes; nobody need look for them."""


@frozen
class Kept:
    """What a rerun is made of. ``failed`` and ``unfinished``: names of partitions, in order of their ordinals."""

    arg: bytes
    spec: Spec
    failed: tuple[str, ...]
    unfinished: tuple[str, ...]
    """Those that had no end when the operation was cancelled, by a person or because others failed."""


def encode_rows(named: Iterable[tuple[int, str]], failed: Collection[int]) -> bytes | None:
    """The partitions that are not done, in the form of a plan's chunk; None where no start would take their names."""
    rows: list[dict[str, object]] = []
    size = 0
    for ordinal, name in named:
        size += len(name.encode(errors="surrogatepass")) + 3
        if size > MAX_ARGUMENT_BYTES:
            return None
        rows.append({"partition": ordinal, "name": name, **({"failed": True} if ordinal in failed else {})})
    return dumps(rows)


def writes(keys: Keys, ref: OperationRef, arg: bytes, spec: Spec, rows: bytes) -> tuple[Put, ...]:
    """To be written with the history record. The names that a start asked for are in the rows, as far as they are
    needed.
    """
    return (
        Put(keys.beside_history(ref, "arg"), arg),
        Put(keys.beside_history(ref, "spec"), replace(spec, partitions=None).encode()),
        Put(keys.history_chunk(ref, 0), rows),
    )


def reads(keys: Keys, ref: OperationRef) -> tuple[Get, Get, Get]:
    """What :func:`decode` wants."""
    return (
        Get(keys.beside_history(ref, "arg")),
        Get(keys.beside_history(ref, "spec")),
        Get(keys.history_chunk(ref, 0)),
    )


def decode(found: Sequence[GetResult]) -> Kept | None:
    """What was read; None where nothing was kept. Raises UnreadableRecord."""
    arg, spec, rows = (answer.kv for answer in found)
    if arg is None or spec is None or rows is None:
        return None
    failed, unfinished = read(_decode_rows, rows)
    return Kept(arg.value, read(Spec.decode, spec), failed, unfinished)


def _decode_rows(value: bytes) -> tuple[tuple[str, ...], tuple[str, ...]]:
    known = loads(value)
    failed = tuple(row["name"] for row in known if row.get("failed"))
    return failed, tuple(row["name"] for row in known if not row.get("failed"))
