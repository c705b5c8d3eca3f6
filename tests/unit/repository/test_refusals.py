"""The page about refusals quotes errors of the code, and a refused operation changes nothing."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from deltalake import write_deltalake

from distop import testing
from distop.behavior import TableRecord
from distop.errors import InvalidArgument
from distop.protocol.keys import Keys
from distop_behaviors.compact import Compact
from distop_behaviors.expire import ExpirePartitions, ExpireSnapshots
from distop_behaviors.export import Export
from distop_behaviors.orphans import RemoveOrphans, Restore
from distop_behaviors.purge import Purge
from tests.support.orphan_runs import snapshot

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).parents[3]
PAGE = ROOT / "docs" / "reference" / "refusals.md"
KEYS = Keys()


def rows() -> list[str]:
    """The first cells of all tables of the page."""
    found = [line.split(" | ")[0].removeprefix("| ") for line in PAGE.read_text().splitlines() if line.startswith("| ")]
    return [one for one in found if one != "the error"]


def _text(node: ast.expr) -> str | None:
    """A literal, with … for each value in it."""
    if isinstance(node, ast.Constant):
        return node.value if isinstance(node.value, str) else None
    if isinstance(node, ast.JoinedStr):
        return "".join(str(v.value) if isinstance(v, ast.Constant) else "…" for v in node.values)
    return None


@cache
def sentences() -> str:
    """All texts of the code, one in a line."""
    found: list[str] = []
    for folder in ("behaviors", "distop"):
        for file in sorted((ROOT / folder).rglob("*.py")):
            tree = ast.parse(file.read_text())
            found += [text for node in ast.walk(tree) if isinstance(node, ast.expr) and (text := _text(node))]
    return "\n".join(one.replace("\n", " ") for one in found)


@pytest.mark.parametrize("sentence", rows())
def test_each_quoted_sentence_is_one_of_the_code(sentence: str) -> None:
    """At its start and its end, … may stand for a part of a longer sentence."""
    wanted = re.sub(r"^… |( …|: …)$", "", sentence)
    assert sentences().count(wanted), "this is no text of the code"


def test_each_refusal_of_the_types_is_on_the_page() -> None:
    """Errors that planning raises for an argument or a table; others are of jobs, or need a plan written by hand."""
    quoted = [re.sub(r"^… |( …|: …)$", "", one) for one in rows()]
    missing = [text for text in _refusals() if not any(one in text for one in quoted) and text not in NOT_ON_THE_PAGE]
    assert missing == [], "add these to docs/reference/refusals.md"


def _refusals() -> Iterator[str]:
    """The texts with which the maintenance types raise InvalidArgument and ValueError."""
    for pattern in MODULES:
        for file in sorted(ROOT.glob(pattern)):
            for node in ast.walk(ast.parse(file.read_text())):
                call = node.exc if isinstance(node, ast.Raise) else None
                if not (isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and call.args):
                    continue
                if call.func.id in ("InvalidArgument", "ValueError") and (text := _text(call.args[0])):
                    yield text


MODULES = (
    *(f"behaviors/{name}/*.py" for name in ("compact", "expire", "export", "orphans", "purge")),
    *(f"distop/tables/**/*_{name}.py" for name in ("replacer", "swap", "expiration", "partition_removal", "retention")),
    "distop/tables/reachability.py",
    "distop/tables/partition_condition.py",
    "distop/storage/export_targets.py",
)
"""The modules with refusals of the maintenance types."""
NOT_ON_THE_PAGE = {
    "…, so no file is known to be an orphan",  # ends the sentences about paths
    "compact needs a table: start it on a registered table",  # a start without a table is refused before
    "the list of files has … bytes, but at most … are supported",
    "the table is not exported: …",  # the reasons about paths
    "the folder … has a name that cannot be exported",
    "where cannot be read: …",  # as "where cannot be read at …"
    "where: …",
    "the table … has no commits: its partitions are removed by deletion",  # nobody calls it
    # Of jobs and completions, of records that were changed by hand:
    "the files of the group … do not have one partition spec: …",
    "an entry in … names the folder …, which has no staged files",
    "an entry in … names …, which is not a file in one folder",
    "the entry … of an interrupted compaction cannot be read: …",
}


# ------------------------------------------------------------------ a refused operation changes nothing


def parquet(folder: Path) -> TableRecord:
    for day in ("day=2013-01-01", "day=2013-01-02"):
        (folder / day).mkdir(parents=True)
        pq.write_table(pa.table({"v": [1, 2]}), folder / day / "x.parquet")
    return TableRecord("t", "parquet", str(folder))


def delta(folder: Path) -> TableRecord:
    for n in range(2):
        write_deltalake(folder, pa.table({"k": ["a", "b"], "v": [n, n]}), mode="append", partition_by=["k"])
    return TableRecord("t", "delta", str(folder))


def beside(folder: Path) -> TableRecord:
    """Another table inside of the table's folder."""
    return TableRecord("inner", "parquet", str(folder / "day=2013-01-01"))


