"""Instance numbers of a type on a table, with concurrent starts and after the table's removal."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import pytest

import distop
from distop.errors import NotAllowed, NotFound
from distop.protocol.records import TableRecord
from tests.support.contract import dump

if TYPE_CHECKING:
    from pathlib import Path

    from tests.support.daemons import Daemons

TABLE = "t"
CLIENTS, STARTS_PER_CLIENT = 16, 4


def test_starts_of_sixteen_clients_are_numbered_without_gaps_while_operations_end(group: Daemons) -> None:
    """F41: starts and ends write the same two keys of the table. The audit after the test checks the counts."""
    group.start("ann", "bob")

    def start_and_wait(client: int) -> list[tuple[int, str]]:
        ended = []
        with distop.connect(group.endpoint) as own:
            for _ in range(STARTS_PER_CLIENT):
                operation = own.start_operation("noop", TABLE, {"jobs": 1})
                ended.append((operation.instance_id, operation.wait(60).state))
        return ended

    with ThreadPoolExecutor(CLIENTS) as pool:
        ended = [one for ones in pool.map(start_and_wait, range(CLIENTS)) for one in ones]
    assert sorted(ended) == [(number, "success") for number in range(1, CLIENTS * STARTS_PER_CLIENT + 1)]
    assert dump(group.endpoint, f"distOp.{TABLE}.runOps") == {f"distOp.{TABLE}.runOps": "{}"}


def test_numbers_continue_after_a_table_is_removed_and_added_again(group: Daemons, tmp_path: Path) -> None:
    """F42: no number is used twice, since it is part of the names of history records and stages."""
    group.start("ann")
    before = group.client.start_operation("noop", TABLE, {"jobs": 2})
    assert before.wait(60).state == "success"
    during = group.client.start_operation("noop", TABLE, {"jobs": 4, "sleep": 1.0})
    with pytest.raises(NotAllowed, match="1 operation .noop. runs on 't'"):
        group.client.remove_table(TABLE)
    assert during.wait(60).state == "success"
    group.client.remove_table(TABLE)
    with pytest.raises(NotFound):
        group.client.start_operation("noop", TABLE, {"jobs": 2})
    record = TableRecord(TABLE, "parquet", str(tmp_path / "elsewhere"))
    group.client.add_table(record, check=False)
    after = group.client.start_operation("noop", TABLE, {"jobs": 2})
    assert (before.instance_id, during.instance_id, after.instance_id) == (1, 2, 3)
    assert after.wait(60).state == "success"
    assert sorted(ended.op for ended in group.client.history()) == [f"{TABLE}/noop/{n}" for n in (1, 2, 3)]
