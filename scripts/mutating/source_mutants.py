"""Source mutants: inverted ages, skipped steps and tasks, shortened slices.

They are found in the syntax trees, so new code has mutants at once. A mutant is planted by giving the live function
the code of the changed one. A time that no comparison names is replaced wherever it is imported.
"""

from __future__ import annotations

import ast
import builtins
import functools
import importlib
import sys
import types
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from distop.protocol.size_limits import DEFAULT, Limits
from mutating import started_processes
from mutating.transaction_mutants import Mutant

AGE, NEVER, NOW, STEP, TASK = "age", "never", "now", "step", "task"
SLICE_FIRST, SLICE = "slice-first", "slice"
"""Kinds of changes: invert a comparison with a time; make a time 30 years, or 0; skip a step of a periodic loop; have a
background task, or a timer, do nothing; drop a slice's first, or last, element.
"""
SLICES = (SLICE_FIRST, SLICE)
MODES = (AGE, NEVER, NOW, STEP, TASK, *SLICES)
FOREVER = 1e9
LIMITS = "distop.protocol.size_limits"
"""The module whose times are the fields of ``Limits``."""

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("protocol", "decide", "invariants", "store", "services/claims", "services/submission", "daemon", "worker")
"""Packages of distop that coordinate; their times, loops, tasks and slices have mutants."""
MODULES = (
    "client/async_operation", "client/async_worker", "client/operation_end", "runtime/backoff", "runtime/spark_rules",
    "services/draining", "services/open_operation", "services/operation_commands", "services/table_registry",
)  # fmt: skip
"""Other modules that wait, poll or retry; those beside them have no times, or use this machine alone."""
IN_CHILDREN = "distop.worker."
"""Prefix of the modules that also run in processes that tests start."""
NOT_RUN = ("distop.store.embedded", "distop.store.endpoint_diagnosis", "distop.daemon.metrics", "distop.daemon.process")
"""Modules that use this machine's processes, sockets and files; unit tests and the simulator do not run them."""
TEXTS = frozenset(
    {
        "distop.protocol.json_codec",
        "distop.protocol.operation_labels",
        "distop.protocol.record_reading",
        "distop.invariants.replay_state",
        "distop.worker.child_side.error_texts",
    }
)
"""Modules whose slices and numbers are of text for people."""
TIMES_OF_OBJECTS = frozenset({"poll", "longest"})
"""Attributes that are times, beside those of ``Limits``: of the configuration, and of a back-off."""
_INVERTED: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.GtE, ast.LtE: ast.Gt, ast.Gt: ast.LtE, ast.GtE: ast.Lt,
}  # fmt: skip
_WAITS = frozenset({"sleep", "timeout", "timeout_at", "wait_for", "wait"})
_BACKGROUND = frozenset({"ensure_future", "create_task"})
_TIMERS = frozenset({"call_later", "call_at"})
_TOGETHER = "run_all"
"""A function that runs each of its arguments in a task."""
_ISLICE = "islice"
_DIGESTS = frozenset({"hex", "hexdigest"})
"""Any part of these is as good as another one."""
_REACHED = "__distop_reached__"


@dataclass(frozen=True)
class Site:
    """Where a mutant is in a module: the position of a node, or a time's name."""

    mutant: Mutant
    module: str
    function: str
    line: int = 0
    column: int = 0
    end: tuple[int | None, int | None] = (0, 0)
    """A slice of a slice begins where that one begins."""
    name: str = ""


@functools.cache
def sites() -> dict[Mutant, Site]:
    """All source mutants."""
    found: dict[Mutant, Site] = {}
    compared: set[str] = set()
    fields_read: set[str] = set()
    fields_compared: set[str] = set()
    for name, tree in trees().items():
        for site in _Finder(name, tree).found:
            found[site.mutant] = site
        compared |= {
            f"{owner}.{node.id}"
            for compare in ast.walk(tree)
            if isinstance(compare, ast.Compare)
            for node in ast.walk(compare)
            if isinstance(node, ast.Name) and (owner := times_of(name).get(node.id))
        }
        fields_read |= _attributes(tree)
        fields_compared |= {
            one for compare in ast.walk(tree) if isinstance(compare, ast.Compare) for one in _attributes(compare)
        }
    read = _read_in_functions()
    for module in trees():
        for name, owner in times_of(module).items():
            if owner == module and f"{owner}.{name}" in read - compared:
                for mode in (NEVER, NOW):
                    mutant = Mutant(module, mode, name)
                    found[mutant] = Site(mutant, module, "", name=name)
    for name in sorted(_times_of_limits() & fields_read - fields_compared):
        for mode in (NEVER, NOW):
            mutant = Mutant(LIMITS, mode, name)
            found[mutant] = Site(mutant, LIMITS, "", name=name)
    return found


