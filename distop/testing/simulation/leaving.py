"""Executors that go for good, and with them the only ones that may work for an operation, which is then cancelled."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from distop.core.model import CLUSTER_TABLE
from distop.testing.simulation.behaviors import RARE
from distop.testing.simulation.scenario import Act, Host, Wish

if TYPE_CHECKING:
    import random
    from collections.abc import Mapping, Sequence

AWAY = "away"
"""The zone of an executor that goes."""
ENDLESS = 60.0
"""The pace of jobs that do not end before their executor goes."""


def leaves(type_name: str, where: Mapping[str, str]) -> bool:
    """Only an executor that goes may work for an operation of this type, with this selector."""
    return type_name == RARE or where.get("zone") == AWAY


def draw_leaving(
    chance: random.Random, wishes: Sequence[Wish], hosts: Sequence[Host]
) -> tuple[tuple[Wish, ...], tuple[Host, ...]]:
    """In a twelfth of the seeds: one more operation, of a type that one executor alone offers, or for labels that it
    alone has. It goes, and a client cancels the operation before or after that.
    """
    if chance.random() >= 1 / 12:
        return tuple(wishes), tuple(hosts)
    return going(chance, wishes, hosts, labels=chance.random() < 0.5)


def going(
    chance: random.Random, wishes: Sequence[Wish], hosts: Sequence[Host], *, labels: bool
) -> tuple[tuple[Wish, ...], tuple[Host, ...]]:
    """With such an operation, and such an executor."""
    model = wishes[0]
    kind = "check-all" if labels else RARE
    name = f"exec-{len(hosts)}"
    host = Host(name, (kind,), chance.choice((1, 2)), 0.0, labels={"zone": AWAY}, leaves=chance.uniform(1.5, 7.0))
    if labels:
        hosts = tuple(replace(one, types=tuple(dict.fromkeys((*one.types, kind)))) for one in hosts)
    table = model.table if model.table != CLUSTER_TABLE else "a"
    # Its jobs cannot fail, nor do they all end: then nobody could complete it any more, nor cancel it.
    arg = {"seed": chance.randrange(1 << 30), "partitions": chance.randint(1, 12), "pace": ENDLESS, "calls": 0.1}
    arg |= {"trouble": 0.0, "chunk": 1000}
    acts = (Act(chance.uniform(0.3, 9.0), "cancel"),)
    where = {"where": {"zone": AWAY}} if labels else {}
    wish = Wish(model.client, chance.uniform(0.0, 2.0), kind, table, arg, None, None, acts, options=where)
    return (*wishes, wish), (*hosts, host)
