"""The distribution of a test run among processes."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from scripts import built_programs, etcd_servers
from tests import distributing
from tests.distributing import (
    APART,
    LONGEST,
    SHARING,
    TURNS,
    UNIT_PROCESSES,
    Units,
    collects_unit_tests,
    has_turn,
    is_unit_test,
    own_share_first,
    rank,
    unit_of,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

ROOT = Path(__file__).parents[3]


def test_the_listed_slow_tests_exist_and_start_first() -> None:
    assert [name for name in LONGEST if name not in SHARING.values() and not (ROOT / name).exists()] == []
    crash_points = "tests/simulation/test_crash_points.py::test_b"
    nodes = ["tests/unit/test_a.py::test_a", crash_points, "tests/acceptance/test_c.py::test_c"]
    assert sorted(nodes, key=rank) == nodes[::-1]


def test_acceptance_tests_share_few_processes_except_those_with_their_own_spark() -> None:
    files = [f"tests/acceptance/{path.name}" for path in (ROOT / "tests/acceptance").glob("test_*.py")]
    assert {unit_of(f"{file}::test[a::b]") for file in files} == {*SHARING.values(), *APART}
    assert unit_of("tests/acceptance/test_apply_catalogs.py::test_x") == "tests/acceptance"
    assert [prefix for prefix in SHARING if not any(file.startswith(prefix) for file in files)] == []
    assert unit_of("tests/unit/test_x.py::test_y") == "tests/unit/test_x.py"


def test_each_process_collects_its_own_share_first() -> None:
    found = list(range(20))
    orders = [own_share_first(found, number, 6) for number in range(6)]
    assert all(sorted(order) == found for order in orders)
    assert {one for order in orders for one in order[: len(found) // 6 + 1]} == set(found)
    assert own_share_first([0], 5, 6) == [0]
    assert own_share_first([], 5, 6) == []


def test_each_rotating_test_has_one_turn_and_no_turn_is_empty() -> None:
    nodes = [f"tests/faults/test_x.py::test_y[{n}]" for n in range(90)]
    turns = [[node for node in nodes if has_turn(node, turn)] for turn in range(7, 7 + TURNS)]
    assert sorted(node for some in turns for node in some) == sorted(nodes)
    assert all(turns)
    assert all(has_turn("tests/acceptance/test_x.py::test_hole_2_y", turn) for turn in range(TURNS))


def test_each_built_store_has_one_turn_in_which_no_other_server_is_built() -> None:
    assert built_programs.TURN_COUNT == TURNS
    turns = {name: [turn for turn in range(TURNS) if has_turn("x", turn, name)] for name in built_programs.SOURCES}
    assert all(len(some) == 1 for some in turns.values())
    assert {etcd_servers.of_turn(turn) for some in turns.values() for turn in some} == {etcd_servers.PACKAGED}
    assert built_programs.wanted(["--turn", str(turns["azurite"][0] + TURNS)]) == ("azurite",)
    assert built_programs.wanted(["--turn", "1"]) == built_programs.wanted(["--slow", "tests/unit"]) == ()
    assert built_programs.wanted(["--slow"]) == tuple(built_programs.SOURCES)


def test_each_turn_has_one_other_server() -> None:
    tests = [(f"tests/conformance/test_x.py::test_y[{s}-{n}]", s) for n in range(30) for s in etcd_servers.OTHERS]
    turns = [[test for test in tests if has_turn(test[0], turn, test[1])] for turn in range(7, 7 + TURNS)]
    assert sorted(test for some in turns for test in some) == sorted(tests)
    assert [{server for _, server in some} for some in turns] == [{etcd_servers.of_turn(7 + n)} for n in range(TURNS)]


TESTS = ("tests/faults/test_a.py::test_a", "tests/faults/test_a.py::test_b", "tests/storage/test_b.py::test_a")
UNIT_TESTS = ("tests/unit/a/test_c.py::test_a", "tests/unit/a/test_c.py::test_b", "tests/unit/b/test_d.py::test_a")


class Process:
    """A process of a run, as the scheduler sees it."""

    def __init__(self, number: int) -> None:
        self.gateway = SimpleNamespace(id=f"gw{number}")
        self.queued: list[int] = []
        self.shutting_down = False

    def send_runtest_some(self, indices: Sequence[int]) -> None:
        assert not self.shutting_down
        self.queued += indices

    def shutdown(self) -> None:
        self.shutting_down = True


class Run:
    """A run of TESTS and UNIT_TESTS in some processes, of which the first ones collect the unit tests."""

    def __init__(self, with_unit_tests: int, without: int) -> None:
        self.session = SimpleNamespace(testscollected=0)
        self.reports: list[Any] = []
        plugins = SimpleNamespace(get_plugin=lambda name: {"session": self.session}[name])
        hook = SimpleNamespace(pytest_collectreport=lambda report: self.reports.append(report))
        options = SimpleNamespace(loadscopereorder=True)
        count = with_unit_tests + without
        config: Any = SimpleNamespace(
            option=options, pluginmanager=plugins, hook=hook, getvalue=lambda _: ["popen"] * count, debug=False
        )
        self.units: Any = Units(config)
        self.ran: dict[Process, list[str]] = {}
        self.processes = [self.add(TESTS + UNIT_TESTS * (n < with_unit_tests), number=n) for n in range(count)]

    def add(self, found: Sequence[str], number: int) -> Process:
        process = Process(number)
        self.ran[process] = []
        self.units.add_node(process)
        self.units.add_node_collection(process, list(found))
        if self.units.collection_is_completed:
            self.units.schedule()
        return process

    def step(self, process: Process) -> None:
        """Run one test of a process."""
        index = process.queued.pop(0)
        self.ran[process].append((TESTS + UNIT_TESTS)[index])
        self.units.mark_test_complete(process, index)

    def finish(self) -> None:
        """Run all tests. A process needs the test after the next one, or the end, before it runs the next one."""
        while busy := [one for one in self.ran if one.queued[1:] or (one.queued and one.shutting_down)]:
            for process in busy:
                self.step(process)
            if self.units.tests_finished:  # as xdist then does
                for process in self.ran:
                    process.shutdown()
        assert not any(one.queued for one in self.ran)


@pytest.mark.parametrize(("with_unit_tests", "without"), [(1, 0), (1, 1), (2, 1), (1, 3)])
def test_each_test_runs_once_and_unit_tests_only_where_they_are_collected(with_unit_tests: int, without: int) -> None:
    run = Run(with_unit_tests, without)
    assert run.session.testscollected == len(TESTS + UNIT_TESTS)
    run.finish()
    assert sorted(name for names in run.ran.values() for name in names) == sorted(TESTS + UNIT_TESTS)
    for process in run.processes[with_unit_tests:]:
        assert not any(map(is_unit_test, run.ran[process]))
    assert is_unit_test(run.ran[run.processes[0]][0]), "unit tests come first where they are collected"
    assert run.reports == []


def test_a_process_that_replaces_a_lost_one_runs_its_unit_tests() -> None:
    run = Run(1, 1)
    lost = run.processes[0]
    run.step(lost)
    assert run.units.remove_node(lost) == UNIT_TESTS[1]
    del run.ran[lost]
    run.add(TESTS + UNIT_TESTS, number=2)
    run.finish()
    assert {name for names in run.ran.values() for name in names} >= {*TESTS, *UNIT_TESTS[1:]}


def test_processes_that_collect_different_tests_are_reported() -> None:
    run = Run(2, 0)
    run.units.registered_collections[run.processes[1]][0] = "tests/faults/test_a.py::test_z"
    run.units.collection = None
    run.units.schedule()
    assert len(run.reports) == 1


def test_the_first_processes_and_those_that_replace_a_lost_one_collect_unit_tests(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    count = UNIT_PROCESSES + 4
    found = []
    for number in range(count + 2):
        monkeypatch.setattr(distributing, "share", lambda number=number: (number, count))
        found.append(collects_unit_tests())
    assert found == [True] * UNIT_PROCESSES + [False] * 4 + [True] * 2
    monkeypatch.setattr(distributing, "share", lambda: None)
    assert collects_unit_tests(), "a run with one process"
    assert not any(is_unit_test(name) for name in LONGEST), "unit tests have the last positions in all processes"