REFUSED: list[tuple[Any, Any, dict[str, Any], str]] = [
    (Compact, parquet, {}, "cannot be replaced in one step"),
    (Compact, delta, {"sort_by": ["w"]}, "sort_by names"),
    (ExpireSnapshots, parquet, {}, "has no old versions"),
    (ExpireSnapshots, delta, {"older_than": "2h"}, "keeps removed files for"),
    (ExpireSnapshots, delta, {"older_than": 1}, "older_than must be at least 1h"),
    (ExpirePartitions, parquet, {"column": "day", "older_than": "90d"}, "more than max_fraction"),
    (ExpirePartitions, parquet, {"column": "v", "older_than": "90d"}, "is not a partition column"),
    (ExpirePartitions, delta, {"column": "v", "older_than": "90d"}, "is not a partition column"),
    (RemoveOrphans, parquet, {}, "has no metadata that list its files"),
    (RemoveOrphans, delta, {"older_than": 1}, "older_than must be at least 1h"),
    (Restore, delta, {"operation": "t/remove-orphans/1"}, "there are no quarantined files"),
    (Restore, delta, {"operation": "u/remove-orphans/1"}, "is not a remove-orphans of the table"),
    (Purge, delta, {"incomplete": "error"}, "is inside the table's folder"),
    (Purge, parquet, {}, "another table's folder"),
    (ExpirePartitions, parquet, {"column": "day", "older_than": "90d", "max_fraction": 1}, "another table's folder"),
    (Export, parquet, {"to": "/not/allowed"}, "are not allowed"),
    (Export, delta, {"to": "/"}, "root of a file system"),
]


@pytest.mark.parametrize(("behavior", "make", "argument", "why"), REFUSED, ids=lambda one: getattr(one, "__name__", ""))
def test_a_refused_operation_changes_nothing(
    tmp_path: Path, behavior: Any, make: Any, argument: dict[str, Any], why: str
) -> None:
    table = make(tmp_path / "t")
    tables = [beside(tmp_path / "t")] if why == "another table's folder" else []
    if why == "is inside the table's folder":
        delta(tmp_path / "t" / "inner")
    before = snapshot(tmp_path / "t")
    done = testing.run_operation(behavior, argument, table=table, tables=tables, folder=tmp_path / "work")
    assert done.state == "failed"
    assert why in str(done.errors)
    assert (done.result.jobs["total"], done.jobs, done.follow_ups) == (0, (), ())
    assert snapshot(tmp_path / "t") == before
    kv = done.store.get(KEYS.table("t"))
    assert kv is not None
    assert TableRecord.decode(kv.value).to_json() == table.to_json()
    assert kv.mod_revision == kv.create_revision, "nobody has written the registration again"
    left = [one for one in done.store.listing() if one.key.startswith(("distOpClaim", "distOpOpen"))]
    assert left == []


@pytest.mark.parametrize(
    "behavior", [Compact, ExpireSnapshots, ExpirePartitions, RemoveOrphans, Restore, Purge, Export]
)
def test_a_wrong_argument_writes_nothing(tmp_path: Path, behavior: Any) -> None:
    """The start checks it by the published schema, so there is no operation at all."""
    table = parquet(tmp_path / "t")
    before = snapshot(tmp_path / "t")
    store = testing.ModelStore()
    with pytest.raises(InvalidArgument):
        testing.run_operation(behavior, {"colour": "red"}, table=table, folder=tmp_path / "work", store=store)
    assert [one.key for one in store.listing() if one.key.startswith(("distOp.", "distOpOpen", "distOpHistory"))] == []
    assert snapshot(tmp_path / "t") == before
