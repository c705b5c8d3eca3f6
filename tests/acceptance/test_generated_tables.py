"""Rows of generated tables stay the same multiset when they are compacted and exported beside other writers.

Iceberg's and Delta's own readers in Spark are the oracle. ``tests/unit/behaviors/test_generated_tables.py`` has the
tables that need no JVM. All of them: ``scripts/test`` with both files.
"""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

import pytest

from tests.acceptance.generated_tables import DeltaSubject, IcebergSubject
from tests.acceptance.sparklake import Lake
from tests.support import delta, lake
from tests.support.generated_iceberg import ODD_FOLDERS
from tests.support.maintenance_oracle import check_table
from tests.support.needs import need

if TYPE_CHECKING:
    from pathlib import Path

    from pyspark.sql import SparkSession

pytestmark = [pytest.mark.spark, pytest.mark.timeout(240), pytest.mark.rotating]

ICEBERG, DELTA = 96, 36
"""The number of tables."""


@pytest.fixture(scope="module")
def iceberg_lakes(spark: SparkSession, tmp_path_factory: pytest.TempPathFactory) -> list[Lake]:
    need(lake.jar(), lake.MAVEN)
    root = tmp_path_factory.mktemp("iceberg")
    return [Lake(spark, root / folder) for folder in ODD_FOLDERS]


@pytest.fixture(scope="module")
def delta_lakes(spark: SparkSession, tmp_path_factory: pytest.TempPathFactory) -> list[delta.DeltaLake]:
    need(delta.jars(), delta.MAVEN)
    session, root = delta.writing_session(spark), tmp_path_factory.mktemp("delta")
    return [delta.DeltaLake(session, root / folder) for folder in ODD_FOLDERS]


def chosen(count: int) -> list[Any]:
    """The seeds. Three in four of the tables take too long for every turn: Spark writes and reads each of them."""
    return [pytest.param(seed, marks=() if seed % 4 == 3 else pytest.mark.slow) for seed in range(count)]


@pytest.mark.parametrize("seed", chosen(ICEBERG))
def test_iceberg_tables_keep_their_rows(
    iceberg_lakes: list[Lake], spark: SparkSession, tmp_path: Path, seed: int
) -> None:
    subject = IcebergSubject(iceberg_lakes[seed % len(iceberg_lakes)], spark, seed)
    print(check_table(subject, random.Random(f"iceberg {seed}"), seed, tmp_path))


@pytest.mark.parametrize("seed", chosen(DELTA))
def test_delta_tables_keep_their_rows(
    delta_lakes: list[delta.DeltaLake], spark: SparkSession, tmp_path: Path, seed: int
) -> None:
    subject = DeltaSubject(delta_lakes[seed % len(delta_lakes)], spark, seed)
    print(check_table(subject, random.Random(f"delta {seed}"), seed, tmp_path))
