"""The HTML page of an operation: its content and escaping; it loads no other files."""

from __future__ import annotations

import re
import tomllib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from distop.cli.page import page_file as rendering
from distop.cli.page.content import page
from distop.cli.page.job_map import CELLS, ROWS, jobs_of
from distop.cli.page.page_file import render
from distop.cli.page.value_tree import MOST, Grid, Items, Pairs, Scalar, tree
from distop.protocol.behavior_declaration import Declaration, Retry, Rules
from distop.protocol.jobs import Claim, Tried
from distop.protocol.json_codec import rfc3339
from distop.protocol.plan import Plan
from distop.protocol.records import Cancel, History, Node, OperationRef, Spec, State, TableRecord
from distop.protocol.work_done import WorkDone
from distop.services.inspection.partitions import Account, Partition
from distop.services.inspection.status import Snapshot, judge
from distop.services.inspection.work import KnownWork
from tests.support.html import Parsed

REF = OperationRef("nyc.flights", "validate", "", 7)
BEGAN = 1_000_000.0
NOW = BEGAN + 100
NODES = {"i1": Node("ann", "host-a", 2, ("validate",))}
SPEC = Spec("r-1", rfc3339(BEGAN), "eve@desk", Rules(), TableRecord("nyc.flights", "parquet", "/data/flights"))
HOSTILE = '<script>alert("1")</script>\'"><img src=x onerror=y> & 订单 \u202eevil\x1b[31m\x00'
REPORT = {
    "verdict": "violated",
    "rows": 336776,
    "checks": [
        {"name": "tail", "check": {"not_null": "tailnum"}, "verdict": "violated", "violations": 2512, "exact": True,
         "evidence": {"files_statistics": 365, "files_scanned": 0}, "error": None,
         "samples": [{"partition": "day=1", "file": "/data/flights/day=1/a.parquet", "row_index": 3,
                      "values": {"tailnum": None, "carrier": "AA"}}]},
        {"name": "delay", "check": {"check": "x > 1"}, "verdict": "violated", "violations": 9, "exact": False,
         "evidence": {"files_statistics": 1, "files_scanned": 364}, "samples": [], "error": None},
        {"name": "dist", "check": {"range": {"column": "d", "min": 0}}, "verdict": "error", "violations": 0,
         "exact": False, "evidence": {}, "samples": [], "error": "no column 'd'"},
        {"name": "fine", "check": {"not_null": "x"}, "verdict": "valid", "violations": 0, "exact": True},
    ],
}  # fmt: skip


def succeeded(n: int, name: str = "", seconds: float = 1.0, executor: str = "ann") -> Partition:
    return Partition(n, name or f"day={n}", "success", 1, executor, "i1", BEGAN + n, BEGAN + n + seconds)


def failed(n: int, error: str, name: str = "", tried: tuple[Tried, ...] = ()) -> Partition:
    return replace(succeeded(n, name), state="failed", error=error, tried=tried)


def history(state: State, total: int, failed: int = 0, **fields: Any) -> History:
    done = fields.pop("done", total - failed)
    about = {"request_id": "r-1", "submitter": "eve@desk", **fields}
    return History(str(REF), state, rfc3339(BEGAN), rfc3339(BEGAN + 65), total, done, failed, **about)


def page_of(record: History | None, account: Account, snapshot: Snapshot | None = None) -> Any:
    seen = judge(snapshot or Snapshot(REF, history=record), NODES, NOW)
    return page(REF, seen, account, NODES, Declaration("validate", description="Checks rows.\nAnd more."), NOW)


def account(*partitions: Partition, **fields: Any) -> Account:
    about: dict[str, Any] = {"spec": SPEC, "arg": {"checks": [1]}, "arg_known": True, "planned": True, **fields}
    return Account(True, 5, partitions=partitions, **about)


def parsed(record: History | None, known: Account, snapshot: Snapshot | None = None) -> Parsed:
    return Parsed(render(page_of(record, known, snapshot)))


# ------------------------------------------------------------------ the sentence


