"""Three simulated etcd members, and a client of the first one."""

from __future__ import annotations

import contextvars
import random
from typing import TYPE_CHECKING, Any

from distop.clock import source
from distop.store.client import EtcdClient
from distop.store.connection_settings import EtcdConfig
from distop.store.transport import channels
from tests.simulator.network import Network
from tests.simulator.process_clock import SimSource
from tests.simulator.sim_etcd import SimEtcd
from tests.simulator.virtual_loop import Process, VirtualLoop

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from tests.simulator.quorum import Member

ADDRESSES = tuple(f"etcd-{n}:2379" for n in range(3))
ELECTION = 1.0


class SimCluster:
    """Three simulated etcd members, and a client of the first one."""

    def __init__(self) -> None:
        chance = random.Random(1)
        self.loop = VirtualLoop(chance)
        self.etcd = SimEtcd(self.loop, ADDRESSES, election=ELECTION)
        self.network = Network(self.loop, self.etcd, chance)
        self.members: list[Member] = list(self.etcd.members.values())
        self._context = contextvars.Context()
        self._context.run(source.set, SimSource(self.loop, chance))
        self._context.run(channels.set, self.network.channel)

    def run(self, work: Callable[[EtcdClient], Awaitable[None]], **config: Any) -> None:
        """Run ``work`` with a connected client. ``config``: its settings besides the endpoint."""

        async def connected() -> None:
            async with EtcdClient(EtcdConfig(ADDRESSES[:1], **config)) as client:
                await work(client)

        task = self.loop.spawn(Process("test"), connected(), self._context)
        assert self.loop.run(task.done, 600.0)
        task.result()

    def sent_on_watches(self, most: int, counts: Callable[[Any], bool] = lambda asked: True) -> list[float]:
        """The times at which messages for which ``counts`` is true are sent on watches, from now on.

        Fails after ``most`` messages, since a tight loop would not advance virtual time.
        """
        when: list[float] = []

        def sending(process: Process, path: str, asked: object) -> float:
            if path.endswith("/Watch") and counts(asked):
                when.append(self.loop.now)
                assert len(when) <= most, "too many watches or progress requests"
            return 0.0

        self.network.sending = sending
        return when

    def end_watches(self, reason: str) -> None:
        """Cancel all watches on the server with this reason; the streams stay open."""
        server = self.etcd.watching
        for watch in [one for some in server._watches.values() for one in some]:
            watch.send(server._response(watch.member, canceled=True, cancel_reason=reason))
            server.close(watch)

    def stop(self, *numbers: int) -> None:
        for number in numbers:
            self.network.stop(self.members[number])

    def start(self, *numbers: int) -> None:
        for number in numbers:
            self.network.start(self.members[number])
