"""Each clause of the invariants is needed: without it, a violation that was planted by hand is not found."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tests.support.clause_plants import PLANTS
from tests.support.clauses import JUDGE, PARTS, Clauses
from tests.support.plants import opened

if TYPE_CHECKING:
    from tests.support.world import World


def test_each_clause_of_the_invariants_is_needed() -> None:
    clauses = Clauses()

    def found(number: int, world: World) -> bool:
        return number in {one.invariant for one in clauses.judge.check(world.keys, world.store.history)}

    planted_at: dict[str, list[tuple[int, World]]] = {clause: [] for clause in clauses.names}
    for number, name, spoil in PLANTS:
        world, ref = opened()
        spoil(world, ref)
        clauses.reached.clear()
        assert found(number, world), name
        for clause in clauses.reached:
            planted_at[clause].append((number, world))
    untested = []
    for clauses.off, planted in planted_at.items():
        if all(found(number, world) for number, world in planted):
            untested.append(clauses.off)
    assert not untested, "No planted violation is found by these clauses alone:\n" + "\n".join(untested)


def test_the_clauses_of_each_module_are_found() -> None:
    assert {name.partition(".py:")[0] for name in Clauses().names} == {JUDGE, *PARTS}
    assert len(Clauses().names) > 110
