"""Rows and facts of random Delta tables against Delta's own scan."""

from __future__ import annotations

from collections import Counter
from datetime import date
from decimal import Decimal
from typing import TYPE_CHECKING, Any

import pytest

from distop.tables import plan_table, reader_of
from distop.tables.reading.file_facts import FileFacts
from distop_behaviors.reading.check_session import session_of
from distop_behaviors.validate import Validate
from tests.support import random_delta_tables
from tests.support.context import FakeContext, run_operation
from tests.support.delta import MAVEN, DeltaLake, jars, writing_session
from tests.support.needs import need

if TYPE_CHECKING:
    from collections.abc import Callable

    from pyspark.sql import SparkSession

    from distop.behavior import TableRecord
    from distop.tables.reading.file_facts import Chunk, Leaf

pytestmark = [pytest.mark.spark, pytest.mark.timeout(240), pytest.mark.rotating]

SEEDS = 4
SLOW_SEEDS = 200


@pytest.fixture(scope="module")
def lake(spark: SparkSession, tmp_path_factory: pytest.TempPathFactory) -> DeltaLake:
    need(jars(), MAVEN)
    return DeltaLake(writing_session(spark), tmp_path_factory.mktemp("random"))


@pytest.mark.parametrize(
    "seed", [*range(SEEDS), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(SEEDS, SLOW_SEEDS))]
)
def test_a_random_table_is_read_as_by_delta(
    seed: int, lake: DeltaLake, spark: SparkSession, context: Callable[[TableRecord], FakeContext]
) -> None:
    table = random_delta_tables.make(lake, seed)
    planned = plan_table(table.record)
    reader = reader_of(table.record, planned.partitions)
    files = [file for p in planned.partitions for file in p.files]
    expected = lake.read(f"seed{seed}")
    names = expected.columns
    assert list(reader.columns() or ()) == names, table.history
    wanted = Counter(str(tuple(row)) for row in expected.collect())
    if not files:
        assert not wanted
        return
    frame = reader.rows(session_of(spark), files)
    rows = frame.select("*", reader.file_column(frame).alias("f"), reader.position_column(frame).alias("p"))
    found = rows.collect()
    assert Counter(str(tuple(row)[:-2]) for row in found) == wanted, table.history
    assert len({(row["f"], row["p"]) for row in found}) == len(found)

    all_facts = reader.facts(files, frozenset(name.lower() for name in names), lambda: None)
    facts = {one.path: one for one in all_facts if isinstance(one, FileFacts)}
    assert len(facts) == len(files), all_facts
    precise = reader.precise_facts(list(facts.values()), frozenset(name.lower() for name in names), lambda: None)
    by_file: dict[str, list[Any]] = {path: [] for path in facts}
    leaves = {path: leaf for one in facts.values() for path, leaf in one.leaves.items()}
    values = frame.select(reader.file_column(frame), *(_physical(path, leaf) for path, leaf in leaves.items()))
    for row in values.collect():
        by_file[reader.planned_path(row[0])].append(tuple(row)[1:])
    for path, one in facts.items():
        assert one.live_rows == len(by_file[path]), (path, table.history)
        for source in (one, precise[path].precise if path in precise else None):
            if source is None:
                continue
            for n, leaf in enumerate(leaves):
                for chunk in _whole(source, leaf):
                    own = [_comparable(row[n], source.leaves[leaf]) for row in by_file[path]]
                    _check(chunk, own, exact=one.deleted == 0, what=(leaf, path, table.history))

    counted = {name: sum(row[name] is None for row in found) for name in names}
    checks = [{"not_null": name} for name in names]
    for mode in ("auto", "never"):
        ran = run_operation(Validate(), table.record, {"checks": checks, "statistics": mode}, context)
        report = ran.report["checks"]
        assert {c["check"]["not_null"]: c["violations"] for c in report} == counted, (mode, table.history)
        assert ran.report["rows"] == len(found)


def _physical(path: tuple[str, ...], leaf: Leaf) -> Any:
    from pyspark.sql import functions as F

    column = F.col(".".join(f"`{name}`" for name in path))
    # The session's time zone is UTC.
    return F.unix_micros(column.cast("timestamp")) if leaf.kind == "timestamp" else column


def _whole(facts: FileFacts, leaf: tuple[str, ...]) -> list[Chunk]:
    """The statistics of a leaf, if they are of the whole file, and its bounds have an order."""
    if facts.leaves[leaf].kind == "other":
        return []
    found = list(facts.chunks.get(leaf, ()))
    return found if len(found) == 1 else []


def _comparable(value: Any, leaf: Leaf) -> Any:
    if isinstance(value, str):
        return value.encode()
    if isinstance(value, Decimal):
        return int(value.scaleb(leaf.scale))
    if isinstance(value, date):
        return (value - date(1970, 1, 1)).days
    return value


def _check(chunk: Chunk, values: list[Any], *, exact: bool, what: Any) -> None:
    known = [value for value in values if value is not None]
    nulls = len(values) - len(known)
    if chunk.nulls is not None:
        assert nulls <= chunk.nulls, what
        assert chunk.nulls < chunk.rows or not known, what
        if exact:
            assert nulls == chunk.nulls, what
    for value in known:
        assert chunk.low is None or chunk.low <= value, (chunk, value, what)
        assert chunk.high is None or value <= chunk.high, (chunk, value, what)
    if exact and chunk.tight and known and not isinstance(known[0], bytes):
        assert chunk.low in (None, min(known)), (chunk, what)
        assert chunk.high in (None, max(known)), (chunk, what)
