"""The history on a real etcd: filters, pages, invalid queries and retention."""

from __future__ import annotations

import asyncio
import itertools
import re
from datetime import datetime, timedelta, timezone
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from distop import aio
from distop.client.graphs import Start
from distop.clock import System, source, time
from distop.daemon.clock_check import ClockCheck
from distop.daemon.upkeep import history_pruning
from distop.daemon.upkeep.history_pruning import HistoryPruner
from distop.errors import InvalidArgument, OutcomeUnknown
from distop.protocol import keys as K
from distop.protocol.age_watermarks import watermarks
from distop.protocol.json_codec import rfc3339
from distop.protocol.records import History, OperationRef, State
from distop.protocol.txn import Get, KeyValue, Put, Txn, TxnResult
from distop.runtime import logs
from distop.services.inspection import history_pages as past
from distop.services.submission.option_values import Every
from tests.integration.conftest import TABLE
from tests.support.behaviors import sample_env
from tests.support.etcd import compacted, own_etcd, shared_etcd
from tests.support.history_age import age_history

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    from distop.store.embedded import EmbeddedEtcd
    from tests.support.daemons import Daemons

__all__ = ["own_etcd", "sample_env", "shared_etcd"]

pytestmark = pytest.mark.etcd

_numbers = itertools.count()
EPOCH = 1_700_000_000.0
HOUR = 3600.0


@pytest.fixture
async def client(shared_etcd: EmbeddedEtcd) -> AsyncIterator[aio.Client]:
    async with aio.connect(shared_etcd.endpoint, namespace=f"history{next(_numbers)}") as client:
        yield client


def record(op: str, at: float, state: State = State.SUCCESS, **fields: Any) -> History:
    return History(op, state, rfc3339(at - 5), rfc3339(at), 1, 1, 0, **fields)


async def write(client: aio.Client, *records: History) -> None:
    """Write the records of operations that ended in one transaction."""
    puts = tuple(Put(client.keys.history(OperationRef.parse(one.op)), one.encode()) for one in records)
    assert (await client.etcd.commit(Txn((), puts))).succeeded


def ops(found: list[Any]) -> list[str]:
    return [result.op for result in found]


async def write_many(client: aio.Client, number: int) -> list[str]:
    """Write ``number`` operations on two tables, a second apart, and return their names, the newest first."""
    named = []
    for n in range(1, number + 1):
        op = f"{'b' if n % 3 == 0 else 'a'}/noop/{n}"
        await write(client, record(op, EPOCH + n, request_id=f"r{n}", labels={"team": "x" if n % 2 else "y"}))
        named.append(op)
    return named[::-1]


async def test_C31_history_of_one_or_all_tables_is_listed_newest_first(client: aio.Client) -> None:
    named = await write_many(client, 9)
    await client.etcd.commit(Txn((), (Put(f"{client.keys.history(OperationRef.parse(named[0]))}.arg", b"{}"),)))
    assert ops(await client.history()) == named
    assert ops(await client.history("b")) == [op for op in named if op.startswith("b/")]
    assert ops(await client.history("b", 2)) == ["b/noop/9", "b/noop/6"]
    assert (await client.history("nothing"), (await client.history()).after) == ([], None)


async def test_C31_history_is_filtered_by_each_field(client: aio.Client) -> None:
    await write(client, record("t/noop/1", EPOCH, labels={"team": "x", "ticket": "1"}, request_id="r1"))
    await write(client, record("t/noop/2", EPOCH + HOUR, State.FAILED, labels={"team": "x"}))
    await write(client, record("t/index/col/1", EPOCH + 2 * HOUR, State.CANCELLED))
    await write(client, record("u/noop/1", EPOCH + 3 * HOUR, labels={"team": "y"}))

    async def found(*args: Any, **filters: Any) -> list[str]:
        return ops(await client.history(*args, **filters))

    assert await found(type="noop") == ["u/noop/1", "t/noop/2", "t/noop/1"]
    assert await found("t", type="index") == ["t/index/col/1"]
    named = OperationRef("t", "index", "col", 1)
    assert await found(op=str(named)) == await found("t", op=named) == ["t/index/col/1"]
    assert await found("u", op="t/noop/1") == await found(op="t/noop/1", states="failed") == []
    assert await found(states="failed") == ["t/noop/2"]
    assert await found(states=["success", "cancelled"]) == ["u/noop/1", "t/index/col/1", "t/noop/1"]
    assert await found(labels={"team": "x"}) == ["t/noop/2", "t/noop/1"]
    assert await found(labels={"team": "x", "ticket": "1"}) == ["t/noop/1"]
    assert await found(request_id="r1") == ["t/noop/1"]
    assert await found(since=EPOCH + HOUR) == ["u/noop/1", "t/index/col/1", "t/noop/2"]
    assert await found(until=EPOCH + HOUR) == ["t/noop/1"], "the end of the range is exclusive"
    there = timezone(timedelta(hours=5))
    moment = datetime.fromtimestamp(EPOCH + 2 * HOUR, there)
    assert await found(since=moment) == await found(since=moment.isoformat()) == ["u/noop/1", "t/index/col/1"]
    assert await found("t", since=EPOCH, until=EPOCH + 2 * HOUR, states="failed", labels={"team": "x"}) == ["t/noop/2"]


