"""What `distop cancel` says about the work that stays."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from distop.cli import command_context, main
from distop.errors import EtcdUnavailable
from distop.protocol.records import History, State
from distop.services.operation_results import OperationResult, OperationStatus

COMMITTED = {"files": 50, "commits": 2, "committed_files": 40, "committed_bytes": 1_200_000}


class Client:
    """A client whose operations have this status."""

    def __init__(self, status: OperationStatus | None) -> None:
        self._status = status
        self.cancelled: list[str] = []

    def operation(self, _: Any) -> Client:
        return self

    async def cancel(self, text: str) -> None:
        self.cancelled.append(text)

    async def status(self) -> OperationStatus:
        if self._status is None:
            raise EtcdUnavailable("etcd is gone")
        return self._status


def status(**fields: Any) -> OperationStatus:
    return OperationStatus("t/compact/1", "cancelling", "cancelling", {}, "", **fields)


ENDED = History("t/compact/1", State.CANCELLED, "", "", 1, 0, 0, report={"work": {"committed_files": 1}})


@pytest.mark.parametrize(
    ("seen", "stays"),
    [
        (status(work=COMMITTED), "; committed so far, and stays: 2 commits, 40 files, 1.2 MB"),
        (status(work={"files": 50}), ""),
        (status(), ""),
        (status(result=OperationResult.of(ENDED)), "; committed so far, and stays: 1 file"),
        (None, ""),
    ],
)
def test_cancel_says_what_stays(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], seen: OperationStatus | None, stays: str
) -> None:
    client = Client(seen)
    monkeypatch.setattr(command_context.GlobalOptions, "with_client", lambda _, work, **__: asyncio.run(work(client)))
    assert main.run(["cancel", "t/compact/1", "--text", "wrong table"]) == 0
    assert capsys.readouterr().out == f"t/compact/1 is cancelling{stays}\n"
    assert client.cancelled == ["wrong table"]


def test_cancel_with_json_has_the_work(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    for seen, more in ((status(work=COMMITTED), {"work": COMMITTED}), (None, {})):
        client = Client(seen)
        monkeypatch.setattr(
            command_context.GlobalOptions, "with_client", lambda _, work, c=client, **__: asyncio.run(work(c))
        )
        assert main.run(["--json", "cancel", "t/compact/1"]) == 0
        assert json.loads(capsys.readouterr().out) == {"op": "t/compact/1", "state": "cancelling", **more}
