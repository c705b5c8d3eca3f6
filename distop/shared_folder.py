"""Where things stand in the shared directory: paths that are made of an operation, a partition and an attempt alone."""

from __future__ import annotations

from typing import TYPE_CHECKING

from distop.core.keys import encode
from distop.core.model import OperationRef

if TYPE_CHECKING:
    from distop.core.model import TableRecord

RESULTS = "results"


def shared_of(configured: str, table: TableRecord | None) -> str:
    """The shared directory: as configured, else ``<table location>/_distop`` where that is a folder, else "" (there is
    none).
    """
    if configured:
        return configured.rstrip("/")
    return f"{table.folder.rstrip('/')}/_distop" if table is not None and table.folder else ""


def operation_path(op: str) -> str:
    """An operation as a relative path: one folder each for table, type, object, instance. Characters are escaped
    as in keys, except dots inside (Hadoop's paths and percent signs do not go well together); so the first folder of
    digits alone after the type is the instance."""
    ref = OperationRef.parse(op)
    parts = [folder(ref.table), folder(ref.type), str(ref.instance)]
    if ref.object:
        digits = ref.object.isascii() and ref.object.isdigit()
        parts.insert(2, f"%{ord(ref.object[0]):02X}{ref.object[1:]}" if digits else folder(ref.object))
    return "/".join(parts)


def folder(name: str) -> str:
    """A name as one path component, reversible, never hidden and never ``..``."""
    text = encode(name)
    head = 3 if text.startswith("%2E") else 0
    return text[:head] + text[head:].replace("%2E", ".")


def result_path(shared: str, op: str, partition: int, fence: int, incarnation: str) -> str:
    """Where the result of an attempt stands that is too large for etcd: a file of that attempt's own."""
    return f"{shared}/{result_file(op, partition, fence, incarnation)}"


def result_file(op: str, partition: int, fence: int, incarnation: str) -> str:
    """The same below the shared directory."""
    return f"{RESULTS}/{operation_path(op)}/{partition:06d}-{fence}-{folder(incarnation)}.json"
