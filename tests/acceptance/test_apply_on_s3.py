"""apply on tables in an object store: one conditional write makes the change, whatever happens to its answer."""

from __future__ import annotations

import gzip
import json
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pytest
from deltalake.exceptions import DeltaError

from distop.behavior import PartitionPlan, TableRecord
from distop.errors import InvalidArgument, TableRefused
from distop.protocol.executor_nodes import WAITS_FOR_STORE
from distop.storage import storage_options
from distop.storage.opened_stores import open_store
from distop.tables import check_table, commit_file
from distop.tables.commits import Conflict
from distop_behaviors.apply import TABLE, Apply
from distop_behaviors.apply.apply_loop import MARK, ROUNDS, Applying
from distop_behaviors.apply.delta_commit import DeltaTarget
from distop_behaviors.apply.hadoop_commit import HadoopTarget
from distop_behaviors.apply.schema_target import SchemaChange, target_of
from tests.acceptance.applying import At, crashes
from tests.storage.faulty_http import without_header
from tests.storage.iceberg_tables import properties_for
from tests.support.context import HISTORY, store_certificate
from tests.support.delta import MAVEN as DELTA_MAVEN
from tests.support.delta import jars as delta_jars
from tests.support.delta_bench import VALUE, RemoteBench
from tests.support.delta_bench import rows as delta_rows
from tests.support.delta_logs import DeltaLog, features, field
from tests.support.folder_bench import FolderBench, rows
from tests.support.icebergrest import configure
from tests.support.lake import MAVEN, jar
from tests.support.needs import need
from tests.unit.support.running import Child

if TYPE_CHECKING:
    from collections.abc import Callable

    from pyspark.sql import SparkSession

    from distop.storage.object_store import ObjectStore
    from tests.storage.faulty_http import FaultyProxy, Seen
    from tests.storage.servers import Served

pytestmark = pytest.mark.rotating

NOT_NULL = {"not_null": "c"}
POSITIVE = {"range": {"column": "id", "min": 0}, "name": "positive"}


@pytest.fixture
def properties(s3_server: Served) -> dict[str, str]:
    """pyiceberg's properties for the object store; other writers use it without the proxy."""
    return properties_for(s3_server.port)


@pytest.fixture(params=["disk", "s3"])
def bench(request: pytest.FixtureRequest, tmp_path: Path, properties: dict[str, str]) -> FolderBench:
    """An Iceberg table by folder, without Spark."""
    if request.param == "disk":
        return FolderBench(open_store(str(tmp_path / "t")), tmp_path, {})
    return FolderBench(request.getfixturevalue("s3_place"), tmp_path, properties)


@pytest.fixture
def remote(s3_place: ObjectStore, tmp_path: Path, properties: dict[str, str]) -> FolderBench:
    return FolderBench(s3_place, tmp_path, properties)


@pytest.fixture
def delta(s3_server: Served, s3_place: ObjectStore, tmp_path: Path) -> RemoteBench:
    """A Delta table, without Spark. Its other writers use the store without the proxy."""
    options = {
        "AWS_ENDPOINT_URL": f"http://127.0.0.1:{s3_server.port}",
        "AWS_ALLOW_HTTP": "true",
        "AWS_REGION": "us-east-1",
        **s3_server.environment,
    }
    return RemoteBench(s3_place, tmp_path, options)


@pytest.fixture(params=["iceberg", "delta"])
def on_either(request: pytest.FixtureRequest) -> FolderBench | RemoteBench:
    """A table of either format in the object store, without Spark."""
    if request.param == "iceberg":
        remote: FolderBench = request.getfixturevalue("remote")
        return remote
    delta: RemoteBench = request.getfixturevalue("delta")
    return delta.create()


def new_row(bench: FolderBench | RemoteBench) -> Any:
    return rows("z", first=3) if isinstance(bench, FolderBench) else delta_rows("z", first=3)


def of_metadata(seen: Seen) -> bool:
    """Whether a request creates a metadata file or a commit of a table."""
    return seen.method == "PUT" and (".metadata.json" in seen.target or "_delta_log/" in seen.target)


