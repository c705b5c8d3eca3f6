"""Generates the reference of the command line, the Python API, the settings and exclusions (scripts/generate-docs)."""

from __future__ import annotations

import ast
import inspect
import re
import textwrap
import tomllib
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer.main

import distop
from distop import aio, behavior, errors, testing
from distop.cli.commands import commands
from distop.protocol import txn
from distop.protocol.table_registry import excludes
from distop.protocol.type_aliases import ALIASES
from distop.settings import DEFAULT_JOB_TIME_LIMIT, SETTINGS
from distop.store.connection_settings import DEFAULT_ENDPOINT
from distop_behaviors.index import lookup

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

WIDTH = 100
"""Maximum columns of a signature on one line."""


# ------------------------------------------------------------------ command line


def command_line() -> Iterator[str]:
    """Each command with its arguments and options, in the order of ``distop --help``."""
    group: Any = typer.main.get_command(commands())
    yield "## Options of all commands"
    yield ""
    yield from _parameters(group)
    for name, command in group.commands.items():
        for words, one in _leaves(f"distop {name}", command):
            yield ""
            yield f"## {words}"
            yield ""
            usage = " ".join(one.collect_usage_pieces(typer.Context(one, info_name=words)))
            yield from ("```text", f"{words} {usage}".strip(), "```", "")
            for paragraph in re.split(r"\n\s*\n", inspect.cleandoc(one.help or "")):
                yield from (" ".join(paragraph.split()), "")
            yield from _parameters(one)


def _leaves(words: str, command: Any) -> Iterator[tuple[str, Any]]:
    if not hasattr(command, "commands"):
        yield words, command
        return
    for name, one in command.commands.items():
        yield from _leaves(f"{words} {name}", one)


def _parameters(command: Any) -> Iterator[str]:
    rows = [_row(one) for one in command.params if not getattr(one, "hidden", False)]
    if rows:
        yield from ("| argument or option | meaning |", "|---|---|", *rows)
    else:
        yield "It has no arguments and no options of its own."


def _row(one: Any) -> str:
    option = one.param_type_name == "option"
    if option:
        metavar = one.metavar or ("" if one.is_flag else one.type.name.upper())
        name = " / ".join([", ".join(one.opts), *one.secondary_opts]) + (f" {metavar}" if metavar else "")
    else:
        name = one.metavar or one.name.upper()
    text = (one.help or "").strip()
    if one.required and text and not text.endswith("."):
        text += "."
    if one.required:
        text += " Required."
    shown = isinstance(one.default, str | int | float) and not isinstance(one.default, bool) and one.default != ""
    if shown and "default" not in text:
        text += f" Default: {one.default:g}." if isinstance(one.default, float) else f" Default: {one.default}."
    return f"| `{_cell(name)}` | {_cell(text.strip())} |"


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


# ---------------------------------------------------------------------- settings


def settings() -> Iterator[str]:
    """Each setting with its variable, its flag, its default and its meaning."""
    yield from ("| setting | variable | flag | default | meaning |", "|---|---|---|---|---|")
    for name, setting in SETTINGS.items():
        key = name.replace("_", "-")
        cells = (f"`{key}`", f"`DISTOP_{name.upper()}`", f"`--{key}`" if setting.metavar else "none")
        yield f"| {' | '.join(cells)} | {_default(name, setting.default)} | {_cell(setting.help)} |"


def _default(name: str, value: Any) -> str:
    if name == "etcd":
        return f"`{DEFAULT_ENDPOINT}`"
    if name == "job_time_limit":
        return f"`*={DEFAULT_JOB_TIME_LIMIT / 3600:g}h`"
    if isinstance(value, bool):
        return "`1`" if value else "`0`"
    if isinstance(value, float):
        return f"{value:g} s"
    return f"`{value}`" if value not in (None, "", (), {}) else "none"


# -------------------------------------------------------------------- exclusions


def exclusions() -> Iterator[str]:
    """Which operation types exclude each other on a table, by the declarations of both."""
    types = [one for one in shipped_types() if one.type_name not in (*ALIASES, "join", "noop")]
    types.sort(key=lambda one: one.type_name)
    yield f"| | {' | '.join(f'`{one.type_name}`' for one in types)} |"
    yield f"|---|{'---|' * len(types)}"
    for one in types:
        yield f"| `{one.type_name}` | {' | '.join(excluded(one, other) for other in types)} |"


