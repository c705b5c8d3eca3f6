"""A transaction of the caller's own that also starts operations (C9, C10): one of its branches is applied, once.

distop's compares stand outside, the caller's are nested inside. A branch of the caller's that writes also writes the
counter of instances, which the outer compares watch. So the first copy that is applied decides, and each other copy is
refused outside, whatever becomes of the caller's keys meanwhile. A refused copy reads which branch ran: the spec or the
history of the operation tells of ``success``, a receipt tells of ``failure``. The clauses were checked by exhaustive
exploration (``tests/unit/test_within_copies.py``). Pure.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

from distop.core.codec import dumps, word
from distop.core.frozen import frozen
from distop.core.links import Hold, HoldState
from distop.core.model import History, OperationRef, Spec
from distop.core.records import read
from distop.core.txn import Compare, Delete, Get, GetResult, Operation, Put, Txn, absent

if TYPE_CHECKING:
    from collections.abc import Iterable

    from distop.core.keys import Keys
    from distop.core.txn import Result

KIND = "transaction"
"""The kind of the receipt, which stands among the holds and holds nothing: daemons delete it like one of a
confirmation (``core.prepared``).
"""


@frozen
class Caller:
    """What the caller's transaction compares and does. ``ref``: the operation that it starts by the request id of the
    caller's choice, or else the first one; ``request_id``: of that; ``number``: the counter of its instances, as read.
    ``again``: an earlier call may have had the same request id.
    """

    ref: OperationRef
    request_id: str
    number: int
    again: bool
    compare: tuple[Compare, ...]
    success: tuple[Operation, ...]
    failure: tuple[Operation, ...]

    @property
    def writes_failure(self) -> bool:
        """Its failure branch does something that must not be done twice, nor beside the other one."""
        return any(_writes(op) for op in self.failure)

    @property
    def fences_failure(self) -> bool:
        """Its failure branch refuses all other copies. Where it only reads, and no other call has its request id, this
        is left to a transaction that is sent where an answer was lost: so nobody else's start is in its way.
        """
        return self.again or self.writes_failure


def _writes(op: Operation) -> bool:
    if isinstance(op, Txn):
        return any(_writes(inner) for inner in (*op.success, *op.failure))
    return isinstance(op, Put | Delete)


def receipt(keys: Keys, table: str, type_name: str, request_id: str) -> str:
    """The key that tells that the failure branch of a caller's transaction ran, by the request that names it
    (``Caller.request_id``). A request id may have any length.
    """
    place = dumps([table, type_name, request_id])
    return keys.hold(f"{KIND}:{hashlib.sha256(place).hexdigest()[:32]}")


def joined(keys: Keys, starts: Txn, caller: Caller) -> Txn:
    """The caller's transaction together with ``starts``. The failure branch reads which branch an earlier copy ran
    (:func:`decided`).
    """
    ref = caller.ref
    told = receipt(keys, ref.table, ref.type, caller.request_id)
    failure = caller.failure
    if caller.fences_failure:
        failure += (Put(keys.next_instance(ref.table, ref.type), word(str(caller.number))),)
    if caller.writes_failure:
        record = Hold(KIND, HoldState.CONFIRMED, "the compares failed", {"request_id": caller.request_id})
        failure += (Put(told, record.encode()),)
    return Txn(
        (*starts.compares, *((absent(told),) if caller.again else ())),
        (Txn(caller.compare, (*starts.success, *caller.success), failure, "own"),),
        (*found_at(keys, ref), Get(told)),
        "transaction",
    )


def found_at(keys: Keys, ref: OperationRef) -> tuple[Get, Get]:
    """Where an operation that was started is found by its request id, whether it goes on or has ended."""
    return Get(keys.of(ref, "spec")), Get(keys.history(ref))


def was_started(answers: Iterable[Result], request_id: str) -> bool:
    """The operation was started by this request: what :func:`found_at` read."""
    spec, history = (answer.kv if isinstance(answer, GetResult) else None for answer in answers)
    return (spec is not None and read(Spec.decode, spec).request_id == request_id) or (
        history is not None and read(History.decode, history).request_id == request_id
    )


def decided(answers: tuple[Result, ...], request_id: str) -> bool | None:
    """Which branch was applied before, by what the failure branch of :func:`joined` read: True is ``success``, None is
    neither.
    """
    *started, told = answers
    if was_started(started, request_id):
        return True
    return False if isinstance(told, GetResult) and told.kv is not None else None


def forget(keys: Keys, ref: OperationRef, request_id: str) -> Txn:
    """Delete the receipt of a request that nobody sends again: no copy of this deletes another one's."""
    return Txn((), (Delete(receipt(keys, ref.table, ref.type, request_id)),), (), "forget_receipt")
