"""Issues certificates for valid tables, and plans only what is new since a certificate."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import islice
from typing import TYPE_CHECKING, Any

from distop.behavior import PartitionPlan, TableUnavailable
from distop.clock import time
from distop.errors import InvalidArgument, UnsafePath
from distop.protocol.json_codec import rfc3339
from distop.tables import reader_of, registered_types
from distop.tables.reading.file_facts import Ambiguous, match, of_json, split_path
from distop_behaviors.validate.certificate import (
    MAX_BYTES,
    ROW_KINDS,
    Certificate,
    Certified,
    Column,
    certificate_of,
    columns_in_expression,
)
from distop_behaviors.validate.file_lists import (
    certified_files,
    file_entries,
    file_list_path,
    read_list,
    write_file_list,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping, Sequence

    from distop.behavior import JobContext, Planned, Summary, TableRecord
    from distop.tables.reader import Reader
    from distop.tables.table_version import TableVersion
    from distop_behaviors.validate.validate_argument import Argument, Check
    from distop_behaviors.validate.validate_report import ValidateReport

    File = tuple[str, int, int | str]

NOTHING_NEW = "nothing-new"
"""The name of the only partition, without files, if a table of a format with versions has no new files."""


class Uncertified(Exception):
    """The reason why a valid report has no certificate."""


# --------------------------------------------------------------------- issuing


def certify(
    argument: Argument,
    report: ValidateReport,
    table: TableRecord,
    summary: Summary,
    ctx: JobContext,
    *,
    by_executors: bool = True,
) -> None:
    """Add the certificate to a valid report, or the reason why there is none.

    ``by_executors``: whether executors ran all jobs. An actor's results are not a proof.
    """
    try:
        if not by_executors:
            raise Uncertified("actors returned some of its jobs, so no executor has read the rows of these")
        report.certificate = _certificate(argument, report, table, summary, ctx)
    except Uncertified as error:
        ctx.log.info("Issued no certificate for a valid table: %s", error)
        report.uncertified = str(error)


def _certificate(
    argument: Argument, report: ValidateReport, table: TableRecord, summary: Summary, ctx: JobContext
) -> Certificate:
    if not summary.whole or len(report.checks) != len(argument.checks):
        raise Uncertified("only some of the table's partitions were validated")
    if not summary.version:
        raise Uncertified("its plan has no version of the table")
    before: int | None = 0
    if argument.since is not None:
        try:
            before = certificate_of(argument.since, table.name, ctx).rows
        except InvalidArgument as error:
            raise Uncertified(str(error)) from error
    certificate = Certificate.issue(
        table=table.name,
        format=table.format,
        location=table.location,
        operation=ctx.operation,
        since=argument.since,
        time=rfc3339(time.time()),
        version=summary.version,
        where=argument.where,
        null_is=argument.null_is,
        checks=[
            Certified(
                name=check.name,
                check=check.check,
                files_statistics=check.evidence.files_statistics,
                files_scanned=check.evidence.files_scanned,
            )
            for check in report.checks
        ],
        rows=None if before is None or report.rows is None else before + report.rows,
        **_of_table(argument, table, summary, ctx),
    )
    size = certificate.size() + len(report.model_dump_json())
    if size > MAX_BYTES:
        raise Uncertified(f"the report with its certificate has {size} bytes, but at most {MAX_BYTES} are allowed")
    return certificate


def _of_table(argument: Argument, table: TableRecord, summary: Summary, ctx: JobContext) -> dict[str, Any]:
    """The certificate's fields that identify the planned version of the table."""
    try:
        reader = reader_of(table, [*islice(summary.partitions(), 1)])
        version = reader.version
    except (InvalidArgument, TableUnavailable) as error:
        raise Uncertified(f"the planned version of the table cannot be read any more: {error}") from error
    if version is None:
        return _of_files(argument, table, reader, summary, ctx)
    if version.version != summary.version:
        raise Uncertified(f"another table has replaced the one whose version {summary.version} was planned")
    return {
        "uuid": version.table_id,
        "metadata": version.metadata_file,
        "schema_id": version.schema_id,
        "columns": columns_below(version, checked_columns(argument, version.names())),
    }


