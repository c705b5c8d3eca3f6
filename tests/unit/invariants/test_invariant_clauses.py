"""Each clause of the invariants is needed: without it, a violation that was planted by hand is not found."""

from __future__ import annotations

import ast
import importlib
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

from tests.unit.invariants.plants import opened
from tests.unit.invariants.policy_plants import PLANTS

if TYPE_CHECKING:
    from tests.support.world import World


PARTS = (
    "job_invariants",
    "cluster_invariants",
    "dependency_invariants",
    "operation_invariants",
    "limit_invariants",
    "policy_invariants",
)
JUDGE = "checker"


class Clauses:
    """The modules of the invariants, compiled again from their source with a switch at each clause.

    A clause is a ``yield``, a call of ``_found``, or a text that a function returns which tells what is wrong, or "".
    """

    def __init__(self) -> None:
        self.names: list[str] = []
        self.off = ""
        """The clause that reports nothing."""
        self.reached: set[str] = set()
        """Clauses that were reached, those that are off included."""
        parts = [self._compiled(name) for name in PARTS]
        self.judge = self._compiled(JUDGE)
        for part in parts:
            for name, value in vars(part).items():
                if name in vars(self.judge) and getattr(value, "__module__", "") == part.__name__:
                    setattr(self.judge, name, value)

    def _reports(self, clause: str) -> bool:
        self.reached.add(clause)
        return clause != self.off

    def _compiled(self, name: str) -> ModuleType:
        source = importlib.import_module(f"distop.invariants.{name}")
        assert source.__file__ is not None
        switches = _Switches(name)
        tree = switches.visit(ast.parse(Path(source.__file__).read_text()))
        self.names += switches.names
        module = ModuleType(source.__name__)
        vars(module)["_tells"] = self._reports
        exec(compile(ast.fix_missing_locations(tree), source.__file__, "exec"), vars(module))
        return module


class _Switches(ast.NodeTransformer):
    def __init__(self, module: str) -> None:
        self.module = module
        self.names: list[str] = []
        self._returns_text = False

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        outer, self._returns_text = self._returns_text, isinstance(node.returns, ast.Name) and node.returns.id == "str"
        self.generic_visit(node)
        self._returns_text = outer
        return node

    def visit_Expr(self, node: ast.Expr) -> ast.AST:
        value = node.value
        found = isinstance(value, ast.Call) and isinstance(value.func, ast.Attribute) and value.func.attr == "_found"
        return ast.If(self._switch(node), [node], []) if found or isinstance(value, ast.Yield) else node

    def visit_Return(self, node: ast.Return) -> ast.AST:
        value = node.value
        if self._returns_text and (
            (isinstance(value, ast.Constant) and value.value)
            or isinstance(value, ast.JoinedStr)
            or (isinstance(value, ast.IfExp) and isinstance(value.body, ast.JoinedStr))
        ):
            return ast.If(self._switch(node), [node], [ast.Return(ast.Constant(""))])
        return node

    def _switch(self, node: ast.stmt) -> ast.expr:
        self.names.append(f"{self.module}.py:{node.lineno}: {ast.unparse(node)}")
        return ast.Call(ast.Name("_tells", ast.Load()), [ast.Constant(self.names[-1])], [])


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
    assert len(Clauses().names) > 140
