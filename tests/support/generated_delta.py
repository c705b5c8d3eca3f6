"""Random Delta tables by seed, written by delta-rs: deletes, odd partitions, changing schemas, restores."""

from __future__ import annotations

import datetime
import json
import random
import shutil
from contextlib import suppress
from decimal import Decimal
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote

import pyarrow as pa
import pyarrow.parquet as pq
from deltalake import DeltaTable, write_deltalake
from deltalake.exceptions import DeltaError

from distop.protocol.records import TableRecord
from distop.tables.delta.delta_replacer import DeltaReplacer
from tests.support.generated_iceberg import ODD_COLUMNS, ODD_VALUES
from tests.support.maintenance_oracle import rows_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.support.maintenance_oracle import Rows

_NAMES = [name for name in ODD_COLUMNS if "." not in name]
"""Without a dot, for which a copy needs Spark."""

_EPOCH = datetime.datetime(1970, 1, 1)  # noqa: DTZ001
TYPES: dict[str, tuple[pa.DataType, Callable[[int], Any]]] = {
    "long": (pa.int64(), lambda n: n * 7919),
    "int": (pa.int32(), lambda n: n - 500),
    "short": (pa.int16(), lambda n: n % 300),
    "byte": (pa.int8(), lambda n: n % 100),
    "double": (pa.float64(), lambda n: (float("nan"), -0.0, 0.0, n / 3)[n % 4]),
    "float": (pa.float32(), lambda n: (float("inf"), -0.0, float("nan"), n / 4)[n % 4]),
    "string": (pa.string(), lambda n: "é" * (n % 40) if n % 5 else None),
    "bool": (pa.bool_(), lambda n: n % 2 == 0),
    "date": (pa.date32(), lambda n: datetime.date(1969, 12, 1) + datetime.timedelta(days=n)),
    "time": (
        pa.timestamp("us", "UTC"),
        lambda n: (_EPOCH + datetime.timedelta(microseconds=n * 987654321)).replace(tzinfo=datetime.UTC),
    ),
    "local": (pa.timestamp("us"), lambda n: _EPOCH + datetime.timedelta(microseconds=n * 123456789)),
    "decimal": (pa.decimal128(12, 3), lambda n: Decimal(n - 400).scaleb(-3)),
    "wide": (pa.decimal128(38, 2), lambda n: Decimal(n * 10**30 + 1).scaleb(-2)),
    "binary": (pa.binary(), lambda n: bytes([n % 256, 0])),
    "struct": (
        pa.struct([("a", pa.int32()), ("b b", pa.string())]),
        lambda n: None if n % 4 == 0 else {"a": n if n % 3 else None, "b b": "x"},
    ),
    "list": (pa.list_(pa.int64()), lambda n: (None, [], [n, None], [n])[n % 4]),
    "deep": (
        pa.list_(pa.struct([("x", pa.list_(pa.string()))])),
        lambda n: (None, [{"x": ["ü", None]}, None], [{"x": None}])[n % 3],
    ),
}
"""Type → Arrow's type, and the value of a row."""
KEYS: dict[str, Callable[[int], Any]] = {
    "string": lambda n: ODD_VALUES[n % len(ODD_VALUES)],
    "int": lambda n: n % 3,
    "date": lambda n: datetime.date(1969, 12, 30) + datetime.timedelta(days=n % 3),
    "bool": lambda n: n % 2 == 0,
    "double": lambda n: (float("nan"), -0.0, 1.5)[n % 3],
    "decimal": lambda n: Decimal(n % 3).scaleb(-3),
}
"""Type of a partition column → the value of a row."""


