"""Many starts of one client at the same time, on a real etcd: each is one, and they share transactions."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import distop
from distop import aio
from distop.protocol.txn import Get
from tests.integration.hand import Hand
from tests.support.etcd import own_etcd, shared_etcd
from tests.support.replay import violations

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence

    from distop.store.embedded import EmbeddedEtcd

__all__ = ["own_etcd", "shared_etcd"]

pytestmark = pytest.mark.etcd

ROOT = Path(__file__).resolve().parents[2]
TABLE = "t"
SCHEMA = {"type": "object", "properties": {"n": {"type": "integer"}, "column": {"type": "string"}}}
_numbers = itertools.count()


@pytest.fixture
async def client(shared_etcd: EmbeddedEtcd) -> AsyncIterator[aio.Client]:
    async with aio.connect(shared_etcd.endpoint, namespace=f"starts{next(_numbers)}") as client:
        await prepare(client)
        yield client


async def prepare(client: aio.Client) -> None:
    hand = Hand(client.etcd, client.keys)
    await hand.publish("noop", arg_schema=SCHEMA)
    await hand.publish("one", instances="one", object_field="column", arg_schema=SCHEMA)
    await hand.table(TABLE)
    await hand.join("n1", "noop", "one")


async def counted(client: aio.Client, type_name: str = "noop") -> tuple[int, int, int]:
    """What runs, the number of the next instance, and how many transactions drew numbers."""
    run_ops, following = await client.etcd.read(
        Get(client.keys.run_ops(TABLE)), Get(client.keys.next_instance(TABLE, type_name))
    )
    assert run_ops.kv is not None
    assert following.kv is not None
    return json.loads(run_ops.kv.value)[type_name], int(following.kv.value), following.kv.version


async def args(client: aio.Client, ops: Sequence[aio.Operation]) -> list[int]:
    found = [await client.etcd.get(client.keys.of(op.parts, "arg")) for op in ops]
    return [json.loads(kv.value)["n"] for kv in found if kv is not None]


async def test_eighty_starts_at_once_are_eighty_operations_in_three_transactions(client: aio.Client) -> None:
    ops = await asyncio.gather(*(client.start_operation("noop", TABLE, {"n": n}) for n in range(80)))
    assert sorted(op.instance_id for op in ops) == list(range(1, 81))
    assert await counted(client) == (80, 81, 3), "of which the second starts sixty-four, in parcels"
    assert await args(client, ops) == list(range(80))
    assert {status.state for status in await client.operations(TABLE)} == {"running"}


async def test_two_clients_that_race(client: aio.Client) -> None:
    async with aio.connect(client.config.etcd.endpoints, namespace=client.config.namespace) as other:
        callers = [(one, n) for n in range(40) for one in (client, other)]
        ops = await asyncio.gather(*(one.start_operation("noop", TABLE, {"n": n}) for one, n in callers))
    assert sorted(op.instance_id for op in ops) == list(range(1, 81))
    running, following, transactions = await counted(client)
    assert (running, following) == (80, 81)
    assert transactions < 80
    assert await args(client, ops) == [n for _, n in callers]


async def test_of_a_group_each_is_refused_by_itself(client: aio.Client) -> None:
    first = await client.start_operation("one", TABLE, {"column": "a"})
    columns: list[Any] = ["x", "a", "b", 5, "c", "b"]
    answers = await asyncio.gather(
        *(client.start_operation("one", TABLE, {"column": column}) for column in columns), return_exceptions=True
    )
    started = [answers[n] for n in (0, 2, 4)]
    assert sorted(op.ref for op in started if isinstance(op, aio.Operation)) == ["t/one/b/3", "t/one/c/4", "t/one/x/2"]
    for n, kind, words in (
        (1, distop.Incompatible, f"one on t for a cannot start while {first.ref} runs: one runs one at a time"),
        (3, distop.InvalidArgument, "the argument of one is invalid: at column: 5 is not of type string"),
        (5, distop.Incompatible, "one on t for b cannot start while t/one/b/3 runs: one runs one at a time"),
    ):
        assert type(answers[n]) is kind
        assert words in str(answers[n])


async def test_a_request_twice_in_one_group_is_one_operation(client: aio.Client) -> None:
    ids = [None, "r", None, "r", "s", "r"]
    ops = await asyncio.gather(*(client.start_operation("noop", TABLE, {"n": 1}, request_id=one) for one in ids))
    assert ops[1].ref == ops[3].ref == ops[5].ref
    assert len({op.ref for op in ops}) == 4
    assert (await counted(client))[:2] == (4, 5)
    again = await asyncio.gather(
        *(client.start_operation("noop", TABLE, {"n": n}, request_id="r") for n in (1, 2, 1)), return_exceptions=True
    )
    assert [str(getattr(op, "ref", op)) for op in (again[0], again[2])] == [ops[1].ref] * 2
    assert f"the request id 'r' has started {ops[1].ref} with another argument" in str(again[1])


async def test_who_is_cancelled_while_it_waits_is_not_started(client: aio.Client) -> None:
    calls = [asyncio.ensure_future(client.start_operation("noop", TABLE, {"n": n})) for n in range(20)]
    await asyncio.sleep(0)  # the first is under way, the others wait
    for call in calls[1::2]:
        call.cancel()
    answers = await asyncio.gather(*calls, return_exceptions=True)
    ops = [op for op in answers if isinstance(op, aio.Operation)]
    assert await args(client, ops) == list(range(0, 20, 2))
    assert (await counted(client))[:2] == (10, 11)


def test_threads_share_transactions(shared_etcd: EmbeddedEtcd) -> None:
    namespace = f"starts{next(_numbers)}"

    async def with_client(work: Any) -> Any:
        async with aio.connect(shared_etcd.endpoint, namespace=namespace) as client:
            return await work(client)

    asyncio.run(with_client(prepare))
    found: list[int] = []
    with distop.connect(shared_etcd.endpoint, namespace=namespace) as client:
        ready = threading.Barrier(16)

        def call() -> None:
            ready.wait()
            found.extend(client.start_operation("noop", TABLE).instance_id for _ in range(4))

        threads = [threading.Thread(target=call) for _ in range(16)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert sorted(found) == list(range(1, 65))
    running, following, transactions = asyncio.run(with_client(counted))
    assert (running, following) == (64, 65)
    assert transactions < 64


KILLED = """
import asyncio, sys
from distop import aio

