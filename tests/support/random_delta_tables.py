"""Random Delta tables by seed: types, column mapping, partitions, deletes, schema changes, checkpoints and restores."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from distop.behavior import TableRecord
    from tests.support.delta import DeltaLake

VALUES = {
    "tinyint": "cast({n} % 120 as tinyint)",
    "int": "cast({n} - 50 as int)",
    "bigint": "{n} * 1000000007",
    "float": "cast({n} / 7 as float)",
    "double": "{n} / 3",
    "decimal(9,2)": "cast({n} / 4 as decimal(9,2))",
    "string": "repeat(concat('v', {n} % 37), 1 + cast({n} % 17 as int))",
    "date": "date_add(date'1969-12-01', cast({n} as int))",
    "timestamp": "timestamp_micros(({n} - 300) * 987654321012)",
    "timestamp_ntz": "cast(timestamp_micros({n} * 123456789) as timestamp_ntz)",
    "boolean": "{n} % 2 = 0",
    "struct<a:int,b:string>": "if({n} % 11 = 0, null, named_struct('a', cast({n} as int), 'b', concat('s', {n})))",
    "array<int>": "array(cast({n} as int))",
}
"""Type → expression of a value of row ``{n}``."""
WIDER = {"tinyint": "int", "int": "bigint", "float": "double", "decimal(9,2)": "decimal(12,4)"}
KEYS = ("int", "string", "date", "boolean", "decimal(9,2)", "bigint")
"""Types of partition columns."""


@dataclass
class RandomTable:
    """A random table and what was done to it. ``columns``: name → type."""

    seed: int
    record: TableRecord
    columns: dict[str, str]
    history: list[str] = field(default_factory=list)


def make(lake: DeltaLake, seed: int, steps: int = 4) -> RandomTable:
    """Create the table of a seed."""
    chance, name = random.Random(seed), f"seed{seed}"
    columns = {"id": "bigint"} | {f"c{n}": kind for n, kind in enumerate(chance.sample(sorted(VALUES), 5))}
    key = chance.choice([None, *KEYS])
    if key is not None:
        columns["k"] = key
    mode = chance.choice(["none", "name", "id"])
    widening, checkpoint = chance.random() < 0.5, chance.choice(["classic", "v2"])
    properties = {
        "delta.enableDeletionVectors": chance.choice(["true", "true", "false"]),
        "delta.enableTypeWidening": str(widening).lower(),
        "delta.checkpointPolicy": checkpoint,
        "delta.checkpointInterval": str(chance.choice([2, 3, 100])),
        "delta.checkpoint.writeStatsAsJson": chance.choice(["true", "false"]),
        "delta.checkpoint.writeStatsAsStruct": "true",
        "delta.dataSkippingNumIndexedCols": str(chance.choice([-1, 0, 3])),
        "delta.feature.timestampNtz": "supported",
    }
    if mode != "none":
        properties["delta.columnMapping.mode"] = mode
    listed = ", ".join(f"{column} {kind}" for column, kind in columns.items())
    record = lake.create(name, listed, "partitioned by (k)" if key is not None else "", **properties)
    table = RandomTable(seed, record, columns)
    _insert(lake, table, chance)
    for _ in range(steps):
        _step(lake, table, chance, mapped=mode != "none", widening=widening)
    return table


def _do(lake: DeltaLake, table: RandomTable, statement: str) -> None:
    table.history.append(statement)
    lake.sql(statement, f"seed{table.seed}")


def _insert(lake: DeltaLake, table: RandomTable, chance: random.Random) -> None:
    first, count = chance.randrange(500), chance.randrange(1, 60)
    nulls = {column: chance.choice([0, 0, 3, 1]) for column in table.columns}

    def value(column: str, kind: str) -> str:
        text = VALUES.get(kind) or VALUES[next(narrow for narrow, wide in WIDER.items() if wide == kind)]
        number = "(id % 3)" if column == "k" else "id"
        found = f"cast({text.format(n=number)} as {kind})"
        return f"if(id % {nulls[column]} = 0, null, {found})" if nulls[column] else found

    listed = ", ".join(value(column, kind) for column, kind in table.columns.items())
    names = ", ".join(table.columns)
    parts = chance.choice([1, 2])
    _do(lake, table, f"insert into {{t}} ({names}) select {listed} from range({first}, {first + count}, 1, {parts})")


def _step(lake: DeltaLake, table: RandomTable, chance: random.Random, *, mapped: bool, widening: bool) -> None:
    own = [column for column in table.columns if column not in ("id", "k")]
    choices = ["insert", "insert", "delete", "delete", "update", "add"]
    if mapped and len(own) > 1:
        choices += ["rename", "drop"]
    wide = [column for column in own if table.columns[column] in WIDER]
    if widening and wide:
        choices.append("widen")
    if len(table.history) > 1:
        choices += ["restore", "optimize"]
    kind = chance.choice(choices)
    if kind == "insert":
        _insert(lake, table, chance)
    elif kind == "delete":
        _do(lake, table, f"delete from {{t}} where hash(id) % {chance.choice([2, 5, 9])} = 0")
    elif kind == "update":
        _do(lake, table, f"update {{t}} set id = id + 1 where hash(id) % {chance.choice([4, 7])} = 1")
    elif kind == "add":
        column = f"a{len(table.history)}"
        table.columns[column] = chance.choice(["int", "string", "date"])
        _do(lake, table, f"alter table {{t}} add column {column} {table.columns[column]}")
    elif kind == "rename":
        old = chance.choice(own)
        table.columns = {f"r{len(table.history)}" if c == old else c: kind for c, kind in table.columns.items()}
        _do(lake, table, f"alter table {{t}} rename column {old} to r{len(table.history)}")
    elif kind == "drop":
        old = chance.choice(own)
        del table.columns[old]
        _do(lake, table, f"alter table {{t}} drop column {old}")
    elif kind == "widen":
        column = chance.choice(wide)
        table.columns[column] = WIDER[table.columns[column]]
        _do(lake, table, f"alter table {{t}} alter column {column} type {table.columns[column]}")
    elif kind == "optimize":
        _do(lake, table, "optimize {t}")
    else:
        version = lake.version(f"seed{table.seed}")
        _do(lake, table, f"restore table {{t}} to version as of {max(version - 1, 1)}")
        table.columns = dict(lake.read(f"seed{table.seed}").dtypes)
