"""Reports that come while one is being committed, on the model of etcd."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

from distop.core.claiming import Guarded
from distop.core.limits import Limits
from distop.core.txn import Put, Txn, TxnResult, absent
from distop.logs import ContextLogger
from distop.node.reporter import Reporter
from tests.support.modelclient import ModelClient


def report(n: int) -> Guarded:
    key = f"k{n}"
    return Guarded(absent(key), (Put(key, b"1"), Put(f"{key}.a", b"1"), Put(f"{key}.b", b"1")), 1, "report")


def written(txn: Txn) -> int:
    """How many reports a transaction has."""
    return len(txn.compares)


def test_part_of_a_group_waits_for_the_commit_under_way_and_a_whole_one_does_not() -> None:
    """Parts went beside up to two others, in twice as many transactions."""

    async def main() -> None:
        client = ModelClient()
        lost: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        log = ContextLogger(logging.getLogger("tests"), {})
        reporter = Reporter(client, lost, log, Limits(reports=3))  # type: ignore[arg-type]
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
        assert len(client.committed) == 1, "less than a group waits"
        reporter.submit([(report(n), applied.append) for n in (3, 4)])
        await client.until(lambda: len(client.committed) == 2)
        await asyncio.sleep(0)
        assert list(map(written, client.committed)) == [1, 3], "a whole group goes"
        held.set()
        await reporter.drain()
        assert list(map(written, client.committed)) == [1, 3, 1]
        assert len(applied) == 5
        assert all(applied)

    asyncio.run(main())
