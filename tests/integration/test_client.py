"""The client against a real etcd with scripted daemons."""

from __future__ import annotations

import asyncio
import itertools
import json
import threading
from typing import TYPE_CHECKING, Any

import pytest

import distop
from distop import aio
from distop.client.connection_options import configure
from distop.protocol import operation_finish
from distop.protocol.identity import plan_digest
from distop.protocol.records import CLUSTER_TABLE, Spec, State, TableRecord
from distop.protocol.txn import Get
from distop.services.submission.idempotency import find_earlier
from distop.services.submission.start_options import StartOptions
from distop.services.submission.start_request import request
from distop.services.submission.submit import submit
from tests.integration.scripted_daemons import ScriptedDaemons
from tests.support.etcd import own_etcd, shared_etcd, until
from tests.support.history_age import age_history
from tests.support.service import client_of_service

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from distop.store.embedded import EmbeddedEtcd

__all__ = ["own_etcd", "shared_etcd"]

pytestmark = pytest.mark.etcd

TABLE = "nyc.flights"
_numbers = itertools.count()

SCHEMA = {
    "type": "object",
    "properties": {"column": {"type": "string"}, "depth": {"type": "integer"}},
    "required": ["column"],
    "additionalProperties": False,
}


@pytest.fixture(params=["etcd", "service"])
async def client(request: pytest.FixtureRequest, shared_etcd: EmbeddedEtcd) -> AsyncIterator[aio.Client]:
    """A client of etcd, and one of a service."""
    namespace = f"client{next(_numbers)}"
    if request.param == "service":
        async with client_of_service(shared_etcd.endpoint, namespace) as client:
            yield client
        return
    async with aio.connect(shared_etcd.endpoint, namespace=namespace) as client:
        yield client


@pytest.fixture
async def scripted(client: aio.Client) -> ScriptedDaemons:
    scripted = ScriptedDaemons(client.etcd, client.keys)
    await scripted.publish("noop")
    await scripted.table(TABLE)
    await scripted.join("n1", "noop", "index", "purge", "one")
    return scripted


async def content(client: aio.Client) -> dict[str, bytes]:
    """All distop keys of the namespace and their values, without the namespace's prefix."""
    start = f"{client.config.namespace}/"
    listing = await client.etcd.list(f"{start}distOp", f"{start}distOq")
    return {kv.key.removeprefix(start): kv.value for kv in listing.kvs}


# ----------------------------------------------------------------------- start


async def test_a_start_writes_the_keys_of_the_contract_and_nothing_else(
    client: aio.Client, scripted: ScriptedDaemons
) -> None:
    before = await content(client)
    op = await client.start_operation("noop", TABLE, {"jobs": 3}, partitions=["a", "b"], submitter="me")
    assert (op.ref, op.instance_id) == ("nyc.flights/noop/1", 1)
    after = await content(client)
    root = "distOp.nyc%2Eflights.noop.1"
    new = {key: value for key, value in after.items() if key not in before}
    assert set(new) == {
        "distOp.nyc%2Eflights.runOps",
        "distOp.nyc%2Eflights.noop.nextInstanceId",
        f"{root}.arg",
        f"{root}.spec",
        f"{root}.state",
        "distOpPending.nyc%2Eflights.noop.1",
    }
    assert json.loads(new["distOp.nyc%2Eflights.runOps"]) == {"noop": 1}
    assert new["distOp.nyc%2Eflights.noop.nextInstanceId"] == b"2"
    assert json.loads(new[f"{root}.arg"]) == {"jobs": 3}
    assert new[f"{root}.state"] == b"running"
    assert new["distOpPending.nyc%2Eflights.noop.1"] == b"planning"
    spec = json.loads(new[f"{root}.spec"])
    assert spec["v"] == 1
    assert spec["partitions"] == ["a", "b"]
    assert spec["submitter"] == "me"
    assert spec["table"]["location"] == "/data"
    assert spec["request_id"]


