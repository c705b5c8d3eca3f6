"""What a submitter of one table writes below ``distOp.<table>.`` leads no executor to other data."""

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
from distop.worker.daemon_side.host import JobItem, RunRequest, Worker, WorkerConfig, WorkerError
from distop.worker.daemon_side.requests import Listener, PlanPages
from tests.support.behaviors import sample_env
from tests.support.daemons import daemons
from tests.support.etcd import connected

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Collection, Iterator, Mapping
    from pathlib import Path

    from distop.protocol.txn import Operation
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


class Records:
    """The registered records; ``asked`` counts."""

    def __init__(self) -> None:
        self.there: dict[str, TableRecord] = {"t": MINE, "theirs": THEIRS}
        self.asked = 0
        self.away = False

    async def find(self, names: Collection[str]) -> Mapping[str, TableRecord | None]:
        self.asked += 1
        if self.away:
            raise EtcdUnavailable("etcd is away")
        return {name: self.there.get(name) for name in names}


@pytest.fixture
def records() -> Records:
    return Records()


@pytest.fixture
async def worker(tmp_path: Path, sample_env: dict[str, str], records: Records) -> AsyncIterator[Worker]:
    env = sample_env
    one = Worker(WorkerConfig(tmp_path / "work", "ex", "inc-1", env=env, grace=0.3, find_tables=records.find))
    try:
        await one.start()
        yield one
    finally:
        await one.stop(10)


async def nothing(start: int) -> tuple[list[str], int | None]:
    return [], None


async def run(
    worker: Worker, table: Any, arg: dict[str, Any], row: Any = ROW, op: str = OP, opened: int = 7
) -> tuple[str, str]:
    ends: list[Any] = []
    asked = RunRequest(op, "sample", arg, table, (JobItem(row, 1, 1),), batch=False, opened=opened)
    await worker.run(asked, ends.extend)
    (end,) = ends
    return end.kind, end.error


async def everything(worker: Worker, table: Any, diary: Path, row: Any = ROW) -> list[tuple[str, str]]:
    """How each request that has the record ends."""
    arg, told = {"names": ["a"], "diary": str(diary)}, [await run(worker, table, {"diary": str(diary)}, row)]
    for asked in (
        worker.plan(OP, "sample", arg, table, None),
        worker.complete(OP, "sample", arg, table, "success", 1, 1, 0, nothing),
        worker.cleanup(OP, "sample", arg, table, [JobItem(row, 1, 1)]),
        worker.sweep(OP, table),
    ):
        try:
            await asked
            told.append(("done", ""))
        except WorkerError as error:
            told.append((error.kind, str(error)))
    return told


@pytest.mark.parametrize("forged", FORGED)
async def test_a_record_that_is_not_the_registered_one_reaches_no_code(
    worker: Worker, tmp_path: Path, forged: str
) -> None:
    diary = tmp_path / "diary"
    for kind, text in await everything(worker, FORGED[forged], diary):
        assert kind == "fatal"
        assert text.startswith(
            "the registered record of table t differs from the one with which t/sample/1 was started: "
        )
    assert not diary.exists()


async def test_the_registered_record_reaches_all_with_what_planning_found(worker: Worker, tmp_path: Path) -> None:
    found = MINE.extended({"columns": {"a": "int"}, "partition_types": {}}).to_json()
    told = await everything(worker, found, tmp_path / "diary")
    assert [kind for kind, _ in told] == ["success", *["done"] * 4]


async def test_a_record_beside_that_is_not_the_registered_one_is_not_read(worker: Worker, tmp_path: Path) -> None:
    diary, pay = tmp_path / "diary", replace(THEIRS, location="/data/pay")
    for other in (replace(MINE, location="/data/theirs"), pay, replace(THEIRS, name="u")):
        row = PartitionPlan(0, "a", beside=(Pinned(other),)).to_json()
        job, _, _, cleanup, _ = await everything(worker, MINE.to_json(), diary, row)
        for kind, text in (job, cleanup):
            assert (kind, text.partition(" differs ")[0]) == ("fatal", f"the registered record of table {other.name}")

        async def page(number: int, row: Any = row) -> tuple[list[str], int | None]:
            return [json.dumps(row)], None

        plan = PlanPages("", True, 1, page)
        with pytest.raises(WorkerError, match="differs from the one with which t/sample/1 was started"):
            await worker.complete(
                OP, "sample", {"does": {"plan": ""}}, MINE.to_json(), "success", 0, 0, 0, nothing, plan=plan
            )
    assert "start" not in diary.read_text()
    malformed = {**ROW, "beside": [{"table": None}]}
    assert (await run(worker, MINE.to_json(), {}, malformed))[0] == "fatal"
    good = PartitionPlan(0, "a", beside=(Pinned(THEIRS),)).to_json()
    assert await run(worker, MINE.to_json(), {}, good) == ("success", "")


async def test_jobs_ask_for_the_record_once_and_not_on_no_table(worker: Worker, records: Records) -> None:
    for _ in range(3):
        assert await run(worker, MINE.to_json(), {}) == ("success", "")
    assert records.asked == 1
    assert await run(worker, None, {}, op="@cluster/sample/1") == ("success", "")
    assert records.asked == 1
    kind, error = await run(worker, MINE.to_json(), {}, op="@cluster/sample/2")
    assert (kind, "the registered record of table @cluster differs" in error) == ("fatal", True)
    records.away = True
    kind, error = await run(worker, MINE.to_json(), {}, op="t/sample/2")
    assert (kind, error) == ("refused", "cannot read the records of its tables: etcd is away"), "it is tried again"
    with pytest.raises(WorkerError, match="cannot read the records of its tables: etcd is away") as caught:
        await worker.plan(OP, "sample", {}, MINE.to_json(), None)
    assert caught.value.kind == "transient"


