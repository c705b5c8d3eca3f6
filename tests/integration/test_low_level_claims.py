"""Low-level claims of workers beside real daemons. The history of each test is audited."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import threading
import time
from typing import TYPE_CHECKING, Any

import pytest

import distop
from distop import Abort, Complete, InvalidToken, Release, Retry, aio
from distop.behavior import Retry as Rule
from distop.errors import InvalidArgument, JobFailed, NotAllowed, UsageError

if TYPE_CHECKING:
    from collections.abc import Callable

    from distop.blocking import Client, Operation
    from distop.services.claims.owned_jobs import OwnedJob
    from tests.support.daemons import Daemons

pytestmark = [pytest.mark.etcd, pytest.mark.rotating]

LIMIT = 60
QUICK = Rule(attempts=3, initial=0.05, maximum=0.2)


def until(found: Callable[[], Any], seconds: float = 30) -> Any:
    """Call ``found`` until it returns a true value, and return that."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if answer := found():
            return answer
        threading.Event().wait(0.02)
    raise AssertionError("time-out")


def start_copies(client: Client, count: int = 1, **options: Any) -> list[Operation]:
    client.register_type("copy", {"type": "object"}, retry=QUICK)
    return [client.start_operation("copy", "@cluster", {"n": n}, **options) for n in range(count)]


def own(client: Client, actor: str = "w", max_jobs: int = 1, duration: float = 30, **options: Any) -> list[OwnedJob]:
    return client.own_jobs(actor, ["copy"], max_jobs, duration, **options)


def own_soon(client: Client, actor: str = "w", max_jobs: int = 1, duration: float = 30) -> list[OwnedJob]:
    return until(lambda: own(client, actor, max_jobs, duration))


def test_L11_tasks_are_claimed_by_type_and_L13_each_has_its_token(group: Daemons) -> None:
    group.start("e1")
    ops = start_copies(group.client, 3)
    group.client.register_type("report", retry=QUICK)
    assert group.client.own_jobs("w", ["report"], 10) == []
    jobs = own(group.client, max_jobs=10)
    assert [(job.op, job.arg, job.attempt, job.partition) for job in jobs] == [
        (op.ref, {"n": n}, 1, "all") for n, op in enumerate(ops)
    ]
    assert len({job.token for job in jobs}) == 3
    assert own(group.client, "other", 10) == [], "another worker gets no owned jobs"
    assert ops[0].status().jobs["running"] == 1
    for job in jobs:
        group.client.return_job(job.token, Complete({"bytes": job.arg["n"]}))
    assert [op.wait(LIMIT).state for op in ops] == ["success"] * 3


def test_L14_a_job_is_returned_only_with_its_own_token(group: Daemons) -> None:
    group.start("e1")
    one, two = start_copies(group.client, 2)
    first, second = own(group.client, max_jobs=2)
    crossed = second.token.rpartition("@")[0] + "@" + first.token.rpartition("@")[2]
    for invalid in (crossed, "", "nonsense", first.token + "0", first.token[:-1], "t/copy/9#0@5.0123456789abcdef", 7):
        with pytest.raises(InvalidToken):
            group.client.return_job(invalid, Complete())
    for invalid_outcome in ("complete", None, Complete(object())):
        with pytest.raises(InvalidArgument):
            group.client.return_job(first.token, invalid_outcome)
    with pytest.raises(InvalidArgument, match="65536"):
        group.client.return_job(first.token, Complete("x" * 70_000))
    assert (one.status().stage, two.status().stage) == ("open", "open"), "refused calls change nothing"
    with distop.connect(group.endpoint) as elsewhere:  # as another process with the token
        elsewhere.return_job(first.token, Complete())
    group.client.return_job(second.token, Complete())
    assert (one.wait(LIMIT).state, two.wait(LIMIT).state) == ("success", "success")
    with pytest.raises(InvalidToken, match="is invalid: nobody holds the job"):
        group.client.return_job(first.token, Retry("late"))


