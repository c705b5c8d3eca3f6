"""What an error of Spark is about: the data, one file, or Spark itself.

It is told by classes, by conditions, and by what Spark writes before it quotes anything: the text of an error holds
values of the data, which may be any words.
"""

from __future__ import annotations

import re
from contextlib import suppress
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote, urlsplit

from distop.jvm import thrown
from distop_behaviors.reading.facts import Unreadable

if TYPE_CHECKING:
    from collections.abc import Sequence

    from distop_behaviors.reading.footers import PlannedFile

_READING = re.compile(r"while reading file (\S+?)\.?(?:\s|$)")

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
"""A task that ended by no exception of its own, and a stage that none of its tasks ended."""
_STOPPED = re.compile(
    r"Job \d+ cancelled|Job cancelled because SparkContext was shut down|SparkContext (?:was|has been) (?:shut|stopped)"
    r"|Cannot call methods on a stopped SparkContext"
)
"""How Spark's own sentences begin."""
_DISK = "No space left on device"


def plain_path(uri: str) -> str:
    """Spark's ``file:///a%20b`` as the local path ``/a b``; other schemes as they are, unescaped."""
    if uri.startswith("file:"):
        return unquote(urlsplit(uri).path)
    return unquote(uri)


def broken_file(error: Exception, files: Sequence[PlannedFile]) -> str | None:
    """Which of the files Spark could not read, where it says so."""
    named = {plain_path(m) for m in _READING.findall(str(error))}
    return next((f[0] for f in files if f[0] in named), None)


def is_unexpected(error: Exception) -> bool:
    """Spark itself is in trouble: nothing is known of the data, and another attempt may do better."""
    from py4j.protocol import Py4JError, Py4JJavaError
    from pyspark.errors import PySparkException

    if isinstance(error, Unreadable):
        return False
    if not isinstance(error, PySparkException | Py4JJavaError):
        return True
    try:
        return any(map(_is_gone, thrown(error)))
    except (Py4JError, OSError):
        return True  # the JVM no longer answers


def _is_gone(thrown: Any) -> bool:
    name, text = str(thrown.getClass().getName()), str(thrown.getMessage() or "")
    if name in _GONE or (name.startswith("java.io.") and text.rstrip(")").endswith(_DISK)):
        return True
    condition = _condition(thrown)
    if condition is not None:
        return condition in _GONE_CONDITIONS
    if name in ("org.apache.spark.SparkException", "java.lang.IllegalStateException"):
        return _STOPPED.match(text) is not None or _GONE_TASK.match(text) is not None
    return False


def _condition(thrown: Any) -> str | None:
    """Spark's name for the error, without its subclass; None where it has none."""
    from py4j.java_gateway import is_instance_of
    from pyspark import SparkContext

    context = SparkContext._active_spark_context
    if context is None or not is_instance_of(context._gateway, thrown, "org.apache.spark.SparkThrowable"):
        return None
    found = thrown.getCondition()
    return str(found).partition(".")[0] if found else None


def sentence_of(error: Exception) -> str:
    """Spark's own sentence, without the plan, the query text and the stack."""
    from py4j.protocol import Py4JError, Py4JJavaError

    text = str(error).strip()
    if isinstance(error, Py4JJavaError):
        # Of Java's own exceptions PySpark makes none of its own: their sentence stands behind the call's.
        with suppress(Py4JError, OSError):
            text = str(error.java_exception.getMessage() or text).strip()
    found = re.search(r"\[[A-Z_0-9.]+\] .*", text)
    line = (found.group(0) if found else text.split("\n")[0]).strip()
    return re.sub(r"\s*SQLSTATE: \w+.*$", "", line)
