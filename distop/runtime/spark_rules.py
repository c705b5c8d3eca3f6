"""What distop demands of Spark: heartbeats of its executors, and which catalogs are trusted. Pure.

How often Spark's executors on other nodes ask for their driver, so that they stop before others run their jobs.

The executor's setting ``trusted-spark-catalogs``: names of catalogs of Spark.

A listed catalog may choose code, hosts and where credentials are sent. ``distop.tables.spark.spark_catalog`` decides
which catalogs need to be listed.
"""

from __future__ import annotations

import re

from distop.errors import InvalidArgument
from distop.protocol.texts import shown

FAILURES = 3
"""Heartbeats missed in a row after which a Spark executor ends."""
SHORTEST = 1.0
"""Seconds between two of them at least: a driver that collects garbage is not gone."""
LONGEST = 10.0
"""Spark's own interval, which stays well below its network timeout (120 s), as Spark demands."""
LEAST_TTL = 1.5 * (FAILURES + 1) * SHORTEST
"""The shortest time to live of a session whose Spark executors are on other nodes."""


def interval(ttl: float) -> float:
    """Seconds between two heartbeats, for sessions of so many seconds.

    Where driver and daemon are gone at once, the lease goes on for at least two thirds of ``ttl`` (it is renewed every
    third). A Spark executor is gone after up to one interval until its next heartbeat, and as many intervals as may
    fail, since each waits so long for its answer.
    """
    return min(LONGEST, ttl * 2 / 3 / (FAILURES + 1))


CONF = "spark.distop.trustedCatalogs"
"""The setting of a Spark session that holds the names, with commas between."""
_NAME = re.compile(r"[A-Za-z0-9_-]+")
"""The names that a table record may have for a catalog."""


def check_name(name: str) -> str:
    """The name itself. Raises InvalidArgument for what is no name of a catalog."""
    if not _NAME.fullmatch(name):
        raise InvalidArgument(f"{shown(name)} is no name of a catalog of Spark: letters, digits, _ and - only")
    return name
