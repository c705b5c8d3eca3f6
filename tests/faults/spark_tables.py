"""Tables on a disk on which maintenance operations need Spark, or run in a child that has one."""

from __future__ import annotations

import itertools
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

import pyarrow as pa
from pyiceberg.partitioning import PartitionField, PartitionSpec
from pyiceberg.schema import Schema
from pyiceberg.transforms import IdentityTransform
from pyiceberg.types import DateType, LongType, NestedField

from distop.tables.commits import Marks
from tests.faults.maintained_tables import (
    CompactTables,
    ExpireSnapshotsTables,
    Rows,
    contents,
)
from tests.unit.tables.iceberg.test_tables_iceberg import rows as iceberg_rows

if TYPE_CHECKING:
    from collections.abc import Mapping

    from pyiceberg.table import Table

    from distop import Operation

DAY = Schema(NestedField(1, "id", LongType()), NestedField(2, "k", DateType()))
BY_DAY = PartitionSpec(PartitionField(2, 1000, IdentityTransform(), "k"))


class CompactIcebergTables(ExpireSnapshotsTables):
    """Four groups of three small files in an Iceberg table by folder, committed two by two."""

    type_name = "faulty-compact"
    argument: Mapping[str, Any] = {"min_input_files": 2, "commit_every": 2}
    commit = "IcebergReplacer.commit"
    steps = ("IcebergReplacer.rewrite", "GroupRewrite.rewrite_and_offer")

    @staticmethod
    def _fill(table: Table) -> None:
        for _ in range(3):
            table.append(iceberg_rows("a", "b", "c", "d"))

    def assert_effect(self, name: str, operation: Operation, report: Any) -> None:
        assert report["verdict"] == "compacted", report
        assert self.read(name) == self.rows[name]
        table = self.table(name)
        summaries = [dict(one.summary.additional_properties) for one in table.metadata.snapshots if one.summary]
        commits = [groups for one in summaries if (groups := Marks.groups_in(one, str(operation.ref)))]
        assert sorted(itertools.chain(*commits)) == [0, 1, 2, 3]
        assert report["commits"] == len(commits)
        assert len(list(table.scan().plan_files())) == 4
        found = {_checked_file(key) for key in contents(self.location(name))} - {"metadata/version-hint.text"}
        reached = self.reached(name)
        assert found == reached, (found - reached, reached - found)

    def reached(self, name: str) -> set[str]:
        """As for other tables, whose files are written without Hadoop, which spells paths as ``file:/…``."""
        root = self.location(name)
        return {key.removeprefix(f"file:{root}/") for key in super().reached(name)}


def _checked_file(key: str) -> str:
    """The file of which this is the checksum file by Hadoop, or the key itself."""
    folder, slash, file = key.rpartition("/")
    return f"{folder}{slash}{file[1:-4]}" if file.startswith(".") and file.endswith(".crc") else key


class CompactSortedTables(CompactTables):
    """Delta tables whose rows are sorted, which needs Spark."""

    argument: Mapping[str, Any] = {**CompactTables.argument, "sort_by": ["id"]}
    steps = ("DeltaReplacer.rewrite", "GroupRewrite.rewrite_and_offer")


class ExpireIcebergPartitionsTables(ExpireSnapshotsTables):
    """Iceberg tables with partitions of five days, of which two are old."""

    type_name = "faulty-expire-partitions"
    argument: Mapping[str, Any] = {"column": "k", "older_than": "90d"}
    steps = ("IcebergPartitionRemoval.remove",)
    schema, spec = DAY, BY_DAY

    @staticmethod
    def _fill(table: Table) -> None:
        today = datetime.now(UTC).date()
        for n in (1, 2, 3, 200, 201):
            table.append(pa.table({"id": [n, n + 1000], "k": [today - timedelta(days=n)] * 2}))

    def assert_effect(self, name: str, operation: Operation, report: Any) -> None:
        kept = Rows({row: n for row, n in self.rows[name].items() if row[0] % 1000 < 90})
        assert self.read(name) == kept
        snapshots = self.table(name).metadata.snapshots
        made = [one.summary for one in snapshots if one.summary and one.summary.get("distop.operation")]
        assert [one["distop.operation"] for one in made] == [str(operation.ref)]
        assert (report["removed"], report["files"]["files"], report["left"]) == (2, 2, 0)
        before, after = self.files[name], contents(self.location(name))
        assert {
            key: data for key, data in before.items() if not key.endswith("version-hint.text")
        }.items() <= after.items()
