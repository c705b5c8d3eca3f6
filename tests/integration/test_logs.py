"""The logs of a daemon and its child: one line for each record, the attempt of a record, a child's last output."""

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
LAST_OUTPUT = "OSError: the disk is on fire"
"""The last line of output of a job that ends its process."""


def daemon_with_failures(group: Daemons, style: str, env: dict[str, str]) -> tuple[Daemon, OperationResult]:
    """A stopped daemon with this log style, and the result of its operation.

    One job failed twice, one killed its child twice, and one reported its status.
    """
    (ann,) = group.start("ann", options=("--log-format", style), env=env)
    arg = {"names": ["a", "b", "c"], "does": {"a": "error", "b": "last-words", "c": "status"}}
    operation = group.client.start_operation("sample", TABLE, arg, retry_attempts=2, failure_policy="collect_all")
    result = operation.wait(60)
    assert (result.state, result.jobs["failed"]) == ("failed", 2), group.tails()
    assert ann.stop() == 0
    return ann, result


def documents(daemon: Daemon) -> list[dict[str, Any]]:
    """Each line of the daemon's output, parsed as JSON."""
    return [json.loads(line) for line in daemon.log.read_text().splitlines()]


def children(work_dir: Path) -> str:
    """The output of all children of an executor."""
    return "".join(path.read_text() for path in sorted((work_dir / "logs").glob("child-*.log")))


def test_each_line_is_json_and_a_retry_names_its_attempt(
    group: Daemons,
    sample_env: dict[str, str],  # noqa: F811
) -> None:
    ann, result = daemon_with_failures(group, "json", sample_env)
    lines = documents(ann)
    assert all({"time", "level", "logger", "message"} <= line.keys() for line in lines)
    retries = [line for line in lines if line["message"].startswith("Job attempt failed; retrying in ")]
    assert sorted((line["operation"], line["partition"], line["attempt"], line["executor"]) for line in retries) == [
        (result.op, 0, 1, "ann"),
        (result.op, 1, 1, "ann"),
    ]
    status_lines = [line for line in lines if line["message"] == "half way"]
    assert {(line["operation"], line["partition"], line["attempt"]) for line in status_lines} == {(result.op, 2, 1)}
    deaths = [line for line in lines if line["message"].startswith("the worker process died")]
    assert deaths
    assert {(line["level"], line["executor"]) for line in deaths} == {("warning", "ann")}
    assert len({line["incarnation"] for line in (*retries, *deaths)}) == 1


def test_the_last_output_of_a_child_is_logged(
    group: Daemons,
    sample_env: dict[str, str],  # noqa: F811
) -> None:
    ann, result = daemon_with_failures(group, "text", sample_env)
    (error,) = (one for one in result.errors if one["partition"] == "b")
    assert "exit code 3" in error["text"]
    assert LAST_OUTPUT not in error["text"], "jobs of other tables are in the same child"
    assert LAST_OUTPUT in ann.log.read_text()
    assert LAST_OUTPUT in children(group.folder / "ann").splitlines()


def test_the_text_log_has_no_traceback(
    group: Daemons,
    sample_env: dict[str, str],  # noqa: F811
) -> None:
    ann, _ = daemon_with_failures(group, "text", sample_env)
    log = ann.log.read_text()
    assert TRACEBACK in children(group.folder / "ann"), "the child printed a traceback"
    assert "Traceback" not in log
    record = re.compile(r"\d{4}-\d\d-\d\dT\S+Z (INFO   |WARNING|ERROR  ) \S")
    assert [line for line in log.splitlines() if not record.match(line)] == []
    assert f"the end of its log: … {LAST_OUTPUT}" in log


def test_the_last_line_of_a_daemon_that_cannot_start_is_json(group: Daemons) -> None:
    group.start("ann")
    bob = group.spawn("bob", "--work-dir", str(group.folder / "ann"), "--log-format", "json")
    assert bob.process.wait(30) == 5, group.tails()
    last = documents(bob)[-1]
    assert last["level"] == "error"
    assert "is in use by a running executor" in last["message"]