async def test_a_cluster_operation_is_started_with_its_plan_and_is_open_at_once(
    client: aio.Client, scripted: ScriptedDaemons
) -> None:
    op = await client.start_operation("noop", CLUSTER_TABLE)
    keys = client.keys
    plan, chunk, gate, pending = await client.etcd.read(
        Get(keys.of(op.parts, "plan")),
        Get(keys.chunk(op.parts, 0)),
        Get(keys.gate(op.parts)),
        Get(keys.pending(op.parts)),
    )
    assert plan.kv is not None
    assert chunk.kv is not None
    assert gate.kv is not None
    assert pending.kv is None
    assert json.loads(plan.kv.value)["digest"] == plan_digest([chunk.kv.value])
    assert [row["name"] for row in json.loads(chunk.kv.value)] == ["all"]


async def test_an_invalid_start_is_refused_in_one_line_and_changes_nothing(
    client: aio.Client, scripted: ScriptedDaemons
) -> None:
    await scripted.publish("index", arg_schema=SCHEMA, object_field="column")
    await scripted.publish("rows", needs_table=True)
    before = await content(client)
    invalid: list[tuple[Any, ...]] = [
        (distop.UnknownBehavior, r"'nope' \(did you mean 'noop'\? published: index, noop, r", "nope", TABLE, {}, {}),
        (distop.NotFound, "no table 'elsewhere'", "noop", "elsewhere", {}, {}),
        (distop.InvalidArgument, "'column' is missing", "index", TABLE, {}, {}),
        (distop.InvalidArgument, 'at depth: "x" is not of type integer', "index", TABLE, {"column": "", "depth": "x"}, {}),  # noqa: E501
        (distop.InvalidArgument, "'dept' .did you mean 'depth'", "index", TABLE, {"column": "c", "dept": 1}, {}),
        (distop.InvalidArgument, "needs the field 'column'", "index", TABLE, {"column": ""}, {}),
        (distop.InvalidArgument, "not JSON", "noop", TABLE, {"x": object()}, {}),
        (distop.InvalidArgument, "512 KiB", "noop", TABLE, {"x": "y" * 600_000}, {}),
        (distop.InvalidArgument, "list of partitions is empty", "noop", TABLE, {}, {"partitions": []}),
        (distop.InvalidArgument, "'a' is named twice", "noop", TABLE, {}, {"partitions": ["a", "b", "a"]}),
        (distop.InvalidArgument, "a list of names", "noop", TABLE, {}, {"partitions": "a"}),
        (distop.InvalidArgument, "must be a text", "noop", TABLE, {}, {"partitions": [""]}),
        (distop.InvalidArgument, "rows works on a table: name one", "rows", CLUSTER_TABLE, {}, {}),
        (distop.InvalidArgument, "leave out the partitions", "noop", CLUSTER_TABLE, {}, {"partitions": ["a"]}),
        (distop.InvalidArgument, "failure policy", "noop", TABLE, {}, {"failure_policy": "never"}),
        (distop.InvalidArgument, "failure policy", "noop", TABLE, {}, {"failure_policy": ["fail_fast"]}),
        (distop.InvalidArgument, "the name of a table must be a text, not 5", "noop", 5, {}, {}),
        (distop.InvalidArgument, "the operation type must be a text", None, TABLE, {}, {}),
        (distop.InvalidArgument, "list of names, not 5", "noop", TABLE, {}, {"partitions": 5}),
        (distop.InvalidArgument, "attempts must be a whole number", "noop", TABLE, {}, {"retry_attempts": "x"}),
        (distop.InvalidArgument, "the submitter must be a text", "noop", TABLE, {}, {"submitter": 5}),
        (distop.InvalidArgument, "attempts", "noop", TABLE, {}, {"retry_attempts": 0}),
        (distop.InvalidArgument, "not an operation type", "no.op", TABLE, {}, {}),
        (distop.InvalidArgument, "must not be empty", "noop", "", {}, {}),
    ]  # fmt: skip
    for kind, words, type_name, table, arg, options in invalid:
        with pytest.raises(kind, match=words) as caught:
            await client.start_operation(type_name, table, arg, **options)
        assert "\n" not in str(caught.value)
    assert await content(client) == before


