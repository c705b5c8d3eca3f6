"""The cost of changes for a daemon that coordinates many tables: only changed tables are checked."""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import replace
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from distop.daemon.coordinator.coordinator_role import Coordinator
from distop.daemon.elections import Elections
from distop.daemon.evaluator.evaluator_role import Evaluator
from distop.daemon.executor.executor_role import Executor
from distop.daemon.incarnation import DaemonSetup, Incarnation
from distop.decide.view import ClusterView
from distop.protocol import keys as K
from distop.protocol.dependencies import Hold, HoldState
from distop.protocol.plan import Gate
from distop.protocol.records import Node, OperationRef, Phase
from distop.protocol.revisioned import Change
from distop.protocol.txn import KeyValue, Put, Txn
from distop.runtime import logs
from distop.settings import ExecutorConfig
from distop.store.connection_settings import EtcdConfig
from distop.store.watch import Batch
from tests.unit.support.modelclient import ModelClient

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence
    from pathlib import Path

TABLES = 40
NODE = Node("ann", "host", 2, ("noop",))


def ref(number: int, instance: int = 1) -> OperationRef:
    return OperationRef(f"t{number:02d}", "noop", "", instance)


class Daemon(Incarnation):
    """Coordinates one operation on each table; the test passes it the events of watches."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch, client: Any = None) -> None:
        client = client if client is not None else ModelClient()
        client.transport = SimpleNamespace(identity=SimpleNamespace(revision=0))
        super().__init__(DaemonSetup(ExecutorConfig(EtcdConfig(), folder), "ann", logs.get("distop.test")), client)
        self.store = client.store
        self.types = frozenset({"noop"})
        self.worker: Any = SimpleNamespace(trouble="")
        self.lost = asyncio.get_running_loop().create_future()
        self.executor, self.elections, self.evaluator = Executor(self), Elections(self), Evaluator(self)
        self.node_record.begin(self.types)
        self.caught_up_at = 1
        self._families = [families for _, _, families in self._watched()]
        self.looked_at: Counter[str] = Counter()
        """Checks whether this node coordinates a table, by table."""
        self.informed: Counter[Coordinator] = Counter()
        """Notifications of changed nodes, by role."""
        self.capable = 0
        """Lookups of the nodes that may serve an operation."""
        self._count(monkeypatch)

    def _count(self, monkeypatch: pytest.MonkeyPatch) -> None:
        informed, capable = Coordinator.cluster_changed, ClusterView.capable

        def count_informed(role: Coordinator) -> None:
            self.informed[role] += 1
            informed(role)

        def count_capable(view: ClusterView, *args: Any, **named: Any) -> list[str]:
            self.capable += 1
            return capable(view, *args, **named)

        async def start(role: Coordinator) -> None:
            """Without watches."""

        monkeypatch.setattr(Coordinator, "cluster_changed", count_informed)
        monkeypatch.setattr(ClusterView, "capable", count_capable)
        monkeypatch.setattr(Coordinator, "start", start)

    def serves(self, type_name: str, tables: Sequence[str]) -> bool:
        self.looked_at[tables[0]] += 1
        return super().serves(type_name, tables)

    def see(self, key: str, value: bytes | None, mod: int = 0) -> None:
        """An event of a watch."""
        family = key.split(".")[0]
        families = next(one for one in self._families if family in one)
        kv = KeyValue(key, value or b"", mod or self.store.revision)
        self._folder(families)(Batch(kv.mod_revision, (Change(kv, value is None),)))

    async def settle(self) -> None:
        """Win the elections that are sought, and pass on their events."""
        while self.elections._work:
            await asyncio.wait(self.elections._work.values())
            await asyncio.sleep(0)
        for kv in self.store.range(*self.keys.family(K.COORDINATOR)):
            self.see(kv.key, kv.value, kv.mod_revision)
        await asyncio.sleep(0)
        self.forget()

    def forget(self) -> None:
        self.looked_at.clear()
        self.informed.clear()
        self.capable = 0


@pytest.fixture
async def daemon(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Daemon]:
    one = Daemon(tmp_path, monkeypatch)
    node = Put(one.keys.node(one.incarnation), NODE.encode())
    one.store.apply(Txn((), (node,)))
    one.see(node.key, node.value)
    for number in range(TABLES):
        one.see(one.keys.pending(ref(number)), Phase.PLANNING.encode())
    await one.settle()
    assert len(one.elections._roles) == TABLES
    yield one
    one.elections.close()


@pytest.mark.parametrize("change", ["gate", "pending", "election"])
async def test_only_the_changed_tables_are_checked(daemon: Daemon, change: str) -> None:
    """Each change notified all roles and sorted all tables.

    With 3,000 tables that took 1.2 s of CPU time for each operation, and sessions were lost.
    """
    for number in (3, 7, 11):
        if change == "gate":
            daemon.see(daemon.keys.gate(ref(number)), Gate(2).encode())
        elif change == "pending":
            daemon.see(daemon.keys.pending(ref(number, 2)), Phase.WAITING.encode())
        else:
            daemon.see(daemon.keys.coordinator(f"t{number:02d}", "noop"), b"another")
    await asyncio.sleep(0)
    assert daemon.looked_at.keys() <= {"t03", "t07", "t11"}
    assert daemon.looked_at.total() <= 6
    assert not daemon.informed


async def test_a_won_election_causes_a_check_of_its_own_table_only(daemon: Daemon) -> None:
    daemon.see(daemon.keys.pending(OperationRef("new", "noop", "", 1)), Phase.PLANNING.encode())
    await asyncio.wait(daemon.elections._work.values())
    await asyncio.sleep(0)
    assert ("new", "noop") in daemon.elections._roles
    assert daemon.looked_at.keys() == {"new"}
    assert not daemon.informed


async def test_each_role_is_notified_once_of_changed_nodes_but_not_of_their_progress(daemon: Daemon) -> None:
    daemon.see(daemon.keys.node("inc-2"), NODE.encode())
    assert len(daemon.looked_at) == TABLES
    assert daemon.looked_at.total() == TABLES
    assert len(daemon.informed) == TABLES
    assert daemon.informed.total() == TABLES
    daemon.forget()
    changed = replace(NODE, released=1, doing={"t00/noop/1": "reads"}, skipped={"*": "no"})
    daemon.see(daemon.keys.node("inc-2"), changed.encode())
    assert not daemon.looked_at
    assert not daemon.informed
    daemon.see(daemon.keys.node("inc-2"), replace(NODE, failing={"noop": "no memory"}).encode())
    assert len(daemon.informed) == TABLES


async def test_operations_of_one_job_are_assigned_again_when_nodes_change(daemon: Daemon) -> None:
    for number in range(TABLES):
        daemon.see(daemon.keys.gate(ref(number)), Gate(1).encode())
    daemon.forget()
    daemon.see(daemon.keys.gate(ref(3)), None)
    daemon.see(daemon.keys.gate(ref(3, 2)), Gate(1).encode())
    assert daemon.capable == 0
    daemon.see(daemon.keys.node("inc-2"), NODE.encode())
    assert daemon.capable >= TABLES


async def test_a_changed_hold_causes_no_check_of_elections(daemon: Daemon) -> None:
    daemon.see(daemon.keys.hold("graph-1"), Hold("graph", HoldState.HELD, "", {}).encode())
    daemon.see(daemon.keys.hold("graph-1"), None)
    assert not daemon.looked_at
    assert not daemon.informed


async def test_the_end_of_an_operation_notifies_all_roles_of_its_table(
    daemon: Daemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may have excluded their operations."""
    informed: list[Coordinator] = []
    monkeypatch.setattr(Coordinator, "table_changed", lambda role: informed.append(role))
    daemon.types = frozenset({"noop", "other"})
    daemon.see(daemon.keys.pending(OperationRef("t05", "other", "", 2)), Phase.WAITING.encode())
    await daemon.settle()
    informed.clear()
    daemon.see(daemon.keys.pending(ref(5)), None)
    roles = daemon.elections._roles
    assert informed == [roles["t05", "noop"], roles["t05", "other"]]
