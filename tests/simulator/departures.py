"""Executors that go for good, leaving operations that no other executor may run.

These operations are then cancelled.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from distop.protocol.records import CLUSTER_TABLE
from tests.simulator.scenario import TABLES, Act, Host, Wish
from tests.simulator.simulated_behaviors import RARE

if TYPE_CHECKING:
    import random
    from collections.abc import Mapping, Sequence

AWAY = "away"
"""The zone of an executor that goes."""
AWAY_TABLE = "away.t"
"""A table that only an executor that goes serves."""
ENDLESS = 60.0
"""The pace of jobs that do not end before their executor goes."""


def needs_departing(type_name: str, table: str, where: Mapping[str, str]) -> bool:
    """Whether only a departing executor may run an operation of this type, table and labels."""
    return type_name == RARE or table == AWAY_TABLE or where.get("zone") == AWAY


def draw_leaving(
    chance: random.Random, wishes: Sequence[Wish], hosts: Sequence[Host]
) -> tuple[tuple[Wish, ...], tuple[Host, ...]]:
    """In a twelfth of the seeds, add a departing executor and an operation for it.

    That executor alone offers the type, alone has the labels, or alone serves the table. A client cancels the operation
    before or after it goes, or another one that this one waits for.
    """
    if chance.random() >= 1 / 12:
        return tuple(wishes), tuple(hosts)
    labels = chance.random() < 0.5
    return with_departure(chance, wishes, hosts, labels=labels, table=not labels and chance.random() < 0.5)


def with_departure(
    chance: random.Random, wishes: Sequence[Wish], hosts: Sequence[Host], *, labels: bool, table: bool = False
) -> tuple[tuple[Wish, ...], tuple[Host, ...]]:
    """The wishes and hosts with such an operation and such an executor."""
    model = wishes[0]
    kind = "check-all" if labels or table else RARE
    name = f"exec-{len(hosts)}"
    host = Host(name, (kind,), chance.choice((1, 2)), 0.0, labels={"zone": AWAY}, leaves=chance.uniform(1.5, 7.0))
    if table:
        known = tuple(dict.fromkeys((CLUSTER_TABLE, *TABLES, *(one.table for one in wishes))))
        hosts = tuple(replace(one, only_tables=one.only_tables or known) for one in hosts)
    if labels or table:
        hosts = tuple(replace(one, types=tuple(dict.fromkeys((*one.types, kind)))) for one in hosts)
    name_of = AWAY_TABLE if table else model.table if model.table != CLUSTER_TABLE else "a"
    # Its jobs cannot fail, nor do they all end: then nobody could complete it any more, nor cancel it.
    arg = {"seed": chance.randrange(1 << 30), "partitions": chance.randint(1, 12), "pace": ENDLESS, "calls": 0.1}
    arg |= {"trouble": 0.0, "chunk": 1000}
    acts = (Act(chance.uniform(0.3, 9.0), "cancel"),)
    where = {"where": {"zone": AWAY}} if labels else {}
    wish = Wish(model.client, chance.uniform(0.0, 2.0), kind, name_of, arg, None, None, acts, options=where)
    if int(str(arg["seed"])) % 3:
        return (*wishes, wish), (*hosts, host)
    # It waits for another one, which is cancelled in its place: it ends with that one, without an executor.
    first = replace(wish, type=model.type, table=model.table, arg={**model.arg, **arg}, options={})
    return (*wishes, first, replace(wish, acts=(), behind=((len(wishes), "success"),))), (*hosts, host)
