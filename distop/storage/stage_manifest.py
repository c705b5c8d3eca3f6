"""The manifest of an attempt's staged output: its files, with sizes, checksums and rows.

An attempt closes its files and writes the manifest into its stage. Its outcome has the manifest's digest
(:class:`StagedOutput`, a part of the job's result). So the outcome, which one transaction commits under the claim's
fence, decides which files count. The outcome has no path: the stage is derived from the operation, the partition and
the attempt. A forged outcome names no other file.
"""

from __future__ import annotations

import hashlib
import os
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from distop.errors import InvalidArgument, NotFound, UnreadableRecord, describe
from distop.protocol.frozen import frozen
from distop.protocol.texts import shown
from distop.storage.deletion import Place, check_own, opened_folder
from distop.storage.files import TooLarge, local_path
from distop.storage.object_store import PART
from distop.storage.opened_stores import store_of
from distop.storage.store_check import publishing_store
from distop.storage.store_errors import ObjectMissing, Throttled, TimedOut

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from distop.storage.object_store import ObjectStore, StoredObject

MANIFEST = "distop-manifest.json"
"""The name of the manifest in its stage."""
MAX_BYTES = 64 << 20
"""Maximum bytes of a manifest: about 300,000 files."""
_FORMAT = 1
_Number = Annotated[int, Field(ge=0)]


class StagedOutput(BaseModel):
    """The commit of a manifest: a part of a job's result. ``rows``: None if a file has an unknown number of rows."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    sha256: Annotated[str, Field(pattern="^[0-9a-f]{64}$", description="of the manifest")]
    files: _Number
    bytes: _Number
    rows: _Number | None = None


class StagedFile(BaseModel):
    """A file in a manifest.

    ``path``: below the stage; with ``in_table``, below the folder of the stage in the table. ``sha256``: "" if it was
    not computed. ``etag``: the version in an object store, "" on a disk.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    path: str
    bytes: _Number
    sha256: str = ""
    etag: str = ""
    rows: _Number | None = None
    in_table: bool = False


