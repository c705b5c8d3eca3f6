"""Classifies errors of Spark by their cause: the data, one file, or Spark itself.

It uses classes, error conditions, and the fixed text at the start of a message. The rest of a message may quote values
of the data, so it is not used.
"""

from __future__ import annotations

import re
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from distop.runtime import secret_settings
from distop.runtime.java import java_exceptions
from distop.tables.reading.file_facts import Unreadable
from distop.tables.reading.spark_paths import READING

if TYPE_CHECKING:
    from collections.abc import Sequence

_CODEC = re.compile(r"Class (\S*?(\w+)Codec) was not found")
_ENCODING = re.compile(r"Unsupported encoding: (\w+)")
_PLACE = re.compile(r" (?:at|of|in) (?:file |path )?[a-z0-9]+:/\S+")
"""The path of a file in a message: removed if the error names the file itself."""

_GONE = frozenset(
    {
        *("java.lang.InterruptedException", "java.io.InterruptedIOException"),
        *("java.nio.channels.ClosedByInterruptException", "java.lang.OutOfMemoryError"),
        *("org.apache.spark.memory.SparkOutOfMemoryError", "org.apache.spark.TaskKilledException"),
        *("org.apache.spark.ExecutorDeadException", "org.apache.spark.shuffle.FetchFailedException"),
    }
)
_GONE_CONDITIONS = frozenset(
    {
        *("SPARK_JOB_CANCELLED", "OPERATION_CANCELED", "AGGREGATE_OUT_OF_MEMORY", "POINTER_ARRAY_OUT_OF_MEMORY"),
        *("SPILL_OUT_OF_MEMORY", "UNABLE_TO_ACQUIRE_MEMORY", "INTERNAL_ERROR_EXECUTOR", "INTERNAL_ERROR_MEMORY"),
        *("INTERNAL_ERROR_SHUFFLE", "INTERNAL_ERROR_BROADCAST", "INTERNAL_ERROR_NETWORK", "INTERNAL_ERROR_STORAGE"),
    }
)
_GONE_TASK = re.compile(
    r"Job aborted due to stage failure: (?:Task \S+ in stage \S+ failed \d+ times, most recent failure: "
    r"Lost task \S+ in stage \S+ \(TID \d+\)(?: \(\S+ executor \S+\))?: "
    r"(?:ExecutorLostFailure|TaskKilled|FetchFailed|TaskResultLost|Resubmitted|java\.lang\.OutOfMemoryError)\b"
    r"|(?!Task ))"
)
"""A task that ended without an exception of its own, or a stage that failed without a failed task."""
_STOPPED = re.compile(
    r"Job \d+ cancelled|Job cancelled because SparkContext was shut down|SparkContext (?:was|has been) (?:shut|stopped)"
    r"|Cannot call methods on a stopped SparkContext"
)
"""The start of Spark's own messages about a stopped job or context."""
_OF_TASK = re.compile(
    r"Job aborted due to stage failure: Task \S+ in stage \S+ failed \d+ times, most recent failure: "
    r"Lost task \S+ in stage \S+ \(TID \d+\)(?: \(\S+ executor \S+\))?: "
)
"""The text that Spark puts before the exception of a task, if that is not a separate cause."""
_STACK_OVERFLOW = "java.lang.StackOverflowError"
_READ = 10_000
"""Maximum characters of an exception's message to examine: it may quote a value of any length."""
MAX_SENTENCE = 600
"""Maximum characters of Spark's error message, which may quote a whole expression."""
_DISK = "No space left on device"


def _beginning(text: str) -> str:
    """The start of a message without secrets. They are removed first: a secret that is cut is not recognized."""
    return secret_settings.redact(text)[:_READ]


def is_unexpected(error: Exception) -> bool:
    """Whether Spark itself fails. The error says nothing about the data, and another attempt may succeed."""
    from py4j.protocol import Py4JError, Py4JJavaError
    from pyspark.errors import PySparkException

    if isinstance(error, Unreadable):
        return False
    if not isinstance(error, PySparkException | Py4JJavaError):
        return True
    try:
        return any(map(_is_gone, java_exceptions(error)))
    except (Py4JError, OSError):
        return True  # the JVM no longer answers


def _is_gone(thrown: Any) -> bool:
    name, text = str(thrown.getClass().getName()), str(thrown.getMessage() or "")
    if name in _GONE or (name.startswith("java.io.") and text.rstrip(")").endswith(_DISK)):
        return True
    if name == "scala.MatchError" and text.startswith("java.lang.OutOfMemoryError"):
        return True  # Spark 4.1 reports lack of memory in this way while it reads a file
    condition = _condition(thrown)
    if condition is not None:
        return condition in _GONE_CONDITIONS
    if name in ("org.apache.spark.SparkException", "java.lang.IllegalStateException"):
        return _STOPPED.match(text) is not None or _GONE_TASK.match(text) is not None
    return False


