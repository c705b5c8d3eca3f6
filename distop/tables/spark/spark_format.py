"""The planner for tables of Spark's catalog, which defines columns, partitions and locations.

A partition may be outside the table's folder, and a folder in it may be no partition, so paths are never parsed. Only
Spark can read the catalog: planning needs the session, and jobs use the catalog's answers in the plan
(``Planned.options``).
"""

from __future__ import annotations

import hashlib
import json
from typing import TYPE_CHECKING, Any

from distop.errors import InvalidArgument, TableUnavailable
from distop.protocol.plan import MAX_PARTITIONS, PartitionPlan, Planned
from distop.protocol.records import PLANNED_OPTIONS
from distop.storage.confinement import own_folder, table_of
from distop.storage.location import Location
from distop.tables.formats import Format
from distop.tables.parquet.parquet_format import EMPTY, HIVE_NULL, escaped, files_text, in_groups, natural
from distop.tables.reading.file_facts import PlannedFile, of_json
from distop.tables.spark import spark_catalog
from distop.tables.spark.partition_folders import PartitionFolders
from distop.tables.table_options import check_options, is_partition_type

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from distop.protocol.plan import Pinned
    from distop.protocol.records import TableRecord
    from distop.tables.commits import CommitContext, FileReplacer, ReplacementContext
    from distop.tables.formats import Changes, Spark
    from distop.tables.partition_removal import PartitionRemoval
    from distop.tables.reachability import Reachability
    from distop.tables.reader import Reader
    from distop.tables.spark.spark_catalog import CatalogPartition, Described
    from distop.tables.table_options import TableOptions

COLUMNS = "columns"
"""The option with the table's columns except partition columns: name → type, as JSON of the values of
``distop.tables.reading.file_facts``."""

_CHECKED_PARTITIONS = 100
"""Number of partitions that are checked; one existing folder makes the table reachable."""
_DEFAULT = "EXISTS_DEFAULT"
"""In the metadata of a field: the value that Spark reads if a file lacks the column."""
_WITH_DEFAULT = "it has a DEFAULT, which only Spark reads if a file lacks the column"
_PLAIN = {"byte": "tinyint", "short": "smallint", "integer": "int", "long": "bigint"}


