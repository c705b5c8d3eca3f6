"""pyiceberg's catalogs, which use only listed settings of a server's answers, and none of table properties.

pyiceberg itself lets both override its settings: they may name the classes that it imports (``py-io-impl``, ``auth``),
and the hosts that get its tokens (``uri``, ``oauth2-server-uri``, ``s3.endpoint``).
"""

from __future__ import annotations

import logging
from importlib import import_module
from typing import TYPE_CHECKING, Any

from pyiceberg.catalog import Catalog, CatalogType, infer_catalog_type
from pyiceberg.catalog.rest import RestCatalog
from pyiceberg.exceptions import CommitFailedException, NotInstalledError
from pyiceberg.table.update import RemoveSnapshotsUpdate, SetLocationUpdate, SetPropertiesUpdate
from pyiceberg.typedef import EMPTY_DICT
from requests import RequestException

from distop.errors import InvalidArgument
from distop.storage.confinement import check_folder, own_folder
from distop.storage.storage_urls import check_paths
from distop.tables.iceberg.bounded_io import bounded
from distop.tables.iceberg.snapshot_retention import log_without
from distop.tables.iceberg.written_folders import check_metadata_folder

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from pyiceberg.io import FileIO
    from requests import Response, Session

log = logging.getLogger("distop.tables")

REST_PROPERTIES = ("namespace-separator", "prefix")
"""Settings that a REST catalog may give its client by ``/v1/config``: the form of paths on its own server."""
_CREDENTIALS = (
    *("s3.access-key-id", "s3.secret-access-key", "s3.session-token"),
    *("gcs.oauth2.token", "gcs.oauth2.token-expires-at", "adls.sas-token"),
)
"""Table properties with which a table is refused."""
UNUSED = ("s3.", "gcs.", "adls.")
"""Starts of the names of pyiceberg's settings for object stores: distop reaches these by its own configuration."""

_REDIRECTING = {
    "write.py-location-provider.impl": "run code",
    "write.metadata.path": "write to a folder that the table names",
}
"""Table properties that pyiceberg obeys when it writes metadata, and their effects."""
_OTHERS = {
    CatalogType.SQL: ("sql", "SqlCatalog"),
    CatalogType.HIVE: ("hive", "HiveCatalog"),
    CatalogType.GLUE: ("glue", "GlueCatalog"),
    CatalogType.DYNAMODB: ("dynamodb", "DynamoDbCatalog"),
    CatalogType.BIGQUERY: ("bigquery_metastore", "BigQueryMetastoreCatalog"),
}
"""Modules and classes of the catalogs that need other packages."""


def made(name: str, settings: Mapping[str, Any]) -> _Guarded:
    """The catalog with these settings.

    Raises pyiceberg's errors: ValueError for invalid settings, NotInstalledError, and errors of the connection.
    """
    given = settings.get("type")
    settings = bounded(dict(settings))
    if unused := sorted(name for name in settings if name.startswith(UNUSED)):
        log.warning(
            "Ignoring the settings %s of the catalog %r: configure its bucket in distop's own settings (storage), and "
            "give credentials in the environment or a profile",
            ", ".join(unused),
            name,
        )
    kind = CatalogType(str(given).lower()) if given else infer_catalog_type(name, dict(settings))
    if kind in (CatalogType.REST, CatalogType.SQL, CatalogType.HIVE) and not settings.get("uri"):
        raise ValueError("URI missing")
    if kind == CatalogType.REST:
        return GuardedRestCatalog(name, **settings)
    if kind not in _OTHERS:
        raise ValueError(f"the type {given!r} is not supported")
    module, class_name = _OTHERS[kind]
    try:
        cls = getattr(import_module(f"pyiceberg.catalog.{module}"), class_name)
    except ImportError as error:
        raise NotInstalledError(f"a catalog of type {kind.value} needs another package: {error}") from error
    guarded: Callable[..., _Guarded] = type(class_name, (_Guarded, cls), {})
    return guarded(name, **settings)


