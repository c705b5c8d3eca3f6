"""What the ports of a JVM with Spark answer to somebody who has no secret of Spark's."""

from __future__ import annotations

import contextlib
import socket
import struct
from pathlib import Path

SECONDS = 10.0
"""For an answer."""
_LISTENS = "0A"


def listening(pid: int) -> list[int]:
    """The TCP ports on which a process listens."""
    own = set()
    for descriptor in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(OSError):
            own.add(str(descriptor.readlink()))
    found = set()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
            _, local, _, state, *_, inode = line.split()[:10]
            if state == _LISTENS and f"socket:[{inode}]" in own:
                found.add(int(local.rpartition(":")[2], 16))
    return sorted(found)


def asked_for_a_block(port: int, block: str = "broadcast_0_piece0") -> bytes:
    """The answer to a request of Spark's block transfer, as a program sends it that has connected and nothing else;
    empty where there is none."""

    def text(what: str) -> bytes:
        return struct.pack(">i", len(what)) + what.encode()

    opened = b"\x00" + text("app") + text("driver") + struct.pack(">i", 1) + text(block)
    request = b"\x03" + struct.pack(">qi", 1, len(opened))
    answer = b""
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), SECONDS) as connection:
        connection.sendall(struct.pack(">q", 8 + len(request) + len(opened)) + request + opened)
        while len(answer) < 8 or len(answer) < struct.unpack(">q", answer[:8])[0]:
            if not (part := connection.recv(1 << 16)):
                break
            answer += part
    return answer
