"""Versions of a table, for formats that have them: for certificates, and for the files that are new since a version."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

from distop.protocol.frozen import frozen

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping, Sequence

    from distop.tables.reading.file_facts import PlannedFile


@frozen
class Field:
    """A column or nested field: its permanent id, and its type in the format's terms, without nested fields."""

    id: int
    type: str


class TableVersion(ABC):
    """A version of a table.

    ``version``: what plans of it have as the table's version; ``table_id`` distinguishes the table from one that
    replaces it; ``metadata_file``: the file of this version in plans; ``schema_id``: the number of its schema.
    """

    version: str
    table_id: str
    metadata_file: str
    schema_id: int

    @abstractmethod
    def names(self) -> Sequence[str]:
        """The top-level columns."""

    @abstractmethod
    def fields(self, tops: Collection[str]) -> Mapping[str, Field]:
        """These top-level columns with all nested fields, by dotted names."""

    @abstractmethod
    def name_of(self, field_id: int) -> str | None:
        """The dotted name of a field in this version; None if it does not exist."""

    @abstractmethod
    def new_files(self, since: str, check: Callable[[], None]) -> Sequence[PlannedFile] | None:
        """The files that may have rows which version ``since`` of a plan did not have; None: any file may.

        ``check`` raises to stop. Raises TableUnavailable.
        """
