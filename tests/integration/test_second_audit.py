"""``scripts/second-audit``, which reads etcd's history through etcdctl, on histories of real daemons."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.support.contract import etcdctl
from tests.support.etcd import compacted, connected

if TYPE_CHECKING:
    from distop.store.embedded import EmbeddedEtcd
    from tests.support.daemons import Daemons

pytestmark = pytest.mark.etcd

SCRIPT = Path(__file__).parents[2] / "scripts" / "second_audit.py"


def second_audit(*words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(SCRIPT), "--etcdctl", etcdctl(), "--quiet", "1", *words]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)


def test_the_second_audit_passes_a_real_history_and_reports_a_violation(group: Daemons, etcd: EmbeddedEtcd) -> None:
    group.start("ann", "bob")
    group.client.start_operation("noop", "t", {"jobs": 20, "fail": ["3"]}, max_jobs=3).wait(30)
    first = group.client.start_operation("noop", "t", {"jobs": 5})
    group.client.start_operation("noop", "t", {"jobs": 5}, after=[first]).wait(30)
    clean = second_audit("--endpoints", etcd.endpoint)
    assert (clean.returncode, clean.stderr) == (0, "")
    assert "3 operations, violations: none" in clean.stdout

    words = [etcdctl(), "--endpoints", etcd.endpoint]
    key = "distOp.u.noop.1.state"
    subprocess.run([*words, "put", key, "running"], check=True, capture_output=True)
    violated = second_audit("--endpoints", etcd.endpoint)
    assert violated.returncode == 1
    assert "u/noop/1" in violated.stdout
    assert "has neither" in violated.stdout
    subprocess.run([*words, "del", key], check=True, capture_output=True)
    # The compaction removes this test's own write, so that the audit after the test does not see it.
    asyncio.run(_compact(etcd))
    compacted_audit = second_audit("--endpoints", etcd.endpoint)
    assert compacted_audit.returncode == 3
    assert "compacted" in compacted_audit.stderr


async def _compact(etcd: EmbeddedEtcd) -> None:
    async with connected(etcd.endpoint) as client:
        await compacted(client, (await client.status()).revision)


def test_an_etcd_that_does_not_answer_is_reported_in_one_sentence() -> None:
    ran = second_audit("--endpoints", "127.0.0.1:1")
    assert (ran.returncode, ran.stdout) == (3, "")
    assert ran.stderr.startswith("second audit: etcd cannot be read:")
