"""HistoryReader reads each revision of etcd once and in order, and reports compacted revisions as lost."""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from typing import TYPE_CHECKING

import pytest

from distop.errors import EtcdRejected, EtcdUnavailable
from distop.protocol.txn import Delete, Put, Txn
from distop.store import history
from distop.store.history import CaughtUp, HistoryReader, HistoryStart, Revision
from distop.store.watch import WatchStream
from tests.support.etcd import compacted, connected, until
from tests.support.proxy import Mode, TcpProxy

if TYPE_CHECKING:
    from distop.store.client import EtcdClient
    from distop.store.embedded import EmbeddedEtcd
    from distop.store.history import HistoryStep

pytestmark = pytest.mark.etcd


async def read(client: EtcdClient) -> list[HistoryStep]:
    async with aclosing(HistoryReader(client, "h.", "h/").steps()) as steps:
        return [step async for step in steps]


async def put(client: EtcdClient, *keys: str) -> int:
    return (await client.commit(Txn((), tuple(Put(key, b"v") for key in keys)))).revision


async def test_the_whole_history_is_read_in_order(own_etcd: EmbeddedEtcd) -> None:
    async with connected(own_etcd.endpoint) as client:
        first = await put(client, "h.a", "h.b")
        await put(client, "other")
        second = (await client.commit(Txn((), (Delete("h.a"), Put("h.c", b"x"))))).revision
        last = (await client.commit(Txn((), (Delete("h.b"),)))).revision
        *revisions, end = await read(client)
        assert end == CaughtUp(last)
        changes = [(r.number, [(c.kv.key, c.deleted) for c in r.changes]) for r in revisions if isinstance(r, Revision)]
        assert changes == [
            (first, [("h.a", False), ("h.b", False)]),
            (second, [("h.a", True), ("h.c", False)]),
            (last, [("h.b", True)]),
        ]


async def test_an_empty_history_ends(own_etcd: EmbeddedEtcd) -> None:
    async with connected(own_etcd.endpoint) as client:
        (end,) = await read(client)
        assert isinstance(end, CaughtUp)


async def test_a_reader_closes_its_stream_at_the_end(own_etcd: EmbeddedEtcd, monkeypatch: pytest.MonkeyPatch) -> None:
    """The stream was once left to the event loop's clean-up of async generators, which the simulator never runs."""
    ended: list[WatchStream] = []
    cut = WatchStream.cut

    def recorded(stream: WatchStream, **how: bool) -> None:
        ended.append(stream)
        cut(stream, **how)

    monkeypatch.setattr(WatchStream, "cut", recorded)
    async with connected(own_etcd.endpoint) as client:
        await put(client, "h.a")
        await read(client)
        assert len(ended) == 1


async def test_a_history_of_more_revisions_than_one_response_holds_is_read_in_full(own_etcd: EmbeddedEtcd) -> None:
    async with connected(own_etcd.endpoint) as client:
        for n in range(0, 2_500, 50):
            await asyncio.gather(*(put(client, f"h.{n + m}") for m in range(50)))
        numbers = [step.number for step in await read(client) if isinstance(step, Revision)]
        assert len(numbers) == 2_500
        assert numbers == sorted(set(numbers))


async def test_a_compacted_history_starts_with_the_content_at_the_compaction(own_etcd: EmbeddedEtcd) -> None:
    async with connected(own_etcd.endpoint) as client:
        await put(client, "h.a")
        at = await put(client, "h.b")
        later = (await client.commit(Txn((), (Delete("h.a"),)))).revision
        await compacted(client, at)
        start, revision, end = await read(client)
        assert isinstance(start, HistoryStart)
        assert (start.revision, start.lost) == (at, 1)
        assert [kv.key for kv in start.kvs] == ["h.a", "h.b"]
        assert isinstance(revision, Revision)
        assert (revision.number, end) == (later, CaughtUp(later))


async def test_a_history_compacted_to_its_end_has_only_a_start(own_etcd: EmbeddedEtcd) -> None:
    """W8a: etcd has no revision after the compaction, so that the reader must end without one."""
    async with connected(own_etcd.endpoint) as client:
        await put(client, "h.a")
        at = await put(client, "h.b")
        await compacted(client, at)
        start, end = await asyncio.wait_for(read(client), 30.0)
        assert isinstance(start, HistoryStart)
        assert (start.revision, start.lost) == (at, 1)
        assert end == CaughtUp(at)


