"""Results on real daemons (P9, L25): reports as models, results of jobs from etcd and files, and callbacks."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import subprocess
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from pydantic import BaseModel

import distop
from distop import aio
from distop.errors import InvalidArgument, NotFound, UnreadableRecord
from distop.protocol.records import TableRecord
from tests.integration.conftest import TABLE
from tests.integration.large_behavior import LargeReport, LargeResult
from tests.integration.scripted_daemons import ScriptedDaemons
from tests.support.behaviors import sample_env
from tests.support.etcd import compacted, connected, until

if TYPE_CHECKING:
    from distop.services.operation_results import OperationResult
    from distop.store.embedded import EmbeddedEtcd
    from tests.support.daemons import Daemons

__all__ = ["sample_env"]

pytestmark = pytest.mark.etcd

BIG = 200_000


class Other(BaseModel):
    """A model that no report of ``large`` fits."""

    rows: int


def run_large(group: Daemons, env: dict[str, str], tmp_path: Path, *sizes: int) -> distop.Operation:
    group.start("a", options=("--shared-dir", str(tmp_path / "shared")), env=env)
    client = distop.connect(group.endpoint, shared_dir=str(tmp_path / "shared"))
    op = client.start_operation("large", TABLE, {"sizes": list(sizes)})
    assert op.wait(60).raise_for_state().report == {"length": sum(sizes)}
    return op


def test_P9_results_are_parsed_as_models_and_read_one_by_one(
    group: Daemons, sample_env: dict[str, str], tmp_path: Path
) -> None:
    """Results are available after the end, and those too large for etcd come from their files."""
    op = run_large(group, sample_env, tmp_path, 3, BIG, 5)
    result = op.wait(report=LargeReport)
    assert result.report == LargeReport(length=BIG + 8)
    assert result.record["report"] == {"length": BIG + 8}
    assert op.wait().report_as(LargeReport) == LargeReport(length=BIG + 8)
    found = list(op.results(LargeResult))
    assert [(r.partition, r.name, r.success, r.executor, r.attempt) for r in found] == [
        (0, "p0", True, "a", 1),
        (1, "p1", True, "a", 1),
        (2, "p2", True, "a", 1),
    ]
    assert [r.result for r in found] == [LargeResult(text="x" * size) for size in (3, BIG, 5)]
    assert [r.file is not None for r in found] == [False, True, False]
    path = Path(found[1].file["path"])
    assert path.relative_to(tmp_path / "shared").parts[1] == "results", "below the folder of the namespace"
    data = path.read_bytes()
    assert found[1].file == {"path": str(path), "bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    first = op.results()
    assert next(first).result == {"text": "xxx"}
    first.close()  # type: ignore[attr-defined]
    for mismatch in (
        lambda: op.wait(report=Other),
        lambda: op.wait().report_as(Other),
        lambda: list(op.results(Other)),
    ):
        with pytest.raises(InvalidArgument, match=r"does not fit Other: at rows: Field required"):
            mismatch()
    for not_a_model in (lambda: op.wait(report=int), lambda: op.results(dict), lambda: op.wait().report_as("x")):  # type: ignore[arg-type]
        with pytest.raises(InvalidArgument, match="can only be read as a pydantic model"):
            not_a_model()
    data_of = path.read_bytes()
    path.write_bytes(data_of.replace(b"xx", b"yy", 1))
    with pytest.raises(UnreadableRecord, match="whose size or checksum has changed"):
        list(op.results())
    path.unlink()
    with pytest.raises(NotFound, match=r"cannot be read here: there is no such file"):
        list(op.results())


def test_P9_too_large_results_fail_unless_the_behavior_uses_files(
    group: Daemons, sample_env: dict[str, str], tmp_path: Path
) -> None:
    group.client.add_table(TableRecord("named", "spark", "db.t"), check=False)
    group.start("a", env=sample_env)
    sizes = {"sizes": [3, BIG]}
    refused = group.client.start_operation("refusing", TABLE, sizes, failure_policy="collect_all").wait(60)
    assert (refused.state, dict(refused.jobs)) == ("failed", {"total": 2, "success": 1, "failed": 1})
    assert "it has 200011 bytes: at most 64512 are allowed; put large results into a file" in refused.errors[0]["text"]
    without_shared_dir = group.client.start_operation("large", "named", {"sizes": [BIG]}).wait(60)
    assert without_shared_dir.state == "failed"
    assert "start the executors with --shared-dir" in without_shared_dir.errors[0]["text"]
    assert not list(tmp_path.rglob("results"))


def test_P9_results_are_read_during_the_operation_after_it_and_until_compaction(etcd: EmbeddedEtcd) -> None:
    """Results of ended jobs are available while others run. After the clean-up, they come from etcd's history, and
    after a compaction they raise NotFound.
    """

    async def script() -> None:
        async with aio.connect(etcd.endpoint) as client:
            scripted = ScriptedDaemons(client.etcd, client.keys)
            await scripted.publish("noop")
            await scripted.table(TABLE)
            await scripted.join("n1", "noop")
            op = await client.start_operation("noop", TABLE)
            assert [r async for r in op.results()] == [], "an operation without a plan has no results"
            names = [f"p{n}" for n in range(150)]
            await scripted.plan(op.parts, "n1", names)
            fences = await scripted.claim(op.parts, "n1", 0, 1, 120)
            await scripted.report(op.parts, 0, fences[0], name="p0")
            await scripted.report(op.parts, 120, fences[120], error="no", name="p120")
            seen = [(r.partition, r.success, r.error) async for r in op.results()]
            assert seen == [(0, True, ""), (120, False, "no")]
            iteration = op.results()
            assert (await anext(iteration)).partition == 0
            await scripted.report(op.parts, 1, fences[1], name="p1")
            await op.cancel()
            await scripted.finish(op.parts, "n1", distop.protocol.records.State.CANCELLED)
            await scripted.clean(op.parts, "n1")
            assert [r.partition async for r in iteration] == [120]
            assert [r.partition async for r in op.results()] == [0, 1, 120]
            async with connected(etcd.endpoint) as other:
                await compacted(other, (await other.status()).revision)
            with pytest.raises(NotFound, match="etcd has compacted them since it ended"):
                await anext(op.results())
            with pytest.raises(NotFound, match="there is no operation"):
                await anext(client.operation("t/noop/9").results())

    asyncio.run(script())


OTHER_PROCESS = """
import sys, distop
with distop.connect(sys.argv[1], shared_dir=sys.argv[3]) as client:
    op = client.operation(sys.argv[2])
    print(op.wait(60).report["length"], [len(r.result["text"]) for r in op.results()])
