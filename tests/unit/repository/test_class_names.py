"""Each class of distop and its behaviors has a name of its own."""

from __future__ import annotations

import ast
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).parents[3]
GENERATED = {"_proto", "_etcd3pb"}
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


def homes() -> dict[str, list[str]]:
    """The files that define a class of a name, for each name."""
    found = defaultdict(list)
    for folder in ("distop", "behaviors"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            if GENERATED.isdisjoint(path.parts):
                for node in ast.walk(ast.parse(path.read_text())):
                    if isinstance(node, ast.ClassDef):
                        found[node.name].append(path.relative_to(ROOT).as_posix())
    return found


def test_a_class_name_is_defined_once() -> None:
    repeated = {name: files for name, files in homes().items() if len(files) > 1 and name not in EXCEPTED}
    assert repeated == {}


def test_each_exception_is_defined_twice() -> None:
    found = homes()
    assert {name: len(found[name]) for name in EXCEPTED} == dict.fromkeys(EXCEPTED, 2)
