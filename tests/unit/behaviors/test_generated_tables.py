"""Rows of generated Delta tables stay the same multiset when they are compacted and exported beside other writers.

delta-rs writes and reads these tables: no JVM is needed. ``tests/acceptance/test_generated_tables.py`` has those of
Iceberg and Delta with Spark.
"""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

import pytest

from tests.support.generated_delta import GeneratedDelta
from tests.support.generated_iceberg import GeneratedIceberg, exported_rows, registered_rows
from tests.support.maintenance_oracle import WRITERS, check_table, export_and_compare, rows_of

if TYPE_CHECKING:
    from pathlib import Path

    from tests.support.maintenance_oracle import Rows

TABLES = 168
"""The number of tables."""
ALWAYS = len(WRITERS) + 1
"""The first tables are compared in each run: one for each kind of writer, and one without."""


@pytest.mark.parametrize(
    "seed", [n if n < ALWAYS else pytest.param(n, marks=pytest.mark.rotating) for n in range(TABLES)]
)
def test_delta_tables_keep_their_rows(tmp_path: Path, seed: int) -> None:
    subject = GeneratedDelta(seed, tmp_path / "t", heavy=seed % 7 == 0)
    print(check_table(subject, random.Random(f"delta-rs {seed}"), seed, tmp_path))


class WithoutSpark:
    """A generated Iceberg table, which pyiceberg reads."""

    def __init__(self, seed: int, path: Path) -> None:
        self.generated = GeneratedIceberg(seed, path, version=1 + seed % 2)
        self.record, self.history = self.generated.record, self.generated.history

    def read(self, version: Any = None) -> Rows:
        return rows_of(self.generated.table.scan(snapshot_id=version).to_arrow())

    def versions(self) -> list[Any]:
        return [one.snapshot_id for one in self.generated.table.metadata.snapshots]

    def needs(self) -> bool:
        return len(self.generated.table.inspect.delete_files()) > 0

    def exported(self, target: str, version: Any) -> tuple[Rows, Rows]:
        return exported_rows(self.generated.table, target, version)

    def registers(self) -> bool:
        return not self.generated.equal  # pyiceberg reads no equality deletes

    def registered(self, target: str) -> Rows:
        return registered_rows(target)

    def write(self, kind: str) -> None:
        doing = {"append": self.generated.append, "overwrite": self.generated.overwrite}
        doing.get(kind, self.generated.change_schema)()


@pytest.mark.parametrize("seed", [n if n < 2 else pytest.param(n, marks=pytest.mark.rotating) for n in range(18)])
def test_exported_iceberg_tables_have_their_rows(tmp_path: Path, seed: int) -> None:
    (tmp_path / "work").mkdir()
    subject: Any = WithoutSpark(seed, tmp_path / "t")
    writer = ("append", "overwrite", "schema")[seed % 3]
    print(export_and_compare(subject, writer, tmp_path / "out", tmp_path / "work"))