async def test_an_argument_of_a_wrong_type_is_named(client: aio.Client, scripted: ScriptedDaemons) -> None:
    op: Any = await client.start_operation("noop", TABLE)
    untyped_client: Any = client
    for words, call in (
        ("the timeout must be a number of seconds, 0 or more, not 'x'", lambda: op.wait("x")),
        ("the timeout must be a number of seconds, 0 or more, not nan", lambda: op.wait(float("nan"))),
        ("the interval must be a number", lambda: anext(op.watch("x"))),
        ("the reason of a cancel must be a text", lambda: op.cancel(5)),
        ("the name of a table must be a text", lambda: untyped_client.operations(5)),
        ("the name of a table must be a text", lambda: untyped_client.history(5)),
        ("the limit must be a whole number", lambda: untyped_client.history(limit="x")),
        ("the name of a table must be a text", lambda: untyped_client.remove_table(5)),
        ("given as a TableRecord, not 'x'", lambda: untyped_client.add_table("x")),
    ):
        with pytest.raises(distop.InvalidArgument, match=words):
            await call()
    with pytest.raises(distop.InvalidArgument, match="an operation's name must be a text, not 5"):
        untyped_client.operation(5)
    with pytest.raises(distop.InvalidArgument, match="the endpoints must be a text or a list of texts, not 5"):
        distop.connect(5)  # type: ignore[arg-type]


async def test_the_error_without_behaviors_says_to_start_an_executor(client: aio.Client) -> None:
    with pytest.raises(distop.UnknownBehavior, match=r"published: none\): start an executor"):
        await client.start_operation("noop", TABLE)


async def test_an_object_id_is_taken_from_the_argument(client: aio.Client, scripted: ScriptedDaemons) -> None:
    await scripted.publish("index", arg_schema=SCHEMA, object_field="column")
    op = await client.start_operation("index", TABLE, {"column": "dep/time%"})
    assert op.ref == "nyc.flights/index/dep%2Ftime%25/1"
    assert client.operation(op.ref).parts == op.parts


async def test_table_names_may_contain_any_characters(client: aio.Client, scripted: ScriptedDaemons) -> None:
    for name in ("a.b/c d%", "订单", "🛒", "..", "a", "ab"):
        await scripted.table(name)
        op = await client.start_operation("noop", name)
        assert client.operation(op.ref).parts.table == name
        assert (await op.status()).state == "running"
    assert len(await client.operations()) == 6
    assert len(await client.operations("a")) == 1


@pytest.mark.parametrize("declaring", ["purge", "noop"])
async def test_a_conflicting_start_is_refused_when_either_type_declares_the_conflict(
    client: aio.Client, scripted: ScriptedDaemons, declaring: str
) -> None:
    await scripted.publish("purge", conflicts_with=("noop",) if declaring == "purge" else ())
    await scripted.publish("noop", conflicts_with=("purge",) if declaring == "noop" else ())
    op = await client.start_operation("noop", TABLE)
    before = await content(client)
    with pytest.raises(distop.Incompatible, match=r"purge on nyc.flights cannot start while nyc.flights/noop/1 runs"):
        await client.start_operation("purge", TABLE)
    assert await content(client) == before
    await scripted.table("other")
    assert (await client.start_operation("purge", "other")).instance_id == 1
    await scripted.plan(op.parts, "n1", [])
    await scripted.finish(op.parts, "n1", State.SUCCESS)
    assert (await client.start_operation("purge", TABLE)).instance_id == 1


async def test_a_second_instance_of_a_type_that_runs_one_at_a_time_is_refused(
    client: aio.Client, scripted: ScriptedDaemons
) -> None:
    await scripted.publish("one", instances="one", arg_schema=SCHEMA, object_field="column")
    first = await client.start_operation("one", TABLE, {"column": "a"})
    await client.start_operation("one", TABLE, {"column": "b"})
    with pytest.raises(distop.Incompatible, match=r"while nyc.flights/one/a/1 runs: one runs one at a time"):
        await client.start_operation("one", TABLE, {"column": "a"})
    await scripted.plan(first.parts, "n1", [])
    await scripted.finish(first.parts, "n1", State.SUCCESS)
    assert (await client.start_operation("one", TABLE, {"column": "a"})).instance_id == 3


