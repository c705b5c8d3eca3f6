"""``compact`` end to end, on the command line and by real executors, of which one is killed. No JVM is started."""

from __future__ import annotations

import json
from collections import Counter
from typing import TYPE_CHECKING

import pyarrow as pa
import pytest
from deltalake import DeltaTable, write_deltalake

from distop.protocol.records import TableRecord
from distop.store.embedded import EmbeddedEtcd
from tests.support.daemons import Daemons, daemons
from tests.support.daemons import distop_process as distop
from tests.support.replay import violations

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytestmark = [pytest.mark.timeout(240), pytest.mark.rotating]

TABLE = "lake.events"
DAYS, FILES, ROWS = 24, 3, 20
SMALL = {"min_input_files": 2, "commit_every": 4}


@pytest.fixture
def group(tmp_path: Path) -> Iterator[Daemons]:
    """A group without executors, and a table with three small files in each of 24 partitions."""
    (tmp_path / "daemons").mkdir()
    for n in range(FILES):
        ids = range(n * DAYS * ROWS, (n + 1) * DAYS * ROWS)
        rows = pa.table({"id": list(ids), "day": [f"d{id_ % DAYS:02}" for id_ in ids]})
        write_deltalake(tmp_path / "events", rows, mode="append", partition_by=["day"])
    with EmbeddedEtcd(compaction=None) as etcd:
        with daemons(etcd.endpoint, tmp_path / "daemons") as found:
            found.client.add_table(TableRecord(TABLE, "delta", str(tmp_path / "events")))
            yield found
        found_violations = violations(etcd.endpoint)
    assert not found_violations, "\n".join(found_violations[:3])


def rows_of(folder: Path) -> Counter[tuple[int, str]]:
    found = DeltaTable(folder).to_pyarrow_table()
    return Counter(zip(found["id"].to_pylist(), found["day"].to_pylist(), strict=True))


def commits(folder: Path) -> list[str]:
    history = DeltaTable(folder).history()
    return [one["operationParameters"]["distop.batch"] for one in history if one["operation"] == "distop compact"]


def test_a_killed_executor_loses_and_repeats_nothing(group: Daemons, tmp_path: Path) -> None:
    folder = tmp_path / "events"
    before = rows_of(folder)
    _, bob = group.start("ann", "bob")
    started = group.client.start_operation("compact", TABLE, SMALL)
    group.eventually(lambda: commits(folder), "the first groups are committed", "ann", "bob")
    bob.kill()
    done = started.wait(150)
    assert done.state == "success", group.tails()
    assert done.report["verdict"] == "compacted", done.report
    assert done.report["groups"]["committed"] == DAYS
    assert done.report["commits"] == len(commits(folder)) > 1
    assert sorted(int(number) for batch in commits(folder) for number in batch.split(",")) == list(range(DAYS))
    assert rows_of(folder) == before
    assert len(DeltaTable(folder).file_uris()) == DAYS
    live = {uri.rpartition("/")[2] for uri in DeltaTable(folder).file_uris()}
    assert {path.name for path in (folder / "distop-staged").rglob("*.parquet")} == live
    assert not list((folder / "_distop").rglob("staged.json"))


def test_the_command_line_compacts_reports_and_repeats(group: Daemons, tmp_path: Path) -> None:
    folder = tmp_path / "events"
    before = rows_of(folder)
    group.start("ann")
    words = ("start", "compact", TABLE, "--wait", "--json", "--arg")
    planned = json.loads(distop(group, *words, json.dumps({**SMALL, "dry_run": True})).stdout)
    assert (planned["report"]["verdict"], planned["report"]["groups"]["planned"]) == ("planned", DAYS), group.tails()
    one = json.loads(distop(group, *words, json.dumps(SMALL), "--partition", "day=d03").stdout)
    assert (one["report"]["verdict"], one["report"]["groups"]["planned"]) == ("compacted", 1), group.tails()
    rest = json.loads(distop(group, "start", "Compact_Table_Job", *words[2:], json.dumps(SMALL)).stdout)
    assert (rest["report"]["verdict"], rest["report"]["groups"]["planned"]) == ("compacted", DAYS - 1), group.tails()
    again = json.loads(distop(group, *words, json.dumps(SMALL)).stdout)
    assert again["report"]["verdict"] == "nothing to do"
    assert rows_of(folder) == before
    refused = distop(group, *words, json.dumps({"sort_by": ["days"]}))
    assert refused.returncode == 1
    assert "sort_by names 'days'" in refused.stdout + refused.stderr