class SparkFormat(Format):
    """Tables of Spark's catalog: of Parquet files, or Iceberg tables."""

    def check_table(self, record: TableRecord) -> TableRecord:
        """Check a record, without the catalog: only planning has Spark, and finds out whether the table exists.

        Raises InvalidArgument for an unknown option, and a location that is not the name of a table.
        """
        check_options(record.options, "spark")
        spark_catalog.check_name(record.location)
        return record

    def plan_table(self, table: TableRecord, check: Callable[[], None], spark: Spark) -> Planned:
        """Plan the files of the catalog's partitions with their values, in groups if there are no partition columns.

        An Iceberg table is planned like other Iceberg tables. Raises InvalidArgument if the catalog does not have the
        table, for an unsupported format, and for a Parquet table in a folder of a Delta, Iceberg or Hudi table;
        TableUnavailable if the catalog cannot be read, a folder in it does not exist, or the table has no file.
        """
        # A record from an earlier plan also has the options of that plan.
        options = check_options({n: v for n, v in table.options.items() if n not in PLANNED_OPTIONS}, "spark")
        check()
        described = spark_catalog.describe(spark(), table.location)
        if described.provider == "iceberg":
            from distop.tables.iceberg.snapshot_plan import plan_metadata

            if not described.metadata:
                raise InvalidArgument(f"the catalog has no metadata file for the Iceberg table {table.location!r}")
            return plan_metadata(spark_catalog.path_of(described.metadata), table, options, check)
        if described.provider != "parquet":
            what = "view" if described.provider == "view" else f"table of the format {described.provider}"
            raise InvalidArgument(
                f"{table.location!r} is a {what} in Spark's catalog: only parquet and iceberg tables are supported"
            )
        places = [partition.location for partition in described.partitions or ()]
        return plan(
            described, table.location, options, PartitionFolders(described.location, places, check).files, check
        )

    def reader(self, table: TableRecord, plans: Sequence[PartitionPlan | Pinned]) -> Reader:
        """The reader for the format that the catalog had for the table at planning."""
        if plans and plans[0].source:
            from distop.tables.iceberg import iceberg_format

            return iceberg_format.FORMAT.reader(table, plans)
        from distop.tables.parquet.parquet_reader import ParquetReader

        columns = table.options.get(COLUMNS)
        if columns is None:
            raise InvalidArgument(f"the plan of {table.name!r} has no columns, so it is not a plan of this table")
        declared = {name: of_json(kind) for name, kind in columns.items()}
        return ParquetReader(table, plans, table.options.get("partition_types") or {}, declared)

    def check_reachable(self, table: TableRecord, spark: Spark) -> None:
        """Raises TableUnavailable if the catalog has the table, but no folder of it can be read from here."""
        try:
            described = spark_catalog.describe(spark(), table.location)
        except InvalidArgument:
            return  # dropped: other nodes cannot read it either
        if described.metadata:
            from distop.tables.iceberg.metadata_file import read_metadata

            read_metadata(spark_catalog.path_of(described.metadata))
            return
        if described.provider != "parquet":
            return
        reason: TableUnavailable | None = None
        for place in (described.location, *(p.location for p in (described.partitions or ())[:_CHECKED_PARTITIONS])):
            try:
                Location.of(place).check()
                return
            except TableUnavailable as error:
                reason = reason or error
        if reason is not None:
            raise reason

    def place_of(self, table: TableRecord, check: Callable[[], None], spark: Spark) -> str:
        """The table's location in the catalog. Raises the errors of planning."""
        check()
        described = spark_catalog.describe(spark(), table.location, partitions=False)
        if described.metadata:
            from distop.tables.iceberg.metadata_file import read_metadata

            source = spark_catalog.path_of(described.metadata)
            return own_folder(source, str(read_metadata(source)[0].location))
        return described.location

    def folders_of(
        self, table: TableRecord, check: Callable[[], None], spark: Spark, *, elsewhere: bool
    ) -> tuple[str, ...]:
        """The catalog's location, or the folder of an Iceberg table's metadata.

        ``elsewhere``: also the partitions' locations.
        """
        check()
        described = spark_catalog.describe(spark(), table.location, partitions=elsewhere)
        if described.metadata:
            return (table_of(spark_catalog.path_of(described.metadata)),)
        return (described.location, *(partition.location for partition in described.partitions or ()))

    def of_catalog(self, table: TableRecord) -> bool:
        return True

    def has_source(self, table: TableRecord) -> bool:
        return True

    def reachability(
        self, table: TableRecord, check: Callable[[], None], spark: Spark, *, source: str = ""
    ) -> Reachability:
        """The files of the catalog's partitions, or all snapshots of an Iceberg table.

        Raises the errors of planning.
        """
        from distop.tables.iceberg.iceberg_reachability import IcebergReachability
        from distop.tables.parquet.folder_reachability import FolderReachability

        check()
        described = spark_catalog.describe(spark(), table.location)
        if described.provider == "iceberg" and (source or described.metadata):
            return IcebergReachability.of(source or spark_catalog.path_of(described.metadata), check, hint=False)

        def folders() -> Iterator[tuple[str, Sequence[PlannedFile]]]:
            for partition in self.plan_table(table, check, spark).partitions:
                yield partition.name, partition.files

        return FolderReachability(described.location, folders)

    def partition_removal(
        self, table: TableRecord, context: CommitContext, check: Callable[[], None]
    ) -> PartitionRemoval:
        raise InvalidArgument(
            f"partitions of the table {table.name!r} are entries of Spark's catalog, which distop does not change: "
            "remove them with ALTER TABLE … DROP PARTITION, or register the table's folder as a table of its own"
        )

    def replacer(self, table: TableRecord, ctx: ReplacementContext) -> FileReplacer:
        raise InvalidArgument(
            f"the files of the table {table.name!r} cannot be replaced through Spark's catalog: register its folder as "
            "a table of the format parquet, or an Iceberg table by its folder or with the option 'catalog'"
        )

    def changes(self, table: TableRecord) -> Changes:
        raise InvalidArgument(
            f"cannot change the schema of the table {table.name!r} through Spark's catalog: register an Iceberg table "
            "by its folder, or with the option 'catalog'"
        )


