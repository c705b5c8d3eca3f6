"""Messages of the service: each value of a client crosses the network unchanged."""

from __future__ import annotations

import inspect
from dataclasses import fields
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import pytest
from google.protobuf import descriptor_pool

from distop import errors
from distop.client import service_messages as m
from distop.client.backend import Backend
from distop.client.direct_backend import DirectBackend
from distop.client.remote_backend import RemoteBackend
from distop.client.service_errors import CODES, DETAILS, error_of, status_of
from distop.protocol.actor_claims import Token
from distop.protocol.behavior_declaration import Declaration, Retry
from distop.protocol.json_codec import dumps
from distop.protocol.policy import Policy, PolicyState
from distop.protocol.records import Node, OperationRef, TableRecord
from distop.server.handlers import services
from distop.services.claims import owned_jobs as claims
from distop.services.claims.types_without_code import TypeOptions
from distop.services.inspection.outcomes import JobResult
from distop.services.inspection.reasons import Code, Reason
from distop.services.inspection.status import JobStates
from distop.services.inspection.survey import Count
from distop.services.inspection.why import Why
from distop.services.operation_results import OperationStatus
from distop.services.policies import PolicyStatus
from distop.services.submission.option_values import After, Every
from distop.services.submission.start_options import StartOptions
from distop.v1 import operations_pb2

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

LARGE = 2**63 + 1
"""An integer that no double holds."""
REF = OperationRef.parse("t/noop/7")
STATUS = OperationStatus(
    "t/noop/7",
    "running",
    "open",
    {"total": 9, "success": 3, "failed": 1, "running": 2, "waiting": 0},
    "2026-01-31T18:00:00.000Z",
    progress=0.25,
    eta_seconds=12.5,
    waiting_for="a free slot",
    cancel={"reason": "user", "text": "enough", "by": "ann", "time": "2026-01-31T18:00:01.000Z"},
    errors=({"partition": "a", "text": "it failed"},),
    exact=False,
    failed="3,7-9",
    failed_truncated=True,
    request_id="once",
    request_digest="d",
    submitter="ann",
    rerun_of="t/noop/6",
    labels={"team": "lake"},
    id="nightly",
    doing=({"executor": "e", "text": "reading"},),
    work={"files": LARGE},
    options={"priority": 5},
    by="ben",
    actions={"actions": [{"action": "pause"}], "actions_dropped": 1},
)


@pytest.mark.parametrize(
    "options",
    [
        StartOptions(),
        StartOptions(labels={}, where={}, after=[]),
        StartOptions(
            partitions=["a", "b=ü"],
            request_id="r",
            failure_policy="collect_all",
            retry_attempts=3,
            time_limit=1.5,
            submitter="s",
            labels={"a": "b"},
            delay=0.0,
            after=["t/noop/1", After(REF, "end")],
            priority=-5,
            max_jobs=0,
            max_jobs_per_executor=2,
            max_failed="2%",
            where={"zone": "a"},
            every=Every(60.0, 1.0, "start", "success", "2126-01-31T18:00:00Z", 3),
            id="i",
            on_duplicate="replace",
            traceparent="00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01",
        ),
        StartOptions(max_failed=5, every=60.0, not_before=datetime(2126, 1, 31, tzinfo=UTC)),
        StartOptions(one_off=True, not_before="2126-01-31T18:00:00+01:00"),
    ],
)
def test_options_of_a_start_cross_the_network(options: StartOptions) -> None:
    wire = operations_pb2.StartOptions.FromString(m.options_message(options).SerializeToString())
    sent, found = options.checked(), m.start_options(wire).checked()
    if isinstance(options.not_before, datetime):
        sent["not_before"] = options.not_before.isoformat()
    assert found == {name: value for name, value in sent.items() if name != "after" or value}


def test_the_message_has_each_option_of_a_start() -> None:
    assert {one.name for one in fields(StartOptions)} == {
        one.name for one in operations_pb2.StartOptions.DESCRIPTOR.fields
    }


def wire(message: Any) -> Any:
    """The message as it arrives."""
    return type(message).FromString(message.SerializeToString())


def test_a_status_crosses_the_network() -> None:
    assert m.operation_status(wire(m.operation_message(STATUS))) == STATUS
    fresh = OperationStatus("t/noop/7", "running", "planning", {"total": None, "success": 0}, "")
    found = m.operation_status(wire(m.operation_message(fresh)))
    assert found == fresh


