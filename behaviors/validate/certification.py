"""Certificates at work: issuing one for a validation that ended valid, and planning what came since one."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import islice
from typing import TYPE_CHECKING, Any

from distop.behavior import PartitionPlan, TableUnavailable, is_wide
from distop.clock import time
from distop.errors import InvalidArgument, UnsafePath
from distop.protocol.json_codec import rfc3339
from distop.protocol.records import OperationRef
from distop.protocol.texts import shown
from distop.storage.deletion import read_regular, write
from distop.storage.files import gone, identity, local_path
from distop.storage.places import folder
from distop.tables import reader_of, registered_types
from distop.tables.reading.file_facts import Ambiguous, match, of_json, split_path
from distop_behaviors.validate.certificate import (
    MAX_BYTES,
    ROW_KINDS,
    Certificate,
    Certified,
    Column,
    certificate_of,
    digest_of,
    named_in,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

    from distop.behavior import JobContext, Planned, Summary, TableRecord
    from distop.storage.deletion import Place
    from distop.tables.reader import Reader
    from distop.tables.table_version import TableVersion
    from distop_behaviors.validate.validate_argument import Argument, Check
    from distop_behaviors.validate.validate_report import Report

    File = tuple[str, int, int]
    Entry = tuple[Any, ...]
    """A file in a list: its path, size and time, and its partition where that may be another one some day."""

NOTHING_NEW = "nothing-new"
"""The name of the one partition, without files, of a table to which nothing came, of a format that keeps versions."""
_FOLDER = "certificates"
_LIST_BYTES = 1 << 30
"""Of a list of files at most."""
KEPT_LISTS = 256
_written: dict[str, tuple[tuple[str, ...], str]] = {}
"""The lists of files that this process has written, as they then were, with their digests. A network's file system may
show one for a while that is gone: then a certificate names it, and going on from that says what to do.
"""


class Uncertified(Exception):
    """Why what is valid has no certificate."""


# --------------------------------------------------------------------- issuing


def certify(
    argument: Argument,
    report: Report,
    table: TableRecord,
    summary: Summary,
    ctx: JobContext,
    *,
    by_executors: bool = True,
) -> None:
    """Give a report that is valid its certificate, or the reason why it has none. ``by_executors``: they ran all jobs;
    what an actor returns is no proof.
    """
    try:
        if not by_executors:
            raise Uncertified("some of its jobs were returned by actors, and no executor has looked at their rows")
        report.certificate = _certificate(argument, report, table, summary, ctx)
    except Uncertified as error:
        ctx.log.info("there is no certificate: %s", error)
        report.uncertified = str(error)


def _certificate(
    argument: Argument, report: Report, table: TableRecord, summary: Summary, ctx: JobContext
) -> Certificate:
    if not summary.whole or len(report.checks) != len(argument.checks):
        raise Uncertified("only some of the table's partitions were looked at")
    if not summary.version:
        raise Uncertified("its plan tells no version of the table")
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
        raise Uncertified(f"the report would have {size} bytes with it, more than {MAX_BYTES}")
    return certificate


def _of_table(argument: Argument, table: TableRecord, summary: Summary, ctx: JobContext) -> dict[str, Any]:
    """What tells the state of the table that was planned from later ones."""
    try:
        reader = reader_of(table, [*islice(summary.partitions(), 1)])
        version = reader.version
    except (InvalidArgument, TableUnavailable) as error:
        raise Uncertified(f"what was planned from cannot be read any more: {error}") from error
    if version is None:
        return _of_files(argument, table, reader, summary, ctx)
    return {
        "uuid": version.table_id,
        "metadata": version.metadata_file,
        "schema_id": version.schema_id,
        "columns": columns_below(version, looked_at(argument, version.names())),
    }


def columns_below(version: TableVersion, tops: Collection[str]) -> dict[str, Column]:
    """These top-level columns with all that is inside them, by their dotted names."""
    return {name: Column(id=field.id, type=field.type) for name, field in version.fields(tops).items()}


def looked_at(argument: Argument, names: Sequence[str]) -> set[str]:
    """The top-level columns that the checks and ``where`` look at, and perhaps some more."""
    found: set[str] = set()
    for check in argument.checks:
        found.update(_looked_at_by(check, names))
    if argument.where is not None:
        found.update(named_in(argument.where, list(names)))
    return found


def _looked_at_by(check: Check, names: Sequence[str]) -> list[str]:
    if not check.column:
        text = json.dumps(check.as_given(), ensure_ascii=False) if check.check is None else check.check
        return named_in(text, list(names))
    try:
        found = match(check.column, names) or match(split_path(check.column)[0], names)
    except Ambiguous as error:
        raise Uncertified(str(error)) from error
    return [found] if found is not None else []


def _columns_of(reader: Reader) -> dict[str, Any] | None:
    """The columns that a catalog declares, with those of partitions; None where files alone have them."""
    found = reader.columns()
    return None if found is None else {**found, **reader.partition_columns()}


def _of_files(
    argument: Argument, table: TableRecord, reader: Reader, summary: Summary, ctx: JobContext
) -> dict[str, Any]:
    columns = _columns_of(reader)
    try:
        if argument.since is None:
            digest = keep_files(summary.version, lambda: _listed(summary.partitions(), reader), ctx)
        else:
            since = certificate_of(argument.since, table.name, ctx)
            digest = _carried_over(since, table, reader, summary, ctx)
    except (OSError, InvalidArgument) as error:
        raise Uncertified(f"the list of its files cannot be kept: {error}") from error
    of_files = {"files": _list_of(table.name, summary.version), "files_digest": digest}
    if columns is None:
        return {**of_files, "partition_types": registered_types(table)}
    named = looked_at(argument, list(columns))
    return {**of_files, "types": {name: columns[name] for name in columns if name in named}}


def _carried_over(since: Certificate, table: TableRecord, reader: Reader, summary: Summary, ctx: JobContext) -> str:
    """The digest of the list that planning has kept. Of what is not new the plan says nothing, and whoever may write
    into the shared directory may have replaced the list: each of its files has to be one of ``since``, or of the plan.
    Raises InvalidArgument, and OSError.
    """
    files, digest = _read_list(table.name, summary.version, ctx)
    unknown = set(files).difference(kept_files(since, ctx), _listed(summary.partitions(), reader))
    if unknown:
        raise InvalidArgument(
            f"it names {min(unknown)[0]!r}, which is neither certified by {since.operation} nor validated now"
        )
    return digest


def _listed(partitions: Iterable[PartitionPlan], reader: Reader) -> list[Entry]:
    """The files of a plan as their list has them; each with its partition, where that may be another one some day."""
    found: dict[Entry, str] = {}
    for partition in partitions:
        for file in partition.files:
            # Each once: a job may be over several partitions.
            if file not in found or not is_wide(partition.name):
                found[file] = partition.name
    return [(*file, name) for file, name in found.items()] if reader.moves else list(found)


def _list_of(table: str, version: str) -> str:
    """Where the list of the files of a table's version stands, below the shared directory.

    A plan names the version: it reaches no list of another table. Raises InvalidArgument.
    """
    if "/" in version:
        raise InvalidArgument(f"{shown(version)} is no version of the table {table!r}")
    return f"{_FOLDER}/{folder(table)}/{version}.json"


def keep_files(version: str, files: Callable[[], Iterable[Entry]], ctx: JobContext) -> str:
    """Write the list of a table's files to where certificates of this version say; its digest. Twice is once: ``files``
    is not asked for what this process has written, and nobody since. Raises what that raises, and OSError.
    """
    shared = _shared(ctx)
    name = _list_of(OperationRef.parse(ctx.operation).table, version)
    location = shared.below(name).location
    if location in _written and _written[location][0] == _standing(location):
        return _written[location][1]
    listed = sorted(list(file) for file in files())
    digest = digest_of({"files": listed})
    write(shared, name, json.dumps({"version": version, "files": listed, "digest": digest}).encode())
    # Of files alone the version tells what is in the list. Partitions' names depend on the argument as well: a job over
    # several has one of its own.
    if all(len(file) == 3 for file in listed) and (found := _standing(location)) is not None:
        if len(_written) >= KEPT_LISTS:
            _written.clear()
        _written[location] = found, digest
    return digest


def _standing(location: str) -> tuple[str, ...] | None:
    """What tells a list on a disk from one that replaces it; None of any other: of a URL its name is all there is."""
    found = identity(location)
    return found if local_path(location) is not None and found != gone(location) else None


def kept_files(certificate: Certificate, ctx: JobContext) -> list[Entry]:
    """The files of a certificate. Raises InvalidArgument where its list is gone, or is not the one of its digest."""
    if "/" in certificate.version or certificate.files != _list_of(certificate.table, certificate.version):
        raise InvalidArgument(
            f"the certificate of {certificate.operation} names {certificate.files!r}, which is no list of files of its "
            "version: validate the whole table"
        )
    if certificate.files_digest is None:
        raise InvalidArgument(
            f"the certificate of {certificate.operation} was issued by an earlier release of distop, without a digest "
            "of its list of files: validate the whole table"
        )
    try:
        files, digest = _read_list(certificate.table, certificate.version, ctx)
    except OSError as error:
        raise InvalidArgument(
            f"the list of files {certificate.files}, which the certificate of {certificate.operation} names, cannot be "
            f"read ({error}): validate the whole table"
        ) from error
    if digest != certificate.files_digest:
        raise InvalidArgument(
            f"the list of files {certificate.files} is not the one of the certificate of {certificate.operation}: "
            "validate the whole table"
        )
    return files


def _shared(ctx: JobContext) -> Place:
    if ctx.shared is None:
        raise FileNotFoundError("there is no shared directory: give the executors a --shared-dir")
    return ctx.shared


def _read_list(table: str, version: str, ctx: JobContext) -> tuple[list[Entry], str]:
    """The files of the list of a version, and the digest that they have. Raises InvalidArgument where it is no list of
    files of this version, and OSError.
    """
    name = _list_of(table, version)
    text = read_regular(_shared(ctx), name, _LIST_BYTES)
    if len(text) > _LIST_BYTES:
        raise InvalidArgument(f"the list of files {name} has more than {_LIST_BYTES} bytes: validate the whole table")
    try:
        told = json.loads(text)
        if told["version"] == version:
            digest = digest_of({"files": told["files"]})
            return [(str(f[0]), int(f[1]), int(f[2]), *map(str, f[3:])) for f in told["files"]], digest
    except (ValueError, LookupError, TypeError) as error:
        raise InvalidArgument(f"the list of files {name} cannot be read ({error}): validate the whole table") from error
    raise InvalidArgument(f"the list of files {name} is one of another version: validate the whole table")


# ----------------------------------------------------------------------- since


def what_is_new(certificate: Certificate, planned: Planned, table: TableRecord, ctx: JobContext) -> Planned:
    """What the certificate does not cover of a plan of its whole table.

    Raises InvalidArgument where its columns are not the table's any more, or what it names is gone.
    """
    reader = reader_of(table.extended(planned.options), planned.partitions)
    version = reader.version
    if (version is not None) != (certificate.uuid is not None):
        raise InvalidArgument(
            f"the table {table.name!r} is of another format than when {certificate.operation} was run: validate it as "
            "a whole"
        )
    if version is None:
        check_types(certificate, _columns_of(reader) or {})
        before = frozenset(kept_files(certificate, ctx))
        try:
            keep_files(planned.version, lambda: _listed(planned.partitions, reader), ctx)
        except (OSError, UnsafePath) as error:
            ctx.log.warning("the list of files cannot be kept, and there will be no certificate: %s", error)
        return _only(planned, lambda file, name: ((*file, name) if reader.moves else file) not in before)
    check_columns(certificate, version)
    new = version.new_files(certificate.version, ctx.check_cancelled)
    if new is None:
        ctx.log.info("Cannot determine which files are new since the certificate; validating all files")
        return planned
    paths = {path for path, _, _ in new}
    left = _only(planned, lambda file, _: file[0] in paths)
    if left.partitions:
        return left
    nothing = replace(planned.partitions[0], partition=0, name=NOTHING_NEW, bytes=0, files=(), values={})
    return replace(planned, partitions=[nothing])


def _only(planned: Planned, wanted: Callable[[File, str], bool]) -> Planned:
    left: list[PartitionPlan] = []
    for partition in planned.partitions:
        files = tuple(file for file in partition.files if wanted(file, partition.name))
        if files:
            size = sum(file[1] for file in files)
            left.append(replace(partition, partition=len(left), files=files, bytes=size))
    return replace(planned, partitions=left)


def check_covered(certificate: Certificate, argument: Argument) -> None:
    """Raises InvalidArgument for other checks than those of a certificate, or checks that cannot go on from one."""
    whose = f"the certificate of {certificate.operation}"
    if argument.where != certificate.where:
        raise InvalidArgument(f"'where' is not the one of {whose}")
    certified = [c.check for c in certificate.checks]
    for check, name in zip(argument.checks, argument.names(), strict=True):
        if check.kind not in ROW_KINDS:
            raise InvalidArgument(f"{name}: {check.kind!r} is about all rows together: leave 'since' out")
        if check.as_given() not in certified:
            raise InvalidArgument(f"{name}: {whose} has no such check")
        if check.kind == "check" and argument.null_is != certificate.null_is:
            raise InvalidArgument(f"'null_is' is not the one of {whose}")


def check_table(certificate: Certificate, table: TableRecord) -> None:
    """Raises InvalidArgument unless the certificate is one of this table, as it is registered."""
    if certificate.table != table.name:
        raise InvalidArgument(f"the certificate of {certificate.operation} is one of the table {certificate.table!r}")
    types = registered_types(table)
    if (certificate.format, certificate.location, certificate.partition_types) != (table.format, table.location, types):
        raise InvalidArgument(
            f"the table {table.name!r} is registered otherwise than when {certificate.operation} was run: validate it "
            "as a whole"
        )


def check_types(certificate: Certificate, columns: Mapping[str, Any]) -> None:
    """Raises InvalidArgument where a catalog has other columns by now than those that a certificate names."""
    whose = f"since {certificate.operation}"
    for name, kind in certificate.types.items():
        if name not in columns:
            raise InvalidArgument(f"the column {name!r} was dropped or renamed {whose}: validate anew")
        if of_json(columns[name]) != of_json(kind):
            raise InvalidArgument(f"the type of {name!r} was changed {whose}: validate anew")


def check_columns(certificate: Certificate, version: TableVersion) -> None:
    """Raises InvalidArgument where the table is another one by now, or the certificate's columns are."""
    whose = f"since {certificate.operation}"
    if version.table_id != certificate.uuid:
        raise InvalidArgument(f"the table {certificate.table!r} was replaced by another one {whose}: validate it anew")
    tops = {name for name in certificate.columns if not any(name.startswith(f"{c}.") for c in certificate.columns)}
    now = version.fields(tops)
    for name, column in certificate.columns.items():
        found = now.get(name)
        if found is not None and found.id == column.id:
            if found.type != column.type:
                raise InvalidArgument(
                    f"the type of {name!r} was changed from {column.type} to {found.type} {whose}: validate anew"
                )
            continue
        new_name = version.name_of(column.id)
        if new_name is not None:
            raise InvalidArgument(f"the column {name!r} was renamed to {new_name!r} {whose}: validate anew")
        other = " and another one has its name" if found is not None else ""
        raise InvalidArgument(f"the column {name!r} was dropped{other} {whose}: validate anew")
    if added := now.keys() - certificate.columns.keys():
        raise InvalidArgument(f"the field {min(added)!r} was added to a checked column {whose}: validate anew")
