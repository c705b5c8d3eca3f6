"""``compact`` on Iceberg tables, without a JVM: which files its completion may remove, and what it takes as done."""

from __future__ import annotations

import random
from collections import Counter
from typing import TYPE_CHECKING, Any

import pyarrow.parquet as pq
import pytest
from pyiceberg.partitioning import UNPARTITIONED_PARTITION_SPEC, PartitionField, PartitionSpec
from pyiceberg.schema import Schema
from pyiceberg.table.metadata import new_table_metadata
from pyiceberg.table.sorting import UNSORTED_SORT_ORDER
from pyiceberg.transforms import BucketTransform, DayTransform, MonthTransform, TruncateTransform, VoidTransform
from pyiceberg.typedef import Record
from pyiceberg.types import NestedField, StringType, TimestampType

from distop.behavior import OutcomeRow
from distop.errors import InvalidArgument
from distop.storage.places import make_stage
from distop.tables import plan_table
from distop.tables.commits import GroupStatus, Marks, Replacement
from distop.tables.iceberg.avro import ManifestIO
from distop.tables.iceberg.iceberg_replacer import IcebergReplacer
from distop.tables.iceberg.snapshot_files import PartitionNames, partition_types, values_in
from distop.tables.partition_condition import PartitionCondition
from distop_behaviors.compact import Compact
from distop_behaviors.compact.compact_argument import CompactArgument
from distop_behaviors.compact.group_committer import REASONS
from distop_behaviors.compact.group_rewrite import GroupRewrite
from distop_behaviors.expire import ExpireSnapshots
from tests.support.context import FakeContext, Ran, complete, run_operation
from tests.support.lake import Folder
from tests.support.row_deltas import commit, equality_deletes, position_deletes
from tests.support.table_files import LoggedFolder
from tests.unit.tables.iceberg.test_tables_iceberg import BY_K, SCHEMA, record, rows

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from pyiceberg.table import Table

OPERATION = "t/compact/1"
EXPIRED = {"older_than": 0, "allow_recent": True}


class Compacting:
    """A compaction of a table of two small files, whose new file a test commits: Spark is not used."""

    def __init__(self, folder: Path, version: int = 2, before_plan: Callable[[Table], object] = lambda _: None) -> None:
        self.work = folder / "work"
        self.work.mkdir()
        self.folder = folder / "t"
        self.catalog = LoggedFolder(self.folder)
        self.table: Table = self.catalog.new(SCHEMA, UNPARTITIONED_PARTITION_SPEC, **{"format-version": str(version)})
        for key in "ab":
            self.table.append(rows(key))
        before_plan(self.table)
        self.read = self.table.metadata.current_snapshot_id
        self.argument = CompactArgument(min_input_files=2)
        self.plans = Compact().partitions(record(self.folder), self.argument, self.context()).partitions
        rewrite = GroupRewrite(self.argument, self.context(), "x")
        self.stage = rewrite.committer.stage_at(self.context().stage_place)
        self.stage.begin()
        make_stage(self.stage.data, 0o755)
        self.new = f"{self.stage.data.location}/part-0.parquet"
        pq.write_table(self.table.scan().to_arrow(), self.new)
        self.replacement = Replacement(
            group=0,
            files=2,
            bytes=10,
            rows=2,
            deleted_rows=0,
            added_files=1,
            added_bytes=10,
            sizes=(10,),
            detail={
                "read": str(self.read),
                "sequence": getattr(self.table.metadata, "last_sequence_number", 0),
                "removed": [path for path, _, _ in self.plans[0].files],
                "added": [self.new],
            },
            stage=self.stage,
        )
        self.stage.offer(self.replacement)

    def context(self) -> FakeContext:
        context = FakeContext(self.work, record(self.folder))
        context.operation = OPERATION
        context.partition = self.plans[0] if hasattr(self, "plans") else None
        return context

    def commit(self, operation: str = OPERATION) -> None:
        """Replace the files of the group as this operation does."""
        marks = Marks(operation, "1").texts([self.replacement])
        old = [task.file for task in self.table.scan().plan_files()]
        with self.table.transaction() as transaction, transaction.update_snapshot(marks).overwrite() as overwriting:
            for file in old:
                overwriting.delete_data_file(file)
        self.table.add_files([self.new], snapshot_properties=marks)

    def set_back(self, snapshot: int | None) -> None:
        """Roll the table back, as another user does meanwhile."""
        assert snapshot is not None
        self.table.manage_snapshots().rollback_to_snapshot(snapshot).commit()

    def statuses(self) -> tuple[GroupStatus, GroupStatus]:
        """The statuses of the new files, and of the group of the plan."""
        replacer = IcebergReplacer(record(self.folder), self.context(), by_catalog=False)
        head = replacer.load()
        return (*replacer.statuses(head, [self.replacement]), *replacer.group_statuses(head, self.plans))  # type: ignore[return-value]

    def current(self) -> str:
        """The current metadata file."""
        return IcebergReplacer(record(self.folder), self.context(), by_catalog=False).load().source

    def expire(self) -> None:
        """Remove all snapshots but the current one, as another operation does meanwhile."""
        self.ended = run_operation(
            ExpireSnapshots(), record(self.folder), EXPIRED, lambda table: FakeContext(self.work / "other", table)
        )
        assert self.ended.report["removed"] > 0

    def complete(self) -> Ran:
        result = {"state": "staged", "before": {}, "after": {}}
        outcome = OutcomeRow(0, self.plans[0].name, True, result, "", self.stage.place)
        return complete(
            Compact(), self.argument, record(self.folder), [outcome], self.plans, self.context(), version=""
        )

    @property
    def files(self) -> set[str]:
        return {path.name for path in self.folder.rglob("*.parquet")}


