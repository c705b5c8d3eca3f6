"""distop and etcd3 in one process, imported in either order, with distop's messages or etcd3's own."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from distop.store.embedded import EmbeddedEtcd

pytestmark = pytest.mark.etcd

USE_BOTH = """
import asyncio, sys
from distop.protocol.txn import Put, Txn
port, key = int(sys.argv[1]), sys.argv[2]

async def ours():
    from distop.store.client import EtcdClient
    from distop.store.connection_settings import EtcdConfig
    async with EtcdClient(EtcdConfig((f"127.0.0.1:{port}",))) as client:
        await client.commit(Txn((), (Put(key, b"distop"),)))
        return (await client.get(key + "3")).value

def theirs(etcd3):
    client = etcd3.client(host="127.0.0.1", port=port)
    value, meta = client.get(key)
    done, _ = client.transaction(
        compare=[client.transactions.value(key) == "distop"],
        success=[client.transactions.put(key + "3", "etcd3")],
        failure=[],
    )
    assert done and value in (None, b"distop"), (done, value)
    lease = client.lease(10)
    assert lease.remaining_ttl > 0
    lease.revoke()
    assert client.status().version
    client.close()
"""

ORDERS = {
    "compat first": """
import distop.compat
etcd3 = distop.compat.etcd3()
import etcd3 as same
assert same is etcd3 and distop.compat.etcd3() is etcd3
from etcd3.etcdrpc import rpc_pb2, kv_pb2
""",
    "distop first": """
import distop.store.client
import distop.compat
etcd3 = distop.compat.etcd3()
""",
    "own import failed before": """
try:
    import etcd3
except TypeError:
    pass  # its generated code does not load with this protobuf
import distop.compat
etcd3 = distop.compat.etcd3()
""",
}

OWN_MESSAGES = {
    "own import first": """
import etcd3
import distop.compat
assert distop.compat.etcd3() is etcd3
import distop.store.client
""",
    "own import last": """
import distop.store.client
import etcd3
""",
}


def run(program: str, server: EmbeddedEtcd, key: str, **environment: str) -> None:
    finish = """
import distop.store.client, distop.store.connection_settings
async def first():
    from distop.store.client import EtcdClient
    from distop.store.connection_settings import EtcdConfig
    async with EtcdClient(EtcdConfig((f"127.0.0.1:{port}",))) as client:
        await client.commit(Txn((), (Put(key, b"distop"),)))
asyncio.run(first())
theirs(etcd3)
assert asyncio.run(ours()) == b"etcd3"
"""
    done = subprocess.run(
        [sys.executable, "-c", USE_BOTH + program + finish, str(server.port), key],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), **environment},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("order", ORDERS)
def test_etcd3_works_with_the_messages_of_distop(shared_etcd: EmbeddedEtcd, prefix: str, order: str) -> None:
    run(ORDERS[order], shared_etcd, f"{prefix}key")


@pytest.mark.parametrize("order", OWN_MESSAGES)
def test_etcd3_works_with_its_own_messages(shared_etcd: EmbeddedEtcd, prefix: str, order: str) -> None:
    """Only protobuf in pure Python loads etcd3's generated code."""
    run(OWN_MESSAGES[order], shared_etcd, f"{prefix}key", PROTOCOL_BUFFERS_PYTHON_IMPLEMENTATION="python")


def test_an_error_names_the_extra_when_etcd3_is_not_installed() -> None:
    program = """
import sys
sys.modules["etcd3.client"] = None
import distop.compat, distop.errors
try:
    distop.compat.etcd3()
except distop.errors.DistopError as error:
    assert "distop[etcd3]" in str(error)
    assert "etcd3.etcdrpc" not in sys.modules
else:
    raise AssertionError("no error")
"""
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
