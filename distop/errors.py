"""The exceptions of distop, each named for what the caller does about it.

The public ones (a contract) derive from :class:`DistopError` and carry one sentence that says what to do. The store's
exceptions follow docs/internals/etcd-rules.md ("What an error says about a write"): a request certainly did not happen
(:class:`EtcdRejected`), could not be sent (:class:`Unavailable`), or may have happened (:class:`OutcomeUnknown`).
"Failed" and "unknown" are different types on purpose: only after a failure may the caller do something else.
"""

from __future__ import annotations

from typing import Any


class DistopError(Exception):
    """Base of all exceptions that distop raises on purpose. ``exit_code`` is the command line's (contract)."""

    exit_code = 1


class UsageError(DistopError):
    """The call itself is wrong: correct it and call again. Nothing was changed."""

    exit_code = 2


class UnknownBehavior(UsageError):
    """No executor has published a behavior of this type."""


class InvalidArgument(UsageError):
    """An argument, name, option or location is invalid."""


class UnsafePath(InvalidArgument):
    """A path leaves its folder, or goes through a link.

    Nothing was removed or read: a person has to check the path.
    """


class Unavailable(DistopError):
    """The call cannot be answered now. Nothing was changed; call again later."""

    exit_code = 3


class EtcdUnavailable(Unavailable):
    """etcd could not be reached in time, and the request was certainly not applied."""


class ServiceUnavailable(Unavailable):
    """The service cannot answer the call now, although etcd may answer. Nothing was changed; call again later."""


class LimitExceeded(Unavailable):
    """The caller exceeds a limit that the service has for it. Nothing was changed; call again later."""


class NotFound(DistopError):
    """There is no such table, operation, or executor."""

    exit_code = 4


class OperationStartError(DistopError):
    """The start of an operation was refused; nothing was changed."""

    exit_code = 5


class Incompatible(OperationStartError):
    """A running operation on the table excludes this one (both are named)."""


class NotAllowed(DistopError):
    """The state of the operation or table does not allow the command; nothing was changed."""

    exit_code = 5


class OperationFailed(DistopError):
    """The operation ended as ``failed``; ``complete_operation`` raises it to end so.

    ``report`` is stored in the history record.
    """

    def __init__(self, message: str = "", report: Any = None) -> None:
        super().__init__(message)
        self.report = report


class OperationCancelled(OperationFailed):
    """The operation ended as ``cancelled``."""


class InvalidToken(DistopError):
    """The token is invalid, or its job has ended or has another holder: drop the work."""

    exit_code = 5


class WaitTimeout(DistopError):
    """The wait has timed out; the operation continues."""

    exit_code = 6


class OutcomeUnknown(DistopError):
    """A write may or may not have been applied, now or later (docs/internals/etcd-rules.md, T9).

    The only correct way to find out is to send the identical guarded transaction again.
    """

    exit_code = 3


class JobFailed(DistopError):
    """Raised by a job for a *verdict*: the job did its work, and its answer is no.

    A verdict is no unexpected error (IGNITE-19692), and the job is not retried. ``result`` is stored in the outcome.
    """

    def __init__(self, message: str, result: Any = None) -> None:
        super().__init__(message)
        self.result = result


class TableUnavailable(DistopError):
    """A table's files cannot be reached from this node now.

    It says nothing about the table, and is retried: another node may reach the files, or this node later.
    """


class TableBusy(TableUnavailable):
    """The store of a table's files asks for fewer requests, or gives no answer in time. Wait, and ask it again."""


class NotServed(DistopError):
    """This executor does not serve the operation's type or tables (``types``, ``tables``)."""


class FatalError(DistopError):
    """Raised by a behavior for an error that a retry cannot fix.

    A job then fails at once (with ``can_fail``), as planning or completion does. Other unexpected errors are retried.
    """


class TableRefused(TableUnavailable, FatalError):
    """The store refuses a table's files: access is denied, or there is no such place. A retry cannot fix it."""


class JobCancelled(DistopError):
    """Raised inside a job by ``ctx.check_cancelled()`` when the job has to stop."""


class EtcdRejected(DistopError):
    """etcd answered that the request was certainly not applied, and repeating it would not help.

    ``code`` is the gRPC status name, ``detail`` etcd's own words.
    """

    exit_code = 3

    def __init__(self, message: str, *, code: str = "", detail: str = "") -> None:
        super().__init__(message)
        self.code = code
        self.detail = detail


class PermissionDenied(EtcdRejected):
    """The etcd user may not do this, or the user name, password or certificate is not accepted."""


class NotIdentified(PermissionDenied):
    """The service does not know the caller: the token or certificate is missing, or belongs to nobody."""


class MalformedRequest(EtcdRejected):
    """etcd rejects the request as invalid: too large, or a key is written twice.

    It may also have too many operations. It is rejected whatever the store contains, so one that is part of a group
    must not hold up the others. ``key``: the key concerned, where that is known.
    """

    def __init__(self, message: str, *, code: str = "", detail: str = "", key: str = "") -> None:
        super().__init__(message, code=code, detail=detail)
        self.key = key


class LeaseNotFound(EtcdRejected):
    """The lease does not exist, or no longer: its session has ended (L2)."""


class Compacted(EtcdRejected):
    """The requested revision has been compacted: list again (W6).

    ``revision`` is the oldest one that is kept.
    """

    def __init__(self, message: str, *, revision: int = 0, detail: str = "") -> None:
        super().__init__(message, code="OUT_OF_RANGE", detail=detail)
        self.revision = revision


class ClusterChanged(DistopError):
    """The endpoints lead to another etcd cluster, or to a restored snapshot.

    The cluster id is another one, or the revision went back. All cached knowledge is void: fail closed.
    """

    exit_code = 3


class UnreadableRecord(DistopError):
    """A record in etcd has a form that this release cannot read.

    A later release or another program has written it.
    """

    exit_code = 3


class SessionLost(DistopError):
    """This incarnation's lease is gone or past its deadline: it may write nothing more."""


def no_operation(op: object) -> NotFound:
    """The error for an operation without a state and a history record."""
    return NotFound(f"there is no operation {op}: it never existed, or its history has been deleted")


def message_of(error: BaseException) -> str:
    """The message of an error; other text if the error's ``__str__`` raises, as that of Py4J can after a lost JVM."""
    try:
        return str(error)
    except Exception as problem:
        return f"its message cannot be read: {type(problem).__name__}"


def describe(error: BaseException) -> str:
    """One line for people: the message, or the type's name if there is no message."""
    text = message_of(error).strip()
    return text if text else type(error).__name__
