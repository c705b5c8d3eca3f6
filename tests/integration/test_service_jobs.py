"""Callers without etcd that emit events, submit PolyCat's jobs and use Google's interface, over gRPC and HTTP."""

from __future__ import annotations

import re
import signal
from typing import TYPE_CHECKING, Any

import grpc
import httpx
import pytest
from google.longrunning import operations_pb2 as google

import distop
from distop.v1 import polycat_pb2
from tests.integration.test_service import LIMIT, TABLE, Service
from tests.support.daemons import eventually

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.support.daemons import Daemons

pytestmark = [pytest.mark.etcd, pytest.mark.direct, pytest.mark.rotating]


@pytest.fixture
def service(group: Daemons, tmp_path: Path) -> Iterator[Service]:
    found = Service(group.endpoint, tmp_path, options=("--http", "127.0.0.1:0"))
    yield found
    found.end(signal.SIGKILL)


@pytest.fixture
def http(service: Service) -> Iterator[httpx.Client]:
    place = re.search(r"Serving HTTP on .*127\.0\.0\.1:(\d+)", service.text())
    assert place is not None
    with httpx.Client(base_url=f"http://127.0.0.1:{place[1]}", timeout=LIMIT) as found:
        yield found


def test_C5_an_event_through_the_service_starts_a_policy(group: Daemons, service: Service, http: httpx.Client) -> None:
    """Over gRPC and over REST: the policy, the event, and the operation that it starts."""
    group.start("e1", options=("--poll", "1"))
    body = {"start": "noop", "on": ["event:loaded"]}
    assert http.put(f"/v1/tables/{TABLE}/policies/on-load", json=body).status_code == 200

    def started() -> list[Any]:
        found = http.get("/v1/history", params={"table": TABLE, "type": "noop"}).json()["operations"]
        return [one for one in found if one["record"]["submitter"] == "policy:on-load"]

    with distop.connect(service.url) as client:
        assert client.emit(TABLE, "other") == []
        assert client.emit(TABLE, "loaded", event_id="one") == ["on-load"]
        eventually(lambda: len(started()) == 1, "the event over gRPC starts an operation", tail=service.text)
        answer = http.post(f"/v1/tables/{TABLE}/events", json={"name": "loaded", "event_id": "two"})
        assert (answer.status_code, answer.json()) == (200, {"policies": ["on-load"]})
        eventually(lambda: len(started()) == 2, "the event over REST starts an operation", tail=service.text)
        assert client.emit(TABLE, "loaded", event_id="two") == ["on-load"], "the same event"
        assert {one["state"] for one in started()} == {"success"}


def test_C14_a_job_of_polycat_runs_after_its_confirmation(
    group: Daemons, service: Service, http: httpx.Client, tmp_path: Path
) -> None:
    group.client.add_table(distop.TableRecord("sales.orders", "parquet", str(tmp_path)), check=False)
    group.start("e1")
    job = {"job_type": "noop", "catalog_id": "orders", "job_params": {"jobs": 2}}
    made = http.post("/v1/sales/pre_create_job", json={"job": job, "external_id": "tx-1"}).json()
    assert made["job_status"] == "pending"
    with grpc.insecure_channel(f"127.0.0.1:{service.port}") as channel:
        end = channel.unary_unary(
            "/distop.v1.PolyCat/EndCreateJob",
            polycat_pb2.EndCreateJobRequest.SerializeToString,
            polycat_pb2.PolyCatJob.FromString,
        )
        end(polycat_pb2.EndCreateJobRequest(project_id="sales", job_id=made["job_id"]))
        wait = channel.unary_unary(
            "/google.longrunning.Operations/WaitOperation",
            google.WaitOperationRequest.SerializeToString,
            google.Operation.FromString,
        )
        found = wait(google.WaitOperationRequest(name=f"operations/{made['job_id']}"))
    assert (found.done, found.WhichOneof("result")) == (True, "response")
    assert http.get(f"/v1/longrunning/operations/{made['job_id']}").json()["response"]["state"] == "success"


def test_C14_an_unconfirmed_job_of_polycat_ends_with_an_alarm(
    group: Daemons, service: Service, http: httpx.Client, tmp_path: Path
) -> None:
    group.client.add_table(distop.TableRecord("sales.orders", "parquet", str(tmp_path)), check=False)
    group.start("e1", options=("--poll", "1"))
    body = {"job": {"job_type": "noop", "catalog_id": "orders"}, "external_id": "tx-1", "callback_after": 0.5}
    made = http.post("/v1/sales/pre_create_job", json=body).json()
    waited = http.post(f"/v1/longrunning/operations/{made['job_id']}:wait", json={"timeout": "60s"}).json()
    assert (waited["done"], waited["error"]["code"]) == (True, 1)
    alarms = http.get("/v1/history", params={"alarms": "true"}).json()["operations"]
    assert [one["op"] for one in alarms] == [made["job_id"]]
    assert http.post("/v1/sales/end_create_job", json={"job_id": made["job_id"]}).status_code == 400
