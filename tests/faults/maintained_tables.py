"""Tables on which maintenance operations run under faults, on a disk or on S3, each beside a neighbour.

After an operation, a table is compared with what it must be: its rows as a multiset, and its files. No file of a
neighbour may have changed, whose folder has the same prefix.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
from deltalake import DeltaTable, write_deltalake
from pyiceberg.table import Table

from distop.behavior import TableRecord
from distop.storage.files import local_path
from distop.storage.location import Location
from distop.storage.opened_stores import open_store
from distop.tables import reachability_of
from distop.tables.iceberg.metadata_file import current_metadata_file, read_file
from distop_behaviors.export.export_manifest import ROOT_MANIFEST
from tests.storage.iceberg_tables import properties_for
from tests.support import stored_files
from tests.support.icebergrest import sql_catalog
from tests.support.orphan_runs import NOW, wait_until_older
from tests.support.table_files import LoggedRemote
from tests.unit.tables.iceberg.test_tables_iceberg import BY_K, SCHEMA
from tests.unit.tables.iceberg.test_tables_iceberg import rows as iceberg_rows

if TYPE_CHECKING:
    from collections.abc import Mapping

    from distop import Operation
    from tests.faults.fault_injection import FaultInjector
    from tests.faults.s3_lake import S3Lake
    from tests.support.daemons import Daemons

Rows = Counter[tuple[Any, ...]]
Files = dict[str, bytes]


def contents(location: str) -> Files:
    """The files of a table's folder, without those of distop itself."""
    found = [key for key in stored_files.keys(location) if not key.startswith("_distop/")]
    return {key: stored_files.read(location, key) for key in found}


class Maintained:
    """Tables for one operation type, and their operations. ``root``: a path or URL."""

    type_name: str
    argument: Mapping[str, Any]
    commit: str
    """The step that changes the table."""
    steps: tuple[str, ...]
    """Other steps, in which a process may be killed."""
    cancelled_at = ""
    """Where a cancel finds the operation with a part of its work done; "": it has only one step."""

    def __init__(
        self, group: Daemons, work: Path, faults: FaultInjector, root: str, lake: S3Lake | None = None
    ) -> None:
        self.group, self.faults, self.lake = group, faults, lake
        self._work, self._root = work, root
        self.rows: dict[str, Rows] = {}
        self.files: dict[str, Files] = {}
        self._neighbours: dict[str, Files] = {}

    def location(self, name: str) -> str:
        return f"{self._root}/{name}"

    @property
    def points(self) -> list[str]:
        return [f"{step}.{when}" for step in (self.commit, *self.steps) for when in ("before", "after")]

    def create(self, name: str, *faults: str) -> None:
        """Register a table, write its neighbour, and set the faults of its operation."""
        record = self._new(name)
        neighbour = f"{self.location(name)}-old"
        for key, data in contents(self.location(name)).items():
            stored_files.write(neighbour, key, data)
        stored_files.write(neighbour, "left-over", b"x")
        self.rows[name], self.files[name] = self.read(name), contents(self.location(name))
        self._neighbours[name] = contents(neighbour)
        self.group.client.add_table(record)
        self._prepare(name)
        self.faults.set_faults(name, *faults)

    def _new(self, name: str) -> TableRecord:
        raise NotImplementedError

    def _prepare(self, name: str) -> None:
        """What else must be done after the table was registered."""

    def start(self, name: str) -> Operation:
        return self.group.client.start_operation(self.type_name, name, dict(self.argument))

    def read(self, name: str) -> Rows:
        """The rows of a table."""
        raise NotImplementedError

    def assert_neighbour(self, name: str) -> None:
        assert contents(f"{self.location(name)}-old") == self._neighbours[name]

    def assert_done(self, name: str, operation: Operation, report: Any) -> None:
        """Assert that the operation has done its work once, and nothing else."""
        self.assert_neighbour(name)
        self.assert_effect(name, operation, report)

    def assert_effect(self, name: str, operation: Operation, report: Any) -> None:
        raise NotImplementedError

    def assert_cancelled(self, name: str, report: Any) -> None:
        """Assert that no row is lost, and that the report tells what has been done."""
        self.assert_neighbour(name)
        assert self.read(name) == self.rows[name]


