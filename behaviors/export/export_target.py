"""The place that a table is exported to: whether it is allowed, whose it is, and its markers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from distop.errors import InvalidArgument
from distop.protocol.texts import shown
from distop.storage.deletion_scope import OWN, DeletionScope, overlap
from distop.storage.export_targets import target_place
from distop.storage.normal_uris import normal
from distop.storage.opened_stores import store_of
from distop.storage.places import operation_path
from distop.storage.store_errors import ObjectChanged, ObjectExists
from distop_behaviors.export import export_manifest
from distop_behaviors.export.export_manifest import FOLDER_MANIFEST, OWNER, PAGES, ROOT_MANIFEST, ExportOwner, in_folder
from distop_behaviors.orphans.other_tables import spellings_of

if TYPE_CHECKING:
    from collections.abc import Iterable

    from distop.behavior import JobContext, TableRecord

_TRIES = 10


class ExportTarget:
    """The target of an export.

    ``taken``: folders that it must have no file in common with: of tables, and of distop. Raises InvalidArgument for a
    place that is not allowed, UnsafePath for one that overlaps.
    """

    def __init__(self, to: str, table: TableRecord, ctx: JobContext, taken: Iterable[str] = ()) -> None:
        self.place = target_place(to)
        self._table = table
        self._ctx = ctx
        folders = [*taken, *([ctx.shared.location] if ctx.shared is not None else [])]
        for one in spellings_of(self.place.location):
            found = normal(one)
            for other in (text for folder in folders for text in spellings_of(folder)):
                if why := overlap(found, normal(other)):
                    raise InvalidArgument(
                        f"nothing is exported to {shown(to)}: {shown(other)}, a folder of a table or of distop, is "
                        f"{why} it"
                    )
            self.scope = DeletionScope(one)
        self.store = store_of(self.place)

    def read_owner(self) -> ExportOwner | None:
        """The record of this table as the owner; None if the place is empty. Raises InvalidArgument otherwise."""
        owner = export_manifest.read(self.store, OWNER, ExportOwner)
        if owner is None:
            if (found := next(self.store.list(), None)) is not None:
                raise InvalidArgument(
                    f"{shown(self.place.location)} has files that no export has written, such as {shown(found.key)}: "
                    "export to an empty folder"
                )
            return None
        if (owner.table, owner.space) != (self._table.name, self._ctx.space):
            whose = f"the table {owner.table!r}" + ("" if owner.space == self._ctx.space else " of another namespace")
            raise InvalidArgument(
                f"{whose} is exported to {shown(self.place.location)}: export {self._table.name!r} to another folder"
            )
        return owner

    def record_owner(self, success: str, folders: Iterable[str]) -> ExportOwner:
        """Record this table as the owner, with these folders. Raises InvalidArgument as :meth:`read_owner`."""
        wanted = set(folders)
        for _ in range(_TRIES):
            owner = self.read_owner()
            found = owner or ExportOwner(table=self._table.name, space=self._ctx.space)
            found.success = sorted({*found.success, success})
            found.folders = sorted({*found.folders, *wanted})
            data = found.model_dump_json().encode()
            try:
                if owner is None:
                    self.store.put_new(OWNER, data)
                else:
                    self.store.replace_if(OWNER, data, self.store.head(OWNER).version)
                return found
            except (ObjectExists, ObjectChanged):
                continue
        raise ObjectChanged(f"cannot write {self.store.location_of(OWNER)}: other exports keep replacing it")

    def remove_markers(self, folder: str, success: Iterable[str]) -> None:
        """Remove the markers of a folder and of those around it, and the root manifest, before the first change."""
        parts = folder.split("/") if folder else []
        around = ["/".join(parts[:n]) for n in range(len(parts) + 1)]
        names = sorted(set(success))
        self.store.delete_many([ROOT_MANIFEST, *(in_folder(one, name) for one in around for name in names)])

    def mark(self, folder: str, success: str) -> None:
        """Write the marker of a complete folder."""
        self.store.put(in_folder(folder, success), b"")

    def check_key(self, key: str, success: str) -> None:
        """Raises InvalidArgument for a data file that would be taken for one of the export's own, and UnsafePath."""
        self.scope.check(key)
        name = key.rpartition("/")[2]
        if name in (FOLDER_MANIFEST, ROOT_MANIFEST, success) or OWN in key.split("/"):
            raise InvalidArgument(f"the table's file {shown(key)} has the name of a file that an export writes")

    @property
    def pages(self) -> str:
        """The folder with the pages of this operation."""
        return f"{PAGES}/{operation_path(self._ctx.operation)}"
