"""Submission in two phases (C13, C14): prepare an operation, then confirm it.

A prepared operation is pending under a hold of the kind "prepared". It begins once its sender confirms it. If nobody
does, an executor asks a verifier whether the sender's own transaction was completed.

The sender's external id names the hold. A confirmation deletes the hold and writes a receipt, so a second confirmation
finds it done. All writes compare the revision of the hold: of a confirmation, a denial and the count of an attempt one
wins, and late copies of the others stay refused. An exhaustive exploration of a model checked the compares. Pure.
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
"""Seconds that a verifier has to answer."""
ASKING = 90.0
"""Seconds after which a live asker without an answer is considered stuck.

The call to the child, including the wait for one, takes at most 60 s.
"""
TURN = 5.0
"""Seconds until it is the next executor's turn to ask."""
LONGEST_PAUSE = 300.0
"""Maximum seconds between two attempts."""
LOST_ASKERS = 3
"""Attempts are started at most this many times the allowed number, because askers may die."""


class Unanswered(StrEnum):
    """Why a verifier gave no answer.

    The hold and the history only contain this word: a server's own text is not for readers of etcd.
    """

    TIMEOUT = "timeout"
    REFUSED = "refused"
    """No connection: the host is unknown or unreachable, or refuses it."""
    TLS = "no TLS"
    """The server speaks no TLS, or its certificate is not accepted."""
    STATUS_1XX = "status 1xx"
    STATUS_2XX = "status 2xx"
    """A status other than 200."""
    STATUS_3XX = "status 3xx"
    """Redirects are not followed."""
    STATUS_4XX = "status 4xx"
    STATUS_5XX = "status 5xx"
    NOT_AN_ANSWER = "not an answer"
    NOT_ALLOWED = "not allowed"
    """No prefix in the executor's setting verifier-url allows the URL, or its host resolves to an address of the node.
    """
    NOT_INSTALLED = "not installed"
    FAILED = "failed"
    """A registered function raised an error, or the asking process died."""
    BUSY = "busy"
    """Too many verifications hang on this node."""

    @classmethod
    def of(cls, text: str) -> Unanswered:
        """The word that the child sent; FAILED for any other text."""
        try:
            return cls(text)
        except ValueError:
            return cls.FAILED


@frozen
class PreparedTerms:
    """What the hold of a prepared operation contains.

    ``verify``: the name of a verifier, or a URL; "": nobody is asked, and an unconfirmed operation ends.
    ``verify_after`` and ``pause`` (the first one between two attempts): seconds. ``asked``: attempts started;
    ``asker``: the incarnation whose attempt is in progress, or ""; ``failed``: attempts that ended without an answer;
    ``error``: why the last one did (a word of ``Unanswered``).
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
    """It was denied because nobody confirmed it."""

    def hold(self, state: HoldState = HoldState.HELD, text: str = "") -> Hold:
        """The hold's record."""
        return Hold(KIND, state, text, {name: getattr(self, name) for name in _FIELDS})

    @classmethod
    def of(cls, record: Hold) -> PreparedTerms | None:
        """The terms in a hold; None if it is of another kind or has no valid terms."""
        options = record.options or {}
        if (
            record.kind != KIND
            or not isinstance(options.get("op"), str)
            or not isinstance(options.get("external_id"), str)
        ):
            return None
        try:
            found = cls(**{name: kind(options[name]) for name, kind in _FIELDS.items() if name in options})
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
    """The id of the hold."""
    return f"prepared:{external_id}"


def receipt_id(external_id: str) -> str:
    """The id of a confirmation's receipt, which is stored as a hold."""
    return f"confirmed:{external_id}"


def held_as(id_: str) -> str:
    """The id of the hold that this receipt is for; any other id is unchanged."""
    return hold_id(id_.removeprefix("confirmed:")) if id_.startswith("confirmed:") else id_


def external_id_of(id_: str) -> str | None:
    """The external id of a prepared operation's hold; None for another hold."""
    return id_.removeprefix("prepared:") if id_.startswith("prepared:") else None


def digest(*parts: Any) -> str:
    """SHA-256 in hex over what a preparation asks for; it recognizes a repeated preparation."""
    return hashlib.sha256(dumps(list(parts))).hexdigest()


# ------------------------------------------------------------------- transactions


