"""A jar of Delta for another Spark is recognized by its name, and the error says which jars fit."""

from __future__ import annotations

import pytest

from distop.tables.delta.delta_jar import VERSION, misfits, missing
from scripts.spark_jars import DELTA


@pytest.mark.parametrize(
    ("jar", "wrong"),
    [
        ("file:/jars/delta-spark_4.1_2.13-4.4.0.jar", False),
        ("file:/jars/delta-spark_4.0_2.13-4.4.0.jar", True),
        ("file:/jars/delta-spark_4.1_2.12-4.4.0.jar", True),
        ("file:/jars/delta-spark_2.13-4.4.0.jar", False),
        ("file:/jars/all.jar", False),
    ],
)
def test_a_jar_for_another_spark_misfits(jar: str, wrong: bool) -> None:
    assert misfits(jar, "4.1.4") == wrong


def test_the_error_names_the_tested_jars() -> None:
    for jar in DELTA:
        assert str(jar) in missing("4.1.4", None)
    assert DELTA[0].version == VERSION
    assert "does not fit Spark 4.1.4" in missing("4.1.4", "x.jar")
