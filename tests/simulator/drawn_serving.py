"""Executors that are told which types and tables they serve, in a third of the seeds."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from distop.protocol.executor_nodes import Serves, refusal
from distop.protocol.operation_options import fits
from tests.simulator.departures import needs_departing

if TYPE_CHECKING:
    import random
    from collections.abc import Sequence

    from tests.simulator.scenario import Host, Wish

PATTERNS = ("a", "a.*", "ab", "@cluster")
"""Of these an executor serves some: each table of a scenario is in one of them."""


def draw_serving(chance: random.Random, wishes: Sequence[Wish], hosts: Sequence[Host]) -> tuple[Host, ...]:
    """The hosts with their limits. Whatever is wanted, or follows, is served by one that can run it."""
    if chance.random() >= 0.33:
        return tuple(hosts)
    limited = [host if host.leaves else _limited(chance, host) for host in hosts]
    staying = [wish for wish in wishes if not needs_departing(wish.type, wish.table, wish.options.get("where", {}))]
    wanted = {(wish.type, wish.table, tuple(wish.options.get("where", {}).items())): None for wish in staying}
    wanted |= {("check", wish.table, ()): None for wish in wishes if "follows" in wish.arg}
    wanted |= {("noop", "@cluster", ()): None}  # of which graphs are made
    for type_name, table, where in wanted:
        stay = [n for n, host in enumerate(hosts) if type_name in host.types and not host.leaves]
        having = [n for n in stay if fits(dict(where), hosts[n].labels)]
        able = [n for n in having if type_name not in hosts[n].unable] or having
        if able and not any(_serves(limited[n], type_name, table) for n in able):
            n = chance.choice(able)
            host = limited[n]
            types = host.only_types and tuple(dict.fromkeys((*host.only_types, type_name)))
            tables = host.only_tables and tuple(dict.fromkeys((*host.only_tables, table)))
            limited[n] = replace(host, only_types=types, only_tables=tables)
    return tuple(limited)


def _limited(chance: random.Random, host: Host) -> Host:
    tables = tuple(pattern for pattern in PATTERNS if chance.random() < 0.5) or (chance.choice(PATTERNS),)
    types = tuple(name for name in host.types if chance.random() < 0.7) or host.types[:1] or ("none",)
    return replace(
        host,
        only_tables=tables if chance.random() < 0.7 else host.only_tables,
        only_types=types if chance.random() < 0.3 else None,
    )


def _serves(host: Host, type_name: str, table: str) -> bool:
    return not refusal(Serves(host.only_types, host.only_tables), type_name, (table,))
