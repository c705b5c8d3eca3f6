"""Tables of which the store refuses every file: the operation ends with the one cause, in the first attempt."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from distop.protocol.records import TableRecord
from distop.tables.reading.parquet_footers import THREADS
from tests.support.command import distop_command  # noqa: F401
from tests.support.refusing_store import RefusingStore

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.support.command import Ran
    from tests.support.daemons import Daemons

FILES = 365
CHECKS = '{"checks": [{"not_null": "a"}], "statistics": "only"}'


def test_an_operation_on_a_refused_table_ends_with_the_one_cause(
    group: Daemons,
    distop_command: Callable[..., Ran],  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    files: dict[str, bytes | None] = {f"listed/day={n}/a.parquet": None for n in range(FILES)}
    with RefusingStore(files=files) as store:
        store.serve(monkeypatch)
        group.client.add_table(TableRecord("d", "parquet", "s3://bucket/listed"), check=False)
        group.start("ann")
        ran = distop_command("start", "validate", "d", "--etcd", group.endpoint, "--arg", CHECKS, "--wait", "--json")
        asked = [line for line in store.requests if ".parquet" in line]
    assert ran.code == 1, group.tails()
    assert ran.json["state"] == "failed"
    cause = f"cannot read any file of this batch (files: {FILES}) from this executor: access is denied"
    assert {check["verdict"] for check in ran.json["report"]["checks"]} == {"error"}
    assert cause in str(ran.json["report"])
    # Only the files of the first attempt's probe were asked for.
    assert len(asked) == THREADS
