"""The options of a table record, checked."""

from __future__ import annotations

import re
from dataclasses import field
from typing import TYPE_CHECKING, Any

from distop.errors import InvalidArgument
from distop.protocol.frozen import frozen
from distop.protocol.texts import shown
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
class Options:
    """``group_bytes`` and ``group_files`` bound a group of files in a table without partitions;
    ``partition_types`` gives partition columns of Parquet folders a Spark type (they are text otherwise); ``catalog``
    is the one that knows an Iceberg table, and ``folder`` the only one that this may say the table lies in ("": any).
    """

    group_bytes: int = 128 * 1024 * 1024
    group_files: int = 1_000
    partition_types: Mapping[str, str] = field(default_factory=dict)
    catalog: Catalog | None = None
    folder: str = ""


_NUMBERS = ("group_bytes", "group_files")
_KNOWN = {"parquet": (*_NUMBERS, "partition_types"), "iceberg": (*_NUMBERS, "catalog", "folder"), "spark": _NUMBERS}


def is_partition_type(text: str) -> bool:
    """A Spark type that a partition column may have."""
    return _TYPE.fullmatch(text.strip()) is not None


def check_options(options: Mapping[str, Any], format_name: str = "parquet") -> Options:
    """The options with their defaults. Of a format that is not distop's own: those of groups of files. Raises
    InvalidArgument for one that the format does not have, or of the wrong kind.
    """
    known = _KNOWN.get(format_name, _NUMBERS)
    for name in options:
        if name not in known:
            of = "" if format_name == "parquet" else f" for {format_name}"
            raise InvalidArgument(f"the table option {shown(name)} is not known{of} (known: {', '.join(known)})")
    defaults = Options()
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
                f"the type {shown(text)} of partition column {shown(column)} is no Spark type for one"
            )
    catalog = Catalog.of(options["catalog"]) if "catalog" in options else None
    folder = _folder(options)
    types = {column: text.strip() for column, text in types.items()}
    return Options(numbers["group_bytes"], numbers["group_files"], types, catalog, folder)


def _folder(options: Mapping[str, Any]) -> str:
    """The option ``folder``; "" where there is none. Raises InvalidArgument."""
    if "folder" not in options:
        return ""
    folder = options["folder"]
    if "catalog" not in options:
        raise InvalidArgument("the table option 'folder' goes with the option 'catalog': leave it out")
    try:
        check_form(folder.rstrip("/") if isinstance(folder, str) else "")
    except InvalidArgument:
        raise InvalidArgument(
            "the table option 'folder' must be an absolute path or a URL without '.', '..' and empty names, not "
            f"{shown(folder)}"
        ) from None
    return str(folder)
