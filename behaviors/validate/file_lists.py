"""Lists of the files that a validation has certified, in the shared directory.

A certificate of a table without versions has the path and the digest of such a list.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from distop.behavior import is_wide
from distop.errors import InvalidArgument
from distop.protocol.plan import files_of
from distop.protocol.records import OperationRef
from distop.protocol.texts import shown
from distop.storage.files import TooLarge
from distop.storage.opened_stores import store_of
from distop.storage.places import folder
from distop.storage.store_check import publishing_store
from distop.storage.store_errors import ObjectMissing
from distop_behaviors.validate.certificate import digest_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from distop.behavior import JobContext, PartitionPlan
    from distop.storage.deletion import Place
    from distop.storage.object_store import Version
    from distop.tables.reader import Reader
    from distop_behaviors.validate.certificate import Certificate

    Entry = tuple[Any, ...]
    """A file in a list: its path, size and time; and its partition, if a file may move to another partition."""

_FOLDER = "certificates"
_LIST_BYTES = 1 << 30
"""Maximum bytes of a list of files."""
CACHED_LISTS = 256
_written: dict[str, tuple[Version, str]] = {}
"""Lists that this process has written: by location, the file's version and the list's digest.

A network file system may still show a removed list for a while. A certificate may then name it; validating ``since``
that certificate fails with an error that says what to do.
"""


def file_entries(partitions: Iterable[PartitionPlan], reader: Reader) -> list[Entry]:
    """The files of a plan as entries of a list, with their partitions if files may move between partitions."""
    found: dict[Entry, str] = {}
    for partition in partitions:
        for file in partition.files:
            # A file may be in two jobs: in that of its partition, and in that of several partitions.
            if file not in found or not is_wide(partition.name):
                found[file] = partition.name
    return [(*file, name) for file, name in found.items()] if reader.moves else list(found)


def file_list_path(table: str, version: str) -> str:
    """The path of the list of files of a table's version, below the shared directory.

    The version comes from a plan, so it must not lead to the list of another table. Raises InvalidArgument.
    """
    if "/" in version:
        raise InvalidArgument(f"{shown(version)} is not a version of the table {table!r}")
    return f"{_FOLDER}/{folder(table)}/{version}.json"


def write_file_list(version: str, files: Callable[[], Iterable[Entry]], ctx: JobContext) -> str:
    """Write the list of a table's files for certificates of this version; returns its digest.

    Does nothing, and does not call ``files``, if this process has written the list and nothing has replaced it since.
    Raises the errors of ``files``, InvalidArgument for a shared directory that is not allowed or not suitable, and
    OSError.
    """
    shared = _shared(ctx)
    name = file_list_path(OperationRef.parse(ctx.operation).table, version)
    location = shared.below(name).location
    if location in _written and _written[location][0] == _version_of(shared, name):
        return _written[location][1]
    listed = sorted(list(file) for file in files())
    digest = digest_of({"files": listed})
    content = json.dumps({"version": version, "files": listed, "digest": digest}).encode()
    written = write(shared, name, content)
    # A list without partition names only depends on the version. Partition names also depend on the argument: a job
    # over several partitions has its own name.
    if all(len(file) == 3 for file in listed):
        if len(_written) >= CACHED_LISTS:
            _written.clear()
        _written[location] = written, digest
    return digest


def write(shared: Place, name: str, content: bytes) -> Version:
    """Write or replace a list; returns its version. Raises the errors of :func:`publishing_store`, and OSError."""
    return publishing_store(shared).put(name, content)


def _version_of(shared: Place, name: str) -> Version | None:
    """The version of a list's file, which changes if it is replaced; None if there is none."""
    try:
        return store_of(shared).head(name).version
    except ObjectMissing:
        return None


def certified_files(certificate: Certificate, ctx: JobContext) -> list[Entry]:
    """The files of a certificate. Raises InvalidArgument if their list is missing, or its digest does not match."""
    if "/" in certificate.version or certificate.files != file_list_path(certificate.table, certificate.version):
        raise InvalidArgument(
            f"the certificate of {certificate.operation} has {certificate.files!r}, which is not the list of files of "
            "its version: validate the whole table"
        )
    if certificate.files_digest is None:
        raise InvalidArgument(
            f"the certificate of {certificate.operation} has no digest of its list of files: validate the whole table"
        )
    try:
        files, digest = read_list(certificate.table, certificate.version, ctx)
    except OSError as error:
        raise InvalidArgument(
            f"cannot read the list of files {certificate.files} of the certificate of {certificate.operation} "
            f"({error}): validate the whole table"
        ) from error
    if digest != certificate.files_digest:
        raise InvalidArgument(
            f"the list of files {certificate.files} was changed: its digest does not match the certificate of "
            f"{certificate.operation}: validate the whole table"
        )
    return files


def _shared(ctx: JobContext) -> Place:
    if ctx.shared is None:
        raise FileNotFoundError("there is no shared directory: start the executors with --shared-dir")
    return ctx.shared


def read_list(table: str, version: str, ctx: JobContext) -> tuple[list[Entry], str]:
    """The files in the list of a version, and their digest. Raises InvalidArgument for an invalid list, and OSError."""
    name = file_list_path(table, version)
    try:
        text = store_of(_shared(ctx)).get(name, limit=_LIST_BYTES).data
    except TooLarge:
        raise InvalidArgument(
            f"the list of files {name} has more than {_LIST_BYTES} bytes: validate the whole table"
        ) from None
    try:
        content = json.loads(text)
        if content["version"] == version:
            digest = digest_of({"files": content["files"]})
            return [(str(f[0]), *files_of([f])[0][1:], *map(str, f[3:])) for f in content["files"]], digest
    except (ValueError, LookupError, TypeError) as error:
        raise InvalidArgument(f"cannot read the list of files {name} ({error}): validate the whole table") from error
    raise InvalidArgument(f"the list of files {name} belongs to another version: validate the whole table")
