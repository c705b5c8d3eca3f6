"""The single list of the options of a start, with types, defaults, bounds and help texts.

It defines the signatures of the clients, the options of the command line, and the fields of a graph file, also for
``prepare``, ``rerun``, ``apply`` and ``alter``. To add an option: add a field to StartOptions, a row to ``_OPTIONS``, a
keyword to the ``…Keywords`` (for the type checker; a test compares them), and its effect to
``services.submission.start_request``.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from operator import attrgetter
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, TypedDict

from distop.errors import InvalidArgument
from distop.protocol import caller_values
from distop.protocol.behavior_declaration import check_time_limit
from distop.protocol.operation_labels import labels as check_labels
from distop.protocol.operation_options import MAX_LIMIT, MOST_URGENT
from distop.protocol.texts import did_you_mean
from distop.runtime.keyword_signatures import F, takes_fields_of
from distop.services.command_flags import Flag
from distop.services.submission import option_values as v

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence
    from datetime import datetime

    from distop.services.submission.option_values import Every

Verb: TypeAlias = Literal["start", "prepare", "graph", "rerun", "apply", "alter"]
"""The commands that take options; ``graph``: an operation in a graph."""

_NEW: tuple[Verb, ...] = ("start", "prepare", "graph")
_ONCE: tuple[Verb, ...] = ("start", "graph", "rerun", "apply")
_RULES: tuple[Verb, ...] = (*_NEW, "rerun")
_LIMITS: tuple[Verb, ...] = (*_NEW, "alter")


@dataclass(frozen=True, slots=True)
class Option:
    """The check, flags and commands of a field of StartOptions.

    ``check`` converts a given value, or raises InvalidArgument. ``verbs``: the commands that take the field.
    """

    check: Callable[[Any], Any]
    flags: tuple[Flag, ...]
    verbs: tuple[Verb, ...]


def _option(check: Callable[[Any], Any], *flags: Flag, of: tuple[Verb, ...] = _NEW) -> Option:
    return Option(check, flags, of)


@dataclass(frozen=True, slots=True, kw_only=True)
class StartOptions:
    """All options of a start, as a caller gives them; None: not given."""

    partitions: Sequence[str] | None = None
    request_id: str | None = None
    failure_policy: str | None = None
    retry_attempts: int | None = None
    time_limit: float | None = None
    submitter: str | None = None
    labels: Mapping[str, str] | None = None
    not_before: datetime | str | None = None
    delay: float | None = None
    after: Iterable[Any] | None = None
    priority: int | None = None
    max_jobs: int | None = None
    max_jobs_per_executor: int | None = None
    max_failed: int | str | None = None
    where: Mapping[str, str] | None = None
    every: Every | float | None = None
    id: str | None = None
    one_off: bool = False
    on_duplicate: str | None = None
    traceparent: str | None = None

    @classmethod
    def of(cls, given: Mapping[str, Any], verb: Verb = "start") -> StartOptions:
        """These options. Raises InvalidArgument for a name that the command does not take."""
        known = options(verb)
        for name in given:
            if name not in known:
                raise InvalidArgument(
                    f"{name!r} is not an option of {_OF[verb]}{did_you_mean(name, known, 'its options')}"
                )
        return cls(**given)

    def given(self) -> dict[str, Any]:
        """The options that differ from their defaults, as keywords."""
        values = zip(_OPTIONS, _values(self), _DEFAULTS, strict=True)
        return {name: value for name, value, default in values if value is not default}

    def checked(self) -> dict[str, Any]:
        """The checked and converted values of the given options. Raises InvalidArgument."""
        found = self.given()
        if found.get("one_off") and (self.id is not None or self.on_duplicate is not None):
            raise InvalidArgument("a one-off has no id, and so no duplicates: leave out one_off, or the others")
        return {name: _OPTIONS[name].check(value) for name, value in found.items()}


_OPTIONS: Mapping[str, Option] = MappingProxyType(
    {
        "partitions": _option(
            caller_values.partition_names, Flag("--partition", "NAME", "Run only this partition (repeatable).", "texts")
        ),
        "request_id": _option(
            v.request_id, Flag("--request-id", "ID", "Repeating the command with the same id starts it once."), of=_ONCE
        ),
        "failure_policy": _option(
            v.one_of("the failure policy", v.FAILURE_POLICIES),
            Flag("--failure-policy", "POLICY", "fail_fast or collect_all, instead of the default."),
            of=_RULES,
        ),
        "retry_attempts": _option(
            lambda value: v.times(value, "the number of attempts must be"),
            Flag("--retry-attempts", "N", "Attempts of a job after unexpected errors.", "count"),
            of=_RULES,
        ),
        "time_limit": _option(
            lambda value: check_time_limit(value, "the time limit of a job"),
            Flag("--time-limit", "S", "Maximum seconds for one attempt of a job.", "seconds"),
            of=_RULES,
        ),
        "submitter": _option(
            lambda value: caller_values.text(value, "the submitter", v.LONGEST_SUBMITTER),
            of=("start", "prepare", "graph", "rerun"),
        ),
        "labels": _option(
            check_labels,
            Flag("--label", "K=V", "Label to filter operations by (repeatable).", "texts"),
            of=(*_RULES, "apply"),
        ),
        "not_before": _option(
            lambda value: value, Flag("--at", "TIME", "Start at this time or later: 2026-01-31T18:00:00+01:00.")
        ),
        "delay": _option(
            lambda value: caller_values.seconds(value, "the delay"),
            Flag("--delay", "S", "Start after this many seconds.", "seconds"),
        ),
        "after": _option(
            v.predecessors,
            Flag("--after", "OP", "Start after this operation succeeds (repeatable).", "texts"),
            Flag("--after-end", "OP", "Start after this operation ends (repeatable).", "texts"),
        ),
        "priority": _option(
            v.whole("the priority", -MOST_URGENT, MOST_URGENT),
            Flag("--priority", "N", f"-{MOST_URGENT} to {MOST_URGENT}; higher starts first (default 0).", "number"),
            of=_LIMITS,
        ),
        "max_jobs": _option(
            v.whole("the number of jobs at once", 0, MAX_LIMIT),
            Flag("--max-jobs", "N", "Maximum jobs at once (0: no limit).", "number"),
            of=_LIMITS,
        ),
        "max_jobs_per_executor": _option(
            v.whole("the number of jobs at once of each executor", 0, MAX_LIMIT),
            Flag("--max-jobs-per-executor", "N", "Maximum jobs at once on each executor.", "number"),
            of=_LIMITS,
        ),
        "max_failed": _option(
            v.budget, Flag("--max-failed", "N|N%", "Tolerate up to N failed jobs, whatever the policy."), of=_LIMITS
        ),
        "where": _option(
            v.selector, Flag("--where", "K=V", "Run only on executors with this label (repeatable).", "texts")
        ),
        "every": _option(
            v.every,
            Flag("--every", "S", "Repeat this many seconds after each end.", "seconds"),
            Flag("--grid", "", "With --every: measure from start to start.", "switch"),
            Flag("--jitter", "S", "With --every: random delay of at most S seconds.", "seconds", 0.0),
            Flag("--times", "N", "With --every: number of runs in all.", "count"),
            Flag("--until", "TIME", "With --every: start no run after this time."),
            Flag("--on", "END", "With --every: repeat after success, failure or any.", default="any"),
            of=("start", "graph"),
        ),
        "id": _option(v.own_id, Flag("--id", "ID", "Only one operation of an id is active (default: computed).")),
        "one_off": _option(v.switch("one_off"), Flag("--one-off", "", "Start without an id.", "switch")),
        "on_duplicate": _option(
            v.one_of("the duplicate policy", v.DUPLICATE_POLICIES),
            Flag("--on-duplicate", "POLICY", "If the id is active: join (default), refuse, replace, combine."),
        ),
        "traceparent": _option(
            v.traceparent,
            Flag("--traceparent", "TEXT", "The W3C trace context that the operation belongs to."),
            of=_RULES,
        ),
    }
)
"""The check, help and flags of each field."""
_values = attrgetter(*_OPTIONS)
_DEFAULTS = _values(StartOptions())
_OF: Mapping[Verb, str] = MappingProxyType(
    {
        "start": "a start",
        "prepare": "a prepared operation",
        "graph": "an operation of a graph",
        "rerun": "a rerun",
        "apply": "apply",
        "alter": "alter",
    }
)


@cache
def options(verb: Verb) -> Mapping[str, Option]:
    """The options that a command takes, by name."""
    return MappingProxyType({name: one for name, one in _OPTIONS.items() if verb in one.verbs})


def takes_options(verb: Verb) -> Callable[[F], F]:
    """Show these options in the signature of a function that takes them as ``**options``."""
    return takes_fields_of(StartOptions, options(verb))


# ------------------------------------------------------- for the type checker


class AlterKeywords(TypedDict, total=False):
    """What ``alter`` takes."""

    priority: int | None
    max_jobs: int | None
    max_jobs_per_executor: int | None
    max_failed: int | str | None


class _RuleKeywords(TypedDict, total=False):
    failure_policy: str | None
    retry_attempts: int | None
    time_limit: float | None
    submitter: str | None
    labels: Mapping[str, str] | None
    traceparent: str | None


class RerunKeywords(_RuleKeywords, total=False):
    """What ``rerun`` takes."""

    request_id: str | None


class PrepareKeywords(_RuleKeywords, AlterKeywords, total=False):
    """What ``prepare_operation`` takes."""

    partitions: Sequence[str] | None
    not_before: datetime | str | None
    delay: float | None
    after: Iterable[Any] | None
    where: Mapping[str, str] | None
    id: str | None
    one_off: bool
    on_duplicate: str | None


class StartKeywords(PrepareKeywords, total=False):
    """What ``start_operation`` takes, and an operation of a graph."""

    request_id: str | None
    every: Every | float | None
