"""Parquet folders in object stores: planning and verdicts from statistics, without Spark."""

from __future__ import annotations

import io
import re
import uuid
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from distop.behavior import TableRecord, TableUnavailable, load
from distop.errors import InvalidArgument, TableRefused
from distop.protocol.executor_nodes import WAITS_FOR_STORE
from distop.storage import storage_options, store_waits
from distop.storage.object_store import Version
from distop.storage.opened_stores import open_store
from distop.tables import check_table, plan_table
from distop.tables.reading import parquet_footers
from distop.tables.reading.file_facts import Unreadable
from distop.tables.reading.parquet_tail import FIRST_READ
from distop.worker.child_side.call_handlers import Call
from tests.storage.conftest import REMOTE, S3
from tests.storage.servers import request
from tests.support.context import FakeContext, run_operation
from tests.unit.support.running import Child, kinds

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from distop.storage.object_store import ObjectStore
    from tests.storage.faulty_http import FaultyProxy, Seen
    from tests.storage.servers import Served

pytestmark = pytest.mark.timeout(300)


def parquet(*values: Any, columns: int = 1) -> bytes:
    data = io.BytesIO()
    pq.write_table(pa.table({f"c{n}" if n else "a": list(values) for n in range(columns)}), data)
    return data.getvalue()


def record(store: ObjectStore) -> TableRecord:
    return TableRecord("t", "parquet", store.location)


def put(store: ObjectStore, *keys: str, data: bytes = b"") -> None:
    for key in keys:
        store.put_new(key, data or parquet(1, 2, 3))


def judged(store: ObjectStore, folder: Path) -> dict[str, Any]:
    """The report of a check by statistics alone."""
    argument = {"checks": [{"not_null": "a"}], "statistics": "only"}
    report: dict[str, Any] = run_operation(load("validate"), record(store), argument, context_of(folder)).report
    return report


def context_of(folder: Path) -> Callable[[TableRecord], FakeContext]:
    return lambda table: FakeContext(folder, table)


@pytest.mark.parametrize("store", REMOTE, indirect=True)
def test_a_table_is_registered_planned_and_judged_by_its_statistics(store: ObjectStore, tmp_path: Path) -> None:
    put(store, "day=2/a.parquet", "day=10/b.parquet", "day=a%3Ab/c d+é.parquet", "_SUCCESS", "day=2/.hidden")
    store.put_new("day=11/n.parquet", parquet(1, None))
    assert check_table(record(store)) == record(store)
    assert [(p.name, [f[0] for f in p.files], p.values) for p in plan_table(record(store)).partitions] == [
        ("day=2", [f"{store.location}/day=2/a.parquet"], {"day": "2"}),
        ("day=10", [f"{store.location}/day=10/b.parquet"], {"day": "10"}),
        ("day=11", [f"{store.location}/day=11/n.parquet"], {"day": "11"}),
        ("day=a%3Ab", [f"{store.location}/day=a%3Ab/c d+é.parquet"], {"day": "a:b"}),
    ]
    report = judged(store, tmp_path)
    assert report["rows"] == 11
    [check] = report["checks"]
    assert (check["verdict"], check["violations"]) == ("violated", 1)


@pytest.mark.parametrize("store", REMOTE, indirect=True)
@pytest.mark.parametrize("change", ["replaced", "removed"])
def test_a_changed_object_is_an_error_that_names_it(change: str, store: ObjectStore) -> None:
    """Its bytes have the planned size, and an object store has times in seconds only."""
    put(store, "a.parquet", "b.parquet")
    [plan] = plan_table(record(store)).partitions
    assert all(isinstance(file[2], str) for file in plan.files)
    if change == "replaced":
        version = store.head("b.parquet").version
        assert len(parquet(1, 2, 4)) == plan.files[1][1]
        store.replace_if("b.parquet", parquet(1, 2, 4), version)
        text = f"the file {store.location}/b.parquet has changed since the operation was planned"
    else:
        store.delete_many(["b.parquet"])
        text = f"the file {store.location}/b.parquet is gone since the operation was planned"
    good, changed = parquet_footers.read_all(plan.files, frozenset({"a"}))
    assert not isinstance(good, Unreadable)
    assert isinstance(changed, Unreadable)
    assert str(changed) == text
    found = parquet_footers.changed(plan.files, lambda: None)
    assert {path: str(why) for path, why in found.items()} == {plan.files[1][0]: text}


