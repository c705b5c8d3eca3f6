"""Options and arguments that several commands take, and how the values of options are read."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING, Annotated, Any

import typer

from distop.errors import InvalidArgument, UsageError
from distop.protocol.texts import shown

if TYPE_CHECKING:
    from collections.abc import Callable

    from distop.protocol.records import OperationRef

_DIGITS = 19
"""Nobody counts so far."""


def check_waiting(wait: bool, timeout: float | None) -> None:
    """``--timeout`` stands with ``--wait`` alone. Raises UsageError."""
    if timeout is not None and not wait:
        raise UsageError("--timeout needs --wait: add --wait, or leave --timeout out")


def seconds(option: str) -> Callable[[Any], float]:
    """Reads the value of an option that is a time. What it returns raises InvalidArgument."""

    def read(value: Any) -> float:
        try:
            number = float(value)
        except ValueError:
            number = -1.0
        if not 0 <= number < float("inf"):
            raise InvalidArgument(f"{option} must be a number of seconds, 0 or more, not {shown(value)}")
        return number

    return read


def count(option: str) -> Callable[[Any], int]:
    """Reads the value of an option that is a number of things. What it returns raises InvalidArgument."""

    def read(value: Any) -> int:
        text = str(value).strip()
        if not (text.isascii() and text.isdigit() and len(text) < _DIGITS and int(text) > 0):
            raise InvalidArgument(f"{option} must be a whole number of at least 1, not {shown(value)}")
        return int(text)

    return read


def parse(op: str) -> OperationRef:
    """The operation that is named, read before etcd is asked. Raises InvalidArgument."""
    from distop.client.async_operation import parse_ref

    return parse_ref(op)


def duration_or_time(option: str) -> Callable[[Any], float]:
    """Reads the value of an option that is a moment: a time with a zone, or how long ago (``90s``, ``36h``, ``7d``), as
    seconds since the epoch. What it returns raises InvalidArgument.
    """

    def read(value: Any) -> float:
        from distop.clock import time
        from distop.services.inspection.filters import time_of
        from distop.settings import duration

        text = str(value).strip()
        with suppress(ValueError):
            if text.endswith(("s", "m", "h", "d")):
                return time.time() - duration(text)
        return time_of(text, option, "2013-01-01T00:00:00Z, or how long ago, such as 36h or 7d")

    return read


def labels(texts: list[str] | None) -> dict[str, str] | None:
    """``--label K=V``, each given once. Raises InvalidArgument."""
    from distop.protocol.operation_labels import labels as check

    found: dict[str, str] = {}
    for text in texts or ():
        key, equals, value = text.partition("=")
        if not equals:
            raise InvalidArgument(f"--label must be written as K=V, not {shown(text)}")
        if found.get(key, value) != value:
            raise InvalidArgument(f"the label {key} is given twice, with other values")
        found[key] = value
    return dict(check(found)) if texts else None


LABEL = Annotated[list[str] | None, typer.Option(metavar="K=V", help="To find it again by (repeatable).")]
WITH_LABEL = Annotated[list[str] | None, typer.Option(metavar="K=V", help="Only with this label (repeatable).")]
OF_TYPE = Annotated[str | None, typer.Option("--type", metavar="TYPE", help="Only of this type.")]
OP = Annotated[str, typer.Argument(metavar="OP", help="table/type[/object]/instance")]
TIMEOUT = Annotated[
    float | None, typer.Option(metavar="S", parser=seconds("--timeout"), help="With --wait: at most so many seconds.")
]
TIME_LIMIT = Annotated[
    float | None,
    typer.Option(metavar="S", parser=seconds("--time-limit"), help="Seconds for one attempt of a job at most."),
]
ATTEMPTS = Annotated[
    int | None,
    typer.Option(metavar="N", parser=count("--retry-attempts"), help="Tries of a job that meets unexpected errors."),
]


def selected(given: list[str] | None) -> dict[str, str] | None:
    """The labels of ``--where K=V``, each name once. Raises InvalidArgument."""
    if not given:
        return None
    found: dict[str, str] = {}
    for text in given:
        name, equals, value = text.partition("=")
        if not (name and equals and value):
            raise InvalidArgument(f"--where takes a label as K=V, not {shown(text)}")
        if found.setdefault(name, value) != value:
            raise InvalidArgument(f"--where names the label {shown(name)} twice: an executor has one value for it")
    return found


def _number(option: str) -> Callable[[Any], int]:
    """Reads a whole number, which is checked where it is used."""

    def read(value: Any) -> int:
        text = str(value).strip()
        if not text.removeprefix("-").isdigit() or not text.isascii() or len(text) > _DIGITS:
            raise InvalidArgument(f"{option} must be a whole number, not {shown(value)}")
        return int(text)

    return read


PRIORITY = Annotated[
    int | None,
    typer.Option(metavar="N", parser=_number("--priority"), help="-100 to 100, the higher first (default 0)."),
]
MAX_JOBS = Annotated[
    int | None,
    typer.Option(metavar="N", parser=_number("--max-jobs"), help="Run so many of its jobs at once (0: no limit)."),
]
MAX_JOBS_PER_EXECUTOR = Annotated[
    int | None,
    typer.Option(metavar="N", parser=_number("--max-jobs-per-executor"), help="The same for each executor."),
]
MAX_FAILED = Annotated[
    str | None,
    typer.Option(metavar="N|N%", help="Go on until more jobs than so many have failed, whatever the policy."),
]
AT = Annotated[str | None, typer.Option(metavar="TIME", help="Begin then, or later: 2026-01-31T18:00:00+01:00.")]
DELAY = Annotated[float | None, typer.Option(metavar="S", help="Begin so many seconds from now.")]
AFTER = Annotated[
    list[str] | None, typer.Option(metavar="OP", help="Begin once this operation has succeeded (repeatable).")
]
AFTER_END = Annotated[
    list[str] | None, typer.Option(metavar="OP", help="Begin once it has ended, however (repeatable).")
]
WHERE = Annotated[
    list[str] | None, typer.Option(metavar="K=V", help="Only on executors with this label (repeatable).")
]


def predecessors(after: list[str] | None, after_end: list[str] | None) -> list[Any]:
    """The operations of ``--after`` and ``--after-end``. Raises InvalidArgument."""
    from distop.services.submission.start_request import After

    return [*(After(parse(one)) for one in after or ()), *(After(parse(one), "end") for one in after_end or ())]
