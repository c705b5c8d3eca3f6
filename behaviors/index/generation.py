"""A generation of an index: its files and settings, and its JSON."""

from __future__ import annotations

import json
from dataclasses import asdict, field
from typing import TYPE_CHECKING, Any

from distop.errors import UnsafePath
from distop.protocol.frozen import frozen
from distop.protocol.texts import shown
from distop.storage.deletion import components

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

VERSION = 2
"""The version of a generation's JSON."""


@frozen
class Named:
    """A Parquet file of a generation.

    Its name under ``data``, size in bytes, digest and number of rows.

    A run of postings also has its lowest and highest key, and its level. Runs of one level do not overlap.
    """

    name: str
    size: int
    digest: str
    rows: int
    low: int = 0
    high: int = 0
    level: int = 0


MAX_FILES = 50_000_000
"""Maximum number of files that an index has ever numbered: a build needs four bytes of memory for each."""
MAX_POSTINGS = 10**13
"""Maximum number of postings in an index. It bounds the number of runs that a build creates."""


@frozen
class Generation:
    """A state of an index.

    ``operation`` and ``build``: the operation that has built it, and an id that is unique across etcds and namespaces.
    ``ids``: the identities of its columns (``table_files.identities``). ``families``: of its columns; None if no file
    has the column. ``schema``: the columns of the covered files (name, Spark type). ``files``: the list of the covered
    files.
    """

    number: int
    operation: str = ""
    build: str = ""
    dropped: bool = False
    kind: str = ""
    columns: tuple[str, ...] = ()
    ids: Mapping[str, int | str] | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    families: tuple[str | None, ...] = ()
    schema: tuple[tuple[str, Any], ...] = ()
    table_version: str = ""
    published: float = 0.0
    files: Named | None = None
    runs: tuple[Named, ...] = ()
    next_file: int = 0
    report: Mapping[str, Any] = field(default_factory=dict)

    def named(self) -> Iterator[Named]:
        """All files of the generation."""
        if self.files is not None:
            yield self.files
        yield from self.runs

    def to_json(self) -> str:
        return json.dumps({"v": VERSION, **asdict(self)}, indent=1)

    @classmethod
    def from_json(cls, text: str) -> Generation:
        """Raises ValueError, KeyError and TypeError if the text is not a generation."""
        data = json.loads(text)
        version = data.pop("v")
        if version != VERSION:
            raise ValueError(
                f"it has version {shown(version)}, and this release of distop reads version {VERSION}: use the release "
                "that wrote it, or remove the index's folder and build it again"
            )
        data["files"] = _named(data["files"]) if data["files"] else None
        data["runs"] = tuple(map(_named, data["runs"]))
        data["schema"] = tuple((name, _type(kind)) for name, kind in data["schema"])
        for name in ("columns", "families"):
            data[name] = tuple(data[name])
        if type(data["next_file"]) is not int or not 0 <= data["next_file"] <= MAX_FILES:
            raise ValueError(f"next_file is {shown(data['next_file'])}, but must be a number of at most {MAX_FILES}")
        rows = [one.rows for one in data["runs"]]
        if any(type(number) is not int or number < 0 for number in rows) or sum(rows) > MAX_POSTINGS:
            raise ValueError(f"its runs have {shown(rows)} postings, but at most {MAX_POSTINGS} are allowed in all")
        return cls(**data)


def _named(data: Any) -> Named:
    """Raises ValueError for a name that leads out of the folder ``data``."""
    found = Named(**data)
    try:
        if len(components(found.name)) == 1:
            return found
    except UnsafePath:
        pass
    raise ValueError(f"{found.name!r} is not a file name")


def _type(kind: Any) -> Any:
    """A Spark type from JSON: arrays become tuples."""
    if not isinstance(kind, list):
        return kind
    if kind[0] == "struct":
        return ("struct", tuple((name, _type(inner)) for name, inner in kind[1]))
    return (kind[0], *(_type(inner) if kind[0] != "unreadable" else inner for inner in kind[1:]))