async def test_revisions_compacted_while_reading_are_reported_as_lost(own_etcd: EmbeddedEtcd) -> None:
    steps: list[HistoryStep] = []
    take = steps.append
    async with TcpProxy(own_etcd.port) as proxy, connected(own_etcd.endpoint) as client:
        await put(client, "h.a")
        async with connected(proxy.endpoint, request_timeout=1.0) as reading:

            async def follow() -> None:
                async with aclosing(HistoryReader(reading, "h.", "h/", follow=True).steps()) as reported:
                    async for step in reported:
                        take(step)

            following = asyncio.ensure_future(follow())
            await until(lambda: any(isinstance(step, CaughtUp) for step in steps), "the reader has caught up")
            seen = steps[-1].revision if isinstance(steps[-1], CaughtUp) else 0
            proxy.set(Mode.BLACK_HOLE)
            await put(client, "h.b")
            at = await put(client, "h.c")
            await compacted(client, at)
            proxy.set(Mode.PASS)
            await until(lambda: isinstance(steps[-1], HistoryStart), "the reader reports the lost revisions")
            start = steps[-1]
            assert isinstance(start, HistoryStart)
            assert (start.lost, start.revision) == (seen + 1, at)
            after = await put(client, "h.d")
            await until(lambda: isinstance(steps[-1], Revision) and steps[-1].number == after, "the reader continues")
            following.cancel()
            await asyncio.gather(following, return_exceptions=True)


async def test_a_cut_while_reading_loses_and_repeats_no_revision(own_etcd: EmbeddedEtcd) -> None:
    async with TcpProxy(own_etcd.port) as proxy, connected(own_etcd.endpoint) as client:
        for n in range(0, 2_200, 50):
            await asyncio.gather(*(put(client, f"h.{n + m}") for m in range(50)))
        async with connected(proxy.endpoint) as reading:
            numbers: list[int] = []
            async with aclosing(HistoryReader(reading, "h.", "h/").steps()) as reported:
                async for step in reported:
                    if isinstance(step, Revision):
                        numbers.append(step.number)
                        if len(numbers) in (700, 1_500):
                            proxy.cut()
        assert len(numbers) == 2_200
        assert numbers == sorted(set(numbers))


async def test_a_reader_waits_for_a_slow_etcd(own_etcd: EmbeddedEtcd, monkeypatch: pytest.MonkeyPatch) -> None:
    """etcd takes seconds to split a response of many small events, and starts again for each new stream. A reader that
    reopened its stream too early never ended the audit of an operation with 50,000 jobs on a busy machine.
    """
    monkeypatch.setattr(history, "PATIENCE", 0.02)
    monkeypatch.setattr(history, "QUIET", 0.02)
    read_at_once = WatchStream.read

    async def read_slowly(stream: WatchStream) -> object:
        await asyncio.sleep(0.2)
        return await read_at_once(stream)

    monkeypatch.setattr(WatchStream, "read", read_slowly)
    async with connected(own_etcd.endpoint) as client:
        at = await put(client, "h.a")
        assert [step.number for step in await asyncio.wait_for(read(client), 30) if isinstance(step, Revision)] == [at]


async def test_a_history_reader_fails_when_etcd_is_gone(own_etcd: EmbeddedEtcd) -> None:
    async with connected(own_etcd.endpoint, connect_timeout=0.5, request_timeout=0.5, read_timeout=1.0) as client:
        await put(client, "h.a")
        await put(client, "other")  # so that the first event does not complete the history
        async with aclosing(HistoryReader(client, "h.", "h/").steps()) as reported:
            with pytest.raises(EtcdUnavailable):
                async for step in reported:
                    if isinstance(step, Revision):
                        own_etcd.kill()


async def test_a_user_without_read_permission_is_rejected(own_etcd: EmbeddedEtcd) -> None:
    from tests.support.users import WORKER, enable_users

    await enable_users(own_etcd.endpoint)
    async with connected(own_etcd.endpoint, **WORKER) as client:
        with pytest.raises(EtcdRejected):
            await read(client)
        async with aclosing(HistoryReader(client, "ours.", "ours/").steps()) as reported:
            assert [step async for step in reported]
