"""The arguments, results and reports of ``build-index`` and ``drop-index`` (a contract)."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator

from distop.tables.reading.file_facts import folded

NAME = r"^[A-Za-z][A-Za-z0-9_-]{0,63}$"
MAX_DISTINCT = 1_000
SHOWN = 20
"""Maximum number of files in a report that are listed as not indexed, with reasons."""


class BuildArgument(BaseModel):
    """The index to build or refresh."""

    model_config = ConfigDict(extra="forbid")

    name: str = Field(pattern=NAME, description="The name of the index, for `lookup`.")
    kind: Literal["posting", "skip"] = Field(
        "posting", description="posting: finds the rows with a key. skip: finds the files that may have a key."
    )
    columns: list[str] = Field(min_length=1, max_length=32, description="The indexed top-level columns.")
    refresh: Literal["incremental", "full"] = Field(
        "incremental", description="incremental: index only new and changed files. full: index all files again."
    )
    distinct: int = Field(
        MAX_DISTINCT,
        ge=0,
        le=MAX_DISTINCT,
        description="skip: store the values of a column in a file if it has at most this many different ones.",
    )
    bloom: bool = Field(
        False, description="skip: store a Bloom filter for a column that has more different values than `distinct`."
    )

    @field_validator("columns")
    @classmethod
    def _each_once(cls, columns: list[str]) -> list[str]:
        if len({folded(column) for column in columns}) < len(columns):
            raise ValueError("columns must not name a column twice (case does not matter)")
        return columns


class DropArgument(BaseModel):
    """The index to remove."""

    model_config = ConfigDict(extra="forbid")

    name: str = Field(pattern=NAME, description="The name of the index.")


class NotIndexed(BaseModel):
    """A file that is not indexed, so that every lookup reads it, with the reason."""

    file: str
    why: str


class BuildResult(BaseModel):
    """The result of one job, whose journal and segments are in the stage of its attempt.

    ``bytes`` and ``digest``: the valid length of the journal, and the digest of that part. ``ids``: the identities of
    the columns (``table_files.identities``).
    """

    model_config = ConfigDict(extra="forbid")

    bytes: int = Field(ge=0)
    digest: str = Field(pattern=r"^[0-9a-f]{32}$")
    files: int = Field(ge=0)
    rows: int = Field(ge=0)
    ids: dict[str, int | str] | None = None


class BuildReport(BaseModel):
    """The state of the index after a build.

    ``generation``: its number, unchanged if there was nothing to do. ``files`` and ``rows``: covered by the index.
    ``indexed`` and ``removed``: files that this operation has added and removed. ``not_indexed_files``: the number of
    files that every lookup reads; ``not_indexed`` lists the first of them. ``bytes``: the size of the index.
    """

    name: str
    kind: str
    columns: list[str]
    generation: int
    table_version: str
    files: int
    rows: int
    indexed: int
    removed: int
    not_indexed_files: int
    not_indexed: list[NotIndexed]
    bytes: int


class DropReport(BaseModel):
    """The report of a drop. ``dropped``: False if there was no such index."""

    name: str
    dropped: bool
