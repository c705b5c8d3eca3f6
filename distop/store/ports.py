"""Reserves loopback ports for our own servers, also while no server listens on them.

The system uses its ephemeral ports also for outgoing connections. While a server on such a port is down, another server
or connection may get the port; a client that keeps connecting to it is in the end connected to itself. So reserved
ports are below the ephemeral range, and each is held by an abstract socket name, unique in a network namespace.
"""

from __future__ import annotations

import socket
from pathlib import Path

from distop.clock import secrets

EPHEMERAL_RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")
_FIRST = 16384
_TRIES = 200

_held: dict[int, socket.socket | None] = {}


def reserve(count: int) -> list[int]:
    """Reserve free ports until :func:`release` or the end of this process.

    If no port below the ephemeral range is free, or names cannot be held (not on Linux), the system chooses ports that
    are free at the moment.
    """
    return [_reserve() for _ in range(count)]


def release(ports: list[int]) -> None:
    """Release reserved ports."""
    for port in ports:
        hold = _held.pop(port, None)
        if hold is not None:
            hold.close()


def _reserve() -> int:
    below = _first_ephemeral_port() - _FIRST
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
    """Check that a port is free (0: any); returns the port. Raises OSError."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", port))
        return int(probe.getsockname()[1])


def _first_ephemeral_port() -> int:
    try:
        return int(EPHEMERAL_RANGE.read_text().split()[0])
    except (OSError, ValueError, IndexError):
        return 0
