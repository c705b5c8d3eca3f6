"""Each action is recorded by the transaction that performs it, bounded, and logged as one line of JSON."""

from __future__ import annotations

import json
import logging
import stat
from dataclasses import replace
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from distop.client.async_operation import Operation
from distop.client.direct_backend import DirectBackend
from distop.daemon.action_log import ActionLog, write
from distop.errors import InvalidArgument
from distop.protocol import user_actions as a
from distop.protocol.executor_nodes import Drain
from distop.protocol.jobs import JobState
from distop.protocol.operation_options import Options
from distop.protocol.records import Cancel, History, State, TableRecord
from distop.protocol.txn import flaw
from distop.protocol.user_actions import NO_ACTIONS, Action, Actions
from distop.runtime import logs, secret_settings
from distop.services import draining, table_registry
from distop.services.submission.start_request import acting, whoami
from distop.store.connection_settings import EtcdConfig
from tests.support.world import TIME, World
from tests.unit.support.modelclient import ModelClient

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from distop.protocol.keys import Keys

ALTERED = Action.change(TIME, "alter", "ann", {"priority": 0, "max_jobs": 4}, {"priority": 9, "max_jobs": 4})


def test_an_action_lists_only_changed_fields() -> None:
    assert ALTERED.to_json() == {
        "time": TIME, "action": "alter", "by": "ann", "from": {"priority": 0}, "to": {"priority": 9}
    }  # fmt: skip


def test_a_record_keeps_the_last_actions_and_counts_dropped_ones() -> None:
    actions = NO_ACTIONS
    for n in range(30):
        actions = actions.and_then(Action(TIME, f"a{n}", "ann"))
    assert (len(actions.kept), actions.dropped, actions.count) == (a.MOST_ACTIONS, 10, 30)
    assert [one.action for one in actions.since(28)] == ["a28", "a29"]
    assert Actions.decode(actions.encode()) == actions


def test_a_record_of_actions_is_bounded_in_bytes() -> None:
    actions, change = NO_ACTIONS, {"options": {"x": "y" * 600_000}, **{f"f{n}": "z" * 400 for n in range(10)}}
    for n in range(30):
        former, actions = actions, actions.and_then(Action.change(TIME, f"a{n}", "b" * 10_000, {}, change))
        assert [one.action for one in actions.kept] == [f"a{k}" for k in range(actions.dropped, n + 1)]
        assert len(actions.kept) >= len(former.kept), "no more than necessary are dropped"
    assert len(actions.encode()) < a.MOST_BYTES + 1_000
    assert actions.kept[-1].to_json()["to"]["options"] == "(600008 bytes)"


def test_actions_are_recorded_under_the_etcd_user() -> None:
    etcd: Any = SimpleNamespace(config=EtcdConfig(username="ann", password="x"))
    assert acting(etcd) == "ann"
    etcd = SimpleNamespace(config=EtcdConfig())
    assert acting(etcd) == whoami()


@pytest.fixture
def world() -> World:
    world = World()
    world.join("a")
    return world


def test_an_end_that_has_not_seen_an_alteration_is_refused(world: World) -> None:
    ref = world.next_ref()
    world.do(world.start(ref))
    world.do(world.elect("a"))
    world.do(world.plan(ref, 1))
    world.do(world.claim(ref, "a", [0]))
    world.do(world.report(ref, 0, JobState.SUCCESS))
    before, late = world.mod(ref, "state"), world.finish_at_once(ref)
    world.do(world.alter(ref, Options(priority=9), NO_ACTIONS.and_then(ALTERED)))
    assert world.mod(ref, "state") > before
    assert world.op(ref).actions.kept == (ALTERED,)
    assert not world.store.apply(late).succeeded


