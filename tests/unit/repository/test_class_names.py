"""Each class and type alias has a name of its own."""

from __future__ import annotations

import ast
from collections import defaultdict
from functools import cache
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).parents[3]
GENERATED = {"_proto", "_etcd3pb", "v1"}
TWINS = "the async class and its blocking form, of the public API"
EXCEPTED = {
    "Client": TWINS,
    "Job": TWINS,
    "Operation": TWINS,
    "Submission": TWINS,
    "Worker": TWINS,
    "Retry": "distop.Retry and distop.behavior.Retry, of the public API",
}
"""Class name → why two classes have it."""


@cache
def modules_in(folder: str) -> list[tuple[str, ast.Module]]:
    paths = (path for path in sorted((ROOT / folder).rglob("*.py")) if GENERATED.isdisjoint(path.parts))
    return [(path.relative_to(ROOT).as_posix(), ast.parse(path.read_text())) for path in paths]


def modules(*folders: str) -> Iterator[tuple[str, ast.Module]]:
    """The path and the syntax tree of each module that is written by hand."""
    return chain.from_iterable(map(modules_in, folders))


def homes(*folders: str) -> dict[str, list[str]]:
    """The files that define a class of a name, for each name."""
    found = defaultdict(list)
    for path, tree in modules(*folders):
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                found[node.name].append(path)
    return found


def alias(node: ast.stmt) -> str:
    """The name of the public type alias that a statement of a module defines, or "".

    Its name is in CamelCase, and its value is no type variable.
    """
    match node:
        case ast.AnnAssign(target=ast.Name(id=name), value=value):
            pass
        case ast.Assign(targets=[ast.Name(id=name)], value=value):
            pass
        case _:
            return ""
    variable = isinstance(value, ast.Call) and ast.unparse(value.func) in ("TypeVar", "ParamSpec")
    return name if name[0].isupper() and not name.isupper() and not variable else ""


def aliases(*folders: str) -> dict[str, list[str]]:
    """The files that define a type alias of a name, for each name."""
    found = defaultdict(list)
    for path, tree in modules(*folders):
        for name in filter(None, map(alias, tree.body)):
            found[name].append(path)
    return found


def test_a_class_name_is_defined_once() -> None:
    found = homes("distop", "behaviors")
    assert {name: files for name, files in found.items() if len(files) > 1 and name not in EXCEPTED} == {}


def test_each_exception_is_defined_twice() -> None:
    found = homes("distop", "behaviors")
    assert {name: len(found[name]) for name in EXCEPTED} == dict.fromkeys(EXCEPTED, 2)


def test_a_type_alias_shares_its_name_with_no_other_alias_and_no_class() -> None:
    folders = ("distop", "behaviors", "tests/simulator")
    classes, found = homes(*folders), aliases(*folders)
    assert "Step" in found
    repeated = {name: files + classes.get(name, []) for name, files in found.items()}
    assert {name: files for name, files in repeated.items() if len(files) > 1} == {}
