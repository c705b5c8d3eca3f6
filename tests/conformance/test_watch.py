"""The watch feed against real servers, with all kinds of stream failures (W1–W11)."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest

from distop.errors import Compacted, EtcdUnavailable
from distop.protocol.supported_versions import orders_requested_progress
from distop.protocol.txn import Delete, Put, Txn
from distop.store.watch import Batch, Feed, WatchStream, decode_response
from tests.conformance.mirror import Mirror
from tests.support.etcd import compacted, connected, until
from tests.support.proxy import Mode, TcpProxy

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from distop.protocol.revisioned import Change
    from distop.store.client import EtcdClient, Listing
    from distop.store.embedded import EmbeddedEtcd

pytestmark = pytest.mark.etcd


async def put(client: EtcdClient, prefix: str, **values: str) -> int:
    puts = tuple(Put(f"{prefix}{name}", value.encode()) for name, value in values.items())
    return (await client.commit(Txn((), puts))).revision


async def matches_etcd(client: EtcdClient, mirror: Mirror, prefix: str) -> bool:
    listing = await client.list(prefix, f"{prefix[:-1]}/")
    return mirror.content == {pair.key: pair for pair in listing.kvs}


async def test_a_feed_reports_a_listing_and_then_changes_in_order(client: EtcdClient, prefix: str) -> None:
    await put(client, prefix, a="1", b="1")
    mirror = Mirror()
    feed = Feed(client, prefix, f"{prefix[:-1]}/", mirror.apply)
    await feed.start()
    assert mirror.values == {f"{prefix}a": b"1", f"{prefix}b": b"1"}
    assert feed.revision == mirror.revision
    await put(client, prefix, a="2", c="1")
    gone = await client.commit(Txn((), (Delete(f"{prefix}b"),)))
    await feed.reached(gone.revision)
    assert mirror.values == {f"{prefix}a": b"2", f"{prefix}c": b"1"}
    assert await matches_etcd(client, mirror, prefix)
    assert mirror.listings == 1
    deletion = mirror.batches[-1].events[-1]
    assert deletion.deleted
    assert (deletion.kv.key, deletion.kv.value, deletion.kv.mod_revision) == (f"{prefix}b", b"", gone.revision)
    await feed.close()
    applied = len(mirror.batches)
    await put(client, prefix, a="3")
    assert len(mirror.batches) == applied


async def test_the_keys_of_one_revision_arrive_in_one_batch(client: EtcdClient, prefix: str) -> None:  # W4
    mirror = Mirror()
    feed = Feed(client, prefix, f"{prefix[:-1]}/", mirror.apply)
    await feed.start()
    result = await client.commit(Txn((), tuple(Put(f"{prefix}{number}", b"") for number in range(120))))
    await feed.reached(result.revision)
    assert [len(batch.events) for batch in mirror.batches if batch.events] == [120]
    await feed.close()


async def test_a_feed_reaches_a_revision_without_changes_in_its_range(client: EtcdClient, prefix: str) -> None:  # W11
    mirror = Mirror()
    feed = Feed(client, prefix, f"{prefix[:-1]}/", mirror.apply)
    await feed.start()
    elsewhere = await put(client, "elsewhere.", a="1")
    await feed.reached(elsewhere)
    assert feed.revision >= elsewhere
    await feed.close()


async def test_a_feed_catches_up_thousands_of_revisions_despite_cut_connections(
    shared_etcd: EmbeddedEtcd, prefix: str
) -> None:
    """W2: batches that catch up hold at most 1,000 revisions, and their headers carry the current revision."""
    async with TcpProxy(shared_etcd.port) as proxy, connected(proxy.endpoint) as client:
        mirror = Mirror()
        feed = Feed(client, prefix, f"{prefix[:-1]}/", mirror.apply)
        await feed.start()
        async with connected(shared_etcd.endpoint) as writer:
            first = await put(writer, prefix, start="x")
            await feed.reached(first)
            proxy.set(Mode.BLACK_HOLE)
            revisions = []
            for _ in range(50):
                results = await asyncio.gather(
                    *(writer.commit(Txn((), (Put(f"{prefix}{n}", b"v" * 200),))) for n in range(70))
                )
                revisions += [result.revision for result in results]
            proxy.set(Mode.PASS)
            last = max(revisions)
            # Not `feed.reached`, which lists again on a slow machine.
            for _ in range(4):
                before = len(mirror.mod_revisions)
                await until(lambda before=before: feed.revision >= last or len(mirror.mod_revisions) > before)
                proxy.cut()
            await until(lambda: feed.revision >= last)
            assert mirror.listings == 1
            assert mirror.mod_revisions[1:] == sorted(revisions)  # each once and in order
            assert await matches_etcd(writer, mirror, prefix)
        await feed.close()


async def test_batches_that_catch_up_carry_the_current_revision(own_etcd: EmbeddedEtcd) -> None:
    """W2: a client that resumed at the header's revision would miss the events of the next batches."""
    async with connected(own_etcd.endpoint) as client:
        revisions = list[int]()
        for _ in range(25):
            written = await asyncio.gather(*(put(client, "t.", **{f"k{n}": "v"}) for n in range(100)))
            revisions += sorted(written)
        stream = WatchStream(client, "t.", "t/", revisions[0])
        await stream.open(5.0)
        batches = []
        while sum(len(batch.events) for batch in batches) < len(revisions):
            message = await stream.read()
            assert message is not None
            if message.events:
                batches.append(decode_response(message))
        stream.cut()
        assert [len(batch.events) for batch in batches] == [1_000, 1_000, 500]
        assert {batch.revision for batch in batches} == {revisions[-1]}
        assert [event.kv.mod_revision for batch in batches for event in batch.events] == revisions


