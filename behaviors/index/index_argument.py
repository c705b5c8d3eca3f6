"""What ``build-index`` and ``drop-index`` are asked for, and what they answer."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator

from distop.tables.reading.file_facts import folded

NAME = r"^[A-Za-z][A-Za-z0-9_-]{0,63}$"
MAX_DISTINCT = 1_000
SHOWN = 20
"""Files that are not indexed of which a report tells why."""


class BuildArgument(BaseModel):
    """Which index is to be built, or brought up to date."""

    model_config = ConfigDict(extra="forbid")

    name: str = Field(pattern=NAME, description="The index; with it, `lookup` finds it beside the table.")
    kind: Literal["posting", "skip"] = Field(
        "posting", description="posting: which rows have a key. skip: what values each file has."
    )
    columns: list[str] = Field(min_length=1, max_length=32, description="Its columns, at the top level of the table.")
    refresh: Literal["incremental", "full"] = Field(
        "incremental", description="incremental: index what is not indexed yet. full: everything anew."
    )
    distinct: int = Field(
        MAX_DISTINCT, ge=0, le=MAX_DISTINCT, description="skip: keep the values of a column of at most so many."
    )
    bloom: bool = Field(False, description="skip: keep a bloom filter where there are more values than `distinct`.")

    @field_validator("columns")
    @classmethod
    def _each_once(cls, columns: list[str]) -> list[str]:
        if len({folded(column) for column in columns}) < len(columns):
            raise ValueError("a column is named twice")
        return columns


class DropArgument(BaseModel):
    """Which index is to be removed."""

    model_config = ConfigDict(extra="forbid")

    name: str = Field(pattern=NAME, description="The index.")


class NotIndexed(BaseModel):
    """A file that every lookup reads, and why."""

    file: str
    why: str


class BuildResult(BaseModel):
    """Of one job, whose journal and segments are in the stage of its attempt. ``bytes`` and ``digest``: of so much of
    the journal. ``ids``: what the columns were told by from others of their names (``table_files.identities``).
    """

    model_config = ConfigDict(extra="forbid")

    bytes: int = Field(ge=0)
    digest: str = Field(pattern=r"^[0-9a-f]{32}$")
    files: int = Field(ge=0)
    rows: int = Field(ge=0)
    ids: dict[str, int | str] | None = None


class BuildReport(BaseModel):
    """What the index is now. ``generation``: its number, unchanged where there was nothing to do; ``files`` and
    ``rows`` are what it covers, ``indexed`` the files that this operation added, ``removed`` those that left it;
    ``not_indexed_files`` are read by every lookup; ``bytes``: of the index.
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
    """``dropped``: there was such an index."""

    name: str
    dropped: bool
