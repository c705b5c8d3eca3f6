"""A server that accepts connections and never answers, like a blocked service."""

from __future__ import annotations

import socket
import threading
from typing import TYPE_CHECKING, Self

if TYPE_CHECKING:
    import pytest

LOCATIONS = {"s3": "s3://bucket/table", "gs": "gs://anonymous@bucket/table"}
"""A location for each kind of object store, by its scheme."""


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

    def serve(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Let pyarrow find it as S3 and as Google's store: in :data:`LOCATIONS`."""
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://{self.address}")
        monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
        monkeypatch.setenv("CLOUD_STORAGE_EMULATOR_ENDPOINT", f"http://{self.address}")

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
