"""etcd's history read back: whole, in order, each revision once; and told to be lost where it was compacted."""

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
    from distop.store.history import Step

pytestmark = pytest.mark.etcd


async def read(client: EtcdClient) -> list[Step]:
    async with aclosing(HistoryReader(client, "h.", "h/").steps()) as steps:
        return [step async for step in steps]


async def put(client: EtcdClient, *keys: str) -> int:
    return (await client.commit(Txn((), tuple(Put(key, b"v") for key in keys)))).revision


async def test_the_whole_history_in_order(own_etcd: EmbeddedEtcd) -> None:
    async with connected(own_etcd.endpoint) as client:
        first = await put(client, "h.a", "h.b")
        await put(client, "other")
        second = (await client.commit(Txn((), (Delete("h.a"), Put("h.c", b"x"))))).revision
        last = (await client.commit(Txn((), (Delete("h.b"),)))).revision
        *revisions, end = await read(client)
        assert end == CaughtUp(last)
        told = [(r.number, [(c.kv.key, c.deleted) for c in r.changes]) for r in revisions if isinstance(r, Revision)]
        assert told == [
            (first, [("h.a", False), ("h.b", False)]),
            (second, [("h.a", True), ("h.c", False)]),
            (last, [("h.b", True)]),
        ]


async def test_an_empty_history_ends(own_etcd: EmbeddedEtcd) -> None:
    async with connected(own_etcd.endpoint) as client:
        (end,) = await read(client)
        assert isinstance(end, CaughtUp)


async def test_a_reader_that_is_done_holds_no_stream(own_etcd: EmbeddedEtcd, monkeypatch: pytest.MonkeyPatch) -> None:
    """It was closed when the loop got round to what the reader had left behind, and in the simulator never."""
    ended: list[WatchStream] = []
    cut = WatchStream.cut

    def noted(stream: WatchStream, **how: bool) -> None:
        ended.append(stream)
        cut(stream, **how)

    monkeypatch.setattr(WatchStream, "cut", noted)
    async with connected(own_etcd.endpoint) as client:
        await put(client, "h.a")
        await read(client)
        assert len(ended) == 1


async def test_more_revisions_than_one_answer_holds(own_etcd: EmbeddedEtcd) -> None:
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
        beginning, revision, end = await read(client)
        assert isinstance(beginning, HistoryStart)
        assert (beginning.revision, beginning.lost) == (at, 1)
        assert [kv.key for kv in beginning.kvs] == ["h.a", "h.b"]
        assert isinstance(revision, Revision)
        assert (revision.number, end) == (later, CaughtUp(later))


async def test_a_history_that_is_compacted_to_its_end(own_etcd: EmbeddedEtcd) -> None:
    """Nothing happened since the compaction, so there is nothing more to read (W8a)."""
    async with connected(own_etcd.endpoint) as client:
        await put(client, "h.a")
        at = await put(client, "h.b")
        await compacted(client, at)
        beginning, end = await asyncio.wait_for(read(client), 30.0)
        assert isinstance(beginning, HistoryStart)
        assert (beginning.revision, beginning.lost) == (at, 1)
        assert end == CaughtUp(at)


async def test_revisions_compacted_while_reading_are_reported_as_lost(own_etcd: EmbeddedEtcd) -> None:
    steps: list[Step] = []
    take = steps.append
    async with TcpProxy(own_etcd.port) as proxy, connected(own_etcd.endpoint) as client:
        await put(client, "h.a")
        async with connected(proxy.endpoint, request_timeout=1.0) as reading:

            async def follow() -> None:
                async with aclosing(HistoryReader(reading, "h.", "h/", follow=True).steps()) as told:
                    async for step in told:
                        take(step)

            following = asyncio.ensure_future(follow())
            await until(lambda: any(isinstance(step, CaughtUp) for step in steps), "the present")
            seen = steps[-1].revision if isinstance(steps[-1], CaughtUp) else 0
            proxy.set(Mode.BLACK_HOLE)
            await put(client, "h.b")
            at = await put(client, "h.c")
            await compacted(client, at)
            proxy.set(Mode.PASS)
            await until(lambda: isinstance(steps[-1], HistoryStart), "the loss")
            beginning = steps[-1]
            assert isinstance(beginning, HistoryStart)
            assert (beginning.lost, beginning.revision) == (seen + 1, at)
            after = await put(client, "h.d")
            await until(lambda: isinstance(steps[-1], Revision) and steps[-1].number == after, "what came after")
            following.cancel()
            await asyncio.gather(following, return_exceptions=True)


async def test_a_cut_in_the_middle_loses_and_repeats_nothing(own_etcd: EmbeddedEtcd) -> None:
    async with TcpProxy(own_etcd.port) as proxy, connected(own_etcd.endpoint) as client:
        for n in range(0, 2_200, 50):
            await asyncio.gather(*(put(client, f"h.{n + m}") for m in range(50)))
        async with connected(proxy.endpoint) as reading:
            numbers: list[int] = []
            async with aclosing(HistoryReader(reading, "h.", "h/").steps()) as told:
                async for step in told:
                    if isinstance(step, Revision):
                        numbers.append(step.number)
                        if len(numbers) in (700, 1_500):
                            proxy.cut()
        assert len(numbers) == 2_200
        assert numbers == sorted(set(numbers))


async def test_an_etcd_that_is_slow_to_answer_is_waited_for(
    own_etcd: EmbeddedEtcd, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It takes seconds to divide a response of many small events, and each stream has it start anew: the audit of an
    operation with 50,000 jobs never ended on a busy machine.
    """
    monkeypatch.setattr(history, "_PATIENCE", 0.02)
    monkeypatch.setattr(history, "_QUIET", 0.02)
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
        await put(client, "other")  # so that the present is not reached with the first event
        async with aclosing(HistoryReader(client, "h.", "h/").steps()) as told:
            with pytest.raises(EtcdUnavailable):
                async for step in told:
                    if isinstance(step, Revision):
                        own_etcd.kill()


async def test_a_user_without_read_permission_is_rejected(own_etcd: EmbeddedEtcd) -> None:
    from tests.support.users import WORKER, enable_users

    await enable_users(own_etcd.endpoint)
    async with connected(own_etcd.endpoint, **WORKER) as client:
        with pytest.raises(EtcdRejected):
            await read(client)
        async with aclosing(HistoryReader(client, "ours.", "ours/").steps()) as told:
            assert [step async for step in told]