async def test_who_paused_an_operation_and_who_resumed_it_is_recorded(world: World) -> None:
    ref = world.next_ref()
    world.do(world.start(ref))
    world.do(world.elect("a"))
    world.do(world.plan(ref, 1))
    etcd = Client("ann")
    etcd.store = world.store
    operation = Operation(DirectBackend(etcd, world.keys), ref)  # type: ignore[arg-type]
    await operation.pause()
    await operation.pause(now=True)
    await operation.resume()
    kept = [(one.action, one.by) for one in world.op(ref).actions.kept]
    assert kept == [("pause", "ann"), ("pause --now", "ann"), ("resume", "ann")]


def test_the_history_record_lists_all_actions_on_an_operation() -> None:
    cancel = Cancel("user", "not needed", by="ben", time=TIME)
    history = History(
        "t/noop/1", State.CANCELLED, TIME, TIME, 1, 0, 0, None, (), submitter="nightly", by="ann", cancel=cancel,
        actions=NO_ACTIONS.and_then(ALTERED), executor="ex",
    )  # fmt: skip
    assert History.decode(history.encode()) == history
    entries = a.of_operation(history.to_json())
    assert [(one["action"], one["by"]) for one in entries] == [
        ("start", "ann"), ("alter", "ann"), ("cancel", "ben"), ("finish", "")
    ]  # fmt: skip
    assert (entries[0]["submitter"], entries[2]["text"], entries[3]["executor"]) == ("nightly", "not needed", "ex")


def test_an_apply_action_lists_its_changes() -> None:
    report = {"verdict": "applied", "snapshot": "7", "changes": [{"check": "c", "column": "x", "same": False}]}
    who = {"submitter": "team", "by": "ann", "executor": "ex"}
    history = History("t/apply/1", State.SUCCESS, TIME, TIME, 1, 1, 0, report, (), **who)
    entry = a.of_operation(history.to_json())[-1]
    assert (entry["action"], entry["executor"], entry["changes"]) == ("apply", "ex", [{"check": "c", "column": "x"}])
    assert (entry["by"], entry["submitter"]) == ("ann", "team"), "who started it"
    finished = a.of_operation(replace(history, report={}).to_json())[-1]
    assert (finished["action"], finished["by"]) == ("finish", ""), "an end is nobody's deed"


class Client(ModelClient):
    """The model client of an etcd user."""

    def __init__(self, user: str) -> None:
        super().__init__()
        self.config = EtcdConfig(username=user, password="x")


def _table_actions(etcd: Client, keys: Keys) -> list[tuple[str, str, Any, Any]]:
    kv = etcd.store.get(keys.table_actions("t"))
    assert kv is not None
    kept = [one.to_json() for one in Actions.decode(kv.value).kept]
    return [(one["action"], one["by"], one["from"].get("location"), one["to"].get("location")) for one in kept]


async def test_changes_of_a_table_are_recorded_with_it_and_survive_its_removal(world: World) -> None:
    etcd: Any = Client("ann")
    keys, record = world.keys, TableRecord("t", "parquet", "/a", {})
    await table_registry.add(etcd, keys, record, replace=False, check=False)
    etcd.config = EtcdConfig(username="ben", password="x")
    await table_registry.add(etcd, keys, replace(record, location="/b"), replace=True, check=False)
    await table_registry.add(etcd, keys, replace(record, location="/b"), replace=True, check=False)  # changes nothing
    await table_registry.remove(etcd, keys, "t")
    assert _table_actions(etcd, keys) == [
        ("add_table", "ann", None, "/a"), ("change_table", "ben", "/a", "/b"), ("remove_table", "ben", "/b", None)
    ]  # fmt: skip
    assert len(etcd.committed) == 3
    assert all(any(put.key == keys.table_actions("t") for put in txn.success) for txn in etcd.committed)
    assert all(flaw(txn) is None for txn in etcd.committed)


async def test_drains_and_their_end_are_recorded_in_the_drain(world: World) -> None:
    etcd: Any = Client("ann")
    etcd.store = world.store
    await draining.drain(etcd, world.keys, "ex-a")
    await draining.undo(etcd, world.keys, "ex-a")
    kv = etcd.store.get(world.keys.drain("ex-a"))
    drain = Drain.decode(kv.value)
    assert [(one.action, one.by) for one in drain.actions.kept] == [("drain", "ann"), ("undrain", "ann")]
    assert (drain.drain, drain.by, len(etcd.committed)) == (False, "ann", 2)


