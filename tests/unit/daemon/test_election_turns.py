"""Elections that a daemon seeks and gives up, on the model store and in virtual time."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from distop.daemon.elections import ABANDONED_AT_ONCE, RACE_DELAY
from distop.decide import work_shares
from distop.errors import EtcdUnavailable
from distop.protocol import keys as K
from distop.protocol.behavior_declaration import Declaration
from distop.protocol.records import OperationRef, Phase
from distop.protocol.txn import Put, Txn, TxnResult
from tests.unit.daemon.coordinating import BusyClient
from tests.unit.daemon.test_elections import NODE, Daemon
from tests.unit.support.virtualtime import in_virtual_time

if TYPE_CHECKING:
    from pathlib import Path

    from distop.daemon.coordinator.coordinator_role import Coordinator

Subject = tuple[str, str]
POLL = 30.0


class Cluster:
    """A daemon that serves ``noop``, and gets all events of etcd while it ``sees``."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.client = BusyClient()
        self.daemon = Daemon(folder, monkeypatch, self.client)
        self.store, self.keys, self.elections = self.client.store, self.daemon.keys, self.daemon.elections
        self.sees = True
        self._seen = 1
        self.put(self.keys.node(self.daemon.incarnation), NODE.encode())

    def put(self, key: str, value: bytes) -> None:
        self.store.apply(Txn((), (Put(key, value),)))

    def pending(self, table: str, type_name: str = "noop", phase: Phase = Phase.PLANNING) -> Subject:
        """An operation of the type on the table needs a coordinator."""
        ref = OperationRef(table, type_name, "", 1)
        self.put(self.keys.of(ref, "state"), b"running")
        self.put(self.keys.pending(ref), phase.encode())
        return table, type_name

    def join(self, incarnation: str, **more: Any) -> None:
        self.put(self.keys.node(incarnation), replace(NODE, executor=f"ex-{incarnation}", **more).encode())

    def where_it_is_first(self) -> str:
        """A table whose election this daemon seeks before all other nodes."""
        nodes = sorted(self.daemon.cluster.nodes)
        names = (f"t{n}" for n in range(1000))
        return next(name for name in names if not work_shares.turn(nodes, self.daemon.incarnation, f"{name}/noop"))

    def role(self, subject: Subject) -> Coordinator | None:
        return self.elections._roles.get(subject)

    def fence(self, subject: Subject) -> int:
        """The fence of the role here if it holds the election, else 0."""
        role, mod = self.role(subject), self.store.mod(self.keys.coordinator(*subject))
        return mod if role is not None and role.fence == mod else 0

    async def until_elected(self, subject: Subject, within: float = 60.0) -> Coordinator:
        async with asyncio.timeout(within):
            while not self.fence(subject):  # noqa: ASYNC110  # it is virtual time
                await asyncio.sleep(0.01)
        role = self.role(subject)
        assert role is not None
        return role

    async def live(self) -> None:
        """Pass on the events of its watches, and poll."""
        families = {K.NODE, K.OPEN, K.PENDING, K.COORDINATOR}
        polled = asyncio.get_running_loop().time()
        while True:
            await asyncio.sleep(0.01)
            if self.sees:
                changed = self.store.between(self._seen + 1, self.store.revision)
                self._seen = self.store.revision
                for revision, changes in changed:
                    for one in changes:
                        if one.kv.key.split(".")[0] in families:
                            self.daemon.see(one.kv.key, None if one.deleted else one.kv.value, revision)
            if (now := asyncio.get_running_loop().time()) - polled >= POLL:
                polled = now
                self.elections.poll()


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    def running(work: Callable[[Cluster], Awaitable[Any]]) -> None:
        async def main() -> None:
            one = Cluster(tmp_path, monkeypatch)
            living = asyncio.ensure_future(one.live())
            await asyncio.sleep(0.1)
            await work(one)
            living.cancel()
            one.elections.close()
            assert not one.client.busy, "it asks etcd without a pause"

        in_virtual_time(main)

    return running


def test_a_type_declared_without_code_is_coordinated(run: Any) -> None:
    """Actors run its jobs, and no executor offers it."""

    async def work(one: Cluster) -> None:
        one.put(one.keys.behavior("by-hand"), Declaration("by-hand", code=False, completes=False).encode())
        await one.until_elected(one.pending("t", "by-hand"))

    run(work)


