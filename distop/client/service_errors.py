"""distop's errors as gRPC statuses, and back.

A status has a canonical code, the sentence, and google.rpc details: ErrorInfo, whose reason is the exception's name,
BadRequest for invalid arguments, and RetryInfo if the call may be repeated.
"""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import grpc
from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import DecodeError
from google.rpc import error_details_pb2, status_pb2

from distop import errors as e
from distop.v1 import operations_pb2

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

DOMAIN = "distop"
DETAILS = "grpc-status-details-bin"
"""The trailer with the details of a status."""
RETRY_AFTER = 1
"""Seconds until a repeated call may succeed."""

_Code = grpc.StatusCode

CODES: Mapping[type[e.DistopError], grpc.StatusCode] = MappingProxyType(
    {
        e.InvalidArgument: _Code.INVALID_ARGUMENT,
        e.UsageError: _Code.INVALID_ARGUMENT,
        e.UnsafePath: _Code.INVALID_ARGUMENT,
        e.UnknownBehavior: _Code.NOT_FOUND,
        e.NotFound: _Code.NOT_FOUND,
        e.Incompatible: _Code.FAILED_PRECONDITION,
        e.OperationStartError: _Code.FAILED_PRECONDITION,
        e.NotAllowed: _Code.FAILED_PRECONDITION,
        e.InvalidToken: _Code.FAILED_PRECONDITION,
        e.WaitTimeout: _Code.DEADLINE_EXCEEDED,
        e.LimitExceeded: _Code.RESOURCE_EXHAUSTED,
        e.EtcdUnavailable: _Code.UNAVAILABLE,
        e.ServiceUnavailable: _Code.UNAVAILABLE,
        e.Unavailable: _Code.UNAVAILABLE,
        e.OutcomeUnknown: _Code.UNKNOWN,
        e.PermissionDenied: _Code.PERMISSION_DENIED,
        e.NotIdentified: _Code.UNAUTHENTICATED,
        e.EtcdRejected: _Code.INTERNAL,
        e.MalformedRequest: _Code.INTERNAL,
        e.Compacted: _Code.OUT_OF_RANGE,
        e.ClusterChanged: _Code.DATA_LOSS,
        e.UnreadableRecord: _Code.DATA_LOSS,
    }
)
"""The exceptions that cross the network. Any other one is INTERNAL, without its text."""
RETRYABLE = (e.Unavailable, e.OutcomeUnknown)
_BY_NAME = {kind.__name__: kind for kind in CODES}


def status_of(error: e.DistopError) -> tuple[grpc.StatusCode, str, bytes]:
    """Code, sentence and details of an error."""
    kind = next((one for one in type(error).__mro__ if one in CODES), None)
    if kind is None:
        return _Code.INTERNAL, "internal error: see the log of the service", b""
    code, text = CODES[kind], str(error).encode(errors="backslashreplace").decode()
    found = status_pb2.Status(code=code.value[0], message=text)
    found.details.add().Pack(error_details_pb2.ErrorInfo(reason=kind.__name__, domain=DOMAIN))
    if code is _Code.INVALID_ARGUMENT:
        violation = error_details_pb2.BadRequest.FieldViolation(description=text)
        found.details.add().Pack(error_details_pb2.BadRequest(field_violations=[violation]))
    if issubclass(kind, RETRYABLE):
        found.details.add().Pack(error_details_pb2.RetryInfo(retry_delay=Duration(seconds=RETRY_AFTER)))
    return code, text, found.SerializeToString()


def start_error(error: e.DistopError) -> operations_pb2.StartError:
    """The message of a start that fails beside others."""
    code, text, _ = status_of(error)
    kind = next((one for one in type(error).__mro__ if one in CODES), None)
    return operations_pb2.StartError(code=code.name, message=text, reason="" if kind is None else kind.__name__)


def error_of_start(message: operations_pb2.StartError) -> e.DistopError:
    """The error of a start that failed beside others."""
    kind = _BY_NAME.get(message.reason)
    return e.DistopError(f"the service fails ({message.message})") if kind is None else kind(message.message)


def error_of(failed: grpc.aio.AioRpcError, service: str, *, writes: bool, request_id: str = "") -> e.DistopError:
    """The error that a service has sent, or what a failed call means.

    ``writes``: whether the call may have changed something. ``request_id``: under which it can be repeated.
    """
    kind = _BY_NAME.get(_reason(failed.trailing_metadata()))
    text = failed.details() or ""
    if kind is not None:
        return kind(text)
    code = failed.code()
    if code is _Code.RESOURCE_EXHAUSTED:
        return e.InvalidArgument(f"the service at {service} refuses the call: {text}")
    if code in (_Code.UNAUTHENTICATED, _Code.PERMISSION_DENIED):
        return e.PermissionDenied(f"the service at {service} refuses the call: {text}", code=code.name)
    if code is _Code.UNIMPLEMENTED:
        return e.NotAllowed(f"the service at {service} does not know this call: use the release of the service")
    if code is _Code.INVALID_ARGUMENT:
        return e.InvalidArgument(text)
    why = f"the service at {service} does not answer ({code.name}: {text})"
    if code in (_Code.INTERNAL, _Code.UNKNOWN):
        why = f"the service at {service} fails ({code.name}: {text})"
        if not writes:
            return e.DistopError(why)
    if not writes:
        return e.EtcdUnavailable(why)
    again = f"call again with request_id={request_id!r}" if request_id else "call again"
    return e.OutcomeUnknown(f"cannot tell whether the call had an effect, because {why}: {again}")


def _reason(metadata: Any) -> str:
    """The reason in the trailers of a failed call; "" if distop has sent none."""
    trailers: Sequence[tuple[str, Any]] = tuple(metadata or ())
    details = next((value for key, value in trailers if key == DETAILS), b"")
    found = status_pb2.Status()
    try:
        found.ParseFromString(details)
        for one in found.details:
            info = error_details_pb2.ErrorInfo()
            if one.Unpack(info) and info.domain == DOMAIN:
                return str(info.reason)
    except DecodeError:
        return ""
    return ""
