"""Import rules beyond the contracts of pyproject.toml: a pure core, and light imports."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).resolve().parents[3]
PACKAGE = ROOT / "distop"

# Modules without I/O, clock, randomness or event loop. `datetime` is for arithmetic; a test forbids its clock.
PURE = {
    "__future__", "abc", "base64", "binascii", "bisect", "collections", "contextlib", "copy", "dataclasses", "datetime",
    "difflib", "enum", "functools", "hashlib", "heapq", "hmac", "itertools", "json", "marshal", "math", "operator",
    "re", "string", "types", "typing", "unicodedata", "urllib.parse", "zlib",
}  # fmt: skip
DATA = {"distop_behaviors", "numpy", "obstore", "pandas", "py4j", "pyarrow", "pyiceberg", "pyspark"}
HEAVY = DATA | {"asyncio", "google", "grpc", "jinja2", "jsonschema", "pydantic", "rich", "tenacity", "typer"}
HEAVY |= {"prometheus_client"}
CLOCK = {"now", "utcnow", "today"}
CORE = ("protocol", "decide", "invariants")


def sources(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*.py") if not {"_proto", "v1"} & set(path.parts))


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def imported(tree: ast.AST) -> Iterator[str]:
    """Every imported module, with the full name for `from distop import core`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module == "distop":
            yield from (f"distop.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.module or "."


def is_pure(module: str) -> bool:
    own = ".".join(module.split(".")[:2]) in {"distop.errors", *(f"distop.{name}" for name in CORE)}
    return own or module in PURE or module.split(".")[0] in PURE


@pytest.mark.parametrize("path", [p for name in CORE for p in sources(PACKAGE / name)], ids=name_of)
def test_the_core_imports_pure_modules_only(path: Path) -> None:
    assert [module for module in imported(ast.parse(path.read_text())) if not is_pure(module)] == []


@pytest.mark.parametrize("path", [p for name in CORE for p in sources(PACKAGE / name)], ids=name_of)
def test_the_core_reads_no_clock(path: Path) -> None:
    calls = [
        node.lineno
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in CLOCK
        and isinstance(node.func.value, ast.Name) and node.func.value.id in {"datetime", "date"}
    ]  # fmt: skip
    assert calls == []


def test_only_one_module_spells_key_names() -> None:
    spelled = [
        f"{name_of(path)}:{node.lineno}"
        for path in sources(PACKAGE)
        if path != PACKAGE / "protocol" / "keys.py"
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Constant) and isinstance(node.value, str | bytes)
        if re.match(rb"distOp[A-Za-z]*\.", node.value if isinstance(node.value, bytes) else node.value.encode())
    ]
    assert spelled == []


def modules_after(statement: str) -> set[str]:
    """The modules that a fresh interpreter has loaded after ``statement``."""
    program = f"import sys\n{statement}\nprint(*sorted(sys.modules))"
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    return set(done.stdout.split())


def loaded_by(statement: str) -> set[str]:
    """The top-level packages of these modules."""
    return {name.split(".")[0] for name in modules_after(statement)}


def test_importing_distop_loads_no_library() -> None:
    assert loaded_by("import distop") & HEAVY == set()


@pytest.mark.parametrize(
    "module", ["distop.daemon.process", "distop.client.async_client", "distop.aio", "distop.blocking"]
)
def test_daemon_and_client_load_no_data_library_and_no_behavior(module: str) -> None:
    assert loaded_by(f"import {module}") & DATA == set()


@pytest.mark.parametrize(
    "line",
    [
        ["executor", "--id", "a", "--slots", "2", "--label", "zone=a", "--label", "rack=1", "--ttl", "none"],
        ["ls", "t", "--state", "running", "--label", "a=b", "--etcd", "127.0.0.1:1", "--connect-timeout", "0.1"],
        ["show", "t/noop/1", "--json", "--etcd", "127.0.0.1:1", "--connect-timeout", "0.1"],
        ["cancel", "t/noop/1", "--etcd", "127.0.0.1:1", "--connect-timeout", "0.1"],
    ],
    ids=lambda line: line[0],
)
def test_a_command_line_is_parsed_without_pydantic(line: list[str]) -> None:
    """typer would build a validator with it for each option, which takes longer than all else."""
    names = modules_after(f"from distop.cli.main import run; assert run({line}) in (2, 3)")
    assert "distop.settings" in names  # the line and its settings were read
    assert "pydantic" not in names


def test_a_daemon_loads_no_pydantic_and_no_metrics_server() -> None:
    spared = {"jinja2", "jsonschema", "opentelemetry", "prometheus_client", "pydantic", "rich"}
    assert loaded_by("import distop.daemon.process") & spared == set()


def test_behaviors_are_declared_without_data_libraries() -> None:
    declare = "from distop.behavior import load, registered; [load(name).declaration() for name in registered()]"
    names = modules_after(f"import distop.worker.child_side.child; {declare}")
    assert "distop_behaviors.index" in names
    assert {name.split(".")[0] for name in names} & (DATA - {"distop_behaviors"}) == set()
    assert {"asyncio", "http.client", "distop_behaviors.index.key_lookup"} & names == set()
    # Of distop.tables only the vocabulary, neither planners nor readers.
    vocabulary = {"distop.tables", "distop.tables.formats", "distop.tables.reading", "distop.tables.reading.file_facts"}
    assert {name for name in names if name.startswith("distop.tables")} <= vocabulary


@pytest.mark.parametrize("module", ["distop.client.async_client", "distop.aio", "distop.blocking"])
def test_a_client_loads_no_daemon_and_no_worker(module: str) -> None:
    """P36. A contract of pyproject.toml forbids later imports, too."""
    names = modules_after(f"import {module}")
    assert f"{module}" in names
    runs = ("distop.daemon", "distop.worker")
    assert [name for name in names if name.startswith((*runs, "opentelemetry"))] == []


# Not simulated: the child's side, the command line, and the embedded server of a demo.
OWN_TIME = {"cli", "worker", "tables", "testing"}


@pytest.mark.parametrize(
    "path",
    [p for p in sources(PACKAGE) if p.relative_to(PACKAGE).parts[0] not in OWN_TIME and p.name != "embedded.py"],
    ids=name_of,
)
def test_time_and_random_numbers_come_from_one_module(path: Path) -> None:
    """A simulation replaces them there, so that it is repeatable."""
    if path.name == "clock.py":
        return
    assert {"random", "secrets", "time", "uuid"} & set(imported(ast.parse(path.read_text()))) == set()


@pytest.mark.parametrize("path", sources(PACKAGE / "cli"), ids=name_of)
def test_the_command_line_calls_services_and_not_etcd(path: Path) -> None:
    """A contract of pyproject.toml and the rule T20 of the linter keep services from printing."""
    asked = [
        node.lineno
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Attribute) and node.value.attr == "etcd"
    ]
    assert asked == []
