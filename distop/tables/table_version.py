"""The state of a table that its format keeps: what a certificate names, and what has come since another state."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

from distop.protocol.frozen import frozen

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping, Sequence

    from distop.tables.reading.file_facts import PlannedFile


@frozen
class Field:
    """A column, or what is inside one: the id that it keeps whatever it is called, and its type in the format's words,
    without what is inside it.
    """

    id: int
    type: str


class TableVersion(ABC):
    """A state of a table. ``table_id``: it tells the table from another one that takes its place; ``metadata_file``:
    where the state is described, as a plan names it; ``schema_id``: the number of its schema.
    """

    table_id: str
    metadata_file: str
    schema_id: int

    @abstractmethod
    def names(self) -> Sequence[str]:
        """Its top-level columns."""

    @abstractmethod
    def fields(self, tops: Collection[str]) -> Mapping[str, Field]:
        """These top-level columns with all that is inside them, by their dotted names."""

    @abstractmethod
    def name_of(self, field_id: int) -> str | None:
        """The dotted name that a field has in this state; None where it is gone."""

    @abstractmethod
    def new_files(self, since: str, check: Callable[[], None]) -> Sequence[PlannedFile] | None:
        """The files that may have rows which the state ``since`` had not; None: any of them may. ``since``: the version
        of a plan. ``check`` raises where that is to stop. Raises TableUnavailable.
        """
