"""Detects unexpected errors in logs.

A daemon logs an unexpected error and continues, so the invariants may still hold. In a simulation each one is a breach,
because only a bug can cause it. Simulated faults cause only the exception classes in ``EXPECTED``, and a full disk.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import traceback
from typing import TYPE_CHECKING

from distop.errors import EtcdRejected, EtcdUnavailable, OutcomeUnknown, SessionLost
from distop.store.transport import RequestFailed
from distop.worker.daemon_side.requests import WorkerError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

EXPECTED = (
    EtcdUnavailable,
    EtcdRejected,
    OutcomeUnknown,
    SessionLost,
    WorkerError,
    RequestFailed,
    asyncio.CancelledError,
)


def expected(error: BaseException) -> bool:
    """Whether a fault can cause this error."""
    return isinstance(error, EXPECTED) or (isinstance(error, OSError) and error.errno == errno.ENOSPC)


def with_traceback(error: BaseException) -> str:
    """The error with its traceback and its causes."""
    return "".join(traceback.format_exception(error)).rstrip()


class ErrorListener(logging.Handler):
    """A log handler. ``found(text, operation, partition)`` is called for each unexpected error."""

    def __init__(self, found: Callable[[str, str, int], None]) -> None:
        super().__init__(logging.WARNING)
        self._found = found

    def emit(self, record: logging.LogRecord) -> None:
        """Check the errors of a log record: its exception, its ``error`` field, and its arguments."""
        carried = [getattr(record, "error", None), *(record.exc_info or ()), *(record.args or ())]
        errors = {id(one): one for one in carried if isinstance(one, BaseException)}
        for error in errors.values():
            if not expected(error):
                partition = getattr(record, "partition", None)
                self._found(
                    f"{record.getMessage()}\n{with_traceback(error)}",
                    getattr(record, "operation", ""),
                    partition if partition is not None else -1,
                )


@contextlib.contextmanager
def listening(listener: ErrorListener) -> Iterator[None]:
    """Send distop's warnings and errors only to the listener."""
    logger = logging.getLogger("distop")
    handlers, level, propagate = logger.handlers[:], logger.level, logger.propagate
    logger.handlers[:], logger.propagate = [listener], False
    logger.setLevel(logging.WARNING)
    try:
        yield
    finally:
        logger.handlers[:], logger.propagate = handlers, propagate
        logger.setLevel(level)
