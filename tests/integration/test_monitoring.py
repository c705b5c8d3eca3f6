"""Counts of open operations, reasons for waiting (lakeFS L27), labels, and parameters of types.

The client and the command line run on a real etcd with scripted daemons.
"""

from __future__ import annotations

import itertools
import json
from typing import TYPE_CHECKING, Any

import pytest

import distop
from distop import aio
from distop.clock import time
from distop.errors import InvalidArgument
from distop.protocol.jobs import Claim
from distop.protocol.json_codec import loads, rfc3339
from distop.protocol.records import State
from distop.protocol.txn import Delete, Put, Txn
from tests.integration.cli_namespace import TABLE, CliNamespace, cli, end, ref
from tests.integration.scripted_daemons import ScriptedDaemons
from tests.support.command import distop_command
from tests.support.etcd import shared_etcd

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from distop.store.embedded import EmbeddedEtcd

__all__ = ["cli", "distop_command", "shared_etcd"]

pytestmark = pytest.mark.etcd

_numbers = itertools.count()


@pytest.fixture
async def client(shared_etcd: EmbeddedEtcd) -> AsyncIterator[aio.Client]:
    async with aio.connect(shared_etcd.endpoint, namespace=f"monitor{next(_numbers)}") as client:
        yield client


@pytest.fixture
async def scripted(client: aio.Client) -> ScriptedDaemons:
    scripted = ScriptedDaemons(client.etcd, client.keys)
    for type_name in ("noop", "purge"):
        await scripted.publish(type_name)
    for table in (TABLE, "u"):
        await scripted.table(table)
    await scripted.join("n1", "noop", "purge")
    return scripted


async def start_one_of_each_kind(client: aio.Client, scripted: ScriptedDaemons) -> dict[str, aio.Operation]:
    """Start one operation of each kind, and return them by kind."""
    found = {
        "planning": await client.start_operation("noop", TABLE, labels={"team": "x"}),
        "slots": await client.start_operation("noop", TABLE, labels={"team": "y"}),
        "running": await client.start_operation("noop", "u", labels={"team": "x", "ticket": "1"}),
        "paused": await client.start_operation("purge", "u"),
        "ended": await client.start_operation("noop", "u", labels={"team": "x"}),
    }
    for name in ("slots", "running", "paused"):
        await scripted.plan(found[name].parts, "n1", ["a", "b"])
    await scripted.claim(found["running"].parts, "n1", 0)
    await found["paused"].pause()
    await end(scripted, found["ended"].ref)
    return found


# ------------------------------------------------------------------------- counts


async def test_L27_open_operations_are_counted_by_type_and_state(client: aio.Client, scripted: ScriptedDaemons) -> None:
    assert await client.counts() == ()
    await start_one_of_each_kind(client, scripted)

    async def counts(*args: Any, **filters: Any) -> list[tuple[str, str, int, int]]:
        return [(c.type, c.state, c.operations, c.waiting) for c in await client.counts(*args, **filters)]

    assert await counts() == [("noop", "running", 3, 2), ("purge", "paused", 1, 0)]
    assert await counts("u") == [("noop", "running", 1, 0), ("purge", "paused", 1, 0)]
    assert await counts(type="purge") == await counts(states="paused") == [("purge", "paused", 1, 0)]
    assert await counts("u", type="noop", states=["running", "paused"]) == [("noop", "running", 1, 0)]
    assert await counts(labels={"team": "x"}) == [("noop", "running", 2, 1)]
    assert await counts(labels={"team": "z"}) == await counts(states="cancelling") == []