@pytest.mark.parametrize("version", [1, 2])
def test_committed_files_stay_if_the_snapshot_of_their_commit_is_expired(tmp_path: Path, version: int) -> None:
    """No snapshot shows then that the group was committed, and yet the table has the new file."""
    one = Compacting(tmp_path, version)
    one.commit()
    one.table.append(rows("c"))
    one.expire()
    one.complete()
    assert "part-0.parquet" in one.files
    assert len(one.table.scan().to_arrow()) == 3


def test_committed_files_stay_if_a_former_snapshot_has_them(tmp_path: Path) -> None:
    """The table was set back, so that the current snapshot has neither the new file nor those that it replaces."""
    one = Compacting(tmp_path)
    first = one.table.metadata.snapshots[0].snapshot_id
    one.commit()
    committed = one.table.metadata.snapshots[-1].snapshot_id
    one.table.manage_snapshots().create_tag(committed, "kept").commit()
    one.table.manage_snapshots().rollback_to_snapshot(first).commit()
    one.complete()
    assert "part-0.parquet" in one.files
    assert len(one.table.scan(snapshot_id=committed).to_arrow()) == 2


def test_files_that_were_never_committed_are_removed(tmp_path: Path) -> None:
    one = Compacting(tmp_path)
    one.table.overwrite(rows("x"))
    ran = one.complete()
    assert "nothing was committed" in ran.message
    assert (ran.report["left_bytes"], "part-0.parquet" in one.files) == (0, False)


def test_commits_before_the_plan_are_not_of_this_operation(tmp_path: Path) -> None:
    """Numbers of operations begin anew with a new etcd: the name alone does not tell who has committed."""
    one = Compacting(tmp_path)
    one.commit(OPERATION)
    for key in "de":
        one.table.append(rows(key))
    context = one.context()
    plan = Compact().partitions(record(one.folder), one.argument, context).partitions[0]
    replacer = IcebergReplacer(record(one.folder), context, by_catalog=False)
    assert replacer.committed_versions(replacer.load(), plan) == {}


