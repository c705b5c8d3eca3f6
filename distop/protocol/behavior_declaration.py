"""The declaration of a behavior: published at ``distOpBehavior.<type>``, and copied into each operation's spec."""

from __future__ import annotations

from dataclasses import field
from typing import TYPE_CHECKING, Any

from distop.errors import InvalidArgument
from distop.protocol.field_checks import checked
from distop.protocol.frozen import frozen
from distop.protocol.json_codec import SCHEMA_VERSION, dumps, loads
from distop.protocol.texts import shown

if TYPE_CHECKING:
    from collections.abc import Mapping

STAGED_OUTPUTS = ("refuse", "remove", "keep")
"""What happens to the stages of an operation's attempts (``Behavior.staged_output``)."""
ALL_TYPES = "*"
"""In ``conflicts_with``: all operation types."""
LONGEST_TIME_LIMIT = 100 * 365.25 * 86_400
"""Maximum time limit in seconds."""


def check_time_limit(value: Any, what: str) -> float:
    """The time limit of one attempt of a job, in seconds.

    Raises InvalidArgument if it is not a number above 0.
    """
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value <= LONGEST_TIME_LIMIT:
        raise InvalidArgument(f"{what} must be a number of seconds above 0, such as 600, not {shown(value)}")
    return float(value)


def shortest(*limits: float) -> float:
    """The shortest of several time limits; 0: none."""
    return min((limit for limit in limits if limit > 0), default=0.0)


def over_time_limit(limit: float) -> str:
    """The error of a job that ran longer than its time limit."""
    return f"the job ran longer than its time limit of {limit:g} s"


@frozen
class Retry:
    """How unexpected errors are retried: at most ``attempts`` failures, with back-off.

    The back-off doubles from ``initial`` to ``maximum`` seconds. The executor adds jitter.
    """

    attempts: int = 3
    initial: float = 1.0
    maximum: float = 60.0

    def delay(self, failures: int) -> float:
        """Seconds to wait after the ``failures``-th failure (from 1), before jitter."""
        return float(min(self.maximum, self.initial * 2.0 ** min(max(failures - 1, 0), 60)))

    def to_json(self) -> dict[str, Any]:
        return {"attempts": self.attempts, "initial": self.initial, "maximum": self.maximum}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Retry:
        attempts, initial = int(data.get("attempts", 3)), float(data.get("initial", 1.0))
        return checked(cls(attempts, initial, float(data.get("maximum", 60.0))))


