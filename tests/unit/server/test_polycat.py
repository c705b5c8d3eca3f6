"""PolyCat's two calls over gRPC and HTTP: what they prepare and confirm, and for whom."""

from __future__ import annotations

from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import pytest

from distop.client import service_messages as m
from distop.protocol import prepared_operations as p
from distop.protocol.dependencies import Hold
from distop.protocol.keys import Keys
from distop.protocol.records import OperationRef, Spec, TableRecord
from distop.v1 import polycat_pb2 as c
from tests.unit.support.model_service import ModelService, identities
from tests.unit.support.model_submission import Etcd

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

KEYS = Keys()
PRE, END = "distop.v1.PolyCat/PreCreateJob", "distop.v1.PolyCat/EndCreateJob"
ACCESS = (
    identities(etl="open_operations = 2", guest="")
    + """
[[grants]]
to = ["etl"]
role = "submitter"
tables = ["sales.*"]
types = ["noop"]
[[grants]]
to = ["guest"]
role = "viewer"
"""
)
BODY: dict[str, Any] = {
    "job": {"job_type": "noop", "catalog_id": "orders", "job_params": {"jobs": 2}},
    "external_id": "tx-1",
    "callback_url": "https://orders.example.com/confirmed",
}


@asynccontextmanager
async def service(folder: Path, access: str = ACCESS) -> AsyncIterator[ModelService]:
    etcd = Etcd()
    for name in ("sales.orders", "hr.pay"):
        etcd.put(KEYS.table(name), TableRecord(name, "parquet", "/data").encode())
    async with ModelService(etcd, folder, access) as found:
        yield found


def pre(project: str = "sales", **more: Any) -> c.PreCreateJobRequest:
    job = c.PolyCatJob(job_type="noop", catalog_id="orders", job_params=m.json_message({"jobs": 2}))
    return c.PreCreateJobRequest(**{"project_id": project, "job": job, "external_id": "tx-2", **more})


def hold_of(etcd: Etcd, external_id: str) -> p.PreparedTerms:
    value = etcd.value(KEYS.hold(p.hold_id(external_id)))
    assert value is not None
    found = p.PreparedTerms.of(Hold.decode(value))
    assert found is not None
    return found


async def test_C13_a_job_is_prepared_and_confirmed_over_rest(tmp_path: Path) -> None:
    async with service(tmp_path) as found:
        answer = await found.ask("POST", "/v1/sales/pre_create_job", BODY, "etl")
        job = answer.json()
        op = "sales.orders/noop/1"
        assert (answer.status_code, job) == (
            200,
            {"job_id": op, "job_type": "noop", "catalog_id": "orders", "job_status": "pending"},
        )
        terms = hold_of(found.etcd, "sales:tx-1")
        assert (terms.op, terms.verify) == (op, "https://orders.example.com/confirmed")
        spec = Spec.decode(found.etcd.value(KEYS.of(OperationRef.parse(op), "spec")) or b"")
        assert spec.submitter == "etl"
        assert (await found.ask("POST", "/v1/sales/pre_create_job", BODY, "etl")).json() == job
        for _ in range(2):
            answer = await found.ask("POST", "/v1/sales/end_create_job", {"job_id": op}, "etl")
            assert (answer.status_code, answer.json()["job_id"]) == (200, op)
        assert found.etcd.value(KEYS.hold(p.hold_id("sales:tx-1"))) is None
        assert found.etcd.value(KEYS.hold(p.receipt_id("sales:tx-1"))) is not None


async def test_C14_a_job_is_prepared_and_confirmed_over_grpc(tmp_path: Path) -> None:
    async with service(tmp_path) as found:
        job = await found.call(PRE, pre(verify_function="orders", callback_after=30.0), "etl")
        assert (job.job_id, job.job_status) == ("sales.orders/noop/1", "pending")
        terms = hold_of(found.etcd, "sales:tx-2")
        assert (terms.verify, terms.verify_after) == ("orders", 30.0)
        end = c.EndCreateJobRequest(project_id="sales", job_id=job.job_id)
        assert (await found.call(END, end, "etl")).job_id == job.job_id
        assert ("etl", "PolyCat/PreCreateJob", "ok") in found.verdicts()
        assert ("etl", "PolyCat/EndCreateJob", "ok") in found.verdicts()


