"""The certificate of a validation: the checks that it has proved for a version of a table. Plain values.

An ``apply`` names the validation, and the executor reads the certificate from its history record. The digest detects
accidental changes. The signature of the history record proves that an executor has written it, if executors have a key
(``certificate-key-file``).
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
"""Maximum bytes of a report with its certificate; less than the limits of a report and of an argument that has it."""

TYPES = ("validate",)
"""Operation types whose reports have certificates. A caller may choose the report of any other type."""
ROW_KINDS = ("not_null", "range", "fits", "check", "in_set", "length", "matches")
"""Checks of single rows: new rows do not change the result for the old ones."""

_OF_SOME_FORMATS = ("types", "files_digest")
"""Fields that only certificates of some formats have."""


class Column(BaseModel):
    """A column or nested field of a format with field ids: its id, and its type without inner fields."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    id: int
    type: str


class Certified(BaseModel):
    """A check without violations, with the numbers of files that statistics and a scan have decided."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str
    check: dict[str, Any]
    violations: Literal[0] = 0
    files_statistics: int = 0
    files_scanned: int = 0


class Certificate(BaseModel):
    """The proof that checks of a version of a table are valid.

    ``version``: the planned version of the table. A format with versions also has ``uuid`` (the table's), ``metadata``
    (the planned metadata file), ``schema_id``, and ``columns``: the checked columns and their inner fields, by name.
    Other formats have ``files`` (the path of the list of files, below the shared directory), ``files_digest`` (its
    digest), and ``partition_types``; or, if a catalog declares the columns, ``types``: the types of the checked
    columns, as JSON.

    ``rows``: the number of validated rows, including those of the certificate of ``since``; null if they were not
    counted.
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
    def _check_digest(cls, data: Any) -> Any:
        if isinstance(data, dict) and isinstance(data.get("digest"), str):
            try:
                fits = data["digest"] == digest_of(data)
            except (TypeError, ValueError):
                fits = False
            if not fits:
                whose = f"the certificate of {data.get('operation')}"
                text = f"{whose} was changed after it was issued: its digest does not match"
                raise PydanticCustomError("certificate", "{text}", {"text": text})
        return data

    @classmethod
    def issue(cls, **fields: Any) -> Certificate:
        """A certificate with these fields and their digest."""
        draft = cls.model_construct(digest="", **fields).model_dump(mode="json")
        return cls.model_validate({**draft, "digest": digest_of(draft)})

    def size(self) -> int:
        """Its size in bytes of JSON."""
        return len(json.dumps(self.model_dump(mode="json")))


def certificate_of(operation: str, table: str, ctx: JobContext) -> Certificate:
    """The certificate of a validation of this table, from its history record.

    Raises InvalidArgument if there is none. It does not read history records of other tables, which the caller may not
    be allowed to see.
    """
    if operation.rpartition("/")[0].rpartition("/")[0] != table:
        raise InvalidArgument(
            f"{shown(operation)} is not a validation of the table {table!r}: name one, such as {table}/validate/7"
        )
    record = ctx.history_record(operation)
    if not re.fullmatch(rf"[^/]+/({'|'.join(TYPES)})/[0-9]+", operation) or record.get("op") != operation:
        raise InvalidArgument(f"{operation!r} is not a validation: name one, such as table/validate/7")
    report = record.get("report")
    found = report.get("certificate") if isinstance(report, dict) else None
    if record.get("state") != "success" or not isinstance(found, dict):
        why = report.get("uncertified") if isinstance(report, dict) else None
        raise InvalidArgument(f"{operation} has no certificate: {why or 'it ended as ' + str(record.get('state'))}")
    try:
        certificate = Certificate.model_validate(found)
    except ValidationError as error:
        raise InvalidArgument(f"cannot read the certificate of {operation}: {error.errors()[0]['msg']}") from None
    if certificate.operation != operation:
        raise InvalidArgument(
            f"the history record of {operation} has the certificate of {shown(certificate.operation)}"
        )
    return certificate


def digest_of(data: dict[str, Any]) -> str:
    """The digest of a certificate's JSON, computed without its field ``digest``.

    Empty fields of ``_OF_SOME_FORMATS`` do not count.
    """
    rest = {name: value for name, value in data.items() if name != "digest" and (name not in _OF_SOME_FORMATS or value)}
    text = json.dumps(rest, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return f"blake2b-{hashlib.blake2b(text.encode(), digest_size=16).hexdigest()}"


def columns_in_expression(expression: str, names: list[str]) -> list[str]:
    """The names that an expression may use as columns: all that it uses, and perhaps some more.

    An expression contains each of its columns, in any case, and between backticks if it is not a plain word.
    """
    text = folded(expression.replace("``", "`"))
    found = []
    for name in names:
        wanted = folded(name)
        plain = re.fullmatch(r"\w+", wanted) is not None
        if re.search(rf"(?<!\w){re.escape(wanted)}(?!\w)", text) if plain else wanted in text:
            found.append(name)
    return found
