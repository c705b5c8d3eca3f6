"""Keys that a submitter of one table forges below ``distOp.<table>.`` give no access to other data."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from distop.errors import EtcdUnavailable
from distop.protocol.identity import plan_digest
from distop.protocol.keys import Keys
from distop.protocol.plan import Gate, PartitionPlan, Pinned, Plan, chunked
from distop.protocol.records import OperationRef, Spec, TableRecord
from distop.protocol.txn import Delete, Put, Txn
from distop.worker.daemon_side.host import JobItem, RunRequest, WorkerConfig, WorkerError, WorkerHost
from distop.worker.daemon_side.requests import CompleteRequest, Listener, PlanPages
from tests.support.behaviors import sample_env
from tests.support.daemons import daemons
from tests.support.etcd import connected

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Collection, Iterator, Mapping
    from pathlib import Path

    from distop.protocol.txn import TxnOperation
    from distop.store.embedded import EmbeddedEtcd
    from tests.support.daemons import Daemons

__all__ = ["sample_env"]

KEYS = Keys()
OP = "t/sample/1"
MINE = TableRecord("t", "parquet", "/data/mine")
THEIRS = TableRecord("theirs", "parquet", "/data/theirs")
FORGED = {
    "location": replace(MINE, location=THEIRS.location).to_json(),
    "catalog": replace(MINE, options={"catalog": "sales"}).to_json(),
    "format": replace(MINE, format="iceberg").to_json(),
    "another table's record": THEIRS.to_json(),
    "no record": None,
    "nonsense": {"name": 5},
}
ROW = PartitionPlan(0, "a").to_json()


class TableRegistry:
    """The registered table records. ``reads`` counts calls of :meth:`find`."""

    def __init__(self) -> None:
        self.tables: dict[str, TableRecord] = {"t": MINE, "theirs": THEIRS}
        self.reads = 0
        self.unavailable = False

    async def find(self, names: Collection[str]) -> Mapping[str, TableRecord | None]:
        self.reads += 1
        if self.unavailable:
            raise EtcdUnavailable("etcd is not available")
        return {name: self.tables.get(name) for name in names}


@pytest.fixture
def registry() -> TableRegistry:
    return TableRegistry()


@pytest.fixture
async def worker(tmp_path: Path, sample_env: dict[str, str], registry: TableRegistry) -> AsyncIterator[WorkerHost]:
    env = sample_env
    started = WorkerHost(WorkerConfig(tmp_path / "work", "ex", "inc-1", env=env, grace=0.3, find_tables=registry.find))
    try:
        await started.start()
        yield started
    finally:
        await started.stop(10)


async def nothing(start: int) -> tuple[list[str], int | None]:
    return [], None


async def run(
    worker: WorkerHost, table: Any, arg: dict[str, Any], row: Any = ROW, op: str = OP, opened: int = 7
) -> tuple[str, str]:
    ends: list[Any] = []
    request = RunRequest(op, "sample", arg, table, (JobItem(row, 1, 1),), batch=False, opened=opened)
    await worker.run(request, ends.extend)
    (end,) = ends
    return end.kind, end.error


async def end_of_each_request(worker: WorkerHost, table: Any, diary: Path, row: Any = ROW) -> list[tuple[str, str]]:
    """The result of each kind of request that has the table's record."""
    arg, results = {"names": ["a"], "diary": str(diary)}, [await run(worker, table, {"diary": str(diary)}, row)]
    for request in (
        worker.plan(OP, "sample", arg, table, None),
        worker.complete(CompleteRequest(OP, "sample", arg, table, "success", 1, 1, 0, nothing)),
        worker.cleanup(OP, "sample", arg, table, [JobItem(row, 1, 1)]),
        worker.sweep(OP, table, plans=True, stages=True, earlier=True),
    ):
        try:
            await request
            results.append(("done", ""))
        except WorkerError as error:
            results.append((error.kind, str(error)))
    return results


@pytest.mark.parametrize("forged", FORGED)
async def test_a_forged_table_record_is_refused_before_any_code_runs(
    worker: WorkerHost, tmp_path: Path, forged: str
) -> None:
    diary = tmp_path / "diary"
    for kind, text in await end_of_each_request(worker, FORGED[forged], diary):
        assert kind == "fatal"
        assert text.startswith(
            "the registered record of table t differs from the one with which t/sample/1 was started: "
        )
    assert not diary.exists()


async def test_the_registered_record_with_options_from_planning_is_accepted(worker: WorkerHost, tmp_path: Path) -> None:
    found = MINE.extended({"columns": {"a": "int"}, "partition_types": {}}).to_json()
    results = await end_of_each_request(worker, found, tmp_path / "diary")
    assert [kind for kind, _ in results] == ["success", *["done"] * 4]


