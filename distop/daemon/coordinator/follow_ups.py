"""Starts the operations that follow an ended one: follow-ups of its completion code, and the next of its series.

Each starts once, by its request id, even if several coordinators try.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from distop.clock import random, time
from distop.errors import Incompatible, InvalidArgument, NotFound, OperationStartError, UnknownBehavior
from distop.protocol.dependencies import follows_elsewhere
from distop.protocol.json_codec import parse_time
from distop.protocol.record_reading import read
from distop.protocol.records import History
from distop.protocol.schedule import Series, following, next_request
from distop.protocol.txn import Get
from distop.schemas.argument_schema import encode_argument
from distop.services.submission.start_options import StartOptions
from distop.services.submission.start_request import FOLLOW, derived, request
from distop.services.submission.submit import submit

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from distop.daemon.incarnation_context import Context
    from distop.decide.operation_view import OperationView
    from distop.protocol.records import OperationRef, Spec
    from distop.protocol.schedule import Next
    from distop.services.submission.start_request import Request

FOLLOW_UP_TIME = 600.0
"""Seconds for which a refused follow-up is retried."""
FOLLOW_UP_PAUSE = (1.0, 60.0)
SERIES_PAUSE = (1.0, 5.0)


class Later(Exception):
    """Nothing more can be done for an operation before ``when`` (seconds since the epoch)."""

    def __init__(self, when: float) -> None:
        super().__init__(when)
        self.when = when


def _next_of_series(op: OperationView, spec: Spec, arg: bytes, when: Next) -> Request:
    """The request for the next operation of a series."""
    rules = spec.rules
    as_before = StartOptions(
        partitions=spec.partitions,
        failure_policy=rules.failure_policy,
        retry_attempts=rules.retry.attempts,
        time_limit=rules.time_limit or None,
        labels=spec.labels,
    )
    wanted = request(op.ref.type, op.ref.table, arg, as_before, spec.submitter)
    wanted = replace(wanted, by=spec.by, where=spec.where, options=op.terms.options)
    wanted = replace(wanted, not_before=when.not_before, series=when.series)
    by_id: dict[str, Any] = {"id": spec.id, "on_duplicate": FOLLOW} if spec.id else {"one_off": True}
    return derived(replace(wanted, **by_id), next_request(op.ref))


class FollowUps:
    """The operations that follow those of one coordinator."""

    def __init__(self, ctx: Context) -> None:
        self._ctx = ctx
        self._keys = ctx.keys
        self._log = ctx.log
        self._settled: dict[OperationRef, set[int]] = {}
        """The follow-up operations that are settled, by operation, while others wait."""
        self._retry_at: dict[OperationRef, float] = {}
        """When the refused follow-ups of an operation are retried (``time.monotonic``)."""
        self._refused: dict[OperationRef, float] = {}
        """When the first follow-up of an operation was refused (``time.monotonic``)."""

    def keep(self, refs: Collection[OperationRef]) -> None:
        """Forget all other operations, which are gone."""
        self._refused = {ref: since for ref, since in self._refused.items() if ref in refs}

    async def start_next_of_series(self, op: OperationView) -> None:
        """Start the next operation of its series (P3). Raises Later."""
        ref, spec, where = op.ref, op.spec, {"operation": str(op.ref)}
        if spec is None or spec.series is None or op.state is None:
            return
        history, arg = await self._ctx.client.read(Get(self._keys.history(ref)), Get(self._keys.of(ref, "arg")))
        now = time.time()
        finished = parse_time(read(History.decode, history.kv).finished) if history.kv is not None else now
        when = following(Series.from_json(spec.series), str(ref), op.state, finished, now, random.uniform(0, 1))
        if when is None or arg.kv is None:
            return
        retrying = "Cannot start the next operation of its series; retrying: %s"
        ending = "Ending its series: the next operation was refused: %s"
        try:
            started = await submit(self._ctx.client, self._keys, _next_of_series(op, spec, arg.kv.value, when))
        except Incompatible as error:
            # Its id is held by one of no series that has not begun: while that lasts, it is tried again.
            if pause := self._pause(ref):
                self._log.info(retrying, error, extra=where)
                raise Later(time.time() + pause) from None
            self._log.error(ending, error, extra=where)
        except OperationStartError as error:
            self._log.info(retrying, error, extra=where)
            raise Later(now + random.uniform(*SERIES_PAUSE)) from None
        except (InvalidArgument, UnknownBehavior, NotFound) as error:
            self._log.error(ending, error, extra=where)
        else:
            self._log.info("Started %s, the next operation of its series", started.ref, extra=where)

    async def start_all(self, ref: OperationRef, follow_ups: Sequence[Mapping[str, Any]]) -> None:
        """Start the follow-up operations that the completion code asked for.

        A refused one is retried, also by the next coordinator: the decision, which names it, stays until then. Raises
        Later.
        """
        if (left := self._retry_at.get(ref, 0.0) - time.monotonic()) > 0:
            raise Later(time.time() + left)
        settled = self._settled.setdefault(ref, set())
        refused: dict[int, OperationStartError] = {}
        for number, wanted in enumerate(follow_ups):
            if number not in settled:
                try:
                    await self._start(ref, number, wanted)
                    settled.add(number)
                except OperationStartError as error:
                    refused[number] = error
        if refused and (pause := self._pause(ref)):
            for why in refused.values():
                self._log.info("Cannot start a follow-up operation; retrying: %s", why, extra={"operation": str(ref)})
            self._retry_at[ref] = time.monotonic() + pause
            raise Later(time.time() + pause)
        for why in refused.values():
            self._log.error(
                "Giving up on a follow-up operation that is still refused: %s", why, extra={"operation": str(ref)}
            )
        self._settled.pop(ref, None)
        self._retry_at.pop(ref, None)

    def _pause(self, ref: OperationRef) -> float:
        """Seconds until a refused operation is retried; 0 after the time limit.

        The pause grows with the time since the first refusal. The clock is monotonic: a wall clock that is hours ahead
        would give up at once. A new coordinator starts from zero.
        """
        now = time.monotonic()
        waited = now - self._refused.setdefault(ref, now)
        shortest, longest = FOLLOW_UP_PAUSE
        pause = min(longest, shortest + waited / 4) * random.uniform(0.8, 1.0)
        return pause if waited < FOLLOW_UP_TIME else 0.0

    async def _start(self, ref: OperationRef, number: int, wanted: Mapping[str, Any]) -> None:
        """Start one follow-up operation of the completion code.

        Raises OperationStartError if it is refused for now.
        """
        try:
            if why := follows_elsewhere(ref, wanted.get("table")):
                raise InvalidArgument(why)
            options = StartOptions(partitions=wanted.get("partitions"), not_before=wanted.get("not_before"))
            arg = encode_argument(wanted.get("arg") or {})
            asked = request(wanted.get("type", ""), ref.table, arg, options, str(ref))
            started = await submit(self._ctx.client, self._keys, derived(asked, f"{ref}#{number}"))
        except (InvalidArgument, UnknownBehavior, NotFound) as error:
            self._log.error("Cannot start a follow-up operation; skipping it: %s", error, extra={"operation": str(ref)})
        else:
            self._log.info("Started the follow-up operation %s", started.ref, extra={"operation": str(ref)})
