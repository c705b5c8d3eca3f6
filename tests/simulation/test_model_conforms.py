"""Runs the conformance tests of a real etcd against the simulated one, in virtual time.

The classes below replace a server, a cluster, users and a proxy.
"""

from __future__ import annotations

import contextvars
import inspect
import itertools
import random
from typing import TYPE_CHECKING, Any

import pytest

from distop.clock import source
from distop.store.client import EtcdClient
from distop.store.connection_settings import EtcdConfig
from distop.store.transport import channels
from tests.conformance import (
    test_cluster,
    test_history,
    test_reads,
    test_session,
    test_space_quota,
    test_transactions,
    test_unknown_outcomes,
    test_users,
    test_watch,
)
from tests.simulator.network import Network
from tests.simulator.process_clock import SimSource
from tests.simulator.server_links import PATIENCE
from tests.simulator.sim_etcd import SimEtcd
from tests.simulator.virtual_loop import Process, VirtualLoop
from tests.support.etcd import SMALL_QUOTA
from tests.support.proxy import Mode

if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import Self

    from tests.simulator.quorum import Member

pytestmark = pytest.mark.malformed

ALL = ("KV", "Lease", "Watch")
FOR_EVER = 1_000_000.0
"""Seconds by which a paused member is behind."""
ADDRESSES = tuple(f"model-{n}:2379" for n in range(3))
VERSIONS = ("3.4.23", "3.5.1", "3.5.33", "3.6.16")
"""One version for each behavior with progress requests (W3) and a full database (T8)."""
MODULES = (
    test_cluster,
    test_history,
    test_reads,
    test_session,
    test_space_quota,
    test_transactions,
    test_unknown_outcomes,
    test_users,
    test_watch,
)
NEEDS_A_REAL_SERVER = {
    "test_an_unreachable_etcd_is_reported_in_one_sentence": "looks at a real port",
    "test_an_event_loop_stalled_beyond_the_deadline_ends_the_session": "holds the interpreter, in real time",
    "test_a_user_without_read_permission_is_rejected": "has users",
    "test_a_client_fails_once_its_endpoint_serves_another_cluster": "starts another cluster",
    "test_a_client_detects_that_the_revision_decreased": "starts another cluster",
}


class ModelServer:
    """The interface of an embedded etcd; members stop and start as in the simulator."""

    def __init__(self, network: Network, member: Member) -> None:
        self._network = network
        self._member = member
        self.port = self.endpoint = member.address

    def kill(self) -> None:
        self._network.stop(self._member)

    def halt(self) -> None:
        for link in self._links():
            for stream in list(link.streams):
                stream.fail(None)
        self.kill()

    def restart(self) -> None:
        self._network.start(self._member)
        self.resume()

    def pause(self) -> None:
        self._member.lag = FOR_EVER
        for link in self._links():
            self._network.block(link, ALL, ALL)

    def resume(self) -> None:
        self._member.lag = 0.0
        self._network.etcd.catch_up(self._member)
        for link in self._links():
            self._network.heal(link)

    def _links(self) -> list[Any]:
        return self._network.links(member=self._member)


class ModelCluster:
    """The interface of a cluster of several members."""

    def __init__(self, network: Network) -> None:
        self.members = [ModelServer(network, member) for member in network.etcd.members.values()]
        self.endpoints = tuple(member.endpoint for member in self.members)


class ModelUsers:
    """The interface of a server's users."""

    def __init__(self, etcd: SimEtcd) -> None:
        self._etcd = etcd
        self.endpoint = ADDRESSES[0]

    async def enable(self) -> None:
        self._etcd.users.enabled = True

    async def take_role(self) -> None:
        self._etcd.deny(True)

    async def give_role(self) -> None:
        self._etcd.deny(False)

    async def end_tokens(self) -> None:
        self._etcd.users.end_tokens()


