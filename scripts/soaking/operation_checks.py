"""Checks each operation of a soak: its output and its cleanup against its outcomes and history record."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from distop.protocol.json_codec import from_rfc3339
from soaking.operations import TRIPS
from soaking.tables import misjudged
from tests.support.coordinator_behaviors import NO_PLAN, NO_REPORT, Tripping
from tests.support.writing import output_error

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from distop.protocol.records import OperationRef
    from soaking.follower import Counted
    from soaking.operations import Submission
    from soaking.suspensions import Allowed

RETRY = Tripping.retry
COUNTED = {"planning": RETRY.attempts - 1, "completion": RETRY.attempts}
"""Failed attempts that are recorded before an operation fails. The last one at planning is the decision."""
SOUND = frozenset({"writing", "step", "followed", "lone", "noop", "large"})
"""Kinds whose jobs fail only by faults. Spark kinds are left out: a killed JVM causes many different errors."""
DIED = ("was lost while it ran", "the worker process died")
"""Errors of a job whose executor or child died."""
LEAST_JITTER = 0.5
"""Minimum share of a back-off that is waited for."""


def compare(
    ref: OperationRef,
    submission: Submission,
    record: Mapping[str, Any],
    outcomes: Mapping[int, Sequence[str]],
    followers: Sequence[OperationRef],
    counted: Sequence[Counted] = (),
    allowed: Allowed | None = None,
) -> list[str]:
    """The problems of an ended operation.

    Each job has one outcome, with complete output. No two attempts wrote at the same time, except as ``allowed`` after
    a suspension. No attempt started before a saved checkpoint. A success has its follow-up operation once. A report on
    a table is right. Planning and completion failed the allowed number of times. Sound kinds failed only because their
    executors or children died.
    """
    problems = [f"job {partition} has {len(found)} outcomes" for partition, found in outcomes.items() if len(found) > 1]
    if submission.journal is not None:
        wrong = {outcome["name"]: output_error(outcome, submission.rows) for outcome in successes(outcomes)}
        problems += [f"job {name}: {text}" for name, text in wrong.items() if text]
    if submission.journal is not None and submission.type != "sparkwriting":
        problems += submission.journal.overlaps(allowed) + submission.journal.lost_checkpoints()
    if submission.then and (len(followers) > 1 or (record.get("state") == "success" and not followers)):
        problems.append(f"it has {len(followers)} follow-up operations")
    if ref.type == "validate":
        problems += misjudged(record.get("report"))
    if submission.kind in TRIPS:
        problems += _tripped(submission, record, outcomes, counted)
    if submission.kind in SOUND:
        problems += failed_by_itself(record, outcomes)
    return [f"{ref} ({submission.kind}): {text}" for text in problems]


def failed_by_itself(record: Mapping[str, Any], outcomes: Mapping[int, Sequence[str]]) -> Iterator[str]:
    """The errors of a sound operation other than deaths of executors and children."""
    ends = [json.loads(found[-1]) for found in outcomes.values()]
    texts = [text for end in ends for text in (end.get("error"), *(one["text"] for one in end.get("errors") or ()))]
    if record.get("state") == "failed":
        texts += [one["text"] for one in record.get("errors") or ()]
    for text in sorted({text for text in texts if text and not any(words in text for words in DIED)}):
        yield f"unexpected failure: {text}"


def recovered(record: Mapping[str, Any], counted: Sequence[Counted]) -> bool:
    """Whether planning or completion failed on a node where it always fails, but another node completed it."""
    return record.get("state") == "success" and any(NO_PLAN in one.error or NO_REPORT in one.error for one in counted)


def _tripped(
    submission: Submission, record: Mapping[str, Any], outcomes: Mapping[int, Sequence[str]], counted: Sequence[Counted]
) -> Iterator[str]:
    """The problems of an operation whose planning or completion raises."""
    state, errors = record.get("state"), record.get("errors") or [{"text": ""}]
    for stage in COUNTED:
        some = [one for one in counted if one.stage == stage]
        if [one.attempts for one in some] != list(range(1, len(some) + 1)):
            yield f"its attempts at {stage} are counted as {[one.attempts for one in some]}"
        for former, one in itertools.pairwise(some):
            # The attempt started at the former due time, and failed before this record was written.
            least = LEAST_JITTER * RETRY.delay(one.attempts)
            if one.retry_at and from_rfc3339(one.retry_at) < from_rfc3339(former.retry_at) + least - 0.002:
                yield f"attempt {one.attempts} at {stage} did not wait: {former.retry_at}, {one.retry_at}"
    if state == "success" and "error" in submission.arg.values():
        yield "it succeeded, although this fails on all nodes"
    if state == "failed":
        stage = str(errors[0]["text"]).partition(" failed: ")[0]
        if sum(one.stage == stage for one in counted) != COUNTED.get(stage):
            yield f"it failed with {errors[0]['text']!r} after {len(counted)} failed attempts"
    if submission.arg.get("plan") == "error" and outcomes:
        yield f"it was never planned, but has outcomes of {sorted(outcomes)}"
    if (record.get("jobs") or {}).get("failed"):
        yield "a job failed that cannot fail"


def successes(outcomes: Mapping[int, Sequence[str]]) -> list[dict[str, Any]]:
    """The last outcome of each job that has a result."""
    return [outcome for found in outcomes.values() if (outcome := json.loads(found[-1])).get("result") is not None]


def uncleaned(
    ref: OperationRef, submission: Submission, logs: Iterable[Path], allowed: Allowed | None = None
) -> tuple[list[str], bool]:
    """The output that the cleanups of an ended operation left, as problems; and whether a log explains it.

    A daemon logs a failed cleanup and does not retry it; the remaining output is garbage that no outcome names. Output
    of an attempt whose machine had just resumed is ``allowed``.
    """
    found = sorted(Path(submission.arg["held"]).iterdir()) if "held" in submission.arg else []
    left = [path.name for path in found if allowed is None or not allowed.left(int(path.name[2:]), path)]
    if not left:
        return [], False
    if any(_failed(line, str(ref)) for log in logs for line in log.read_text(errors="replace").splitlines()):
        return [], True
    return [f"{ref} ({submission.kind}): its cleanup left {', '.join(left)}"], False


def _failed(line: str, ref: str) -> bool:
    words = line.replace("=", " ").split()
    return "cleanup" in line.lower() and "failed" in line and any(word.strip("[],:") == ref for word in words)
