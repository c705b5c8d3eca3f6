"""Generated tables of Iceberg and Delta as subjects of the oracle, which Spark reads and changes."""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pyiceberg.manifest import ManifestContent

from distop.runtime.java import active
from distop.tables.delta.delta_replacer import DeltaReplacer
from distop.tables.iceberg.iceberg_replacer import IcebergReplacer
from tests.support import random_delta_tables, row_deltas
from tests.support.generated_delta import DeltaActions
from tests.support.generated_iceberg import ODD_COLUMNS, GeneratedIceberg, exported_rows
from tests.support.maintenance_oracle import spark_rows

if TYPE_CHECKING:
    from collections.abc import Callable

    from pyiceberg.table import Table
    from pyspark.sql import SparkSession

    from tests.acceptance.sparklake import Lake
    from tests.support.delta import DeltaLake
    from tests.support.maintenance_oracle import Rows

_STATE = (
    *("format-version", "table-uuid", "location", "schemas", "current-schema-id", "partition-specs", "default-spec-id"),
    *("sort-orders", "default-sort-order-id", "properties", "last-column-id", "last-partition-id", "statistics"),
)
"""The fields of metadata that a compaction must not change."""


def _plain(value: Any) -> Any:
    """JSON without empty lists, which some writers leave out."""
    if isinstance(value, dict):
        return {name: _plain(one) for name, one in value.items() if one != []}
    return [_plain(one) for one in value] if isinstance(value, list) else value


class IcebergSubject:
    """A generated Iceberg table. Version 3 is written by Spark alone, after version 2."""

    replacer = IcebergReplacer
    groups = 3

    def __init__(self, lake: Lake, spark: SparkSession, seed: int) -> None:
        self.chance = random.Random(f"subject {seed}")
        self.lake = lake
        self.name = f"seed{seed}"
        self._spark = spark
        self._version = (2, 3, 2, 3, 1)[seed % 5]
        self.heavy = seed % 8 == 7
        self.generated = GeneratedIceberg(seed, lake.path(self.name), version=min(self._version, 2), heavy=self.heavy)
        self.record = lake.record(self.name)
        self.history = self.generated.history
        if self._version == 3:
            self._sql("alter table {t} set tblproperties ('format-version'='3')")
            if not self.heavy:
                self._delete_by_spark()
        elif self._version == 1:
            self._sql(
                "alter table {t} set tblproperties ('write.delete.mode'='copy-on-write',"
                "'write.update.mode'='copy-on-write')"
            )

    def _sql(self, statement: str) -> None:
        self.lake.sql(statement.replace("{t}", f"{{{self.name}}}"))
        self.history.append(statement)

    def _delete_by_spark(self) -> None:
        self._sql(f"delete from {{t}} where id % {self.chance.randint(3, 7)} = 1")

    # ------------------------------------------------------------------ the subject

    @property
    def _table(self) -> Table:
        return self.generated.reload()

    def read(self, version: Any = None) -> Rows:
        reading = self.lake.spark.read
        if version is not None:
            reading = reading.option("versionAsOf", str(version))
        return spark_rows(reading.table(f"lake.db.{self.name}"))

    def versions(self) -> list[Any]:
        return [one.snapshot_id for one in self._table.metadata.snapshots]

    def state(self) -> Any:
        found = _plain(json.loads(Path(self._table.metadata_location).read_text()))
        refs = {name: one for name, one in found.get("refs", {}).items() if name != "main"}
        return {name: found[name] for name in _STATE if found.get(name)} | {"refs": refs}

    def files(self) -> dict[str, int]:
        return {file.file_path: file.file_size_in_bytes for file in row_deltas.data_files(self._table)}

    def spark(self) -> Any:
        return self._spark

    def needs(self) -> bool:
        table = self._table
        snapshot = table.metadata.current_snapshot()
        assert snapshot is not None
        manifests = [one for one in snapshot.manifests(table.io) if one.content == ManifestContent.DELETES]
        return any(one.fetch_manifest_entry(table.io) for one in manifests)

    def exported(self, target: str, version: Any) -> tuple[Rows, Rows]:
        return exported_rows(self._table, target, version)

    def registers(self) -> bool:
        return self._version < 3

    def registered(self, target: str) -> Rows:
        return spark_rows(self.lake.spark.read.format("iceberg").load(target))

    def write(self, kind: str) -> None:
        table, generated = self._table, self.generated
        assert table is not None
        by_spark = self._version == 3 or self.chance.random() < 0.4
        doing: dict[str, list[Callable[[], None]]] = {
            "append": [lambda: self._sql("insert into {t} select * from {t} limit 3"), generated.append],
            "delete": [self._delete_by_spark, self.chance.choice([generated.delete_positions, generated.delete_equal])],
            "overwrite": [
                self.chance.choice([self._overwrite, self._overwrite, self._roll_back]),
                generated.overwrite,
            ],
            "schema": [self._alter, generated.change_schema],
            "compaction": [self._rewrite] * 2,
        }
        if kind == "delete" and self._version == 1:
            by_spark = True
        doing[kind][0 if by_spark else 1]()

    def _overwrite(self) -> None:
        self._sql("insert overwrite {t} select * from {t} where id % 2 = 0")

    def _roll_back(self) -> None:
        """Set the table back by a snapshot."""
        current = self._table.metadata.current_snapshot()
        if current is None or current.parent_snapshot_id is None:
            self._overwrite()
            return
        self.lake.load(self.name).manageSnapshots().rollbackTo(current.parent_snapshot_id).commit()
        self.history.append("roll back")

    def _alter(self) -> None:
        number = len(self.history)
        if self._version == 2 and self.chance.random() < 0.3:
            self._version = 3
            self._sql("alter table {t} set tblproperties ('format-version'='3')")
            return
        self._sql(
            self.chance.choice([f"alter table {{t}} add column more{number} int", "alter table {t} drop column s"])
        )
        if self.chance.random() < 0.5:
            jvm: Any = self.lake.spark._jvm
            term = jvm.org.apache.iceberg.expressions.Expressions.bucket("id", 3 + number)
            self.lake.load(self.name).updateSpec().addField(f"by_id_{number}", term).commit()
            self.history.append("partition by bucket(id)")

    def _rewrite(self) -> None:
        """Spark's own compaction of all files."""
        jvm: Any = self.lake.spark._jvm
        with active(self.lake.spark):
            actions = jvm.org.apache.iceberg.spark.actions.SparkActions.get(self.lake.spark._jsparkSession)
            rewriting = actions.rewriteDataFiles(self.lake.load(self.name)).option("rewrite-all", "true")
            if self.chance.random() < 0.5:
                rewriting = rewriting.option("remove-dangling-deletes", "true")
            rewriting.execute()
        self.history.append("rewrite_data_files")


