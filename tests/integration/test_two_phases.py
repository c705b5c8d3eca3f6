"""Two-phase submission on real daemons; etcd's history is audited."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from distop.errors import InvalidArgument, NotAllowed, NotFound
from distop.services.submission.start_request import whoami
from tests.support.behaviors import ROOT, install, python_path
from tests.support.command import distop_command
from tests.support.daemons import distop_process
from tests.support.scripted_server import Server, answering, ok

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from distop.blocking import Operation
    from tests.support.command import Ran
    from tests.support.daemons import Daemon, Daemons

__all__ = ["distop_command"]

pytestmark = [pytest.mark.etcd, pytest.mark.rotating]

TABLE = "t"
LIMIT = 60
SOON = {"verify_after": 0.2, "verify_pause": 0.1}
YES, NO = ok(b'{"completed": true}'), ok(b'{"completed": false}')

VERIFIERS = """\
import os, time
from pathlib import Path

def orders(external_id, op):
    with open(os.environ["ASKED"], "a") as asked:
        asked.write(f"{external_id} {op}\\n")
    return external_id == "tx-done"

def hangs(external_id, op):
    time.sleep(3600)

def dies(external_id, op):
    os._exit(1)
"""
ENTRY_POINTS = """\
[distop.verifiers]
orders = some_verifiers:orders
hangs = some_verifiers:hangs
dies = some_verifiers:dies
gone = some_verifiers:gone
"""


@pytest.fixture
def verifiers(tmp_path: Path) -> dict[str, str]:
    """The environment of executors with installed verifiers."""
    folder = tmp_path / "site"
    install(folder, "some-verifiers", ENTRY_POINTS)
    (folder / "some_verifiers.py").write_text(VERIFIERS)
    return python_path(folder, ROOT) | {"ASKED": str(tmp_path / "asked")}


def prepare(group: Daemons, external_id: str = "tx-17", **options: object) -> Operation:
    return group.client.prepare_operation("noop", TABLE, {}, external_id=external_id, **options)


def test_C13_a_prepared_operation_starts_only_after_its_confirmation(group: Daemons) -> None:
    group.start("e1")
    op = prepare(group, verify_after=3600)
    dependent = group.client.start_operation("noop", TABLE, {}, after=[op])
    other = group.client.start_operation("noop", TABLE, {})
    assert other.wait(LIMIT).state == "success", "other operations are not blocked"
    assert op.status().state == "pending"
    assert prepare(group, verify_after=3600).ref == op.ref
    with pytest.raises(InvalidArgument, match="by another request"):
        prepare(group, verify_after=7)
    assert group.client.confirm("tx-17").ref == op.ref
    assert op.wait(LIMIT).state == "success"
    assert dependent.wait(LIMIT).state == "success"
    op.confirm()
    record = group.client.confirm("tx-17").wait(LIMIT).record
    assert record["state"] == "success"
    assert [(one["action"], one["by"]) for one in record["actions"]] == [("confirm", whoami())]


def test_C13_an_abandoned_operation_never_runs(group: Daemons) -> None:
    group.start("e1")
    op = prepare(group, verify_after=3600)
    op.abandon("the order was withdrawn")
    ended = op.wait(LIMIT)
    assert (ended.state, ended.record["cancel"]["text"], ended.alarm) == ("cancelled", "the order was withdrawn", "")
    with pytest.raises(NotAllowed, match="will never run: the order was withdrawn"):
        group.client.confirm("tx-17")
    assert group.client.history(alarms=True) == []


@pytest.mark.parametrize("answer", [YES, NO])
def test_C14_a_verifier_url_decides_on_an_unconfirmed_operation(group: Daemons, answer: bytes) -> None:
    with answering(answer) as server:
        group.start("e1", "e2", options=("--verifier-url", server.url))
        op = prepare(group, verify=server.url, **SOON)
        ended = op.wait(LIMIT)
        assert len(server.requests) == 1, "the verifier got one request"
        assert server.requests[0].startswith("GET /check?external_id=tx-17&op=t%2Fnoop%2F1 ")
    if answer is YES:
        assert (ended.state, ended.alarm) == ("success", "")
        assert group.client.confirm("tx-17").ref == op.ref
    else:
        assert ended.state == "cancelled"
        assert ended.alarm == ended.record["cancel"]["text"]
        assert "its sender's transaction was not completed" in ended.alarm
        assert [one.op for one in group.client.history(alarms=True)] == [op.ref]
        why = "will never run: 'tx-17' was not confirmed: .*its sender's transaction was not completed"
        with pytest.raises(NotAllowed, match=why):
            group.client.confirm("tx-17")
        group.eventually(lambda: "ERROR" in group.tails(), "a daemon logs the alarm")


def test_hole_5_only_listed_hosts_are_called_and_no_remote_text_is_kept(group: Daemons) -> None:
    with answering(b"HTTP/1.1 500 TOP-SECRET\r\n\r\n") as listed, answering(YES) as other:
        group.start("e1", options=("--verifier-url", listed.url))
        denied = prepare(group, "tx-1", verify=other.url, verify_attempts=2, **SOON).wait(LIMIT)
        failing = prepare(group, "tx-2", verify=listed.url, verify_attempts=2, **SOON).wait(LIMIT)
        assert denied.alarm.endswith("(last attempt: not allowed)")
        assert failing.alarm.endswith("(last attempt: status 5xx)")
        assert (other.requests, len(listed.requests)) == ([], 2)
        assert "TOP-SECRET" not in str(failing.record) + group.tails()


def ten_gigabytes(server: Server) -> Iterator[bytes]:
    yield b"HTTP/1.1 200 OK\r\nContent-Length: 10000000000\r\n\r\n"
    while not server.closed.is_set():
        yield b" " * 65_536


@pytest.mark.parametrize("answer", [ok(b"nonsense"), ten_gigabytes], ids=["nonsense", "10 GB"])
def test_C14_a_verifier_url_with_invalid_answers_is_retried_and_then_raises_an_alarm(
    group: Daemons, answer: object
) -> None:
    with answering(answer) as server:  # type: ignore[arg-type]
        group.start("e1", options=("--verifier-url", server.url))
        ended = prepare(group, verify=server.url, verify_attempts=3, **SOON).wait(LIMIT)
        assert len(server.requests) == 3
    assert ended.state == "cancelled"
    assert "asked 3 times, did not answer" in ended.alarm
    assert group.client.start_operation("noop", TABLE, {}).wait(LIMIT).state == "success", (
        "the node still runs operations"
    )


def test_C14_registered_functions_decide_on_unconfirmed_operations(group: Daemons, verifiers: dict[str, str]) -> None:
    group.start("e1", env=verifiers)
    done, undone = prepare(group, "tx-done", verify="orders", **SOON), prepare(group, "tx-not", verify="orders", **SOON)
    undefined = prepare(group, "tx-3", verify="gone", verify_attempts=2, **SOON)
    missing = prepare(group, "tx-4", verify="missing", verify_attempts=2, **SOON)
    assert done.wait(LIMIT).state == "success"
    assert undone.wait(LIMIT).alarm.endswith("orders reports that its sender's transaction was not completed")
    calls = Path(verifiers["ASKED"]).read_text().split("\n")
    assert sorted(filter(None, calls)) == [f"tx-done {done.ref}", f"tx-not {undone.ref}"]
    assert "last attempt: failed" in undefined.wait(LIMIT).alarm
    assert "last attempt: not installed" in missing.wait(LIMIT).alarm


def test_C14_a_function_that_kills_its_process_fails_and_jobs_continue(
    group: Daemons, verifiers: dict[str, str]
) -> None:
    group.start("e1", env=verifiers)
    running = group.client.start_operation("noop", TABLE, {"sleep": 3})
    ended = prepare(group, verify="dies", verify_attempts=2, **SOON).wait(LIMIT)
    assert "last attempt: failed" in ended.alarm
    assert running.wait(LIMIT).state == "success"


def test_C14_an_unconfirmed_operation_without_a_verifier_raises_an_alarm(group: Daemons) -> None:
    group.start("e1")
    op = prepare(group, verify_after=0.2)
    assert "it names no verifier to ask" in op.wait(LIMIT).alarm
    shown = distop_process(group, "show", op.ref)
    assert shown.returncode == 0
    assert "alarm" in shown.stdout
    listed = distop_process(group, "history", "--alarms")
    assert op.ref in listed.stdout
    assert "it names no verifier to ask" in listed.stdout


def test_C14_another_executor_calls_the_verifier_after_the_first_one_dies(group: Daemons) -> None:
    """The attempt of the dead executor counts, and after a while another executor makes the next."""
    executors: list[Daemon] = []

    def kill_first_caller(server: Server) -> Iterator[bytes]:
        if len(server.requests) == 1:
            executors[0].kill()
            yield b""
        else:
            yield YES

    with answering(kill_first_caller) as server:
        executors += group.start("e1", "e2", options=("--verifier-url", server.url))
        op = prepare(group, verify=server.url, **SOON)
        group.eventually(lambda: len(server.requests) == 1, "an executor calls the verifier")
        assert op.wait(110).state == "success"


PREPARES = """
import sys
import distop
client = distop.connect(sys.argv[1])
print("connected", flush=True)
for n in range(int(sys.argv[2]), int(sys.argv[2]) + 1000):
    op = client.prepare_operation("noop", "t", {}, external_id=f"tx-{n}", verify=sys.argv[3], verify_after=0.5)
    print("prepared", n, op.ref, flush=True)
    client.confirm(f"tx-{n}")
    print("confirmed", n, op.ref, flush=True)
