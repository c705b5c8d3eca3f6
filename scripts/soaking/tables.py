"""The tables of a soak: small, and of known content, so that what ``validate`` says of them can be judged."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq

if TYPE_CHECKING:
    from pathlib import Path

TABLES = ("soak.a", "soak.b", "soak.c")
PARTITIONS = 4
ROWS = 500
"""Of each partition; their ids count from 0."""
CHECKS: tuple[dict[str, Any], ...] = (
    {"not_null": "id", "name": "present"},
    {"check": "id % 100 <> 7", "name": "no sevens"},
    {"check": "id >= 0", "name": "positive"},
)
"""The second and the third can only be told by Spark."""
VIOLATIONS = {"present": 0, "no sevens": PARTITIONS * ROWS // 100, "positive": 0}


def make_table(folder: Path) -> None:
    """Write the files of one table."""
    for day in range(PARTITIONS):
        path = folder / f"day={day}" / "part-0.parquet"
        path.parent.mkdir(parents=True)
        pq.write_table(pa.table({"id": list(range(ROWS))}), path)


def decided(report: dict[str, Any] | None) -> bool:
    """Whether a report has a verdict on each check: nothing was lost on the way to it."""
    checks = (report or {}).get("checks", ())
    return len(checks) == len(CHECKS) and all(check["verdict"] in ("valid", "violated") for check in checks)


def misjudged(report: dict[str, Any] | None) -> list[str]:
    """What a report of ``validate`` says that is not so. Where a job was lost it may say that it does not know."""
    wrong = []
    for check in (report or {}).get("checks", ()):
        expected = VIOLATIONS[check["name"]]
        told = check["verdict"], check["violations"]
        if told[0] == "valid" and expected:
            wrong.append(f"{check['name']} is said to be valid")
        if told[0] == "violated" and not 0 < told[1] <= expected:
            wrong.append(f"{check['name']} is said to be violated {told[1]} times, of {expected}")
    return wrong
