"""The next step of a coordinator or an executor. Pure.

It is decided from one view and the time. Steps are returned as values; the shells (``distop.daemon.coordinator``,
``distop.daemon.executor``) perform them. Operations with records of a newer version are skipped (rolling upgrades).
"""

from __future__ import annotations

from dataclasses import replace
from itertools import islice
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal, TypeAlias
from zlib import crc32

from distop.protocol import job_transitions
from distop.protocol import operation_finish as f
from distop.protocol import operation_transitions as t
from distop.protocol import pending_operations as w
from distop.protocol.frozen import frozen
from distop.protocol.jobs import Claim, Outcome, Tried, told
from distop.protocol.json_codec import SCHEMA_VERSION, failed_text, parse_time, rfc3339
from distop.protocol.operation_options import allowance
from distop.protocol.records import Attempts, Cancel, Decision, State
from distop.protocol.revisioned import Seen
from distop.protocol.state_tables import Stage
from distop.protocol.texts import plural

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping, Sequence

    from distop.decide.operation_view import OperationView
    from distop.protocol.behavior_declaration import Rules
    from distop.protocol.keys import Keys
    from distop.protocol.txn import Compare, Txn

# ----------------------------------------------------------------- coordinator


@frozen
class MakePlan:
    """Run the behavior's ``partitions()`` in the child, then write chunks and plan."""


@frozen
class Complete:
    """Run the behavior's ``complete_operation`` in the child with this decision, then finish."""

    decision: Decision


@frozen
class Finish:
    """Write the terminal state and the history. ``decision_mod`` 0: decide in the same transaction."""

    decision: Decision
    decision_mod: int


@frozen
class Reap:
    """Clean up after these jobs, then delete their claims.

    ``claims``: (partition, the claim's mod revision). Their claims wait, or their holders are gone.
    """

    claims: tuple[tuple[int, int], ...]


@frozen
class Commit:
    """Send one transaction and decide again."""

    txn: Txn


@frozen
class CompleteFirst:
    """Run the behavior's ``complete_operation`` before deciding.

    It gets the expected decision. It only makes a report. Then one transaction decides and finishes. ``otherwise``:
    decide first, if the installed code does more than a report, or etcd has refused the end once (the code would run
    again and again).
    """

    decision: Decision
    otherwise: Commit


@frozen
class Clean:
    """Start follow-ups, delete the operation's keys in pages, then ``.state`` and pending together."""

    count: int
    follow_ups: tuple[Mapping[str, Any], ...] = ()


@frozen
class WakeAt:
    """Wait until this time (seconds since the epoch)."""

    time: float


_NOBODY: Mapping[int, float] = MappingProxyType({})

Step: TypeAlias = MakePlan | Complete | CompleteFirst | Finish | Reap | Commit | Clean | WakeAt | None


def next_step(
    keys: Keys,
    op: OperationView,
    live: Collection[str],
    election: Compare,
    now: float,
    poll: float,
    actors: Mapping[int, float] = _NOBODY,
) -> Step:
    """The coordinator's next step for an operation; None: wait for an event.

    ``live``: incarnations with a node key. ``poll``: seconds between two checks. A ``retry_at`` further ahead than that
    and than the longest back-off is due at once, so a clock that is an hour ahead delays nothing (fault 40).
    ``actors``: seconds until each actor's claim counts as abandoned (:func:`abandoned_in`).
    """
    if op.spec is None or newer(op):
        return None
    stage = op.stage
    longest = max(poll, op.spec.rules.retry.maximum)
    if stage is Stage.PLANNING:
        if op.planning is not None and (due := _due(op.planning.value.retry_at, now, longest)) > now:
            return WakeAt(due)
        return MakePlan()
    if stage in (Stage.OPEN, Stage.PAUSED) and op.plan is not None:
        if op.ended >= op.plan.count:
            # No claim exists, though claims are not watched: each was deleted with its job's end, and no ended job is
            # claimed again.
            verdict = State.FAILED if op.failed else State.SUCCESS
            return _decided(keys, op, election, verdict, at_once=op.spec.rules.reports_only)
        max_failed, fail_fast = op.terms.options.max_failed, op.spec.rules.failure_policy == "fail_fast"
        if stage is Stage.OPEN and len(op.failed) > allowance(max_failed, fail_fast, op.plan.count):
            text = f"{len(op.failed)} of {op.plan.count} jobs failed"
            why = Cancel("failed", f"{text}, where {max_failed} may" if max_failed else text)
            return Commit(t.cancel(keys, op.ref, op.state_mod, why, election))
        return None
    if stage is Stage.CANCELLING:
        if not op.claims_known:
            return None
        gone = tuple(
            (p, seen.mod)
            for p, seen in sorted(op.claims.items())
            if seen.value.waiting or _gone(p, seen.value, live, actors)
        )
        if gone:
            return Reap(gone)
        if op.claims:  # a holder has not stopped yet
            return WakeAt(now + max(SOONEST, min(actors.values()))) if actors else None
        failed = op.cancel is not None and op.cancel.reason == "failed"
        return _decided(keys, op, election, State.FAILED if failed else State.CANCELLED)
    if stage is Stage.COMPLETING and op.decision is not None:
        decision = op.decision.value
        if op.plan is None or not op.spec.rules.completes or gives_up(op.spec.rules, decision.attempts):
            return Finish(decision, op.decision.mod)
        if (due := _due(decision.retry_at, now, longest)) > now:
            return WakeAt(due)
        return Complete(decision)
    if stage is Stage.CLEANING and op.next and op.state is not None:
        page = dict(islice(op.next.items(), w.SIGNALS_PER_TXN))
        return Commit(w.signal(keys, op.ref, election, op.state_mod, op.state, page))
    if stage is Stage.CLEANING:
        follow_ups = op.decision.value.follow_ups if op.decision is not None else ()
        return Clean(op.plan.count if op.plan is not None else 0, follow_ups)
    return None


