"""Writes that etcd rejects as invalid block no other writes of real daemons.

etcd's history is audited.
"""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING

import pytest

from distop import Complete, Start, aio, chord
from distop.protocol.jobs import Claim
from distop.protocol.records import OperationRef, TableRecord
from distop.protocol.txn import Put, Txn
from distop.store.embedded import EmbeddedEtcd
from tests.support.daemons import daemons, distop_process
from tests.support.replay import violations

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from pathlib import Path

    from distop import OwnedJob
    from tests.support.daemons import Daemons

pytestmark = [pytest.mark.etcd, pytest.mark.rotating]

LIMIT = 60
NARROW = 2_000
"""A limit on request bytes that only a hold of nearly maximum size exceeds."""


def test_failing_chords_do_not_block_pending_operations(group: Daemons) -> None:
    """The end of an operation and its predecessor's signal once shared a transaction.

    etcd rejected that transaction, because both wrote the same key.
    """
    group.start("e1")
    for _ in range(10):
        ops = []
        for _ in range(3):
            parts = [Start("noop", "@cluster", {"fail": ["all"]}) for _ in range(2)]
            ops += group.client.start_operations(chord(parts, Start("noop", "@cluster")))
        assert [op.wait(LIMIT).state for op in ops] == ["failed", "failed", "cancelled"] * 3
    assert group.client.start_operation("noop", "@cluster", {}, delay=0.1).wait(LIMIT).state == "success"
    group.eventually(lambda: not group.client.operations(), "all operations are cleaned up", "e1")


@pytest.fixture
def narrow_etcd() -> Iterator[EmbeddedEtcd]:
    """An etcd that accepts small requests only."""
    with EmbeddedEtcd(compaction=None, arguments=("--max-request-bytes", "50000")) as server:
        yield server


def test_a_rejected_write_is_reported_and_blocks_no_other(narrow_etcd: EmbeddedEtcd, tmp_path: Path) -> None:
    with daemons(narrow_etcd.endpoint, tmp_path) as group:
        group.client.add_table(TableRecord("t", "parquet", str(tmp_path)), check=False)
        group.start("e1", ttl=20)
        large = group.client.start_operation("noop", "t", {"jobs": 1_500})
        small = [group.client.start_operation("noop", "t", {"fail": ["0"]}) for _ in range(5)]
        assert {op.wait(LIMIT).state for op in small} == {"failed"}

        def rejection_is_reported() -> bool:
            return any(reason.code == "refused-by-etcd" for reason in large.why().reasons)

        group.eventually(rejection_is_reported, "why reports the rejected write", "e1")
        why = distop_process(group, "why", large.ref)
        retried = "etcd to accept a write of executor e1, which retries with back-off: "
        assert f"{retried}coordination: etcd rejected the plan" in why.stdout
        assert "etcdserver: request is too large: it has " in why.stdout
        assert f"distOp.t.noop.{large.ref.rpartition('/')[2]}.plan" in why.stdout
        assert "raise etcd's --max-request-bytes (default 1572864)" in why.stdout
        doctor = distop_process(group, "doctor", "--json")
        assert doctor.returncode == 1
        (writes,) = [one for one in json.loads(doctor.stdout)["checks"] if one["name"] == "writes"]
        assert writes["status"] == "error"
        assert f"etcd rejects a write of {large.ref} (e1): coordination: etcd rejected the plan" in writes["text"]
        narrow_etcd.kill()
        narrow_etcd.arguments = []  # raise the limit
        narrow_etcd.restart()
        assert large.wait(LIMIT).state == "success"
        group.eventually(
            lambda: not any(node.refused for node in group.client.nodes().values()), "no write is rejected"
        )
    assert not violations(narrow_etcd.endpoint)


def test_a_rejected_end_is_reported_by_why_of_its_successors(tmp_path: Path) -> None:
    """The operation itself has ended, so users call why on its successors."""
    with EmbeddedEtcd(compaction=None, arguments=("--max-txn-ops", "24")) as server:
        with daemons(server.endpoint, tmp_path) as group:
            _check_rejected_end(server, group)
        assert not violations(server.endpoint)


def _check_rejected_end(server: EmbeddedEtcd, group: Daemons) -> None:
    group.start("e1", ttl=20)
    first = group.client.start_operation("noop", "@cluster", {}, delay=3.0)
    behind = [group.client.start_operation("noop", "@cluster", {}, after=[first]) for _ in range(20)]
    beside = [group.client.start_operation("noop", "@cluster", {}) for _ in range(20)]
    assert {op.wait(LIMIT).state for op in (first, *beside)} == {"success"}

    def rejection_is_reported() -> bool:
        found = {reason.code: reason.text for reason in behind[0].why().reasons}
        return f"a write of executor e1 about {first.ref}, " in found.get("refused-by-etcd", "")

    group.eventually(rejection_is_reported, "why reports the rejected end", "e1")
    server.kill()
    server.arguments = []  # raise the limit
    server.restart()
    assert {op.wait(LIMIT).state for op in behind} == {"success"}


def test_claims_rejected_as_a_group_are_sent_in_smaller_groups(tmp_path: Path) -> None:
    """The executor once retried the same 76 claims for ever, without a log line."""
    with EmbeddedEtcd(compaction=None, arguments=("--max-txn-ops", "24")) as server:
        with daemons(server.endpoint, tmp_path) as group:
            group.client.add_table(TableRecord("t", "parquet", str(tmp_path)), check=False)
            group.start("e1", ttl=20)
            ops = [group.client.start_operation("noop", "t", {"jobs": jobs}) for jobs in (200, 30, 1)]
            assert [op.wait(LIMIT).state for op in ops] == ["success"] * 3
            group.eventually(
                lambda: not any(node.refused for node in group.client.nodes().values()), "no rejected write is reported"
            )
        assert not violations(server.endpoint)


