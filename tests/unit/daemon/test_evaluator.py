"""The evaluator of policies in one incarnation: its elections, its looks at tables, drains and failures."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from distop.clock import time as clock
from distop.daemon.evaluator import evaluator_role as module
from distop.daemon.evaluator.evaluator_role import ELECTIONS_AT_ONCE, FIRST_LOOKS_A_SECOND, VERSIONS_A_SECOND, Evaluator
from distop.daemon.evaluator.table_look import NextLook
from distop.daemon.incarnation import DaemonSetup, Incarnation
from distop.errors import ClusterChanged, PermissionDenied
from distop.protocol.executor_nodes import NodeState
from distop.protocol.plan import Gate
from distop.protocol.policy import Policy
from distop.protocol.records import Node, OperationRef
from distop.protocol.revisioned import Change
from distop.protocol.txn import Delete, KeyValue, Put, Txn, TxnResult
from distop.runtime import logs
from distop.settings import ExecutorConfig
from distop.store.connection_settings import EtcdConfig
from tests.unit.support.modelclient import ModelClient
from tests.unit.support.modelfeed import ModelFeed
from tests.unit.support.virtualtime import in_virtual_time

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable
    from pathlib import Path

NODE = Node("ann", "host", 1, ("noop",))


class Place:
    """An incarnation with an evaluator on the model of etcd. ``looks``: the tables whose looks started, in order."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.client = ModelClient()
        config = ExecutorConfig(EtcdConfig(), folder)
        one: Any = Incarnation(DaemonSetup(config, "ann", logs.get("distop.test")), self.client)  # type: ignore[arg-type]
        self.one, self.keys = one, one.keys
        self.states: list[NodeState] = []
        one.session, one.caught_up_at, one.worker = SimpleNamespace(update=self._update), 1, SimpleNamespace(trouble="")
        one.lost = asyncio.get_running_loop().create_future()
        one.executor = SimpleNamespace(busy=False, cluster_changed=lambda **_: None)
        one.elections = SimpleNamespace(busy=False, poll=lambda: None)
        one.reconciler = SimpleNamespace(look_soon=lambda: None)
        self.feeds: list[ModelFeed] = []
        self.looks: list[str] = []
        self.looking: asyncio.Event | None = None
        """If set, looks wait for it."""
        self.versions = False
        """Whether the policies of all tables wait for versions."""
        self.of_versions: set[str] | None = None
        """If set, only the policies of these tables do."""
        self.times: list[float] = []
        """The times of the looks."""

        def feed(*args: Any, **options: Any) -> ModelFeed:
            self.feeds.append(ModelFeed(*args, **options))
            return self.feeds[-1]

        def look(_: Any, table: str, fence: int) -> Any:
            return SimpleNamespace(look=lambda: self._look(table))

        monkeypatch.setattr(module, "Feed", feed)
        monkeypatch.setattr(module, "TableLook", look)
        self.put(self.keys.node(one.incarnation), NODE.encode())
        node = KeyValue(self.keys.node(one.incarnation), NODE.encode(), self.client.store.revision)
        one.cluster.apply([Change(node)])
        self.evaluator: Evaluator = Evaluator(one)
        one.evaluator = self.evaluator
        self.evaluator.marked()

    async def _update(self, value: bytes) -> None:
        self.states.append(Node.decode(value).state)

    async def _look(self, table: str) -> NextLook:
        self.looks.append(table)
        self.times.append(clock.monotonic())
        if self.looking is not None:
            await self.looking.wait()
        return NextLook(polls=self.versions if self.of_versions is None else table in self.of_versions)

    def put(self, key: str, value: bytes) -> None:
        self.client.store.apply(Txn((), (Put(key, value),)))

    def policy(self, table: str, every: float = 60.0) -> None:
        self.put(self.keys.policy(table, "one"), Policy("noop", "u", every=every).encode())

    def drain(self, drained: bool = True) -> None:
        (self.one.cluster.drains.add if drained else self.one.cluster.drains.discard)("ann")
        self.evaluator.nodes_changed()

    def elected(self, table: str) -> bool:
        """Whether etcd names this incarnation as the evaluator."""
        kv = self.client.store.get(self.keys.policy_evaluator(table))
        return kv is not None and kv.value.decode() == self.one.incarnation


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    def running(work: Callable[[Place], Awaitable[Any]]) -> None:
        async def main() -> None:
            place = Place(tmp_path, monkeypatch)
            await work(place)
            place.evaluator.close()
            await place.evaluator.closed()

        in_virtual_time(main)

    return running


