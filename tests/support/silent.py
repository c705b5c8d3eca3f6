"""A server that accepts connections and never answers, like a blocked service."""

from __future__ import annotations

import socket
import threading
from typing import Self


class SilentServer:
    """``connected`` is set once somebody has connected. Use it with ``with``."""

    def __init__(self) -> None:
        self._socket = socket.create_server(("127.0.0.1", 0))
        self._open: list[socket.socket] = []
        self.connected = threading.Event()
        threading.Thread(target=self._serve, daemon=True).start()

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self._socket.getsockname()[1]}"

    def locations(self) -> dict[str, str]:
        """A location at this server for each kind of object store, by its scheme."""
        where = f"scheme=http&endpoint_override={self.address.replace(':', '%3A')}"
        return {
            "s3": f"s3://bucket/table?region=us-east-1&{where}",
            "gs": f"gs://anonymous@bucket/table?{where}",
        }

    def _serve(self) -> None:
        while True:
            try:
                connection, _ = self._socket.accept()
            except OSError:
                return
            self._open.append(connection)
            self.connected.set()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._socket.close()
        for connection in self._open:
            connection.close()