async def test_hole_2_a_number_that_is_used_again_is_compared_again(
    worker: Worker, records: Records, tmp_path: Path
) -> None:
    """What was compared for an operation of this name counts no more once the table has another record."""
    assert await run(worker, MINE.to_json(), {}) == ("success", "")
    records.there["t"] = replace(MINE, location="/data/moved")
    diary = tmp_path / "diary"
    for opened in (8, 0):
        kind, error = await run(worker, MINE.to_json(), {"diary": str(diary)}, opened=opened)
        assert (kind, "the table, or the operation's copy, was changed or removed" in error) == ("fatal", True)
    assert not diary.exists()
    moved, asked = records.there["t"].to_json(), records.asked
    for n in (1, 2):  # without a gate nothing is kept
        assert await run(worker, moved, {}, op="t/sample/3", opened=0) == ("success", "")
        assert records.asked == asked + n


async def test_of_several_operations_in_turn_the_forged_one_alone_is_refused(worker: Worker, records: Records) -> None:
    ends: dict[str, list[Any]] = {"t/sample/1": [], "t/sample/2": [], "theirs/sample/1": []}
    tables = [MINE.to_json(), FORGED["location"], THEIRS.to_json()]
    asked = [
        (RunRequest(op, "sample", {}, table, (JobItem(ROW, 1, 1),), batch=False, opened=7), Listener(ends[op].extend))
        for op, table in zip(ends, tables, strict=True)
    ]
    await worker.run_in_turn(asked)
    assert [found[0].kind for found in ends.values()] == ["success", "fatal", "success"]
    assert records.asked == 1


# ------------------------------------------------------------------ daemons


@pytest.fixture
def group(etcd: EmbeddedEtcd, tmp_path: Path) -> Iterator[Daemons]:
    """With a table ``t``. The history is not checked against the invariants: what is forged breaks them."""
    with daemons(etcd.endpoint, tmp_path) as found:
        found.client.add_table(TableRecord("t", "parquet", str(tmp_path)), check=False)
        yield found


def put(group: Daemons, *ops: Operation) -> None:
    """As a submitter does by hand."""

    async def write() -> None:
        async with connected(group.endpoint) as client:
            assert (await client.commit(Txn((), ops))).succeeded

    asyncio.run(write())


def forged(group: Daemons, ref: OperationRef) -> Put:
    """The operation's spec, with another location in its table's record."""

    async def read() -> bytes:
        async with connected(group.endpoint) as client:
            kv = await client.get(KEYS.of(ref, "spec"))
            assert kv is not None
            return kv.value

    spec = Spec.decode(asyncio.run(read()))
    assert spec.table is not None
    return Put(KEYS.of(ref, "spec"), replace(spec, table=replace(spec.table, location="/etc")).encode())


@pytest.mark.parametrize("planned", [False, True])
def test_an_operation_with_a_forged_record_fails_and_reads_nothing(
    group: Daemons, sample_env: dict[str, str], tmp_path: Path, planned: bool
) -> None:
    """Also where its plan is forged, so that no coordinator plans it."""
    group.start("ann", env=sample_env)  # publishes the type
    diary = tmp_path / "diary"
    operation = group.client.start_operation("sample", "t", {"names": ["a"], "diary": str(diary)}, delay=3600)
    ref = OperationRef.parse(operation.ref)
    ops: list[Operation] = [forged(group, ref)]
    if planned:
        chunks = chunked([PartitionPlan(0, "a", 1, (("/etc/passwd", 1, 1),))])
        plan = Plan(1, "", plan_digest(chunks), 1)
        ops += [Put(KEYS.chunk(ref, 0), chunks[0]), Put(KEYS.of(ref, "plan"), plan.encode())]
        ops += [Put(KEYS.gate(ref), Gate(1).encode()), Delete(KEYS.pending(ref))]
    else:
        ops.append(Put(KEYS.pending(ref), b"planning"))
    put(group, *ops, Put(KEYS.of(ref, "state"), b"running"), Put(KEYS.run_ops("t"), b'{"sample":1}'))
    result = operation.wait(60)
    assert result.state == "failed", group.tails()
    assert any(
        "the registered record of table t differs from the one with which" in error["text"] for error in result.errors
    )
    assert not diary.exists()
    retried = [line for line in group.lines() if "again in" in line]
    assert not retried, "no attempt more mends it"


def test_hole_2_keys_by_hand_under_a_number_that_was_used_reach_no_former_location(
    group: Daemons, sample_env: dict[str, str], tmp_path: Path
) -> None:
    """The executor had compared the former record for the operation of this number, and took it again."""
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
    put(
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
    group.eventually(lambda: any(refusal in line for line in group.lines()) or diary.exists(), "a refusal")
    assert not diary.exists()


def test_a_table_whose_record_was_changed_fails_what_was_started_before(
    group: Daemons, sample_env: dict[str, str], tmp_path: Path
) -> None:
    group.start("ann", env=sample_env)
    (tmp_path / "moved").mkdir()
    waits = group.client.prepare_operation("sample", "t", {"names": ["a"]}, external_id="x")
    group.client.add_table(TableRecord("t", "parquet", str(tmp_path / "moved")), check=False, replace=True)
    waits.confirm()
    result = waits.wait(60)
    assert result.state == "failed"
    assert "was started: the table, or the operation's copy, was changed" in result.errors[0]["text"]
    assert group.client.start_operation("sample", "t", {"names": ["a"]}).wait(60).state == "success"
