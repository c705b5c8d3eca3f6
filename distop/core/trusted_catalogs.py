"""The executor's setting ``trusted-spark-catalogs``: names of catalogs of Spark.

A listed catalog may choose code, hosts and where credentials are sent. ``distop.tables.sparkcatalog`` decides which
catalogs need to be listed. Pure.
"""

from __future__ import annotations

import re

from distop.core.texts import shown
from distop.errors import InvalidArgument

CONF = "spark.distop.trustedCatalogs"
"""The setting of a Spark session that holds the names, with commas between."""
_NAME = re.compile(r"[A-Za-z0-9_-]+")
"""The names that a table record may have for a catalog."""


def check_name(name: str) -> str:
    """The name itself. Raises InvalidArgument for what is no name of a catalog."""
    if not _NAME.fullmatch(name):
        raise InvalidArgument(f"{shown(name)} is no name of a catalog of Spark: letters, digits, _ and - only")
    return name