def _attributes(tree: ast.AST) -> set[str]:
    """The attributes that a part of a module names."""
    return {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}


def _read_in_functions() -> set[str]:
    """Times that functions read when they run.

    A time that only a default or another constant uses cannot be changed later.
    """
    return {
        f"{owner}.{node.id}"
        for name, tree in trees().items()
        for function in ast.walk(tree)
        if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef)
        for statement in function.body
        for node in ast.walk(statement)
        if isinstance(node, ast.Name) and (owner := times_of(name).get(node.id))
    }


@functools.cache
def trees() -> dict[str, ast.Module]:
    """The syntax trees of the modules that have mutants."""
    found = {}
    own = [ROOT / "distop" / f"{name}.py" for name in MODULES]
    for path in (*own, *(one for folder in FOLDERS for one in sorted((ROOT / "distop" / folder).rglob("*.py")))):
        if path.parent.name.startswith("_"):
            continue  # generated
        name = ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
        if name not in NOT_RUN:
            found[name] = ast.parse(path.read_text(), str(path))
    return found


@functools.cache
def times_of(module: str) -> dict[str, str]:
    """The names of a module that are times, each with the module that owns it.

    A time is a constant in seconds, which are floats here: one, or a pair of them for a back-off.
    """
    found = {}
    for node in trees()[module].body:
        if isinstance(node, ast.ImportFrom) and node.module in trees():
            owned = times_of(node.module)
            found.update({(a.asname or a.name): owned[a.name] for a in node.names if a.name in owned})
        elif module not in TEXTS:
            for name in _assigned(node):
                if name.isupper() and _is_time(getattr(importlib.import_module(module), name, None)):
                    found[name] = module
    return found


def _assigned(node: ast.stmt) -> list[str]:
    """The names that a statement assigns a value to."""
    targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
    flat = (one for each in targets for one in (each.elts if isinstance(each, ast.Tuple) else [each]))
    return [one.id for one in flat if isinstance(one, ast.Name)]


def _is_time(value: object) -> bool:
    if isinstance(value, tuple):
        return bool(value) and all(isinstance(one, float) for one in value)
    return isinstance(value, float)


@functools.cache
def _times_of_limits() -> frozenset[str]:
    return frozenset(one.name for one in fields(Limits) if isinstance(one.default, float))


