"""Permits: what makes "at most so many of an operation's jobs at once" hold at every revision.

An operation with a limit N (``Options.max_jobs``) has the permits 0 … N-1, keys that claims take and give back. A claim
behind a gate with a limit puts its permit's key in the same transaction, which compares that the permit is as it was
seen to be free. The report, the release or the takeover that ends the claim gives it back in its own transaction, for
which it compares nothing: the permit belongs to the claim, whose fence is compared anyhow. So there is no key that all
of them write. A permit's key is not deleted while its operation goes on ("free" is written), so that its mod revision
is a one-way guard (T9). Which permits may be taken when a limit was set or lowered while jobs run:
``operation_options.usable_permits``.
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
"""Claims by actors that are overdue and not counted: each is compared in each claim. Executors set all others to
waiting (``job_transitions.revoke_lost``)."""
MAX_GONE = 40
"""Incarnations that are gone and whose claims are not counted: each is compared in each claim. Executors set the claims
of all others to waiting: these count as live until then, and a takeover could need a permit that none of them leaves.
"""


@frozen
class Permits:
    """The permits that may be taken behind one gate: number → mod revision (0: never taken). ``below``: no other may
    be, free or not. ``gone``: incarnations whose claims were not counted, since they had no node key.
    """

    free: dict[int, int]
    below: int
    gone: frozenset[str] = frozenset()
    overdue: tuple[tuple[int, int], ...] = ()
    """Claims by actors that were not counted, since they were not extended in time: (partition, mod revision)."""

    def keeps(self, claim: Claim) -> bool:
        """A takeover of this claim keeps its permit."""
        return 0 <= claim.permit < self.below


def permits(
    most: int,
    claims: Collection[Claim],
    keyed: Mapping[int, tuple[bytes, int]],
    live: Collection[str],
    overdue: Sequence[tuple[int, int]] = (),
    most_gone: int = MAX_GONE,
) -> Permits:
    """What may be taken where at most ``most`` jobs run at once. ``claims``: all of the operation's, read after the
    gate; ``keyed``: the permits' keys, (value, mod revision), read before or after. ``live``: the incarnations with a
    node key. ``overdue``: what is not among the claims, since its actor has not extended it in time.
    """
    # Whether an actor is gone tells no key.
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


def takes(keys: Keys, ref: OperationRef, number: int, seen_mod: int, partition: int) -> tuple[Compare, Put]:
    """What a claim compares and puts for the permit that it takes."""
    key = keys.permit(ref, number)
    return unchanged(key, seen_mod), Put(key, b"%d" % partition)


def gives_back(keys: Keys, ref: OperationRef, claim: Claim | None) -> tuple[Put, ...]:
    """What the end of a claim puts, under its fence."""
    return (Put(keys.permit(ref, claim.permit), FREE),) if claim is not None and claim.permit >= 0 else ()
