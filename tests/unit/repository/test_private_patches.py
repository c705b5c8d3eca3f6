"""Tests replace no private member of distop, except those listed here with the reason.

Planted bugs (tests/simulation/planted*.py) need no entry: a planted bug replaces the code that would be wrong.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).parents[3]
TESTS = ROOT / "tests"
PRIVATE = re.compile(r"_[A-Za-z]\w*")

REASONS = {
    ("acceptance/test_index_local.py", "_group_rows"): "the file changes between two reads of one call",
    ("acceptance/test_validate_changing_files.py", "_read_footer"): "the file changes just before its footer is read",
    ("integration/test_elections.py", "_apply"): "a watch whose events cannot be applied",
    ("simulation/test_found_bugs.py", "_revoke"): "a planted bug",
    ("simulation/test_scheduling.py", "_alone"): "an executor that is never idle",
    ("unit/support/running.py", "_behaviors"): "a behavior that is not installed",
    ("unit/behaviors/test_expire_partitions.py", "_files"): "values of files that no writer here makes",
    ("unit/behaviors/test_index_build.py", "_close"): "another attempt runs just before a segment is closed",
    ("unit/behaviors/test_index_places.py", "_numbers"): "a folder lists a file that is always gone",
    ("unit/conftest.py", "_any_hidden"): "a process never forgets its secrets",
    ("unit/conftest.py", "_hidden"): "a process never forgets its secrets",
    ("unit/daemon/test_executor.py", "_operations"): "operations that were read, without etcd",
    ("unit/runtime/test_secret_settings.py", "_copying"): "outputs of earlier tests still end",
    ("unit/storage/test_stages.py", "_write"): "Spark would write the rows",
    ("unit/tables/iceberg/test_avro_records.py", "_Records"): "counts the records in memory",
    ("unit/tables/iceberg/test_catalog_publisher.py", "_same"): "a table without a catalog, whose commits are scripted",
    ("unit/tables/test_formats.py", "_installed"): "a process finds its installed formats once",
    ("unit/worker/test_spark_stall.py", "_build"): "a JVM that dies at its start",
    ("unit/worker/test_spark_watch.py", "_build"): "a session that does not start",
    ("unit/worker/test_verifiers.py", "_shut_down"): "the socket's time-out comes before the deadline",
    ("unit/worker/test_worker_sinks.py", "_cleanup"): "a cleanup without a child",
}
"""Test file and private member → why nothing else reaches it."""


def defined(tree: ast.AST) -> Iterator[str]:
    """The names that a module defines: functions, classes, variables and attributes."""
    for node in ast.walk(tree):
        match node:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                yield name
            case ast.Attribute(attr=name, ctx=ast.Store()) | ast.Name(id=name, ctx=ast.Store()):
                yield name


def own() -> set[str]:
    """The private names of distop and its behaviors."""
    return {
        name
        for folder in ("distop", "behaviors")
        for path in (ROOT / folder).rglob("*.py")
        if not {"_proto", "v1"} & set(path.parts)
        for name in defined(ast.parse(path.read_text()))
        if PRIVATE.fullmatch(name)
    }


def names(text: object) -> list[str]:
    """The private names in a name or a dotted path."""
    return [part for part in str(text).split(".") if PRIVATE.fullmatch(part)]


def replaced(tree: ast.AST) -> Iterator[str]:
    """The private names that a test replaces in an object other than its own ``self``.

    A call that names it, such as ``patch.setattr(owner, "_name", …)``, or an assignment to ``owner._name`` or to one
    of its items. Names that are only read, or called, do not count.
    """
    for node in ast.walk(tree):
        match node:
            case ast.Call(func=ast.Name(id="getattr")) | ast.Call(args=[ast.Name(id="self"), *_]):
                continue
            case ast.Call(args=args):
                texts = [arg.value if isinstance(arg, ast.Constant) else None for arg in args]
                paths = [text for text in texts if isinstance(text, str) and text.startswith("distop")]
                named = texts[texts.index(None) :] if None in texts else []  # the owner comes before the name
                yield from (part for text in [*paths, *named] if text for part in names(text))
            case ast.Attribute(value=owner, attr=name, ctx=ast.Store() | ast.Del()):
                if PRIVATE.fullmatch(name) and ast.unparse(owner) not in ("self", "cls"):
                    yield name
            case ast.Subscript(value=ast.Attribute(value=owner, attr=name), ctx=ast.Store() | ast.Del()):
                if PRIVATE.fullmatch(name) and ast.unparse(owner) not in ("self", "cls"):
                    yield name


def found() -> set[tuple[str, str]]:
    known = own()
    return {
        (path.relative_to(TESTS).as_posix(), name)
        for path in sorted(TESTS.rglob("*.py"))
        if path != Path(__file__) and not re.fullmatch(r"(test_)?planted\w*\.py", path.name)
        for name in replaced(ast.parse(path.read_text()))
        if name in known
    }


def test_each_replaced_private_member_is_listed_with_a_reason() -> None:
    members = found()
    assert sorted(members - REASONS.keys()) == [], "use a public seam, or list it with the reason"
    assert sorted(REASONS.keys() - members) == [], "no longer replaced: remove the entry"


def test_replaced_names_are_found() -> None:
    text = """
patch.setattr(module, "_a", 1)
patch.setattr("distop.module._b", 1)
act_at(patch, module, "_c", "before", act)
one._d, one.e = 1, 2
one.f._g[key] = 1
del one._h
self._i = 1
one._j.clear()
getattr(one, "_k")
setattr(self, "_l", 1)
"""
    assert sorted(replaced(ast.parse(text))) == ["_a", "_b", "_c", "_d", "_g", "_h"]
