"""distop's rules for Spark: heartbeats of Spark's executors, and trusted catalogs. Pure.

Spark's executors on other nodes send heartbeats to their driver often enough to stop before other nodes run their jobs.

The executor's setting ``trusted-spark-catalogs`` has names of Spark's catalogs. A listed catalog may choose code, hosts
and where credentials are sent. ``distop.tables.spark.spark_catalog`` decides which catalogs need to be listed.
"""

from __future__ import annotations

import re

from distop.errors import InvalidArgument
from distop.protocol.texts import shown

FAILURES = 3
"""Heartbeats missed in a row after which a Spark executor ends."""
SHORTEST = 1.0
"""Minimum seconds between two heartbeats: a driver that collects garbage is not gone."""
LONGEST = 10.0
"""Spark's own interval, which stays well below its network timeout (120 s), as Spark demands."""
LEAST_TTL = 1.5 * (FAILURES + 1) * SHORTEST
"""The shortest time to live of a session whose Spark executors are on other nodes."""


def interval(ttl: float) -> float:
    """Seconds between two heartbeats, for sessions with this time to live.

    If driver and daemon die together, the lease still lasts for at least two thirds of ``ttl`` (it is renewed every
    third). A Spark executor ends after up to one interval until its next heartbeat, and one interval for each allowed
    failure, since each waits that long for its answer.
    """
    return min(LONGEST, ttl * 2 / 3 / (FAILURES + 1))


CONF = "spark.distop.trustedCatalogs"
"""The setting of a Spark session with the names, separated by commas."""
_NAME = re.compile(r"[A-Za-z0-9_-]+")
"""The names that a table record may have for a catalog."""


def check_name(name: str) -> str:
    """The checked name of a catalog. Raises InvalidArgument."""
    if not _NAME.fullmatch(name):
        raise InvalidArgument(f"{shown(name)} is not a name of a Spark catalog: use letters, digits, _ and - only")
    return name
