"""A folder of a Delta, Iceberg or Hudi table is refused as another format: its removed rows would count."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from deltalake import write_deltalake

from distop.errors import InvalidArgument
from distop.protocol.records import TableRecord
from distop.tables import check_table, plan_table
from distop.tables.spark import spark_catalog
from distop.tables.spark.spark_catalog import CatalogPartition, Described
from tests.support.delta_logs import DeltaLog

ROWS = pa.table({"id": [1, 2], "k": ["a", "b"]})
ENTRANCES = [pytest.param(check_table, id="registration"), pytest.param(plan_table, id="planning")]


COLUMNS = [{"name": "id", "type": "long"}, {"name": "k", "type": "string"}]


def record(path: Path, format_name: str = "parquet") -> TableRecord:
    return TableRecord("t", format_name, str(path))


def iceberg(path: Path, metadata: str = "v1.metadata.json", data: str = "data/part-0.parquet") -> Path:
    for name in (f"metadata/{metadata}", data):
        (path / name).parent.mkdir(parents=True, exist_ok=True)
    (path / "metadata" / metadata).write_text("{}")
    pq.write_table(ROWS, path / data)
    return path


def add_metadata(kind: str, path: Path) -> None:
    """Add a file that shows a table of a kind."""
    name = {"delta": f"_delta_log/{0:020}.json", "iceberg": "metadata/v1.metadata.json", "hudi": ".hoodie/x"}[kind]
    (path / name).parent.mkdir(parents=True)
    (path / name).write_text("{}")


@pytest.mark.parametrize("enter", ENTRANCES)
@pytest.mark.parametrize("partitions", [[], ["k"]])
def test_a_delta_table_is_refused_as_parquet(
    enter: Callable[[TableRecord], object], partitions: list[str], tmp_path: Path
) -> None:
    write_deltalake(tmp_path, ROWS, partition_by=partitions)
    with pytest.raises(InvalidArgument, match=r"is a Delta table: .*; register it with --format delta$"):
        enter(record(tmp_path))


@pytest.mark.parametrize("enter", ENTRANCES)
def test_a_partition_of_a_delta_table_is_refused_as_parquet(
    enter: Callable[[TableRecord], object], tmp_path: Path
) -> None:
    write_deltalake(tmp_path / "t", ROWS, partition_by=["k"])
    with pytest.raises(InvalidArgument, match=rf"belongs to a Delta table: .*; register {tmp_path}/t with --format"):
        enter(record(tmp_path / "t" / "k=a"))


def test_a_folder_beside_a_delta_table_is_no_delta_table(tmp_path: Path) -> None:
    write_deltalake(tmp_path, ROWS)
    (tmp_path / "plain").mkdir()
    pq.write_table(ROWS, tmp_path / "plain" / "a.parquet")
    assert len(plan_table(check_table(record(tmp_path / "plain"))).partitions) == 1


@pytest.mark.parametrize("enter", ENTRANCES)
def test_a_delta_table_in_a_partition_folder_is_refused(enter: Callable[[TableRecord], object], tmp_path: Path) -> None:
    write_deltalake(tmp_path / "day=1", ROWS)
    (tmp_path / "day=2").mkdir()
    pq.write_table(ROWS, tmp_path / "day=2" / "a.parquet")
    with pytest.raises(InvalidArgument, match="has the Delta table 'day=1': .*register it with --format delta"):
        enter(record(tmp_path))


def test_a_delta_log_with_a_checkpoint_only_is_one(tmp_path: Path) -> None:
    log = DeltaLog(tmp_path)
    pq.write_table(ROWS, log.folder / f"{3:020}.checkpoint.parquet")
    pq.write_table(ROWS, tmp_path / "part-0.parquet")
    with pytest.raises(InvalidArgument, match="is a Delta table"):
        plan_table(record(tmp_path))


def test_an_empty_folder_named_as_a_log_is_none(tmp_path: Path) -> None:
    DeltaLog(tmp_path)
    pq.write_table(ROWS, tmp_path / "part-0.parquet")
    assert plan_table(check_table(record(tmp_path))).partitions


@pytest.mark.parametrize("enter", ENTRANCES)
@pytest.mark.parametrize("data", ["data/part-0.parquet", "part-0.parquet", "data/k=a/part-0.parquet"])
def test_an_iceberg_table_is_refused_as_parquet(
    enter: Callable[[TableRecord], object], data: str, tmp_path: Path
) -> None:
    for name in ("v1.metadata.json", "00000-3f2c.metadata.json", "v3.gz.metadata.json"):
        found = iceberg(tmp_path / name, name, data)
        with pytest.raises(InvalidArgument, match=r"is an Iceberg table: .*; register it with --format iceberg$"):
            enter(record(found))


@pytest.mark.parametrize("enter", ENTRANCES)
@pytest.mark.parametrize("inner", ["data", "data/k=a"])
def test_the_data_folder_of_an_iceberg_table_is_refused_as_parquet(
    enter: Callable[[TableRecord], object], inner: str, tmp_path: Path
) -> None:
    found = iceberg(tmp_path / "t", data=f"{inner}/part-0.parquet")
    with pytest.raises(InvalidArgument, match=rf"belongs to an Iceberg table: .*; register {found} with --format iceb"):
        enter(record(found / inner))


@pytest.mark.parametrize("enter", ENTRANCES)
def test_an_iceberg_table_in_a_partition_folder_is_refused(
    enter: Callable[[TableRecord], object], tmp_path: Path
) -> None:
    iceberg(tmp_path / "day=1", data="part-0.parquet")
    with pytest.raises(InvalidArgument, match="has the Iceberg table 'day=1': .*register it with --format iceberg"):
        enter(record(tmp_path))


def test_a_folder_named_metadata_with_data_is_no_iceberg_table(tmp_path: Path) -> None:
    (tmp_path / "metadata").mkdir()
    pq.write_table(ROWS, tmp_path / "metadata" / "a.parquet")
    assert plan_table(check_table(record(tmp_path / "metadata"))).partitions


@pytest.mark.parametrize("enter", ENTRANCES)
def test_a_hudi_table_is_refused_as_parquet(enter: Callable[[TableRecord], object], tmp_path: Path) -> None:
    (tmp_path / ".hoodie").mkdir()
    (tmp_path / ".hoodie" / "hoodie.properties").write_text("")
    pq.write_table(ROWS, tmp_path / "part-0.parquet")
    with pytest.raises(InvalidArgument, match="is a Hudi table, which distop does not support"):
        enter(record(tmp_path))


@pytest.mark.parametrize("enter", ENTRANCES)
def test_delta_and_iceberg_folders_name_each_other(enter: Callable[[TableRecord], object], tmp_path: Path) -> None:
    write_deltalake(tmp_path / "d", ROWS)
    with pytest.raises(InvalidArgument, match="has no Iceberg table: .* it is a Delta table.* --format delta$"):
        enter(record(tmp_path / "d", "iceberg"))
    iceberg(tmp_path / "i")
    with pytest.raises(InvalidArgument, match="has no Delta table: .* it is an Iceberg table.* --format iceberg$"):
        enter(record(tmp_path / "i", "delta"))


def test_a_folder_that_becomes_a_delta_table_is_refused_at_planning(tmp_path: Path) -> None:
    write_deltalake(tmp_path / "new", ROWS)
    (tmp_path / "t").mkdir()
    pq.write_table(ROWS, tmp_path / "t" / "a.parquet")
    registered = check_table(record(tmp_path / "t"))
    shutil.copytree(tmp_path / "new", tmp_path / "t", dirs_exist_ok=True)
    with pytest.raises(InvalidArgument, match="is a Delta table"):
        plan_table(registered)


@pytest.fixture
def in_catalog(monkeypatch: pytest.MonkeyPatch) -> Callable[..., object]:
    """Plans a Parquet table that Spark's catalog has at a location, with partitions by ``k`` at these locations."""

    def planned(location: Path, *partitions: Path) -> object:
        found = [CatalogPartition({"k": str(n)}, str(path)) for n, path in enumerate(partitions)]
        by = ("k",) if partitions else ()
        described = Described("parquet", str(location), COLUMNS, by, found if partitions else None)
        monkeypatch.setattr(spark_catalog, "describe", lambda *args, **options: described)
        return plan_table(TableRecord("t", "spark", "db.t"), spark=lambda: None)

    return planned


