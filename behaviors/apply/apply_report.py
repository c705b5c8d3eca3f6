"""The argument of ``apply``, what its job answers, and its report."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from distop.errors import InvalidArgument
from distop_behaviors.validate.certificate import Certificate, certificate_of
from distop_behaviors.validate.validate_argument import Argument as Checks
from distop_behaviors.validate.validate_report import Answer, CheckReport, combine

if TYPE_CHECKING:
    from distop.behavior import JobContext

LONGEST_SETTLING = 86_400.0
SAMPLE = 10
"""Violating rows that are shown of a check."""


class Argument(BaseModel):
    """Whose certificate, and for how many seconds after the change what is still committed is looked at."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    certificate: Annotated[str, Field(min_length=1, description="the validation that has it: table/validate/7")]
    settle_seconds: Annotated[float, Field(ge=0, le=LONGEST_SETTLING)] = 10.0


@dataclass(frozen=True, slots=True)
class Request:
    """An argument with the certificate itself, as the executor has read it from history."""

    certificate: Certificate
    settle_seconds: float


def request_of(argument: Argument, ctx: JobContext) -> Request:
    """Raises InvalidArgument where the operation has no certificate, or its record is not accepted."""
    if ctx.table is None:
        raise InvalidArgument("a certificate is applied to the table that was validated: name it")
    return Request(certificate_of(argument.certificate, ctx.table.name, ctx), argument.settle_seconds)


class Made(BaseModel):
    """What became of one check: its ``column`` is required, or of another ``type``, or its ``property`` is set."""

    check: str
    column: str | None = None
    property: str | None = None
    type: str | None = None
    before: Literal["same", "other"]
    """``same``: it was so before."""


class Staged(BaseModel):
    """How much was written anew that is no part of the table yet. Where it lies follows from the operation and the
    attempt (:mod:`distop_behaviors.apply.file_rewrite`).
    """

    model_config = ConfigDict(extra="forbid")

    files: Annotated[int, Field(ge=0)] = 0
    rows: Annotated[int, Field(ge=0)] = 0
    bytes: Annotated[int, Field(ge=0)] = 0


class Rewritten(BaseModel):
    """``files``, ``rows`` and ``bytes``: what the table was rewritten into; ``late``: how many files were that somebody
    had begun before the change and committed after it.
    """

    files: int = 0
    rows: int = 0
    bytes: int = 0
    late: int = 0


class Outcome(BaseModel):
    """``snapshot``: the last that was judged. ``rounds``: how often the table was judged before the change. ``files``
    and ``rows``: what of it was looked at here, being new since the certificate. ``reverted``: the change was made, and
    taken back. ``answer``: of the files that were looked at last, what validate says of a partition. ``staged``: of a
    job that rewrites a partition.
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


class Report(BaseModel):
    """As :class:`Outcome`. ``certificate``: the operation that it is of. ``checks``: those on the new files."""

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
    """The certificate's checks as validate takes them."""
    checks = [{**certified.check, "name": certified.name} for certified in certificate.checks]
    return Checks.model_validate(
        {"checks": checks, "where": certificate.where, "null_is": certificate.null_is, "sample": SAMPLE}
    )


def report_of(certificate: Certificate, outcome: Outcome, partition: str) -> Report:
    """The report of the operation's one job."""
    checks: list[CheckReport] = []
    if outcome.answer is not None:
        result = Answer.model_validate(outcome.answer).root
        # Where a column was when the certificate was issued, it may be in none of the new files.
        checks = combine(checks_of(certificate), [(partition, result)], complete=True).checks
    fields = outcome.model_dump(exclude={"answer", "staged"})
    return Report(certificate=certificate.operation, checks=checks, **fields)