class DeltaSubject:
    """A generated Delta table: deletion vectors, column mapping, widened types, checkpoints of both kinds."""

    replacer = DeltaReplacer
    groups = 3

    def __init__(self, lake: DeltaLake, spark: SparkSession, seed: int) -> None:
        self.chance = random.Random(f"subject {seed}")
        self.lake = lake
        self.name = f"seed{seed}"
        self._spark = spark
        self.heavy = seed % 8 == 7
        made = random_delta_tables.make(lake, seed, steps=2)
        self.record, self.history = made.record, made.history
        self.path = lake.root / self.name
        self.log = DeltaActions(self.path)
        self._mapped = self._mode() != "none"
        if self._mapped:
            column = self.chance.choice([name for name in made.columns if name not in ("id", "k")])
            odd = self.chance.choice(ODD_COLUMNS).replace("`", "``")
            self._sql(f"alter table {{t}} rename column {column} to `{odd}`")
        if self.heavy:
            self._fill()

    def _mode(self) -> str:
        return str(self.state()["metaData"]["configuration"].get("delta.columnMapping.mode", "none"))

    def _sql(self, statement: str) -> None:
        self.lake.sql(statement, self.name)
        self.history.append(statement)

    def _fill(self) -> None:
        """Append eight files of about 60 KB to one partition."""
        self._sql("alter table {t} add column load string")
        made = "hex(concat(unhex(sha2(cast(rand(1) as string), 512)), unhex(sha2(cast(rand(2) as string), 512))))"
        rows = f"select cast(id as bigint), {made} from range(0, 4000, 1, 8)"
        self._sql(f"insert into {{t}} (id, load) {rows}")

    # ------------------------------------------------------------------ the subject

    def read(self, version: Any = None) -> Rows:
        return self._load(self.path, version)

    def _load(self, path: Path, version: Any) -> Rows:
        with active(self.lake.session):
            reading = self.lake.session.read.format("delta")
            if version is not None:
                reading = reading.option("versionAsOf", version)
            return spark_rows(reading.load(str(path)))

    def versions(self) -> list[Any]:
        return self.log.versions()

    def state(self) -> Any:
        return self.log.state()

    def files(self) -> dict[str, int]:
        return self.log.files()

    def spark(self) -> Any:
        return self._spark

    def needs(self) -> bool:
        return self._mapped or any("deletionVector" in one for one in self.log.adds())

    def registers(self) -> bool:
        return False  # tests/unit/behaviors/test_export_register.py has those of Delta

    def registered(self, target: str) -> Rows:
        raise NotImplementedError

    def exported(self, target: str, version: Any) -> tuple[Rows, Rows]:
        log = Path(target) / "_delta_log"
        shutil.copytree(self.path / "_delta_log", log)
        try:
            return self._load(Path(target), version), self.read(version)
        finally:
            shutil.rmtree(log)

    def write(self, kind: str) -> None:
        number = len(self.history)
        statements: dict[str, list[str]] = {
            "append": ["insert into {t} select * from {t} limit 3"],
            "delete": ["delete from {t} where id % 3 = 0", "update {t} set id = id + 1 where id % 5 = 0"],
            "overwrite": [
                "insert overwrite {t} select * from {t} where id % 2 = 0",
                f"restore table {{t}} to version as of {max(self.versions()[-1] - 1, 1)}",
            ],
            "schema": [f"alter table {{t}} add column more{number} int"],
            "compaction": ["optimize {t}"],
        }
        if self._mapped:
            statements["schema"].append(f"alter table {{t}} rename column id to id{number}")
        self._sql(self.chance.choice(statements[kind]))
