"""``distop show --failed`` lists failed partitions by name in pages, also after a compaction."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest

from distop import aio
from distop.protocol.keys import Keys
from distop.protocol.records import OperationRef, TableRecord
from distop.protocol.txn import Delete, Txn
from tests.support.command import distop_command
from tests.support.daemons import daemons
from tests.support.etcd import compacted, own_etcd

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from distop.store.embedded import EmbeddedEtcd
    from tests.support.command import Ran

__all__ = ["distop_command", "own_etcd"]

pytestmark = pytest.mark.etcd

FAILED = ["3", "7", "150", "151", "249"]


def test_failed_partitions_are_listed_by_name_in_pages(
    own_etcd: EmbeddedEtcd, tmp_path: Path, distop_command: Callable[..., Ran]
) -> None:
    def show(*options: str) -> Ran:
        return distop_command("show", op, *options, "--etcd", own_etcd.endpoint)

    def names(*options: str) -> list[str]:
        return [one["name"] for one in show("--failed", "--json", *options).json["partitions"]]

    with daemons(own_etcd.endpoint, tmp_path) as found:
        found.client.add_table(TableRecord("t", "parquet", str(tmp_path)), check=False)
        found.start("ann")
        ended = found.client.start_operation("noop", "t", {"jobs": 250, "fail": FAILED}).wait(60)
        op = ended.op
        clean = found.client.start_operation("noop", "t", {"jobs": 2}).wait(60).op
    assert f"failed      5 of 250 partitions (list them: `distop show {op} --failed`)\n" in show().out

    first = show("--failed", "--limit", "2")
    header, *lines = first.out.splitlines()
    assert (header.split(), [line.split()[:3] for line in lines]) == (
        ["PARTITION", "ATTEMPT", "EXECUTOR", "ERROR"],
        [["3", "1", "ann"], ["7", "1", "ann"]],
    )
    following = f"list the next ones: `distop show {op} --failed --after 7`"
    assert first.err == f"listed 2 of 5 failed partitions; {following}\n"
    page = show("--failed", "--limit", "2", "--after", "7", "--json").json
    assert {name: page[name] for name in ("op", "failed", "total", "after")} == {
        "op": op, "failed": 5, "total": 250, "after": 151,
    }  # fmt: skip
    assert [(one["partition"], one["name"], one["executor"]) for one in page["partitions"]] == [
        (150, "150", "ann"), (151, "151", "ann"),
    ]  # fmt: skip
    assert all(one["error"] for one in page["partitions"])
    assert (names(), names("--after", "151"), names("--after", "249")) == (FAILED, ["249"], [])
    nothing = distop_command("show", clean, "--failed", "--etcd", own_etcd.endpoint)
    assert nothing.out == f"no partition of {clean} failed\n"

    async def compact() -> None:
        async with aio.connect(own_etcd.endpoint) as client:
            await compacted(client.etcd, (await client.etcd.status()).revision)

    asyncio.run(compact())
    assert (names(), names("--after", "7", "--limit", "1")) == (FAILED, ["150"]), (
        "the names come from the plan that is kept for a rerun"
    )

    async def delete_kept_plan() -> None:
        async with aio.connect(own_etcd.endpoint) as client:
            chunk = Keys().history_chunk(OperationRef.parse(op), 0)
            await client.etcd.commit(Txn((), (Delete(chunk),)))

    asyncio.run(delete_kept_plan())
    gone = show("--failed")
    assert (gone.code, "etcd has compacted its outcomes" in gone.sentence) == (4, True), gone


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--limit", "5"), "--limit and --after need --failed"),
        (("--after", "5"), "--limit and --after need --failed"),
        (("--failed", "--html", "page.html"), "--failed and --html exclude each other"),
        (("--failed", "--limit", "0"), "--limit must be a whole number of at least 1"),
    ],
)
def test_conflicting_options_are_refused_without_a_request_to_etcd(
    distop_command: Callable[..., Ran], options: tuple[str, ...], words: str
) -> None:
    ran = distop_command("show", "t/noop/1", *options, "--etcd", "127.0.0.1:1")
    assert (ran.code, words in ran.sentence) == (2, True), ran
