"""compact, expire, remove-orphans, restore and export under faults on real daemons. No test here needs a JVM.

Each operation does its work once, loses no row, and changes no file of a neighbour, whatever is killed or suspended,
and whatever happens to the answers of the store or of the catalog. conftest.py audits etcd's history.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.faults.maintained_tables import (
    CompactTables,
    ExpirePartitionsTables,
    ExpireSnapshotsInCatalog,
    ExpireSnapshotsTables,
    ExportTables,
    Maintained,
    RemoveOrphansTables,
    RestoreTables,
    contents,
)
from tests.faults.s3_lake import SHORT, delay_writes, double_requests, lose_answers, lose_requests, throttle
from tests.support.icebergrest import configure
from tests.support.processes import machine

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.faults.fault_injection import FaultInjector
    from tests.faults.s3_lake import S3Lake
    from tests.support.daemons import Daemon, Daemons

pytestmark = [pytest.mark.etcd, pytest.mark.timeout(240), pytest.mark.rotating]

FAULTS_OF_A_STORE = {
    "answers": (lose_answers, double_requests),
    "requests": (lose_requests, delay_writes),
    "throttled": (throttle,),
}
ON_DISK: list[type[Maintained]] = [
    CompactTables,
    ExpireSnapshotsTables,
    ExpireSnapshotsInCatalog,
    ExpirePartitionsTables,
    RemoveOrphansTables,
    RestoreTables,
    ExportTables,
]
ON_S3 = [kind for kind in ON_DISK if kind is not ExpireSnapshotsInCatalog]
IN_STEPS = [kind for kind in ON_DISK if kind.cancelled_at]


def name_of(kind: type[Maintained]) -> str:
    return kind.__name__.removesuffix("Tables")


@pytest.fixture
def env(kind: type[Maintained], tmp_path: Path, faulty_env: dict[str, str]) -> dict[str, str]:
    shared = {"DISTOP_SHARED_DIR": str(tmp_path / "shared")} if kind is ExpireSnapshotsInCatalog else {}
    return {**faulty_env, **shared, "DISTOP_EXPORT_TO": str(tmp_path / "tables" / "out")}


@pytest.fixture
def tables(
    kind: type[Maintained],
    group: Daemons,
    tmp_path: Path,
    faults: FaultInjector,
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[Maintained]:
    """Tables of the kind in the test's parameter, on a disk."""
    group.client.remove_table("t")  # its folder is that of all files of the test
    configure(monkeypatch, type="sql", uri=f"sqlite:///{tmp_path}/lake/catalog.db")
    made = kind(group, tmp_path, faults, str(tmp_path / "tables"))
    yield made
    if isinstance(made, ExpireSnapshotsInCatalog):
        made.catalog.close()


def executor_of(daemons: list[Daemon], pid: int) -> Daemon:
    """The executor with this child process."""
    return next(one for one in daemons if pid in machine(one.pid))


@pytest.mark.parametrize("kind", ON_DISK, ids=name_of)
def test_a_child_killed_at_any_step_repeats_nothing(
    kind: type[Maintained], tables: Maintained, group: Daemons, env: dict[str, str]
) -> None:
    for n, point in enumerate(tables.points):
        tables.create(f"t{n}", f"{point} kill")
    group.start("ann", "bob", ttl=10, env=env)
    # One at a time: the kill for one operation would interrupt another one in the same child at a different step.
    for n, point in enumerate(tables.points):
        operation = tables.start(f"t{n}")
        tables.faults.await_triggered(group, f"t{n}", seconds=60)
        result = operation.wait(90)
        assert result.state == "success", (point, result.errors, group.tails())
        tables.assert_done(f"t{n}", operation, result.report)


@pytest.mark.parametrize("kind", ON_DISK, ids=name_of)
@pytest.mark.parametrize("moment", ["before", "after"])
def test_an_executor_killed_around_its_change_repeats_nothing(
    kind: type[Maintained], moment: str, tables: Maintained, group: Daemons, env: dict[str, str]
) -> None:
    """kill -9 of the daemon; its guardian kills the child. Another executor completes the operation."""
    tables.create("t0", f"{tables.commit}.{moment} hold")
    daemons = group.start("ann", "bob", env=env)
    operation = tables.start("t0")
    pid = tables.faults.await_triggered(group, "t0", seconds=60)
    executor_of(daemons, pid).kill()
    result = operation.wait(90)
    assert result.state == "success", (result.errors, group.tails())
    tables.assert_done("t0", operation, result.report)


