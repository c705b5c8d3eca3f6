"""How long a coordinator retries a refused follow-up, and when completion code runs again."""

from __future__ import annotations

import asyncio
import logging
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import pytest

from distop.clock import source
from distop.daemon.coordinator import follow_ups
from distop.daemon.coordinator.attempt_limit import Elsewhere
from distop.daemon.coordinator.election import Election
from distop.daemon.coordinator.follow_ups import FOLLOW_UP_TIME, FollowUps, Later
from distop.daemon.coordinator.operation_end import Ending
from distop.decide.next_steps import gives_up
from distop.errors import OperationStartError
from distop.protocol import operation_transitions as t
from distop.protocol.behavior_declaration import Retry, Rules
from distop.protocol.keys import Keys
from distop.protocol.records import Decision, OperationRef, Spec, State
from distop.protocol.size_limits import DEFAULT
from distop.protocol.txn import Put
from distop.worker.daemon_side.requests import WorkerError
from tests.unit.support.clock import StandingClock

if TYPE_CHECKING:
    from distop.protocol.txn import Txn
    from distop.services.submission.start_request import Request

REF = OperationRef("t", "noop", "", 1)
LOG = logging.getLogger("distop.test")


def context(keys: Keys, log: Any) -> SimpleNamespace:
    return SimpleNamespace(client=None, keys=keys, log=log, limits=DEFAULT, lost=asyncio.Future(), rejected_writes=None)


class HoursAhead(StandingClock):
    """Its wall clock is wrong by hours."""

    def time(self) -> float:  # type: ignore[override]
        return self.now + 7200.0


async def test_a_wrong_wall_clock_does_not_shorten_the_retries_of_a_follow_up() -> None:
    clock, keys = HoursAhead(), Keys()
    ctx: Any = context(keys, None)
    reset = source.set(clock)
    try:
        following = FollowUps(ctx)
        pauses = [following._pause(REF)]
        while pauses[-1]:
            clock.now += pauses[-1]
            pauses.append(following._pause(REF))
        assert FOLLOW_UP_TIME <= clock.now < FOLLOW_UP_TIME + 61.0
        assert pauses[:-1] == sorted(pauses[:-1]), "growing pauses"
        following.keep(())
        assert not following._refused, "ended operations take no memory"
    finally:
        source.reset(reset)


async def test_a_refused_follow_up_is_started_later_and_once(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, keys, asked = StandingClock(), Keys(), list[int]()
    refusals = [OperationStartError("excluded by t/noop/2")]

    async def submit(client: Any, keys: Keys, wanted: Request) -> Any:
        asked.append(int(wanted.request_id.removeprefix(f"{REF}#")))
        if asked[-1] == 1 and refusals:
            raise refusals.pop()
        return SimpleNamespace(ref=REF)

    monkeypatch.setattr(follow_ups, "submit", submit)
    ctx: Any = context(keys, LOG)
    reset = source.set(clock)
    try:
        following = FollowUps(ctx)
        for _ in range(2):
            with pytest.raises(Later):
                await following.start_all(REF, [{"type": "noop", "table": "t"}] * 3)
        assert asked == [0, 1, 2], "it is not tried again before its time"
        clock.now += 2.0
        await following.start_all(REF, [{"type": "noop", "table": "t"}] * 3)
        assert asked == [0, 1, 2, 1]
    finally:
        source.reset(reset)


@pytest.mark.parametrize(("kind", "final"), [("fatal", True), ("transient", False)])
async def test_completion_code_with_a_fatal_error_does_not_run_again(kind: str, final: bool) -> None:
    keys, written = Keys(), list[Decision]()

    async def commit(txn: Txn) -> bool:
        written.extend(Decision.decode(op.value) for op in txn.success if isinstance(op, Put))
        return True

    rules = Rules(retry=Retry(attempts=3))
    spec = Spec("r", "2025-01-01T00:00:00.000Z", "tester", rules)
    decision = Decision(State.SUCCESS, 1, 1, 0)
    op: Any = SimpleNamespace(ref=REF, spec=spec, decision=SimpleNamespace(mod=7))
    ctx: Any = context(keys, LOG)
    guard, nothing = t.election_guard(keys, "t", "noop", 1), cast("Any", None)
    ending = Ending(Election(ctx, guard, nothing, commit, nothing, nothing), nothing)
    error = WorkerError(kind, "no")  # type: ignore[arg-type]
    if final:
        assert await ending._completion_failed(op, decision, error)
    else:
        with pytest.raises(Elsewhere):
            await ending._completion_failed(op, decision, error)
    (after,) = written
    assert gives_up(rules, after.attempts) is final
    assert after.verdict is (State.FAILED if final else State.SUCCESS)
    assert "completion failed: no" in after.error


@pytest.mark.parametrize(
    "wanted", [{"table": "others"}, {"table": "@cluster"}, {"table": 5}, {"table": "t", "type": 5}, {}]
)
async def test_a_forged_follow_up_on_another_table_is_never_started(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, wanted: dict[str, Any]
) -> None:
    async def submit(client: Any, keys: Keys, request: Any) -> Any:
        pytest.fail(f"{request.type} is started on {request.table}")

    monkeypatch.setattr(follow_ups, "submit", submit)
    ctx: Any = context(Keys(), LOG)
    following = FollowUps(ctx)
    await following.start_all(REF, [{"type": "noop", "arg": {}, **wanted}])
    (record,) = caplog.records
    assert record.levelname == "ERROR"
    assert record.getMessage().startswith("Cannot start a follow-up operation; skipping it: ")


async def test_a_follow_up_on_the_operation_s_own_table_is_started(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[tuple[str, str]] = []

    async def submit(client: Any, keys: Keys, request: Any) -> Any:
        started.append((request.type, request.table))
        return SimpleNamespace(ref="t/noop/2")

    monkeypatch.setattr(follow_ups, "submit", submit)
    ctx: Any = context(Keys(), LOG)
    following = FollowUps(ctx)
    await following.start_all(REF, [{"type": "noop", "table": "t", "arg": {}}])
    assert started == [("noop", "t")]
