"""Options and arguments that several commands take, and how the values of options are read."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated, Any, TypeAlias

import typer

from distop.errors import InvalidArgument, UsageError
from distop.protocol.texts import shown
from distop.services.command_flags import Flag
from distop.services.inspection.history_filters import FILTERS, HistoryFilters
from distop.services.submission.start_options import StartOptions, options
from distop.settings import SETTINGS

if TYPE_CHECKING:
    from distop.protocol.records import OperationRef
    from distop.services.command_flags import FlagKind
    from distop.services.submission.option_values import Every
    from distop.services.submission.start_options import Verb

GivenOptions: TypeAlias = Mapping[str, Any]
"""The values of options, by the names of their parameters."""
NOTHING: GivenOptions = MappingProxyType({})
_DIGITS = 19
"""Maximum digits of a number."""


def check_waiting(wait: bool, timeout: float | None) -> None:
    """Raises UsageError for ``--timeout`` without ``--wait``."""
    if timeout is not None and not wait:
        raise UsageError("--timeout needs --wait: add --wait, or leave --timeout out")


def check_start(type_name: str, table: str, argument: Any, options: StartOptions) -> None:
    """Report wrong arguments of a start before etcd is asked. Raises InvalidArgument."""
    from distop.schemas.argument_schema import encode_argument
    from distop.services.submission.start_request import request

    request(type_name, table, encode_argument(argument), options, "")


def seconds(option: str) -> Callable[[Any], float]:
    """A reader of an option's value in seconds. It raises InvalidArgument."""

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
    """A reader of an option's value that is a count. It raises InvalidArgument."""

    def read(value: Any) -> int:
        text = str(value).strip()
        if not (text.isascii() and text.isdigit() and len(text) < _DIGITS and int(text) > 0):
            raise InvalidArgument(f"{option} must be a whole number of at least 1, not {shown(value)}")
        return int(text)

    return read


def parse(op: str) -> OperationRef:
    """The operation with this name, parsed before etcd is asked. Raises InvalidArgument."""
    from distop.client.async_operation import parse_ref

    return parse_ref(op)


def duration_or_time(option: str) -> Callable[[Any], float]:
    """A reader of an option's value as seconds since the epoch. It raises InvalidArgument.

    The value is a time with a zone, or how long ago (``90s``, ``36h``, ``7d``).
    """

    def read(value: Any) -> float:
        from distop.clock import time
        from distop.services.inspection.filters import time_of
        from distop.setting_values import duration

        text = str(value).strip()
        with suppress(ValueError):
            if text.endswith(("s", "m", "h", "d")):
                return time.time() - duration(text)
        return time_of(text, option, "2013-01-01T00:00:00Z, or how long ago, such as 36h or 7d")

    return read


def labels(texts: list[str] | None) -> dict[str, str] | None:
    """The labels of ``--label K=V``. Raises InvalidArgument."""
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


WITH_LABEL = Annotated[list[str] | None, typer.Option(metavar="K=V", help="Only with this label (repeatable).")]
OF_TYPE = Annotated[str | None, typer.Option("--type", metavar="TYPE", help="Only of this type.")]
NO_OPTIONS = StartOptions()
NO_FILTERS = HistoryFilters()
OP = Annotated[str, typer.Argument(metavar="OP", help="table/type[/object]/instance")]
TIMEOUT = Annotated[
    float | None, typer.Option(metavar="S", parser=seconds("--timeout"), help="With --wait: time-out in seconds.")
]


def selected(given: list[str] | None) -> dict[str, str] | None:
    """The labels of ``--where K=V``. Raises InvalidArgument."""
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
    """A reader of a whole number; the caller checks its bounds. It raises InvalidArgument."""

    def read(value: Any) -> int:
        text = str(value).strip()
        if not text.removeprefix("-").isdigit() or not text.isascii() or len(text) > _DIGITS:
            raise InvalidArgument(f"{option} must be a whole number, not {shown(value)}")
        return int(text)

    return read


def predecessors(after: list[str] | None, after_end: list[str] | None) -> list[Any]:
    """The operations of ``--after`` and ``--after-end``. Raises InvalidArgument."""
    from distop.services.submission.option_values import After

    return [*(After(parse(one)) for one in after or ()), *(After(parse(one), "end") for one in after_end or ())]


