"""A shared directory in an object store, with real executors: results, plans, certificates, and their removal."""

from __future__ import annotations

import json
import time
import uuid
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import distop
from distop.errors import InvalidArgument, NotFound
from distop.protocol.records import TableRecord
from distop.settings import Settings, client_config, executor_config
from distop.storage import storage_options
from distop.storage.opened_stores import open_store
from distop.store.embedded import EmbeddedEtcd
from tests.integration.test_history import advance_an_hour, record, write_now
from tests.storage.conftest import S3
from tests.storage.faulty_http import FaultyProxy, without_header
from tests.support.behaviors import sample_env
from tests.support.daemons import SPARK, Daemons, daemons
from tests.support.replay import violations

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.storage.servers import Served

__all__ = ["sample_env"]

BIG = 200_000

pytestmark = [pytest.mark.etcd, pytest.mark.timeout(300)]
on_s3 = pytest.mark.parametrize("served", S3, indirect=True)
on_moto = pytest.mark.parametrize("served", ["moto"], indirect=True)  # it checks no signatures


@pytest.fixture
def shared(served: Served, monkeypatch: pytest.MonkeyPatch) -> str:
    """A new folder of the bucket. The settings of executors and clients name the server."""
    monkeypatch.setenv("DISTOP_STORAGE", json.dumps(storage_options.as_given(served.options())))
    return f"{served.url}/{uuid.uuid4().hex}"


@pytest.fixture
def group(shared: str, tmp_path: Path) -> Iterator[Daemons]:
    """A group without daemons yet, with a client of this shared directory and a table ``t``."""
    with EmbeddedEtcd(compaction=None) as etcd:
        with daemons(etcd.endpoint, tmp_path) as found:
            found.client = distop.connect(etcd.endpoint, shared_dir=shared)
            found.client.add_table(TableRecord("t", "parquet", str(tmp_path / "t")), check=False)
            yield found
        assert violations(etcd.endpoint) == []


def keys(shared: str) -> list[str]:
    """The keys below the shared directory, without the folder of the namespace."""
    return [found.key.partition("/")[2] for found in open_store(shared).list()]


@on_s3
def test_large_results_are_read_by_their_clients_until_their_operation_is_removed(
    group: Daemons, shared: str, sample_env: dict[str, str]
) -> None:
    (daemon,) = group.start("a", options=("--shared-dir", shared), env=sample_env)
    op = group.client.start_operation("large", "t", {"sizes": [3, BIG]})
    assert op.wait(120).raise_for_state().report == {"length": BIG + 3}
    found = list(op.results())
    assert [len(one.result["text"]) for one in found] == [3, BIG]
    assert found[1].file["path"].startswith(f"{shared}/")
    assert [key for key in keys(shared) if key.startswith("results/t/large/1/000001-")] == keys(shared)
    with distop.connect(group.endpoint, shared_dir=f"{shared}-other") as elsewhere:
        results = elsewhere.operation(op.ref).results()
        assert next(results).result == {"text": "xxx"}
        with pytest.raises(NotFound, match=f"is in the file {shared}-other/.*there is no such file"):
            next(results)
    assert daemon.stop() == 0
    kept = keys(shared)
    write_now(group, record("t/large/90", time.time() - 5 * 3600))
    store = open_store(shared)
    (folder,) = store.list_folder().folders
    for instance in ("90", "95"):
        store.put_new(f"{folder}/results/t/large/{instance}/000000-7-i.json", b"{}")
    advance_an_hour(group)
    group.start("b", options=("--shared-dir", shared, "--history-age", "4h"), env=sample_env)
    kept.append("results/t/large/95/000000-7-i.json")
    group.eventually(lambda: keys(shared) == kept, "the results of the removed record are removed", seconds=60)


@on_s3
def test_a_long_list_of_files_reaches_its_job_and_is_removed(
    group: Daemons, shared: str, sample_env: dict[str, str]
) -> None:
    group.start("a", options=("--shared-dir", shared), env=sample_env)
    op = group.client.start_operation("sample", "t", {"names": ["a"], "files": 4000, "does": {"a": "files"}})
    assert op.wait(120).state == "success"
    assert [one.result for one in op.results()] == [{"files": 4000}]
    group.eventually(lambda: keys(shared) == [], "the plan is removed after its operation", seconds=60)


@on_s3
def test_a_validation_certifies_the_files_in_its_list(group: Daemons, shared: str, tmp_path: Path) -> None:
    folder = tmp_path / "t"
    folder.mkdir()
    pq.write_table(pa.table({"id": [1, 2, 3]}), folder / "a.parquet")
    group.start("a", ttl=10, options=("--shared-dir", shared, *SPARK))
    argument: dict[str, Any] = {"checks": [{"not_null": "id"}], "statistics": "never"}
    report = group.client.start_operation("validate", "t", argument).wait(250).raise_for_state().report
    certificate = report["certificate"]
    assert keys(shared) == [certificate["files"]]
    pq.write_table(pa.table({"id": [4, 5]}), folder / "b.parquet")
    since = argument | {"since": "t/validate/1"}
    report = group.client.start_operation("validate", "t", since).wait(250).raise_for_state().report
    assert (report["rows"], report["certificate"]["rows"]) == (2, 5)
    assert len(keys(shared)) == 2


@on_moto
def test_a_store_without_conditional_writes_is_refused_in_one_sentence(
    group: Daemons, shared: str, served: Served, sample_env: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first write there ends the operation, and no attempt is repeated."""
    with FaultyProxy(served.port) as front:
        front.fault = without_header(b"if-none-match")
        settings = json.dumps(storage_options.as_given(served.options(front.port)))
        group.start("a", options=("--shared-dir", shared), env={**sample_env, "DISTOP_STORAGE": settings})
        result = group.client.start_operation("large", "t", {"sizes": [BIG]}).wait(120)
    assert result.state == "failed"
    (error,) = result.errors
    assert "is not safe, so distop writes nothing there: of 16 writers" in error["text"]
    (job,) = group.client.operation(result.op).results()
    assert job.attempt == 1
    assert keys(shared) == []


@pytest.mark.parametrize("url", ["hdfs:///shared", "http://lake/shared", "s3://lake/shared?endpoint=x", "s3:///shared"])
def test_a_shared_directory_that_no_store_can_be_is_refused_by_clients_and_executors(url: str) -> None:
    settings = Settings({"shared_dir": url})
    for read in (client_config, lambda given: executor_config(given, {})):
        with pytest.raises(InvalidArgument, match="URL|names no bucket"):
            read(settings)
