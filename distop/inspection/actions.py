"""What was done to tables and executors, as a list."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

from distop.core import actions as a
from distop.core import keys as K
from distop.errors import InvalidArgument

if TYPE_CHECKING:
    from collections.abc import Iterable

    from distop.core.keys import Keys
    from distop.core.txn import KeyValue


def newest_first(found: Iterable[tuple[KeyValue, a.Actions]], keys: Keys) -> list[dict[str, Any]]:
    """The actions of these records, by the times of those who acted."""
    listed: list[dict[str, Any]] = []
    for kv, actions in found:
        with contextlib.suppress(InvalidArgument):  # no key of ours
            key = keys.parse(kv.key)
            kind, name = ("executor", key.id) if key.family == K.NODE_DRAIN else ("table", key.table)
            listed += reversed(a.entries(kind, name, actions))
    return sorted(listed, key=lambda one: str(one["time"]), reverse=True)
