"""Iceberg tables of a catalog: reads the current metadata file, and commits a new one.

A table record has only the name of its catalog. The catalog's type, addresses and secrets come from pyiceberg's
configuration on the node: ``PYICEBERG_CATALOG__<NAME>__…``, or ``.pyiceberg.yaml`` in ``PYICEBERG_HOME`` or the user's
home. A file in the current folder, which pyiceberg would read as well, is ignored.
"""

from __future__ import annotations

import os
import re
import threading
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from distop.errors import DistopError, InvalidArgument, NotAllowed, OutcomeUnknown, TableUnavailable
from distop.protocol.frozen import frozen
from distop.runtime import secret_settings
from distop.storage.confinement import check_folder, table_of
from distop.storage.store_errors import StoreError, unavailable

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from distop.protocol.records import TableRecord

T = TypeVar("T")

TYPES = ("rest", "sql", "hive", "glue", "dynamodb", "bigquery", "hadoop")
"""Supported types. ``hadoop`` is distop's own: a folder with one folder per table, by the table's name."""
ANSWER_TIMEOUT = 60.0
"""Time-out in seconds for a catalog's answer: pyiceberg itself has none."""

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]*")
_FILE = ".pyiceberg.yaml"
_PAIRS = (("username", "password"), ("client_id", "client_secret"))
"""Settings below ``auth`` that pyiceberg sends together."""
_STEP = 0.25
"""Seconds between two checks whether to stop waiting."""


@frozen
class Catalog:
    """A catalog by its name in a table record."""

    name: str

    @classmethod
    def of(cls, option: Any) -> Catalog:
        """The catalog of the option ``catalog``, which is not trusted. Raises InvalidArgument for an invalid name."""
        if isinstance(option, dict):
            raise InvalidArgument(
                "the table option 'catalog' must be only the name of a catalog: give its type, uri, warehouse and "
                f"credentials to the executors, {_where('NAME')}"
            )
        if not isinstance(option, str) or not _NAME.fullmatch(option):
            raise InvalidArgument(
                "the table option 'catalog' must be the name of a catalog with letters, digits, '-' and '_'; give its "
                f"settings under this name to the executors, {_where('NAME')}"
            )
        return cls(option)

    def settings(self) -> dict[str, Any]:
        """This node's settings of the catalog. Raises TableUnavailable if it has none, or an unknown type."""
        found = _settings(self.name)
        if not found:
            raise TableUnavailable(f"{self} is not configured on this node: give its settings {_where(self.name)}")
        kind = found.get("type")
        if kind is not None and str(kind).lower() not in TYPES:
            raise TableUnavailable(f"{self} has the unknown type {kind!r} on this node (known: {', '.join(TYPES)})")
        return found

    def warehouse(self) -> str | None:
        """The folder of the tables of a catalog of type ``hadoop``; None for other types. Raises TableUnavailable."""
        settings = self.settings()
        if str(settings.get("type")).lower() != "hadoop":
            return None
        folder = str(settings.get("warehouse") or "").rstrip("/")
        if not folder.startswith("/") and "://" not in folder:
            raise TableUnavailable(
                f"{self} of type hadoop needs its warehouse on this node, an absolute path or a URL: give it "
                f"{_where(self.name, 'warehouse')}"
            )
        return folder

    def __str__(self) -> str:
        return f"the catalog {self.name!r}"


