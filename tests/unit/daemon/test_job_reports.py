"""Reports of jobs: group commit, and rejected writes, on the model of etcd."""

from __future__ import annotations

import asyncio
import functools
import logging
from types import SimpleNamespace
from typing import Any

import pytest

from distop.daemon.job_reports import Reporter
from distop.daemon.rejected_writes import RejectedWrites
from distop.errors import MalformedRequest, PermissionDenied
from distop.protocol import job_transitions
from distop.protocol import operation_finish as f
from distop.protocol import pending_operations as w
from distop.protocol.dependencies import Edge
from distop.protocol.job_transitions import Guarded
from distop.protocol.keys import Keys
from distop.protocol.records import OperationRef, State
from distop.protocol.size_limits import DEFAULT, Limits
from distop.protocol.txn import Put, Txn, TxnResult, absent, flaw
from distop.runtime.logs import ContextLogger
from tests.support.world import TABLE, TYPE, World
from tests.unit.support.modelclient import ModelClient
from tests.unit.support.virtualtime import in_virtual_time, now


def report(n: int) -> Guarded:
    key = f"k{n}"
    return Guarded(absent(key), (Put(key, b"1"), Put(f"{key}.a", b"1"), Put(f"{key}.b", b"1")), "report")


def context(client: Any, lost: Any, rejected_writes: RejectedWrites, limits: Limits = DEFAULT) -> Any:
    """What a reporter needs of an incarnation."""
    log = ContextLogger(logging.getLogger("tests"), {})
    return SimpleNamespace(
        client=client, keys=Keys(), lost=lost, log=log, rejected_writes=rejected_writes, limits=limits
    )


def written(txn: Txn) -> int:
    """The number of reports in a transaction."""
    return len(txn.compares)


def test_a_partial_group_waits_for_the_current_commit_and_a_full_one_does_not() -> None:
    """Partial groups were sent beside up to two others, in twice as many transactions."""

    async def main() -> None:
        client = ModelClient()
        lost: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        log = ContextLogger(logging.getLogger("tests"), {})
        refusals = RejectedWrites(log, lambda: None)
        reporter = Reporter(context(client, lost, refusals, Limits(reports=3)))
        held, applied = asyncio.Event(), list[int]()

        async def late(txn: Txn) -> TxnResult:
            await held.wait()
            return client.store.apply(txn)

        client.fates.append(late)
        reporter.submit([(report(0), applied.append)])
        await client.until(lambda: len(client.committed) == 1)
        for n in (1, 2):
            reporter.submit([(report(n), applied.append)])
            await asyncio.sleep(0)
        assert len(client.committed) == 1, "a partial group waits"
        reporter.submit([(report(n), applied.append) for n in (3, 4)])
        await client.until(lambda: len(client.committed) == 2)
        await asyncio.sleep(0)
        assert list(map(written, client.committed)) == [1, 3], "a full group is sent"
        held.set()
        await reporter.drain()
        assert list(map(written, client.committed)) == [1, 3, 1]
        assert len(applied) == 5
        assert all(applied)

    asyncio.run(main())


def test_reports_are_retried_with_pauses_while_etcd_refuses_them() -> None:
    """Such as while a role is revoked."""
    refused: list[float] = []

    async def main() -> None:
        client, applied = ModelClient(), list[int]()
        lost: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        log = ContextLogger(logging.getLogger("tests"), {})
        reporter = Reporter(context(client, lost, RejectedWrites(log, lambda: None)))

        def refuse(txn: Txn) -> TxnResult:
            if now() < 120.0 and len(refused) < 200:
                refused.append(now())
                raise PermissionDenied("permission denied")
            return client.store.apply(txn)

        client.usual = refuse
        reporter.submit([(report(0), applied.append)])
        await reporter.drain()
        assert len(applied) == 1

    in_virtual_time(main, limit=150.0)
    assert 5 < len(refused) < 200


# --------------------------------------------------------- what etcd refuses

KEYS = Keys()


def job(partition: int, fence: int = 0, value: bytes = b"") -> Guarded:
    """A checkpoint of a job of ``t/noop/1``."""
    return job_transitions.checkpoint(KEYS, OperationRef("t", "noop", "", 1), partition, fence, value, 0)


