"""The Java that Spark would start here, and whether it is new enough: for the child before it starts Spark, and for
``distop doctor``."""

from __future__ import annotations

import shutil
import subprocess
from typing import TYPE_CHECKING

from distop.core.versions import OLDEST_JAVA, Judgement, judge_java

if TYPE_CHECKING:
    from collections.abc import Mapping

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
