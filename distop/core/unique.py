"""Who holds an id: ``distOpUnique.<table>.<type>.<id>`` names the operation of it that has not ended (invariant 18).

It is put by the start's transaction, and deleted by the one that ends the operation, if it still names that. One that
shall run after another of the same id *follows* it: it waits for its end, and the key names the one that waits; if that
is cancelled while the other still runs, it names the other again. The clauses were checked by exhaustive exploration of
a model.

An operation of a series keeps its id beyond its end, until the next one has taken it or its last keys are deleted: so
nobody takes the id in between, who would find the series itself there a moment later.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from distop.core.codec import word
from distop.core.frozen import frozen
from distop.core.model import OperationRef, State
from distop.core.txn import Compare, Delete, Operation, Put, Txn, absent, is_not, none_within, unchanged, value_is
from distop.errors import InvalidArgument

if TYPE_CHECKING:
    from distop.core.keys import Keys
    from distop.core.model import Cancel, History


@frozen
class Takes:
    """How a start takes its id. ``holder``: whom the key names, if anybody, with ``mod``, the revision of its state as
    it was read (0: it is gone). It has ended, by a release that knows no ids, or is followed; or it is ``replaced``: it
    waits, and ends in the same transaction, in this way; then nobody may wait for it (``alone``), or who does is told
    that it ended.
    """

    id: str
    holder: OperationRef | None = None
    mod: int = 0
    replaced: tuple[History, Cancel] | None = None
    alone: bool = False


def holder_of(value: bytes) -> OperationRef:
    """Whom a key of an id names. Raises ValueError for what names nobody."""
    try:
        return OperationRef.parse(value.decode())
    except InvalidArgument as error:
        raise ValueError(str(error)) from None


def free_for(keys: Keys, ref: OperationRef, takes: Takes) -> tuple[Compare, ...]:
    """What the start of an operation that takes an id compares besides."""
    key, holder = keys.unique(ref.table, ref.type, takes.id), takes.holder
    if holder is None:
        return (absent(key),)
    seen = (value_is(key, word(str(holder))), unchanged(keys.of(holder, "state"), takes.mod))
    return (*seen, none_within(*keys.edges_range(holder, "next"))) if takes.alone else seen


def taken(keys: Keys, ref: OperationRef, takes: Takes) -> Put:
    """The key, which names the operation from its start on."""
    return Put(keys.unique(ref.table, ref.type, takes.id), word(str(ref)))


def freed(keys: Keys, ref: OperationRef, history: History) -> tuple[Operation, ...]:
    """What gives back the id of an operation that ends with this record; nothing without one, or if more may come."""
    if not history.id or may_come_again(bool(history.series), history.state):
        return ()
    key = keys.unique(ref.table, ref.type, history.id)
    back: Operation = Delete(key)
    followed = _followed(ref, history)
    if followed is not None:
        state = keys.of(followed, "state")
        going_on = tuple(is_not(state, word(end)) for end in State if end.terminal)
        back = Txn(going_on, (Put(key, word(str(followed))),), (Delete(key),), "give_back")
    return (Txn((value_is(key, word(str(ref))),), (back,), (), "release_id"),)


def _followed(ref: OperationRef, history: History) -> OperationRef | None:
    """What it followed; None also where the record names an operation of another table or type, or none: who may write
    one table's keys would learn whether that goes on.
    """
    try:
        found = OperationRef.parse(history.follows)
    except InvalidArgument:
        return None
    return found if (found.table, found.type) == (ref.table, ref.type) else None


def may_come_again(series: bool, ended: State) -> bool:
    """An operation (of a ``series``) that has ended so may have a next one: which is started when it is cleaned up."""
    return series and ended is not State.CANCELLED


def released(keys: Keys, ref: OperationRef, id_: str) -> tuple[Operation, ...]:
    """What gives back the id of an operation of a series with its last keys, where it has no next one."""
    if not id_:
        return ()
    key = keys.unique(ref.table, ref.type, id_)
    return (Txn((value_is(key, word(str(ref))),), (Delete(key),), (), "release_id"),)