def _settings(name: str) -> dict[str, Any]:
    """The settings of a catalog in pyiceberg's configuration. Raises TableUnavailable if it cannot be read.

    A file in the current folder is ignored: a user who can write there could choose the host that gets the tokens of
    the environment. Secrets in the settings are redacted in texts from now on, since a server may quote them.
    """
    import strictyaml
    from pyiceberg.utils.config import Config

    config: dict[str, Any] = {}
    for folder in (os.environ.get("PYICEBERG_HOME"), os.path.expanduser("~")):  # noqa: PTH111
        if not folder or not (path := Path(folder) / _FILE).is_file():
            continue
        try:
            config = _lower(strictyaml.load(path.read_text(encoding="utf-8")).data)
        except (OSError, ValueError, strictyaml.YAMLError) as error:
            raise TableUnavailable(f"cannot read the file {path}: {_line(error)}") from error
        if config:
            break
    try:
        found = Config._from_environment_variables(config).get("catalog")
    except ValueError as error:
        raise TableUnavailable(f"cannot read pyiceberg's settings on this node: {_line(error)}") from error
    of = found.get(name.lower()) if isinstance(found, dict) else None
    settings = dict(of) if isinstance(of, dict) else {}
    _hide(settings)
    return settings


def _hide(settings: dict[str, Any], within: str = "") -> None:
    leaves: dict[str, str] = {}
    for name, value in settings.items():
        if isinstance(value, dict):
            _hide(value, f"{within}{name}.")
        else:
            leaves[f"{within}{name}"] = str(value)
    secret_settings.hide_variables(leaves)
    pairs = [(settings.get(user), settings.get(word)) for user, word in _PAIRS]
    secret_settings.hide(secret_settings.basic(str(user), str(word)) for user, word in pairs if user and word)


def _lower(mapping: Any) -> dict[str, Any]:
    """A mapping with its names in lower case, like pyiceberg's; empty if the value is not a mapping."""
    if not isinstance(mapping, dict):
        return {}
    return {str(name).lower(): _lower(value) if isinstance(value, dict) else value for name, value in mapping.items()}


def _where(name: str, setting: str = "") -> str:
    """The places for settings of a catalog, for an error text."""
    variable = f"PYICEBERG_CATALOG__{name.upper().replace('-', '_')}__{setting.upper() or '…'}"
    return f"as {variable} in the environment, or in {_FILE} in the home or in PYICEBERG_HOME"


def identifier(table: TableRecord) -> tuple[str, ...]:
    """The parts of the table's name in its catalog. Raises InvalidArgument for an invalid name."""
    parts = tuple(table.location.split("."))
    if len(parts) < 2 or not all(parts) or any(c in table.location for c in "/\\\0"):
        raise InvalidArgument(
            f"the location {table.location!r} is not the name of a table in a catalog: write namespace.table"
        )
    return parts


class NoTable(InvalidArgument):
    """The catalog does not have the table."""


class Changed(NotAllowed):
    """Another process has committed a change of the table meanwhile. Nothing was changed."""


