"""What Java opens of an Iceberg table is looked at, whatever Python has read in the same files."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pytest
from pyiceberg.manifest import read_manifest_list
from pyiceberg.schema import Schema
from pyiceberg.types import LongType, NestedField

from distop import confinement
from distop.core.model import TableRecord
from distop.errors import InvalidArgument
from distop.tables import plan_table
from distop.tables.iceberg import read_metadata
from distop_behaviors.apply.producing import Production
from distop_behaviors.reading import iceberg
from tests.support.lake import Folder
from tests.support.two_readings import exchange_for_java

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = [pytest.mark.spark, pytest.mark.timeout(240)]

SCHEMA = Schema(NestedField(1, "id", LongType(), required=False))


@pytest.fixture
def tables(tmp_path: Path) -> tuple[Folder, Folder]:
    """Two tables of one commit each: mine, and somebody's."""
    mine, other = Folder(tmp_path / "mine"), Folder(tmp_path / "other")
    for folder, number in ((mine, 1), (other, 42)):
        folder.new(SCHEMA).append(pa.table({"id": [number]}))
    return mine, other


def on_disk(path: str) -> Path:
    return Path(path.removeprefix("file://"))


def metadata_of(folder: Folder) -> tuple[Path, Path]:
    """The list of the manifests of a table, and its manifest."""
    metadata = read_metadata(str(folder.root / "metadata" / f"v{folder.version}.metadata.json"))[0]
    listed = on_disk(metadata.current_snapshot().manifest_list)
    (manifest,) = read_manifest_list(folder.io.new_input(str(listed)))
    return listed, on_disk(manifest.manifest_path)


def test_hole_5_java_finds_the_manifests_that_python_has_checked(
    spark: SparkSession, tables: tuple[Folder, Folder]
) -> None:
    """It opened others, at any host."""
    mine, other = tables
    (planned,) = plan_table(TableRecord("t", "iceberg", str(mine.root))).partitions
    exchange_for_java(metadata_of(mine)[0], metadata_of(other)[0])
    (again,) = plan_table(TableRecord("t", "iceberg", str(mine.root))).partitions
    assert again.files == planned.files, "Python sees nothing of it"
    with pytest.raises(InvalidArgument, match="is not read by Java as by Python"):
        iceberg.read(spark, planned.source, planned.files)
    session: Any = spark
    conf = session._jsparkSession.sessionState().newHadoopConf()
    table = session._jvm.org.apache.iceberg.hadoop.HadoopTables(conf).load(str(mine.root))
    with pytest.raises(InvalidArgument, match="is not read by Java as by Python"):
        Production(spark, table, "t/apply/1")


def test_hole_2_java_opens_no_file_of_another_table(
    spark: SparkSession, tables: tuple[Folder, Folder], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rows of other tables stood in samples."""
    mine, other = tables
    exchange_for_java(metadata_of(mine)[1], metadata_of(other)[1])
    monkeypatch.setattr(confinement, "_some_tables_only", True)
    (planned,) = plan_table(TableRecord("t", "iceberg", str(mine.root))).partitions
    with pytest.raises(InvalidArgument, match=r"other/data/.*' lies outside of its table '.*/mine'"):
        iceberg.read(spark, planned.source, planned.files)