def without_code(decision: Seen[Decision], why: str) -> Finish:
    """The decision for a cancelled operation that ends without completion code.

    No executor can run the code. Its record states that the code did not run.
    """
    text = f"the completion code did not run: {why}"
    return Finish(replace(decision.value, error=text), decision.mod)


def _gone(partition: int, claim: Claim, live: Collection[str], actors: Mapping[int, float]) -> bool:
    return actors.get(partition, 1.0) <= 0 if claim.actor else claim.incarnation not in live


def _decided(keys: Keys, op: OperationView, election: Compare, verdict: State, *, at_once: bool = False) -> Step:
    total = op.plan.count if op.plan is not None else 0
    failed, truncated = failed_text(op.failed)
    decision = Decision(verdict, total, op.success, len(op.failed), failed, failed_truncated=truncated)
    if op.spec is not None and not op.spec.rules.completes:
        return Finish(decision, 0)
    decide = Commit(f.decide(keys, op.ref, election, op.state_mod, decision, planned=op.plan is not None))
    return CompleteFirst(decision, decide) if at_once else decide


def gives_up(rules: Rules, attempts: int) -> bool:
    """Whether planning or completion has failed so often that the operation fails.

    These attempts count whatever ``can_fail`` says, which is about jobs. An operation that can neither continue nor end
    would block its table for ever.
    """
    return attempts >= rules.retry.attempts


def failed_attempt(
    rules: Rules, before: int, text: str, now: float, *, final: bool, jitter: float
) -> tuple[Attempts, bool]:
    """The attempts at planning or completion after one more failure.

    Also returned: whether it was the last. ``before``: failed attempts before it. ``final``: a retry cannot succeed.
    ``jitter``: the factor of the back-off, at most 1.
    """
    if final or gives_up(rules, before + 1):
        return Attempts(before + 1, text), True
    return Attempts(before + 1, text, rfc3339(now + rules.retry.delay(before + 1) * jitter)), False


def after_failed_completion(decision: Decision, rules: Rules, attempts: Attempts, *, last: bool) -> Decision:
    """The decision after a failed attempt at completion (:func:`failed_attempt`).

    After the last attempt the limit is reached: the next step finishes the operation as failed without completion code.
    """
    after = replace(decision, attempts=attempts.attempts, error=attempts.error, retry_at=attempts.retry_at)
    if not last:
        return after
    return replace(after, verdict=State.FAILED, attempts=max(after.attempts, rules.retry.attempts))


def newer(op: OperationView) -> bool:
    """Whether a newer release wrote the operation. Its rules are unknown here, so it is skipped."""
    return op.spec is not None and op.spec.version > SCHEMA_VERSION


def _due(retry_at: str, now: float, longest: float) -> float:
    """The time of the next attempt.

    A correct clock never writes a time further ahead than the longest back-off; such a time is due now. (Reducing it to
    ``now + longest`` would postpone it again at each check.)
    """
    due = parse_time(retry_at)
    return due if due <= now + longest else now


# -------------------------------------------------------------------- executor


@frozen
class Claimable:
    """The jobs of an open operation that may be claimed now, and when more become due."""

    free: tuple[int, ...]
    waiting: tuple[int, ...]
    lost: tuple[int, ...]
    """Held by incarnations without a node key, or by actors that did not extend their claims in time."""
    next_due: float | None


SOONEST = 0.01
"""Minimum seconds until the next check: wall clocks are not more precise."""
PATIENCE = (0.5, 5.0)
"""Seconds beyond its duration during which an actor's claim is not taken: a tenth of it, within these limits.

An extension may be on its way, and clocks differ slightly.
"""


