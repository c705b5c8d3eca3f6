"""Executors that leave for good, and operations that only they can run; these are then cancelled."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from distop.protocol.records import CLUSTER_TABLE
from tests.simulator.scenario import TABLES, Action, Host, Submission
from tests.simulator.simulated_behaviors import RARE

if TYPE_CHECKING:
    import random
    from collections.abc import Mapping, Sequence

AWAY = "away"
"""The zone of the departing executor."""
AWAY_TABLE = "away.t"
"""A table that only the departing executor serves."""
ENDLESS = 60.0
"""The pace of jobs that do not end before their executor leaves."""


def needs_departing(type_name: str, table: str, where: Mapping[str, str]) -> bool:
    """Whether only a departing executor may run an operation of this type, table and labels."""
    return type_name == RARE or table == AWAY_TABLE or where.get("zone") == AWAY


def draw_leaving(
    chance: random.Random, submissions: Sequence[Submission], hosts: Sequence[Host]
) -> tuple[tuple[Submission, ...], tuple[Host, ...]]:
    """In a twelfth of the seeds, add a departing executor and an operation that only it can run.

    It alone offers the type, has the labels, or serves the table. A client cancels the operation, or its predecessor,
    before or after the executor leaves.
    """
    if chance.random() >= 1 / 12:
        return tuple(submissions), tuple(hosts)
    labels = chance.random() < 0.5
    return with_departure(chance, submissions, hosts, labels=labels, table=not labels and chance.random() < 0.5)


def with_departure(
    chance: random.Random,
    submissions: Sequence[Submission],
    hosts: Sequence[Host],
    *,
    labels: bool,
    table: bool = False,
) -> tuple[tuple[Submission, ...], tuple[Host, ...]]:
    """Add such an operation and such an executor."""
    model = submissions[0]
    kind = "check-all" if labels or table else RARE
    name = f"exec-{len(hosts)}"
    host = Host(name, (kind,), chance.choice((1, 2)), 0.0, labels={"zone": AWAY}, leaves=chance.uniform(1.5, 7.0))
    if table:
        known = tuple(dict.fromkeys((CLUSTER_TABLE, *TABLES, *(one.table for one in submissions))))
        hosts = tuple(replace(one, only_tables=one.only_tables or known) for one in hosts)
    if labels or table:
        hosts = tuple(replace(one, types=tuple(dict.fromkeys((*one.types, kind)))) for one in hosts)
    name_of = AWAY_TABLE if table else model.table if model.table != CLUSTER_TABLE else "a"
    # Its jobs neither fail nor end: an ended operation could not be cancelled, nor completed without the executor.
    arg = {"seed": chance.randrange(1 << 30), "partitions": chance.randint(1, 12), "pace": ENDLESS, "calls": 0.1}
    arg |= {"trouble": 0.0, "chunk": 1000}
    actions = (Action(chance.uniform(0.3, 9.0), "cancel"),)
    where = {"where": {"zone": AWAY}} if labels else {}
    submission = Submission(
        model.client, chance.uniform(0.0, 2.0), kind, name_of, arg, None, None, actions, options=where
    )
    if int(str(arg["seed"])) % 3:
        return (*submissions, submission), (*hosts, host)
    # It waits for another operation, which is cancelled instead: it ends with that one, without an executor.
    first = replace(submission, type=model.type, table=model.table, arg={**model.arg, **arg}, options={})
    return (*submissions, first, replace(submission, actions=(), predecessors=((len(submissions), "success"),))), (
        *hosts,
        host,
    )