def test_a_condition_chooses_partitions_of_all_specs(tmp_path: Path) -> None:
    """Files of another spec, which is not by the column, are never chosen."""
    table = Folder(tmp_path / "t").new(SCHEMA, BY_K)
    for _ in range(2):
        table.append(rows("a", "b", None))
    with table.update_spec() as update:
        update.remove_field("k")
        update.add_identity("id")
    for _ in range(2):
        table.append(rows("a"))
    context = FakeContext(tmp_path / "work", record(tmp_path / "t"))

    def chosen(where: str) -> list[str]:
        argument = CompactArgument(min_input_files=2, where=where)
        planned = Compact().partitions(record(tmp_path / "t"), argument, context)
        return [one.name.rpartition("#")[0] for one in planned.partitions if one.files]

    assert chosen("k = 'a'") == ["k=a"]
    assert chosen("k <> 'a'") == ["k=b"]
    assert chosen("k is null") == ["k=__HIVE_DEFAULT_PARTITION__"]
    assert chosen("k is null or id >= 0") == ["k=__HIVE_DEFAULT_PARTITION__", "spec-1/id=0"]
    with pytest.raises(InvalidArgument, match=r"where names 'total', which is not .*\(its partition columns: k, id\)"):
        chosen("total = 3")
    with pytest.raises(InvalidArgument, match="compares 'id', whose type is bigint, with 'x'"):
        chosen("id = 'x'")


class Least(random.Random):
    """Always the least number."""

    def random(self) -> float:
        return 0.0


def test_all_delete_files_that_apply_make_a_file_a_candidate(tmp_path: Path) -> None:
    """Equality deletes, and position deletes of several files, were not counted."""
    table = Folder(tmp_path / "t").new(SCHEMA, BY_K)
    for _ in range(2):
        table.append(rows("a", "b"))
    context = FakeContext(tmp_path / "work", record(tmp_path / "t"))

    def counted() -> list[int]:
        replacer = IcebergReplacer(record(tmp_path / "t"), context, by_catalog=False)
        return sorted(one.deletes for one in replacer.candidates(plan_table(record(tmp_path / "t"))))

    def groups(least: int) -> list[tuple[str, int]]:
        argument = CompactArgument(min_ratio=0, deletes_at_least=least)
        planned = Compact().partitions(record(tmp_path / "t"), argument, context)
        return [(one.name, len(one.files)) for one in planned.partitions if one.files]

    assert counted() == [0, 0, 0, 0]
    commit(table, deletes=equality_deletes(table, ["id"], [{"id": 0}]))
    assert counted() == [1, 1, 1, 1]
    table.append(rows("a"))
    assert counted() == [0, 1, 1, 1, 1], "an equality delete applies to earlier files alone"
    commit(table, deletes=position_deletes(table, Least()))
    assert counted() == [1, 2, 2, 2, 2]
    assert groups(2) == [("k=a#0", 2), ("k=b#0", 2)]
    assert groups(3) == []


def test_the_specs_of_all_groups_need_one_reading_of_each_manifest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = Folder(tmp_path / "t").new(SCHEMA, BY_K)
    for _ in range(3):
        table.append(rows("a", "b", "c"))
    with table.update_spec() as update:
        update.remove_field("k")
        update.add_identity("id")
    for _ in range(2):
        table.append(rows("a"))
    context = FakeContext(tmp_path / "work", record(tmp_path / "t"))
    argument = CompactArgument(min_input_files=2)
    plans = [one for one in Compact().partitions(record(tmp_path / "t"), argument, context).partitions if one.files]
    new_input, opened = ManifestIO.new_input, list[str]()

    def counted(self: ManifestIO, location: str) -> Any:
        opened.append(location)
        return new_input(self, location)

    monkeypatch.setattr(ManifestIO, "new_input", counted)
    replacer = IcebergReplacer(record(tmp_path / "t"), context, by_catalog=False)
    specs = {one.name.rpartition("#")[0]: replacer._spec_of(one) for one in plans}
    assert specs == {"k=a": 0, "k=b": 0, "k=c": 0, "spec-1/id=0": 1}
    snapshot = table.metadata.current_snapshot()
    assert snapshot is not None
    manifests = {one.manifest_path for one in snapshot.manifests(table.io)}
    assert len(manifests) == 5
    assert max(Counter(path for path in opened if path in manifests).values(), default=0) <= 1


