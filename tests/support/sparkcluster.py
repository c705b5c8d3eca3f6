"""A Spark standalone cluster for a test, the one of ``scripts/cluster``."""

from __future__ import annotations

import os
from contextlib import contextmanager
from typing import TYPE_CHECKING

from standalone import Size, Standalone

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path


@contextmanager
def spark_cluster(folder: Path, size: Size, env: Mapping[str, str] | None = None) -> Iterator[Standalone]:
    """A cluster in a folder, which ends with the block. Its processes and Spark's executors have the archive of classes
    that scripts/test gives to every other Spark.
    """
    cluster = Standalone(folder, {"JAVA_TOOL_OPTIONS": os.environ.get("SPARK_SUBMIT_OPTS", ""), **(env or {})})
    try:
        cluster.up(size)
        yield cluster
    finally:
        cluster.down(0)
