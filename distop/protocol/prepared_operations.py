"""Submission in two phases (C13, C14): an operation is inserted under a hold of the kind "prepared", and begins once
its sender confirms it. Where nobody does, a verifier is asked whether the sender's own transaction was completed.

The hold stands under a name made of the sender's external id. To confirm is to take it away and to leave a receipt, so
that a second time finds it done. All writes compare the revision of the hold that was seen: of a confirmation, a denial
and the count of an attempt one wins, and late copies of the others are dead. The clauses were checked by exhaustive
exploration of a model. Pure.
"""

from __future__ import annotations

import hashlib
import math
from dataclasses import replace
from enum import StrEnum
from typing import TYPE_CHECKING, Any

from distop.protocol.dependencies import Hold, HoldState
from distop.protocol.frozen import frozen
from distop.protocol.json_codec import dumps, word
from distop.protocol.records import State
from distop.protocol.txn import Delete, Get, Put, Txn, absent, unchanged, value_is
from distop.protocol.user_actions import NO_ACTIONS, recorded

if TYPE_CHECKING:
    from collections.abc import Iterable

    from distop.protocol.keys import Keys
    from distop.protocol.records import OperationRef
    from distop.protocol.txn import Compare
    from distop.protocol.user_actions import Actions

KIND = "prepared"
ASK_LIMIT = 10.0
"""Seconds in which a verifier has to answer."""
ASKING = 90.0
"""Seconds after which whoever asks, and lives, is taken for stuck, where nothing was heard of the answer: the call to
the child, with the wait for one, takes at most 60."""
TURN = 5.0
"""Seconds until it is the next executor's turn to ask."""
LONGEST_PAUSE = 300.0
"""Seconds between two attempts, whatever their number."""
LOST_ASKERS = 3
"""So many times the attempts allowed are begun at most: those who ask may die each time."""


class Unanswered(StrEnum):
    """Why a verifier gave no answer. This word is all that the hold and the history say: a server's own text is not
    for readers of etcd.
    """

    TIMEOUT = "timeout"
    REFUSED = "refused"
    """There was no connection: the host is unknown, unreachable, or refuses it."""
    TLS = "no TLS"
    """The server speaks no TLS, or its certificate is not accepted."""
    STATUS_1XX = "status 1xx"
    STATUS_2XX = "status 2xx"
    """Another one than 200."""
    STATUS_3XX = "status 3xx"
    """Redirects are not followed."""
    STATUS_4XX = "status 4xx"
    STATUS_5XX = "status 5xx"
    NOT_AN_ANSWER = "not an answer"
    NOT_ALLOWED = "not allowed"
    """No prefix in the executor's setting verifier-url allows the URL, or its host has an address of the node's own."""
    NOT_INSTALLED = "not installed"
    FAILED = "failed"
    """A registered function raised an error, or the process that asks died."""
    BUSY = "busy"
    """Too many verifications hang on the node."""

    @classmethod
    def of(cls, text: str) -> Unanswered:
        """The word as the child sent it."""
        try:
            return cls(text)
        except ValueError:
            return cls.FAILED


@frozen
class Terms:
    """What the hold of a prepared operation says. ``verify``: the name of a verifier, or a URL; "": nobody is asked,
    and what is not confirmed ends. ``verify_after`` and ``pause`` (the first one between two attempts): seconds.
    ``asked``: attempts that were begun; ``asker``: the incarnation whose attempt is not over, or ""; ``failed``: those
    that are over without an answer; ``error``: why the last was
    (a word of ``Unanswered``).
    """

    external_id: str
    op: str
    digest: str
    verify: str = ""
    verify_after: float = 60.0
    attempts: int = 5
    pause: float = 5.0
    asked: int = 0
    asker: str = ""
    failed: int = 0
    error: str = ""
    alarm: bool = False
    """It was denied for want of a confirmation."""

    def hold(self, state: HoldState = HoldState.HELD, text: str = "") -> Hold:
        """The record."""
        return Hold(KIND, state, text, {name: getattr(self, name) for name in _FIELDS})

    @classmethod
    def of(cls, record: Hold) -> Terms | None:
        """What a hold says; None where it is of another kind, or lacks what a prepared one has."""
        told = record.options or {}
        if record.kind != KIND or not isinstance(told.get("op"), str) or not isinstance(told.get("external_id"), str):
            return None
        try:
            found = cls(**{name: kind(told[name]) for name, kind in _FIELDS.items() if name in told})
        except (TypeError, ValueError, OverflowError):
            return None
        return found if math.isfinite(found.verify_after) and math.isfinite(found.pause) else None


_FIELDS: dict[str, Any] = {
    "external_id": str,
    "op": str,
    "digest": str,
    "verify": str,
    "verify_after": float,
    "attempts": int,
    "pause": float,
    "asked": int,
    "asker": str,
    "failed": int,
    "error": str,
    "alarm": bool,
}


def hold_id(external_id: str) -> str:
    """What the hold is called."""
    return f"prepared:{external_id}"


def receipt_id(external_id: str) -> str:
    """What the receipt of a confirmation is called, among the holds."""
    return f"confirmed:{external_id}"


def held_as(id_: str) -> str:
    """The hold of which this is the receipt; any other name is as it is."""
    return hold_id(id_.removeprefix("confirmed:")) if id_.startswith("confirmed:") else id_


