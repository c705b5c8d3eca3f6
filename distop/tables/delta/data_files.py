"""Checks that the data files of a Delta table still exist: VACUUM removes those of older versions."""

from __future__ import annotations

import os

from distop.storage.files import NotRegular, check_regular, local_path
from distop.storage.store_errors import BucketMissing, unavailable
from distop.tables.reading.file_facts import Gone, Unreadable
from distop.tables.reading.parquet_footers import size_and_stamp


def check_length(path: str, size: int, *, local_only: bool = False) -> None:
    """Raises Gone if a data file no longer exists, Unreadable if it does not have the size in the log.

    Statistics must not decide about a file that cannot be read. ``local_only``: skip files in object stores, each of
    which would need a request. Raises TableUnavailable if a store cannot be reached.
    """
    local = local_path(path)
    try:
        if local is not None:
            found = os.stat(local)  # noqa: PTH116
            check_regular(path, found.st_mode)
            length = found.st_size
        elif local_only:
            return
        else:
            length = size_and_stamp(path)[0]
    except BucketMissing as error:
        raise unavailable(f"cannot reach the file {path}: {error}", error) from error
    except FileNotFoundError:
        raise Gone(
            f"the file {path} is gone: since the operation was planned the table was vacuumed, or dropped; start the "
            "operation again"
        ) from None
    except NotRegular as error:
        raise Unreadable(str(error)) from None
    except OSError as error:
        if local is None:
            raise unavailable(f"cannot reach the file {path}: {error}", error) from error
        raise Unreadable(f"the file {path} cannot be read: {error.strerror or error}") from error
    if length != size:
        # Do not say how many bytes it has: a link could lead to any file of this process's user.
        raise Unreadable(
            f"the file {path} does not have the {size} bytes that the log says: it was truncated or overwritten; "
            "restore it, or remove it from the table"
        )
