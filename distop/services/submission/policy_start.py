"""Starts an operation in the transaction that records its policy's evaluation (``protocol.policy``).

The operation is pending first, as in a caller's transaction: so only the instance counter, the table's record and the
policy are compared, and an operation that excludes it is waited for.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from distop.protocol import policy as p
from distop.protocol.operation_transitions import starts
from distop.schemas.argument_schema import encode_argument
from distop.services.submission.insertion import Insertion, StartAttempt
from distop.services.submission.start_options import StartOptions
from distop.services.submission.start_request import derived, request

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from distop.protocol.keys import Keys
    from distop.protocol.records import OperationRef
    from distop.protocol.txn import Txn, TxnResult
    from distop.services.submission.start_request import Request
    from distop.store.client import EtcdClient


def request_of(table: str, name: str, policy: p.Policy, request_id: str = "") -> Request:
    """The request for the operation of a policy. Raises InvalidArgument.

    ``request_id``: "" to check the policy only.
    """
    options = StartOptions.of(policy.options.to_json(), "start")
    wanted = request(policy.start, table, encode_argument(dict(policy.arg)), options, f"{p.SUBMITTER}{name}")
    wanted = replace(wanted, by=policy.by)
    return derived(wanted, request_id) if request_id else wanted


async def start_by_policy(
    etcd: EtcdClient,
    keys: Keys,
    wanted: Request,
    record: Callable[[OperationRef, Txn], Txn],
    commit: Callable[[Txn], Awaitable[TxnResult]],
) -> OperationRef | None:
    """Start the operation of a policy; None: something that was read has changed since, or an earlier copy started it.

    ``record`` adds the evaluation to the transaction that starts this operation. Raises OperationStartError if the
    start is refused for now (its id is active), and UnknownBehavior, NotFound (the table), InvalidArgument.
    """
    one = StartAttempt(wanted)
    insertion = Insertion(etcd, keys, [one], joins=False)
    await insertion.look_back()
    await insertion.check()
    if isinstance(one.verdict, Exception):
        raise one.verdict
    if one.verdict is not None:
        return None
    await insertion.read_predecessors()
    (new,) = insertion.operations([one], waits=True)
    counters = insertion.types[wanted.table, wanted.type].counters
    result = await commit(record(new.ref, starts(keys, counters, [new], looks=False)))
    return new.ref if result.succeeded else None