async def test_sixteen_concurrent_starts_are_numbered_without_gaps(
    client: aio.Client, scripted: ScriptedDaemons
) -> None:
    ops = await asyncio.gather(*(client.start_operation("noop", TABLE, {"n": n}) for n in range(16)))
    assert sorted(op.instance_id for op in ops) == list(range(1, 17))
    run_ops, next_instance = await client.etcd.read(
        Get(client.keys.run_ops(TABLE)), Get(client.keys.next_instance(TABLE, "noop"))
    )
    assert run_ops.kv is not None
    assert next_instance.kv is not None
    assert json.loads(run_ops.kv.value) == {"noop": 16}
    assert next_instance.kv.value == b"17"
    for n, op in enumerate(ops):
        arg = await client.etcd.get(client.keys.of(op.parts, "arg"))
        assert arg is not None
        assert json.loads(arg.value) == {"n": n}


async def test_starts_with_one_request_id_share_one_operation(client: aio.Client, scripted: ScriptedDaemons) -> None:
    ops = await asyncio.gather(*(client.start_operation("noop", TABLE, request_id="r") for _ in range(5)))
    assert {op.ref for op in ops} == {"nyc.flights/noop/1"}
    other = await client.start_operation("noop", TABLE, request_id="s")
    assert other.instance_id == 2
    await scripted.plan(ops[0].parts, "n1", [])
    await scripted.finish(ops[0].parts, "n1", State.SUCCESS)
    await scripted.clean(ops[0].parts, "n1")
    again = await client.start_operation("noop", TABLE, request_id="r")
    assert again.ref == ops[0].ref, "the history has the request id"


async def test_a_request_id_with_another_argument_or_other_partitions_is_refused(
    client: aio.Client, scripted: ScriptedDaemons
) -> None:
    first = await client.start_operation("noop", TABLE, {"a": 1, "b": 2}, partitions=["x", "y"], request_id="r")

    async def check() -> None:
        same = await client.start_operation("noop", TABLE, {"b": 2, "a": 1}, partitions=["y", "x"], request_id="r")
        assert same.ref == first.ref
        for arg, names in (({"a": 1}, ["x", "y"]), ({"a": 1, "b": 2}, ["x"]), ({"a": 1, "b": 2}, None)):
            with pytest.raises(distop.InvalidArgument, match=f"'r' has started {first.ref} with another argument"):
                await client.start_operation("noop", TABLE, arg, partitions=names, request_id="r")

    await check()
    await scripted.plan(first.parts, "n1", [])
    await scripted.finish(first.parts, "n1", State.SUCCESS)
    await scripted.clean(first.parts, "n1")
    await check()
    ops = await asyncio.gather(
        *(client.start_operation("noop", TABLE, {"n": n}, request_id="race") for n in range(5)), return_exceptions=True
    )
    assert sorted(type(op).__name__ for op in ops) == ["InvalidArgument"] * 4 + ["Operation"]


async def test_find_earlier_finds_a_request_by_its_id(client: aio.Client, scripted: ScriptedDaemons) -> None:
    wanted = request("noop", TABLE, b"{}", StartOptions(request_id="mine"), "me")
    assert await find_earlier(client.etcd, client.keys, [wanted]) == [None]
    ref = (await submit(client.etcd, client.keys, wanted)).ref
    assert await find_earlier(client.etcd, client.keys, [wanted]) == [ref]


