"""A client whose etcd is not running yet, answers nothing, or has fewer members than endpoints."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest

from distop.errors import EtcdUnavailable
from distop.protocol.supported_versions import judge_etcd
from distop.store.embedded import EmbeddedEtcd
from distop.store.ports import reserve
from tests.support.etcd import connected, until
from tests.support.proxy import Mode, TcpProxy

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.etcd


async def test_a_client_logs_that_it_waits_for_etcd_and_then_connects(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    port, peer = reserve(2)
    address = f"127.0.0.1:{port}"

    async def read_a_key() -> bool:
        async with connected(address, connect_timeout=60.0) as client:
            return await client.get("nothing") is None

    starting = asyncio.ensure_future(read_a_key())
    await until(lambda: f"Waiting for etcd at {address}" in caplog.text)
    assert "Connected to etcd" not in caplog.text
    etcd = EmbeddedEtcd(tmp_path / "etcd", port=port, peer_port=peer)
    await asyncio.to_thread(etcd.start)
    try:
        assert await starting
        assert caplog.text.count("Waiting for etcd at") == 1
        assert "Connected to etcd" in caplog.text
    finally:
        await asyncio.to_thread(etcd.stop)


async def test_the_number_of_endpoints_counts_as_the_cluster_size(
    shared_etcd: EmbeddedEtcd,
) -> None:
    async with connected(f"{shared_etcd.endpoint},http://localhost:{shared_etcd.port}") as client:
        judged, members = await client.judge_server()
        assert members == 1
        assert judged == judge_etcd((await client.status()).version, 2)


async def test_a_silent_server_and_a_closed_port_have_different_errors() -> None:
    async with TcpProxy(1) as proxy:
        proxy.set(Mode.BLACK_HOLE)
        with pytest.raises(EtcdUnavailable, match=rf"{proxy.endpoint} \(it does not answer\)"):
            async with connected(proxy.endpoint, connect_timeout=0.7):
                pass
        proxy.set(Mode.PASS)