def plan(
    described: Described,
    name: str,
    options: TableOptions,
    files_in: Callable[..., list[PlannedFile]],
    check: Callable[[], None],
) -> Planned:
    """Plan the table that the catalog describes.

    ``files_in`` lists the files of a folder (``deep``: also of its subfolders), and raises TableUnavailable if it does
    not exist. If all folders are empty, the table counts as unavailable: a missing disk looks the same.

    Raises InvalidArgument for unsupported types of partition columns, ambiguous partitions, and more than a million
    partitions.
    """
    types = {str(field["name"]): _type(field) for field in described.columns}
    for field in described.columns:
        # The catalog has the values of partition columns, so their defaults do not matter.
        if _DEFAULT in (field.get("metadata") or {}) and field["name"] not in described.partition_columns:
            types[str(field["name"])] = ["unreadable", _WITH_DEFAULT]
    if described.partitions == []:
        if files_in(described.location, deep=True):
            raise InvalidArgument(
                f"the folder of {name!r} has files, but the catalog has no partitions of it, so Spark reads no rows: "
                f"run MSCK REPAIR TABLE {name}"
            )
        return Planned([PartitionPlan(0, EMPTY)], _version([], types), {COLUMNS: types, "partition_types": {}})
    by_value = {column: types.pop(column) for column in described.partition_columns}
    for column, kind in by_value.items():
        if not isinstance(kind, str) or not is_partition_type(kind):
            raise InvalidArgument(f"the partition column {column!r} of {name!r} has an unsupported type")
    if described.partitions is None:
        partitions = [
            PartitionPlan(ordinal, group, sum(f[1] for f in files), tuple(files))
            for ordinal, (group, files) in enumerate(in_groups(files_in(described.location), options))
        ]
    else:
        partitions = list(_by_value(described.partitions, name, files_in, check))
    if not any(partition.files for partition in partitions):
        raise TableUnavailable(
            f"the folders of {name!r} have no files: they were removed, or their disk is not mounted here"
        )
    if len(partitions) > MAX_PARTITIONS:
        raise InvalidArgument(f"the table {name!r} has {len(partitions)} partitions: at most a million are supported")
    return Planned(partitions, _version(partitions, types), {COLUMNS: types, "partition_types": by_value})


def _by_value(
    found: Iterable[CatalogPartition], name: str, files_in: Callable[..., list[PlannedFile]], check: Callable[[], None]
) -> Iterator[PartitionPlan]:
    by_name: dict[str, tuple[dict[str, str | None], str]] = {}
    folders: dict[str, str] = {}
    for one in found:
        values = {column: None if value in (None, HIVE_NULL) else value for column, value in one.values.items()}
        partition = "/".join(
            f"{escaped(column)}={HIVE_NULL if value is None else escaped(value)}" for column, value in values.items()
        )
        if partition in by_name:
            raise InvalidArgument(f"the catalog has the partition {partition} of {name!r} twice")
        other = folders.setdefault(one.location.rstrip("/"), partition)
        if other != partition:
            both = f"the partitions {other} and {partition} of {name!r}"
            raise InvalidArgument(f"{both} have the same folder: {one.location}")
        by_name[partition] = (values, one.location)
    for ordinal, partition in enumerate(sorted(by_name, key=lambda text: (natural(text), text))):
        check()
        values, location = by_name[partition]
        try:
            files = files_in(location)
        except TableUnavailable as error:
            raise TableUnavailable(f"cannot read the partition {partition} of {name!r}: {error}") from error
        yield PartitionPlan(ordinal, partition, sum(f[1] for f in files), tuple(files), values=values)


def _type(field: Mapping[str, Any]) -> Any:
    if any("collation" in key.lower() for key in field.get("metadata") or {}):
        return ["unreadable", "texts with a collation are not supported"]
    return _plain(field["type"])


def _plain(kind: Any) -> Any:
    """A type of ``StructType.json()`` as JSON of the values of ``distop.tables.reading.file_facts``."""
    if isinstance(kind, str):
        return _PLAIN.get(kind, kind)
    if kind["type"] == "struct":
        return ["struct", [[field["name"], _type(field)] for field in kind["fields"]]]
    if kind["type"] == "array":
        return ["array", _plain(kind["elementType"])]
    if kind["type"] == "map":
        return ["map", _plain(kind["keyType"]), _plain(kind["valueType"])]
    return ["unreadable", f"the type {kind['type']} is not supported"]


def _version(partitions: Iterable[PartitionPlan], types: Mapping[str, Any]) -> str:
    digest = hashlib.blake2b(json.dumps(types).encode(), digest_size=16)
    for partition in partitions:
        digest.update(f"{partition.name}\0".encode("utf-8", "surrogateescape"))
        digest.update(files_text(partition))
    return f"files-{digest.hexdigest()}"


FORMAT = SparkFormat()
