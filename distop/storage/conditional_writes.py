"""Sends conditional writes, and reads the object back if the answer is lost or a refusal.

After a lost answer the write may have been applied, may be applied later, or never. A blind retry would report
``ObjectExists`` or ``ObjectChanged`` although the first request had succeeded. The same happens if a proxy duplicates a
request: the second copy is refused because of the first. So after a lost answer, and after each refusal, the object is
read. Each write has a token in the object's metadata, which identifies its writer.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, NamedTuple, TypeVar

from distop.clock import time
from distop.runtime.backoff import Backoff
from distop.storage.store_errors import (
    AnswerLost,
    NotConnected,
    ObjectChanged,
    ObjectExists,
    StoreError,
    StoreUnavailable,
    Throttled,
    TimedOut,
    UnknownWrite,
    Unreachable,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from distop.storage.object_store import Version

T = TypeVar("T")

_FIRST_PAUSE, _LONGEST_PAUSE = 0.1, 5.0


class Deadline:
    """A time limit with pauses between tries."""

    def __init__(self, limit: float) -> None:
        self.limit = limit
        self._end = time.monotonic() + limit
        self._backoff = Backoff(_FIRST_PAUSE, _LONGEST_PAUSE)

    def pause(self) -> bool:
        """Wait before another try; returns False if no time is left for one."""
        left = self._end - time.monotonic()
        if left <= 0:
            return False
        threading.Event().wait(min(self._backoff.pause(), left))
        return True

    def exceeded(self, error: StoreUnavailable) -> StoreUnavailable:
        """The error for the caller after the last try, which had failed with ``error``."""
        kinds = ((Throttled, Throttled), (NotConnected, Unreachable))
        kind = next((mine for kind, mine in kinds if isinstance(error, kind)), TimedOut)
        found = kind(f"{error} (given up after {self.limit:g} s)")
        found.status, found.code = error.status, error.code
        return found


def repeated(call: Callable[[], T], limit: float) -> T:
    """The result of a call that changes nothing, or nothing more when repeated.

    Repeats it while the store is unavailable. Raises the call's errors, Throttled and TimedOut.
    """
    deadline = Deadline(limit)
    while True:
        try:
            return call()
        except StoreUnavailable as error:
            if not deadline.pause():
                raise deadline.exceeded(error) from None


class ReadBack(NamedTuple):
    """The object after a write. ``version``: None: there is no object. ``own``: this write created that version."""

    version: Version | None
    own: bool


def settled(
    send: Callable[[], Version],
    read_back: Callable[[bool], ReadBack],
    *,
    what: str,
    limit: float,
    expected: Version | None,
) -> Version:
    """Send a conditional write until its outcome is known; returns the new version.

    ``read_back``: reads the object; its argument says whether an answer was lost (then an object without a token may be
    this write's). ``expected``: the version that the write replaces; None: it creates the object.

    Raises ObjectExists or ObjectChanged if another writer was first, UnknownWrite if the outcome stays unknown,
    Throttled or TimedOut if nothing was written, and errors of the store.
    """
    deadline = Deadline(limit)
    unanswered = unread = False
    while True:
        refusal: StoreError | None = None
        last: StoreError
        try:
            return send()
        except (ObjectExists, ObjectChanged) as error:
            refusal = last = error
        except (Throttled, NotConnected) as error:
            last = error
        except AnswerLost as error:
            unanswered, last = True, error
        except StoreError as error:
            if unanswered:
                raise _unknown(what, error) from None
            raise
        if refusal is not None or unanswered:
            try:
                found = read_back(unanswered)
            except StoreUnavailable as error:
                unread, last = True, error
            except StoreError as error:
                raise _unknown(what, error) from None
            else:
                unread = False
                if found.own and found.version is not None:
                    return found.version
                if found.version != expected:
                    raise _lost(what, unanswered, refusal, expected)
        if not deadline.pause():
            if unanswered or unread:
                raise _unknown(what, last)
            raise deadline.exceeded(last) if isinstance(last, StoreUnavailable) else last


def _lost(what: str, unanswered: bool, refusal: StoreError | None, expected: Version | None) -> StoreError:
    """The error for a write after which the object is another writer's."""
    if expected is None:
        return ObjectExists(f"cannot {what}: it exists already")
    if unanswered:
        # An own write may have been applied, and replaced since.
        return _unknown(what, refusal or "another writer has replaced the object since")
    return refusal or ObjectChanged(f"cannot {what}: the object has changed, or is gone")


def _unknown(what: str, cause: object) -> UnknownWrite:
    return UnknownWrite(
        f"the answer to a request to {what} was lost, and it is unknown whether the write was applied: {cause}"
    )
