"""The docs: links, navigation, commands and figures (scripts/check_docs.py, mkdocs.yml)."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Any

import check_docs
import pytest
import typer.main

import distop
from distop.cli.command_context import take_globals
from distop.cli.commands import commands
from distop.settings import SETTINGS

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).resolve().parents[3]
DOCS = ROOT / "docs"
README = (ROOT / "README.md").read_text()
BLOCK = re.compile(r"^ *```(\w*)(?: [^\n]*)?\n(.*?)^ *```$", re.MULTILINE | re.DOTALL)


def test_each_link_and_each_named_page_exists() -> None:
    assert check_docs.problems() == []
    assert check_docs.unknown() == []


def test_each_page_is_in_the_navigation_once() -> None:
    listed = re.findall(r"^ +- .+: (\S+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE)
    assert sorted(listed) == sorted(str(page.relative_to(DOCS)) for page in DOCS.rglob("*.md"))


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("[a](gone.md)", "3: gone.md does not exist"),
        ("two\nlines [a\nb](other.md#nowhere)", "5: other.md#nowhere names a missing heading"),
        ("[a](#nowhere)", "3: #nowhere names a missing heading"),
        ("[a](../README.md)", "3: ../README.md leaves docs/, so it is not on the site"),
        ("[a](#a-b--c) [b](other.md#what-etcds-keys-show) [c](https://example.com/x#y)", ""),
        ("```\n[a](gone.md)\n# no heading\n```", ""),
    ],
)
def test_a_dead_link_is_found(tmp_path: Path, text: str, problem: str) -> None:
    (tmp_path / "docs").mkdir()
    (tmp_path / "README.md").write_text("# x\n")
    (tmp_path / "docs" / "other.md").write_text("# What etcd's `keys` show\n")
    page = tmp_path / "docs" / "page.md"
    page.write_text(f"# A b / c\n\n{text}\n")
    assert check_docs.problems(tmp_path) == ([f"{page.relative_to(tmp_path)}:{problem}"] if problem else [])


def test_anchors_match_those_of_github() -> None:
    text = "# The [title](x.md)\n## Twice\n## Twice\n### `unique` and *so on*, 1. of 2\n"
    assert check_docs.anchors(text) == {"the-title", "twice", "twice-1", "unique-and-so-on-1-of-2"}


# ---------------------------------------------------------------------- commands


def statements(block: str) -> Iterator[str]:
    """The statements of a shell block; a quote or a backslash joins lines."""
    waiting = ""
    for line in block.splitlines():
        waiting += line.strip() if not waiting else f"\n{line}"
        if waiting.endswith("\\"):
            waiting = waiting[:-1]
            continue
        try:
            shlex.split(waiting, comments=True)
        except ValueError:
            continue
        yield waiting
        waiting = ""


def commands_of_docs() -> list[tuple[str, list[str]]]:
    """Each ``distop`` command in a shell block of the docs, with its page."""
    found = []
    for page in (ROOT / "README.md", *sorted(DOCS.rglob("*.md"))):
        for language, block in BLOCK.findall(page.read_text()):
            for statement in statements(block) if language in ("", "sh", "shell") else ():
                for part in re.split(r" && | \|\| |; ", statement):
                    words = shlex.split(part, comments=True) if "distop" in part else []
                    while words and re.fullmatch(r"[A-Z_]+=.*", words[0]):
                        words.pop(0)
                    if words[:1] == ["distop"] and words[1:] != ["--version"]:  # no command
                        found.append((page.name, words[1:]))
    return found


def test_the_command_line_accepts_each_command_of_the_docs() -> None:
    found = commands_of_docs()
    assert len(found) > 50
    for page, words in found:
        _, (name, *rest) = take_globals(words)
        command: Any = typer.main.get_command(commands(name))
        left = [name, *rest]
        try:
            with command.make_context("distop", list(left)) as context:
                while hasattr(command, "commands"):
                    _, command, left = command.resolve_command(context, left)
                command.make_context(name, left, parent=context).close()
        except Exception as error:  # for any error, name the page
            pytest.fail(f"{page}: distop {shlex.join(words)}: {error!r}")


def test_a_quote_and_a_backslash_continue_a_statement() -> None:
    assert list(statements("a 'b\n c' d\ne \\\n f\ng # h\n")) == ["a 'b\n c' d", "e \n f", "g # h"]


# ------------------------------------------------------------- README and pages


def test_the_readme_is_short() -> None:
    assert len(README.splitlines()) <= 110
    (quickstart,) = (block for language, block in BLOCK.findall(README) if language == "python")
    assert len(quickstart.splitlines()) <= 15


def test_each_figure_of_the_readme_is_in_the_benchmarks() -> None:
    _, _, table = README.partition("| what | measured |\n|---|---|\n")
    figures = [line.strip("|").split("|")[1].strip() for line in table.partition("\n\n")[0].splitlines()]
    assert 0 < len(figures) <= 8
    benchmarks = (DOCS / "benchmarks.md").read_text()
    assert [one for one in figures if f"| {one.removesuffix(' a second')}" not in benchmarks] == []


def test_the_runbook_has_each_check_of_doctor() -> None:
    parts = ("cli/doctor", "services/doctor", "services/storage_doctor")
    source = "".join((ROOT / f"distop/{part}.py").read_text() for part in parts)
    names = set(re.findall(r"""(?:Finding|_wrong|_tried|_finding)\(\s*"([a-z ]+)",""", source))
    assert len(names) == 17
    runbook = (DOCS / "operations/runbook.md").read_text()
    assert [name for name in sorted(names) if f"| `{name}` |" not in runbook] == []


def test_the_contract_has_each_setting() -> None:
    _, _, settings = (DOCS / "contract.md").read_text().partition("\n## Settings\n")
    assert [name for name in SETTINGS if f"`{name.replace('_', '-')}`" not in settings] == []


def test_the_reference_has_each_public_name_and_each_command() -> None:
    page = (DOCS / "reference/python-api.md").read_text()
    assert [name for name in distop.__all__ if not re.search(rf"\b{name}\b", page)] == ["__version__", "compat"]
    top: Any = typer.main.get_command(commands())
    page = (DOCS / "reference/cli.md").read_text()
    assert [name for name in top.commands if f"\n## distop {name}" not in page] == []
    below = top.commands["table"].commands
    assert [name for name in below if f"\n## distop table {name}\n" not in page] == []


def test_table_cells_hold_no_paragraphs() -> None:
    """Conditions belong in notes below the table. Generated pages are exempt."""
    from_code = ("cli.md", "python-api.md", "settings.md")
    pages = [*ROOT.glob("*.md"), *DOCS.rglob("*.md")]
    long = [
        f"{page.relative_to(ROOT)}: {cell.strip()[:60]}"
        for page in pages
        if page.name not in from_code
        for line in page.read_text().splitlines()
        if line.startswith("|")
        for cell in re.split(r"(?<!\\)\|", line)
        if len(re.sub(r"\]\([^)]*\)", "]", cell).strip()) > 160
    ]
    assert long == []


def test_python_blocks_of_the_docs_compile() -> None:
    pages = (ROOT / "README.md", *(page for page in DOCS.rglob("*.md") if page.name != "python-api.md"))
    blocks = [
        (page, code) for page in pages for language, code in BLOCK.findall(page.read_text()) if language == "python"
    ]
    assert len(blocks) > 15
    for page, code in blocks:
        compile(code, str(page), "exec")