def shipped_types() -> list[type[behavior.Behavior]]:
    """The operation types that come with distop."""
    project = tomllib.loads((Path(__file__).parent.parent / "pyproject.toml").read_text())["project"]
    group = "distop.behaviors"
    return [EntryPoint(name, where, group).load() for name, where in project["entry-points"][group].items()]


def excluded(one: type[behavior.Behavior], other: type[behavior.Behavior]) -> str:
    """A cell of the table: whether a start of one type is refused while the other one runs on the table."""
    mine, theirs = one.declaration(), other.declaration()
    if one is other and mine.instances == "one" and mine.object_field:
        return "same name"
    alone = one is other and mine.instances == "one"
    found = excludes(mine.conflicts_with, other.type_name) or excludes(theirs.conflicts_with, one.type_name)
    return "no" if alone or found else ""


# -------------------------------------------------------------------- Python API

CALLERS: dict[str, tuple[Any, ...]] = {
    "Connect": (distop.connect, distop.start_operation, distop.EmbeddedEtcd),
    "Client": (aio.Client,),
    "Operation": (aio.Operation, distop.OperationResult, distop.OperationStatus),
    "Graphs and times": (
        *(distop.Start, distop.chain, distop.group, distop.chord),
        *(distop.After, distop.Ended, distop.Every),
    ),
    "Workers": (
        *(aio.Worker, aio.Job, distop.OwnedJob),
        *(distop.Complete, distop.Abort, distop.Retry, distop.Release),
    ),
    "Transactions": (
        *(txn.value_is, txn.is_not, txn.absent, txn.exists, txn.unchanged, txn.none_within),
        *(txn.Put, txn.Delete, txn.Get),
    ),
    "Tables": (distop.TableRecord, lookup),
}
"""Heading → the members that callers import."""

AUTHORS: tuple[Any, ...] = (
    *(behavior.Behavior, behavior.JobContext, behavior.Progress, behavior.Summary, behavior.OutcomeRow),
    behavior.PartitionPlan,
)

TESTERS: tuple[Any, ...] = (testing.run_operation, testing.OperationRun, testing.FakeContext, testing.MemoryProgress)


def python_api() -> Iterator[str]:
    """All members that callers and authors of behaviors import, with signatures and docstrings."""
    for heading, members in CALLERS.items():
        yield from (f"## {heading}", "")
        for one in members:
            yield from _documented(one)
    yield from ("## Exceptions", "", "| exception | exit code | meaning |", "|---|---|---|")
    for name, one in vars(errors).items():
        if isinstance(one, type) and issubclass(one, errors.DistopError) and not name.startswith("_"):
            yield f"| `{name}` | {one.exit_code} | {_cell(_markdown(inspect.getdoc(one) or '')).partition('. ')[0]} |"
    yield ""
    yield from ("## For authors of behaviors", "")
    for one in AUTHORS:
        yield from _documented(one)
    yield from ("## For tests of behaviors", "")
    for one in TESTERS:
        yield from _documented(one)


def _documented(one: Any) -> Iterator[str]:
    faces = (aio.Client, aio.Operation, aio.Worker, aio.Job)
    where = one.__module__ if one in CALLERS["Transactions"] else "distop.aio" if one in faces else "distop"
    where = "distop_behaviors.index" if one is lookup else "distop.behavior" if one in AUTHORS else where
    where = "distop.testing" if one in TESTERS else where
    yield from (f"### {where}.{one.__name__}", "")
    if not isinstance(one, type):
        yield from _signature(one.__name__, one)
        yield from (_markdown(inspect.getdoc(one) or ""), "")
        return
    # Users do not construct clients, operations and jobs.
    made = "__init__" in vars(one) and not inspect.isabstract(one) and (one not in faces or one is aio.Worker)
    if made:
        yield from _signature(one.__name__, one)
    yield from (_markdown(inspect.getdoc(one) or ""), "")
    listed = [line for line in _fields(one) if not made or "`: " in line]  # the signature has fields without text
    yield from (*listed, "") if listed else ()
    for name, member in _members(one):
        if isinstance(member, property):
            yield f"**`{name}`**: {_markdown(inspect.getdoc(member) or '')}"
            yield ""
            continue
        yield from (f"#### {one.__name__}.{name}", "")
        yield from _signature(name, member)
        yield from (_markdown(inspect.getdoc(member) or ""), "")