@pytest.mark.parametrize("served", ["moto"], indirect=True)
def test_a_table_with_objects_for_its_folders_is_planned(served: Served) -> None:
    """Consoles and Hadoop create them. ``day=1/`` is listed after ``day=1-x/``, since ``-`` is before ``/``."""
    store = open_store(f"{served.url}/{uuid.uuid4().hex}")
    put(store, "day=1/a.parquet", "day=1-x/a.parquet")
    endpoint = f"http://127.0.0.1:{served.port}/{store.location.partition('://')[2]}"
    for folder in ("", "day=1/", "day=1-x/"):
        request(f"{endpoint}/{folder}", "PUT")
    assert [(p.name, len(p.files)) for p in plan_table(record(store)).partitions] == [("day=1", 1), ("day=1-x", 1)]


@pytest.mark.parametrize("store", S3, indirect=True)
def test_facts_of_an_object_are_cached_by_its_version(store: ObjectStore) -> None:
    put(store, "a.parquet")
    [plan] = plan_table(record(store)).partitions
    first = parquet_footers.read_all(plan.files, frozenset({"a"}))
    assert parquet_footers.read_all(plan.files, frozenset({"a"}))[0] is first[0]


@pytest.mark.parametrize("served", S3, indirect=True)
def test_a_plan_takes_one_listing_for_a_thousand_objects_and_one_request_for_each_footer(
    served: Served, proxy: FaultyProxy, tmp_path: Path
) -> None:
    store = open_store(f"{served.url}/{uuid.uuid4().hex}")
    put(store, *(f"day={n % 4}/{n}.parquet" for n in range(12)))
    put(store, "day=0/long.parquet", data=parquet(1, columns=2_000))
    proxy.seen.clear()
    planned = plan_table(record(store))
    assert [one.method for one in proxy.seen] == ["GET"]
    proxy.seen.clear()
    assert judged(store, tmp_path)["rows"] == sum(len(p.files) for p in planned.partitions) * 3 - 2
    asked = [one.target.partition("?")[0].rpartition("/")[2] for one in proxy.seen if ".parquet" in one.target]
    assert len(parquet(1, columns=2_000)) > FIRST_READ
    assert sorted(asked) == sorted([*(f"{n}.parquet" for n in range(12)), "long.parquet", "long.parquet"])


@pytest.mark.parametrize("store", ["moto"], indirect=True)  # versitygw has folders of its own
def test_empty_objects_that_tools_create_as_folders_are_no_files(store: ObjectStore) -> None:
    put(store, "day=1.5/a.parquet", "day=2/a.parquet")
    for marker in ("day=2", "day=3"):
        store.put_new(marker, b"")
    assert [p.name for p in plan_table(record(store)).partitions] == ["day=1.5", "day=2"]
    store.put_new("day=2/empty.parquet", b"")
    assert [len(p.files) for p in plan_table(record(store)).partitions] == [1, 2]


@pytest.mark.parametrize("store", S3, indirect=True)
def test_a_location_may_be_one_object(store: ObjectStore) -> None:
    put(store, "a.parquet")
    table = TableRecord("t", "parquet", f"{store.location}/a.parquet")
    [plan] = plan_table(table).partitions
    assert [file[0] for file in plan.files] == [table.location]


@pytest.mark.parametrize("store", S3, indirect=True)
def test_a_location_that_does_not_exist_is_reported(store: ObjectStore) -> None:
    with pytest.raises(TableUnavailable, match="does not exist"):
        plan_table(record(store))
    with pytest.raises(InvalidArgument, match="does not exist"):
        check_table(record(store))
    [options] = storage_options.configuration().values()
    storage_options.configure({"s3://": options})
    with pytest.raises(TableUnavailable, match="no-such-bucket"):
        plan_table(TableRecord("t", "parquet", "s3://no-such-bucket/t"))


def test_a_store_without_versions_is_compared_by_size_and_time() -> None:
    from distop.storage.location import stamp_of
    from distop.storage.object_store import StoredObject

    assert stamp_of(StoredObject("a", 1, Version(""), 12.5)) == 12_500_000_000
    assert stamp_of(StoredObject("a", 1, Version('"e"'), 12.5)) == '"e"'


@pytest.mark.parametrize("served", ["moto"], indirect=True)
@pytest.mark.parametrize("fault", ["503 Slow Down", "none"])
def test_a_busy_store_is_waited_for_within_the_attempt(
    fault: str,
    served: Served,
    proxy: FaultyProxy,
    short_store_waits: None,
    request: pytest.FixtureRequest,
    tmp_path: Path,
) -> None:
    store = open_store(f"{served.url}/{uuid.uuid4().hex}")
    put(store, "day=1/a.parquet", "day=2/a.parquet")
    plans, child = plan_table(record(store)).partitions, validating(store, tmp_path)
    request.getfixturevalue("impatient")
    left = [40]

    def answer(seen: Seen, forward: Callable[[bytes], bytes]) -> bytes | None:
        left[0] -= 1
        if left[0] < 0:
            return forward(seen.whole)
        return None if fault == "none" else f"HTTP/1.1 {fault}\r\ncontent-length: 0\r\n\r\n".encode()

    proxy.fault = answer
    ends = child.ends(plans)
    assert [end.result["verdict"] for end in ends.values()] == ["valid", "valid"]
    assert any(one["t"] == "status" and one["text"].startswith(WAITS_FOR_STORE) for one in child.sent.messages)