class DeltaActions:
    """The log of a Delta table, as plain JSON: all commits are there."""

    def __init__(self, path: Path) -> None:
        self._log = path / "_delta_log"
        self._path = path

    def versions(self) -> list[int]:
        return sorted(int(one.stem) for one in self._log.glob("[0-9]*.json") if one.stem.isdigit())

    def actions(self, until: int | None = None) -> list[dict[str, Any]]:
        chosen = [number for number in self.versions() if until is None or number <= until]
        lines = [(self._log / f"{number:020}.json").read_text().splitlines() for number in chosen]
        return [json.loads(line) for some in lines for line in some if line.strip()]

    def adds(self) -> list[dict[str, Any]]:
        """The live files of the newest version."""
        found: dict[str, dict[str, Any]] = {}
        for action in self.actions():
            for kind, one in action.items():
                if kind == "remove":
                    found.pop(one["path"], None)
                elif kind == "add":
                    found[one["path"]] = one
        return list(found.values())

    def files(self) -> dict[str, int]:
        return {f"{self._path}/{unquote(one['path'])}": int(one["size"]) for one in self.adds()}

    def state(self) -> Any:
        """The newest protocol and metadata."""
        found = {}
        for action in self.actions():
            found |= {kind: one for kind, one in action.items() if kind in ("protocol", "metaData")}
        return found