async def test_a_forged_record_of_a_second_table_is_refused(worker: WorkerHost, tmp_path: Path) -> None:
    diary, pay = tmp_path / "diary", replace(THEIRS, location="/data/pay")
    for other in (replace(MINE, location="/data/theirs"), pay, replace(THEIRS, name="u")):
        row = PartitionPlan(0, "a", beside=(Pinned(other),)).to_json()
        job, _, _, cleanup, _ = await end_of_each_request(worker, MINE.to_json(), diary, row)
        for kind, text in (job, cleanup):
            assert (kind, text.partition(" differs ")[0]) == ("fatal", f"the registered record of table {other.name}")

        async def page(number: int, row: Any = row) -> tuple[list[str], int | None]:
            return [json.dumps(row)], None

        plan = PlanPages("", True, 1, page)
        with pytest.raises(WorkerError, match="differs from the one with which t/sample/1 was started"):
            await worker.complete(
                CompleteRequest(
                    OP, "sample", {"does": {"plan": ""}}, MINE.to_json(), "success", 0, 0, 0, nothing, plan=plan
                )
            )
    assert "start" not in diary.read_text()
    malformed = {**ROW, "beside": [{"table": None}]}
    assert (await run(worker, MINE.to_json(), {}, malformed))[0] == "fatal"
    good = PartitionPlan(0, "a", beside=(Pinned(THEIRS),)).to_json()
    assert await run(worker, MINE.to_json(), {}, good) == ("success", "")


async def test_jobs_of_an_operation_read_the_registry_once(worker: WorkerHost, registry: TableRegistry) -> None:
    for _ in range(3):
        assert await run(worker, MINE.to_json(), {}) == ("success", "")
    assert registry.reads == 1
    assert await run(worker, None, {}, op="@cluster/sample/1") == ("success", "")
    assert registry.reads == 1
    kind, error = await run(worker, MINE.to_json(), {}, op="@cluster/sample/2")
    assert (kind, "the registered record of table @cluster differs" in error) == ("fatal", True)
    registry.unavailable = True
    kind, error = await run(worker, MINE.to_json(), {}, op="t/sample/2")
    assert (kind, error) == ("refused", "cannot read the records of its tables: etcd is not available"), "it is retried"
    with pytest.raises(WorkerError, match="cannot read the records of its tables: etcd is not available") as caught:
        await worker.plan(OP, "sample", {}, MINE.to_json(), None)
    assert caught.value.kind == "transient"


async def test_hole_2_a_reused_operation_number_is_compared_again(
    worker: WorkerHost, registry: TableRegistry, tmp_path: Path
) -> None:
    """An earlier comparison for an operation with this name is void once the table's record has changed."""
    assert await run(worker, MINE.to_json(), {}) == ("success", "")
    registry.tables["t"] = replace(MINE, location="/data/moved")
    diary = tmp_path / "diary"
    for opened in (8, 0):
        kind, error = await run(worker, MINE.to_json(), {"diary": str(diary)}, opened=opened)
        assert (kind, "the table, or the operation's copy, was changed or removed" in error) == ("fatal", True)
    assert not diary.exists()
    moved, reads = registry.tables["t"].to_json(), registry.reads
    for n in (1, 2):  # without a gate, comparisons are not cached
        assert await run(worker, moved, {}, op="t/sample/3", opened=0) == ("success", "")
        assert registry.reads == reads + n


async def test_only_the_forged_one_of_several_operations_is_refused(
    worker: WorkerHost, registry: TableRegistry
) -> None:
    ends: dict[str, list[Any]] = {"t/sample/1": [], "t/sample/2": [], "theirs/sample/1": []}
    tables = [MINE.to_json(), FORGED["location"], THEIRS.to_json()]
    requests = [
        (RunRequest(op, "sample", {}, table, (JobItem(ROW, 1, 1),), batch=False, opened=7), Listener(ends[op].extend))
        for op, table in zip(ends, tables, strict=True)
    ]
    await worker.run_in_turn(requests)
    assert [found[0].kind for found in ends.values()] == ["success", "fatal", "success"]
    assert registry.reads == 1


# ------------------------------------------------------------------ daemons


@pytest.fixture
def group(etcd: EmbeddedEtcd, tmp_path: Path) -> Iterator[Daemons]:
    """A group with a table ``t``. Its history is not checked, because forged keys violate invariants."""
    with daemons(etcd.endpoint, tmp_path) as found:
        found.client.add_table(TableRecord("t", "parquet", str(tmp_path)), check=False)
        yield found


def write_keys(group: Daemons, *ops: TxnOperation) -> None:
    """Write keys directly, as a submitter can."""

    async def write() -> None:
        async with connected(group.endpoint) as client:
            assert (await client.commit(Txn((), ops))).succeeded

    asyncio.run(write())


