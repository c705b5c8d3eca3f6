"""When a daemon acts on holds: it measures time since it saw them written."""

from __future__ import annotations

import asyncio
import logging
from types import SimpleNamespace
from typing import Any

import pytest

from distop.client.graphs import requests
from distop.daemon.rejected_writes import PAUSE, RejectedWrites
from distop.daemon.upkeep import abandoned_holds
from distop.daemon.upkeep.abandoned_holds import HoldKeeper
from distop.daemon.upkeep.prepared_verification import Verifying
from distop.errors import MalformedRequest
from distop.protocol import prepared_operations as p
from distop.protocol import user_transaction
from distop.protocol.dependencies import Hold, HoldState
from distop.protocol.executor_nodes import ALL, NodeState
from distop.protocol.revisioned import Seen
from distop.protocol.size_limits import DEFAULT
from distop.protocol.txn import ENVELOPE_BYTES, MAX_REQUEST_BYTES, Put, Txn, request_bytes
from distop.runtime import logs
from distop.services.submission.graph_start import in_one
from tests.unit.support.model_submission import KEYS, TABLE, Etcd, noop

TERMS = p.PreparedTerms("x", "t/noop/1", "", "orders", 60.0)


class Daemon:
    """A daemon among these nodes, with a clock that the test sets."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, **nodes: NodeState) -> None:
        self.now = 0.0
        self.incarnation, self.log = "e1", logging.getLogger("distop.test")
        self.config, self.limits = SimpleNamespace(poll=30.0), DEFAULT
        states = nodes or {"e1": NodeState.ACTIVE}
        found = {name: SimpleNamespace(state=state, serves=ALL) for name, state in states.items()}
        self.cluster: Any = SimpleNamespace(holds={}, nodes=found)
        monkeypatch.setattr(abandoned_holds, "time", SimpleNamespace(monotonic=lambda: self.now))
        self.begun: list[tuple[str, int]] = []
        self.may_begin = 1_000
        monkeypatch.setattr(Verifying, "begin", lambda _, id_, terms, mod: self._begin(id_, mod))
        self.keeper = HoldKeeper(self)  # type: ignore[arg-type]

    def _begin(self, id_: str, mod: int) -> bool:
        if len(self.begun) >= self.may_begin:
            return False
        self.begun.append((id_, mod))
        return True

    def admits(self, type_name: str, tables: Any) -> bool:
        return True

    def sees(
        self, mod: int, terms: p.PreparedTerms = TERMS, state: HoldState = HoldState.HELD, id_: str = "prepared:x"
    ) -> None:
        self.cluster.holds[id_] = Seen(terms.hold(state), mod)
        self.keeper.changed([id_])

    def at(self, now: float) -> list[tuple[str, int]]:
        """Set the clock; return the verifications that begin."""
        self.now, self.begun = now, []
        self.keeper._verify_due()
        return self.begun


def run(monkeypatch: pytest.MonkeyPatch, work: Any, **nodes: NodeState) -> None:
    async def main() -> None:
        daemon = Daemon(monkeypatch, **nodes)
        work(daemon)
        daemon.keeper.close()

    asyncio.run(main())


def test_C14_a_hold_is_verified_verify_after_seconds_after_it_was_seen(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def work(daemon: Daemon) -> None:
        daemon.sees(5)
        assert daemon.at(59.9) == []
        assert daemon.at(60.1) == [("prepared:x", 5)]
        assert daemon.at(61.2) == [("prepared:x", 5)], "again, until the attempt is written"
        daemon.sees(6, p.begun(TERMS, "e1") or TERMS)
        assert daemon.at(62.3) == [], "the attempt is in progress"
        daemon.sees(7, TERMS, HoldState.DENIED)
        assert daemon.at(1_000.0) == []

    run(monkeypatch, work)


def test_C14_holds_confirmed_in_time_take_no_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    def work(daemon: Daemon) -> None:
        for n in range(1_000):
            daemon.sees(n + 5, id_=f"prepared:{n}")
            del daemon.cluster.holds[f"prepared:{n}"]
            daemon.keeper.changed([f"prepared:{n}"])
        assert daemon.keeper._seen == {}
        assert len(daemon.keeper._due) <= abandoned_holds.FEW + 1
        daemon.sees(2_000)
        assert daemon.at(60.1) == [("prepared:x", 2_000)]

    run(monkeypatch, work)


def test_C14_only_due_holds_that_can_be_verified_now_are_checked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """All were checked each second and after each change of a hold."""
    asked: list[p.PreparedTerms] = []
    due = Verifying.due

    def counted(verifying: Verifying, terms: p.PreparedTerms, age: float) -> float:
        asked.append(terms)
        return due(verifying, terms, age)

    def work(daemon: Daemon) -> None:
        monkeypatch.setattr(Verifying, "due", counted)
        for n in range(200):
            daemon.sees(n + 5, id_=f"prepared:{n:03d}")
        daemon.may_begin = 8
        seen: set[str] = set()
        for now in range(61, 86):
            asked.clear()
            seen.update(id_ for id_, _ in daemon.at(now))
            assert len(asked) == 9
            timer = daemon.keeper._timer
            assert timer is not None
            assert timer.when() - asyncio.get_running_loop().time() > 0.5, "not again at once"
        assert len(seen) == 200, "each has its turn"

    run(monkeypatch, work)


@pytest.mark.parametrize(("other", "when"), [(NodeState.ACTIVE, 60.0 + p.TURN), (NodeState.DRAINED, 60.0)])
def test_C14_a_drained_executor_verifies_last(other: NodeState, when: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """This executor is drained; the other one may be."""

    def work(daemon: Daemon) -> None:
        daemon.sees(5)
        assert daemon.at(when - 0.1) == []
        assert daemon.at(when + 0.1 if when == 60.0 else when + 5.1) == [("prepared:x", 5)]

    run(monkeypatch, work, e1=NodeState.DRAINED, e2=other)


def test_old_denied_holds_cost_one_read_of_pending_operations_per_hour(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each poll searched all pending operations for each hold, as long as one named it."""

    class Keeping(Etcd):
        specs = 0

        async def read(self, *gets: Any) -> Any:
            self.specs += sum(get.key.endswith(".spec") for get in gets)
            return await super().read(*gets)

    async def main() -> None:
        etcd, daemon = Keeping(), Daemon(monkeypatch)
        daemon.client, daemon.keys, daemon.commit = etcd, KEYS, etcd.commit  # type: ignore[attr-defined]
        denied = Hold("graph", HoldState.DENIED, "given up")
        etcd.renew_client()
        held = await in_one(etcd, KEYS, requests([noop()], None)[0], (), "used")  # type: ignore[arg-type]
        await etcd.commit(held.txn)
        for _ in range(20):
            await etcd.client.start_operation("noop", TABLE, {}, delay=100.0)
        for id_ in ["used", *(f"gone-{n}" for n in range(10))]:
            etcd.put(KEYS.hold(id_), denied.encode())
            daemon.cluster.holds[id_] = Seen(denied, etcd.store.mod(KEYS.hold(id_)))
        await daemon.keeper.look()
        etcd.specs, daemon.now = 0, DEFAULT.denied_kept + 1
        await daemon.keeper.look()
        assert etcd.specs == 21
        assert [KEYS.parse(kv.key).id for kv in etcd.store.range(*KEYS.family("distOpHold"))] == ["used"]
        daemon.cluster.holds = {"used": daemon.cluster.holds["used"]}
        for _ in range(10):
            daemon.now += 30
            await daemon.keeper.look()
        assert etcd.specs == 21
        daemon.now += DEFAULT.denied_kept
        await daemon.keeper.look()
        assert etcd.specs == 42
        daemon.keeper.close()

    asyncio.run(main())


