"""docs/how-to/run-executors.md: its commands are valid (the manifests: tests/integration/test_helm_chart.py)."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import typer.main

from distop.cli.command_context import take_globals
from distop.cli.commands import commands

DOCS = Path(__file__).resolve().parents[3] / "docs"
GUIDE, SECURITY = ((DOCS / name).read_text() for name in ("how-to/run-executors.md", "security.md"))


def blocks(language: str, page: str = GUIDE) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", page, re.MULTILINE | re.DOTALL)


def executors() -> list[list[str]]:
    """The arguments of each ``distop executor`` of the guide."""
    found: list[list[str]] = []
    for text in blocks("sh"):
        found += [shlex.split(line) for line in text.replace("\\\n", "").splitlines() if "distop executor" in line]
    (unit,) = blocks("ini", SECURITY)
    found += [shlex.split(line.removeprefix("ExecStart=")) for line in unit.splitlines() if "ExecStart=" in line]
    return [words[words.index("executor") :] for words in found]


def test_the_command_line_accepts_each_command_of_the_guide() -> None:
    found = executors()
    assert len(found) == 3
    for words in found:
        _, (name, *rest) = take_globals(words)
        command: Any = typer.main.get_command(commands(name))
        with command.make_context("distop", [name, *rest]) as context:
            _, executor, left = command.resolve_command(context, [name, *rest])
            with executor.make_context(name, left, parent=context) as made:
                masters = [word for word in words if word.startswith(("spark:", "--spark-master=", "yarn"))]
                assert [word.removeprefix("--spark-master=") for word in masters] in ([], [made.params["spark_master"]])