@pytest.mark.parametrize("window", [3, 7, 50_000])
async def test_C31_pages_neither_skip_nor_repeat_a_record(
    client: aio.Client, window: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """This holds while other operations end, and with few keys in memory at once."""
    monkeypatch.setattr(past, "WINDOW", window)
    monkeypatch.setattr(past, "SPARE", 1)
    monkeypatch.setattr(past, "PAGE", 2)
    named = await write_many(client, 20)
    # Operations that ended in one transaction have the same revision.
    await write(client, *(record(f"c/noop/{n}", EPOCH + 50, labels={"team": "x"}) for n in (1, 2, 3, 4, 5)))
    named = [f"c/noop/{n}" for n in (5, 4, 3, 2, 1)] + named
    for filters, wanted in (
        ({}, named),
        ({"labels": {"team": "x"}}, [op for op in named if op.startswith("c/") or int(op.rpartition("/")[2]) % 2]),
        ({"until": EPOCH + 3}, ["a/noop/2", "a/noop/1"]),
    ):
        seen: list[str] = []
        after: str | None = None
        for number in itertools.count():
            page = await client.history(limit=4, after=after, **filters)  # type: ignore[arg-type]
            assert len(page) <= 4
            seen += ops(page)
            await write(client, record(f"later{number}/noop/1", EPOCH + 99, labels={"team": "x"}))
            after = page.after
            if after is None:
                break
        assert seen == [op for op in wanted if op in seen]
        assert seen == wanted
        there = client.config.namespace
        listing = await client.etcd.list(f"{there}/distOpHistory.later", f"{there}/~")
        for kv in listing.kvs:
            await client.etcd.commit(Txn((), (Put(kv.key, b""),)))  # lists omit unreadable records


async def test_C31_a_search_by_time_stops_at_older_records(client: aio.Client, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(past, "PAGE", 5)
    await write_many(client, 30)
    await write(client, record("new/noop/1", EPOCH + 30 * HOUR))
    reads: list[Get] = []
    read = client.etcd.read

    async def recorded_read(*gets: Get) -> Any:
        reads.extend(gets)
        return await read(*gets)

    monkeypatch.setattr(client.etcd, "read", recorded_read)
    assert ops(await client.history(since=EPOCH + 20 * HOUR)) == ["new/noop/1"]
    assert len(reads) == 10, "one page with the record, and one page of older records"


async def test_a_compaction_during_a_listing_restarts_it(
    own_etcd: EmbeddedEtcd, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with aio.connect(own_etcd.endpoint) as client:
        named = await write_many(client, 6)
        pages, times = client.etcd.pages, itertools.count()

        async def small(start: str, end: str, **options: Any) -> AsyncIterator[Any]:
            first = next(times) == 0
            async for page in pages(start, end, page=2, **options):
                yield page
                if first:
                    await write(client, record("z/noop/1", EPOCH + 60))
                    await compacted(client.etcd, (await client.etcd.status()).revision)

        monkeypatch.setattr(client.etcd, "pages", small)
        assert ops(await client.history("a")) == [op for op in named if op.startswith("a/")]
        assert next(times) == 2


@pytest.mark.parametrize(
    ("query", "message"),
    [
        ({"table": 5}, "the name of a table must be a text"),
        ({"table": ""}, "a name must not be empty"),
        ({"type": "1x"}, "is not an operation type"),
        ({"op": "t"}, "is not an operation"),
        ({"op": 7}, "the operation must be named by a text, not 7"),
        ({"states": "running"}, "is not a state of an operation that has ended (states: success, failed, cancelled)"),
        ({"states": []}, "the list of states is empty"),
        ({"states": 5}, "the states must be a list of texts, not 5"),
        ({"since": "yesterday"}, "since must be a time such as 2013-01-01T00:00:00Z, not 'yesterday'"),
        ({"since": "2013-01-01T00:00:00"}, "since must have a time zone"),
        ({"until": datetime(2013, 1, 1)}, "until must have a time zone"),  # noqa: DTZ001
        ({"until": float("nan")}, "until must be a time"),
        ({"since": True}, "since must be a time"),
        ({"since": 20, "until": 20}, "since must be before until"),
        ({"labels": ["a"]}, "labels are a mapping"),
        ({"request_id": 4}, "the request id must be a text"),
        ({"limit": 0}, "the limit must be a whole number of at least 1, not 0"),
        ({"limit": True}, "the limit must be"),
        ({"after": "x"}, "'x' is not a page token"),
        ({"after": ""}, "is not a page token"),
        ({"after": 5}, "5 is not a page token"),
        ({"after": "bnVsbA"}, "is not a page token"),
        ({"after": "WzEsIngiXQ"}, "is not a page token"),
        ({"after": "WzAsInQvbm9vcC8xIl0"}, "is not a page token"),
    ],
)
async def test_C31_an_invalid_query_is_refused_in_one_sentence(
    client: aio.Client, query: dict[str, Any], message: str
) -> None:
    with pytest.raises(InvalidArgument) as raised:
        await client.history(**query)
    assert message in str(raised.value)
    assert "\n" not in str(raised.value)


# ---------------------------------------------------------------------- retention


def pruner(client: aio.Client) -> HistoryPruner:
    """The pruner of a daemon that is the only one."""
    limits = SimpleNamespace(pruned=2, prune_every=60.0, history_kept=HOUR)
    config = SimpleNamespace(history_limit=1000)
    log = logs.get("distop.test")
    ctx: Any = SimpleNamespace(
        client=client.etcd, keys=client.keys, limits=limits, config=config, commit=client.etcd.commit, log=log
    )
    ctx.clock = ClockCheck(client.etcd, log, lambda: None)
    return HistoryPruner(ctx)


async def test_C30_records_beyond_an_age_are_deleted_with_their_other_keys(
    client: aio.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """This covers all tables, holds few keys at once, and skips unreadable records."""
    monkeypatch.setattr(history_pruning, "OLDEST", 2)
    now = time.time()
    for n in range(1, 6):
        one = OperationRef(f"t{n % 2}", "noop", "", n)
        await write(client, record(str(one), now - 10 * HOUR))
        await client.etcd.commit(Txn((), (Put(client.keys.beside_history(one, "arg"), b"{}"),)))
    unreadable = client.keys.history(OperationRef("t0", "noop", "", 90))
    await client.etcd.commit(Txn((), (Put(unreadable, b"nonsense"),)))
    await write(client, record("t1/noop/6", now - 10 * HOUR), record("t2/noop/7", now - 10 * HOUR))
    await write(client, record("t1/noop/8", now - 2 * HOUR))
    await age_history(client.etcd, client.keys)
    await pruner(client).forget_older(3 * HOUR)
    left = await client.etcd.list(*client.keys.family("distOpHistory"), keys_only=True)
    assert [kv.key for kv in left.kvs] == sorted([unreadable, client.keys.history(OperationRef("t1", "noop", "", 8))])
    await pruner(client).forget_older(HOUR)
    assert await client.history() == []


async def test_C30_one_daemon_deletes_old_records_and_keeps_those_of_the_last_hour(client: aio.Client) -> None:
    now = time.time()
    await write(client, record("t/noop/1", now - 2 * HOUR))
    await age_history(client.etcd, client.keys)
    await write(client, record("t/noop/2", now - HOUR / 2))
    one = pruner(client)
    nodes = dict.fromkeys(("i1", "i2"), SimpleNamespace(clock=0, clock_unknown=""))
    one._ctx.incarnation, one._ctx.cluster = "i2", SimpleNamespace(nodes=nodes)  # type: ignore[attr-defined]
    slept: list[float] = []

    async def sleep(seconds: float) -> None:
        slept.append(seconds)
        if len(slept) == 2:
            raise TimeoutError
        one._ctx.cluster.nodes.pop("i1")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(history_pruning.asyncio, "sleep", sleep)
        with pytest.raises(TimeoutError):
            await one.keep_young(10.0)
    assert ops(await client.history()) == ["t/noop/2"]
    assert slept == [2.5, 2.5]


def test_C30_a_daemon_deletes_records_older_than_its_history_age(group: Daemons) -> None:
    """This includes tables on which no more operations end."""
    now = time.time()
    for op, ago in (("gone/noop/1", 5 * HOUR), ("t/noop/1", 2 * HOUR)):
        write_now(group, record(op, now - ago))
    advance_an_hour(group)
    group.start("a", options=("--history-age", "4h"))
    group.eventually(lambda: ops(group.client.history()) == ["t/noop/1"], "the older record is deleted")


def write_now(group: Daemons, one: History) -> None:
    """Write a record without its operation, and compact etcd, so that audits start after it."""

    async def work() -> None:
        async with aio.connect(group.endpoint) as client:
            await write(client, one)
            await compacted(client.etcd, (await client.etcd.status()).revision)

    asyncio.run(work())


def advance_an_hour(group: Daemons) -> None:
    async def work() -> None:
        async with aio.connect(group.endpoint) as client:
            await age_history(client.etcd, client.keys)

    asyncio.run(work())


class AheadClock(System):
    """A machine whose wall clock is two hours ahead."""

    def time(self) -> float:  # type: ignore[override]
        return System.time() + 2 * HOUR


async def test_a_clock_two_hours_ahead_deletes_no_record_of_the_last_hour(
    client: aio.Client, caplog: pytest.LogCaptureFixture
) -> None:
    """Deletion by count relies on etcd's leases, and with a wrong clock there is no deletion by age."""
    one = pruner(client)
    one._ctx.config.history_limit = 1
    now = time.time()
    await write(client, record("t/noop/1", now - 90), record("t/noop/2", now - 60))
    reset = source.set(AheadClock())
    try:
        await one.prune("t")
        assert ops(await client.history()) == ["t/noop/2", "t/noop/1"]
        young = [one for one in watermarks(client.keys, await marks(client)) if not one.old]
        assert len(young) == 1, "there is a watermark for the records"
        await one.prune("u")
        assert len(await marks(client)) == 2, "a recent watermark is used again"
        assert not await one._ctx.clock.agrees()
        assert 7190 < one._ctx.clock.ahead <= 7200
    finally:
        source.reset(reset)
    assert re.search(r"This machine's clock is 7(19\d|200) s ahead of etcd's\. ", caplog.text)
    assert await one._ctx.clock.agrees()
    assert "agrees with etcd's again" in caplog.text
    await client.etcd.revoke(young[0].lease)
    one._last.clear()
    await one.prune("t")
    assert ops(await client.history()) == ["t/noop/2"], "the hour has passed by etcd's time"


async def test_a_late_watermark_does_not_cover_records_written_since_its_lease(
    client: aio.Client,
) -> None:
    """The hour of a watermark starts with the grant of its lease, but etcd applied the write much later."""
    one, late = pruner(client), []
    one._ctx.config.history_limit = 1

    async def commit(txn: Txn, deadline: float | None = None) -> TxnResult:
        if txn.label == "watermark":
            late.append(txn)
            raise OutcomeUnknown("etcd stopped answering")
        return await client.etcd.commit(txn, deadline=deadline)

    one._ctx.commit = commit
    now = time.time()
    await write(client, record("t/noop/1", now - 90), record("t/noop/2", now - 60))
    await one.prune("t")
    (put,) = late
    await write(client, record("t/noop/3", now), record("t/noop/4", now))
    assert (await client.etcd.commit(put)).succeeded
    (mark,) = watermarks(client.keys, await marks(client))
    await client.etcd.revoke(mark.lease)
    one._last.clear()
    await one.prune("t")
    assert ops(await client.history()) == ["t/noop/4", "t/noop/3"]


async def marks(client: aio.Client) -> tuple[KeyValue, ...]:
    return (await client.etcd.list(*client.keys.family(K.WATERMARK))).kvs


def test_operations_of_a_series_and_of_a_graph_have_their_labels(group: Daemons) -> None:
    group.start("a")
    group.client.start_operation("noop", TABLE, every=Every(0.1, times=2), labels={"team": "x"})
    group.client.start_operations([Start("noop", TABLE, options={"labels": {"team": "y"}})])
    group.eventually(
        lambda: len(group.client.history(labels={"team": "x"})) == 2, "both operations of the series have ended"
    )
    group.eventually(
        lambda: len(group.client.history(labels={"team": "y"})) == 1, "the operation of the graph has ended"
    )


def test_C30_result_files_are_deleted_with_their_record_and_kept_otherwise(
    group: Daemons, sample_env: dict[str, str], tmp_path: Path
) -> None:
    """Files left by a daemon that died before it removed them are deleted, too. Other folders are kept."""
    size, now = 200_000, time.time()
    write_now(group, record("t/large/85", now - HOUR))
    shared = ("--shared-dir", str(tmp_path / "shared"))
    (daemon,) = group.start("a", options=shared, env=sample_env)
    assert group.client.start_operation("large", "t", {"sizes": [size, 3]}).wait(60).success
    assert daemon.stop() == 0
    (results,) = (tmp_path / "shared").glob("*/results/t/large")
    # Left over; of a kept record; of a deleted record; of a later operation; of no operation.
    for name in ("80", "85", "90", "95", "notes"):
        (results / name).mkdir()
        (results / name / "000000-7-i.json").write_text("{}")
    write_now(group, record("t/large/90", now - 5 * HOUR))
    advance_an_hour(group)
    group.start("b", options=(*shared, "--history-age", "4h"), env=sample_env)
    group.eventually(
        lambda: not (results / "90").exists() and not (results / "80").exists(), "both folders are deleted"
    )
    assert {path.name for path in results.iterdir()} == {"1", "85", "95", "notes"}
    assert [path.stat().st_size > size for path in (results / "1").iterdir()] == [True]
    assert "t/large/90" not in ops(group.client.history())
