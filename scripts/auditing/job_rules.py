"""Rules of jobs: who claims them, who reports them, and how many run at once."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

from auditing.content import GATE, PLAN, UNCHANGED, Finding
from auditing.records import job_key, record

if TYPE_CHECKING:
    from collections.abc import Iterator

    from auditing.content import Change, Operation, Step

LOST = "the executor was lost while it ran the job"
"""What the errors of a claim say of an attempt whose executor was lost."""


def claims(step: Step) -> Iterator[Finding]:
    """A live holder takes the one claim of a job, through a gate, as the next attempt.

    It is never taken from a live holder.
    """
    for (family, rest), change in step.changed.items():
        if family != "distOpClaim":
            continue
        partition = int(rest)
        before = record(change.before) if change.before is not None else None
        if change.after is None:
            yield from _unclaimed(step, partition, before)
            continue
        after = record(change.after)
        if holder(after) is None:
            yield from _released(step, partition, before, after)
        elif _granted(change):
            yield from _claimed(step, partition, before, after)
        elif after["attempt"] != (last := step.operation.attempts.get(partition, 0)):
            text = f"attempt {after['attempt']} of a claim that was granted for {last}"
            yield Finding("claims", _job(step, partition), text)


def _claimed(step: Step, partition: int, before: dict[str, Any] | None, after: dict[str, Any]) -> Iterator[Finding]:
    subject, operation = _job(step, partition), step.operation
    last = operation.attempts.get(partition, 0)
    if after["attempt"] != last + 1:
        yield Finding("claims", subject, f"attempt {after['attempt']} follows attempt {last}")
    operation.attempts[partition] = after["attempt"]
    taken_over = before is not None and holder(before) is not None
    failures = (before or {}).get("failures", 0) + taken_over
    if after.get("failures", 0) != failures:
        yield Finding("claims", subject, f"was claimed with {after.get('failures')} failures instead of {failures}")
    if before is not None and (former := before.get("incarnation")) and step.content.node_lived(former):
        yield Finding("claims", subject, f"was taken from {former}, which is alive")
    if GATE not in operation.keys and step.change(GATE).before is None:
        yield Finding("claims", subject, "was claimed without a gate")
    if ("distOp", f"{partition:06d}.state") in operation.keys:
        yield Finding("claims", subject, "was claimed after it had ended")
    count = operation.record(PLAN).get("count", 0)
    if partition >= count:
        yield Finding("claims", subject, f"was claimed, and the plan has {count} partitions")
    if incarnation := after.get("incarnation"):
        node = step.content.node(incarnation)
        if node is None:
            yield Finding("claims", subject, f"was claimed by {incarnation}, which is not alive")
        elif not set((operation.spec.get("where") or {}).items()) <= set(node.get("labels", {}).items()):
            yield Finding("labels", subject, f"was claimed by {incarnation}, which lacks the labels")
        elif not _serves(node, operation, step):
            yield Finding("serves", subject, f"was claimed by {incarnation}, which does not serve its type or tables")


def _serves(node: dict[str, Any], operation: Operation, step: Step) -> bool:
    """The node record names the operation's type, and each table that its jobs touch; or has no such list."""
    types, tables = node.get("types"), node.get("tables")
    if types is not None and step.name.type not in types:
        return False
    touched = [step.name.table, *operation.record(PLAN).get("beside", [])]
    return tables is None or all(
        any(name == one or (one.endswith(".*") and name.startswith(one[:-1])) for one in tables) for name in touched
    )


def _released(step: Step, partition: int, before: dict[str, Any] | None, after: dict[str, Any]) -> Iterator[Finding]:
    if before is None or holder(before) is None:
        yield Finding("claims", _job(step, partition), "was released, but nobody held it")
    elif after.get("attempt") != before.get("attempt"):
        text = f"was released with attempt {after.get('attempt')} of another claim"
        yield Finding("claims", _job(step, partition), text)
    elif (owner := before.get("incarnation")) and step.content.node_lived(owner) and _revoked(before, after):
        yield Finding("claims", _job(step, partition), f"was taken from {owner}, which is alive")


def _revoked(before: dict[str, Any], after: dict[str, Any]) -> bool:
    """Another executor has set the claim to waiting, and says that its holder is lost.

    It counts one more of the ``losses``; in a cancel it counts none, and the last of the ``errors`` says so.
    """
    errors = after.get("errors", [])
    says_lost = bool(errors) and errors != before.get("errors", []) and errors[-1]["text"] == LOST
    return says_lost or after.get("losses", 0) > before.get("losses", 0)


def _unclaimed(step: Step, partition: int, before: dict[str, Any] | None) -> Iterator[Finding]:
    """A claim is deleted when its job ends, or in a cancel once nobody holds it."""
    operation = step.operation
    if step.change(("distOp", f"{partition:06d}.state")).after is not None or operation.ended:
        return
    if operation.state != "cancelling":
        yield Finding("claims", _job(step, partition), "the claim was removed, but the job has not ended")
    elif before is not None and (owner := before.get("incarnation")) and step.content.node_lived(owner):
        yield Finding("claims", _job(step, partition), f"was taken from {owner}, which is alive, in a cancel")


