"""Low-level claims on a real etcd with real daemons beside the workers; the history of each test is audited."""

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

pytestmark = pytest.mark.etcd

LIMIT = 60
QUICK = Rule(attempts=3, initial=0.05, maximum=0.2)


def until(found: Callable[[], Any], seconds: float = 30) -> Any:
    """The first true answer."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if answer := found():
            return answer
        threading.Event().wait(0.02)
    raise AssertionError("it never came")


def copies(client: Client, count: int = 1, **options: Any) -> list[Operation]:
    client.register_type("copy", {"type": "object"}, retry=QUICK)
    return [client.start_operation("copy", "@cluster", {"n": n}, **options) for n in range(count)]


def own(client: Client, actor: str = "w", most: int = 1, duration: float = 30, **options: Any) -> list[OwnedJob]:
    return client.own_jobs(actor, ["copy"], most, duration, **options)


def own_soon(client: Client, actor: str = "w", most: int = 1, duration: float = 30) -> list[OwnedJob]:
    return until(lambda: own(client, actor, most, duration))


def test_L11_tasks_are_claimed_by_type_and_L13_each_has_its_token(group: Daemons) -> None:
    group.start("e1")
    ops = copies(group.client, 3)
    group.client.register_type("report", retry=QUICK)
    assert group.client.own_jobs("w", ["report"], 10) == []
    jobs = own(group.client, most=10)
    assert [(job.op, job.arg, job.attempt, job.partition) for job in jobs] == [
        (op.ref, {"n": n}, 1, "all") for n, op in enumerate(ops)
    ]
    assert len({job.token for job in jobs}) == 3
    assert own(group.client, "other", 10) == [], "nobody else gets them"
    assert ops[0].status().jobs["running"] == 1
    for job in jobs:
        group.client.return_job(job.token, Complete({"bytes": job.arg["n"]}))
    assert [op.wait(LIMIT).state for op in ops] == ["success"] * 3


def test_L14_both_the_job_and_its_token_are_needed_to_return_it(group: Daemons) -> None:
    group.start("e1")
    one, two = copies(group.client, 2)
    first, second = own(group.client, most=2)
    crossed = second.token.rpartition("@")[0] + "@" + first.token.rpartition("@")[2]
    for wrong in (crossed, "", "nonsense", first.token + "0", first.token[:-1], "t/copy/9#0@5.0123456789abcdef", 7):
        with pytest.raises(InvalidToken):
            group.client.return_job(wrong, Complete())
    for wrong_outcome in ("complete", None, Complete(object())):
        with pytest.raises(InvalidArgument):
            group.client.return_job(first.token, wrong_outcome)
    with pytest.raises(InvalidArgument, match="65536"):
        group.client.return_job(first.token, Complete("x" * 70_000))
    assert (one.status().stage, two.status().stage) == ("open", "open"), "nothing was changed"
    with distop.connect(group.endpoint) as elsewhere:  # another process that was given the token
        elsewhere.return_job(first.token, Complete())
    group.client.return_job(second.token, Complete())
    assert (one.wait(LIMIT).state, two.wait(LIMIT).state) == ("success", "success")
    with pytest.raises(InvalidToken, match="is invalid: nobody holds the job"):
        group.client.return_job(first.token, Retry("late"))


def test_L12_a_claim_ends_unless_it_is_extended_and_another_worker_gets_the_job(group: Daemons) -> None:
    group.start("e1")
    (op,) = copies(group.client)
    with distop.connect(group.endpoint) as dead, distop.connect(group.endpoint) as alive:
        (former,) = own(dead, "dead", duration=0.5)
        (job,) = own_soon(alive, "alive")
        assert (job.attempt, job.failures) == (2, 1)
        assert dead.extend([former.token], 5) == [False], "stolen: False, no error"
        with pytest.raises(InvalidToken, match="the job was granted to alive"):
            dead.return_job(former.token, Complete("stale"))
        alive.return_job(job.token, Complete("fresh"))
    assert op.wait(LIMIT).state == "success"


def test_L17_a_late_worker_may_return_while_nobody_else_has_the_job(group: Daemons) -> None:
    group.start("e1")
    (op,) = copies(group.client)
    with distop.connect(group.endpoint) as late, distop.connect(group.endpoint) as other:
        began = time.monotonic()
        (job,) = own(late, duration=0.1)
        assert own(other, "other") == [], "seen for the first time: it is live"
        until(lambda: time.monotonic() - began > 0.7)
        assert late.extend([job.token], 0.1) == [True], "the token decides, not the clock"
        until(lambda: time.monotonic() - began > 1.5)
        late.return_job(job.token, Complete("late"))
    assert op.wait(LIMIT).state == "success"


def test_L21_own_jobs_takes_at_most_so_many_and_an_executor_never_what_is_owned(group: Daemons) -> None:
    group.start("e1")
    group.start("e2")
    ops = copies(group.client, 8)
    group.client.register_type("report", retry=QUICK)
    report = group.client.start_operation("report", "@cluster")
    got = group.client.own_jobs("w", {"copy": 3, "report": 1}, 10)
    assert sorted(job.type for job in got) == ["copy"] * 3 + ["report"]
    assert len(own(group.client, "other", 2)) == 2
    rest = own(group.client, "third", 100)
    assert len(rest) == 3
    assert own(group.client, most=0) == []
    for job in [*got, *rest]:
        group.client.return_job(job.token, Release())
    again = until(lambda: own(group.client, "fourth", 100))
    while len(again) < 6:
        again += own(group.client, "fourth", 100)
    assert {(job.attempt, job.failures) for job in again} == {(2, 0)}, "released: not held against them"
    for op in ops:
        op.cancel()
    report.cancel()
    for op in [*ops, report]:
        assert op.status().state in ("cancelling", "cancelled")
    for job in again:
        group.client.return_job(job.token, Release())


def test_L22_extending_answers_for_each_token_and_never_breaks_a_loop(group: Daemons) -> None:
    group.start("e1")
    _, _, cancelled = copies(group.client, 3)
    first, second, third = own(group.client, most=3)
    group.client.return_job(second.token, Complete())
    cancelled.cancel()
    unknown = "t/copy/99#0@5.0123456789abcdef"
    tokens = [first.token, second.token, third.token, "nonsense", unknown, None, first.token]
    assert group.client.extend(tokens, 30) == [True, False, False, False, False, False, True]
    assert group.client.extend([], 30) == []
    for wrong in (0, -1, float("nan"), "long", True):
        with pytest.raises(InvalidArgument, match="duration"):
            group.client.extend([first.token], wrong)
    with distop.connect(group.endpoint) as elsewhere:
        assert elsewhere.extend([first.token], 30) == [True], "by the token alone"
    assert group.client.extend([first.token], 30) == [True], "though its fence has moved since"
    group.client.return_job(first.token, Complete())
    group.client.return_job(third.token, Release())
    assert cancelled.wait(LIMIT).state == "cancelled"


def test_L23_what_is_extended_is_not_taken_however_short_its_duration(group: Daemons) -> None:
    group.start("e1")
    (op,) = copies(group.client)
    with distop.connect(group.endpoint) as other:
        (job,) = own(group.client, duration=0.4)
        began = time.monotonic()
        while time.monotonic() - began < 3:
            assert own(other, "other") == []
            assert group.client.extend([job.token], 0.4) == [True]
        group.client.return_job(job.token, Complete())
    assert op.wait(LIMIT).state == "success"


def test_L24_complete_abort_and_retry_and_an_abort_ends_the_successors(group: Daemons) -> None:
    group.start("e1")
    good, bad, broken = copies(group.client, 3)
    after = group.client.start_operation("copy", "@cluster", after=[bad])
    last = group.client.start_operation("copy", "@cluster", after=[after])
    jobs = own(group.client, most=3)
    group.client.return_job(jobs[0].token, Complete({"rows": 3}))
    group.client.return_job(jobs[1].token, Abort("no such source", {"source": "a"}))
    group.client.return_job(jobs[2].token, Retry("disk full"))
    for failures in (1, 2):
        (again,) = own_soon(group.client)
        assert (again.op, again.failures) == (broken.ref, failures)
        group.client.return_job(again.token, Retry(f"disk full {failures}"))
    assert good.wait(LIMIT).state == "success"
    failed = bad.wait(LIMIT)
    assert (failed.state, failed.record["errors"][0]["text"]) == ("failed", "no such source")
    assert [op.wait(LIMIT).state for op in (after, last)] == ["cancelled", "cancelled"]
    ended = broken.wait(LIMIT)
    assert (ended.state, ended.record["errors"][0]["text"]) == ("failed", "disk full 2")
    assert [one["text"] for one in ended.record["errors"][0]["attempts"]] == ["disk full", "disk full 1", "disk full 2"]


def test_L10_a_loss_on_the_last_try_ends_as_failed(group: Daemons) -> None:
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
    assert slow.wait(LIMIT).state == "success", "the executor has taken it over"
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


def test_a_cancel_waits_for_a_live_worker_and_not_for_one_that_is_gone(group: Daemons) -> None:
    group.start("e1")
    lively, gone = copies(group.client, 2)
    first, _ = own(group.client, most=2, duration=1)
    assert group.client.extend([first.token], 3600) == [True]
    lively.cancel()
    gone.cancel()
    assert gone.wait(LIMIT).state == "cancelled", "its claim has not been extended"
    assert lively.status().state == "cancelling"
    group.client.return_job(first.token, Release())
    assert lively.wait(LIMIT).state == "cancelled"


def test_a_type_without_code_is_declared_and_names_its_partitions(group: Daemons) -> None:
    group.start("e1")
    client = group.client
    client.register_type("copy", {"type": "object", "required": ["to"]}, description="copies")
    client.register_type("copy", {"type": "object", "required": ["to"]}, description="copies")
    with pytest.raises(NotAllowed, match="replace=True"):
        client.register_type("copy")
    with pytest.raises(NotAllowed, match="executors offer a behavior"):
        client.register_type("noop", replace=True)
    for wrong in ({"instances": "three"}, {"object_field": "x"}, {"conflicts_with": "copy"}):
        with pytest.raises(InvalidArgument):
            client.register_type("other", **wrong)
    with pytest.raises(InvalidArgument, match="is not an accepted JSON Schema"):
        client.register_type("other", {"type": 7})
    with pytest.raises(InvalidArgument, match="to"):
        client.start_operation("copy", "@cluster", {})
    with pytest.raises(InvalidArgument, match="name them"):
        client.start_operation("copy", "t", {"to": "b"})
    op = client.start_operation("copy", "t", {"to": "b"}, partitions=["day=2", "day=1"])
    jobs: list[OwnedJob] = []
    until(lambda: jobs.extend(own(client, most=5)) or len(jobs) == 2)
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


def test_L28_jobs_are_accepted_on_a_condition(group: Daemons) -> None:
    group.start("e1")
    ops = copies(group.client, 6)
    even = own(group.client, most=10, accept=lambda job: job.arg["n"] % 2 == 0)
    assert [job.arg["n"] for job in even] == [0, 2, 4]
    odd = own(group.client, "other", most=10)
    assert [job.arg["n"] for job in odd] == [1, 3, 5]
    for job in [*even, *odd]:
        group.client.return_job(job.token, Complete())
    assert {op.wait(LIMIT).state for op in ops} == {"success"}
    copies(group.client, 1)
    with pytest.raises(ZeroDivisionError):
        until(lambda: own(group.client, accept=lambda job: 1 // 0))
    (left,) = own(group.client)
    group.client.return_job(left.token, Complete())


def test_L15_each_type_has_a_number_of_jobs_at_once(group: Daemons) -> None:
    group.start("e1")
    client = group.client
    ops = copies(client, 12)
    client.register_type("report")
    ops += [client.start_operation("report", "@cluster") for _ in range(4)]
    lock, now, most = threading.Lock(), {"copy": 0, "report": 0}, {"copy": 0, "report": 0}
    full = threading.Event()

    def handle(job: Any) -> dict[str, Any]:
        with lock:
            now[job.type] += 1
            most[job.type] = max(most[job.type], now[job.type])
            if most["copy"] == 4:
                full.set()
        assert full.wait(30)
        with lock:
            now[job.type] -= 1
        return {"by": job.type}

    worker = distop.Worker(client, {"copy": handle, "report": handle}, concurrency={"copy": 4, "report": 1}, poll=0.5)
    running = threading.Thread(target=worker.run)
    running.start()
    assert {op.wait(LIMIT).state for op in ops} == {"success"}
    worker.stop()
    running.join(30)
    assert not running.is_alive()
    assert most == {"copy": 4, "report": 1}


def test_L24_a_worker_turns_what_handlers_raise_and_return_into_outcomes(group: Daemons) -> None:
    group.start("e1")
    copies(group.client, 0)

    async def play() -> None:
        async with aio.connect(group.endpoint) as client:
            ops = [await client.start_operation("copy", "@cluster", {"n": n}) for n in range(6)]
            tries: dict[int, int] = {}

            async def handle(job: aio.Job) -> Any:
                n = job.arg["n"]
                tries[n] = tries.get(n, 0) + 1
                if n == 1:
                    raise JobFailed("the answer is no", {"n": 1})
                if n == 2 and tries[n] == 1:
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
            assert tries == {0: 1, 1: 1, 2: 2, 3: 1, 4: 1, 5: 1}

    asyncio.run(play())


def test_L28_jobs_are_given_out_one_after_the_other_and_extended_meanwhile(group: Daemons) -> None:
    group.start("e1")
    ops = copies(group.client, 3)

    async def play() -> None:
        async with aio.connect(group.endpoint) as client, aio.connect(group.endpoint) as other:
            duration = 3.0  # of which two thirds may pass unheard on a busy machine
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

    asyncio.run(play())
    assert {op.wait(LIMIT).state for op in ops} == {"success"}
    with pytest.raises(InvalidArgument, match="does not handle"):
        distop.Worker(group.client, ["copy"], concurrency={"report": 1})


def test_a_worker_gives_up_what_is_cancelled_and_releases_what_it_is_interrupted_in(group: Daemons) -> None:
    group.start("e1")
    stopped, kept = copies(group.client, 2)

    async def play() -> None:
        async with aio.connect(group.endpoint) as client:
            cancelled: list[int] = []

            begun = asyncio.Event()

            async def handle(job: aio.Job) -> None:
                if len(worker.held) == 2:
                    begun.set()
                try:
                    await asyncio.Event().wait()
                except asyncio.CancelledError:
                    cancelled.append(job.arg["n"])
                    raise

            worker = aio.Worker(client, {"copy": handle}, concurrency=2, duration=0.6, poll=0.5)
            running = asyncio.ensure_future(worker.run())
            await asyncio.wait_for(begun.wait(), 30)
            await client.operation(stopped.ref).cancel()
            assert (await client.operation(stopped.ref).wait(LIMIT)).state == "cancelled"
            assert cancelled == [0]
            running.cancel()
            with pytest.raises(asyncio.CancelledError):
                await running
            assert cancelled == [0, 1]
            (job,) = await client.own_jobs("next", ["copy"])
            assert (job.op, job.attempt, job.failures) == (kept.ref, 2, 0)
            await client.return_job(job.token, Complete())

    asyncio.run(play())
    assert kept.wait(LIMIT).state == "success"


def test_L6_a_worker_process_that_is_killed_loses_its_job_to_another(group: Daemons) -> None:
    group.start("e1")
    (op,) = copies(group.client)
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
