"""The entry of a table in its catalog: the interface :class:`CatalogEntry`, which formats with catalogs implement."""

from __future__ import annotations

from abc import ABC, abstractmethod

from distop.errors import OutcomeUnknown, TableUnavailable
from distop.protocol.frozen import frozen


@frozen
class CatalogEntryState:
    """A state of an entry. ``identity``: of the table, which its commits keep; ``state``: its current metadata."""

    identity: str
    state: str


class CatalogEntry(ABC):
    """The entry of one table in its catalog."""

    @abstractmethod
    def find(self) -> CatalogEntryState | None:
        """The current state; None if the catalog does not have the table. Raises the errors of planning."""

    @abstractmethod
    def drop(self) -> None:
        """Remove the entry, and no file. An entry that is gone is ignored.

        Raises OutcomeUnknown without an answer, InvalidArgument if the catalog refuses, and TableUnavailable.
        """


class EntryChanged(Exception):
    """The table has another state than the planned one. The entry was not removed."""


def drop_planned(entry: CatalogEntry, planned: CatalogEntryState) -> None:
    """Remove the entry of a planned table, so that it is certainly gone.

    An entry that is gone, or of another table under the same name, is not touched: an earlier call has removed the
    planned one. Without an answer, the catalog is read. Raises EntryChanged if the table was changed since the plan,
    and TableUnavailable if the entry is still there.
    """
    found = entry.find()
    if found is None or found.identity != planned.identity:
        return
    if found.state != planned.state:
        raise EntryChanged(f"its current metadata file is now {found.state}, and not {planned.state}")
    try:
        entry.drop()
        return
    except OutcomeUnknown as error:
        left = entry.find()
        if left is not None and left.identity == planned.identity:
            raise TableUnavailable(f"the table is still in its catalog: {error}") from error
