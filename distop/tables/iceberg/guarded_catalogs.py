"""pyiceberg's catalogs, which take of a server's answers and of table properties only what is listed here.

By itself pyiceberg lets both override its settings: they may name the classes that it imports (``py-io-impl``,
``auth``), and the hosts that get its tokens (``uri``, ``oauth2-server-uri``, ``s3.endpoint``).
"""

from __future__ import annotations

import re
from importlib import import_module
from typing import TYPE_CHECKING, Any

from pyiceberg.catalog import Catalog, CatalogType, infer_catalog_type
from pyiceberg.catalog.rest import RestCatalog
from pyiceberg.exceptions import NotInstalledError
from pyiceberg.table.update import SetLocationUpdate, SetPropertiesUpdate
from pyiceberg.typedef import EMPTY_DICT
from requests import RequestException

from distop.errors import InvalidArgument
from distop.storage.confinement import check_folder, own_folder
from distop.storage.storage_urls import check_paths
from distop.tables.iceberg.bounded_io import bounded
from distop.tables.iceberg.written_folders import check_metadata_folder

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from pyiceberg.io import FileIO
    from requests import Response, Session

REST_PROPERTIES = ("namespace-separator", "prefix")
"""What a REST catalog may set of its client, by ``/v1/config``: how the paths on its own server are written."""
_CREDENTIALS = (
    *("s3.access-key-id", "s3.secret-access-key", "s3.session-token"),
    *("gcs.oauth2.token", "gcs.oauth2.token-expires-at", "adls.sas-token"),
)
STORAGE_PROPERTIES = ("client.region", "s3.region", *_CREDENTIALS)
"""What a catalog may set of the storage of a table: credentials for it, and its region."""

_LEADING = {
    "write.py-location-provider.impl": "run code",
    "write.metadata.path": "write to a folder that the table names",
}
"""Properties of tables that pyiceberg obeys when it writes metadata, and what it would do."""
_REGIONS = ("client.region", "s3.region")
_REGION = re.compile(r"[A-Za-z0-9-]+")
"""It becomes a part of the host's name."""
_OTHERS = {
    CatalogType.SQL: ("sql", "SqlCatalog"),
    CatalogType.HIVE: ("hive", "HiveCatalog"),
    CatalogType.GLUE: ("glue", "GlueCatalog"),
    CatalogType.DYNAMODB: ("dynamodb", "DynamoDbCatalog"),
    CatalogType.BIGQUERY: ("bigquery_metastore", "BigQueryMetastoreCatalog"),
}
"""Modules and classes of the catalogs that need other packages."""


def made(name: str, settings: Mapping[str, Any]) -> _Guarded:
    """The catalog of these settings, with what its type needs. Raises what pyiceberg raises: ValueError for settings
    that do not fit, NotInstalledError, and errors of the connection.
    """
    told = settings.get("type")
    settings = bounded(dict(settings))
    kind = CatalogType(str(told).lower()) if told else infer_catalog_type(name, dict(settings))
    if kind in (CatalogType.REST, CatalogType.SQL, CatalogType.HIVE) and not settings.get("uri"):
        raise ValueError("URI missing")
    if kind == CatalogType.REST:
        return GuardedRestCatalog(name, **settings)
    if kind not in _OTHERS:
        raise ValueError(f"the type {told!r} is not supported")
    module, class_name = _OTHERS[kind]
    try:
        cls = getattr(import_module(f"pyiceberg.catalog.{module}"), class_name)
    except ImportError as error:
        raise NotInstalledError(f"a catalog of type {kind.value} needs another package: {error}") from error
    guarded: Callable[..., _Guarded] = type(class_name, (_Guarded, cls), {})
    return guarded(name, **settings)


class _Guarded(Catalog):
    """Opens the files of a table by the settings, and by what is listed of its properties."""

    pinned = ""
    """The folder that the one table which is asked for lies in, by its record; "": any."""

    def _load_file_io(self, properties: Mapping[str, Any] = EMPTY_DICT, location: str | None = None) -> FileIO:
        check_paths(() if location is None else (location,))
        return super()._load_file_io(storage_properties(properties), location)

    def _update_and_stage_table(
        self, current_table: Any, table_identifier: Any, requirements: Any, updates: Any
    ) -> Any:
        # The table as a commit has just loaded it, and what becomes of it, decide where its metadata go.
        if current_table is not None:
            check_identity(current_table)
            check_written(current_table, self.pinned)
            check_updates(updates)
        return super()._update_and_stage_table(  # type: ignore[misc]
            current_table, table_identifier, requirements, updates
        )


class GuardedRestCatalog(_Guarded, RestCatalog):
    """A REST catalog that speaks to its configured server alone."""

    def _fetch_config(self) -> None:
        own, uri = dict(self.properties), self.uri
        super()._fetch_config()
        self.properties = own | {name: self.properties[name] for name in REST_PROPERTIES if name in self.properties}
        self.uri = uri

    def _config_headers(self, session: Session) -> None:
        # The first that is done with a session: credentials are exchanged for a token before it is complete.
        super()._config_headers(session)
        session.hooks["response"].append(_refuse_redirect)


def _refuse_redirect(response: Response, **_: Any) -> None:
    """Raises RequestException where the server sends its client elsewhere: requests would repeat headers and bodies
    there, with the credentials in them.
    """
    if response.is_redirect:
        raise RequestException(
            f"it redirects to {response.headers['location']}, which is not followed: give its final address as its uri"
        )


def check_identity(table: Any) -> None:
    """Raises InvalidArgument where a table's own metadata say as whom its storage is opened: only a server may."""
    for name in _CREDENTIALS:
        if name in table.metadata.properties:
            raise InvalidArgument(
                f"the table {'.'.join(table.name())!r} has the property {name}, which is a credential: remove it from "
                "the table, and set it for the catalog"
            )


def check_written(table: Any, pinned: str = "") -> None:
    """Raises InvalidArgument where a table's own metadata have pyiceberg write the next ones elsewhere, or run code, or
    where they do not lie in the folder of the record (``pinned``); UnsafePath where they go to a folder on a disk that
    others may change.
    """
    folder = own_folder(str(table.metadata_location), str(table.metadata.location))
    check_folder(folder, pinned)
    for name, why in _LEADING.items():
        if name in table.metadata.properties:
            raise InvalidArgument(
                f"the table {'.'.join(table.name())!r} has the property {name}, by which pyiceberg would {why} for "
                "this change: remove it from the table first"
            )
    check_metadata_folder(folder)


def check_updates(updates: Iterable[Any]) -> None:
    """Raises InvalidArgument for a change of a table by which pyiceberg would write its next metadata elsewhere, or run
    code: it goes by the table as it is to be.
    """
    for update in updates:
        if isinstance(update, SetLocationUpdate):
            raise InvalidArgument("the location of a table is not changed by distop")
        names = update.updates if isinstance(update, SetPropertiesUpdate) else ()
        if refused := sorted({*_LEADING, *_CREDENTIALS}.intersection(names)):
            raise InvalidArgument(f"the property {refused[0]} of a table is not set by distop")


def storage_properties(properties: Mapping[str, Any]) -> dict[str, Any]:
    """Those of a table's properties, or of a server's answer, that storage is opened with."""
    return {
        name: value
        for name, value in properties.items()
        if name in STORAGE_PROPERTIES and (name not in _REGIONS or _REGION.fullmatch(str(value)))
    }
