"""Decides which listed files of a table are orphans. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from distop.errors import InvalidArgument, UnsafePath
from distop.protocol.texts import shown
from distop.storage.deletion_scope import OWN
from distop.storage.location import hidden
from distop.tables.reading.table_folders import shown_by
from distop_behaviors.orphans.needed_files import NEEDED
from distop_behaviors.orphans.orphan_argument import SHOWN, FileCount, OrphanListing

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable

    from distop.storage.deletion_scope import DeletionScope
    from distop.storage.object_store import StoredObject
    from distop_behaviors.orphans.needed_files import NeededFiles

OF_DISTOP, HIDDEN, YOUNG, UNSAFE = "distop's own", "hidden", "too young", "unsafe name"
OTHER_STATE = "needed by a metadata file that the table does not know"
"""Further reasons to keep a file."""


@dataclass
class Orphans:
    """The orphans of a listing, by key, with what else the listing has shown."""

    files: list[StoredObject] = field(default_factory=list)
    listing: OrphanListing = field(default_factory=OrphanListing)
    needed: int = 0
    has_source: bool = False
    unknown: list[str] = field(default_factory=list)
    """The keys of further metadata files in the folder of the table's own."""

    def keep(self, why: str) -> None:
        """Count one more file that is kept."""
        self.listing.kept[why] = self.listing.kept.get(why, 0) + 1


def decide(
    listed: Iterable[StoredObject],
    needed: NeededFiles,
    scope: DeletionScope,
    *,
    before: float,
    source: str = "",
    own_folders: Collection[str] = (),
    check: Callable[[], None] = lambda: None,
) -> Orphans:
    """The orphans among the listed files of a table's folder.

    ``before``: only files that were changed before this time of the store. ``source``: the key of the metadata file
    that names the needed files; ``own_folders``: the folders with the table's metadata. Raises InvalidArgument if
    another table is inside the folder, or if the listing does not have what the metadata name.
    """
    found = Orphans()
    checksums: list[StoredObject] = []
    for n, one in enumerate(listed):
        if n % 1000 == 0:
            check()
        found.listing.listed.add(one.size)
        found.has_source |= one.key == source
        if one.key.partition("/")[0] == OWN:
            found.keep(OF_DISTOP)
            continue
        is_metadata = _is_own_metadata(one.key, own_folders)
        why = _why_kept(one, needed, scope, before)
        if is_metadata and why != NEEDED:
            found.unknown.append(one.key)
        if why == HIDDEN and _checked_by(one.key):
            checksums.append(one)
        elif why:
            found.keep(why)
        else:
            found.files.append(one)
    found.needed = found.listing.kept.get(NEEDED, 0)
    _check_comparable(found, needed, source)
    _add_checksums(found, checksums, before)
    found.files.sort(key=lambda one: one.key)
    _count(found)
    return found


def _is_own_metadata(key: str, own_folders: Collection[str]) -> bool:
    """Whether a file belongs to metadata of the table's own. Raises InvalidArgument for those of another table."""
    shown_table = shown_by(key)
    if shown_table is not None and shown_table[2] not in own_folders:
        raise InvalidArgument(
            f"{shown_table[0]} in {shown(shown_table[1] or '.')} is inside the table's folder, so no file there is "
            "known to be an orphan"
        )
    return shown_table is not None


def _add_checksums(found: Orphans, checksums: Iterable[StoredObject], before: float) -> None:
    """Add the checksum files of orphans, and keep the others."""
    orphans = {one.key for one in found.files}
    for one in checksums:
        if _checked_by(one.key) in orphans and one.modified < before:
            found.files.append(one)
        else:
            found.keep(HIDDEN)


def _count(found: Orphans) -> None:
    """Count the orphans in the listing, and show the first ones."""
    found.listing.orphans = FileCount()
    for one in found.files:
        found.listing.orphans.add(one.size)
    found.listing.sample = [shown_key(one.key) for one in found.files[:SHOWN]]


def _check_comparable(found: Orphans, needed: NeededFiles, source: str) -> None:
    """Raises InvalidArgument if the listing does not have what the metadata name.

    The folder may be listed under other names than the metadata use, or another folder may be mounted there; then all
    of its files would look like orphans.
    """
    if source and not found.has_source:
        raise InvalidArgument(
            f"the table's own metadata file {shown(source)} was not found in its folder, so no file there is known to "
            "be an orphan"
        )
    if needed.below and not found.needed and found.files:
        raise InvalidArgument(
            f"none of the {needed.below} files that the metadata name was found in the table's folder, but "
            f"{len(found.files)} others: no file there is known to be an orphan"
        )


def drop_needed(found: Orphans, needed: NeededFiles) -> None:
    """Drop those of the orphans that are needed by now: needed files were added since :func:`decide`."""
    files, found.files = found.files, []
    for one in files:
        if needed.why(one.key):
            found.keep(OTHER_STATE)
        else:
            found.files.append(one)
    _count(found)


def shown_key(key: str) -> str:
    """A key for a report: bytes that are not UTF-8 are escaped."""
    return key.encode(errors="backslashreplace").decode()


def _why_kept(one: StoredObject, needed: NeededFiles, scope: DeletionScope, before: float) -> str:
    if why := needed.why(one.key):
        return why
    try:
        scope.check(one.key)
    except UnsafePath:
        return UNSAFE
    if any(map(hidden, one.key.split("/"))):
        return HIDDEN
    return YOUNG if one.modified >= before else ""


def _checked_by(key: str) -> str:
    """The key of the file whose checksum Hadoop's local file system has written to this key; "" for other files."""
    folder, slash, name = key.rpartition("/")
    if name.startswith(".") and name.endswith(".crc") and len(name) > len("..crc"):
        return f"{folder}{slash}{name[1:].removesuffix('.crc')}"
    return ""
