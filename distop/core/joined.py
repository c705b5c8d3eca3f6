"""Transactions that join two, taken apart: what a replay of the history judges is each of the two.

An operation that ends and is deleted in one transaction (``finishing.Final.gone``) shows neither its terminal state nor
that it was being cleaned up. It is judged as though it had shown both: the history record, which is written in the same
transaction, tells the state.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from distop.core import keys as K
from distop.core.codec import UNREADABLE, word
from distop.core.model import History, Phase
from distop.core.seen import Change
from distop.core.txn import KeyValue
from distop.errors import InvalidArgument

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from distop.core.keys import Keys
    from distop.core.model import OperationRef


def apart(keys: Keys, changes: Sequence[Change], goes_on: Callable[[OperationRef], bool]) -> list[Sequence[Change]]:
    """What one revision did, as one transaction after the other would have. ``goes_on`` tells whether an operation had
    neither ended nor gone before.
    """
    family = keys.family(K.HISTORY)[0]
    records = [one for one in changes if not one.deleted and one.kv.key.startswith(family)]
    if not records:
        return [changes]
    deleted = {one.kv.key: one for one in changes if one.deleted}
    ended: list[Change] = []
    cleaned: list[Change] = []
    for record in records:
        try:
            key = keys.parse(record.kv.key)
            ref = key.ref
            if ref is None or key.name or key.chunk >= 0 or keys.of(ref, "state") not in deleted or not goes_on(ref):
                continue
            state = History.decode(record.kv.value).state
        except (InvalidArgument, *UNREADABLE):
            continue
        first, after = keys.own_range(ref)
        cleaned += [deleted.pop(one) for one in list(deleted) if first <= one < after]
        ended.append(_put(keys.of(ref, "state"), word(state), record))
        ended.append(_put(keys.pending(ref), word(Phase.CLEANING), record))
        cleaned.append(Change(KeyValue(keys.pending(ref), b"", record.kv.mod_revision), deleted=True))
    if not ended:
        return [changes]
    later = {id(one) for one in cleaned}
    return [[*(one for one in changes if id(one) not in later), *ended], cleaned]


def _put(key: str, value: bytes, beside: Change) -> Change:
    return Change(KeyValue(key, value, beside.kv.mod_revision))