async def test_a_watch_from_the_next_revision_gets_no_progress_notification(
    shared_etcd: EmbeddedEtcd, prefix: str
) -> None:
    """W8a: until the next write, a newer server leaves a progress request unanswered, which is no failure."""
    async with connected(shared_etcd.endpoint) as client:
        now = await put(client, prefix, a="1")
        stream = WatchStream(client, prefix, f"{prefix[:-1]}/", now + 1)
        await stream.open(5.0)
        created = await stream.read()
        assert created is not None
        assert created.created
        await stream.ask_progress()
        answer = asyncio.ensure_future(stream.read())
        elsewhere = await put(client, "elsewhere.", a="1")
        while not answer.done():
            await stream.ask_progress()
            await asyncio.wait([answer], timeout=0.1)
        response = await answer
        stream.cut()
        assert response is not None
        assert not response.events
        if orders_requested_progress(client.known_version(stream.address)):
            assert response.header.revision >= elsewhere


async def test_a_feed_joins_fragments_of_large_revisions_despite_cut_connections(
    shared_etcd: EmbeddedEtcd, prefix: str
) -> None:  # W5
    async with TcpProxy(shared_etcd.port) as proxy, connected(proxy.endpoint) as client:
        mirror = Mirror()
        feed = Feed(client, prefix, f"{prefix[:-1]}/", mirror.apply)
        await feed.start()
        async with connected(shared_etcd.endpoint) as writer:
            await feed.reached(await put(writer, prefix, start="x"))
            proxy.set(Mode.BLACK_HOLE)
            value = bytes(300_000)
            revisions = []
            for _ in range(8):
                written = await writer.commit(Txn((), tuple(Put(f"{prefix}{n}", value) for n in range(4))))
                revisions.append(written.revision)
            fragments = 0
            stream = WatchStream(writer, prefix, f"{prefix[:-1]}/", revisions[0])
            await stream.open(5.0)
            seen = 0
            while seen < 32:
                message = await stream.read()
                assert message is not None
                fragments += message.fragment
                seen += len(decode_response(message).events)
            stream.cut()
            assert fragments, "the server sent no fragments: the test shows nothing"
            proxy.set(Mode.PASS)
            for size in (2_500_000, 4_000_000):
                start = proxy.answered
                await until(
                    lambda start=start, size=size: proxy.answered - start > size or feed.revision >= revisions[-1]
                )
                proxy.cut()
            await until(lambda: feed.revision >= revisions[-1])
            assert mirror.mod_revisions[1:] == [revision for revision in revisions for _ in range(4)]
            assert await matches_etcd(writer, mirror, prefix)
        await feed.close()


async def test_a_feed_lists_again_when_its_position_was_compacted(own_etcd: EmbeddedEtcd) -> None:  # W6
    async with (
        TcpProxy(own_etcd.port) as proxy,
        connected(proxy.endpoint, request_timeout=1.0) as client,
        connected(own_etcd.endpoint) as writer,
    ):
        mirror = Mirror()
        feed = Feed(client, "t.", "t/", mirror.apply)
        await feed.start()
        await feed.reached(await put(writer, "t.", a="1", b="1"))
        proxy.set(Mode.BLACK_HOLE)
        await writer.commit(Txn((), (Delete("t.a"),)))
        last = 0
        for number in range(20):
            last = await put(writer, "t.", c=str(number))
        await compacted(writer, last)
        proxy.set(Mode.PASS)
        await feed.reached(last)
        assert mirror.values == {"t.b": b"1", "t.c": b"19"}  # the deletion of a is implied by the listing
        assert mirror.listings == 2
        after = await put(writer, "t.", d="1")
        await feed.reached(after)
        assert mirror.values["t.d"] == b"1"
        await feed.close()


async def test_a_feed_lists_again_on_request_and_at_its_interval(client: EtcdClient, prefix: str) -> None:
    mirror = Mirror()
    feed = Feed(client, prefix, f"{prefix[:-1]}/", mirror.apply, relist_every=0.2)
    await feed.start()
    await feed.relist()
    assert mirror.listings >= 2
    await until(lambda: mirror.listings >= 4)
    await feed.reached(await put(client, prefix, a="1"))
    assert mirror.values == {f"{prefix}a": b"1"}
    await feed.close()


