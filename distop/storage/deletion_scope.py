"""Decides which files of a table an operation may delete. Pure.

A path in a list, or in metadata, is not trusted. :class:`DeletionScope` returns its key below the table's own folder,
or raises: for a path outside of that folder or in another table's, for the folder itself, for distop's own files, and
for spellings that some readers resolve to another file. The store then refuses links
(:mod:`distop.storage.folder_store`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING
from urllib.parse import unquote

from distop.errors import UnsafePath
from distop.protocol.texts import shown
from distop.storage.normal_uris import NormalUri, is_normal, normal
from distop.storage.object_store import check_key

if TYPE_CHECKING:
    from collections.abc import Iterable

OWN = "_distop"
"""The folder below a table with distop's own files: indexes, lists of certificates, stages, plans and results."""
_MOST_DECODINGS = 8


class DeletionScope:
    """The files of one table that may be deleted.

    ``place``: the table's own folder; ``others``: the folders of other tables. Raises UnsafePath if the place is the
    root of a file system or of a bucket, or if another table's folder is the same one, or is inside or around it.
    """

    def __init__(self, place: str, others: Iterable[str] = ()) -> None:
        self.place = normal(place)
        if not self.place.path:
            raise UnsafePath(f"{shown(place)} is the root of a file system or a bucket, where nothing is deleted")
        for other in others:
            if why := overlap(self.place, normal(other)):
                raise UnsafePath(f"another table's folder, {shown(other)}, is {why} {shown(place)}: nothing is deleted")

    def key_of(self, path: str) -> str:
        """The key of a file below the place. Raises UnsafePath if it may not be deleted."""
        found = normal(path)
        if found == self.place or not self.place.has(found):
            raise UnsafePath(f"{shown(path)} is not a file below the table's folder {self.place}: it is not deleted")
        key = found.below(self.place)
        if not is_normal(path):  # a doubled slash is part of a key in an object store, so it names another object
            raise UnsafePath(f"{shown(path)} is not the normal form of a path: it is not deleted")
        self.check(key)
        return key

    def check(self, key: str) -> None:
        """Raises UnsafePath if the file with this key may not be deleted."""
        check_key(key)
        if key.partition("/")[0] == OWN:
            raise UnsafePath(f"{shown(key)} is one of distop's own files, which belong to their operations")
        decoded = key
        for _ in range(_MOST_DECODINGS):
            if "%" not in decoded:
                break
            decoded = unquote(decoded, errors="surrogateescape")
            if not {"", ".", ".."}.isdisjoint(decoded.split("/")) or "\0" in decoded:
                raise UnsafePath(f"{shown(key)} has percent escapes that lead out of its folder: it is not deleted")


def overlap(place: NormalUri, other: NormalUri) -> str:
    """How another folder lies to a place: "equal to", "inside" or "around"; "" if they have no file in common."""
    if other == place:
        return "equal to"
    if place.has(other):
        return "inside"
    return "around" if other.has(place) else ""
