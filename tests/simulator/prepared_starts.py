"""Operations that are submitted in two phases: what their senders do, and what must come of it."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from distop.errors import NotAllowed, NotFound
from distop.protocol import keys as K
from distop.protocol.dependencies import Hold
from distop.protocol.prepared_operations import Terms, external_id_of
from distop.protocol.records import History, Spec, State

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from distop.client.async_client import Client
    from distop.client.async_operation import Operation
    from distop.protocol.keys import ParsedKey
    from distop.protocol.revisioned import Change
    from tests.simulator.clients import Told

PATIENCE: dict[str, Any] = {"verify_after": 2.0, "verify_attempts": 3, "verify_pause": 0.5}
LATE = 2.5
"""Seconds after which a late sender confirms: about when the verifier is asked."""


async def decide(
    client: Client, operation: Operation, external_id: str, what: str, told: Told, insist: Callable[..., Any]
) -> None:
    """What the sender of a prepared operation does next."""
    ref, now = operation.ref, asyncio.get_running_loop().time
    first = told.prepared.setdefault(ref, now())
    if what == "dies":
        return
    if what == "late":
        await asyncio.sleep(LATE)
    try:
        if what == "abandons":
            await insist(operation.abandon)
            return
        if told.senders.get(ref) != "confirmed":
            told.senders[ref] = "confirming"
        await insist(client.confirm, external_id)
        told.senders[ref] = "confirmed"
        await insist(operation.confirm)
    except NotAllowed as error:
        if what == "abandons":
            return
        if told.senders.get(ref) == "confirmed":
            told.surprises.append(f"{ref} was confirmed, and then refused: {error}")
        else:
            told.senders[ref] = "refused"
    except NotFound as error:
        # A sender that comes back when its receipt is forgotten is told by the operation's name.
        if now() - first <= told.receipts_kept:
            told.surprises.append(f"{what} of {ref}: {error}")
        elif what != "abandons":
            await insist(operation.confirm)


class Prepared:
    """Follows them in etcd's history."""

    def __init__(self) -> None:
        self._verifiers: dict[str, str] = {}
        """Operation → what its verifier says."""
        self._began: set[str] = set()
        self._alarms: set[str] = set()
        self._held: set[str] = set()
        """Operations that were prepared."""

    def step(self, changes: Sequence[tuple[ParsedKey, Change]]) -> None:
        for key, change in changes:
            if change.deleted:
                continue
            if key.family == K.HOLD and (terms := Terms.of(Hold.decode(change.kv.value))) is not None:
                self._verifiers[terms.op] = terms.verify
            elif key.family == K.HISTORY and not key.name and History.decode(change.kv.value).alarm:
                self._alarms.add(str(key.ref))
            elif key.name == "spec" and key.family == K.OP:
                if external_id_of(Spec.decode(change.kv.value).hold) is not None:
                    self._held.add(str(key.ref))
            elif key.name == "state" and key.partition < 0 and change.kv.value == str(State.RUNNING).encode():
                self._began.add(str(key.ref))

    def broken(self, senders: Mapping[str, str], ended: Mapping[str, str]) -> Iterator[tuple[str, str]]:
        """(operation, text) of what must not be."""
        for op in sorted(self._held):
            said, says = senders.get(op, ""), self._verifiers.get(op, "")
            if op in self._began and not said and says != "yes":
                yield op, f"{op} began; nobody confirmed it, and its verifier says {says!r}"
            if op in self._began and said == "refused":
                yield op, f"{op} began, and its sender was told that it never does"
            if op in self._alarms and said == "confirmed":
                yield op, f"{op} was given up with an alarm, and its sender was told that it is confirmed"
            if op in self._alarms and op in self._began:
                yield op, f"{op} began, and ended with the alarm of one that never does"
            if op in self._alarms and ended.get(op) != str(State.CANCELLED):
                yield op, f"{op} has an alarm, and ended as {ended.get(op)}"