class ModelProxy:
    """The interface of a proxy: it has its own address, and so its own links."""

    _numbers = itertools.count(1)

    def __init__(self, network: Network, address: str) -> None:
        self._network = network
        self.endpoint = f"proxy-{next(self._numbers)}:2379"
        network.aliases[self.endpoint] = address
        self._mode = Mode.PASS
        self.answered = 0

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.set(Mode.PASS)
        self.cut()

    @property
    def requested(self) -> int:
        return self._network.requests

    def _links(self) -> list[Any]:
        return [link for link in self._network.links() if link.address == self.endpoint]

    def set(self, mode: Mode) -> None:
        lossy, self._mode = self._mode in (Mode.DROP_ANSWERS, Mode.BLACK_HOLE), mode
        for link in self._links():
            if lossy:
                self._network.cut(link)
            self._network.heal(link)
            if mode is not Mode.PASS:
                requests = ALL if mode in (Mode.HOLD_REQUESTS, Mode.BLACK_HOLE) else ()
                self._network.block(link, requests, ALL if mode in (Mode.DROP_ANSWERS, Mode.BLACK_HOLE) else ())

    def drop_connections_silently(self) -> None:
        """Make the links dead until gRPC's pings close them, then restore them.

        A link stands for all connections to an address.
        """
        for link in self._links():
            self._network.block(link, ALL, ALL)
            self._network.loop.world_at(self._network.loop.now + PATIENCE + 0.001, self._network.heal, link)

    def cut(self) -> None:
        for link in self._links():
            self._network.cut(link)

    def cut_clients(self) -> None:
        """Cut the links, but keep their stuck messages, which still arrive."""
        for link in self._links():
            held, link.stuck = link.stuck, []
            self._network.cut(link)
            link.stuck = held


def cases() -> Iterator[Any]:
    for module in MODULES:
        for name, function in vars(module).items():
            if not name.startswith("test_") or name in NEEDS_A_REAL_SERVER:
                continue
            marks = [mark for mark in getattr(function, "pytestmark", []) if mark.name == "parametrize"]
            rows = [{}]
            for mark in marks:
                names = [n.strip() for n in mark.args[0].split(",")] if isinstance(mark.args[0], str) else mark.args[0]
                rows = [
                    {**row, **dict(zip(names, value if len(names) > 1 else [value], strict=True))}
                    for row in rows
                    for value in mark.args[1]
                ]
            for n, row in enumerate(rows):
                yield pytest.param(module, function, row, id=f"{name}-{n}" if marks else name)


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize(("module", "function", "given"), list(cases()))
def test_the_model_as_the_server(
    module: Any,
    function: Any,
    given: dict[str, Any],
    version: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    parameters = inspect.signature(function).parameters
    chance = random.Random(1)
    loop = VirtualLoop(chance)
    addresses = ADDRESSES if "cluster" in parameters else ADDRESSES[:1]
    quota = SMALL_QUOTA if "small_etcd" in parameters else None
    # Starting a server returns only after its election.
    etcd = SimEtcd(loop, addresses, version=version, election=0.0, quota=quota)
    network = Network(loop, etcd, chance)
    if hasattr(module, "TcpProxy"):
        monkeypatch.setattr(module, "TcpProxy", lambda address: ModelProxy(network, address))
    cluster = ModelCluster(network)
    servers = dict.fromkeys(("shared_etcd", "own_etcd", "small_etcd"), cluster.members[0])
    offered = {
        **servers,
        "cluster": cluster,
        "users": ModelUsers(etcd),
        "prefix": "t.",
        "monkeypatch": monkeypatch,
        "caplog": caplog,
        **given,
    }

    async def run() -> None:
        async with EtcdClient(EtcdConfig(addresses[:1])) as client:
            offered["client"] = client
            await function(**{name: offered[name] for name in parameters})

    context = contextvars.Context()
    context.run(source.set, SimSource(loop, chance))
    context.run(channels.set, network.channel)
    task = loop.spawn(Process("test"), run(), context)
    try:
        assert loop.run(task.done, 600.0), "the test has not ended in ten virtual minutes"
        task.result()
        assert loop.errors == []
    finally:
        loop.end()
