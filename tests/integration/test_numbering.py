"""The numbers of a type's instances on a table, whatever goes on beside the starts."""

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
CLIENTS, EACH = 16, 4


def test_sixteen_clients_start_while_operations_finish(group: Daemons) -> None:
    """Starts and finishes write the same two keys of the table. The audit that follows counts with them (F41)."""
    group.start("ann", "bob")

    def some(client: int) -> list[tuple[int, str]]:
        ended = []
        with distop.connect(group.endpoint) as own:
            for _ in range(EACH):
                operation = own.start_operation("noop", TABLE, {"jobs": 1})
                ended.append((operation.instance_id, operation.wait(60).state))
        return ended

    with ThreadPoolExecutor(CLIENTS) as pool:
        ended = [one for ones in pool.map(some, range(CLIENTS)) for one in ones]
    assert sorted(ended) == [(number, "success") for number in range(1, CLIENTS * EACH + 1)]
    assert dump(group.endpoint, f"distOp.{TABLE}.runOps") == {f"distOp.{TABLE}.runOps": "{}"}


def test_a_table_that_is_removed_and_added_again_counts_on(group: Daemons, tmp_path: Path) -> None:
    """No number is given twice, since history and stages are named by it (F42)."""
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