class _Guarded(Catalog):
    """Opens a table's files by the executor's settings alone: no answer and no property of a table is used."""

    pinned = ""
    """The folder of the requested table according to its record; "": any."""
    expected = ""
    """The metadata file that the next commit must replace; "": any."""

    def _load_file_io(self, properties: Mapping[str, Any] = EMPTY_DICT, location: str | None = None) -> FileIO:
        check_paths(() if location is None else (location,))
        return super()._load_file_io(EMPTY_DICT, location)

    def _update_and_stage_table(
        self, current_table: Any, table_identifier: Any, requirements: Any, updates: Any
    ) -> Any:
        # The table that the commit has just loaded, and its updates, determine where the metadata are written.
        if current_table is not None:
            check_identity(current_table)
            check_written(current_table, self.pinned)
            check_updates(updates)
            if self.expected and current_table.metadata_location != self.expected:
                raise CommitFailedException(f"the current metadata file is now {current_table.metadata_location}")
        staged = super()._update_and_stage_table(  # type: ignore[misc]
            current_table, table_identifier, requirements, updates
        )
        gone = {i for one in updates if isinstance(one, RemoveSnapshotsUpdate) for i in one.snapshot_ids}
        if gone:
            # pyiceberg would leave a gap, and show another snapshot as current at that time.
            log = log_without(current_table.metadata.snapshot_log, lambda entry: entry.snapshot_id, gone)
            staged.metadata = staged.metadata.model_copy(update={"snapshot_log": log})
        return staged


class GuardedRestCatalog(_Guarded, RestCatalog):
    """A REST catalog that only connects to its configured server."""

    def _fetch_config(self) -> None:
        own, uri = dict(self.properties), self.uri
        super()._fetch_config()
        self.properties = own | {name: self.properties[name] for name in REST_PROPERTIES if name in self.properties}
        self.uri = uri

    def _config_headers(self, session: Session) -> None:
        # Called first for a session: the exchange of credentials for a token follows.
        super()._config_headers(session)
        session.hooks["response"].append(_refuse_redirect)


def _refuse_redirect(response: Response, **_: Any) -> None:
    """Raises RequestException for a redirect, to which requests would send headers and bodies with credentials."""
    if response.is_redirect:
        raise RequestException(
            f"it redirects to {response.headers['location']}, which is not followed: set its final address as its uri"
        )


def check_identity(table: Any) -> None:
    """Raises InvalidArgument if a table's metadata have credentials for its storage: its readers would see them."""
    for name in _CREDENTIALS:
        if name in table.metadata.properties:
            raise InvalidArgument(
                f"the table {'.'.join(table.name())!r} has the property {name}, which is a credential: remove it from "
                "the table, and give credentials to the executors (AWS_ACCESS_KEY_ID and the like)"
            )


def check_written(table: Any, pinned: str = "") -> None:
    """Check a table before pyiceberg writes its metadata.

    Raises InvalidArgument if its properties would redirect the new metadata or run code, or if it is not in the folder
    of the record (``pinned``); UnsafePath if other users may change its metadata folder.
    """
    folder = own_folder(str(table.metadata_location), str(table.metadata.location))
    check_folder(folder, pinned)
    for name, why in _REDIRECTING.items():
        if name in table.metadata.properties:
            raise InvalidArgument(
                f"the table {'.'.join(table.name())!r} has the property {name}, by which pyiceberg would {why} for "
                "this change: remove it from the table first"
            )
    check_metadata_folder(folder)


def check_updates(updates: Iterable[Any]) -> None:
    """Raises InvalidArgument for updates of a table that would redirect its new metadata or run code.

    pyiceberg already applies the updates when it writes the metadata.
    """
    for update in updates:
        if isinstance(update, SetLocationUpdate):
            raise InvalidArgument("distop does not change the location of a table")
        names = update.updates if isinstance(update, SetPropertiesUpdate) else ()
        if refused := sorted({*_REDIRECTING, *_CREDENTIALS}.intersection(names)):
            raise InvalidArgument(f"distop does not set the property {refused[0]} of a table")
