"""Starts operations inside a caller's transaction: they exist if it commits (C8-C10).

A start is a set of compares and puts. :func:`commit_with` commits them together with the caller's compares and
operations. A caller with an ``etcd3`` client adds them to its own transaction (:meth:`Submission.etcd3`).

All operations are pending first, even without a dependency, like those of a graph. So they compare only the instance
counter, and no other start or end on the table makes the caller's transaction fail.
"""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING, Any

from distop.errors import DistopError, InvalidArgument, OperationStartError, OutcomeUnknown
from distop.protocol.frozen import frozen
from distop.protocol.texts import plural, shown
from distop.protocol.txn import (
    MAX_OPERATIONS,
    TOO_LARGE,
    Compare,
    Delete,
    Get,
    Put,
    Relation,
    Target,
    Txn,
    TxnResult,
    flaw,
    operations,
    unchanged,
)
from distop.protocol.user_transaction import (
    CallerTransaction,
    applied_branch,
    combined,
    forget,
    receipt,
    start_lookups,
    was_started,
)
from distop.services.submission.contention import Lost, until_won
from distop.services.submission.graph_start import check, in_one
from distop.store.connection_settings import WRITE_LIMIT

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from distop.protocol.keys import Keys
    from distop.protocol.records import OperationRef
    from distop.protocol.txn import KeyValue, TxnOperation, TxnOperationResult
    from distop.services.submission.graph_start import StartLink, Whole
    from distop.services.submission.start_request import Request
    from distop.store.client import EtcdClient


FORGET_LIMIT = 5.0
"""Deadline in seconds for the deletion of an obsolete receipt."""


class Submission:
    """The compares and puts that start operations in a caller's transaction.

    Add ``compares`` and ``puts`` to that transaction, and commit it soon: if other operations of these types start
    before, the compares fail. They are valid for one transaction.
    """

    def __init__(self, etcd: EtcdClient, keys: Keys, wanted: Sequence[Request], whole: Whole) -> None:
        self._etcd = etcd
        self._keys = keys
        self._wanted = wanted
        self._refs = whole.refs
        self.compares: tuple[Compare, ...] = whole.txn.compares
        self.puts: tuple[Put, ...] = tuple(op for op in whole.txn.success if isinstance(op, Put))

    @property
    def refs(self) -> tuple[OperationRef, ...]:
        """The operations, which exist once the transaction has been committed."""
        return self._refs

    def etcd3(self, client: Any) -> tuple[list[Any], list[Any]]:
        """The compares and the operations for a transaction of an ``etcd3`` client.

        ``client.transaction(compare=[*mine, *compares], success=[*mine, *puts], failure=[…])``.
        """
        kinds = client.transactions
        return [_compare3(kinds, one) for one in self.compares], [kinds.put(put.key, put.value) for put in self.puts]

    async def stale(self) -> bool:
        """After a refusal: whether one of distop's compares fails now.

        True: make a new submission. False: a compare of the caller's failed.
        """
        found = await self._etcd.read(*(Get(one.key) for one in self.compares))
        return not all(_holds(one, answer.kv) for one, answer in zip(self.compares, found, strict=True))

    async def committed(self) -> bool:
        """After an unknown outcome: whether the caller's transaction was committed.

        If it was not, it never will be: a late copy of it is refused once this has returned. The answer depends on the
        operations or their history records, so call it soon.

        Raises OutcomeUnknown; EtcdUnavailable.
        """
        return await _committed(self._etcd, self._keys, self._wanted[0].request_id, self._refs[0])


def _holds(one: Compare, kv: KeyValue | None) -> bool:
    if one.target is Target.MOD:
        return (kv.mod_revision if kv is not None else 0) == one.value
    if one.target is Target.VALUE:
        return kv is not None and kv.value == one.value
    return (kv is not None) is (one.relation is Relation.GREATER)


