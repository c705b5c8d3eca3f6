"""Permits: at most N jobs of an operation run at once, at every revision.

An operation with a limit N (``Options.max_jobs``) has the permits 0 … N-1. Each permit is a key that claims take and
give back. A claim behind a gate with a limit writes its permit's key in the same transaction, which compares that the
permit is still free as read. The report, release or takeover that ends the claim gives the permit back in its own
transaction. That needs no further compare: the permit belongs to the claim, whose fence is compared. So no key is
written by all claims.

While the operation exists its permit keys are not deleted: "free" is written instead, so their mod revisions are
one-way guards (T9). ``operation_options.usable_permits`` determines which permits may be taken after a limit was set or
lowered while jobs run.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from distop.protocol.frozen import frozen
from distop.protocol.operation_options import usable_permits
from distop.protocol.txn import Put, unchanged

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from distop.protocol.jobs import Claim
    from distop.protocol.keys import Keys
    from distop.protocol.records import OperationRef
    from distop.protocol.txn import Compare

FREE = b"free"
MAX_OVERDUE = 20
"""Maximum number of actors' overdue claims that are not counted: each claim compares each of them.

Executors set all others to waiting (``job_transitions.revoke_lost``).
"""
MAX_GONE = 40
"""Maximum number of dead incarnations whose claims are not counted: each claim compares each of them.

Executors set the claims of all others to waiting. Until then these count as live, and there may be no free permit for a
takeover.
"""


@frozen
class Permits:
    """The permits that may be taken behind one gate.

    ``free``: number → mod revision (0: never taken). ``below``: only permits below this number may be taken. ``gone``:
    incarnations without a node key, whose claims were not counted.
    """

    free: dict[int, int]
    below: int
    gone: frozenset[str] = frozenset()
    overdue: tuple[tuple[int, int], ...] = ()
    """Actors' claims that were not extended in time and not counted: (partition, mod revision)."""

    def keeps(self, claim: Claim) -> bool:
        """Whether a takeover of this claim keeps its permit."""
        return 0 <= claim.permit < self.below


def permits(
    most: int,
    claims: Collection[Claim],
    keyed: Mapping[int, tuple[bytes, int]],
    live: Collection[str],
    overdue: Sequence[tuple[int, int]] = (),
    most_gone: int = MAX_GONE,
) -> Permits:
    """The permits that may be taken while at most ``most`` jobs run at once.

    ``claims``: all claims of the operation, read after the gate. ``keyed``: the permits' keys, (value, mod revision),
    read before or after. ``live``: incarnations with a node key. ``overdue``: claims that are left out of ``claims``
    because their actors did not extend them in time.
    """
    # No key shows whether an actor is gone.
    dead = sorted({c.incarnation for c in claims if c.incarnation and c.incarnation not in live})
    gone = frozenset(dead[:most_gone])
    held: dict[int, int] = {}
    without = 0
    for claim in claims:
        if claim.waiting or claim.incarnation in gone:
            continue
        if claim.permit >= 0:
            held[claim.permit] = held.get(claim.permit, 0) + 1
        else:
            without += 1
    below = usable_permits(most, held, without)
    taken = {c.permit for c in claims if not c.waiting}
    seen = {n: keyed.get(n, (FREE, 0)) for n in range(below)}
    free = {n: mod for n, (value, mod) in seen.items() if value == FREE and n not in taken}
    return Permits(free, below, gone, tuple(overdue))


def take_permit(keys: Keys, ref: OperationRef, number: int, seen_mod: int, partition: int) -> tuple[Compare, Put]:
    """The guard and the write of a claim that takes a permit.

    Guard: the permit is unchanged, so it is still free.
    """
    key = keys.permit(ref, number)
    return unchanged(key, seen_mod), Put(key, b"%d" % partition)


def permit_puts(keys: Keys, ref: OperationRef, claim: Claim | None) -> tuple[Put, ...]:
    """The write that gives a claim's permit back, under the claim's fence."""
    return (Put(keys.permit(ref, claim.permit), FREE),) if claim is not None and claim.permit >= 0 else ()
