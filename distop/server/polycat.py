"""The calls PreCreateJob and EndCreateJob of PolyCat, a job controller for data lakes (C13, C14).

A job of PolyCat is a prepared operation on the table ``PROJECT.CATALOG``.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from distop.client.async_operation import parse_ref
from distop.errors import InvalidArgument
from distop.protocol.texts import shown
from distop.services.submission.two_phase import check_verifier
from distop.v1 import operations_pb2, polycat_pb2

if TYPE_CHECKING:
    from distop.server.handlers import OperationCalls

_PROJECT = re.compile(r"[A-Za-z0-9_-]{1,100}")


def project_of(request: Any) -> str:
    """The project of a request. Raises InvalidArgument."""
    if not _PROJECT.fullmatch(request.project_id):
        raise InvalidArgument(f"{shown(request.project_id)} is no project: 1 to 100 letters, digits, - and _")
    return str(request.project_id)


def prepare_request(request: polycat_pb2.PreCreateJobRequest) -> operations_pb2.PrepareRequest:
    """The preparation that a call asks for. Raises InvalidArgument."""
    project, job = project_of(request), request.job
    if not job.catalog_id or not request.external_id:
        raise InvalidArgument("a job needs a catalog_id and an external_id")
    if job.job_id or job.job_status:
        raise InvalidArgument("job_id and job_status are chosen by the service: leave them out")
    if request.callback_url and request.verify_function:
        raise InvalidArgument("callback_url and verify_function exclude each other: give one of them")
    found = operations_pb2.PrepareRequest(
        type=job.job_type, table=f"{project}.{job.catalog_id}", external_id=f"{project}:{request.external_id}"
    )
    if job.HasField("job_params"):
        found.arg.CopyFrom(job.job_params)
    if request.callback_url and "://" not in request.callback_url:
        raise InvalidArgument("callback_url must be a URL (https://host/path)")
    if request.verify_function and "://" in request.verify_function:
        raise InvalidArgument("verify_function is the name of an installed verifier: a URL is a callback_url")
    if verify := request.callback_url or request.verify_function:
        found.verify = check_verifier(verify)
    if request.HasField("callback_after"):
        found.verify_after = request.callback_after
    return found


def confirm_request(request: polycat_pb2.EndCreateJobRequest) -> operations_pb2.ConfirmRequest:
    """The confirmation that a call asks for. Raises InvalidArgument for a job of another project."""
    if not parse_ref(request.job_id).table.startswith(f"{project_of(request)}."):
        raise InvalidArgument(f"{shown(request.job_id)} is no job of the project {request.project_id}")
    return operations_pb2.ConfirmRequest(op=request.job_id)


class PolyCatCalls:
    """Submission in two phases for PolyCat's clients."""

    def __init__(self, operations: OperationCalls) -> None:
        self._operations = operations

    async def PreCreateJob(self, request: polycat_pb2.PreCreateJobRequest) -> polycat_pb2.PolyCatJob:
        started = await self._operations.Prepare(prepare_request(request))
        return await self._job(started.op)

    async def EndCreateJob(self, request: polycat_pb2.EndCreateJobRequest) -> polycat_pb2.PolyCatJob:
        await self._operations.Confirm(confirm_request(request))
        return await self._job(request.job_id)

    async def _job(self, op: str) -> polycat_pb2.PolyCatJob:
        ref, status = parse_ref(op), await self._operations.Get(operations_pb2.GetRequest(op=op))
        return polycat_pb2.PolyCatJob(
            job_id=op, job_type=ref.type, catalog_id=ref.table.partition(".")[2], job_status=status.state
        )
