"""``google.longrunning.Operations``: a second view of operations, for clients that know only Google's interface.

The name of an operation is ``operations/`` with its name in distop. Deleting is not served: history is kept by age.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import grpc
from google.longrunning import operations_pb2 as google
from google.protobuf import empty_pb2

from distop.client.service_messages import given
from distop.errors import InvalidArgument
from distop.protocol.records import State
from distop.protocol.texts import shown
from distop.v1 import operations_pb2

if TYPE_CHECKING:
    from distop.server.handlers import OperationCalls

SERVICE = "google.longrunning.Operations"
PREFIX = "operations/"
MOST = 1_000
"""Maximum operations in a page."""
LONGEST_WAIT = 60.0
"""Seconds after which a wait answers with an open operation. Clients then wait again."""
_DONE = ("", "done=false", "done=true")
_CODES = {State.SUCCESS: None, State.CANCELLED: grpc.StatusCode.CANCELLED}


def op_of(name: str) -> str:
    """The operation that a name means. Raises InvalidArgument."""
    if not name.startswith(PREFIX):
        raise InvalidArgument(f"{shown(name)} is no operation: a name is {PREFIX}TABLE/TYPE/INSTANCE")
    return name.removeprefix(PREFIX)


class LongRunningCalls:
    """Gets, lists, cancels and waits for operations."""

    def __init__(self, operations: OperationCalls) -> None:
        self._operations = operations

    async def GetOperation(self, request: google.GetOperationRequest) -> google.Operation:
        return await self._get(op_of(request.name))

    async def _get(self, op: str) -> google.Operation:
        status = await self._operations.Get(operations_pb2.GetRequest(op=op))
        if not State(status.state).terminal:
            return _open(status)
        return _ended(status, await self._operations.GetReport(operations_pb2.GetReportRequest(op=op)))

    async def ListOperations(self, request: google.ListOperationsRequest) -> google.ListOperationsResponse:
        """The open operations by name, or with the filter ``done=true`` the ended ones, newest first."""
        wanted = request.filter.replace(" ", "").lower()
        if request.name not in ("operations", "") or wanted not in _DONE or request.page_size < 0:
            raise InvalidArgument(
                "a list has the name operations, a page_size of 0 or more, and the filter done=true, done=false or none"
            )
        size = min(request.page_size or 100, MOST)
        if wanted == "done=true":
            return await self._history(size, request.page_token)
        found = (await self._operations.List(operations_pb2.ListRequest())).operations
        rest = sorted((one for one in found if one.op > request.page_token), key=lambda one: one.op)
        page = google.ListOperationsResponse(operations=map(_open, rest[:size]))
        if len(rest) > size:
            page.next_page_token = rest[size - 1].op
        return page

    async def _history(self, size: int, token: str) -> google.ListOperationsResponse:
        asked = operations_pb2.ListHistoryRequest(page_size=size)
        if token:
            asked.page_token = token
        found = await self._operations.ListHistory(asked)
        ended = [_ended(one, _report(one)) for one in found.operations]
        return google.ListOperationsResponse(operations=ended, next_page_token=given(found, "next_page_token") or "")

    async def CancelOperation(self, request: google.CancelOperationRequest) -> Any:
        await self._operations.Cancel(operations_pb2.CancelRequest(op=op_of(request.name)))
        return empty_pb2.Empty()

    async def WaitOperation(self, request: google.WaitOperationRequest) -> google.Operation:
        op, limit = op_of(request.name), LONGEST_WAIT
        if request.HasField("timeout"):
            limit = max(0.0, min(limit, request.timeout.seconds + request.timeout.nanos / 1e9))
        found = await self._get(op)
        if found.done or not limit:
            return found
        await self._operations.Wait(operations_pb2.WaitRequest(op=op, timeout=limit))
        return await self._get(op)


def _open(status: operations_pb2.Operation) -> google.Operation:
    found = google.Operation(name=f"{PREFIX}{status.op}")
    found.metadata.Pack(status)
    return found


def _report(status: operations_pb2.Operation) -> operations_pb2.GetReportResponse:
    """The report without the content: a list of ended operations has their records alone."""
    return operations_pb2.GetReportResponse(state=status.state, record=status.record)


def _ended(status: operations_pb2.Operation, report: operations_pb2.GetReportResponse) -> google.Operation:
    found = _open(status)
    found.done = True
    code = _CODES.get(State(report.state), grpc.StatusCode.ABORTED)
    if code is None:
        found.response.Pack(report)
    else:
        found.error.code = code.value[0]
        found.error.message = f"the operation {status.op} ended as {report.state}"
        found.error.details.add().Pack(report)
    return found