def test_days_are_dates_and_months_are_texts() -> None:
    schema = Schema(NestedField(1, "at", TimestampType(), required=False), NestedField(2, "k", StringType()))
    spec = PartitionSpec(
        PartitionField(1, 1000, DayTransform(), "at_day"),
        PartitionField(1, 1001, MonthTransform(), "at_month"),
        PartitionField(2, 1002, BucketTransform(4), "k_bucket"),
        PartitionField(2, 1003, TruncateTransform(2), "k_trunc"),
        PartitionField(2, 1004, VoidTransform(), "k_gone"),
    )
    metadata = new_table_metadata(schema, spec, UNSORTED_SORT_ORDER, "/t")
    types = partition_types(metadata)
    assert types == {"at_day": "date", "at_month": "string", "k_bucket": "int", "k_trunc": "string"}
    name = PartitionNames(metadata.spec(), metadata).name(Record(20512, 673, 3, "ab", None))
    values = values_in(name)
    assert values == {"at_day": "2026-02-28", "at_month": "2026-02", "k_bucket": "3", "k_trunc": "ab"}
    for text, holds in (("at_day >= '2026-02-01' and at_month = '2026-02'", True), ("k_bucket > 3", False)):
        assert PartitionCondition(text, types, "t").holds(values) is holds


@pytest.mark.parametrize("version", [1, 2])
def test_a_group_whose_commit_was_rolled_back_is_not_committed_again(tmp_path: Path, version: int) -> None:
    """Another commit of its files would undo the rollback, without any new reason for it."""
    one = Compacting(tmp_path, version)
    one.commit()
    one.set_back(one.read)
    assert one.statuses() == (GroupStatus.ROLLED_BACK, GroupStatus.ROLLED_BACK)
    before = one.current()
    ran = one.complete()
    assert REASONS[GroupStatus.ROLLED_BACK] in ran.message
    assert (ran.report["verdict"], ran.report["groups"]["committed"]) == ("failed", 0)
    assert one.current() == before
    assert "part-0.parquet" in one.files  # the rollback can be undone


def test_a_commit_that_is_in_force_again_is_committed(tmp_path: Path) -> None:
    """A rollback of the rollback."""
    one = Compacting(tmp_path)
    one.commit()
    committed = one.table.metadata.current_snapshot_id
    one.set_back(one.read)
    with one.table.manage_snapshots() as change:
        change.set_current_snapshot(snapshot_id=committed)
    assert one.statuses() == (GroupStatus.COMMITTED, GroupStatus.COMMITTED)
    assert one.complete().report["verdict"] == "compacted"


def test_new_files_of_an_expired_commit_are_never_committed_again(tmp_path: Path) -> None:
    """The commit was rolled back and expired: whoever expired it deletes its files, perhaps after the next commit.

    Only new files are safe then.
    """
    one = Compacting(tmp_path)
    one.commit()
    one.set_back(one.read)
    one.expire()
    assert one.statuses() == (GroupStatus.DIVERGED, GroupStatus.PENDING)


def test_a_rollback_to_a_state_before_the_group_was_read_is_a_conflict(tmp_path: Path) -> None:
    one = Compacting(tmp_path, before_plan=lambda table: table.append(rows("x").slice(0, 0)))
    one.set_back(one.table.metadata.snapshots[1].snapshot_id)
    assert one.statuses() == (GroupStatus.DIVERGED, GroupStatus.DIVERGED)


def test_a_rolled_back_commit_of_an_earlier_operation_of_the_same_name_does_not_count(tmp_path: Path) -> None:
    """Numbers of operations begin anew with a new etcd."""
    earlier: list[int] = []

    def compact_and_set_back(table: Table) -> None:
        before = table.metadata.current_snapshot_id
        assert before is not None
        table.append(rows("x"), snapshot_properties={"distop.operation": OPERATION, "distop.batch": "0"})
        table.manage_snapshots().rollback_to_snapshot(before).commit()
        earlier.append(before)

    one = Compacting(tmp_path, before_plan=compact_and_set_back)
    assert earlier == [one.read]
    assert one.statuses() == (GroupStatus.PENDING, GroupStatus.PENDING)