def external_id_of(id_: str) -> str | None:
    """The external id of a prepared operation's hold; None for another hold."""
    return id_.removeprefix("prepared:") if id_.startswith("prepared:") else None


def digest(*parts: Any) -> str:
    """SHA-256 in hex over what a preparation asks for: by it the same one is known again."""
    return hashlib.sha256(dumps(list(parts))).hexdigest()


# ------------------------------------------------------------------- transactions


def under_hold(keys: Keys, starts: Txn, terms: Terms) -> Txn:
    """``starts`` (of an operation whose spec names the hold), together with the hold; once for each external id."""
    hold, receipt = keys.hold(hold_id(terms.external_id)), keys.hold(receipt_id(terms.external_id))
    return replace(
        starts,
        compares=(*starts.compares, absent(hold), absent(receipt)),
        success=(*starts.success, Put(hold, terms.hold().encode())),
        label="prepare",
    )


def confirm(
    keys: Keys, ref: OperationRef, terms: Terms, seen_mod: int, actions: Actions = NO_ACTIONS, state_mod: int = 0
) -> Txn:
    """What is held goes on. It has not ended, by a cancel, meanwhile. ``actions``: with this one, where somebody
    confirms it. The state, as seen, is then written again, as by whatever records an action.
    """
    state, waits = keys.of(ref, "state"), word(State.PENDING)
    hold, receipt = keys.hold(hold_id(terms.external_id)), keys.hold(receipt_id(terms.external_id))
    return Txn(
        (unchanged(hold, seen_mod), value_is(state, waits), *([unchanged(state, state_mod)] if actions.kept else [])),
        (
            *(Delete(hold), Put(receipt, terms.hold(HoldState.CONFIRMED).encode())),
            *([Put(state, waits)] if actions.kept else []),
            *recorded(keys.of(ref, "actions"), actions),
        ),
        (Get(hold), Get(receipt)),
        "confirm",
    )


def write(keys: Keys, terms: Terms, seen_mod: int, state: HoldState = HoldState.HELD, text: str = "") -> Txn:
    """Write the hold again: an attempt is counted, or (DENIED) it is given up."""
    key = keys.hold(hold_id(terms.external_id))
    return Txn((unchanged(key, seen_mod),), (Put(key, terms.hold(state, text).encode()),), (Get(key),), "hold")


def denied_with(keys: Keys, end: Txn, terms: Terms, seen_mod: int, text: str) -> Txn:
    """The end of the operation (by whoever cancels it) together with the denial of its hold: no confirmation that comes
    later is told that it was done.
    """
    key = keys.hold(hold_id(terms.external_id))
    compares: tuple[Compare, ...] = (*end.compares, unchanged(key, seen_mod))
    denied = Put(key, terms.hold(HoldState.DENIED, text).encode())
    return replace(end, compares=compares, success=(*end.success, denied))


# --------------------------------------------------------------------- decisions


def due_after(terms: Terms, rank: int, *, asking: bool) -> float:
    """Seconds since the hold was last written, by the observer's own clock, after which the ``rank``-th of the
    executors (0 is the first) is to ask, or to give up. ``asking``: the one that asks now is alive.
    """
    if terms.asker and asking:
        pause = ASKING
    elif terms.asked == 0:
        pause = terms.verify_after
    else:
        pause = min(terms.pause * 2.0 ** min(max(terms.failed - 1, 0), 30), LONGEST_PAUSE)
    return pause + rank * TURN


def rank(terms: Terms, mine: str, others: Iterable[str]) -> int:
    """The place of this incarnation in the order in which they ask, which is another one for each attempt: a verifier
    may be missing, or its host out of reach, on one node alone.
    """

    def place(incarnation: str) -> bytes:
        return hashlib.sha256(f"{terms.external_id}\n{terms.asked}\n{incarnation}".encode()).digest()

    own = place(mine)
    return sum(place(other) < own for other in others if other != mine)


def begun(terms: Terms, asker: str) -> Terms | None:
    """With one attempt more, of this incarnation; None where no more are made."""
    if not terms.verify or terms.failed >= terms.attempts or terms.asked >= LOST_ASKERS * terms.attempts:
        return None
    return replace(terms, asked=terms.asked + 1, asker=asker)


def without_answer(terms: Terms, why: Unanswered) -> Terms:
    """An attempt is over, and nothing is known."""
    return replace(terms, asker="", failed=terms.failed + 1, error=str(why))


def alarm(terms: Terms) -> Terms:
    """What the hold says of an operation that is given up."""
    return replace(terms, asker="", alarm=True)


def sentence(terms: Terms, completed: bool | None) -> str:
    """Why it never runs: the verifier said no; or (None) nobody could tell."""
    what = f"{terms.external_id!r} was not confirmed"
    if completed is False:
        return f"{what}, and its sender's transaction was not completed, as {terms.verify} says"
    if not terms.verify:
        return f"{what} within {terms.verify_after:g} s, and it names nobody who could be asked"
    why = f" (the last time: {terms.error})" if terms.error else ""
    times = "once" if terms.asked == 1 else f"{terms.asked} times"
    return (
        f"{what}, and {terms.verify}, asked {times}, did not tell whether its sender's transaction was completed{why}"
    )
