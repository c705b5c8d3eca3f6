"""apply on Delta tables: commits that assert the validated version, beside other writers, and after crashes."""

from __future__ import annotations

import json
import shutil
import threading
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pytest
from deltalake import write_deltalake
from deltalake.exceptions import DeltaError

from distop.errors import InvalidArgument, UnsafePath
from distop.tables.commits import CommitUnknown, Conflict
from distop.tables.delta.metadata_commit import check_widening, may_widen
from distop_behaviors.apply import Apply
from distop_behaviors.apply.apply_loop import MARK, ROUNDS, Applying
from distop_behaviors.apply.constraints import SchemaChanges, Widened
from distop_behaviors.apply.delta_commit import DeltaTarget
from distop_behaviors.apply.schema_target import SchemaChange, rewrite_target_of
from tests.acceptance.applying import At, crashes
from tests.support.delta_bench import LOG_NAME, VALUE, Bench, rows
from tests.support.delta_logs import ID, PLAIN, DeltaLog, features, field, statistics

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

NOT_NULL = {"not_null": "c"}
GENERATED = "delta.generationExpression"
POSITIVE = {"range": {"column": "id", "min": 0}, "name": "Positive"}


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path).create()


def test_checks_become_not_null_and_constraints_that_other_writers_enforce(bench: Bench) -> None:
    certificate = bench.certificate(NOT_NULL, POSITIVE)
    before = bench.table.metadata()
    ran = bench.apply(bench.context(), certificate)
    assert (ran.report["verdict"], ran.report["rounds"], ran.message) == ("applied", 1, "")
    assert [(c["column"], c["property"], c["before"]) for c in ran.report["changes"]] == [
        ("c", None, "other"),
        (None, VALUE, "other"),
    ]
    assert (bench.version, bench.required(), bench.required("id")) == (1, True, False)
    assert bench.properties[VALUE] == "(`id` >= 0) IS NOT FALSE"
    assert bench.table.protocol().min_writer_version == 3
    after = bench.table.metadata()
    assert (after.id, after.created_time) == (before.id, before.created_time)
    assert bench.table.history(1)[0]["operation"] == "distop apply"
    for data in (rows(None, first=3), rows("z", first=-1)):
        with pytest.raises(DeltaError):
            write_deltalake(bench.path, data, mode="append")
    write_deltalake(bench.path, pa.table({"id": pa.array([None], pa.int64()), "c": ["a NULL passes"]}), mode="append")
    again = bench.apply(bench.context(), bench.certificate(NOT_NULL, POSITIVE))
    assert [c["before"] for c in again.report["changes"]] == ["same", "same"]


def test_a_writer_that_began_before_the_change_fails(bench: Bench) -> None:
    began = bench.table
    bench.apply(bench.context(), bench.certificate(NOT_NULL))
    with pytest.raises(DeltaError, match=r"(?i)metadata"):
        write_deltalake(began, rows(None, first=9), mode="append")
    assert bench.table.to_pyarrow_table().num_rows == 2


