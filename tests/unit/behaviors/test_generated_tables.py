"""Rows of generated Delta tables stay the same multiset when they are compacted and exported beside other writers.

delta-rs writes and reads these tables: no JVM is needed. ``tests/acceptance/test_generated_tables.py`` has those of
Iceberg and Delta with Spark.
"""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import pytest

from tests.support.generated_delta import GeneratedDelta
from tests.support.maintenance_oracle import WRITERS, check_table

if TYPE_CHECKING:
    from pathlib import Path

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
