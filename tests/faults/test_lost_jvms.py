"""The JVM of a child is killed while compact or expire-partitions runs. Each work is done once, and loses no row.

A child without its JVM ends, and another one continues the operation. conftest.py audits etcd's history.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.faults.maintained_tables import ExpirePartitionsTables, Maintained
from tests.faults.spark_tables import CompactIcebergTables, CompactSortedTables, ExpireIcebergPartitionsTables
from tests.faults.test_maintenance_faults import name_of
from tests.support import delta
from tests.support.daemons import SPARK
from tests.support.lake import MAVEN, jar
from tests.support.needs import need

if TYPE_CHECKING:
    from pathlib import Path

    from tests.faults.fault_injection import FaultInjector
    from tests.support.daemons import Daemons

pytestmark = [pytest.mark.etcd, pytest.mark.spark, pytest.mark.timeout(400), pytest.mark.rotating]


@pytest.fixture
def options() -> tuple[str, ...]:
    """Options of a daemon that has Spark with Iceberg and Delta."""
    need(jar(), MAVEN)
    need(delta.jars(), delta.MAVEN)
    return (*SPARK, "--spark-conf", f"spark.jars={','.join(map(str, [jar(), *(delta.jars() or [])]))}")


@pytest.fixture
def tables(kind: type[Maintained], group: Daemons, tmp_path: Path, faults: FaultInjector) -> Maintained:
    """Tables of the kind in the test's parameter, on a disk."""
    group.client.remove_table("t")  # its folder is that of all files of the test
    return kind(group, tmp_path, faults, str(tmp_path / "tables"))


@pytest.mark.parametrize(
    "kind", [CompactIcebergTables, pytest.param(CompactSortedTables, marks=pytest.mark.slow)], ids=name_of
)
def test_a_compaction_whose_jvm_is_killed_rewrites_each_group_once(
    kind: type[Maintained],
    tables: Maintained,
    group: Daemons,
    faulty_env: dict[str, str],
    options: tuple[str, ...],
) -> None:
    """While Spark writes, after the new files are written, after they are offered, and around the commit."""
    rewrite, *_ = tables.steps
    faults = [
        f"{rewrite}.before kill-busy-jvm",
        f"{rewrite}.after lose-jvm",
        "GroupRewrite.rewrite_and_offer.after lose-jvm",
    ]
    faults += [f"{tables.commit}.{moment} lose-jvm" for moment in ("before", "after")]
    for n, fault in enumerate(faults):
        tables.create(f"t{n}", fault)
    group.start("ann", ttl=10, env=faulty_env, options=options)
    for n, fault in enumerate(faults):
        operation = tables.start(f"t{n}")
        tables.faults.await_triggered(group, f"t{n}")
        result = operation.wait(150)
        assert result.state == "success", (fault, result.errors, group.tails())
        tables.assert_done(f"t{n}", operation, result.report)


@pytest.mark.parametrize(
    ("kind", "moment"),
    [
        (ExpireIcebergPartitionsTables, "before"),
        (ExpirePartitionsTables, "after"),
        pytest.param(ExpireIcebergPartitionsTables, "after", marks=pytest.mark.slow),
        pytest.param(ExpirePartitionsTables, "before", marks=pytest.mark.slow),
    ],
    ids=lambda one: one if isinstance(one, str) else name_of(one),
)
def test_partitions_expire_once_if_the_jvm_of_their_child_is_killed(
    kind: type[Maintained],
    moment: str,
    tables: Maintained,
    group: Daemons,
    tmp_path: Path,
    faults: FaultInjector,
    faulty_env: dict[str, str],
    options: tuple[str, ...],
) -> None:
    """They need no JVM, but run in a child in which a compaction has started one, and end with it."""
    compacted = CompactSortedTables(group, tmp_path, faults, str(tmp_path / "compacted"))
    compacted.create("c0")
    tables.create("t0", f"{tables.commit}.{moment} lose-jvm")
    group.start("ann", ttl=10, env=faulty_env, options=options)
    compaction = compacted.start("c0")
    compacted.assert_done("c0", compaction, compaction.wait(120).raise_for_state().report)
    operation = tables.start("t0")
    tables.faults.await_triggered(group, "t0")
    result = operation.wait(120)
    assert result.state == "success", (result.errors, group.tails())
    tables.assert_done("t0", operation, result.report)
