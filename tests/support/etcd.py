"""Real etcd servers for tests, and functions that compact, fill and free their databases."""

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


CHEAP_PASSWORDS = ("--bcrypt-cost", "4")
"""Arguments of an etcd with users. By default it computes for 50 ms at each password that it stores or checks."""


@pytest.fixture(scope="session")
def shared_etcd() -> Iterator[EmbeddedEtcd]:
    """One etcd for all tests that neither stop nor compact it and write only their own keys."""
    with EmbeddedEtcd(compaction=None) as server:
        yield server


@pytest.fixture
def own_etcd() -> Iterator[EmbeddedEtcd]:
    """An etcd for one test, which may stop, compact and fill it, and enable users."""
    with EmbeddedEtcd(compaction=None, arguments=CHEAP_PASSWORDS) as server:
        yield server


SMALL_QUOTA = 16 * 1024 * 1024


@pytest.fixture
def small_etcd() -> Iterator[EmbeddedEtcd]:
    """An etcd for one test with a small quota."""
    with EmbeddedEtcd(compaction=None, quota=SMALL_QUOTA) as server:
        yield server


@asynccontextmanager
async def connected(endpoint: str, **options: Any) -> AsyncIterator[EtcdClient]:
    """A connected client."""
    async with EtcdClient(EtcdConfig((endpoint,), **options)) as client:
        yield client


async def compacted(client: EtcdClient, revision: int) -> None:
    """Compact etcd's history before a revision."""
    await client.transport.unary(wire.COMPACT, rpc.CompactionRequest(revision=revision), 5.0)


async def fill_database(client: EtcdClient, lease: int = 0) -> OutcomeUnknown:
    """Write keys ``fill0``, ``fill1``… on a lease until the database is full; returns the error of the last write."""
    for number in range(60):  # etcd compares the quota with the data on the disk, so more fits
        try:
            await client.commit(Txn((), (Put(f"fill{number}", bytes(1_000_000), lease),)), deadline=0.5)
        except OutcomeUnknown as error:
            if "database space exceeded" in str(error):  # other errors come from a slow disk
                return error
    raise AssertionError("the database is not full")


async def free_space(client: EtcdClient) -> None:
    """Compact and defragment a full database and disarm its alarm, after keys were deleted."""
    await compacted(client, (await client.status()).revision)
    await client.transport.unary(_DEFRAGMENT, rpc.DefragmentRequest(), 10.0)
    disarm = rpc.AlarmRequest(action=rpc.AlarmRequest.DEACTIVATE, alarm=rpc.NOSPACE)
    disarm.memberID = (await client.status()).member_id
    await client.transport.unary(wire.ALARM, disarm, 5.0)


async def until(condition: Callable[[], bool], what: str = "the condition", timeout: float = 20.0) -> None:
    """Wait for a condition; raises AssertionError after the time-out."""
    limit = time.monotonic() + timeout
    while not condition():
        if time.monotonic() > limit:
            raise AssertionError(f"timed out after {timeout} s waiting for: {what}")
        await asyncio.sleep(0.005)


PORT_TRIES = 5


class EtcdCluster:
    """Members on the loopback (three by default). ``arguments``: further arguments of each member."""

    def __init__(self, size: int = 3, arguments: Sequence[str] = ()) -> None:
        self._names = [f"m{number}" for number in range(size)]
        self._given = arguments
        self._stack = ExitStack()
        self.members: list[EmbeddedEtcd] = []

    def _assemble(self) -> None:
        """Create the members with each other's addresses, on free ports."""
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
        """Replace a member that is down by a new member with an empty disk.

        ``etcdctl`` runs a command and returns its output, or None if it failed. Returns False if the other members do
        not accept the change yet: call it again.
        """
        member, name = self.members[number], self._names[number]
        port, peer_port = member.port, member.peer_port
        peer = f"http://127.0.0.1:{peer_port}"
        listed = etcdctl("--write-out", "json", "member", "list")
        if listed is None:
            return False
        found = next((m for m in json.loads(listed)["members"] if m["peerURLs"] == [peer]), None)
        if found is not None and found.get("name"):  # a member that was never started has no name
            if etcdctl("member", "remove", f"{found['ID']:x}") is None:
                return False
            found = None
        if found is None and etcdctl("member", "add", name, f"--peer-urls={peer}") is None:
            return False
        member.stop()  # also deletes its data
        member = self._member(name, port, peer_port, "--initial-cluster-state", "existing")
        self.members[number] = member
        self._stack.callback(member.stop)
        member.start()
        return True

    def __enter__(self) -> Self:
        """Start the cluster; retries on other ports if one is in use by now."""
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
