"""Spark's connector for S3 in tests: its jars, and its settings for a server."""

from __future__ import annotations

import functools
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from distop.storage.storage_access import storage_access_for
from distop_behaviors.reading.check_session import session_of
from scripts import spark_jars

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

    from pyspark.sql import SparkSession

MAVEN = f"the jars of S3: run scripts/s3-jars with access to Maven Central, for {' and '.join(map(str, spark_jars.S3))}"


@functools.cache
def jars() -> list[Path] | None:
    """The jars from the user's cache; None if one is not there and cannot be downloaded. Raises Unverified."""
    found = [spark_jars.find(jar) for jar in spark_jars.S3]
    return None if None in found else [jar for jar in found if jar is not None]


@contextmanager
def configured(
    spark: SparkSession, url: str, key: str, secret: str, others: Mapping[str, str] | None = None
) -> Iterator[None]:
    """Let a running session reach a bucket as distop is configured for it, until the end of the block.

    The JVM runs already, so it gets the credentials as settings instead of from its environment. ``others``: further
    settings of the bucket. Only the settings at the first use of a bucket count.
    """
    hadoop: Any = spark.sparkContext._jsc.hadoopConfiguration()
    access = storage_access_for(url)
    start = f"fs.s3a.bucket.{access.bucket.name}"
    settings = {name.removeprefix("spark.hadoop."): value for name, value in access.spark().items()}
    settings[f"{start}.aws.credentials.provider"] = "org.apache.hadoop.fs.s3a.SimpleAWSCredentialsProvider"
    settings |= {f"{start}.access.key": key, f"{start}.secret.key": secret}
    # The servers of tests answer no request without its body, for which the client would wait three seconds.
    settings[f"{start}.connection.expect.continue"] = "false"
    settings |= {f"{start}.{name}": value for name, value in (others or {}).items()}
    for name, value in settings.items():
        hadoop.set(name, value)
    # Iceberg's catalogs keep the Hadoop settings of their first use, which may be before these were set.
    session_of(spark)._jsparkSession.sessionState().catalogManager().reset()
    yield
    for name in settings:
        hadoop.unset(name)