class CatalogTable:
    """The state of a catalog's table when it was opened. ``loaded``: pyiceberg's Table."""

    def __init__(self, catalog: Catalog, loaded: Any, check: Callable[[], None]) -> None:
        self._catalog = catalog
        self._check = check
        self.loaded = loaded

    @property
    def source(self) -> str:
        """The current metadata file."""
        return str(self.loaded.metadata_location)

    @property
    def metadata(self) -> Any:
        """The content of the current metadata file."""
        return self.loaded.metadata

    @property
    def writes_metadata(self) -> bool:
        """Whether the catalog's server writes the metadata files; otherwise pyiceberg writes them here."""
        from pyiceberg.catalog.rest import RestCatalog

        return isinstance(self.loaded.catalog, RestCatalog)

    def commit(self, updates: Sequence[Any], requirements: Sequence[Any] = (), *, exact: bool = False) -> str:
        """Commit changes of the table; returns the new metadata file, which is then this object's state.

        The commit requires the opened table, its snapshot on the main branch, its schema, and ``requirements``. A stop
        is checked before the commit, but not during it. ``exact``: it also requires the opened metadata file, if
        pyiceberg writes the new one.

        Raises InvalidArgument if pyiceberg would write the metadata to another folder (``guarded_catalogs``), Changed,
        and OutcomeUnknown without an answer: the same commit again then either succeeds or is rejected, and opening the
        table again shows whether it was committed.
        """
        from pyiceberg.exceptions import CommitFailedException, CommitStateUnknownException, NoSuchTableError
        from pyiceberg.table.update import AssertCurrentSchemaId, AssertRefSnapshotId, AssertTableUUID

        metadata = self.metadata
        current = metadata.current_snapshot()
        same = (
            AssertTableUUID(uuid=metadata.table_uuid),
            AssertRefSnapshotId.model_validate({"ref": "main", "snapshot-id": current and current.snapshot_id}),
            AssertCurrentSchemaId.model_validate({"current-schema-id": metadata.current_schema_id}),
            *requirements,
        )

        def ask() -> Any:
            self.loaded.catalog.expected = self.source if exact else ""
            return self.loaded.catalog.commit_table(self.loaded, same, tuple(updates))

        name = ".".join(self.loaded.name())
        # After it was sent, wait for the answer: otherwise the outcome would be unknown.
        self._check()
        try:
            done = _answer(ask, lambda: None)
        except Exception as error:
            if isinstance(error, CommitFailedException | NoSuchTableError) or _status(error) == 404:
                text = f"the table {name!r} was changed by another process meanwhile: {_line(error)}"
                raise Changed(text) from error
            explained = _explained(error, self._catalog, name)
            if isinstance(error, CommitStateUnknownException | TimeoutError) or isinstance(explained, _Unanswered):
                text = f"whether the change of {name!r} was committed is unknown: {explained or _line(error)}"
                raise OutcomeUnknown(text) from error
            if explained is None:
                raise
            raise explained from error
        self.loaded.metadata, self.loaded.metadata_location = done.metadata, done.metadata_location
        return self.source

    def drop(self) -> None:
        """Remove the table from the catalog; its files stay. A stop is checked before, but not during it.

        Raises NoTable, OutcomeUnknown without an answer, InvalidArgument and TableUnavailable if the catalog refuses.
        """
        name = ".".join(self.loaded.name())
        self._check()
        try:
            _answer(lambda: self.loaded.catalog.drop_table(self.loaded.name()), lambda: None)
        except Exception as error:
            explained = _explained(error, self._catalog, name)
            if isinstance(error, TimeoutError) or isinstance(explained, _Unanswered):
                text = f"whether {name!r} was dropped is unknown: {explained or _line(error)}"
                raise OutcomeUnknown(text) from error
            if explained is None:
                raise
            raise explained from error


@contextmanager
def opened(table: TableRecord, check: Callable[[], None] = lambda: None) -> Iterator[CatalogTable]:
    """Open the current state of a table with the option ``catalog``.

    ``check`` is called during the wait for the catalog, and raises to stop it. Raises InvalidArgument if the catalog
    does not have the table, TableUnavailable if the catalog or the table's metadata cannot be read from here, for
    example without credentials.
    """
    catalog = Catalog.of(table.options.get("catalog"))
    name = identifier(table)
    try:
        loaded = _answer(lambda: _load(catalog, name, str(table.options.get("folder") or "")), check)
    except StoreError as error:
        raise _explained(error, catalog, table.location) or error from error
    except DistopError:
        raise
    except TimeoutError as error:
        raise TableUnavailable(f"{catalog} did not answer within {ANSWER_TIMEOUT:g} s") from error
    except Exception as error:
        explained = _explained(error, catalog, table.location)
        if explained is None:
            raise
        raise explained from error
    try:
        if not loaded.metadata_location:
            raise InvalidArgument(f"{catalog} has no metadata file for the table {table.location!r}")
        check_folder(table_of(str(loaded.metadata_location)), loaded.catalog.pinned)
        yield CatalogTable(catalog, loaded, check)
    finally:
        loaded.catalog.close()


