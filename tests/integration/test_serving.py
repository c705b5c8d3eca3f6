"""Executors that serve selected types and tables only."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from distop.protocol.records import OperationRef, TableRecord
from tests.support.behaviors import sample_env  # noqa: F401
from tests.support.command import distop_command  # noqa: F401
from tests.support.replay import Written

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.support.command import Ran
    from tests.support.daemons import Daemons

pytestmark = [pytest.mark.timeout(300), pytest.mark.rotating]


def jobs(*names: str) -> dict[str, Any]:
    return {"names": list(names)}


def holders(group: Daemons, ref: str) -> set[str]:
    written = Written(group.endpoint, OperationRef.parse(ref))
    return {json.loads(claim)["executor"] for job in written.claims.values() for claim in job}


def test_each_executor_runs_jobs_of_its_tables_only(
    group: Daemons,
    sample_env: dict[str, str],  # noqa: F811
    distop_command: Callable[..., Ran],  # noqa: F811
    tmp_path: Any,
) -> None:
    tables = ["sales.orders", "hr.pay", "ops.log"]
    for name in tables:
        (tmp_path / name).mkdir()
        group.client.add_table(TableRecord(name, "parquet", str(tmp_path / name)), check=False)
    group.start("ann", env=sample_env, options=("--tables", "sales.*"))
    group.start("bob", env={**sample_env, "DISTOP_TABLES": "hr.*,@cluster", "DISTOP_TYPES": "sample"})
    nodes = {one.executor: one for one in group.client.nodes().values()}
    assert nodes["ann"].serves.to_json() == {"tables": ["sales.*"]}
    assert nodes["bob"].serves.to_json() == {"types": ["sample"], "tables": ["hr.*", "@cluster"]}
    assert nodes["bob"].behaviors == ("join", "sample")
    assert "types: sample; tables: hr.*, @cluster" in distop_command("nodes", "--etcd", group.endpoint).out
    assert any("serves only tables: sales.*" in line for line in group.lines())

    started = {name: group.client.start_operation("sample", name, jobs(*"abcdef")) for name in tables}
    for name, executor in (("sales.orders", "ann"), ("hr.pay", "bob")):
        assert started[name].wait(60).state == "success", group.tails()
        assert holders(group, started[name].ref) == {executor}

    unserved = started["ops.log"]
    reason = group.client.why(unserved.ref).reasons[0]
    assert (reason.code, reason.text) == ("not-served", "an executor: no live executor serves table ops.log")
    doctor = distop_command("doctor", "--etcd", group.endpoint, "--json").json
    found = {check["name"]: check for check in doctor["checks"]}["executors"]
    assert (found["status"], "no live executor serves table ops.log" in found["text"]) == ("warning", True)
    assert "sales.orders" not in found["text"]

    unserved.cancel()
    assert unserved.wait(120).state == "cancelled", "a cancel ends although no executor serves the table"
    assert holders(group, unserved.ref) == set()
