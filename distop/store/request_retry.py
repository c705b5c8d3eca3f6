"""Repeats a request until its outcome is known: back-off, new tokens, identical repetitions (T9)."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, TypeVar

from distop.clock import time
from distop.errors import EtcdRejected, EtcdUnavailable, OutcomeUnknown, PermissionDenied
from distop.runtime.backoff import Backoff
from distop.store.grpc_failures import CLOSED, Failure, FailureKind
from distop.store.transport import Method, RequestFailed, Transport

if TYPE_CHECKING:
    from collections.abc import Coroutine

    from distop.store.connection_settings import EtcdConfig

log = logging.getLogger("distop.store")

Request = TypeVar("Request")
Response = TypeVar("Response")

_PAUSE = (0.05, 1.0)
"""Seconds between repetitions, first and longest."""

_LOG_FIRST, _LOG_EVERY = 4, 30  # repetitions before the first warning and between warnings: short failures log none
NO_SPACE = "database space exceeded"
NO_SPACE_ADVICE = (
    "etcd's alarm NOSPACE is active: its database is full and rejects writes; compact and defragment it, then disarm "
    "the alarm (`etcdctl alarm disarm`)"
)
_TOKEN_TRIES = 3  # new tokens in a row before an authentication error counts as final


def _backoff() -> Backoff:
    return Backoff(*_PAUSE)


@dataclass(slots=True)
class RequestRetries:
    """The repetitions of one request.

    ``deadline``: total seconds, None for no limit. ``idempotent``: repetitions change nothing, so its outcome is never
    unknown. ``stop_on_no_space``: stop at once if etcd's database is full. ``unknown``: a copy has an unknown outcome.
    ``refused``: the error of the last copy, if etcd rejected it; ``refusals``: the number of rejected copies.
    """

    what: str
    deadline: float | None = None
    idempotent: bool = False
    stop_on_no_space: bool = False
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
        """Remaining seconds, None for no limit."""
        return None if self.deadline is None else self.deadline - (time.monotonic() - self.started)

    def timeout(self, longest: float) -> float:
        """The time-out of one attempt in seconds; more than 0, so that each request is sent at least once."""
        left = self.left()
        return longest if left is None else max(min(longest, left), 0.05)

    def next_pause(self) -> float | None:
        """Seconds until the next attempt; None if time is up, or ``until`` is done."""
        if self.until is not None and self.until.done():
            return None
        pause = self.backoff.pause()
        left = self.left()
        if left is None:
            return pause
        return None if left <= 0 else min(pause, left)


class Repeater:
    """Repeats requests until etcd answers them."""

    def __init__(self, transport: Transport, config: EtcdConfig) -> None:
        self._transport = transport
        self._config = config

    async def send(self, method: Method[Request, Response], request: Request, attempts: RequestRetries) -> Response:
        """Send the identical request until etcd answers it.

        Permissions may be restored, and a permission error concerns only the copy that was rejected. So while the
        outcome of an earlier copy is unknown, the request is still repeated: only the identical transaction can tell
        (T9). Raises RequestFailed if etcd's database is full and ``stop_on_no_space`` is set, and the errors of
        ``EtcdClient.commit``.
        """
        while True:
            refusal: EtcdRejected | None = None
            try:
                attempt = self._transport.unary(method, request, attempts.timeout(self._config.request_timeout))
                return await (attempt if attempts.until is None else self._until(attempt, attempts.until, attempts))
            except RequestFailed as error:
                failure, token = error.failure, error.token
            except EtcdRejected as error:  # the authentication was rejected; the request itself was not sent
                failure, token, refusal = Failure(FailureKind.FINAL, error.code, error.detail), None, error
            except EtcdUnavailable:  # the client is closed
                if not attempts.unknown:
                    raise
                failure, token = CLOSED, None
            attempts.last = failure
            if attempts.stop_on_no_space and NO_SPACE in failure.detail:
                raise RequestFailed(failure)
            if failure.kind is FailureKind.TOKEN:
                failure, refusal = await self._with_new_token(failure, token, attempts)
                if failure.kind is FailureKind.TOKEN and attempts.tokens == 1 and refusal is None:
                    continue
            if failure.kind is FailureKind.FINAL and refusal is None:
                refusal = self._transport.rejection(failure, f"the {attempts.what}")
            if refusal is not None and not attempts.unknown:
                raise refusal from None
            if refusal is not None and not isinstance(refusal, PermissionDenied):
                raise self._unknown_after_refusal(attempts, refusal) from refusal
            attempts.refused = refusal
            attempts.refusals += refusal is not None
            if failure.kind is FailureKind.UNKNOWN and not attempts.idempotent:
                attempts.unknown = True
            attempts.count += 1
            pause = attempts.next_pause() if failure is not CLOSED else None
            if pause is None:
                raise self._time_up_error(attempts)
            self._log_failure(attempts, failure)
            if attempts.until is None:
                await asyncio.sleep(pause)
            else:
                await asyncio.wait([attempts.until], timeout=pause)

    async def _with_new_token(
        self, failure: Failure, token: str | None, attempts: RequestRetries
    ) -> tuple[Failure, EtcdRejected | None]:
        """Fetch a new token after a rejected one.

        Returns the failure, which becomes final if no token can help, and etcd's rejection of the authentication.
        """
        attempts.tokens += 1
        final = attempts.tokens > _TOKEN_TRIES and not attempts.unknown
        if final or not self._config.username:
            return replace(failure, kind=FailureKind.FINAL, code="UNAUTHENTICATED"), None
        try:
            await self.fresh_token(token)
        except EtcdRejected as error:
            return failure, error
        return failure, None

    def _log_failure(self, attempts: RequestRetries, failure: Failure) -> None:
        rejected = "etcd rejected the %s; retrying: %s"
        if attempts.refused is not None:  # only a person can resolve it
            visible = attempts.refusals % _LOG_EVERY == 1
            log.log(logging.ERROR if visible else logging.DEBUG, rejected, attempts.what, attempts.refused)
            return
        visible = attempts.count % _LOG_EVERY == _LOG_FIRST
        if NO_SPACE in failure.detail:
            log.log(logging.ERROR if visible else logging.DEBUG, rejected, attempts.what, NO_SPACE_ADVICE)
            return
        log.log(
            logging.WARNING if visible else logging.DEBUG,
            "etcd at %s did not answer the %s; retrying: %s",
            self._transport.address,
            attempts.what,
            failure,
        )

    async def _until(
        self, attempt: Coroutine[Any, Any, Response], until: asyncio.Future[Any], attempts: RequestRetries
    ) -> Response:
        """One attempt, cancelled when ``until`` is done.

        It runs in the caller's task: with a separate task each answer would wait for three more rounds of the loop.
        """
        if until.done():
            attempt.close()
            raise self._time_up_error(attempts)
        task = asyncio.current_task()
        assert task is not None
        before, waits, cut = task.cancelling(), True, False

        def stop(_: asyncio.Future[Any]) -> None:
            nonlocal cut
            # This may run after the answer: the callbacks of a future run one round of the loop later.
            cut = waits and task.cancel()

        until.add_done_callback(stop)
        try:
            return await attempt
        except asyncio.CancelledError:
            # If the caller was not cancelled, its connection was closed: the outcome is unknown as well.
            if task.cancelling() - cut > before:
                raise
            attempts.unknown = not attempts.idempotent
            raise self._time_up_error(attempts) from None
        finally:
            waits = False
            until.remove_done_callback(stop)
            if cut:
                task.uncancel()

    async def fresh_token(self, stale: str | None) -> None:
        """Replace a rejected token; if etcd cannot be reached, the next attempt retries."""
        try:
            await self._transport.refresh_token(stale)
        except RequestFailed as error:
            log.debug("Cannot fetch a new token; the next attempt retries: %s", error)

    @staticmethod
    def _unknown_after_refusal(attempts: RequestRetries, refused: EtcdRejected) -> OutcomeUnknown:
        """The error for a rejected repetition, whose rejection does not concern the copies before it."""
        why = refused if isinstance(refused, PermissionDenied) else refused.detail or refused
        return OutcomeUnknown(
            f"whether etcd applied the {attempts.what} is unknown: an earlier copy was not answered, and etcd "
            f"rejected its repetition: {why}"
        )

    def _time_up_error(self, attempts: RequestRetries) -> OutcomeUnknown | EtcdUnavailable:
        last = f" (last error: {attempts.last})" if attempts.last else ""
        if attempts.last is not None and NO_SPACE in attempts.last.detail:
            last = f"{last}; its database is full: compact and defragment it, then disarm the alarm"
        if attempts.unknown and attempts.refused is not None:
            return self._unknown_after_refusal(attempts, attempts.refused)
        if attempts.unknown:
            return OutcomeUnknown(
                f"whether etcd applied the {attempts.what} is unknown{last}: only the identical transaction can tell"
            )
        if attempts.last is CLOSED:
            return EtcdUnavailable("the etcd client is closed")
        endpoints = ", ".join(self._config.endpoints)
        return EtcdUnavailable(f"etcd at {endpoints} did not accept the {attempts.what} in time{last}")
