"""Audits etcd's history while it is written, and collects the records that the checks of a soak need."""

from __future__ import annotations

import asyncio
import json
import threading
from collections import defaultdict
from contextlib import aclosing
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from distop.protocol import keys as K
from distop.protocol.jobs import Claim
from distop.protocol.keys import Keys
from distop.protocol.records import Attempts, Decision
from distop.services.audit import Audit, history
from distop.store.client import EtcdClient
from distop.store.history import Revision

if TYPE_CHECKING:
    from distop.protocol.records import OperationRef
    from distop.protocol.revisioned import Change
    from distop.store.connection_settings import EtcdConfig
    from distop.store.history import HistoryStep

FOLLOWING = "following"
"""The type of follow-up operations."""


@dataclass(frozen=True, slots=True)
class Counted:
    """A recorded failed attempt at the ``planning`` or ``completion`` of an operation."""

    stage: str
    attempts: int
    error: str
    retry_at: str


class Follower:
    """Reads the history in its own thread, as a context manager."""

    def __init__(self, config: EtcdConfig) -> None:
        self.audit = Audit(Keys())
        self.failure: BaseException | None = None
        """The error that ended the thread."""
        self.records: dict[OperationRef, dict[str, Any]] = {}
        """Operation → its history record."""
        self.outcomes: dict[OperationRef, dict[int, list[str]]] = defaultdict(dict)
        """Operation → job → all outcomes that were ever written for it."""
        self.followers: dict[str, list[OperationRef]] = defaultdict(list)
        """Name of an operation in the soak → its follow-up operations."""
        self.counted: dict[OperationRef, list[Counted]] = defaultdict(list)
        """Operation → the failed attempts at its planning and completion, in order."""
        self.held: dict[OperationRef, dict[tuple[int, int], str]] = defaultdict(dict)
        """Operation → (job, attempt) → the executor that held its claim."""
        self.specs: dict[OperationRef, dict[str, Any]] = {}
        """Operation → its spec."""
        self.args: dict[OperationRef, Any] = {}
        """Operation → its argument."""
        self.started: dict[str, list[OperationRef]] = defaultdict(list)
        """Request id → the operations that it started."""
        self._config = config
        self._loop = asyncio.new_event_loop()
        self._following = self._loop.create_task(self._follow())
        self._thread = threading.Thread(target=self._work, daemon=True)

    def __enter__(self) -> Follower:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._following.cancel)
        self._thread.join(20)

    def problems(self, last: int) -> list[str]:
        """The violations, and why the history up to revision ``last`` was not audited completely."""
        return judge(self.audit, self.failure, last)

    def _work(self) -> None:
        try:
            self._loop.run_until_complete(self._following)
        except asyncio.CancelledError:
            pass
        except BaseException as error:
            self.failure = error

    async def _follow(self) -> None:
        async with EtcdClient(self._config) as client, aclosing(history(client, Keys(), follow=True)) as steps:
            async for step in steps:
                self._take(step)

    def _take(self, step: HistoryStep) -> None:
        self.audit.take(step)
        if isinstance(step, Revision):
            for change in step.changes:
                if not change.deleted:
                    self._note(change)

    def _note(self, change: Change) -> None:
        if change.kv.key.endswith(".outcome"):
            key = Keys().parse(change.kv.key)
            assert key.ref is not None
            self.outcomes[key.ref].setdefault(key.partition, []).append(change.kv.value.decode())
        elif change.kv.key.startswith(f"{K.OP}.") and change.kv.key.endswith((".arg", ".spec")):
            self._note_start(change)
        elif change.kv.key.startswith(f"{K.CLAIM}."):
            key, claim = Keys().parse(change.kv.key), Claim.decode(change.kv.value)
            if not claim.waiting:
                assert key.ref is not None
                self.held[key.ref][key.partition, claim.attempt] = claim.executor
        elif change.kv.key.endswith((".planning", ".decision")):
            self._count(change)
        elif change.kv.key.startswith(f"{K.HISTORY}."):
            key = Keys().parse(change.kv.key)
            if key.ref is not None and not key.name and key.chunk < 0:
                self.records[key.ref] = json.loads(change.kv.value)

    def _note_start(self, change: Change) -> None:
        key, value = Keys().parse(change.kv.key), json.loads(change.kv.value)
        if key.ref is None or key.name not in ("arg", "spec"):
            return
        if key.name == "spec":
            if key.ref not in self.specs:
                self.started[value.get("request_id", "")].append(key.ref)
            self.specs[key.ref] = value
        else:
            self.args[key.ref] = value
            if key.ref.type == FOLLOWING:
                self.followers[value["of"]].append(key.ref)

    def _count(self, change: Change) -> None:
        key = Keys().parse(change.kv.key)
        assert key.ref is not None
        planning = key.name == "planning"
        read: Attempts | Decision = (Attempts if planning else Decision).decode(change.kv.value)
        if read.attempts:
            stage = "planning" if planning else "completion"
            self.counted[key.ref].append(Counted(stage, read.attempts, read.error, read.retry_at))


def judge(audit: Audit, failure: BaseException | None, last: int) -> list[str]:
    """The problems of an audit up to revision ``last``. ``failure``: the error that ended it."""
    totals, violation = audit.totals, audit.violation
    if violation is not None:
        return ["\n  ".join([str(violation), *violation.story])]
    found = []
    if failure is not None:
        found.append(f"the audit failed: {failure!r}")
    if totals.last < last:
        found.append(f"the audit stopped at revision {totals.last} of {last}")
    found += [f"revisions {first} to {end} were compacted before the audit read them" for first, end in totals.lost]
    return found