def validating(store: ObjectStore, folder: Path) -> Child:
    """A child that runs jobs of a validation by statistics alone."""
    argument = {"checks": [{"not_null": "a"}], "statistics": "only"}
    return Child(load("validate"), folder, argument, op="t/validate/1", table=record(store))


def planned_by_child(store: ObjectStore, folder: Path) -> dict[str, Any]:
    """The last message of a child that plans a validation."""
    child, argument = Child(load("validate"), folder), {"checks": [{"not_null": "a"}]}
    message = {"t": "plan", "call": 1, "op": "t/validate/1", "type": "validate", "names": None, "arg": argument}
    Call(child.env, {**message, "table": record(store).to_json()}, child.deaths.append).run()
    return dict(child.sent.messages[-1])


@pytest.mark.parametrize("served", ["moto"], indirect=True)
@pytest.mark.parametrize("fault", ["503 Slow Down", "none"])
def test_planning_waits_for_a_busy_store_within_the_attempt(
    fault: str,
    served: Served,
    proxy: FaultyProxy,
    short_store_waits: None,
    request: pytest.FixtureRequest,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """After the time limit of one request, 120 s, the planning failed, which counted as an attempt."""
    store = open_store(f"{served.url}/{uuid.uuid4().hex}")
    put(store, "day=1/a.parquet", "day=2/a.parquet")
    request.getfixturevalue("impatient")
    if fault == "none":
        proxy.lose_answers("GET", times=40)
    else:
        proxy.answer(fault, times=40)
    answer = planned_by_child(store, tmp_path)
    assert (answer["t"], answer.get("value", {}).get("count")) == ("result", 2), answer
    monkeypatch.setattr(store_waits, "LIMIT", 0.0)
    proxy.answer("503 Slow Down")
    answer = planned_by_child(store, tmp_path)
    assert (answer["t"], answer["kind"]) == ("failed", "transient")
    # The request's own limit is 0.05 s: a slow machine gives it up before it has the answer.
    assert re.search("503|has not ended within|error sending request", answer["message"])


@pytest.mark.parametrize("served", ["moto"], indirect=True)
def test_a_batch_that_waits_for_a_busy_store_can_be_cancelled_and_gives_up(
    served: Served,
    proxy: FaultyProxy,
    request: pytest.FixtureRequest,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    store = open_store(f"{served.url}/{uuid.uuid4().hex}")
    put(store, "day=1/a.parquet", "day=2/a.parquet")
    plans = plan_table(record(store)).partitions
    request.getfixturevalue("impatient")
    proxy.answer("503 Slow Down")
    with monkeypatch.context() as patch:
        patch.setattr(store_waits, "LIMIT", 0.0)
        ends = validating(store, tmp_path).ends(plans)
    assert kinds(ends) == "day=1:error day=2:error"
    for end in ends.values():
        assert re.search("there are too many requests|503|given up after", end.error)
    proxy.answer("503 Slow Down")
    child = validating(store, tmp_path)
    run = child.run(plans)
    child.sent.on_status = lambda text: run.cancel(None) if text.startswith(WAITS_FOR_STORE) else None
    run.run()
    assert {end.kind for end in child.sent.ends.values()} == {"cancelled"}


@pytest.mark.parametrize("served", ["moto"], indirect=True)
@pytest.mark.parametrize("when", ["listing", "reading"])
def test_a_store_that_denies_access_fails_all_jobs_at_once(
    when: str, served: Served, proxy: FaultyProxy, tmp_path: Path
) -> None:
    store = open_store(f"{served.url}/{uuid.uuid4().hex}")
    put(store, *(f"day={n}/a.parquet" for n in range(30)))
    plans, behavior, ctx = plan_table(record(store)).partitions, load("validate"), FakeContext(tmp_path, record(store))
    denied = b"<?xml version='1.0'?><Error><Code>AccessDenied</Code><Message>no</Message></Error>"
    proxy.answer("403 Forbidden", denied)
    proxy.seen.clear()
    with pytest.raises(TableRefused, match="AccessDenied") as raised:
        if when == "listing":
            plan_table(record(store))
        else:
            arg = behavior.Arg.model_validate({"checks": [{"not_null": "a"}], "statistics": "only"})
            list(behavior.run_batch(arg, plans, ctx))
    assert behavior.is_fatal(raised.value)
    assert len(proxy.seen) <= parquet_footers.THREADS