def test_a_node_is_drained_as_soon_as_its_last_look_has_ended(run: Any) -> None:
    """`drain --wait` waits for it, and the next poll may be 30 seconds away."""

    async def work(place: Place) -> None:
        place.looking = asyncio.Event()
        place.policy("t")
        await asyncio.sleep(1.0)
        assert place.evaluator.busy
        place.one.cluster.drains.add("ann")
        place.one.activity_changed()
        await asyncio.sleep(1.0)
        assert place.states == [NodeState.DRAINING]
        place.evaluator.nodes_changed()
        await asyncio.sleep(1.0)
        assert place.states == [NodeState.DRAINING, NodeState.DRAINED]
        assert not place.elected("t")

    run(work)


def test_the_looks_at_many_tables_are_spread(run: Any) -> None:
    """A daemon with ten thousand tables would be busy for minutes after its start, and again at each poll."""

    async def work(place: Place) -> None:
        place.versions = True
        tables = [f"t{n:03d}" for n in range(200)]
        for table in tables:
            place.policy(table)
        await asyncio.sleep(2 * len(tables) / VERSIONS_A_SECOND)
        assert sorted(place.looks[: len(tables)]) == tables, "each table is looked at once, and then again"
        assert most_in_a_second(place.times[: len(tables)]) <= FIRST_LOOKS_A_SECOND + 1
        assert sorted(place.looks[len(tables) : 2 * len(tables)]) == tables
        assert most_in_a_second(place.times[len(tables) :]) <= VERSIONS_A_SECOND + 1

    run(work)


def test_a_table_with_a_waiting_event_is_looked_at_first(run: Any) -> None:
    async def work(place: Place) -> None:
        place.put(place.keys.policy_event("zzz", "one"), b"{}")
        tables = [*(f"t{n:03d}" for n in range(100)), "zzz"]
        for table in tables:
            place.policy(table)
        await asyncio.sleep(len(tables) / FIRST_LOOKS_A_SECOND + 1.0)
        assert sorted(place.looks) == tables
        assert place.looks.index("zzz") < 50
        place.put(place.keys.policy_event("t050", "one"), b"{}")
        await asyncio.sleep(0.1)
        assert place.looks[-1] == "t050"

    run(work)


def test_looks_for_other_reasons_do_not_delay_the_polling_of_versions(run: Any) -> None:
    """Each look took one of four places a second: after a minute of events, versions were noticed minutes late."""

    async def work(place: Place) -> None:
        poll, place.of_versions = place.one.config.poll, {"versions"}
        others = [f"t{n:03d}" for n in range(100)]
        for table in ("versions", *others):
            place.policy(table)
        await asyncio.sleep(FIRST_LOOKS_A_SECOND)
        place.looks.clear()
        for n in range(600):
            for table in ("versions", *others[:10]) if n % 2 else others[:10]:
                place.put(place.keys.policy_event(table, "one"), b"%d" % n)
            await asyncio.sleep(0.1)
        assert len(place.looks) > 6_000
        place.looks.clear()
        await asyncio.sleep(3 * poll + 1.0)
        assert place.looks[-3:] == ["versions"] * 3

    run(work)


def test_tables_that_left_do_not_delay_the_polling_of_versions(run: Any) -> None:
    async def work(place: Place) -> None:
        place.versions = True
        tables = [f"t{n:03d}" for n in range(400)]
        for table in tables:
            place.policy(table)
        await asyncio.sleep(len(tables) / VERSIONS_A_SECOND)
        for table in tables[1:]:
            place.client.store.apply(Txn((), (Delete(place.keys.policy(table, "one")),)))
        await asyncio.sleep(1.0)
        place.looks.clear()
        await asyncio.sleep(2 * place.one.config.poll)
        assert place.looks == [tables[0]] * 2

    run(work)


def most_in_a_second(times: list[float]) -> int:
    return max(sum(one <= other < one + 1.0 for other in times) for one in times)


def test_a_drained_node_starts_no_look(run: Any) -> None:
    """It resigns from few elections at once, so it still has some for a while."""

    async def work(place: Place) -> None:
        tables = [f"t{n:02d}" for n in range(2 * ELECTIONS_AT_ONCE)]
        for table in tables:
            place.policy(table)
        await asyncio.sleep(1.0)
        assert sorted({*place.looks}) == tables
        held = asyncio.Event()

        async def late(txn: Txn) -> TxnResult:
            await held.wait()
            return place.client.store.apply(txn)

        place.client.usual = late
        place.looks.clear()
        place.drain()
        for table in tables:
            place.policy(table, every=90.0)
        await asyncio.sleep(1.0)
        assert place.evaluator.tables == ELECTIONS_AT_ONCE
        assert place.looks == []
        place.drain(False)
        held.set()
        await asyncio.sleep(2 * place.one.config.poll)
        assert {*place.looks} == {*tables}, "each table is looked at after the drain"

    run(work)