async def test_a_listing_is_passed_on_in_parts(
    client: EtcdClient, prefix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """This also holds when its revision is compacted between two parts, which the patched ``parts`` simulates."""
    names = [f"{prefix}{number:04}" for number in range(2_500)]
    for n in range(0, len(names), 125):
        await client.commit(Txn((), tuple(Put(name, b"1") for name in names[n : n + 125])))
    parts: list[list[list[str]]] = []
    batches: list[Batch] = []
    pages, cut = client.parts, [True, False, False]

    class RecordedParts:
        def __init__(self) -> None:
            self.parts: list[list[str]] = []
            parts.append(self.parts)

        def apply(self, changes: list[Change], /) -> None:
            self.parts.append([change.kv.key for change in changes])

    async def parts_with_one_compaction(start: str, end: str) -> AsyncIterator[Listing]:
        lost = cut.pop(0)
        async for part in pages(start, end):
            yield part
            if lost:
                raise Compacted("gone")

    monkeypatch.setattr(client, "parts", parts_with_one_compaction)
    feed = Feed(client, prefix, f"{prefix[:-1]}/", batches.append, gather=RecordedParts)
    await feed.start()
    assert (batches[0].listing, batches[0].events) == (True, ())
    assert batches[0].gathered.parts is parts[1]
    assert [name for part in parts[1] for name in part] == names
    assert all(len(part) <= 1_000 for part in parts[1])
    await feed.reached(await put(client, prefix, a="1"))
    assert batches[-1].events[-1].kv.key == f"{prefix}a"
    await feed.relist()
    assert batches[-1].gathered.parts is parts[2]
    assert sum(map(len, parts[2])) == 2_501
    await feed.close()


async def test_a_feed_continues_after_a_restart_of_the_server(own_etcd: EmbeddedEtcd) -> None:
    async with connected(own_etcd.endpoint) as client:
        mirror = Mirror()
        feed = Feed(client, "t.", "t/", mirror.apply)
        await feed.start()
        await feed.reached(await put(client, "t.", a="1"))
        await asyncio.to_thread(own_etcd.halt)  # its streams end cleanly
        await asyncio.to_thread(own_etcd.restart)
        await feed.reached(await put(client, "t.", a="2"))
        own_etcd.kill()
        await asyncio.to_thread(own_etcd.restart)
        await feed.reached(await put(client, "t.", a="3"))
        assert mirror.values == {"t.a": b"3"}
        await feed.close()


async def test_closing_a_feed_that_lists_again_ends_its_waiters(client: EtcdClient, prefix: str) -> None:
    feed = Feed(client, prefix, f"{prefix[:-1]}/", Mirror().apply)
    await feed.start()
    await feed.reached(await put(client, prefix, a="1"))
    relisting = asyncio.ensure_future(feed.relist())
    await asyncio.wait([relisting], timeout=0)  # relist() has cut the stream
    await asyncio.wait_for(feed.close(), 5.0)
    with pytest.raises(EtcdUnavailable, match="closed"):
        await relisting
    with pytest.raises(EtcdUnavailable, match="closed"):
        await feed.reached(1 << 40)


async def test_a_consumer_that_fails_ends_the_feed(client: EtcdClient, prefix: str) -> None:
    mirror = Mirror()

    def apply(batch: object) -> None:
        if mirror.batches:
            raise ValueError("a bug of the consumer")
        mirror.batches.append(batch)  # type: ignore[arg-type]

    feed = Feed(client, prefix, f"{prefix[:-1]}/", apply)
    await feed.start()
    revision = await put(client, prefix, a="1")
    with pytest.raises(ValueError, match="a bug"):
        await feed.reached(revision)
    with pytest.raises(ValueError, match="a bug"):
        await feed.wait()
    await feed.close()


async def test_a_stream_on_a_failed_member_is_reopened_on_another_member(own_etcd: EmbeddedEtcd) -> None:
    """A member that drops everything makes requests time out. Its watch is only silent, so it is moved together with
    the requests. (Old servers get no progress requests: silence alone would take a minute to detect.)
    """
    async with TcpProxy(own_etcd.port) as proxy:
        endpoints = f"{proxy.endpoint},{own_etcd.endpoint}"
        async with connected(endpoints, request_timeout=0.5) as client, connected(own_etcd.endpoint) as other:
            mirror = Mirror()
            feed = Feed(client, "d.", "d/", mirror.apply)
            await feed.start()
            await until(lambda: proxy.requested > 0 and feed.problem == "", "the watch is open")
            written = await client.commit(Txn((), (Put("d.a", b"1"),)))
            await feed.reached(written.revision)
            proxy.set(Mode.BLACK_HOLE)
            await other.commit(Txn((), (Put("d.a", b"2"),)))
            assert await client.get("d.a")  # moves on to the other endpoint
            await until(lambda: mirror.values["d.a"] == b"2", "the watch continues", timeout=10)
            await feed.close()
