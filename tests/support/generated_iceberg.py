"""Random Iceberg tables by seed, written without a JVM: deletes, and schemas and partition specs that change.

They go on where ``evolving_tables`` ends.
"""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

from pyiceberg.expressions import AlwaysTrue
from pyiceberg.io import load_file_io
from pyiceberg.io.pyarrow import ArrowScan
from pyiceberg.serializers import FromInputFile
from pyiceberg.table import StaticTable, Table
from pyiceberg.transforms import (
    BucketTransform,
    DayTransform,
    HourTransform,
    IdentityTransform,
    MonthTransform,
    TruncateTransform,
    VoidTransform,
    YearTransform,
)
from pyiceberg.types import (
    BinaryType,
    DoubleType,
    FixedType,
    IntegerType,
    ListType,
    LongType,
    MapType,
    NestedField,
    StringType,
    StructType,
)

from distop.protocol.records import TableRecord
from distop.storage.location import Location
from distop.tables.iceberg.metadata_file import current_metadata_file
from tests.support import row_deltas
from tests.support.evolving_tables import Evolved, as_arrow, change, evolve, random_rows
from tests.support.lake import Folder
from tests.support.maintenance_oracle import rows_of

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from scripts.validate_oracle.random_tables import Row
    from tests.support.maintenance_oracle import Rows

ODD_COLUMNS = ("a b", "ü%", "x.y", "p=q", "100%/s", "`q`", "UP per")
ODD_VALUES = (
    "a b",
    "100%",
    "a%3Ab",
    "ü",
    ".",
    "..",
    "",
    "null",
    "__HIVE_DEFAULT_PARTITION__",
    "x=y/z",
    "p.q",
    "+",
    "\\",
)
ODD_FOLDERS = ("plain", "la ke", "100%", "a%3Ab", "ü", "a+b", "p=q")
"""Names of the folders in which tables are."""
TRANSFORMS: dict[str, tuple[Any, ...]] = {
    "id": (BucketTransform(2), TruncateTransform(50)),
    "k": (IdentityTransform(), BucketTransform(2), TruncateTransform(1)),
    "i": (BucketTransform(2), TruncateTransform(1000), VoidTransform()),
    "f": (IdentityTransform(),),
    "d": (IdentityTransform(), VoidTransform()),
    "dec": (BucketTransform(2), TruncateTransform(10_000)),
    "day": (YearTransform(), MonthTransform(), BucketTransform(2)),
    "ts": (YearTransform(), MonthTransform(), DayTransform(), HourTransform(), BucketTransform(2)),
    "tz": (YearTransform(), DayTransform(), HourTransform()),
    "flag": (IdentityTransform(),),
    "text": (TruncateTransform(1), BucketTransform(3)),
    "odd": (IdentityTransform(), IdentityTransform(), TruncateTransform(2)),
}
"""Column, by its first name → transforms of partitions."""
NESTED: dict[str, tuple[Any, Callable[[int], Any]]] = {
    "tags": (
        ListType(501, StringType(), element_required=False),
        lambda n: None if n % 5 == 0 else ["é", None][: n % 3],
    ),
    "props": (
        MapType(511, StringType(), 512, LongType(), value_required=False),
        lambda n: None if n % 4 == 0 else [("a", n), ("b b", None)][: n % 3],
    ),
    "deep": (
        StructType(
            NestedField(
                521, "in ner", StructType(NestedField(522, "x", IntegerType(), required=False)), required=False
            ),
            NestedField(
                523,
                "list",
                ListType(524, StructType(NestedField(525, "y", DoubleType(), required=False)), element_required=False),
                required=False,
            ),
        ),
        lambda n: None if n % 6 == 0 else {"in ner": {"x": n} if n % 2 else None, "list": [{"y": -0.0}, None][: n % 3]},
    ),
    "bytes": (BinaryType(), lambda n: None if n % 7 == 0 else bytes([n % 256, 0, 255])),
    "fixed": (FixedType(3), lambda n: bytes([n % 256] * 3)),
}
"""Further column → its type and its value in a row."""
DELETABLE = ("id", "k", "i", "dec", "day", "ts", "text", "flag")
"""Columns of equality deletes."""


