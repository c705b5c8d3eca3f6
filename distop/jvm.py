"""What py4j's and PySpark's errors say of Java's, and the active session of a thread. Nothing of theirs is imported."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator

_CAUSES = 20
"""One that is its own cause has no end."""


def thrown(error: Exception) -> Iterator[Any]:
    """What Java threw, and what caused it; nothing where PySpark itself raised the error. Raises what the connection to
    the JVM raises.
    """
    found: Any = getattr(error, "_origin", None) or getattr(error, "java_exception", None)
    for _ in range(_CAUSES):
        if found is None:
            return
        yield found
        found = found.getCause()


@contextmanager
def active(session: Any) -> Iterator[None]:
    """Make the session the active one of this thread.

    Spark and Iceberg read the settings of catalogs from the active session. A thread of a job or a plan has none, or
    another one.
    """
    own, sessions = session._jsparkSession, session._get_j_spark_session_class(session._jvm)
    former = sessions.getActiveSession()
    sessions.setActiveSession(own)
    try:
        yield
    finally:
        if former.isDefined():
            sessions.setActiveSession(former.get())
        else:
            sessions.clearActiveSession()
