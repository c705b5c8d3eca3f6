"""The syntax trees of all modules of distop and its behaviors, for tests of coding rules."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import TYPE_CHECKING

import distop
import distop_behaviors

if TYPE_CHECKING:
    from collections.abc import Iterator


def sources() -> Iterator[tuple[str, ast.Module]]:
    for package, name in ((distop, "distop"), (distop_behaviors, "behaviors")):
        for folder in package.__path__:
            root = Path(folder).resolve()
            for path in sorted(root.rglob("*.py")):
                yield f"{name}/{path.relative_to(root).as_posix()}", ast.parse(path.read_text())
