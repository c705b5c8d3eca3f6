"""Folders of an Iceberg table on a disk in which its libraries write: only such as nobody else may change.

Iceberg, Hadoop and pyiceberg create, rename and remove files by their paths. Whoever may change a folder on the way
could have them write over, or remove, whatever the executor's user can. On an object store there are no links.
"""

from __future__ import annotations

import os

from distop.errors import UnsafePath
from distop.storage import deletion
from distop.storage.deletion import Place
from distop.storage.files import local_path

METADATA, DATA = "metadata", "data/distop-staged"
"""Below a table: its metadata, and what ``apply`` writes anew."""
_TOLD = (
    "the table is not changed: Iceberg would write by paths",
    "let nobody but the executors' user and root change or replace the table's folder, its metadata and its data",
)


def check_metadata_folder(folder: str, *, missing: bool = False) -> None:
    """Raises UnsafePath where others may change the metadata folder of a table, or one that holds it, or where it has
    something that a commit would be led away by, and OSError. ``folder``: the table's, a path or a URL; ``missing``:
    that it is not there is fine.
    """
    place = Place(folder, METADATA)
    check_folder(place, missing=missing)
    if local_path(folder) is None:
        return
    try:
        with os.scandir(str(local_path(place.location))) as entries:
            odd = sorted(entry.name for entry in entries if not _plain(entry))
    except FileNotFoundError:
        if not missing:
            raise
        return
    if odd:
        raise UnsafePath(
            f"the table is not changed: {place.location}/{odd[0]} is no regular file, and Iceberg would write or "
            "remove by its path: remove it"
        )


def check_data_folder(folder: str) -> None:
    """As :func:`check_metadata_folder`, for the data files that are written anew. What is missing of their folder is
    made later. The folder that an attempt has made is checked by :func:`check_folder`.
    """
    check_folder(Place(folder, DATA), missing=True)


def check_folder(place: Place, *, missing: bool = False) -> None:
    """Raises UnsafePath where others may change or replace a folder of a table on a disk, and OSError."""
    deletion.check_own(place, _TOLD, missing=missing)


def _plain(entry: os.DirEntry[str]) -> bool:
    """A regular file, or a folder whose name is none of a file that a commit writes: all of these have a dot."""
    if entry.is_dir(follow_symlinks=False):
        return "." not in entry.name
    return entry.is_file(follow_symlinks=False)
