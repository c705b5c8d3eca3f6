"""Tables on S3 are purged, and nothing beside them; also if answers to deletions are lost, late or refusals."""

from __future__ import annotations

import re
import uuid
from typing import TYPE_CHECKING

import pytest

from distop import testing
from distop.protocol.records import TableRecord
from distop.storage.opened_stores import open_store
from distop_behaviors.purge import Purge
from tests.storage.catalog_lake import KINDS, catalog_lake
from tests.storage.conftest import S3
from tests.storage.iceberg_tables import table_in
from tests.storage.test_orphans_on_s3 import contents, new_table

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tests.storage.faulty_http import FaultyProxy, Seen
    from tests.storage.servers import Served

pytestmark = [pytest.mark.timeout(300)]

OTHERS = {
    "t2/left": b"of another table",
    "t/data/k=caf\u00e9 10%3A00/x y.parquet": b"not of the table",
    "t/.hidden": b"",
    "T/left": b"",
}
DENIED = b"<Error><Code>AccessDenied</Code><Message>Access Denied</Message></Error>"


def table_of(name: str, bucket: str, port: int) -> TableRecord:
    """A table of a format; the bucket has another name in its record than in its metadata."""
    location = f"{bucket}/t"
    if name == "parquet":
        store = open_store(location)
        for key in ("k=caf\u00e9/a.parquet", "k=10%3A00/b.parquet"):
            store.put_new(key, b"PAR1 rows PAR1")
    else:
        new_table(name, location, port)
    return TableRecord("lake", name, location.replace("s3:", "s3a:"))


@pytest.mark.parametrize("served", S3, indirect=True)
@pytest.mark.parametrize("table_format", ["iceberg", "delta", "parquet"])
def test_a_table_on_s3_is_purged(served: Served, table_format: str) -> None:
    bucket = f"{served.url}/{uuid.uuid4().hex}"
    table = table_of(table_format, bucket, served.port)
    reached = set(contents(bucket))
    others = {**OTHERS} if table_format != "parquet" else {k: v for k, v in OTHERS.items() if "x y" not in k}
    for key, data in others.items():
        open_store(bucket).put_new(key, data)
    run = testing.run_operation(Purge, {}, table=table)
    assert (run.state, list(run.errors)) == ("success", [])
    assert (run.report["complete"], run.report["missing"], run.report["added"]) == (True, 0, 0)
    assert run.report["deleted_digest"] == run.report["digest"]
    assert sum(one["files"] for one in run.report["deleted"].values()) == len(reached)
    assert contents(bucket) == others


@pytest.mark.rotating
@pytest.mark.parametrize("served", ["moto"], indirect=True)
@pytest.mark.parametrize("fault", ["lost answers", "lost requests", "repeated", "throttled"])
def test_a_purge_ends_in_spite_of_lost_and_late_answers_to_deletions(
    served: Served, proxy: FaultyProxy, fault: str
) -> None:
    bucket = f"{served.url}/{uuid.uuid4().hex}"
    table = table_of("iceberg", bucket, served.port)
    open_store(bucket).put_new("t2/left", b"")
    begin: dict[str, Callable[[], None]] = {
        "lost answers": lambda: proxy.lose_answers("POST", times=2),
        "lost requests": lambda: proxy.lose_requests("POST", times=2),
        "repeated": lambda: proxy.repeat_requests("POST"),
        "throttled": lambda: proxy.answer(
            "503 Slow Down", b"<Error><Code>SlowDown</Code></Error>", method="POST", times=3
        ),
    }
    begin[fault]()
    run = testing.run_operation(Purge, {}, table=table)
    assert any(seen.method == "POST" for seen in proxy.seen), "deletions are requests of this method"
    assert (run.state, run.report["complete"], run.report["failed_files"]) == ("success", True, 0)
    assert run.report["deleted_digest"] == run.report["digest"]
    assert set(contents(bucket)) == {"t2/left"}


def refuse(proxy: FaultyProxy, part: bytes, *, inside: bool) -> None:
    """Refuse to delete objects whose keys have a part. ``inside``: in an answer with the status 200, as S3 does."""

    def fault(seen: Seen, forward: Callable[[bytes], bytes]) -> bytes:
        keys = [key for key in re.findall(rb"<Key>(.*?)</Key>", seen.whole) if part in key]
        if seen.method != "POST" or not keys:
            return forward(seen.whole)
        body, status = DENIED, b"403 Forbidden"
        if inside:
            errors = b"".join(b"<Error><Key>%s</Key><Code>AccessDenied</Code></Error>" % key for key in keys)
            body, status = b"<DeleteResult>%s</DeleteResult>" % errors, b"200 OK"
        return b"HTTP/1.1 %s\r\ncontent-length: %d\r\nconnection: close\r\n\r\n%s" % (status, len(body), body)

    proxy.fault = fault


@pytest.mark.rotating
@pytest.mark.parametrize("served", ["moto"], indirect=True)
@pytest.mark.parametrize("inside", [False, True])
@pytest.mark.parametrize("part", [b"/data/", b"/snap-", b".metadata.json"])
def test_denied_deletions_are_failures_and_a_later_purge_ends(
    served: Served, proxy: FaultyProxy, part: bytes, inside: bool
) -> None:
    """Wherever it is interrupted, the table can be registered and purged again, without further arguments."""
    bucket = f"{served.url}/{uuid.uuid4().hex}"
    table = table_of("iceberg", bucket, served.port)
    refuse(proxy, part, inside=inside)
    run = testing.run_operation(Purge, {}, table=table)
    assert (run.state, run.report["complete"]) == ("failed", False)
    kept = {key for key in contents(bucket) if part in key.encode()}
    last = {max(kept)} if part == b".metadata.json" else set()  # it is not tried: it leads to the others
    failed = {f"t/{one['file'].rpartition('/t/')[2]}" for one in run.report["failed"]}
    assert failed == kept - last
    assert run.report["failed_files"] == len(failed) > 0
    assert run.report["deleted_digest"] != run.report["digest"]
    proxy.fault = lambda seen, forward: forward(seen.whole)
    again = testing.run_operation(Purge, {}, table=table)
    assert (again.state, again.report["complete"]) == ("success", True)
    assert contents(bucket) == {}


@pytest.mark.rotating
@pytest.mark.parametrize("served", S3, indirect=True)
@pytest.mark.parametrize("kind", KINDS)
def test_a_table_of_a_catalog_on_s3_is_dropped_and_purged(
    kind: str, served: Served, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = f"{served.url}/{uuid.uuid4().hex}"
    with catalog_lake(kind, url, served.port, tmp_path / "catalog", monkeypatch) as lake:
        place = str(lake.table.location())
        table_in(open_store(f"{url}/beside"), served.port, {"a": [1], "b": [1]})
        beside = {key: data for key, data in contents(url).items() if key.startswith("beside/")}
        table = TableRecord("t", "iceberg", lake.record.location, {**lake.record.options, "folder": place})
        run = testing.run_operation(Purge, {"catalog": "drop"}, table=table)
        assert (run.state, list(run.errors)) == ("success", [])
        assert (run.report["complete"], run.report["catalog"], run.report["missing"]) == (True, "dropped", 0)
        assert not lake.rest.tables.table_exists("sales.orders")
        assert contents(url) == beside
