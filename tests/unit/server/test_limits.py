"""Limits of open operations, jobs and bytes of arguments, of services that share one etcd."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import grpc
import pytest
from google.rpc import error_details_pb2, status_pb2

from distop.client import service_messages as m
from distop.client.service_errors import DETAILS, error_of
from distop.errors import LimitExceeded
from distop.protocol.keys import Keys
from distop.protocol.plan import Plan
from distop.protocol.records import OperationRef
from distop.v1 import operations_pb2 as o
from distop.v1 import policies_pb2
from tests.unit.support.model_service import ModelService, identities
from tests.unit.support.model_submission import TABLE, Etcd

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

START = "distop.v1.Operations/Start"


def access(limits: str) -> str:
    grant = '[[grants]]\nto = ["etl", "other"]\nrole = "admin"\n'
    return identities(etl=limits, other="") + grant


@asynccontextmanager
async def two(folder: Path, limits: str) -> AsyncIterator[tuple[ModelService, ModelService]]:
    """Two services on one etcd."""
    etcd = Etcd()
    for name in ("a", "b"):
        (folder / name).mkdir()
    first, second = (ModelService(etcd, folder / name, access(limits)) for name in ("a", "b"))
    async with first, second:
        yield first, second


def start(n: int = 0, **options: Any) -> o.StartRequest:
    given = o.StartOptions(**options)
    return o.StartRequest(type="noop", table=TABLE, arg=m.json_message({"n": n}), options=given)


async def test_open_operations_are_limited_over_all_services(tmp_path: Path) -> None:
    async with two(tmp_path, "open_operations = 3") as (first, second):
        for n, service in enumerate((first, second, first)):
            assert await service.code(START, start(n), "etl") == "OK"
        body = {"type": "noop", "table": TABLE, "arg": {}}
        for service in (first, second):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await service.call(START, start(9), "etl")
            assert caught.value.code().name == "RESOURCE_EXHAUSTED"
            assert "etl has 3 open operations, and may have 3" in str(caught.value.details())
            assert isinstance(error_of(caught.value, "s", writes=True), LimitExceeded)
            answer = await service.ask("POST", "/v1/operations", body, "etl")
            assert (answer.status_code, answer.headers["retry-after"]) == (429, "1")
            assert answer.json()["error"]["retryable"] is True
            assert await service.code(START, start(9), "other") == "OK"
        assert ("etl", "Operations/Start", "LimitExceeded") in second.verdicts()
        ended = OperationRef.parse(f"{TABLE}/noop/1")
        first.etcd.put(Keys().pending(ended), b"cleaning")
        assert await second.code(START, start(9), "etl") == "OK"


def test_a_refusal_says_when_to_call_again(tmp_path: Path) -> None:
    async def work() -> Any:
        async with two(tmp_path, "open_operations = 1") as (first, _):
            await first.call(START, start(), "etl")
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await first.call(START, start(1), "etl")
            return caught.value.trailing_metadata()

    status = status_pb2.Status.FromString(dict(asyncio.run(work()))[DETAILS])
    assert any(one.Is(error_details_pb2.RetryInfo.DESCRIPTOR) for one in status.details)


async def test_a_repeated_start_is_answered_at_the_limit(tmp_path: Path) -> None:
    async with two(tmp_path, "open_operations = 1") as (first, second):
        once = start(request_id="once")
        answer = await first.call(START, once, "etl")
        again = await second.call(START, once, "etl")
        assert (again.op, again.already_started) == (answer.op, True)
        assert await second.code(START, start(request_id="other"), "etl") == "RESOURCE_EXHAUSTED"


async def test_a_repeated_graph_and_preparation_are_answered_at_the_limit(tmp_path: Path) -> None:
    async with two(tmp_path, "open_operations = 3") as (first, second):
        steps = [o.StartGraphRequest.Start(type="noop", table=TABLE) for _ in range(2)]
        graph = o.StartGraphRequest(starts=steps, request_id="graph")
        prepared = o.PrepareRequest(type="noop", table=TABLE, external_id="tx")
        for method, request in (("StartGraph", graph), ("Prepare", prepared)):
            for service in (first, second):
                assert await service.code(f"distop.v1.Operations/{method}", request, "etl") == "OK"
        assert len(first.etcd.operations()) == 3
        graph.request_id = "another"
        assert await second.code("distop.v1.Operations/StartGraph", graph, "etl") == "RESOURCE_EXHAUSTED"
        assert len(first.etcd.operations()) == 3


async def test_concurrent_starts_exceed_the_limit_by_at_most_one_for_each_other_service(tmp_path: Path) -> None:
    async with two(tmp_path, "open_operations = 5") as services:
        codes = await asyncio.gather(*(services[n % 2].code(START, start(n), "etl") for n in range(40)))
        assert set(codes) == {"OK", "RESOURCE_EXHAUSTED"}
        assert 5 <= len(services[0].etcd.operations()) <= 6


async def test_jobs_of_open_operations_are_limited(tmp_path: Path) -> None:
    async with two(tmp_path, "open_jobs = 10") as (first, second):
        assert await first.code(START, start(), "etl") == "OK"
        named = o.StartOptions.Texts(values=[f"p{n}" for n in range(5)])
        assert await second.code(START, start(1, partitions=named), "etl") == "OK"
        ref = OperationRef.parse(f"{TABLE}/noop/1")
        first.etcd.put(Keys().of(ref, "plan"), Plan(5, "", "", 1).encode())
        answer = await first.ask("POST", "/v1/operations", {"type": "noop", "table": TABLE}, "etl")
        assert answer.status_code == 429
        assert "the open operations of etl have 10 jobs, and may have 10" in answer.text


async def test_bytes_of_an_argument_are_limited(tmp_path: Path) -> None:
    async with two(tmp_path, "argument_bytes = 20") as (first, _):
        large = m.json_message({"text": "x" * 20})
        policy = policies_pb2.SetPolicyRequest(table=TABLE, name="p", start="noop", every="1h", arg=large)
        request = start()
        request.arg.CopyFrom(large)
        graph = o.StartGraphRequest(starts=[o.StartGraphRequest.Start(type="noop", table=TABLE, arg=large)])
        revision = first.etcd.store.revision
        for method, message in (
            ("Operations/Start", request),
            ("Operations/StartGraph", graph),
            ("Operations/Prepare", o.PrepareRequest(type="noop", table=TABLE, arg=large, external_id="a")),
            ("Policies/Set", policy),
        ):
            assert await first.code(f"distop.v1.{method}", message, "etl") == "INVALID_ARGUMENT"
        answer = await first.ask("POST", "/v1/operations", {"type": "noop", "table": TABLE, "arg": ["x" * 20]}, "etl")
        assert (answer.status_code, "the argument has 24 bytes" in answer.text) == (400, True)
        assert first.etcd.store.revision == revision
        assert await first.code(START, start(), "etl") == "OK"
        assert await first.code(START, request, "other") == "OK"


async def test_a_cancelled_operation_is_counted_until_it_has_ended(tmp_path: Path) -> None:
    async with two(tmp_path, "open_operations = 1") as (first, second):
        await first.call(START, start(), "etl")
        cancel = o.CancelRequest(op=f"{TABLE}/noop/1")
        assert await second.code("distop.v1.Operations/Cancel", cancel, "etl") == "OK"
        assert await second.code(START, start(1), "etl") == "RESOURCE_EXHAUSTED", "it has not ended yet"
