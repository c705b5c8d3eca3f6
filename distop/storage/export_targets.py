"""The places that operations may export tables to: a setting of the executor. By default there is none.

The argument of an operation chooses a place below them, so who submits operations chooses no other store or folder.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from distop.errors import InvalidArgument, UnsafePath
from distop.protocol.texts import shown
from distop.storage.deletion import Place
from distop.storage.files import local_path
from distop.storage.normal_uris import is_normal, normal
from distop.storage.storage_options import in_object_store
from distop.storage.storage_urls import check_place

if TYPE_CHECKING:
    from collections.abc import Iterable

SETTING = "export-to"

_allowed: tuple[str, ...] = ()


def configure(prefixes: Iterable[str]) -> None:
    """Set the allowed places of this process. Raises InvalidArgument and UnsafePath for an invalid one."""
    global _allowed
    _allowed = tuple(map(checked, prefixes))


def checked(place: str) -> str:
    """A place in its spelling for stores, without a slash at its end.

    Raises InvalidArgument for a URL that is not allowed in data, or of a store in which distop writes nothing;
    UnsafePath for a relative path, ``.``, ``..``, doubled slashes, and the root of a file system.
    """
    check_place("the place of an export", place)
    local = local_path(place)
    text = str(local) if local is not None else place.rstrip("/")
    found = normal(text)
    if local is not None and not found.path:
        raise UnsafePath(f"{shown(place)} is the root of a file system, where nothing is exported")
    if not is_normal(place.rstrip("/") or "/"):
        raise UnsafePath(f"the place {shown(place)} of an export has '.' or '//': write it without them")
    if local is None and not in_object_store(text):
        raise InvalidArgument(
            f"{shown(place)} is in a store in which distop writes no files: it does so in local folders, S3, GCS and "
            "Azure"
        )
    return text


def target_place(place: str) -> Place:
    """An allowed place, anchored in the setting's: on a disk, no link below that is followed.

    Raises InvalidArgument if the place is not below an allowed one, or is the root of a bucket; and the errors of
    :func:`checked`.
    """
    text = checked(place)
    wanted = normal(text)
    if not wanted.path:
        raise InvalidArgument(f"{shown(place)} is the root of a bucket, where nothing is exported: name a folder in it")
    for one in _allowed:
        allowed = normal(one)
        if allowed == wanted:
            return Place(one)
        if allowed.has(wanted):
            return Place(one, wanted.below(allowed))
    some = f"this executor allows {', '.join(_allowed)}" if _allowed else "this executor allows none"
    raise InvalidArgument(
        f"exports to {shown(place)} are not allowed: {some} (its setting {SETTING!r} lists the places to export to)"
    )