async def test_a_repeated_request_reads_few_keys_until_its_history_is_deleted(
    client: aio.Client, scripted: ScriptedDaemons, monkeypatch: pytest.MonkeyPatch
) -> None:
    await client.start_operations([distop.Start("noop", TABLE, {}, options={"delay": 3_600.0}) for _ in range(150)])
    read, reads = client.etcd.read, []

    async def recorded_read(*gets: Get) -> Any:
        reads.append(gets)
        return await read(*gets)

    monkeypatch.setattr(client.etcd, "read", recorded_read)
    first = await client.start_operation("noop", TABLE, request_id="r")
    assert sum(map(len, reads)) <= 10, "a start does not read the pending operations"
    reads.clear()
    again = await client.start_operation("noop", TABLE, request_id="r")
    assert (again.ref, again.already_started) == (first.ref, True)
    assert sum(map(len, reads)) <= 10
    key = client.keys.request(TABLE, "noop", "r")
    found = await client.etcd.get(key)
    assert found is not None
    assert found.value == first.ref.encode()
    await scripted.plan(first.parts, "n1", [])
    await scripted.finish(first.parts, "n1", State.SUCCESS)
    await scripted.clean(first.parts, "n1")
    again = await client.start_operation("noop", TABLE, request_id="r")
    assert (again.ref, again.already_started) == (first.ref, True)
    record = await client.etcd.get(client.keys.history(first.parts))
    assert record is not None
    mark = await age_history(client.etcd, client.keys)
    await client.etcd.commit(operation_finish.forget(client.keys, [(first.parts, record.mod_revision, "r")], mark))
    assert await client.etcd.get(key) is None
    again = await client.start_operation("noop", TABLE, request_id="r")
    assert not again.already_started
    assert again.ref != first.ref


async def test_already_started_is_set_on_a_repeated_start_only(client: aio.Client, scripted: ScriptedDaemons) -> None:
    first = await client.start_operation("noop", TABLE, request_id="r")
    assert not first.already_started
    again = await client.start_operation("noop", TABLE, request_id="r")
    assert (again.ref, again.already_started) == (first.ref, True)
    other = await client.start_operation("noop", TABLE)
    assert not other.already_started


async def test_start_options_override_the_declaration(client: aio.Client, scripted: ScriptedDaemons) -> None:
    op = await client.start_operation("noop", TABLE, failure_policy="collect_all", retry_attempts=7)
    spec = await client.etcd.get(client.keys.of(op.parts, "spec"))
    assert spec is not None
    rules = Spec.decode(spec.value).rules
    assert (rules.failure_policy, rules.retry.attempts) == ("collect_all", 7)


# ------------------------------------------------------------ status and waiting


async def test_status_reports_the_reason_for_waiting(client: aio.Client, scripted: ScriptedDaemons) -> None:
    op = await client.start_operation("noop", TABLE)
    seen = await op.status()
    assert (seen.state, seen.stage, seen.waiting_for, seen.jobs["total"]) == ("running", "planning", "planning", None)
    await scripted.plan(op.parts, "n1", ["a", "b", "c", "d"])
    seen = await op.status()
    assert (seen.stage, seen.waiting_for, seen.jobs["total"]) == ("open", "free slots", 4)
    fences = await scripted.claim(op.parts, "n1", 0, 1, 2)
    await scripted.report(op.parts, 0, fences[0])
    await scripted.report(op.parts, 1, fences[1], error="no")
    seen = await op.status()
    assert seen.jobs == {"total": 4, "success": 1, "failed": 1, "running": 1, "waiting": 0}
    assert (seen.waiting_for, seen.progress) == (None, 0.5)
    assert seen.eta_seconds is not None
    await scripted.wait_again(op.parts, 2, fences[2], "disk full")
    fences = await scripted.claim(op.parts, "n1", 3)
    await scripted.report(op.parts, 3, fences[3])
    seen = await op.status()
    assert seen.waiting_for == "retry of 1 job, the next at 2013-01-01T00:00:02.500Z"
    assert seen.errors == ({"partition": "c", "text": "disk full"},)
    assert [s.op for s in await client.operations()] == [op.ref]


async def test_the_remaining_time_is_estimated_from_the_last_resume(
    client: aio.Client, scripted: ScriptedDaemons
) -> None:
    op = await client.start_operation("noop", TABLE)
    await scripted.plan(op.parts, "n1", ["a", "b", "c", "d"])
    fences = await scripted.claim(op.parts, "n1", 0, 1)
    await scripted.report(op.parts, 0, fences[0])
    assert (await op.status()).eta_seconds is not None
    await op.pause()
    assert (await op.status()).eta_seconds is None
    await op.resume()
    seen = await op.status()
    assert (seen.stage, seen.jobs["running"]) == ("open", 1)
    assert seen.eta_seconds is None, "no job has ended since the resume"
    await scripted.report(op.parts, 1, fences[1])
    await scripted.claim(op.parts, "n1", 2)
    known = client.operation(op.ref)
    for status in (await op.status(), await known.status(), await known.status()):
        assert status.eta_seconds is not None


