"""The worker's pure parts: error texts, paths, plans, the gate, log files, Spark's settings."""

from __future__ import annotations

import asyncio
import json
import os
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from distop.errors import DistopError, InvalidArgument, TableUnavailable, describe
from distop.protocol.json_codec import MAX_ERROR_TEXT, dumps
from distop.protocol.plan import MAX_CHUNK_BYTES, PartitionPlan, Pinned, over, select
from distop.protocol.records import TableRecord
from distop.storage.deletion import Place
from distop.storage.places import folder, operation_path
from distop.worker.child_side import shared_files
from distop.worker.child_side.error_texts import explain, headline
from distop.worker.child_side.spark_session import SparkUnavailable, check_java, settings
from distop.worker.daemon_side import child_logs
from distop.worker.daemon_side.admission import SharedExclusiveLock, halves
from distop.worker.daemon_side.requests import Death, WorkerError

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path


class AnalysisException(Exception):
    """Has the name of Spark's."""

    __module__ = "pyspark.errors"


def test_spark_errors_keep_their_first_line() -> None:
    error = AnalysisException("\n[UNRESOLVED_COLUMN] no column x\n'Project [x]\n+- Relation")
    assert headline(error) == "AnalysisException: [UNRESOLVED_COLUMN] no column x"


def test_java_errors_lose_their_frames() -> None:
    class Py4JJavaError(Exception):
        __module__ = "py4j.protocol"

    error = Py4JJavaError("An error occurred while calling o1.\n: java.io.IOException: disk full\n\tat a.b.C(X.java)")
    assert headline(error) == "Py4JJavaError: java.io.IOException: disk full"


def test_explain_has_location_and_cause_and_a_bounded_length() -> None:
    try:
        try:
            raise KeyError("inner")
        except KeyError as inner:
            raise RuntimeError("outer " + "x" * 9_000) from inner
    except RuntimeError as error:
        text = explain(error)
    assert text.startswith("RuntimeError: outer")
    assert "KeyError" in text
    assert len(text) <= MAX_ERROR_TEXT


def test_the_error_of_an_unreachable_table_is_one_sentence() -> None:
    try:
        raise TableUnavailable("the location '/mnt/t' is empty") from OSError("a reason")
    except TableUnavailable as error:
        assert explain(error) == "the location '/mnt/t' is empty"


def test_errors_of_the_worker_are_described_as_all_errors_of_distop() -> None:
    error = WorkerError("transient", "the worker is being stopped")
    assert isinstance(error, DistopError)
    assert describe(error) == "the worker is being stopped"
    assert error.kind == "transient"


@given(st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=20))
def test_folder_names_are_safe_and_unique(name: str) -> None:
    found = folder(name)
    assert "/" not in found
    assert not found.startswith(".")
    assert (found == folder("a.b")) == (name == "a.b")


def test_each_operation_has_its_own_path() -> None:
    assert operation_path("sales.orders/validate/7") == "sales.orders/validate/7"
    assert operation_path("t/index/by.day/7") == "t/index/by.day/7"
    assert operation_path("%2E%2E/validate/7") == "%2E./validate/7"


def test_long_file_lists_are_spilled_and_read_back(tmp_path: Path) -> None:
    files = tuple((f"/data/{'x' * 200}/{i}", i, i * 10) for i in range(4_000))
    plans = [PartitionPlan(0, "small", files=files[:2]), PartitionPlan(1, "large", files=files)]
    place = Place(str(tmp_path))
    spilled = shared_files.spill(plans, place, "t/sample/1")
    assert spilled[0] is plans[0]
    assert spilled[1].files == ()
    assert spilled[1].files_at
    assert not spilled[1].files_at.startswith("/")
    assert len(dumps(spilled[1].to_json())) < MAX_CHUNK_BYTES
    assert shared_files.with_files(spilled[1], place, "t/sample/1").files == files
    with pytest.raises(InvalidArgument, match="--shared-dir"):
        shared_files.spill(plans, None, "t/sample/1")
    other = shared_files.spill(plans, Place(f"file://{tmp_path}"), "t/sample/11")
    for _ in range(2):
        shared_files.remove_plans(place, "t/sample/1")
        with pytest.raises(FileNotFoundError):
            shared_files.with_files(spilled[1], place, "t/sample/1")
    assert shared_files.with_files(other[1], place, "t/sample/11").files == files, "plans of other operations stay"