def _compare3(kinds: Any, one: Compare) -> Any:
    """A compare in the form of an ``etcd3`` client.

    A submission compares only mod revisions, the existence of tables, and free ids: an id's key is absent, or names an
    operation that has ended.
    """
    if one.target is Target.CREATE:
        assert one.value == 0
        return kinds.create(one.key) > 0 if one.relation is Relation.GREATER else kinds.create(one.key) == 0
    assert one.relation is Relation.EQUAL
    assert one.target in (Target.MOD, Target.VALUE)
    return (kinds.mod if one.target is Target.MOD else kinds.value)(one.key) == one.value


async def submission(etcd: EtcdClient, keys: Keys, wanted: Sequence[Request], links: Sequence[StartLink]) -> Submission:
    """Read and check everything; write nothing.

    Raises as ``graph_start.start_graph`` does; InvalidArgument if one transaction cannot hold it; OperationStartError
    if an earlier call with these request ids has started them.
    """
    check(wanted, links)
    whole = await until_won(etcd, keys, wanted[0], lambda: in_one(etcd, keys, wanted, links))
    if whole.earlier:
        raise OperationStartError(
            f"{', '.join(map(str, whole.refs[:3]))} {'was' if len(whole.refs) == 1 else 'were'} started by an earlier "
            "transaction with this request id: choose a new id for another transaction"
        )
    return Submission(etcd, keys, wanted, whole)


@frozen
class Committed:
    """The outcome of the caller's transaction.

    ``earlier``: an earlier call with its request id had already applied one of its branches. ``answers``: the answers
    to the caller's own operations, in the order of the branch that was taken; empty if ``earlier``, or if etcd's answer
    was lost and the outcome was determined afterwards.
    """

    committed: bool
    refs: tuple[OperationRef, ...] = ()
    answers: tuple[TxnOperationResult, ...] = ()
    earlier: bool = False
    revision: int = 0


@frozen
class Own:
    """The compares and operations of the caller's transaction."""

    compare: tuple[Compare, ...]
    success: tuple[TxnOperation, ...]
    failure: tuple[TxnOperation, ...]


def own(keys: Keys, compare: Iterable[Any], success: Iterable[Any], failure: Iterable[Any]) -> Own:
    """Check the parts of a transaction.

    Raises InvalidArgument for invalid parts, and for writes to keys of distop.
    """
    parts = []
    for given, what in ((compare, "compare"), (success, "success"), (failure, "failure")):
        if isinstance(given, str | bytes) or not hasattr(given, "__iter__"):
            raise InvalidArgument(f"{what} must be a list, not {shown(given)}")
        parts.append(tuple(given))
    for one in parts[0]:
        if not isinstance(one, Compare):
            raise InvalidArgument(
                f"{shown(one)} is not a compare: use those of distop.protocol.txn, such as unchanged(key, revision)"
            )
    for one in (*parts[1], *parts[2]):
        _check_operation(keys, one)
    return Own(*parts)


def _check_operation(keys: Keys, one: Any) -> None:
    if isinstance(one, Txn):
        for inner in (*one.success, *one.failure):
            _check_operation(keys, inner)
        return
    if not isinstance(one, Put | Delete | Get):
        raise InvalidArgument(
            f"{shown(one)} is not an operation of a transaction: use Put, Delete, Get or Txn of distop.protocol.txn"
        )
    if isinstance(one, Get):
        return
    first, after = keys.everything()
    end = (one.range_end if isinstance(one, Delete) else "") or f"{one.key}\0"
    if one.key < after and (end > first or end == "\0"):  # "\0" as an end: all keys from there on
        raise InvalidArgument(f"the key {shown(one.key)} belongs to distop: a caller's transaction cannot write it")