def test_L12_a_claim_that_is_not_extended_goes_to_another_worker(group: Daemons) -> None:
    group.start("e1")
    (op,) = start_copies(group.client)
    with distop.connect(group.endpoint) as dead, distop.connect(group.endpoint) as alive:
        (expired,) = own(dead, "dead", duration=0.5)
        (job,) = own_soon(alive, "alive")
        assert (job.attempt, job.failures) == (2, 1)
        assert dead.extend([expired.token], 5) == [False], "extending a lost claim returns False"
        with pytest.raises(InvalidToken, match="the job was granted to alive"):
            dead.return_job(expired.token, Complete("stale"))
        alive.return_job(job.token, Complete("fresh"))
    assert op.wait(LIMIT).state == "success"


def test_L17_a_late_worker_may_return_a_job_that_no_other_worker_has(group: Daemons) -> None:
    group.start("e1")
    (op,) = start_copies(group.client)
    with distop.connect(group.endpoint) as late, distop.connect(group.endpoint) as other:
        start = time.monotonic()
        (job,) = own(late, duration=0.1)
        assert own(other, "other") == [], "a claim seen for the first time counts as live"
        until(lambda: time.monotonic() - start > 0.7)
        assert late.extend([job.token], 0.1) == [True], "the token decides, not the clock"
        until(lambda: time.monotonic() - start > 1.5)
        late.return_job(job.token, Complete("late"))
    assert op.wait(LIMIT).state == "success"


def test_L21_own_jobs_takes_at_most_max_jobs_and_executors_take_none_of_them(group: Daemons) -> None:
    group.start("e1")
    group.start("e2")
    ops = start_copies(group.client, 8)
    group.client.register_type("report", retry=QUICK)
    report = group.client.start_operation("report", "@cluster")
    got = group.client.own_jobs("w", {"copy": 3, "report": 1}, 10)
    assert sorted(job.type for job in got) == ["copy"] * 3 + ["report"]
    assert len(own(group.client, "other", 2)) == 2
    rest = own(group.client, "third", 100)
    assert len(rest) == 3
    assert own(group.client, max_jobs=0) == []
    for job in [*got, *rest]:
        group.client.return_job(job.token, Release())
    again = until(lambda: own(group.client, "fourth", 100))
    while len(again) < 6:
        again += own(group.client, "fourth", 100)
    assert {(job.attempt, job.failures) for job in again} == {(2, 0)}, "a release does not count as a failure"
    for op in ops:
        op.cancel()
    report.cancel()
    for op in [*ops, report]:
        assert op.status().state in ("cancelling", "cancelled")
    for job in again:
        group.client.return_job(job.token, Release())


def test_L22_extend_returns_a_result_for_each_token_without_an_error(group: Daemons) -> None:
    group.start("e1")
    _, _, cancelled = start_copies(group.client, 3)
    first, second, third = own(group.client, max_jobs=3)
    group.client.return_job(second.token, Complete())
    cancelled.cancel()
    unknown = "t/copy/99#0@5.0123456789abcdef"
    tokens = [first.token, second.token, third.token, "nonsense", unknown, None, first.token]
    assert group.client.extend(tokens, 30) == [True, False, False, False, False, False, True]
    assert group.client.extend([], 30) == []
    for invalid in (0, -1, float("nan"), "long", True):
        with pytest.raises(InvalidArgument, match="duration"):
            group.client.extend([first.token], invalid)
    with distop.connect(group.endpoint) as elsewhere:
        assert elsewhere.extend([first.token], 30) == [True], "the token is enough"
    assert group.client.extend([first.token], 30) == [True], "an earlier extension does not void the token"
    group.client.return_job(first.token, Complete())
    group.client.return_job(third.token, Release())
    assert cancelled.wait(LIMIT).state == "cancelled"


def test_L23_an_extended_claim_is_not_taken_even_with_a_short_duration(group: Daemons) -> None:
    group.start("e1")
    (op,) = start_copies(group.client)
    with distop.connect(group.endpoint) as other:
        (job,) = own(group.client, duration=0.4)
        start = time.monotonic()
        while time.monotonic() - start < 3:
            assert own(other, "other") == []
            assert group.client.extend([job.token], 0.4) == [True]
        group.client.return_job(job.token, Complete())
    assert op.wait(LIMIT).state == "success"


