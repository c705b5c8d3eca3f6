"""The command line in its own namespace on a real etcd, with scripted daemons."""

from __future__ import annotations

import asyncio
import itertools
import threading
from typing import TYPE_CHECKING, Any

import pytest

from distop import aio
from distop.protocol.records import OperationRef, State
from tests.integration.scripted_daemons import ScriptedDaemons

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from distop.store.embedded import EmbeddedEtcd
    from tests.support.command import Ran

_numbers = itertools.count()
TABLE = "nyc.flights"


class CliNamespace:
    """The command line in its own namespace, with scripted daemons that have a table and two types."""

    def __init__(self, endpoint: str, command: Callable[..., Ran]) -> None:
        self.endpoint = endpoint
        self.namespace = f"cli{next(_numbers)}"
        self._command = command
        self.with_daemons(lambda scripted: self._prepare(scripted))

    @staticmethod
    async def _prepare(scripted: ScriptedDaemons) -> None:
        await scripted.publish("noop", description="Does nothing.")
        await scripted.publish("purge", conflicts_with=("noop",))
        await scripted.table(TABLE)
        await scripted.join("n1", "noop", "purge")

    @property
    def options(self) -> tuple[str, ...]:
        return "--etcd", self.endpoint, "--namespace", self.namespace

    def distop(self, *argv: str) -> Ran:
        return self._command(*argv, *self.options)

    def with_daemons(self, script: Callable[[ScriptedDaemons], Awaitable[Any]]) -> None:
        async def run() -> None:
            async with aio.connect(self.endpoint, namespace=self.namespace) as client:
                await script(ScriptedDaemons(client.etcd, client.keys))

        # In a separate thread, because the test's event loop may be running.
        thread = threading.Thread(target=lambda: asyncio.run(run()))
        thread.start()
        thread.join()


@pytest.fixture
def cli(shared_etcd: EmbeddedEtcd, distop_command: Callable[..., Ran]) -> CliNamespace:
    """A namespace with the table and types of the scripted daemons."""
    return CliNamespace(shared_etcd.endpoint, distop_command)


def ref(text: str) -> OperationRef:
    """The operation with this name."""
    return OperationRef.parse(text)


async def end(
    scripted: ScriptedDaemons, op: str, verdict: State = State.SUCCESS, report: Any = None, errors: Any = ()
) -> None:
    """Plan the operation without jobs and end it."""
    await scripted.plan(ref(op), "n1", [])
    await scripted.finish(ref(op), "n1", verdict, report, errors)