async def test_L27_the_age_of_the_oldest_waiting_operation(client: aio.Client, scripted: ScriptedDaemons) -> None:
    """The age counts from the start, despite later commands. Running and paused operations do not count."""
    found = await start_one_of_each_kind(client, scripted)
    await found["slots"].pause()
    await found["slots"].resume()
    for name, ago in (("planning", 300.0), ("slots", 60.0)):
        key = client.keys.of(found[name].parts, "spec")
        kv = await client.etcd.get(key)
        assert kv is not None
        older_spec = {**loads(kv.value), "time": rfc3339(time.time() - ago)}
        await client.etcd.commit(Txn((), (Put(key, json.dumps(older_spec).encode()),)))
    noop, purge = await client.counts()
    assert purge.oldest_waiting is None
    assert noop.oldest_waiting is not None
    assert 300 <= noop.oldest_waiting < 360
    (younger,) = await client.counts(labels={"team": "y"})
    assert younger.oldest_waiting is not None
    assert 60 <= younger.oldest_waiting < 120
    assert set(noop.to_json()) == {"type", "state", "operations", "waiting", "oldest_waiting_seconds"}


async def test_L27_counting_reads_no_history(
    client: aio.Client, scripted: ScriptedDaemons, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The number of reads depends on the open operations, and no read is of a history key."""
    await start_one_of_each_kind(client, scripted)
    reads: list[Any] = []
    read = client.etcd.read

    async def recorded_read(*gets: Any) -> Any:
        reads.extend(gets)
        return await read(*gets)

    async def fail(*_: Any, **__: Any) -> Any:
        raise AssertionError("listed")

    monkeypatch.setattr(client.etcd, "read", recorded_read)
    monkeypatch.setattr(client.etcd, "list", fail)
    await client.counts()
    assert not [get.key for get in reads if "distOpHistory" in get.key]
    assert len(reads) == 2 + 2 * 4 + 1, "two ranges, two keys for each of 4 open operations, and one spec"


async def test_L27_operations_are_filtered_by_type_state_table_and_label(
    client: aio.Client, scripted: ScriptedDaemons
) -> None:
    found = await start_one_of_each_kind(client, scripted)

    async def listed(*args: Any, **filters: Any) -> set[str]:
        refs = {op.ref: name for name, op in found.items()}
        return {refs[status.op] for status in await client.operations(*args, **filters)}

    assert await listed() == {"planning", "slots", "running", "paused"}
    assert await listed("u", type="noop") == {"running"}
    assert await listed(states=["paused"]) == {"paused"}
    assert await listed(labels={"team": "x"}) == {"planning", "running"}
    assert await listed(labels={"team": "x", "ticket": "1"}) == {"running"}


@pytest.mark.parametrize(
    ("filters", "message"),
    [
        ({"type": 5}, "the operation type must be a text"),
        (
            {"states": "success"},
            "is not a state of an operation that has not ended (states: pending, running, paused, ",
        ),
        ({"labels": 5}, "labels are a mapping"),
        ({"table": 5}, "the name of a table must be a text"),
    ],
)
async def test_an_invalid_filter_is_refused_with_the_reason(
    client: aio.Client, filters: dict[str, Any], message: str
) -> None:
    for call in (client.counts, client.operations):
        with pytest.raises(InvalidArgument, match="[a-z]") as raised:
            await call(**filters)
        assert message in str(raised.value)


async def test_an_unreadable_record_hides_no_other_operation(client: aio.Client, scripted: ScriptedDaemons) -> None:
    found = await start_one_of_each_kind(client, scripted)
    await client.etcd.commit(Txn((), (Put(client.keys.of(found["planning"].parts, "state"), b"nonsense"),)))
    assert [(c.type, c.operations) for c in await client.counts()] == [("noop", 2), ("purge", 1)]


# ------------------------------------------------------------------------- labels


async def test_labels_are_in_status_history_and_reruns(client: aio.Client, scripted: ScriptedDaemons) -> None:
    op = await client.start_operation("noop", TABLE, request_id="r", labels={"team": "x", "a": "1"})
    again = await client.start_operation("noop", TABLE, request_id="r", labels={"team": "y"})
    assert (again.ref, again.already_started) == (op.ref, True), "labels are not part of the request"
    seen = await op.status()
    assert dict(seen.labels) == seen.to_json()["labels"] == {"a": "1", "team": "x"}
    await end(scripted, op.ref)
    result = await op.wait(10)
    assert result.record["labels"] == {"a": "1", "team": "x"}
    assert dict((await op.status()).labels) == {"a": "1", "team": "x"}


def test_labels_and_filters_on_the_command_line(cli: CliNamespace) -> None:
    started = cli.distop("start", "noop", TABLE, "--label", "team=x", "--label", "ticket=4=2", "--json")
    assert started.code == 0, started.err
    op = started.json["op"]
    cli.distop("start", "purge", "@cluster")
    shown = cli.distop("show", op)
    assert "labels      team=x, ticket=4=2" in shown.out
    assert cli.distop("show", op, "--json").json["labels"] == {"team": "x", "ticket": "4=2"}
    for words, wanted in (
        (("--label", "team=x"), [op]),
        (("--label", "team=y"), []),
        (("--type", "noop", "--state", "running", "--table", TABLE), [op]),
        (("--state", "paused"), []),
    ):
        assert [one["op"] for one in cli.distop("ls", *words, "--json").json] == wanted, words
    counted = cli.distop("ls", "--count", "--type", "noop", "--json").json
    assert [(c["type"], c["state"], c["operations"], c["waiting"]) for c in counted] == [("noop", "running", 1, 1)]
    assert counted[0]["oldest_waiting_seconds"] >= 0
    lines = cli.distop("ls", "--count").out.splitlines()
    assert lines[0].split() == ["TYPE", "STATE", "OPERATIONS", "WAITING", "OLDEST", "WAITING"]
    assert cli.distop("ls", "--count", "--state", "cancelling").out == "no operation is open\n"
    cli.with_daemons(lambda scripted: end(scripted, op))
    for words, number in (
        (("--type", "noop", "--state", "success", "--label", "team=x"), 1),
        (("--since", "2013-01-01T00:00:00Z", "--until", "2013-01-02T00:00:00+00:00"), 1),
        (("--since", "1h"), 0),
        (("--op", op), 1),
        (("--state", "failed"), 0),
        (("--request-id", "nobody's"), 0),
    ):
        ran = cli.distop("history", *words, "--json")
        assert (ran.code, len(ran.json)) == (0, number), (words, ran.err)


def test_C31_history_is_listed_in_pages_on_the_command_line(cli: CliNamespace) -> None:
    for _ in range(3):
        op = cli.distop("start", "noop", TABLE, "--json").json["op"]
        cli.with_daemons(lambda scripted, op=op: end(scripted, op))  # type: ignore[misc]
    first = cli.distop("history", "--limit", "2", "--json").json
    assert ["after" in one for one in first] == [False, True]
    second = cli.distop("history", "--limit", "2", "--after", first[-1]["after"], "--json").json
    assert [one["op"] for one in [*first, *second]] == [f"{TABLE}/noop/{n}" for n in (3, 2, 1)]
    assert "after" not in second[-1]
    text_output = cli.distop("history", "--limit", "2")
    assert text_output.err == f"list older operations with --after {first[-1]['after']}\n"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("history", "--state", "running"), "'running' is not a state of an operation that has ended"),
        (("history", "--since", "2013-01-01"), "--since must have a time zone"),
        (("history", "--since", "soon"), "--since must be a time such as 2013-01-01T00:00:00Z, or how long ago"),
        (("history", "--until", "-5h"), "--until must be a time such as"),
        (("history", "--since", "1h", "--until", "2h"), "since must be before until"),
        (("history", "--after", "x"), "is not a page token"),
        (("history", "--label", "team"), "--label must be written as K=V, not 'team'"),
        (("history", "--type", "9"), "is not an operation type"),
        (("ls", "--state", "success"), "is not a state of an operation that has not ended"),
        (("ls", "a", "--table", "b"), "the tables a and b are both given"),
        (("ls", "--type", "a b"), "is not an operation type"),
        (("start", "noop", TABLE, "--label", "a=1", "--label", "a=2"), "the label a is given twice, with other values"),
        (("start", "noop", TABLE, "--label", "=1"), "the label key '' must have"),
        (("why", "nonsense"), "is not an operation"),
        (("behaviors", "9"), "is not an operation type"),
        (("behaviors", "none"), "there is no behavior 'none' (published: noop, purge)"),
    ],
)
def test_invalid_input_is_refused_in_one_line_with_exit_code_2(
    cli: CliNamespace, words: tuple[str, ...], message: str
) -> None:
    ran = cli.distop(*words)
    assert ran.code == 2
    assert message in ran.sentence


# ---------------------------------------------------------------------------- why


async def test_L27_why_reports_the_reasons_for_waiting(client: aio.Client, scripted: ScriptedDaemons) -> None:
    op = await client.start_operation("noop", TABLE)

    async def reasons() -> list[tuple[str, str]]:
        return [(str(reason.code), reason.text) for reason in (await op.why()).reasons]

    assert await reasons() == [
        ("no-coordinator", f"an executor to be elected to coordinate `noop` on {TABLE}"),
        ("planning", "planning"),
    ]
    await scripted.plan(op.parts, "n1", ["a", "b"])
    assert await reasons() == [("unclaimed", "an executor to claim its jobs: no other operation holds slots")]
    other = await client.start_operation("purge", "u")
    await scripted.plan(other.parts, "n1", ["a", "b", "c"])
    await scripted.claim(other.parts, "n1", 0, 1)
    assert await reasons() == [("slots", f"free slots: executors run 2 jobs of {other.ref}")]
    await scripted.claim(op.parts, "n1", 0)
    assert await reasons() == []
    gone = Claim("executor-n9", "n9", 1, 0)
    await scripted.put(client.keys.claim(op.parts, 0), gone.encode())
    found = await client.why(op.ref)
    assert (str(found.reasons[0].code), found.waiting) == ("lease-lost", True)
    assert "executor-n9, whose session has ended" in found.reasons[0].text
    await op.pause()
    assert (await reasons())[0] == ("paused", "resume")
    for incarnation in list(await client.nodes()):
        await client.etcd.commit(Txn((), (Delete(client.keys.node(incarnation)),)))
    assert [code for code, _ in await reasons()] == ["paused", "no-executor"]


async def test_L27_why_reports_the_reasons_of_a_pending_operation(
    client: aio.Client, scripted: ScriptedDaemons
) -> None:
    first = await client.start_operation("purge", "u")
    due = rfc3339(time.time() + 3600)
    op = await client.start_operation("noop", TABLE, not_before=due, after=[first.ref], labels={"team": "x"})

    async def reasons() -> list[tuple[str, str]]:
        return [(str(reason.code), reason.text) for reason in (await op.why()).reasons]

    assert await reasons() == [
        ("predecessors", f"1 operation to end ({first.ref})"),
        ("time", f"its start time, {due}"),
    ]
    assert (await op.status()).waiting_for == f"1 operation to end ({first.ref})"
    noop, purge = await client.counts()
    assert (noop.state, noop.operations, noop.waiting) == ("pending", 1, 1)
    assert (purge.state, purge.waiting) == ("running", 1)
    assert [status.op for status in await client.operations(states="pending", labels={"team": "x"})] == [op.ref]
    await op.cancel()
    (ended,) = await client.history(type="noop")
    assert (ended.state, ended.record["labels"]) == ("cancelled", {"team": "x"})


async def test_L27_why_reports_unreadable_records(client: aio.Client, scripted: ScriptedDaemons) -> None:
    op = await client.start_operation("noop", TABLE)
    await scripted.plan(op.parts, "n1", ["a"])
    await scripted.put(client.keys.of(op.parts, "arg"), b"{")
    first = (await op.why()).reasons[0]
    assert (str(first.code), first.stops) == ("unreadable-records", True)
    assert client.keys.of(op.parts, "arg") in first.text
    assert (await op.status()).waiting_for == first.text


def test_L27_why_on_the_command_line(cli: CliNamespace) -> None:
    op = cli.distop("start", "noop", TABLE, "--json").json["op"]
    cli.with_daemons(lambda scripted: scripted.plan(ref(op), "n1", ["a", "b"]))
    shown = cli.distop("why", op)
    assert shown.code == 0
    assert "waits for  an executor to claim its jobs" in shown.out
    assert "to do      read the logs of the executors that offer `noop`" in shown.out
    found = cli.distop("why", op, "--json").json
    assert (found["op"], found["state"], found["waiting"], found["running"]) == (op, "running", True, 0)
    assert [(one["code"], one["stops"]) for one in found["reasons"]] == [("unclaimed", True)]
    cli.with_daemons(lambda scripted: scripted.claim(ref(op), "n1", 0))
    assert cli.distop("why", op).out == f"{op} does not wait: 1 job runs\n"
    other = cli.distop("start", "noop", TABLE, "--json").json["op"]
    cli.with_daemons(
        lambda scripted: end(scripted, other, State.FAILED, errors=[{"partition": None, "text": "no\nat x"}])
    )
    assert cli.distop("why", other).out == f"{other} ended as failed: no\n"
    assert cli.distop("why", f"{TABLE}/noop/99").code == 4


# --------------------------------------------------------------------- behaviors


def test_C20_C33_behaviors_are_listed_with_their_parameters(cli: CliNamespace) -> None:
    schema = {
        "properties": {
            "jobs": {"type": "integer", "default": 1, "description": "How many."},
            "name": {"anyOf": [{"type": "string"}, {"type": "null"}], "default": None},
        },
        "required": ["path"],
    }
    schema["properties"]["path"] = {"type": "string"}  # type: ignore[index]
    cli.with_daemons(lambda scripted: scripted.publish("copy", arg_schema=schema, description="Copies."))
    listed = cli.distop("behaviors", "--json").json
    assert [one["type_name"] for one in listed] == ["copy", "noop", "purge"]
    one = cli.distop("behaviors", "copy", "--json").json
    assert one == listed[0]
    assert (one["arg_schema"], one["executors"]) == (schema, 0)
    names = ("name", "type", "nullable", "required", "default", "description")
    assert [tuple(parameter[name] for name in names) for parameter in one["parameters"]] == [
        ("jobs", "integer", False, False, 1, "How many."),
        ("name", "string", True, False, None, ""),
        ("path", "string", False, True, None, ""),
    ]
    shown = [line.split() for line in cli.distop("behaviors", "copy").out.splitlines()]
    assert ["PARAMETER", "TYPE", "NULLABLE", "DEFAULT", "DESCRIPTION"] in shown
    assert ["name", "string", "yes", "null"] in shown
    assert ["path", "string", "no", "(required)"] in shown
    assert cli.distop("behaviors", "noop").out.endswith("its schema names no parameters\n")


def test_the_blocking_client_has_the_same_queries(shared_etcd: EmbeddedEtcd, cli: CliNamespace) -> None:
    with distop.connect(shared_etcd.endpoint, namespace=cli.namespace) as client:
        op = client.start_operation("noop", TABLE, labels={"team": "x"})
        listed = client.operations(type="noop", states="running", labels={"team": "x"})
        assert [status.op for status in listed] == [op.ref]
        assert [(c.type, c.operations) for c in client.counts(TABLE)] == [("noop", 1)]
        assert client.why(op.ref).waiting
        assert op.why().reasons == client.why(op.ref).reasons
        assert client.history(TABLE, labels={"team": "x"}) == []
        cli.with_daemons(lambda scripted: end(scripted, op.ref))
        page = client.history(TABLE, labels={"team": "x"}, states="success", limit=1)
        assert ([result.op for result in page], page.after) == ([op.ref], None)