def test_an_incomplete_graph_is_denied_after_a_minute_without_its_caller(monkeypatch: pytest.MonkeyPatch) -> None:
    """A caller refreshes its hold while it inserts the graph."""

    async def main() -> None:
        etcd, daemon, key = Etcd(), Daemon(monkeypatch), KEYS.hold("g")
        daemon.client, daemon.keys, daemon.commit = etcd, KEYS, etcd.commit  # type: ignore[attr-defined]
        etcd.put(key, Hold("graph").encode())
        daemon.cluster.holds["g"] = Seen(Hold("graph"), etcd.store.mod(key))
        await daemon.keeper.look()
        for now, state in (
            (abandoned_holds.GRAPH_LIMIT - 1, HoldState.HELD),
            (abandoned_holds.GRAPH_LIMIT + 1, HoldState.DENIED),
        ):
            daemon.now = now
            await daemon.keeper.look()
            assert Hold.decode(etcd.value(key) or b"").state is state
        daemon.keeper.close()

    asyncio.run(main())


def test_a_late_copy_of_the_deletion_of_a_denied_hold_does_not_delete_a_new_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """An operation prepared again with the external id would begin unconfirmed."""

    async def main() -> None:
        etcd, daemon, key = Etcd(), Daemon(monkeypatch), KEYS.hold("prepared:x")
        daemon.client, daemon.keys, daemon.commit = etcd, KEYS, etcd.commit  # type: ignore[attr-defined]
        etcd.put(key, TERMS.hold(HoldState.DENIED).encode())
        daemon.sees(etcd.store.mod(key), state=HoldState.DENIED)
        await daemon.keeper.look()
        daemon.now = DEFAULT.denied_kept + 1
        await daemon.keeper.look()
        assert etcd.value(key) is None
        await etcd.client.prepare_operation("noop", TABLE, {}, external_id="x")
        etcd.store.apply(next(txn for txn in etcd.committed if txn.label == "forget_hold"))
        assert etcd.value(key) is not None
        daemon.keeper.close()

    asyncio.run(main())