async def test_errors_name_partitions_in_every_chunk_of_the_plan(client: aio.Client, scripted: ScriptedDaemons) -> None:
    op = await client.start_operation("noop", TABLE)
    # Long names in the second half: chunks differ in length, so the chunk of a partition cannot be computed.
    names = [f"{'x' * (10 if n < 6_000 else 200)}{n}" for n in range(9_000)]
    await scripted.plan(op.parts, "n1", names)
    plan = await client.etcd.get(client.keys.of(op.parts, "plan"))
    assert plan is not None
    assert json.loads(plan.value)["chunks"] > 2
    failing = [0, 4_321, 6_100, 7_777, 8_999]
    fences = await scripted.claim(op.parts, "n1", *failing)
    for n in failing:
        await scripted.wait_again(op.parts, n, fences[n], "disk full")
    seen = await op.status()
    assert [error["partition"] for error in seen.errors] == [names[n] for n in failing]
    assert (await op.status()).errors == seen.errors


async def test_status_without_a_capable_executor_names_the_type(client: aio.Client, scripted: ScriptedDaemons) -> None:
    await scripted.publish("rare")
    op = await client.start_operation("rare", TABLE)
    assert (await op.status()).waiting_for == "an executor that offers `rare`"


async def test_wait_returns_the_history_record(client: aio.Client, scripted: ScriptedDaemons) -> None:
    op = await client.start_operation("noop", TABLE)
    waiting = asyncio.create_task(op.wait(30))
    await scripted.plan(op.parts, "n1", ["a"])
    fences = await scripted.claim(op.parts, "n1", 0)
    await scripted.report(op.parts, 0, fences[0])
    await scripted.decide(op.parts, "n1", State.SUCCESS, 1, 0)
    assert (await op.status()).waiting_for == "completion"
    with pytest.raises(distop.NotAllowed, match="completing as success"):
        await op.cancel()
    await scripted.finish(op.parts, "n1", State.SUCCESS, {"rows": 7})
    result = await waiting
    assert (result.state, result.report, result.seconds) == ("success", {"rows": 7}, 2.5)
    assert result.jobs == {"total": 1, "success": 1, "failed": 0}
    assert result.raise_for_state() is result
    await scripted.clean(op.parts, "n1")
    assert await op.wait(30) == result
    assert (await op.status()).result == result
    assert [r.op for r in await client.history()] == [op.ref]
    assert await client.history("other") == []
    with pytest.raises(distop.NotAllowed, match="ended as success at 2013"):
        await op.cancel()


async def test_raise_for_state_of_a_failed_operation_has_its_report(
    client: aio.Client, scripted: ScriptedDaemons
) -> None:
    op = await client.start_operation("noop", TABLE)
    await scripted.plan(op.parts, "n1", ["a"])
    fences = await scripted.claim(op.parts, "n1", 0)
    await scripted.report(op.parts, 0, fences[0], error="bad row")
    await scripted.decide(op.parts, "n1", State.FAILED, 1, 1)
    await scripted.finish(op.parts, "n1", State.FAILED, {"v": 1}, [{"partition": "a", "text": "bad row\nmore"}])
    with pytest.raises(distop.OperationFailed, match=r"1 of 1 jobs failed \(partition a: bad row\)$") as caught:
        (await op.wait(30)).raise_for_state()
    assert caught.value.report == {"v": 1}


async def test_watch_ends_with_the_result(client: aio.Client, scripted: ScriptedDaemons) -> None:
    op = await client.start_operation("noop", TABLE)
    stages = []
    async for seen in op.watch(0.01):
        stages.append(seen.stage)
        if seen.stage == "planning":
            await scripted.plan(op.parts, "n1", [])
        elif seen.stage == "open":
            await scripted.finish(op.parts, "n1", State.SUCCESS)
    assert stages == ["planning", "open", "ended"]


