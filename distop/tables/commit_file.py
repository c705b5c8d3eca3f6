"""Publishes a change as one new file of a table: a Delta table's next commit, or an Iceberg table's next metadata.

The file is created only if it does not exist, on a disk as in an object store. So of several writers of a version
exactly one wins.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from distop.errors import InvalidArgument
from distop.storage.files import local_path
from distop.storage.opened_stores import store_of
from distop.storage.places import shared_below
from distop.storage.store_check import require_suitable
from distop.storage.store_errors import ObjectExists, StoreError, UnknownWrite, unavailable
from distop.tables.commits import CommitUnknown, Conflict

if TYPE_CHECKING:
    from distop.storage.deletion import Place


def check_suitable(folder: str) -> None:
    """Check once whether an object store creates a file for only one of several writers.

    ``folder``: the table's; the check writes below its ``_distop``, which readers ignore. Raises InvalidArgument if the
    store is not suitable, TableUnavailable if it cannot be checked now.
    """
    if local_path(folder) is not None:
        return
    try:
        require_suitable(shared_below(folder, "").location)
    except InvalidArgument:
        raise
    except StoreError as error:
        raise unavailable(f"the table in {folder} cannot be changed: {error}", error) from error


def create(place: Place, name: str, data: bytes) -> None:
    """Create a file in a folder of a table.

    Raises Conflict if it exists: another writer was first. Raises CommitUnknown if the answer was lost and the store
    does not tell whose file it is, TableUnavailable if the store refuses, UnsafePath, and InvalidArgument.
    """
    try:
        store_of(place).put_new(name, data)
    except ObjectExists as error:
        raise Conflict(f"another writer has committed {place.location}/{name}") from error
    except UnknownWrite as error:
        raise CommitUnknown(str(error)) from error
    except StoreError as error:
        raise unavailable(str(error), error) from error
