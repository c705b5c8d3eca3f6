"""Parses and checks the options of a table record."""

from __future__ import annotations

import re
from dataclasses import field
from typing import TYPE_CHECKING, Any

from distop.errors import InvalidArgument
from distop.protocol.frozen import frozen
from distop.protocol.texts import did_you_mean, shown
from distop.storage.confinement import check_form
from distop.tables.iceberg.iceberg_catalogs import Catalog

if TYPE_CHECKING:
    from collections.abc import Mapping

_TYPE = re.compile(
    r"(string|boolean|tinyint|byte|smallint|short|int|integer|bigint|long|float|double|date|timestamp"
    r"|decimal\(\s*\d{1,2}\s*,\s*\d{1,2}\s*\))",
    re.IGNORECASE,
)


@frozen
class TableOptions:
    """The options of a table.

    ``group_bytes`` and ``group_files``: limits of a group of files in a table without partitions. ``partition_types``:
    Spark types of the partition columns of Parquet folders (default: text). ``catalog``: the catalog of an Iceberg
    table. ``folder``: the only allowed folder of a catalog's table; "" for any.
    """

    group_bytes: int = 128 * 1024 * 1024
    group_files: int = 1_000
    partition_types: Mapping[str, str] = field(default_factory=dict)
    catalog: Catalog | None = None
    folder: str = ""


_NUMBERS = ("group_bytes", "group_files")
_KNOWN = {
    "parquet": (*_NUMBERS, "partition_types"),
    "iceberg": (*_NUMBERS, "catalog", "folder"),
    "delta": _NUMBERS,
    "spark": _NUMBERS,
}


def is_partition_type(text: str) -> bool:
    """Whether a text is a Spark type that a partition column may have."""
    return _TYPE.fullmatch(text.strip()) is not None


def check_options(options: Mapping[str, Any], format_name: str = "parquet") -> TableOptions:
    """The checked options with their defaults. Formats of entry points have the options of file groups only.

    Raises InvalidArgument for an unknown option of the format, or an invalid value.
    """
    known = _KNOWN.get(format_name, _NUMBERS)
    for name in options:
        if name not in known:
            of = "" if format_name == "parquet" else f" for {format_name}"
            raise InvalidArgument(
                f"the table option {shown(name)} is not known{of}{did_you_mean(name, known, 'known')}"
            )
    defaults = TableOptions()
    numbers = {}
    for name in _NUMBERS:
        value = options.get(name, getattr(defaults, name))
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise InvalidArgument(f"the table option {name!r} must be a whole number of at least 1, not {shown(value)}")
        numbers[name] = value
    types = options.get("partition_types") or {}
    if not isinstance(types, dict):
        raise InvalidArgument('the table option \'partition_types\' must be an object such as {"day": "int"}')
    for column, text in types.items():
        if not isinstance(text, str) or not is_partition_type(text):
            raise InvalidArgument(
                f"the type {shown(text)} of partition column {shown(column)} is not a supported Spark type"
            )
    catalog = Catalog.of(options["catalog"]) if "catalog" in options else None
    folder = _folder(options)
    types = {column: text.strip() for column, text in types.items()}
    return TableOptions(numbers["group_bytes"], numbers["group_files"], types, catalog, folder)


def _folder(options: Mapping[str, Any]) -> str:
    """The option ``folder``; "" if it is not set. Raises InvalidArgument."""
    if "folder" not in options:
        return ""
    folder = options["folder"]
    if "catalog" not in options:
        raise InvalidArgument("the table option 'folder' needs the option 'catalog': set that, or omit 'folder'")
    try:
        check_form(folder.rstrip("/") if isinstance(folder, str) else "")
    except InvalidArgument:
        raise InvalidArgument(
            "the table option 'folder' must be an absolute path or a URL without '.', '..' and empty names, not "
            f"{shown(folder)}"
        ) from None
    return str(folder)