async def test_wait_raises_at_its_timeout(client: aio.Client, scripted: ScriptedDaemons) -> None:
    op = await client.start_operation("noop", TABLE)
    with pytest.raises(distop.WaitTimeout, match=r"nyc.flights/noop/1 has not ended within 0.05 s; it goes on"):
        await op.wait(0.05)
    with pytest.raises(distop.InvalidArgument, match="is not an operation"):
        client.operation("noop/9")


# ---------------------------------------------------------------------- commands


async def test_pause_resume_and_cancel_may_be_repeated(client: aio.Client, scripted: ScriptedDaemons) -> None:
    op = await client.start_operation("noop", TABLE)
    keys = client.keys
    await op.pause()
    await op.pause()
    assert (await op.status()).waiting_for == "resume"
    await op.resume()
    assert (await op.status()).stage == "planning"
    await scripted.plan(op.parts, "n1", ["a"])
    await op.pause()
    assert await client.etcd.get(keys.gate(op.parts)) is None
    await op.resume()
    await op.resume()
    assert await client.etcd.get(keys.gate(op.parts)) is not None
    assert await client.etcd.get(keys.pending(op.parts)) is None
    await scripted.claim(op.parts, "n1", 0)
    await op.cancel("not needed")
    await op.cancel("again")
    seen = await op.status()
    assert (seen.state, seen.waiting_for) == ("cancelling", "its running jobs to stop")
    assert seen.cancel is not None
    assert (seen.cancel["reason"], seen.cancel["text"]) == ("user", "not needed")
    assert seen.cancel["by"]
    for command in (op.pause(), op.resume()):
        with pytest.raises(distop.NotAllowed, match="is cancelling"):
            await command


async def test_all_calls_for_an_unknown_operation_have_the_same_error(
    client: aio.Client, scripted: ScriptedDaemons
) -> None:
    unknown = client.operation("nyc.flights/noop/9")
    message = "^there is no operation nyc.flights/noop/9: it never existed, or its history has been deleted$"
    calls = (unknown.wait(30), unknown.status(), unknown.pause(), unknown.resume(), unknown.cancel(), unknown.rerun())
    for call in calls:
        with pytest.raises(distop.NotFound, match=message):
            await call


# ------------------------------------------------------------------------ tables


async def test_tables_are_added_replaced_and_removed(client: aio.Client, scripted: ScriptedDaemons) -> None:
    record = TableRecord("t", "parquet", "/somewhere")
    await client.add_table(record, check=False)
    await client.add_table(record, check=False)
    moved = TableRecord("t", "parquet", "/elsewhere", {"types": {"month": "int"}})
    with pytest.raises(distop.NotAllowed, match="already registered as parquet at /somewhere"):
        await client.add_table(moved, check=False)
    await client.add_table(moved, replace=True, check=False)
    assert moved in await client.tables()
    op = await client.start_operation("noop", "t")
    with pytest.raises(distop.NotAllowed, match=r"1 operation \(noop\) runs on 't'"):
        await client.remove_table("t")
    await scripted.plan(op.parts, "n1", [])
    await scripted.finish(op.parts, "n1", State.SUCCESS)
    await client.remove_table("t")
    with pytest.raises(distop.NotFound):
        await client.remove_table("t")
    with pytest.raises(distop.InvalidArgument, match="@cluster"):
        await client.add_table(TableRecord(CLUSTER_TABLE, "parquet", "/x"), check=False)
    await client.add_table(record, check=False)
    assert (await client.start_operation("noop", "t")).instance_id == 2, (
        "instance numbers continue after a removal (fault 42)"
    )


async def test_a_table_with_a_missing_location_is_refused(client: aio.Client) -> None:
    with pytest.raises(distop.InvalidArgument, match="does not exist|cannot be"):
        await client.add_table(TableRecord("t", "parquet", "/there/is/no/such/folder"))


# ---------------------------------------------------------------- blocking client


