"""Faults of the store under operations on tables on S3: lost answers, doubled requests, throttling, a killed gateway.

Each operation must have the results of a run without faults. Executors reach the store through a proxy, which injects
the faults; the test reaches it directly.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from distop.protocol.records import OperationRef
from distop.storage.store_check import CHECKS
from tests.faults.s3_lake import FAULTS, SHORT, KilledGateway, throttle
from tests.faults.test_index_faults import IndexedOnS3
from tests.faults.test_validate_faults import DECIDED, Subject
from tests.support import stored_files
from tests.support.replay import Written

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from distop import Operation
    from tests.faults.fault_injection import FaultInjector
    from tests.faults.s3_lake import S3Lake
    from tests.support.daemons import Daemons

pytestmark = [pytest.mark.etcd, pytest.mark.timeout(240), pytest.mark.rotating]

ON_GATEWAY = pytest.mark.parametrize("lake", ["versitygw"], indirect=True)


def assert_no_attempt_was_consumed(group: Daemons, operation: Operation) -> None:
    """Assert that planning and completion have not failed, and that each job ended in its first attempt."""
    assert not [line for line in group.lines() if "planning failed" in line or "completion failed" in line]
    assert {one.attempt for one in operation.results()} <= {1}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_validation_has_the_results_of_a_run_without_faults(
    fault: Callable[[S3Lake], None],
    lake: S3Lake,
    group: Daemons,
    faults: FaultInjector,
    faulty_env: dict[str, str],
) -> None:
    subject = Subject(group, lake.location, faults)
    for name in ("t0", "t1"):
        subject.create(name)
    before = subject.data("t0")
    group.start("ann", ttl=10, env={**faulty_env, **lake.env(SHORT if fault is throttle else 20.0)})
    undisturbed = subject.run("t1", DECIDED)
    assert undisturbed.state == "success", group.tails()
    fault(lake)
    lake.proxy.seen.clear()
    operation = subject.start("t0", DECIDED)
    result = operation.wait(150)
    assert result.state == "success", (result.record, group.tails())
    assert {"GET", "PUT"} <= {seen.method for seen in lake.proxy.seen}
    disturbed = subject.collect_results(operation, result)
    disturbed.assert_same(subject.run("t0", DECIDED), fault)
    assert_no_attempt_was_consumed(group, operation)
    assert subject.data("t0") == before
    assert len(subject.operation_files("t0")) == subject.lists
    assert not [key for key in stored_files.keys(lake.location) if CHECKS in key]


@pytest.mark.parametrize("fault", FAULTS)
def test_an_index_is_built_refreshed_and_dropped_once(
    fault: Callable[[S3Lake], None], lake: S3Lake, group: Daemons, tmp_path: Path, sample_env: dict[str, str]
) -> None:
    (tmp_path / "indexed").mkdir()
    indexed = IndexedOnS3(group, tmp_path / "indexed", f"{lake.location}/table")
    group.start("ann", ttl=10, env={**sample_env, **lake.env(SHORT if fault is throttle else 20.0)})
    for generation in (1, 2):
        fault(lake)
        operation = indexed.start()
        result = operation.wait(120)
        assert (result.state, result.report["generation"]) == ("success", generation), (result.record, group.tails())
        assert_each_job_ended_once(group, operation)
        indexed.assert_finds_all_rows()
        indexed.assert_clean()
        indexed.grow()
    before = indexed.data()
    fault(lake)
    result = indexed.drop().wait(120)
    assert (result.state, result.report) == ("success", {"name": "i", "dropped": True}), group.tails()
    assert [*indexed.index_files()] == ["generations/000003.json"]
    assert indexed.data() == before


def assert_each_job_ended_once(group: Daemons, operation: Operation) -> None:
    written = Written(group.endpoint, OperationRef.parse(operation.ref))
    assert all(len(states) == 1 for states in written.states.values())
    assert all(len(outcomes) == 1 for outcomes in written.outcomes.values())


@ON_GATEWAY
def test_a_validation_continues_after_the_gateway_was_killed(
    lake: S3Lake, group: Daemons, faults: FaultInjector, faulty_env: dict[str, str]
) -> None:
    """It is killed before planning, before a batch of jobs, and before the completion, and started again."""
    gateway, subject = lake.served.process, Subject(group, lake.location, faults)
    assert gateway is not None
    points = ("partitions.before", "batch.before", "completion.before")
    for n, point in enumerate(points):
        subject.create(f"t{n}", f"{point} hold")
    group.start("ann", ttl=10, env={**faulty_env, **lake.env()})
    disturbed = []
    for n, point in enumerate(points):
        operation = subject.start(f"t{n}", DECIDED)
        faults.await_triggered(group, f"t{n}")
        gateway.kill()
        lake.proxy.seen.clear()
        faults.release(f"t{n}")
        group.eventually(lambda: len(lake.proxy.seen) > 2, "requests fail")
        assert gateway.start()
        result = operation.wait(90)
        assert result.state == "success", (point, result.record, group.tails())
        assert_no_attempt_was_consumed(group, operation)
        disturbed.append(subject.collect_results(operation, result))
    for n, point in enumerate(points):
        disturbed[n].assert_same(subject.run(f"t{n}", DECIDED), point)
        assert len(subject.data(f"t{n}")) == 3
        assert len(subject.operation_files(f"t{n}")) == subject.lists


@ON_GATEWAY
@pytest.mark.parametrize("applied", [False, True], ids=["before", "after"])
def test_an_index_is_published_once_if_the_gateway_is_killed_around_a_write(
    applied: bool, lake: S3Lake, group: Daemons, tmp_path: Path, sample_env: dict[str, str]
) -> None:
    """It is killed at a write of a staged segment, of a data file, and of a generation, and started again."""
    (tmp_path / "indexed").mkdir()
    indexed = IndexedOnS3(group, tmp_path / "indexed", f"{lake.location}/table")
    group.start("ann", ttl=10, env={**sample_env, **lake.env()})
    for generation, part in enumerate(("/stage/", "/data/", "/generations/"), 1):
        gateway = KilledGateway(lake, part, applied=applied)
        operation = indexed.start()
        group.eventually(lambda at=gateway: at.requests_without_server() > 1, f"requests fail after {part}")  # type: ignore[misc]
        assert gateway.process.start()
        result = operation.wait(90)
        assert (result.state, result.report["generation"]) == ("success", generation), (part, group.tails())
        assert_each_job_ended_once(group, operation)
        indexed.assert_finds_all_rows()
        indexed.grow()
    assert indexed.start().wait(60).state == "success"
    indexed.assert_finds_all_rows()
    indexed.assert_clean()
