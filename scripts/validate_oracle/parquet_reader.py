"""An independent reader of one Parquet file, in a separate process because pyarrow may abort it.

``python -m scripts.validate_oracle.parquet_reader FILE`` prints one JSON object: the number of violations of each
check, computed row by row in plain Python, or why the file cannot be read.
"""

from __future__ import annotations

import json
import math
import resource
import statistics
import subprocess
import sys
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

MEMORY = 4 << 30
"""Memory limit in bytes for reading one file: a damaged page may request any amount."""
DEADLINE = 120.0


@dataclass
class Expected:
    """The content of a file.

    ``checks``: each with its number of violations, None if unknown. ``rows``: None if the file cannot be read; then
    ``error`` has the cause.
    """

    rows: int | None = None
    checks: list[tuple[dict[str, Any], int | None]] = field(default_factory=list)
    error: str = ""


def expect(path: Path) -> Expected:
    """The content of the file, read by pyarrow in a new process."""
    command = [sys.executable, "-m", "scripts.validate_oracle.parquet_reader", str(path)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE, check=False)
    except subprocess.TimeoutExpired:
        return Expected(error=f"no answer within {DEADLINE:.0f} s")
    lines = done.stdout.splitlines()
    if not lines:
        return Expected(error=f"the reader ended with {done.returncode}")
    # The last line is the most complete: the process prints the columns before it reads the rows.
    found = json.loads(lines[-1])
    error = found["error"] or (f"the reader ended with {done.returncode}" if done.returncode else "")
    checks = [(check, count if not error else None) for check, count in found["checks"]]
    return Expected(None if error else found["rows"], checks, error)


def main(path: str) -> int:
    import pyarrow.parquet as pq

    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    found = Expected(error="the footer cannot be read")
    try:
        file = pq.ParquetFile(path)
        found.checks = [({"not_null": _quoted(name)}, None) for name in file.schema_arrow.names]
        found.error = "the rows cannot be read"
        _print(found)
        table = file.read()
        found = Expected(table.num_rows)
        for name, column in zip(table.column_names, table.columns, strict=True):
            found.checks.append(({"not_null": _quoted(name)}, column.null_count))
            found.checks += _ranges(name, column)
    except Exception as error:
        found.rows, found.error = None, str(error).strip().split("\n")[0] or type(error).__name__
    _print(found)
    return 0


def _print(found: Expected) -> None:
    print(json.dumps(asdict(found)), flush=True)


def _quoted(name: str) -> str:
    return "`" + name.replace("`", "``") + "`" if "." in name or "`" in name else name


def _ranges(name: str, column: Any) -> list[tuple[dict[str, Any], int]]:
    """Checks of a numeric column that hold for all rows or for some, with their violations; NaN is above all bounds."""
    import pyarrow.types as t

    if not t.is_signed_integer(column.type) and column.type not in ("float", "double"):
        return []
    values = [value for value in column.to_pylist() if value is not None]
    numbers = [value for value in values if math.isfinite(value)]
    if not numbers:
        return []
    return [
        ({"range": {"column": _quoted(name), "min": bound}}, sum(value < bound for value in values))
        for bound in dict.fromkeys((min(numbers), statistics.median_high(numbers), max(numbers)))
    ]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