def test_a_rejected_write_of_a_hold_is_reported_and_does_not_block_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """It raised at each check, which skipped all other holds and the rest of the poll."""

    async def main() -> None:
        etcd, daemon = Etcd(), Daemon(monkeypatch)
        daemon.client, daemon.keys, daemon.commit = etcd, KEYS, etcd.commit  # type: ignore[attr-defined]
        rejected = daemon.rejected_writes = RejectedWrites(logs.get("distop.test"), lambda: None)  # type: ignore[attr-defined]
        graph, denied = Hold("graph"), Hold("graph", HoldState.DENIED)
        receipt = Hold(user_transaction.KIND, HoldState.CONFIRMED)
        holds = {"a": graph, "b": receipt, "c": graph, "d": receipt, "e": denied}

        def put(id_: str) -> None:
            hold = holds[id_]
            etcd.put(KEYS.hold(id_), hold.encode())
            daemon.cluster.holds[id_] = Seen(hold, etcd.store.mod(KEYS.hold(id_)))

        for id_ in holds:
            put(id_)
        await daemon.keeper.look()
        poisoned = {KEYS.hold(id_) for id_ in "abe"}
        asked: list[str] = []

        def rejecting(txn: Any) -> Any:
            asked.extend(poisoned.intersection(op.key for op in txn.success))
            if not poisoned.isdisjoint(op.key for op in txn.success):
                raise MalformedRequest("etcdserver: request is too large")
            return etcd.store.apply(txn)

        etcd.usual = rejecting
        daemon.now = DEFAULT.denied_kept + 1
        await daemon.keeper.look()
        assert Hold.decode(etcd.value(KEYS.hold("c")) or b"").state is HoldState.DENIED
        assert etcd.value(KEYS.hold("d")) is None
        assert set(rejected.published) == {"hold a", "hold b", "hold e"}
        assert sorted(asked) == sorted(poisoned)
        await daemon.keeper.look()
        assert sorted(asked) == sorted(poisoned), "not again at once"
        put("a")  # its caller refreshes it
        del daemon.cluster.holds["e"]
        await daemon.keeper.look()
        assert set(rejected.published) == {"hold b"}
        poisoned.clear()
        daemon.now += PAUSE[1]
        await daemon.keeper.look()
        assert rejected.published == {}
        assert etcd.value(KEYS.hold("b")) is None
        daemon.keeper.close()

    asyncio.run(main())


def test_a_rejected_write_of_a_hold_that_is_gone_meanwhile_is_not_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    """It was reported until the daemon ended, because no later check saw the hold."""

    async def main() -> None:
        etcd, daemon = Etcd(), Daemon(monkeypatch)
        daemon.client, daemon.keys, daemon.commit = etcd, KEYS, etcd.commit  # type: ignore[attr-defined]
        rejected = daemon.rejected_writes = RejectedWrites(logs.get("distop.test"), lambda: None)  # type: ignore[attr-defined]
        daemon.cluster.holds["g"] = Seen(Hold("graph"), 5)
        await daemon.keeper.look()

        def goes(txn: Any) -> Any:
            del daemon.cluster.holds["g"]
            daemon.keeper.changed(["g"])
            raise MalformedRequest("etcdserver: request is too large")

        etcd.usual = goes
        daemon.now = abandoned_holds.GRAPH_LIMIT + 1
        await daemon.keeper.look()
        assert len(etcd.committed) == 1
        assert rejected.published == {}
        daemon.keeper.close()

    asyncio.run(main())


def test_a_hold_that_almost_fills_a_request_is_denied(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        etcd, daemon, key = Etcd(), Daemon(monkeypatch), KEYS.hold("g")
        daemon.client, daemon.keys, daemon.commit = etcd, KEYS, etcd.commit  # type: ignore[attr-defined]
        empty = request_bytes(Txn((), (Put(key, Hold("graph", options={"x": "x"}).encode()),)))
        hold = Hold("graph", options={"x": "x" * (MAX_REQUEST_BYTES - ENVELOPE_BYTES - empty - 10)})
        etcd.put(key, hold.encode())
        daemon.cluster.holds["g"] = Seen(hold, etcd.store.mod(key))
        await daemon.keeper.look()
        daemon.now = abandoned_holds.GRAPH_LIMIT + 1
        await daemon.keeper.look()
        assert Hold.decode(etcd.value(key) or b"").state is HoldState.DENIED
        daemon.keeper.close()

    asyncio.run(main())
