"""Lists the properties of an Iceberg table that are passed to Iceberg's readers and writers in Spark.

The writer of a table's metadata chooses its properties. Iceberg's Parquet writer copies all of them into the Hadoop
configuration with which it opens the file (``fs.*.impl``, ``net.topology.script.file.name``). Its readers load the
class in ``write.location-provider.impl``. So properties that are not listed here could choose code, hosts and paths.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

NAME_MAPPING = "schema.name-mapping.default"
READ = frozenset({NAME_MAPPING})
"""Properties for readers: the columns of files without field ids."""

_BOOLEAN = r"true|false"
_METRICS = r"none|counts|full|truncate\([1-9][0-9]{0,4}\)"
_WRITTEN = {
    r"write\.parquet\.compression-codec": r"zstd|gzip|snappy|lz4|uncompressed",
    r"write\.parquet\.compression-level": r"[0-9]|1[0-9]",
    r"write\.parquet\.(page|dict)-size-bytes": r"[1-9][0-9]{0,6}",
    r"write\.parquet\.row-group-size-bytes": r"[1-9][0-9]{0,8}",
    r"write\.parquet\.page-row-limit": r"[1-9][0-9]{0,6}",
    r"write\.parquet\.row-group-check-(min|max)-record-count": r"[1-9][0-9]{0,4}",
    r"write\.parquet\.(stats-enabled|bloom-filter-enabled)\.column\.[^\n]+": _BOOLEAN,
    r"write\.parquet\.bloom-filter-fpp\.column\.[^\n]+": r"0\.[0-9]{1,6}",
    r"write\.parquet\.bloom-filter-max-bytes": r"[1-9][0-9]{0,6}",
    r"write\.target-file-size-bytes": r"[1-9][0-9]{5,9}",
    r"write\.distribution-mode": r"none|hash|range",
    r"write\.metadata\.metrics\.(default|column\.[^\n]+)": _METRICS,
    r"write\.metadata\.metrics\.max-inferred-column-defaults": r"[0-9]{1,5}",
}
"""Patterns of properties for writers, and of their values (case-insensitive).

Sizes are limited: pages below 10 MB, row groups below 1 GB, files from 100 kB.
"""


def for_reading(properties: Mapping[str, str]) -> dict[str, str]:
    """The properties for a reader."""
    return {name: value for name, value in properties.items() if name in READ}


def for_writing(properties: Mapping[str, str]) -> dict[str, str]:
    """The properties for a writer; for values that are not allowed, Iceberg's default applies."""
    return {name: value for name, value in properties.items() if _harmless(name, value)}


def _harmless(name: str, value: str) -> bool:
    return any(
        re.fullmatch(pattern, name) and re.fullmatch(values, value, re.IGNORECASE)
        for pattern, values in _WRITTEN.items()
    )