def columns_below(version: TableVersion, tops: Collection[str]) -> dict[str, Column]:
    """These top-level columns and all fields inside them, by their dotted names."""
    return {name: Column(id=field.id, type=field.type) for name, field in version.fields(tops).items()}


def checked_columns(argument: Argument, names: Sequence[str]) -> set[str]:
    """The top-level columns that the checks and ``where`` use, and perhaps some more."""
    found: set[str] = set()
    for check in argument.checks:
        found.update(_columns_of_check(check, names))
    if argument.where is not None:
        found.update(columns_in_expression(argument.where, list(names)))
    return found


def _columns_of_check(check: Check, names: Sequence[str]) -> list[str]:
    if not check.column:
        text = json.dumps(check.as_given(), ensure_ascii=False) if check.check is None else check.check
        return columns_in_expression(text, list(names))
    try:
        found = match(check.column, names) or match(split_path(check.column)[0], names)
    except Ambiguous as error:
        raise Uncertified(str(error)) from error
    return [found] if found is not None else []


def _columns_of(reader: Reader) -> dict[str, Any] | None:
    """The columns that a catalog declares, with partition columns; None without such a catalog."""
    found = reader.columns()
    return None if found is None else {**found, **reader.partition_columns()}


def _of_files(
    argument: Argument, table: TableRecord, reader: Reader, summary: Summary, ctx: JobContext
) -> dict[str, Any]:
    columns = _columns_of(reader)
    try:
        if argument.since is None:
            digest = write_file_list(summary.version, lambda: file_entries(summary.partitions(), reader), ctx)
        else:
            since = certificate_of(argument.since, table.name, ctx)
            digest = _checked_file_list(since, table, reader, summary, ctx)
    except (OSError, InvalidArgument) as error:
        raise Uncertified(f"cannot store the list of its files: {error}") from error
    of_files = {"files": file_list_path(table.name, summary.version), "files_digest": digest}
    if columns is None:
        return {**of_files, "partition_types": registered_types(table)}
    named = checked_columns(argument, list(columns))
    return {**of_files, "types": {name: columns[name] for name in columns if name in named}}


def _checked_file_list(
    since: Certificate, table: TableRecord, reader: Reader, summary: Summary, ctx: JobContext
) -> str:
    """The digest of the list that planning has written, after a check of each file in it.

    The plan has only new files, and other users may have replaced the list in the shared directory. So each file of the
    list must be in the certificate ``since`` or in the plan. Raises InvalidArgument and OSError.
    """
    files, digest = read_list(table.name, summary.version, ctx)
    unknown = set(files).difference(certified_files(since, ctx), file_entries(summary.partitions(), reader))
    if unknown:
        raise InvalidArgument(
            f"it has the file {min(unknown)[0]!r}, which is neither certified by {since.operation} nor validated by "
            "this operation"
        )
    return digest


# ----------------------------------------------------------------------- since


def plan_new_files(certificate: Certificate, planned: Planned, table: TableRecord, ctx: JobContext) -> Planned:
    """The part of a plan of the whole table that the certificate does not cover.

    Raises InvalidArgument if the table's columns have changed since, or if the certificate's list of files is missing.
    """
    reader = reader_of(table.extended(planned.options), planned.partitions)
    version = reader.version
    if (version is not None) != (certificate.uuid is not None):
        raise InvalidArgument(
            f"the format of the table {table.name!r} has changed since {certificate.operation}: validate the whole "
            "table"
        )
    if version is None:
        check_types(certificate, _columns_of(reader) or {})
        before = frozenset(certified_files(certificate, ctx))
        try:
            write_file_list(planned.version, lambda: file_entries(planned.partitions, reader), ctx)
        except (OSError, UnsafePath) as error:
            ctx.log.warning("Cannot store the list of files; this validation will have no certificate: %s", error)
        return _filtered(planned, lambda file, name: ((*file, name) if reader.moves else file) not in before)
    check_columns(certificate, version)
    new = version.new_files(certificate.version, ctx.check_cancelled)
    if new is None:
        ctx.log.info("Cannot determine which files are new since the certificate; validating all files")
        return planned
    paths = {path for path, _, _ in new}
    left = _filtered(planned, lambda file, _: file[0] in paths)
    if left.partitions:
        return left
    nothing = replace(planned.partitions[0], partition=0, name=NOTHING_NEW, bytes=0, files=(), values={})
    return replace(planned, partitions=[nothing])