def test_a_certificate_becomes_one_new_metadata_file(bench: FolderBench) -> None:
    certificate, before = bench.certificate(NOT_NULL, POSITIVE), bench.file
    bench.table.append(rows("z", first=3))
    ran = bench.apply(bench.context(), certificate)
    assert (ran.report["verdict"], ran.report["rounds"], ran.report["rows"]) == ("applied", 1, 1), ran.message
    assert {c["check"]: c["before"] for c in ran.report["changes"]} == dict.fromkeys(
        ("c_not_null", "positive"), "other"
    )
    assert [bench.required(name) for name in ("id", "c", "s", "s.a")] == [False, True, False, False]
    metadata = bench.file.content
    assert bench.version == 4
    assert json.loads(metadata.properties["distop.constraint.positive"])["sql"] == "`id` >= 0"
    assert [schema.schema_id for schema in metadata.schemas] == [0, 1]
    assert [entry.metadata_file.rpartition("/")[2] for entry in metadata.metadata_log] == ["v3.metadata.json"]
    assert metadata.last_updated_ms >= before.content.last_updated_ms
    assert bench.table.scan().to_arrow()["id"].to_pylist() == [3, 1, 2]
    with pytest.raises(ValueError, match="Mismatch in fields"):
        bench.table.append(rows(None))
    # A second apply changes nothing but the name of the operation.
    ctx = bench.context()
    again = bench.apply(ctx, certificate)
    assert {c["before"] for c in again.report["changes"]} == {"same"}
    assert (json.loads(bench.properties[MARK])["operation"], bench.version) == (ctx.operation, 5)


