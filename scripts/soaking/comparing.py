"""What the operations of a soak wrote and left behind, held against what their outcomes and records say."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from soaking.tables import misjudged
from tests.support.writing import misstated

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from distop.core.model import OperationRef
    from soaking.operations import Wish


def compare(
    ref: OperationRef,
    wish: Wish,
    record: Mapping[str, Any],
    outcomes: Mapping[int, Sequence[str]],
    followers: Sequence[OperationRef],
) -> list[str]:
    """What is wrong with an operation that has ended: one outcome for each job; what it names is whole; no two attempts
    wrote at the same time; none began before a checkpoint that was saved; a success that is to be followed is followed
    once; what was said of a table is so.
    """
    problems = [f"job {partition} has {len(found)} outcomes" for partition, found in outcomes.items() if len(found) > 1]
    if wish.journal is not None:
        wrong = {outcome["name"]: misstated(outcome, wish.rows) for outcome in successes(outcomes)}
        problems += [f"job {name}: {text}" for name, text in wrong.items() if text]
    if wish.journal is not None and wish.type != "sparkwriting":
        problems += wish.journal.overlaps() + wish.journal.forgotten()
    if wish.then and (len(followers) > 1 or (record.get("state") == "success" and not followers)):
        problems.append(f"it is followed by {len(followers)} operations")
    if ref.type == "validate":
        problems += misjudged(record.get("report"))
    return [f"{ref} ({wish.kind}): {text}" for text in problems]


def successes(outcomes: Mapping[int, Sequence[str]]) -> list[dict[str, Any]]:
    """The last outcome of each job that has a result."""
    return [outcome for found in outcomes.values() if (outcome := json.loads(found[-1])).get("result") is not None]


def uncleaned(ref: OperationRef, wish: Wish, logs: Iterable[Path]) -> tuple[list[str], bool]:
    """What the jobs of an operation that has ended left where their cleanup should have removed it, and whether a
    daemon has said that a cleanup of it failed: it is tried no more then, and what is left is garbage that no outcome
    names.
    """
    left = sorted(path.name for path in Path(wish.arg["held"]).iterdir()) if "held" in wish.arg else []
    if not left:
        return [], False
    if any(_failed(line, str(ref)) for log in logs for line in log.read_text(errors="replace").splitlines()):
        return [], True
    return [f"{ref} ({wish.kind}): its cleanup left {', '.join(left)} behind"], False


def _failed(line: str, ref: str) -> bool:
    words = line.replace("=", " ").split()
    return "cleanup" in line and "failed" in line and any(word.strip("[],:") == ref for word in words)