async def main(endpoint, each):
    async with aio.connect(endpoint) as client:
        async def call(n):
            while True:
                op = await client.start_operation("noop", "t", {"n": n})
                print(op.instance_id, flush=True)
        await asyncio.gather(*map(call, range(each)))

asyncio.run(main(sys.argv[1], 12))
"""


def test_a_client_that_is_killed_in_the_middle(own_etcd: EmbeddedEtcd) -> None:
    """What it was told of is there; of the group under way all are there or none; and others go on."""

    async def before() -> None:
        async with aio.connect(own_etcd.endpoint) as client:
            await prepare(client)

    asyncio.run(before())
    words = [sys.executable, "-c", KILLED, own_etcd.endpoint]
    told: list[int] = []
    with subprocess.Popen(words, cwd=ROOT, env=os.environ, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            told.append(int(line))
            if len(told) == 60:
                process.send_signal(signal.SIGKILL)
                break
        told += [int(line) for line in process.stdout.read().split()]

    async def after() -> tuple[int, int]:
        async with aio.connect(own_etcd.endpoint) as client:
            running, following, _ = await counted(client)
            more = await asyncio.gather(*(client.start_operation("noop", TABLE, {"n": n}) for n in range(10)))
            assert sorted(op.instance_id for op in more) == list(range(following, following + 10))
            return running, following

    running, following = asyncio.run(after())
    assert len(set(told)) == len(told)
    assert max(told) < following == running + 1
    assert violations(own_etcd.endpoint) == []
