"""The operation types of a simulation: their declarations, and the course of each attempt by the argument's seed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any
from zlib import crc32

from distop.protocol.behavior_declaration import ALL_TYPES, Declaration, Retry
from distop.protocol.frozen import frozen
from distop.protocol.plan import PartitionPlan, chunked

if TYPE_CHECKING:
    from collections.abc import Mapping

UNABLE = "this node lacks what the type needs"
"""The error of a type's code on a node that cannot run it."""


def hang_time(arg: Any, inability: str) -> float:
    """Seconds until a node notices that it cannot run a job for now, for example while a JVM hangs at its start."""
    return float(arg.get("hang", 0.0)) if inability == "unavailable" and isinstance(arg, dict) else 0.0


_RETRY = Retry(attempts=3, initial=0.2, maximum=2.0)

_COMBINE = {
    "seed": "first", "partitions": "max", "pace": "min", "calls": "min", "trouble": "min", "chunk": "last",
    "objects": "last", "follows": "first",
}  # fmt: skip

RARE = "rare"
"""A type that at most one executor offers (``departures``)."""
BY_HAND = "by-hand"
"""A type without code, whose jobs only actors run."""
DROP = "drop"
"""A type whose plan removes the table's record."""

TYPES: Mapping[str, Declaration] = {
    d.type_name: d
    for d in (
        Declaration("check", failure_policy="collect_all", retry=_RETRY, combine=_COMBINE),
        Declaration("index", failure_policy="fail_fast", retry=_RETRY, resumable=True, object_field="name",
                    instances="one"),
        Declaration("purge", failure_policy="fail_fast", retry=_RETRY, batch=True, conflicts_with=("index",),
                    reports_only=True, lost="fail", cleans=False),
        Declaration("check-all", can_fail=False, failure_policy="collect_all", retry=_RETRY),
        Declaration("quick", failure_policy="collect_all", retry=_RETRY, batch=True, completes=False,
                    combine=_COMBINE),
        Declaration("lone", failure_policy="collect_all", retry=_RETRY, lost="fail", resumable=True),
        Declaration("noop", failure_policy="collect_all", retry=_RETRY),
        Declaration(DROP, failure_policy="collect_all", retry=_RETRY, instances="one", conflicts_with=(ALL_TYPES,),
                    needs_table=True, removes_table=True),
        Declaration("join", completes=False, joins=True),
        Declaration(RARE, can_fail=False, failure_policy="collect_all", retry=_RETRY),
        Declaration(BY_HAND, failure_policy="collect_all", retry=_RETRY, completes=False, cleans=False, code=False),
    )
}  # fmt: skip
"""One type of each kind: resumable, run in batches, cannot fail, without completion code, completion that only makes a
report, lost jobs that fail, with and without cleanup, a name that is a prefix of another one, also without a table, a
join, rarely offered, without code, removal of the table.
"""
DRAWN = tuple(
    name for name, declaration in TYPES.items() if not declaration.joins and name not in (RARE, BY_HAND, DROP)
)
"""The types from which scenarios draw."""


@frozen
class Script:
    """One attempt: ``steps`` of ``step`` seconds each, then ``end``. ``stubborn``: it ignores a cancel."""

    step: float
    steps: int
    end: str
    stubborn: bool = False


def draw(*parts: object) -> float:
    """A number in [0, 1) that depends only on the parts."""
    return _mixed(crc32("/".join(map(str, parts)).encode())) / 2**32


def _mixed(x: int) -> int:
    x = ((x ^ (x >> 16)) * 0x85EBCA6B) & 0xFFFFFFFF
    x = ((x ^ (x >> 13)) * 0xC2B2AE35) & 0xFFFFFFFF
    return x ^ (x >> 16)


def script(type_name: str, arg: Mapping[str, Any], partition: int, attempt: int) -> Script:
    """The course of one attempt at one job.

    Some partitions fail at each attempt, or all of them if the argument has ``fails``. Some kill their child.
    """
    seed, pace = arg["seed"], float(arg.get("pace", 0.1))
    fate = draw(seed, "fate", partition)
    luck = draw(seed, "luck", partition, attempt)
    step = pace * (0.2 + 2 * draw(seed, "pace", partition, attempt))
    steps = 1 + int(4 * draw(seed, "steps", partition)) if TYPES[type_name].resumable else 1
    trouble = float(arg.get("trouble", 0.0))
    end = "success"
    if arg.get("fails") and TYPES[type_name].can_fail:
        end = "verdict"
    elif fate < trouble * 0.15 and TYPES[type_name].can_fail:
        end = "crash" if fate < trouble * 0.05 else "error" if fate < trouble * 0.1 else "verdict"
    elif luck < trouble * 0.25:
        end = "crash" if luck < trouble * 0.06 else "error"
    return Script(step, steps, end, draw(seed, "stubborn", partition, attempt) < trouble * 0.03)


def partitions(arg: Mapping[str, Any], names: tuple[str, ...] | None) -> list[str]:
    """The names of the partitions in order: all, or the requested ones."""
    every = [f"p={n}" for n in range(int(arg["partitions"]))]
    return every if names is None else [name for name in every if name in names]


def plan(arg: Mapping[str, Any], names: tuple[str, ...] | None, grown: int = 1) -> tuple[list[bytes], int]:
    """The chunks of a plan, and the number of partitions. ``grown``: the factor by which the data has grown."""
    chosen = partitions(arg, names)
    chunks = chunked(
        [PartitionPlan(n, name, bytes=(100 + n) * grown) for n, name in enumerate(chosen)], int(arg.get("chunk", 400))
    )
    return chunks, len(chosen)