def reports(step: Step) -> Iterator[Finding]:
    """A job ends once, by its claim's holder, or as failed after the holder was lost.

    Only the holder writes checkpoints.
    """
    for (family, rest), change in step.changed.items():
        job = job_key(rest) if family == "distOp" else None
        if job is None:
            continue
        partition, what = job
        if what == "progress":
            claim = step.operation.keys.get(("distOpClaim", f"{partition:06d}"))
            if change.after is not None and (claim is None or holder(record(claim)) is None):
                yield Finding("claims", _job(step, partition), "a checkpoint was written, and nobody held the claim")
            continue
        if change.before is not None and change.after is not None:
            yield Finding("jobs end once", _job(step, partition), f"its {what} was written again")
        if change.after is None and not step.operation.ended:
            yield Finding("jobs end once", _job(step, partition), f"its {what} was deleted before the operation ended")
        if what == "state" and change.after is not None and change.before is None:
            yield from _reported(step, partition, change.after)


def _reported(step: Step, partition: int, state: str) -> Iterator[Finding]:
    subject = _job(step, partition)
    if state not in ("success", "failed"):
        yield Finding("jobs end once", subject, f"its state is {state!r}")
    claimed = step.change(("distOpClaim", f"{partition:06d}"))
    written = step.change(("distOp", f"{partition:06d}.outcome")).after
    if claimed.before is None or claimed.after is not None or written is None:
        yield Finding("reports", subject, "ended without its claim, or without an outcome")
        return
    claim, outcome = record(claimed.before), record(written)
    if outcome.get("grant"):
        if outcome["grant"] != claim.get("grant"):
            yield Finding("reports", subject, "was returned with the grant of another claim")
    elif outcome.get("incarnation") and outcome["incarnation"] == claim.get("incarnation"):
        if outcome.get("attempt") != claim.get("attempt"):
            yield Finding("reports", subject, f"attempt {outcome.get('attempt')} reported for {claim.get('attempt')}")
    elif state != "failed":
        yield Finding("reports", subject, f"{outcome.get('incarnation')} reported under another's claim")
    elif (owner := claim.get("incarnation")) and step.content.node_lived(owner):
        yield Finding("reports", subject, f"was ended while {owner}, which had it, was alive")


def limits(step: Step) -> Iterator[Finding]:
    """A permit belongs to a claim, and new claims keep to the limits of jobs.

    Only jobs of live holders count.
    """
    operation, name = step.operation, str(step.name)
    if operation.state is None or not any(family in ("distOpClaim", "distOpPermit") for family, _ in step.changed):
        return
    for (family, rest), value in operation.keys.items():
        if family != "distOpPermit" or value == "free":
            continue
        if ("distOpClaim", f"{int(value):06d}") not in operation.keys:
            yield Finding("permits", name, f"permit {int(rest)} is held for job {int(value)}, which has no claim")
    for (family, rest), change in step.changed.items():
        if family != "distOpPermit" or change.before in (None, "free") or change.after == change.before:
            continue
        claim = operation.record(("distOpClaim", f"{int(change.before or 0):06d}"))
        if holder(claim) is not None and claim.get("permit") == int(rest):
            yield Finding("permits", name, f"permit {int(rest)} left job {change.before}, whose claim goes on with it")
    granted = {
        holder(record(change.after or ""))
        for (family, _), change in step.changed.items()
        if family == "distOpClaim" and _granted(change)
    }
    total, own = operation.options.get("max_jobs"), operation.options.get("max_jobs_per_executor")
    if granted and (total or own):
        live = _live(step, operation)
        if total and live.total() > total:
            yield Finding("limits", name, f"{live.total()} jobs run where max_jobs is {total}")
        for owner in granted:
            if own and owner is not None and live[owner] > own:
                yield Finding("limits", name, f"{live[owner]} jobs run on {owner} where {own} may for each executor")


def _live(step: Step, operation: Operation) -> Counter[str]:
    """Live incarnation → number of its claims.

    Claims of actors are left out: a history does not show when an actor's duration has passed.
    """
    live: Counter[str] = Counter()
    for _, claim in operation.claims():
        owner = holder(claim)
        if owner is not None and not claim.get("actor") and step.content.node(owner) is not None:
            live[owner] += 1
    return live


def holder(claim: dict[str, Any]) -> str | None:
    """Who holds a claim: an incarnation, or an actor's grant; None where it waits."""
    return claim.get("incarnation") or claim.get("grant") or None


def _granted(change: Change) -> bool:
    if change.after is None or change == UNCHANGED:
        return False
    before = holder(record(change.before)) if change.before is not None else None
    return holder(record(change.after)) not in (None, before)


def _job(step: Step, partition: int) -> str:
    return f"{step.name} job {partition}"