@pytest.mark.parametrize("removed", [False, True])
def test_a_rejected_resignation_is_repeated_at_the_next_poll(run: Any, removed: bool) -> None:
    """Otherwise no other node could evaluate the table while this one lives."""

    async def work(place: Place) -> None:
        place.policy("t")
        await asyncio.sleep(1.0)
        assert place.elected("t")

        def denied(_: Txn) -> TxnResult:
            raise PermissionDenied("etcd denies permission")

        place.client.fates.append(denied)
        if removed:
            place.client.store.apply(Txn((), (Delete(place.keys.policy("t", "one")),)))
        else:
            place.drain()
        await asyncio.sleep(1.0)
        assert place.elected("t")
        place.evaluator.nodes_changed()  # as each poll does
        await asyncio.sleep(1.0)
        assert not place.elected("t")

    run(work)


def test_a_node_is_elected_again_if_its_drain_ends_during_the_resignation(run: Any) -> None:
    """It took the election for its own, and never saw that its resignation deleted it."""

    async def work(place: Place) -> None:
        place.policy("t")
        await asyncio.sleep(1.0)
        held = asyncio.Event()

        async def late(txn: Txn) -> TxnResult:
            await held.wait()
            return place.client.store.apply(txn)

        place.client.fates.append(late)
        place.drain()
        await asyncio.sleep(1.0)
        place.drain(False)
        await asyncio.sleep(1.0)
        held.set()
        await asyncio.sleep(1.0)
        assert place.elected("t")
        assert place.evaluator._mine == {"t": place.client.store.mod(place.keys.policy_evaluator("t"))}

    run(work)


@pytest.mark.parametrize("error", [PermissionDenied("etcd denies permission"), ValueError("unexpected")])
def test_a_failed_election_blocks_no_other_table_and_no_step_of_a_poll(
    run: Any, caplog: pytest.LogCaptureFixture, error: Exception
) -> None:
    async def work(place: Place) -> None:
        key, holds = place.keys.policy_evaluator("bad"), []

        def rejected(txn: Txn) -> TxnResult:
            if any(one.key == key for one in txn.compares):
                raise error
            return place.client.store.apply(txn)

        async def look() -> None:
            holds.append("looked")

        place.client.usual = rejected
        place.one.holds = SimpleNamespace(look=look)
        gate = KeyValue(place.keys.gate(OperationRef("t", "noop", "", 1)), Gate(1).encode(), 1)
        place.one.cluster.apply([Change(gate)])
        place.policy("bad")
        place.policy("good")
        polling = asyncio.ensure_future(place.one._poll())
        await asyncio.sleep(2.5 * place.one.config.poll)
        assert place.elected("good")
        assert not place.elected("bad")
        assert holds == ["looked"] * 2
        place.client.usual = place.client.store.apply
        await asyncio.sleep(1.5 * place.one.config.poll)
        assert place.elected("bad")
        polling.cancel()

    run(work)
    assert any("the evaluator of table bad" in record.getMessage() for record in caplog.records)


def test_an_incarnation_ends_if_the_watch_of_policies_fails(run: Any) -> None:
    async def work(place: Place) -> None:
        await asyncio.sleep(1.0)
        (feed,) = place.feeds
        feed.fail(ClusterChanged("etcd went back"))
        await asyncio.sleep(1.0)
        assert isinstance(place.one.lost.exception(), ClusterChanged)

    run(work)


def test_a_close_ends_a_look_and_an_election_that_do_not_end(run: Any) -> None:
    """The close of an incarnation waits for them before it ends the child."""

    async def work(place: Place) -> None:
        place.looking = asyncio.Event()
        place.policy("looking")
        await asyncio.sleep(1.0)

        async def endless(_: Txn) -> TxnResult:
            await asyncio.Event().wait()
            raise AssertionError

        place.client.usual = endless
        place.policy("electing")
        await asyncio.sleep(1.0)
        place.evaluator.close()
        async with asyncio.timeout(1.0):
            await place.evaluator.closed()
        assert not place.evaluator.busy

    run(work)
