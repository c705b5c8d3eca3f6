"""How a run in several processes distributes test files, orders them, and collects them."""

from __future__ import annotations

import os
import zlib
from typing import TYPE_CHECKING, Any, TypeVar

import pytest
from xdist.scheduler import LoadFileScheduling

from scripts import etcd_servers, storage_servers

if TYPE_CHECKING:
    from collections.abc import Iterable

T = TypeVar("T")

SHARING = {
    "tests/acceptance/test_validate_spark_catalog": "tests/acceptance",
    "tests/acceptance/test_validate_iceberg": "tests/acceptance",
    "tests/acceptance/test_validate": "tests/acceptance: validate",
    "tests/acceptance/": "tests/acceptance",
}
"""Prefix of an acceptance test's file → the unit that runs it. The first matching prefix counts. A unit has one Spark
session, because a session takes as long to warm up as many of these tests take together.
"""
LONGEST = (
    "tests/acceptance: validate",
    "tests/acceptance",
    "tests/simulation/test_crash_points.py",
    "tests/storage/test_contract.py",
    "tests/storage/test_lost_answers.py",
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
    "tests/integration/test_failing_jobs.py",
    "tests/integration/test_restarts.py",
    "tests/faults/test_restored_etcd.py",
    "tests/integration/test_daemons.py",
)
"""The longest units, which start first: a long unit that starts last leaves a core idle."""
APART = frozenset(name for name in LONGEST if name.startswith("tests/acceptance/"))
"""Acceptance tests that share no Spark session: their executors start their own."""


TURNS = 9
"""A run takes one in this many of the tests marked ``rotating``."""


def has_turn(nodeid: str, turn: int, server: str | None = None) -> bool:
    """Whether a rotating test runs in this turn. It runs in one of :data:`TURNS`; tests of security holes in each.

    ``server``: the etcd server of a test that rotates because that is not the default one, or an object store that is
    built. A turn needs one of these etcd servers, and one of these stores at most, so that CI builds no other one.
    """
    if server in storage_servers.SOURCES:
        return server == storage_servers.of_turn(turn)
    code = zlib.crc32(nodeid.encode())
    if server is None:
        return "::test_hole_" in nodeid or code % TURNS == turn % TURNS
    others = len(etcd_servers.OTHERS)
    share = TURNS // others
    return server == etcd_servers.of_turn(turn) and code % share == turn // others % share


def unit_of(nodeid: str) -> str:
    """The unit that runs a test: its file, or the files that share its Spark session."""
    file = nodeid.partition("::")[0]
    if file in APART:
        return file
    return next((unit for prefix, unit in SHARING.items() if file.startswith(prefix)), file)


def rank(nodeid: str) -> int:
    """The position of a test's unit in :data:`LONGEST`; all other units come after these."""
    unit = unit_of(nodeid)
    return LONGEST.index(unit) if unit in LONGEST else len(LONGEST)


class Units(LoadFileScheduling):
    """Hands out units in the order in which they were collected."""

    def __init__(self, config: pytest.Config, log: Any = None) -> None:
        super().__init__(config, log)
        config.option.loadscopereorder = False  # would order by the number of tests: the longest come last

    def _split_scope(self, nodeid: str) -> str:
        return unit_of(nodeid)


def share() -> tuple[int, int] | None:
    """The number of this process (from 0) and the number of processes; None in a run with one process."""
    name, count = os.environ.get("PYTEST_XDIST_WORKER"), os.environ.get("PYTEST_XDIST_WORKER_COUNT")
    return (int(name.removeprefix("gw")), int(count)) if name and count else None


class OwnShareFirst(pytest.Dir):
    """A folder of which each process of a run collects its own share first.

    pytest rewrites the assertions of a file and caches the result, which is most of the collection time. Processes that
    collect in the same order would each rewrite all files.
    """

    def collect(self) -> Iterable[pytest.Item | pytest.Collector]:
        return own_share_first(list(super().collect()), *(share() or (0, 1)))


def own_share_first(found: list[T], number: int, count: int) -> list[T]:
    """The whole list, rotated to start with the share of process ``number`` of ``count``."""
    first = len(found) * number // count
    return found[first:] + found[:first]
