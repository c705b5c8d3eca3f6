"""Publishes metadata of an Iceberg table by path: the next metadata file is created only if nobody has created it.

So the commit compares with the version that was loaded. The table may be on a disk or in an object store. HDFS has no
such request: there Iceberg renames the file, in the JVM. ``version-hint.text`` is written after the commit, and only if
it has a lower number; readers look for later versions than its number.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from distop.errors import InvalidArgument, TableUnavailable, UnsafePath, describe
from distop.storage.confinement import check_metadata
from distop.storage.deletion import Place
from distop.storage.location import Location
from distop.storage.opened_stores import has_store, store_of
from distop.storage.store_errors import ObjectMissing
from distop.tables import commit_file
from distop.tables.commits import CommitUnknown, Conflict, Head
from distop.tables.iceberg import iceberg_format
from distop.tables.iceberg.iceberg_fields import local_path
from distop.tables.iceberg.iceberg_jar import check_installed
from distop.tables.iceberg.java_tables import uri
from distop.tables.iceberg.metadata_change import next_file
from distop.tables.iceberg.metadata_file import (
    HINT,
    HINT_BYTES,
    METADATA,
    current_metadata_file,
    hinted_version,
    metadata_version,
    read_file,
)
from distop.tables.iceberg.new_metadata import Production
from distop.tables.iceberg.written_folders import check_data_folder, check_metadata_folder

if TYPE_CHECKING:
    from collections.abc import Callable

    from distop.protocol.records import TableRecord
    from distop.tables.commits import CommitContext
    from distop.tables.iceberg.metadata_file import MetadataFile

log = logging.getLogger("distop.tables")

_PACKAGE = "org.apache.iceberg.exceptions"
_FAILED, _UNKNOWN, _NONE = (
    f"{_PACKAGE}.{name}" for name in ("CommitFailedException", "CommitStateUnknownException", "NoSuchTableException")
)


class FolderPublisher:
    """A table of a Hadoop catalog, or one that was created by path."""

    def __init__(self, table: TableRecord, ctx: CommitContext) -> None:
        self._table = table
        self._ctx = ctx

    def check_folders(self, *, rewritten: bool) -> None:
        """Raises UnsafePath if other users may change a folder on a disk that a commit would write into.

        Raises InvalidArgument for an object store in which two writers may both create the same file. ``rewritten``:
        the commit also adds data files.
        """
        folder = self._folder
        check_metadata_folder(folder, missing=True)
        if rewritten:
            check_data_folder(folder)
        if has_store(folder):
            commit_file.check_suitable(folder)

    @property
    def _folder(self) -> str:
        folder = iceberg_format.FORMAT.folder_of(self._table)
        assert folder is not None, "a table whose catalog alone knows its folder"
        return folder

    def load(self) -> Head:
        """The current metadata, not cached. Raises TableUnavailable if there is no table."""
        folder = self._folder
        # A rewrite lets Iceberg load the table by path, so no other user may be able to change that folder.
        check_metadata_folder(folder, missing=True)
        try:
            file = read_file(current_metadata_file(Location.of(folder)))
        except (InvalidArgument, TableUnavailable):
            self._ctx.check_reachable()
            raise
        return Head(file.source, dict(file.content.properties), file)

    def commit_produced(self, head: Head, produce: Callable[[Production], Any]) -> None:
        """Publish the metadata that an Iceberg transaction produces. Removes its manifests if the commit fails.

        Raises the errors of :meth:`commit`.
        """
        session: Any = self._ctx.spark
        production = self._production(head)
        outcome = produce(production)
        try:
            self.commit(head, str(session._jvm.org.apache.iceberg.TableMetadataParser.toJson(outcome)))
        except (Conflict, UnsafePath):
            production.discard()
            raise

    def _production(self, head: Head) -> Production:
        """A transaction on the loaded table. Raises Conflict if the table has changed since."""
        check_metadata_folder(self._folder)  # manifests are written there
        production = Production(self._ctx.spark, self.load_in_java(), self._ctx.operation)
        if (source := _source(production.base)) != head.source:
            raise Conflict(f"the metadata of the table has changed: it is now {source}")
        return production

    def load_in_java(self) -> Any:
        """The table as Iceberg loads it by its path. Raises FatalError if Spark does not have Iceberg."""
        from py4j.protocol import Py4JJavaError

        session: Any = self._ctx.spark
        check_installed(session._jvm)
        conf = session._jsparkSession.sessionState().newHadoopConf()
        try:
            # Not cached: a cached table could be outdated.
            return session._jvm.org.apache.iceberg.hadoop.HadoopTables(conf).load(uri(self._folder))
        except Py4JJavaError as error:
            self._ctx.check_reachable()
            if _name(error) == _NONE:
                text = f"the Iceberg table at {self._folder!r} no longer exists: it was dropped"
                raise TableUnavailable(text) from error
            raise

    def commit(self, head: Head, text: str) -> None:
        """Publish this metadata, as JSON, if the table's metadata is still ``head``.

        Raises Conflict, CommitUnknown, TableUnavailable if the store refuses, UnsafePath, and InvalidArgument.
        """
        folder, file = self._folder, head.base
        check_metadata(head.source)
        check_metadata_folder(folder)
        self._check_same(file)
        if not has_store(folder):
            self._rename_in_java(head, text)
            return
        commit_file.check_suitable(folder)
        name, data = next_file(head.source, text)
        place = Place(folder, METADATA)
        _remove_checksums(place, name)
        commit_file.create(place, name, data)
        _raise_hint(place, metadata_version(name))

    def _check_same(self, file: MetadataFile) -> None:
        """Raises Conflict if the table has another current metadata file, or another one of the same name."""
        source = current_metadata_file(Location.of(self._folder))
        if source != file.source:
            raise Conflict(f"the metadata of the table has changed: it is now {source}")
        if read_file(source).digest != file.digest:
            raise Conflict(f"the metadata file {source} is now another one: the table was replaced")

    def _rename_in_java(self, head: Head, text: str) -> None:
        """Let Iceberg write the metadata under another name, and rename that: HDFS renames over no file."""
        from py4j.protocol import Py4JJavaError

        session: Any = self._ctx.spark
        operations = self.load_in_java().operations()
        base = operations.current()
        if (source := _source(base)) != head.source:
            raise Conflict(f"the metadata of the table has changed: it is now {source}")
        try:
            operations.commit(base, session._jvm.org.apache.iceberg.TableMetadataParser.fromJson(text))
        except Py4JJavaError as error:
            name = _name(error)
            if name == _FAILED:
                raise Conflict(str(error.java_exception.getMessage())) from error
            if name == _UNKNOWN:
                raise CommitUnknown(str(error.java_exception.getMessage())) from error
            raise


def _remove_checksums(place: Place, name: str) -> None:
    """Remove the checksums that Hadoop keeps on a disk, and which new content of these names would not match.

    One of the new metadata file is there if somebody has removed a file of this name without it.
    """
    checksums = {f".{name}.crc", f".{HINT}.crc"} & Location.of(place.anchor).names_in(place.path)
    if checksums:
        store_of(place).delete_many(sorted(checksums))


def _raise_hint(place: Place, version: int) -> None:
    """Set the version hint to a version if it has a lower one. Errors are logged: it is only a hint."""
    store, data = store_of(place), str(version).encode()
    try:
        try:
            found = store.get(HINT, limit=HINT_BYTES)
        except ObjectMissing:
            store.put_new(HINT, data)
        else:
            known = hinted_version(found.data.decode())
            if known is None or known < version:
                store.replace_if(HINT, data, found.stored.version)
    except (OSError, ValueError, InvalidArgument) as error:
        log.info(
            "Cannot write %s in %s; readers find version %s by listing: %s",
            HINT,
            place.location,
            version,
            describe(error),
        )


def _source(metadata: Any) -> str:
    """The path of a metadata file, like in a plan."""
    source = str(metadata.metadataFileLocation())
    return local_path(source) or source


def _name(error: Any) -> str:
    return str(error.java_exception.getClass().getName())
