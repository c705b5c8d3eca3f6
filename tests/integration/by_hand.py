"""The command line in a namespace of its own on a real etcd, with the daemons' part played by hand."""

from __future__ import annotations

import asyncio
import itertools
import threading
from typing import TYPE_CHECKING, Any

import pytest

from distop import aio
from distop.protocol.records import OperationRef, State
from tests.integration.hand import Hand

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from distop.store.embedded import EmbeddedEtcd
    from tests.support.command import Ran

_numbers = itertools.count()
TABLE = "nyc.flights"


class World:
    """A namespace of its own, the command line in it, and the hand that plays the daemons."""

    def __init__(self, endpoint: str, command: Callable[..., Ran]) -> None:
        self.endpoint = endpoint
        self.namespace = f"cli{next(_numbers)}"
        self._command = command
        self.play(lambda hand: self._prepare(hand))

    @staticmethod
    async def _prepare(hand: Hand) -> None:
        await hand.publish("noop", description="Does nothing.")
        await hand.publish("purge", conflicts_with=("noop",))
        await hand.table(TABLE)
        await hand.join("n1", "noop", "purge")

    @property
    def options(self) -> tuple[str, ...]:
        return "--etcd", self.endpoint, "--namespace", self.namespace

    def distop(self, *argv: str) -> Ran:
        return self._command(*argv, *self.options)

    def play(self, part: Callable[[Hand], Awaitable[Any]]) -> None:
        async def run() -> None:
            async with aio.connect(self.endpoint, namespace=self.namespace) as client:
                await part(Hand(client.etcd, client.keys))

        # A loop of its own, in a thread of its own: the test's may be running.
        thread = threading.Thread(target=lambda: asyncio.run(run()))
        thread.start()
        thread.join()


@pytest.fixture
def world(shared_etcd: EmbeddedEtcd, distop_command: Callable[..., Ran]) -> World:
    """With the table and the types that the hand publishes."""
    return World(shared_etcd.endpoint, distop_command)


def ref(text: str) -> OperationRef:
    """The operation of this name."""
    return OperationRef.parse(text)


async def end(hand: Hand, op: str, verdict: State = State.SUCCESS, report: Any = None, errors: Any = ()) -> None:
    """An operation without jobs, to its end."""
    await hand.plan(ref(op), "n1", [])
    await hand.finish(ref(op), "n1", verdict, report, errors)
