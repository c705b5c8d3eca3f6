"""Logging of the daemon and the command line to stderr: text for people, or one JSON object per line.

Each record is one line, whatever its message contains; in text at level debug, its traceback follows.
"""

from __future__ import annotations

import json
import logging
import os
import sys
from io import TextIOWrapper
from logging.handlers import WatchedFileHandler
from typing import TYPE_CHECKING, Any, TextIO

from distop.errors import InvalidArgument
from distop.protocol.json_codec import rfc3339
from distop.protocol.texts import one_line
from distop.runtime import secret_settings

if TYPE_CHECKING:
    from collections.abc import MutableMapping

CONTEXT = ("operation", "partition", "attempt", "executor", "incarnation")
"""Optional fields of a log record besides its message."""
Log = logging.Logger | logging.LoggerAdapter[logging.Logger]


def brief(text: str) -> str:
    """The first and the last line of a text in one line: the event, and the cause at the end of a log or traceback."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return " … ".join(dict.fromkeys((lines[0], lines[-1]))) if lines else ""


def indented(trace: str) -> str:
    """A traceback with indented lines, so that no line of it looks like another record."""
    return "\n".join(f"  {one_line(line)}" for line in trace.split("\n"))


class Plain(logging.Formatter):
    """The standard library's formatter, with each record in one line and its traceback indented below."""

    def format(self, record: logging.LogRecord) -> str:
        record.message = record.getMessage()
        if self.usesTime():
            record.asctime = self.formatTime(record, self.datefmt)
        line = one_line(self.formatMessage(record))
        return f"{line}\n{indented(self.formatException(record.exc_info))}" if record.exc_info else line


class _Text(logging.Formatter):
    def __init__(self, traces: bool) -> None:
        super().__init__()
        self._traces = traces

    def format(self, record: logging.LogRecord) -> str:
        where = " ".join(f"{n}={getattr(record, n)}" for n in CONTEXT if getattr(record, n, None) is not None)
        line = f"{rfc3339(record.created)} {record.levelname:<7} {brief(record.getMessage())}"
        error = record.exc_info[1] if record.exc_info else None
        if error is not None and not self._traces:
            line = f"{line} ({brief(f'{type(error).__name__}: {error}')})"
        line = one_line(f"{line}  [{where}]" if where else line)
        return (
            f"{line}\n{indented(self.formatException(record.exc_info))}" if record.exc_info and self._traces else line
        )


class _Json(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        data: dict[str, Any] = {
            "time": rfc3339(record.created),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        data.update({n: getattr(record, n) for n in (*CONTEXT, "trace_id") if getattr(record, n, None) is not None})
        if action := getattr(record, "action", None):
            data["action"] = action
        if record.exc_info:
            data["exception"] = self.formatException(record.exc_info)
        return json.dumps(data, default=str)  # in ASCII, which is JSON whatever stderr's encoding is


class ActionsFile(WatchedFileHandler):
    """A file with one JSON line per action (``daemon.action_log``), readable only for its owner.

    It is created again after it was moved away, for example by logrotate. Raises OSError if it cannot be written.
    """

    def __init__(self, path: str) -> None:
        super().__init__(path, encoding="ascii")
        self._failed = False

    def _open(self) -> TextIOWrapper:
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        return TextIOWrapper(os.fdopen(os.open(self.baseFilename, flags, 0o600), "ab"), encoding="ascii")

    def format(self, record: logging.LogRecord) -> str:
        names = ("executor", "incarnation")
        logged = {"time": rfc3339(record.created), **{n: getattr(record, n) for n in names if hasattr(record, n)}}
        return secret_settings.redact(json.dumps({**record.action, "logged": logged}, default=str))  # type: ignore[attr-defined]

    def handleError(self, record: logging.LogRecord) -> None:
        error, failed, self._failed = sys.exc_info()[1], self._failed, True
        if not failed:
            logging.getLogger("distop.executor").error("Cannot write the file of actions-log: %s", error)


class ContextLogger(logging.LoggerAdapter[logging.Logger]):
    """A logger that adds its own fields of :data:`CONTEXT`, and those of the call, to its records."""

    def process(self, msg: str, kwargs: MutableMapping[str, Any]) -> tuple[str, MutableMapping[str, Any]]:
        kwargs["extra"] = {**(self.extra or {}), **(kwargs.get("extra") or {})}
        return msg, kwargs

    def bind(self, **fields: Any) -> ContextLogger:
        """The same logger with more fields."""
        return ContextLogger(self.logger, {**(self.extra or {}), **fields})


class _Stderr(logging.StreamHandler[TextIO]):
    """The handler of this process's logs; its class identifies it for replacement."""

    def format(self, record: logging.LogRecord) -> str:
        return secret_settings.redact(super().format(record))


def get(name: str = "distop", **fields: Any) -> ContextLogger:
    """A logger with context fields."""
    return ContextLogger(logging.getLogger(name), fields)


def _is_no_grpc_noise(record: logging.LogRecord) -> bool:
    """Filter out two harmless gRPC errors that asyncio logs in processes with several event loops.

    Any of the loops may read gRPC's queue: a second reader finds nothing (BlockingIOError), and a late event may belong
    to a closed loop (RuntimeError). Nothing waits for either.
    """
    error = record.exc_info[1] if record.exc_info else None
    late = isinstance(error, RuntimeError) and str(error) == "Event loop is closed"
    harmless = late or isinstance(error, BlockingIOError)
    return not (harmless and record.name == "asyncio" and "PollerCompletionQueue" in record.getMessage())


def _actions_file(path: str) -> ActionsFile:
    try:
        return ActionsFile(path)
    except OSError as error:
        raise InvalidArgument(f"cannot write the file {path} of actions-log: {error.strerror or error}") from None


def configure(level: str = "info", style: str = "text", actions: str | None = None) -> None:
    """Send distop's logs, and the warnings of libraries in the same format, to stderr.

    ``style``: text or json. Text has tracebacks only at level debug. ``actions``: a file with one line per action;
    without it, actions go to the log if that is JSON. Raises InvalidArgument if the file cannot be written.
    """
    # No format uses these fields, so do not compute them for each record.
    logging.logThreads = logging.logProcesses = logging.logMultiprocessing = False
    sink = _Stderr(sys.stderr)
    sink.setFormatter(_Json() if style == "json" else _Text(level.upper() == "DEBUG"))
    sink.addFilter(_is_no_grpc_noise)
    own, others = logging.getLogger("distop"), logging.getLogger()
    own.handlers[:] = [sink]
    own.setLevel(level.upper())
    own.propagate = False
    action_log = logging.getLogger("distop.actions")
    action_log.handlers[:] = [*([_actions_file(actions)] if actions else [])]
    action_log.propagate = style == "json" and own.isEnabledFor(logging.INFO)
    action_log.setLevel(logging.INFO if action_log.propagate or actions else logging.CRITICAL)
    others.handlers[:] = [*(handler for handler in others.handlers if not isinstance(handler, _Stderr)), sink]
    logging.captureWarnings(True)