@pytest.mark.parametrize(
    ("record", "sentence"),
    [
        (history(State.SUCCESS, 365), "Succeeded: all 365 jobs are done."),
        (history(State.SUCCESS, 1), "Succeeded: its only job is done."),
        (history(State.SUCCESS, 0), "Succeeded: there was nothing to do."),
        (history(State.FAILED, 365, 3), "Failed: 3 of 365 jobs failed."),
        (
            history(State.FAILED, 365, 3, done=10),
            "Failed: 3 of 365 jobs failed; 352 jobs did not end, because others failed.",
        ),
        (history(State.FAILED, 2, errors=({"partition": None, "text": "no\nat x"},)), "Failed: no."),
        (
            history(State.CANCELLED, 10, 1, done=2, cancel=Cancel("user", "wrong table!")),
            "Cancelled when 3 of 10 jobs had ended: wrong table!",
        ),
        (
            history(State.FAILED, 365, 3, report=REPORT),
            "2 of 4 checks are violated: tail (2,512 rows), delay (at least 9 rows); "
            "1 of 4 checks is not decided because of an error: dist.",
        ),
        (
            history(State.SUCCESS, 1, report={**REPORT, "checks": REPORT["checks"][3:]}),  # type: ignore[index]
            "The check holds in every row (336,776 rows were checked).",
        ),
        (  # it failed for another reason
            history(State.FAILED, 9, 2, report={**REPORT, "checks": REPORT["checks"][3:]}),  # type: ignore[index]
            "Failed: 2 of 9 jobs failed.",
        ),
    ],
)
def test_the_verdict_is_one_sentence(record: History, sentence: str) -> None:
    assert page_of(record, account(succeeded(0))).verdict == sentence


# ------------------------------------------------------------------ the whole page


def test_the_page_of_a_failed_validation_has_all_its_parts() -> None:
    tried = (Tried(1, "bob", "disk full"), Tried(2, "ann", "bad file"))
    partitions = (
        succeeded(0),
        failed(1, "bad file\nat line 1", tried=tried),
        replace(succeeded(2, seconds=50.0), executor="bob"),
    )
    errors = (
        {"partition": None, "text": "tail: 2512 violations", "verdict": True},
        {"partition": "day=1", "text": "bad file"},
        {"partition": None, "text": "no completion\nat line 9"},
    )
    found = parsed(history(State.FAILED, 3, 1, report=REPORT, errors=errors), account(*partitions))
    for words in (
        "nyc.flights/validate/7", "validate: Checks rows.", "/data/flights (parquet)", "eve@desk", "r-1",
        "336,776 rows in all", "not_null: tailnum", "range: column d, min 0", "2,512", "at least 9",
        "no column 'd'", "day=1/a.parquet", "attempt 1 on bob: disk full", "at line 1", "65 s",
        "1970-01-12 13:46:40 UTC", "The slowest partitions", "host-a", "not alive", "no completion",
    ):  # fmt: skip
        assert words in found.text, words
    assert "/data/flights/day=1" not in found.text, "a file is named below the table's location"
    assert found.text.count("tail: 2512 violations") == 0, "the table of checks shows it"
    assert found.text.count("no completion") == 1
    titles = [cell["title"] for cell in found.all("li") if "title" in cell]
    assert titles == [
        "day=0: succeeded · attempt 1 on ann · 1.0 s",
        "day=1: failed · attempt 1 on ann · 1.0 s · bad file",
        "day=2: succeeded · attempt 1 on bob · 50 s",
    ]


def test_the_page_of_an_open_operation_is_called_a_snapshot() -> None:
    claims = {1: Claim("ann", "i1", 2, 1, error="disk full"), 2: Claim("bob", "gone", 1, 0)}
    open_ = Snapshot(REF, State.RUNNING, None, SPEC, Plan(5, "", "", 1), success=1, claims=claims)
    partitions = (
        succeeded(0),
        Partition(1, "day=1", "running", 2, "ann", "i1", error="disk full"),
        Partition(2, "day=2", "running", 1, "bob", "gone"),
        Partition(3, "day=3", "waiting", 1, "bob", error="no memory"),
        Partition(4, "day=4", "open"),
    )
    made = page_of(None, replace(account(*partitions), ended=False), open_)
    assert made.verdict == "Running: when this page was made, 1 of 5 jobs had ended (20%)."
    assert [(kind.name, count) for kind, count in made.counts] == [
        ("success", 1), ("running", 1), ("waiting", 1), ("lost", 1), ("open", 1),
    ]  # fmt: skip
    found = Parsed(render(made))
    assert "A snapshot of 1970-01-12 13:48:20 UTC. The operation goes on" in found.text
    for words in ("disk full", "no memory", "claimed by a lost executor", "day=4", "not started"):
        assert words in found.text


def test_the_page_reports_that_there_is_no_plan_yet() -> None:
    snapshot = Snapshot(REF, State.RUNNING, None, SPEC)
    found = parsed(None, Account(False, 5, SPEC, None, True), snapshot)
    assert "it had no plan yet; it waited for planning" in found.text
    assert "The operation has no plan yet" in found.text


