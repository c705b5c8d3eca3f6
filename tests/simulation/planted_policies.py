"""Planted bugs of policies: an evaluation that compares too little, or notes more than it looked at."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

from distop.clock import uuid
from distop.daemon.evaluator.evaluator_role import Evaluator
from distop.daemon.evaluator.inputs import Inputs
from distop.daemon.evaluator.table_look import TableLook
from distop.decide import policy_evaluation
from distop.protocol import policy as p
from distop.protocol.txn import Txn
from tests.simulation.bug_planting import Patch, bug, substitute, wrap
from tests.simulation.planted_checkpoints import BUGS, Planted
from tests.simulator.scenes import policies_of_tables


def _without(txn: Txn, *keys: str) -> Txn:
    """The transaction without its compares of these keys."""
    return replace(txn, compares=tuple(one for one in txn.compares if one.key not in keys))


@bug(
    "invariant 20",
    "policy started twice",
    shape=policies_of_tables,
    focus=("requests-late", "freeze", "crash"),
    drawn=18,
)
def start_twice_by_a_policy(patch: Patch) -> None:
    """The evaluation is recorded after the start: if the evaluator dies in between, the next one starts again."""
    former = TableLook._start

    async def start(self: TableLook, name: str, seen: Any, judgement: Any, facts: Any) -> Any:
        ref = await former(self, name, seen, judgement, facts)
        if ref is not None:
            after = policy_evaluation.started(judgement, str(ref), facts)
            await self._ctx.commit(p.evaluate(self._ctx.keys, self._table, name, seen, after, self._fence))
        return ref

    substitute(patch, TableLook, "_start", start)
    wrap(patch, p, "start", lambda txn, given: given.starts)
    substitute(patch, p, "request_id", lambda uid, triggers, state_mod: f"{p.REQUEST}{uuid.uuid4().hex}")


@bug("policy missed a version", shape=policies_of_tables, first=15, drawn=910)
def miss_a_version(patch: Patch) -> None:
    """The version is read again after the statistics: one that came in between is noted, but was not looked at."""
    former = Inputs.facts

    async def facts(self: Inputs, name: str, seen: Any, version: str | None) -> Any:
        found = await former(self, name, seen, version)
        if found.version is None or found.problem:
            return found
        answer = await self._ctx.worker.statistics(self._record.to_json(), [], 0)
        return replace(found, version=answer["version"])

    substitute(patch, Inputs, "facts", facts)


@bug("invariant 20", "policy missed a version", shape=policies_of_tables, first=15, drawn=326)
def note_a_version_that_waits(patch: Patch) -> None:
    """A trigger that waits for the last operation counts as evaluated."""

    def consume(judgement: Any, given: SimpleNamespace) -> Any:
        if judgement.evaluation.verdict is not p.PolicyVerdict.WAITS:
            return judgement
        after = policy_evaluation._consumed(given.seen, given.facts).and_then(judgement.evaluation)
        return replace(judgement, after=after)

    wrap(patch, policy_evaluation, "evaluate", consume)


@bug(
    "invariant 20",
    "started by a paused policy",
    shape=policies_of_tables,
    focus=("answers-lost", "requests-late"),
    first=3,
    drawn=18,
)
def lose_a_pause(patch: Patch) -> None:
    """An evaluation does not compare the policy."""
    wrap(
        patch,
        p,
        "evaluation_guards",
        lambda guards, given: tuple(one for one in guards if one.key != given.keys.policy(given.table, given.name)),
    )


@bug("invariant 20", "policy lost a pause", shape=policies_of_tables, first=2, drawn=18)
def end_a_pause_by_a_change(patch: Patch) -> None:
    """A policy that is set again is active."""
    wrap(
        patch,
        p,
        "allows",
        lambda after, given: p.PolicyStage.ACTIVE if given.event is p.PolicyEvent.CHANGE else after,
    )


@bug(
    "invariant 20",
    "started by a removed policy",
    shape=policies_of_tables,
    focus=("answers-lost", "requests-late"),
    first=12,
    drawn=503,
)
def start_after_removal(patch: Patch) -> None:
    """The start compares neither the policy nor its state."""
    wrap(
        patch,
        p,
        "start",
        lambda txn, given: _without(
            txn,
            given.keys.policy(given.table, given.name),
            given.keys.policy_state(given.table, given.name),
        ),
    )


@bug("invariant 20", shape=policies_of_tables, first=4, drawn=326)
def count_each_missed_interval(patch: Patch) -> None:
    """Each missed interval is evaluated, one after the other."""
    wrap(
        patch,
        policy_evaluation,
        "_counted",
        lambda counted, given: given.state.every_at + given.policy.every if given.state.every_at else counted,
    )


@bug("invariant 20", shape=policies_of_tables, first=1, drawn=18)
def evaluate_without_an_election(patch: Patch) -> None:
    """Each node evaluates the tables that it serves, and an evaluation does not compare the election."""
    former = Evaluator._examine

    def examine(self: Evaluator, tables: Iterable[str]) -> None:
        tables = list(tables)
        former(self, tables)
        for table in tables:
            if self._needed(table) and table not in self._mine:
                self._won(table, 0)

    substitute(patch, Evaluator, "_examine", examine)
    wrap(
        patch,
        p,
        "evaluation_guards",
        lambda guards, given: tuple(one for one in guards if one.key != given.keys.policy_evaluator(given.table)),
    )


__all__ = ["BUGS", "Planted"]
