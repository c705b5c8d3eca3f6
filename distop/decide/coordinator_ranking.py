"""Ranks executors as coordinators of a type, and names the one that is missing.

The elections, the coordinator and ``distop why`` all decide by this module, so that they agree. It reads only the node
records. Pure.
"""

from __future__ import annotations

from enum import IntEnum
from typing import TYPE_CHECKING

from distop.protocol.executor_nodes import NodeState, named, refusal
from distop.protocol.operation_options import fits
from distop.protocol.records import State

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from distop.protocol.records import Cancel, Node


class Rank(IntEnum):
    """How well an executor can coordinate a type that is installed there.

    Executors of the best rank that exists coordinate it. Those of the ranks DRAINED and UNABLE only end operations.
    """

    OFFERS = 1
    RETRIES = 2
    """It could not run the type at the last attempt, and will retry by itself."""
    DRAINED = 3
    """It is drained or draining: it takes no new work until the drain is undone."""
    UNABLE = 4
    """It can never run the type."""


def rank(node: Node, type_name: str, tables: Collection[str] = ()) -> Rank | None:
    """The executor's rank for a type on these tables.

    None if the type is not installed there, or if the executor does not serve the type or one of the tables.
    """
    if refusal(node.serves, type_name, tables):
        return None
    active = node.state is NodeState.ACTIVE
    if type_name in node.behaviors:
        return Rank.OFFERS if active else Rank.DRAINED
    if type_name in node.failing:
        return Rank.RETRIES if active else Rank.DRAINED
    return Rank.UNABLE if type_name in node.unable else None


def candidates(
    nodes: Mapping[str, Node], type_name: str, where: Mapping[str, str], tables: Collection[str] = ()
) -> list[str]:
    """The incarnations that would coordinate an operation with this selector and these tables, sorted."""
    ranks = _ranks(nodes, type_name, tables)
    first = min(ranks.values(), default=None)
    return sorted(inc for inc, found in ranks.items() if found is first and fits(where, nodes[inc].labels))


def missing_executor(
    nodes: Mapping[str, Node], type_name: str, where: Mapping[str, str], tables: Collection[str] = ()
) -> str:
    """What a missing executor would need to run an operation's completion code.

    A phrase such as "offers `noop` and has the labels zone=a", or "serves table sales.orders". "" where such an
    executor lives, or will retry the type.
    """
    ranks = _ranks(nodes, type_name, tables)
    first = min(ranks.values(), default=None)
    fitting = {inc: found for inc, found in ranks.items() if fits(where, nodes[inc].labels)}
    if first is not None and any(found <= max(first, Rank.RETRIES) for found in fitting.values()):
        return ""
    unserved = unserved_tables(nodes.values(), type_name, tables)
    phrases = [f"serves {named(unserved)}"] if unserved else [f"offers `{type_name}`"]
    if where:
        phrases.append("has the labels " + ", ".join(f"{name}={value}" for name, value in where.items()))
    if Rank.DRAINED in fitting.values():
        phrases.append("is not drained")
    *most, last = phrases
    return f"{', '.join(most)} and {last}" if most else last


def unserved_tables(nodes: Collection[Node], type_name: str, tables: Collection[str]) -> list[str]:
    """The tables for which no executor with the type serves all tables.

    [] if no executor has the type. All tables, if each is served by some executor with the type, but no executor serves
    them together.
    """
    having = [node for node in nodes if rank(node, type_name) is not None]
    if not having or any(not refusal(node.serves, type_name, tables) for node in having):
        return []
    alone = [table for table in tables if all(refusal(node.serves, type_name, (table,)) for node in having)]
    return alone or list(tables)


def ends_without_code(state: State | None, cancel: Cancel | None) -> bool:
    """Whether an operation may end without its completion code if nobody can run it.

    True for a cancelled operation, false for one that is stopped because its jobs failed.
    """
    return state is State.CANCELLING and not (cancel is not None and cancel.reason == "failed")


def failed_executors(nodes: Collection[Node], type_name: str) -> list[tuple[str, str]]:
    """(executor, reason) of those that cannot run the type, or last failed to, sorted."""
    found = {node.executor: why for node in nodes if (why := {**node.unable, **node.failing}.get(type_name))}
    return sorted(found.items())


def _ranks(nodes: Mapping[str, Node], type_name: str, tables: Collection[str]) -> dict[str, Rank]:
    return {inc: found for inc, node in nodes.items() if (found := rank(node, type_name, tables)) is not None}