class _Finder(ast.NodeVisitor):
    """Finds the mutants of one module's functions."""

    def __init__(self, module: str, tree: ast.Module) -> None:
        self.module = module
        self.found: list[Site] = []
        self._names: list[str] = []
        self._functions: list[str] = []
        self._counts: Counter[tuple[str, str, str]] = Counter()
        self._loops = 0
        self._texts = 0
        self.visit(tree)

    def _add(self, node: ast.expr | ast.stmt, mode: str) -> None:
        if not self._functions:
            return
        place = f"{self.module}.{'.'.join(self._names)}"
        what = " ".join(ast.unparse(node).split())[:100]
        self._counts[place, mode, what] += 1
        number = self._counts[place, mode, what]
        mutant = Mutant(place, mode, what if number == 1 else f"{what} #{number}")
        where = (node.lineno, node.col_offset, _end(node))
        self.found.append(Site(mutant, self.module, self._functions[0], *where))

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        self._names.append(node.name)
        self.generic_visit(node)
        self._names.pop()

    def _function(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        loops, self._loops = self._loops, 0
        self._names.append(node.name)
        self._functions.append(".".join(self._names))
        for one in node.body:
            self.visit(one)
        self._functions.pop()
        self._names.pop()
        self._loops = loops

    visit_FunctionDef = _function
    visit_AsyncFunctionDef = _function

    def visit_While(self, node: ast.While) -> None:
        periodic = any(
            isinstance(one, ast.Call) and isinstance(one.func, ast.Attribute) and one.func.attr in _WAITS
            for one in ast.walk(node)
        )
        self._loops += periodic
        self.generic_visit(node)
        self._loops -= periodic

    def visit_Expr(self, node: ast.Expr) -> None:
        self._step(node, node.value.value if isinstance(node.value, ast.Await) else node.value)

    def visit_Assign(self, node: ast.Assign) -> None:
        self._step(node, node.value.value if isinstance(node.value, ast.Await) else None)

    def _step(self, node: ast.Expr | ast.Assign, call: ast.expr | None) -> None:
        if self._loops and isinstance(call, ast.Call) and not _waits_or_logs(call):
            self._add(node, STEP)
        self.generic_visit(node)

    def visit_JoinedStr(self, node: ast.JoinedStr) -> None:
        self._texts += 1
        self.generic_visit(node)
        self._texts -= 1

    def visit_Call(self, node: ast.Call) -> None:
        func = node.func
        if isinstance(func, ast.Attribute) and func.attr in _BACKGROUND and node.args:
            work = node.args[0]
            if not (isinstance(work, ast.Call) and isinstance(work.func, ast.Attribute) and work.func.attr in _WAITS):
                self._add(node, TASK)
        if isinstance(func, ast.Attribute) and func.attr in _TIMERS:
            self._add(node, TASK)
        if isinstance(func, ast.Name) and func.id == _TOGETHER:
            for role in node.args:
                self._add(role, TASK)
        if isinstance(func, ast.Name) and func.id == _ISLICE:
            self._add(node, SLICE_FIRST)
            self._add(node, SLICE)
        self.generic_visit(node)

    def visit_Compare(self, node: ast.Compare) -> None:
        if len(node.ops) == 1 and type(node.ops[0]) in _INVERTED and self._names_a_time(node):
            self._add(node, AGE)
        self.generic_visit(node)

    def _names_a_time(self, node: ast.Compare) -> bool:
        times, of_objects = times_of(self.module), TIMES_OF_OBJECTS | _times_of_limits()
        for one in ast.walk(node):
            if isinstance(one, ast.Name) and one.id in times:
                return True
            if isinstance(one, ast.Attribute) and one.attr in of_objects:
                return True
        return False

    def visit_Subscript(self, node: ast.Subscript) -> None:
        sliced = isinstance(node.slice, ast.Slice) and isinstance(node.ctx, ast.Load)
        if sliced and isinstance(node.slice, ast.Slice) and self.module not in TEXTS:
            bounds = [one for one in (node.slice.lower, node.slice.upper) if one is not None]
            of_text = self._texts or _is_digest(node.value)
            if bounds and not (of_text and all(isinstance(one, ast.Constant) for one in bounds)):
                self._add(node, SLICE_FIRST)
                self._add(node, SLICE)
        self.generic_visit(node)


def _end(node: ast.expr | ast.stmt) -> tuple[int | None, int | None]:
    return node.end_lineno, node.end_col_offset


def _waits_or_logs(call: ast.Call) -> bool:
    func = call.func
    if not isinstance(func, ast.Attribute):
        return False
    owner = ast.unparse(func.value)
    return func.attr in _WAITS or owner == "log" or owner.endswith((".log", "_log"))


def _is_digest(node: ast.expr) -> bool:
    name = node.func if isinstance(node, ast.Call) else node
    return isinstance(name, ast.Attribute) and name.attr in _DIGESTS


class _Changer(ast.NodeTransformer):
    """Changes the one node of a site."""

    def __init__(self, site: Site) -> None:
        self.site = site
        self.changed = 0

    def _is_it(self, node: ast.expr | ast.stmt) -> bool:
        return (node.lineno, node.col_offset, _end(node)) == (self.site.line, self.site.column, self.site.end)

    def _visit_step(self, node: ast.Expr | ast.Assign) -> Any:
        if self.site.mutant.mode == STEP and self._is_it(node):
            self.changed += 1
            return ast.copy_location(ast.Pass(), node)
        return self.generic_visit(node)

    visit_Expr = _visit_step
    visit_Assign = _visit_step

    def visit_Call(self, node: ast.Call) -> Any:
        if self.site.mutant.mode == TASK and self._is_it(node) and getattr(node.func, "attr", "") in _BACKGROUND:
            self.changed += 1
            idle = ast.parse(f"__import__('asyncio').sleep({FOREVER})", mode="eval").body
            node.args[0] = ast.copy_location(idle, node)
            return ast.fix_missing_locations(node)
        if self.site.mutant.mode == TASK and self._is_it(node) and getattr(node.func, "attr", "") in _TIMERS:
            self.changed += 1
            node.args[0] = ast.Constant(FOREVER)
            return ast.fix_missing_locations(node)
        if self.site.mutant.mode == TASK and getattr(node.func, "id", "") == _TOGETHER:
            others = [role for role in node.args if not self._is_it(role)]
            self.changed += len(node.args) - len(others)
            node.args = others
        if self.site.mutant.mode in SLICES and self._is_it(node):
            return self._shortened(ast.List([ast.Starred(node, ast.Load())], ast.Load()), node)
        return self.generic_visit(node)

    def visit_Compare(self, node: ast.Compare) -> Any:
        if self.site.mutant.mode == AGE and self._is_it(node):
            self.changed += 1
            node.ops = [_INVERTED[type(node.ops[0])]()]
            return node
        return self.generic_visit(node)

    def visit_Subscript(self, node: ast.Subscript) -> Any:
        if self.site.mutant.mode in SLICES and self._is_it(node):
            return self._shortened(node, node)
        return self.generic_visit(node)

    def _shortened(self, node: ast.expr, place: ast.expr) -> ast.expr:
        """The sequence without its first or its last element."""
        self.changed += 1
        last = ast.UnaryOp(ast.USub(), ast.Constant(1))
        first = self.site.mutant.mode == SLICE_FIRST
        shorter = ast.Slice(lower=ast.Constant(1)) if first else ast.Slice(upper=last)
        return ast.fix_missing_locations(ast.copy_location(ast.Subscript(node, shorter, ast.Load()), place))


def change(mutant: Mutant) -> None:
    """Change the code of this process, and of the worker's children, into that of the mutant."""
    site = sites()[mutant]
    if site.module.startswith(IN_CHILDREN):
        started_processes.replace_modules({site.module: ast.unparse(_changed_tree(site))})
    if site.module == LIMITS:
        _relimit(site.name, FOREVER if mutant.mode == NEVER else 0.0)
        return
    if site.name:
        _retime(site.name, getattr(sys.modules[site.module], site.name), FOREVER if mutant.mode == NEVER else 0.0)
        return
    function, code = changed(mutant)
    function.__code__ = code


def changed(mutant: Mutant) -> tuple[types.FunctionType, types.CodeType]:
    """The live function that a mutant changes, and its changed code.

    For a time: a function that stays unchanged. Raises AssertionError where the mutant is not exactly one change of
    one live function.
    """
    site = sites()[mutant]
    if site.module == LIMITS:
        assert site.name in _times_of_limits(), mutant
        return change, change.__code__  # type: ignore[return-value]
    if site.name:
        assert _is_time(getattr(importlib.import_module(site.module), site.name)), mutant
        return change, change.__code__  # type: ignore[return-value]
    compiled = compile(_changed_tree(site), importlib.import_module(site.module).__file__ or "", "exec")
    codes = {code.co_qualname: code for code in _codes(compiled)}
    live = _functions(site.module)
    assert site.function in live, f"{mutant}: {site.function} is no function of {site.module}"
    return live[site.function], codes[site.function]


def _changed_tree(site: Site) -> ast.Module:
    """The syntax tree of a mutant's module."""
    tree = _parsed(site.module)
    if site.name:
        seconds = FOREVER if site.mutant.mode == NEVER else 0.0
        value = _alike(seconds, getattr(importlib.import_module(site.module), site.name))
        (n,) = (n for n, one in enumerate(tree.body) if site.name in _assigned(one))
        tree.body.insert(n + 1, *ast.parse(f"{site.name} = {value}").body)
        return tree
    changer = _Changer(site)
    changer.visit(tree)
    assert changer.changed == 1, f"{site.mutant} is {changer.changed} changes"
    return ast.fix_missing_locations(tree)


def _retime(name: str, former: Any, seconds: float) -> None:
    value = _alike(seconds, former)
    for name_of_module, module in list(sys.modules.items()):
        if name_of_module.partition(".")[0] in ("distop", "distop_behaviors"):
            for alias, one in list(vars(module).items()):
                if one is former and alias == name:
                    setattr(module, alias, value)


def _alike(seconds: float, former: Any) -> Any:
    """The seconds in the shape of a former time: one, or one for each element."""
    return (seconds,) * len(former) if isinstance(former, tuple) else seconds


def _relimit(name: str, seconds: float) -> None:
    """Change the default of a limit: in the limits that most have, and in those that are made from now on."""
    setattr(DEFAULT, name, seconds)
    names = [one.name for one in fields(Limits)]
    values = Limits.__init__.__defaults__ or ()
    Limits.__init__.__defaults__ = tuple(
        seconds if one == name else value for one, value in zip(names, values, strict=True)
    )


def _parsed(module: str) -> ast.Module:
    """The syntax tree of a module's own source. Its ``__file__`` may name a changed one."""
    path = ROOT.joinpath(*module.split("."))
    path = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    return ast.parse(path.read_text(), str(path))


def _replace(module: str, tree: ast.Module, names: set[str]) -> None:
    """Give the live functions of these names the code that the tree has for them."""
    compiled = compile(ast.fix_missing_locations(tree), sys.modules[module].__file__ or "", "exec")
    codes = {code.co_qualname: code for code in _codes(compiled)}
    live = _functions(module)
    for name in names & codes.keys():
        live[name].__code__ = codes[name]


def _codes(code: types.CodeType) -> Iterator[types.CodeType]:
    for one in code.co_consts:
        if isinstance(one, types.CodeType):
            yield one
            yield from _codes(one)


def _functions(module: str) -> dict[str, types.FunctionType]:
    found: dict[str, types.FunctionType] = {}

    def look(value: Any) -> None:
        if isinstance(value, property):
            for one in (value.fget, value.fset, value.fdel):
                look(one)
            return
        value = getattr(value, "__func__", value)
        if not isinstance(value, types.FunctionType) and not isinstance(value, type):
            value = getattr(value, "func", value)  # functools.cached_property
        while hasattr(value, "__wrapped__"):
            value = value.__wrapped__
        if isinstance(value, types.FunctionType) and value.__module__ == module:
            found[value.__qualname__] = value
        elif isinstance(value, type) and value.__module__ == module:
            for one in vars(value).values():
                look(one)

    for value in list(vars(sys.modules[module]).values()):
        look(value)
    return found


class _Marker(ast.NodeTransformer):
    """Puts a call before each statement that holds a mutant."""

    def __init__(
        self,
        numbers: dict[tuple[int, int], list[int]],
        names: dict[str, list[int]],
        limits: dict[str, list[int]],
    ) -> None:
        self.numbers = numbers
        self.names = names
        self.limits = limits
        """Field of ``Limits`` → its mutants."""

    def generic_visit(self, node: ast.AST) -> ast.AST:
        super().generic_visit(node)
        for block in ("body", "orelse", "finalbody"):
            listed = getattr(node, block, None)
            if isinstance(listed, list) and not isinstance(node, ast.Module | ast.ClassDef):
                setattr(node, block, [one for statement in listed for one in self._marked(statement)])
        return node

    def _marked(self, statement: ast.stmt) -> Iterator[ast.stmt]:
        if not isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Global | ast.Nonlocal):
            numbers = {n for one in _own(statement) for n in self._of(one)}
            for n in sorted(numbers):
                call = ast.Call(ast.Name(_REACHED, ast.Load()), [ast.Constant(n)], [])
                yield ast.fix_missing_locations(ast.copy_location(ast.Expr(call), statement))
        yield statement

    def _of(self, node: ast.AST) -> list[int]:
        if isinstance(node, ast.Name):
            return self.names.get(node.id, [])
        if isinstance(node, ast.Attribute) and node.attr in self.limits:
            return [*self.limits[node.attr], *self.numbers.get((node.lineno, node.col_offset), [])]
        if isinstance(node, ast.expr | ast.stmt):
            return self.numbers.get((node.lineno, node.col_offset), [])
        return []


