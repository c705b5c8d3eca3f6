"""The command line against a real etcd with scripted daemons: output and exit codes."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from distop.clock import System, source
from distop.protocol.records import State
from tests.integration.cli_namespace import TABLE, cli, end, ref
from tests.integration.scripted_daemons import ScriptedDaemons
from tests.support.command import distop_command
from tests.support.daemons import eventually
from tests.support.etcd import shared_etcd
from tests.support.proxy import Mode, ThreadedProxy

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from distop.store.embedded import EmbeddedEtcd
    from tests.integration.cli_namespace import CliNamespace
    from tests.support.command import Ran

__all__ = ["cli", "distop_command", "shared_etcd"]

pytestmark = pytest.mark.etcd


def test_an_operation_is_started_listed_shown_paused_resumed_and_cancelled(cli: CliNamespace) -> None:
    ran = cli.distop("start", "noop", TABLE, "--partition", "a", "--partition", "b", "--json")
    assert (ran.code, ran.err) == (0, "")
    assert ran.json == {"op": "nyc.flights/noop/1", "instance": 1, "state": "running"}
    listed = cli.distop("ls", "--json").json
    assert [{k: op[k] for k in ("op", "state", "waiting_for")} for op in listed] == [
        {"op": "nyc.flights/noop/1", "state": "running", "waiting_for": "planning"}
    ]
    assert set(listed[0]) >= {"op", "state", "started", "jobs", "waiting_for"}
    assert "nyc.flights/noop/1" in cli.distop("ls").out
    assert "waits for   planning" in cli.distop("show", "nyc.flights/noop/1").out
    assert cli.distop("pause", "nyc.flights/noop/1", "--json").json["state"] == "paused"
    assert cli.distop("show", "nyc.flights/noop/1", "--json").json["state"] == "paused"
    assert cli.distop("resume", "nyc.flights/noop/1").out == "nyc.flights/noop/1 is running\n"
    assert cli.distop("cancel", "nyc.flights/noop/1", "--text", "why not").code == 0
    assert "user: why not" in cli.distop("show", "nyc.flights/noop/1").out


def test_a_graph_is_started_as_a_whole_or_not_at_all(cli: CliNamespace, tmp_path: Path) -> None:
    file = tmp_path / "graph.json"

    def graph(*last: str) -> str:
        types = dict(zip(("type", "table"), last, strict=True))
        part = {"type": "noop", "table": TABLE}
        file.write_text(json.dumps({"chain": [[{"name": "one", **part}, part], {"name": "then", **types}]}))
        return str(file)

    for last, code, words in ((("nope", TABLE), 2, "no behavior 'nope'"), (("noop", "no"), 4, "no table 'no'")):
        ran = cli.distop("start", "--graph", graph(*last))
        assert (ran.code, words in ran.sentence) == (code, True), ran
    assert cli.distop("ls", "--json").json == []
    ran = cli.distop("start", "--graph", graph("noop", TABLE), "--request-id", "g", "--json")
    assert (ran.code, ran.err) == (0, "")
    names = [f"{TABLE}/noop/{number}" for number in (1, 2, 3)]
    assert ran.json == {
        "operations": [
            {"name": name, "op": op, "instance": n}
            for n, (name, op) in enumerate(zip(("one", "", "then"), names, strict=True), 1)
        ],
        "already_started": False,
    }
    again = cli.distop("start", "--graph", graph("noop", TABLE), "--request-id", "g")
    assert again.out.splitlines() == [
        f"already started: {names[0]} (one)",
        f"already started: {names[1]}",
        f"already started: {names[2]} (then)",
    ]
    assert len(cli.distop("ls", "--json").json) == 3
    for name in reversed(names):
        assert cli.distop("cancel", name).code == 0
    waited = cli.distop("start", "--graph", str(file), "--request-id", "g", "--wait", "--timeout", "20", "--json")
    assert (waited.code, {one["state"] for one in waited.json["operations"]}) == (1, {"cancelled"})
    assert [one["op"] for one in waited.json["operations"]] == names


def test_exit_codes_of_refused_commands(cli: CliNamespace) -> None:
    cli.distop("start", "noop", TABLE)
    for argv, code, words in (
        (("start", "nope", TABLE), 2, "no behavior 'nope'"),
        (("start", "noop", "no"), 4, "no table 'no'"),
        (("start", "purge", TABLE), 5, "purge on nyc.flights cannot start while nyc.flights/noop/1 runs"),
        (("show", "nyc.flights/noop/7"), 4, "no operation nyc.flights/noop/7"),
        (("show", "a\nb/noop/7"), 4, "no operation a\\nb/noop/7"),
        (("cancel", "noop/7"), 2, "'noop/7' is not an operation"),
        (("table", "rm", TABLE), 5, "1 operation (noop) runs on 'nyc.flights'"),
        (("table", "rm", "no"), 4, "no table 'no'"),
        (("table", "add", "x", "--format", "nowhere", "--location", "/"), 2, "'nowhere'"),
        (("table", "add", "x", "--format", "parquet", "--location", "/no/such"), 2, "/no/such"),
    ):
        ran = cli.distop(*argv)
        assert (ran.code, words in ran.sentence) == (code, True), ran


def test_show_history_and_watch_report_an_ended_operation(cli: CliNamespace) -> None:
    cli.distop("start", "noop", TABLE)
    checks = [
        {"name": "tail", "verdict": "violated", "violations": 2512, "exact": True, "evidence": {"files_scanned": 365},
         "samples": [{"partition": "day=1", "file": "/x/part-0.parquet", "row_index": 3, "values": {"tailnum": None}}]},
        *({"name": name, "verdict": "error", "violations": 0, "exact": False, "error": "no column 'dela'\ncode"}
          for name in ("delay", "later")),
    ]  # fmt: skip
    report = {"verdict": "violated", "rows": 336776, "checks": checks}
    errors = [
        {"partition": None, "text": "tail: 2512 violations; delay: error: no column 'dela'", "verdict": True},
        {"partition": "day=1", "text": "tail: at least 7 violations; delay: unknown", "verdict": True},
        {"partition": "day=2", "text": "cannot be read; the end of its log:\nat line 1"},
        {"partition": "day=3", "text": "delay: error: another reason", "verdict": True},
        {"partition": None, "text": "nobody offers it"},
    ]
    cli.with_daemons(lambda scripted: end(scripted, "nyc.flights/noop/1", State.FAILED, report, errors))
    shown = cli.distop("show", "nyc.flights/noop/1")
    assert shown.code == 0
    for words in ("failed", "336,776", "2,512", "part-0.parquet", '{"tailnum": null}',
                  "\ndelay, later: no column 'dela'\n", "error: partition day=2: cannot be read\n"):  # fmt: skip
        assert words in shown.out
    assert re.search(r"^delay +error +-( |$)", shown.out, re.MULTILINE)
    assert "at least 0" not in shown.out
    assert "at line 1" not in shown.out
    error_lines = [line for line in shown.out.splitlines() if line.startswith("error: ")]
    assert error_lines == ["error: partition day=2: cannot be read", "error: nobody offers it"], (
        "errors in the table of checks are not repeated"
    )
    record = cli.distop("show", "nyc.flights/noop/1", "--json").json
    assert set(record) >= {"op", "state", "started", "finished", "jobs", "report", "errors", "failed", "request_id"}
    assert record["report"] == report
    assert cli.distop("history", "--json").json == [record]
    assert cli.distop("history", TABLE, "--limit", "1", "--json").json == [record]
    assert "nyc.flights/noop/1" in cli.distop("history").out
    watched = cli.distop("watch", "nyc.flights/noop/1", "--json")
    assert (watched.code, watched.json) == (1, record)
    ran = cli.distop("cancel", "nyc.flights/noop/1")
    assert (ran.code, "ended as failed at" in ran.sentence) == (5, True)


def test_tables_nodes_and_behaviors_are_listed_and_their_names_escaped(
    cli: CliNamespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    (tmp_path / "data").mkdir()
    pq.write_table(pa.table({"a": [1]}), tmp_path / "data" / "x.parquet")
    monkeypatch.chdir(tmp_path)
    ran = cli.distop("table", "add", "订单 🛒", "--format", "parquet", "--location", "data", "--json")
    assert (ran.code, ran.json["location"]) == (0, str(tmp_path / "data"))
    assert [t["name"] for t in cli.distop("table", "ls", "--json").json] == [TABLE, "订单 🛒"]
    assert "订单 🛒" in cli.distop("table", "ls").out
    assert cli.distop("table", "rm", "订单 🛒").code == 0
    # A name may contain control sequences of a terminal.
    added = cli.distop("table", "add", "\x1b[31mred", "--format", "parquet", "--location", "data")
    removed = cli.distop("table", "rm", "\x1b[31mred")
    assert added.out.startswith("table \\x1b[31mred: parquet at ")
    assert removed.out.startswith("table \\x1b[31mred is removed from the registry")
    nodes = cli.distop("nodes", "--json").json
    assert [(n["executor"], n["slots"], n["incarnation"]) for n in nodes] == [("executor-n1", 2, "n1")]
    assert "executor-n1" in cli.distop("nodes").out
    types = cli.distop("behaviors", "--json").json
    assert [(b["type_name"], b["executors"]) for b in types] == [("noop", 1), ("purge", 1)]
    assert "Does nothing." in cli.distop("behaviors").out


def test_an_empty_list_names_the_next_step(shared_etcd: EmbeddedEtcd, distop_command: Callable[..., Ran]) -> None:
    options = ("--etcd", shared_etcd.endpoint, "--namespace", "nothing")
    for argv, words in (
        (("ls",), "no operation is open"),
        (("history",), "no operation has ended yet"),
        (("nodes",), "distop executor"),
        (("behaviors",), "publishes"),
        (("table", "ls"), "distop table add"),
    ):
        assert words in distop_command(*argv, *options).out
        assert distop_command(*argv, *options, "--json").json == []


def test_lists_of_one_table_reject_an_unknown_table(cli: CliNamespace) -> None:
    for command, empty in (("ls", "no operation is open on nyc.flights"), ("history", "no operation has ended yet")):
        assert empty in cli.distop(command, TABLE).out
        assert TABLE in cli.distop(command, TABLE).out
        assert cli.distop(command, "@cluster", "--json").json == []
        ran = cli.distop(command, "nosuch")
        assert (ran.code, "there is no table 'nosuch'" in ran.sentence) == (4, True)
    cli.distop("start", "noop", TABLE)
    cli.with_daemons(lambda scripted: end(scripted, "nyc.flights/noop/1"))
    cli.distop("table", "rm", TABLE)
    assert cli.distop("history", TABLE, "--json").json != [], "the history of a removed table is kept"
    assert cli.distop("ls", TABLE).code == 0


def test_start_with_wait_ends_at_its_timeout(cli: CliNamespace) -> None:
    ran = cli.distop("start", "noop", TABLE, "--wait", "--timeout", "0.1", "--request-id", "r", "--json")
    assert (ran.code, ran.json) == (6, {"op": "nyc.flights/noop/1", "instance": 1, "state": "running"})
    assert "nyc.flights/noop/1 continues: follow it with `distop watch nyc.flights/noop/1`" in ran.err
    cli.distop("pause", "nyc.flights/noop/1")
    again = cli.distop("start", "noop", TABLE, "--wait", "--timeout", "0.1", "--request-id", "r", "--json")
    assert (again.code, again.json["state"]) == (6, "paused")
    text_output = cli.distop("start", "noop", TABLE, "--wait", "--timeout", "0.1")
    assert (text_output.code, text_output.out) == (6, "")


def test_start_with_wait_prints_the_report(cli: CliNamespace) -> None:
    command = [sys.executable, "-m", "distop.cli", "start", "noop", TABLE, "--wait", *cli.options]
    environment = {k: v for k, v in os.environ.items() if not k.startswith("DISTOP_")}
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
    ) as waiting:
        assert waiting.stderr is not None
        assert waiting.stderr.readline() == "started nyc.flights/noop/1\n"
        cli.with_daemons(lambda scripted: end(scripted, "nyc.flights/noop/1", report={"rows": 1}))
        out, _ = waiting.communicate(timeout=60)
    assert waiting.returncode == 0
    assert "success" in out
    assert "\x1b" not in out, "the output to a pipe has no colours"
    assert json.loads(out[out.index("{") :]) == {"rows": 1}


def test_an_interrupted_wait_leaves_the_operation_running(cli: CliNamespace) -> None:
    command = [sys.executable, "-m", "distop.cli", "start", "noop", TABLE, "--wait", *cli.options]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as waiting:
        assert waiting.stderr is not None
        assert waiting.stderr.readline() == "started nyc.flights/noop/1\n"
        waiting.send_signal(signal.SIGINT)
        out, err = waiting.communicate(timeout=60)
    assert waiting.returncode == 130
    assert out == ""
    assert err == (
        "interrupted; nyc.flights/noop/1 continues: follow it with `distop watch nyc.flights/noop/1`, "
        "stop it with `distop cancel nyc.flights/noop/1`\n"
    )
    assert cli.distop("show", "nyc.flights/noop/1", "--json").json["state"] == "running"


def test_an_interrupted_wait_prints_the_operation_as_json(cli: CliNamespace) -> None:
    watch = b"distOpHistory.nyc%2Eflights.noop.1\x12"  # the start of a range, which only the wait reads
    port = int(cli.endpoint.rpartition(":")[2])
    with ThreadedProxy(port, trigger=(watch, Mode.BLACK_HOLE)) as proxy:
        start = ("start", "noop", TABLE, "--wait", "--json", "--etcd", proxy.endpoint, "--namespace", cli.namespace)
        command = [sys.executable, "-m", "distop.cli", *start]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as waiting:
            eventually(lambda: proxy.triggered or waiting.poll() is not None, "the command waits for the end")
            waiting.send_signal(signal.SIGINT)
            out, err = waiting.communicate(timeout=60)
    assert (waiting.returncode, json.loads(out)) == (
        130,
        {"op": "nyc.flights/noop/1", "instance": 1, "state": "running"},
    )
    assert "nyc.flights/noop/1 continues" in err


def test_a_repeated_start_shows_the_state_of_the_operation(cli: CliNamespace) -> None:
    start = ("start", "noop", TABLE, "--request-id", "abc")
    assert cli.distop(*start).out == "started nyc.flights/noop/1\n"
    assert cli.distop(*start).out == "already started: nyc.flights/noop/1 (running)\n"
    cli.distop("pause", "nyc.flights/noop/1")
    assert cli.distop(*start, "--json").json["state"] == "paused"
    cli.distop("resume", "nyc.flights/noop/1")
    cli.with_daemons(lambda scripted: end(scripted, "nyc.flights/noop/1"))
    cli.with_daemons(lambda scripted: scripted.clean(ref("nyc.flights/noop/1"), "n1"))
    ran = cli.distop(*start, "--json")
    assert ran.json == {"op": "nyc.flights/noop/1", "instance": 1, "state": "success"}
    assert cli.distop(*start).out == "already started: nyc.flights/noop/1 (success)\n"
    waited = cli.distop(*start, "--wait")
    assert (waited.code, waited.err) == (0, "already started: nyc.flights/noop/1 (success)\n")


@pytest.mark.parametrize("spelling", ["nyc%2Eflights/noop/1", "nyc.flights/%6eoop/1"])
def test_each_spelling_of_a_name_finds_its_operation(cli: CliNamespace, spelling: str) -> None:
    cli.distop("start", "noop", TABLE)
    for command in ("pause", "resume", "show", "cancel"):
        assert cli.distop(command, spelling, "--json").json["op"] == "nyc.flights/noop/1"
    cli.distop("start", "noop", TABLE)
    assert cli.distop("pause", spelling.replace("/1", "/2")).out == "nyc.flights/noop/2 is paused\n"
    assert cli.distop("resume", spelling.replace("/1", "/2")).out == "nyc.flights/noop/2 is running\n"


def test_open_and_ended_operations_have_the_same_json_fields(cli: CliNamespace) -> None:
    cli.distop("start", "noop", TABLE, "--request-id", "mine")
    (listed,) = cli.distop("ls", "--json").json
    shown = cli.distop("show", "nyc.flights/noop/1", "--json").json
    text_output = cli.distop("show", "nyc.flights/noop/1").out
    assert (shown["finished"], shown["report"], shown["failed"], shown["request_id"]) == (None, None, "", "mine")
    assert f"by          {shown['submitter']}\nrequest id  mine\n" in text_output
    cli.with_daemons(lambda scripted: end(scripted, "nyc.flights/noop/1"))
    ended = cli.distop("show", "nyc.flights/noop/1", "--json").json
    assert set(ended) <= set(shown)
    assert set(shown) == set(listed)
    for field in ("v", "op", "request_id", "request_digest", "submitter"):
        assert ended[field] == shown[field]
    text_output = cli.distop("show", "nyc.flights/noop/1").out
    assert f"by          {shown['submitter']}\nrequest id  mine\n" in text_output


@pytest.mark.parametrize("mode", [Mode.DROP_ANSWERS, Mode.BLACK_HOLE])
def test_a_start_interrupted_before_the_answer_suggests_its_request_id(cli: CliNamespace, mode: Mode) -> None:
    """The command cannot know whether etcd applied the start."""
    port = int(cli.endpoint.rpartition(":")[2])
    start = ("start", "noop", TABLE, "--arg", '{"mark": "in the middle"}')
    with ThreadedProxy(port, trigger=(b"in the middle", mode)) as proxy:
        options = ("--etcd", proxy.endpoint, "--namespace", cli.namespace)
        command = [sys.executable, "-m", "distop.cli", *start, *options]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as starting:
            eventually(lambda: proxy.triggered or starting.poll() is not None, "the start has been sent")
            if mode is Mode.DROP_ANSWERS:  # etcd drops requests of a closed connection
                eventually(lambda: len(cli.distop("ls", TABLE, "--json").json) == 1, "etcd has applied it")
            starting.send_signal(signal.SIGINT)
            out, err = starting.communicate(timeout=60)
    assert (starting.returncode, out, err.count("\n")) == (130, "", 1), err
    assert err.startswith("interrupted before etcd answered, so the operation may have been started: ")
    assert "distop ls" not in err, "a list may lack an operation that has ended or not started yet"
    (request,) = re.findall(r"run the same command with `--request-id (\S+)`, which starts it at most once", err)
    again = cli.distop(*start, "--request-id", request, "--json")
    assert again.json["op"] == "nyc.flights/noop/1"
    assert len(cli.distop("ls", TABLE, "--json").json) == 1


@pytest.mark.parametrize(("off", "words"), [(3600.0, "ahead of"), (-3600.0, "behind")])
def test_doctor_compares_the_clocks(cli: CliNamespace, off: float, words: str) -> None:
    class WrongClock(System):
        @staticmethod
        def time() -> float:
            return System.time() + off

    before = source.set(WrongClock())
    try:
        ran = cli.distop("doctor", "--json")
    finally:
        source.reset(before)
    (found,) = (check for check in ran.json["checks"] if check["name"] == "clock")
    assert (ran.code, found["status"]) == (1, "error")
    assert re.fullmatch(rf"this machine's clock is about 3[56]\d\d s {words} etcd's: .*\(NTP\)", found["text"])


def test_doctor_reports_that_authentication_is_off(cli: CliNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "users" not in {check["name"] for check in cli.distop("doctor", "--json").json["checks"]}
    monkeypatch.setenv("DISTOP_PASSWORD", "x")
    ran = cli.distop("doctor", "--user", "ann", "--json")
    (found,) = (check for check in ran.json["checks"] if check["name"] == "users")
    assert (ran.code, found["status"]) == (0, "warning")
    assert "authentication is off: etcd did not check the password of 'ann'" in found["text"]


def test_doctor_reports_healthy_parts_and_leftover_keys(cli: CliNamespace) -> None:
    findings = {c["name"]: c for c in cli.distop("doctor", "--json").json["checks"]}
    assert findings["space"]["status"] == "ok"
    assert findings["keys"]["status"] == "ok"
    assert findings["executors"]["status"] == "ok"
    assert findings["clock"]["text"] == "within 5 s of etcd's"

    async def write_leftover_key(scripted: ScriptedDaemons) -> None:
        await scripted.put(scripted.keys.of(ref("t/noop/9"), "arg"), b"{}")

    cli.with_daemons(write_leftover_key)
    ran = cli.distop("doctor")
    assert ran.code == 1
    assert "t/noop/9 has .arg, but no state" in ran.out
    (etcd,) = (line for line in ran.out.splitlines() if line.startswith("etcd "))
    assert f"{cli.options[1]}, 1 member: etcd 3." in etcd
    assert len(etcd) < 160
    assert "#" not in etcd, "issue numbers are in --json only"
