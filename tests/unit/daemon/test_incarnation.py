"""An incarnation of a daemon: its parts end together, and its node record is written in the end."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from dataclasses import replace
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from distop.daemon import incarnation as module
from distop.daemon.evaluator.evaluator_role import Evaluator
from distop.daemon.executor.executor_role import Executor
from distop.daemon.incarnation import DaemonSetup, Incarnation, run_all
from distop.daemon.record_lookup import find_tables
from distop.daemon.upkeep.history_pruning import HistoryPruner
from distop.errors import ClusterChanged, PermissionDenied
from distop.protocol import keys as K
from distop.protocol.behavior_declaration import Declaration
from distop.protocol.executor_nodes import NodeState
from distop.protocol.plan import Gate
from distop.protocol.records import Node, OperationRef, TableRecord
from distop.protocol.revisioned import Change
from distop.protocol.size_limits import DEFAULT
from distop.protocol.txn import KeyValue, Put, Txn, TxnResult
from distop.protocol.user_actions import Action, Actions
from distop.runtime import logs
from distop.settings import ExecutorConfig
from distop.storage.places import operation_path
from distop.store.connection_settings import EtcdConfig
from distop.worker.daemon_side.requests import RemovedStages
from tests.unit.support.modelclient import ModelClient
from tests.unit.support.modelfeed import ModelFeed, SilentFeed
from tests.unit.support.virtualtime import in_virtual_time

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence
    from pathlib import Path


async def test_the_first_part_that_fails_ends_all_others() -> None:
    ended = []

    async def unfinished() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0)
            ended.append("unfinished")

    async def fails() -> None:
        await asyncio.sleep(0)
        raise PermissionDenied("no")

    with pytest.raises(PermissionDenied):
        await run_all(unfinished(), fails(), unfinished())
    assert ended == ["unfinished", "unfinished"]


class Record:
    """A session that refuses the first ``refusals`` updates of the node record."""

    def __init__(self, refusals: int) -> None:
        self.refusals = refusals
        self.written: list[Node] = []

    async def update(self, value: bytes) -> None:
        await asyncio.sleep(0)
        if self.refusals:
            self.refusals -= 1
            raise PermissionDenied("etcd denies us permission for the node update")
        self.written.append(Node.decode(value))


def incarnation(folder: Path, record: Record) -> Any:
    one: Any = Incarnation(DaemonSetup(ExecutorConfig(EtcdConfig(), folder), "ann", logs.get()), None)  # type: ignore[arg-type]
    one.session, one.caught_up_at = record, 1
    one.executor = one.elections = SimpleNamespace(busy=False)
    one.evaluator = Evaluator(one)
    one.worker = SimpleNamespace(trouble="")
    return one


async def published(one: Any) -> None:
    """Wait until the current update has been written or refused."""
    if one.node_record._publishing is not None:
        await one.node_record._publishing


async def test_a_rejected_node_update_is_repeated_at_the_next_poll(tmp_path: Path) -> None:
    record = Record(refusals=1)
    one = incarnation(tmp_path, record)
    one.cluster.drains.add("ann")
    one.activity_changed()
    await published(one)
    assert record.written == []
    one.activity_changed()  # as each poll does
    await published(one)
    assert [node.state for node in record.written] == [NodeState.DRAINED]
    one.activity_changed()
    assert one.node_record._publishing is None, "it is written once"


async def test_a_rejected_count_of_releases_is_repeated_at_the_next_poll(tmp_path: Path) -> None:
    record = Record(refusals=2)
    one = incarnation(tmp_path, record)
    with pytest.raises(PermissionDenied):
        await one.announce_released()
    for _ in range(3):
        one.activity_changed()
        await published(one)
    assert [(node.released, node.state) for node in record.written] == [(1, NodeState.ACTIVE)]


async def test_a_count_of_releases_keeps_other_fields_of_the_node_record(tmp_path: Path) -> None:
    record = Record(refusals=0)
    one = incarnation(tmp_path, record)
    one.cluster.drains.add("ann")
    one.activity_changed()
    await published(one)
    await one.announce_released()
    assert [(node.released, node.state) for node in record.written] == [(0, NodeState.DRAINED), (1, NodeState.DRAINED)]


def test_a_poll_repeats_a_refused_update_of_the_node_record(tmp_path: Path) -> None:
    async def main() -> None:
        record = Record(refusals=1)
        one = incarnation(tmp_path, record)
        one.elections = SimpleNamespace(busy=False, poll=lambda: None)
        one.reconciler = SimpleNamespace(look_soon=lambda: None)
        one.cluster.drains.add("ann")
        one.activity_changed()
        await published(one)
        assert record.written == []
        polling = asyncio.ensure_future(one._poll())
        await asyncio.sleep(1.5 * one.config.poll)
        polling.cancel()
        assert [node.state for node in record.written] == [NodeState.DRAINED]

    in_virtual_time(main)


def test_an_executor_reports_that_it_is_drained_when_its_last_job_ends(tmp_path: Path) -> None:
    """`drain --wait` waits for it, and the next poll may be 30 seconds away."""

    async def main() -> None:
        record = Record(refusals=0)
        one = incarnation(tmp_path, record)
        over = asyncio.Event()
        jobs: Any = SimpleNamespace(run=lambda *_: over.wait(), disk_pause=lambda: 0.0)
        one.executor = executor = Executor(one, lambda *_: jobs)
        executor._start([(SimpleNamespace(ref=OperationRef("t", "noop", "", 1), plan=SimpleNamespace(count=2)), [0])])  # type: ignore[list-item]
        one.cluster.drains.add("ann")
        running = asyncio.ensure_future(executor.run())
        await asyncio.sleep(1.0)
        assert [node.state for node in record.written] == [NodeState.DRAINING]
        over.set()
        await asyncio.sleep(1.0)
        running.cancel()
        assert [node.state for node in record.written] == [NodeState.DRAINING, NodeState.DRAINED]

    in_virtual_time(main)


async def test_a_late_publication_does_not_overwrite_a_newer_declaration(tmp_path: Path) -> None:
    """The late executor may have an older release of the behavior."""
    one = incarnation(tmp_path, Record(refusals=0))
    client = one.client = ModelClient()
    key, newer = one.keys.behavior("noop"), Declaration("noop", resumable=True).encode()

    def late(txn: Txn) -> TxnResult:
        client.store.apply(Txn((), (Put(key, newer),)))
        return client.store.apply(txn)

    client.fates.append(late)
    await one._publish_declarations([Declaration("noop")])
    kv = client.store.get(key)
    assert kv is not None
    assert kv.value == newer


def test_each_poll_repeats_the_checks_for_events_that_watches_missed(tmp_path: Path) -> None:
    looked: Counter[str] = Counter()

    def look(what: str) -> Any:
        return lambda **_: looked.update([what])

    async def look_at_holds() -> None:
        looked.update(["holds"])

    async def main() -> None:
        one = incarnation(tmp_path, Record(refusals=0))
        one.client = ModelClient()
        one.elections = SimpleNamespace(busy=False, poll=look("elections"))
        one.evaluator = SimpleNamespace(busy=False, nodes_changed=look("policies"))
        one.executor = SimpleNamespace(busy=False, cluster_changed=look("open operations"))
        one.reconciler = SimpleNamespace(look_soon=look("former runs"))
        one.holds = SimpleNamespace(look=look_at_holds)
        one.cluster.apply([Change(KeyValue(one.keys.gate(OperationRef("t", "noop", "", 1)), Gate(1).encode(), 1))])
        polling = asyncio.ensure_future(one._poll())
        await asyncio.sleep(3.5 * one.config.poll)
        polling.cancel()
        assert looked == dict.fromkeys(["elections", "policies", "former runs", "holds", "open operations"], 3)
        assert one.client.requests == ["read"] * 3, "claims that name this incarnation"

    in_virtual_time(main)


@pytest.mark.parametrize("refused", ["holds", "claims"])
def test_a_rejected_step_of_a_poll_does_not_block_other_steps(tmp_path: Path, refused: str) -> None:
    looked: Counter[str] = Counter()

    def look(what: str) -> Any:
        async def asked(*_: Any) -> Any:
            looked.update([what])
            if what == refused:
                raise PermissionDenied("etcd denies permission")
            return SimpleNamespace(kvs=())

        return asked

    async def main() -> None:
        one = incarnation(tmp_path, Record(refusals=0))
        one.elections = SimpleNamespace(busy=False, poll=lambda: None)
        one.executor = SimpleNamespace(busy=False, cluster_changed=lambda **_: looked.update(["executor"]))
        one.reconciler = SimpleNamespace(look_soon=lambda: None)
        one.holds, one.client = SimpleNamespace(look=look("holds")), SimpleNamespace(list=look("claims"))
        one.cluster.apply([Change(KeyValue(one.keys.gate(OperationRef("t", "noop", "", 1)), Gate(1).encode(), 1))])
        polling = asyncio.ensure_future(one._poll())
        await asyncio.sleep(2.5 * one.config.poll)
        polling.cancel()
        assert looked == {"holds": 2, "claims": 2, "executor": 2}

    in_virtual_time(main)


def test_a_stop_ends_within_a_minute_though_jobs_and_child_do_not(tmp_path: Path) -> None:
    async def main() -> None:
        async def nothing() -> None:
            pass

        one = incarnation(tmp_path, Record(refusals=0))
        one.executor = one.worker = SimpleNamespace(stop=asyncio.sleep)  # as long as allowed
        one.elections, one.session = SimpleNamespace(stop=nothing), SimpleNamespace(close=nothing)
        async with asyncio.timeout(60.0):
            await one._stop_gracefully()

    in_virtual_time(main)


@pytest.mark.parametrize("count", [1, 2, DEFAULT.reads, DEFAULT.reads + 1])
async def test_all_requested_tables_are_found(tmp_path: Path, count: int) -> None:
    one = incarnation(tmp_path, Record(refusals=0))
    one.client = ModelClient()
    records = {f"t{n}": TableRecord(f"t{n}", "parquet", f"/data/t{n}") for n in range(count)}
    puts = (Put(one.keys.table(name), record.encode()) for name, record in records.items())
    for put in puts:
        one.client.store.apply(Txn((), (put,)))
    assert await find_tables(one, [*records, "not there"]) == {**records, "not there": None}


class EndlessSession:
    """A session that does not end."""

    def __init__(self, *_: Any, **__: Any) -> None:
        self.lost = asyncio.get_running_loop().create_future()

    async def start(self) -> None:
        pass

    async def update(self, value: bytes) -> None:
        pass


class Child:
    """A child with these types.

    ``forgotten``: the operations whose private directories were removed. ``swept``: those whose result files were.
    """

    trouble, stuck = "", False

    def __init__(self, *declarations: Declaration) -> None:
        self.declarations = list(declarations)
        self.forgotten: list[str] = []
        self.swept: list[str] = []

    async def start(self) -> list[Declaration]:
        return self.declarations

    def set_deadline(self, deadline: float) -> None:
        pass

    async def forget(self, op: str) -> None:
        self.forgotten.append(op)

    async def find_files(self, ops: Sequence[str], _: Any) -> list[str]:
        return list(ops)

    async def remove_files(self, ops: Sequence[str], _: Any, staging: Collection[str]) -> RemovedStages:
        self.swept += ops
        return RemovedStages()


def living(folder: Path, child: Child) -> Any:
    """An incarnation with this child, on the model of etcd."""
    one: Any = Incarnation(DaemonSetup(ExecutorConfig(EtcdConfig(), folder), "ann", logs.get()), ModelClient())  # type: ignore[arg-type]
    one.worker, one.clock = child, SimpleNamespace(ahead=0, unknown="", run=asyncio.Event().wait)
    one.lost = asyncio.get_running_loop().create_future()
    return one


@pytest.mark.parametrize("number", [0, 1, 2])
def test_an_incarnation_ends_if_one_of_its_watches_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, number: int
) -> None:
    """Otherwise it would serve and coordinate by old facts."""
    feeds: list[ModelFeed] = []

    def feed(*args: Any, **options: Any) -> ModelFeed:
        feeds.append(ModelFeed(*args, **options))
        return feeds[-1]

    monkeypatch.setattr(module, "Feed", feed)
    monkeypatch.setattr(module, "Session", EndlessSession)
    caplog.set_level(logging.INFO, "distop.actions")

    async def main() -> None:
        running = asyncio.ensure_future(living(tmp_path, Child())._live())
        await asyncio.sleep(1.0)
        assert len(feeds) == 3
        feeds[number].fail(ClusterChanged("etcd went back"))
        await asyncio.wait([running], timeout=1.0)
        assert isinstance(running.exception(), ClusterChanged)

    in_virtual_time(main)


@pytest.fixture
def _model_feeds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Incarnations watch the model of etcd, and their sessions do not end."""
    monkeypatch.setattr(module, "Feed", ModelFeed)
    monkeypatch.setattr(module, "Session", EndlessSession)