def test_the_page_reports_deleted_states_of_partitions() -> None:
    gone = Account(True, 5, gone=True)
    found = parsed(history(State.SUCCESS, 365), gone)
    assert "The states of the partitions are gone" in found.text
    assert "The argument is not kept any more" in found.text
    assert "365 succeeded" in found.text
    assert found.all("li", title="") == []
    kept = Account(True, 5, SPEC, {"a": 1}, True, gone=True, failed=("day=1",), unfinished=("day=8", "day=9"))
    found = parsed(history(State.FAILED, 4, 1, done=1), kept)
    for words in ("1 failed", "day=1", "2 not ended", "day=8", "eve@desk"):
        assert words in found.text


def test_an_operation_of_no_table_has_no_partitions() -> None:
    record = replace(history(State.SUCCESS, 1), op="@cluster/noop/1")
    seen = judge(Snapshot(OperationRef("@cluster", "noop", "", 1), history=record), NODES, NOW)
    spec = replace(SPEC, table=None)
    made = page(
        OperationRef("@cluster", "noop", "", 1), seen, account(succeeded(0, "all"), spec=spec), NODES, None, NOW
    )
    found = Parsed(render(made))
    assert "table none" in found.text
    assert "one job for each partition" not in found.text


def test_jobs_that_were_only_counted_are_not_called_successful() -> None:
    many = Snapshot(REF, State.RUNNING, None, SPEC, Plan(200_000, "", "", 1), success=5, exact=False)
    made = page_of(None, Account(False, 5, SPEC, None, True, planned=True), many)
    assert [(kind.text, count) for kind, count in made.counts] == [("ended", 5), ("not started", 199_995)]
    assert "There are more than 100,000 partitions" in made.jobs_missing


def test_jobs_that_did_not_end_are_listed_by_name() -> None:
    record = history(State.CANCELLED, 3, 0, done=1, cancel=Cancel("user"))
    partitions = (succeeded(0), Partition(1, "day=1", "open"), Partition(2, "day=2", "waiting", 1, "ann", error="x"))
    made = page_of(record, account(*partitions))
    assert made.verdict == "Cancelled when 1 of 3 jobs had ended."
    assert [(t.kind.name, t.names) for t in made.jobs.by_kind] == [("unended", ("day=1", "day=2"))]


# ------------------------------------------------------------------- any report


def test_a_report_of_any_form_is_shown_as_a_tree() -> None:
    assert tree({}) == Scalar("{}")
    assert tree(2013) == Scalar("2013", "number"), "a year has no separators"
    assert tree(None) == Scalar("null", "word")
    assert tree([{"a": 1, "b": "x"}, {"a": 2}]) == Grid(
        ("a", "b"), ((Scalar("1", "number"), Scalar("x")), (Scalar("2", "number"), Scalar("")))
    )
    assert isinstance(tree([{"a": [1]}, {"a": [2]}]), Items)
    many = tree(list(range(MOST + 5)))
    assert isinstance(many, Items)
    assert (len(many.items), many.left) == (MOST, 5)
    wide = tree({str(n): n for n in range(MOST + 1)})
    assert isinstance(wide, Pairs)
    assert wide.left == 1
    deep: Any = "bottom"
    for _ in range(500):
        deep = [deep]
    report = {"rows": 3, "deep": deep, "empty": "", "table": [{"a": 1, "b": True}, {"a": 2, "b": None}]}
    found = parsed(history(State.SUCCESS, 1, report={**report, "many": list(range(300))}), account(succeeded(0)))
    for words in ("rows", "bottom", "empty", "true", "and 100 more"):
        assert words in found.text


@pytest.mark.parametrize(
    "report",
    [
        0, "text", [1], {"checks": "none"}, {"checks": []}, {"checks": [{"verdict": "valid"}]},
        {"checks": [{"verdict": 3, "samples": [{}, 1], "evidence": [], "check": 4, "violations": "x"}], "rows": "many"},
        {"checks": [{"verdict": "odd", "samples": [{"values": {str(n): n for n in range(40)}}]}], "more": {"a": 1}},
    ],
)  # fmt: skip
def test_a_report_of_unknown_form_is_shown(report: Any) -> None:
    assert "Report" in parsed(history(State.SUCCESS, 1, report=report), account(succeeded(0))).text


# --------------------------------------------------------------------- the map


