"""Options of the command line as data; the command line makes the parameters of its commands from them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

FlagKind: TypeAlias = Literal["text", "texts", "seconds", "time", "count", "number", "switch"]
"""How the command line reads a value. ``texts``: the option may be repeated."""


@dataclass(frozen=True, slots=True)
class Flag:
    """An option of the command line, which gives a field of a dataclass of options, or a part of it."""

    name: str
    metavar: str
    help: str
    kind: FlagKind = "text"
    default: Any = None

    @property
    def parameter(self) -> str:
        """Its name as a parameter of a function."""
        return self.name.removeprefix("--").replace("-", "_")