class Picky:
    """A reporter on an etcd that rejects some keys, and the answers of its writes."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *refused: str) -> None:
        monkeypatch.setattr("distop.daemon.rejected_writes.PAUSE", (0.001, 0.001))
        self.client = ModelClient()
        self.refused = set(refused)
        self.answers: dict[int, int] = {}
        log = ContextLogger(logging.getLogger("tests"), {})
        self.rejected_writes = RejectedWrites(log, lambda: self.published.append(self.rejected_writes.published))
        self.published: list[Any] = []
        """What the node record was to say after each change."""
        self.lost: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self.reporter = Reporter(context(self.client, self.lost, self.rejected_writes))
        self.client.usual = self._take

    def _take(self, txn: Txn) -> TxnResult:
        if any(getattr(op, "key", "") in self.refused for op in txn.success):
            raise MalformedRequest("the progress was refused: too large", detail="too large")
        return self.client.store.apply(txn)

    def submit(self, *partitions: int) -> None:
        self.reporter.submit([(job(p, value=b"x"), functools.partial(self.answers.__setitem__, p)) for p in partitions])


def progress(partition: int) -> str:
    return KEYS.job(OperationRef("t", "noop", "", 1), partition, "progress")


def test_a_rejected_write_is_set_aside_and_reported(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A group with one rejected write was resent forever, and blocked the queue."""

    async def main() -> None:
        one = Picky(monkeypatch, progress(2), progress(5))
        one.submit(*range(8))
        await one.reporter.drain()
        assert sorted(one.answers) == [0, 1, 3, 4, 6, 7]
        assert all(one.answers.values())
        reason = "reports: the progress was refused: too large"
        assert dict(one.rejected_writes.published) == {"t/noop/1": f"{reason}; and 1 more write"}
        one.submit(8, 9)
        await one.reporter.drain()
        assert {8, 9} <= one.answers.keys()
        known = len(one.client.committed)
        await one.client.until(lambda: len(one.client.committed) > known + 3)  # they are retried
        one.refused.clear()
        await asyncio.wait(set(one.reporter._aside), timeout=20)
        assert sorted(one.answers) == list(range(10))
        assert all(one.answers.values())
        assert (one.rejected_writes.published, one.reporter._aside) == ({}, set())

    asyncio.run(main())


def test_a_rejected_write_stays_reported_when_another_one_is_applied(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two jobs of one operation: the report of both was gone until the next retry of the second one."""

    async def main() -> None:
        one = Picky(monkeypatch, progress(2), progress(5))
        one.submit(2, 5)
        await one.reporter.drain()
        one.published.clear()
        one.refused.remove(progress(2))
        await asyncio.wait(set(one.reporter._aside), timeout=20, return_when=asyncio.FIRST_COMPLETED)
        assert list(one.answers) == [2]
        assert one.published == [{"t/noop/1": "reports: the progress was refused: too large"}]
        one.reporter.close()

    asyncio.run(main())


def test_a_rejected_write_is_settled_once_its_fence_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        one = Picky(monkeypatch, progress(1))
        one.submit(0, 1)
        await one.reporter.drain()
        assert one.rejected_writes.published
        one.client.store.apply(Txn((), (Put(KEYS.claim(OperationRef("t", "noop", "", 1), 1), b"x"),)))
        one.refused.clear()
        await asyncio.wait(set(one.reporter._aside), timeout=20)
        assert one.answers[1] == 0
        assert not one.rejected_writes.published

    asyncio.run(main())


def test_retries_of_rejected_writes_end_with_the_session(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        one = Picky(monkeypatch, progress(1))
        one.submit(0, 1)
        await one.reporter.drain()
        aside = set(one.reporter._aside)
        one.reporter.close()
        await asyncio.wait(aside)
        assert not one.reporter._aside
        assert 1 not in one.answers

    asyncio.run(main())


def test_writes_to_one_key_use_separate_transactions() -> None:
    """An operation's end deletes the key that another one's signal writes.

    etcd rejects the two in one transaction.
    """

    async def main() -> None:
        client = ModelClient()
        lost: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        log = ContextLogger(logging.getLogger("tests"), {})
        reporter = Reporter(context(client, lost, RejectedWrites(log, lambda: None)))
        world, answers = World(), list[int]()
        world.join("a")
        world.do(world.elect("a"))
        before, after = world.next_ref(), OperationRef(TABLE, TYPE, "", 2)
        world.do(world.start(before))
        world.do(world.submit(after, before))
        world.do(world.plan(before, 0))
        world.do(world.finish_at_once(before))
        world.do(world.end_waiting(after))
        links = {edge: Edge(str(after), "success") for edge in world.op(before).next}
        signal = w.signal(KEYS, before, world.election, world.mod(before, "state"), State.FAILED, links)
        end = f.end(KEYS, after, world.election, world.mod(after, "state"))
        assert flaw(job_transitions.group([job_transitions.guarded(signal), job_transitions.guarded(end)])) is not None
        client.store = world.store
        reporter.submit([(job_transitions.guarded(one), answers.append) for one in (signal, end)])
        await reporter.drain()
        assert [txn.label for txn in client.committed] == ["signal", "end"]
        assert len(answers) == 2
        assert all(answers)

    asyncio.run(main())