class _DeltaTables(Maintained):
    """Delta tables with the partition column ``day``."""

    files_in_a_day = 1

    def days(self) -> list[Any]:
        return ["d0", "d1", "d2", "d3"]

    def _new(self, name: str) -> TableRecord:
        written, first = self._work / "written" / name, 0
        for _ in range(self.files_in_a_day):
            rows = []
            for day in self.days():
                rows += [{"id": first + n, "day": day} for n in range(5)]
                first += 5
            write_deltalake(written, pa.Table.from_pylist(rows), mode="append", partition_by=["day"])
        for key in stored_files.keys(str(written)):
            stored_files.write(self.location(name), key, stored_files.read(str(written), key))
        return TableRecord(name, "delta", self.location(name))

    def delta(self, name: str) -> DeltaTable:
        """The table, copied to a disk if it is in a bucket."""
        folder = local_path(self.location(name))
        if folder is None:
            folder = self._work / "read" / f"{name}-{len(list((self._work / 'read').glob('*')))}"
            for key, data in contents(self.location(name)).items():
                stored_files.write(str(folder), key, data)
        return DeltaTable(folder)

    def read(self, name: str) -> Rows:
        found = self.delta(name).to_pyarrow_table().to_pylist()
        return Counter((row["id"], str(row["day"])) for row in found)

    def commits(self, name: str, operation: str) -> list[dict[str, Any]]:
        """The parameters of the commits of an operation of distop, oldest first."""
        history = [one for one in self.delta(name).history() if one["operation"] == operation]
        return [one["operationParameters"] for one in reversed(history)]

    def data_files(self, name: str) -> set[str]:
        return {key for key in contents(self.location(name)) if key.endswith(".parquet")}


class CompactTables(_DeltaTables):
    """Four groups of three small files, committed two by two."""

    type_name = "faulty-compact"
    argument: Mapping[str, Any] = {"min_input_files": 2, "commit_every": 2}
    commit = "LogPublisher.commit"
    steps: tuple[str, ...] = ("GroupRewrite.rewrite_and_offer", "GroupRewrite.commit_batch", "CompactCompletion._sweep")
    cancelled_at = "LogPublisher.commit.after"
    files_in_a_day = 3

    def assert_effect(self, name: str, operation: Operation, report: Any) -> None:
        assert report["verdict"] == "compacted", report
        assert self.read(name) == self.rows[name]
        batches = [found["distop.batch"] for found in self.commits(name, "distop compact")]
        assert sorted(number for batch in batches for number in batch.split(",")) == ["0", "1", "2", "3"]
        assert report["commits"] == len(batches)
        live = {re.sub(r".*/(?=distop-staged/)", "", uri) for uri in self.delta(name).file_uris()}
        assert len(live) == 4
        assert {key for key in self.data_files(name) if key.startswith("distop-staged/")} == live

    def assert_cancelled(self, name: str, report: Any) -> None:
        super().assert_cancelled(name, report)
        done = sum(len(found["distop.batch"].split(",")) for found in self.commits(name, "distop compact"))
        groups = report["groups"]
        assert (report["verdict"], groups["committed"], groups["unfinished"]) == ("cancelled", done, 4 - done)
        assert done > 0


