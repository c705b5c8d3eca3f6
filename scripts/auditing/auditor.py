"""The second auditor: checks each revision of etcd's history against the contract.

The rules are written from docs/contract.md, docs/internals/protocols.md and the state tables of
docs/internals/architecture.md alone, and share no code with ``distop.protocol``. So a mistake in one auditor is not
also in the other.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, NamedTuple

from auditing import cluster_rules, coordinator_rules, job_rules, operation_rules, policy_rules, waiting_rules
from auditing.content import Content, Step
from auditing.records import BadRecord

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from auditing.content import Changes, Finding
    from auditing.history import Revision
    from auditing.records import OperationName

OF_AN_OPERATION: tuple[Callable[[Step], Iterator[Finding]], ...] = (
    operation_rules.states,
    operation_rules.actions,
    operation_rules.written_once,
    operation_rules.gate_or_pending,
    operation_rules.history,
    operation_rules.request_ids,
    operation_rules.ids,
    operation_rules.series,
    waiting_rules.beginning,
    waiting_rules.aborted,
    waiting_rules.inserted,
    waiting_rules.edges,
    waiting_rules.successors,
    coordinator_rules.elected,
    coordinator_rules.plans,
    coordinator_rules.series_continues,
    job_rules.claims,
    job_rules.reports,
    job_rules.limits,
)
OF_THE_CLUSTER: tuple[Callable[[Content, Mapping[OperationName, Changes]], Iterator[Finding]], ...] = (
    cluster_rules.instance_numbers,
    cluster_rules.running_operations,
    cluster_rules.elections,
    cluster_rules.watermarks,
    cluster_rules.request_keys,
    cluster_rules.id_keys,
    policy_rules.commands,
    policy_rules.evaluations,
    policy_rules.starts,
)


class Violation(NamedTuple):
    """A violation of a rule by a revision.

    ``subject`` is an operation, one of its jobs, or a key.
    """

    rule: str
    revision: int
    subject: str
    text: str

    def __str__(self) -> str:
        return f"{self.rule}: {self.subject}, revision {self.revision}: {self.text}"


class SecondAuditor:
    """Reads revisions in order, and collects violations."""

    def __init__(self, namespace: str = "", *, clock: Callable[[], float] | None = time.monotonic) -> None:
        """Start with an empty store.

        ``clock`` returns seconds, of which only differences count. None: the history was written long ago, so the age
        of its records is judged by watermarks alone.
        """
        self.violations: list[Violation] = []
        self.revision = 0
        """The last one that was taken in."""
        self._content = Content(namespace, clock)

    @property
    def operations(self) -> int:
        """How many operations were seen."""
        return len(self._content.operations)

    def begin(self, content: Mapping[str, str]) -> None:
        """Start from the present content of a store, without judging it."""
        self._content.take(content)

    def feed(self, revision: Revision) -> None:
        """Judge the next revision."""
        self.revision = revision.number
        try:
            for finding in self._judge(revision):
                self.violations.append(Violation(finding.rule, revision.number, finding.subject, finding.text))
        except (BadRecord, KeyError, TypeError, ValueError) as error:
            text = f"{type(error).__name__}: {error}"
            self.violations.append(Violation("readable records", revision.number, ", ".join(revision.changes), text))

    def _judge(self, revision: Revision) -> Iterator[Finding]:
        touched = self._content.take(revision.changes, revision.number)
        for name, changed in touched.items():
            step = Step(self._content, name, self._content.operations[name], changed)
            for rule in OF_AN_OPERATION:
                yield from rule(step)
        for shared in OF_THE_CLUSTER:
            yield from shared(self._content, touched)
