"""Where one transaction, or one answer, becomes several: every size at which a protocol takes another course."""

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
    """The sizes by which one incarnation divides what it does. The defaults are what etcd takes (T1, T2); smaller ones
    are as good, and take more steps: so the simulator sees with sixty jobs what else takes thousands.
    """

    plan_bytes: int = operation_transitions.PLAN_BYTES_PER_TXN
    plan_chunks: int = 100
    """A plan of more bytes or chunks is written chunk by chunk, then opened."""
    claims: int = job_transitions.CLAIMS_PER_TXN
    together: int = batch_claims.OPERATIONS_PER_CLAIM
    """Operations of one job that are claimed, and run in one slot, together."""
    unlearned: int = 1
    """So many, of a type of which it is not known yet what its jobs take."""
    moment: float = 0.1
    """Seconds that the jobs of those may take in all."""
    reports: int = job_transitions.REPORTS_PER_TXN
    begins: int = pending_operations.BEGINS_PER_TXN
    ends: int = pending_operations.ENDS_PER_TXN
    """Of operations that have not begun."""
    finishes: int = operation_finish.FINISHES_PER_TXN
    finish_room: int = MAX_OPERATIONS
    """Entries in the longest list of a transaction that finishes several operations."""
    reaped: int = job_transitions.CLAIMS_PER_REAP
    gone: int = permits.MAX_GONE
    overdue: int = permits.MAX_OVERDUE
    """Lost incarnations, and overdue claims by actors, that a claim behind a limit of jobs compares."""
    cleaned: int = operation_finish.ORDINALS_PER_CLEAN
    """Ordinals whose keys one page of the cleanup deletes."""
    outcomes: int = 500
    """Ordinals whose outcomes are read at once for the completion code."""
    outcomes_ahead: int = 100
    """So few are read while the call is on its way to the child: completion code mostly asks for them."""
    reads: int = MAX_OPERATIONS // 2
    """Keys that are read at once."""
    settled: int = 30
    """Jobs of a former run whose claims and outcomes are read at once."""
    pruned: int = 4
    """History records, of up to a megabyte each, that are read and forgotten at once."""
    denied_kept: float = 3_600.0
    """Seconds for which a denied hold stays: its absence would let begin what it held. And for which a receipt does."""
    history_kept: float = 3_600.0
    """Minimum seconds for which a history record, and with it its request id, is kept."""
    prune_every: float = 60.0
    """Seconds until a table's history is looked at again."""


DEFAULT = Limits()