async def test_a_caller_reaches_the_projects_of_its_grants_only(tmp_path: Path) -> None:
    async with service(tmp_path) as found:
        (await found.call(PRE, pre(), "etl"))
        revision = found.etcd.store.revision
        other = c.PolyCatJob(job_type="noop", catalog_id="pay")
        for request, who in ((pre("hr", job=other), "etl"), (pre(), "guest")):
            assert await found.code(PRE, request, who) == "PERMISSION_DENIED"
        assert await found.code(PRE, pre()) == "UNAUTHENTICATED"
        job = {"job_type": "noop", "catalog_id": "pay"}
        answer = await found.ask("POST", "/v1/hr/pre_create_job", {"job": job, "external_id": "a"}, "etl")
        assert answer.status_code == 403
        end = c.EndCreateJobRequest(project_id="sales", job_id="sales.orders/noop/1")
        assert await found.code(END, end, "guest") == "PERMISSION_DENIED"
        end.project_id = "hr"
        assert await found.code(END, end, "etl") == "INVALID_ARGUMENT"
        assert found.etcd.store.revision == revision
        assert ("guest", "PolyCat/EndCreateJob", "PermissionDenied") in found.verdicts()


async def test_two_projects_may_have_the_same_external_id(tmp_path: Path) -> None:
    async with service(tmp_path, "") as found:
        first = await found.call(PRE, pre())
        second = await found.call(PRE, pre("hr", job=c.PolyCatJob(job_type="noop", catalog_id="pay")))
        assert (first.job_id, second.job_id) == ("sales.orders/noop/1", "hr.pay/noop/1")


async def test_jobs_count_as_open_operations(tmp_path: Path) -> None:
    async with service(tmp_path) as found:
        for n in range(2):
            assert await found.code(PRE, pre(external_id=f"tx-{n}"), "etl") == "OK"
        assert await found.code(PRE, pre(external_id="tx-0"), "etl") == "OK", "the same call"
        assert await found.code(PRE, pre(external_id="tx-9"), "etl") == "RESOURCE_EXHAUSTED"


@pytest.mark.parametrize(
    ("path", "body", "words"),
    [
        ("/v1/a%2Eb/pre_create_job", BODY, "is no project"),
        ("/v1/a%2Fb/pre_create_job", BODY, "is no project"),
        ("/v1/sales/pre_create_job", {**BODY, "external_id": ""}, "needs a catalog_id and an external_id"),
        ("/v1/sales/pre_create_job", {"external_id": "a"}, "needs a catalog_id and an external_id"),
        ("/v1/sales/pre_create_job", {**BODY, "job": {**BODY["job"], "job_id": "x"}}, "chosen by the service"),
        ("/v1/sales/pre_create_job", {**BODY, "verify_function": "f"}, "exclude each other"),
        ("/v1/sales/pre_create_job", {**BODY, "callback_url": "orders"}, "callback_url must be a URL"),
        ("/v1/sales/pre_create_job", {**BODY, "callback_url": "ftp://a/b"}, "asked by http or https"),
        ("/v1/sales/pre_create_job", {**BODY, "callback_after": -1}, "verify_after must be"),
        ("/v1/sales/end_create_job", {"job_id": "x"}, "is not the name of an operation|operation"),
        ("/v1/sales/end_create_job", {"job_id": "hr.pay/noop/1"}, "is no job of the project sales"),
    ],
)
async def test_a_wrong_call_changes_nothing(tmp_path: Path, path: str, body: Any, words: str) -> None:
    import re

    async with service(tmp_path, "") as found:
        revision = found.etcd.store.revision
        answer = await found.ask("POST", path, body)
        assert answer.status_code == 400, answer.text
        assert re.search(words, answer.json()["error"]["message"]), answer.text
        assert found.etcd.store.revision == revision
