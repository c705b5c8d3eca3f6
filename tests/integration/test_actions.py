"""Who did what, with a real daemon on a real etcd: in the history, on the command line, and in the executor's file."""

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


def listed(group: Daemons, *options: str) -> list[dict[str, Any]]:
    ran = distop_process(group, "history", "--actions", "--json", *options)
    assert ran.returncode == 0, ran.stderr
    found: list[dict[str, Any]] = json.loads(ran.stdout)
    return found


def test_each_action_is_in_the_history_and_in_the_file_of_the_executor(group: Daemons, tmp_path: Path) -> None:
    file, me = tmp_path / "actions", whoami()
    group.start("e1", env={"DISTOP_ACTIONS_LOG": str(file)})
    client = group.client
    client.add_table(TableRecord("other", "parquet", "/a"), check=False)
    client.add_table(TableRecord("other", "parquet", "/b"), check=False, replace=True)
    client.remove_table("other")
    op = client.start_operation("noop", TABLE, {"jobs": 40, "sleep": 0.3}, max_jobs=1, submitter="nightly")
    group.eventually(lambda: (op.status().jobs.get("running") or 0) > 0, "it runs")
    op.alter(priority=9)
    op.pause()
    op.resume()
    (*_, start) = listed(group, "--op", op.ref)
    assert (start["action"], start["by"], start["submitter"]) == ("start", me, "nightly")
    op.cancel("not needed")
    record = op.wait(LIMIT).record
    assert [one["action"] for one in record["actions"]] == ["alter", "pause", "resume"]
    assert (record["cancel"]["by"], record["cancel"]["text"], record["executor"]) == (me, "not needed", "e1")

    told = listed(group, "--op", op.ref)
    names = ["finish", "cancel", "resume", "pause", "alter", "start"]
    assert [one["action"] for one in told] == names
    assert (told[4]["from"], told[4]["to"], told[4]["by"]) == ({"priority": 0}, {"priority": 9}, me)
    shown = distop_process(group, "show", op.ref).stdout
    assert "priority 0 → 9" in shown
    assert "user, not needed" in shown

    client.drain("e1", wait=True, timeout=LIMIT)
    client.undrain("e1")
    every = listed(group)
    of_table = [one["action"] for one in every if one["name"] == "other"]
    assert of_table == ["remove_table", "change_table", "add_table"], "they survive the table"
    assert [one["action"] for one in every if one["kind"] == "executor"] == ["undrain", "drain"]
    assert {one["by"] for one in every if one["action"] != "finish"} == {me}

    def lines() -> list[dict[str, Any]]:
        return [json.loads(line) for line in file.read_text().splitlines()]

    wanted = {"add_table", "change_table", "remove_table", "drain", "undrain", *names}
    group.eventually(lambda: {one["action"] for one in lines()} >= wanted, "all are in the file")
    assert all(one["logged"]["executor"] == "e1" for one in lines())
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
