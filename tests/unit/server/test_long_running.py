"""``google.longrunning.Operations`` over gRPC and HTTP."""

from __future__ import annotations

from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import pytest
from google.longrunning import operations_pb2 as google
from google.protobuf.duration_pb2 import Duration

from distop.protocol.keys import Keys
from distop.protocol.records import History, OperationRef, State, TableRecord
from distop.v1 import operations_pb2 as o
from tests.unit.support.model_service import ModelService, identities
from tests.unit.support.model_submission import TABLE, Etcd

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

KEYS = Keys()
SERVICE = "google.longrunning.Operations"
ACCESS = (
    identities(ops="", guest="")
    + f"""
[[grants]]
to = ["ops"]
role = "operator"
[[grants]]
to = ["guest"]
role = "viewer"
tables = ["{TABLE}"]
"""
)
ROOT = "/v1/longrunning/operations"


@asynccontextmanager
async def service(folder: Path, access: str = "") -> AsyncIterator[ModelService]:
    """A service with three open operations on two tables, and with two ended ones."""
    etcd = Etcd()
    etcd.put(KEYS.table("hidden"), TableRecord("hidden", "parquet", "/data").encode())
    for n, table in enumerate((TABLE, TABLE, "hidden")):
        await etcd.client.start_operation("noop", table, {"n": n})
    for number, state in ((8, State.SUCCESS), (9, State.FAILED)):
        ref = OperationRef(TABLE, "noop", "", number)
        times = {"started": "2026-01-31T18:00:00.000Z", "finished": "2026-01-31T18:00:01.000Z"}
        record = History(op=str(ref), state=state, total=1, success=1, failed=0, report={"rows": 5}, **times)
        etcd.put(KEYS.history(ref), record.encode())
    async with ModelService(etcd, folder, access) as found:
        yield found


def named(op: str) -> str:
    return f"operations/{op}"


async def test_an_open_operation_has_its_status_as_metadata(tmp_path: Path) -> None:
    async with service(tmp_path) as found:
        answer = await found.call(f"{SERVICE}/GetOperation", google.GetOperationRequest(name=named(f"{TABLE}/noop/1")))
        status = o.Operation()
        assert answer.metadata.Unpack(status)
        assert (answer.name, answer.done, status.state) == (named(f"{TABLE}/noop/1"), False, "running")
        rest = (await found.ask("GET", f"{ROOT}/{TABLE}/noop/1")).json()
        assert (rest["name"], rest["done"]) == (answer.name, False)
        assert rest["metadata"]["@type"] == "type.googleapis.com/distop.v1.Operation"
        assert (rest["metadata"]["op"], "error" in rest, "response" in rest) == (f"{TABLE}/noop/1", False, False)


async def test_an_ended_operation_has_a_response_or_an_error(tmp_path: Path) -> None:
    async with service(tmp_path) as found:
        get = f"{SERVICE}/GetOperation"
        good = await found.call(get, google.GetOperationRequest(name=named(f"{TABLE}/noop/8")))
        report = o.GetReportResponse()
        assert good.done
        assert good.response.Unpack(report)
        assert (report.state, report.report.text) == ("success", '{"rows":5}')
        bad = await found.call(get, google.GetOperationRequest(name=named(f"{TABLE}/noop/9")))
        assert (bad.done, bad.error.code, bad.WhichOneof("result")) == (True, 10, "error")
        rest = (await found.ask("GET", f"{ROOT}/{TABLE}/noop/9")).json()
        assert (rest["error"]["code"], rest["error"]["details"][0]["report"]) == (10, {"rows": 5})


async def pages(found: ModelService, **asked: Any) -> list[list[str]]:
    all_pages, token = [], ""
    while True:
        request = google.ListOperationsRequest(name="operations", page_token=token, **asked)
        answer = await found.call(f"{SERVICE}/ListOperations", request)
        all_pages.append([one.name for one in answer.operations])
        if not (token := answer.next_page_token):
            return all_pages


async def test_operations_are_listed_in_pages(tmp_path: Path) -> None:
    async with service(tmp_path) as found:
        names = [named(one) for one in ("hidden/noop/1", f"{TABLE}/noop/1", f"{TABLE}/noop/2")]
        assert await pages(found) == [names]
        assert await pages(found, page_size=2, filter="done = false") == [names[:2], names[2:]]
        ended = await pages(found, page_size=1, filter="done=true")
        assert sorted(one for page in ended for one in page) == [named(f"{TABLE}/noop/{n}") for n in (8, 9)]
        rest = (await found.ask("GET", f"{ROOT}?page_size=1&filter=done%3Dtrue")).json()
        assert [one["done"] for one in rest["operations"]] == [True]
        assert rest["next_page_token"]


