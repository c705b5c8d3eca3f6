"""How a run in several processes distributes test files, orders them, and collects them."""

from __future__ import annotations

import os
import zlib
from typing import TYPE_CHECKING, Any, TypeVar

import pytest
from xdist.scheduler import LoadFileScheduling

from scripts import built_programs, etcd_servers

if TYPE_CHECKING:
    from collections.abc import Iterable

    from xdist.workermanage import WorkerController

T = TypeVar("T")

SHARING = {
    "tests/acceptance/test_validate_spark_catalog": "tests/acceptance",
    "tests/acceptance/test_validate_iceberg": "tests/acceptance",
    "tests/acceptance/test_validate_delta": "tests/acceptance",
    "tests/acceptance/test_validate_on_s3": "tests/acceptance",
    "tests/acceptance/test_validate": "tests/acceptance: validate",
    "tests/acceptance/": "tests/acceptance",
}
"""Prefix of an acceptance test's file → the unit that runs it. The first matching prefix counts. A unit has one Spark
session, because a session takes as long to warm up as many of these tests take together: 20 s of processor time for
Delta alone. So tests of one format or store are in one unit.
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
    "tests/faults/test_lost_jvms.py",
    "tests/faults/test_maintenance_faults.py",
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


UNIT_TESTS = "tests/unit"
"""The folder with most of the tests. They only compute, so few processes run them, and the others do not collect them.
"""
UNIT_PROCESSES = 2
"""The first processes of a run, which collect the unit tests and run them before other tests."""
TURNS = 12
"""A run takes one in this many of the tests marked ``rotating``."""


def has_turn(nodeid: str, turn: int, server: str | None = None) -> bool:
    """Whether a rotating test runs in this turn. It runs in one of :data:`TURNS`; tests of security holes in each.

    ``server``: the etcd server of a test that rotates because that is not the default one, or an object store that is
    built. A turn needs one of these etcd servers, and one of these stores at most, so that CI builds no other one.
    """
    if server in built_programs.SOURCES:
        return server in built_programs.of_turn(turn)
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
    """Hands out units in the order in which they were collected, but unit tests first to processes that have them."""

    def __init__(self, config: pytest.Config, log: Any = None) -> None:
        super().__init__(config, log)
        config.option.loadscopereorder = False  # would order by the number of tests: the longest come last
        self.partial: set[WorkerController] = set()
        """The processes without unit tests."""
        self.positions: dict[str, int] = {}
        """The position of each test, which is the same in all processes: unit tests are last."""

    def _split_scope(self, nodeid: str) -> str:
        return unit_of(nodeid)

    def schedule(self) -> None:
        """Complete the collections of processes without unit tests, compare all, and hand out the first units."""
        if self.collection is None:
            every = max(self.registered_collections.values(), key=len)
            unit_tests = [nodeid for nodeid in every if is_unit_test(nodeid)]
            self.positions = {nodeid: number for number, nodeid in enumerate(every)}
            for node, found in self.registered_collections.items():
                if unit_tests and not any(map(is_unit_test, found)):
                    self.partial.add(node)
                    found += unit_tests
            session: Any = self.config.pluginmanager.get_plugin("session")
            session.testscollected = len(every)
        super().schedule()

    def _reschedule(self, node: WorkerController) -> None:
        """Give a process the next unit if it has fewer than two tests: it runs a test when it knows the next one."""
        while not node.shutting_down and self._pending_of(self.assigned_work[node]) < 2:
            self._assign_work_unit(node)

    def _assign_work_unit(self, node: WorkerController) -> None:
        unit = self._next_unit(node)
        if unit is None:
            node.shutdown()
            return
        tests = self.assigned_work[node][unit] = self.workqueue.pop(unit)
        node.send_runtest_some([self.positions[nodeid] for nodeid, completed in tests.items() if not completed])

    def _next_unit(self, node: WorkerController) -> str | None:
        others = (unit for unit in self.workqueue if not is_unit_test(unit))
        if node in self.partial:
            return next(others, None)
        return next(filter(is_unit_test, self.workqueue), None) or next(others, None)


def is_unit_test(name: str) -> bool:
    """Whether a test or unit is in the folder of unit tests."""
    return name.startswith(f"{UNIT_TESTS}/")


def collects_unit_tests() -> bool:
    """Whether this process runs unit tests. A process that replaces a lost one does."""
    number, count = share() or (0, 1)
    return number < UNIT_PROCESSES or number >= count


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