def _filtered(planned: Planned, wanted: Callable[[File, str], bool]) -> Planned:
    left: list[PartitionPlan] = []
    for partition in planned.partitions:
        files = tuple(file for file in partition.files if wanted(file, partition.name))
        if files:
            size = sum(file[1] for file in files)
            left.append(replace(partition, partition=len(left), files=files, bytes=size))
    return replace(planned, partitions=left)


def check_same_checks(certificate: Certificate, argument: Argument) -> None:
    """Raises InvalidArgument for checks that the certificate lacks, or that depend on all rows."""
    whose = f"the certificate of {certificate.operation}"
    if argument.where != certificate.where:
        raise InvalidArgument(f"'where' differs from {whose}: use the same, or leave 'since' out")
    certified = [c.check for c in certificate.checks]
    for check, name in zip(argument.checks, argument.names(), strict=True):
        if check.kind not in ROW_KINDS:
            raise InvalidArgument(f"{name}: {check.kind!r} depends on all rows of the table: leave 'since' out")
        if check.as_given() not in certified:
            raise InvalidArgument(f"{name}: {whose} does not have this check: leave 'since' out")
        if check.kind == "check" and argument.null_is != certificate.null_is:
            raise InvalidArgument(f"'null_is' differs from {whose}: use the same, or leave 'since' out")


def check_table(certificate: Certificate, table: TableRecord) -> None:
    """Raises InvalidArgument unless the certificate belongs to this table with its current registration."""
    if certificate.table != table.name:
        raise InvalidArgument(
            f"the certificate of {certificate.operation} belongs to the table {certificate.table!r}, not {table.name!r}"
        )
    types = registered_types(table)
    if (certificate.format, certificate.location, certificate.partition_types) != (table.format, table.location, types):
        raise InvalidArgument(
            f"the registered format, location or partition columns of the table {table.name!r} have changed since "
            f"{certificate.operation}: validate the whole table"
        )


def check_types(certificate: Certificate, columns: Mapping[str, Any]) -> None:
    """Raises InvalidArgument if the catalog's columns differ from the columns of the certificate."""
    since = f"since {certificate.operation}: validate the whole table"
    for name, kind in certificate.types.items():
        if name not in columns:
            raise InvalidArgument(f"the column {name!r} was dropped or renamed {since}")
        if of_json(columns[name]) != of_json(kind):
            raise InvalidArgument(f"the type of {name!r} was changed {since}")


def check_columns(certificate: Certificate, version: TableVersion) -> None:
    """Raises InvalidArgument if the table was replaced, or its columns differ from the certificate's."""
    since = f"since {certificate.operation}: validate the whole table"
    if version.table_id != certificate.uuid:
        raise InvalidArgument(f"the table {certificate.table!r} was replaced by another table {since}")
    tops = {name for name in certificate.columns if not any(name.startswith(f"{c}.") for c in certificate.columns)}
    now = version.fields(tops)
    for name, column in certificate.columns.items():
        found = now.get(name)
        if found is not None and found.id == column.id:
            if found.type != column.type:
                raise InvalidArgument(f"the type of {name!r} was changed from {column.type} to {found.type} {since}")
            continue
        new_name = version.name_of(column.id)
        if new_name is not None:
            raise InvalidArgument(f"the column {name!r} was renamed to {new_name!r} {since}")
        other = " and another column was created with its name" if found is not None else ""
        raise InvalidArgument(f"the column {name!r} was dropped{other} {since}")
    if added := now.keys() - certificate.columns.keys():
        raise InvalidArgument(f"the field {min(added)!r} was added to a checked column {since}")