def test_new_rows_are_validated_and_the_change_is_made_on_their_version(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    certificate = bench.certificate(NOT_NULL)
    write_deltalake(bench.path, rows("new", first=3), mode="append")
    at = At(DeltaTarget, "swap", 1, "before", lambda: bench.append_blindly(rows("newer", first=4)))
    monkeypatch.setattr(DeltaTarget, "swap", at.wrapped)
    ran = bench.apply(bench.context(), certificate)
    assert (ran.report["verdict"], ran.report["rounds"], ran.report["rows"]) == ("applied", 2, 2)
    assert (bench.required(), bench.version) == (True, 3)


def test_a_crash_at_any_step_changes_the_table_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def crash() -> None:
        raise ConnectionError("the process dies")

    for number, (method, when) in enumerate(crashes(DeltaTarget)):
        bench = Bench(tmp_path / str(number)).create()
        certificate, ctx = bench.certificate(NOT_NULL, POSITIVE), bench.context()
        with monkeypatch.context() as patch:
            patch.setattr(*method, At(*method, 1, when, crash).wrapped)
            with pytest.raises(ConnectionError):
                bench.apply(ctx, certificate)
        ran = bench.apply(ctx, certificate)
        assert (ran.report["verdict"], bench.required()) == ("applied", True)
        assert bench.version == 1, f"changed once, with a crash {when} {method[1]}"
        assert [c["before"] for c in ran.report["changes"]] == ["other", "other"]
        assert json.loads(bench.properties[MARK])["operation"] == ctx.operation


def test_after_an_unknown_outcome_the_table_is_loaded_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def lost() -> None:
        raise CommitUnknown("no answer")

    for when, rounds in (("before", 2), ("after", 1)):
        bench = Bench(tmp_path / when).create()
        certificate = bench.certificate(NOT_NULL)
        with monkeypatch.context() as patch:
            patch.setattr(DeltaTarget, "swap", At(DeltaTarget, "swap", 1, when, lost).wrapped)
            ran = bench.apply(bench.context(), certificate)
        assert (ran.report["verdict"], ran.report["rounds"], bench.version) == ("applied", rounds, 1)


@pytest.mark.parametrize("round_", range(5))
def test_of_several_commits_on_one_version_exactly_one_succeeds(bench: Bench, round_: int) -> None:
    outcomes: list[str] = []
    start = threading.Barrier(6)

    def commit(n: int) -> None:
        target = DeltaTarget(bench.record, bench.context())
        head = target.load()
        start.wait()
        try:
            target.swap(head, SchemaChange(properties={"writer": f"{round_}.{n}"}))
            outcomes.append(f"{round_}.{n}")
        except Conflict:
            outcomes.append("")

    threads = [threading.Thread(target=commit, args=(n,)) for n in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    (winner,) = filter(None, outcomes)
    assert (len(outcomes), bench.version, bench.properties["writer"]) == (6, 1, winner)


def test_no_commit_of_another_writer_is_lost(bench: Bench) -> None:
    """deltalake creates commits in the same way, and repeats its own after a conflict that is none of metadata."""
    certificate, written = bench.certificate(NOT_NULL), list[int]()
    start = threading.Barrier(3)

    def write(first: int) -> None:
        start.wait()
        for n in range(first, first + 10):
            try:
                write_deltalake(bench.path, rows(f"v{n}", first=n), mode="append")
                written.append(n)
            except DeltaError:
                pass  # the metadata has changed since it has opened the table

    threads = [threading.Thread(target=write, args=(first,)) for first in (100, 200)]
    for thread in threads:
        thread.start()
    start.wait()
    ran = bench.apply(bench.context(), certificate)
    for thread in threads:
        thread.join()
    assert ran.report["verdict"] == "applied"
    assert sorted(bench.table.to_pyarrow_table()["id"].to_pylist()) == sorted([1, 2, *written])
    assert (bench.required(), bench.version) == (True, len(written) + 1)


def test_apply_fails_if_other_writers_always_commit_first(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    certificate, original = bench.certificate(NOT_NULL), DeltaTarget.swap

    def swap(self: DeltaTarget, head: Any, change: Any) -> None:
        bench.append_blindly(rows("z", first=9))
        original(self, head, change)

    monkeypatch.setattr(DeltaTarget, "swap", swap)
    ran = bench.apply(bench.context(), certificate)
    assert (ran.report["verdict"], ran.report["rounds"]) == ("unknown", ROUNDS)
    assert not bench.required()


@pytest.mark.parametrize(
    ("protocol", "wanted"),
    [
        ({"minReaderVersion": 1, "minWriterVersion": 1}, {"minWriterVersion": 3}),
        ({"minReaderVersion": 1, "minWriterVersion": 4}, {"minWriterVersion": 4}),
        (features("deletionVectors"), {"writerFeatures": ["deletionVectors", "checkConstraints", "invariants"]}),
    ],
)
def test_the_protocol_gets_the_needed_features(
    protocol: dict[str, Any], wanted: dict[str, Any], tmp_path: Path
) -> None:
    bench = Bench(tmp_path)
    given = {"name": "orders", "description": "of customers", "createdTime": 7, "configuration": {"x": "y"}}
    log = DeltaLog(bench.path).create(protocol, fields=[ID, field("c", "string")], **given)
    log.commit(log.add("a.parquet", rows("x"), stats=statistics(1, nullCount={"id": 0, "c": 0}, minValues={"id": 1})))
    bench.apply(bench.context(), bench.certificate(NOT_NULL, {"range": {"column": "id", "min": 0}, "name": "Positive"}))
    actions = [json.loads(line) for line in (log.folder / f"{2:020}.json").read_text().splitlines()]
    assert list(actions[0]) == ["commitInfo"], "it comes first"
    found = {kind: value for action in actions for kind, value in action.items()}
    assert found.get("protocol", protocol) == {**protocol, **wanted}
    assert {n: found["metaData"][n] for n in ("name", "description", "createdTime")} == {
        n: given[n] for n in ("name", "description", "createdTime")
    }
    assert found["metaData"]["configuration"].keys() == {"x", VALUE, MARK}
    assert found.keys() <= {"commitInfo", "protocol", "metaData"}


def test_the_metadata_of_a_checkpoint_is_kept(bench: Bench) -> None:
    for n in range(3):
        write_deltalake(bench.path, rows("z", first=10 + n), mode="append")
    bench.table.create_checkpoint()
    for n in range(3):
        (bench.path / LOG_NAME / f"{n:020}.json").unlink()
    before = bench.table.metadata()
    bench.apply(bench.context(), bench.certificate(NOT_NULL))
    after = bench.table.metadata()
    assert (after.id, after.created_time, after.partition_columns) == (before.id, before.created_time, [])
    last = (bench.path / LOG_NAME / f"{4:020}.json").read_text().splitlines()
    (metadata,) = [found["metaData"] for found in map(json.loads, last) if "metaData" in found]
    assert metadata["format"] == {"provider": "parquet", "options": {}}
    assert bench.required()


@pytest.mark.parametrize("feature", ["inCommitTimestamp", "icebergCompatV2", "somethingNew"])
def test_an_unknown_writer_feature_is_refused_by_name(feature: str, tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    protocol = {**features(), "writerFeatures": ["appendOnly", feature]}
    log = DeltaLog(bench.path).create(protocol, fields=[ID, field("c", "string")])
    log.commit(log.add("a.parquet", rows("x"), stats=statistics(1, nullCount={"id": 0, "c": 0})))
    certificate = bench.certificate(NOT_NULL)
    with pytest.raises(InvalidArgument, match=f"the writer feature '{feature}', which distop does not support"):
        bench.apply(bench.context(), certificate)
    assert not (log.folder / f"{2:020}.json").exists()


def test_an_unknown_writer_version_is_refused(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    log = DeltaLog(bench.path).create({**PLAIN, "minWriterVersion": 8}, fields=[ID, field("c", "string")])
    log.commit(log.add("a.parquet", rows("x"), stats=statistics(1, nullCount={"id": 0, "c": 0})))
    certificate = bench.certificate(NOT_NULL)
    with pytest.raises(InvalidArgument, match="needs writer version 8"):
        bench.apply(bench.context(), certificate)


def test_what_delta_has_no_constraint_for_is_refused(bench: Bench) -> None:
    fits = bench.certificate({"fits": {"column": "id", "type": "int"}})
    with pytest.raises(
        InvalidArgument, match="cannot get the type int without a rewrite, because Delta does not widen bigint to it"
    ):
        bench.apply(bench.context(), fits)
    wide = {"fits": {"column": "id", "type": "decimal(22,2)"}}
    with pytest.raises(InvalidArgument, match=r"set the property delta\.enableTypeWidening to true first"):
        bench.apply(bench.context(), bench.certificate(wide))
    with pytest.raises(InvalidArgument, match="apply it by itself"):
        bench.apply(bench.context(), bench.certificate(wide, NOT_NULL))
    both = bench.certificate(POSITIVE, {"range": {"column": "id", "max": 9}, "name": "positive"})
    with pytest.raises(InvalidArgument, match="Positive and positive: Delta's constraints do not distinguish"):
        bench.apply(bench.context(), both)
    bench.table.alter.add_constraint({"positive": "id > -9"})
    with pytest.raises(InvalidArgument, match="has another constraint 'positive' already: id > -9; drop it first"):
        bench.apply(bench.context(), bench.certificate(POSITIVE))
    assert bench.properties[VALUE] == "id > -9"


@pytest.mark.parametrize(
    ("narrow", "wide", "allowed"),
    [
        ("tinyint", "int", True),
        ("int", "double", True),
        ("bigint", "double", False),
        ("int", "decimal(10,0)", True),
        ("int", "decimal(10,1)", False),
        ("bigint", "decimal(20,0)", True),
        ("bigint", "decimal(19,0)", False),
        ("decimal(9,2)", "decimal(12,4)", True),
        ("decimal(9,2)", "decimal(9,4)", False),
        ("decimal(9,2)", "decimal(9,2)", False),
        ("float", "double", True),
        ("double", "float", False),
        ("date", "timestamp_ntz", True),
        ("date", "timestamp", False),
        ("int", "string", False),
    ],
)
def test_types_are_widened_as_the_protocol_of_delta_allows(narrow: str, wide: str, allowed: bool) -> None:
    assert may_widen(narrow, wide) == allowed


def test_a_column_that_others_depend_on_is_not_widened(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    fields = [field("id", "integer"), field("p", "integer"), field("g", "long", **{GENERATED: "n + 1"})]
    fields += [field("n", "integer"), field("ids", "integer"), field("day", "date")]
    given = {VALUE: "ID > 0", "delta.enableTypeWidening": "true"}
    DeltaLog(bench.path).create(features("typeWidening"), fields=fields, partitions=("p",), configuration=given)
    target = DeltaTarget(bench.record, bench.context())
    schema = target.schema(target.load())
    with pytest.raises(InvalidArgument, match=r"set its property delta\.feature\.timestampNtz"):
        check_widening(target.load().base, "day", "timestamp_ntz")
    ids = {name: found.id for name, found in schema.version.fields(["id", "p", "n", "ids"]).items()}
    for name, number in ids.items():
        wanted = SchemaChanges({}, {}, widened=(Widened("check", name, number, "bigint"),))
        if name == "ids":
            schema.check_change([], wanted)
        else:
            with pytest.raises(InvalidArgument, match=f"'{name}' cannot be widened"):
                schema.check_change([], wanted)


def test_a_nested_column_is_refused(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    write_deltalake(bench.path, pa.table({"s": [{"a": 1}]}))
    target = DeltaTarget(bench.record, bench.context())
    schema = target.schema(target.load())
    nested = schema.version.fields(["s"])["s.a"].id
    with pytest.raises(InvalidArgument, match=r"'s\.a' is inside another column"):
        schema.check_change([nested], SchemaChanges({}, {}))


@pytest.mark.parametrize("moment", ["planned", "swapping"])
@pytest.mark.parametrize("folder", ["", LOG_NAME])
def test_hole_3_nothing_is_committed_into_folders_of_other_users(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, folder: str, moment: str
) -> None:
    certificate = bench.certificate(NOT_NULL)

    def open_up() -> None:
        (bench.path / folder).chmod(0o777)

    if moment == "planned":
        open_up()
    else:
        monkeypatch.setattr(DeltaTarget, "swap", At(DeltaTarget, "swap", 1, "before", open_up).wrapped)
    with pytest.raises(UnsafePath, match="the table is not changed, because others could change its log"):
        bench.apply(bench.context(), certificate)
    assert (bench.version, bench.properties) == (0, {})


def test_nothing_is_committed_to_a_table_that_replaced_the_validated_one(
    bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_deltalake(bench.path, rows("z", first=3), mode="append")
    certificate = bench.certificate(NOT_NULL)

    def replace() -> None:
        shutil.rmtree(bench.path)
        bench.create()

    monkeypatch.setattr(DeltaTarget, "swap", At(DeltaTarget, "swap", 1, "before", replace).wrapped)
    with pytest.raises(InvalidArgument, match="was replaced by another table"):
        bench.apply(bench.context(), certificate)
    assert sorted(path.name for path in (bench.path / LOG_NAME).glob("*.json")) == [f"{0:020}.json"]


def test_a_cancel_before_the_confirmation_reverts_the_change(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    certificate, ctx = bench.certificate(NOT_NULL, POSITIVE), bench.context()

    def stop() -> None:
        raise ConnectionError("the job is cancelled")

    monkeypatch.setattr(Applying, "settle", At(Applying, "settle", 1, "before", stop).wrapped)
    with pytest.raises(ConnectionError):
        bench.apply(ctx, certificate)
    assert bench.required()
    behavior: Callable[..., None] = Apply().cancel_job_and_cleanup
    argument = Apply.Arg.model_validate({"certificate": certificate["operation"], "settle_seconds": 0})
    ctx.partition = Apply().partitions(bench.record, argument, ctx).partitions[0]
    behavior(argument, ctx.partition, ctx)
    assert not bench.required()
    assert bench.properties == {}


def test_a_delta_table_is_not_rewritten(bench: Bench) -> None:
    with pytest.raises(InvalidArgument, match="the Delta table 't' cannot be rewritten: only Iceberg tables are"):
        rewrite_target_of(bench.record, bench.context())
