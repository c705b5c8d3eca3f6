"""A Spark standalone cluster for tests, like that of ``scripts/cluster``."""

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
    """A cluster in a folder, for one ``with`` block.

    Its processes and Spark's executors use the class archive that scripts/test provides for all JVMs of Spark.
    """
    cluster = Standalone(folder, {"JAVA_TOOL_OPTIONS": os.environ.get("SPARK_SUBMIT_OPTS", ""), **(env or {})})
    try:
        cluster.up(size)
        yield cluster
    finally:
        cluster.down(0)
