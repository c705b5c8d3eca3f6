"""The command line without etcd: global options, usage errors, exit codes, help."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest
from rich.cells import cell_len

from distop.cli import start
from distop.cli.command_context import parse_argument, parse_options, take_globals
from distop.cli.output import UnwritableOutput, console, duration, table, write_bytes
from distop.errors import InvalidArgument
from distop.services.suggested_commands import command
from tests.support.command import distop_command

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tests.support.command import Ran

__all__ = ["distop_command"]

CLOSED = ("--etcd", "127.0.0.1:1", "--connect-timeout", "0.2")
OPERATION_COMMANDS = ("show", "watch", "cancel", "pause", "resume")


@pytest.mark.parametrize(
    "argv",
    [
        ["--json", "--etcd", "a:1", "ls", "t"],
        ["ls", "--json", "--etcd", "a:1", "t"],
        ["ls", "t", "--etcd=a:1", "--json"],
    ],
)
def test_global_options_may_stand_anywhere(argv: list[str]) -> None:
    context, rest = take_globals(argv)
    assert rest == ["ls", "t"]
    assert context.json
    assert not context.debug
    assert context.given == {"etcd": "a:1"}


NO_SPACE = "error: cannot write the output: No space left on device\n"


@pytest.mark.parametrize("unbuffered", ["", "1"])
@pytest.mark.parametrize("option", ["--version", "--help"])
def test_output_that_cannot_be_written_is_reported_in_one_sentence(option: str, unbuffered: str) -> None:
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "distop.cli", option],
            env={**os.environ, "PYTHONUNBUFFERED": unbuffered},
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            timeout=60,
            check=False,
        )
    assert (done.returncode, done.stderr) == (2, NO_SPACE)


@pytest.mark.parametrize("size", [10, 1_000_000])
def test_bytes_that_cannot_be_written_are_an_error_of_the_output(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    full = os.fdopen(os.open("/dev/full", os.O_WRONLY), "w")
    monkeypatch.setattr(sys, "stdout", full)
    with pytest.raises(UnwritableOutput, match="cannot write the output: No space left on device"):
        write_bytes(b"x" * size)
    os.dup2(os.open(os.devnull, os.O_WRONLY), full.fileno())
    full.close()


def test_the_exit_code_of_an_error_holds_if_the_message_cannot_be_written() -> None:
    with open("/dev/full", "w") as full:
        done = subprocess.run([sys.executable, "-m", "distop.cli", "nonsense"], stderr=full, timeout=60, check=False)
    assert done.returncode == 2


def test_arguments_after_two_dashes_are_not_global_options() -> None:
    context, rest = take_globals(["ls", "--debug", "--", "--json", "--etcd"])
    assert rest == ["ls", "--", "--json", "--etcd"]
    assert context.debug
    assert not context.json


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--etcd"], "--etcd needs a value"),
        (["nope"], "No such command 'nope'"),
        (["start"], "Missing argument 'TYPE' (see `distop start --help`)"),
        (["start", "validate"], "Missing argument 'TABLE'"),
        (["ls", "--bogus"], "No such option: --bogus (see `distop ls --help`)"),
        (["start", "--graph", "/no/such/file", *CLOSED], "the graph in /no/such/file cannot be read: No such file"),
        (["start", "noop", "t", "--graph", "/f", *CLOSED], "--graph can only be combined with --request-id, --wait"),
        (["start", "--graph", "/f", "--label", "a=b", *CLOSED], "--graph can only be combined with --request-id,"),
        (["start", "--graph", "/f", "--timeout", "5", *CLOSED], "--timeout needs --wait"),
        (["start", "validate", "t", "--arg", "{", *CLOSED], "--arg is not valid JSON: Expecting property name"),
        (["start", "validate", "t", "--arg", "[1,\n x]", *CLOSED], "at line 2, column 2"),
        (
            ["start", "validate", "t", "--arg", "@/no/such/file", *CLOSED],
            "the argument in /no/such/file cannot be read",
        ),
        (["start", "validate", "t", "--timeout", "5", *CLOSED], "--timeout needs --wait"),
        *(
            (
                ["start", "validate", "t", "--wait", "--timeout", value],
                f"--timeout must be a number of seconds, 0 or more, not {value!r}",
            )
            for value in ("x", "", "-1", "nan", "inf", "1 s")
        ),
        (["pause", "t/noop/1", "--wait", "--timeout", "x"], "--timeout must be a number of seconds"),
        (["drain", "e", "--wait", "--timeout", "x"], "--timeout must be a number of seconds"),
        *(
            (["history", "--limit", value], f"--limit must be a whole number of at least 1, not {value!r}")
            for value in ("x", "", "0", "-3", "1.5", "9" * 30, "²")
        ),
        (["start", "noop", "t", "--retry-attempts", "many"], "--retry-attempts must be a whole number of at least 1"),
        (["table", "add", "t", "--format", "parquet"], "Missing option '--location'"),
        (["table", "add", "t", "--format", "parquet", "--location", "x", "--option", "a", *CLOSED], "K=V"),
        (["ls", "--etcd", "nowhere"], "'nowhere' is not an etcd endpoint"),
        (["ls", "--connect-timeout", "soon"], "--connect-timeout must be a number"),
        (["ls", "--log-level", "loud"], "--log-level must be one of debug"),
        (["ls", "--namespace", "a/b"], "'a/b' is not a namespace"),
        *(([command, "noop/7", *CLOSED], "'noop/7' is not an operation") for command in OPERATION_COMMANDS),
        (["show", "t/noop/1", "--html", "-", "--json", *CLOSED], "--html - and --json would both write to stdout"),
        (
            ["show", "t/noop/1", "--html", "no/page.html", *CLOSED],
            "no/page.html cannot be written: there is no folder no",
        ),
        (["show", "t/noop/1", "--html", "/", *CLOSED], "--html needs the name of a file (-: stdout)"),
        (["show", "t/noop/1", "--html", "", *CLOSED], "--html needs the name of a file (-: stdout), not ''"),
        (["show", "t/noop/1", "--html", "x" * 300, *CLOSED], "cannot be written: File name too long"),
        (["show", "noop/1", "--html", "-", *CLOSED], "'noop/1' is not an operation"),
        (["start", "no type", "t", *CLOSED], "'no type'"),
        (["start", "noop", "t", "--retry-attempts", "0", *CLOSED], "--retry-attempts must be a whole number"),
        (["table", "add", "t", "--format", "csv", "--location", ".", *CLOSED], "the format 'csv' of table 't'"),
        (["table", "add", "t", "--format", "parquet", "--location", "no", *CLOSED], "does not exist"),
        (["ls", "", *CLOSED], "a name must not be empty"),
        (["executor", "--slots", "0"], "--slots must be a whole number greater than 0"),
        (["ls", "--json=1", *CLOSED], "--json takes no value"),
        (["start", "noop", "t", "--arg", "@", *CLOSED], "--arg @ needs the name of a file"),
        (["dev", "--slots", "x"], "--slots must be a whole number greater than 0, not 'x'"),
        (["dev", "--ttl", "1"], "--ttl must be at least 2 seconds"),
        (["dev", "--port", "99999"], "--port must be a number from 1 to 65535"),
    ],
)
def test_a_usage_error_is_one_sentence_with_exit_code_2(
    argv: list[str],
    words: str,
    distop_command: Callable[..., Ran],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    monkeypatch.chdir(tmp_path)
    ran = distop_command(*argv)
    assert words in ran.sentence
    assert ran.code == 2
    assert list(tmp_path.iterdir()) == [], "no file was written"


@pytest.mark.parametrize(
    "argv",
    [
        ["ls"],
        ["show", "t/noop/1"],
        ["show", "t/noop/1", "--html", "page.html"],
        ["watch", "t/noop/1"],
        ["cancel", "t/noop/1"],
        ["start", "noop", "t", "--wait"],
        ["history"],
        ["nodes"],
        ["behaviors"],
        ["table", "ls"],
        ["table", "rm", "t"],
    ],
)
def test_an_unreachable_etcd_is_one_sentence_with_exit_code_3(
    argv: list[str], distop_command: Callable[..., Ran]
) -> None:
    ran = distop_command(*argv, *CLOSED, "--json")
    assert "etcd could not be reached within 0.2 s at 127.0.0.1:1" in ran.sentence
    assert ran.code == 3


def test_an_unknown_host_name_and_a_closed_port_have_different_errors(
    distop_command: Callable[..., Ran],
) -> None:
    """The domain `.invalid` never exists (RFC 2606)."""
    unknown = distop_command("ls", "--etcd", "nohost.invalid:2379", "--connect-timeout", "0.2")
    assert (unknown.code, "nothing answers" in unknown.sentence) == (3, False)
    assert "nohost.invalid:2379 (unknown host name" in unknown.sentence, unknown.sentence
    assert "127.0.0.1:1 (connection refused or timed out)" in distop_command("ls", *CLOSED).sentence


def test_doctor_checks_the_machine_even_without_etcd(distop_command: Callable[..., Ran]) -> None:
    ran = distop_command("doctor", *CLOSED, "--json")
    assert ran.code == 3
    assert not ran.json["ok"]
    assert {"etcd", "boot clock", "java", "spark"} <= {check["name"] for check in ran.json["checks"]}


def test_a_defect_is_one_sentence_without_debug_and_a_traceback_with_it(
    distop_command: Callable[..., Ran], monkeypatch: pytest.MonkeyPatch
) -> None:
    """No input is known to cause a defect, so the test adds one."""

    def broken(*_: object) -> None:
        raise ZeroDivisionError("by zero\nand more")

    monkeypatch.setattr(start, "parse_argument", broken)
    ran = distop_command("start", "a", "b")
    assert ran.code == 1
    assert "ZeroDivisionError: by zero" in ran.sentence
    assert "--debug" in ran.sentence
    ran = distop_command("start", "a", "--debug", "b")
    assert ran.code == 1
    assert "Traceback" in ran.err


def test_an_interrupt_has_exit_code_130(tmp_path: Path) -> None:
    pipe = tmp_path / "argument"
    os.mkfifo(pipe)
    # A shell starts background processes with this signal ignored.
    listening = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)"
    code = f"{listening}; from distop.cli.main import main; main()"
    words = [sys.executable, "-c", code, "start", "a", "b", "--arg", f"@{pipe}"]
    # The pipe opens once the command reads from it.
    with subprocess.Popen(words, stdout=-1, stderr=-1, text=True) as command, pipe.open("w"):
        command.send_signal(signal.SIGINT)
        out, err = command.communicate(timeout=60)
    assert (command.returncode, out, err) == (130, "", "interrupted\n")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", "is not valid JSON: Expecting property name"),
        ("[]", "there is no operation to start: the graph is empty"),
        ('[{"type": "noop"}]', "the graph[0]: an operation needs a table"),
        ('[{"type": "noop", "table": "t", "name": "a", "after": ["a"]}]', "form a cycle"),
        ('{"group": [{"type": "noop", "table": "t", "name": "a"}], "chain": []}', "the graph: a chain has no"),
        (json.dumps([{"type": "noop", "table": "t", "name": "a"}] * 2), "operations of the graph have the name 'a'"),
        ('{"type": "noop", "table": "t", "colour": 1}', "no field 'colour'"),
        ('{"type": "no type", "table": "t"}', "'no type' is not an operation type"),
    ],
)
def test_an_invalid_graph_is_one_sentence_with_exit_code_2(
    text: str, words: str, distop_command: Callable[..., Ran], tmp_path: Path
) -> None:
    file = tmp_path / "graph.json"
    file.write_text(text)
    ran = distop_command("start", "--graph", str(file), *CLOSED)
    assert words in ran.sentence
    assert ran.code == 2


def test_help_names_every_command(distop_command: Callable[..., Ran]) -> None:
    ran = distop_command("--help")
    assert ran.code == 0
    for name in ("dev executor table start ls show watch cancel pause resume history nodes behaviors doctor").split():
        assert f"\n  {name} " in ran.out
    assert "--json" in ran.out
    assert distop_command().code == 2
    for name in ("start", "executor", "dev", "table"):
        assert distop_command(name, "--help").code == 0
    assert distop_command("--version").out.startswith("distop ")


COMMANDS = (
    *(
        "dev executor serve start apply rerun prepare confirm abandon ls show why watch cancel pause resume alter"
    ).split(),
    *("history autopilot emit nodes drain behaviors access audit doctor").split(),
    *("table add", "table ls", "table rm"),
    *("policy set", "policy ls", "policy show", "policy pause", "policy resume", "policy rm"),
)


def test_help_describes_each_command_in_one_line(distop_command: Callable[..., Ran]) -> None:
    """No description is truncated, and the usage has the names that the docs use."""
    listed = distop_command("--help").out.partition("Commands:\n")[2].partition("\n\n")[0].splitlines()
    assert sorted(line.split()[0] for line in listed) == sorted({name.split()[0] for name in COMMANDS})
    assert not [line for line in listed if not line.endswith(".")]
    for name in COMMANDS:
        shown = distop_command(*name.split(), "--help")
        usage = shown.out.splitlines()[0]
        assert (shown.code, usage.startswith(f"Usage: distop {name} [OPTIONS]")) == (0, True), usage
        assert not set(usage) & set("{}<>")
        assert "<str>" not in shown.out
        assert "<int>" not in shown.out


def test_help_shows_an_optional_argument_in_one_pair_of_brackets(distop_command: Callable[..., Ran]) -> None:
    for name, usage in (("ls", "[TABLE]"), ("history", "[TABLE]"), ("audit", "[OP]"), ("behaviors", "[TYPE]")):
        shown = distop_command(name, "--help").out
        assert f" {usage}\n" in shown
        assert f"[{usage}]" not in shown


def test_help_loads_nothing_heavy() -> None:
    heavy = ("grpc", "pydantic", "pyarrow", "pyspark", "rich", "jsonschema", "jinja2", "distop.cli.page")
    code = (
        f"import sys; from distop.cli.main import run; run(['--help']); print([m for m in {heavy} if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.strip().endswith("[]")


def test_arguments_are_read_from_files(tmp_path: Path) -> None:
    file = tmp_path / "arg.json"
    file.write_text('{"a": "ü"}')
    assert parse_argument(f"@{file}") == {"a": "ü"}
    assert parse_argument(None) is None
    file.write_bytes(b"\xff")
    with pytest.raises(InvalidArgument, match="it is not UTF-8"):
        parse_argument(f"@{file}")
    file.write_text("{]")
    with pytest.raises(InvalidArgument, match=r"the argument in .*arg.json is not valid JSON: .* at line 1, column 2"):
        parse_argument(f"@{file}")


def test_options_are_parsed_and_durations_formatted() -> None:
    assert parse_options(["a=1", 'b={"c": true}', "d=text", "e=x=y"]) == {
        "a": 1,
        "b": {"c": True},
        "d": "text",
        "e": "x=y",
    }
    assert [duration(s) for s in (0.04, 12.4, 125, 11_400)] == ["0.0 s", "12 s", "2 min 05 s", "3 h 10 min"]
    assert json.loads(json.dumps(duration(None))) == ""


def test_control_characters_in_a_name_are_escaped(capsys: pytest.CaptureFixture[str]) -> None:
    console.cache_clear()
    table(("name",), [("a\nb\x1b[2J é 订",)], "")
    console.cache_clear()
    assert capsys.readouterr().out == "NAME\na\\nb\\x1b[2J é 订\n"


def test_columns_are_aligned_in_any_script(capsys: pytest.CaptureFixture[str]) -> None:
    console.cache_clear()
    table(("name", "n", "end"), [("订单 🛒", 7, "|"), ("orders", 12_345, "|"), ("e\u0301t\u00e9", 1, "|")], "", ("n",))
    console.cache_clear()
    lines = capsys.readouterr().out.splitlines()
    assert [cell_len(line[: line.index("|")]) for line in lines[1:]] == [cell_len("订单 🛒  12345  ")] * 3
    assert lines[0] == "NAME         N  END"
    assert lines[1] == "订单 🛒      7  |"


@pytest.mark.parametrize(
    "words", [("watch", "a b/noop/1"), ("drain", "it's"), ("cancel", "t/noop/1"), ("show", "$(x)")]
)
def test_suggested_commands_can_be_pasted(words: tuple[str, ...]) -> None:
    suggested = command(*words)
    assert suggested[0] == suggested[-1] == "`"
    echoed = subprocess.run(
        ["sh", "-c", f"printf '%s\\n' {suggested[1:-1]}"], capture_output=True, text=True, timeout=20, check=True
    )
    assert echoed.stdout.splitlines() == ["distop", *words]