def test_single_rejected_claims_are_reported_and_block_no_others(tmp_path: Path) -> None:
    """With max_jobs, each claim checks that the executors of ignored claims have ended, which takes many compares."""
    with EmbeddedEtcd(compaction=None, arguments=("--max-txn-ops", "24")) as server:
        with daemons(server.endpoint, tmp_path) as group:
            group.client.add_table(TableRecord("t", "parquet", str(tmp_path)), check=False)
            group.start("e1", ttl=20)
            _check_rejected_claims(server, group)


async def _write_claims_of_ended_executors(endpoint: str, ref: OperationRef, partitions: Iterable[int]) -> None:
    async with aio.connect(endpoint) as client:
        for p in partitions:
            claim = Claim(f"gone-{p}", f"gone-{p}", 1, 0)
            await client.etcd.commit(Txn((), (Put(client.keys.claim(ref, p), claim.encode()),)))


def _check_rejected_claims(server: EmbeddedEtcd, group: Daemons) -> None:
    op = group.client.start_operation("noop", "t", {"jobs": 40, "sleep": 0.3}, max_jobs=40)
    group.eventually(lambda: op.status().jobs["running"], "jobs run", "e1")
    op.pause(now=True)
    group.eventually(lambda: op.status().state == "paused", "the operation is paused", "e1")
    asyncio.run(_write_claims_of_ended_executors(server.endpoint, OperationRef.parse(op.ref), range(16, 39)))
    op.resume()

    def rejection_is_reported() -> bool:
        return any(reason.code == "refused-by-etcd" for reason in op.why().reasons)

    group.eventually(rejection_is_reported, "why reports the rejected claims", "e1")
    text = "claims: etcd rejected the claim: etcdserver: too many operations in txn request"
    assert f"a write of executor e1, which retries with back-off: {text}" in distop_process(group, "why", op.ref).stdout
    assert f"etcd rejects a write of {op.ref} (e1): {text}" in distop_process(group, "doctor").stdout
    beside = [group.client.start_operation("noop", "t", {"jobs": jobs}) for jobs in (30, 1)]
    assert [one.wait(LIMIT).state for one in beside] == ["success"] * 2
    assert rejection_is_reported()
    server.kill()
    server.arguments = []  # raise the limit
    server.restart()
    assert op.wait(LIMIT).state == "success"
    group.eventually(
        lambda: not any(node.refused for node in group.client.nodes().values()), "no rejected write is reported"
    )


def test_a_rejected_verification_is_reported_and_blocks_no_others(tmp_path: Path) -> None:
    """It once appeared only in the executor's log, and why reported no reason for waiting."""
    with EmbeddedEtcd(compaction=None) as server:
        with daemons(server.endpoint, tmp_path) as group:
            group.client.add_table(TableRecord("t", "parquet", str(tmp_path)), check=False)
            (e1,) = group.start("e1")  # publishes its types
            e1.stop()
            _check_rejected_verification(server, group)
        assert not violations(server.endpoint)


def _check_rejected_verification(server: EmbeddedEtcd, group: Daemons) -> None:
    prepare = group.client.prepare_operation
    # The external id is in the hold and in its key, and each write of a hold contains the key three times.
    large = prepare("noop", "t", external_id="x" * 200, verify="https://host/" + "y" * 980, verify_after=0.5)
    small = prepare("noop", "t", external_id="small", verify_after=0.5)
    server.kill()
    server.arguments = ["--max-request-bytes", str(NARROW)]
    server.restart()
    group.start("e1", ttl=20)

    def rejection_is_reported() -> bool:
        return any(reason.code == "refused-by-etcd" for reason in large.why().reasons)

    group.eventually(rejection_is_reported, "why reports the rejected verification", "e1")
    hold = f"hold prepared:{'x' * 200}"
    text = f"{hold}, which retries with back-off: verification: etcd rejected the"
    assert f"etcd to accept a write of executor e1 about {text}" in distop_process(group, "why", large.ref).stdout
    rejected = f"etcd rejects a write of {hold} (e1): verification: etcd rejected the"
    assert rejected in distop_process(group, "doctor").stdout
    assert small.wait(LIMIT).state == "cancelled"
    assert group.client.start_operation("noop", "t", {}).wait(LIMIT).state == "success"
    assert rejection_is_reported()
    server.kill()
    server.arguments = []  # raise the limit
    server.restart()
    group.eventually(
        lambda: not any(node.refused for node in group.client.nodes().values()), "no rejected write is reported", "e1"
    )
    large.confirm()
    assert large.wait(LIMIT).state == "success"


def test_claims_of_an_actor_that_etcd_rejects_together_are_sent_in_smaller_groups(tmp_path: Path) -> None:
    """A worker claims up to 40 jobs in one transaction, and extends as many."""
    with EmbeddedEtcd(compaction=None, arguments=("--max-txn-ops", "24")) as server:
        with daemons(server.endpoint, tmp_path) as group:
            group.client.add_table(TableRecord("t", "parquet", str(tmp_path)), check=False)
            group.client.register_type("copy")
            group.start("e1", ttl=20)
            op = group.client.start_operation("copy", "t", {}, partitions=[f"p{n}" for n in range(60)])
            owned: list[OwnedJob] = []

            def claimed() -> bool:
                owned.extend(group.client.own_jobs("ann", {"copy": None}, 60 - len(owned), 60.0))
                return len(owned) == 60

            group.eventually(claimed, "an actor has claimed all jobs", "e1")
            assert all(group.client.extend([job.token for job in owned], 60.0))
            for job in owned:
                group.client.return_job(job.token, Complete())
            assert op.wait(LIMIT).state == "success"
        assert not violations(server.endpoint)
