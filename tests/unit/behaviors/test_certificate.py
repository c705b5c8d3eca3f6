"""Certificates: their content, refused ones, and validation of new files since one."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pydantic import ValidationError
from pyiceberg.schema import Schema
from pyiceberg.types import IntegerType, ListType, LongType, NestedField, StringType, StructType

from distop.behavior import OutcomeRow, Summary, TableRecord
from distop.errors import InvalidArgument, NotAllowed
from distop.services.operation_results import OperationResult
from distop.tables import changes_of
from distop.tables.iceberg.iceberg_version import IcebergVersion
from distop_behaviors.apply import Apply
from distop_behaviors.validate import Validate, certification, file_lists
from distop_behaviors.validate.certificate import Certificate, certificate_of, columns_in_expression, digest_of
from distop_behaviors.validate.certification import check_columns, columns_below
from distop_behaviors.validate.validate_argument import Argument
from tests.support.context import HISTORY, FakeContext, Ran, run_operation, store_certificate

if TYPE_CHECKING:
    from collections.abc import Callable

NOT_NULL = {"not_null": "c"}
RANGE = {"range": {"column": "id", "min": 0}}


def write(folder: Path, name: str, **columns: Any) -> Path:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table(columns), path)
    return path


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A table of two partitions without violations."""
    for k in (1, 2):
        write(tmp_path / "t", f"k={k}/a.parquet", id=[k, k + 10], c=["x", "y"])
    return tmp_path / "t"


@pytest.fixture
def run(folder: Path, tmp_path: Path) -> Callable[..., Ran]:
    """Validates without Spark: statistics decide all checks here."""

    def run(*checks: dict[str, Any], options: Any = None, **arg: Any) -> Ran:
        table = TableRecord("t", "parquet", str(folder), options or {})
        argument = {"checks": list(checks), "sample": 0, **arg}  # samples are fetched by Spark
        return run_operation(Validate(), table, argument, lambda t: FakeContext(tmp_path, t))

    return run


def test_a_valid_report_has_a_certificate_of_the_validated_files(
    run: Callable[..., Ran], folder: Path, tmp_path: Path
) -> None:
    certificate = run(NOT_NULL, {**RANGE, "name": "positive"}).report["certificate"]
    assert certificate["table"] == "t"
    assert certificate["rows"] == 4
    assert [(c["name"], c["check"], c["violations"]) for c in certificate["checks"]] == [
        ("c_not_null", NOT_NULL, 0),
        ("positive", RANGE, 0),
    ]
    files = json.loads((tmp_path / certificate["files"]).read_text())["files"]
    assert [path for path, _, _ in files] == [str(folder / f"k={k}/a.parquet") for k in (1, 2)]
    assert certificate["version"] in certificate["files"]
    assert Certificate.model_validate(certificate).model_dump(mode="json") == certificate


