"""The clauses of the invariants, found in their source: each can be switched off alone."""

from __future__ import annotations

import ast
import importlib
from pathlib import Path
from types import ModuleType

PARTS = ("job_invariants", "cluster_invariants", "operation_invariants", "limit_invariants")
JUDGE = "checker"


class Clauses:
    """The modules of the invariants, compiled again from their source with a switch at each clause.

    A clause is a ``yield``, a call of ``_found``, or a text that a function returns which tells what is wrong, or "".
    """

    def __init__(self) -> None:
        self.names: list[str] = []
        self.off = ""
        """The clause that tells nothing."""
        self.reached: set[str] = set()
        """Clauses that were reached, those that are off included."""
        parts = [self._compiled(name) for name in PARTS]
        self.judge = self._compiled(JUDGE)
        for part in parts:
            for name, value in vars(part).items():
                if name in vars(self.judge) and getattr(value, "__module__", "") == part.__name__:
                    setattr(self.judge, name, value)

    def _tells(self, clause: str) -> bool:
        self.reached.add(clause)
        return clause != self.off

    def _compiled(self, name: str) -> ModuleType:
        source = importlib.import_module(f"distop.invariants.{name}")
        assert source.__file__ is not None
        switches = _Switches(name)
        tree = switches.visit(ast.parse(Path(source.__file__).read_text()))
        self.names += switches.names
        module = ModuleType(source.__name__)
        vars(module)["_tells"] = self._tells
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
        told = node.value
        found = isinstance(told, ast.Call) and isinstance(told.func, ast.Attribute) and told.func.attr == "_found"
        return ast.If(self._switch(node), [node], []) if found or isinstance(told, ast.Yield) else node

    def visit_Return(self, node: ast.Return) -> ast.AST:
        told = node.value
        if self._returns_text and (
            (isinstance(told, ast.Constant) and told.value)
            or isinstance(told, ast.JoinedStr)
            or (isinstance(told, ast.IfExp) and isinstance(told.body, ast.JoinedStr))
        ):
            return ast.If(self._switch(node), [node], [ast.Return(ast.Constant(""))])
        return node

    def _switch(self, node: ast.stmt) -> ast.expr:
        self.names.append(f"{self.module}.py:{node.lineno}: {ast.unparse(node)}")
        return ast.Call(ast.Name("_tells", ast.Load()), [ast.Constant(self.names[-1])], [])
