"""Starts that are made at the same time share a call, and each has its own permission, audit line and answer."""

from __future__ import annotations

import asyncio
import json
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import pytest

from distop import aio
from distop.client.async_client import Client
from distop.client.connection_options import configure
from distop.errors import (
    DistopError,
    EtcdUnavailable,
    InvalidArgument,
    LimitExceeded,
    OutcomeUnknown,
    PermissionDenied,
)
from distop.protocol.records import OperationRef
from distop.server import handlers
from distop.server.call_admission import AccessFile, AuditLog, CallAdmission
from distop.server.grpc_server import GrpcServer
from distop.server.handlers import services
from distop.services.submission.insertion import Started
from distop.v1 import operations_pb2
from tests.unit.server.test_access import FILE

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

TOKEN = "etl token of the tests"
TABLE = "sales.orders"


class Backend:
    """Starts operations, each when ``open`` is set. ``errors``: those of a request id."""

    def __init__(self) -> None:
        self.open = asyncio.Event()
        self.open.set()
        self.errors: dict[str, Exception] = {}
        self.started: list[tuple[str, str, str | None]] = []

    async def start(self, type_name: str, table: str, arg: bytes, options: Any, new_id: str = "") -> Started:
        await self.open.wait()
        if (error := self.errors.get(options.request_id)) is not None:
            raise error
        self.started.append((type_name, table, options.submitter))
        return Started(OperationRef(table, type_name, "", len(self.started)), False)


class CountingAdmission(CallAdmission):
    """Counts the calls that arrive."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.calls: list[str] = []
        self.called = asyncio.Event()

    def check_identity(self, call: str, credentials: Any) -> None:
        self.calls.append(call)
        self.called.set()
        super().check_identity(call, credentials)


@asynccontextmanager
async def connected(backend: Any, admission: CallAdmission, token: str = "") -> AsyncIterator[aio.Client]:
    """A client of a service with this backend."""
    server = GrpcServer(services(backend), admission)
    port = await server.start("127.0.0.1:0")
    try:
        async with asyncio.timeout(60), Client(configure(f"grpc://127.0.0.1:{port}", token=token)) as client:
            yield client
    finally:
        await server.stop(0)


@pytest.fixture
def guarded(tmp_path: Path) -> CountingAdmission:
    path = tmp_path / "access.toml"
    path.write_text(FILE)
    return CountingAdmission(AccessFile(path), AuditLog(tmp_path / "audit.log"))


async def test_starts_that_are_made_during_a_call_share_the_next_one() -> None:
    backend, admission = Backend(), CountingAdmission()
    async with connected(backend, admission) as client:
        first = await client.start_operation("validate", TABLE)
        assert (first.ref, admission.calls) == (f"{TABLE}/validate/1", ["Operations/Start"])
        ops = await asyncio.gather(*(client.start_operation("validate", TABLE) for _ in range(50)))
        assert len({one.ref for one in ops}) == 50
        assert len(admission.calls) < 10
        assert "Operations/BatchStart" in admission.calls


async def test_a_start_that_fails_does_not_stop_the_others(guarded: CountingAdmission, tmp_path: Path) -> None:
    backend = Backend()
    backend.errors = {"wrong": InvalidArgument("no"), "odd": ValueError("a secret"), "lost": OutcomeUnknown("lost")}
    async with connected(backend, guarded, TOKEN) as client:

        def start(request_id: str, **options: Any) -> Any:
            return client.start_operation("validate", TABLE, request_id=request_id, **options)

        others = [start("wrong"), start("odd"), start("lost"), start("theirs", submitter="ann"), start("b")]
        found = await asyncio.gather(start("a"), *others, return_exceptions=True)
    kinds = [type(one) for one in found]
    assert kinds == [aio.Operation, InvalidArgument, DistopError, OutcomeUnknown, PermissionDenied, aio.Operation]
    assert "secret" not in str(found[2])
    assert backend.started == [("validate", TABLE, "etl")] * 2
    lines = [json.loads(one) for one in (tmp_path / "audit.log").read_text().splitlines()]
    verdicts = {one["request_id"]: one["verdict"] for one in lines if one["call"] == "Operations/Start"}
    assert verdicts.pop("odd") == "unknown"
    assert verdicts == {
        "a": "ok",
        "b": "ok",
        "wrong": "InvalidArgument",
        "lost": "OutcomeUnknown",
        "theirs": "PermissionDenied",
    }


async def test_each_start_of_a_batch_needs_its_own_permission(guarded: CountingAdmission) -> None:
    backend = Backend()
    async with connected(backend, guarded, TOKEN) as client:
        backend_of: Any = client._backend
        message = operations_pb2.BatchStartRequest()
        for type_name, table in (("validate", TABLE), ("validate", "hr.pay"), ("purge", TABLE), ("x/y", "")):
            message.requests.add(type=type_name, table=table)
        answer = await backend_of._channel.call("Operations/BatchStart", message, writes=True)
        reasons = [one.error.reason for one in answer.results]
        assert reasons == ["", "PermissionDenied", "PermissionDenied", "PermissionDenied"]
        assert answer.results[0].started.op == f"{TABLE}/validate/1"
        assert backend.started == [("validate", TABLE, "etl")]


async def test_each_start_of_a_batch_counts(guarded: CountingAdmission) -> None:
    backend = Backend()
    async with connected(backend, guarded, "root token of the tests") as client:
        starts = (client.start_operation("validate", TABLE) for _ in range(10))
        found = await asyncio.gather(*starts, return_exceptions=True)
    refused = [one for one in found if isinstance(one, LimitExceeded)]
    assert (len(refused) >= 8, len(backend.started)) == (True, 10 - len(refused))


async def test_a_batch_has_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handlers, "MOST_STARTS", 2)
    async with connected(Backend(), CountingAdmission()) as client:
        backend: Any = client._backend
        message = operations_pb2.BatchStartRequest(requests=[operations_pb2.StartRequest()] * 3)
        with pytest.raises(InvalidArgument, match="at most 2 starts are allowed, not 3"):
            await backend._channel.call("Operations/BatchStart", message, writes=True)


async def test_a_lost_answer_names_the_request_id_of_each_start() -> None:
    backend = Backend()
    backend.open.clear()
    server = GrpcServer(services(backend), CallAdmission())  # type: ignore[arg-type]
    port = await server.start("127.0.0.1:0")
    async with asyncio.timeout(60), Client(configure(f"grpc://127.0.0.1:{port}")) as client:
        names = [f"id-{n}" for n in range(5)]
        starts = [asyncio.create_task(client.start_operation("noop", TABLE, request_id=one)) for one in names]
        await client.connect()
        await server.stop(0)
        found = await asyncio.gather(*starts, return_exceptions=True)
    for name, error in zip(names, found, strict=True):
        assert isinstance(error, OutcomeUnknown | EtcdUnavailable)
        assert isinstance(error, EtcdUnavailable) or f"request_id={name!r}" in str(error), str(error)


async def test_a_start_that_is_cancelled_before_its_call_is_not_made() -> None:
    backend, admission = Backend(), CountingAdmission()
    async with connected(backend, admission) as client:
        backend.open.clear()
        first = asyncio.create_task(client.start_operation("validate", TABLE))
        await admission.called.wait()
        second = asyncio.create_task(client.start_operation("validate", TABLE))
        await asyncio.sleep(0)
        second.cancel()
        await asyncio.gather(second, return_exceptions=True)
        backend.open.set()
        await first
        await client.start_operation("validate", TABLE)
    assert len(backend.started) == 2
