"""What a daemon and its child write down: a line for each record, which attempt it is about, a child's last words."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any

from tests.support.behaviors import sample_env  # noqa: F401

if TYPE_CHECKING:
    from pathlib import Path

    from distop.services.operation_results import OperationResult
    from tests.support.daemons import Daemon, Daemons

TABLE = "t"
TRACEBACK = "Traceback (most recent call last):"
WORDS = "OSError: the disk is on fire"
"""The last line that a job prints before it ends its process."""


def broken(group: Daemons, style: str, env: dict[str, str]) -> tuple[Daemon, OperationResult]:
    """A daemon that logs so, after an operation with a job that broke twice, one that killed its child twice, and one
    that told what it was doing.
    """
    (ann,) = group.start("ann", options=("--log-format", style), env=env)
    arg = {"names": ["a", "b", "c"], "does": {"a": "error", "b": "last-words", "c": "status"}}
    operation = group.client.start_operation("sample", TABLE, arg, retry_attempts=2, failure_policy="collect_all")
    result = operation.wait(60)
    assert (result.state, result.jobs["failed"]) == ("failed", 2), group.tails()
    assert ann.stop() == 0
    return ann, result


def documents(daemon: Daemon) -> list[dict[str, Any]]:
    """Each line that it has written, to wherever, as the JSON that it is."""
    return [json.loads(line) for line in daemon.log.read_text().splitlines()]


def children(work_dir: Path) -> str:
    """What all children of an executor have written."""
    return "".join(path.read_text() for path in sorted((work_dir / "logs").glob("child-*.log")))


def test_each_line_is_json_and_a_retry_names_its_attempt(
    group: Daemons,
    sample_env: dict[str, str],  # noqa: F811
) -> None:
    ann, result = broken(group, "json", sample_env)
    lines = documents(ann)
    assert all({"time", "level", "logger", "message"} <= line.keys() for line in lines)
    retries = [line for line in lines if line["message"].startswith("Job attempt failed; retrying in ")]
    assert sorted((line["operation"], line["partition"], line["attempt"], line["executor"]) for line in retries) == [
        (result.op, 0, 1, "ann"),
        (result.op, 1, 1, "ann"),
    ]
    told = [line for line in lines if line["message"] == "half way"]
    assert {(line["operation"], line["partition"], line["attempt"]) for line in told} == {(result.op, 2, 1)}
    deaths = [line for line in lines if line["message"].startswith("the worker process died")]
    assert deaths
    assert {(line["level"], line["executor"]) for line in deaths} == {("warning", "ann")}
    assert len({line["incarnation"] for line in (*retries, *deaths)}) == 1


def test_the_last_words_of_a_child_are_kept(
    group: Daemons,
    sample_env: dict[str, str],  # noqa: F811
) -> None:
    ann, result = broken(group, "text", sample_env)
    (error,) = (one for one in result.errors if one["partition"] == "b")
    assert "exit code 3" in error["text"]
    assert WORDS not in error["text"], "jobs of other tables are in the same child"
    assert WORDS in ann.log.read_text()
    assert WORDS in children(group.folder / "ann").splitlines()


def test_no_traceback_is_among_the_lines_for_people(
    group: Daemons,
    sample_env: dict[str, str],  # noqa: F811
) -> None:
    ann, _ = broken(group, "text", sample_env)
    log = ann.log.read_text()
    assert TRACEBACK in children(group.folder / "ann"), "there was one to be told"
    assert "Traceback" not in log
    record = re.compile(r"\d{4}-\d\d-\d\dT\S+Z (INFO   |WARNING|ERROR  ) \S")
    assert [line for line in log.splitlines() if not record.match(line)] == []
    assert f"the end of its log: … {WORDS}" in log


def test_the_last_line_of_a_daemon_that_is_refused_is_json_too(group: Daemons) -> None:
    group.start("ann")
    bob = group.spawn("bob", "--work-dir", str(group.folder / "ann"), "--log-format", "json")
    assert bob.process.wait(30) == 5, group.tails()
    last = documents(bob)[-1]
    assert last["level"] == "error"
    assert "is in use by a running executor" in last["message"]
