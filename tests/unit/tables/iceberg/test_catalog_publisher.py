"""Which manifests a commit through a catalog removes: only those of a commit that was certainly refused."""

from __future__ import annotations

from contextlib import contextmanager
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any
from unittest.mock import MagicMock

import pytest

from distop.errors import InvalidArgument, OutcomeUnknown, TableUnavailable
from distop.tables.commits import CommitUnknown, Conflict, Head
from distop.tables.iceberg import catalog_publisher, iceberg_catalogs
from distop.tables.iceberg.catalog_publisher import CatalogPublisher
from tests.unit.tables.iceberg.test_tables_iceberg import record

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


class Refusing:
    """A table whose commits end with an error. Only its commits are asked for."""

    source = "/t/metadata/v1.metadata.json"
    metadata = SimpleNamespace(last_column_id=1, default_spec_id=0, default_sort_order_id=0)

    def __init__(self, error: Exception) -> None:
        self._error = error

    def commit(self, *_: Any, **__: Any) -> str:
        raise self._error


class Production:
    """A transaction without a JVM."""

    discarded = 0

    def __init__(self, *_: Any) -> None:
        Production.discarded = 0

    def changes(self) -> list[Any]:
        return []

    def discard(self) -> None:
        Production.discarded += 1


@pytest.mark.parametrize(
    ("error", "raised", "removed"),
    [
        (iceberg_catalogs.Changed("another writer"), Conflict, 1),
        (InvalidArgument("the catalog rejected it"), InvalidArgument, 1),
        (OutcomeUnknown("no answer"), CommitUnknown, 0),
        (TableUnavailable("the connection was closed"), TableUnavailable, 0),
        (RuntimeError("an error of the catalog's library"), RuntimeError, 0),
    ],
)
def test_clickhouse_115390_manifests_stay_unless_the_commit_was_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception, raised: type[Exception], removed: int
) -> None:
    """The files of a commit were removed when its answer was lost. A library may raise anything then."""

    @contextmanager
    def without_catalog(*_: Any) -> Iterator[Any]:
        yield None

    @contextmanager
    def same(*_: Any) -> Iterator[Any]:
        yield Refusing(error)

    monkeypatch.setattr(catalog_publisher, "without_catalog", without_catalog)
    monkeypatch.setattr(catalog_publisher, "check_installed", lambda _: None)
    monkeypatch.setattr(catalog_publisher, "Production", Production)
    monkeypatch.setattr(CatalogPublisher, "_same", same)
    context: Any = MagicMock(operation="t/compact/1")
    publisher = CatalogPublisher(record(tmp_path / "t"), context, lambda: None)
    with pytest.raises(raised):
        publisher.commit_produced(Head("", {}, Refusing.source), lambda production: production)
    assert Production.discarded == removed


def test_manifests_of_a_transaction_that_fails_before_its_commit_are_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    @contextmanager
    def nothing(*_: Any) -> Iterator[Any]:
        yield None

    monkeypatch.setattr(catalog_publisher, "without_catalog", nothing)
    monkeypatch.setattr(catalog_publisher, "check_installed", lambda _: None)
    monkeypatch.setattr(catalog_publisher, "Production", Production)
    monkeypatch.setattr(CatalogPublisher, "_same", nothing)
    context: Any = MagicMock(operation="t/compact/1")

    def fail(_: Any) -> Any:
        raise RuntimeError("a file is missing")

    with pytest.raises(RuntimeError):
        CatalogPublisher(record(tmp_path / "t"), context, lambda: None).commit_produced(Head("", {}, ""), fail)
    assert Production.discarded == 1
