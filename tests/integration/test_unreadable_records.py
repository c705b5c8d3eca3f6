"""Unreadable records, from a later release or another program: only calls that need one fail, and they name its key."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from distop.protocol.records import OperationRef
from tests.integration.cli_namespace import TABLE, CliNamespace, end
from tests.support.command import distop_command
from tests.support.etcd import shared_etcd

if TYPE_CHECKING:
    from collections.abc import Callable

    from distop.store.embedded import EmbeddedEtcd
    from tests.integration.scripted_daemons import ScriptedDaemons
    from tests.support.command import Ran

__all__ = ["distop_command", "shared_etcd"]

pytestmark = pytest.mark.etcd


@pytest.fixture
def cli(shared_etcd: EmbeddedEtcd, distop_command: Callable[..., Ran]) -> CliNamespace:
    return CliNamespace(shared_etcd.endpoint, distop_command)


def put(cli: CliNamespace, key: Callable[[Any], str], value: bytes) -> str:
    """Write a value to a key of the namespace, and return the key."""
    keys: list[str] = []

    async def write(scripted: ScriptedDaemons) -> None:
        keys.append(key(scripted.keys))
        await scripted.put(keys[0], value)

    cli.with_daemons(write)
    return keys[0]


def only_warnings(text: str) -> list[str]:
    lines = text.splitlines()
    assert all("Skipping an unreadable record: " in line for line in lines), text
    return lines


OP = OperationRef(TABLE, "noop", "", 1)
NEXT = OperationRef(TABLE, "noop", "", 2)


def test_an_invalid_history_record_is_skipped_in_lists_and_named_in_errors(cli: CliNamespace) -> None:
    cli.distop("start", "noop", TABLE)
    cli.with_daemons(lambda scripted: end(scripted, str(OP)))
    key = put(cli, lambda keys: keys.history(NEXT), b"{oops")
    listed = cli.distop("history", "--json")
    assert [record["op"] for record in listed.json] == [str(OP)]
    (warning,) = only_warnings(listed.err)
    assert f"the record at {key} cannot be read: b'{{oops' is not a valid value" in warning
    assert [r["op"] for r in cli.distop("history", "--limit", "1", "--json").json] == [str(OP)], (
        "the limit counts readable records"
    )
    for command in (("show",), ("watch",), ("cancel",), ("rerun",)):
        ran = cli.distop(*command, str(NEXT))
        assert (ran.code, key in ran.sentence) == (3, True), command
    doctor = cli.distop("doctor", "--json")
    findings = {check["name"]: check for check in doctor.json["checks"]}
    assert doctor.code == 1
    assert findings["keys"]["status"] == "ok"
    assert (findings["records"]["status"], key in findings["records"]["text"]) == ("error", True)


def test_a_table_record_of_a_later_release_is_named_in_errors(cli: CliNamespace) -> None:
    key = put(cli, lambda keys: keys.table("v2"), b'{"v":2,"newname":"x"}')
    ran = cli.distop("start", "noop", "v2")
    assert (ran.code, ran.sentence) == (
        3,
        f"the record at {key} cannot be read: "
        "it has version 2, but this release only knows version 1: use a later release",
    )
    listed = cli.distop("table", "ls", "--json")
    assert [table["name"] for table in listed.json] == [TABLE]
    assert len(only_warnings(listed.err)) == 1


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (b'{"v":2}', "version 2"),
        (b'{"v":1}', "the field 'type_name' is missing"),
        (b'{"v":1,"type_name":7}', "'type_name' is 7"),
        (b"[]", "b'[]' is not a valid value"),
    ],
)
def test_an_invalid_declaration_is_named_in_errors(cli: CliNamespace, value: bytes, words: str) -> None:
    key = put(cli, lambda keys: keys.behavior("foo"), value)
    ran = cli.distop("start", "foo", TABLE)
    assert (ran.code, key in ran.sentence, words in ran.sentence) == (3, True, True), ran.sentence
    listed = cli.distop("behaviors", "--json")
    assert [b["type_name"] for b in listed.json] == ["noop", "purge"]
    assert len(only_warnings(listed.err)) == 1
    assert "foo" in cli.distop("start", "bar", TABLE).sentence, "an unreadable declaration counts as published"


def test_invalid_node_and_operation_records_are_skipped_in_lists(cli: CliNamespace) -> None:
    cli.distop("start", "noop", TABLE)
    node = put(cli, lambda keys: keys.node("n2"), b'{"v":1,"state":"dancing"}')
    listed = cli.distop("nodes", "--json")
    assert [n["incarnation"] for n in listed.json] == ["n1"]
    assert node in only_warnings(listed.err)[0]
    spec = put(cli, lambda keys: keys.of(OP, "spec"), b"\xff")
    ran = cli.distop("show", str(OP))
    assert ran.code == 3
    assert spec in ran.err
    listed = cli.distop("ls", "--json")
    assert listed.json == []
    assert len(only_warnings(listed.err)) == 2
    doctor = cli.distop("doctor")
    assert (doctor.code, node in doctor.out, spec in doctor.out) == (1, True, True)


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("plan.000000", b'[{"partition":0,"name":"z","bytes":0,"files":[]}]', "the plan does not match its digest"),
        ("arg", b"{oops", "b'{oops' is not a valid value"),
    ],
)
def test_unreadable_records_of_an_operation_are_its_reason_for_waiting(
    cli: CliNamespace, name: str, value: bytes, words: str
) -> None:
    """Its jobs do not run, and its status reports the reason. Its records are unchanged, and it can be cancelled."""
    cli.distop("start", "noop", TABLE)
    cli.with_daemons(lambda scripted: scripted.plan(OP, "n1", ["a", "b"]))
    assert cli.distop("show", str(OP), "--json").json["waiting_for"] == "free slots"
    put(cli, lambda keys: f"{keys.of(OP, 'state').removesuffix('state')}{name}", value)
    shown = cli.distop("show", str(OP), "--json")
    assert shown.code == 0
    assert shown.json["waiting_for"].startswith("records that executors can read: ")
    assert words in shown.json["waiting_for"]
    assert words in " ".join(cli.distop("show", str(OP)).out.split())
    assert cli.distop("cancel", str(OP)).code == 0


def test_invalid_counters_are_named_in_errors(cli: CliNamespace) -> None:
    cli.distop("start", "noop", TABLE)
    for key, value in (
        (lambda keys: keys.next_instance(TABLE, "noop"), b"many"),
        (lambda keys: keys.run_ops(TABLE), b"[1]"),
    ):
        name = put(cli, key, value)
        ran = cli.distop("start", "noop", TABLE)
        assert (ran.code, name in ran.sentence) == (3, True), ran
    assert cli.distop("table", "rm", TABLE).code == 3


def test_the_audit_names_the_key_of_an_unreadable_record(cli: CliNamespace) -> None:
    cli.distop("start", "noop", TABLE)
    key = put(cli, lambda keys: keys.of(OP, "spec"), b"{oops")
    ran = cli.distop("audit")
    assert (ran.code, key in ran.out + ran.err) == (1, True), ran
    assert "defect" not in ran.err
