"""Footers that contradict themselves, are encrypted, or are truncated."""

from __future__ import annotations

import subprocess
import sys
import threading
from decimal import Decimal
from itertools import count
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from distop.behavior import JobCancelled, TableRecord, TableUnavailable
from distop.tables.reading import parquet_footers as read
from distop.tables.reading import parquet_tail
from distop.tables.reading.file_facts import FileFacts, Unreadable
from distop_behaviors.validate import Validate
from tests.support import footers
from tests.support.context import FakeContext, run_operation
from tests.support.damaged import CONTRADICTIONS, KINDS, ROWS, sound

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from distop.tables.reading.file_facts import PlannedFile

READ = """\
import sys
from distop.tables.reading import parquet_footers as footers
from distop.tables.reading.file_facts import Unreadable
from pathlib import Path
path = Path(sys.argv[1])
status = path.stat()
(found,) = footers.read_all([(str(path), status.st_size, status.st_mtime_ns)], frozenset({"id", "name"}))
print(found if isinstance(found, Unreadable) else "read")
"""


def facts_of(path: Path) -> Any:
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
    found = facts_of(path)
    assert (found.rows, len(found.columns), found.contradiction) == (3, 2_001, "")


def test_a_footer_longer_than_its_file_is_reported(path: Path) -> None:
    sound(path)
    data = path.read_bytes()
    path.write_bytes(data[:-8] + (1 << 30).to_bytes(4, "little") + b"PAR1")
    found = facts_of(path)
    assert isinstance(found, Unreadable)
    assert str(found) == (
        f"the file {path} is not a readable Parquet file: its last bytes give a footer length of "
        f"{1 << 30} bytes, but the file has only {len(data)}"
    )


@pytest.mark.parametrize(("kind", "missing"), [("no", 0), ("too-many", 2 * ROWS)])
def test_rows_are_summed_over_row_groups(kind: str, missing: int, path: Path) -> None:
    KINDS[f"counts-{kind}-rows"](path)
    found = facts_of(path)
    assert (found.rows, found.live_rows, found.missing) == (ROWS, None, missing)
    assert "its row groups have 2000" in found.contradiction


@pytest.mark.parametrize("mode", ["only", "auto", "never"])
@pytest.mark.parametrize("kind", CONTRADICTIONS)
def test_row_groups_that_contradict_themselves_are_an_error_of_each_check(
    kind: str, mode: str, path: Path, tmp_path: Path
) -> None:
    """No mode reads rows of such a file or starts Spark."""
    CONTRADICTIONS[kind](path)
    column = "tags" if "lists" in kind else "name"
    report = only(path, tmp_path, {"not_null": "id"}, {"not_null": column}, mode=mode)
    assert [(c["verdict"], c["violations"]) for c in report["checks"]] == [("error", 0)] * 2
    for check in report["checks"]:
        assert check["error"].startswith(f"the file {path} cannot be read: its footer contradicts itself: ")


@pytest.mark.parametrize("mode", ["only", "auto", "never"])
def test_row_groups_that_contradict_themselves_are_an_error_of_keys(mode: str, path: Path, tmp_path: Path) -> None:
    CONTRADICTIONS["one-chunk-twice"](path)
    (check,) = only(path, tmp_path, {"unique": ["id"]}, mode=mode)["checks"]
    assert (check["verdict"], check["violations"]) == ("error", 0)
    assert str(path) in check["error"]


@pytest.mark.parametrize(
    ("kind", "why"),
    [
        ("fewer-values-than-rows-in-lists", "'tags.list.element' has 1000 values in a row group of 2000 rows"),
        ("more-rows-than-lists", "'id' has 1000 values in a row group of 2000 rows"),
        ("chunks-in-another-order", "a row group has a column chunk of 'name' in the place of 'id'"),
        ("one-chunk-twice", "a row group has a column chunk of 'id' in the place of 'name'"),
        ("a-chunk-missing", "a row group has 1 column chunks, but the schema has 2 columns"),
        ("values-without-rows", "'id' has 1000 values in a row group of 0 rows"),
        ("rows-below-zero", "a row group has -7 rows"),
        ("nulls-in-a-required-column", "'name' is a required column, but has 100 NULLs in a row group"),
        ("shared-pages", "two column chunks share pages"),
    ],
)
def test_the_error_of_a_contradiction_is_one_sentence(kind: str, why: str, path: Path) -> None:
    CONTRADICTIONS[kind](path)
    assert str(facts_of(path)).endswith(f": {why}")


@pytest.mark.parametrize("kind", ["more-rows-than-lists", "pages-behind-the-end", "fewer-rows-than-values"])
def test_a_contradiction_in_an_unchecked_column_is_an_error(kind: str, path: Path, tmp_path: Path) -> None:
    """A reader finds a row group by the places of all its columns."""
    CONTRADICTIONS[kind](path)
    column = "tags" if "lists" in kind else "id"
    report = only(path, tmp_path, {"not_null": column})
    assert [check["verdict"] for check in report["checks"]] == ["error"]