def test_a_list_of_files_is_written_again_only_if_it_was_changed_or_removed(
    run: Callable[..., Ran], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []
    plain = file_lists.digest_of
    monkeypatch.setattr(file_lists, "digest_of", lambda listed: asked.append(listed) or plain(listed))
    kept = tmp_path / run(NOT_NULL).report["certificate"]["files"]
    whole, lists = kept.read_text(), sum("files" in listed for listed in asked)
    run(NOT_NULL)
    assert sum("files" in listed for listed in asked) == lists == 1
    kept.write_text("{}")
    run(NOT_NULL)
    assert kept.read_text() == whole
    kept.unlink()
    run(NOT_NULL)
    assert kept.read_text() == whole


def test_a_list_of_files_that_was_removed_at_once_is_written_again(tmp_path: Path) -> None:
    ctx, files = FakeContext(tmp_path), [("/t/a", 1, 1)]
    ctx.operation = "t/validate/1"
    kept = tmp_path / "certificates" / "t" / "gone.json"
    file_lists.write_file_list("gone", lambda: files, ctx)
    kept.unlink()
    file_lists.write_file_list("gone", lambda: files, ctx)
    assert json.loads(kept.read_text())["files"] == [["/t/a", 1, 1]]


@pytest.mark.parametrize("version", ["abc", "../t/abc", "../../certificates/t/abc"])
def test_hole_8_a_plan_replaces_no_list_of_another_table(tmp_path: Path, version: str) -> None:
    """Tables share a --shared-dir, and a forged plan names the version of another table."""
    theirs, mine = FakeContext(tmp_path), FakeContext(tmp_path)
    theirs.operation, mine.operation = "t/validate/1", "mine/validate/1"
    file_lists.write_file_list("abc", lambda: [("/t/a", 1, 1)], theirs)
    kept = tmp_path / "certificates" / "t" / "abc.json"
    stored = kept.read_text()
    if version == "abc":
        file_lists.write_file_list(version, lambda: [("/mine/a", 1, 1)], mine)
    else:
        with pytest.raises(InvalidArgument, match="is not a version of the table 'mine'"):
            file_lists.write_file_list(version, lambda: [("/mine/a", 1, 1)], mine)
    assert kept.read_text() == stored


def test_a_list_with_partition_names_is_written_for_each_certificate(tmp_path: Path) -> None:
    """A validation of keys alone has one job for all partitions, with its own name."""
    ctx = FakeContext(tmp_path)
    ctx.operation = "t/validate/1"
    for name in ("@table", "k=1"):
        file_lists.write_file_list("named", lambda name=name: [("/t/a", 1, 1, name)], ctx)
        written = json.loads((tmp_path / "certificates" / "t" / "named.json").read_text())
        assert written["files"] == [["/t/a", 1, 1, name]]


def test_only_a_valid_validation_of_the_whole_table_has_a_certificate(
    run: Callable[..., Ran], folder: Path, tmp_path: Path
) -> None:
    violated = run({"range": {"column": "id", "max": 0}})
    assert (violated.report["verdict"], violated.report["certificate"]) == ("violated", None)
    errs = run({"not_null": "nowhere"})
    assert (errs.report["verdict"], errs.report["certificate"]) == ("error", None)
    unknown = run({"matches": {"column": "c", "pattern": "x"}}, statistics="only")
    assert (unknown.report["verdict"], unknown.report["certificate"]) == ("unknown", None)
    assert not (tmp_path / "certificates").exists()
    table = TableRecord("t", "parquet", str(folder))
    some = Validate().partitions(table, Argument(checks=[NOT_NULL]), FakeContext(tmp_path, table)).partitions[:1]
    ran = run_operation(Validate(), table, {"checks": [NOT_NULL]}, lambda t: FakeContext(tmp_path, t), partitions=some)
    assert (ran.report["verdict"], ran.report["certificate"]) == ("valid", None)
    assert ran.report["uncertified"] == "only some of the table's partitions were validated"


def test_a_partition_name_may_start_with_an_at_sign(tmp_path: Path, folder: Path) -> None:
    write(tmp_path / "at", "@day=1/a.parquet", c=pa.array([None], pa.string()))
    table = TableRecord("at", "parquet", str(tmp_path / "at"))
    argument = {"checks": [NOT_NULL], "statistics": "only"}
    ran = run_operation(Validate(), table, argument, lambda t: FakeContext(tmp_path, t))
    assert [(c["verdict"], c["violations"]) for c in ran.report["checks"]] == [("violated", 1)]


def test_the_report_has_the_reason_if_the_list_of_files_cannot_be_stored(
    run: Callable[..., Ran], tmp_path: Path
) -> None:
    (tmp_path / "certificates").write_text("in the way")
    ran = run(NOT_NULL)
    assert (ran.report["verdict"], ran.report["certificate"]) == ("valid", None)
    assert ran.report["uncertified"].startswith("cannot store the list of its files: ")


def test_since_validates_only_new_and_changed_files(run: Callable[..., Ran], folder: Path) -> None:
    first = run(NOT_NULL, RANGE).report["certificate"]
    again = run(NOT_NULL, since=first)
    assert (again.report["verdict"], again.report["rows"], again.outcomes) == ("valid", 0, [])
    assert (again.report["since"], again.report["certificate"]["rows"]) == (first["operation"], 4)
    (folder / "k=1/a.parquet").unlink()
    write(folder, "k=3/b.parquet", id=[5], c=["z"])
    second = run(NOT_NULL, since=first)
    assert ([o.name for o in second.outcomes], second.report["rows"]) == (["k=3"], 1)
    assert second.report["certificate"]["rows"] == 5
    # A certificate also covers the files of the former one, except replaced files.
    write(folder, "k=3/c.parquet", id=[6], c=pa.array([None], pa.string()))
    replaced = folder / "k=2/a.parquet"
    os.utime(replaced, ns=(1, replaced.stat().st_mtime_ns + 1))
    third = run(NOT_NULL, since=second.report["certificate"])
    assert ([o.name for o in third.outcomes], third.report["rows"]) == (["k=2", "k=3"], 3)
    assert (third.report["verdict"], third.report["checks"][0]["violations"]) == ("violated", 1)


def test_a_column_missing_in_new_files_is_null_there(run: Callable[..., Ran], folder: Path) -> None:
    certificate = run(NOT_NULL, RANGE).report["certificate"]
    write(folder, "k=3/b.parquet", id=[5, 6])
    ran = run(NOT_NULL, RANGE, since=certificate)
    assert [(c["verdict"], c["violations"]) for c in ran.report["checks"]] == [("violated", 2), ("valid", 0)]


@pytest.mark.parametrize(
    ("arg", "sentence"),
    [
        ({"checks": [{"not_null": "id"}]}, "id_not_null: the certificate of t/validate/1 does not have this check"),
        ({"checks": [NOT_NULL], "where": "id > 0"}, "'where' differs from the certificate of t/validate/1"),
    ],
)
def test_other_checks_than_the_certified_ones_are_refused(run: Callable[..., Ran], arg: Any, sentence: str) -> None:
    certificate = run(NOT_NULL).report["certificate"]
    with pytest.raises(InvalidArgument, match=sentence):
        run(*arg["checks"], since=certificate, **{n: v for n, v in arg.items() if n != "checks"})


def test_a_certificate_that_was_changed_does_not_match_its_digest(run: Callable[..., Ran]) -> None:
    certificate = run(NOT_NULL).report["certificate"]
    for changed in ({"rows": 5}, {"checks": [{**certificate["checks"][0], "name": "x"}]}, {"table": "other"}):
        with pytest.raises(ValidationError, match="was changed after it was issued"):
            Certificate.model_validate({**certificate, **changed})
    other = {**certificate, "table": "other"}
    with pytest.raises(InvalidArgument, match="belongs to the table 'other'"):
        run(NOT_NULL, since={**other, "digest": digest_of(other)})


@pytest.mark.parametrize("exists", [False, True])
def test_the_history_of_another_table_is_not_read(
    run: Callable[..., Ran], monkeypatch: pytest.MonkeyPatch, exists: bool
) -> None:
    certificate = run(NOT_NULL).report["certificate"]
    other = {**certificate, "table": "hr.pay", "operation": "hr.pay/validate/1", "digest": ""}
    record = {"op": "hr.pay/validate/1", "state": "success", "report": {"certificate": other}}
    other["digest"] = digest_of(other)
    monkeypatch.setattr("tests.support.context.HISTORY", {"hr.pay/validate/1": record} if exists else {})
    with pytest.raises(InvalidArgument) as refused:
        run({"not_null": "id"}, since="hr.pay/validate/1")
    assert str(refused.value) == (
        "'hr.pay/validate/1' is not a validation of the table 't': name one, such as t/validate/7"
    )


def test_hole_8_an_argument_names_a_validation_and_cannot_bring_a_certificate(run: Callable[..., Ran]) -> None:
    certificate = run(NOT_NULL).report["certificate"]
    for model, arg in (
        (Apply.Arg, {"certificate": certificate}),
        (Argument, {"checks": [NOT_NULL], "since": certificate}),
    ):
        with pytest.raises(ValidationError, match="Input should be a valid string"):
            model.model_validate(arg)
        assert model.model_validate({n: store_certificate(v) if v is certificate else v for n, v in arg.items()})


def test_hole_8_only_a_successful_validation_has_a_certificate(run: Callable[..., Ran], tmp_path: Path) -> None:
    certificate, ctx = run(NOT_NULL).report["certificate"], FakeContext(tmp_path)
    op = store_certificate(certificate)
    assert certificate_of(op, "t", ctx).digest == certificate["digest"]
    good = HISTORY[op]
    for changed, sentence in (
        ({"state": "failed"}, "has no certificate: it ended as failed"),
        ({"report": {"uncertified": "too wide"}}, "has no certificate: too wide"),
        ({"report": None}, "has no certificate"),
        ({"op": "t/validate/2"}, "is not a validation"),
        ({"report": {"certificate": {**certificate, "rows": 9}}}, "was changed after it was issued"),
    ):
        HISTORY[op] = {**good, **changed}
        with pytest.raises(InvalidArgument, match=sentence):
            certificate_of(op, "t", ctx)
    # Neither a type with a report by its caller nor another operation gives a certificate.
    for other in ("t/echo/1", "t/validate/x/1", "t/validate/7"):
        HISTORY[other] = {**good, "op": other}
        with pytest.raises(InvalidArgument, match="is not a validation|has the certificate of"):
            certificate_of(other, "t", ctx)


def test_hole_8_results_returned_by_actors_are_not_certified(folder: Path, tmp_path: Path) -> None:
    table, ctx = TableRecord("t", "parquet", str(folder)), FakeContext(tmp_path)
    argument = Argument.model_validate({"checks": [NOT_NULL], "sample": 0})
    behavior = Validate()
    planned = behavior.partitions(table, argument, FakeContext(tmp_path, table))
    rows = [
        OutcomeRow(p.partition, p.name, True, r.model_dump(mode="json"), "", by_executor=p.partition > 0)
        for p, r in behavior.run_batch(argument, planned.partitions, FakeContext(tmp_path, table))
    ]
    summary = Summary(
        *("success", 2, 2, 0), lambda: iter(rows), planned.version, True, lambda: iter(planned.partitions)
    )
    report = behavior.complete_operation(argument, table, summary, ctx)
    assert (report.verdict, report.certificate) == ("valid", None)
    assert "actors returned some of its jobs" in report.uncertified


def test_a_list_of_files_that_was_changed_is_refused(run: Callable[..., Ran], tmp_path: Path) -> None:
    certificate = run(NOT_NULL).report["certificate"]
    kept = tmp_path / certificate["files"]
    stored = json.loads(kept.read_text())
    kept.write_text(json.dumps({**stored, "files": [*stored["files"], ["/more", 1, 1]]}))
    with pytest.raises(InvalidArgument, match="was changed: its digest does not match the certificate"):
        run(NOT_NULL, since=certificate)
    kept.unlink()
    with pytest.raises(InvalidArgument, match="cannot read the list of files .*: validate the whole table"):
        run(NOT_NULL, since=certificate)


def forged(kept: Path, *files: Path) -> None:
    """Put files into a list, with a matching digest, as a writer of the table's folder can."""
    stored = json.loads(kept.read_text())
    stored["files"] += [[str(f), f.stat().st_size, f.stat().st_mtime_ns] for f in files]
    kept.write_text(json.dumps({**stored, "digest": digest_of({"files": stored["files"]})}))


def test_a_list_of_files_that_was_forged_with_its_digest_is_refused(
    run: Callable[..., Ran], folder: Path, tmp_path: Path
) -> None:
    certificate = run(NOT_NULL).report["certificate"]
    nulls = write(folder, "k=1/nulls.parquet", id=[None, None], c=pa.array([None, None], pa.string()))
    forged(tmp_path / certificate["files"], nulls)
    with pytest.raises(
        InvalidArgument,
        match="was changed: its digest does not match the certificate of t/validate/1: validate the whole",
    ):
        run(NOT_NULL, since=certificate)
    # A certificate that another program wrote may have no digest of its list.
    run(NOT_NULL)
    without = {name: value for name, value in certificate.items() if name != "files_digest"}
    with pytest.raises(InvalidArgument, match="has no digest of its list of files: validate the whole table"):
        run(NOT_NULL, since={**without, "digest": digest_of(without)})


def test_a_list_of_files_that_is_forged_during_the_validation_is_not_certified(
    run: Callable[..., Ran], folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    certificate = run(NOT_NULL).report["certificate"]
    write(folder, "k=1/new.parquet", id=[3], c=["z"])
    former = certification.certify

    def late(*args: Any, **options: Any) -> None:
        (kept,) = set((tmp_path / "certificates" / "t").iterdir()) - {tmp_path / certificate["files"]}
        forged(kept, write(folder, "k=2/nulls.parquet", id=[1], c=pa.array([None], pa.string())))
        former(*args, **options)

    monkeypatch.setattr(certification, "certify", late)
    report = run(NOT_NULL, since=certificate).report
    assert (report["verdict"], report["certificate"]) == ("valid", None)
    assert (
        "k=2/nulls.parquet', which is neither certified by t/validate/1 nor validated by this operation"
        in report["uncertified"]
    )


@pytest.mark.parametrize(
    "files", ["../secret.json", "/etc/passwd", "certificates/../secret.json", "certificates/b.json"]
)
def test_a_certificate_cannot_name_another_file_than_its_list(
    files: str, run: Callable[..., Ran], tmp_path: Path
) -> None:
    """Otherwise a certificate could have any file read."""
    certificate = dict(run(NOT_NULL).report["certificate"])
    for version in (certificate["version"], "../secret"):
        changed = Certificate.model_construct(**{**certificate, "files": files, "version": version})
        with pytest.raises(InvalidArgument, match="is not the list of files of its version"):
            file_lists.certified_files(changed, FakeContext(tmp_path))


def test_a_certificate_does_not_hold_if_partition_columns_change_their_types(run: Callable[..., Ran]) -> None:
    check = {"range": {"column": "k", "min": 1}}
    certificate = run({"not_null": "k"}).report["certificate"]
    with pytest.raises(InvalidArgument, match="have changed since t/validate/1"):
        run({"not_null": "k"}, since=certificate, options={"partition_types": {"k": "int"}})
    assert check not in [c["check"] for c in certificate["checks"]]


@pytest.mark.parametrize(
    ("expression", "named"),
    [
        ("a > b", ["a", "b"]),
        ("A IS NULL OR upper(c_d) = 'b '", ["a", "b", "c_d"]),
        ("`x y` = `p``q`", ["x y", "p`q"]),
        ("abc > 1", []),
        ("s.inner > 1", ["s"]),
    ],
)
def test_columns_are_found_in_an_expression(expression: str, named: list[str]) -> None:
    assert columns_in_expression(expression, ["a", "b", "c_d", "x y", "p`q", "s"]) == named


def schema(*fields: tuple[int, str, Any]) -> Any:
    return Schema(*(NestedField(i, name, kind, required=False) for i, name, kind in fields))


class Metadata:
    """The parts of a table's metadata that are compared."""

    table_uuid = "u"

    def __init__(self, *fields: tuple[int, str, Any]) -> None:
        self._schema = schema(*fields)

    def schema(self) -> Any:
        return self._schema


def version(*fields: tuple[int, str, Any]) -> IcebergVersion:
    return IcebergVersion("/t/metadata/v1.metadata.json", Metadata(*fields))


INSIDE = StructType(NestedField(4, "x", LongType(), required=False))
FIELDS = ((1, "a", IntegerType()), (2, "b", StringType()), (3, "s", INSIDE))


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        (((1, "z", IntegerType()), (7, "a", IntegerType()), *FIELDS[2:]), "'a' was renamed to 'z'"),
        (((7, "a", IntegerType()), *FIELDS[2:]), "'a' was dropped and another column was created with its name"),
        (FIELDS[1:], "'a' was dropped since"),
        (((1, "a", LongType()), *FIELDS[2:]), "type of 'a' was changed from int to long"),
        (
            (FIELDS[0], (3, "s", StructType(*INSIDE.fields, NestedField(9, "y", LongType(), required=False)))),
            "'s.y' was added to a checked column",
        ),
        ((FIELDS[0], (3, "s", ListType(4, LongType(), element_required=False))), "type of 's' was changed"),
        (((11, "new", LongType()), *FIELDS[2:], FIELDS[0]), ""),
    ],
)
def test_a_certificate_is_refused_if_its_columns_have_changed(fields: Any, sentence: str) -> None:
    certificate = Certificate.issue(
        table="t", format="iceberg", location="/t", operation="t/validate/1", time="", version="1", uuid="u",
        columns=columns_below(version(*FIELDS), {"a", "s"}),
        checks=[{"name": "a_not_null", "check": {"not_null": "a"}}],
    )  # fmt: skip
    if not sentence:
        check_columns(certificate, version(*fields))
        return
    with pytest.raises(InvalidArgument, match=sentence):
        check_columns(certificate, version(*fields))


def test_the_error_names_why_a_result_has_no_certificate() -> None:
    def result(state: str, report: Any) -> OperationResult:
        return OperationResult(state, report, {}, (), 0.0, "t/validate/1")

    assert result("success", {"certificate": {"v": 1}}).certificate() == {"v": 1}
    for state, report, why in (
        ("success", {"uncertified": "too wide"}, "t/validate/1 has no certificate: too wide"),
        ("failed", {"certificate": None}, "it ended as failed"),
        ("success", None, "operations of its type issue none"),
    ):
        with pytest.raises(NotAllowed, match=why):
            result(state, report).certificate()


def test_apply_refuses_tables_whose_schema_it_cannot_change() -> None:
    with pytest.raises(InvalidArgument, match="cannot change the schema of the table .* through Spark's catalog"):
        changes_of(TableRecord("t", "spark", "db.t"))
    with pytest.raises(InvalidArgument, match="is a folder of parquet files, which has no schema"):
        changes_of(TableRecord("t", "parquet", "/t"))
    changes_of(TableRecord("t", "iceberg", "db.t", {"catalog": "prod"}))
    changes_of(TableRecord("t", "iceberg", "/t"))
