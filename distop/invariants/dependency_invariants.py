"""The invariants of dependencies and holds (15)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from distop.protocol.records import State

if TYPE_CHECKING:
    from collections.abc import Iterator

    from distop.invariants.cluster_invariants import ClusterTrace
    from distop.invariants.replay_state import OperationTrace
    from distop.protocol.dependencies import Edge


def deleted_edge(edge: Edge, state: State | None) -> str:
    """What is wrong about the deletion of an edge, or "". ``state``: the predecessor's.

    An edge may be deleted when its predecessor has ended as required.
    """
    if state is None or not edge.satisfied_by(state):
        return f"the edge was deleted while {edge.op} was {state or 'absent'}"
    return ""


def broken_edge(edge: Edge, state: State | None) -> str:
    """What is wrong about an edge that was written while its successor waits, or "". ``state``: the predecessor's.

    An edge is marked as broken when its predecessor has ended otherwise than required.
    """
    if edge.broken and (state is None or str(state) != edge.broken or edge.satisfied_by(state)):
        return f"the edge says that {edge.op} ended as {edge.broken}; its state is {state or 'absent'}"
    return ""


def left_to_wait_for(op: OperationTrace, cluster: ClusterTrace) -> Iterator[str]:
    """What an operation that stops waiting must still have waited for."""
    hold = op.spec.hold if op.spec is not None else ""
    if op.state is not None and op.state.terminal and hold in cluster.inserting:
        yield f"the operation ended while its graph was being inserted under the hold {hold}"
    if op.state is State.CANCELLED:
        if text := _without_cause(op, hold in cluster.denied):
            yield text
        return
    if op.after:
        left = ", ".join(sorted(edge.op for edge in op.after.values())[:3])
        yield f"the operation began while it still waited for {left}"
    if hold in cluster.holds:
        yield f"the operation began while its hold {hold} existed"


def _without_cause(op: OperationTrace, denied: bool) -> str:
    """Why a pending operation must not have ended, or "". ``denied``: its hold was."""
    why = op.cancel
    if why is None:
        return "the operation was cancelled without a cancel record"
    if why.reason == "user" or why.replaced_by or any(edge.broken for edge in op.after.values()) or denied:
        return ""
    return f"the cancel has the reason {why.reason} ({why.text}), but no predecessor failed and no hold was denied"
