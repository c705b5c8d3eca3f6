"""The argument of ``apply``, the outcome of its job, and its report (a contract)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from distop.errors import InvalidArgument
from distop.storage.stage_manifest import StagedOutput
from distop_behaviors.validate.certificate import Certificate, certificate_of
from distop_behaviors.validate.partition_result import Answer
from distop_behaviors.validate.validate_argument import Argument as Checks
from distop_behaviors.validate.validate_report import CheckReport, combine

if TYPE_CHECKING:
    from distop.behavior import JobContext

LONGEST_SETTLING = 86_400.0
SAMPLE = 10
"""Maximum number of violating rows in the report of a check."""


class ApplyArgument(BaseModel):
    """The validation with the certificate, and how long late commits are validated."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    certificate: Annotated[
        str, Field(min_length=1, description="the validation with the certificate, such as table/validate/7")
    ]
    settle_seconds: Annotated[float, Field(ge=0, le=LONGEST_SETTLING)] = 10.0


@dataclass(frozen=True, slots=True)
class CertifiedArgument:
    """An argument with the certificate, which the executor has read from history."""

    certificate: Certificate
    settle_seconds: float


def request_of(argument: ApplyArgument, ctx: JobContext) -> CertifiedArgument:
    """The request of an argument. Raises InvalidArgument if the operation has no accepted certificate."""
    if ctx.table is None:
        raise InvalidArgument("apply needs a table: start it on the table that was validated")
    return CertifiedArgument(certificate_of(argument.certificate, ctx.table.name, ctx), argument.settle_seconds)


class Made(BaseModel):
    """The change for one check: its ``column`` is required or has another ``type``, or its ``property`` is set."""

    check: str
    column: str | None = None
    property: str | None = None
    type: str | None = None
    before: Literal["same", "other"]
    """``same``: the schema already had it. ``other``: apply has changed it."""


class Staged(BaseModel):
    """The amount of rewritten data that is not yet part of the table.

    The operation and the attempt determine its location (:mod:`distop_behaviors.apply.file_rewrite`). ``output``: the
    commit of the manifest with all files; None if there are no files, and for files that a completion has written.
    """

    model_config = ConfigDict(extra="forbid")

    files: Annotated[int, Field(ge=0)] = 0
    rows: Annotated[int, Field(ge=0)] = 0
    bytes: Annotated[int, Field(ge=0)] = 0
    output: StagedOutput | None = None


class Rewritten(BaseModel):
    """The amount of rewritten data in the table.

    ``late``: the number of rewritten files of late commits, by writers that started before the change.
    """

    files: int = 0
    rows: int = 0
    bytes: int = 0
    late: int = 0


class ApplyOutcome(BaseModel):
    """The outcome of a job or completion of ``apply``.

    ``snapshot``: the last validated snapshot. ``rounds``: the number of attempts to change the schema. ``files`` and
    ``rows``: how much was validated here, because it is newer than the certificate. ``reverted``: the change was made
    and reverted. ``answer``: the result of ``validate`` for the files that were validated last. ``staged``: for a job
    that rewrites a partition.
    """

    verdict: Literal["applied", "staged", "violated", "unknown", "error"] = "unknown"
    snapshot: str = ""
    rounds: int = 0
    files: int = 0
    rows: int = 0
    reverted: bool = False
    changes: list[Made] = []
    answer: dict[str, Any] | None = None
    staged: Staged | None = None
    rewritten: Rewritten | None = None


class ApplyReport(BaseModel):
    """The report: the fields of :class:`ApplyOutcome`, the certified operation, and the checks of the new files."""

    verdict: Literal["applied", "staged", "violated", "unknown", "error"]
    certificate: str
    snapshot: str
    rounds: int
    files: int
    rows: int
    reverted: bool
    changes: list[Made]
    rewritten: Rewritten | None = None
    checks: list[CheckReport] = []


def checks_of(certificate: Certificate) -> Checks:
    """The checks of a certificate as an argument of ``validate``."""
    checks = [{**certified.check, "name": certified.name} for certified in certificate.checks]
    return Checks.model_validate(
        {"checks": checks, "where": certificate.where, "null_is": certificate.null_is, "sample": SAMPLE}
    )


def report_of(certificate: Certificate, outcome: ApplyOutcome, partition: str) -> ApplyReport:
    """The report of an outcome."""
    checks: list[CheckReport] = []
    if outcome.answer is not None:
        result = Answer.model_validate(outcome.answer).root
        # All new files may lack columns that existed when the certificate was issued.
        checks = combine(checks_of(certificate), [(partition, result)], complete=True).checks
    fields = outcome.model_dump(exclude={"answer", "staged"})
    return ApplyReport(certificate=certificate.operation, checks=checks, **fields)