class GeneratedDelta:
    """A generated table; a subject of the oracle. ``history``: what was done to it."""

    replacer = DeltaReplacer
    groups = 6

    def __init__(self, seed: int, root: Path, *, heavy: bool = False) -> None:
        self.chance = random.Random(f"delta {seed}")
        self.path = root
        self.record = TableRecord("t", "delta", str(root))
        self.log = DeltaActions(root)
        self.heavy = heavy
        self.history: list[str] = []
        self._rows = 0
        keys = self.chance.sample(sorted(KEYS), self.chance.choice([0, 0, 1, 1, 2]))
        self._keys = {f"k{n}" if self.chance.random() < 0.7 else f"k ü%{n}": kind for n, kind in enumerate(keys)}
        self._columns = {"id": "long"}
        for n, kind in enumerate(self.chance.sample(sorted(TYPES), 4)):
            self._columns[self.chance.choice([f"c{n}", f"c{n}", _NAMES[n]])] = kind
        self.append()
        for _ in range(self.chance.randint(2, 6)):
            self._step()
        if heavy:
            self._fill()
        else:
            self.append()

    @property
    def table(self) -> DeltaTable:
        return DeltaTable(self.path)

    # ------------------------------------------------------------------ the subject

    def read(self, version: Any = None) -> Rows:
        return rows_of(DeltaTable(self.path, version=version).to_pyarrow_table())

    def versions(self) -> list[Any]:
        return self.log.versions()

    def state(self) -> Any:
        return self.log.state()

    def files(self) -> dict[str, int]:
        return self.log.files()

    def spark(self) -> Any:
        return None

    def needs(self) -> bool:
        return False

    def exported(self, target: str, version: Any) -> tuple[Rows, Rows]:
        log = Path(target) / "_delta_log"
        shutil.copytree(self.path / "_delta_log", log)
        try:
            return rows_of(DeltaTable(target, version=version).to_pyarrow_table()), self.read(version)
        finally:
            shutil.rmtree(log)

    def registers(self) -> bool:
        return False

    def registered(self, target: str) -> Rows:
        raise NotImplementedError

    def write(self, kind: str) -> None:
        doing: dict[str, Callable[[], None]] = {
            "append": self.append,
            "delete": self.chance.choice([self._delete, self._update]),
            "overwrite": self.chance.choice([self._overwrite, self._restore]),
            "schema": self._evolve,
            "compaction": self._optimize,
        }
        doing[kind]()

    # ------------------------------------------------------------------ steps

    def append(self) -> None:
        """Append rows, with the columns in any order."""
        self._write(self._random_rows(self.chance.randint(1, 40)))

    def _random_rows(self, count: int) -> pa.Table:
        numbers = range(self._rows, self._rows + count)
        self._rows += count
        nulls, values = self.chance.choice([0, 3, 1]), self.chance.randint(1, 3)
        columns: dict[str, pa.Array] = {}
        for name, kind in self._columns.items():
            made = [TYPES[kind][1](n) if name == "id" or not nulls or n % 4 < nulls else None for n in numbers]
            columns[name] = pa.array(made, TYPES[kind][0])
        for name, kind in self._keys.items():
            shift = self.chance.randint(0, 20) if self.chance.random() < 0.3 else 0
            made = [KEYS[kind](n % values + shift) if n % 4 else None for n in numbers]
            columns[name] = pa.array(made, TYPES[kind][0])
        order = [*columns]
        self.chance.shuffle(order)
        return pa.table({name: columns[name] for name in order})

    def _write(self, rows: pa.Table, mode: Any = "append") -> None:
        write_deltalake(self.path, rows, mode=mode, partition_by=[*self._keys] or None, schema_mode="merge")
        self.history.append(f"{mode} {rows.num_rows} rows of {rows.schema}")

    def _try(self, name: str, act: Callable[[], Any]) -> None:
        """Do something that delta-rs cannot do to every table."""
        with suppress(DeltaError):
            act()
            self.history.append(name)

    def _delete(self) -> None:
        count = self.chance.randint(3, 9)
        self._try("delete", lambda: self.table.delete(f"id % {count} = 0"))

    def _update(self) -> None:
        count = self.chance.randint(3, 9)
        self._try("update", lambda: self.table.update(updates={"id": "id + 1"}, predicate=f"id % {count} = 1"))

    def _overwrite(self) -> None:
        self._write(self._random_rows(self.chance.randint(1, 40)), "overwrite")

    def _evolve(self) -> None:
        name = f"n{len(self.history)} ü"
        self._columns[name] = self.chance.choice(sorted(TYPES))
        self.append()

    def _optimize(self) -> None:
        if self.chance.random() < 0.7:
            self._try("optimize", self.table.optimize.compact)
        else:
            self._try("optimize by order", lambda: self.table.optimize.z_order(["id"]))

    def _restore(self) -> None:
        version = max(0, self.table.version() - self.chance.randint(1, 2))
        self._try(f"restore {version}", lambda: self.table.restore(version))
        names = {field.name for field in self.table.schema().fields}
        self._columns = {name: kind for name, kind in self._columns.items() if name in names}

    def _checkpoint(self) -> None:
        self.table.create_checkpoint()
        self.history.append("checkpoint")

    def _properties(self) -> None:
        given = {"delta.dataSkippingNumIndexedCols": str(self.chance.choice([-1, 0, 2])), "x": "ü%"}
        self._try("properties", lambda: self.table.alter.set_table_properties(given, raise_if_not_exists=False))

    def _empty(self) -> None:
        """Add a file without rows."""
        like = self.chance.choice(self.log.adds())
        folder = like["path"].rpartition("/")[0]
        name = f"{folder}/empty-{len(self.history)}.parquet".lstrip("/")
        source = f"{self.path}/{unquote(like['path'])}"
        pq.write_table(pq.read_schema(source).empty_table(), f"{self.path}/{unquote(name)}")
        size = (self.path / unquote(name)).stat().st_size
        rest = {"modificationTime": 0, "dataChange": True, "stats": json.dumps({"numRecords": 0})}
        add = {"path": name, "partitionValues": like["partitionValues"], "size": size, **rest}
        info = {"timestamp": 0, "operation": "WRITE", "operationParameters": {}}
        text = "".join(json.dumps(one) + "\n" for one in ({"commitInfo": info}, {"add": add}))
        (self.path / "_delta_log" / f"{self.table.version() + 1:020}.json").write_text(text)
        self.history.append("an empty file")

    def _step(self) -> None:
        steps = [self.append, self.append, self._delete, self._update, self._evolve, self._optimize, self._checkpoint]
        steps += [self._properties, self._empty]
        if len(self.history) > 2:
            steps += [self._restore, self._overwrite]
        self.chance.choice(steps)()

    def _fill(self) -> None:
        """Append eight files of about 100 KB to one partition."""
        self._columns["load"] = "string"
        for _ in range(8):
            rows = self._random_rows(500)
            load = pa.array([self.chance.randbytes(100).hex() for _ in range(500)])
            rows = rows.set_column(rows.column_names.index("load"), "load", load)
            for name in self._keys:
                rows = rows.set_column(rows.column_names.index(name), name, pa.nulls(500, rows.schema.field(name).type))
            self._write(rows)
