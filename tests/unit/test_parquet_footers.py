"""Footers that contradict themselves, are encrypted, or are truncated."""

from __future__ import annotations

import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from distop.behavior import TableRecord
from distop_behaviors.reading import footers as read
from distop_behaviors.reading import parquet_tail
from distop_behaviors.reading.facts import Unreadable
from distop_behaviors.validate import Validate
from tests.support import footers
from tests.support.context import FakeContext, run_operation
from tests.support.damaged import KINDS, ROWS, sound

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

READ = """\
import sys
from distop_behaviors.reading import footers
from distop_behaviors.reading.facts import Unreadable
from pathlib import Path
path = Path(sys.argv[1])
status = path.stat()
(found,) = footers.read_all([(str(path), status.st_size, status.st_mtime_ns)], frozenset({"id", "name"}))
print(found if isinstance(found, Unreadable) else "read")
"""


def of(path: Path) -> Any:
    status = path.stat()
    (found,) = read.read_all([(str(path), status.st_size, status.st_mtime_ns)], frozenset({"id", "name"}))
    return found


def only(path: Path, tmp_path: Path, *checks: dict[str, Any]) -> Any:
    """The report of a validate by statistics alone, which needs no Spark."""
    table = TableRecord("t", "parquet", str(path.parent))
    arg = {"checks": list(checks), "statistics": "only"}
    return run_operation(Validate(), table, arg, lambda table: FakeContext(tmp_path, table)).report


@pytest.fixture
def path(tmp_path: Path) -> Path:
    folder = tmp_path / "table"
    folder.mkdir()
    return folder / "a.parquet"


@pytest.mark.parametrize("kind", ["encrypted", "encrypted-columns"])
def test_an_encrypted_file_is_named_and_crashes_no_process(kind: str, path: Path) -> None:
    """In a separate process: pyarrow may abort the process that asks for this."""
    KINDS[kind](path)
    done = subprocess.run([sys.executable, "-c", READ, str(path)], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert str(path) in done.stdout
    assert "encrypted" in done.stdout


def test_a_footer_beyond_the_first_read_is_read(path: Path) -> None:
    names = [f"a column with a name that is not short {n}" for n in range(2_000)]
    pq.write_table(pa.table({"id": [1, 2, 3]} | {name: [1, 2, 3] for name in names}), path)
    assert pq.read_metadata(path).serialized_size > parquet_tail.FIRST_READ
    found = of(path)
    assert (found.rows, len(found.columns), found.contradiction) == (3, 2_001, "")


def test_a_footer_longer_than_its_file_is_reported(path: Path) -> None:
    sound(path)
    data = path.read_bytes()
    path.write_bytes(data[:-8] + (1 << 30).to_bytes(4, "little") + b"PAR1")
    found = of(path)
    assert isinstance(found, Unreadable)
    assert str(found) == (
        f"the file {path} is not a readable Parquet file: its last bytes give a footer length of "
        f"{1 << 30} bytes, but the file has only {len(data)}"
    )


@pytest.mark.parametrize("kind", ["no", "too-many"])
def test_rows_are_summed_over_row_groups(kind: str, path: Path) -> None:
    KINDS[f"counts-{kind}-rows"](path)
    found = of(path)
    assert (found.rows, found.left) == (ROWS, None)
    assert "its row groups hold 2000" in found.contradiction


CONTRADICTIONS: dict[str, Callable[[Path], None]] = {
    "rows": lambda path: footers.with_rows(path, 0),
    "pages": footers.misplaced,
    "values": lambda path: footers.with_values(path, 7),
    "nulls": lambda path: footers.with_nulls(path, 3 * ROWS),
}


@pytest.mark.parametrize("kind", CONTRADICTIONS)
def test_a_footer_that_contradicts_itself_decides_nothing(kind: str, path: Path, tmp_path: Path) -> None:
    sound(path)
    checks = ({"not_null": "id"}, {"range": {"column": "id", "min": ROWS}}, {"not_null": "name"})
    before = only(path, tmp_path, *checks)
    assert [check["verdict"] for check in before["checks"]] == ["valid", "violated", "violated"]
    CONTRADICTIONS[kind](path)
    report = only(path, tmp_path, *checks)
    assert [(c["verdict"], c["violations"]) for c in report["checks"]] == [("unknown", 0)] * 3
    assert report["rows"] is None


def test_one_contradiction_keeps_its_files_from_being_decided_together(path: Path, tmp_path: Path) -> None:
    """Files of one schema that all pass are otherwise decided at once."""
    sound(path)
    sound(path.with_name("b.parquet"))
    footers.with_rows(path, 0)
    report = only(path, tmp_path, {"not_null": "id"})
    assert [c["verdict"] for c in report["checks"]] == ["unknown"]
    assert report["checks"][0]["evidence"] == {"files_statistics": 1, "files_scanned": 0}