def test_a_total_that_differs_from_the_row_groups_decides_nothing(path: Path, tmp_path: Path) -> None:
    sound(path)
    checks = ({"not_null": "id"}, {"range": {"column": "id", "min": ROWS}}, {"not_null": "name"})
    before = only(path, tmp_path, *checks)
    assert [check["verdict"] for check in before["checks"]] == ["valid", "violated", "violated"]
    footers.with_rows(path, 0)
    report = only(path, tmp_path, *checks)
    assert [(c["verdict"], c["violations"]) for c in report["checks"]] == [("unknown", 0)] * 3
    assert report["rows"] is None


def test_bounds_of_nulls_alone_decide_nothing_of_their_column(path: Path, tmp_path: Path) -> None:
    """Either the number of NULLs or the bounds are wrong. Some writers use zero for columns without values."""
    sound(path)
    footers.with_nulls(path, ROWS // 2)
    report = only(path, tmp_path, {"not_null": "id"}, {"range": {"column": "id", "min": ROWS}}, {"not_null": "name"})
    assert [(c["verdict"], c["violations"]) for c in report["checks"]] == [("unknown", 0)] * 3


def test_valid_files_of_each_form_have_no_contradiction(path: Path) -> None:
    """Pages of both versions, with and without dictionaries; lists, maps and structs; no row group, and empty ones."""
    nested = pa.struct([("a", pa.int64()), ("b", pa.list_(pa.map_(pa.string(), pa.int64())))])
    schema = pa.schema(
        [
            pa.field("id", pa.int64(), nullable=False),
            pa.field("null", pa.string()),
            pa.field("nested", nested),
            pa.field("rows", pa.list_(pa.list_(pa.int8()))),
            pa.field("a.b", pa.int64()),
            pa.field("a", pa.struct([pa.field("b", pa.int64())])),
        ]
    )
    full = [{"a": n, "b": [[("k", n)], [], None]} if n % 3 else None for n in range(99)]
    rows = [[[n, None], [], None] if n % 3 else [] if n % 2 else None for n in range(99)]
    columns = [range(99), [None] * 99, full, rows, range(99), [{"b": n} for n in range(99)]]
    table = pa.table([pa.array(c, f.type) for c, f in zip(columns, schema, strict=True)], schema=schema)
    for version in ("1.0", "2.0"):
        for dictionary in (True, False):
            for some in (table, table.slice(0, 0)):
                options: dict[str, Any] = {"data_page_version": version, "use_dictionary": dictionary}
                with pq.ParquetWriter(path, schema, **options) as writer:
                    writer.write_table(some, row_group_size=40)
                    writer.write_table(table.slice(0, 0))
                found = facts_of(path)
                assert (found.rows, found.contradiction) == (some.num_rows, "")


def test_columns_with_the_same_dotted_path_are_not_decided_by_statistics(path: Path, tmp_path: Path) -> None:
    """pyarrow joins the path of a column chunk with dots, so that ``a.b`` may be either."""
    pq.write_table(pa.table({"a.b": [1, 2], "a": [{"b": None}, {"b": 3}], "c": [1, 2]}), path)
    report = only(path, tmp_path, {"not_null": "`a.b`"}, {"not_null": "c"})
    assert [check["verdict"] for check in report["checks"]] == ["unknown", "valid"]
    footers.with_chunks(path, 0, [1, 0, 2])
    report = only(path, tmp_path, {"not_null": "`a.b`"}, {"not_null": "c"})
    assert [check["verdict"] for check in report["checks"]] == ["unknown", "valid"]


@pytest.mark.parametrize(("kind", "value"), [("INT_8", 200), ("INT_16", 40_000), ("UINT_8", 300), ("UINT_8", -1)])
def test_bounds_beyond_a_type_decide_nothing(kind: str, value: int, path: Path, tmp_path: Path) -> None:
    """Readers convert such values to different numbers."""
    pq.write_table(pa.table({"v": pa.array([value] * 9, pa.int32())}), path, store_schema=False)
    footers.with_converted_type(path, "v", getattr(footers, kind))
    bounds = [{"range": {"column": "v", "min": 0}}, {"range": {"column": "v", "max": 0}}]
    report = only(path, tmp_path, *bounds, {"in_set": {"column": "v", "values": [1]}}, {"not_null": "v"})
    assert [check["verdict"] for check in report["checks"]] == ["unknown"] * 3 + ["valid"]


def test_a_declared_precision_proves_nothing_of_decimals_with_more_digits(path: Path, tmp_path: Path) -> None:
    for more in ({"store_decimal_as_integer": True}, {}):
        values = pa.array([Decimal("12345.67")] * 9, pa.decimal128(9, 2))
        pq.write_table(pa.table({"v": values}), path, store_schema=False, **more)
        check = {"fits": {"column": "v", "type": "decimal(9,2)"}}
        assert only(path, tmp_path, check)["checks"][0]["verdict"] == "valid"
        footers.with_precision(path, "v", 5)
        for kind in ("decimal(5,2)", "decimal(9,2)"):
            check = {"fits": {"column": "v", "type": kind}}
            assert only(path, tmp_path, check)["checks"][0]["verdict"] == "unknown", kind


def test_files_with_a_contradiction_among_them_are_not_decided_together(path: Path, tmp_path: Path) -> None:
    """Files of one schema that all pass are otherwise decided at once."""
    sound(path)
    sound(path.with_name("b.parquet"))
    footers.with_rows(path, 0)
    report = only(path, tmp_path, {"not_null": "id"})
    assert [c["verdict"] for c in report["checks"]] == ["unknown"]
    assert report["checks"][0]["evidence"] == {"files_statistics": 1, "files_scanned": 0}


@pytest.fixture
def hanging(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[PlannedFile]:
    """A file that does not answer, such as one on a lost network file system."""
    path, over = tmp_path / "hanging.parquet", threading.Event()
    path.touch()

    def open_regular(path: str) -> None:
        over.wait()
        raise OSError("the file system is gone")

    monkeypatch.setattr(parquet_tail, "open_regular", open_regular)
    status = path.stat()
    yield str(path), status.st_size, status.st_mtime_ns
    over.set()  # releases waiting threads


def cancelled_later() -> Callable[[], None]:
    """A check that raises JobCancelled when it is called for the fourth time."""
    calls = count(1)

    def check() -> None:
        if next(calls) > 3:
            raise JobCancelled

    return check


@pytest.mark.timeout(30)
def test_a_file_that_never_answers_raises_table_unavailable(
    hanging: PlannedFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(read, "CHECKED_AFTER", 0.05)
    monkeypatch.setattr(read, "READ_TIMEOUT", 0.2)
    with pytest.raises(TableUnavailable, match=r"hanging\.parquet did not answer within 0\.2 s: check"):
        read.read_all([hanging], frozenset({"id"}))


@pytest.mark.timeout(30)
def test_waiting_for_a_file_can_be_cancelled(hanging: PlannedFile, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(read, "CHECKED_AFTER", 0.05)
    with pytest.raises(JobCancelled):
        read.read_all([hanging], frozenset({"id"}), cancelled_later())


@pytest.fixture
def stalled(path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[PlannedFile]:
    """A file whose footer is cached, and that does not answer any more."""
    sound(path)
    status, over = path.stat(), threading.Event()
    file = (str(path), status.st_size, status.st_mtime_ns)
    assert isinstance(read.read_all([file], frozenset({"id"}))[0], FileFacts)

    def unchanged(*_: Any) -> None:
        over.wait()

    monkeypatch.setattr(read, "check_unchanged", unchanged)
    monkeypatch.setattr(read, "CHECKED_AFTER", 0.05)
    monkeypatch.setattr(read, "READ_TIMEOUT", 0.2)
    yield file
    over.set()


@pytest.mark.timeout(30)
def test_a_cached_file_that_does_not_answer_any_more_raises_table_unavailable(stalled: PlannedFile) -> None:
    with pytest.raises(TableUnavailable, match=r"a\.parquet did not answer within 0\.2 s: check"):
        read.read_all([stalled], frozenset({"id"}))


@pytest.mark.timeout(30)
def test_waiting_for_a_cached_file_can_be_cancelled(stalled: PlannedFile, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(read, "READ_TIMEOUT", 300.0)
    with pytest.raises(JobCancelled):
        read.read_all([stalled], frozenset({"id"}), cancelled_later())


@pytest.mark.timeout(30)
def test_a_long_read_that_makes_progress_does_not_time_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """While headers of all pages are read, each read counts on its own."""
    monkeypatch.setattr(read, "CHECKED_AFTER", 0.05)
    monkeypatch.setattr(read, "READ_TIMEOUT", 1.0)
    step = threading.Event()

    def parts(progress: Callable[[], None]) -> str:
        for _ in range(8):
            step.wait(0.2)
            progress()
        return "read"

    assert read.read_with_timeout("a.parquet", parts, lambda: None) == "read"


def test_a_column_that_spark_cannot_read_keeps_the_verdict_of_statistics(path: Path, tmp_path: Path) -> None:
    """One file has NULLs by its statistics; the other has no statistics, so it would have to be read."""
    data = pa.table({"at": pa.array([1, None], pa.time64("us"))})
    pq.write_table(data, path)
    pq.write_table(data, path.with_name("b.parquet"), write_statistics=False)
    for mode in ("only", "auto"):
        (check,) = only(path, tmp_path, {"not_null": "at"}, mode=mode)["checks"]
        assert (check["verdict"], check["violations"], check["exact"]) == ("violated", 1, False), mode
    assert "Spark does not read times in microseconds" in check["error"]