def spec_with_other_location(group: Daemons, ref: OperationRef) -> Put:
    """The operation's spec with another location in its table's record."""

    async def read() -> bytes:
        async with connected(group.endpoint) as client:
            kv = await client.get(KEYS.of(ref, "spec"))
            assert kv is not None
            return kv.value

    spec = Spec.decode(asyncio.run(read()))
    assert spec.table is not None
    return Put(KEYS.of(ref, "spec"), replace(spec, table=replace(spec.table, location="/etc")).encode())


@pytest.mark.parametrize("planned", [False, True])
def test_an_operation_with_a_forged_record_fails_and_runs_no_job(
    group: Daemons, sample_env: dict[str, str], tmp_path: Path, planned: bool
) -> None:
    """With ``planned``, its plan is forged, too, so that no coordinator plans it."""
    group.start("ann", env=sample_env)  # publishes the type
    diary = tmp_path / "diary"
    operation = group.client.start_operation("sample", "t", {"names": ["a"], "diary": str(diary)}, delay=3600)
    ref = OperationRef.parse(operation.ref)
    ops: list[TxnOperation] = [spec_with_other_location(group, ref)]
    if planned:
        chunks = chunked([PartitionPlan(0, "a", 1, (("/etc/passwd", 1, 1),))])
        plan = Plan(1, "", plan_digest(chunks), 1)
        ops += [Put(KEYS.chunk(ref, 0), chunks[0]), Put(KEYS.of(ref, "plan"), plan.encode())]
        ops += [Put(KEYS.gate(ref), Gate(1).encode()), Delete(KEYS.pending(ref))]
    else:
        ops.append(Put(KEYS.pending(ref), b"planning"))
    write_keys(group, *ops, Put(KEYS.of(ref, "state"), b"running"), Put(KEYS.run_ops("t"), b'{"sample":1}'))
    result = operation.wait(60)
    assert result.state == "failed", group.tails()
    assert any(
        "the registered record of table t differs from the one with which" in error["text"] for error in result.errors
    )
    assert not diary.exists()
    retried = [line for line in group.lines() if "again in" in line]
    assert not retried, "a forged record is not retried"


def test_hole_2_forged_keys_with_a_used_number_reach_no_previous_location(
    group: Daemons, sample_env: dict[str, str], tmp_path: Path
) -> None:
    """The executor compared the previous record for this operation number, and must not accept that record again."""
    group.start("ann", env=sample_env)  # publishes the type
    operation = group.client.prepare_operation("sample", "t", {"names": ["a"]}, external_id="x")
    ref = OperationRef.parse(operation.ref)

    async def read() -> bytes:
        async with connected(group.endpoint) as client:
            kv = await client.get(KEYS.of(ref, "spec"))
            assert kv is not None
            return kv.value

    spec = asyncio.run(read())
    operation.confirm()
    assert operation.wait(60).state == "success", group.tails()
    (tmp_path / "moved").mkdir()
    group.client.add_table(TableRecord("t", "parquet", str(tmp_path / "moved")), check=False, replace=True)
    diary = tmp_path / "diary"
    chunks = chunked([PartitionPlan(0, "a")])
    write_keys(
        group,
        Put(KEYS.of(ref, "spec"), spec),
        Put(KEYS.of(ref, "arg"), json.dumps({"diary": str(diary)}).encode()),
        Put(KEYS.chunk(ref, 0), chunks[0]),
        Put(KEYS.of(ref, "plan"), Plan(1, "", plan_digest(chunks), 1).encode()),
        Put(KEYS.gate(ref), Gate(1).encode()),
        Put(KEYS.of(ref, "state"), b"running"),
        Put(KEYS.run_ops("t"), b'{"sample":1}'),
    )
    refusal = f"differs from the one with which {ref} was started"
    group.eventually(
        lambda: any(refusal in line for line in group.lines()) or diary.exists(), "the operation is refused"
    )
    assert not diary.exists()


def test_operations_started_before_a_table_was_changed_fail(
    group: Daemons, sample_env: dict[str, str], tmp_path: Path
) -> None:
    group.start("ann", env=sample_env)
    (tmp_path / "moved").mkdir()
    prepared = group.client.prepare_operation("sample", "t", {"names": ["a"]}, external_id="x")
    group.client.add_table(TableRecord("t", "parquet", str(tmp_path / "moved")), check=False, replace=True)
    prepared.confirm()
    result = prepared.wait(60)
    assert result.state == "failed"
    assert "was started: the table, or the operation's copy, was changed" in result.errors[0]["text"]
    assert group.client.start_operation("sample", "t", {"names": ["a"]}).wait(60).state == "success"