def test_L24_jobs_are_completed_aborted_and_retried_and_an_abort_cancels_successors(group: Daemons) -> None:
    group.start("e1")
    good, bad, retried = start_copies(group.client, 3)
    after = group.client.start_operation("copy", "@cluster", after=[bad])
    last = group.client.start_operation("copy", "@cluster", after=[after])
    jobs = own(group.client, max_jobs=3)
    group.client.return_job(jobs[0].token, Complete({"rows": 3}))
    group.client.return_job(jobs[1].token, Abort("no such source", {"source": "a"}))
    group.client.return_job(jobs[2].token, Retry("disk full"))
    for failures in (1, 2):
        (again,) = own_soon(group.client)
        assert (again.op, again.failures) == (retried.ref, failures)
        group.client.return_job(again.token, Retry(f"disk full {failures}"))
    assert good.wait(LIMIT).state == "success"
    failed = bad.wait(LIMIT)
    assert (failed.state, failed.record["errors"][0]["text"]) == ("failed", "no such source")
    assert [op.wait(LIMIT).state for op in (after, last)] == ["cancelled", "cancelled"]
    ended = retried.wait(LIMIT)
    assert (ended.state, ended.record["errors"][0]["text"]) == ("failed", "disk full 2")
    assert [one["text"] for one in ended.record["errors"][0]["attempts"]] == ["disk full", "disk full 1", "disk full 2"]


def test_L10_a_claim_lost_on_the_last_attempt_fails_the_job(group: Daemons) -> None:
    group.start("e1")
    group.client.register_type("copy", retry=Rule(attempts=2, initial=0.05, maximum=0.1))
    op = group.client.start_operation("copy", "@cluster")
    with distop.connect(group.endpoint) as other:
        own(group.client, "first", duration=0.1)
        own_soon(other, "second", duration=0.1)
        until(lambda: own(group.client, "third") == [] and op.status().ended)
    ended = op.wait(LIMIT)
    assert ended.state == "failed"
    assert "second did not extend its claim of attempt 2 in time (2 failures)" in ended.record["errors"][0]["text"]


def test_L28_an_executor_takes_over_from_a_worker_and_a_worker_from_an_executor(group: Daemons) -> None:
    (first,) = group.start("e1")
    assert group.client.start_operation("noop", "@cluster", {}).wait(LIMIT).state == "success"
    first.stop()
    slow = group.client.start_operation("noop", "@cluster", {})
    (job,) = until(lambda: group.client.own_jobs("w", ["noop"], 1, 0.5))
    (second,) = group.start("e2")
    assert slow.wait(LIMIT).state == "success", "the executor has taken the job over"
    with pytest.raises(InvalidToken):
        group.client.return_job(job.token, Complete())
    long = group.client.start_operation("noop", "@cluster", {"sleep": 600})
    until(lambda: long.status().jobs["running"] == 1)
    second.kill()
    (taken,) = until(lambda: group.client.own_jobs("w", ["noop"], 1, 30))
    assert (taken.op, taken.attempt, taken.failures) == (long.ref, 2, 1)
    group.client.return_job(taken.token, Complete())
    group.start("e3")
    assert long.wait(LIMIT).state == "success"


def test_a_cancel_waits_for_live_workers_only(group: Daemons) -> None:
    group.start("e1")
    extended, abandoned = start_copies(group.client, 2)
    first, _ = own(group.client, max_jobs=2, duration=1)
    assert group.client.extend([first.token], 3600) == [True]
    extended.cancel()
    abandoned.cancel()
    assert abandoned.wait(LIMIT).state == "cancelled", "its claim has not been extended"
    assert extended.status().state == "cancelling"
    group.client.return_job(first.token, Release())
    assert extended.wait(LIMIT).state == "cancelled"


