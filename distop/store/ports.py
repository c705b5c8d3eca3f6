"""Ports of the loopback for servers of our own: nobody is given one while it is ours, also while no server listens.

The ports that the system chooses it also gives to connections. While a server on such a port is down, another server
may get it, or a connection to anywhere; and a client that tries to reach it again and again is in the end connected
to itself. So these lie below the system's, and each is held by a name of which a network namespace has one.
"""

from __future__ import annotations

import socket
from pathlib import Path

from distop.clock import secrets

_SYSTEM = Path("/proc/sys/net/ipv4/ip_local_port_range")
_FIRST = 16384
_TRIES = 200

_held: dict[int, socket.socket | None] = {}


def reserve(count: int) -> list[int]:
    """Ports that are free, and no other's who asks here until they are released or this process ends.

    Where there are none below the system's own, or names cannot be held (on other systems than Linux), these are ports
    that the system says are free just now.
    """
    return [_reserve() for _ in range(count)]


def release(ports: list[int]) -> None:
    """They may be anybody's again."""
    for port in ports:
        hold = _held.pop(port, None)
        if hold is not None:
            hold.close()


def _reserve() -> int:
    below = _lowest_of_the_system() - _FIRST
    for _ in range(_TRIES if below > 0 else 0):
        port = _FIRST + secrets.randbits(32) % below
        hold = socket.socket(socket.AF_UNIX)
        try:
            hold.bind(f"\0distop-port-{port}")
            _bind(port)
        except OSError:
            hold.close()
            continue
        _held[port] = hold
        return port
    while (port := _bind(0)) in _held:
        pass
    _held[port] = None
    return port


def _bind(port: int) -> int:
    """The port that was free. Raises OSError."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", port))
        return int(probe.getsockname()[1])


def _lowest_of_the_system() -> int:
    try:
        return int(_SYSTEM.read_text().split()[0])
    except (OSError, ValueError, IndexError):
        return 0
