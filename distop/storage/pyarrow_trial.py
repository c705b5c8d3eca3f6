"""Reads a bucket through pyarrow, in a process of its own: pyarrow's file systems may hang, or abort the process."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from distop.errors import TableUnavailable
from distop.storage import storage_options
from distop.storage.storage_access import storage_access_for

if TYPE_CHECKING:
    from collections.abc import Mapping


def read(request: Mapping[str, Any]) -> int:
    """The size of the object ``key`` below ``url``. Raises TableUnavailable, and InvalidArgument.

    ``options``: the configuration, as in the settings file.
    """
    storage_options.configure(storage_options.read_settings(request["options"]))
    filesystem, path = storage_access_for(request["url"]).pyarrow()
    try:
        with filesystem.open_input_stream(f"{path}/{request['key']}") as stream:
            return len(stream.read())
    except Exception as error:  # pyarrow's own errors differ between its file systems
        lines = str(error).strip().splitlines() or [type(error).__name__]
        raise TableUnavailable(lines[0]) from None
