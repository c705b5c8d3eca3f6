"""Every exception of distop, each named for what the caller does about it.

The public ones (a contract) derive from :class:`DistopError` and carry one sentence that says what to do.
The store's own distinctions follow docs/internals/etcd-rules.md ("What an error says about a write"): a request
certainly did not happen (:class:`EtcdRejected`), could not be sent (:class:`EtcdUnavailable`), or may have happened
(:class:`OutcomeUnknown`). "Failed" and "unknown" are different types on purpose: only the first
may be answered by doing something else.
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
    """No executor has ever published a behavior of this type."""


class InvalidArgument(UsageError):
    """The argument, name, option or location does not fit what it is for."""


class UnsafePath(InvalidArgument):
    """A path leads out of the folder that it has to lie in, or through a link. Nothing was removed or read: a person
    has to look at what is there.
    """


class EtcdUnavailable(DistopError):
    """etcd could not be reached in the time allowed, and the request was certainly not sent or not applied."""

    exit_code = 3


class NotFound(DistopError):
    """There is no such table, operation, or executor."""

    exit_code = 4


class OperationStartError(DistopError):
    """The operation was refused at submission; nothing was changed."""

    exit_code = 5


class Incompatible(OperationStartError):
    """An operation that runs on the table excludes this one (both are named)."""


class NotAllowed(DistopError):
    """The command does not fit the state that the operation or the table is in; nothing was changed."""

    exit_code = 5


class OperationFailed(DistopError):
    """The operation ended as ``failed``; or, raised by ``complete_operation``, is to end so.

    ``report`` is stored in the history record.
    """

    def __init__(self, message: str = "", report: Any = None) -> None:
        super().__init__(message)
        self.report = report


class OperationCancelled(OperationFailed):
    """The operation ended as ``cancelled``."""


class InvalidToken(DistopError):
    """The token is none, or the job that it was for has been granted to somebody else, or has ended: drop the work."""

    exit_code = 5


class WaitTimeout(DistopError):
    """The time given for waiting is over; the operation goes on."""

    exit_code = 6


class OutcomeUnknown(DistopError):
    """A write may or may not have been applied, now or later (docs/internals/etcd-rules.md, T9).

    The only correct way to find out is to send the identical guarded transaction again.
    """

    exit_code = 3


class JobFailed(DistopError):
    """Raised by a job for a *verdict*: the job did its work and the answer is no (IGNITE-19692: failing is
    not an unexpected error). ``result`` is stored in the outcome. It is not retried.
    """

    def __init__(self, message: str, result: Any = None) -> None:
        super().__init__(message)
        self.result = result


class TableUnavailable(DistopError):
    """A table's files cannot be reached from this node now. Another node may reach them, or this one later: it is tried
    again, and says nothing of the table.
    """


class NotServed(DistopError):
    """This executor does not serve the type or a table of an operation: its settings ``types`` and ``tables``."""


class FatalError(DistopError):
    """Raised by code of a behavior for an error that no retry mends: a job then fails at once (with ``can_fail``), as
    planning or completion does. Other unexpected errors are tried again.
    """


class JobCancelled(DistopError):
    """Raised inside a job by ``ctx.check_cancelled()`` once the job has to stop."""


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


class MalformedRequest(EtcdRejected):
    """etcd rejects the request as invalid: too large, or a key is written twice.

    It may also have too many operations. It is rejected whatever the store contains, so one that is part of a group
    must not hold up the others. ``key``: the key concerned, where that is known.
    """

    def __init__(self, message: str, *, code: str = "", detail: str = "", key: str = "") -> None:
        super().__init__(message, code=code, detail=detail)
        self.key = key


class LeaseNotFound(EtcdRejected):
    """The lease does not exist (any more): the session that it stood for is over (L2)."""


class Compacted(EtcdRejected):
    """The revision asked for has been compacted away: list again (W6). ``revision`` is the oldest one kept."""

    def __init__(self, message: str, *, revision: int = 0, detail: str = "") -> None:
        super().__init__(message, code="OUT_OF_RANGE", detail=detail)
        self.revision = revision


class ClusterChanged(DistopError):
    """The etcd behind the endpoints is not the one seen before (another cluster id, or a revision that went
    back: a restored snapshot). Everything known of it is void: fail closed.
    """

    exit_code = 3


class UnreadableRecord(DistopError):
    """A record in etcd is not of the form that this release reads: written by a later one, or by something else."""

    exit_code = 3


class SessionLost(DistopError):
    """The lease of this incarnation is gone or its deadline has passed: nothing may be written under it."""


def no_operation(op: object) -> NotFound:
    """The error to raise where there is neither an operation's state nor its history."""
    return NotFound(f"there is no operation {op}: it never was, or it ended so long ago that its history was dropped")


def describe(error: BaseException) -> str:
    """One line for people: the message, or the type's name where there is none."""
    text = str(error).strip()
    return text if text else type(error).__name__