def test_reasons_cross_the_network_also_those_of_a_newer_service() -> None:
    why = Why("t/noop/7", STATUS, (Reason(next(iter(Code)), "a slot", "wait", stops=False),))
    message = wire(m.why_message(why))
    assert m.why_value(message) == why
    message.reasons[0].code = "from-the-future"
    assert m.why_value(message).reasons[0].to_json()["code"] == "from-the-future"


@pytest.mark.parametrize(
    ("to_message", "to_value", "value"),
    [
        (m.count_message, m.count_value, Count("noop", "running", 3, 1, 2.5)),
        (m.count_message, m.count_value, Count("noop", "running", 3, 0, None)),
        (m.job_message, m.job_value, JobResult(1, "a", True, {"n": LARGE}, "", "e", 2, "s", "f", {"path": "p"})),
        (m.job_message, m.job_value, JobResult(0, "ü", False, None, "it failed")),
        (m.table_message, m.table_value, TableRecord("t", "iceberg", "/x", {"n": LARGE})),
        (m.behavior_message, m.behavior_value, Declaration("noop", {"type": "object"}, retry=Retry(5, 0.5, 9.0))),
        (m.offered_message, m.offered_value, claims.OfferedJob("t/n/1", "n", "t", "", "a", 3, [LARGE], 1, 0, {"f": 1})),
        (
            m.offered_message,
            m.owned_value,
            claims.OwnedJob("t/n/1", "n", "t", "o", "a", 3, None, 1, 0, {}, token="x", duration=2.5),
        ),
        (m.policy_message, m.policy_value, PolicyStatus("t", "p", None, PolicyState(), 0, "it cannot be read")),
        (
            m.policy_message,
            m.policy_value,
            PolicyStatus(
                "t", "p", Policy("compact", "u", {"n": LARGE}, 60.0, ("version",), "files > 5"), PolicyState(1.5)
            ),
        ),
    ],
)
def test_a_value_crosses_the_network(to_message: Any, to_value: Any, value: Any) -> None:
    assert to_value(wire(to_message(value))) == value


def test_a_name_that_is_not_utf_8_is_escaped() -> None:
    found = m.job_value(wire(m.job_message(JobResult(0, "a=\udcff", False, None, "no \udcff"))))
    assert (found.name, found.error) == ("a=\\udcff", "no \\udcff")


def test_a_node_crosses_the_network() -> None:
    node = Node("e", "h", 2, ("noop",), {"zone": "a"}, "1.0")
    assert m.node_value(wire(m.node_message("i", node))) == node


@pytest.mark.parametrize(
    "outcome",
    [
        claims.Complete(),
        claims.Complete({"n": LARGE}),
        claims.Abort("no"),
        claims.Abort("no", [1]),
        claims.Retry("later"),
        claims.Retry(),
        claims.Release(),
    ],
)
def test_the_outcome_of_a_job_crosses_the_network(outcome: claims.OwnedOutcome) -> None:
    token = str(Token(REF, 0, 5, "0123456789abcdef"))
    message = wire(m.return_message(token, outcome))
    assert (message.token, m.outcome_value(message)) == (token, outcome)


def test_a_declaration_without_code_crosses_the_network() -> None:
    options = TypeOptions(
        result_schema={"type": "object"},
        object_field="path",
        instances="one",
        conflicts_with=["noop"],
        retry=Retry(5, 0.5, 9.0),
        failure_policy="collect_all",
        description="copies",
    )
    schema = {"type": "object", "properties": {"path": {"type": "string"}}}
    made = options.declaration("copy", schema)
    message = wire(m.registration_message(made, True))
    assert m.type_options(message).declaration("copy", m.given_json(message, "arg_schema")) == made
    plain = TypeOptions().declaration("copy")
    message = wire(m.registration_message(plain, False))
    assert m.type_options(message).declaration("copy", m.given_json(message, "arg_schema")) == plain


def test_deeply_nested_json_is_refused() -> None:
    with pytest.raises(errors.InvalidArgument, match="nested too deeply"):
        m.json_value(m.json_pb2.Json(text="[" * 200_000))


@pytest.mark.parametrize("options", [5, "x", None, [1]])
def test_options_of_a_table_that_are_no_object_are_refused(options: Any) -> None:
    with pytest.raises(errors.InvalidArgument, match="the options of a table must be an object"):
        m.table_value(m.tables_pb2.Table(name="t", options=m.json_message(options)))