class _Content(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    v: int
    files: tuple[StagedFile, ...]


@frozen
class Manifest:
    """A manifest that was read and whose digest is the committed one.

    ``stage``: the attempt's folder in the shared directory. ``data``: its folder in the table, None if it has none.
    """

    stage: Place
    data: Place | None
    files: tuple[StagedFile, ...]

    def place(self, file: StagedFile) -> Place:
        """The place of a file of this manifest. Raises UnsafePath for a path that leads out of its folder."""
        return self._folder(file).below(file.path)

    def check(self, file: StagedFile, *, contents: bool = False) -> None:
        """Check that a file is a regular one and unchanged: its size, and on an object store its version.

        ``contents``: also its checksum, if it has one, which reads the whole file. Raises NotFound if it is missing,
        UnreadableRecord if it has changed, UnsafePath for a link or a path out of its folder, and OSError.
        """
        store = store_of(self._folder(file))
        what = f"the staged file {store.location_of(file.path)}"
        try:
            found = store.head(file.path)
            same = found.size == file.bytes and _etag(store, found) == file.etag
            if same and contents and file.sha256:
                same = _checksum(store, file.path) == file.sha256
        except ObjectMissing:
            raise NotFound(f"{what} is missing") from None
        if not same:
            raise UnreadableRecord(f"{what} has changed since its job has ended")

    def read(self, file: StagedFile, *, limit: int) -> bytes:
        """The bytes of a file, which are compared with the manifest.

        Raises the errors of :meth:`check`, and TooLarge if it has more than ``limit`` bytes.
        """
        store = store_of(self._folder(file))
        what = f"the staged file {store.location_of(file.path)}"
        try:
            data = store.get(file.path, limit=limit).data
        except ObjectMissing:
            raise NotFound(f"{what} is missing") from None
        if len(data) != file.bytes or (file.sha256 and hashlib.sha256(data).hexdigest() != file.sha256):
            raise UnreadableRecord(f"{what} has changed since its job has ended")
        return data

    def _folder(self, file: StagedFile) -> Place:
        if not file.in_table:
            return self.stage
        assert self.data is not None, "read_manifest refuses such a manifest"
        return self.data


def write_manifest(
    stage: Place,
    files: Mapping[str, int | None],
    *,
    data: Place | None = None,
    in_table: Mapping[str, int | None] | None = None,
    checksums: bool = True,
) -> StagedOutput:
    """Write the manifest of a stage; returns what the outcome commits.

    ``files``: rows (None: unknown) by the paths of closed files below ``stage``; ``in_table``: of those below ``data``.
    ``checksums``: also read files of over 8 MiB. On a disk the files are flushed first. An earlier process may have
    written a manifest of the same attempt, which is replaced.

    Raises InvalidArgument for a missing file, UnsafePath, and OSError.
    """
    found = [_described(stage, path, rows, checksums, in_table=False) for path, rows in sorted(files.items())]
    for path, rows in sorted((in_table or {}).items()):
        assert data is not None, "files in the table need the folder of the stage there"
        found.append(_described(data, path, rows, checksums, in_table=True))
    text = _Content(v=_FORMAT, files=tuple(found)).model_dump_json(exclude_defaults=True).encode()
    if len(text) > MAX_BYTES:
        raise InvalidArgument(f"the manifest of {len(found)} files has over {MAX_BYTES} bytes: write fewer files")
    publishing_store(stage).put(MANIFEST, text)
    return StagedOutput(
        sha256=hashlib.sha256(text).hexdigest(),
        files=len(found),
        bytes=sum(one.bytes for one in found),
        rows=_total(one.rows for one in found),
    )


def read_manifest(stage: Place | None, committed: StagedOutput, data: Place | None = None) -> Manifest:
    """The manifest in a stage, if it is the one that an outcome has committed.

    ``stage``: of the outcome (``OutcomeRow.stage``). Files are not checked: see :meth:`Manifest.check`. Raises
    InvalidArgument if no executor has run the job, NotFound if the manifest is missing, UnreadableRecord if it is
    another one, UnsafePath if other users may have written the stage, and OSError.
    """
    if stage is None:
        raise InvalidArgument("a job without a stage has staged no output: an actor has returned it")
    check_own(stage)
    store = store_of(stage)
    what = f"the manifest {store.location_of(MANIFEST)}"
    changed = UnreadableRecord(f"{what} is not the one that the job's outcome has committed")
    try:
        text = store.get(MANIFEST, limit=MAX_BYTES).data
    except TooLarge:
        raise changed from None
    except (Throttled, TimedOut):
        raise
    except OSError as error:
        reason = "there is no such file" if isinstance(error, ObjectMissing) else describe(error)
        raise NotFound(f"{what} cannot be read: {reason}") from None
    if hashlib.sha256(text).hexdigest() != committed.sha256:
        raise changed
    try:
        content = _Content.model_validate_json(text)
    except ValidationError as error:
        raise UnreadableRecord(f"{what} is not valid: {describe(error)}") from None
    if data is None and any(one.in_table for one in content.files):
        raise InvalidArgument(f"{what} has files in the table: give the stage's folder there")
    return Manifest(stage, data, content.files)


def _described(folder: Place, path: str, rows: int | None, checksums: bool, *, in_table: bool) -> StagedFile:
    store = store_of(folder)
    try:
        found = store.head(path)
        checksum = _checksum(store, path) if checksums or found.size <= PART else ""
    except ObjectMissing:
        raise InvalidArgument(f"the staged file {shown(store.location_of(path))} does not exist") from None
    flush(folder, path)
    fields: dict[str, Any] = {"sha256": checksum, "etag": _etag(store, found), "rows": rows, "in_table": in_table}
    return StagedFile(path=path, bytes=found.size, **fields)


def _etag(store: ObjectStore, found: StoredObject) -> str:
    """The version of an object in an object store. On a disk "": nodes may see different times of one file."""
    return "" if local_path(store.location) is not None else found.version.etag


def _checksum(store: ObjectStore, path: str) -> str:
    digest = hashlib.sha256()
    with store.open(path) as opened:
        while piece := opened.file.read(PART):
            digest.update(piece)
    return digest.hexdigest()


def flush(folder: Place, path: str) -> None:
    """Let a file on a disk survive a crash of the machine: its writer may only have closed it."""
    if local_path(folder.anchor) is None:
        return
    inner, _, name = path.rpartition("/")
    with opened_folder(folder.below(inner) if inner else folder) as opened:
        if opened is None:
            return
        file = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=opened)
        try:
            os.fsync(file)
        finally:
            os.close(file)
        os.fsync(opened)


def _total(rows: Iterable[int | None]) -> int | None:
    total = 0
    for one in rows:
        if one is None:
            return None
        total += one
    return total
