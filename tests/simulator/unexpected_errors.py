"""Errors that nobody expects. A daemon tells them in its log and goes on, so that the invariants may well hold: in a
simulation each is a breach all the same, because nothing there can cause one but a mistake in the program.

What is expected is told by the class of an exception. A cluster with faults gives those of ``EXPECTED``, and those
alone: no record is unreadable there, nobody's call is malformed, and nothing else is wrong with a disk than that it is
full.
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
    """A fault can cause it."""
    return isinstance(error, EXPECTED) or (isinstance(error, OSError) and error.errno == errno.ENOSPC)


def told(error: BaseException) -> str:
    """With its traceback, and what it came from."""
    return "".join(traceback.format_exception(error)).rstrip()


class Listener(logging.Handler):
    """Takes in what is logged. ``found(text, operation, partition)`` is called for each error that is not expected."""

    def __init__(self, found: Callable[[str, str, int], None]) -> None:
        super().__init__(logging.WARNING)
        self._found = found

    def emit(self, record: logging.LogRecord) -> None:
        """A record carries an error as its exception, or beside a text that describes it, or has it in its text."""
        carried = [getattr(record, "error", None), *(record.exc_info or ()), *(record.args or ())]
        errors = {id(one): one for one in carried if isinstance(one, BaseException)}
        for error in errors.values():
            if not expected(error):
                partition = getattr(record, "partition", None)
                self._found(
                    f"{record.getMessage()}\n{told(error)}",
                    getattr(record, "operation", ""),
                    partition if partition is not None else -1,
                )


@contextlib.contextmanager
def listening(listener: Listener) -> Iterator[None]:
    """Warnings and errors of distop go to the listener, and nowhere else."""
    logger = logging.getLogger("distop")
    handlers, level, propagate = logger.handlers[:], logger.level, logger.propagate
    logger.handlers[:], logger.propagate = [listener], False
    logger.setLevel(logging.WARNING)
    try:
        yield
    finally:
        logger.handlers[:], logger.propagate = handlers, propagate
        logger.setLevel(level)