@pytest.mark.parametrize("retry", [5, [1], {"attempts": "x"}, {"attempts": float("inf")}])
def test_a_retry_policy_that_is_not_valid_is_refused(retry: Any) -> None:
    message = m.behaviors_pb2.RegisterBehaviorRequest(type="x", options=m.json_message({"retry": retry}))
    with pytest.raises(errors.InvalidArgument, match="is no retry policy"):
        m.type_options(message)


def test_an_error_with_a_lone_surrogate_crosses_the_network() -> None:
    assert status_of(errors.InvalidArgument("a\ud800b"))[1] == "a\\ud800b"


def test_json_that_is_not_valid_is_refused() -> None:
    with pytest.raises(errors.InvalidArgument, match="no valid JSON"):
        m.json_value(m.json_pb2.Json(text="{"))
    assert m.json_value(wire(m.json_message("\ud800"))) == "\ud800"
    assert dumps(m.json_value(m.json_message({"a": [1, 2.0]}))) == b'{"a":[1,2.0]}'


# ------------------------------------------------------------------------ errors


class Failed:
    """A failed call."""

    def __init__(self, status: tuple[Any, str, bytes]) -> None:
        self._status = status

    def code(self) -> Any:
        return self._status[0]

    def details(self) -> str:
        return self._status[1]

    def trailing_metadata(self) -> Any:
        return ((DETAILS, self._status[2]),) if self._status[2] else ()


@pytest.mark.parametrize("kind", CODES)
def test_each_error_crosses_the_network(kind: type[errors.DistopError]) -> None:
    failed: Any = Failed(status_of(kind("one sentence")))
    found = error_of(failed, "host:1", writes=True)
    assert (type(found), str(found)) == (kind, "one sentence")


def test_an_unexpected_error_shows_nothing_of_itself() -> None:
    code, text, details = status_of(errors.DistopError("a secret"))
    assert (code.name, text, details) == ("INTERNAL", "internal error: see the log of the service", b"")
    failed: Any = Failed((code, text, details))
    assert str(error_of(failed, "host:1", writes=False)).startswith("the service at host:1 fails (INTERNAL: internal")
    unknown = error_of(failed, "host:1", writes=True, request_id="once")
    assert type(unknown) is errors.OutcomeUnknown
    assert "call again with request_id='once'" in str(unknown)


def test_details_that_are_not_ours_name_no_error() -> None:
    failed: Any = Failed((CODES[errors.NotFound], "gone", b"\xff\xff"))
    assert type(error_of(failed, "host:1", writes=True)) is errors.OutcomeUnknown


class FailingChannel:
    """A channel whose calls and streams raise these errors, one after the other."""

    def __init__(self, *failures: Exception) -> None:
        self.failures = list(failures)

    async def call(self, *_: Any, **__: Any) -> Any:
        raise self.failures.pop(0)

    async def stream(self, *_: Any) -> AsyncGenerator[Any, None]:
        raise self.failures.pop(0)
        yield


@pytest.mark.parametrize("kind", [errors.EtcdUnavailable, errors.ServiceUnavailable, errors.LimitExceeded])
async def test_waits_and_watches_are_repeated_while_the_service_cannot_answer(kind: type[errors.DistopError]) -> None:
    for use in ("end", "watch"):
        channel: Any = FailingChannel(kind("later"), errors.NotFound("gone"))
        remote = RemoteBackend(channel)
        with pytest.raises(errors.NotFound):
            await (remote.end(REF) if use == "end" else anext(remote.watch(REF, JobStates(), 1.0)))
        assert channel.failures == []


# ------------------------------------------------------------------------- calls


def names_of(kind: type) -> set[str]:
    return {name for name, one in inspect.getmembers(kind, inspect.isfunction) if not name.startswith("_")}


def test_both_backends_have_each_call() -> None:
    assert names_of(DirectBackend) == names_of(Backend)
    assert names_of(RemoteBackend) == names_of(Backend)


def test_each_call_of_the_services_has_a_handler() -> None:
    backend: Any = None
    for name, handlers in services(backend).items():
        methods = {one.name for one in descriptor_pool.Default().FindServiceByName(name).methods}
        assert names_of(type(handlers)) == methods - {"DeleteOperation"}
