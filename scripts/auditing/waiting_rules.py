"""Rules of pending operations: begin, abort, and the edges between operations."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from auditing.content import CANCEL, STATE, Finding
from auditing.records import TERMINAL, operation_name, record

if TYPE_CHECKING:
    from collections.abc import Iterator

    from auditing.content import Step


def beginning(step: Step) -> Iterator[Finding]:
    """An operation begins or joins once it waits for nothing and its hold is gone."""
    before, after = step.change(STATE)
    if before != "pending" or after not in ("running", "success"):
        return
    waited = [rest for (_, rest), change in step.changed.items() if rest.startswith("after.") and change.before]
    waited += [edge for edge in step.operation.edges("after") if ("distOp", f"after.{edge}") not in step.changed]
    if waited:
        yield Finding("edges", str(step.name), f"began, and still waited for {len(waited)} others")
    if (hold := step.operation.hold) is not None and step.content.hold(hold, before=True):
        yield Finding("holds", str(step.name), f"began under the hold {hold}")


def aborted(step: Step) -> Iterator[Finding]:
    """A pending operation is aborted by a broken edge, a denied hold or a replacement."""
    before, after = step.change(STATE)
    if before != "pending" or after != "cancelled":
        return
    operation = step.operation
    cancel, hold = operation.record(CANCEL), operation.hold
    broken = any(operation.record(("distOp", f"after.{edge}")).get("broken") for edge in operation.edges("after"))
    denied = hold is not None and step.content.hold(hold, before=False).get("state") == "denied"
    if cancel.get("reason") == "aborted" and not (broken or denied or cancel.get("replaced_by")):
        yield Finding("waiting", str(step.name), "was aborted, and nothing that it waits for has failed")


def inserted(step: Step) -> Iterator[Finding]:
    """Nothing ends while the graph that it is part of is being inserted."""
    before, after = step.change(STATE)
    if before != "pending" or after not in TERMINAL or (hold := step.operation.hold) is None:
        return
    found = step.content.hold(hold, before=False)
    if found.get("kind") == "graph" and found.get("state") == "held":
        yield Finding("holds", str(step.name), f"ended while its graph is being inserted, under the hold {hold}")


def edges(step: Step) -> Iterator[Finding]:
    """An edge has two ends, starts before its predecessor ends, and is removed after."""
    name, operation = str(step.name), step.operation
    for (family, rest), (before, after) in step.changed.items():
        side, _, edge = rest.partition(".")
        if family != "distOp" or side not in ("after", "next"):
            continue
        value = record(after if after is not None else before or "")
        other_name = operation_name(value["op"])
        other = step.content.operations[other_name]
        if before is None:
            opposite = "next" if side == "after" else "after"
            if ("distOp", f"{opposite}.{edge}") not in other.keys:
                yield Finding("edges", name, f"the edge {edge} has no other end at {other_name}")
            if side == "after" and other.ended:
                yield Finding("edges", name, f"was made to wait for {other_name}, which had ended")
        elif side == "after" and after is None:
            if not operation.ended and not _fulfilled(record(before), other.ended):
                yield Finding("edges", name, f"no longer waits for {other_name} ({other.ended or 'not ended'})")
        elif side == "after" and value.get("broken", other.ended) != other.ended:
            text = f"its edge says that {other_name} is {value['broken']}, but it is {other.ended or 'not ended'}"
            yield Finding("edges", name, text)


def successors(step: Step) -> Iterator[Finding]:
    """An operation's keys go only after all its successors know of its end."""
    if STATE not in step.changed or step.operation.state is not None:
        return
    for (family, rest), (before, _) in step.changed.items():
        if family != "distOp" or not rest.startswith("next.") or before is None:
            continue
        successor = operation_name(record(before)["op"])
        edge = step.content.operations[successor].record(("distOp", f"after.{rest.removeprefix('next.')}"))
        if edge and not edge.get("broken"):
            yield Finding("edges", str(step.name), f"its keys were deleted before {successor} was informed of its end")


def _fulfilled(edge: dict[str, Any], ended: str) -> bool:
    return ended == "success" or (edge.get("on") == "end" and ended in TERMINAL)
