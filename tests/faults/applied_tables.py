"""Tables that ``apply`` changes under faults: of a catalog, and by location on a disk or on S3.

Each has rows of a writer beside ``apply``, and can be compared with what it must be afterwards.
"""

from __future__ import annotations

import json
import re
import uuid
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq
from deltalake import write_deltalake
from pyiceberg.exceptions import CommitFailedException
from pyiceberg.schema import Schema
from pyiceberg.table import Table
from pyiceberg.types import LongType, NestedField, StringType

from distop.behavior import TableRecord
from distop.storage.location import Location
from distop.storage.opened_stores import open_store
from distop.tables.iceberg.metadata_file import HINT, METADATA, current_metadata_file, metadata_version, read_file
from distop_behaviors.apply.apply_loop import MARK
from distop_behaviors.validate import Validate
from tests.storage.iceberg_tables import properties_for
from tests.support import stored_files
from tests.support.context import FakeContext, run_operation
from tests.support.icebergrest import sql_catalog
from tests.support.lake import Remote

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from distop import Operation
    from tests.faults.fault_injection import FaultInjector
    from tests.faults.s3_lake import S3Lake
    from tests.support.daemons import Daemons

SCHEMA = Schema(NestedField(1, "id", LongType(), required=False), NestedField(2, "c", StringType(), required=False))
CHECKS = [{"not_null": "c"}, {"not_null": "id"}]
_NULLABLE = pa.schema([pa.field("id", pa.int64()), pa.field("c", pa.string())])


def rows(*ids: int) -> pa.Table:
    """Rows in a schema without NULLs, which a writer can append before and after the change."""
    schema = pa.schema([pa.field("id", pa.int64(), nullable=False), pa.field("c", pa.string(), nullable=False)])
    return pa.table({"id": ids, "c": [f"c{i}" for i in ids]}, schema)


class Tables:
    """Tables of one format, and the faults of their operations.

    ``root``: the path or URL of the tables that have no catalog. ``lake``: the server with the root, if it is on S3.
    """

    target: str
    """The class whose ``swap`` changes a table."""
    commit_part: str
    """A part of the key of each file that commits a change."""

    def __init__(
        self, group: Daemons, work: Path, faults: FaultInjector, root: str = "", lake: S3Lake | None = None
    ) -> None:
        self.group = group
        self.faults = faults
        self.lake = lake
        self._root = root
        self._work = work
        self._commits: dict[str, int] = {}

    def create(self, name: str, *faults: str, checks: Sequence[Mapping[str, Any]] = CHECKS) -> dict[str, Any]:
        """Register a table with two rows, set its faults, and return a certificate of the table."""
        record = self._new(name)
        self.group.client.add_table(record)
        self.faults.set_faults(name, *faults)
        made = run_operation(Validate(), record, {"checks": list(checks)}, lambda t: FakeContext(self._work, t))
        self._commits[name] = self._version(name)
        return dict(made.report["certificate"])

    def _new(self, name: str) -> TableRecord:
        raise NotImplementedError

    def _version(self, name: str) -> int:
        """The number of commits of a table."""
        raise NotImplementedError

    def append(self, name: str, *ids: int) -> None:
        """Append rows as another writer, which repeats its commit if ``apply`` was first."""
        while not self._append(name, rows(*ids)):
            pass
        self._commits[name] += 1

    def _append(self, name: str, data: pa.Table) -> bool:
        """Append rows; False: another writer has committed first."""
        raise NotImplementedError

    def start(self, name: str, certificate: dict[str, Any], settle: float = 0) -> Operation:
        argument = {"certificate": self.faults.add_certificate(certificate), "settle_seconds": settle}
        return self.group.client.start_operation("faulty-apply", name, argument)

    def content(self, name: str) -> Any:
        """The metadata of a table, for a comparison with later ones."""
        raise NotImplementedError

    def assert_content(self, name: str, operation: str | None, *ids: int) -> None:
        """Assert that the table has these rows, and one change, by this operation (None: no change is left)."""
        raise NotImplementedError

    def location(self, name: str) -> str:
        return f"{self._root}/{name}"


class _IcebergTables(Tables):
    def table(self, name: str) -> Table:
        raise NotImplementedError

    def _append(self, name: str, data: pa.Table) -> bool:
        try:
            self.table(name).append(data)
        except (CommitFailedException, FileExistsError):
            return False
        return True

    def content(self, name: str) -> Any:
        return self.table(name).metadata

    def assert_content(self, name: str, operation: str | None, *ids: int) -> None:
        metadata = self.table(name).metadata
        mark = json.loads(metadata.properties.get(MARK, "null"))
        assert (mark and mark["operation"]) == operation
        assert [field.required for field in metadata.schema().fields] == [operation is not None] * 2
        found = self.table(name).scan().to_arrow()
        assert sorted(found["id"].to_pylist()) == list(ids)
        if operation is not None:
            assert self._version(name) == self._commits[name] + 1, "changed exactly once"


