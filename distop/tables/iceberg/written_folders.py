"""Checks the folders of an Iceberg table on a disk before its libraries write there: no other user may change them.

Iceberg, Hadoop and pyiceberg create, rename and remove files by path. A user who can change a folder of the path could
redirect them to other files of the executor's user. Object stores have no links.
"""

from __future__ import annotations

import os

from distop.errors import UnsafePath
from distop.storage import deletion
from distop.storage.deletion import Place
from distop.storage.files import local_path

METADATA, DATA = "metadata", "data/distop-staged"
"""Folders below a table: its metadata, and the rewritten data of ``apply``."""
_UNSAFE = (
    "the table is not changed, because Iceberg writes by path",
    "let only the executors' user and root change or replace the table's folder, its metadata and its data",
)


def check_metadata_folder(folder: str, *, missing: bool = False) -> None:
    """Raises UnsafePath if other users may change a table's metadata folder or its parents, and OSError.

    Also if the folder has a link or another entry that could redirect a commit. ``folder``: the table's, a path or URL;
    ``missing``: accept a missing folder.
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
            f"the table is not changed, because {place.location}/{odd[0]} is not a regular file, and Iceberg could "
            "write or remove through it: remove it"
        )


def check_data_folder(folder: str) -> None:
    """Like :func:`check_metadata_folder`, for the folder of rewritten data files, which may be missing.

    :func:`check_folder` checks the folder that an attempt has created.
    """
    check_folder(Place(folder, DATA), missing=True)


def check_folder(place: Place, *, missing: bool = False) -> None:
    """Raises UnsafePath if other users may change or replace a folder of a table on a disk, and OSError."""
    deletion.check_own(place, _UNSAFE, missing=missing)


def _plain(entry: os.DirEntry[str]) -> bool:
    """Whether an entry is a regular file, or a folder without a dot in its name, which a commit's files have."""
    if entry.is_dir(follow_symlinks=False):
        return "." not in entry.name
    return entry.is_file(follow_symlinks=False)
