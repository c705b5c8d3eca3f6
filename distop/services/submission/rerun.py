"""Reruns an operation: starts a new one over its failed or unfinished partitions."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from distop.errors import NotAllowed, no_operation
from distop.protocol import rerun_record
from distop.protocol.record_reading import read
from distop.protocol.records import CLUSTER_TABLE, History, State
from distop.protocol.texts import plural
from distop.protocol.txn import Get
from distop.services.submission.start_options import StartOptions
from distop.services.submission.start_request import acting, request
from distop.services.submission.submit import submit
from distop.services.suggested_commands import command

if TYPE_CHECKING:
    from distop.protocol.keys import Keys
    from distop.protocol.records import OperationRef
    from distop.protocol.rerun_record import Kept
    from distop.services.operation_results import OperationResult
    from distop.services.submission.insertion import Started
    from distop.store.client import EtcdClient


async def rerun(
    etcd: EtcdClient, keys: Keys, ref: OperationRef, given: StartOptions, *, unfinished: bool | None
) -> Started:
    """Start a new operation over the failed partitions of an ended one.

    ``unfinished``: also over the partitions whose jobs had not ended; None: only if the operation was cancelled.

    It is an ordinary start with the same argument. It takes policy, attempts, time limit and labels of the former
    operation, unless others are given, and all other rules from the behavior's current declaration. It plans the table
    that is registered now.

    Raises NotFound, NotAllowed (it has not ended, it succeeded, it has no partition to rerun, or its rerun data were
    too large to be stored), and the errors of a start.
    """
    history, state, *beside = await etcd.read(
        Get(keys.history(ref)), Get(keys.of(ref, "state"), count_only=True), *rerun_record.reads(keys, ref)
    )
    if history.kv is None:
        if state.count:
            raise NotAllowed(f"{ref} has not ended: wait for it, or cancel it first")
        raise no_operation(ref)
    found = rerun_record.decode(beside)
    record = read(History.decode, history.kv)
    names = _names(ref, record, found, record.state is State.CANCELLED if unfinished is None else unfinished)
    assert found is not None
    rules = found.spec.rules
    former = StartOptions(
        partitions=None if ref.table == CLUSTER_TABLE else names,
        failure_policy=rules.failure_policy,
        retry_attempts=rules.retry.attempts,
        time_limit=rules.time_limit or None,
        labels=found.spec.labels,
    )
    wanted = request(ref.type, ref.table, found.arg, replace(former, **given.given()), acting(etcd))
    # It takes the id of the former operation: so it is refused while another operation with this id is active.
    id_ = found.spec.id
    wanted = replace(wanted, id=id_, one_off=not id_, on_duplicate="refuse" if id_ else "")
    return await submit(etcd, keys, replace(wanted, rerun_of=str(ref)))


def left_out(ended: OperationResult, unfinished: bool | None) -> int:
    """The number of unfinished partitions that a rerun leaves out."""
    takes = unfinished if unfinished is not None else ended.state != State.FAILED
    return 0 if takes else ended.jobs["total"] - ended.jobs["success"] - ended.jobs["failed"]


def _names(ref: OperationRef, record: History, found: Kept | None, unfinished: bool) -> tuple[str, ...]:
    """The partitions to rerun. Raises NotAllowed if there are none, or if their names were not stored."""
    if record.state is State.SUCCESS:
        raise NotAllowed(f"{ref} succeeded: it has no partition to rerun")
    left = record.total - record.success - record.failed
    if not record.failed and not (unfinished and left):
        if left:
            raise NotAllowed(
                f"{ref} has no failed partition, but {plural(left, 'unfinished partition')}: rerun with --unfinished "
                "(unfinished=True)"
            )
        planned = "all its jobs succeeded" if record.total else "it had no plan"
        raise NotAllowed(
            f"{ref} ended as {record.state}, but {planned}: it has no partition to rerun; start a new operation"
        )
    names = (*found.failed, *(found.unfinished if unfinished else ())) if found is not None else ()
    if found is None or (unfinished and left and not found.unfinished):
        listing = f" (list the failed ones: {command('show', str(ref), '--failed')})" if record.failed else ""
        raise NotAllowed(
            f"{ref} cannot be rerun: its unfinished partitions were too many, or their names too long, to be stored. "
            f"Start a new operation with --partition for some of them{listing}"
        )
    return names