def test_neighbouring_partitions_share_a_cell_with_the_worst_state() -> None:
    partitions = [succeeded(n) for n in range(10_000)]
    partitions[7] = failed(7, "bad file")
    jobs = jobs_of(partitions, NODES, ended=True)
    (group,) = jobs.groups
    assert (len(group.cells), jobs.shared) == (CELLS, 5)
    assert group.cells[1].kind.name == "failed"
    assert group.cells[1].title == (
        "day=5 … day=9: 4 succeeded, 1 failed\nday=7: failed · attempt 1 on ann · 1.0 s · bad file"
    )
    assert [cell.kind.name for cell in group.cells].count("failed") == 1
    assert [row.name for kind in jobs.by_kind for row in kind.rows] == ["day=7"]
    found = parsed(history(State.FAILED, 10_000, 1), account(*partitions))
    assert len([cell for cell in found.all("li") if "title" in cell]) == CELLS


def test_folders_are_rows_of_the_map() -> None:
    partitions = [succeeded(n, f"month={n // 30}/day={n}") for n in range(90)]
    groups = jobs_of(partitions, NODES, ended=True).groups
    assert [(group.name, len(group.cells)) for group in groups] == [("month=0", 30), ("month=1", 30), ("month=2", 30)]
    wide = [*partitions, succeeded(90, "@table")]
    assert [group.name for group in jobs_of(wide, NODES, ended=True).groups][-2:] == ["month=2", "@table"]
    alone = [succeeded(n, f"folder{n}/part") for n in range(90)]
    assert [group.name for group in jobs_of(alone, NODES, ended=True).groups] == [""], (
        "no row for each single partition"
    )


def test_all_failed_partitions_are_named() -> None:
    jobs = jobs_of([failed(n, "bad file") for n in range(ROWS + 500)], NODES, ended=True)
    (group,) = jobs.by_kind
    assert (len(group.rows), len(group.names), group.count) == (ROWS, 500, ROWS + 500)
    assert group.names[-1] == f"day={ROWS + 499}"


def test_the_page_summarizes_job_durations() -> None:
    jobs = jobs_of([succeeded(n, seconds=float(n + 1)) for n in range(100)], NODES, ended=True)
    assert jobs.typical == "Half of the jobs took up to 50 s, 95 % up to 95 s, the slowest 1 min 40 s."
    assert [row.name for row in jobs.slowest] == [f"day={n}" for n in range(99, 89, -1)]
    assert (jobs.first, jobs.last) == (BEGAN, BEGAN + 99 + 100)
    alike = jobs_of([succeeded(n, seconds=68.0) for n in range(9)], NODES, ended=True)
    assert (alike.typical, alike.slowest) == ("All jobs took about 68 s.", ())
    backwards = jobs_of([replace(succeeded(0), finished=BEGAN - 5)], NODES, ended=True)
    assert backwards.slowest == (), "a clock was set back, so the duration is unknown"


# ------------------------------------------------------------------- the HTML


def hostile_page() -> str:
    x = HOSTILE
    report = {
        "verdict": "violated",
        "rows": 1,
        x: {x: [x, {x: x}]},
        "checks": [
            {"name": x, "check": {x: x}, "verdict": "violated", "violations": 1, "error": x,
             "samples": [{"partition": x, "file": x, "row_index": 0, "values": {x: x}}]},
        ],
    }  # fmt: skip
    ref = OperationRef(x, "validate", x, 7)
    spec = Spec(x, x, x, replace(Rules(), failure_policy=x), TableRecord(x, x, x), (x,), rerun_of=x)
    errors = ({"partition": x + "2", "text": f"{x}\n{x}", "attempts": [{"attempt": 1, "executor": x, "text": x}]},)
    record = replace(
        history(State.FAILED, 2, 1, report=report, errors=errors), started=x, submitter=x, request_id=x, rerun_of=x
    )
    tried = (Tried(1, x, x), Tried(2, x, x))
    jobs = Account(
        True, 5, spec, {x: [x]}, True, True, False, (succeeded(0, x, executor=x), failed(1, f"{x}\n{x}", x, tried))
    )
    seen = judge(Snapshot(ref, history=record), {}, NOW)
    nodes = {"i": Node(x, x, 1, ())}
    return render(page(ref, seen, jobs, nodes, Declaration("validate", description=x), NOW))


def test_data_is_escaped_in_the_page() -> None:
    html = hostile_page()
    found = Parsed(html)
    assert {tag for tag, _ in found.tags} & {"script", "img", "iframe", "object", "a", "link", "form"} == set()
    assert not [name for _, attributes in found.tags for name in attributes if name.startswith("on")]
    assert '<script>alert("1")</script>\'"><img src=x onerror=y> & 订单 \\u202eevil\\x1b[31m\\x00' in found.text
    assert any("<script>" in attributes.get("title", "") for _, attributes in found.tags)
    assert re.search("[\x00-\x08\x0b\x0c\x0e-\x1f\u202e]", html) is None