def _series(given: GivenOptions) -> Every | None:
    """The series of ``--every`` and its options. Raises InvalidArgument."""
    from distop.services.submission.option_values import Every

    parts = {"jitter": given["jitter"], "on": given["on"], "until": given["until"], "times": given["times"]}
    if given["every"] is not None:
        return Every(given["every"], since="start" if given["grid"] else "end", **parts)
    if given["grid"] or Every(0, **parts) != Every(0):
        raise InvalidArgument(
            "--grid, --jitter, --times, --until and --on say how an operation comes again: add --every"
        )
    return None


Readers: TypeAlias = Mapping[str, Callable[[GivenOptions], Any]]
"""Fields that are made from the values of their options; any other is the value of its option."""
_OF_STARTS: Readers = {
    "partitions": lambda given: given["partition"] or None,
    "labels": lambda given: labels(given["label"]),
    "where": lambda given: selected(given["where"]),
    "after": lambda given: predecessors(given["after"], given["after_end"]) or None,
    "every": _series,
}
_OF_HISTORY: Readers = {
    "op": lambda given: parse(given["op"]) if given["op"] is not None else None,
    "states": lambda given: given["state"] or None,
    "labels": lambda given: labels(given["label"]),
}

_PARSERS: Mapping[str, Callable[[str], Callable[[Any], Any]]] = {
    "seconds": seconds,
    "time": duration_or_time,
    "count": count,
    "number": _number,
}
_TYPES: Mapping[str, Any] = {
    "text": str | None,
    "texts": list[str] | None,
    "seconds": float | None,
    "time": float | None,
    "count": int | None,
    "number": int | None,
    "switch": bool,
}


def _parameter(flag: Flag) -> inspect.Parameter:
    """The option of the command line, as typer reads it from a signature."""
    parser = _PARSERS[flag.kind](flag.name) if flag.kind in _PARSERS else None
    info = typer.Option(flag.name, metavar=flag.metavar or None, parser=parser, help=flag.help)
    default = False if flag.kind == "switch" else flag.default
    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    return inspect.Parameter(flag.parameter, kind, default=default, annotation=Annotated[_TYPES[flag.kind], info])


def takes_flags(
    name: str, flags: Sequence[Flag], read: Callable[[GivenOptions], Any]
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command these options in place of its parameter ``name``, which ``read`` makes from their values."""

    def made(command: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(command)
        def run(**given: Any) -> None:
            values = {flag.parameter: given.pop(flag.parameter) for flag in flags}
            command(**{name: read(values)}, **given)

        own = inspect.signature(command, eval_str=True).parameters.values()
        shown = [one for p in own for one in (map(_parameter, flags) if p.name == name else (p,))]
        run.__signature__ = inspect.Signature(shown)  # type: ignore[attr-defined]
        run.__annotations__ = {one.name: one.annotation for one in shown}
        return run

    return made


def _takes_fields(
    name: str, options: type, flags: Mapping[str, Sequence[Flag]], readers: Readers
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command the options of these fields of a dataclass, in place of its parameter ``name``."""

    def read(given: GivenOptions) -> Any:
        return options(
            **{one: readers[one](given) if one in readers else given[own[0].parameter] for one, own in flags.items()}
        )

    return takes_flags(name, [flag for own in flags.values() for flag in own], read)


def start_options(verb: Verb) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command the options of StartOptions that its verb takes, in place of its parameter ``options``."""
    flags = {name: one.flags for name, one in options(verb).items() if one.flags}
    return _takes_fields("options", StartOptions, flags, _OF_STARTS)


history_filters = _takes_fields("filters", HistoryFilters, {name: (one,) for name, one in FILTERS.items()}, _OF_HISTORY)
"""Gives a command the options of HistoryFilters, in place of its parameter ``filters``."""


def setting_options(names: Sequence[str]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command the options of these settings, instead of its parameter ``given``, which gets the given ones."""
    flags = []
    for name in names:
        setting = SETTINGS[name]
        kind: FlagKind = "texts" if setting.repeatable else "text"
        flags.append(Flag(f"--{name.replace('_', '-')}", setting.metavar, setting.help, kind))
    # A repeatable option that was not given is an empty list. An empty text was given.
    return takes_flags(
        "given", flags, lambda given: {name: value for name, value in given.items() if value or value == ""}
    )
