"""The Java that Spark would start here, whether it is new enough, and what errors of py4j say of Java's.

The Java that Spark would start here, and whether it is new enough: for the child before it starts Spark, and for
``distop doctor``.

What py4j's and PySpark's errors say of Java's, and the active session of a thread. Nothing of theirs is imported.
"""

from __future__ import annotations

import shutil
import subprocess
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from distop.protocol.supported_versions import OLDEST_JAVA, Judgement, judge_java

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping


_LIMIT = 30.0
"""Seconds for ``java -version``."""
_NEEDED = f"Java {OLDEST_JAVA} or newer is needed"


def judge(environment: Mapping[str, str]) -> Judgement:
    """Spark takes JAVA_HOME's, else the first one on PATH. Of the level ``error`` where it would not run."""
    home = environment.get("JAVA_HOME")
    java = shutil.which(f"{home}/bin/java") if home else shutil.which("java", path=environment.get("PATH"))
    if java is None:
        where = f"JAVA_HOME is {home}, where no bin/java can be run" if home else "no java is on the PATH"
        return Judgement("error", f"{_NEEDED}: {where}")
    try:
        done = subprocess.run(
            [java, "-version"], env=environment, capture_output=True, text=True, timeout=_LIMIT, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return Judgement("error", f"{_NEEDED}: {java} cannot be run ({error})")
    judged = judge_java(done.stderr + done.stdout)
    text = f"{_NEEDED}: {java} {judged.text}" if judged.level == "error" else f"{judged.text} ({java})"
    return Judgement(judged.level, text)


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