def test_a_text_with_lone_surrogates_can_be_written() -> None:
    made = page_of(history(State.FAILED, 1, 1), account(failed(0, "bad \udcff file")))
    assert b"bad \\udcff file" in render(made).encode()


def test_the_page_loads_no_other_files() -> None:
    html = hostile_page() + render(page_of(history(State.SUCCESS, 1), account(succeeded(0))))
    named = {name for _, attributes in Parsed(html).tags for name in attributes}
    assert named & {"src", "srcset", "href", "action", "data", "poster", "background"} == set()
    assert not re.search(r"url\(|@import|image-set", css())
    (policy, _) = [found["content"] for found in Parsed(html).all("meta", **{"http-equiv": "Content-Security-Policy"})]
    assert policy == "default-src 'none'; style-src 'unsafe-inline'"


def css() -> str:
    return (Path(rendering.__file__).parent / "templates" / "operation.css").read_text()


def _luminance(colour: str) -> float:
    parts = [int(colour[n : n + 2], 16) / 255 for n in (1, 3, 5)]
    red, green, blue = (p / 12.92 if p <= 0.03928 else ((p + 0.055) / 1.055) ** 2.4 for p in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


PAIRS = (
    *((text, paper) for text in ("ink", "faint", "good", "bad", "odd", "going") for paper in ("paper", "panel")),
    *(("on-strong", strong) for strong in ("good", "bad", "odd", "going")),
    ("on-good", "soft-good"),
    ("ink", "soft"),
)


@pytest.mark.parametrize("scheme", ["light", "dark", "print"])
def test_every_text_has_the_contrast_that_wcag_requires(scheme: str) -> None:
    blocks = re.findall(r":root \{(.*?)\}", css(), re.DOTALL)
    assert len(blocks) == 3
    block = blocks[["light", "dark", "print"].index(scheme)]
    colours = dict(re.findall(r"--([a-z-]+): (#[0-9a-f]{6})", block))
    assert colours.keys() >= {name for pair in PAIRS for name in pair}
    for pair in PAIRS:
        dark, light = sorted(_luminance(colours[name]) for name in pair)
        assert (light + 0.05) / (dark + 0.05) >= 4.5, pair


def test_no_state_is_shown_by_colour_alone() -> None:
    made = page_of(history(State.FAILED, 1, 1), account(failed(0, "x")))
    marks = [kind.mark for kind in rendering_kinds()]
    assert len(set(marks)) == len(marks)
    assert all(kind.mark.strip() and kind.text for kind in rendering_kinds())
    assert f"{made.mark} failed" in Parsed(render(made)).text


def rendering_kinds() -> list[Any]:
    from distop.cli.page.job_map import ENDED, KINDS

    return [*KINDS.values(), ENDED]


def test_the_page_shows_the_limit_of_attempts() -> None:
    never = replace(SPEC, rules=replace(Rules(), retry=Retry(1)), partitions=tuple(f"p{n}" for n in range(120)))
    asked = dict(page_of(history(State.SUCCESS, 1), replace(account(succeeded(0)), spec=never)).asked)
    assert asked["attempts of a job"] == "up to 1"
    assert asked["partitions"].endswith("p99 and 20 more")


def test_an_installation_has_the_templates() -> None:
    """setuptools packages only files named in pyproject.toml; editable installations hide an omission."""
    root = Path(__file__).parents[3]
    settings = tomllib.loads((root / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]
    folder = root / "distop" / "cli" / "page"
    taken = {path for pattern in settings["distop.cli.page"] for path in folder.glob(pattern)}
    assert taken == set((folder / "templates").iterdir())
    assert {path.name for path in taken} == {"operation.html", "operation.css"}


def test_the_page_has_the_work_of_an_operation() -> None:
    known = KnownWork(WorkDone(40, 4_000), WorkDone(10, 1_000), WorkDone(), WorkDone(commits=1, committed_files=10))
    open_ = Snapshot(REF, State.RUNNING, None, SPEC, Plan(4, "", "", 1), success=1, work=known)
    found = parsed(None, replace(account(succeeded(0)), ended=False), open_)
    assert "10/40 files, 1.0 kB of 4.0 kB" in found.text
    assert "1 commit, 10 files" in found.text
    record = history(State.CANCELLED, 4, 1, done=1, cancel=Cancel("user"), report={"work": {"commits": 1}})
    assert "1 commit: it stays" in parsed(record, account(succeeded(0))).text
