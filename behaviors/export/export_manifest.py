"""The files that describe an export: the manifest of each folder, the root manifest, and the owner's record."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from distop.errors import InvalidArgument
from distop.storage.deletion_scope import OWN
from distop.storage.store_errors import ObjectMissing
from distop_behaviors.export.export_argument import ExportResult

if TYPE_CHECKING:
    from distop.storage.object_store import ObjectStore

FOLDER_MANIFEST = "_MANIFEST.json"
ROOT_MANIFEST = "_EXPORT.json"
OWNER = f"{OWN}/export/owner.json"
PAGES = f"{OWN}/export/pages"
LARGEST = 256 << 20
"""Bytes of a manifest."""
_FORMAT = 1

M = TypeVar("M", bound=BaseModel)


class CopiedFile(BaseModel):
    """A copy of a data file.

    ``path``: below the target; ``checksum``: ``sha256:…`` or ``md5:…`` of the content, or ``etag:…`` if the store tells
    no more. ``planned_stamp`` and ``source_stamp``: of the source in its plan and when it was copied;
    ``target_stamp``: of the copy. A stamp is the ETag, or a file's time of modification. In JSON they have shorter
    names, which manifests of earlier exports have, too.
    """

    model_config = ConfigDict(populate_by_name=True, serialize_by_alias=True)

    path: str
    bytes: int
    checksum: str
    planned_stamp: int | str = Field(validation_alias="planned", serialization_alias="planned")
    source_stamp: int | str = Field(validation_alias="copied", serialization_alias="copied")
    target_stamp: int | str = Field(validation_alias="target", serialization_alias="target")


class FolderManifest(BaseModel):
    """The manifest of one folder. ``left``: files of earlier exports that ``version`` does not have."""

    v: int = _FORMAT
    table: str
    version: str
    files: list[CopiedFile]
    left: list[CopiedFile] = Field(default_factory=list)


class ExportedFolder(BaseModel):
    """A folder in the root manifest. ``sha256``: of its manifest."""

    path: str
    files: int
    bytes: int
    sha256: str


class RootManifest(BaseModel):
    """The root manifest, the last file of an export. ``partial``: the export was limited to some folders."""

    v: int = _FORMAT
    table: str
    version: str
    operation: str
    partial: bool
    files: int
    bytes: int
    folders: list[ExportedFolder]


class ExportOwner(BaseModel):
    """The table that is exported to a place. ``space``: of its namespace.

    ``success``: the names of markers that exports have used; ``folders``: the folders that exports have written.
    """

    v: int = _FORMAT
    table: str
    space: str
    success: list[str] = Field(default_factory=list)
    folders: list[str] = Field(default_factory=list)


class CopiedPage(BaseModel):
    """The copies of a page of a job, so that its next attempt need not examine them. ``result``: up to this page."""

    files: list[CopiedFile]
    result: ExportResult = Field(default_factory=ExportResult)


def read(store: ObjectStore, key: str, kind: type[M]) -> M | None:
    """A file of an export; None if it does not exist. Raises InvalidArgument for an invalid one, and StoreError."""
    try:
        data = store.get(key, limit=LARGEST).data
    except ObjectMissing:
        return None
    try:
        return kind.model_validate_json(data)
    except ValidationError as error:
        raise InvalidArgument(
            f"{store.location_of(key)} is not a file of an export by distop: export to another place, or empty this one"
        ) from error


def write(store: ObjectStore, key: str, content: BaseModel) -> str:
    """Write a file of an export; returns its SHA-256."""
    data = encoded(content)
    store.put(key, data)
    return digest(data)


def encoded(content: BaseModel) -> bytes:
    """The bytes of a file of an export."""
    return content.model_dump_json(indent=None).encode()


def digest(data: bytes) -> str:
    """The SHA-256 of a file of an export."""
    return hashlib.sha256(data).hexdigest()


def in_folder(folder: str, name: str) -> str:
    """The key of a file in a folder; the table's own is ""."""
    return f"{folder}/{name}" if folder else name
