"""The staged files of a rewrite: the stage of an attempt or a completion, its description, and its removal.

The metadata of the staging table is in the stage. The data files are at their final place, in a folder of this attempt
below the table's data, so that publishing moves nothing. The path of that folder is the path of the stage in the shared
directory, below ``distop-staged`` and the folder of the namespace.
"""

from __future__ import annotations

import hashlib
import json
import os
from typing import TYPE_CHECKING, Any

from distop.errors import InvalidArgument, UnsafePath
from distop.protocol.frozen import frozen
from distop.storage import deletion
from distop.storage.confinement import normal_form
from distop.storage.files import local_path as path_on_disk
from distop.storage.location import Location
from distop.storage.opened_stores import store_of
from distop.storage.places import TABLE_MARKER, table_data
from distop.tables.iceberg.metadata_file import current_metadata_file, read_file
from distop.tables.iceberg.staged_metadata import check_staged
from distop_behaviors.apply.apply_report import Staged

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from distop.runtime.logs import Log
    from distop.storage.deletion import Place
    from distop.tables.iceberg.metadata_file import MetadataFile
    from distop_behaviors.apply.constraints import Narrowed

TABLE = "table"
"""The folder of the staging table in a stage."""
CONTENTS = f"{TABLE}/contents.json"
"""A file in a stage with the source files of the rewrite, and its parameters. Outcomes have them too, but a forged
outcome could replace files by nothing.
"""
_CONTENTS_BYTES = 1 << 20


@frozen
class StageFolders:
    """The two folders of an attempt or a completion.

    ``place``: with the staging table's metadata, in the shared directory. ``data``: with the data files, below the real
    table.
    """

    place: Place
    data: Place

    @classmethod
    def of(cls, place: Place, shared: Place, space: str, table: str) -> StageFolders:
        """The stage at a place in the shared directory. ``table``: the table's folder.

        Raises UnsafePath if the place is not below the folder of stages.
        """
        return cls(place, table_data(place, shared, space, table))

    @property
    def table(self) -> str:
        """The location of the staging table."""
        return f"{self.place.location}/{TABLE}"

    def check_own(self) -> None:
        """Raises UnsafePath if other users may have written into ``place`` or if it is missing, and OSError.

        The name of a stage comes from an outcome, so it does not prove who has created it.
        """
        deletion.check_own(self.place)

    def metadata(self, check: Callable[[], None] = lambda: None) -> tuple[MetadataFile, list[str]]:
        """The current metadata file of the staging table, and its manifests.

        Raises UnsafePath if other users may have written it or if it is a link, InvalidArgument if there is none, and
        the errors of :func:`~distop.tables.iceberg.staged_metadata.check_staged`.
        """
        self.check_own()
        name = current_metadata_file(Location.of(self.table)).rpartition("/")[2]
        found = store_of(self.place).head(f"{TABLE}/metadata/{name}")
        file = read_file(f"{self.place.location}/{found.key}")
        return file, check_staged(file, self.data.location, check)

    def check_file(self, path: str) -> None:
        """Raises UnsafePath for a data file that is outside this stage or a link, and OSError."""
        found, folder = normal_form(path), f"{normal_form(self.data.location)}/"
        if not found.startswith(folder):
            raise UnsafePath(f"{self.table} has the file {path}, which is not in {folder}: nothing was changed")
        store_of(self.data).head(found.removeprefix(folder))

    def begun(self) -> bool:
        """Whether files may have been written into ``data``."""
        try:
            store_of(self.place).head(TABLE_MARKER)
        except (OSError, UnsafePath):
            return False
        return True


def contents_of(files: Iterable[str], schema: int, last_column: int, ids: Mapping[int, int]) -> dict[str, Any]:
    digest = hashlib.blake2b("\0".join(sorted(files)).encode("utf-8", "surrogateescape"), digest_size=16)
    columns = {str(old): new for old, new in ids.items()}
    return {"files": digest.hexdigest(), "schema": schema, "last_column": last_column, "ids": columns}


def purpose_of(certificate: str, narrowed: Iterable[Narrowed]) -> dict[str, Any]:
    """The purpose of a stage: the digest of the certificate, and the columns with their new types."""
    return {"certificate": certificate, "narrowed": {str(n.id): [n.name, n.type, n.spark] for n in narrowed}}


def staged_data(
    stage: StageFolders, files: Iterable[str], schema: int, last_column: int, ids: Mapping[int, int], wanted_for: Any
) -> tuple[Staged, str] | None:
    """The staged data of a stage with these source files, and the snapshot they were read from.

    None if the stage has other source files or ids, or if other users may have written it. Raises InvalidArgument if it
    was written for another purpose than ``wanted_for`` (:func:`purpose_of`).
    """
    wanted = contents_of(files, schema, last_column, ids)
    try:
        stage.check_own()
        contents = json.loads(store_of(stage.place).get(CONTENTS, limit=_CONTENTS_BYTES).data)
        if contents["made_for"] == wanted_for:
            if not wanted.items() <= contents.items():
                return None
            return Staged.model_validate(contents["staged"]), str(contents["snapshot"])
    except (OSError, UnsafePath, ValueError, LookupError, TypeError, AttributeError):
        return None
    raise InvalidArgument(
        f"{stage.place.location} was written for another certificate or other types than those of the operation's "
        "argument: the argument was changed after planning, so nothing was changed; start a new operation"
    )


def clear(stage: StageFolders) -> None:
    """Remove the files of an interrupted run of the attempt that runs now. Raises UnsafePath and OSError."""
    _remove(stage.data)
    store_of(stage.place).delete_folder(TABLE)


def discard(stage: StageFolders, live: frozenset[str], log: Log) -> None:
    """Remove a stage and its data files. If data cannot be removed, logs it, and the stage stays for a retry.

    ``live``: folders with files of the table (:func:`live_folders`). A data folder with one of them stays. Data without
    a stage also stays: it may be published, and belong to an older snapshot.
    """
    data = _resolved(stage.data.location)
    if stage.begun() and not any(folder == data or folder.startswith(f"{data}/") for folder in live):
        try:
            _remove(stage.data)
        except (OSError, UnsafePath) as error:
            log.warning("Cannot remove the staged data files %s; retrying later: %s", stage.data.location, error)
            return
    try:
        _remove(stage.place)
    except (OSError, UnsafePath) as error:
        log.warning("Cannot remove the stage %s; retrying later: %s", stage.place.location, error)


def _remove(place: Place) -> None:
    """Remove a folder of an attempt, and those of its job and its operation if they are empty."""
    job = place.parent
    store_of(job.parent.parent).delete_folder(f"{job.parent.name}/{job.name}/{place.name}")


def live_folders(paths: Iterable[str]) -> frozenset[str]:
    """The folders of these files, with links resolved, for :func:`discard`."""
    return frozenset(_resolved(folder) for folder in {path.rpartition("/")[0] for path in paths})


def _resolved(folder: str) -> str:
    """The normal form of a folder, with its links followed."""
    found = normal_form(folder)
    return found if path_on_disk(found) is None else os.path.realpath(found)
