"""Sending a request until its outcome is known: back-off, fresh tokens, and T9's identical repetition."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, TypeVar

from distop.clock import time
from distop.errors import EtcdRejected, EtcdUnavailable, OutcomeUnknown, PermissionDenied
from distop.runtime.backoff import Backoff
from distop.store.grpc_failures import Failure, Fate
from distop.store.transport import Method, RequestFailed, Transport

if TYPE_CHECKING:
    from collections.abc import Coroutine

    from distop.store.connection_settings import EtcdConfig

log = logging.getLogger("distop.store")

Request = TypeVar("Request")
Response = TypeVar("Response")

_PAUSE = (0.05, 1.0)
"""Seconds between repetitions, first and longest."""

_LOG_FIRST, _LOG_EVERY = 4, 30  # repetitions: a passing trouble is not worth a line, a lasting one is worth some
NO_SPACE = "database space exceeded"
NO_SPACE_ADVICE = (
    "etcd raises NOSPACE, its database is full and it takes no writes: compact and defragment it, then disarm the "
    "alarm (`etcdctl alarm disarm`)"
)
_TOKEN_TRIES = 3  # fresh tokens in a row before a refusal is believed


def _backoff() -> Backoff:
    return Backoff(*_PAUSE)


@dataclass(slots=True)
class Attempts:
    """The repetitions of one request. ``deadline``: seconds in all, None for ever. ``harmless``: it changes nothing,
    so no outcome of it can be unknown. ``gives_way``: a full database ends it at once. ``unknown``: a copy was sent
    whose outcome is not known. ``refused``: how the last copy was refused, if it was; ``refusals``: how many were.
    """

    what: str
    deadline: float | None = None
    harmless: bool = False
    gives_way: bool = False
    until: asyncio.Future[Any] | None = None
    unknown: bool = False
    started: float = field(default_factory=time.monotonic)
    backoff: Backoff = field(default_factory=_backoff)
    count: int = 0
    tokens: int = 0
    last: Failure | None = None
    refused: EtcdRejected | None = None
    refusals: int = 0

    def left(self) -> float | None:
        """Seconds that are left, None for ever."""
        return None if self.deadline is None else self.deadline - (time.monotonic() - self.started)

    def timeout(self, longest: float) -> float:
        """For one attempt; never nothing, so that each request is tried at least once."""
        left = self.left()
        return longest if left is None else max(min(longest, left), 0.05)

    def next_pause(self) -> float | None:
        """How long to wait before the next attempt; None when time is up, or ``until`` is done."""
        if self.until is not None and self.until.done():
            return None
        pause = self.backoff.pause()
        left = self.left()
        if left is None:
            return pause
        return None if left <= 0 else min(pause, left)


class Repeater:
    """Sends requests until they are answered."""

    def __init__(self, transport: Transport, config: EtcdConfig) -> None:
        self._transport = transport
        self._config = config

    async def send(self, method: Method[Request, Response], request: Request, attempts: Attempts) -> Response:
        """Send the identical request until it is answered. Raises RequestFailed where it gives way to a full database.

        Rights come and go, and a refusal for want of them answers only for the copy that was refused: while an earlier
        one is unknown the request is repeated all the same, for only the identical transaction tells (T9).
        Raises what ``EtcdClient.commit`` documents.
        """
        while True:
            refusal: EtcdRejected | None = None
            try:
                attempt = self._transport.unary(method, request, attempts.timeout(self._config.request_timeout))
                return await (attempt if attempts.until is None else self._until(attempt, attempts.until, attempts))
            except RequestFailed as error:
                failure, token = error.failure, error.token
            except EtcdRejected as error:  # the authentication was refused; the request itself was not sent
                failure, token, refusal = Failure(Fate.FINAL, error.code, error.detail), None, error
            attempts.last = failure
            if attempts.gives_way and NO_SPACE in failure.detail:
                raise RequestFailed(failure)
            if failure.fate is Fate.TOKEN:
                attempts.tokens += 1
                believed = attempts.tokens > _TOKEN_TRIES and not attempts.unknown
                if believed or not self._config.username:
                    failure = replace(failure, fate=Fate.FINAL, code="UNAUTHENTICATED")
                else:
                    try:
                        await self.fresh_token(token)
                    except EtcdRejected as error:
                        refusal = error
                    if attempts.tokens == 1 and refusal is None:
                        continue
            if failure.fate is Fate.FINAL and refusal is None:
                refusal = self._transport.rejection(failure, f"the {attempts.what}")
            if refusal is not None and not attempts.unknown:
                raise refusal from None
            if refusal is not None and not isinstance(refusal, PermissionDenied):
                raise self._refused(attempts, refusal) from refusal
            attempts.refused = refusal
            attempts.refusals += refusal is not None
            if failure.fate is Fate.UNKNOWN and not attempts.harmless:
                attempts.unknown = True
            attempts.count += 1
            pause = attempts.next_pause()
            if pause is None:
                raise self._given_up(attempts)
            self._tell(attempts, failure)
            if attempts.until is None:
                await asyncio.sleep(pause)
            else:
                await asyncio.wait([attempts.until], timeout=pause)

    def _tell(self, attempts: Attempts, failure: Failure) -> None:
        if attempts.refused is not None:  # it passes when a person acts, who has to be told
            loud = attempts.refusals % _LOG_EVERY == 1
            log.log(logging.ERROR if loud else logging.DEBUG, "the %s waits: %s", attempts.what, attempts.refused)
            return
        loud = attempts.count % _LOG_EVERY == _LOG_FIRST
        if NO_SPACE in failure.detail:
            log.log(logging.ERROR if loud else logging.DEBUG, "the %s waits: %s", attempts.what, NO_SPACE_ADVICE)
            return
        log.log(
            logging.WARNING if loud else logging.DEBUG,
            "etcd at %s did not answer the %s: %s; trying again",
            self._transport.address,
            attempts.what,
            failure,
        )

    async def _until(
        self, attempt: Coroutine[Any, Any, Response], until: asyncio.Future[Any], attempts: Attempts
    ) -> Response:
        """One attempt, cut off when ``until`` is done. It runs in the caller's own task: one of its own, and a wait for
        that, would take each answer through the loop three times more, behind whatever else is ready there.
        """
        if until.done():
            attempt.close()
            raise self._given_up(attempts)
        task = asyncio.current_task()
        assert task is not None
        before, waits, cut = task.cancelling(), True, False

        def stop(_: asyncio.Future[Any]) -> None:
            nonlocal cut
            # It may be called after the answer: a future that is done has its callbacks called one round later.
            cut = waits and task.cancel()

        until.add_done_callback(stop)
        try:
            return await attempt
        except asyncio.CancelledError:
            # Where nobody has cancelled the caller, its connection was closed: that is an unknown outcome as well.
            if task.cancelling() - cut > before:
                raise
            attempts.unknown = not attempts.harmless
            raise self._given_up(attempts) from None
        finally:
            waits = False
            until.remove_done_callback(stop)
            if cut:
                task.uncancel()

    async def fresh_token(self, stale: str | None) -> None:
        """Replace a token that was refused; where etcd cannot be reached the next attempt tries again."""
        try:
            await self._transport.refresh_token(stale)
        except RequestFailed as error:
            log.debug("no fresh token yet: %s", error)

    @staticmethod
    def _refused(attempts: Attempts, refused: EtcdRejected) -> OutcomeUnknown:
        """A refusal answers only for the copy that was refused, not for one before it. Of rights it says what to do."""
        told = refused if isinstance(refused, PermissionDenied) else refused.detail or refused
        return OutcomeUnknown(
            f"whether etcd applied the {attempts.what} is not known: an earlier copy was not answered, and its "
            f"repetition was refused: {told}"
        )

    def _given_up(self, attempts: Attempts) -> OutcomeUnknown | EtcdUnavailable:
        heard = f" (last heard: {attempts.last})" if attempts.last else ""
        if attempts.last is not None and NO_SPACE in attempts.last.detail:
            heard = f"{heard}; its database is full: compact and defragment it, then disarm the alarm"
        if attempts.unknown and attempts.refused is not None:
            return self._refused(attempts, attempts.refused)
        if attempts.unknown:
            return OutcomeUnknown(
                f"whether etcd applied the {attempts.what} is not known{heard}: only the identical transaction tells"
            )
        endpoints = ", ".join(self._config.endpoints)
        return EtcdUnavailable(f"etcd at {endpoints} did not take the {attempts.what} in the time allowed{heard}")
