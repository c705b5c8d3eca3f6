"""A caller's own transaction that also starts operations (C9, C10).

One branch of it is applied, exactly once. distop's compares are outside, the caller's are nested inside. A branch of
the caller's that writes also writes the instance counter, which the outer compares check. So the first copy that is
applied decides, and every other copy is refused by the outer compares, whatever happens to the caller's keys. A
refused copy reads which branch ran: the operation's spec or history stands for ``success``, a receipt for ``failure``.
The clauses were checked by exhaustive exploration (``tests/unit/protocol/test_user_transaction_copies.py``). Pure.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

from distop.protocol.dependencies import Hold, HoldState
from distop.protocol.frozen import frozen
from distop.protocol.json_codec import dumps, word
from distop.protocol.record_reading import read
from distop.protocol.records import History, OperationRef, Spec
from distop.protocol.txn import Compare, Delete, Get, GetResult, Put, Txn, TxnOperation, absent

if TYPE_CHECKING:
    from collections.abc import Iterable

    from distop.protocol.keys import Keys
    from distop.protocol.txn import TxnOperationResult

KIND = "transaction"
"""The kind of the receipt. It is stored as a hold that holds nothing; daemons delete it like the receipt of a
confirmation (``protocol.prepared_operations``).
"""


@frozen
class CallerTransaction:
    """What the caller's transaction compares and does.

    ``ref``: the operation that it starts under the caller's request id, or else the first operation. ``request_id``:
    of that operation. ``number``: its instance counter, as read. ``again``: an earlier call may have had the same
    request id.
    """

    ref: OperationRef
    request_id: str
    number: int
    again: bool
    compare: tuple[Compare, ...]
    success: tuple[TxnOperation, ...]
    failure: tuple[TxnOperation, ...]

    @property
    def writes_failure(self) -> bool:
        """Whether the failure branch writes, so that it must run at most once."""
        return any(_writes(op) for op in self.failure)

    @property
    def fences_failure(self) -> bool:
        """Whether the failure branch writes the counter, so that all other copies are refused.

        If it only reads, and no other call has its request id, a later transaction writes the counter, and only after a
        lost answer. So it does not delay other callers' starts.
        """
        return self.again or self.writes_failure


def _writes(op: TxnOperation) -> bool:
    if isinstance(op, Txn):
        return any(_writes(inner) for inner in (*op.success, *op.failure))
    return isinstance(op, Put | Delete)


def receipt(keys: Keys, table: str, type_name: str, request_id: str) -> str:
    """The key that records that the failure branch of a caller's transaction ran.

    It is named by ``CallerTransaction.request_id``, which may have any length.
    """
    place = dumps([table, type_name, request_id])
    return keys.hold(f"{KIND}:{hashlib.sha256(place).hexdigest()[:32]}")


def combined(keys: Keys, starts: Txn, caller: CallerTransaction) -> Txn:
    """The caller's transaction merged with ``starts``.

    The failure branch reads which branch an earlier copy ran (:func:`applied_branch`).
    """
    ref = caller.ref
    receipt_key = receipt(keys, ref.table, ref.type, caller.request_id)
    failure = caller.failure
    if caller.fences_failure:
        failure += (Put(keys.next_instance(ref.table, ref.type), word(str(caller.number))),)
    if caller.writes_failure:
        record = Hold(KIND, HoldState.CONFIRMED, "the compares failed", {"request_id": caller.request_id})
        failure += (Put(receipt_key, record.encode()),)
    return Txn(
        (*starts.compares, *((absent(receipt_key),) if caller.again else ())),
        (Txn(caller.compare, (*starts.success, *caller.success), failure, "own"),),
        (*start_lookups(keys, ref), Get(receipt_key)),
        "transaction",
    )


def start_lookups(keys: Keys, ref: OperationRef) -> tuple[Get, Get]:
    """Reads of the spec and the history record that show whether a request started."""
    return Get(keys.of(ref, "spec")), Get(keys.history(ref))


def was_started(answers: Iterable[TxnOperationResult], request_id: str) -> bool:
    """Whether this request started the operation, by the answers to start_lookups()."""
    spec, history = (answer.kv if isinstance(answer, GetResult) else None for answer in answers)
    return (spec is not None and read(Spec.decode, spec).request_id == request_id) or (
        history is not None and read(History.decode, history).request_id == request_id
    )


def applied_branch(answers: tuple[TxnOperationResult, ...], request_id: str) -> bool | None:
    """Which branch an earlier copy applied, by what :func:`combined` read.

    True: ``success``; False: ``failure``; None: neither.
    """
    *started, found = answers
    if was_started(started, request_id):
        return True
    return False if isinstance(found, GetResult) and found.kv is not None else None


def forget(keys: Keys, ref: OperationRef, request_id: str) -> Txn:
    """Delete the receipt of a request that nobody sends again.

    A late copy of this transaction deletes no other request's receipt.
    """
    return Txn((), (Delete(receipt(keys, ref.table, ref.type, request_id)),), (), "forget_receipt")
