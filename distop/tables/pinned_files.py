"""The data files of one version of a table, which do not change while an operation copies them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from distop.protocol.frozen import frozen

if TYPE_CHECKING:
    from collections.abc import Sequence

    from distop.tables.reading.file_facts import PlannedFile


@frozen
class PinnedFiles:
    """The data files of a version. ``place``: the table's own folder.

    ``version``: as a start names it, "" for a format without versions. ``needs``: why the rows of the version are not
    those of its data files alone, a clause; "" if they are.
    """

    place: str
    version: str
    files: Sequence[PlannedFile]
    needs: str = ""
