"""In a third of the seeds, limits executors to some types and tables."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from distop.protocol.executor_nodes import Serves, refusal
from distop.protocol.operation_options import fits
from tests.simulator.departures import needs_departing

if TYPE_CHECKING:
    import random
    from collections.abc import Sequence

    from tests.simulator.scenario import Host, Submission

PATTERNS = ("a", "a.*", "ab", "@cluster")
"""Patterns of tables, of which an executor serves some. They cover all tables of a scenario."""


def draw_serving(chance: random.Random, submissions: Sequence[Submission], hosts: Sequence[Host]) -> tuple[Host, ...]:
    """The hosts with their limits. A host that can run it serves each submitted operation, and each follow-up."""
    if chance.random() >= 0.33:
        return tuple(hosts)
    limited = [host if host.leaves else _limited(chance, host) for host in hosts]
    staying = [
        submission
        for submission in submissions
        if not needs_departing(submission.type, submission.table, submission.options.get("where", {}))
    ]
    needed = {
        (submission.type, submission.table, tuple(submission.options.get("where", {}).items())): None
        for submission in staying
    }
    needed |= {("check", submission.table, ()): None for submission in submissions if "follows" in submission.arg}
    needed |= {("noop", "@cluster", ()): None}  # the parts of graphs
    for type_name, table, where in needed:
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