def _condition(thrown: Any) -> str | None:
    """Spark's error condition without its subclass, or None."""
    from py4j.java_gateway import is_instance_of
    from pyspark import SparkContext

    context = SparkContext._active_spark_context
    if context is None or not is_instance_of(context._gateway, thrown, "org.apache.spark.SparkThrowable"):
        return None
    found = thrown.getCondition()
    return str(found).partition(".")[0] if found else None


def is_internal(error: Exception) -> bool:
    """Whether Spark failed on a bug or limit of its own, such as a stack overflow.

    The data is not the cause, and Spark may succeed with other expressions. Call this only if :func:`is_unexpected` is
    false.
    """
    first = next(java_exceptions(error), None)
    if first is None:
        return False
    condition = _condition(first)
    return condition.startswith("INTERNAL_ERROR") if condition is not None else _is_of_java(first)


def _is_of_java(thrown: Any) -> bool:
    """Whether the error comes from Java or from the code compiler, not from Spark."""
    name = str(thrown.getClass().getName())
    return name.startswith(("java.lang.", "scala.", "org.codehaus.", "com.google.common.util.concurrent."))


def why_unreadable(error: Exception) -> str:
    """Why Spark cannot read a file: codec, encoding, encryption, its name, or damage."""
    from py4j.protocol import Py4JError

    causes: list[tuple[str, str]] = []
    with suppress(Py4JError, OSError):
        causes = [(str(t.getClass().getName()), str(t.getMessage() or "")) for t in java_exceptions(error)]
    return explain_causes(causes) or message_of(error)


def explain_causes(causes: Sequence[tuple[str, str]]) -> str:
    """Why a file cannot be read, from the (class, message) pairs of the exceptions.

    "" if they only say that a file cannot be read.
    """
    # Further lines (a schema, mostly) are dropped, and so is the ':' or '{' that announces them.
    causes = [
        (name, text.strip().split("\n")[0].rstrip(" {:"))
        for name, text in ((name, _beginning(text)) for name, text in causes)
        if READING.search(text) is None
    ]
    for name, text in causes:
        if name == "java.net.URISyntaxException" and ":" in text.rpartition("URI: ")[2]:
            return "its name contains ':', which Hadoop does not allow: rename it"
        if missing := _CODEC.search(text):
            return f"Spark has no codec {missing[2]} (the class {missing[1]})"
        if encoding := _ENCODING.search(text):
            return f"Spark cannot read the encoding {encoding[1]}"
        if name.endswith("CryptoRuntimeException"):
            return f"it is encrypted: {text}"
        if name.endswith("AnalysisException"):
            return f"Spark cannot read its schema: {text}"
    messages = [(name, text) for name, text in causes if text]
    if not messages and not causes:
        return ""
    # The first message names the place in the file, the last one the cause.
    name, text = messages[0] if messages else causes[-1]
    details = [name.rpartition(".")[2]]
    if messages:
        details.append(_PLACE.sub("", text))
        if messages[-1][1] not in text:
            details.append(messages[-1][1])
    return f"it is damaged, or in a form that Spark cannot read ({': '.join(details)})"


def message_of(error: Exception) -> str:
    """Spark's error message without the plan, the query text and the stack.

    It has at most :data:`MAX_SENTENCE` characters.
    """
    from py4j.protocol import Py4JError, Py4JJavaError

    text = _beginning(str(error)).strip()
    if isinstance(error, Py4JJavaError):
        # PySpark does not convert Java's own exceptions: their message follows the description of the call.
        with suppress(Py4JError, OSError):
            text = _of_java(error.java_exception)
    found = re.search(r"\[[A-Z_0-9.]+\] .*", text)
    line = _OF_TASK.sub("", found.group(0) if found else text.split("\n")[0]).strip()
    if line == _STACK_OVERFLOW:  # in a task: a too deeply nested expression fails in the driver
        return f"a regular expression that repeats a group, such as (a|b)*, fails on a long text ({line}): use [ab]*"
    return secret_settings.shortened(line.partition("SQLSTATE: ")[0].rstrip(), MAX_SENTENCE)


def _of_java(thrown: Any) -> str:
    name, text = str(thrown.getClass().getName()), _beginning(str(thrown.getMessage() or "")).strip()
    if name == _STACK_OVERFLOW:
        return f"the expression is nested too deeply for Spark ({name})"
    return text or name
