"""A store that refuses files of a Delta table: the error shows whether a retry may help."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from distop.errors import TableBusy, TableRefused, TableUnavailable
from distop.protocol.records import TableRecord
from distop.tables import plan_table
from distop.tables.delta.data_files import check_length
from distop.tables.iceberg.metadata_file import read_file
from distop.tables.reading.file_facts import Gone, Unreadable
from tests.support.refusing_store import RefusingStore

if TYPE_CHECKING:
    pass

REFUSALS = [(403, "AccessDenied", TableRefused), (503, "SlowDown", TableBusy)]


pytestmark = pytest.mark.usefixtures("short_time_limit")


@pytest.mark.parametrize(("status", "code", "error"), REFUSALS)
def test_the_log_is_refused(
    status: int, code: str, error: type[TableUnavailable], monkeypatch: pytest.MonkeyPatch
) -> None:
    with RefusingStore(status, code, {"t/_delta_log/00000000000000000000.json": None}) as store:
        store.serve(monkeypatch)
        with pytest.raises(TableUnavailable, match=f"cannot read the file s3://bucket/t/_delta_log/.*{code}") as raised:
            plan_table(TableRecord("t", "delta", "s3://bucket/t"))
    assert type(raised.value) is error


def test_a_missing_bucket_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with RefusingStore(404, "NoSuchBucket") as store:
        store.serve(monkeypatch)
        with pytest.raises(TableRefused, match="cannot be listed: .*there is no such bucket or container"):
            plan_table(TableRecord("t", "delta", "s3://bucket/t"))


@pytest.mark.parametrize(("status", "code", "error"), REFUSALS)
def test_the_metadata_of_an_iceberg_table_is_refused(
    status: int, code: str, error: type[TableUnavailable], monkeypatch: pytest.MonkeyPatch
) -> None:
    source = "s3://bucket/t/metadata/v1.metadata.json"
    with RefusingStore(status, code) as store:
        store.serve(monkeypatch)
        with pytest.raises(TableUnavailable, match=f"cannot read the metadata file {source}: .*{code}") as raised:
            read_file(source)
    assert type(raised.value) is error


@pytest.mark.parametrize(
    ("files", "status", "error"),
    [
        ({"t/a": b"1234"}, 403, None),
        ({"t/a": b"123"}, 403, Unreadable),
        ({}, 403, Gone),
        ({"t/a": None}, 403, TableRefused),
        ({"t/a": None}, 503, TableBusy),
    ],
)
def test_the_length_of_a_data_file(
    files: dict[str, bytes | None], status: int, error: type[Exception] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    with RefusingStore(status, "Refused", files) as store:
        store.serve(monkeypatch)
        if error is None:
            check_length("s3://bucket/t/a", 4)
        else:
            with pytest.raises(error, match="the file s3://bucket/t/a") as raised:
                check_length("s3://bucket/t/a", 4)
            assert type(raised.value) is error
