"""Iceberg tables that a catalog knows: which metadata file is the current one, and how another takes its place.

A table record names a catalog, and nothing else of it. Its type, its addresses and what is secret come from pyiceberg's
configuration where the code runs: ``PYICEBERG_CATALOG__<NAME>__…``, or ``.pyiceberg.yaml`` in ``PYICEBERG_HOME`` or the
user's home. That of the current folder, which pyiceberg would read as well, is not read.
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

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from distop.protocol.records import TableRecord

T = TypeVar("T")

TYPES = ("rest", "sql", "hive", "glue", "dynamodb", "bigquery", "hadoop")
"""``hadoop`` is none of pyiceberg's: a folder in which each table has the folder of its name."""
PATIENCE = 60.0
"""Seconds that a catalog is given for an answer: pyiceberg itself would wait for ever."""

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]*")
_FILE = ".pyiceberg.yaml"
_PAIRS = (("username", "password"), ("client_id", "client_secret"))
"""Settings below ``auth`` that pyiceberg sends together."""
_STEP = 0.25
"""Seconds between two looks at whether to go on waiting."""


@frozen
class Catalog:
    """A catalog, as a table record names it."""

    name: str

    @classmethod
    def of(cls, option: Any) -> Catalog:
        """From the option ``catalog``. Raises InvalidArgument for what is no name, also where it is read from etcd."""
        if isinstance(option, dict):
            raise InvalidArgument(
                "the table option 'catalog' must be the name of a catalog alone: its type, uri, warehouse and "
                f"credentials belong into the settings of the executors, {_where('NAME')}"
            )
        if not isinstance(option, str) or not _NAME.fullmatch(option):
            raise InvalidArgument(
                "the table option 'catalog' must be the name of a catalog, of letters, digits, '-' and '_': "
                f"its settings are found by it, {_where('NAME')}"
            )
        return cls(option)

    def settings(self) -> dict[str, Any]:
        """This node's settings of the catalog. Raises TableUnavailable where it has none, or no known type."""
        found = _settings(self.name)
        if not found:
            raise TableUnavailable(f"{self} is not configured on this node: give it its settings {_where(self.name)}")
        kind = found.get("type")
        if kind is not None and str(kind).lower() not in TYPES:
            raise TableUnavailable(f"{self} has the type {kind!r} on this node, which is not one of {', '.join(TYPES)}")
        return found

    def warehouse(self) -> str | None:
        """The folder of the tables of a catalog of type ``hadoop``; None for other types. Raises TableUnavailable."""
        settings = self.settings()
        if str(settings.get("type")).lower() != "hadoop":
            return None
        folder = str(settings.get("warehouse") or "").rstrip("/")
        if not folder.startswith("/") and "://" not in folder:
            raise TableUnavailable(
                f"{self} is of type hadoop, and needs its warehouse on this node, as an absolute path or a URL: "
                f"give it {_where(self.name, 'warehouse')}"
            )
        return folder

    def __str__(self) -> str:
        return f"the catalog {self.name!r}"