class GeneratedIceberg:
    """A generated table. ``history``: what was done to it."""

    def __init__(self, seed: int, path: Path, *, version: int = 2, heavy: bool = False) -> None:
        self.chance = random.Random(f"iceberg {seed}")
        self.path = path
        self.record = TableRecord("t", "iceberg", str(path))
        self.version = version
        self.heavy = heavy
        self.history: list[str] = []
        self.equal = False
        """Whether it has equality deletes."""
        properties = {"write.delete.mode": "merge-on-read", "write.update.mode": "merge-on-read"}
        if self.chance.random() < 0.2:
            properties["write.parquet.compression-codec"] = self.chance.choice(["zstd", "gzip", "uncompressed"])
        self.made: Evolved = evolve(seed, path, version=version, **properties)
        self._extra: dict[str, Callable[[int], Any]] = {}
        for _ in range(self.chance.randint(3, 6)):
            self._step()
        if heavy:
            self._fill()
        else:
            self.append()
        if self.chance.random() < 0.5 and not heavy:
            self.append()

    @property
    def table(self) -> Table:
        """The current table."""
        return self.made.table

    def reload(self) -> Table:
        """Load the current metadata file, since others have changed the table."""
        numbers = {
            int(one.name[1:].partition(".")[0]): one for one in (self.path / "metadata").glob("v*.metadata.json")
        }
        number = max(numbers)
        catalog = Folder(self.path)
        catalog.version = number
        io = load_file_io({}, str(self.path))
        metadata = FromInputFile.table_metadata(io.new_input(str(numbers[number])))
        self.made.table = Table(("t",), metadata, str(numbers[number]), io, catalog)
        return self.made.table

    # ------------------------------------------------------------------ steps

    def append(self) -> None:
        """Append random rows."""
        rows = random_rows(self.made, self.chance, {c for c in TRANSFORMS if self.chance.random() < 0.3})
        self._append(rows)

    def _append(self, rows: list[Row]) -> None:
        for n, row in enumerate(rows):
            for column, value in self._extra.items():
                row[column] = value(len(self.made.rows) + n)
        row_deltas.commit(self.table, data=row_deltas.new_files(self.table, as_arrow(self.made, rows)))
        self.made.rows += rows
        self.history.append(f"append {len(rows)} rows")

    def delete_positions(self) -> None:
        """Delete rows by their positions."""
        deletes = row_deltas.position_deletes(self.table, self.chance)
        if deletes:
            row_deltas.commit(self.table, deletes=deletes)
        self.history.append(f"{len(deletes)} files of position deletes")

    def delete_equal(self) -> None:
        """Delete rows that are equal to some in one or two columns."""
        columns = self.chance.sample(DELETABLE, self.chance.choice([1, 1, 2]))
        some = self.chance.sample(self.made.rows, min(len(self.made.rows), self.chance.randint(1, 3)))
        rows = [{self.made.names[c]: row[c] for c in columns} for row in some]
        row_deltas.commit(
            self.table, deletes=row_deltas.equality_deletes(self.table, [self.made.names[c] for c in columns], rows)
        )
        self.equal = True
        self.history.append(f"equality deletes of {rows}")

    def overwrite(self) -> None:
        """Remove some data files, and add rows."""
        files = row_deltas.data_files(self.table)
        removed = self.chance.sample(files, self.chance.randint(1, len(files)))
        rows = random_rows(self.made, self.chance, set())
        for n, row in enumerate(rows):
            row |= {column: value(n) for column, value in self._extra.items()}
        new = row_deltas.new_files(self.table, as_arrow(self.made, rows))
        row_deltas.commit(self.table, data=new, removed=removed)
        self.history.append(f"overwrite {len(removed)} of {len(files)} files")

    def change_schema(self) -> None:
        """Rename, widen, drop, move or add columns."""
        sources = {field.source_id for spec in self.table.specs().values() for field in spec.fields}
        used = {self.table.schema().find_column_name(number) for number in sources}
        before = str(self.table.schema())
        if not {self.made.names[c] for c in ("tz", "big", "ts")} & used:
            change(self.made, self.chance)
        else:
            self._add_column()
        if str(self.table.schema()) == before:
            self._add_column()
        self.history.append("change the schema")

    def _add_column(self) -> None:
        left = sorted(NESTED.keys() - self._extra.keys())
        with self.table.update_schema() as update:
            if not left or (self.chance.random() < 0.4 and "odd" not in self._extra):
                name = self.chance.choice(ODD_COLUMNS)
                column = "odd" if "odd" not in self._extra else f"more{len(self.history)}"
                self.made.names[column] = name if column == "odd" else column
                update.add_column((self.made.names[column],), StringType())
                values = self.chance.sample(ODD_VALUES, 2)
                self._extra[column] = lambda n: None if n % 5 == 4 else values[n % 2]
            else:
                column = self.chance.choice(left)
                kind, value = NESTED[column]
                self.made.names[column] = column
                update.add_column((column,), kind)
                self._extra[column] = value

    def _change_spec(self) -> None:
        schema, spec = self.table.schema(), self.table.spec()
        with self.table.update_spec() as update:
            live = [one for one in spec.fields if not isinstance(one.transform, VoidTransform)]
            if live and self.chance.random() < 0.6:
                gone = self.chance.choice(live)
                update.remove_field(gone.name)
                self.history.append(f"remove the partition field {gone.name}")
            if len(live) < 2:
                taken = {one.source_id for one in spec.fields}
                known = [
                    c
                    for c in TRANSFORMS
                    if c in self.made.names and schema.find_field(self.made.names[c]).field_id not in taken
                ]
                if "odd" in known and self.chance.random() < 0.5:
                    known = ["odd"]
                column = self.chance.choice(known)
                transform = self.chance.choice(TRANSFORMS[column])
                name = f"by_{column}_{len(self.history)}" if self.chance.random() < 0.7 else f"b ü%.{len(self.history)}"
                update.add_field(self.made.names[column], transform, name)
                self.history.append(f"partition by {transform}({column})")

    def _step(self) -> None:
        kinds: list[Callable[[], None]] = [self.append, self._change_spec, self._change_spec, self.change_schema]
        kinds += [self._add_column, self._empty, self._properties]
        if self.version > 1:
            kinds += [self.delete_positions, self.delete_positions, self.delete_equal]
        self.chance.choice(kinds)()

    def _empty(self) -> None:
        file = row_deltas.empty_file(self.table)
        if file is not None:
            row_deltas.commit(self.table, data=[file])
            self.history.append("an empty file")

    def _properties(self) -> None:
        with self.table.transaction() as transaction:
            transaction.set_properties({"owner": "ü", f"x.{len(self.history)}": "%"})
        if (snapshot := self.table.metadata.current_snapshot()) is not None:
            tag = f"tag{len(self.history)}"
            self.table.manage_snapshots().create_tag(snapshot.snapshot_id, tag).commit()
        if self.chance.random() < 0.5:
            with self.table.update_sort_order() as order:
                order.asc(self.made.names["id"], IdentityTransform())
        self.history.append("properties, a tag, a sort order")

    def _fill(self) -> None:
        """Append eight files of about 60 KB to the table without partitions."""
        if self.table.spec().fields:
            with self.table.update_spec() as update:
                for one in self.table.spec().fields:
                    if not isinstance(one.transform, VoidTransform):
                        update.remove_field(one.name)
        with self.table.transaction() as transaction:  # tiny row groups would vanish in new files
            transaction.set_properties({"write.parquet.row-group-limit": "1000"})
        (row,) = random_rows(self.made, self.chance, set())[:1]
        for _ in range(8):
            first = len(self.made.rows)
            rows = [{**row, "id": first + n, "long": self.chance.randbytes(300).hex()} for n in range(200)]
            self._append(rows)


def exported_rows(table: Table, target: str, snapshot: int) -> tuple[Rows, Rows]:
    """The rows of a snapshot's exported data files, read as files of the table; and those of the table's own files."""
    scan = table.scan(snapshot_id=snapshot)
    own = rows_of(scan.to_arrow())
    tasks = list(scan.plan_files())
    for task in tasks:
        task.file[1] = task.file.file_path.replace(table.metadata.location, target, 1)
    reading = ArrowScan(table.metadata, table.io, scan.projection(), AlwaysTrue())
    return rows_of(reading.to_table(tasks)), own


def registered_rows(target: str) -> Rows:
    """The rows of the table whose metadata are at the target of an export."""
    return rows_of(StaticTable.from_metadata(current_metadata_file(Location.of(target))).scan().to_arrow())