def test_an_election_is_sought_again_after_etcd_is_reachable(run: Any) -> None:
    async def work(one: Cluster) -> None:
        def away(txn: Txn) -> TxnResult:
            raise EtcdUnavailable("etcd is away")

        one.client.usual = away
        subject = one.pending("t")
        await asyncio.sleep(20.0)
        assert one.client.requests.count("elect") > 1
        one.client.usual = one.store.apply
        await one.until_elected(subject)

    run(work)


# -------------------------------------------------------------------- giving up


def test_a_node_resigns_for_failed_calls_at_most_once_a_minute(run: Any) -> None:
    """Work that fails on every node would move between them forever."""

    async def work(one: Cluster) -> None:
        one.join("other")
        await asyncio.sleep(0.1)
        subject = one.pending(one.where_it_is_first())
        role = await one.until_elected(subject)
        role._callbacks.trouble()
        assert one.role(subject) is None
        role = await one.until_elected(subject)  # the other node does not seek it
        one.elections.poll()
        role._callbacks.trouble()
        assert one.role(subject) is role
        await asyncio.sleep(3 * POLL)
        role._callbacks.trouble()
        assert one.role(subject) is None

    run(work)


@pytest.mark.parametrize("polls", [False, True])
def test_a_node_that_resigned_for_other_labels_tries_after_all_others(run: Any, polls: bool) -> None:
    async def work(one: Cluster) -> None:
        one.join("other")
        await asyncio.sleep(0.1)
        subject = one.pending(one.where_it_is_first())
        began = asyncio.get_running_loop().time()
        role = await one.until_elected(subject)
        assert asyncio.get_running_loop().time() - began < RACE_DELAY, "it is the first"
        assert one.elections._pass_on(subject, role.fence)
        if polls:
            one.elections.poll()
        await asyncio.sleep(1.5 * RACE_DELAY)  # the other node has had its turn
        assert one.client.requests.count("elect") == 1
        await one.until_elected(subject)

    run(work)


def test_a_resigned_election_is_not_taken_for_a_held_one(run: Any) -> None:
    """The view still shows it for a while, but no write under it would succeed."""

    async def work(one: Cluster) -> None:
        one.join("other")
        await asyncio.sleep(0.1)
        subject = one.pending(one.where_it_is_first())
        role = await one.until_elected(subject)
        await asyncio.sleep(0.1)
        one.sees = False
        one.elections._pass_on(subject, role.fence)
        await asyncio.sleep(RACE_DELAY / 2)
        assert one.store.mod(one.keys.coordinator(*subject)) == 0
        one.elections.poll()
        again = await one.until_elected(subject)
        assert again.fence > role.fence

    run(work)


# -------------------------------------------------- types without code on any node


def test_any_daemon_ends_abandoned_operations(run: Any) -> None:
    async def work(one: Cluster) -> None:
        await one.until_elected(one.pending("t", "gone", Phase.CANCELLING), within=180.0)

    run(work)


def test_no_daemon_ends_an_abandoned_operation_within_a_minute(run: Any) -> None:
    """A node with the code of the type may only be restarting."""

    async def work(one: Cluster) -> None:
        subject = one.pending("t", "gone", Phase.CANCELLING)
        await asyncio.sleep(50.0)
        assert "elect" not in one.client.requests
        await one.until_elected(subject, within=130.0)

    run(work)


def test_the_pending_key_of_no_operation_is_deleted_without_an_election(run: Any) -> None:
    """The key is forged. A coordinator would find nothing to end, and the key would remain."""

    async def work(one: Cluster) -> None:
        key = one.keys.pending(OperationRef("t", "gone", "", 1))
        one.put(key, Phase.CANCELLING.encode())
        await asyncio.sleep(180.0)
        assert one.store.get(key) is None
        assert one.client.requests.count("stray") == 1
        assert "elect" not in one.client.requests

    run(work)


def test_each_of_many_abandoned_types_gets_a_turn(run: Any) -> None:
    async def work(one: Cluster) -> None:
        subjects = [one.pending("t", f"gone-{n}", Phase.CANCELLING) for n in range(3 * ABANDONED_AT_ONCE)]
        held, longest = Counter[Subject](), Counter[Subject]()
        for _ in range(150):
            await asyncio.sleep(1.0)
            one.elections.cluster_changed()  # something changes all the time
            mine = [subject for subject in subjects if one.role(subject) is not None]
            assert len(mine) <= ABANDONED_AT_ONCE
            held = Counter({subject: held[subject] + 1 for subject in mine})
            longest |= held
        assert longest.keys() == set(subjects)
        assert min(longest.values()) >= 5

    run(work)