@pytest.fixture
def file(tmp_path: Path) -> Iterator[Path]:
    path = tmp_path / "actions"
    yield path
    logs.configure("warning")


@pytest.mark.parametrize("style", ["text", "json"])
@pytest.mark.parametrize("level", ["debug", "warning", "error"])
def test_the_action_file_is_private_and_has_one_line_per_action(
    level: str, style: str, file: Path, world: World
) -> None:
    """Whatever the log leaves out."""
    logs.configure(level, style, str(file))
    who = logs.get("distop.executor", executor="ex", incarnation="i")
    write(who, [a.entry("table", "t\x1b[31m\n", {"time": TIME, "action": "add_table", "by": "ann\x07"})])
    ref = world.next_ref()
    world.do(world.start(ref))
    log, op = ActionLog(who), world.op(ref)
    log.see(op)
    log.see(op)
    op.actions = NO_ACTIONS.and_then(ALTERED)
    log.see(op)
    op.cancel = Cancel("user", "why", by="ben", time=TIME)
    log.see(op)
    text = file.read_text()
    lines = [json.loads(line) for line in text.splitlines()]
    assert [one["action"] for one in lines] == ["add_table", "start", "alter", "cancel"]
    assert all(one["logged"]["executor"] == "ex" for one in lines)
    assert lines[0]["name"] == "t\x1b[31m\n"
    assert not any(ord(c) < 32 and c != "\n" for c in text)
    assert stat.S_IMODE(file.stat().st_mode) == 0o600


def test_actions_are_in_a_json_log_but_not_in_a_text_log(capsys: pytest.CaptureFixture[str]) -> None:
    who = logs.get("distop.executor", executor="ex")
    entry = a.started("t/noop/1", TIME, "ann", "")
    try:
        for style in ("json", "text"):
            logs.configure("info", style)
            write(who, [entry])
        (line,) = capsys.readouterr().err.splitlines()
    finally:
        logs.configure("warning")
    logged = json.loads(line)
    assert (logged["logger"], logged["action"], logged["operation"]) == ("distop.actions", entry, "t/noop/1")
    assert not logging.getLogger("distop.actions").isEnabledFor(logging.INFO)


@pytest.mark.parametrize("secret", ["wasp-in-a-jar", 'wasp "in" a \\jar', "wasp in a jär", "wasp\tin\x1ba jar"])
def test_hole_6_neither_a_json_log_nor_the_action_file_contains_a_secret(
    secret: str, file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also where JSON spells it otherwise."""
    secret_settings.hide([secret])
    entry = {"time": TIME, "action": "cancel", "by": "ann", "text": f"it is {secret}!"}
    for style in ("json", "text"):
        logs.configure("info", style, str(file))
        who = logs.get("distop.executor", executor="ex")
        write(who, [a.entry("operation", "t/noop/1", entry)])
        who.info("it is %s!", secret)
    in_json, of_json, of_text = capsys.readouterr().err.splitlines()
    assert json.loads(in_json)["action"]["text"] == f"it is {secret_settings.REPLACEMENT}!"
    assert json.loads(of_json)["message"] == f"it is {secret_settings.REPLACEMENT}!"
    assert f"it is {secret_settings.REPLACEMENT}!" in of_text
    texts = [json.loads(line)["text"] for line in file.read_text().splitlines()]
    assert texts == [f"it is {secret_settings.REPLACEMENT}!"] * 2


def test_an_unwritable_action_file_is_named_in_the_error(tmp_path: Path) -> None:
    link = tmp_path / "link"
    link.symlink_to(tmp_path / "elsewhere")
    for path in (tmp_path, link):
        with pytest.raises(InvalidArgument, match="cannot write the file .* of actions-log"):
            logs.configure("info", "text", str(path))
    logs.configure("warning")