def plan(*names: str) -> list[PartitionPlan]:
    return [PartitionPlan(9, name) for name in names]


def test_selected_partitions_are_renumbered() -> None:
    chosen = select(plan("a", "b", "c"), ["c", "a"])
    assert [(p.partition, p.name) for p in chosen] == [(0, "a"), (1, "c")]
    assert [p.partition for p in select(plan("a", "b"), None)] == [0, 1]
    assert select([], None) == []


@pytest.mark.parametrize(
    ("partitions", "names", "sentence"),
    [
        (plan("a"), ["b"], "no partition 'b'"),
        (plan("a", "a"), None, "'a' is a duplicate"),
        (plan(""), None, "no name"),
        (plan("a"), [str(i) for i in range(9)], "and 4 more"),
    ],
)
def test_invalid_plans_are_refused(partitions: list[PartitionPlan], names: Sequence[str] | None, sentence: str) -> None:
    with pytest.raises(InvalidArgument, match=sentence):
        select(partitions, names)


@given(st.lists(st.integers(), min_size=1))
def test_halves_are_smaller_and_complete(items: list[int]) -> None:
    parts = list(halves(items))
    assert [x for part in parts for x in part] == items
    assert all(0 < len(part) < len(items) or len(items) == 1 for part in parts)


async def test_exclusive_entry_excludes_others_and_comes_first() -> None:
    gate, order = SharedExclusiveLock(), []
    inside, leave = asyncio.Event(), asyncio.Event()

    async def first() -> None:
        async with gate.shared():
            inside.set()
            await leave.wait()
            order.append("first")

    async def alone() -> None:
        async with gate.exclusive():
            order.append("alone")

    async def later() -> None:
        async with gate.shared():
            order.append("later")

    tasks = [asyncio.create_task(first())]
    await inside.wait()
    tasks += [asyncio.create_task(alone())]
    await asyncio.sleep(0)
    tasks += [asyncio.create_task(later())]
    given_up = asyncio.create_task(alone())
    await asyncio.sleep(0)
    given_up.cancel()
    leave.set()
    await asyncio.wait_for(asyncio.gather(*tasks), 10)
    assert order == ["first", "alone", "later"]


def test_log_files_are_few_and_bounded(tmp_path: Path) -> None:
    for _ in range(child_logs.KEEP + 5):
        child_logs.new_log(tmp_path).write_text("x")
    kept = sorted(path.name for path in (tmp_path / "logs").iterdir())
    assert len(kept) == child_logs.KEEP + 1
    assert f"child-{child_logs.KEEP + 5}.log" in kept
    path = tmp_path / "logs" / kept[0]
    path.write_text("é" * 5_000 + "end")
    assert child_logs.tail(path).endswith("end")
    assert len(child_logs.tail(path)) <= child_logs.TAIL
    child_logs.truncate_if_large(path, limit=100)
    assert path.stat().st_size == 0
    assert child_logs.tail(tmp_path / "none") == ""


def test_an_old_java_is_refused_in_one_sentence(tmp_path: Path) -> None:
    java = tmp_path / "bin" / "java"
    java.parent.mkdir()
    java.write_text("#!/bin/sh\necho 'openjdk version \"11.0.2\"' >&2\n")
    java.chmod(0o755)
    with pytest.raises(SparkUnavailable, match=r"^Java 17 or newer is needed: .*java is version 11$"):
        check_java({"JAVA_HOME": str(tmp_path)})
    with pytest.raises(SparkUnavailable, match="no executable bin/java"):
        check_java({"JAVA_HOME": str(tmp_path / "none")})


def test_settings_of_the_user_override_ours(tmp_path: Path) -> None:
    conf = settings("local[3]", "ex", tmp_path, 10.0, {"spark.ui.enabled": "true", "spark.x": "y"})
    assert conf["spark.ui.enabled"] == "true"
    assert conf["spark.x"] == "y"
    assert conf["spark.sql.session.timeZone"] == "UTC"
    assert conf["spark.scheduler.mode"] == "FAIR"
    assert "spark.driver.host" not in settings("spark://h:7077", "ex", tmp_path, 10.0, {})
    assert os.fspath(tmp_path) in conf["spark.local.dir"]


