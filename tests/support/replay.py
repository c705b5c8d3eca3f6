"""Reads etcd's history after a test: audits it, and collects what was written for the jobs of an operation."""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from typing import TYPE_CHECKING, Any

from auditing.auditor import SecondAuditor
from auditing.history import Revision as SecondRevision

from distop.protocol import keys as K
from distop.protocol.keys import Keys
from distop.services.audit import Audit, history
from distop.store.client import EtcdClient
from distop.store.connection_settings import EtcdConfig
from distop.store.history import HistoryStart, Revision

if TYPE_CHECKING:
    from collections.abc import Iterable

    from distop.protocol.records import OperationRef
    from distop.protocol.revisioned import Change
    from distop.store.history import HistoryStep

History = list[tuple[int, tuple["Change", ...]]]


def read_steps(endpoint: str, namespace: str = "", **options: Any) -> list[HistoryStep]:
    """The history of an etcd since its last compaction; ``options``: of the connection."""
    keys, config = Keys(namespace), EtcdConfig(tuple(endpoint.split(",")), **options)

    async def read() -> list[HistoryStep]:
        async with EtcdClient(config) as client, aclosing(history(client, keys)) as steps:
            return [step async for step in steps]

    return asyncio.run(read())


def read_history(endpoint: str, namespace: str = "") -> History:
    """All revisions with their changes; etcd must not have been compacted."""
    steps = read_steps(endpoint, namespace)
    assert not any(isinstance(step, HistoryStart) for step in steps), "etcd was compacted: its history is incomplete"
    return [(step.number, step.changes) for step in steps if isinstance(step, Revision)]


def audited(endpoint: str, namespace: str = "", **options: Any) -> Audit:
    """The result of ``distop audit`` for an etcd's history; ``options``: of the connection."""
    audit = Audit(Keys(namespace))
    for step in read_steps(endpoint, namespace, **options):
        audit.take(step)
    return audit


def violations(endpoint: str) -> list[str]:
    """The violations of both audits in an etcd's history.

    That is the first violation of ``distop audit`` with its timeline, and all violations of the second auditor.
    """
    return violations_in(read_steps(endpoint))


def violations_in(steps: Iterable[HistoryStep]) -> list[str]:
    """The violations of both audits in a history."""
    steps, audit = list(steps), Audit(Keys())
    for step in steps:
        audit.take(step)
    found = audit.violation
    first = [] if found is None else ["\n  ".join([str(found), *found.story])]
    return first + [f"second audit: {one}" for one in second_audit(steps).violations]


def second_audit(steps: Iterable[HistoryStep], namespace: str = "") -> SecondAuditor:
    """The second auditor after it has checked this history."""
    auditor = SecondAuditor(namespace, clock=None)
    for step in steps:
        if isinstance(step, HistoryStart):
            auditor.begin({kv.key: kv.value.decode() for kv in step.kvs})
        elif isinstance(step, Revision):
            written = {one.kv.key: None if one.deleted else one.kv.value.decode() for one in step.changes}
            auditor.feed(SecondRevision(step.number, written))
    return auditor


class Written:
    """All values that were written for the jobs of one operation: states, outcomes and claims by job, in order."""

    def __init__(self, endpoint: str, ref: OperationRef) -> None:
        keys = Keys()
        self.states: dict[int, list[str]] = {}
        self.outcomes: dict[int, list[str]] = {}
        self.claims: dict[int, list[str]] = {}
        for _, changes in read_history(endpoint):
            for change in changes:
                if change.deleted or not change.kv.key.startswith(("distOp.", "distOpClaim.")):
                    continue
                key = keys.parse(change.kv.key)
                if key.ref != ref or key.partition < 0:
                    continue
                kind = {"state": self.states, "outcome": self.outcomes}.get(key.name)
                kind = self.claims if key.family == K.CLAIM else kind
                if kind is not None:
                    kind.setdefault(key.partition, []).append(change.kv.value.decode())
