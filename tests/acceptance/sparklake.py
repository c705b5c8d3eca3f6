"""A warehouse of Iceberg tables written by Spark."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from distop.protocol.records import TableRecord

if TYPE_CHECKING:
    from pathlib import Path

    from pyspark.sql import DataFrame, SparkSession

DELETING = {"write.metadata.delete-after-commit.enabled": "true", "write.metadata.previous-versions-max": "1"}
"""Table properties with which Iceberg's own commit deletes files named in the metadata log."""


class Lake:
    """Tables of a Hadoop catalog under one folder. Statements name them in braces: ``insert into {t} …``."""

    def __init__(self, spark: SparkSession, root: Path) -> None:
        self.spark = spark.newSession()
        self._root = root
        for name, value in {"": "org.apache.iceberg.spark.SparkCatalog", ".type": "hadoop", ".warehouse": root}.items():
            self.spark.conf.set(f"spark.sql.catalog.lake{name}", str(value))
        self.spark.conf.set("spark.sql.catalog.lake.cache-enabled", "false")
        self.spark.conf.set("spark.sql.session.timeZone", "UTC")

    def path(self, name: str) -> Path:
        return self._root / "db" / name

    def record(self, name: str) -> TableRecord:
        return TableRecord(name, "iceberg", str(self.path(name)))

    def rows(self, name: str) -> DataFrame:
        return self.spark.table(f"lake.db.{name}")

    def sql(self, text: str) -> None:
        self.spark.sql(text.replace("{", "lake.db.").replace("}", ""))

    def create(self, name: str, columns: str, partitioned: str, version: int) -> None:
        """Create a table with merge-on-read deletes."""
        self.sql(
            f"create table {{{name}}} ({columns}) using iceberg {partitioned} tblproperties ("
            f"'format-version'='{version}', 'write.delete.mode'='merge-on-read', 'write.distribution-mode'='hash')"
        )

    def fill(self, name: str, columns: str = "id, k, c") -> None:
        """Add a hundred rows, in which ``c`` is NULL if the id ends in 0 or 5."""
        made = "select id, cast(id % 3 as int) k, if(id % 5 = 0, null, cast(id as string)) c from range(0, 100, 1, 1)"
        self.sql(f"insert into {{{name}}} select {columns} from ({made})")

    def delete(self, name: str, condition: str) -> None:
        self.sql(f"delete from {{{name}}} where {condition}")

    def delete_files(self, name: str) -> int:
        return int(self.spark.table(f"lake.db.{name}.delete_files").count())

    def load(self, name: str) -> Any:
        """The JVM's object of the table."""
        jvm: Any = self.spark._jvm
        conf = self.spark._jsparkSession.sessionState().newHadoopConf()
        return jvm.org.apache.iceberg.hadoop.HadoopTables(conf).load(str(self.path(name)))

    def delete_equal(self, name: str, column: str, value: Any) -> None:
        """Delete the rows with this value from an unpartitioned table by an equality delete (Spark writes none)."""
        jvm: Any = self.spark._jvm
        iceberg, table = jvm.org.apache.iceberg, self.load(name)
        field = table.schema().findField(column)
        ids = self.spark.sparkContext._gateway.new_array(jvm.int, 1)  # type: ignore[union-attr]
        ids[0] = field.fieldId()
        schema = iceberg.Schema(jvm.java.util.Collections.singletonList(field))
        row = iceberg.data.GenericRecord.create(schema)
        row.setField(column, value)
        file = iceberg.encryption.EncryptedFiles.plainAsEncryptedOutput(
            table.io().newOutputFile(str(self.path(name) / "data" / "equal-deletes.parquet"))
        )
        appenders = iceberg.data.GenericAppenderFactory(table.schema(), table.spec(), ids, schema, None)
        writer = appenders.newEqDeleteWriter(file, iceberg.FileFormat.PARQUET, None)
        writer.write(row)
        writer.close()
        table.newRowDelta().addDeletes(writer.toDeleteFile()).commit()

    def files(self, name: str) -> list[Any]:
        """The JVM's objects of the table's data files, for :meth:`append`."""
        planned = self.load(name).newScan().planFiles()
        try:
            tasks = planned.iterator()
            found = []
            while tasks.hasNext():
                found.append(tasks.next().file())
            return found
        finally:
            planned.close()

    def append(self, name: str, file: Any) -> None:
        """Commit a file as a writer with an old plan does, without a comparison with the current schema."""
        self.load(name).newAppend().appendFile(file).commit()

    def drop_file(self, name: str, file: Any) -> None:
        """Remove a file from the table."""
        self.load(name).newDelete().deleteFile(file).commit()

    def name_victims(self, name: str, *victims: Path) -> None:
        """Name these files in the metadata log as previous metadata, which Iceberg's next commit would delete."""
        folder = self.path(name) / "metadata"
        version = int((folder / "version-hint.text").read_text())
        found = json.loads((folder / f"v{version}.metadata.json").read_text())
        found["properties"] |= DELETING
        found["metadata-log"] = [{"timestamp-ms": 1000 + n, "metadata-file": str(v)} for n, v in enumerate(victims)]
        (folder / f".v{version}.metadata.json.crc").unlink(missing_ok=True)
        (folder / f"v{version}.metadata.json").write_text(json.dumps(found))
