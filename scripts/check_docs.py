"""Checks of the documents that `mkdocs build --strict` lacks.

They cover links of pages outside of docs/, links that leave the site, anchors as GitHub makes them, and pages that code
and other pages name by path.

    python scripts/check_docs.py        prints one line per problem; exit code 1 if there is one
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).resolve().parents[1]
FENCE = re.compile(r"^ *(```|~~~)")
HEADING = re.compile(r"^#{1,6} +(.+?) *#*$")
LINK = re.compile(r"\]\(([^()\s]+)\)")
ELSEWHERE = re.compile(r"[a-z][a-z0-9+.-]*:")
NAMED = re.compile(r"(?<![\w./-])docs/[\w/-]+\.md")
"""A page named by its path from the root of the repository."""
FOLDERS = ("behaviors", "distop", "docker", "docs", "examples", "scripts", "tests")
TEXTS = ("", ".md", ".py", ".toml", ".yaml", ".yml")
"""Suffixes of files that may name a page."""


def prose(text: str) -> Iterator[tuple[int, str]]:
    """The lines outside of code blocks, with their numbers."""
    inside = False
    for number, line in enumerate(text.splitlines(), 1):
        if FENCE.match(line):
            inside = not inside
        elif not inside:
            yield number, line


def anchors(text: str) -> set[str]:
    """The anchors of a page's headings, as GitHub and the site make them."""
    found: set[str] = set()
    for _, line in prose(text):
        if heading := HEADING.match(line):
            words = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading[1]).replace("`", "")
            anchor = base = re.sub(r"[^\w\- ]", "", words.lower()).replace(" ", "-")
            number = 0
            while anchor in found:
                number += 1
                anchor = f"{base}-{number}"
            found.add(anchor)
    return found


def links(text: str) -> Iterator[tuple[int, str]]:
    """The targets of a page's links within the repository, with their line numbers."""
    for number, line in prose(text):
        for target in LINK.findall(line):
            if not ELSEWHERE.match(target):
                yield number, target


def problems(root: Path = ROOT) -> list[str]:
    """Dead links and anchors of all pages, and links that leave the site."""
    docs = root / "docs"
    found = []
    for page in (*sorted(root.glob("*.md")), *sorted(docs.rglob("*.md"))):
        name = page.relative_to(root)
        for number, target in links(page.read_text(encoding="utf-8")):
            path, _, anchor = target.partition("#")
            there = (page.parent / path).resolve() if path else page
            if not there.exists():
                found.append(f"{name}:{number}: {target} does not exist")
            elif docs in page.parents and docs not in there.parents:
                found.append(f"{name}:{number}: {target} leaves docs/, so it is not on the site")
            elif anchor and anchor not in anchors(there.read_text(encoding="utf-8")):
                found.append(f"{name}:{number}: {target} names a missing heading")
    return found


def unknown(root: Path = ROOT) -> list[str]:
    """Missing pages of docs/ that code, tests, scripts or pages name."""
    found = []
    for path in (*sorted(root.glob("*.*")), *(path for one in FOLDERS for path in sorted((root / one).rglob("*")))):
        if path.suffix not in TEXTS or not path.is_file():
            continue
        for number, line in enumerate(path.read_text(encoding="utf-8", errors="replace").splitlines(), 1):
            missing = (page for page in NAMED.findall(line) if not (root / page).exists())
            found += [f"{path.relative_to(root)}:{number}: {page} does not exist" for page in missing]
    return found


def main() -> int:
    found = [*problems(), *unknown()]
    for sentence in found:
        print(sentence, file=sys.stderr)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