def abandoned_in(claim: Claim, unchanged_for: float) -> float:
    """Seconds until an actor's claim counts as abandoned; 0 or less: now.

    ``unchanged_for``: seconds for which the observer has seen it unchanged, by its own clock. Every extension changes
    the claim's revision, and a takeover compares it. So nothing is taken from an actor that extends in time, whatever
    any clock shows.
    """
    least, most = PATIENCE
    return claim.duration + min(max(least, claim.duration / 10), most) - unchanged_for


def actors_of(op: OperationView, clock: float) -> dict[int, float]:
    """Seconds until each actor's claim in the view counts as abandoned. ``clock``: a monotonic time."""
    return {
        p: abandoned_in(seen.value, op.unchanged_for(p, clock)) for p, seen in op.claims.items() if seen.value.actor
    }


LEFT_TO_OTHERS = 30.0
"""Minimum seconds for which an executor leaves a job to others, times its failed attempts there.

A broken executor has free slots again at once. It would otherwise use up all attempts of the job.
"""
HEAD_START = 2.0
"""Seconds for which a resumable job is left to the live executor that has its local state."""


def claimable(
    count: int,
    ended: Collection[int],
    claims: Mapping[int, Seen[Claim]],
    live: Collection[str],
    executor: str,
    others: bool,
    now: float,
    unchanged_for: Mapping[int, float],
    patience: float,
    homes: Collection[str] = (),
) -> Claimable:
    """Sort the jobs of an operation into free, waiting and lost ones.

    ``executor``: my id. ``others``: another capable node lives, so a job that failed here is left to it at first.
    ``unchanged_for``: seconds for which I have seen a waiting claim, or an actor's, unchanged, by my own clock. A
    waiting claim that was unchanged for ``patience`` is due whatever its ``retry_at`` says (liveness depends on no wall
    clock). ``homes``: other live executors that may first continue what they ran last, because they have its local
    state (of a resumable type).
    """
    free, waiting, lost = [], [], []
    next_due: float | None = None
    for p in range(count):
        if p in ended:
            continue
        seen = claims.get(p)
        if seen is None:
            free.append(p)
            continue
        claim = seen.value
        if claim.incarnation in live:
            continue
        if claim.actor:
            left = abandoned_in(claim, unchanged_for.get(p, 0.0))
            if left > 0:
                next_due = min(next_due, now + left) if next_due is not None else now + left
            else:
                lost.append(p)
            continue
        if claim.executor in homes and claim.executor != executor and not (claim.waiting and claim.failures):
            head_start = HEAD_START - unchanged_for.get(p, 0.0)
            if head_start > 0:
                next_due = min(next_due, now + head_start) if next_due is not None else now + head_start
                continue
        if not claim.waiting:
            lost.append(p)
            continue
        due, longest = parse_time(claim.retry_at), patience
        if claim.failures and others and claim.executor == executor:
            here = sum(tried.executor == executor for tried in claim.tried)
            longest = max(patience, LEFT_TO_OTHERS * here)
            due += longest
        remaining = min(due - now, longest - unchanged_for.get(p, 0.0))
        if remaining <= 0:
            waiting.append(p)
        else:
            next_due = min(next_due, now + remaining) if next_due is not None else now + remaining
    return Claimable(tuple(free), tuple(waiting), tuple(lost), next_due)


def may_end_soon(op: OperationView) -> bool:
    """Whether one group of reports may be the last of an open operation."""
    return (
        op.stage is Stage.OPEN and op.plan is not None and op.plan.count - op.ended <= job_transitions.REPORTS_PER_TXN
    )


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


def claim_for(
    seen: Seen[Claim] | None, executor: str, incarnation: str, lost: bool, rules: Rules
) -> tuple[Claim, int, bool]:
    """The claim to write for a job, and the mod revision of the claim as read.

    Also returned: whether its losses reached the limit. In that case the job fails, after another claim if
    :func:`only_ends` holds for it.
    """
    if seen is None:
        return Claim(executor, incarnation, 1, 0), 0, False
    old = seen.value
    failures = old.failures + (1 if lost else 0)
    over = lost and rules.can_fail and (rules.at_limit(failures) or rules.lost == "fail")
    losses, tried = old.losses, old.tried
    if lost and not only_ends(old, rules):
        losses += not old.actor
        tried = told(tried, Tried(old.attempt, old.executor, EXPIRED if old.actor else LOST))
    claim = Claim(executor, incarnation, old.attempt + 1, failures, error=old.error, losses=losses, tried=tried)
    return claim, seen.mod, over


def only_ends(claim: Claim, rules: Rules) -> bool:
    """Whether the job under this claim is only cleaned up and failed.

    Its losses had reached the limit before the claim. It is claimed for that because a holder that seems gone may still
    act: it may give the job back, or report its success, while the claim is its own. A cleanup has no transaction that
    could be refused.
    """
    if not (rules.code and rules.cleans and rules.can_fail):
        return False
    lost = bool(claim.tried) and claim.tried[-1].text in (LOST, EXPIRED)
    return rules.at_limit(claim.failures) or (lost and rules.lost == "fail")


