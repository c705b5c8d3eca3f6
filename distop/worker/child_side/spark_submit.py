"""Starts Spark's JVM with its settings in a private file, not in arguments or the environment.

PySpark itself would write each setting as ``--conf`` into the command line, which all users of the machine can read.
"""

from __future__ import annotations

import importlib
import subprocess
import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from distop.runtime import secret_settings
from distop.worker import spark_settings
from distop.worker.child_side import redacted_output

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

OPTION = "--properties-file"
_patching = threading.Lock()


class PropertiesFileConflict(Exception):
    """PYSPARK_SUBMIT_ARGS names another properties file, but Spark reads only one."""

    def __init__(self) -> None:
        super().__init__(
            f"PYSPARK_SUBMIT_ARGS has the option {OPTION}, but distop needs it for its own file: give these settings "
            "to distop as spark-conf instead (in the file of --config)"
        )


def launch(settings: Mapping[str, str], work_dir: Path) -> None:
    """Start the JVM of this process. Raises OSError, PropertiesFileConflict, and PySpark's errors."""
    from pyspark import SparkContext

    try:
        with _started_by(spark_settings.write(work_dir, settings)):
            SparkContext._ensure_initialized()
    finally:
        # The JVM answers, so it has read its settings.
        spark_settings.remove(work_dir)


@contextmanager
def _started_by(path: Path) -> Iterator[None]:
    """Make PySpark start ``spark-submit`` with the file, and with an environment without secrets.

    PySpark has no parameter for either: it copies ``os.environ``, which other threads use.
    """
    gateway: Any = importlib.import_module("pyspark.java_gateway")
    start = gateway.Popen

    def started(command: list[str], **options: Any) -> Any:
        program, *arguments = command
        if any(word == OPTION or word.startswith(f"{OPTION}=") for word in arguments):
            raise PropertiesFileConflict
        # With a properties file, Spark reads spark-defaults.conf only with this option.
        words = [program, OPTION, str(path), "--load-spark-defaults", *arguments]
        options["env"] = secret_settings.environment(options["env"])
        process = start(words, **options, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        redacted_output.copy_output(process.stdout)
        return process

    with _patching:
        gateway.Popen = started
        try:
            yield
        finally:
            gateway.Popen = start
