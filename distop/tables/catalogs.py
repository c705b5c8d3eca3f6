"""Iceberg tables that a catalog knows: which metadata file is the current one, and how another takes its place.

A table record says which catalog it is and where. What is secret stands in no record, which everybody may read who
reads etcd: pyiceberg finds it where the code runs, in ``PYICEBERG_CATALOG__<NAME>__…`` or in ``.pyiceberg.yaml``.
"""

from __future__ import annotations

import os
import threading
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any, TypeVar

from distop.core.frozen import frozen
from distop.core.texts import shown
from distop.errors import DistopError, InvalidArgument, NotAllowed, OutcomeUnknown, TableUnavailable
from distop.tables.secrets import check_place, holds_secret

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from distop.core.model import TableRecord

T = TypeVar("T")

TYPES = ("rest", "sql", "hive", "glue", "dynamodb", "bigquery", "hadoop")
"""``hadoop`` is none of pyiceberg's: a folder in which each table has the folder of its name."""
PATIENCE = 60.0
"""Seconds that a catalog is given for an answer: pyiceberg itself would wait for ever."""

_PROPERTIES = ("name", "type", "uri", "warehouse")
_STEP = 0.25
"""Seconds between two looks at whether to go on waiting."""


@frozen
class Catalog:
    """A catalog as a table record names it. ``properties``: ``type``, ``uri`` and ``warehouse``, where they are given;
    the rest is of pyiceberg's configuration of this name.
    """

    name: str
    properties: Mapping[str, str]

    @classmethod
    def of(cls, option: Any) -> Catalog:
        """From the option ``catalog``: a name, or an object. Raises InvalidArgument for what is neither, and for
        anything that is secret, or may be.
        """
        given = {"name": option} if isinstance(option, str) else option
        if not isinstance(given, dict) or not given:
            raise InvalidArgument(
                "the table option 'catalog' must be the name of a catalog, or an object such as "
                '{"name": "prod", "type": "rest", "uri": "https://…"}'
            )
        for name, value in given.items():
            if name not in _PROPERTIES:
                raise InvalidArgument(
                    f"the property {shown(name)} of a catalog does not belong into a table record (known: "
                    f"{', '.join(_PROPERTIES)}): {_elsewhere(given, name)}"
                )
            if not isinstance(value, str) or not value:
                raise InvalidArgument(f"the property {shown(name)} of a catalog must be a text, not {shown(value)}")
            if name == "uri" and holds_secret(value):
                raise InvalidArgument(
                    "the uri of a catalog with a password, a key or a token in it does not belong into a table record: "
                    f"leave it out, and {_elsewhere(given, 'uri')}"
                )
            check_place(f"the {name} of a catalog", value)
        kind = given.get("type")
        if kind is not None and kind not in TYPES:
            raise InvalidArgument(f"the catalog type {shown(kind)} is not known (known: {', '.join(TYPES)})")
        if kind == "hadoop" and not given.get("warehouse"):
            raise InvalidArgument("a catalog of type hadoop needs its warehouse: the folder that holds the tables")
        if "name" not in given and kind != "hadoop":
            raise InvalidArgument("the table option 'catalog' must have a name: pyiceberg's settings are found by it")
        return cls(given.get("name", ""), {n: v for n, v in given.items() if n != "name"})

    @property
    def hadoop(self) -> bool:
        """Its tables are folders of their names."""
        return self.properties.get("type") == "hadoop"

    def __str__(self) -> str:
        where = self.properties.get("uri") or self.properties.get("warehouse")
        return f"the catalog {self.name!r}" + (f" ({where})" if where else "")


def _elsewhere(given: Mapping[str, Any], name: str) -> str:
    """Where a property is to be given that is in no record."""
    known = str(given.get("name") or "NAME")
    catalog = ("NAME" if holds_secret(known) else known).upper().replace("-", "_")
    variable = f"PYICEBERG_CATALOG__{catalog}__{name.upper().replace('.', '__').replace('-', '_')}"
    return f"give it to the executors as {variable}, or in .pyiceberg.yaml"


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

    def commit(self, updates: Sequence[Any], requirements: Sequence[Any] = ()) -> str:
        """Change the table, if it is still the one that was opened, with the same snapshot on its main branch, the same
        schema, and what ``requirements`` want besides; the new metadata file. It is opened as that from then on.
        Whether to go on is asked before it, and not while its answer is waited for.

        Raises Changed, and OutcomeUnknown where the answer did not come: the same commit again then either does it, or
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
        loaded = _answer(lambda: _load(catalog, name), check)
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
        yield CatalogTable(catalog, loaded, check)
    finally:
        loaded.catalog.close()


def _load(catalog: Catalog, name: tuple[str, ...]) -> Any:
    from pyiceberg.catalog import load_catalog
    from pyiceberg.utils.config import Config

    # Reading makes no tables in a data base, and no data base.
    settings = Config().get_catalog_config(catalog.name) or {}
    _check_sqlite(str(catalog.properties.get("uri") or settings.get("uri") or ""))
    found = load_catalog(catalog.name, **{"init_catalog_tables": "false", **catalog.properties})
    try:
        return found.load_table(name)
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
        hint = _elsewhere({"name": catalog.name}, "token")
        return TableUnavailable(f"{what} refuses what this node logs in with ({line}): {hint}")
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