@pytest.mark.parametrize("kind", ON_DISK, ids=name_of)
@pytest.mark.parametrize("moment", ["before", "after"])
def test_an_executor_that_wakes_up_changes_nothing_that_another_took_over(
    kind: type[Maintained], moment: str, tables: Maintained, group: Daemons, env: dict[str, str]
) -> None:
    """Two executors on one job: ann is suspended around its change, and continues when bob has completed all."""
    tables.create("t0", f"{tables.commit}.{moment} hold")
    (ann,) = group.start("ann", env=env)
    operation = tables.start("t0")
    tables.faults.await_triggered(group, "t0", seconds=60)
    ann.suspend()
    group.start("bob", env=env)
    result = operation.wait(60)
    assert result.state == "success", (result.errors, group.tails())
    tables.faults.release("t0")
    ann.wake()
    group.await_ready("ann")
    tables.assert_done("t0", operation, result.report)


@pytest.mark.parametrize("kind", ON_DISK, ids=name_of)
def test_twice_equals_once(kind: type[Maintained], tables: Maintained, group: Daemons, env: dict[str, str]) -> None:
    tables.create("t0")
    group.start("ann", ttl=10, env=env)
    operation = tables.start("t0")
    result = operation.wait(60)
    tables.assert_done("t0", operation, result.report)
    if kind is RestoreTables:
        return  # a second one has nothing to restore, and is refused
    before = contents(tables.location("t0"))
    again = tables.start("t0").wait(60)
    assert again.state == "success", (again.errors, group.tails())
    assert contents(tables.location("t0")) == before
    tables.assert_neighbour("t0")


@pytest.mark.parametrize("kind", IN_STEPS, ids=name_of)
def test_a_cancel_in_the_middle_keeps_what_was_done_and_says_so(
    kind: type[Maintained], tables: Maintained, group: Daemons, env: dict[str, str]
) -> None:
    tables.create("t0", f"{tables.cancelled_at} hold")
    group.start("ann", ttl=10, env=env)
    operation = tables.start("t0")
    tables.faults.await_triggered(group, "t0", seconds=60)
    operation.cancel("changed my mind")
    tables.faults.release("t0")
    result = operation.wait(60)
    assert result.state == "cancelled", group.tails()
    tables.assert_cancelled("t0", result.report)
    tables.faults.set_faults("t0")
    done = tables.start("t0").wait(60)
    assert done.state == "success", (done.errors, group.tails())
    tables.assert_neighbour("t0")
    assert tables.read("t0") == tables.rows["t0"]


@pytest.mark.parametrize(
    ("faults_of", "kind"),
    [
        pytest.param(
            some,
            kind,
            id=f"{name}-{name_of(kind)}",
            # Each lost answer to a part of an upload costs a time limit of a request: 109 s.
            marks=[pytest.mark.slow] if name == "answers" and kind in (ExportTables, RestoreTables) else [],
        )
        for name, some in FAULTS_OF_A_STORE.items()
        for kind in ON_S3
    ],
)
def test_nothing_is_lost_or_repeated_whatever_happens_to_requests_and_answers_of_the_store(
    kind: type[Maintained],
    faults_of: tuple[object, ...],
    lake: S3Lake,
    group: Daemons,
    tmp_path: Path,
    faults: FaultInjector,
    faulty_env: dict[str, str],
) -> None:
    group.client.remove_table("t")
    tables = kind(group, tmp_path, faults, lake.location, lake)
    for n, _ in enumerate(faults_of):
        tables.create(f"t{n}")
    limit = SHORT if throttle in faults_of else 20.0
    env = {**faulty_env, **lake.env(limit), "DISTOP_EXPORT_TO": f"{lake.location}/out"}
    group.start("ann", ttl=10, env=env)
    for n, fault in enumerate(faults_of):
        fault(lake)  # type: ignore[operator]
        operation = tables.start(f"t{n}")
        result = operation.wait(120)
        assert result.state == "success", (result.errors, group.tails())
        tables.assert_done(f"t{n}", operation, result.report)
