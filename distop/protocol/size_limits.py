"""Sizes at which one transaction or answer is divided into several."""

from __future__ import annotations

from distop.protocol import (
    batch_claims,
    job_transitions,
    operation_finish,
    operation_transitions,
    pending_operations,
    permits,
)
from distop.protocol.frozen import frozen
from distop.protocol.txn import MAX_OPERATIONS


@frozen
class Limits:
    """The sizes by which one incarnation divides its work.

    The defaults are what etcd accepts (T1, T2). Smaller ones work as well, in more steps: so the simulator covers with
    sixty jobs what otherwise takes thousands.
    """

    plan_bytes: int = operation_transitions.PLAN_BYTES_PER_TXN
    plan_chunks: int = 100
    """A plan of more bytes or chunks is written chunk by chunk; then its gate is opened."""
    claims: int = job_transitions.CLAIMS_PER_TXN
    together: int = batch_claims.OPERATIONS_PER_CLAIM
    """Maximum number of one-job operations that are claimed together and run in one slot."""
    unlearned: int = 1
    """The same for a type whose jobs' duration is not known yet."""
    moment: float = 0.1
    """Maximum seconds that the jobs of these operations may take in all."""
    reports: int = job_transitions.REPORTS_PER_TXN
    begins: int = pending_operations.BEGINS_PER_TXN
    ends: int = pending_operations.ENDS_PER_TXN
    """Pending operations that end in one transaction."""
    finishes: int = operation_finish.FINISHES_PER_TXN
    finish_room: int = MAX_OPERATIONS
    """Entries in the longest list of a transaction that finishes several operations."""
    reaped: int = job_transitions.CLAIMS_PER_REAP
    gone: int = permits.MAX_GONE
    overdue: int = permits.MAX_OVERDUE
    """Dead incarnations, and actors' overdue claims, that a claim behind a job limit compares."""
    cleaned: int = operation_finish.ORDINALS_PER_CLEAN
    """Ordinals whose keys one cleanup page deletes."""
    outcomes: int = 500
    """Ordinals whose outcomes are read at once for the completion code."""
    outcomes_ahead: int = 100
    """Up to this number they are read while the call is on its way to the child: most completion code uses them."""
    reads: int = MAX_OPERATIONS // 2
    """Keys that are read at once."""
    settled: int = 30
    """Jobs of a previous run whose claims and outcomes are read at once."""
    pruned: int = 4
    """History records, of up to a megabyte each, that are read and deleted at once."""
    denied_kept: float = 3_600.0
    """Seconds for which a denied hold is kept; also a receipt.

    Deleting it earlier would let operations under it begin.
    """
    history_kept: float = 3_600.0
    """Minimum seconds for which a history record, and with it its request id, is kept."""
    prune_every: float = 60.0
    """Seconds between two prunings of a table's history."""


DEFAULT = Limits()
