"""Steps that are left to nodes with other labels."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from distop.daemon.coordinator.label_routing import Placing
from distop.decide import coordinator_ranking, next_steps
from distop.protocol.records import OperationRef
from tests.unit.support.virtualtime import in_virtual_time

REF = OperationRef("t", "x", "", 1)


def node(**more: Any) -> Any:
    """The parts of a node that the routing uses."""
    fields = {"incarnation": "me", "fits": lambda where: not where, "admits": lambda *args: True}
    return SimpleNamespace(cluster=SimpleNamespace(nodes={}), **fields, **more)


def completion_elsewhere() -> tuple[Any, Any]:
    """An operation whose completion code is to run on a node with a label, and that step."""
    spec, terms = SimpleNamespace(where={"zone": "a"}), SimpleNamespace(beside=())
    op = SimpleNamespace(ref=REF, spec=spec, terms=terms, decision=None, state=None, cancel=None)
    return op, next_steps.RunCompletion.__new__(next_steps.RunCompletion)


def test_an_operation_that_was_left_to_a_node_that_is_gone_is_checked_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its minute without such a node begins then. It never began, because no check was triggered."""
    missing = [""]
    monkeypatch.setattr(coordinator_ranking, "missing_executor", lambda *args: missing[0])
    monkeypatch.setattr(coordinator_ranking, "candidates", lambda *args: [])
    kicked: list[Any] = []

    async def scenario() -> None:
        placing = Placing(node(), lambda: True, kicked.append)
        assert placing.here(*completion_elsewhere()) is None, "a node with these labels lives"
        placing.changed()
        assert kicked == []
        missing[0] = "has the labels zone=a"
        placing.changed()
        assert kicked == [[REF]]
        placing.close()

    asyncio.run(scenario())


def test_an_election_that_cannot_be_resigned_yet_is_resigned_later(monkeypatch: pytest.MonkeyPatch) -> None:
    """The coordinator is still starting."""
    monkeypatch.setattr(coordinator_ranking, "missing_executor", lambda *args: "")
    monkeypatch.setattr(coordinator_ranking, "candidates", lambda *args: ["other"])
    tries: list[bool] = []
    taken_up = [False]

    def pass_on() -> bool:
        tries.append(taken_up[0])
        return taken_up[0] or len(tries) > 1000  # ends a loop without a pause

    async def scenario() -> None:
        placing = Placing(node(), pass_on, lambda refs: None)
        assert placing.here(*completion_elsewhere()) is None
        await asyncio.sleep(5.0)
        assert 1 < len(tries) < 500
        taken_up[0] = True
        await asyncio.sleep(5.0)
        assert tries[-1], "it is given up"
        placing.close()

    in_virtual_time(scenario)
