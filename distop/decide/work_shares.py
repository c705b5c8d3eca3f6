"""How executors divide work without messages: shares of an operation's jobs, batches, and turns. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any
from zlib import crc32

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from distop.protocol.jobs import Claim


def block_size(open_jobs: int, mine: int, executors: int, batch: bool, free_slots: int, limit: int) -> int:
    """The number of jobs to claim at once, at most ``limit``.

    For a batch: this executor's share (``mine``), or an equal share of the open jobs if it has none. Otherwise: as many
    as there are free slots. So executors that see the same nodes claim disjoint blocks that cover all jobs.
    """
    if free_slots <= 0:
        return 0
    share = (mine or -(-open_jobs // max(executors, 1))) if batch else free_slots
    return max(0, min(share, open_jobs, limit))


BATCH_BYTES_PER_SLOT = 16 * 1024**3
"""Maximum data in one batch, for each slot of its executor (with a core each): about a minute of scanning.

With much less, the fixed cost of a batch would show. With much more, a lost executor would cost more work, and an
executor that has finished its share could take over nothing.
"""


def within_bytes(sizes: Iterable[int], slots: int) -> int:
    """The number of partitions, in order, that make one batch of an executor with these slots; at least one."""
    total = count = 0
    for size in sizes:
        total += size
        if count and total > BATCH_BYTES_PER_SLOT * slots:
            break
        count += 1
    return count


def rendezvous(partitions: Iterable[int], executor: str, others: Sequence[str], salt: str) -> tuple[list[int], int]:
    """The order in which this executor should claim the partitions.

    Also returned: how many of them are its own. First come those for which it has the highest score (highest random
    weight), then those for which it is second, and so on. No executor needs to know what another claims.
    """
    if not others:
        own = list(partitions)
        return own, len(own)
    rivals = [crc32(f"{salt}/{name}".encode()) for name in others]
    mine = crc32(f"{salt}/{executor}".encode())
    ranked: list[list[int]] = [[] for _ in range(len(rivals) + 1)]
    for p in partitions:
        score = _mix(mine, p)
        ranked[sum([_mix(rival, p) > score for rival in rivals])].append(p)
    return [p for rank in ranked for p in rank], len(ranked[0])


LONGEST_RUN = 120
"""Maximum number of neighbouring ordinals that are assigned together."""


def shares(
    count: int, executor: str, others: Sequence[str], salt: str, costs: Sequence[int] | None = None
) -> tuple[list[int], int]:
    """The order in which this executor should claim a fresh plan's ordinals.

    Also returned: the size of its share, at the head. Runs of neighbours are assigned, each to the executor with the
    least work so far. So all executors that see the same nodes divide alike, and an untouched run is claimed under two
    range compares.

    ``costs``: of each ordinal, in any unit; without them all cost the same. Runs that cost many times more than others
    come first: the longest work must not begin last, and no share may be a multiple of another.
    """
    names = sorted({executor, *others})
    if len(names) == 1 and costs is None:
        return list(range(count)), count
    turn = (names.index(executor) + crc32(salt.encode())) % len(names)
    length = max(1, min(LONGEST_RUN, count // (8 * len(names))))
    runs = [range(first, min(first + length, count)) for first in range(0, count, length)]
    weights = [sum(costs[run.start : run.stop]) if costs is not None else len(run) for run in runs]
    dealt = [0] * len(names)
    mine: list[int] = []
    rest: list[int] = []
    # By powers of two, so that random differences of sizes do not change the order.
    for n in sorted(range(len(runs)), key=lambda n: -weights[n].bit_length()):
        whose = dealt.index(min(dealt))
        dealt[whose] += weights[n]
        (mine if whose == turn else rest).extend(runs[n])
    return mine + rest, len(mine)


OPEN_COST = 4 * 1024**2
"""The cost of opening a file, in bytes that could be read meanwhile, as in Spark (``openCostInBytes``)."""


def cost(partition: Mapping[str, Any]) -> int:
    """The cost of a partition (its plan in JSON form) in bytes, estimated from its files."""
    return int(partition.get("bytes", 0)) + OPEN_COST * max(1, len(partition.get("files") or ()))


def _mix(seed: int, n: int) -> int:
    # A multiplicative hash of 32 bits (odd constants), enough to spread ordinals evenly over executors.
    x = (seed ^ (n * 0x9E3779B1)) & 0xFFFFFFFF
    x = ((x ^ (x >> 16)) * 0x85EBCA6B) & 0xFFFFFFFF
    x = ((x ^ (x >> 13)) * 0xC2B2AE35) & 0xFFFFFFFF
    return x ^ (x >> 16)


def place_for_suspect(claim: Claim, executor: str, others: Sequence[str], job: str) -> int:
    """My place, from 0, among the executors that may run a suspect.

    The order differs for each job and is the same for all executors. The executor on which it failed comes last,
    because it leaves the job to others for a while.
    """
    if claim.waiting and claim.failures:
        if claim.executor == executor:
            return len(others)
        others = [name for name in others if name != claim.executor]
    return turn(others, executor, job)


QUIET_TURN = 300.0
"""Seconds for which a suspect is left to the executor before me.

That one may have to wait for a long job of its own, or may never be idle.
"""


def quiet_in(place: int, unchanged_for: float) -> float:
    """Seconds until an executor at this place stops claiming other jobs for a suspect; 0: now."""
    return max(0.0, place * QUIET_TURN - unchanged_for)


def turn(candidates: Iterable[str], mine: str, subject: str) -> int:
    """My place among the candidates for an election, from 0.

    The order differs for each subject and is the same for all that see the same candidates.
    """
    own = (crc32(f"{subject}/{mine}".encode()), mine)
    return sum((crc32(f"{subject}/{name}".encode()), name) < own for name in candidates if name != mine)
