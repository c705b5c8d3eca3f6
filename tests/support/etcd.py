"""Real etcd servers for tests, and what observes them."""

from __future__ import annotations

import asyncio
import time
from contextlib import ExitStack, asynccontextmanager
from typing import TYPE_CHECKING

import pytest

from distop.core.txn import KeyValue
from distop.store import transport as wire
from distop.store._proto import rpc_pb2 as rpc
from distop.store.client import EtcdClient
from distop.store.config import EtcdConfig
from distop.store.embedded import EmbeddedEtcd, free_ports
from distop.store.position import Batch

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterator
    from types import TracebackType
    from typing import Any, Self


@pytest.fixture(scope="session")
def shared_etcd() -> Iterator[EmbeddedEtcd]:
    """One etcd for all tests that neither stop it nor compact it; each writes below keys of its own."""
    with EmbeddedEtcd(compaction=None) as server:
        yield server


@pytest.fixture
def own_etcd() -> Iterator[EmbeddedEtcd]:
    """An etcd of the test's own, to be stopped, compacted and filled."""
    with EmbeddedEtcd(compaction=None) as server:
        yield server


@asynccontextmanager
async def connected(endpoint: str, **options: Any) -> AsyncIterator[EtcdClient]:
    """A connected client."""
    async with EtcdClient(EtcdConfig((endpoint,), **options)) as client:
        yield client


async def compacted(client: EtcdClient, revision: int) -> None:
    """Drop etcd's history before a revision."""
    await client.transport.unary(wire.COMPACT, rpc.CompactionRequest(revision=revision), 5.0)


async def until(condition: Callable[[], bool], what: str = "the state waited for", timeout: float = 20.0) -> None:
    """Wait for a state, with a deadline."""
    limit = time.monotonic() + timeout
    while not condition():
        if time.monotonic() > limit:
            raise AssertionError(f"{what} was not reached within {timeout} s")
        await asyncio.sleep(0.005)


class Mirror:
    """Applies batches as a consumer does, and checks on the way what every consumer relies on."""

    def __init__(self) -> None:
        self.content: dict[str, KeyValue] = {}
        self.revision = 0
        self.batches: list[Batch] = []
        self.mod_revisions: list[int] = []

    def apply(self, batch: Batch) -> None:
        assert batch.revision >= self.revision, "the revision went back"
        self.batches.append(batch)
        if batch.listing:
            self.content = {event.kv.key: event.kv for event in batch.events}
            assert not any(event.deleted for event in batch.events)
        else:
            for event in batch.events:
                assert event.kv.mod_revision > self.revision, "an old or a split revision was applied"
                self.mod_revisions.append(event.kv.mod_revision)
                if event.deleted:
                    self.content.pop(event.kv.key, None)
                else:
                    self.content[event.kv.key] = event.kv
        self.revision = batch.revision

    @property
    def listings(self) -> int:
        return sum(batch.listing for batch in self.batches)

    @property
    def values(self) -> dict[str, bytes]:
        return {key: pair.value for key, pair in self.content.items()}


class EtcdCluster:
    """Three members on the loopback. ``arguments``: more of etcd's own, for each."""

    def __init__(self, size: int = 3, arguments: tuple[str, ...] = ()) -> None:
        ports = free_ports(2 * size)
        names = [f"m{number}" for number in range(size)]
        peers = dict(zip(names, ports[size:], strict=True))
        initial = ",".join(f"{name}=http://127.0.0.1:{port}" for name, port in peers.items())
        self.members = [
            EmbeddedEtcd(
                name=name,
                port=client,
                peer_port=peers[name],
                compaction=None,
                arguments=["--initial-cluster", initial, *arguments],
            )
            for name, client in zip(names, ports[:size], strict=True)
        ]
        self._stack = ExitStack()

    @property
    def endpoints(self) -> tuple[str, ...]:
        return tuple(member.endpoint for member in self.members)

    def __enter__(self) -> Self:
        try:
            for member in self.members:
                self._stack.callback(member.stop)
                member.launch()
            for member in self.members:
                member.wait_ready()
        except BaseException:
            self._stack.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()