class ExpireSnapshotsTables(Maintained):
    """Iceberg tables by folder with five snapshots, of which two have files that the last one lacks."""

    type_name = "faulty-expire-snapshots"
    argument: Mapping[str, Any] = NOW
    commit = "FolderPublisher.commit"
    steps: tuple[str, ...] = ("expire_plan.read_units", "ExpireCompletion._candidates", "FileDeletion.delete")
    cancelled_at = "expire_plan.read_units.after"
    """The completion, which removes versions and files, can no longer be cancelled."""
    schema, spec = SCHEMA, BY_K

    def _new(self, name: str) -> TableRecord:
        properties = {} if self.lake is None else properties_for(self.lake.served.port)
        if self.lake is None:
            Path(self.location(name)).mkdir(parents=True)
        table = LoggedRemote(open_store(self.location(name)), properties).new(self.schema, self.spec)
        self._fill(table)
        return TableRecord(name, "iceberg", self.location(name))

    @staticmethod
    def _fill(table: Table) -> None:
        table.append(iceberg_rows("a", "b"))
        table.append(iceberg_rows("c"))
        table.overwrite(iceberg_rows("d", "e", "f"))
        table.delete("k = 'd'")

    def table(self, name: str) -> Table:
        source = current_metadata_file(Location.of(self.location(name)))
        properties = {} if self.lake is None else properties_for(self.lake.served.port)
        writer = LoggedRemote(open_store(self.location(name)), properties)
        return Table(("t",), read_file(source).content, source, writer.io, writer)

    def read(self, name: str) -> Rows:
        found = self.table(name).scan().to_arrow().to_pylist()
        return Counter((row["id"], row["k"]) for row in found)

    def record(self, name: str) -> TableRecord:
        return TableRecord(name, "iceberg", self.location(name))

    def reached(self, name: str) -> set[str]:
        """The keys of all files that the table reaches, without the hint."""
        root = self.table(name).metadata.location.removeprefix("file://").rstrip("/")
        files = reachability_of(self.record(name)).all_files()
        found = {file.path.removeprefix("file://").removeprefix(f"{root}/") for file in files}
        return found - {"metadata/version-hint.text"}

    def assert_effect(self, name: str, operation: Operation, report: Any) -> None:
        assert self.read(name) == self.rows[name]
        assert len(self.table(name).metadata.snapshots) == report["versions_after"] == 1
        assert report["removed"] == report["versions_before"] - 1 > 3
        found = {key for key in contents(self.location(name)) if not key.endswith("version-hint.text")}
        reached = self.reached(name)
        assert found == reached, (found - reached, reached - found)

    def assert_cancelled(self, name: str, report: Any) -> None:
        super().assert_cancelled(name, report)
        assert contents(self.location(name)) == self.files[name]


class ExpireSnapshotsInCatalog(ExpireSnapshotsTables):
    """The same in a catalog in SQLite."""

    commit = "CatalogPublisher.commit"

    def __init__(
        self, group: Daemons, work: Path, faults: FaultInjector, root: str, lake: S3Lake | None = None
    ) -> None:
        super().__init__(group, work, faults, f"{work}/lake/warehouse/sales", lake)
        self.catalog = sql_catalog(work / "lake")
        self.catalog.create_namespace("sales")

    def _new(self, name: str) -> TableRecord:
        table = self.catalog.create_table(f"sales.{name}", SCHEMA, location=self.location(name), partition_spec=BY_K)
        self._fill(table)
        return self.record(name)

    def table(self, name: str) -> Table:
        return self.catalog.load_table(f"sales.{name}")

    def record(self, name: str) -> TableRecord:
        return TableRecord(name, "iceberg", f"sales.{name}", {"catalog": "prod"})


class ExpirePartitionsTables(_DeltaTables):
    """Partitions of five days, of which two are old."""

    type_name = "faulty-expire-partitions"
    argument: Mapping[str, Any] = {"column": "day", "older_than": "90d"}
    commit = "LogPublisher.commit"
    steps: tuple[str, ...] = ("DeltaPartitionRemoval.remove",)

    def days(self) -> list[Any]:
        today = datetime.now(UTC).date()
        return [today - timedelta(days=n) for n in (1, 2, 3, 200, 201)]

    def assert_effect(self, name: str, operation: Operation, report: Any) -> None:
        kept = {str(day) for day in self.days()[:3]}
        assert self.read(name) == Counter({row: n for row, n in self.rows[name].items() if row[1] in kept})
        (commit,) = self.commits(name, "distop expire-partitions")
        assert commit == {"distop.operation": str(operation.ref), "distop.fence": "completion"}
        assert (report["removed"], report["files"]["files"], report["left"]) == (2, 2, 0)
        assert self.files[name].items() <= contents(self.location(name)).items()


