"""Certificates on real daemons: an executor with a key accepts only history records signed with that key."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyiceberg.schema import Schema
from pyiceberg.types import LongType, NestedField

from distop.errors import InvalidArgument
from distop.protocol.records import History, OperationRef, TableRecord
from distop.protocol.txn import Put, Txn
from tests.support.daemons import daemons
from tests.support.etcd import connected
from tests.support.lake import Folder

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from distop.store.embedded import EmbeddedEtcd
    from tests.support.daemons import Daemons

pytestmark = pytest.mark.etcd

CHECKS = {"checks": [{"not_null": "id"}], "sample": 0}
FORGED: list[tuple[dict[str, str], str]] = [
    ({"signature": ""}, "it is not signed"),
    ({}, "its signature does not match the key"),
]
"""Changes to a forged record's fields, and why it is rejected."""


@pytest.fixture
def group(etcd: EmbeddedEtcd, tmp_path: Path) -> Iterator[Daemons]:
    """A group whose history is not audited, because the audit would report the forged records."""
    with daemons(etcd.endpoint, tmp_path) as found:
        yield found


@pytest.fixture
def validation(group: Daemons, tmp_path: Path) -> Any:
    """The result of validating a table."""
    (tmp_path / "rows").mkdir()
    pq.write_table(pa.table({"id": [1, 2]}), tmp_path / "rows" / "a.parquet")
    key = tmp_path / "key"
    key.write_bytes(b"TOP-SECRET-" * 4)
    key.chmod(0o600)
    group.start("ann", options=("--certificate-key-file", str(key)))
    group.client.add_table(TableRecord("rows", "parquet", str(tmp_path / "rows")))
    return group.client.start_operation("validate", "rows", CHECKS).wait(60).raise_for_state()


def write(group: Daemons, record: History) -> None:
    """Write a history record directly, as any user with write permission can."""

    async def work() -> None:
        async with connected(group.endpoint) as etcd:
            key = group.client._inner.keys.history(OperationRef.parse(record.op))
            await etcd.commit(Txn((), (Put(key, record.encode()),), (), "forge"))

    asyncio.run(work())


def test_hole_8_a_forged_certificate_in_etcd_is_refused(group: Daemons, validation: Any) -> None:
    assert validation.record["signature"].startswith("hmac-sha256-")
    again = group.client.start_operation("validate", "rows", {**CHECKS, "since": validation.op}).wait(60)
    assert (again.state, again.report["since"], again.report["certificate"]["rows"]) == ("success", validation.op, 2)

    record = group.client._loop.run(_history(group, validation.op))
    from distop_behaviors.validate.certificate import Certificate

    certificate = Certificate.model_validate(validation.certificate())
    fields = {n: getattr(certificate, n) for n in Certificate.model_fields if n not in ("digest", "version")}
    forged = Certificate.issue(**fields, version="another").model_dump(mode="json")
    for changed, why in FORGED:
        write(group, replace(record, report={**record.report, "certificate": forged}, **changed))
        refused = group.client.start_operation("validate", "rows", {**CHECKS, "since": validation.op}).wait(60)
        assert refused.state == "failed"
        assert f"the history record of {validation.op} is rejected: {why}" in refused.sentence()
    write(group, record)
    accepted = group.client.start_operation("validate", "rows", {**CHECKS, "since": validation.op}).wait(60)
    assert accepted.state == "success"


def test_hole_8_apply_refuses_a_forged_certificate_and_changes_nothing(group: Daemons, validation: Any) -> None:
    from distop_behaviors.validate.certificate import Certificate, Column

    lake = Folder(group.folder / "lake")
    schema = Schema(NestedField(1, "id", LongType()), NestedField(2, "c", LongType()))
    lake.new(schema).append(pa.table({"id": [1, 2], "c": pa.array([1, None], pa.int64())}))
    group.client.add_table(TableRecord("lake", "iceberg", str(lake.root)))
    op = group.client.start_operation("validate", "lake", CHECKS).wait(60).raise_for_state().op

    # Forge a certificate for the column with a NULL.
    record = group.client._loop.run(_history(group, op))
    certificate = Certificate.model_validate(record.report["certificate"])
    (check,) = certificate.checks
    fields = {n: getattr(certificate, n) for n in Certificate.model_fields if n != "digest"} | {
        "checks": [check.model_copy(update={"name": "c_not_null", "check": {"not_null": "c"}})],
        "columns": {"c": Column(id=2, type="long")},
    }
    forged = {**record.report, "certificate": Certificate.issue(**fields).model_dump(mode="json")}
    before = lake.version
    for changed, why in FORGED:
        write(group, replace(record, report=forged, **changed))
        refused = group.client.start_operation("apply", "lake", {"certificate": op}).wait(60)
        assert refused.state == "failed"
        assert f"the history record of {op} is rejected: {why}" in refused.sentence()
    assert [path.name for path in sorted((lake.root / "metadata").glob("*.json"))] == [
        f"v{n}.metadata.json" for n in range(1, before + 1)
    ]


async def _history(group: Daemons, op: str) -> History:
    inner = group.client._inner
    kv = await inner.etcd.get(inner.keys.history(OperationRef.parse(op)))
    assert kv is not None
    return History.decode(kv.value)


def test_hole_8_a_certificate_in_the_argument_is_refused_at_the_start(group: Daemons, validation: Any) -> None:
    with pytest.raises(InvalidArgument, match="at since: .* is not of type string"):
        group.client.start_operation("validate", "rows", {**CHECKS, "since": dict(validation.certificate())})
    with pytest.raises(InvalidArgument, match="at certificate: .* is not of type string"):
        group.client.start_operation("apply", "rows", {"certificate": dict(validation.certificate())})
    missing = group.client.start_operation("validate", "rows", {**CHECKS, "since": "rows/validate/99"}).wait(60)
    assert "there is no history record of rows/validate/99" in missing.sentence()


def test_hole_8_records_and_logs_do_not_contain_the_key(group: Daemons, validation: Any, tmp_path: Path) -> None:
    async def values() -> bytes:
        inner = group.client._inner
        return b"".join(kv.value for kv in (await inner.etcd.list(*inner.keys.everything())).kvs)

    assert b"TOP-SECRET" not in group.client._loop.run(values())
    logs = [path.read_bytes() for path in group.folder.rglob("*.log")]
    assert logs
    assert not any(b"TOP-SECRET" in log for log in logs)
