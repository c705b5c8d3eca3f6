"""Which tests of a whole run share a process, in which order files begin, and where each process begins to collect."""

from __future__ import annotations

import os
import zlib
from typing import TYPE_CHECKING, Any, TypeVar

import pytest
from xdist.scheduler import LoadFileScheduling

if TYPE_CHECKING:
    from collections.abc import Iterable

T = TypeVar("T")

SHARING = {
    "tests/acceptance/test_apply": "tests/acceptance: apply",
    "tests/acceptance/test_iceberg_end_to_end": "tests/acceptance: apply",
    "tests/acceptance/test_validate_spark_catalog": "tests/acceptance",
    "tests/acceptance/test_validate_iceberg": "tests/acceptance",
    "tests/acceptance/test_validate": "tests/acceptance: validate",
    "tests/acceptance/": "tests/acceptance",
}
"""How acceptance tests begin → the process that has them: each has one Spark session, which takes as long to be of use
as many of them take together. The first that fits counts.
"""
LONGEST = (
    "tests/acceptance: validate",
    "tests/acceptance: apply",
    "tests/acceptance",
    "tests/simulation/test_crash_points.py",
    "tests/integration/test_worker_spark.py",
    "tests/integration/test_unable_nodes.py",
    "tests/acceptance/test_end_to_end.py",
    "tests/acceptance/test_demo.py",
    "tests/acceptance/test_package.py",
    "tests/simulation/test_planted_bugs.py",
    "tests/faults/test_apply_faults.py",
    "tests/integration/test_coordinator.py",
    "tests/simulation/test_schedules.py",
    "tests/faults/test_self_fencing.py",
    "tests/faults/test_etcd_faults.py",
    "tests/faults/test_index_faults.py",
    "tests/faults/test_spark_faults.py",
    "tests/faults/test_spark_master.py",
    "tests/acceptance/test_spark_catalog_end_to_end.py",
    "tests/integration/test_low_level_claims.py",
    "tests/integration/test_worker_calls.py",
    "tests/integration/test_two_phases.py",
    "tests/integration/test_waiting.py",
    "tests/integration/test_bad_days.py",
    "tests/integration/test_restarts.py",
    "tests/faults/test_restored_etcd.py",
    "tests/integration/test_daemons.py",
)
"""What takes longest begins first: whatever is still at work when all else is done leaves a core idle."""
APART = frozenset(name for name in LONGEST if name.startswith("tests/acceptance/"))
"""Acceptance tests that share no Spark: their executors have one of their own."""


TURNS = 3
"""Of the tests marked ``rotating``, one in so many has its turn in a run."""


def has_turn(nodeid: str, turn: int) -> bool:
    """Whether a rotating test runs in this turn: in one of :data:`TURNS`. Tests of security holes run in each."""
    return "::test_hole_" in nodeid or zlib.crc32(nodeid.encode()) % TURNS == turn % TURNS


def unit_of(nodeid: str) -> str:
    """The file of a test, or what shares a Spark session with others."""
    file = nodeid.partition("::")[0]
    if file in APART:
        return file
    return next((unit for prefix, unit in SHARING.items() if file.startswith(prefix)), file)


def rank(nodeid: str) -> int:
    """Its place among what takes long; the same for all else."""
    unit = unit_of(nodeid)
    return LONGEST.index(unit) if unit in LONGEST else len(LONGEST)


class Units(LoadFileScheduling):
    """Hands out units in the order in which they were collected."""

    def __init__(self, config: pytest.Config, log: Any = None) -> None:
        super().__init__(config, log)
        config.option.loadscopereorder = False  # by the number of tests: one that takes minutes would come last

    def _split_scope(self, nodeid: str) -> str:
        return unit_of(nodeid)


def share() -> tuple[int, int] | None:
    """Which process of a run this is, from 0, and how many it has; None where there is one."""
    name, count = os.environ.get("PYTEST_XDIST_WORKER"), os.environ.get("PYTEST_XDIST_WORKER_COUNT")
    return (int(name.removeprefix("gw")), int(count)) if name and count else None


class Turned(pytest.Dir):
    """A folder of which each process of a run collects its own share first. pytest rewrites the assertions of a file
    and keeps the result: processes that went through all files in step would all rewrite all of them, and that is most
    of what collecting takes.
    """

    def collect(self) -> Iterable[pytest.Item | pytest.Collector]:
        return turned(list(super().collect()), *(share() or (0, 1)))


def turned(found: list[T], number: int, count: int) -> list[T]:
    """All of it, from the share of this process of so many on."""
    first = len(found) * number // count
    return found[first:] + found[:first]
