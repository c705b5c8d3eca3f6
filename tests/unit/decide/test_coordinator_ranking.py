"""Which executors coordinate a type, and which one is missing."""

from __future__ import annotations

import pytest

from distop.decide.coordinator_ranking import candidates, ends_without_code, missing_executor
from distop.protocol.executor_nodes import NodeState
from distop.protocol.records import Cancel, Node, State

ZONE = {"zone": "a"}
OFFERS = Node("offers", "h", 1, ("noop",))
OTHER = Node("other", "h", 1, ("other",))


def node(state: NodeState = NodeState.ACTIVE, *, pausing: bool = False, unable: bool = False) -> Node:
    """A node with these labels. ``pausing``: between two tries of the type."""
    why = {"noop": "no Spark"} if pausing or unable else {}
    return Node("fits", "h", 1, () if why else ("noop",), ZONE, state=state, unable=why, failing=why if pausing else {})


DRAINED, PAUSING, UNABLE = node(NodeState.DRAINED), node(pausing=True), node(unable=True)


@pytest.mark.parametrize(
    ("nodes", "where", "who", "lacks"),
    [
        ((), {}, [], "offers `noop`"),
        ((OTHER,), {}, [], "offers `noop`"),
        ((OFFERS,), {}, ["offers"], ""),
        ((OFFERS,), ZONE, [], "offers `noop` and has the labels zone=a"),
        ((OFFERS, node()), ZONE, ["fits"], ""),
        ((OFFERS, PAUSING), ZONE, [], ""),
        ((OFFERS, DRAINED), ZONE, [], "offers `noop`, has the labels zone=a and is not drained"),
        ((OFFERS, node(NodeState.DRAINING)), ZONE, [], "offers `noop`, has the labels zone=a and is not drained"),
        ((OFFERS, UNABLE), ZONE, [], "offers `noop` and has the labels zone=a"),
        # Where nobody else is left, these end the operations.
        ((PAUSING,), ZONE, ["fits"], ""),
        ((OTHER, DRAINED), ZONE, ["fits"], ""),
        ((OTHER, UNABLE), ZONE, ["fits"], ""),
    ],
)
def test_candidates_and_the_missing_executor(
    nodes: tuple[Node, ...], where: dict[str, str], who: list[str], lacks: str
) -> None:
    named = {one.executor: one for one in nodes}
    assert candidates(named, "noop", where) == who
    assert missing_executor(named, "noop", where) == lacks


def test_only_cancelled_operations_end_without_their_completion_code() -> None:
    assert ends_without_code(State.CANCELLING, Cancel("user"))
    assert not ends_without_code(State.CANCELLING, Cancel("failed"))
    assert not ends_without_code(State.RUNNING, None)
