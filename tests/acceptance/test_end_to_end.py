"""End-to-end tests: etcd, a daemon, Spark, the flights table and the command line, as users use them."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyiceberg.schema import Schema
from pyiceberg.types import LongType, NestedField

from distop.errors import InvalidArgument
from distop.protocol.records import TableRecord
from distop.store.embedded import EmbeddedEtcd
from tests.support.command import distop_command  # noqa: F401
from tests.support.daemons import SPARK, Daemons, daemons
from tests.support.daemons import distop_process as distop
from tests.support.damaged import KINDS
from tests.support.footers import of_unknown_type
from tests.support.lake import Folder
from tests.support.replay import violations
from tests.support.tables import FLIGHTS_DAYS, FLIGHTS_NULLS, FLIGHTS_ROWS, lay_out_flights

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tests.support.command import Ran

pytestmark = [pytest.mark.spark, pytest.mark.rotating]

ROOT = Path(__file__).parents[2]
FLIGHTS = "nyc.flights"
ALL_COLUMNS = (
    "year dep_time sched_dep_time dep_delay arr_time sched_arr_time arr_delay carrier flight tailnum origin dest "
    "air_time distance hour minute time_hour month day"
).split()


@pytest.fixture(scope="module")
def group(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemons]:
    """One executor with Spark, and the flights table."""
    folder = tmp_path_factory.mktemp("end-to-end")
    with EmbeddedEtcd(compaction=None) as etcd:
        with daemons(etcd.endpoint, folder) as found:
            location = lay_out_flights(folder / "flights")
            found.start("ann", ttl=10, options=SPARK)
            found.client.add_table(TableRecord(FLIGHTS, "parquet", str(location)))
            yield found
        found_violations = violations(etcd.endpoint)
    assert not found_violations, "\n".join(found_violations[:3])


def validate(group: Daemons, table: str, *checks: dict[str, Any], **options: Any) -> Any:
    """Run validate to its end, and return the result."""
    return group.client.start_operation("validate", table, {"checks": list(checks), **options}).wait(100)


def test_the_flights_have_their_known_nulls(group: Daemons) -> None:
    result = validate(group, FLIGHTS, *({"not_null": column} for column in ALL_COLUMNS), sample=5)
    assert result.state == "failed", group.tails()
    report = result.report
    assert (report["verdict"], report["rows"]) == ("violated", FLIGHTS_ROWS)
    counts = {check["check"]["not_null"]: check for check in report["checks"]}
    assert {c: check["violations"] for c, check in counts.items() if check["violations"]} == FLIGHTS_NULLS
    assert all(check["exact"] for check in counts.values())
    sample = counts["tailnum"]["samples"][0]
    assert sample["values"]["tailnum"] is None
    assert sample["partition"].startswith("month=")
    assert result.jobs["total"] == FLIGHTS_DAYS


def test_only_named_partitions_are_validated(group: Daemons) -> None:
    operation = group.client.start_operation(
        "validate", FLIGHTS, {"checks": [{"not_null": "dep_time"}]}, partitions=["month=1/day=3", "month=12/day=31"]
    )
    result = operation.wait(100)
    assert result.jobs["total"] == 2
    assert result.report["rows"] == 914 + 776, group.tails()


def test_start_show_and_history_print_the_same_record(group: Daemons) -> None:
    argument = json.dumps({"checks": [{"not_null": "carrier"}, {"fits": {"column": "flight", "type": "smallint"}}]})
    ran = distop(group, "start", "validate", FLIGHTS, "--arg", argument, "--wait", "--json")
    assert ran.returncode == 0, ran.stderr
    record = json.loads(ran.stdout)
    assert (record["state"], record["report"]["verdict"]) == ("success", "valid")
    shown = distop(group, "show", record["op"], "--json")
    assert json.loads(shown.stdout) == record
    listed = json.loads(distop(group, "history", FLIGHTS, "--json").stdout)
    assert record in listed


def test_a_violation_has_exit_code_1_and_a_readable_report(group: Daemons) -> None:
    argument = json.dumps({"checks": [{"not_null": "tailnum"}]})
    ran = distop(group, "start", "validate", FLIGHTS, "--arg", argument, "--wait")
    assert ran.returncode == 1
    assert "2,512" in ran.stdout
    assert "Traceback" not in ran.stdout + ran.stderr


def test_values_missing_in_a_referenced_table_are_found_and_checked_again_by_a_rerun(
    group: Daemons, tmp_path: Path
) -> None:
    carriers = january()["carrier"].to_pylist()
    known = sorted({*carriers} - {"HA"})
    (tmp_path / "carriers").mkdir()
    pq.write_table(pa.table({"code": known}), tmp_path / "carriers" / "a.parquet")
    group.client.add_table(TableRecord("carriers", "parquet", str(tmp_path / "carriers")))
    group.client.add_table(TableRecord("three.days", "parquet", str(lay_out_days(tmp_path / "days"))))
    checks = [{"references": {"column": "carrier", "table": "carriers", "to": "code"}}, {"not_null": "carrier"}]
    argument = json.dumps({"checks": checks, "sample": 1})
    ran = distop(group, "start", "validate", "three.days", "--arg", argument, "--wait", "--json")
    assert ran.returncode == 1, group.tails()
    record = json.loads(ran.stdout)
    found, other = record["report"]["checks"]
    assert (found["violations"], other["verdict"]) == (carriers.count("HA"), "valid"), group.tails()
    assert found["samples"][0]["values"] == {"carrier": "HA"}
    assert found["samples"][0]["partition"].startswith("month=1/day=")
    assert record["report"]["rows"] == len(carriers)
    assert record["jobs"] == {"total": 4, "success": 3, "failed": 1}

    pq.write_table(pa.table({"code": [*known, "HA"]}), tmp_path / "carriers" / "a.parquet")
    again = json.loads(distop(group, "rerun", record["op"], "--wait", "--json").stdout)
    assert (again["state"], again["jobs"]["total"]) == ("success", 1), group.tails()
    (check,) = again["report"]["checks"]
    assert (check["verdict"], check["scope"]) == ("valid", "table")
    assert check["against"]["version"] != found["against"]["version"]

    unknown = validate(group, "three.days", {"references": {"column": "carrier", "table": "nobody", "to": "code"}})
    assert unknown.state == "failed"
    assert "there is no table 'nobody'" in unknown.errors[0]["text"]


@pytest.mark.parametrize(
    ("check", "message"),
    [
        ({"not_null": "tailnumber"}, "tailnumber"),
        ({"check": "dep_delay >"}, "cannot parse"),
        ({"check": "dep_delay + 1"}, "not boolean"),
    ],
)
def test_a_check_that_spark_rejects_fails_with_the_verdict_error(
    group: Daemons, check: dict[str, Any], message: str
) -> None:
    result = validate(group, FLIGHTS, check, {"not_null": "carrier"})
    assert result.state == "failed", group.tails()
    assert result.report["verdict"] == "error"
    bad, good = result.report["checks"]
    assert bad["verdict"] == "error"
    assert message in bad["error"]
    assert "Traceback" not in bad["error"]
    assert good["verdict"] == "valid", "the other check keeps its verdict"


def test_a_forbidden_expression_is_refused_at_the_start(group: Daemons) -> None:
    for text in ("reflect('java.lang.System', 'exit', 1) = 0", "dep_delay IN (SELECT 1)"):
        with pytest.raises(InvalidArgument, match="at checks.0..check: the expression "):
            validate(group, FLIGHTS, {"check": text})
        argument = json.dumps({"checks": [{"not_null": "carrier"}], "where": text})
        done = distop(group, "start", "validate", FLIGHTS, "--arg", argument)
        assert done.returncode == 2
        assert "at where: the expression " in done.stderr


def test_a_truncated_file_is_named_and_the_others_keep_their_verdicts(group: Daemons, tmp_path: Path) -> None:
    location = lay_out_days(tmp_path / "broken")
    victim = next((location / "month=1" / "day=2").glob("*.parquet"))
    victim.write_bytes(victim.read_bytes()[:-100])
    group.client.add_table(TableRecord("broken", "parquet", str(location)))
    result = validate(group, "broken", {"not_null": "tailnum"})
    assert result.state == "failed", group.tails()
    assert result.report["verdict"] in ("error", "violated")
    assert result.jobs["total"] == 3
    texts = " ".join(error["text"] for error in result.errors)
    assert victim.name in texts
    nulls = nulls_of_days("tailnum")
    (check,) = result.report["checks"]
    assert (check["violations"], check["exact"]) == (nulls[1] + nulls[3], False), "the other days are counted exactly"
    assert result.report["rows"] == rows_of_days()[1] + rows_of_days()[3]
    bad = {1: bool(nulls[1]), 2: True, 3: bool(nulls[3])}
    assert result.jobs["failed"] == sum(bad.values())
    assert all(error["verdict"] for error in result.errors), "each error is a verdict of a job"
    error_texts = {error["partition"]: error["text"] for error in result.errors if error["partition"]}
    for day in (1, 3):
        name = f"month=1/day={day}"
        assert (name in error_texts) == bad[day]
        if bad[day]:
            assert error_texts[name] == f"tailnum_not_null: {nulls[day]} violation{'s' if nulls[day] != 1 else ''}"
        alone = group.client.start_operation(
            "validate", "broken", {"checks": [{"not_null": "tailnum"}]}, partitions=[name]
        ).wait(100)
        assert alone.report["verdict"] == ("violated" if bad[day] else "valid")
        assert (alone.report["checks"][0]["violations"], alone.report["checks"][0]["exact"]) == (nulls[day], True)
    assert "month=1/day=2" in {error["partition"] for error in result.errors}


def test_a_missing_location_fails_with_its_name(group: Daemons, tmp_path: Path) -> None:
    group.client.add_table(TableRecord("gone", "parquet", str(tmp_path / "nowhere")), check=False)
    result = validate(group, "gone", {"not_null": "x"})
    assert result.state == "failed"
    assert str(tmp_path / "nowhere") in result.errors[0]["text"]
    assert "Traceback" not in result.errors[0]["text"]


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (["start", "validate", FLIGHTS, "--arg", '{"checks": [{"not_nul": "tailnum"}]}'], 2, "not_nul"),
        (["start", "validate", FLIGHTS, "--arg", '{"checks": []}'], 2, "checks"),
        (["start", "validate", FLIGHTS, "--arg", "{checks"], 2, "JSON"),
        (["start", "validate", "nowhere", "--arg", '{"checks": [{"not_null": "x"}]}'], 4, "nowhere"),
        (["start", "validat", FLIGHTS], 2, "validat"),
        (["show", f"{FLIGHTS}/validate/99999"], 4, "99999"),
        (["show", "not an operation"], 2, "not an operation"),
        (["table", "add", "t", "--format", "parquet", "--location", "ftp://x/y"], 2, "ftp://x/y"),
        (["table", "add", "t", "--format", "orc", "--location", "/tmp"], 2, "orc"),
    ],
)
def test_invalid_input_is_refused_in_one_line_with_its_exit_code(
    group: Daemons,
    distop_command: Callable[..., Ran],  # noqa: F811
    words: list[str],
    code: int,
    message: str,
) -> None:
    ran = distop_command(*words, "--etcd", group.endpoint)
    assert (ran.code, message in ran.sentence) == (code, True), ran
    assert not group.client.operations()


def test_the_process_has_the_exit_code_of_its_command(group: Daemons) -> None:
    words = [sys.executable, "-m", "distop.cli", "show", f"{FLIGHTS}/validate/99999", "--etcd", group.endpoint]
    ran = subprocess.run(words, capture_output=True, text=True, check=False, timeout=60)
    assert (ran.returncode, len(ran.stderr.splitlines()), "Traceback" in ran.stderr) == (4, 1, False), ran


def code_blocks(page: str, language: str) -> list[str]:
    """The code blocks of a document in this language."""
    return re.findall(rf"^```{language}\n(.*?)^```$", (ROOT / page).read_text(), re.MULTILINE | re.DOTALL)


def test_the_quickstart_of_the_readme_runs(group: Daemons, tmp_path: Path) -> None:
    (code,) = code_blocks("README.md", "python")
    env = {**os.environ, "DISTOP_ETCD": group.endpoint}
    ran = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=110, env=env, cwd=tmp_path
    )
    assert (ran.returncode, ran.stderr) == (0, "")
    assert re.fullmatch(r"orders/validate/\d+ failed\nid_not_null violated 1\ntotal_range valid 0\n", ran.stdout)
    group.client.remove_table("orders")


TUTORIAL = "docs/tutorial/first-operation.md"


@pytest.mark.parametrize("page", [TUTORIAL, "docs/reference/validate.md", "docs/contract.md"])
def test_the_python_of_the_documents_runs(group: Daemons, page: str) -> None:
    code = next(block for block in code_blocks(page, "python") if block.startswith("import distop\n"))
    words = [sys.executable, "-c", code.replace("127.0.0.1:2379", group.endpoint)]
    env = {**os.environ, "DISTOP_ETCD": group.endpoint}
    ran = subprocess.run(words, capture_output=True, text=True, check=False, timeout=110, env=env)
    assert (ran.returncode, ran.stderr) == (0, "")
    if page == TUTORIAL:
        assert ran.stdout.endswith(f"\n{FLIGHTS_ROWS} rows are valid\n")


def test_the_commands_of_the_tutorial_run(group: Daemons, distop_command: Callable[..., Ran]) -> None:  # noqa: F811
    """This omits commands that stay in the foreground. A failed operation has the exit code 1."""
    lines = [line for block in code_blocks(TUTORIAL, "sh") for line in block.splitlines()]
    parsed_lines = [shlex.split(part, comments=True) for line in lines for part in line.split("; ")]
    commands = [words[1:] for words in parsed_lines if words[:1] == ["distop"] and words[1] not in ("dev", "executor")]
    assert len(commands) > 8
    page = group.folder / "page.html"
    replacements = {
        **dict.fromkeys((".demo/flights", "/data/flights"), str(group.folder / "flights")),
        page.name: str(page),
    }
    for words in commands:
        ran = distop_command(*(replacements.get(word, word) for word in words), "--etcd", group.endpoint)
        fails = words[0] == "rerun" or any("tailnum" in word for word in words)
        assert (ran.code, "error:" in ran.err) == (int(fails), False), (words, ran)
        if words[0] == "start":  # the module's group has earlier operations
            (op,) = re.findall(r"started (\S+)\n", ran.err)
            replacements.setdefault(f"{FLIGHTS}/validate/1", op)
    assert page.exists()


def january() -> Any:
    """The flights of the first three days of January."""
    import pyarrow.compute as pc

    from tests.support.tables import flights

    table = flights()
    return table.filter(pc.and_(pc.equal(table["month"], 1), pc.less_equal(table["day"], 3)))


def rows_of_days() -> dict[int, int]:
    """Day → the number of flights."""
    days = january()["day"].to_pylist()
    return {day: days.count(day) for day in (1, 2, 3)}


def nulls_of_days(column: str) -> dict[int, int]:
    """Day → the number of flights with NULL in the column."""
    table = january()
    pairs = list(zip(table["day"].to_pylist(), table[column].to_pylist(), strict=True))
    return {day: pairs.count((day, None)) for day in (1, 2, 3)}


def lay_out_days(folder: Path) -> Path:
    """Write a table with the first three days of January."""
    from tests.support.tables import write_partitions

    return write_partitions(january(), folder, ["month", "day"])


def test_an_iceberg_table_without_icebergs_jar_fails_with_advice(group: Daemons, tmp_path: Path) -> None:
    schema = Schema(NestedField(1, "id", LongType(), required=False))
    Folder(tmp_path).new(schema).append(pa.table({"id": [1, None]}))
    group.client.add_table(TableRecord("lake.t", "iceberg", str(tmp_path)))
    result = validate(group, "lake.t", {"not_null": "id"})
    assert result.state == "failed"
    assert result.report["verdict"] == "error"
    message = result.report["checks"][0]["error"]
    advice = "start the executors with --spark-conf spark.jars=FILE, where FILE is the jar org.apache.iceberg:"
    assert advice in message, group.tails()


def test_files_that_can_crash_a_process_are_named_in_one_attempt(group: Daemons, tmp_path: Path) -> None:
    """A damaged page would exceed the JVM's memory, and a damaged footer would abort pyarrow.

    validate checks the files before it reads them.
    """
    place = tmp_path / "deadly"
    for name, kind in (("p=1", "sound"), ("p=2", "huge-page"), ("p=3", "sound"), ("p=4", "sound")):
        (place / name).mkdir(parents=True)
        KINDS[kind](place / name / "a.parquet")
    of_unknown_type(place / "p=4" / "a.parquet")
    group.client.add_table(TableRecord("deadly", "parquet", str(place)))
    operation = group.client.start_operation(
        "validate", "deadly", {"checks": [{"check": "id >= 0"}], "statistics": "never"}
    )
    result = operation.wait(200)
    assert result.state == "failed", group.tails()
    found = {row.name: row for row in operation.results()}
    assert {name: row.attempt for name, row in found.items()} == dict.fromkeys(("p=1", "p=2", "p=3", "p=4"), 1)
    assert {name for name, row in found.items() if row.success} == {"p=1", "p=3"}
    page, footer = (found[name].result["reasons"] for name in ("p=2", "p=4"))
    assert f"the file {place}/p=2/a.parquet cannot be read: a page of the column 'id' is damaged" in page[0]
    assert f"the file {place}/p=4/a.parquet is not a readable Parquet file: its footer is damaged" in footer[0]
