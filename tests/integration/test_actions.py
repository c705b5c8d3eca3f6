"""The record of users' actions, from a real daemon: in the history, on the command line and in the executor's file."""

from __future__ import annotations

import json
import stat
from typing import TYPE_CHECKING, Any

import pytest

from distop.protocol.records import TableRecord
from distop.services.submission.start_request import whoami
from tests.support.daemons import distop_process

if TYPE_CHECKING:
    from pathlib import Path

    from tests.support.daemons import Daemons

pytestmark = pytest.mark.etcd

TABLE = "t"
LIMIT = 90


def recorded_actions(group: Daemons, *options: str) -> list[dict[str, Any]]:
    ran = distop_process(group, "history", "--actions", "--json", *options)
    assert ran.returncode == 0, ran.stderr
    found: list[dict[str, Any]] = json.loads(ran.stdout)
    return found


def test_each_action_is_in_the_history_and_in_the_executors_file(group: Daemons, tmp_path: Path) -> None:
    actions_file, me = tmp_path / "actions", whoami()
    group.start("e1", env={"DISTOP_ACTIONS_LOG": str(actions_file)})
    client = group.client
    client.add_table(TableRecord("other", "parquet", "/a"), check=False)
    client.add_table(TableRecord("other", "parquet", "/b"), check=False, replace=True)
    client.remove_table("other")
    op = client.start_operation("noop", TABLE, {"jobs": 40, "sleep": 0.3}, max_jobs=1, submitter="nightly")
    group.eventually(lambda: (op.status().jobs.get("running") or 0) > 0, "a job runs")
    op.alter(priority=9)
    op.pause()
    op.resume()
    (*_, start) = recorded_actions(group, "--op", op.ref)
    assert (start["action"], start["by"], start["submitter"]) == ("start", me, "nightly")
    op.cancel("not needed")
    record = op.wait(LIMIT).record
    assert [one["action"] for one in record["actions"]] == ["alter", "pause", "resume"]
    assert (record["cancel"]["by"], record["cancel"]["text"], record["executor"]) == (me, "not needed", "e1")

    actions = recorded_actions(group, "--op", op.ref)
    names = ["finish", "cancel", "resume", "pause", "alter", "start"]
    assert [one["action"] for one in actions] == names
    assert (actions[4]["from"], actions[4]["to"], actions[4]["by"]) == ({"priority": 0}, {"priority": 9}, me)
    shown = distop_process(group, "show", op.ref).stdout
    assert "priority 0 → 9" in shown
    assert "user, not needed" in shown

    client.drain("e1", wait=True, timeout=LIMIT)
    client.undrain("e1")
    every = recorded_actions(group)
    of_other_table = [one["action"] for one in every if one["name"] == "other"]
    assert of_other_table == ["remove_table", "change_table", "add_table"], (
        "the actions on a table are kept after its removal"
    )
    assert [one["action"] for one in every if one["kind"] == "executor"] == ["undrain", "drain"]
    assert {one["by"] for one in every if one["action"] != "finish"} == {me}

    def logged_actions() -> list[dict[str, Any]]:
        return [json.loads(line) for line in actions_file.read_text().splitlines()]

    wanted = {"add_table", "change_table", "remove_table", "drain", "undrain", *names}
    group.eventually(lambda: {one["action"] for one in logged_actions()} >= wanted, "all actions are in the file")
    assert all(one["logged"]["executor"] == "e1" for one in logged_actions())
    assert stat.S_IMODE(actions_file.stat().st_mode) == 0o600
