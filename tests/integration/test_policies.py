"""Policies on real daemons and a real etcd, whose history is audited."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from distop.cli.main import run
from distop.errors import InvalidArgument, NotFound, UnknownBehavior
from distop.protocol.records import TableRecord

if TYPE_CHECKING:
    from distop.services.policies import PolicyStatus
    from tests.support.daemons import Daemons

pytestmark = [pytest.mark.etcd, pytest.mark.rotating]

TABLE = "lake.days"


class Lake:
    """A folder of Parquet files as a table, one partition for each day, and a daemon that offers ``noop``."""

    def __init__(self, group: Daemons, folder: Path) -> None:
        self.group, self.client, self.folder = group, group.client, folder
        self.add_day(1)
        self.client.add_table(TableRecord(TABLE, "parquet", str(folder)))
        (self.daemon,) = group.start("e1", options=("--poll", "1"))

    def add_day(self, day: int, files: int = 1) -> None:
        place = self.folder / f"day={day}"
        place.mkdir(parents=True, exist_ok=True)
        for n in range(files):
            pq.write_table(pa.table({"id": [day, n]}), place / f"{n}.parquet")

    def policy(self, name: str, **options: Any) -> PolicyStatus:
        return self.client.set_policy(name, TABLE, "noop", **options)

    def status(self, name: str) -> PolicyStatus:
        return self.client.policy(TABLE, name)

    def started(self, name: str) -> list[str]:
        return [one.op for one in self.status(name).state.kept if one.op]

    def await_started(self, name: str, count: int) -> list[str]:
        self.group.eventually(lambda: len(self.started(name)) >= count, f"{name} starts {count} operations", "e1")
        return self.started(name)

    def ended(self, op: str) -> str:
        return str(self.client.operation(op).wait(timeout=60).state)


@pytest.fixture
def lake(group: Daemons, tmp_path: Path) -> Lake:
    return Lake(group, tmp_path / "lake")


def test_C5_an_event_starts_an_operation_once(lake: Lake) -> None:
    client = lake.client
    lake.policy("on-load", on="event:loaded", priority=7, max_jobs=1)
    assert client.emit(TABLE, "other") == []
    assert client.emit(TABLE, "loaded", event_id="one") == ["on-load"]
    (op,) = lake.await_started("on-load", 1)
    assert lake.ended(op) == "success"
    assert client.operation(op).status().submitter == "policy:on-load"
    assert client.emit(TABLE, "loaded", event_id="one") == ["on-load"], "the same event, which was consumed"
    client.pause_policy(TABLE, "on-load")
    client.emit(TABLE, "loaded", event_id="two")
    client.emit(TABLE, "loaded", event_id="three")
    assert (lake.status("on-load").stage, lake.status("on-load").events) == ("paused", 2)
    lake.policy("on-load", on="event:loaded", priority=8)
    assert lake.status("on-load").stage == "paused"
    client.resume_policy(TABLE, "on-load")
    ops = lake.await_started("on-load", 2)
    assert lake.ended(ops[1]) == "success"
    assert lake.status("on-load").events == 0
    assert [one.triggers for one in lake.status("on-load").state.kept] == [
        ("event:loaded@one",),
        ("event:loaded@two", "event:loaded@three"),
    ]
    client.remove_policy(TABLE, "on-load")
    with pytest.raises(NotFound, match="has no policy 'on-load'"):
        client.policy(TABLE, "on-load")
    assert client.emit(TABLE, "loaded") == []


def test_C6_intervals_versions_and_partitions_are_triggers(lake: Lake) -> None:
    lake.policy("growing", on="version", when="new_partitions >= 2")
    lake.policy("hourly", every="1h")
    (first,) = lake.await_started("hourly", 1)
    assert lake.ended(first) == "success"
    lake.group.eventually(lambda: bool(lake.status("growing").state.kept), "the first version is evaluated", "e1")
    (before,) = lake.status("growing").state.kept
    assert (before.verdict, before.inputs["new_partitions"]) == ("no", 1)
    lake.add_day(2)
    (op,) = lake.await_started("growing", 1)
    assert lake.ended(op) == "success"
    assert lake.status("growing").state.kept[-1].inputs["new_partitions"] == 2
    assert lake.started("hourly") == [first]


def test_C2_a_condition_over_statistics_decides_about_the_start(lake: Lake) -> None:
    lake.policy("many-files", on="version", when="small_files > 3 and hours_since.noop > 1 and bytes < 1GiB")
    lake.group.eventually(lambda: bool(lake.status("many-files").state.kept), "the condition is evaluated", "e1")
    (found,) = lake.status("many-files").state.kept
    assert (found.verdict, found.inputs["small_files"]) == ("no", 1)
    assert found.inputs["hours_since.noop"] == "never"
    lake.add_day(2, files=5)
    (op,) = lake.await_started("many-files", 1)
    assert lake.ended(op) == "success"
    lake.add_day(3)
    lake.group.eventually(
        lambda: lake.status("many-files").state.kept[-1].inputs["small_files"] == 7, "the next version", "e1"
    )
    last = lake.status("many-files").state.kept[-1]
    assert (last.verdict, last.inputs["hours_since.noop"]) == ("no", 0.0)
    lake.policy("snapshots", every="1h", when="snapshots > 1")
    lake.group.eventually(lambda: bool(lake.status("snapshots").state.kept), "a missing statistic is recorded", "e1")
    (failed,) = lake.status("snapshots").state.kept
    assert (failed.verdict, failed.why) == ("failed", "the format of the table has no snapshots")


def test_C1_the_autopilot_makes_policies_of_published_types(lake: Lake, monkeypatch: pytest.MonkeyPatch) -> None:
    from distop.services import autopilot

    rule = autopilot.Rule("autopilot-noop", "noop", {}, ("parquet",), every="1d")
    monkeypatch.setattr(autopilot, "RULES", (rule, *autopilot.RULES))
    found = lake.client.autopilot(TABLE, dry_run=True)
    assert ([one.name for one in found.policies], found.written) == (["autopilot-noop"], False)
    assert lake.client.policies() == []
    assert "autopilot-compact" in found.left_out
    assert lake.client.autopilot(TABLE).written
    (op,) = lake.await_started("autopilot-noop", 1)
    assert lake.ended(op) == "success"


def test_another_executor_evaluates_after_the_death_of_the_first(lake: Lake) -> None:
    group = lake.group
    lake.policy("on-load", on="event:loaded")
    lake.client.emit(TABLE, "loaded")
    (first,) = lake.await_started("on-load", 1)
    assert lake.ended(first) == "success"
    group.start("e2", options=("--poll", "1"))
    lake.daemon.kill()
    lake.client.emit(TABLE, "loaded")
    group.eventually(lambda: len(lake.started("on-load")) == 2, "the other executor starts an operation", "e2")
    assert lake.ended(lake.started("on-load")[1]) == "success"


def test_policies_are_checked_when_they_are_set(lake: Lake) -> None:
    client = lake.client
    for options, why in (
        ({}, "needs a trigger"),
        ({"every": "soon"}, "the interval of a policy must be"),
        ({"every": 0.5}, "at least 1 s"),
        ({"on": "versions"}, "is not a trigger"),
        ({"every": 60, "when": "file > 5"}, "did you mean 'files'"),
        ({"every": 60, "arg": {"no_such": 1}}, "no_such"),
        ({"every": 60, "priority": 1_000}, "priority"),
    ):
        with pytest.raises(InvalidArgument, match=why):
            lake.policy("wrong", **options)
    with pytest.raises(UnknownBehavior, match="no behavior 'compactify'"):
        client.set_policy("wrong", TABLE, "compactify", every=60)
    with pytest.raises(NotFound, match="no table 'lake.day'"):
        client.set_policy("wrong", "lake.day", "noop", every=60)
    with pytest.raises(NotFound, match="no table"):
        client.emit("lake.day", "loaded")
    assert client.policies() == []


def test_the_commands_of_policies(lake: Lake, capsys: pytest.CaptureFixture[str]) -> None:
    def command(*words: str) -> Any:
        assert run(["--etcd", lake.group.endpoint, "--json", *words]) == 0
        return json.loads(capsys.readouterr().out)

    set_policy = ("policy", "set", "nightly", TABLE, "--every", "1d", "--on", "event:loaded", "--start", "noop")
    made = command(*set_policy, "--when", "files >= 1", "--priority", "3")
    assert (made["state"], made["every"], made["on"], made["priority"]) == ("active", 86_400.0, ["event:loaded"], 3)
    (op,) = lake.await_started("nightly", 1)
    shown = command("policy", "show", "nightly", TABLE)
    assert shown["op"] == op
    assert shown["evaluations"][0]["inputs"] == {"files": 1}
    assert [one["name"] for one in command("policy", "ls")] == ["nightly"]
    assert command("policy", "pause", "nightly", TABLE)["state"] == "paused"
    assert command("emit", TABLE, "loaded")["policies"] == ["nightly"]
    assert command("policy", "resume", "nightly", TABLE)["state"] == "active"
    assert command("policy", "rm", "nightly", TABLE)["removed"] is True
    assert command("autopilot", TABLE)["written"] is False
    assert run(["--etcd", lake.group.endpoint, "policy", "show", "nightly", TABLE]) == 4
    for words in (
        ("policy", "ls"),
        ("autopilot", TABLE, "--dry-run"),
        set_policy,
        ("policy", "show", "nightly", TABLE),
    ):
        assert run(["--etcd", lake.group.endpoint, *words]) == 0
    assert "every 1d, on event:loaded" in capsys.readouterr().out
    lake.client.remove_policy(TABLE, "nightly")
