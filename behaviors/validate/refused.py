"""A store that refuses all files to Spark is no verdict on them: another executor may have access."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from distop.behavior import TableUnavailable
from distop.tables.reading import store_errors
from distop_behaviors.validate import failures, scan

if TYPE_CHECKING:
    from collections.abc import Callable

    from pyspark.sql import SparkSession


def check_store(session: SparkSession, group: scan.Group, error: Exception, stop: Callable[[], None]) -> bool:
    """Whether a file of the group can be read, after an error for which the store may be the cause; False: it is not.

    A few files are probed, so that not every file has to be read alone. Raises TableUnavailable where the store refuses
    them all for one cause, what is unexpected, and what ``stop`` raises.
    """
    cause = store_errors.cause_of_spark_error(error) if len(group.files) > 1 else None
    if cause is None:
        return False
    for file in store_errors.evenly_spaced(group.files):
        stop()
        try:
            scan.count(session, replace(group, files=(file,), all_rows=True), {}, None)
        except Exception as e:
            if failures.is_unexpected(e):
                raise
            if store_errors.cause_of_spark_error(e) == cause:
                continue
        return True
    raise TableUnavailable(
        f"Spark cannot read any of these files (files: {len(group.files)}) from this executor: {cause} "
        f"({failures.sentence_of(error)})"
    )
