"""The folders of other registered tables, where nothing of this table may be deleted."""

from __future__ import annotations

from typing import TYPE_CHECKING

from distop.errors import InvalidArgument, TableUnavailable
from distop.protocol.texts import shown
from distop.storage.confinement import resolved
from distop.storage.files import local_path
from distop.storage.normal_uris import NormalUri, normal
from distop.tables import place_of

if TYPE_CHECKING:
    from distop.behavior import JobContext, TableRecord


def folders_of_others(table: TableRecord, ctx: JobContext, *, with_same: bool = False, but: str = "") -> list[str]:
    """The folders of all registered tables but this one, in planning; local ones also with their links followed.

    The same table under another name is left out, unless ``with_same``, and so is the table ``but``. Raises
    InvalidArgument if the folder of a table is not known, and TableUnavailable.
    """
    found: list[str] = []
    for other in ctx.registered_tables():
        ctx.check_cancelled()
        if other.name in (table.name, but) or (not with_same and _is_same(other, table)):
            continue
        try:
            place = place_of(other, ctx.check_cancelled, lambda: ctx.spark)
        except InvalidArgument as error:
            raise InvalidArgument(
                f"it is not known where the registered table {shown(other.name)} has its files, which may be in the "
                f"folder of this one ({error}): if it does not exist any more, remove it with `distop table rm`"
            ) from error
        except TableUnavailable as error:
            raise TableUnavailable(
                f"it is not known now where the registered table {shown(other.name)} has its files: {error}"
            ) from error
        found += spellings_of(place)
    return found


def spellings_of(place: str) -> list[str]:
    """A table's folder: as it is registered, and on a disk also without links."""
    local = local_path(place)
    if local is None:
        return [place]
    return [str(local), resolved(str(local))]


def normal_places(place: str) -> list[NormalUri]:
    """The normal forms of :func:`spellings_of`, each once. Raises UnsafePath."""
    return list(dict.fromkeys(map(normal, spellings_of(place))))


def _is_same(other: TableRecord, table: TableRecord) -> bool:
    return (other.format, other.location, other.options) == (table.format, table.location, table.options)
