"""The daemon's handle on a child: pings, replacement, history records and time limits, in virtual time."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import pytest

from distop.runtime import logs
from distop.worker.daemon_side.child_launch import ChildProcess
from distop.worker.daemon_side.coordinator_calls import ChildCalls
from distop.worker.daemon_side.requests import Verified
from tests.unit.support.virtualtime import in_virtual_time, now


class Child(ChildProcess):
    """A child that is not started. It answers a ping after ``answers_after`` seconds.

    ``sent``: the messages to it. ``killed``: the reason and the time of its kill.
    """

    def __init__(self, answers_after: float = 1.0) -> None:
        super().__init__(cast(Any, None), logs.get("distop.test"))
        self.answers_after = answers_after
        self.sent: list[Any] = []
        self.killed: tuple[str, float] | None = None

    def send(self, message: Any) -> None:
        self.sent.append(message)
        if message["t"] == "ping":
            asyncio.get_running_loop().call_later(self.answers_after, self._dispatch, {"t": "pong"})

    def kill(self, reason: str) -> None:
        self.killed = self.killed or (reason, now())


@pytest.mark.parametrize("answers_after", [1.0, 59.0])
def test_a_child_that_answers_within_a_minute_is_kept(answers_after: float) -> None:
    async def main() -> None:
        child = Child(answers_after)
        pinging = asyncio.ensure_future(child._ping_regularly())
        await asyncio.sleep(3_600.0)
        assert len(child.sent) <= 120, "it is pinged twice a minute at most"
        assert child.killed is None
        pinging.cancel()

    in_virtual_time(main, limit=4_000.0)


def test_a_frozen_child_is_killed_within_two_minutes() -> None:
    async def main() -> None:
        child = Child()
        pinging = asyncio.ensure_future(child._ping_regularly())
        await asyncio.sleep(100.0)
        child.answers_after = 1e6
        await asyncio.wait([pinging], timeout=120.0)
        assert child.killed is not None
        assert child.killed[0] == "frozen"

    in_virtual_time(main)


def test_a_stuck_child_is_replaced_after_minutes_although_another_run_goes_on() -> None:
    async def main() -> None:
        child = Child()
        child.runs[1] = cast(Any, None)
        began = now()
        child._dispatch({"t": "stuck", "why": "a job of t/noop/1 does not stop"})
        await asyncio.sleep(500.0)
        assert child.killed == ("replaced", began + 300.0)

    in_virtual_time(main)


@pytest.mark.parametrize("found", [True, False])
def test_the_child_gets_the_history_record_that_it_requests(found: bool) -> None:
    async def find(op: str) -> Any:
        if not found:
            raise OSError("no connection")
        return {"op": op}

    async def main() -> None:
        child = Child()
        child.find_history = find
        child._dispatch({"t": "history", "seq": 7, "op": "t/noop/1"})
        await asyncio.sleep(1.0)
        (reply,) = child.sent
        assert (reply["t"], reply["seq"]) == ("reply", 7)
        assert reply["value"] == ({"op": "t/noop/1"} if found else None)
        assert bool(reply.get("error")) is not found

    in_virtual_time(main)


@pytest.mark.parametrize(("limit", "expected"), [(1.0, 60.0), (50.0, 100.0)])
async def test_a_verification_includes_the_wait_for_a_child(limit: float, expected: float) -> None:
    class Calls(ChildCalls):
        def __init__(self) -> None:
            self._caller = self._admission = cast(Any, self)

        async def call(self, *_: Any, limit: float, **__: Any) -> Any:
            self.limit = limit
            return {"completed": True, "why": ""}, ()

    calls = Calls()
    assert await calls.verify("t/noop/1", "x", "https://orders", limit) == Verified(True, "")
    assert calls.limit == expected