"""


def test_L25_another_process_waits_before_and_after_the_end_and_restarts(
    group: Daemons, sample_env: dict[str, str], tmp_path: Path
) -> None:
    """A process that only knows the operation's name waits for it. The executor is killed and restarted meanwhile."""
    shared = str(tmp_path / "shared")
    options = ("--shared-dir", shared)
    (daemon,) = group.start("a", options=options, env=sample_env)
    daemon.stop()
    op = group.client.start_operation("large", TABLE, {"sizes": [3, BIG]})
    waiting = subprocess.Popen(
        [sys.executable, "-c", OTHER_PROCESS, group.endpoint, op.ref, shared], stdout=subprocess.PIPE, text=True
    )
    daemon.start()
    group.eventually(lambda: "a" in group.live(), "the executor is live again")
    daemon.kill()
    daemon.start()
    output = f"{BIG + 3} [3, {BIG}]\n"
    assert waiting.communicate(timeout=60) == (output, None)
    daemon.stop()
    again = [sys.executable, "-c", OTHER_PROCESS, group.endpoint, op.ref, shared]
    assert subprocess.run(again, capture_output=True, text=True, check=True, timeout=60).stdout == output
    with distop.connect(group.endpoint) as new_client:
        assert new_client.operation(op.ref).wait(10, report=LargeReport).report == LargeReport(length=BIG + 3)


# ------------------------------------------------------------------------ callbacks


def test_P9_callbacks_run_once_in_a_thread_and_their_errors_are_logged(
    group: Daemons, caplog: pytest.LogCaptureFixture
) -> None:
    group.start("a")
    op = group.client.start_operation("noop", TABLE, {"jobs": 2, "sleep": 1})
    called: list[tuple[str, str, str]] = []
    done = threading.Event()

    def record_end(result: OperationResult) -> None:
        # A callback may use the client, and block.
        status = group.client.operation(result.op).status()
        called.append((result.op, result.state, threading.current_thread().name))
        assert status.ended
        done.set()

    def fail(result: OperationResult) -> None:
        raise RuntimeError("no")

    op.add_done_callback(fail)
    op.add_done_callback(record_end)
    with pytest.raises(InvalidArgument, match="a callback must be a function"):
        op.add_done_callback(5)  # type: ignore[arg-type]
    assert op.wait(60).success
    assert done.wait(30)
    assert called == [(op.ref, "success", "distop-callback")]
    group.eventually(lambda: "Error in a callback" in caplog.text, "the error of the callback is logged")
    done.clear()
    op.add_done_callback(record_end)
    assert done.wait(30), "a callback on an ended operation runs at once"
    assert len(called) == 2


async def test_P9_callbacks_of_the_asyncio_client_run_in_its_loop(
    etcd: EmbeddedEtcd, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, "distop.client")
    client = await aio.connect(etcd.endpoint)
    scripted = ScriptedDaemons(client.etcd, client.keys)
    await scripted.publish("noop")
    await scripted.table(TABLE)
    await scripted.join("n1", "noop")
    op, other = await client.start_operation("noop", TABLE), await client.start_operation("noop", TABLE)
    loop, called = asyncio.get_running_loop(), asyncio.Queue[Any]()

    async def later(result: OperationResult) -> None:
        await asyncio.sleep(0)
        called.put_nowait(("later", result.state, asyncio.get_running_loop() is loop))

    def now(result: OperationResult) -> None:
        called.put_nowait(("now", result.state, asyncio.get_running_loop() is loop))

    def fail(result: OperationResult) -> None:
        raise RuntimeError("no")

    for function in (fail, now, later, now):
        op.add_done_callback(function)
    other.add_done_callback(now)
    assert op.remove_done_callback(now) == 2
    op.add_done_callback(now)
    await scripted.plan(op.parts, "n1", [])
    await scripted.finish(op.parts, "n1", distop.protocol.records.State.SUCCESS)
    async with asyncio.timeout(20):
        calls = sorted([await called.get(), await called.get()])
    assert calls == [("later", "success", True), ("now", "success", True)]
    assert "Error in a callback" in caplog.text
    await op.wait(10)
    op.add_done_callback(now)
    async with asyncio.timeout(20):
        assert await called.get() == ("now", "success", True)
    await client.close()
    await until(lambda: "not calling its callbacks" in caplog.text, "the client logs that it drops callbacks")
    assert called.empty()
