"""The service as a process, and clients that lose it."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

import grpc
import httpx
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

import distop
from distop import aio
from distop.client.service_channel import MOST_BYTES
from distop.protocol.records import TableRecord
from distop.v1 import operations_pb2
from tests.support.command import distop_command  # noqa: F401
from tests.support.daemons import eventually

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from distop.store.embedded import EmbeddedEtcd
    from tests.support.command import Ran
    from tests.support.daemons import Daemons

pytestmark = [pytest.mark.etcd, pytest.mark.direct]

TABLE = "t"
LIMIT = 60.0


class Service:
    """A ``distop serve`` process. ``port`` 0: any that is free."""

    def __init__(self, endpoint: str, folder: Path, port: int = 0, options: tuple[str, ...] = ()) -> None:
        self.log = folder / f"service-{len(list(folder.glob('service-*')))}.log"
        command = [sys.executable, "-m", "distop.cli", "serve", "--etcd", endpoint, "--listen", f"127.0.0.1:{port}"]
        command += options
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(command, stderr=log, stdout=log, cwd=folder)
        words = ("Serving gRPC on", *(("Serving HTTP on",) if "--http" in options else ()))
        eventually(lambda: all(one in self.text() for one in words), "the service serves", tail=self.text)
        line = next(one for one in self.text().splitlines() if "Serving gRPC on" in one)
        self.port = int(line.partition("127.0.0.1:")[2].split()[0])

    @property
    def url(self) -> str:
        return f"grpc://127.0.0.1:{self.port}"

    def text(self) -> str:
        return self.log.read_text(errors="replace")

    def end(self, number: int = signal.SIGTERM) -> int:
        """Send a signal, and wait for the exit code."""
        if self.process.poll() is None:
            self.process.send_signal(number)
        return self.process.wait(30)


@pytest.fixture
def service(group: Daemons, tmp_path: Path) -> Iterator[Service]:
    found = Service(group.endpoint, tmp_path)
    yield found
    found.end(signal.SIGKILL)


def held(client: Any, seconds: float = 0.0) -> Any:
    """A started operation that lasts so long."""
    return client.start_operation("noop", TABLE, {"sleep": seconds})


def test_an_operation_is_started_watched_and_ended_through_the_service(group: Daemons, service: Service) -> None:
    group.start("e1")
    with distop.connect(service.url) as client:
        op = client.start_operation("noop", TABLE, {"jobs": 3}, request_id="once", labels={"team": "lake"})
        assert client.start_operation("noop", TABLE, {"jobs": 3}, request_id="once", labels={}).already_started
        result = op.wait(LIMIT)
        assert result == group.client.operation(op.ref).wait(LIMIT)
        assert op.status() == group.client.operation(op.ref).status()
        assert [job.name for job in op.results()] == [job.name for job in group.client.operation(op.ref).results()]
        assert client.history(TABLE) == group.client.history(TABLE)
        assert client.nodes() == group.client.nodes()
        assert client.behaviors() == group.client.behaviors()
        assert client.tables() == group.client.tables()
        with pytest.raises(distop.NotAllowed, match="connect to etcd for it, not to a service"):
            client.transaction(success=[], start=distop.Start("noop", TABLE))


def test_a_wait_survives_the_death_of_the_service(group: Daemons, service: Service, tmp_path: Path) -> None:
    group.start("e1")
    with distop.connect(service.url) as client:
        op = held(client, 3.0)
        ended: list[Any] = []
        waiting = threading.Thread(target=lambda: ended.append(op.wait(LIMIT)))
        waiting.start()
        service.end(signal.SIGKILL)
        with pytest.raises(distop.EtcdUnavailable, match="does not answer"):
            op.status()
        again = Service(group.endpoint, tmp_path, service.port)
        try:
            waiting.join(LIMIT)
            assert ended[0].success
        finally:
            again.end(signal.SIGKILL)


@pytest.mark.rotating
def test_a_start_whose_answer_is_lost_is_repeated_with_its_request_id(
    group: Daemons, service: Service, tmp_path: Path
) -> None:
    """The service is stopped, so that the call is sent and never answered."""
    group.start("e1")
    with distop.connect(service.url) as client:
        service.process.send_signal(signal.SIGSTOP)
        failed: list[BaseException] = []

        def start() -> None:
            try:
                client.start_operation("noop", TABLE, {}, request_id="mine")
            except distop.DistopError as error:
                failed.append(error)

        calling = threading.Thread(target=start)
        calling.start()
        service.end(signal.SIGKILL)
        calling.join(LIMIT)
        assert [type(one) for one in failed] == [distop.OutcomeUnknown]
        assert "request_id='mine'" in str(failed[0])
    again = Service(group.endpoint, tmp_path)
    try:
        with distop.connect(again.url) as client:
            ops = {client.start_operation("noop", TABLE, {}, request_id="mine").ref for _ in range(2)}
            assert ops == {"t/noop/1"}
    finally:
        again.end(signal.SIGKILL)


@pytest.mark.rotating
def test_several_services_serve_one_etcd(group: Daemons, service: Service, tmp_path: Path) -> None:
    group.start("e1")
    other = Service(group.endpoint, tmp_path)
    try:
        with distop.connect(service.url) as one, distop.connect(other.url) as two:
            op = held(one)
            assert two.operation(op.ref).wait(LIMIT).success
            two.register_type("report")
            two.start_operation("report", "@cluster")
            jobs: list[Any] = []
            eventually(lambda: jobs.extend(one.own_jobs("w", ["report"], 1)) or jobs, "a job is owned")
            assert two.extend([jobs[0].token]) == [True]
            two.return_job(jobs[0].token, distop.Complete({"n": 2**60}))
            assert next(iter(one.operation(jobs[0].op).results())).result == {"n": 2**60}
    finally:
        other.end(signal.SIGKILL)


@pytest.mark.rotating
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM], ids=["killed", "stopped"])
async def test_watches_and_waits_go_on_at_another_service(
    group: Daemons, service: Service, tmp_path: Path, number: int
) -> None:
    """The client is connected to one of two services, and that one ends."""
    services = [service, Service(group.endpoint, tmp_path)]
    try:
        group.start("e1")
        op = held(group.client, 2.0)
        async with asyncio.timeout(LIMIT), aio.connect(",".join([service.url, services[1].url[7:]])) as client:
            handle = client.operation(op.ref)
            waiting, stages = asyncio.create_task(handle.wait()), []
            async for status in handle.watch():
                stages.append(status.state)
                if len(stages) == 1:
                    used = next(one for one in services if _is_connected(one))
                    await asyncio.to_thread(used.end, number)
            assert (await waiting).success
            assert (stages[0], stages[-1]) == ("running", "success")
    finally:
        services[1].end(signal.SIGKILL)


def _is_connected(service: Service) -> bool:
    """Whether a client is connected to the service."""
    port = f"{service.port:04X}"
    texts = (Path("/proc/net", one).read_text() for one in ("tcp", "tcp6"))  # gRPC's sockets serve both
    rows = (line.split() for text in texts for line in text.splitlines()[1:])
    return any(row[1].endswith(f":{port}") and row[3] == "01" for row in rows)


@pytest.mark.rotating
def test_sigterm_ends_open_calls_in_order(group: Daemons, service: Service) -> None:
    group.start("e1")
    with distop.connect(service.url) as client:
        op = held(client, 1.0)
        ended: list[Any] = []
        waiting = threading.Thread(target=lambda: ended.append(op.wait(LIMIT)))
        waiting.start()
        eventually(lambda: op.status().jobs["running"], "the job runs")
        assert service.end() == 0
        waiting.join(LIMIT)
        assert ended[0].success


@pytest.mark.parametrize(
    ("listen", "words"),
    [
        ("0.0.0.0:0", "the service needs access and service-cert there: without them it listens on 127.0.0.1 only"),
        ("[::]:0", "others can reach ::, so the service needs access"),
        ("127.0.0.1", "HOST:PORT"),
    ],
)
def test_an_address_that_others_reach_is_refused(
    distop_command: Callable[..., Ran],  # noqa: F811
    listen: str,
    words: str,
) -> None:
    ran = distop_command("serve", "--etcd", "127.0.0.1:1", "--listen", listen)
    assert (ran.code, words in ran.err) == (2, True), ran.err


@pytest.mark.rotating
def test_a_port_in_use_is_refused(
    etcd: EmbeddedEtcd,
    distop_command: Callable[..., Ran],  # noqa: F811
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        ran = distop_command("serve", "--etcd", etcd.endpoint, "--listen", f"127.0.0.1:{port}")
    assert (ran.code, f"cannot listen on 127.0.0.1:{port}" in ran.err) == (2, True), ran.err


def test_rest_serves_the_same_calls(group: Daemons, tmp_path: Path) -> None:
    group.start("e1")
    service = Service(group.endpoint, tmp_path, options=("--http", "127.0.0.1:0"))
    try:
        line = next(one for one in service.text().splitlines() if "Serving HTTP on" in one)
        url = f"http://127.0.0.1:{line.partition('127.0.0.1:')[2].split()[0].rstrip(';')}"
        with httpx.Client(base_url=url, timeout=LIMIT) as rest:
            assert "/v1/operations" in rest.get("/openapi.json").json()["paths"]
            body = {"type": "noop", "table": TABLE, "arg": {"jobs": 3}, "options": {"request_id": "once"}}
            op = rest.post("/v1/operations", json=body).json()["op"]
            assert rest.post("/v1/operations", json=body).json() == {"op": op, "already_started": True}
            with rest.stream("GET", f"/v1/operations/{op}:watch") as stream:
                events = [json.loads(one[6:]) for one in stream.iter_lines() if one.startswith("data: ")]
            assert events[-1]["operation"]["state"] == "success"
            assert rest.get(f"/v1/operations/{op}").json()["record"] == group.client.operation(op).status().to_json()
            jobs = rest.get(f"/v1/operations/{op}/jobs?page_size=2").json()
            assert (len(jobs["jobs"]), jobs["next_page_token"]) == (2, "2")
            refused = rest.post(f"/v1/operations/{op}:cancel", json={})
            assert (refused.status_code, refused.json()["error"]["reason"]) == (400, "NotAllowed")
            with rest.stream("GET", f"/v1/operations/{held(group.client, 30.0).ref}:watch") as stream:
                next(stream.iter_lines())
                assert service.end() == 0, "an open stream does not hold up the end"
    finally:
        service.end(signal.SIGKILL)


@pytest.mark.rotating
async def test_health_and_reflection_answer(group: Daemons, service: Service) -> None:
    async with grpc.aio.insecure_channel(f"127.0.0.1:{service.port}") as channel:
        health: Any = health_pb2_grpc.HealthStub(channel)
        for name in ("", "distop.v1.Operations"):
            answer = await health.Check(health_pb2.HealthCheckRequest(service=name), timeout=10)
            assert answer.status == health_pb2.HealthCheckResponse.SERVING
        reflection: Any = reflection_pb2_grpc.ServerReflectionStub(channel)
        asked = reflection_pb2.ServerReflectionRequest(list_services="")
        async for listed in reflection.ServerReflectionInfo(iter([asked]), timeout=10):
            names = {one.name for one in listed.list_services_response.service}
            assert {"distop.v1.Operations", "distop.v1.Claims", "distop.v1.Policies"} <= names
            break


async def test_bytes_that_are_no_message_and_messages_that_are_too_large_are_refused(
    group: Daemons, service: Service
) -> None:
    async with grpc.aio.insecure_channel(
        f"127.0.0.1:{service.port}", options=[("grpc.max_send_message_length", -1)]
    ) as channel:
        for data, code in (
            (b"\xff" * 100, grpc.StatusCode.INVALID_ARGUMENT),
            (
                operations_pb2.GetRequest(op="x" * (MOST_BYTES + 1)).SerializeToString(),
                grpc.StatusCode.RESOURCE_EXHAUSTED,
            ),
            (operations_pb2.GetRequest(op="x/y").SerializeToString(), grpc.StatusCode.INVALID_ARGUMENT),
            (b"", grpc.StatusCode.INVALID_ARGUMENT),
        ):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await channel.unary_unary("/distop.v1.Operations/Get")(data, timeout=30)
            assert caught.value.code() is code
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await channel.unary_unary("/distop.v1.Operations/Unknown")(b"", timeout=30)
        assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED
    async with aio.connect(service.url) as client:
        assert await client.operations() == []


async def test_a_service_that_is_not_there_is_reported() -> None:
    with pytest.raises(distop.EtcdUnavailable, match="the service at 127.0.0.1:9 cannot be reached within 0.2 s"):
        async with aio.connect("grpc://127.0.0.1:9", connect_timeout=0.2):
            pass


@pytest.mark.parametrize("url", ["grpc://", "grpc://host:port", "grpc://user@host:1", "grpc://host:1/path"])
def test_a_wrong_url_is_refused(url: str) -> None:
    with pytest.raises(distop.InvalidArgument, match="is not the URL of a service"):
        distop.connect(url)


def test_options_of_etcd_are_refused_for_a_service() -> None:
    with pytest.raises(distop.InvalidArgument, match="username is an option of a connection to etcd"):
        distop.connect("grpc://127.0.0.1:1", username="ann")


PROGRAM = """
import sys
for name in ("pyspark", "pyarrow", "numpy", "obstore", "pyiceberg", "py4j"):
    sys.modules[name] = None
import distop
with distop.connect(sys.argv[1]) as client:
    op = client.start_operation("noop", "t", {"jobs": 2})
    print(op.wait(60).state, len(list(op.results())))
"""


@pytest.mark.rotating
def test_a_client_of_a_service_needs_neither_spark_nor_arrow_nor_etcd(group: Daemons, service: Service) -> None:
    group.start("e1")
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, service.url],
        capture_output=True,
        text=True,
        timeout=LIMIT,
        check=False,
        env={**os.environ, "DISTOP_ETCD": "127.0.0.1:1"},
    )
    assert (done.returncode, done.stdout.split()) == (0, ["success", "2"]), done.stderr


@pytest.mark.rotating
async def test_calls_of_one_client_run_concurrently(group: Daemons, service: Service) -> None:
    group.client.add_table(TableRecord("u", "parquet", "/nowhere"), check=False)
    async with aio.connect(service.url) as client:
        found = await asyncio.gather(*(client.tables() for _ in range(50)))
    assert {len(one) for one in found} == {2}
