"""Rerunning an operation: a new one over those of its partitions that are not done."""

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
    """Start a new instance over the partitions of an ended operation that failed, and (``unfinished``) those that had
    no end; None: the latter where it was cancelled.

    It is a start like any other, of the same argument, under the rules that the behavior publishes by now and the
    policy, attempts and time limit of the former operation, and with its labels unless others are given. The table is
    the one that is registered by now, planned anew.

    Raises NotFound, NotAllowed (it has not ended, it succeeded, nothing is left to do, or what this takes was not
    kept), and what a start raises.
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
    # Its id goes with it, and says that nothing of the kind goes on beside it; it is nobody's duplicate.
    id_ = found.spec.id
    wanted = replace(wanted, id=id_, one_off=not id_, on_duplicate="refuse" if id_ else "")
    return await submit(etcd, keys, replace(wanted, rerun_of=str(ref)))


def left_out(ended: OperationResult, unfinished: bool | None) -> int:
    """How many of its partitions that had no end a rerun leaves out."""
    takes = unfinished if unfinished is not None else ended.state != State.FAILED
    return 0 if takes else ended.jobs["total"] - ended.jobs["success"] - ended.jobs["failed"]


def _names(ref: OperationRef, record: History, found: Kept | None, unfinished: bool) -> tuple[str, ...]:
    """The partitions to run again. Raises NotAllowed where there are none, or their names were not kept."""
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
