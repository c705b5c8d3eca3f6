"""Steps that are left to other nodes."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from distop.coordinator.placing import Placing
from distop.core import coordinator_ranking, decide
from distop.core.model import OperationRef

REF = OperationRef("t", "x", "", 1)


def test_an_operation_that_was_left_to_a_node_that_is_gone_now_is_looked_at_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its minute without such a node begins then. It never began: nothing had the operation looked at."""
    missing = [""]
    monkeypatch.setattr(coordinator_ranking, "missing_executor", lambda *args: missing[0])
    monkeypatch.setattr(coordinator_ranking, "candidates", lambda *args: [])
    kicked: list[Any] = []
    ctx: Any = SimpleNamespace(
        cluster=SimpleNamespace(nodes={}), incarnation="me", fits=lambda where: not where, admits=lambda *args: True
    )

    async def scenario() -> None:
        placing = Placing(ctx, lambda: True, kicked.append)
        spec = SimpleNamespace(where={"zone": "a"})
        terms = SimpleNamespace(beside=())
        op: Any = SimpleNamespace(ref=REF, spec=spec, terms=terms, decision=None, state=None, cancel=None)
        step = decide.Complete.__new__(decide.Complete)
        assert placing.here(op, step) is None, "a node with these labels lives"
        placing.changed()
        assert kicked == []
        missing[0] = "has the labels zone=a"
        placing.changed()
        assert kicked == [[REF]]
        placing.close()

    asyncio.run(scenario())