async def test_an_operation_is_cancelled(tmp_path: Path) -> None:
    async with service(tmp_path, ACCESS) as found:
        cancel = google.CancelOperationRequest(name=named(f"{TABLE}/noop/1"))
        assert await found.code(f"{SERVICE}/CancelOperation", cancel, "guest") == "PERMISSION_DENIED"
        assert await found.code(f"{SERVICE}/CancelOperation", cancel) == "UNAUTHENTICATED"
        state = KEYS.of(OperationRef.parse(f"{TABLE}/noop/1"), "state")
        assert found.etcd.value(state) == b"running"
        assert await found.code(f"{SERVICE}/CancelOperation", cancel, "ops") == "OK"
        assert found.etcd.value(state) == b"cancelling"
        answer = await found.ask("POST", f"{ROOT}/{TABLE}/noop/2:cancel", {}, "ops")
        assert (answer.status_code, answer.json()) == (200, {})
        assert ("guest", "Operations/CancelOperation", "PermissionDenied") in found.verdicts()
        assert ("ops", "Operations/CancelOperation", "ok") in found.verdicts()


async def test_a_caller_sees_the_operations_of_its_grants_only(tmp_path: Path) -> None:
    async with service(tmp_path, ACCESS) as found:
        listed = google.ListOperationsRequest(name="operations")
        answer = await found.call(f"{SERVICE}/ListOperations", listed, "guest")
        assert [one.name for one in answer.operations] == [named(f"{TABLE}/noop/{n}") for n in (1, 2)]
        for method, request in (
            ("GetOperation", google.GetOperationRequest(name=named("hidden/noop/1"))),
            ("WaitOperation", google.WaitOperationRequest(name=named("hidden/noop/1"))),
        ):
            assert await found.code(f"{SERVICE}/{method}", request, "guest") == "PERMISSION_DENIED"
        assert (await found.ask("GET", f"{ROOT}/hidden/noop/1", None, "guest")).status_code == 403
        assert (await found.ask("GET", ROOT)).status_code == 401


async def test_a_wait_answers_at_once_if_the_operation_has_ended_or_there_is_no_time(tmp_path: Path) -> None:
    async with service(tmp_path) as found:
        wait = google.WaitOperationRequest(name=named(f"{TABLE}/noop/1"), timeout=Duration())
        assert not (await found.call(f"{SERVICE}/WaitOperation", wait)).done
        answer = await found.ask("POST", f"{ROOT}/{TABLE}/noop/1:wait", {"timeout": "0s"})
        assert (answer.status_code, answer.json()["done"]) == (200, False)
        wait = google.WaitOperationRequest(name=named(f"{TABLE}/noop/8"))
        assert (await found.call(f"{SERVICE}/WaitOperation", wait)).done


async def test_deleting_is_not_served(tmp_path: Path) -> None:
    async with service(tmp_path) as found:
        delete = google.DeleteOperationRequest(name=named(f"{TABLE}/noop/8"))
        assert await found.code(f"{SERVICE}/DeleteOperation", delete) == "UNIMPLEMENTED"
        assert (await found.ask("DELETE", f"{ROOT}/{TABLE}/noop/8")).status_code == 405
        assert found.etcd.value(KEYS.history(OperationRef(TABLE, "noop", "", 8))) is not None


@pytest.mark.parametrize(
    ("method", "request_"),
    [
        ("GetOperation", google.GetOperationRequest(name=f"{TABLE}/noop/1")),
        ("GetOperation", google.GetOperationRequest()),
        ("ListOperations", google.ListOperationsRequest(name="other")),
        ("ListOperations", google.ListOperationsRequest(filter="state=failed")),
        ("ListOperations", google.ListOperationsRequest(page_size=-1)),
        ("CancelOperation", google.CancelOperationRequest(name="operations/x")),
        ("WaitOperation", google.WaitOperationRequest(name="operations/")),
    ],
)
async def test_a_wrong_call_is_refused(tmp_path: Path, method: str, request_: Any) -> None:
    async with service(tmp_path) as found:
        assert await found.code(f"{SERVICE}/{method}", request_) == "INVALID_ARGUMENT"


CERTIFICATE = {"table": TABLE, "version": "v1", "checks": []}


async def test_the_certificate_of_a_validation_is_read(tmp_path: Path) -> None:
    async with service(tmp_path, ACCESS) as found:
        ref = OperationRef(TABLE, "validate", "", 1)
        times = {"started": "2026-01-31T18:00:00.000Z", "finished": "2026-01-31T18:00:01.000Z"}
        record = History(
            op=str(ref), state=State.SUCCESS, total=1, success=1, failed=0, report={"certificate": CERTIFICATE}, **times
        )
        found.etcd.put(KEYS.history(ref), record.encode())
        answer = await found.ask("GET", f"/v1/operations/{ref}/certificate", None, "guest")
        assert (answer.status_code, answer.json()) == (200, {"certificate": CERTIFICATE})
        get = "distop.v1.Operations/GetCertificate"
        assert (await found.call(get, o.GetCertificateRequest(op=str(ref)), "guest")).certificate.text
        for op in (f"{TABLE}/noop/8", f"{TABLE}/noop/9", f"{TABLE}/noop/1"):
            assert await found.code(get, o.GetCertificateRequest(op=op), "guest") == "FAILED_PRECONDITION"
        hidden = o.GetCertificateRequest(op="hidden/noop/1")
        assert await found.code(get, hidden, "guest") == "PERMISSION_DENIED"