@frozen
class Declaration:
    """What a behavior publishes, so that a start is checked without its code."""

    type_name: str
    arg_schema: Mapping[str, Any] = field(default_factory=dict)
    result_schema: Mapping[str, Any] = field(default_factory=dict)
    report_schema: Mapping[str, Any] = field(default_factory=dict)
    object_field: str | None = None
    instances: str = "many"
    conflicts_with: tuple[str, ...] = ()
    can_fail: bool = True
    retry: Retry = Retry()
    lost: str = "retry"
    failure_policy: str = "fail_fast"
    resumable: bool = False
    batch: bool = False
    """The behavior has ``run_batch``: executors claim blocks of jobs."""
    completes: bool = True
    """The behavior has completion code. Without it one transaction decides and finishes."""
    description: str = ""
    needs_table: bool = False
    """It works on the rows of a table: starts on ``@cluster`` are refused."""
    cleans: bool = True
    """The behavior has cleanup code: executors record on disk which of its jobs they run."""
    reports_only: bool = False
    """Its completion code only makes the report, so it may run before the decision is fixed."""
    joins: bool = False
    """It only waits for others, and ends with the last of them (L36)."""
    code: bool = True
    """Executors have code for it. Otherwise only actors run its jobs, and any daemon coordinates it."""
    id_fields: tuple[str, ...] | None = None
    """Fields of the argument that determine an operation's id (``protocol.identity``); None: no id."""
    combine: Mapping[str, str] = field(default_factory=dict)
    """Field of the argument → the rule that combines two of its values (``protocol.identity.RULES``)."""
    time_limit: float = 0.0
    """Maximum seconds of one attempt of a job; 0: no limit."""
    to_file: bool = False
    """Results that are too large for etcd go to files, which are deleted with the operation's history."""
    staged_output: str = "refuse"
    """One of STAGED_OUTPUTS."""
    removes_table: bool = False
    """The plan of an operation may remove the table's record (``Behavior.removes_table``)."""

    def encode(self) -> bytes:
        return dumps(
            {
                "v": SCHEMA_VERSION,
                "type_name": self.type_name,
                "description": self.description,
                "arg_schema": dict(self.arg_schema),
                "result_schema": dict(self.result_schema),
                "report_schema": dict(self.report_schema),
                "object_field": self.object_field,
                "instances": self.instances,
                "conflicts_with": list(self.conflicts_with),
                "needs_table": self.needs_table,
                **({"id_fields": list(self.id_fields)} if self.id_fields is not None else {}),
                **({"combine": dict(self.combine)} if self.combine else {}),
                **({"large_results": "file"} if self.to_file else {}),
                **({"removes_table": True} if self.removes_table else {}),
                **self.rules().to_json(),
            }
        )

    @classmethod
    def decode(cls, value: bytes) -> Declaration:
        data = loads(value)
        rules = Rules.from_json(data)
        return checked(
            cls(
                data["type_name"],
                data.get("arg_schema") or {},
                data.get("result_schema") or {},
                data.get("report_schema") or {},
                data.get("object_field"),
                data.get("instances", "many"),
                tuple(data.get("conflicts_with", ())),
                rules.can_fail,
                rules.retry,
                rules.lost,
                rules.failure_policy,
                rules.resumable,
                rules.batch,
                rules.completes,
                data.get("description", ""),
                bool(data.get("needs_table", False)),
                rules.cleans,
                rules.reports_only,
                rules.joins,
                rules.code,
                tuple(data["id_fields"]) if data.get("id_fields") is not None else None,
                data.get("combine") or {},
                rules.time_limit,
                data.get("large_results") == "file",
                rules.staged_output,
                bool(data.get("removes_table", False)),
            )
        )

    def rules(self) -> Rules:
        """The part of the declaration that each operation's spec contains."""
        return Rules(
            self.can_fail,
            self.retry,
            self.lost,
            self.failure_policy,
            self.resumable,
            self.batch,
            self.completes,
            self.cleans,
            self.reports_only,
            self.joins,
            self.code,
            self.time_limit,
            self.staged_output,
        )


@frozen
class Rules:
    """How an operation's jobs are run and judged, copied from its behavior's declaration at the start."""

    can_fail: bool = True
    retry: Retry = Retry()
    lost: str = "retry"
    failure_policy: str = "fail_fast"
    resumable: bool = False
    batch: bool = False
    completes: bool = True
    cleans: bool = True
    reports_only: bool = False
    joins: bool = False
    code: bool = True
    time_limit: float = 0.0
    staged_output: str = "refuse"

    @property
    def stages(self) -> bool:
        """Whether attempts may have staged output."""
        return self.staged_output != "refuse"

    @property
    def leaves_something(self) -> bool:
        """Whether an interrupted job may leave something on its node that the executor must remember."""
        return self.cleans or self.resumable

    def to_json(self) -> dict[str, Any]:
        return {
            "can_fail": self.can_fail,
            "retry": self.retry.to_json(),
            "lost": self.lost,
            "failure_policy": self.failure_policy,
            "resumable": self.resumable,
            "batch": self.batch,
            "completes": self.completes,
            "cleans": self.cleans,
            "reports_only": self.reports_only,
            **({"joins": True} if self.joins else {}),
            **({} if self.code else {"code": False}),
            **({"time_limit": self.time_limit} if self.time_limit else {}),
            **({"staged_output": self.staged_output} if self.stages else {}),
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Rules:
        return checked(
            cls(
                bool(data.get("can_fail", True)),
                Retry.from_json(data.get("retry") or {}),
                data.get("lost", "retry"),
                data.get("failure_policy", "fail_fast"),
                bool(data.get("resumable", False)),
                bool(data.get("batch", False)),
                bool(data.get("completes", True)),
                bool(data.get("cleans", True)),
                bool(data.get("reports_only", False)),
                bool(data.get("joins", False)),
                bool(data.get("code", True)),
                float(data.get("time_limit", 0.0)),
                data.get("staged_output", "refuse"),
            )
        )

    def at_limit(self, failures: int) -> bool:
        """Whether the failures have reached the limit. A behavior that cannot fail has none."""
        return self.can_fail and failures >= self.retry.attempts
