"""Which jobs an executor or an actor may claim, and the claims and outcomes that it writes. Pure."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal

from distop.protocol.frozen import frozen
from distop.protocol.jobs import Claim, Outcome, Tried, bounded_errors
from distop.protocol.json_codec import parse_time
from distop.protocol.revisioned import Seen
from distop.protocol.texts import plural

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from distop.protocol.behavior_declaration import Rules


@frozen
class Claimable:
    """The jobs of an open operation that may be claimed now, and when more become due."""

    free: tuple[int, ...]
    waiting: tuple[int, ...]
    lost: tuple[int, ...]
    """Held by incarnations without a node key, or by actors that did not extend their claims in time."""
    next_due: float | None


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


LEFT_TO_OTHERS = 30.0
"""Minimum seconds for which an executor leaves a job to others, times its failed attempts there.

A broken executor has free slots again at once. It would otherwise use up all attempts of the job.
"""
HEAD_START = 2.0
"""Seconds for which a resumable job is left to the live executor that has its local state."""


@frozen
class Claimant:
    """An executor or an actor that looks for jobs to claim.

    ``live``: incarnations with a node key. ``others``: other live executors that may run the jobs: a job that failed
    here is left to them at first. ``patience``: seconds after which an unchanged waiting claim is due, whatever its
    ``retry_at`` says (liveness depends on no wall clock).
    """

    name: str
    live: Collection[str]
    others: Sequence[str]
    patience: float

    def due_in(self, claim: Claim, unchanged_for: float, now: float, *, resumable: bool) -> float:
        """Seconds until the job under this claim, which no live executor holds, may be claimed; 0 or less: now."""
        if claim.actor:
            return abandoned_in(claim, unchanged_for)
        at_home = resumable and claim.executor in self.others and claim.executor != self.name
        if at_home and not (claim.waiting and claim.failures) and (left := HEAD_START - unchanged_for) > 0:
            return left
        if not claim.waiting:
            return 0.0
        due, longest = parse_time(claim.retry_at), self.patience
        if claim.failures and self.others and claim.executor == self.name:
            here = sum(tried.executor == self.name for tried in claim.tried)
            longest = max(self.patience, LEFT_TO_OTHERS * here)
            due += longest
        return min(due - now, longest - unchanged_for)


def claimable(
    count: int,
    ended: Collection[int],
    claims: Mapping[int, Seen[Claim]],
    by: Claimant,
    now: float,
    unchanged_for: Mapping[int, float],
    *,
    resumable: bool = False,
) -> Claimable:
    """Sort the jobs of an operation into free, waiting and lost ones.

    ``unchanged_for``: seconds for which the claimant has seen a waiting claim, or an actor's, unchanged, by its own
    clock. ``resumable``: other live executors may first continue what they ran last, because they have its local state.
    """
    free, waiting, lost = list[int](), list[int](), list[int]()
    next_due: float | None = None
    for p in range(count):
        if p in ended:
            continue
        seen = claims.get(p)
        if seen is None:
            free.append(p)
            continue
        claim = seen.value
        if claim.incarnation in by.live:
            continue
        left = by.due_in(claim, unchanged_for.get(p, 0.0), now, resumable=resumable)
        if left > 0:
            next_due = min(next_due, now + left) if next_due is not None else now + left
        else:
            (waiting if claim.waiting and not claim.actor else lost).append(p)
    return Claimable(tuple(free), tuple(waiting), tuple(lost), next_due)


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
        tried = bounded_errors(tried, Tried(old.attempt, old.executor, EXPIRED if old.actor else LOST))
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


def after_end(kind: str, claim: Claim, rules: Rules) -> Literal["release", "retry", "fail", "report"]:
    """What to write for a job that ended under this claim.

    ``kind``: a ``worker.child_messages.EndKind``. ``fail``: reported as failed, after a cleanup, because no attempt
    follows.
    """
    if kind in ("cancelled", "refused", "unable", "unavailable"):
        return "release"
    unexpected = kind in ("error", "crash", "fatal")
    if unexpected and not (kind == "fatal" and rules.can_fail) and not rules.at_limit(claim.failures + 1):
        return "retry"
    return "fail" if unexpected and rules.cleans else "report"


def outcome(claim: Claim, fence: int, name: str, kind: str, result: Any, error: str, when: tuple[str, str]) -> Outcome:
    """The outcome of a job that ended as ``kind`` under this claim. ``when``: its start and its finish.

    It lists the errors of all attempts if the job failed in a later attempt than the first.
    """
    tried = (
        bounded_errors(claim.tried, Tried(claim.attempt, claim.executor, error))
        if kind != "success" and claim.tried
        else ()
    )
    by = (name, claim.executor, claim.incarnation, claim.attempt)
    return Outcome(*by, *when, result, error, tried, fence=fence)


def retried(claim: Claim, executor: str, error: str, retry_at: str) -> Claim:
    """The waiting claim after an unexpected error: counted, due later, with the error for people."""
    tried = bounded_errors(claim.tried, Tried(claim.attempt, executor, error))
    return Claim(executor, "", claim.attempt, claim.failures + 1, retry_at, error, claim.losses, tried)


NOT_RUN = "this executor could not run it: "
"""Prefix of an attempt's text where the executor lacked something for the moment."""


def released(claim: Claim, executor: str, lacks: str = "") -> Claim:
    """The waiting claim after a release: not held against the job, and due at once.

    ``lacks``: what the executor lacked for the moment; it is added to the job's list of attempts.
    """
    tried = bounded_errors(claim.tried, Tried(claim.attempt, executor, f"{NOT_RUN}{lacks}")) if lacks else claim.tried
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