def _own(statement: ast.stmt) -> Iterator[ast.AST]:
    """The nodes of a statement outside of its blocks."""
    yield statement
    for name, value in ast.iter_fields(statement):
        if name in ("body", "orelse", "finalbody", "handlers", "cases"):
            continue
        for one in value if isinstance(value, list) else [value]:
            if isinstance(one, ast.AST):
                yield from ast.walk(one)


def mark(reached: Callable[[Mutant], None]) -> Callable[[], None]:
    """Have each statement with a mutant report, before it runs, that it is reached.

    This changes the code of this process, and of the worker's children. Returns a function that passes on what the
    children have reported.
    """
    listed = list(sites())
    places: defaultdict[str, defaultdict[tuple[int, int], list[int]]] = defaultdict(lambda: defaultdict(list))
    names: defaultdict[str, list[int]] = defaultdict(list)
    limits: defaultdict[str, list[int]] = defaultdict(list)
    for n, mutant in enumerate(listed):
        site = sites()[mutant]
        if site.module == LIMITS:
            limits[site.name].append(n)
        elif site.name:
            names[f"{site.module}.{site.name}"].append(n)
        else:
            places[site.module][site.line, site.column].append(n)
    setattr(builtins, _REACHED, lambda n: reached(listed[n]))
    marked: dict[str, str] = {}
    for module in trees():
        here = {name: names[f"{owner}.{name}"] for name, owner in times_of(module).items()}
        if module in places or any(here.values()) or _attributes(trees()[module]) & limits.keys():
            importlib.import_module(module)
            tree = _Marker(places[module], here, limits).visit(_parsed(module))
            _replace(module, tree, set(_functions(module)))
            if module.startswith(IN_CHILDREN):
                marked[module] = ast.unparse(tree)
    numbers = started_processes.report_from(marked, _REACHED)

    def reached_in_children() -> None:
        for n in numbers():
            reached(listed[n])

    return reached_in_children


__all__ = ["MODES", "Site", "change", "mark", "sites"]