def under_hold(keys: Keys, starts: Txn, terms: PreparedTerms) -> Txn:
    """The transaction ``starts``, together with the hold.

    The operation's spec names the hold. Guards, besides those of ``starts``: hold and receipt are absent, so each
    external id is prepared once.
    """
    hold, receipt = keys.hold(hold_id(terms.external_id)), keys.hold(receipt_id(terms.external_id))
    return replace(
        starts,
        compares=(*starts.compares, absent(hold), absent(receipt)),
        success=(*starts.success, Put(hold, terms.hold().encode())),
        label="prepare",
    )


def confirm(
    keys: Keys,
    ref: OperationRef,
    terms: PreparedTerms,
    seen_mod: int,
    actions: Actions = NO_ACTIONS,
    state_mod: int = 0,
) -> Txn:
    """Confirm a prepared operation: delete its hold and write the receipt.

    Guards: the hold is unchanged; the operation is still pending, not cancelled. ``actions``: the recorded actions
    including this one, if a person confirms. The state is then compared and written again, as by every transaction that
    records an action.
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


def write(keys: Keys, terms: PreparedTerms, seen_mod: int, state: HoldState = HoldState.HELD, text: str = "") -> Txn:
    """Write the hold again: count an attempt, or (DENIED) give up.

    Guard: the hold is unchanged.
    """
    key = keys.hold(hold_id(terms.external_id))
    return Txn((unchanged(key, seen_mod),), (Put(key, terms.hold(state, text).encode()),), (Get(key),), "hold")


def denied_with(keys: Keys, end: Txn, terms: PreparedTerms, seen_mod: int, text: str) -> Txn:
    """The transaction ``end``, together with the denial of the hold.

    ``end`` cancels the operation. Guard, besides those of ``end``: the hold is unchanged. So no later confirmation is
    told that it succeeded.
    """
    key = keys.hold(hold_id(terms.external_id))
    compares: tuple[Compare, ...] = (*end.compares, unchanged(key, seen_mod))
    denied = Put(key, terms.hold(HoldState.DENIED, text).encode())
    return replace(end, compares=compares, success=(*end.success, denied))


# --------------------------------------------------------------------- decisions


def due_after(terms: PreparedTerms, rank: int, *, asking: bool) -> float:
    """Seconds since the last write of the hold until an executor is due.

    It is then to ask the verifier, or to give up. By the observer's own clock. ``rank``: the executor's place in the
    order (0 is the first). ``asking``: the current asker is alive.
    """
    if terms.asker and asking:
        pause = ASKING
    elif terms.asked == 0:
        pause = terms.verify_after
    else:
        pause = min(terms.pause * 2.0 ** min(max(terms.failed - 1, 0), 30), LONGEST_PAUSE)
    return pause + rank * TURN


def rank(terms: PreparedTerms, mine: str, others: Iterable[str]) -> int:
    """The place of this incarnation in the order in which executors ask.

    The order differs for each attempt: a verifier may be missing, or its host unreachable, on one node only.
    """

    def place(incarnation: str) -> bytes:
        return hashlib.sha256(f"{terms.external_id}\n{terms.asked}\n{incarnation}".encode()).digest()

    own = place(mine)
    return sum(place(other) < own for other in others if other != mine)


def begun(terms: PreparedTerms, asker: str) -> PreparedTerms | None:
    """The terms with one more attempt, by this incarnation; None if no more attempts are allowed."""
    if not terms.verify or terms.failed >= terms.attempts or terms.asked >= LOST_ASKERS * terms.attempts:
        return None
    return replace(terms, asked=terms.asked + 1, asker=asker)


def without_answer(terms: PreparedTerms, why: Unanswered) -> PreparedTerms:
    """The terms after an attempt that ended without an answer."""
    return replace(terms, asker="", failed=terms.failed + 1, error=str(why))


def alarm(terms: PreparedTerms) -> PreparedTerms:
    """The terms of an operation that is given up."""
    return replace(terms, asker="", alarm=True)


def sentence(terms: PreparedTerms, completed: bool | None) -> str:
    """Why the operation never runs. ``completed``: the verifier's answer; None: nobody could answer."""
    what = f"{terms.external_id!r} was not confirmed"
    if completed is False:
        return f"{what}: {terms.verify} reports that its sender's transaction was not completed"
    if not terms.verify:
        return f"{what} within {terms.verify_after:g} s, and it names no verifier to ask"
    why = f" (last attempt: {terms.error})" if terms.error else ""
    times = "once" if terms.asked == 1 else f"{terms.asked} times"
    return (
        f"{what}, and {terms.verify}, asked {times}, did not answer whether its sender's transaction was completed{why}"
    )