class RemoveOrphansTables(_DeltaTables):
    """A table with orphans, which are removed in pages."""

    type_name = "faulty-remove-orphans"
    argument: Mapping[str, Any] = {**NOW, "max_per_second": 20}
    commit = "OrphanRemoval._remove"
    steps = ()
    cancelled_at = "OrphanRemoval._remove.after"
    orphans = 50
    orphans_on_s3 = 12
    """Fewer, because each lost answer takes time."""

    def _prepare(self, name: str) -> None:
        if self.lake is not None:
            self.orphans = self.orphans_on_s3
        for n in range(self.orphans):
            stored_files.write(self.location(name), f"day=d{n % 4}/orphan-{n}", b"x" * n)
        wait_until_older(self.location(name))

    def left(self, name: str) -> int:
        return sum("orphan-" in key for key in contents(self.location(name)))

    def assert_effect(self, name: str, operation: Operation, report: Any) -> None:
        assert contents(self.location(name)) == self.files[name]
        assert self.read(name) == self.rows[name]
        assert report["removed"]["files"] + report["missing"] == self.orphans
        assert report["failed_files"] == 0

    def assert_cancelled(self, name: str, report: Any) -> None:
        super().assert_cancelled(name, report)
        assert self.files[name].items() <= contents(self.location(name)).items()
        assert 0 < self.left(name) < self.orphans


class RestoreTables(RemoveOrphansTables):
    """Orphans in the quarantine, which are moved back."""

    type_name = "faulty-restore"
    commit = "Restoration._restore"
    orphans_on_s3 = 4
    cancelled_at = ""

    def _prepare(self, name: str) -> None:
        super()._prepare(name)
        self.files[name] = contents(self.location(name))

    def start(self, name: str) -> Operation:
        moved = self.group.client.start_operation("remove-orphans", name, {**NOW, "quarantine": True})
        moved.wait(120).raise_for_state()
        assert self.left(name) == 0
        return self.group.client.start_operation(self.type_name, name, {"operation": str(moved.ref)})

    def assert_effect(self, name: str, operation: Operation, report: Any) -> None:
        assert contents(self.location(name)) == self.files[name]
        assert report["restored"]["files"] + report["existing"] + report["missing"] == self.orphans
        assert report["failed_files"] == 0


class ExportTables(_DeltaTables):
    """Folders of a table, which are copied to another place."""

    type_name = "faulty-export"
    commit = "ExportTarget.mark"
    steps: tuple[str, ...] = ("ExportTarget.remove_markers", "FolderExport._copy_pages", "export_completion.complete")
    cancelled_at = "FolderExport._copy_pages.after"
    files_in_a_day = 2

    def target(self, name: str) -> str:
        return f"{self._root}/out/{name}"

    def start(self, name: str) -> Operation:
        return self.group.client.start_operation(self.type_name, name, {"to": self.target(name)})

    def assert_effect(self, name: str, operation: Operation, report: Any) -> None:
        assert contents(self.location(name)) == self.files[name]
        found = contents(self.target(name))
        data = {key: text for key, text in found.items() if key.endswith(".parquet")}
        assert data == {key: self.files[name][key] for key in self.data_files(name)}
        assert report["complete"]
        assert report["copied"]["files"] + report["reused"]["files"] == len(data)
        markers = {key for key in found if key.endswith("_SUCCESS")}
        assert markers == {"_SUCCESS", *(f"day={day}/_SUCCESS" for day in self.days())}
        root = json.loads(found[ROOT_MANIFEST])
        assert (root["files"], root["operation"]) == (len(data), str(operation.ref))
        assert not [key for key in stored_files.keys(self.target(name)) if "/pages/" in key]

    def assert_cancelled(self, name: str, report: Any) -> None:
        super().assert_cancelled(name, report)
        found = contents(self.target(name))
        assert "_SUCCESS" not in found
        assert ROOT_MANIFEST not in found
        for key in found:
            if key.endswith(".parquet"):
                assert found[key] == self.files[name][key]