"""


def test_C13_after_a_killed_caller_confirmed_operations_run_and_others_end(group: Daemons) -> None:
    """All operations that it reported as confirmed succeed. The verifier rejects the others, which raise an alarm."""
    with answering(NO) as server:
        group.start("e1", options=("--verifier-url", server.url))
        reported: dict[str, str] = {}
        for first in (0, 1_000, 2_000):
            command = [sys.executable, "-c", PREPARES, group.endpoint, str(first), server.url]
            with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
                assert process.stdout is not None
                for number, line in enumerate(process.stdout):
                    reported |= _parse_report(line)
                    if number == 5 + first // 500:
                        os.kill(process.pid, signal.SIGKILL)
        group.eventually(lambda: group.client.operations() == [], "all operations have ended", "e1")
        ended = {one.op: one.state for one in group.client.history(TABLE)}
        assert len(reported) >= 9
        for op, last_report in reported.items():
            if last_report == "confirmed":
                assert ended[op] == "success", op
        unconfirmed = [op for op, state in ended.items() if state == "cancelled"]
        assert all(one.alarm for one in group.client.history(TABLE) if one.state == "cancelled")
        assert len(unconfirmed) <= 3, "at most the last one of each killed caller"
        assert not [op for op in unconfirmed if reported.get(op) == "confirmed"]


def _parse_report(line: str) -> dict[str, str]:
    words = line.split()
    return {words[2]: words[0]} if len(words) == 3 else {}


def test_C13_operations_are_prepared_confirmed_and_abandoned_on_the_command_line(
    group: Daemons, distop_command: Callable[..., Ran]
) -> None:
    def run(*words: str) -> Ran:
        return distop_command(*words, "--etcd", group.endpoint)

    group.start("e1")
    prepares = ("prepare", "noop", TABLE, "--verify-after", "3600", "--external-id")
    assert (made := run(*prepares, "tx-1")).out == "prepared t/noop/1\n", made.err
    assert run(*prepares, "tx-1").out == "already prepared t/noop/1\n"
    assert run("confirm", "--external-id", "tx-1").out == "confirmed t/noop/1\n"
    assert group.client.operation("t/noop/1").wait(LIMIT).state == "success"
    assert run("confirm", "t/noop/1").code == 0
    assert "can no longer be abandoned" in (refused := run("abandon", "t/noop/1")).sentence
    assert refused.code == 5
    assert run(*prepares, "tx-2", "--json").json["op"] == "t/noop/2"
    assert run("abandon", "--external-id", "tx-2", "--reason", "no").out == "abandoned t/noop/2\n"
    assert run("confirm", "--external-id", "tx-2").code == 5
    assert run("confirm", "--external-id", "tx-3").code == 4
    for words in (("confirm",), ("abandon", "t/noop/1", "--external-id", "x"), ("confirm", "nonsense")):
        assert run(*words).code == 2
    later = ("--label", "team=a", "--delay", "3600", "--priority", "7", "--max-jobs", "2", "--where", "zone=b")
    assert run(*prepares, "tx-5", *later, "--after-end", "t/noop/1").out == "prepared t/noop/3\n"
    assert run("confirm", "--external-id", "tx-5").code == 0
    shown = run("show", "t/noop/3", "--json").json
    assert (shown["labels"], shown["state"]) == ({"team": "a"}, "pending")
    assert "waits" in run("why", "t/noop/3").out
    assert run("cancel", "t/noop/3").code == 0
    for words, sentence in ((("--where", "a"), "--where takes a label"), (("--at", "never"), "is not a start time")):
        invalid = run(*prepares, "tx-6", *words)
        assert (invalid.code, sentence in invalid.sentence) == (2, True)
    secret = run(*prepares, "tx-4", "--verify", "https://a:b@c/")
    assert secret.code == 2
    assert "neither a user, a password nor parameters" in secret.sentence


def test_C13_a_refused_start_prepares_no_operation(group: Daemons) -> None:
    group.start("e1")
    with pytest.raises(InvalidArgument):
        group.client.prepare_operation("noop", TABLE, {"colour": "red"}, external_id="tx-1")
    with pytest.raises(NotFound):
        group.client.confirm("tx-1")
    assert prepare(group, "tx-1").ref == "t/noop/1"
    group.client.prepared_operation("tx-1").abandon()
