"""Values read from the store: one event of a watch, and a value with its revision."""

from __future__ import annotations

from typing import TYPE_CHECKING, Generic, TypeVar

from distop.protocol.frozen import frozen

if TYPE_CHECKING:
    from distop.protocol.txn import KeyValue

T = TypeVar("T")


@frozen
class Change:
    """One event: a put, or (``deleted``) a deletion.

    Of a deletion ``kv.value`` is empty, and ``kv.mod_revision`` is its revision.
    """

    kv: KeyValue
    deleted: bool = False


@frozen
class Seen(Generic[T]):
    """A value with the mod revision at which it was written."""

    value: T
    mod: int
