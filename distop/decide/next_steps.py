"""The next step of a coordinator. Pure.

It is decided from one view and the time. Steps are returned as values, which ``distop.daemon.coordinator`` performs.
Operations with records of a newer version are skipped (rolling upgrades).
"""

from __future__ import annotations

from dataclasses import replace
from itertools import islice
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, TypeAlias

from distop.decide import job_claims
from distop.protocol import job_transitions
from distop.protocol import operation_finish as f
from distop.protocol import operation_transitions as t
from distop.protocol import pending_operations as w
from distop.protocol.frozen import frozen
from distop.protocol.json_codec import SCHEMA_VERSION, failed_text, parse_time, rfc3339
from distop.protocol.operation_options import allowance
from distop.protocol.records import Attempts, Cancel, Decision, State
from distop.protocol.state_tables import Stage

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from distop.decide.operation_view import OperationView
    from distop.protocol.behavior_declaration import Rules
    from distop.protocol.jobs import Claim
    from distop.protocol.keys import Keys
    from distop.protocol.revisioned import Seen
    from distop.protocol.txn import Compare, Txn


@frozen
class MakePlan:
    """Run the behavior's ``partitions()`` in the child, then write chunks and plan."""


@frozen
class RunCompletion:
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
SOONEST = 0.01
"""Minimum seconds until the next check: wall clocks are not more precise."""

NextStep: TypeAlias = MakePlan | RunCompletion | CompleteFirst | Finish | Reap | Commit | Clean | WakeAt | None


def next_step(
    keys: Keys,
    op: OperationView,
    live: Collection[str],
    election: Compare,
    now: float,
    poll: float,
    actors: Mapping[int, float] = _NOBODY,
) -> NextStep:
    """The coordinator's next step for an operation; None: wait for an event.

    ``live``: incarnations with a node key. ``poll``: seconds between two checks. A ``retry_at`` further ahead than that
    and than the longest back-off is due at once, so a clock that is an hour ahead delays nothing (fault 40).
    ``actors``: seconds until each actor's claim counts as abandoned (:func:`abandoned_in`).
    """
    if op.spec is None or newer(op):
        return None
    rules = op.spec.rules
    longest = max(poll, rules.retry.maximum)
    match op.stage:
        case Stage.PLANNING:
            if op.planning is not None and (due := _due(op.planning.value.retry_at, now, longest)) > now:
                return WakeAt(due)
            return MakePlan()
        case Stage.OPEN | Stage.PAUSED if op.plan is not None:
            return _after_jobs(keys, op, rules, op.plan.count, election)
        case Stage.CANCELLING if op.claims_known:
            return _after_cancel(keys, op, live, election, now, actors)
        case Stage.COMPLETING if op.decision is not None:
            decision = op.decision.value
            if op.plan is None or not rules.completes or gives_up(rules, decision.attempts):
                return Finish(decision, op.decision.mod)
            if (due := _due(decision.retry_at, now, longest)) > now:
                return WakeAt(due)
            return RunCompletion(decision)
        case Stage.CLEANING:
            return _after_end(keys, op, election)
    return None


def _after_jobs(keys: Keys, op: OperationView, rules: Rules, planned: int, election: Compare) -> NextStep:
    """Decide an open or paused operation whose jobs have all ended, or cancel one with too many failed jobs."""
    if op.ended >= planned:
        # No claim exists, though claims are not watched: each was deleted with its job's end, and no ended job is
        # claimed again.
        return _decided(keys, op, election, State.FAILED if op.failed else State.SUCCESS, at_once=rules.reports_only)
    max_failed, fail_fast = op.terms.options.max_failed, rules.failure_policy == "fail_fast"
    if op.stage is Stage.OPEN and len(op.failed) > allowance(max_failed, fail_fast, planned):
        text = f"{len(op.failed)} of {planned} jobs failed"
        why = Cancel("failed", f"{text}, where {max_failed} may" if max_failed else text)
        return Commit(t.cancel(keys, op.ref, op.state_mod, why, election))
    return None


def _after_cancel(
    keys: Keys, op: OperationView, live: Collection[str], election: Compare, now: float, actors: Mapping[int, float]
) -> NextStep:
    """Clean up after the jobs of a cancelled operation that no holder runs, and decide it when no claim is left."""
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


def _after_end(keys: Keys, op: OperationView, election: Compare) -> NextStep:
    """Signal the end to the operations that wait for it, one page at a time, then clean up."""
    if op.next and op.state is not None:
        page = dict(islice(op.next.items(), w.SIGNALS_PER_TXN))
        return Commit(w.signal(keys, op.ref, election, op.state_mod, op.state, page))
    follow_ups = op.decision.value.follow_ups if op.decision is not None else ()
    return Clean(op.plan.count if op.plan is not None else 0, follow_ups)


def without_code(decision: Seen[Decision], why: str) -> Finish:
    """The decision for a cancelled operation that ends without completion code.

    No executor can run the code. Its record states that the code did not run.
    """
    text = f"the completion code did not run: {why}"
    return Finish(replace(decision.value, error=text), decision.mod)


def _gone(partition: int, claim: Claim, live: Collection[str], actors: Mapping[int, float]) -> bool:
    return actors.get(partition, 1.0) <= 0 if claim.actor else claim.incarnation not in live


def _decided(keys: Keys, op: OperationView, election: Compare, verdict: State, *, at_once: bool = False) -> NextStep:
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


def actors_of(op: OperationView, clock: float) -> dict[int, float]:
    """Seconds until each actor's claim in the view counts as abandoned. ``clock``: a monotonic time."""
    claims = [(p, seen.value) for p, seen in op.claims.items() if seen.value.actor]
    return {p: job_claims.abandoned_in(claim, op.unchanged_for(p, clock)) for p, claim in claims}


def may_end_soon(op: OperationView) -> bool:
    """Whether one group of reports may be the last of an open operation."""
    return (
        op.stage is Stage.OPEN and op.plan is not None and op.plan.count - op.ended <= job_transitions.REPORTS_PER_TXN
    )
