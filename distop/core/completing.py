"""Which executors bring the operations of a type to their end, and who is missing where none does. Pure.

The elections, the coordinator and ``distop why`` ask here, so that they agree. All is judged by the node records.
"""

from __future__ import annotations

from enum import IntEnum
from typing import TYPE_CHECKING

from distop.core.draining import NodeState
from distop.core.model import State
from distop.core.options import fits

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from distop.core.model import Cancel, Node


class Rank(IntEnum):
    """What an executor is for a type that is installed there. Executors of the first rank that any has coordinate it:
    a drained one, and one that cannot run the type, only end operations, and only where nobody else would.
    """

    OFFERS = 1
    RETRIES = 2
    """It could not run the type at the last attempt, and tries again by itself."""
    DRAINED = 3
    """It is drained, or is being drained: it takes no new work until that is undone, which may be never."""
    UNABLE = 4
    """It cannot run the type at all."""


def rank(node: Node, type_name: str) -> Rank | None:
    """None: the type is not installed there."""
    active = node.state is NodeState.ACTIVE
    if type_name in node.behaviors:
        return Rank.OFFERS if active else Rank.DRAINED
    if type_name in node.failing:
        return Rank.RETRIES if active else Rank.DRAINED
    return Rank.UNABLE if type_name in node.unable else None


def takers(nodes: Mapping[str, Node], type_name: str, where: Mapping[str, str]) -> list[str]:
    """The incarnations that would now take the coordination of an operation with this selector, sorted."""
    ranks = _ranks(nodes, type_name)
    first = min(ranks.values(), default=None)
    return sorted(inc for inc, found in ranks.items() if found is first and fits(where, nodes[inc].labels))


def missing(nodes: Mapping[str, Node], type_name: str, where: Mapping[str, str]) -> str:
    """What nobody does who could run the completion code of an operation with this selector: a phrase such as "offers
    `noop` and has the labels zone=a". "": somebody does, or will when it tries the type again.
    """
    ranks = _ranks(nodes, type_name)
    first = min(ranks.values(), default=None)
    fitting = {inc: found for inc, found in ranks.items() if fits(where, nodes[inc].labels)}
    if first is not None and any(found <= max(first, Rank.RETRIES) for found in fitting.values()):
        return ""
    phrases = [f"offers `{type_name}`"]
    if where:
        phrases.append("has the labels " + ", ".join(f"{name}={value}" for name, value in where.items()))
    if Rank.DRAINED in fitting.values():
        phrases.append("is not drained")
    *most, last = phrases
    return f"{', '.join(most)} and {last}" if most else last


def ends_without_code(state: State | None, cancel: Cancel | None) -> bool:
    """An operation ends without its completion code where nobody can run that: one that was cancelled, and none that is
    stopped because its jobs failed.
    """
    return state is State.CANCELLING and not (cancel is not None and cancel.reason == "failed")


def cannot(nodes: Collection[Node], type_name: str) -> list[tuple[str, str]]:
    """The executors that could not run the type at the last attempt, or cannot at all, with why, sorted."""
    found = {node.executor: why for node in nodes if (why := {**node.unable, **node.failing}.get(type_name))}
    return sorted(found.items())


def _ranks(nodes: Mapping[str, Node], type_name: str) -> dict[str, Rank]:
    return {inc: found for inc, node in nodes.items() if (found := rank(node, type_name)) is not None}
