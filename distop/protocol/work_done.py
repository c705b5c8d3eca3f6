"""How much of the work of a job or an operation is done, and how much of that is committed."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from typing import TYPE_CHECKING, Any

from distop.errors import InvalidArgument
from distop.protocol.texts import shown

if TYPE_CHECKING:
    from collections.abc import Mapping

LARGEST = 2**53
"""The largest whole number that every JSON reader represents exactly."""


@dataclass(frozen=True, slots=True)
class WorkDone:
    """Files and bytes that are done, of how many (0: unknown), and how many of them are committed.

    What is committed stays if the operation is cancelled or fails. ``commits``: commits of the table. A deleted or
    copied file needs no commit: it counts as committed at once.
    """

    files: int = 0
    bytes: int = 0
    of_files: int = 0
    of_bytes: int = 0
    commits: int = 0
    committed_files: int = 0
    committed_bytes: int = 0

    def __add__(self, other: WorkDone) -> WorkDone:
        return WorkDone(*(getattr(self, name) + getattr(other, name) for name in NAMES))

    def __bool__(self) -> bool:
        return any(getattr(self, name) for name in NAMES)

    def to_json(self) -> dict[str, int]:
        """The numbers that are not 0."""
        return {name: value for name, value in asdict(self).items() if value}

    @classmethod
    def from_json(cls, data: object) -> WorkDone:
        """The numbers of a JSON object. Others may have written it, so what is no number counts as 0."""
        known: Mapping[str, Any] = data if isinstance(data, dict) else {}
        return cls(*(_number(known.get(name)) for name in NAMES))


NAMES = tuple(field.name for field in fields(WorkDone))


def checked_work(numbers: Mapping[str, Any]) -> WorkDone:
    """The work that a behavior reports. Raises InvalidArgument for what is not a whole number, 0 or more."""
    for name, value in numbers.items():
        if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= LARGEST:
            raise InvalidArgument(f"{name} must be a whole number, 0 or more, not {shown(value)}")
    return WorkDone(**numbers)


def _number(value: object) -> int:
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= LARGEST else 0