@pytest.mark.parametrize("master", ["local", "local[*]", "local[2,3]"])
def test_hole_6_a_local_spark_always_requires_authentication(tmp_path: Path, master: str) -> None:
    conf = settings(master, "ex", tmp_path, 10.0, {"spark.authenticate": "false"})
    assert conf["spark.authenticate"] == "true"
    assert "spark.authenticate" not in settings("spark://h:7077", "ex", tmp_path, 10.0, {}), (
        "a cluster needs a secret from the operator"
    )


def test_hole_6_the_error_of_a_job_that_killed_its_child_quotes_no_log() -> None:
    """A child runs jobs of all tables; file names of one table got into the history of another."""
    death = Death("exited", "exit code 3", "ERROR the file s3://other/customers.csv cannot be read")
    assert "exit code 3" in str(death)
    assert "customers" not in str(death)
    assert "customers" in death.with_log()
    stopped = Death("stubborn", "", "customers")
    assert "customers" not in stopped.with_log(), "it was ended on purpose"


@pytest.mark.parametrize("ttl", [6.0, 10.0, 30.0, 600.0])
def test_spark_executors_elsewhere_stop_before_their_jobs_are_taken_over(tmp_path: Path, ttl: float) -> None:
    conf = settings("spark://h:7077", "ex", tmp_path, ttl, {})
    interval = int(conf["spark.executor.heartbeatInterval"].removesuffix("ms")) / 1000
    failures = int(conf["spark.executor.heartbeat.maxFailures"])
    # The first failure comes within one interval; the lease was renewed within a third of the ttl.
    assert interval * (failures + 1) <= ttl * 2 / 3
    assert 1.0 <= interval <= 10.0


def test_a_local_spark_gets_no_heartbeat_settings(tmp_path: Path) -> None:
    assert not [name for name in settings("local[2]", "ex", tmp_path, 2.0, {}) if "heartbeat" in name]


def test_spilled_plans_keep_the_partitions_of_irregular_folders(tmp_path: Path) -> None:
    """Those of the table itself and of a second table."""
    partitions = [
        PartitionPlan(n, f"k={n}", files=((f"/{'k=' if n % 2 else 'odd'}{n}/f", 1, 2),), values={"k": str(n)})
        for n in range(20_000)
    ]
    whole = over("@table", partitions)
    assert (len(whole.files), len(whole.folders), whole.folders["/odd4"]) == (20_000, 10_000, "k=4")
    beside = Pinned(TableRecord("u", "spark", "db.u"), "v", whole.files, folders=whole.folders)
    (spilled,) = shared_files.spill([replace(whole, beside=(beside,))], Place(str(tmp_path)), "t/sample/1")
    assert (spilled.files, spilled.folders, spilled.beside[0].folders) == ((), {}, {})
    read = PartitionPlan.from_json(json.loads(json.dumps(spilled.to_json())))
    came = shared_files.with_files(read, Place(str(tmp_path)), "t/sample/1")
    assert (came.files, came.folders) == (whole.files, whole.folders)
    assert (came.beside[0].files, came.beside[0].folders) == (whole.files, whole.folders)
    small = replace(whole, files=whole.files[:3], folders={"/odd0": "k=0"})
    assert PartitionPlan.from_json(json.loads(json.dumps(small.to_json()))) == small


def test_hole_2_spark_opens_no_url_that_can_name_any_host(tmp_path: Path) -> None:
    """Unless the operator allows it. A path replaced after its check could choose a host."""
    own = settings("local", "e", tmp_path, 20.0, {"spark.hadoop.fs.webhdfs.impl": "org.example.Own"})
    refused = {name for name, value in own.items() if value == "distop.RefusedFileSystem"}
    schemes = ("http", "https", "ftp", "sftp", "swebhdfs", "har")
    assert refused == {f"spark.hadoop.fs.{scheme}.impl" for scheme in schemes}
    assert own["spark.hadoop.fs.webhdfs.impl"] == "org.example.Own"
