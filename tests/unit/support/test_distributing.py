"""The distribution of a test run among processes."""

from __future__ import annotations

from pathlib import Path

from scripts import etcd_servers, storage_servers
from tests.distributing import APART, LONGEST, SHARING, TURNS, has_turn, own_share_first, rank, unit_of

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
    assert storage_servers.TURN_COUNT == TURNS
    turns = {name: [turn for turn in range(TURNS) if has_turn("x", turn, name)] for name in storage_servers.SOURCES}
    assert all(len(some) == 1 for some in turns.values())
    assert {etcd_servers.of_turn(turn) for some in turns.values() for turn in some} == {etcd_servers.PACKAGED}
    assert storage_servers.wanted(["--turn", str(turns["azurite"][0] + TURNS)]) == ("azurite",)
    assert storage_servers.wanted(["--turn", "1"]) == storage_servers.wanted(["--slow", "tests/unit"]) == ()
    assert storage_servers.wanted(["--slow"]) == tuple(storage_servers.SOURCES)


def test_each_turn_has_one_other_server() -> None:
    tests = [(f"tests/conformance/test_x.py::test_y[{s}-{n}]", s) for n in range(30) for s in etcd_servers.OTHERS]
    turns = [[test for test in tests if has_turn(test[0], turn, test[1])] for turn in range(7, 7 + TURNS)]
    assert sorted(test for some in turns for test in some) == sorted(tests)
    assert [{server for _, server in some} for some in turns] == [{etcd_servers.of_turn(7 + n)} for n in range(TURNS)]