async def commit_with(
    etcd: EtcdClient, keys: Keys, wanted: Sequence[Request], links: Sequence[StartLink], mine: Own, name: str
) -> Committed:
    """Commit the caller's compares and operations together with the starts.

    If only distop's counters have changed, nothing is applied, and the transaction is retried. ``name``: the request id
    for the message of an OutcomeUnknown.

    Of all copies, sent by this call or another one with the same request id, one branch of one copy is applied
    (``protocol.user_transaction``).
    """
    check(wanted, links)
    # A repeated call has the same request id if the caller chose one: that operation identifies the call.
    place = next((n for n, one in enumerate(wanted) if one.own_id), 0)
    first = wanted[place]

    async def attempt() -> Committed:
        if first.own_id and await etcd.get(receipt(keys, first.table, first.type, first.request_id)) is not None:
            return Committed(False, earlier=True)
        whole = await in_one(etcd, keys, wanted, links)
        if whole.earlier:
            return Committed(True, whole.refs, earlier=True)
        ref = whole.refs[place]
        number = min(one.instance for one in whole.refs if (one.table, one.type) == (ref.table, ref.type))
        caller = CallerTransaction(
            ref, first.request_id, number, first.own_id, mine.compare, mine.success, mine.failure
        )
        result = await etcd.commit(_joined(keys, whole, caller), deadline=WRITE_LIMIT)
        return await _outcome(etcd, keys, whole, caller, result)

    try:
        return await until_won(etcd, keys, first, attempt)
    except OutcomeUnknown as error:
        raise OutcomeUnknown(
            "cannot tell whether the transaction was committed, because etcd did not answer: call again with "
            f"request_id={shown(name)}, which commits it at most once"
        ) from error


async def _outcome(
    etcd: EtcdClient, keys: Keys, whole: Whole, caller: CallerTransaction, result: TxnResult
) -> Committed:
    """The outcome. Raises Lost if one of distop's counters has changed, and nothing was applied."""
    if not result.succeeded:
        before = applied_branch(result.responses, caller.request_id)
        if before is False:
            return Committed(False, earlier=not result.repeated)
        if not (before and result.repeated):
            raise Lost
        return Committed(True, whole.refs)
    inner = result.responses[0]
    assert isinstance(inner, TxnResult)
    if inner.succeeded:
        return Committed(True, whole.refs, inner.responses[len(whole.txn.success) :], revision=result.revision)
    if not caller.fences_failure:
        # An earlier copy may still arrive, and by then the caller's compares may hold.
        if result.repeated and await _committed(etcd, keys, caller.request_id, caller.ref):
            return Committed(True, whole.refs)
    elif caller.writes_failure and not caller.again:
        with suppress(DistopError):  # executors delete it after a while
            await etcd.commit(forget(keys, caller.ref, caller.request_id), deadline=FORGET_LIMIT)
    return Committed(False, (), inner.responses[: len(caller.failure)], revision=result.revision)


def _joined(keys: Keys, whole: Whole, caller: CallerTransaction) -> Txn:
    txn = combined(keys, whole.txn, caller)
    if operations(txn) > MAX_OPERATIONS:
        raise InvalidArgument(
            f"the transaction has {operations(txn)} etcd operations, with those that start its "
            f"{plural(len(whole.refs), 'operation')}; etcd accepts at most {MAX_OPERATIONS}: split the transaction"
        )
    if (found := flaw(txn)) is not None and found.detail != TOO_LARGE:
        raise InvalidArgument(f"etcd would reject the transaction: {found.text}")
    return txn


async def _committed(etcd: EtcdClient, keys: Keys, request_id: str, ref: OperationRef) -> bool:
    """Whether this request has started the operation.

    If it has not, the instance counter is rewritten unchanged. So every late copy, which compares its old revision, is
    refused.
    """
    counter = keys.next_instance(ref.table, ref.type)
    gets = start_lookups(keys, ref)
    while True:
        (seen,) = await etcd.read(Get(counter))
        number = int(seen.kv.value) if seen.kv is not None else 1
        if number > ref.instance:
            return was_started(await etcd.read(*gets), request_id)
        mod = seen.kv.mod_revision if seen.kv is not None else 0
        txn = Txn((unchanged(counter, mod),), (Put(counter, str(number).encode()),), gets, "withdraw")
        if (await etcd.commit(txn, deadline=WRITE_LIMIT)).succeeded:
            return False