def test_a_type_without_code_is_registered_and_started_with_named_partitions(group: Daemons) -> None:
    group.start("e1")
    client = group.client
    client.register_type("copy", {"type": "object", "required": ["to"]}, description="copies")
    client.register_type("copy", {"type": "object", "required": ["to"]}, description="copies")
    with pytest.raises(NotAllowed, match="replace=True"):
        client.register_type("copy")
    with pytest.raises(NotAllowed, match="executors offer a behavior"):
        client.register_type("noop", replace=True)
    for invalid in ({"instances": "three"}, {"object_field": "x"}, {"conflicts_with": "copy"}):
        with pytest.raises(InvalidArgument):
            client.register_type("other", **invalid)
    with pytest.raises(InvalidArgument, match="is not an accepted JSON Schema"):
        client.register_type("other", {"type": 7})
    with pytest.raises(InvalidArgument, match="to"):
        client.start_operation("copy", "@cluster", {})
    with pytest.raises(InvalidArgument, match="name them"):
        client.start_operation("copy", "t", {"to": "b"})
    op = client.start_operation("copy", "t", {"to": "b"}, partitions=["day=2", "day=1"])
    jobs: list[OwnedJob] = []
    until(lambda: jobs.extend(own(client, max_jobs=5)) or len(jobs) == 2)
    assert sorted(job.partition for job in jobs) == ["day=1", "day=2"]
    for job in jobs:
        client.return_job(job.token, Complete(job.partition))
    assert op.wait(LIMIT).state == "success"
    later = client.start_operation("copy", "@cluster", {"to": "c"}, delay=0.3)
    (job,) = own_soon(client)
    assert job.op == later.ref
    client.return_job(job.token, Complete())
    assert later.wait(LIMIT).state == "success"
    assert next(d for d in client.behaviors() if d.type_name == "copy").code is False


