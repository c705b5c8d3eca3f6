"""Random messages and bytes to all calls over gRPC, and random requests over REST: no internal error, no lasting trace.

The service runs on the model of etcd. A refused call must not have changed it.
"""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING, Any

import grpc
import pytest
from google.protobuf import descriptor_pool, message_factory
from google.protobuf.descriptor import FieldDescriptor
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as s

from distop.server.handlers import services
from distop.server.json_messages import is_map
from tests.unit.support.model_service import ModelService
from tests.unit.support.model_submission import TABLE, Etcd

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

UNMODELLED = {
    *("Operations/Watch", "Operations/Wait", "Operations/WaitOperation"),
    *("Claims/Offer", "Claims/Own", "Claims/Extend", "Claims/Return", "Claims/WaitForJobs"),
}
"""Calls whose answers need a watch, which the model of etcd does not have: only raw bytes are sent to them."""
METHODS = [
    method
    for name, handlers in services(None).items()  # type: ignore[arg-type]
    for method in descriptor_pool.Default().FindServiceByName(name).methods
    if hasattr(handlers, method.name)
]
CALLS = {f"{one.containing_service.name}/{one.name}": one for one in METHODS}
REFUSED = {
    *("INVALID_ARGUMENT", "NOT_FOUND", "FAILED_PRECONDITION", "PERMISSION_DENIED", "UNAUTHENTICATED"),
    *("RESOURCE_EXHAUSTED", "DEADLINE_EXCEEDED"),
}
WORDS = f"""
{TABLE} noop join @cluster {TABLE}/noop/1 operations/{TABLE}/noop/1 operations p e1 sales 0 1h 5% auto-1 tx-1
success failed running end refuse version event:loaded done=true 2026-01-31T18:00:00Z https://a.example/b a%2Fb ../..
{TABLE}/noop/18446744073709551616
""".split()
TEXTS = s.sampled_from([*WORDS, "", "a" * 300, "\x00", "\u202e", '{"a": 1}']) | s.text(max_size=20)
JSON = s.recursive(
    s.none() | s.booleans() | s.integers() | s.floats() | TEXTS,
    lambda inner: s.lists(inner, max_size=3) | s.dictionaries(TEXTS, inner, max_size=3),
    max_leaves=5,
).map(json.dumps)
_WHOLE = {
    FieldDescriptor.CPPTYPE_INT32: s.integers(-(2**31), 2**31 - 1),
    FieldDescriptor.CPPTYPE_INT64: s.integers(-(2**63), 2**63 - 1),
    FieldDescriptor.CPPTYPE_UINT32: s.integers(0, 2**32 - 1),
    FieldDescriptor.CPPTYPE_UINT64: s.integers(0, 2**64 - 1),
    FieldDescriptor.CPPTYPE_BOOL: s.booleans(),
    FieldDescriptor.CPPTYPE_DOUBLE: s.floats(),
    FieldDescriptor.CPPTYPE_FLOAT: s.floats(width=32),
    FieldDescriptor.CPPTYPE_STRING: TEXTS,
}


VALID: dict[str, s.SearchStrategy[str]] = {
    **dict.fromkeys(("type", "start", "job_type"), s.sampled_from(["noop", "noop", "join"])),
    "table": s.just(TABLE),
    **dict.fromkeys(("op", "run", "job_id"), s.sampled_from([f"{TABLE}/noop/{n}" for n in (1, 1, 1, 2, 99)])),
    **dict.fromkeys(("external_id", "request_id", "event_id"), s.sampled_from(["tx-1", "tx-2"])),
    "name": s.sampled_from(["p", TABLE, "loaded"]),
    "executor": s.just("e1"),
    "format": s.just("parquet"),
    "location": s.just("/data"),
    "project_id": s.just("sales"),
    "catalog_id": s.just("orders"),
    "failure_policy": s.sampled_from(["fail_fast", "collect_all"]),
    "on_duplicate": s.sampled_from(["join", "refuse", "replace", "combine"]),
    "every": s.sampled_from(["1h", "30d"]),
    "on": s.sampled_from(["success", "end", "version", "event:loaded"]),
    "states": s.sampled_from(["success", "failed", "running"]),
    "max_failed": s.sampled_from(["5", "2%"]),
}
"""Valid texts of fields with these names, which most examples have: else each ends at the first check."""


def scalars(field: Any) -> s.SearchStrategy[Any]:
    valid = VALID.get(field.name)
    if field.containing_type.file.package == "google.longrunning" and field.name == "name":
        valid = s.sampled_from(["operations", *(f"operations/{TABLE}/noop/{n}" for n in (1, 1, 99))])
    if valid is not None and field.cpp_type == FieldDescriptor.CPPTYPE_STRING:
        return s.integers(0, 7).flatmap(lambda n: TEXTS if n == 7 else valid)
    if field.cpp_type in (FieldDescriptor.CPPTYPE_INT32, FieldDescriptor.CPPTYPE_INT64):
        return s.integers(-2, 5) | _WHOLE[field.cpp_type]
    return _WHOLE[field.cpp_type]


