"""Which operation a request id has started: ``distOpRequest.<table>.<type>.<request id>`` names it, where the caller
chose the id (invariant 14).

It is put by the start's transaction and deleted with the operation's history record, if it still names that: as long
as anything is known of the operation. The start compares nothing for it: the id is looked for after the counters were
read, and every start of the type on the table changes the counter of instances. What was part of a graph that was given
up was never started: then the next start of the request writes the key again.

An id that distop makes has no key, since nobody repeats it but who was told that the outcome is unknown: it is looked
for among the specs of what is active, and in the history.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from distop.core.codec import word
from distop.core.txn import Delete, Put, Txn, value_is

if TYPE_CHECKING:
    from distop.core.keys import Keys
    from distop.core.model import OperationRef, Spec

MADE = "auto-"
"""How the request ids begin that are made here."""


def noted(keys: Keys, ref: OperationRef, spec: Spec) -> Put:
    """The key, from the start of the operation on."""
    return Put(keys.request(ref.table, ref.type, spec.request_id), word(str(ref)))


def forgotten(keys: Keys, ref: OperationRef, request_id: str) -> tuple[Txn, ...]:
    """What deletes the key of an operation of which nothing is kept any more; nothing where it cannot have one."""
    if not request_id or request_id.startswith(MADE):
        return ()
    key = keys.request(ref.table, ref.type, request_id)
    return (Txn((value_is(key, word(str(ref))),), (Delete(key),), (), "forget_request"),)
