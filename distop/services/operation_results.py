"""The results and statuses of operations that clients return."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

from distop.errors import InvalidArgument, NotAllowed, OperationCancelled, OperationFailed
from distop.protocol.json_codec import SCHEMA_VERSION, from_rfc3339
from distop.protocol.records import State
from distop.protocol.texts import shown
from distop.protocol.work_done import WorkDone

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from distop.protocol.records import History


T = TypeVar("T")


def _seconds(started: str, finished: str) -> float:
    try:
        return max(0.0, from_rfc3339(finished) - from_rfc3339(started))
    except ValueError:
        return 0.0


_LOG_FOLLOWS = "; the end of its log:"


def first_line(text: Any) -> str:
    """The first line of an error; the others are a traceback or the end of a log."""
    return str(text or "").strip().partition("\n")[0].rstrip().removesuffix(_LOG_FOLLOWS)


def parsed(model: Any, value: Any, what: str) -> Any:
    """Convert a report or result to this pydantic model; None stays None, because a failed operation may have none.

    Raises InvalidArgument with one sentence; ``what`` names the value in it.
    """
    check_model(model)
    if value is None or isinstance(value, model):
        return value
    try:
        return model.model_validate(value)
    except Exception as error:
        found = error.errors() if hasattr(error, "errors") else []
        where = ".".join(map(str, found[0].get("loc", ()))) if found else ""
        wrong = f"{f'at {where}: ' if where else ''}{found[0].get('msg')}" if found else first_line(error)
        raise InvalidArgument(f"{what} does not fit {model.__name__}: {wrong}") from error


def check_model(model: Any) -> None:
    """Raises InvalidArgument for a value that is not a pydantic model."""
    if not (isinstance(model, type) and hasattr(model, "model_validate")):
        raise InvalidArgument(f"a report can only be read as a pydantic model, not as {shown(model)}")


@dataclass(frozen=True, slots=True)
class OperationResult:
    """How an operation ended.

    ``state``: success, failed or cancelled. ``report``: what the behavior's completion returned. ``jobs``: ``total``,
    ``success`` and ``failed``. ``errors``: the first few, each ``{"partition": name or None, "text": …}``, with
    ``"verdict": True`` if a result or the report has the details. ``seconds``: from the start to the finish by the
    executors' clocks. ``record``: the whole history record.
    """

    state: str
    report: Any
    jobs: Mapping[str, int]
    errors: tuple[Mapping[str, Any], ...]
    seconds: float
    op: str
    record: Mapping[str, Any] = field(default_factory=dict, repr=False, compare=False)

    @classmethod
    def of(cls, history: History) -> OperationResult:
        """The result in a history record."""
        return cls(
            str(history.state),
            history.report,
            {"total": history.total, "success": history.success, "failed": history.failed},
            history.errors,
            _seconds(history.started, history.finished),
            history.op,
            history.to_json(),
        )

    @property
    def success(self) -> bool:
        """Whether the operation ended as success."""
        return self.state == State.SUCCESS

    @property
    def work(self) -> WorkDone | None:
        """How much was done, and how much of it was committed and stays; None if the report does not have it."""
        data = self.report.get("work") if isinstance(self.report, dict) else None
        return WorkDone.from_json(data) if isinstance(data, dict) else None

    @property
    def alarm(self) -> str:
        """A problem that needs attention, or "": a prepared operation was not confirmed, and never ran."""
        return str(self.record.get("alarm") or "")

    def sentence(self) -> str:
        """How it ended, in one line for people."""
        jobs = self.jobs
        text = f"{self.op} ended as {self.state}"
        if self.state == State.FAILED and jobs.get("failed"):
            text += f": {jobs['failed']} of {jobs['total']} jobs failed"
        cancel = self.record.get("cancel") or {}
        if self.state == State.CANCELLED and cancel.get("text"):
            text += f": {cancel['text']}"
        if self.errors:
            first = self.errors[0]
            where = f"partition {first['partition']}: " if first.get("partition") else ""
            line = first_line(first.get("text"))
            text += f" ({where}{line})" if ": " in text else f": {where}{line}"
        return text

    def report_as(self, model: type[T]) -> T | None:
        """The report as the behavior's Report, or another pydantic model that it fits; None if there is no report.

        Raises InvalidArgument.
        """
        found: T | None = parsed(model, self.report, f"the report of {self.op}")
        return found

    def certificate(self) -> Mapping[str, Any]:
        """The certificate of a validation: the checks that hold, and for which version of the table.

        ``apply``, and ``since`` of the next validation, name this operation (``op``), and the executor reads its
        certificate from the history. Raises NotAllowed, with the reason, if there is none.
        """
        report = self.report if isinstance(self.report, dict) else {}
        found = report.get("certificate")
        if isinstance(found, dict):
            return found
        why = report.get("uncertified") if self.success else f"it ended as {self.state}"
        raise NotAllowed(f"{self.op} has no certificate: {why or 'operations of its type issue none'}")

    def raise_for_state(self) -> OperationResult:
        """Return this result if the operation succeeded.

        Raises OperationFailed or OperationCancelled, with the report, otherwise.
        """
        if self.state == State.CANCELLED:
            raise OperationCancelled(self.sentence(), self.report)
        if not self.success:
            raise OperationFailed(self.sentence(), self.report)
        return self


@dataclass(frozen=True, slots=True)
class OperationStatus:
    """The current status of an operation.

    ``state``: as in its key. ``stage`` has more detail: planning, open, pausing (jobs still run), paused, cancelling,
    completing, cleaning, or ``ended``. ``jobs``: ``total`` (None before the plan), ``success``, ``failed``,
    ``running``, ``waiting`` (for a retry). ``exact`` False: there are too many jobs to distinguish failed from
    successful ones, and ``success`` counts both. ``progress``: the fraction of ended jobs, 0 to 1. ``eta_seconds``: an
    estimate from the pace since work last started; None while the operation waits, or without an estimate.
    ``waiting_for``: why there is no progress, or None. ``errors``: the first few errors of attempts that are retried.
    ``failed``: the ordinals of failed jobs so far, as ranges; only the first of them if ``failed_truncated``, and none
    if ``exact`` is False. ``labels``: the caller's. ``id``: the operation's id, or "". ``doing``: the status of jobs
    that have run for a while, each ``{"executor": id, "text": …}``, some seconds old. ``work``: how much is done, some
    seconds old, or None if the plan has no files: ``files`` and ``bytes``, ``of_files`` and ``of_bytes`` (None:
    unknown), ``files_per_second`` and ``bytes_per_second`` (None: unknown), and what is committed so far: ``commits``,
    ``committed_files``, ``committed_bytes``. During planning and completion it is their work. ``request_id``,
    ``submitter`` and ``rerun_of`` are those of the start.
    """

    op: str
    state: str
    stage: str
    jobs: Mapping[str, int | None]
    started: str
    progress: float = 0.0
    eta_seconds: float | None = None
    waiting_for: str | None = None
    cancel: Mapping[str, str] | None = None
    errors: tuple[Mapping[str, Any], ...] = ()
    exact: bool = True
    result: OperationResult | None = None
    """The result, once the operation has ended."""
    failed: str = ""
    failed_truncated: bool = False
    request_id: str = ""
    request_digest: str = field(default="", repr=False)
    submitter: str = ""
    rerun_of: str = ""
    labels: Mapping[str, str] = field(default_factory=dict)
    id: str = ""
    doing: tuple[Mapping[str, str], ...] = ()
    work: Mapping[str, Any] | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    """The given ones of priority, limits, failure budget and selector."""
    by: str = ""
    """The user who started it, if not the submitter."""
    actions: Mapping[str, Any] = field(default_factory=dict)
    """The fields ``actions`` and ``actions_dropped`` of the record, if users have changed the operation."""

    @property
    def ended(self) -> bool:
        """Whether the operation has a history record."""
        return self.result is not None

    def to_json(self) -> dict[str, Any]:
        """The fields for ``--json``.

        For an ended operation: its history record. Before: the known fields of that record, and the current status.
        """
        if self.result is not None:
            return dict(self.result.record)
        data: dict[str, Any] = {
            "v": SCHEMA_VERSION,
            "op": self.op,
            "state": self.state,
            "stage": self.stage,
            "started": self.started,
            "finished": None,
            "jobs": dict(self.jobs),
            "progress": round(self.progress, 4),
            "eta_seconds": None if self.eta_seconds is None else round(self.eta_seconds, 1),
            "waiting_for": self.waiting_for,
            "doing": [dict(d) for d in self.doing],
            "work": dict(self.work) if self.work is not None else None,
            "cancel": dict(self.cancel) if self.cancel else None,
            "report": None,
            "errors": [dict(e) for e in self.errors],
            "failed": self.failed,
            "exact": self.exact,
            "request_id": self.request_id,
            "request_digest": self.request_digest,
            "submitter": self.submitter,
        }
        if self.failed_truncated:
            data["failed_truncated"] = True
        for name in ("rerun_of", "id", "by"):
            if value := getattr(self, name):
                data[name] = value
        if self.options:
            data["options"] = dict(self.options)
        if self.labels:
            data["labels"] = dict(self.labels)
        return {**data, **self.actions}


@dataclass(frozen=True, slots=True)
class Transaction:
    """The outcome of a caller's transaction that starts operations.

    ``committed``: its compares held; then ``operations`` has its handles, in their order. ``answers``: etcd's answers
    to the caller's own operations (those of ``failure`` if it was not committed). ``earlier``: an earlier call with the
    same request id had applied this branch; there are no answers then, nor if an answer was lost. ``revision``: that of
    the commit; 0 if unknown.
    """

    committed: bool
    operations: Sequence[Any]
    answers: tuple[Any, ...] = ()
    earlier: bool = False
    revision: int = 0
