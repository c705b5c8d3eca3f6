"""Reading an operation and its partitions at one revision, on a real etcd."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest

from distop import aio
from distop.protocol.records import State
from distop.services.inspection import partitions
from distop.services.inspection.partitions import look
from tests.integration.cli_namespace import TABLE, ref
from tests.integration.scripted_daemons import ScriptedDaemons
from tests.support.etcd import compacted, own_etcd, shared_etcd

if TYPE_CHECKING:
    from collections.abc import Callable

    from distop.store.client import EtcdClient
    from distop.store.embedded import EmbeddedEtcd

__all__ = ["own_etcd", "shared_etcd"]

pytestmark = pytest.mark.etcd

OP = "nyc.flights/noop/1"


class ChangingClient:
    """A store client that calls ``before`` ahead of its fifth list."""

    def __init__(self, etcd: EtcdClient, before: Callable[[], Any]) -> None:
        self._etcd, self._before, self._lists = etcd, before, 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._etcd, name)

    async def list(self, *args: Any, **settings: Any) -> Any:
        self._lists += 1
        if self._lists == 5:  # after the records of the operation and the claims, before the jobs
            await self._before()
        return await self._etcd.list(*args, **settings)


async def start_and_plan(client: aio.Client, names: list[str]) -> ScriptedDaemons:
    scripted = ScriptedDaemons(client.etcd, client.keys)
    await scripted.publish("noop")
    await scripted.table(TABLE)
    await scripted.join("n1", "noop")
    await client.start_operation("noop", TABLE, {"jobs": 5})
    await scripted.plan(ref(OP), "n1", names)
    return scripted


async def test_partitions_are_read_at_one_revision(shared_etcd: EmbeddedEtcd) -> None:
    """The jobs and the operation end during the read."""
    async with aio.connect(shared_etcd.endpoint, namespace="moment") as client:
        scripted = await start_and_plan(client, ["a", "b"])
        fences = await scripted.claim(ref(OP), "n1", 0, 1)

        async def finish() -> None:
            for n in (0, 1):
                await scripted.report(ref(OP), n, fences[n])
            await scripted.finish(ref(OP), "n1", State.SUCCESS)
            await scripted.clean(ref(OP), "n1")

        inspection = await look(ChangingClient(client.etcd, finish), client.keys, ref(OP))  # type: ignore[arg-type]
        assert inspection.partitions is not None
        assert [(p.name, p.state, p.executor) for p in inspection.partitions] == [
            ("a", "running", "executor-n1"), ("b", "running", "executor-n1"),
        ]  # fmt: skip
        inspection = await look(client.etcd, client.keys, ref(OP))
        assert inspection.ended
        assert [p.state for p in inspection.partitions or ()] == ["success", "success"]


async def test_an_operation_is_read_despite_a_compaction(own_etcd: EmbeddedEtcd) -> None:
    async with aio.connect(own_etcd.endpoint) as client:
        await start_and_plan(client, ["a"])

        async def compact() -> None:
            await client.operation(OP).pause()
            revision, _ = await client.etcd.read_at()
            await compacted(client.etcd, revision)

        inspection = await look(ChangingClient(client.etcd, compact), client.keys, ref(OP))  # type: ignore[arg-type]
        assert [(p.name, p.state) for p in inspection.partitions or ()] == [("a", "open")]
        assert inspection.arg == {"jobs": 5}


async def test_many_partitions_are_read_in_pages(shared_etcd: EmbeddedEtcd, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(partitions, "PAGE", 3)
    async with aio.connect(shared_etcd.endpoint, namespace="pages") as client:
        scripted = await start_and_plan(client, [f"p{n}" for n in range(10)])
        fences = await scripted.claim(ref(OP), "n1", *range(7))
        await asyncio.gather(*(scripted.report(ref(OP), n, fences[n], name=f"p{n}") for n in range(0, 7, 2)))
        inspection = await look(client.etcd, client.keys, ref(OP))
        assert [(p.ordinal, p.name) for p in inspection.partitions or ()] == [(n, f"p{n}") for n in range(10)]
        assert "".join(p.state[0] for p in inspection.partitions or ()) == "srsrsrsooo"
        monkeypatch.setattr(partitions, "MOST", 9)
        inspection = await look(client.etcd, client.keys, ref(OP))
        assert (inspection.partitions, inspection.planned, inspection.gone) == (None, True, False)


async def test_an_unreadable_outcome_is_skipped_and_logged(
    shared_etcd: EmbeddedEtcd, caplog: pytest.LogCaptureFixture
) -> None:
    async with aio.connect(shared_etcd.endpoint, namespace="unreadable") as client:
        scripted = await start_and_plan(client, ["a", "b"])
        fences = await scripted.claim(ref(OP), "n1", 0, 1)
        await scripted.report(ref(OP), 0, fences[0], name="a")
        await scripted.put(client.keys.job(ref(OP), 0, "outcome"), b"[]")
        inspection = await look(client.etcd, client.keys, ref(OP))
        assert [(p.name, p.state, p.executor) for p in inspection.partitions or ()] == [
            ("a", "success", ""), ("b", "running", "executor-n1"),
        ]  # fmt: skip
        assert "Skipping an unreadable record: " in caplog.text
