"""Reserved ports: free, and given to no other process."""

from __future__ import annotations

import socket
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from distop.store import ports

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture
def reserved() -> Iterator[list[int]]:
    found = ports.reserve(20)
    yield found
    ports.release(found)


def test_reserved_ports_are_free_and_below_the_ephemeral_range(reserved: list[int]) -> None:
    lowest = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    assert len(set(reserved)) == 20
    for port in reserved:
        assert 1024 < port < lowest
        with socket.socket() as server:
            server.bind(("127.0.0.1", port))
            server.listen()


def test_a_reserved_port_is_not_given_to_another_process(reserved: list[int]) -> None:
    """Even if it asks for exactly that one."""
    ask = f"""
from distop.store import ports
ports.secrets.randbits = lambda bits: {reserved[0]} - ports._FIRST
print(ports.reserve(1)[0])
"""

    def another() -> int:
        return int(subprocess.run([sys.executable, "-c", ask], capture_output=True, text=True, check=True).stdout)

    assert another() != reserved[0]
    ports.release(reserved[:1])
    assert another() == reserved[0]


def test_the_system_chooses_a_port_if_none_is_below_the_ephemeral_range(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    system = tmp_path / "range"
    system.write_text("1024 65000\n")
    monkeypatch.setattr(ports, "EPHEMERAL_RANGE", system)
    found = ports.reserve(5)
    assert len(set(found)) == 5
    ports.release(found)
