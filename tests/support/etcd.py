"""Real etcd servers for tests, and what observes them."""

from __future__ import annotations

import asyncio
import json
import time
from contextlib import ExitStack, asynccontextmanager
from typing import TYPE_CHECKING

import pytest

from distop.errors import DistopError, OutcomeUnknown
from distop.protocol.txn import Put, Txn
from distop.store import transport as wire
from distop.store._proto import rpc_pb2 as rpc
from distop.store.client import EtcdClient
from distop.store.connection_settings import EtcdConfig
from distop.store.embedded import EmbeddedEtcd
from distop.store.ports import reserve

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterator, Sequence
    from types import TracebackType
    from typing import Any, Self

_DEFRAGMENT = wire.Method.of("Maintenance/Defragment", rpc.DefragmentRequest, rpc.DefragmentResponse, leader=False)


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


SMALL_QUOTA = 16 * 1024 * 1024


@pytest.fixture
def small_etcd() -> Iterator[EmbeddedEtcd]:
    """An etcd of the test's own whose database is soon full."""
    with EmbeddedEtcd(compaction=None, quota=SMALL_QUOTA) as server:
        yield server


@asynccontextmanager
async def connected(endpoint: str, **options: Any) -> AsyncIterator[EtcdClient]:
    """A connected client."""
    async with EtcdClient(EtcdConfig((endpoint,), **options)) as client:
        yield client


async def compacted(client: EtcdClient, revision: int) -> None:
    """Drop etcd's history before a revision."""
    await client.transport.unary(wire.COMPACT, rpc.CompactionRequest(revision=revision), 5.0)


async def filled(client: EtcdClient, lease: int = 0) -> OutcomeUnknown:
    """Write until etcd says that its database is full, under keys that begin with ``fill`` and on a lease; returns what
    the last write was told.
    """
    for number in range(60):  # the quota is held against what has reached the disk
        try:
            await client.commit(Txn((), (Put(f"fill{number}", bytes(1_000_000), lease),)), deadline=0.5)
        except OutcomeUnknown as error:
            if "database space exceeded" in str(error):  # a slow disk leaves a write unknown as well
                return error
    raise AssertionError("the database is not full")


async def disarmed(client: EtcdClient) -> None:
    """What a person does once less is stored in a full database: compact, defragment, disarm the alarm."""
    await compacted(client, (await client.status()).revision)
    await client.transport.unary(_DEFRAGMENT, rpc.DefragmentRequest(), 10.0)
    disarm = rpc.AlarmRequest(action=rpc.AlarmRequest.DEACTIVATE, alarm=rpc.NOSPACE)
    disarm.memberID = (await client.status()).member_id
    await client.transport.unary(wire.ALARM, disarm, 5.0)


async def until(condition: Callable[[], bool], what: str = "the state waited for", timeout: float = 20.0) -> None:
    """Wait for a state, with a deadline."""
    limit = time.monotonic() + timeout
    while not condition():
        if time.monotonic() > limit:
            raise AssertionError(f"{what} was not reached within {timeout} s")
        await asyncio.sleep(0.005)


PORT_TRIES = 5


class EtcdCluster:
    """Three members on the loopback. ``arguments`` are for each of them."""

    def __init__(self, size: int = 3, arguments: Sequence[str] = ()) -> None:
        self._names = [f"m{number}" for number in range(size)]
        self._given = arguments
        self._stack = ExitStack()
        self.members: list[EmbeddedEtcd] = []

    def _assemble(self) -> None:
        """Members that know of each other, on ports that are free just now."""
        names = self._names
        ports = reserve(2 * len(names))
        peers = dict(zip(names, ports[len(names) :], strict=True))
        initial = ",".join(f"{name}=http://127.0.0.1:{port}" for name, port in peers.items())
        self._arguments = ["--initial-cluster", initial, *self._given]
        self.members = [
            self._member(name, client, peers[name]) for name, client in zip(names, ports[: len(names)], strict=True)
        ]

    def _member(self, name: str, port: int, peer_port: int, *arguments: str) -> EmbeddedEtcd:
        given = [*self._arguments, *arguments]
        return EmbeddedEtcd(name=name, port=port, peer_port=peer_port, compaction=None, arguments=given)

    @property
    def endpoints(self) -> tuple[str, ...]:
        return tuple(member.endpoint for member in self.members)

    def replace(self, number: int, etcdctl: Callable[..., str | None]) -> bool:
        """Put a new member with an empty disk in the place of one that is down; ``etcdctl`` runs a command, and gives
        what it printed, or None. False where the others do not take it in yet: to be called again.
        """
        member, name = self.members[number], self._names[number]
        port, peer_port = member.port, member.peer_port
        peer = f"http://127.0.0.1:{peer_port}"
        listed = etcdctl("--write-out", "json", "member", "list")
        if listed is None:
            return False
        found = next((m for m in json.loads(listed)["members"] if m["peerURLs"] == [peer]), None)
        if found is not None and found.get("name"):  # one that never was started has no name
            if etcdctl("member", "remove", f"{found['ID']:x}") is None:
                return False
            found = None
        if found is None and etcdctl("member", "add", name, f"--peer-urls={peer}") is None:
            return False
        member.stop()  # with its data
        member = self._member(name, port, peer_port, "--initial-cluster-state", "existing")
        self.members[number] = member
        self._stack.callback(member.stop)
        member.start()
        return True

    def __enter__(self) -> Self:
        """Start it, on other ports where one of them was taken meanwhile."""
        for _ in range(PORT_TRIES - 1):
            try:
                return self._start()
            except DistopError as error:
                if "address already in use" not in str(error):
                    raise
        return self._start()

    def _start(self) -> Self:
        self._assemble()
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