def _load(catalog: Catalog, name: tuple[str, ...], pinned: str) -> Any:
    from distop.tables.iceberg.guarded_catalogs import check_identity, made

    settings = catalog.settings()
    _check_sqlite(str(settings.get("uri") or ""))
    # Reading must not create tables in a database, or a database.
    found = made(catalog.name, {"init_catalog_tables": "false", **settings})
    found.pinned = pinned
    try:
        loaded = found.load_table(name)
        check_identity(loaded)
        return loaded
    except BaseException:
        with suppress(Exception):
            found.close()
        raise


def _check_sqlite(uri: str) -> None:
    """Raises TableUnavailable if the database file does not exist: SQLite would create it."""
    scheme, _, path = uri.partition("://")
    file = path[1:].partition("?")[0]
    if scheme.startswith("sqlite") and file and not os.path.exists(file):  # noqa: PTH110
        raise TableUnavailable(f"the database file {file!r} does not exist")


class _Unanswered(TableUnavailable):
    """The catalog gave no answer, so the outcome of a request is unknown."""


def _explained(error: Exception, catalog: Catalog, name: str) -> DistopError | None:
    """The DistopError for an error of pyiceberg, by whether another node or attempt may succeed; None if unknown."""
    from pyiceberg import exceptions as e
    from requests import RequestException

    what, line = str(catalog), _line(error)
    if isinstance(error, e.NoSuchTableError | e.NoSuchNamespaceError | e.NoSuchIdentifierError):
        return NoTable(f"{what} has no table {name!r}: it was dropped, renamed or never existed ({line})")
    if isinstance(error, e.UnauthorizedError | e.ForbiddenError | e.AuthorizationExpiredError | e.OAuthError):
        return TableUnavailable(
            f"{what} rejects this node's credentials ({line}): give it a token {_where(catalog.name, 'token')}"
        )
    if isinstance(error, e.NotInstalledError):
        return TableUnavailable(f"{what} cannot be used on this node: {line}")
    if isinstance(error, e.ServiceUnavailableError | e.ServerError | e.TooManyRequestsError | RequestException):
        return _Unanswered(f"{what} cannot be reached: {line}")
    if isinstance(error, e.RESTError):
        return InvalidArgument(f"{what} rejected the request for the table {name!r}: {line}")
    if _is_sql_error(error):
        return _Unanswered(f"{what} cannot be read: {line}")
    if isinstance(error, OSError):
        return unavailable(f"the metadata of the table {name!r} of {what} cannot be read: {line}", error)
    if isinstance(error, ValueError | e.ValidationError | e.NoSuchPropertyException):
        return TableUnavailable(f"{what} cannot be used with the settings of this node: {line}")
    return None


def _status(error: Exception) -> int:
    """The HTTP status of an error; 0 if it has none."""
    return getattr(getattr(error.__cause__, "response", None), "status_code", 0)


def _is_sql_error(error: Exception) -> bool:
    """Whether SQLAlchemy raised an error; by its module, since SQLAlchemy may not be installed."""
    return any(kind.__module__.startswith("sqlalchemy.") for kind in type(error).__mro__)


def _line(error: BaseException) -> str:
    """The first line of an error's message, without the SQL statement."""
    text = str(error).strip()
    return text.split("\n")[0] if text else type(error).__name__


def _answer(ask: Callable[[], T], check: Callable[[], None]) -> T:
    """Call ``ask`` in a thread; returns its result or raises its error. Raises TimeoutError if it takes too long.

    The thread is abandoned then: a library that waits for a server cannot be interrupted.
    """
    answer: Future[T] = Future()

    def run() -> None:
        try:
            answer.set_result(ask())
        except BaseException as error:
            answer.set_exception(error)

    threading.Thread(target=run, name="catalog", daemon=True).start()
    for _ in range(max(1, int(ANSWER_TIMEOUT / _STEP))):
        try:
            return answer.result(timeout=_STEP)
        except TimeoutError:
            if answer.done():
                return answer.result()
        check()
    raise TimeoutError("there was no answer")