@s.composite
def messages(draw: s.DrawFn, kind: Any, depth: int = 0) -> Any:
    """A message of this descriptor, with some of its fields."""
    message = message_factory.GetMessageClass(kind)()
    if kind.full_name == "distop.v1.Json":
        plain = s.sampled_from(["{}", '{"jobs": 2}', '{"checks": [{"not_null": "id"}]}', "null"])
        message.text = draw(s.integers(0, 7).flatmap(lambda n: TEXTS if n == 7 else JSON if n > 4 else plain))
        return message
    for field in kind.fields:
        required = (field.name in VALID and not field.has_presence) or field.name in ("starts", "job")
        required = required and not (kind.name == "PolyCatJob" and field.name == "job_id")
        present = draw(s.integers(0, 15)) > (0 if required else 7 if depth == 0 else 12)
        if not present or (depth > 3 and field.message_type is not None):
            continue
        if is_map(field):
            for key, value in draw(s.dictionaries(TEXTS, TEXTS, max_size=3)).items():
                getattr(message, field.name)[key] = value
        elif field.message_type is not None:
            inner = messages(field.message_type, depth + 1)
            if field.is_repeated:
                getattr(message, field.name).extend(draw(s.lists(inner, max_size=3)))
            else:
                getattr(message, field.name).CopyFrom(draw(inner))
        elif field.is_repeated:
            getattr(message, field.name).extend(draw(s.lists(scalars(field), max_size=3)))
        else:
            setattr(message, field.name, draw(scalars(field)))
    return message


class Fuzzed:
    """A running service, and the loop that it runs in."""

    def __init__(self, folder: Path) -> None:
        self.loop = asyncio.new_event_loop()
        self.etcd = Etcd()
        self.service: ModelService = self.run(self._started(folder))

    async def _started(self, folder: Path) -> ModelService:
        """A service with an open operation."""
        found = await ModelService(self.etcd, folder).__aenter__()
        await self.etcd.client.start_operation("noop", TABLE, {})
        return found

    def run(self, work: Any) -> Any:
        return self.loop.run_until_complete(asyncio.wait_for(work, 60))

    def close(self) -> None:
        self.run(self.service.__aexit__())
        self.loop.close()

    def send(self, method: Any, data: bytes) -> tuple[str, str]:
        """The status of a call with these bytes, and its text."""

        async def work() -> tuple[str, str]:
            path = f"/{method.containing_service.full_name}/{method.name}"
            try:
                if method.server_streaming:
                    async for _ in self.service.channel.unary_stream(path)(data):
                        break
                else:
                    await self.service.channel.unary_unary(path)(data)
            except grpc.aio.AioRpcError as error:
                return error.code().name, str(error.details())
            return "OK", ""

        found: tuple[str, str] = self.run(work())
        return found

    def check(self, method: Any, data: bytes) -> None:
        before = self.etcd.store.revision
        code, text = self.send(method, data)
        assert code == "OK" or code in REFUSED, f"{method.full_name}: {code}: {text}"
        if code != "OK":
            assert self.etcd.store.revision == before, f"{method.full_name}: {code}: {text}, but it has written"
            assert len(text) < 20_000


@pytest.fixture(scope="module")
def fuzzed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fuzzed]:
    found = Fuzzed(tmp_path_factory.mktemp("service"))
    yield found
    found.close()


LOOSE = settings(
    deadline=None,
    max_examples=40,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow, HealthCheck.data_too_large],
)


@pytest.mark.rotating
@pytest.mark.parametrize("call", sorted(CALLS.keys() - UNMODELLED))
def test_a_random_message_is_answered_or_refused(fuzzed: Fuzzed, call: str) -> None:
    method = CALLS[call]

    @LOOSE
    @given(messages(method.input_type))
    def send(message: Any) -> None:
        fuzzed.check(method, message.SerializeToString())

    send()


@LOOSE
@given(s.sampled_from(METHODS), s.binary(max_size=50))
def test_random_bytes_are_answered_or_refused(fuzzed: Fuzzed, method: Any, data: bytes) -> None:
    kind = message_factory.GetMessageClass(method.input_type)
    if f"{method.containing_service.name}/{method.name}" in UNMODELLED:
        data = b"\xff" + data  # no message
    try:
        kind.FromString(data)
    except Exception:
        expected = {"INVALID_ARGUMENT"}
    else:
        expected = {"OK", *REFUSED}
    before = fuzzed.etcd.store.revision
    code, text = fuzzed.send(method, data)
    assert code in expected, f"{method.full_name}: {code}: {text}"
    assert code == "OK" or fuzzed.etcd.store.revision == before
