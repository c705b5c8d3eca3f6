"""Certificates are replaced on disk during a session, and etcd restarts with the new ones."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from distop.store.client import EtcdClient
from distop.store.connection_settings import EtcdConfig
from distop.store.embedded import EmbeddedEtcd
from distop.store.session import Session
from tests.support.certificates import make_certificates
from tests.support.etcd import until

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

pytestmark = pytest.mark.etcd


@pytest.fixture
async def mutual(tmp_path: Path) -> AsyncIterator[tuple[EmbeddedEtcd, EtcdConfig]]:
    """An etcd that requires client certificates, and a client config with files that both sides read."""
    made = make_certificates(tmp_path)
    etcd = EmbeddedEtcd(tmp_path / "etcd", scheme="https", arguments=made.mutual_arguments)
    files = {"ca_cert": made.ca, "cert": made.client_cert, "key": made.client_key}
    await asyncio.to_thread(etcd.start)
    try:
        yield etcd, EtcdConfig((etcd.endpoint,), **files)  # type: ignore[arg-type]
    finally:
        await asyncio.to_thread(etcd.stop)


async def test_hole_9_a_session_continues_with_replaced_certificates(
    mutual: tuple[EmbeddedEtcd, EtcdConfig], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    etcd, config = mutual
    caplog.set_level("INFO", "distop.store")
    async with EtcdClient(config) as client:
        session = Session(client, "node", b"here", ttl=20)
        await session.start()
        make_certificates(tmp_path)  # another certificate authority, in the same files
        await asyncio.to_thread(etcd.restart)
        assert await client.get("node") is not None
        moved = session.deadline
        await until(lambda: session.deadline > moved or session.lost.done())
        assert session.alive
        assert "new connections use them" in caplog.text
        await session.close()


async def test_invalid_new_certificates_keep_the_previous_ones_in_use(
    mutual: tuple[EmbeddedEtcd, EtcdConfig], caplog: pytest.LogCaptureFixture
) -> None:
    """Certificate files are replaced one by one, and etcd may restart in between."""
    etcd, config = mutual
    assert config.key is not None
    async with EtcdClient(config) as client:
        key = Path(config.key)
        good = key.read_bytes()
        key.write_bytes(Path(etcd.folder.parent / "server-key.pem").read_bytes())
        await asyncio.to_thread(etcd.halt)
        reading = asyncio.ensure_future(client.get("node"))
        await until(lambda: "keeping the previous certificates" in caplog.text)
        await asyncio.to_thread(etcd.restart)
        assert await reading is None
        key.write_bytes(good)
        await asyncio.to_thread(etcd.restart)
        assert await client.get("node") is None
    assert caplog.text.count("keeping the previous certificates") == 1
