"""The tables of a soak: small and of known content, so that reports of ``validate`` can be checked."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq

if TYPE_CHECKING:
    from pathlib import Path

TABLES = ("soak.a", "soak.b", "soak.c")
PARTITIONS = 4
ROWS = 500
"""Rows of each partition; their ids count from 0."""
CHECKS: tuple[dict[str, Any], ...] = (
    {"not_null": "id", "name": "present"},
    {"check": "id % 100 <> 7", "name": "no sevens"},
    {"check": "id >= 0", "name": "positive"},
)
"""The second and the third one need Spark."""
VIOLATIONS = {"present": 0, "no sevens": PARTITIONS * ROWS // 100, "positive": 0}
"""Check → the number of its violations."""


def make_table(folder: Path) -> None:
    """Write the files of one table."""
    for day in range(PARTITIONS):
        path = folder / f"day={day}" / "part-0.parquet"
        path.parent.mkdir(parents=True)
        pq.write_table(pa.table({"id": list(range(ROWS))}), path)


def decided(report: dict[str, Any] | None) -> bool:
    """Whether a report has a verdict on each check, so that no job was lost."""
    checks = (report or {}).get("checks", ())
    return len(checks) == len(CHECKS) and all(check["verdict"] in ("valid", "violated") for check in checks)


def misjudged(report: dict[str, Any] | None) -> list[str]:
    """The wrong verdicts of a report of ``validate``. The verdict ``unknown`` is allowed, for lost jobs."""
    wrong = []
    for check in (report or {}).get("checks", ()):
        expected = VIOLATIONS[check["name"]]
        verdict, violations = check["verdict"], check["violations"]
        if verdict == "valid" and expected:
            wrong.append(f"{check['name']} is reported as valid")
        if verdict == "violated" and not 0 < violations <= expected:
            wrong.append(f"{check['name']} is reported as violated {violations} times, of {expected}")
    return wrong
