"""The autopilot starts no operation that a table's format refuses, and leaves out none that it allows."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from distop import testing
from distop.protocol import policy_condition
from distop.protocol.policy_condition import SINCE
from distop.protocol.records import TableRecord
from distop.protocol.table_registry import excludes
from distop.services import autopilot
from distop.tables import statistics_of
from distop_behaviors.compact import Compact
from distop_behaviors.expire import ExpirePartitions, ExpireSnapshots
from distop_behaviors.export import Export
from distop_behaviors.orphans import RemoveOrphans, Restore
from tests.support.delta_logs import DeltaLog, features, remove, statistics, vector
from tests.unit.behaviors.test_remove_orphans import delta, iceberg
from tests.unit.support.model_submission import KEYS, Etcd

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from distop.behavior import Behavior

TYPES = {one.type_name: one for one in (Compact, ExpireSnapshots, RemoveOrphans)}


def parquet(folder: Path) -> TableRecord:
    folder.mkdir()
    pq.write_table(pa.table({"id": [1]}), folder / "a.parquet")
    return TableRecord("t", "parquet", str(folder))


def chosen(table: TableRecord, *published: str) -> autopilot.Autopilot:
    async def work() -> autopilot.Autopilot:
        etcd = Etcd()
        etcd.put(KEYS.table("t"), table.encode())
        for name in published:
            etcd.put(KEYS.behavior(name), TYPES[name].declaration().encode())
        etcd.renew_client()
        listed = await etcd.client.autopilot("t", dry_run=True)
        made = await etcd.client.autopilot("t")
        assert made.written is bool(made.policies)
        assert [one.name for one in listed.policies] == [one.name for one in made.policies]
        assert len(await etcd.client.policies("t")) == len(made.policies)
        return made

    return asyncio.run(work())


@pytest.mark.parametrize(("make", "count"), [(iceberg, 3), (delta, 3), (parquet, 0)])
def test_each_chosen_operation_can_be_planned(tmp_path: Path, make: Callable[[Path], TableRecord], count: int) -> None:
    table = make(tmp_path / "t")
    found = chosen(table, *TYPES)
    assert len(found.policies) == count
    assert len(found.left_out) == len(autopilot.RULES) - count
    for one in found.policies:
        assert one.policy is not None
        names = policy_condition.parse(one.policy.when).names() if one.policy.when else frozenset()
        statistics = {name for name in names if not name.startswith(SINCE)}
        assert None not in statistics_of(table, statistics, 1_000).values(statistics).values()
        argument = {**one.policy.arg, "dry_run": True}
        done = testing.run_operation(
            TYPES[one.policy.start], argument, table=table, folder=tmp_path / f"work of {one.name}"
        )
        assert (done.state, list(done.errors)) == ("success", []), one.name


def test_what_the_autopilot_leaves_out_is_refused_by_the_format(tmp_path: Path) -> None:
    table = parquet(tmp_path / "t")
    left_out = chosen(table, *TYPES).left_out
    for rule in autopilot.RULES:
        assert (
            left_out[rule.name] == f"{rule.start} needs a format with versions and commits, as iceberg and delta have"
        )
        done = testing.run_operation(TYPES[rule.start], {"dry_run": True}, table=table, folder=tmp_path / rule.name)
        assert done.state == "failed", rule.name


def test_a_type_that_nobody_has_published_is_left_out(tmp_path: Path) -> None:
    found = chosen(iceberg(tmp_path / "t"), "expire-snapshots")
    assert [one.name for one in found.policies] == ["autopilot-expire-snapshots"]
    assert found.left_out["autopilot-compact"] == "no executor has published the type compact"


def test_compact_rewrites_the_deletes_for_which_the_autopilot_starts_it(tmp_path: Path) -> None:
    """It was started although no file was chosen by its deletes, so the condition held forever."""
    log = DeltaLog(tmp_path / "t").create(features("deletionVectors"))
    added = {"stats": statistics(10), "deletionVector": vector("^(]<&u-VY!GpVjU9LJQb", rows=5)}
    log.commit(log.add("a.parquet", stats=statistics(10)))
    log.commit(remove("a.parquet"), log.add("a.parquet", **added))
    (one,) = chosen(log.record, "compact").policies
    assert one.policy is not None
    condition = policy_condition.parse(one.policy.when)
    statistic = {name for name in condition.names() if not name.startswith(SINCE)}
    values = {
        name: value or 0.0 for name, value in statistics_of(log.record, statistic, 1_000).values(statistic).items()
    }
    assert condition.holds({**values, f"{SINCE}compact": 7_200.0})
    argument = {**one.policy.arg, "dry_run": True}
    done = testing.run_operation(Compact, argument, table=log.record, folder=tmp_path / "work")
    assert (done.report["verdict"], done.report["groups"]["planned"]) == ("planned", 1)


@pytest.mark.parametrize("other", [Compact, ExpireSnapshots, ExpirePartitions, Export])
@pytest.mark.parametrize("orphans", [RemoveOrphans, Restore])
def test_no_other_type_writes_removes_or_copies_files_during_a_removal_of_orphans(
    orphans: type[Behavior], other: type[Behavior]
) -> None:
    mine, theirs = (one.declaration() for one in (orphans, other))
    assert excludes(mine.conflicts_with, theirs.type_name) or excludes(theirs.conflicts_with, mine.type_name)
