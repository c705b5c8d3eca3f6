"""The argument, results and report of ``export`` (a contract)."""

from __future__ import annotations

from typing import Annotated, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from distop.behavior import WorkDone
from distop_behaviors.orphans.orphan_argument import FailedFiles, FileCount
from distop_behaviors.transferred_bytes import TransferredBytes

Prefix = Annotated[str, Field(min_length=1, max_length=1024)]


class RegisteredTable(BaseModel):
    """The table to register at the target."""

    model_config = ConfigDict(extra="forbid")

    name: str = Field(min_length=1, max_length=512, description="The name of the new table.")


class ExportArgument(BaseModel):
    """What to export, and where."""

    model_config = ConfigDict(extra="forbid", populate_by_name=True, serialize_by_alias=True)

    to: str = Field(
        min_length=1,
        max_length=2048,
        description="The folder or URL to export to, below a place of the executors' setting export-to.",
    )
    version: str | None = Field(
        None,
        max_length=256,
        description="A version of the table: its id, or the name of a branch or tag. null: the current one.",
    )
    diff_from: str | None = Field(
        None,
        max_length=256,
        description="The version of the last complete export to the same place: its files are not examined again.",
    )
    prefixes: list[Prefix] | None = Field(
        None, min_length=1, max_length=10_000, description="Only these folders, below the table's. null: all."
    )
    success: str = Field(
        "_SUCCESS",
        pattern=r"^[_.][A-Za-z0-9_-][A-Za-z0-9._-]{0,62}$",
        description="The name of the marker of a complete folder.",
    )
    remove_gone: bool = Field(
        False,
        description="Remove files of earlier exports that this version does not have. By default they are only listed.",
    )
    register_as: RegisteredTable | None = Field(
        None,
        alias="register",
        description="Write metadata for the copies, so that they are a table of the same format, and register it.",
    )
    dry_run: bool = Field(False, description="Only report what would be copied.")

    @model_validator(mode="after")
    def _whole(self) -> Self:
        if self.register_as is not None:
            for name, given in (("prefixes", self.prefixes is not None), ("remove_gone", self.remove_gone)):
                if given:
                    raise ValueError(f"'register' cannot be combined with {name!r}: the table needs all its files")
        return self


class ExportResult(TransferredBytes, FailedFiles):
    """The result of the export of one folder.

    ``copied``: written now; ``reused``: copies of earlier attempts or exports, examined; ``unchanged``: files of
    ``diff_from``, not examined; ``verified``: the copies whose checksum was compared now; ``gone``: files of earlier
    exports that this version does not have; ``removed``: those of them that were removed. ``manifest``: its SHA-256.
    ``work``: what was done, and stays.
    """

    copied: FileCount = FileCount()
    reused: FileCount = FileCount()
    unchanged: FileCount = FileCount()
    verified: FileCount = FileCount()
    gone: FileCount = FileCount()
    removed: FileCount = FileCount()
    seconds: float = 0.0
    manifest: str = ""
    sample: list[str] = Field(default_factory=list, description="The first files of `gone`.")
    work: WorkDone = WorkDone()


class ExportReport(ExportResult):
    """The report of ``export``.

    ``complete``: the root manifest is written. ``partial``: only some folders. ``registered``: the name of the table
    that was registered, "" for none.
    """

    to: str = ""
    version: str = ""
    files: FileCount = FileCount()
    folders: int = 0
    complete: bool = False
    partial: bool = False
    registered: str = ""
    dry_run: bool = False