def _fields(one: type) -> Iterator[str]:
    """The public attributes that the class body declares, each with the docstring below it."""
    (body,) = ast.parse(textwrap.dedent(inspect.getsource(one))).body
    assert isinstance(body, ast.ClassDef)
    for at, line in enumerate(body.body):
        if isinstance(line, ast.AnnAssign) and isinstance(line.target, ast.Name) and not line.target.id.startswith("_"):
            below = body.body[at + 1] if at + 1 < len(body.body) else None
            docstring = isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant) and below.value.value
            text = " ".join(_markdown(inspect.cleandoc(str(docstring))).split()) if docstring else ""
            kind = re.sub(r"^ClassVar\[(.*)\]$", r"\1", ast.unparse(line.annotation))
            value = (
                f" = {ast.unparse(line.value)}"
                if line.value is not None and "field(" not in ast.unparse(line.value)
                else ""
            )
            yield f"- `{line.target.id}: {kind}{value}`" + (f": {text}" if text else "")


def _members(one: type) -> Iterator[tuple[str, Any]]:
    """The public methods and properties with a docstring, in source order, without those of documented base classes."""
    documented_before = {name for kind in one.__mro__[1:] if kind in AUTHORS for name in vars(kind)}
    for kind in reversed(one.__mro__):
        if kind.__module__.startswith("distop"):
            for name, member in vars(kind).items():
                plain = member.__func__ if isinstance(member, classmethod | staticmethod) else member
                documented = inspect.isfunction(plain) or isinstance(plain, property)
                if documented and not name.startswith("_") and name not in documented_before and inspect.getdoc(plain):
                    yield name, plain


def _signature(name: str, one: Callable[..., Any]) -> Iterator[str]:
    """A signature as code: on one line if it fits, else one line per parameter."""
    signature = inspect.signature(one)
    shown, star = [], False
    for parameter in signature.parameters.values():
        if parameter.name in ("self", "cls"):
            continue
        if parameter.kind is parameter.KEYWORD_ONLY and not star:
            shown.append("*")
            star = True
        star = star or parameter.kind is parameter.VAR_POSITIONAL
        prefix = {parameter.VAR_POSITIONAL: "*", parameter.VAR_KEYWORD: "**"}.get(parameter.kind, "")
        text = prefix + parameter.name
        typed = parameter.annotation is not parameter.empty
        text += f": {_annotation(parameter.annotation)}" if typed else ""
        if parameter.default is not parameter.empty:
            equals = " = " if typed else "="
            value = repr(parameter.default)
            text += f"{equals}{'…' if value.startswith('<') else value}"
        shown.append(text)
    before = "async " if inspect.iscoroutinefunction(one) else ""
    returns = signature.return_annotation
    back = "" if isinstance(one, type) or returns in (signature.empty, None) else f" -> {_annotation(returns)}"
    line = f"{before}{name}({', '.join(shown)}){back}"
    if len(line) <= WIDTH:
        yield from ("```python", line, "```", "")
    else:
        lines = (f"    {text}," for text in shown)
        yield from ("```python", f"{before}{name}(", *lines, f"){back}", "```", "")


def _annotation(value: Any) -> str:
    text = value if isinstance(value, str) else getattr(value, "__name__", str(value))
    return re.sub(r"\b(?:m|claims|aio|workers|model)\.(?=[A-Z])", "", text)


def _markdown(text: str) -> str:
    """Convert a docstring's roles, literals and literal blocks to Markdown."""
    text = re.sub(r":(?:class|meth|func|data|attr|exc|mod):`~?([^`]+)`", lambda m: f"`{m[1].rpartition('.')[2]}`", text)
    text = text.replace("``", "`")
    out, block = [], False
    for line in text.splitlines():
        if block and line.strip() and not line.startswith("    "):
            out += ["```", ""]
            block = False
        if line.rstrip().endswith("::") and not block:
            out += [line.rstrip()[:-1], "", "```python"]
            block = True
            continue
        out.append(line.removeprefix("    ") if block else line)
    if block:
        out.append("```")
    # Placeholders such as <root> are no HTML.
    return re.sub(r"(?<!`)<(\w+)>(?!`)", r"&lt;\1&gt;", "\n".join(out)).replace("```python\n\n", "```python\n")
