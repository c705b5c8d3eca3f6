"""Requests cut off by the end of a session: their outcome, and cancellation of the caller."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from distop.errors import OutcomeUnknown
from distop.store import transport as wire
from distop.store._proto import rpc_pb2 as rpc
from distop.store.connection_settings import EtcdConfig
from distop.store.grpc_failures import Failure, FailureKind
from distop.store.request_retry import Repeater, RequestRetries
from tests.unit.support.virtualtime import in_virtual_time


class Silent:
    """A transport that answers requests with ``answer`` once it is set."""

    def __init__(self) -> None:
        self.answer: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self.asked = asyncio.Event()
        self.left = 0
        """Requests whose caller did not wait for the answer."""
        self.address = "here:1"

    async def unary(self, method: Any, request: Any, timeout: float) -> Any:
        self.asked.set()
        try:
            return await asyncio.shield(self.answer)
        except asyncio.CancelledError:
            self.left += 1
            raise


async def sending(silent: Silent, until: asyncio.Future[None]) -> tuple[asyncio.Task[Any], RequestRetries]:
    """A write that was sent, and is not answered yet."""
    attempts = RequestRetries("write", until=until)
    repeater = Repeater(silent, EtcdConfig())  # type: ignore[arg-type]
    task = asyncio.ensure_future(repeater.send(wire.TXN, rpc.TxnRequest(), attempts))  # type: ignore[arg-type]
    await silent.asked.wait()
    return task, attempts


def run(work: Callable[[Silent, asyncio.Future[None]], Awaitable[None]]) -> None:
    async def main() -> None:
        await work(Silent(), asyncio.get_running_loop().create_future())

    asyncio.run(main())


def test_a_write_that_is_cut_off_has_an_unknown_outcome() -> None:
    async def cut_off(silent: Silent, until: asyncio.Future[None]) -> None:
        task, attempts = await sending(silent, until)
        until.set_result(None)
        with pytest.raises(OutcomeUnknown):
            await task
        assert attempts.unknown
        assert silent.left == 1, "nothing waits for the request any more"

    run(cut_off)


def test_an_answer_before_the_end_is_returned() -> None:
    async def answered(silent: Silent, until: asyncio.Future[None]) -> None:
        task, attempts = await sending(silent, until)
        silent.answer.set_result("done")
        assert await task == "done"
        until.set_result(None)
        await asyncio.sleep(0)
        assert not attempts.unknown
        assert not task.cancelling(), "a later end does not affect an answered caller"

    run(answered)


def test_an_end_together_with_the_answer_does_not_cancel_the_caller() -> None:
    async def together(silent: Silent, until: asyncio.Future[None]) -> None:
        attempts = RequestRetries("write", until=until)

        async def caller() -> str:
            answer: str = await Repeater(silent, EtcdConfig()).send(wire.TXN, rpc.TxnRequest(), attempts)  # type: ignore[arg-type]
            for _ in range(5):
                await asyncio.sleep(0)
            return answer

        task = asyncio.ensure_future(caller())
        await silent.asked.wait()
        silent.answer.set_result("done")
        await asyncio.sleep(0)
        until.set_result(None)
        assert await task == "done"
        assert not task.cancelling()

    run(together)


def test_a_closed_connection_leaves_an_unknown_outcome() -> None:
    """gRPC then cancels the call; nobody cancels the caller."""

    async def closed(silent: Silent, until: asyncio.Future[None]) -> None:
        task, attempts = await sending(silent, until)
        silent.answer.cancel()
        with pytest.raises(OutcomeUnknown):
            await task
        assert attempts.unknown

    run(closed)


@pytest.mark.parametrize("ends", [False, True])
def test_a_cancelled_caller_is_cancelled_even_if_the_session_ends(ends: bool) -> None:
    async def cancelled(silent: Silent, until: asyncio.Future[None]) -> None:
        task, _ = await sending(silent, until)
        task.cancel()
        if ends:
            until.set_result(None)
        with pytest.raises(asyncio.CancelledError):
            await task
        assert task.cancelled()
        assert silent.left == 1

    run(cancelled)


def test_a_write_of_a_cancelled_caller_is_cut_off_as_any_other() -> None:
    async def last_word(silent: Silent, until: asyncio.Future[None]) -> None:
        async def caller() -> str:
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                attempts = RequestRetries("write", until=until)
                with pytest.raises(OutcomeUnknown):
                    await Repeater(silent, EtcdConfig()).send(wire.TXN, rpc.TxnRequest(), attempts)  # type: ignore[arg-type]
                return "outcome unknown"
            raise AssertionError("unreachable")

        task = asyncio.ensure_future(caller())
        await asyncio.sleep(0)
        task.cancel()
        await silent.asked.wait()
        until.set_result(None)
        assert await task == "outcome unknown"

    run(last_word)


def test_pauses_between_attempts_grow_to_a_second() -> None:
    attempts = RequestRetries("write")
    pauses = [attempts.next_pause() or 0.0 for _ in range(20)]
    assert 0.0 < pauses[0] <= 0.05
    assert all(0.1 < pause <= 1.0 for pause in pauses[10:])


def test_a_request_that_stays_unanswered_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    """Neither a short failure nor each retry is logged."""

    class Away:
        address = "here:1"

        async def unary(self, method: Any, request: Any, timeout: float) -> Any:
            raise wire.RequestFailed(Failure(FailureKind.NOT_DONE, "UNAVAILABLE", "connection refused"))

    async def main() -> None:
        repeater = Repeater(Away(), EtcdConfig())  # type: ignore[arg-type]
        sending = asyncio.ensure_future(repeater.send(wire.TXN, rpc.TxnRequest(), RequestRetries("write")))
        await asyncio.sleep(0.1)
        assert caplog.records == []
        await asyncio.sleep(60.0)
        sending.cancel()

    with caplog.at_level(logging.WARNING, "distop"):
        in_virtual_time(main)
    logged = {record.getMessage() for record in caplog.records}
    assert logged == {"etcd at here:1 did not answer the write; retrying: connection refused (UNAVAILABLE)"}
    assert len(caplog.records) <= 10
