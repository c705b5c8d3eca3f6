"""Footers that contradict themselves, are encrypted, or are truncated."""

from __future__ import annotations

import subprocess
import sys
import threading
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from distop.behavior import JobCancelled, TableRecord, TableUnavailable
from distop_behaviors.reading import footers as read
from distop_behaviors.reading import parquet_tail
from distop_behaviors.reading.facts import Unreadable
from distop_behaviors.validate import Validate
from tests.support import footers
from tests.support.context import FakeContext, run_operation
from tests.support.damaged import KINDS, ROWS, sound

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from distop_behaviors.reading.footers import PlannedFile

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


def only(path: Path, tmp_path: Path, *checks: dict[str, Any], mode: str = "only") -> Any:
    """The report of a validate by statistics alone, which needs no Spark."""
    table = TableRecord("t", "parquet", str(path.parent))
    arg = {"checks": list(checks), "statistics": mode}
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


@pytest.mark.parametrize(("kind", "missing"), [("no", 0), ("too-many", 2 * ROWS)])
def test_rows_are_summed_over_row_groups(kind: str, missing: int, path: Path) -> None:
    KINDS[f"counts-{kind}-rows"](path)
    found = of(path)
    assert (found.rows, found.left, found.missing) == (ROWS, None, missing)
    assert "its row groups hold 2000" in found.contradiction


CONTRADICTIONS: dict[str, Callable[[Path], None]] = {
    "rows": lambda path: footers.with_rows(path, 0),
    "pages": footers.misplaced,
    "values": lambda path: footers.with_values(path, 7),
    "nulls": lambda path: footers.with_nulls(path, 3 * ROWS),
    "bounds of NULLs alone": lambda path: footers.with_nulls(path, ROWS // 2),
    "sizes": lambda path: footers.misplaced(path, size=-(1 << 24)),
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


@pytest.mark.parametrize("size", [1 << 24, -(1 << 24)])
def test_a_contradiction_of_a_column_that_no_check_names_is_one(size: int, path: Path, tmp_path: Path) -> None:
    """A reader skips the row groups of such a file, whichever columns it is asked for."""
    sound(path)
    footers.misplaced(path, size=size)
    report = only(path, tmp_path, {"not_null": "id"})
    assert [check["verdict"] for check in report["checks"]] == ["unknown"]
    assert report["rows"] is None


def test_one_contradiction_keeps_its_files_from_being_decided_together(path: Path, tmp_path: Path) -> None:
    """Files of one schema that all pass are otherwise decided at once."""
    sound(path)
    sound(path.with_name("b.parquet"))
    footers.with_rows(path, 0)
    report = only(path, tmp_path, {"not_null": "id"})
    assert [c["verdict"] for c in report["checks"]] == ["unknown"]
    assert report["checks"][0]["evidence"] == {"files_statistics": 1, "files_scanned": 0}


@pytest.fixture
def hanging(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[PlannedFile]:
    """A file that does not answer, as one on a lost network file system."""
    path, over = tmp_path / "hanging.parquet", threading.Event()
    path.touch()

    def open_regular(path: str) -> None:
        over.wait()
        raise OSError("the file system is gone")

    monkeypatch.setattr(parquet_tail, "open_regular", open_regular)
    status = path.stat()
    yield str(path), status.st_size, status.st_mtime_ns
    over.set()  # for who still waits


@pytest.mark.timeout(30)
def test_a_file_that_never_answers_is_no_verdict(hanging: PlannedFile, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(read, "CHECKED_AFTER", 0.05)
    monkeypatch.setattr(read, "LONGEST_READ", 0.2)
    with pytest.raises(TableUnavailable, match=r"hanging\.parquet has not answered for 0\.2 s: check"):
        read.read_all([hanging], frozenset({"id"}))


@pytest.mark.timeout(30)
def test_who_waits_for_a_file_can_be_stopped(hanging: PlannedFile, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(read, "CHECKED_AFTER", 0.05)
    looks: list[None] = []

    def check() -> None:
        looks.append(None)
        if len(looks) > 3:
            raise JobCancelled

    with pytest.raises(JobCancelled):
        read.read_all([hanging], frozenset({"id"}), check)


def test_a_column_that_spark_does_not_read_keeps_what_statistics_prove(path: Path, tmp_path: Path) -> None:
    """One file has NULLs by its statistics, and the other has none, so that it would have to be read."""
    data = pa.table({"at": pa.array([1, None], pa.time64("us"))})
    pq.write_table(data, path)
    pq.write_table(data, path.with_name("b.parquet"), write_statistics=False)
    for mode in ("only", "auto"):
        (check,) = only(path, tmp_path, {"not_null": "at"}, mode=mode)["checks"]
        assert (check["verdict"], check["violations"], check["exact"]) == ("violated", 1, False), mode
    assert "Spark does not read times in microseconds" in check["error"]
