"""A place on S3 for tables of fault tests, with a faulty proxy between the store and the executors."""

from __future__ import annotations

import itertools
import json
import random
import threading
import uuid
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING
from urllib.parse import unquote

from distop.storage import storage_options
from tests.storage import servers
from tests.storage.faulty_http import FaultyProxy

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    import pytest

    from tests.storage.faulty_http import Seen
    from tests.storage.servers import Served

_THROTTLED = b"HTTP/1.1 503 Slow Down\r\ncontent-length: 0\r\nconnection: close\r\n\r\n"

SHORT = 0.5
"""Seconds after which the storage layer of an executor gives a throttled request up."""


@dataclass(frozen=True)
class S3Lake:
    """``location``: a new folder. The test reaches the store directly, and executors through ``proxy``."""

    served: Served
    proxy: FaultyProxy
    location: str

    def env(self, time_limit: float = 20.0) -> dict[str, str]:
        """The environment of executors. ``time_limit``: seconds for which the storage layer repeats a request."""
        options = {prefix: replace(one, time_limit=time_limit) for prefix, one in self._options().items()}
        return {"DISTOP_STORAGE": json.dumps(storage_options.as_given(options))}

    def _options(self) -> dict[str, storage_options.StorageOptions]:
        return self.served.options(self.proxy.port)


class KilledGateway:
    """A server that is killed around the first PUT of a key with a given part, and started again by the test.

    ``applied``: it is killed after the write, whose answer is lost; else before it.
    """

    def __init__(self, lake: S3Lake, part: str, *, applied: bool) -> None:
        assert lake.served.process is not None
        self.process = lake.served.process
        self._lake, self._part, self._applied = lake, part, applied
        self.killed = threading.Event()
        self._seen = 0
        self._lock = threading.Lock()
        lake.proxy.fault = self._fault

    def _fault(self, seen: Seen, forward: Callable[[bytes], bytes]) -> bytes | None:
        with self._lock:
            first = seen.method == "PUT" and self._part in unquote(seen.target) and not self.killed.is_set()
            if first:
                if self._applied:
                    forward(seen.whole)
                self.process.kill()
                self._seen = len(self._lake.proxy.seen)
                self.killed.set()
        return None if first else forward(seen.whole)

    def requests_without_server(self) -> int:
        """The number of requests since it was killed."""
        return len(self._lake.proxy.seen) - self._seen if self.killed.is_set() else 0


@contextmanager
def s3_lake(name: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[S3Lake]:
    """Run a server, for which the test and the executors that it starts are configured."""
    running = servers.moto() if name == "moto" else servers.versitygw(folder)
    with running as served, FaultyProxy(served.port) as proxy:
        for variable, value in served.environment.items():
            monkeypatch.setenv(variable, value)
        # pyarrow, with which a lookup reads rows in the test's process.
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{served.port}")
        monkeypatch.setenv("AWS_REGION", "us-east-1")
        monkeypatch.setenv("AWS_ALLOW_HTTP", "true")
        storage_options.configure(served.options())
        lake = S3Lake(served, proxy, f"{served.url}/{uuid.uuid4().hex}")
        monkeypatch.setenv("DISTOP_STORAGE", lake.env()["DISTOP_STORAGE"])
        try:
            yield lake
        finally:
            storage_options.configure({})


def lose_answers(lake: S3Lake) -> None:
    """Lose the answer of each write, and a third of the other answers.

    A part of an upload counts among the others: without any answer to its parts, an upload cannot be completed.
    """
    chance = random.Random(21)

    def fault(seen: Seen, forward: Callable[[bytes], bytes]) -> bytes | None:
        answer = forward(seen.whole)
        if seen.method == "PUT" and "partNumber=" not in seen.target:
            return None
        return answer if chance.random() > 1 / 3 else None

    lake.proxy.fault = fault


def double_requests(lake: S3Lake) -> None:
    """Forward each request twice."""
    lake.proxy.fault = lambda seen, forward: (forward(seen.whole), forward(seen.whole))[1]


def lose_requests(lake: S3Lake) -> None:
    """Lose a third of the requests before they come to the store.

    They are drawn: if each third one were lost, a write and the two reads after it would always lose the write.
    """
    chance = random.Random(21)
    lake.proxy.fault = lambda seen, forward: None if chance.random() < 1 / 3 else forward(seen.whole)


def delay_writes(lake: S3Lake) -> None:
    """Let a third of the writes come to the store after two later requests, when their client has given them up."""
    late: list[tuple[int, bytes]] = []
    lock, numbers, chance = threading.Lock(), itertools.count(), random.Random(21)

    def fault(seen: Seen, forward: Callable[[bytes], bytes]) -> bytes | None:
        with lock:
            number = next(numbers)
            if seen.method == "PUT" and chance.random() < 1 / 3:
                late.append((number + 2, seen.whole))
                return None
            due = [whole for when, whole in late if when <= number]
            late[:] = [one for one in late if one[0] > number]
        answer = forward(seen.whole)
        for whole in due:
            forward(whole)
        return answer

    lake.proxy.fault = fault


def throttle(lake: S3Lake) -> None:
    """Refuse the first requests of each kind: more than fit into :data:`SHORT`, but of removals.

    Whatever cannot be removed is removed an hour later.
    """
    counts: dict[str, int] = {}

    def fault(seen: Seen, forward: Callable[[bytes], bytes]) -> bytes:
        kind = f"{seen.method} list" if "list-type=2" in seen.target else seen.method
        counts[kind] = counts.get(kind, 0) + 1
        return _THROTTLED if counts[kind] <= (1 if kind in ("DELETE", "POST") else 6) else forward(seen.whole)

    lake.proxy.fault = fault


FAULTS = [lose_answers, double_requests, throttle]
