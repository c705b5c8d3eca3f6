"""The certificate of a validation: what was proved, of which state of which table. Plain values.

Whoever changes the schema names the validation, and the executor reads the certificate from its history record. The
digest tells a change by accident. That nobody else has written it, the signature of the record shows, where executors
have a key (``certificate-key-file``).
"""

from __future__ import annotations

import hashlib
import json
import re
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator
from pydantic_core import PydanticCustomError

from distop.errors import InvalidArgument
from distop.protocol.texts import shown
from distop.tables.reading.file_facts import folded

if TYPE_CHECKING:
    from distop.behavior import JobContext

MAX_BYTES = 448 * 1024
"""Of a certificate with the report that it is in: both must fit where reports do, and it into an argument."""

TYPES = ("validate",)
"""Operation types whose reports have certificates: of any other, the caller may choose what is in its report."""
ROW_KINDS = ("not_null", "range", "fits", "check", "in_set", "length", "matches")
"""Checks that look at each row by itself: what held for some rows holds whatever comes beside them."""

_LATER = ("types", "files_digest")
"""Fields that certificates of the first releases do not have."""


class Column(BaseModel):
    """A column, or what is inside one, where the format gives it an id: this, and its type without what is in it."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    id: int
    type: str


class Certified(BaseModel):
    """A check that no row violated, and how many files were decided by statistics, and by a scan."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str
    check: dict[str, Any]
    violations: Literal[0] = 0
    files_statistics: int = 0
    files_scanned: int = 0


class Certificate(BaseModel):
    """``version``: the table's, as the plan had it. Of a format that keeps versions: ``uuid``, ``metadata`` (the file
    that was planned from), ``schema_id`` and ``columns``, by name those that the checks look at, with what is inside
    them. Of others: ``files``, where the list of the files stands, below the shared directory, ``files_digest``, its
    digest, and ``partition_types``; where a catalog declares the columns, ``types`` instead: those that it had for the
    columns looked at, as JSON.

    ``rows``: how many were looked at, by this operation and by those ``since`` which it went on; null where they were
    not counted.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    v: Literal[1] = 1
    table: str
    format: str
    location: str
    operation: str
    since: str | None = None
    time: str
    version: str
    uuid: str | None = None
    metadata: str | None = None
    schema_id: int | None = None
    columns: dict[str, Column] = {}
    files: str | None = None
    files_digest: str | None = None
    partition_types: dict[str, str] = {}
    types: dict[str, Any] = {}
    where: str | None = None
    null_is: Literal["pass", "fail"] = "pass"
    checks: Annotated[list[Certified], Field(min_length=1)]
    rows: int | None = None
    digest: str

    @model_validator(mode="before")
    @classmethod
    def _as_it_was_issued(cls, data: Any) -> Any:
        if isinstance(data, dict) and isinstance(data.get("digest"), str):
            try:
                fits = data["digest"] == digest_of(data)
            except (TypeError, ValueError):
                fits = False
            if not fits:
                whose = f"the certificate of {data.get('operation')}"
                text = f"{whose} was changed after it was issued: it does not fit its digest"
                raise PydanticCustomError("certificate", "{text}", {"text": text})
        return data

    @classmethod
    def issue(cls, **fields: Any) -> Certificate:
        """One with these fields, and their digest."""
        draft = cls.model_construct(digest="", **fields).model_dump(mode="json")
        return cls.model_validate({**draft, "digest": digest_of(draft)})

    def size(self) -> int:
        """Bytes of its JSON."""
        return len(json.dumps(self.model_dump(mode="json")))


def certificate_of(operation: str, table: str, ctx: JobContext) -> Certificate:
    """The certificate of a validation of this table, from its history record. Raises InvalidArgument where it has none.

    History is not asked about another table: whoever may only use this one learns nothing of that.
    """
    if operation.rpartition("/")[0].rpartition("/")[0] != table:
        raise InvalidArgument(
            f"{shown(operation)} is no validation of the table {table!r}: name one, such as {table}/validate/7"
        )
    record = ctx.history_record(operation)
    if not re.fullmatch(rf"[^/]+/({'|'.join(TYPES)})/[0-9]+", operation) or record.get("op") != operation:
        raise InvalidArgument(f"{operation!r} is no validation: name one, such as table/validate/7")
    report = record.get("report")
    found = report.get("certificate") if isinstance(report, dict) else None
    if record.get("state") != "success" or not isinstance(found, dict):
        why = report.get("uncertified") if isinstance(report, dict) else None
        raise InvalidArgument(f"{operation} has no certificate: {why or 'it ended as ' + str(record.get('state'))}")
    try:
        certificate = Certificate.model_validate(found)
    except ValidationError as error:
        raise InvalidArgument(f"the certificate of {operation} cannot be read: {error.errors()[0]['msg']}") from None
    if certificate.operation != operation:
        raise InvalidArgument(f"the certificate in the history record of {operation} is of another operation")
    return certificate


def digest_of(data: dict[str, Any]) -> str:
    """The digest of a certificate's JSON, without the one that it has, and without empty fields of ``_LATER``: so one
    that was issued before there were any keeps its own.
    """
    rest = {name: value for name, value in data.items() if name != "digest" and (name not in _LATER or value)}
    text = json.dumps(rest, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return f"blake2b-{hashlib.blake2b(text.encode(), digest_size=16).hexdigest()}"


def named_in(expression: str, names: list[str]) -> list[str]:
    """Those of the names that an expression may mean, and perhaps some that it does not: a column that it looks at is
    written in it, whatever its case, and between backticks if it is no plain word.
    """
    text = folded(expression.replace("``", "`"))
    found = []
    for name in names:
        wanted = folded(name)
        plain = re.fullmatch(r"\w+", wanted) is not None
        if re.search(rf"(?<!\w){re.escape(wanted)}(?!\w)", text) if plain else wanted in text:
            found.append(name)
    return found
