"""Checks the Java that Spark would use on this machine, and finds Java exceptions in errors of py4j and PySpark.

Also sets a thread's active session. Imports neither py4j nor PySpark.
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
"""Time-out in seconds for ``java -version``."""
_NEEDED = f"Java {OLDEST_JAVA} or newer is needed"


def judge(environment: Mapping[str, str]) -> Judgement:
    """Judge the Java that Spark would use: JAVA_HOME's, else the first on PATH. Level ``error``: not usable."""
    home = environment.get("JAVA_HOME")
    java = shutil.which(f"{home}/bin/java") if home else shutil.which("java", path=environment.get("PATH"))
    if java is None:
        where = f"JAVA_HOME is {home}, which has no executable bin/java" if home else "there is no java on the PATH"
        return Judgement("error", f"{_NEEDED}: {where}")
    try:
        done = subprocess.run(
            [java, "-version"], env=environment, capture_output=True, text=True, timeout=_LIMIT, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return Judgement("error", f"{_NEEDED}: cannot run {java} ({error})")
    judged = judge_java(done.stderr + done.stdout)
    text = f"{_NEEDED}: {java} {judged.text}" if judged.level == "error" else f"{judged.text} ({java})"
    return Judgement(judged.level, text)


_CAUSES = 20
"""Maximum length of a chain of causes, which may be cyclic."""


def java_exceptions(error: Exception) -> Iterator[Any]:
    """The Java exception in an error and its causes; nothing if PySpark itself raised the error.

    Raises the errors of the connection to the JVM.
    """
    found: Any = getattr(error, "_origin", None) or getattr(error, "java_exception", None)
    for _ in range(_CAUSES):
        if found is None:
            return
        yield found
        found = found.getCause()


@contextmanager
def active(session: Any) -> Iterator[None]:
    """Make the session the thread's active session during the block.

    Spark and Iceberg read the settings of catalogs from the active session. Threads of jobs and plans have none, or
    another one.
    """
    own, sessions = session._jsparkSession, session._get_j_spark_session_class(session._jvm)
    previous = sessions.getActiveSession()
    sessions.setActiveSession(own)
    try:
        yield
    finally:
        if previous.isDefined():
            sessions.setActiveSession(previous.get())
        else:
            sessions.clearActiveSession()
