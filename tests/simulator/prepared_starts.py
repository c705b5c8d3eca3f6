"""Prepared operations: the actions of their senders, and the checks of their outcomes."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from distop.errors import NotAllowed, NotFound
from distop.protocol import keys as K
from distop.protocol.dependencies import Hold
from distop.protocol.prepared_operations import PreparedTerms, external_id_of
from distop.protocol.records import History, Spec, State

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from distop.client.async_client import Client
    from distop.client.async_operation import Operation
    from distop.protocol.keys import ParsedKey
    from distop.protocol.revisioned import Change
    from tests.simulator.clients import ClientAnswers

VERIFY_OPTIONS: dict[str, Any] = {"verify_after": 2.0, "verify_attempts": 3, "verify_pause": 0.5}
LATE = 2.5
"""Seconds after which a late sender confirms: about when the verifier is asked."""


async def act_as_sender(
    client: Client,
    operation: Operation,
    external_id: str,
    what: str,
    answers: ClientAnswers,
    insist: Callable[..., Any],
) -> None:
    """Confirm, abandon or ignore a prepared operation, as ``what`` says."""
    ref, now = operation.ref, asyncio.get_running_loop().time
    first = answers.prepared.setdefault(ref, now())
    if what == "dies":
        return
    if what == "late":
        await asyncio.sleep(LATE)
    try:
        if what == "abandons":
            await insist(operation.abandon)
            return
        if answers.senders.get(ref) != "confirmed":
            answers.senders[ref] = "confirming"
        await insist(client.confirm, external_id)
        answers.senders[ref] = "confirmed"
        await insist(operation.confirm)
    except NotAllowed as error:
        if what == "abandons":
            return
        if answers.senders.get(ref) == "confirmed":
            answers.surprises.append(f"{ref} was confirmed, but then refused: {error}")
        else:
            answers.senders[ref] = "refused"
    except NotFound as error:
        # A sender that returns after its receipt was deleted confirms by the operation's name.
        if now() - first <= answers.receipts_kept:
            answers.surprises.append(f"{what} of {ref}: {error}")
        elif what != "abandons":
            await insist(operation.confirm)


class PreparedStarts:
    """Follows prepared operations in etcd's history."""

    def __init__(self) -> None:
        self._verifiers: dict[str, str] = {}
        """Operation → the answer of its verifier."""
        self._began: set[str] = set()
        self._alarms: set[str] = set()
        self._held: set[str] = set()
        """Operations that were prepared."""

    def step(self, changes: Sequence[tuple[ParsedKey, Change]]) -> None:
        for key, change in changes:
            if change.deleted:
                continue
            if key.family == K.HOLD and (terms := PreparedTerms.of(Hold.decode(change.kv.value))) is not None:
                self._verifiers[terms.op] = terms.verify
            elif key.family == K.HISTORY and not key.name and History.decode(change.kv.value).alarm:
                self._alarms.add(str(key.ref))
            elif key.name == "spec" and key.family == K.OP:
                if external_id_of(Spec.decode(change.kv.value).hold) is not None:
                    self._held.add(str(key.ref))
            elif key.name == "state" and key.partition < 0 and change.kv.value == str(State.RUNNING).encode():
                self._began.add(str(key.ref))

    def breaches(self, senders: Mapping[str, str], ended: Mapping[str, str]) -> Iterator[tuple[str, str]]:
        """(operation, text) of each breach."""
        for op in sorted(self._held):
            sender, verifier = senders.get(op, ""), self._verifiers.get(op, "")
            if op in self._began and not sender and verifier != "yes":
                yield op, f"{op} started without a confirmation; the verifier's answer is {verifier!r}"
            if op in self._began and sender == "refused":
                yield op, f"{op} started, but its sender was told that it never would"
            if op in self._alarms and sender == "confirmed":
                yield op, f"{op} was cancelled with an alarm, but its sender was told that it was confirmed"
            if op in self._alarms and op in self._began:
                yield op, f"{op} started, but has the alarm of an operation that never started"
            if op in self._alarms and ended.get(op) != str(State.CANCELLED):
                yield op, f"{op} has an alarm, but ended as {ended.get(op)}"