def test_L28_own_jobs_takes_only_accepted_jobs(group: Daemons) -> None:
    group.start("e1")
    ops = start_copies(group.client, 6)
    even = own(group.client, max_jobs=10, accept=lambda job: job.arg["n"] % 2 == 0)
    assert [job.arg["n"] for job in even] == [0, 2, 4]
    odd = own(group.client, "other", max_jobs=10)
    assert [job.arg["n"] for job in odd] == [1, 3, 5]
    for job in [*even, *odd]:
        group.client.return_job(job.token, Complete())
    assert {op.wait(LIMIT).state for op in ops} == {"success"}
    start_copies(group.client, 1)
    with pytest.raises(ZeroDivisionError):
        until(lambda: own(group.client, accept=lambda job: 1 // 0))
    (left,) = own(group.client)
    group.client.return_job(left.token, Complete())


def test_L15_a_worker_runs_at_most_its_number_of_jobs_of_each_type(group: Daemons) -> None:
    group.start("e1")
    client = group.client
    ops = start_copies(client, 12)
    client.register_type("report")
    ops += [client.start_operation("report", "@cluster") for _ in range(4)]
    lock, running_now, most_at_once = threading.Lock(), {"copy": 0, "report": 0}, {"copy": 0, "report": 0}
    limit_reached = threading.Event()

    def handle(job: Any) -> dict[str, Any]:
        with lock:
            running_now[job.type] += 1
            most_at_once[job.type] = max(most_at_once[job.type], running_now[job.type])
            if most_at_once["copy"] == 4:
                limit_reached.set()
        assert limit_reached.wait(30)
        with lock:
            running_now[job.type] -= 1
        return {"by": job.type}

    worker = distop.Worker(client, {"copy": handle, "report": handle}, concurrency={"copy": 4, "report": 1}, poll=0.5)
    running = threading.Thread(target=worker.run)
    running.start()
    assert {op.wait(LIMIT).state for op in ops} == {"success"}
    worker.stop()
    running.join(30)
    assert not running.is_alive()
    assert most_at_once == {"copy": 4, "report": 1}


def test_L24_the_result_or_error_of_a_handler_becomes_the_outcome(group: Daemons) -> None:
    group.start("e1")
    start_copies(group.client, 0)

    async def script() -> None:
        async with aio.connect(group.endpoint) as client:
            ops = [await client.start_operation("copy", "@cluster", {"n": n}) for n in range(6)]
            attempts: dict[int, int] = {}

            async def handle(job: aio.Job) -> Any:
                n = job.arg["n"]
                attempts[n] = attempts.get(n, 0) + 1
                if n == 1:
                    raise JobFailed("the answer is no", {"n": 1})
                if n == 2 and attempts[n] == 1:
                    raise RuntimeError("broken once")
                if n == 3:
                    return distop.Abort("as a value")
                return {"n": n}

            worker = aio.Worker(client, {"copy": handle}, concurrency=10, rate={"copy": (20, 1)}, poll=0.5)
            running = asyncio.ensure_future(worker.run())
            results = [await op.wait(LIMIT) for op in ops]
            worker.stop()
            await running
            assert [r.state for r in results] == ["success", "failed", "success", "failed", "success", "success"]
            assert attempts == {0: 1, 1: 1, 2: 2, 3: 1, 4: 1, 5: 1}

    asyncio.run(script())


def test_L28_a_worker_yields_jobs_one_by_one_and_extends_their_claims(group: Daemons) -> None:
    group.start("e1")
    ops = start_copies(group.client, 3)

    async def script() -> None:
        async with aio.connect(group.endpoint) as client, aio.connect(group.endpoint) as other:
            duration = 3.0  # on a busy machine, two thirds of it may pass without an extension
            worker = aio.Worker(client, ["copy"], duration=duration, poll=0.5)
            seen: list[int] = []
            async for job in worker:
                end = time.monotonic() + 1.5 * duration * (not seen)
                lost = asyncio.ensure_future(job.wait_lost())
                while time.monotonic() < end and not lost.done():
                    stolen = await other.own_jobs("thief", ["copy"], 1, accept=lambda one, op=job.op: one.op == op)
                    assert stolen == []
                    await asyncio.wait([lost], timeout=0.1)
                assert not job.lost
                lost.cancel()
                await job.complete({"n": job.arg["n"]})
                seen.append(job.arg["n"])
                if len(seen) == 3:
                    worker.stop()
            assert seen == [0, 1, 2]
            with pytest.raises(UsageError, match="no handlers"):
                await worker.run()

    asyncio.run(script())
    assert {op.wait(LIMIT).state for op in ops} == {"success"}
    with pytest.raises(InvalidArgument, match="does not handle"):
        distop.Worker(group.client, ["copy"], concurrency={"report": 1})


def test_a_worker_drops_cancelled_jobs_and_releases_interrupted_ones(group: Daemons) -> None:
    group.start("e1")
    stopped, released = start_copies(group.client, 2)

    async def script() -> None:
        async with aio.connect(group.endpoint) as client:
            cancelled: list[int] = []

            both_running = asyncio.Event()

            async def handle(job: aio.Job) -> None:
                if len(worker.held) == 2:
                    both_running.set()
                try:
                    await asyncio.Event().wait()
                except asyncio.CancelledError:
                    cancelled.append(job.arg["n"])
                    raise

            worker = aio.Worker(client, {"copy": handle}, concurrency=2, duration=0.6, poll=0.5)
            running = asyncio.ensure_future(worker.run())
            await asyncio.wait_for(both_running.wait(), 30)
            await client.operation(stopped.ref).cancel()
            assert (await client.operation(stopped.ref).wait(LIMIT)).state == "cancelled"
            assert cancelled == [0]
            running.cancel()
            with pytest.raises(asyncio.CancelledError):
                await running
            assert cancelled == [0, 1]
            (job,) = await client.own_jobs("next", ["copy"])
            assert (job.op, job.attempt, job.failures) == (released.ref, 2, 0)
            await client.return_job(job.token, Complete())

    asyncio.run(script())
    assert released.wait(LIMIT).state == "success"


def test_L6_a_killed_worker_process_loses_its_job_to_another(group: Daemons) -> None:
    group.start("e1")
    (op,) = start_copies(group.client)
    code = "import sys, distop, signal\n" + (
        "client = distop.connect(sys.argv[1])\n"
        "jobs = client.own_jobs('doomed', ['copy'], 1, 1.0)\n"
        "print(jobs[0].token, flush=True)\n"
        "signal.pause()\n"
    )
    with subprocess.Popen([sys.executable, "-c", code, group.endpoint], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        token = process.stdout.readline().strip()
        assert own(group.client) == []
        os.kill(process.pid, signal.SIGKILL)
    (job,) = own_soon(group.client)
    assert (job.op, job.attempt, job.failures) == (op.ref, 2, 1)
    with pytest.raises(InvalidToken):
        group.client.return_job(token, Complete())
    group.client.return_job(job.token, Complete())
    assert op.wait(LIMIT).state == "success"