LOST = "the executor was lost while it ran the job"
EXPIRED = "the worker did not extend its claim in time"


def lost_text(old: Claim, failures: int) -> str:
    """The error of a job whose holders were lost too often; ``old``: the claim of the last one."""
    if old.actor:
        text = f"the worker {old.executor} did not extend its claim of attempt {old.attempt} in time"
    else:
        text = f"executor {old.executor} was lost while it ran attempt {old.attempt}"
    text += f" ({plural(failures, 'failure')})"
    return f"{text}; the error before: {old.error}" if old.error else text


def suspect(claim: Claim, lost: bool, rules: Rules) -> bool:
    """Whether a job has to run alone in its executor.

    Its next loss is the last allowed one. So no neighbour fails for a job that kills executors (F38). ``lost``: its
    holder is gone.
    """
    failures = claim.failures + lost
    if rules.at_limit(failures) or (lost and rules.lost == "fail") or only_ends(claim, rules):
        return False  # its limit is reached
    return rules.at_limit(failures + 1) and claim.losses + (lost and not claim.actor) > 0


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


def after_end(kind: str, claim: Claim, rules: Rules) -> Literal["release", "retry", "fail", "report"]:
    """What to write for a job that ended under this claim.

    ``kind``: a ``worker.child_messages.Kind``. ``fail``: reported as failed, after a cleanup, because no attempt
    follows.
    """
    if kind in ("cancelled", "refused", "unable", "unavailable"):
        return "release"
    unexpected = kind in ("error", "crash", "fatal")
    if unexpected and not (kind == "fatal" and rules.can_fail) and not rules.at_limit(claim.failures + 1):
        return "retry"
    return "fail" if unexpected and rules.cleans else "report"


def outcome(
    claim: Claim, fence: int, name: str, kind: str, result: Any, error: str, started: str, finished: str
) -> Outcome:
    """The outcome of a job that ended as ``kind`` under this claim.

    It lists the errors of all attempts if the job failed in a later attempt than the first.
    """
    tried = told(claim.tried, Tried(claim.attempt, claim.executor, error)) if kind != "success" and claim.tried else ()
    by = (name, claim.executor, claim.incarnation, claim.attempt)
    return Outcome(*by, started, finished, result, error, tried, fence=fence)


def retried(claim: Claim, executor: str, error: str, retry_at: str) -> Claim:
    """The waiting claim after an unexpected error: counted, due later, with the error for people."""
    tried = told(claim.tried, Tried(claim.attempt, executor, error))
    return Claim(executor, "", claim.attempt, claim.failures + 1, retry_at, error, claim.losses, tried)


NOT_RUN = "this executor could not run it: "
"""Prefix of an attempt's text where the executor lacked something for the moment."""


def released(claim: Claim, executor: str, lacks: str = "") -> Claim:
    """The waiting claim after a release: not held against the job, and due at once.

    ``lacks``: what the executor lacked for the moment; it is added to the job's list of attempts.
    """
    tried = told(claim.tried, Tried(claim.attempt, executor, f"{NOT_RUN}{lacks}")) if lacks else claim.tried
    return Claim(executor, "", claim.attempt, claim.failures, "", claim.error, claim.losses, tried)


def revoked(claim: Claim) -> Claim:
    """The waiting claim of a cancelled job whose holder is gone; its error says so."""
    lost = Tried(claim.attempt, claim.executor, EXPIRED if claim.actor else LOST)
    # Without the list of attempts: many are written at once (T2), and the job is never run again.
    return Claim(claim.executor, "", claim.attempt, claim.failures, losses=claim.losses, tried=(lost,))


def revoked_lost(claim: Claim, rules: Rules) -> Claim:
    """The waiting claim of a job whose holder is gone. It counts the loss as a takeover does."""
    after, _, _ = claim_for(Seen(claim, 0), claim.executor, "", True, rules)
    return replace(after, attempt=claim.attempt)


def given_back(claim: Claim) -> frozenset[str]:
    """Executors that gave the job back because they lacked something for the moment."""
    return frozenset(one.executor for one in claim.tried if one.text.startswith(NOT_RUN))


# ------------------------------------------------------------------ candidates


def turn(candidates: Iterable[str], mine: str, subject: str) -> int:
    """My place among the candidates for an election, from 0.

    The order differs for each subject and is the same for all that see the same candidates.
    """
    own = (crc32(f"{subject}/{mine}".encode()), mine)
    return sum((crc32(f"{subject}/{name}".encode()), name) < own for name in candidates if name != mine)