class CatalogTables(_IcebergTables):
    """Iceberg tables of a catalog in SQLite, on a disk."""

    target = "CatalogTarget"

    def __init__(self, group: Daemons, work: Path, faults: FaultInjector) -> None:
        super().__init__(group, work, faults)
        self.catalog = sql_catalog(work / "lake")
        self.catalog.create_namespace("sales")

    def _new(self, name: str) -> TableRecord:
        self.catalog.create_table(f"sales.{name}", SCHEMA).append(rows(1, 2))
        return TableRecord(name, "iceberg", f"sales.{name}", {"catalog": "prod"})

    def table(self, name: str) -> Table:
        return self.catalog.load_table(f"sales.{name}")

    def _version(self, name: str) -> int:
        return len(self.table(name).metadata.metadata_log)


class FolderTables(_IcebergTables):
    """Iceberg tables by location, without a catalog."""

    target = "HadoopTarget"
    commit_part = ".metadata.json"

    def _new(self, name: str) -> TableRecord:
        self._writer(name).new(SCHEMA).append(rows(1, 2))
        return TableRecord(name, "iceberg", self.location(name))

    def _writer(self, name: str) -> Remote:
        """A writer whose commits create the metadata file with the next number."""
        properties = {} if self.lake is None else properties_for(self.lake.served.port)
        return Remote(open_store(self.location(name)), properties)

    def _source(self, name: str) -> str:
        return current_metadata_file(Location.of(self.location(name)))

    def table(self, name: str) -> Table:
        writer, source = self._writer(name), self._source(name)
        writer.version = metadata_version(source)
        return Table(("t",), read_file(source).content, source, writer.io, writer)

    def _version(self, name: str) -> int:
        return metadata_version(self._source(name))

    def assert_content(self, name: str, operation: str | None, *ids: int) -> None:
        """Further, its metadata files are those of the versions, and ``apply`` leaves no others."""
        super().assert_content(name, operation, *ids)
        found, newest = stored_files.keys(self.location(name)), self._version(name)
        metadata = {key for key in found if key.startswith(f"{METADATA}/") and key.endswith((".json", ".text"))}
        versions = {f"{METADATA}/v{n}.metadata.json" for n in range(1, newest + 1)}
        assert metadata - {f"{METADATA}/{HINT}"} == versions
        assert not [key for key in found if not key.startswith(("data/", f"{METADATA}/"))]


class DeltaTables(Tables):
    """Delta tables by location."""

    target = "DeltaTarget"
    commit_part = "/_delta_log/"

    def _new(self, name: str) -> TableRecord:
        written = self._work / "written" / name
        write_deltalake(written, rows(1, 2).cast(_NULLABLE))
        for key in stored_files.keys(str(written)):
            stored_files.write(self.location(name), key, stored_files.read(str(written), key))
        return TableRecord(name, "delta", self.location(name))

    def _version(self, name: str) -> int:
        return len(self.content(name))

    def _append(self, name: str, data: pa.Table) -> bool:
        """Append as a writer of Delta does: in the version after the one that it has read."""
        file = pa.BufferOutputStream()
        pq.write_table(data, file)
        content, where = file.getvalue().to_pybytes(), self.location(name)
        key = f"{uuid.uuid4().hex}.parquet"
        stored_files.write(where, key, content)
        numbers = {"numRecords": len(data), "nullCount": {"id": 0, "c": 0}}
        add = {"path": key, "partitionValues": {}, "size": len(content), "modificationTime": 0, "dataChange": True}
        text = json.dumps({"add": {**add, "stats": json.dumps(numbers)}}) + "\n"
        try:
            stored_files.write(where, f"_delta_log/{self._version(name):020}.json", text.encode())
        except FileExistsError:
            return False
        return True

    def content(self, name: str) -> list[list[dict[str, Any]]]:
        """The actions of each version."""
        where = self.location(name)
        found = [key for key in stored_files.keys(where) if re.fullmatch(r"_delta_log/\d{20}\.json", key)]
        assert found == [f"_delta_log/{n:020}.json" for n in range(len(found))]
        return [[json.loads(line) for line in stored_files.read(where, key).splitlines()] for key in found]

    def assert_content(self, name: str, operation: str | None, *ids: int) -> None:
        actions = [action for version in self.content(name) for action in version]
        metadata = [one["metaData"] for one in actions if "metaData" in one][-1]
        mark = json.loads(metadata["configuration"].get(MARK, "null"))
        assert (mark and mark["operation"]) == operation
        fields = json.loads(metadata["schemaString"])["fields"]
        assert [field["nullable"] for field in fields] == [operation is None] * 2
        if operation is not None:
            made = [one["commitInfo"]["operationParameters"] for one in actions if _is_apply(one)]
            assert made == [{"operation": operation}], "changed exactly once"
            assert self._version(name) == self._commits[name] + 1
        live = [stored_files.read(self.location(name), one["add"]["path"]) for one in actions if "add" in one]
        assert sorted(n for one in live for n in pq.read_table(pa.BufferReader(one))["id"].to_pylist()) == list(ids)
        assert not [key for key in stored_files.keys(self.location(name)) if key.startswith("_distop/")]


def _is_apply(action: dict[str, Any]) -> bool:
    return bool(action.get("commitInfo", {}).get("operation") == "distop apply")
