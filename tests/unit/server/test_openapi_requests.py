"""Requests that schemathesis makes from /openapi.json: each answer is one that the document describes.

The service runs on the model of etcd, in a thread. A refused request must not have changed it.
"""

from __future__ import annotations

import asyncio
import threading
from typing import TYPE_CHECKING, Any

import httpx
import pytest
from hypothesis import HealthCheck, given, settings

from tests.unit.server.test_fuzzing import UNMODELLED
from tests.unit.support.model_service import ModelService
from tests.unit.support.model_submission import TABLE, Etcd

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

# 500 requests are one test. It takes 5 s alone, and more than a minute on a busy machine, which is no failure.
pytestmark = [pytest.mark.rotating, pytest.mark.timeout(600)]
EXAMPLES = 10


class Served:
    """A service over HTTP."""

    def __init__(self, folder: Path) -> None:
        self.etcd = Etcd()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="service", daemon=True)
        self._thread.start()
        self._service, port = self._run(self._started(folder))
        self.url = f"http://127.0.0.1:{port}"

    def _run(self, work: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(60)

    async def _started(self, folder: Path) -> tuple[ModelService, int]:
        await self.etcd.client.start_operation("noop", TABLE, {})
        found = ModelService(self.etcd, folder)
        return found, await found.rest.start("127.0.0.1", 0)

    def close(self) -> None:
        self._run(self._service.rest.stop(1))
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(30)
        self._loop.close()


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    found = Served(tmp_path_factory.mktemp("service"))
    yield found
    found.close()


def test_each_answer_is_one_of_the_document(served: Served) -> None:
    import schemathesis
    from schemathesis.checks import not_a_server_error
    from schemathesis.specs.openapi.checks import (
        content_type_conformance,
        response_schema_conformance,
        status_code_conformance,
    )

    document = httpx.get(f"{served.url}/openapi.json").json()
    checks = [not_a_server_error, content_type_conformance, response_schema_conformance, status_code_conformance]
    sent: dict[str, set[int]] = {}
    for found in schemathesis.openapi.from_dict(document).get_all_operations():
        operation = found.ok()
        name = operation.definition.raw["operationId"].replace("_", "/")
        if name not in UNMODELLED:
            sent.setdefault(name, set()).update(_codes(served, operation, checks))
    assert len(sent) > 40
    assert sum(200 in codes for codes in sent.values()) > 10


def _codes(served: Served, operation: Any, checks: list[Any]) -> set[int]:
    """Send random requests of an operation, check the answers, and return their statuses."""
    codes: set[int] = set()

    @settings(deadline=None, max_examples=EXAMPLES, suppress_health_check=list(HealthCheck))
    @given(case=operation.as_strategy())
    def send(case: Any) -> None:
        before = served.etcd.store.revision
        answer = case.call_and_validate(base_url=served.url, checks=checks, timeout=60)
        codes.add(answer.status_code)
        assert answer.status_code == 200 or served.etcd.store.revision == before

    send()
    return codes
