"""What the operations of a soak wrote and left behind, held against what their outcomes and records say."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from distop.protocol.json_codec import from_rfc3339
from soaking.operations import TRIPS
from soaking.tables import misjudged
from tests.support.stumbling import NO_PLAN, NO_REPORT, Tripping
from tests.support.writing import misstated

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from distop.protocol.records import OperationRef
    from soaking.follower import Counted
    from soaking.operations import Wish
    from soaking.standstills import Allowed

RETRY = Tripping.retry
COUNTED = {"planning": RETRY.attempts - 1, "completion": RETRY.attempts}
"""Failed attempts that are written down before an operation fails: the last one at planning is the decision."""
SOUND = frozenset({"writing", "step", "followed", "lone", "noop", "large"})
"""Kinds in which nothing is to go wrong by itself. (Spark has many words for a JVM that was killed under it.)"""
DIED = ("was lost while it ran", "the worker process died")
"""What befalls a job with its executor, or with its child."""
LEAST_JITTER = 0.5
"""The share of a back-off that is waited for at least."""


def compare(
    ref: OperationRef,
    wish: Wish,
    record: Mapping[str, Any],
    outcomes: Mapping[int, Sequence[str]],
    followers: Sequence[OperationRef],
    counted: Sequence[Counted] = (),
    allowed: Allowed | None = None,
) -> list[str]:
    """What is wrong with an operation that has ended: one outcome for each job; what it names is whole; no two attempts
    wrote at the same time, but as it is ``allowed`` to one whose machine stood still; none began before a checkpoint
    that was saved; a success that is to be followed is followed once; what was said of a table is so; planning and
    completion that fail do so as often as they may, and no oftener; what has no reason of its own to fail fails by what
    befell its executors alone.
    """
    problems = [f"job {partition} has {len(found)} outcomes" for partition, found in outcomes.items() if len(found) > 1]
    if wish.journal is not None:
        wrong = {outcome["name"]: misstated(outcome, wish.rows) for outcome in successes(outcomes)}
        problems += [f"job {name}: {text}" for name, text in wrong.items() if text]
    if wish.journal is not None and wish.type != "sparkwriting":
        problems += wish.journal.overlaps(allowed) + wish.journal.forgotten()
    if wish.then and (len(followers) > 1 or (record.get("state") == "success" and not followers)):
        problems.append(f"it is followed by {len(followers)} operations")
    if ref.type == "validate":
        problems += misjudged(record.get("report"))
    if wish.kind in TRIPS:
        problems += _tripped(wish, record, outcomes, counted)
    if wish.kind in SOUND:
        problems += failed_by_itself(record, outcomes)
    return [f"{ref} ({wish.kind}): {text}" for text in problems]


def failed_by_itself(record: Mapping[str, Any], outcomes: Mapping[int, Sequence[str]]) -> Iterator[str]:
    """What went wrong with an operation in which nothing should, but for executors and children that died."""
    ends = [json.loads(found[-1]) for found in outcomes.values()]
    texts = [text for end in ends for text in (end.get("error"), *(one["text"] for one in end.get("errors") or ()))]
    if record.get("state") == "failed":
        texts += [one["text"] for one in record.get("errors") or ()]
    for text in sorted({text for text in texts if text and not any(words in text for words in DIED)}):
        yield f"it had no reason to fail: {text}"


def recovered(record: Mapping[str, Any], counted: Sequence[Counted]) -> bool:
    """Planning or completion raised on a node where it always does, and the operation succeeded all the same: another
    node has done it.
    """
    return record.get("state") == "success" and any(NO_PLAN in one.error or NO_REPORT in one.error for one in counted)


def _tripped(
    wish: Wish, record: Mapping[str, Any], outcomes: Mapping[int, Sequence[str]], counted: Sequence[Counted]
) -> Iterator[str]:
    """What is wrong with an operation whose planning or completion raises."""
    state, errors = record.get("state"), record.get("errors") or [{"text": ""}]
    for stage in COUNTED:
        some = [one for one in counted if one.stage == stage]
        if [one.attempts for one in some] != list(range(1, len(some) + 1)):
            yield f"its attempts at {stage} are counted as {[one.attempts for one in some]}"
        for former, one in itertools.pairwise(some):
            # The attempt began when that was due, and failed before this was written.
            least = LEAST_JITTER * RETRY.delay(one.attempts)
            if one.retry_at and from_rfc3339(one.retry_at) < from_rfc3339(former.retry_at) + least - 0.002:
                yield f"attempt {one.attempts} at {stage} did not wait: {former.retry_at}, {one.retry_at}"
    if state == "success" and "error" in wish.arg.values():
        yield "it succeeded, though this cannot be done anywhere"
    if state == "failed":
        stage = str(errors[0]["text"]).partition(" failed: ")[0]
        if sum(one.stage == stage for one in counted) != COUNTED.get(stage):
            yield f"it failed by {errors[0]['text']!r} after {len(counted)} failed attempts"
    if wish.arg.get("plan") == "error" and outcomes:
        yield f"it was never planned, and has outcomes of {sorted(outcomes)}"
    if (record.get("jobs") or {}).get("failed"):
        yield "a job failed that cannot fail"


def successes(outcomes: Mapping[int, Sequence[str]]) -> list[dict[str, Any]]:
    """The last outcome of each job that has a result."""
    return [outcome for found in outcomes.values() if (outcome := json.loads(found[-1])).get("result") is not None]


def uncleaned(
    ref: OperationRef, wish: Wish, logs: Iterable[Path], allowed: Allowed | None = None
) -> tuple[list[str], bool]:
    """What the jobs of an operation that has ended left where their cleanup should have removed it, and whether a
    daemon has said that a cleanup of it failed: it is tried no more then, and what is left is garbage that no outcome
    names. What was put there by an attempt whose machine had just woken up is ``allowed``.
    """
    found = sorted(Path(wish.arg["held"]).iterdir()) if "held" in wish.arg else []
    left = [path.name for path in found if allowed is None or not allowed.left(int(path.name[2:]), path)]
    if not left:
        return [], False
    if any(_failed(line, str(ref)) for log in logs for line in log.read_text(errors="replace").splitlines()):
        return [], True
    return [f"{ref} ({wish.kind}): its cleanup left {', '.join(left)} behind"], False


def _failed(line: str, ref: str) -> bool:
    words = line.replace("=", " ").split()
    return "cleanup" in line.lower() and "failed" in line and any(word.strip("[],:") == ref for word in words)