@pytest.mark.parametrize("place", ["t", "t/k=a"])
@pytest.mark.parametrize("make", ["delta", "iceberg", "hudi"])
def test_a_parquet_table_of_a_catalog_in_a_folder_of_another_format_is_refused(
    in_catalog: Callable[..., object], tmp_path: Path, make: str, place: str
) -> None:
    (tmp_path / place).mkdir(parents=True)
    pq.write_table(ROWS, tmp_path / place / "part-0.parquet")
    assert in_catalog(tmp_path / place)
    add_metadata(make, tmp_path / "t")
    with pytest.raises(InvalidArgument, match=rf"(?i)(is|belongs to) an? {make} table.* its removed rows"):
        in_catalog(tmp_path / place)


@pytest.mark.parametrize("layout", ["own folder", "custom name", "elsewhere", "elsewhere, of a partition", "inside"])
@pytest.mark.parametrize("make", ["delta", "iceberg", "hudi"])
def test_a_partition_of_a_catalog_in_a_folder_of_another_format_is_refused(
    in_catalog: Callable[..., object], tmp_path: Path, make: str, layout: str
) -> None:
    other, partition = {
        "own folder": ("t", "t/k=a"),
        "custom name": ("t", "t/first"),
        "elsewhere": ("u", "u"),
        "elsewhere, of a partition": ("u", "u/k=a"),
        "inside": ("t/k=a", "t/k=a"),
    }[layout]
    for folder in ("t/k=0", partition):
        (tmp_path / folder).mkdir(parents=True)
        pq.write_table(ROWS, tmp_path / folder / "part-0.parquet")
    partitions = (tmp_path / "t/k=0", tmp_path / partition)
    assert in_catalog(tmp_path / "t", *partitions)
    add_metadata(make, tmp_path / other)
    with pytest.raises(InvalidArgument, match=rf"(?i) an? {make} table"):
        in_catalog(tmp_path / "t", *partitions)
