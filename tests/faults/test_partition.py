"""An etcd member that is partitioned from the other members, but not from daemons with open streams on it.

test_etcd_faults.py has a similar test with a proxy, which needs no root.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import subprocess
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import TYPE_CHECKING, Self

import pytest

from distop.protocol.records import OperationRef, TableRecord
from distop.store.embedded import find_etcd
from tests.support.daemons import daemons
from tests.support.etcd import connected
from tests.support.needs import need
from tests.support.replay import Written
from tests.support.writing import assert_data

if TYPE_CHECKING:
    from pathlib import Path

    from tests.support.writing import Journal

pytestmark = [pytest.mark.etcd, pytest.mark.slow, pytest.mark.timeout(180), pytest.mark.rotating]


def namespaces_available() -> bool:
    """Whether network namespaces can be created here, which needs root, iproute2 and the capability."""
    if os.geteuid() != 0 or shutil.which("ip") is None:
        return False
    name = f"dt{os.getpid()}x"
    made = subprocess.run(["ip", "netns", "add", name], capture_output=True, check=False).returncode == 0
    if made:
        bridged = subprocess.run(["ip", "link", "add", f"b{name}", "type", "bridge"], capture_output=True, check=False)
        subprocess.run(["ip", "link", "del", f"b{name}"], capture_output=True, check=False)
        subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)
        return bridged.returncode == 0
    return False


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)


class NamespacedEtcd:
    """An etcd cluster in network namespaces. Clients still reach a member after :meth:`isolate`."""

    def __init__(self, folder: Path, size: int = 3) -> None:
        self._folder = folder
        self._size = size
        self._tag = f"{os.getpid() % 10_000}"
        self._net = 64 + os.getpid() % 128
        self._processes: list[subprocess.Popen[bytes]] = []

    @property
    def endpoints(self) -> tuple[str, ...]:
        return tuple(f"{self._client(n)}:2379" for n in range(self._size))

    def _peer(self, n: int) -> str:
        return f"10.{self._net}.1.{n + 1}"

    def _client(self, n: int) -> str:
        return f"10.{self._net}.2.{n + 1}"

    def _space(self, n: int) -> str:
        return f"dt{self._tag}n{n}"

    def __enter__(self) -> Self:
        try:
            for kind, last in (("p", 1), ("c", 2)):
                bridge = f"dt{self._tag}{kind}"
                _ip("link", "add", bridge, "type", "bridge")
                _ip("addr", "add", f"10.{self._net}.{last}.254/24", "dev", bridge)
                _ip("link", "set", bridge, "up")
            for n in range(self._size):
                self._join(n)
            names = ",".join(f"m{n}=http://{self._peer(n)}:2380" for n in range(self._size))
            for n in range(self._size):
                self._processes.append(self._launch(n, names))
            for n in range(self._size):
                self._await(n)
        except BaseException:
            self.__exit__()
            raise
        return self

    def _join(self, n: int) -> None:
        space = self._space(n)
        _ip("netns", "add", space)
        _ip("-n", space, "link", "set", "lo", "up")
        for kind, address in (("p", self._peer(n)), ("c", self._client(n))):
            outside, bridge = f"dt{self._tag}{kind}{n}", f"dt{self._tag}{kind}"
            _ip("link", "add", outside, "type", "veth", "peer", "name", f"{kind}0", "netns", space)
            _ip("link", "set", outside, "master", bridge, "up")
            _ip("-n", space, "addr", "add", f"{address}/24", "dev", f"{kind}0")
            _ip("-n", space, "link", "set", f"{kind}0", "up")

    def _launch(self, n: int, names: str) -> subprocess.Popen[bytes]:
        client, peer = f"http://{self._client(n)}:2379", f"http://{self._peer(n)}:2380"
        words = ["ip", "netns", "exec", self._space(n), find_etcd(), "--name", f"m{n}"]
        words += ["--data-dir", str(self._folder / f"m{n}"), "--initial-cluster", names]
        words += ["--listen-client-urls", client, "--advertise-client-urls", client]
        words += ["--listen-peer-urls", peer, "--initial-advertise-peer-urls", peer]
        words += ["--heartbeat-interval", "100", "--election-timeout", "1000", "--log-level", "warn"]
        with (self._folder / f"m{n}.log").open("wb") as log:
            return subprocess.Popen(words, stdout=log, stderr=log, start_new_session=True)

    def _await(self, n: int) -> None:
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        deadline = time.monotonic() + 30
        while True:
            try:
                with opener.open(f"http://{self._client(n)}:2379/health", timeout=2.0) as answer:
                    if b'"true"' in answer.read():
                        return
            except (OSError, urllib.error.URLError):
                pass
            if time.monotonic() > deadline:
                raise AssertionError((self._folder / f"m{n}.log").read_text()[-2000:])
            time.sleep(0.05)

    def isolate(self, n: int) -> None:
        """Cut the connections between a member and the others."""
        _ip("-n", self._space(n), "link", "set", "p0", "down")

    def rejoin(self, n: int) -> None:
        """Restore the connections between a member and the others."""
        _ip("-n", self._space(n), "link", "set", "p0", "up")

    def __exit__(self, *_: object) -> None:
        for process in self._processes:
            process.kill()
            process.wait()
        for n in range(self._size):
            for kind in "pc":
                subprocess.run(["ip", "link", "del", f"dt{self._tag}{kind}{n}"], capture_output=True, check=False)
            subprocess.run(["ip", "netns", "del", self._space(n)], capture_output=True, check=False)
        for kind in "pc":
            subprocess.run(["ip", "link", "del", f"dt{self._tag}{kind}"], capture_output=True, check=False)


TABLE = "t"
JOBS, ROWS = 12, 20


@pytest.mark.parametrize("role", ["leader", "follower"])
def test_a_daemon_leaves_a_partitioned_member_and_keeps_its_session(
    role: str, tmp_path: Path, journal: Journal, sample_env: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """W8: the member reports that it has no leader, and the daemon moves to another member."""
    need(namespaces_available(), "root and network namespaces: run it as root, with iproute2")
    monkeypatch.setenv("DISTOP_ACCEPT_ETCD_DEFECTS", "1")
    with NamespacedEtcd(tmp_path) as etcd:
        everywhere = ",".join(etcd.endpoints)
        number = _find_member(etcd.endpoints, leader=role == "leader")
        # The daemon connects first to the member that will be isolated.
        mine = [etcd.endpoints[number], *(e for n, e in enumerate(etcd.endpoints) if n != number)]
        with daemons(everywhere, tmp_path) as group:
            group.client.add_table(TableRecord(TABLE, "parquet", str(tmp_path)), check=False)
            ann = group.spawn("ann", "--etcd", ",".join(mine), ttl=10, env=sample_env)
            group.await_ready("ann")
            before = set(group.client.nodes())
            arg = {"jobs": JOBS, "rows": ROWS, "pause": 0.1, "journal": str(journal.path)}
            operation = group.client.start_operation("writing", TABLE, arg)
            group.eventually(lambda: len(journal.lines()) > 10, "the jobs write")
            etcd.isolate(number)
            result = operation.wait(120)
            assert result.state == "success", group.tails()
            assert "failed; using" in ann.log.read_text()
            assert set(group.client.nodes()) == before, "its session continues on another member"
            etcd.rejoin(number)
            written = Written(everywhere, OperationRef.parse(operation.ref))
            assert_data(written, journal, JOBS, ROWS)


def _find_member(endpoints: tuple[str, ...], *, leader: bool) -> int:
    async def is_leader(endpoint: str) -> bool:
        async with connected(endpoint) as client:
            status = await client.status()
            return bool(status.leader == status.member_id)

    return next(n for n, endpoint in enumerate(endpoints) if asyncio.run(is_leader(endpoint)) is leader)
