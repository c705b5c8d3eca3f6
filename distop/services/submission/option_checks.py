"""Priority, limits, failure budget and selector as a caller gives them, checked without etcd."""

from __future__ import annotations

from collections.abc import Mapping
from decimal import Decimal, InvalidOperation
from typing import Any

from distop.errors import InvalidArgument
from distop.protocol.operation_options import MAX_LIMIT, MOST_URGENT, Options
from distop.protocol.texts import check_encodable, shown

MAX_LABELS = 20
MAX_LABEL = 200
"""Characters of a label's name, or of its value."""


def changes(
    *,
    priority: int | None = None,
    max_jobs: int | None = None,
    max_jobs_per_executor: int | None = None,
    max_failed: int | str | None = None,
) -> dict[str, Any]:
    """The fields of ``protocol.operation_options.Options`` that these give; what is None is not among them.
    ``max_jobs`` and ``max_jobs_per_executor``: 0 is no limit. ``max_failed``: a count, or a share such as "2%"; ""
    leaves it to the failure policy. Raises InvalidArgument.
    """
    found: dict[str, Any] = {}
    if priority is not None:
        found["priority"] = _whole(priority, "the priority", -MOST_URGENT, MOST_URGENT)
    if max_jobs is not None:
        found["max_jobs"] = _whole(max_jobs, "the number of jobs at once", 0, MAX_LIMIT)
    if max_jobs_per_executor is not None:
        what = "the number of jobs at once of each executor"
        found["max_jobs_per_executor"] = _whole(max_jobs_per_executor, what, 0, MAX_LIMIT)
    if max_failed is not None:
        found["max_failed"] = _budget(max_failed)
    return found


def refuse_unowned(type_name: str, options: Options, where: Mapping[str, str] | None = None) -> None:
    """Raise InvalidArgument for limits and labels of executors, where a type has no code.

    Actors and workers own no job of such an operation, and executors have no code for it: it would never end.
    """
    given = {"max_jobs": options.max_jobs, "max_jobs_per_executor": options.max_jobs_per_executor, "where": where}
    if named := [name for name, value in given.items() if value]:
        raise InvalidArgument(
            f"{type_name} has no code that executors run, and workers own no jobs of operations with limits or labels: "
            f"leave out {' and '.join(named)}"
        )


def _whole(value: Any, what: str, least: int, most: int) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
        raise InvalidArgument(f"{what} must be a whole number from {least} to {most}, not {shown(value)}")
    return value


def _budget(value: Any) -> str:
    wrong = InvalidArgument(
        f'the number of jobs that may fail must be a count such as 5, or a share such as "2%", not {shown(value)}'
    )
    if isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= 1_000_000:
        return str(value)
    if not isinstance(value, str) or not value.isascii() or len(value) > 20:
        raise wrong
    text = value.strip()
    if text.endswith("%"):
        number = text[:-1].strip()
        try:
            share = Decimal(number)
        except InvalidOperation:
            raise wrong from None
        if not number.replace(".", "", 1).isdigit() or not 0 <= share <= 100:
            raise wrong
        return f"{number}%"
    if text and not (text.isdigit() and int(text) <= 1_000_000):
        raise wrong
    return str(int(text)) if text else ""


def selector(where: Mapping[str, str] | None) -> dict[str, str]:
    """The labels that an executor must have. Raises InvalidArgument."""
    if where is None:
        return {}
    if not isinstance(where, Mapping):
        raise InvalidArgument(f'where names labels of executors, such as {{"zone": "a"}}, not {shown(where)}')
    if len(where) > MAX_LABELS:
        raise InvalidArgument(f"where names {len(where)} labels; at most {MAX_LABELS} are allowed")
    for name, value in where.items():
        for text in (name, value):
            if not isinstance(text, str) or not 0 < len(text) <= MAX_LABEL:
                raise InvalidArgument(
                    f"a label in where is a name and a value, texts of 1 to {MAX_LABEL} characters, not "
                    f"{shown(name)}: {shown(value)}"
                )
            check_encodable(text, "a label in where")
    return dict(sorted(where.items()))