def test_a_writer_that_commits_first_is_validated(
    on_either: FolderBench | RemoteBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its commit comes after all comparisons, directly before the file is created."""
    bench = on_either
    certificate, before = bench.certificate(NOT_NULL), bench.version
    at = At(commit_file, "create", 1, "before", lambda: bench.append(new_row(bench)))
    monkeypatch.setattr(commit_file, "create", at.wrapped)
    ran = bench.apply(bench.context(), certificate)
    assert at.happened
    assert (ran.report["verdict"], ran.report["rounds"], ran.report["rows"]) == ("applied", 2, 1), ran.message
    assert (bench.version, bench.required()) == (before + 2, True)


def test_of_several_commits_on_one_version_exactly_one_succeeds(on_either: FolderBench | RemoteBench) -> None:
    bench, outcomes = on_either, list[str]()
    start, before = threading.Barrier(6), bench.version

    def commit(n: int) -> None:
        target = target_of(bench.record, bench.context())
        head = target.load()
        start.wait()
        try:
            target.swap(head, SchemaChange(properties={"writer": str(n)}))
            outcomes.append(str(n))
        except Conflict:
            outcomes.append("")

    threads = [threading.Thread(target=commit, args=(n,)) for n in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    (winner,) = filter(None, outcomes)
    assert (len(outcomes), bench.version, bench.properties["writer"]) == (6, before + 1, winner)


def test_apply_fails_if_other_writers_always_commit_first(
    on_either: FolderBench | RemoteBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench, original = on_either, commit_file.create
    certificate = bench.certificate(NOT_NULL)

    def create(*args: Any) -> None:
        bench.append(new_row(bench))
        original(*args)

    monkeypatch.setattr(commit_file, "create", create)
    ran = bench.apply(bench.context(), certificate)
    assert (ran.report["verdict"], ran.report["rounds"], bench.required()) == ("unknown", ROUNDS, False)


def test_a_table_that_was_replaced_is_not_changed(bench: FolderBench, monkeypatch: pytest.MonkeyPatch) -> None:
    """The current metadata file has the same name."""
    certificate = bench.certificate(NOT_NULL)
    key = f"metadata/v{bench.version}.metadata.json"
    other = json.dumps({**json.loads(bench.file.text), "properties": {"other": "mine"}}).encode()
    at = At(HadoopTarget, "swap", 1, "before", lambda: bench.replace(key, other))
    monkeypatch.setattr(HadoopTarget, "swap", at.wrapped)
    ran = bench.apply(bench.context(), certificate)
    assert (ran.report["verdict"], ran.report["rounds"]) == ("applied", 2), ran.message
    assert bench.file.content.properties["other"] == "mine"


def test_a_change_that_a_writer_without_a_condition_has_overwritten_is_made_again(
    bench: FolderBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As Iceberg may do, which checks whether the file exists and then renames or copies."""
    certificate, key = bench.certificate(NOT_NULL), f"metadata/v{bench.version + 1}.metadata.json"
    other = json.dumps({**json.loads(bench.file.text), "properties": {"other": "mine"}}).encode()
    at = At(commit_file, "create", 1, "after", lambda: bench.replace(key, other))
    monkeypatch.setattr(commit_file, "create", at.wrapped)
    ran = bench.apply(bench.context(), certificate)
    assert (ran.report["verdict"], ran.report["rounds"], bench.version) == ("applied", 2, 4), ran.message
    assert (bench.required(), bench.properties["other"]) == (True, "mine")


@pytest.mark.parametrize("n", range(len(crashes(None))))
def test_a_crash_at_any_step_changes_the_table_once(
    on_either: FolderBench | RemoteBench, monkeypatch: pytest.MonkeyPatch, n: int
) -> None:
    def crash() -> None:
        raise ConnectionError("the process dies")

    bench = on_either
    method, when = crashes(HadoopTarget if isinstance(bench, FolderBench) else DeltaTarget)[n]
    certificate, before, ctx = bench.certificate(NOT_NULL, POSITIVE), bench.version, bench.context()
    with monkeypatch.context() as patch:
        patch.setattr(*method, At(*method, 1, when, crash).wrapped)
        with pytest.raises(ConnectionError):
            bench.apply(ctx, certificate)
    ran = bench.apply(ctx, certificate)
    assert (ran.report["verdict"], bench.required(), bench.version) == ("applied", True, before + 1)
    assert [c["before"] for c in ran.report["changes"]] == ["other", "other"]
    assert json.loads(bench.properties[MARK])["operation"] == ctx.operation


def test_the_answer_to_the_commit_is_lost_or_comes_twice(
    on_either: FolderBench | RemoteBench, s3_proxy: FaultyProxy
) -> None:
    certificate, before = on_either.certificate(NOT_NULL), on_either.version

    def lose(seen: Seen, forward: Callable[[bytes], bytes]) -> bytes | None:
        answer = forward(seen.whole)
        return None if of_metadata(seen) else answer

    def repeat(seen: Seen, forward: Callable[[bytes], bytes]) -> bytes:
        answer = forward(seen.whole)
        return forward(seen.whole) if of_metadata(seen) else answer

    for n, fault in enumerate((lose, repeat), 1):
        s3_proxy.fault = fault
        ran = on_either.apply(on_either.context(), certificate)
        assert (ran.report["verdict"], ran.report["rounds"]) == ("applied", 1), ran.message
        assert (on_either.version, on_either.required()) == (before + n, True)


def test_an_unknown_outcome_is_settled_by_the_next_load(
    on_either: FolderBench | RemoteBench, s3_proxy: FaultyProxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither the write nor the reads after it are answered."""
    certificate, before = on_either.certificate(NOT_NULL), on_either.version
    storage_options.configure(within(2.0))
    sent = False

    def fault(seen: Seen, forward: Callable[[bytes], bytes]) -> bytes | None:
        nonlocal sent
        of_new = f"v{before + 1}.metadata.json" in seen.target or f"{before + 1:020}.json" in seen.target
        if seen.method == "PUT" and of_new:
            sent = True
            forward(seen.whole)
        return None if of_new else forward(seen.whole)

    s3_proxy.fault = fault

    def answers_again() -> None:
        s3_proxy.fault = lambda seen, forward: forward(seen.whole)

    monkeypatch.setattr(Applying, "load", At(Applying, "load", 2, "before", answers_again).wrapped)
    ran = on_either.apply(on_either.context(), certificate)
    assert sent
    assert (ran.report["verdict"], ran.report["rounds"]) == ("applied", 1), ran.message
    assert (on_either.version, on_either.required()) == (before + 1, True)


@pytest.mark.parametrize("moment", ["begin", "commit"])
def test_a_job_waits_for_a_busy_store_and_changes_the_schema_once(
    on_either: FolderBench | RemoteBench, s3_proxy: FaultyProxy, short_store_waits: None, moment: str, tmp_path: Path
) -> None:
    """It failed, and was retried as another attempt."""
    certificate, before = on_either.certificate(NOT_NULL), on_either.version
    storage_options.configure(within(0.5))
    argument = {"certificate": store_certificate(certificate), "settle_seconds": 0}
    child = Child(Apply(), tmp_path, argument, op="t/apply/1", table=on_either.record)
    child.sent.history = HISTORY
    busy, waits = [moment == "begin"], list[str]()

    def fault(seen: Seen, forward: Callable[[bytes], bytes]) -> bytes | None:
        if busy[0]:
            return b"HTTP/1.1 503 Slow Down\r\ncontent-length: 0\r\nconnection: close\r\n\r\n"
        answer = forward(seen.whole)
        if of_metadata(seen) and not waits:
            busy[0] = True
            return None
        return answer

    def on_status(text: str) -> None:
        if text.startswith(WAITS_FOR_STORE):
            waits.append(text)
            busy[0] = False

    s3_proxy.fault, child.sent.on_status = fault, on_status
    end = child.ends([PartitionPlan(0, TABLE)], batch=False)[TABLE]
    assert (end.kind, bool(waits)) == ("success", True), end.error
    assert (on_either.version, on_either.required()) == (before + 1, True)


def within(limit: float) -> dict[str, Any]:
    """The configuration with another time limit of requests."""
    from dataclasses import replace

    return {prefix: replace(options, time_limit=limit) for prefix, options in storage_options.configuration().items()}


def test_a_refused_commit_is_an_error_at_once(on_either: FolderBench | RemoteBench, s3_proxy: FaultyProxy) -> None:
    certificate, before = on_either.certificate(NOT_NULL), on_either.version
    body = b"<Error><Code>AccessDenied</Code><Message>no</Message></Error>"
    denied = b"HTTP/1.1 403 Forbidden\r\ncontent-length: %d\r\nconnection: close\r\n\r\n" % len(body) + body
    s3_proxy.fault = lambda seen, forward: denied if of_metadata(seen) else forward(seen.whole)
    with pytest.raises(TableRefused, match="AccessDenied"):
        on_either.apply(on_either.context(), certificate)
    assert (on_either.version, on_either.required()) == (before, False)


def test_a_store_without_conditional_writes_is_refused_before_the_change(
    on_either: FolderBench | RemoteBench, s3_proxy: FaultyProxy
) -> None:
    certificate, before = on_either.certificate(NOT_NULL), on_either.version
    s3_proxy.fault = without_header(b"if-none-match")
    s3_proxy.seen.clear()
    with pytest.raises(InvalidArgument, match="is not safe, so distop writes nothing there"):
        on_either.apply(on_either.context(), certificate)
    assert on_either.version == before
    assert not any(of_metadata(seen) for seen in s3_proxy.seen)


def test_the_version_hint_is_only_a_hint(bench: FolderBench, monkeypatch: pytest.MonkeyPatch) -> None:
    certificate, key = bench.certificate(NOT_NULL), "metadata/version-hint.text"

    def apply(change_hint: Callable[[], None] = lambda: None) -> tuple[int, bytes]:
        """Change the hint between the commit and the write of the hint."""
        with monkeypatch.context() as patch:
            patch.setattr(commit_file, "create", At(commit_file, "create", 1, "after", change_hint).wrapped)
            assert bench.apply(bench.context(), certificate).report["verdict"] == "applied"
        return bench.version, bench.store.get(key, limit=64).data

    assert apply() == (3, b"3")
    bench.store.put(key, b"1\n")
    assert apply() == (4, b"4")
    bench.store.put(key, b"")
    assert apply() == (5, b"5")

    def commit_later() -> None:
        with bench.table.transaction() as changing:
            changing.set_properties({"other": "mine"})
        bench.store.put(key, b"7")

    assert apply(commit_later) == (7, b"7")


def test_the_commit_stands_if_the_version_hint_cannot_be_written(remote: FolderBench, s3_proxy: FaultyProxy) -> None:
    certificate = remote.certificate(NOT_NULL)
    denied = b"HTTP/1.1 403 Forbidden\r\ncontent-length: 0\r\nconnection: close\r\n\r\n"
    s3_proxy.fault = lambda seen, forward: denied if "version-hint" in seen.target else forward(seen.whole)
    assert remote.apply(remote.context(), certificate).report["verdict"] == "applied"
    assert (remote.version, remote.required()) == (3, True)


def test_a_cancel_reverts_an_unconfirmed_change(bench: FolderBench, monkeypatch: pytest.MonkeyPatch) -> None:
    from distop.behavior import JobCancelled
    from distop_behaviors.apply import Apply
    from tests.support.context import store_certificate

    certificate, before = bench.certificate(NOT_NULL, POSITIVE), bench.file.content
    argument = Apply.Arg.model_validate({"certificate": store_certificate(certificate), "settle_seconds": 60})
    ctx = bench.context()
    (job,) = Apply().partitions(bench.record, argument, ctx).partitions
    at = At(Applying, "settle", 1, "before", lambda: setattr(ctx, "stopped", True))
    monkeypatch.setattr(Applying, "settle", at.wrapped)
    with pytest.raises(JobCancelled):
        Apply().start_or_resume_job(argument, job, ctx)
    assert bench.required()
    for _ in range(2):
        Apply().cancel_job_and_cleanup(argument, job, ctx)
        after = bench.file.content
        assert (after.schema(), after.current_schema_id, after.properties) == (before.schema(), 0, before.properties)
    assert bench.version == 4


def test_a_delta_table_gets_what_other_writers_enforce(delta: RemoteBench) -> None:
    assert check_table(delta.create().record) == delta.record
    ran = delta.apply(delta.context(), delta.certificate(NOT_NULL, POSITIVE))
    assert (ran.report["verdict"], delta.version, delta.required()) == ("applied", 1, True), ran.message
    for row in (delta_rows(None, first=3), delta_rows("z", first=-3)):
        with pytest.raises(DeltaError):
            delta.append(row)
    delta.append(delta_rows("z", first=3))
    assert (delta.version, sorted(delta.table.to_pyarrow_table()["id"].to_pylist())) == (2, [1, 2, 3])


def test_a_column_of_a_delta_table_is_widened(delta: RemoteBench, tmp_path: Path) -> None:
    log = DeltaLog(tmp_path / "log")
    log.create(
        features("typeWidening"), fields=[field("id", "integer")], configuration={"delta.enableTypeWidening": "true"}
    )
    log.commit(log.add("a.parquet", pa.table({"id": pa.array([1, 2, None], pa.int32())})))
    for path in filter(Path.is_file, log.root.rglob("*")):
        delta.store.put_new(str(path.relative_to(log.root)), path.read_bytes())
    ran = delta.apply(delta.context(), delta.certificate({"fits": {"column": "id", "type": "bigint"}}))
    assert ran.report["verdict"] == "applied", ran.message
    commit = delta.store.get("_delta_log/00000000000000000002.json", limit=1 << 20).data.decode().splitlines()
    (metadata,) = (action["metaData"] for action in map(json.loads, commit) if "metaData" in action)
    (column,) = json.loads(metadata["schemaString"])["fields"]
    assert column["type"] == "long"
    assert column["metadata"]["delta.typeChanges"] == [{"fromType": "integer", "toType": "long"}]


@pytest.mark.spark
@pytest.mark.timeout(300)
def test_late_rows_of_a_delta_table_revert_the_change(
    s3_store: ObjectStore, delta: RemoteBench, tmp_path: Path, spark: SparkSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    need(delta_jars(), DELTA_MAVEN)
    bench = RemoteBench(s3_store, tmp_path, delta.options, spark).create()
    certificate = bench.certificate(POSITIVE, {"check": "c <> '--'"})
    at = At(DeltaTarget, "swap", 1, "after", lambda: bench.append_blindly(delta_rows("--", first=7)))
    monkeypatch.setattr(DeltaTarget, "swap", at.wrapped)
    ran = bench.apply(bench.context(), certificate)
    assert (ran.report["verdict"], ran.report["reverted"]) == ("violated", True), ran.message
    assert [s["values"] for s in ran.report["checks"][1]["samples"]] == [{"c": "--"}]
    assert bench.version == 3
    assert not {VALUE, MARK} & bench.properties.keys()


@pytest.mark.spark
@pytest.mark.timeout(300)
def test_spark_enforces_the_change_and_late_rows_revert_it(
    s3_store: ObjectStore, tmp_path: Path, properties: dict[str, str], spark: SparkSession,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    need(jar(), MAVEN)
    bench = FolderBench(open_store(f"{s3_store.location}/db/t"), tmp_path, properties, spark)
    session = spark.newSession()
    for name, value in {
        "": "org.apache.iceberg.spark.SparkCatalog",
        ".type": "hadoop",
        ".warehouse": s3_store.location,
    }.items():
        session.conf.set(f"spark.sql.catalog.ons3{name}", value)
    session.conf.set("spark.sql.catalog.ons3.cache-enabled", "false")
    session.sql("insert into ons3.db.t values (3, 'z', null)")
    certificate = bench.certificate(NOT_NULL, POSITIVE)
    session.sql("insert into ons3.db.t values (4, 'z', named_struct('a', 1L))")
    ran = bench.apply(bench.context(), certificate)
    assert (ran.report["verdict"], ran.report["rows"]) == ("applied", 1), ran.message
    assert sorted(row.id for row in session.table("ons3.db.t").collect()) == [1, 2, 3, 4]
    with pytest.raises(Exception, match="[Nn]ull"):
        session.sql("insert into ons3.db.t values (5, null, null)")
    session.sql("insert into ons3.db.t values (6, 'w', null)")
    assert (bench.version, bench.required()) == (6, True)
    # A row of a writer with an old plan reverts a change that was not there before.
    certificate, before = bench.certificate({"not_null": "id"}), bench.file.content
    at = At(HadoopTarget, "swap", 1, "after", bench.append_blindly_without_id)
    monkeypatch.setattr(HadoopTarget, "swap", at.wrapped)
    ran = bench.apply(bench.context(), certificate)
    assert (ran.report["verdict"], ran.report["reverted"]) == ("violated", True), ran.message
    assert [s["values"] for s in ran.report["checks"][0]["samples"]] == [{"id": None}]
    after = bench.file.content
    del before.properties[MARK]
    assert (after.schema(), after.properties, bench.version) == (before.schema(), before.properties, 9)


def test_a_table_of_a_hadoop_catalog_is_changed_in_its_folder(
    s3_place: ObjectStore, tmp_path: Path, properties: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = FolderBench(open_store(f"{s3_place.location}/sales/orders"), tmp_path, properties)
    option = configure(monkeypatch, type="hadoop", warehouse=s3_place.location)
    bench.record = TableRecord("t", "iceberg", "sales.orders", option)
    assert bench.apply(bench.context(), bench.certificate(NOT_NULL)).report["verdict"] == "applied"
    assert (bench.version, bench.required()) == (3, True)


def test_compressed_metadata_stay_compressed(s3_place: ObjectStore, tmp_path: Path, properties: dict[str, str]) -> None:
    bench = FolderBench(s3_place, tmp_path, properties, given={"write.metadata.compression-codec": "gzip"})
    assert bench.apply(bench.context(), bench.certificate(NOT_NULL)).report["verdict"] == "applied"
    assert bench.source.endswith("/v3.gz.metadata.json")
    data = s3_place.get("metadata/v3.gz.metadata.json", limit=1 << 20).data
    assert json.loads(gzip.decompress(data))["properties"]["write.metadata.compression-codec"] == "gzip"
    assert bench.required()