def _settings(name: str) -> dict[str, Any]:
    """What pyiceberg's configuration has of a catalog, but for a file in the current folder: whoever may write there
    would choose a host for the tokens in the environment. What is secret of it is hidden in texts from now on: a server
    may quote it. Raises TableUnavailable where it cannot be read.
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
            raise TableUnavailable(f"the file {path} cannot be read: {_line(error)}") from error
        if config:
            break
    try:
        found = Config._from_environment_variables(config).get("catalog")
    except ValueError as error:
        raise TableUnavailable(f"pyiceberg's settings on this node cannot be read: {_line(error)}") from error
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


def _lower(told: Any) -> dict[str, Any]:
    """With names in lower case, as pyiceberg has them; nothing of what is no mapping."""
    if not isinstance(told, dict):
        return {}
    return {str(name).lower(): _lower(value) if isinstance(value, dict) else value for name, value in told.items()}


def _where(name: str, setting: str = "") -> str:
    """Where the settings of a catalog are given."""
    variable = f"PYICEBERG_CATALOG__{name.upper().replace('-', '_')}__{setting.upper() or '…'}"
    return f"as {variable} in the environment, or in {_FILE} in the home or in PYICEBERG_HOME"


def identifier(table: TableRecord) -> tuple[str, ...]:
    """The parts of the name by which the catalog knows the table. Raises InvalidArgument for what is no name."""
    parts = tuple(table.location.split("."))
    if len(parts) < 2 or not all(parts) or any(c in table.location for c in "/\\\0"):
        raise InvalidArgument(
            f"the location {table.location!r} is no name of a table in a catalog: write it as namespace.table"
        )
    return parts


class Changed(NotAllowed):
    """The table is not what the change was made from: somebody else has committed. Nothing was changed."""


class CatalogTable:
    """A table as its catalog had it when it was opened. ``loaded``: pyiceberg's Table."""

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
        """What stands in it."""
        return self.loaded.metadata

    @property
    def writes_metadata(self) -> bool:
        """Whether the catalog's server writes metadata files by itself; else pyiceberg does here."""
        from pyiceberg.catalog.rest import RestCatalog

        return isinstance(self.loaded.catalog, RestCatalog)

    def commit(self, updates: Sequence[Any], requirements: Sequence[Any] = ()) -> str:
        """Change the table, if it is still the one that was opened, with the same snapshot on its main branch, the same
        schema, and what ``requirements`` want besides; the new metadata file. It is opened as that from then on.
        Whether to go on is asked before it, and not while its answer is waited for.

        Raises InvalidArgument where pyiceberg would write the metadata elsewhere (``guarded_catalogs``), Changed, and
        OutcomeUnknown where the answer did not come: the same commit again then either does it, or
        is refused, and whoever opens the table anew sees whether it was done.
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
            return self.loaded.catalog.commit_table(self.loaded, same, tuple(updates))

        name = ".".join(self.loaded.name())
        # Once it is on its way it is waited for: whoever stops then would not know what became of it.
        self._check()
        try:
            done = _answer(ask, lambda: None)
        except Exception as error:
            if isinstance(error, CommitFailedException | NoSuchTableError) or _status(error) == 404:
                text = f"the table {name!r} has been changed by somebody else meanwhile: {_line(error)}"
                raise Changed(text) from error
            told = _told(error, self._catalog, name)
            if isinstance(error, CommitStateUnknownException | TimeoutError) or isinstance(told, _Unanswered):
                text = f"whether the change of {name!r} was committed is not known: {told or _line(error)}"
                raise OutcomeUnknown(text) from error
            if told is None:
                raise
            raise told from error
        self.loaded.metadata, self.loaded.metadata_location = done.metadata, done.metadata_location
        return self.source


@contextmanager
def opened(table: TableRecord, check: Callable[[], None] = lambda: None) -> Iterator[CatalogTable]:
    """The table of a record with the option ``catalog``, as the catalog has it now. ``check`` is called while it is
    waited for, and raises where that is to stop.

    Raises InvalidArgument for what the catalog does not have, TableUnavailable where it, or the table's metadata,
    cannot be reached or read from here, be it for want of credentials.
    """
    catalog = Catalog.of(table.options.get("catalog"))
    name = identifier(table)
    try:
        loaded = _answer(lambda: _load(catalog, name, str(table.options.get("folder") or "")), check)
    except DistopError:
        raise
    except TimeoutError as error:
        raise TableUnavailable(f"{catalog} has not answered for {PATIENCE:g} s") from error
    except Exception as error:
        told = _told(error, catalog, table.location)
        if told is None:
            raise
        raise told from error
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
    # Reading makes no tables in a data base, and no data base.
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
    """Raises TableUnavailable where there is no data base in a file: SQLite would make it."""
    scheme, _, path = uri.partition("://")
    file = path[1:].partition("?")[0]
    if scheme.startswith("sqlite") and file and not os.path.exists(file):  # noqa: PTH110
        raise TableUnavailable(f"there is no data base at {file!r}")


class _Unanswered(TableUnavailable):
    """The catalog gave no answer: what it did is not known."""


def _told(error: Exception, catalog: Catalog, name: str) -> DistopError | None:
    """What went wrong, in a sentence, by whether another node or attempt may do better; None: it is not known."""
    from pyiceberg import exceptions as e
    from requests import RequestException

    what, line = str(catalog), _line(error)
    if isinstance(error, e.NoSuchTableError | e.NoSuchNamespaceError | e.NoSuchIdentifierError):
        return InvalidArgument(f"{what} has no table {name!r}: it was dropped or renamed, or never was there ({line})")
    if isinstance(error, e.UnauthorizedError | e.ForbiddenError | e.AuthorizationExpiredError | e.OAuthError):
        return TableUnavailable(
            f"{what} refuses what this node logs in with ({line}): give it a token {_where(catalog.name, 'token')}"
        )
    if isinstance(error, e.NotInstalledError):
        return TableUnavailable(f"{what} cannot be asked from this node: {line}")
    if isinstance(error, e.ServiceUnavailableError | e.ServerError | e.TooManyRequestsError | RequestException):
        return _Unanswered(f"{what} cannot be reached: {line}")
    if isinstance(error, e.RESTError):
        return InvalidArgument(f"{what} refuses to be asked for the table {name!r}: {line}")
    if _of_sql(error):
        return _Unanswered(f"{what} cannot be read: {line}")
    if isinstance(error, OSError):
        return TableUnavailable(f"the metadata of the table {name!r} of {what} cannot be read: {line}")
    if isinstance(error, ValueError | e.ValidationError | e.NoSuchPropertyException):
        return TableUnavailable(f"{what} is none that can be asked with the settings of this node: {line}")
    return None


def _status(error: Exception) -> int:
    """The HTTP status that an error was made of; 0: of none."""
    return getattr(getattr(error.__cause__, "response", None), "status_code", 0)


def _of_sql(error: Exception) -> bool:
    """By its module: SQLAlchemy is there only where a catalog needs it."""
    return any(kind.__module__.startswith("sqlalchemy.") for kind in type(error).__mro__)


def _line(error: BaseException) -> str:
    """The first line of what it says, without what a statement was made of."""
    text = str(error).strip()
    return text.split("\n")[0] if text else type(error).__name__


def _answer(ask: Callable[[], T], check: Callable[[], None]) -> T:
    """What ``ask`` gives, or raises; TimeoutError where that takes too long. It runs in a thread that is left alone
    then: nothing interrupts a library that waits for a server.
    """
    answer: Future[T] = Future()

    def run() -> None:
        try:
            answer.set_result(ask())
        except BaseException as error:
            answer.set_exception(error)

    threading.Thread(target=run, name="catalog", daemon=True).start()
    for _ in range(max(1, int(PATIENCE / _STEP))):
        try:
            return answer.result(timeout=_STEP)
        except TimeoutError:
            if answer.done():
                return answer.result()
        check()
    raise TimeoutError("there was no answer")