def test_the_blocking_client_works_from_threads_and_inside_a_running_loop(shared_etcd: EmbeddedEtcd) -> None:
    with distop.connect(shared_etcd.endpoint, namespace=f"client{next(_numbers)}") as client:

        async def prepare() -> None:
            async with aio.connect(shared_etcd.endpoint, namespace=client._inner.config.namespace) as other:
                scripted = ScriptedDaemons(other.etcd, other.keys)
                await scripted.publish("noop")
                await scripted.table(TABLE)
                await scripted.join("n1", "noop")

        asyncio.run(prepare())
        found: list[int] = []
        threads = [
            threading.Thread(target=lambda: found.append(client.start_operation("noop", TABLE).instance_id))
            for _ in range(8)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert sorted(found) == list(range(1, 9))

        async def inside() -> str:
            op = client.start_operation("noop", TABLE)
            op.cancel()
            return op.status().state

        assert asyncio.run(inside()) == "cancelling"
        op = client.operation("nyc.flights/noop/1")
        assert next(iter(op.watch())).stage == "planning"
        with pytest.raises(distop.WaitTimeout):
            op.wait(timeout=0.05)
        with pytest.raises(distop.NotFound):
            client.operation("nyc.flights/noop/99").wait()
        assert len(client.operations()) == 9
        assert client.history() == []
        assert list(client.nodes()) == ["n1"]
        assert [b.type_name for b in client.behaviors()] == ["noop"]
        assert [t.name for t in client.tables()] == [TABLE]
        assert repr(op) == "<Operation nyc.flights/noop/1>"


def test_the_default_client_is_configured_by_the_environment(
    shared_etcd: EmbeddedEtcd, monkeypatch: pytest.MonkeyPatch
) -> None:
    namespace = f"client{next(_numbers)}"
    monkeypatch.setenv("DISTOP_ETCD", shared_etcd.endpoint)
    monkeypatch.setenv("DISTOP_NAMESPACE", namespace)
    with pytest.raises(distop.UnknownBehavior):
        distop.start_operation("noop", TABLE)

    async def prepare() -> None:
        async with aio.connect(shared_etcd.endpoint, namespace=namespace) as other:
            scripted = ScriptedDaemons(other.etcd, other.keys)
            await scripted.publish("noop")
            await scripted.table(TABLE)

    asyncio.run(prepare())
    assert distop.start_operation("noop", TABLE).ref == "nyc.flights/noop/1"
    from distop.client import blocking_client

    assert blocking_client._default is not None
    blocking_client._default.close()


def test_a_client_connects_to_the_address_of_an_etcd3_client(shared_etcd: EmbeddedEtcd) -> None:
    etcd3 = distop.compat.etcd3()
    theirs = etcd3.client(host="127.0.0.1", port=shared_etcd.port)
    with distop.connect(client=theirs, namespace=f"client{next(_numbers)}") as client:
        assert client.tables() == []
    theirs.close()
    with pytest.raises(distop.InvalidArgument, match="not both"):
        configure("127.0.0.1:1", client=theirs)
    with pytest.raises(distop.InvalidArgument, match=r"is not an etcd3\.Etcd3Client"):
        configure(client=object())


async def test_a_wait_survives_an_outage_of_etcd(own_etcd: EmbeddedEtcd, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("WARNING", "distop.client")

    def logged() -> list[str]:
        return [record.message for record in caplog.records if record.name == "distop.client"]

    async with aio.connect(own_etcd.endpoint) as client:
        scripted = ScriptedDaemons(client.etcd, client.keys)
        await scripted.publish("noop")
        await scripted.table(TABLE)
        await scripted.join("n1", "noop")
        op = await client.start_operation("noop", TABLE)
        waiting = asyncio.create_task(op.wait(60))
        await scripted.plan(op.parts, "n1", [])
        own_etcd.kill()
        await until(lambda: bool(logged()), "the client logs that it waits for etcd")
        await asyncio.to_thread(own_etcd.restart)
        await until(lambda: len(logged()) > 1, "the client logs that etcd answers again")
        await scripted.finish(op.parts, "n1", State.SUCCESS)
        assert (await waiting).state == "success"
        first, again = logged()
        assert first.startswith("Waiting for etcd: ")
        assert again == "Connected to etcd again"


def test_an_unreachable_etcd_is_reported_in_one_line_after_the_connect_timeout() -> None:
    with pytest.raises(distop.EtcdUnavailable, match="could not be reached within 0.2 s") as caught:
        distop.connect("127.0.0.1:1", connect_timeout=0.2)
    assert "\n" not in str(caught.value)
