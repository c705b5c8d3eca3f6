"""Concurrent starts on a real etcd: each starts one operation, and they share transactions."""

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
from distop.errors import EtcdUnavailable, OutcomeUnknown
from distop.protocol.txn import Get
from tests.integration.scripted_daemons import ScriptedDaemons
from tests.support.etcd import own_etcd, shared_etcd, until
from tests.support.proxy import Mode, TcpProxy
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
    scripted = ScriptedDaemons(client.etcd, client.keys)
    await scripted.publish("noop", arg_schema=SCHEMA)
    await scripted.publish("one", instances="one", object_field="column", arg_schema=SCHEMA)
    await scripted.table(TABLE)
    await scripted.join("n1", "noop", "one")


async def run_counts(client: aio.Client, type_name: str = "noop") -> tuple[int, int, int]:
    """The number of running operations, the next instance number, and the number of transactions that drew numbers."""
    run_ops, next_number = await client.etcd.read(
        Get(client.keys.run_ops(TABLE)), Get(client.keys.next_instance(TABLE, type_name))
    )
    assert run_ops.kv is not None
    assert next_number.kv is not None
    return json.loads(run_ops.kv.value)[type_name], int(next_number.kv.value), next_number.kv.version


async def args(client: aio.Client, ops: Sequence[aio.Operation]) -> list[int]:
    found = [await client.etcd.get(client.keys.of(op.parts, "arg")) for op in ops]
    return [json.loads(kv.value)["n"] for kv in found if kv is not None]


async def test_eighty_concurrent_starts_take_two_transactions(client: aio.Client) -> None:
    ops = await asyncio.gather(*(client.start_operation("noop", TABLE, {"n": n}) for n in range(80)))
    assert sorted(op.instance_id for op in ops) == list(range(1, 81))
    assert await run_counts(client) == (80, 81, 2), "the first transaction starts sixty-four operations"
    assert await args(client, ops) == list(range(80))
    assert {status.state for status in await client.operations(TABLE)} == {"running"}


async def test_concurrent_starts_of_two_clients_are_numbered_without_gaps(client: aio.Client) -> None:
    async with aio.connect(client.config.etcd.endpoints, namespace=client.config.namespace) as other:
        callers = [(one, n) for n in range(40) for one in (client, other)]
        ops = await asyncio.gather(*(one.start_operation("noop", TABLE, {"n": n}) for one, n in callers))
    assert sorted(op.instance_id for op in ops) == list(range(1, 81))
    running, next_number, transactions = await run_counts(client)
    assert (running, next_number) == (80, 81)
    assert transactions < 80
    assert await args(client, ops) == [n for _, n in callers]


async def test_starts_in_one_transaction_are_refused_independently(client: aio.Client) -> None:
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


async def test_starts_with_one_request_id_in_one_transaction_share_an_operation(client: aio.Client) -> None:
    ids = [None, "r", None, "r", "s", "r"]
    ops = await asyncio.gather(*(client.start_operation("noop", TABLE, {"n": 1}, request_id=one) for one in ids))
    assert ops[1].ref == ops[3].ref == ops[5].ref
    assert len({op.ref for op in ops}) == 4
    assert (await run_counts(client))[:2] == (4, 5)
    again = await asyncio.gather(
        *(client.start_operation("noop", TABLE, {"n": n}, request_id="r") for n in (1, 2, 1)), return_exceptions=True
    )
    assert [str(getattr(op, "ref", op)) for op in (again[0], again[2])] == [ops[1].ref] * 2
    assert f"the request id 'r' has started {ops[1].ref} with another argument" in str(again[1])


async def test_a_call_cancelled_while_it_waits_starts_no_operation(client: aio.Client) -> None:
    calls = [asyncio.ensure_future(client.start_operation("noop", TABLE, {"n": 0}))]
    for _ in range(3):
        await asyncio.sleep(0)  # the first has been sent
    calls += [asyncio.ensure_future(client.start_operation("noop", TABLE, {"n": n})) for n in range(1, 20)]
    await asyncio.sleep(0)  # the others wait
    for call in calls[1::2]:
        call.cancel()
    answers = await asyncio.gather(*calls, return_exceptions=True)
    ops = [op for op in answers if isinstance(op, aio.Operation)]
    assert await args(client, ops) == list(range(0, 20, 2))
    assert (await run_counts(client))[:2] == (10, 11)


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
    running, next_number, transactions = asyncio.run(with_client(run_counts))
    assert (running, next_number) == (64, 65)
    assert transactions < 64


async def test_starts_during_a_close_have_an_unknown_outcome(client: aio.Client, shared_etcd: EmbeddedEtcd) -> None:
    arg = {"n": 1, "column": "of the first"}
    async with TcpProxy(shared_etcd.port, trigger=(b"of the first", Mode.DROP_ANSWERS)) as proxy:
        async with aio.connect(proxy.endpoint, namespace=client.config.namespace) as closed:
            first = asyncio.ensure_future(closed.start_operation("noop", TABLE, arg, request_id="first"))
            await until(lambda: proxy.triggered)
            queued = asyncio.ensure_future(closed.start_operation("noop", TABLE, {"n": 2}))
            await asyncio.sleep(0)
        with pytest.raises(OutcomeUnknown, match="request_id='first'"):
            await first
        with pytest.raises(EtcdUnavailable):  # it was never sent
            await queued
    assert await args(client, [await client.start_operation("noop", TABLE, arg, request_id="first")]) == [1]


STARTS_UNTIL_KILLED = """
import asyncio, sys
from distop import aio
from distop.errors import EtcdUnavailable, OutcomeUnknown

async def main(endpoint, each):
    async with aio.connect(endpoint) as client:
        async def call(n):
            while True:
                op = await client.start_operation("noop", "t", {"n": n})
                print(op.instance_id, flush=True)
        await asyncio.gather(*map(call, range(each)))

asyncio.run(main(sys.argv[1], 12))
"""


def test_operations_started_by_a_killed_client_exist_and_starts_continue(own_etcd: EmbeddedEtcd) -> None:
    """Acknowledged operations exist, the last transaction is complete or missing, and other clients can start more."""

    async def before() -> None:
        async with aio.connect(own_etcd.endpoint) as client:
            await prepare(client)

    asyncio.run(before())
    words = [sys.executable, "-c", STARTS_UNTIL_KILLED, own_etcd.endpoint]
    acknowledged: list[int] = []
    with subprocess.Popen(words, cwd=ROOT, env=os.environ, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            acknowledged.append(int(line))
            if len(acknowledged) == 60:
                process.send_signal(signal.SIGKILL)
                break
        acknowledged += [int(line) for line in process.stdout.read().split()]

    async def after() -> tuple[int, int]:
        async with aio.connect(own_etcd.endpoint) as client:
            running, next_number, _ = await run_counts(client)
            more = await asyncio.gather(*(client.start_operation("noop", TABLE, {"n": n}) for n in range(10)))
            assert sorted(op.instance_id for op in more) == list(range(next_number, next_number + 10))
            return running, next_number

    running, next_number = asyncio.run(after())
    assert len(set(acknowledged)) == len(acknowledged)
    assert max(acknowledged) < next_number == running + 1
    assert violations(own_etcd.endpoint) == []
