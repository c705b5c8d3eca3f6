"""Types without code: limits and labels of executors are refused for them, however an operation is started."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from distop import Every, Start, chain
from distop.errors import InvalidArgument
from distop.protocol.behavior_declaration import Declaration
from tests.unit.support.model_submission import KEYS, TABLE, Etcd, run

REFUSED = "copy has no code that executors run, and workers cannot own jobs .*: leave out {}$"
GIVEN: list[dict[str, Any]] = [{"max_jobs": 1}, {"max_jobs_per_executor": 1}, {"where": {"zone": "a"}}]
Way = Callable[[Etcd, dict[str, Any]], Awaitable[Any]]


def copy(given: dict[str, Any]) -> Start:
    return Start("copy", TABLE, {}, options={"partitions": ["p"], **given})


async def start(etcd: Etcd, given: dict[str, Any]) -> Any:
    return await etcd.client.start_operation("copy", TABLE, {}, partitions=["p"], **given)


async def series(etcd: Etcd, given: dict[str, Any]) -> Any:
    return await start(etcd, {**given, "every": Every(60)})


async def graph(etcd: Etcd, given: dict[str, Any]) -> Any:
    return await etcd.client.start_operations(chain(copy({}), copy(given)))


async def large_graph(etcd: Etcd, given: dict[str, Any]) -> Any:
    return await etcd.client.start_operations([*(copy({}) for _ in range(100)), copy(given)])


async def prepare(etcd: Etcd, given: dict[str, Any]) -> Any:
    return await etcd.client.prepare_operation("copy", TABLE, {}, external_id="x", partitions=["p"], **given)


async def transaction(etcd: Etcd, given: dict[str, Any]) -> Any:
    return await etcd.client.transaction(start=copy(given))


async def submission(etcd: Etcd, given: dict[str, Any]) -> Any:
    return await etcd.client.submission(copy(given))


@pytest.mark.parametrize("given", GIVEN, ids=lambda given: next(iter(given)))
@pytest.mark.parametrize("way", [start, series, graph, large_graph, prepare, transaction, submission])
def test_no_way_to_start_takes_a_limit_or_labels(way: Way, given: dict[str, Any]) -> None:
    """Workers leave such operations to executors, which have no code: it would never end."""

    async def work(etcd: Etcd) -> list[str]:
        etcd.put(KEYS.behavior("copy"), Declaration("copy", code=False).encode())
        with pytest.raises(InvalidArgument, match=REFUSED.format(next(iter(given)))):
            await way(etcd, given)
        return etcd.operations()

    assert run(work) == []


def test_alter_takes_no_limit_and_lifts_one() -> None:
    async def work(etcd: Etcd) -> None:
        etcd.put(KEYS.behavior("copy"), Declaration("copy", code=False).encode())
        op = await start(etcd, {})
        for given in GIVEN[:2]:
            with pytest.raises(InvalidArgument, match=REFUSED.format(next(iter(given)))):
                await op.alter(**given)
        await op.alter(max_jobs=0, max_jobs_per_executor=0, priority=3)

    run(work)
