"""A worker loop on low-level claims (L11-L24, L28), for other processes than executors.

``Worker(client, {"copy": copy, "report": report}).run()`` calls a handler for each job; ``async for job in worker``
yields them. Claims are extended while a job is held. Each type has a maximum number of jobs at once, and optionally a
rate.

The rate limit is a token bucket with a monotonic clock in this process.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import math
import os
import socket
from collections import Counter
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from distop.clock import secrets, time
from distop.errors import DistopError, FatalError, InvalidArgument, InvalidToken, JobFailed, UsageError, describe
from distop.protocol.texts import did_you_mean, plural, shown
from distop.services.claims import owned_jobs as m

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable

    from distop.client.async_client import Client

    Handler = Callable[["Job"], Any]

__all__ = ["Job", "Worker"]

log = logging.getLogger("distop.worker")

TROUBLE_PAUSE = 1.0
"""Seconds before a retry after an error of etcd."""


class Job:
    """A job that a worker holds: :class:`distop.services.claims.owned_jobs.OwnedJob` with returns.

    After it is returned or lost, nothing more can be written for it.
    """

    def __init__(self, worker: Worker, owned: m.OwnedJob) -> None:
        self._worker = worker
        self.owned = owned
        self.op, self.type, self.table, self.object = owned.op, owned.type, owned.table, owned.object
        self.partition, self.ordinal, self.plan = owned.partition, owned.ordinal, owned.plan
        self.arg, self.attempt, self.failures, self.token = owned.arg, owned.attempt, owned.failures, owned.token
        self.returned = False
        self._lost = asyncio.Event()

    @property
    def lost(self) -> bool:
        """Whether another claimant has it, or its operation is being cancelled: stop.

        May be read from any thread.
        """
        return self._lost.is_set()

    async def wait_lost(self) -> None:
        """Return once it is lost."""
        await self._lost.wait()

    async def complete(self, result: Any = None) -> None:
        """Return it as a success.

        Raises as :meth:`distop.client.async_client.Client.return_job`, as the other returns do.
        """
        await self.give_back(m.Complete(result))

    async def abort(self, message: str, result: Any = None) -> None:
        """Return it as failed, with a verdict: it is not retried."""
        await self.give_back(m.Abort(message, result))

    async def retry(self, error: str = "") -> None:
        """Return it for a retry after an unexpected error."""
        await self.give_back(m.Retry(error))

    async def release(self) -> None:
        """Release it, as if it had not been claimed."""
        await self.give_back(m.Release())

    async def give_back(self, outcome: m.OwnedOutcome) -> None:
        """Return it with this outcome."""
        try:
            await self._worker.client.return_job(self.token, outcome)
        except InvalidToken:
            self._worker.forget(self)
            raise
        self._worker.forget(self)


class Worker:
    """Claims jobs of some types and calls their handlers, until :meth:`stop`.

    ``handlers``: type → a function of the :class:`Job`, a coroutine function or a plain one, which is called in a
    thread; or a list of types, for ``async for``. A handler returns the job's result, or one of ``distop.Complete``,
    ``Abort``, ``Retry``, ``Release``. JobFailed and FatalError are verdicts; after any other exception the job is
    retried. ``concurrency``: maximum jobs at once, for all types or by type (default 1). ``rate``: maximum jobs that
    this process starts in a second, by type, or (rate, burst). ``accept``: called with each job before it is claimed;
    False skips the job. ``duration``: seconds after which others may take over a job whose claim was not extended; a
    handler learns of a cancel within a third of it. ``poll``: seconds between two listings without an event.
    """

    def __init__(
        self,
        client: Client,
        handlers: Mapping[str, Handler] | Iterable[str],
        *,
        actor: str | None = None,
        concurrency: int | Mapping[str, int] = 1,
        rate: Mapping[str, float | tuple[float, float]] | None = None,
        accept: Callable[[m.OfferedJob], bool] | None = None,
        duration: float = 60.0,
        poll: float = 5.0,
    ) -> None:
        self.client = client
        self.actor = m.check_actor(actor or f"{socket.gethostname()}-{os.getpid()}-{secrets.randbits(16):04x}")
        self._types = list(m.check_types(list(handlers) if isinstance(handlers, Mapping) else handlers))
        self._handlers: Mapping[str, Handler] = handlers if isinstance(handlers, Mapping) else {}
        for name, handler in self._handlers.items():
            if not callable(handler):
                raise InvalidArgument(f"the handler of {name} must be callable, not {handler!r:.100}")
        self._concurrency_by_type = self._concurrency(concurrency)
        self._buckets = {name: _bucket(rate[name]) for name in self._known(rate or {}, "rate")} if rate else {}
        self._accept = accept
        self._duration = m.check_duration(duration)
        self._poll = m.check_duration(poll)
        self._held: dict[str, Job] = {}
        self._running: Counter[str] = Counter()
        self._freed = asyncio.Event()
        self._stopped = False
        self._version = -1

    def _known(self, by_type: Mapping[str, Any], what: str) -> Mapping[str, Any]:
        if not isinstance(by_type, Mapping):
            raise InvalidArgument(f"the {what} must map types to values, such as {{{self._types[0]!r}: 10}}")
        if unknown := sorted(set(by_type) - set(self._types)):
            hint = did_you_mean(unknown[0], self._types, "its types")
            raise InvalidArgument(f"the {what} names {unknown[0]}, a type that this worker does not handle{hint}")
        return by_type

    def _concurrency(self, given: int | Mapping[str, int]) -> dict[str, int]:
        if isinstance(given, int):
            given = dict.fromkeys(self._types, given)
        most = dict.fromkeys(self._types, 1) | dict(self._known(given, "concurrency"))
        for name, count in most.items():
            if m.check_count(count, f"the concurrency of {name}") < 1:
                raise InvalidArgument(f"the concurrency of {name} must be at least 1, not {count}")
        return most

    # ------------------------------------------------------------------- jobs

    def stop(self) -> None:
        """Stop claiming: :meth:`run` and ``async for`` end after the held jobs are returned."""
        self._stopped = True
        self._freed.set()

    @property
    def held(self) -> list[Job]:
        """The jobs that this worker holds."""
        return list(self._held.values())

    def forget(self, job: Job) -> None:
        """Whether it was returned, or can no longer be."""
        if self._held.pop(job.token, None) is not None:
            job.returned = True
            self._running[job.type] -= 1
            self._freed.set()

    async def __aiter__(self) -> AsyncGenerator[Job, None]:
        keeping = asyncio.ensure_future(self._extend_claims())
        try:
            while not self._stopped:
                for job in await self._claim():
                    yield job
            while self._held:
                self._freed.clear()
                await self._freed.wait()
        finally:
            keeping.cancel()
            with suppress(asyncio.CancelledError):
                await keeping

    async def _claim(self) -> list[Job]:
        """Claim jobs within each type's free number and rate; wait a while if there are none."""
        self._freed.clear()
        room, pause = self._room()
        if room:
            try:
                owned = await self._own(room)
            except UsageError:
                raise
            except DistopError as error:
                log.warning("Cannot claim jobs; retrying: %s", describe(error))
                owned, pause = [], TROUBLE_PAUSE
                self._version = -1
            if owned:
                return [self._hold(one) for one in owned]
        await self._wait(pause, watch=bool(room))
        return []

    async def _own(self, room: Mapping[str, int]) -> list[m.OwnedJob]:
        self._version = await self.client.jobs_version()
        most = sum(room.values())
        return await self.client.own_jobs(self.actor, room, most, self._duration, accept=self._accept)

    def _room(self) -> tuple[dict[str, int], float]:
        room: dict[str, int] = {}
        pause = self._poll
        for name in self._types:
            free = self._concurrency_by_type[name] - self._running[name]
            bucket = self._buckets.get(name)
            if bucket is not None and free > 0:
                free = min(free, bucket.available())
                if not free:
                    pause = min(pause, bucket.wait())
            if free > 0:
                room[name] = free
        return room, pause

    def _hold(self, owned: m.OwnedJob) -> Job:
        job = self._held[owned.token] = Job(self, owned)
        self._running[owned.type] += 1
        if (bucket := self._buckets.get(owned.type)) is not None:
            bucket.spend()
        return job

    async def _wait(self, pause: float, *, watch: bool) -> None:
        """Wait until a slot is free, or (``watch``) more jobs may be available; at most ``pause`` seconds."""
        if self._stopped:
            return
        freed = asyncio.ensure_future(self._freed.wait())
        waits: set[asyncio.Future[Any]] = {freed}
        if watch:
            waits.add(asyncio.ensure_future(self.client.jobs_changed(self._version, pause)))
        try:
            await asyncio.wait(waits, timeout=max(pause, 0.001), return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()
            await asyncio.gather(*waits, return_exceptions=True)

    async def _extend_claims(self) -> None:
        """Extend the held claims three times in each duration, and mark lost jobs."""
        while True:
            await asyncio.sleep(self._duration / 3)
            jobs = [job for job in self._held.values() if not job.lost]
            if not jobs:
                continue
            try:
                alive = await self.client.extend([job.token for job in jobs], self._duration)
            except DistopError as error:
                log.warning("Cannot extend the claims of %s; retrying: %s", plural(len(jobs), "job"), describe(error))
                continue
            for job, ok in zip(jobs, alive, strict=True):
                if not ok and not job.returned:
                    log.info("Lost the claim of job %s of %s; stopping its handler", job.partition, job.op)
                    job._lost.set()

    # --------------------------------------------------------------- handlers

    async def run(self) -> None:
        """Call the handlers until :meth:`stop`, and wait for those that run.

        A cancellation cancels the handlers and releases their jobs.
        """
        if not self._handlers:
            raise UsageError("this worker has no handlers: give them by type, or use it with `async for`")
        threads = ThreadPoolExecutor(sum(self._concurrency_by_type.values()), thread_name_prefix=f"distop-{self.actor}")
        tasks: set[asyncio.Task[None]] = set()
        jobs = aiter(self)
        try:
            async for job in jobs:
                task = asyncio.ensure_future(self._handle(job, threads))
                tasks.add(task)
                task.add_done_callback(tasks.discard)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            threads.shutdown(wait=False, cancel_futures=True)

    async def _handle(self, job: Job, threads: ThreadPoolExecutor) -> None:
        working = asyncio.ensure_future(self._call(job, threads))
        losing = asyncio.ensure_future(job.wait_lost())
        try:
            await asyncio.wait({working, losing}, return_when=asyncio.FIRST_COMPLETED)
            if not working.done():
                working.cancel()
                await asyncio.wait({working})
                outcome: m.OwnedOutcome = m.Release()
            else:
                outcome = working.result()
        except asyncio.CancelledError:
            working.cancel()
            await asyncio.gather(working, return_exceptions=True)
            await asyncio.shield(self._finish(job, m.Release()))
            raise
        finally:
            losing.cancel()
        await self._finish(job, outcome)

    async def _call(self, job: Job, threads: ThreadPoolExecutor) -> m.OwnedOutcome:
        handler = self._handlers[job.type]
        try:
            if inspect.iscoroutinefunction(handler):
                result = await handler(job)
            else:
                result = await asyncio.get_running_loop().run_in_executor(threads, handler, job)
                if inspect.isawaitable(result):
                    result = await result
        except JobFailed as error:
            return m.Abort(describe(error), error.result)
        except FatalError as error:
            return m.Abort(describe(error))
        except Exception as error:
            log.warning(
                "Error in the handler of %s; returning the job for a retry: %s",
                job.type,
                describe(error),
                exc_info=error,
            )
            return m.Retry(f"{type(error).__name__}: {error}")
        return result if isinstance(result, m.OwnedOutcome) else m.Complete(result)

    async def _finish(self, job: Job, outcome: m.OwnedOutcome) -> None:
        """Return the job; retry until it is returned or its token is invalid."""
        while not job.returned:
            try:
                await job.give_back(outcome)
            except InvalidToken as error:
                log.info("Dropping the outcome of a job: %s", error)
            except InvalidArgument as error:
                outcome = m.Abort(f"the handler returned an invalid outcome: {error}")
            except DistopError as error:
                log.warning("Cannot return a job; retrying: %s", describe(error))
                await asyncio.sleep(TROUBLE_PAUSE)
            except Exception as error:
                log.exception("Unexpected error while returning a job; returning it for a retry")
                outcome = m.Retry(describe(error))
                await asyncio.sleep(TROUBLE_PAUSE)


def _bucket(given: float | tuple[float, float]) -> Bucket:
    return Bucket(*given) if isinstance(given, tuple | list) else Bucket(given)


class Bucket:
    """A token bucket: ``rate`` tokens are added in a second, up to ``burst``. It starts full.

    ``burst``: default the tokens of one second, at least one. Raises InvalidArgument.
    """

    def __init__(self, rate: float, burst: float | None = None) -> None:
        for value, what in ((rate, "a rate"), (burst, "a burst")):
            number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
            if value is not None and not (number and value > 0):
                raise InvalidArgument(f"{what} must be a positive number, not {shown(value)}")
        self.rate = float(rate)
        self.burst = max(1.0, float(burst if burst is not None else rate))
        self._tokens = self.burst
        self._at = time.monotonic()

    def available(self) -> int:
        """The number of whole tokens available now."""
        now = time.monotonic()
        self._tokens = min(self.burst, self._tokens + (now - self._at) * self.rate)
        self._at = now
        return int(self._tokens + 1e-9)

    def spend(self, count: int = 1) -> None:
        """Take this many tokens, at most those of :meth:`available`."""
        self._tokens -= count

    def wait(self) -> float:
        """Seconds until the next token; 0: now."""
        return 0.0 if self.available() else (1.0 - self._tokens) / self.rate