@pytest.mark.usefixtures("_model_feeds")
def test_an_incarnation_removes_directories_that_earlier_ones_left(tmp_path: Path) -> None:
    ref = OperationRef("t", "noop", "", 1)

    async def main() -> None:
        child = Child()
        one = living(tmp_path, child)
        (tmp_path / "ops" / operation_path(str(ref))).mkdir(parents=True)
        running = asyncio.ensure_future(one._live())
        await asyncio.sleep(one.config.poll / 2)
        running.cancel()
        assert child.forgotten == [str(ref)]

    in_virtual_time(main)


@pytest.mark.usefixtures("_model_feeds")
def test_an_incarnation_deletes_old_history_records_if_an_age_is_configured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ages: list[float] = []

    class Pruner(HistoryPruner):
        async def keep_young(self, age: float) -> None:
            ages.append(age)

    monkeypatch.setattr(module, "HistoryPruner", Pruner)

    async def main() -> None:
        one = living(tmp_path, Child())
        one.config = replace(one.config, history_age=7_200.0)
        running = asyncio.ensure_future(one._live())
        await asyncio.sleep(1.0)
        running.cancel()
        assert ages == [7_200.0]

    in_virtual_time(main)


@pytest.mark.usefixtures("_model_feeds")
def test_an_incarnation_removes_result_files_of_deleted_records(tmp_path: Path) -> None:
    ref = OperationRef("t", "large", "", 1)

    async def main() -> None:
        child = Child(Declaration("large", to_file=True))
        one = living(tmp_path, child)
        running = asyncio.ensure_future(one._live())
        await asyncio.sleep(1.0)
        one._sweeper.add([ref])
        await asyncio.sleep(1.0)
        running.cancel()
        assert child.swept == [str(ref)]

    in_virtual_time(main)


def test_an_action_whose_event_was_lost_is_logged_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Tables are listed again, but rarely, because there may be thousands."""
    listings: Counter[str] = Counter()

    class Counting(SilentFeed):
        def _list(self) -> None:
            listings.update([self.name])
            super()._list()

    monkeypatch.setattr(module, "Feed", Counting)
    monkeypatch.setattr(module, "Session", EndlessSession)
    caplog.set_level(logging.INFO, "distop.actions")

    async def main() -> None:
        one = living(tmp_path, Child())
        running = asyncio.ensure_future(one._live())
        await asyncio.sleep(1.0)
        done = Actions().and_then(Action("2025-01-01T00:00:00.000Z", "add_table", "me"))
        one.client.store.apply(Txn((), (Put(one.keys.table_actions("t"), done.encode()),)))
        await asyncio.sleep(2 * 3_600.0)
        running.cancel()
        assert [record.getMessage() for record in caplog.records if record.name == "distop.actions"] == [
            "add_table of t by me"
        ]
        assert listings[K.TABLE_ACTIONS] <= 30

    in_virtual_time(main, limit=3 * 3_600.0)
