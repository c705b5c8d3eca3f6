"""Identities, roles and grants of the service, and the rule of each call."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from itertools import product
from types import SimpleNamespace
from typing import Any

import pytest
from google.protobuf import descriptor_pool

from distop.client import service_messages as m
from distop.client.remote_backend import RemoteBackend
from distop.errors import (
    InvalidArgument,
    LimitExceeded,
    NotFound,
    NotIdentified,
    PermissionDenied,
    ServiceUnavailable,
)
from distop.protocol.actor_claims import Token
from distop.protocol.records import History, OperationRef, State
from distop.server import access, call_admission, handlers, limits
from distop.server.access import EVERYTHING, CallerRole, CallScope, parse
from distop.server.call_admission import AccessFile, AuditLog, CallAdmission, CallerCredentials, caller
from distop.server.grpc_server import credentials_of
from distop.server.handlers import services
from distop.server.permissions import RULES
from distop.services.inspection.history_filters import HistoryFilters, page_token
from distop.services.inspection.history_pages import HistoryPage
from distop.services.operation_results import OperationResult
from distop.v1 import claims_pb2, operations_pb2, policies_pb2, tables_pb2
from distop.v1 import nodes_pb2 as nodes


def digest(token: str) -> str:
    return hashlib.sha256(token.encode()).hexdigest()


FILE = f"""
[identities.etl]
token_sha256 = ["{digest("etl token of the tests")}"]
[identities.ops]
certificates = ["CN=ops", "URI:spiffe://ops"]
[identities.root]
token_sha256 = ["{digest("root token of the tests")}"]
calls_per_second = 2
[identities.nobody]
token_sha256 = ["{digest("nobody token of the tests")}"]

[[grants]]
to = ["etl"]
role = "submitter"
tables = ["sales.*"]
types = ["validate", "compact"]
[[grants]]
to = ["etl", "ops"]
role = "viewer"
[[grants]]
to = ["ops"]
role = "operator"
tables = ["hr.pay"]
[[grants]]
to = ["root"]
role = "admin"
"""
ACCESS = parse(FILE, "file")
WHO = {one.name: one for one in ACCESS.identities}


@pytest.mark.parametrize(
    ("token", "certificates", "name"),
    [
        ("etl token of the tests", (), "etl"),
        ("root token of the tests", ("CN=ops",), "root"),
        ("a wrong token of the tests", ("CN=ops",), None),
        ("", ("CN=ops",), None),
        (None, ("CN=ops",), "ops"),
        (None, ("CN=other", "URI:spiffe://ops"), "ops"),
        (None, ("ops",), None),
        (None, (), None),
    ],
)
def test_a_caller_is_identified_by_its_token_or_else_its_certificate(
    token: str | None, certificates: tuple[str, ...], name: str | None
) -> None:
    found = ACCESS.identity(token, certificates)
    assert (None if found is None else found.name) == name


@pytest.mark.parametrize(
    ("name", "role", "scope", "permitted"),
    [
        ("etl", CallerRole.SUBMITTER, CallScope("validate", "sales.orders"), True),
        ("etl", CallerRole.SUBMITTER, CallScope("purge", "sales.orders"), False),
        ("etl", CallerRole.SUBMITTER, CallScope("validate", "sales"), False),
        ("etl", CallerRole.SUBMITTER, CallScope("validate", "hr.pay"), False),
        ("etl", CallerRole.SUBMITTER, CallScope("validate", None), False),
        ("etl", CallerRole.SUBMITTER, CallScope(None, "sales.orders"), False),
        ("etl", CallerRole.SUBMITTER, EVERYTHING, False),
        ("etl", CallerRole.VIEWER, CallScope("purge", "hr.pay"), True),
        ("etl", CallerRole.OPERATOR, CallScope("validate", "sales.orders"), False),
        ("ops", CallerRole.OPERATOR, CallScope("purge", "hr.pay"), True),
        ("ops", CallerRole.OPERATOR, CallScope(None, "hr.pay"), True),
        ("ops", CallerRole.OPERATOR, EVERYTHING, False),
        ("ops", CallerRole.SUBMITTER, CallScope("purge", "hr.pay"), False),
        ("root", CallerRole.ADMIN, EVERYTHING, True),
        ("root", CallerRole.SUBMITTER, CallScope("x", "y"), True),
        ("etl", CallerRole.SUBMITTER, CallScope("join", "sales.orders"), False),
        ("etl", CallerRole.SUBMITTER, CallScope("join", "hr.pay"), False),
        ("ops", CallerRole.OPERATOR, CallScope("join", "@cluster"), False),
        ("nobody", CallerRole.VIEWER, EVERYTHING, False),
        ("nobody", CallerRole.VIEWER, CallScope("validate", "sales.orders"), False),
    ],
)
def test_a_grant_permits_its_role_for_its_types_and_tables_only(
    name: str, role: CallerRole, scope: CallScope, permitted: bool
) -> None:
    assert ACCESS.permits(WHO[name], role, scope) is permitted


def test_an_unknown_caller_may_do_nothing_if_callers_are_identified() -> None:
    assert not any(
        ACCESS.permits(None, role, scope) for role, scope in product(CallerRole, (EVERYTHING, CallScope("a", "b")))
    )
    assert all(access.UNRESTRICTED.permits(None, role, EVERYTHING) for role in CallerRole)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "has no identities"),
        ("x", "is not valid TOML"),
        ("other = 1", "'other' is not one of grants, identities"),
        ("identities = 5", "identities must be tables"),
        ("identities.a = 5", "identities must be tables"),
        ("[identities.a]", "has neither token_sha256 nor certificates"),
        ("[identities.a]\ntoken_sha256 = ['x']", "SHA-256 digests"),
        ("[identities.a]\ntoken_sha256 = 'x'", "token_sha256 must be a list of texts"),
        ("[identities.a]\ntoken = ['x']", "'token' is not one of"),
        ("[identities.a]\ncertificates = ['CN=a']\ncalls_per_second = true", "must be a number from 0 to a million"),
        ("[identities.a]\ncertificates = ['CN=a']\n[identities.b]\ncertificates = ['CN=a']", "have the same token or"),
        (
            "[identities.a]\ncertificates = ['CN=a']\n[[grants]]\nto = ['b']\nrole = 'viewer'",
            "not one of the identities",
        ),
        ("[identities.a]\ncertificates = ['CN=a']\n[[grants]]\nto = []\nrole = 'viewer'", "is to nobody"),
        (
            "[identities.a]\ncertificates = ['CN=a']\n[[grants]]\nto = ['a']\nrole = 'king'",
            "role must be one of viewer",
        ),
        ("[identities.a]\ncertificates = ['CN=a']\n[[grants]]\nto = ['a']", "role must be one of viewer"),
        (
            "[identities.a]\ncertificates = ['CN=a']\n[[grants]]\nto = ['a']\nrole = 'viewer'\ntables = []",
            "an empty list grants nothing",
        ),
        (
            "[identities.a]\ncertificates = ['CN=a']\n[[grants]]\nto = ['a']\nrole = 'viewer'\ntables = ['*']",
            "neither a table's name nor a prefix",
        ),
    ],
)
def test_a_wrong_access_file_is_refused_in_one_sentence(text: str, words: str) -> None:
    with pytest.raises(InvalidArgument, match=words) as caught:
        parse(text, "the-file")
    assert str(caught.value).startswith("the-file")
    assert "\n" not in str(caught.value)


# ------------------------------------------------------------------------- calls


def test_each_call_has_a_rule() -> None:
    backend: Any = None
    calls = {
        f"{name.rpartition('.')[2]}/{method.name}"
        for name, handlers_ in services(backend).items()
        for method in descriptor_pool.Default().FindServiceByName(name).methods
        if hasattr(handlers_, method.name)
    }
    assert set(RULES) == calls


READING = ("Get", "List", "Wait", "Watch", "Why", "Counts", "Offer")


def test_calls_that_write_need_more_than_a_viewer() -> None:
    for call, rule in RULES.items():
        reads = call.partition("/")[2].startswith(READING)
        assert rule.writes is not reads, call
        assert (rule.role is CallerRole.VIEWER) is (reads and call != "Claims/Offer"), call


OP = "sales.orders/validate/1"
TOKEN = str(Token(OperationRef.parse(OP), 0, 5, "0123456789abcdef"))
AFTER = operations_pb2.After(op="hr.pay/purge/1")
REFERENCES = m.json_message({"checks": [{"references": {"table": "hr.pay", "column": "id", "to": "id"}}]})
PAY = CallScope("validate", "hr.pay", CallerRole.VIEWER)
JOIN = operations_pb2.StartGraphRequest.Start(type="join", table="@cluster")


@pytest.mark.parametrize(
    ("call", "request_", "scopes"),
    [
        (
            "Operations/Start",
            operations_pb2.StartRequest(type="validate", table="t", options=operations_pb2.StartOptions(after=[AFTER])),
            [CallScope("validate", "t"), CallScope("purge", "hr.pay")],
        ),
        (
            "Operations/Start",
            operations_pb2.StartRequest(type="validate", table="t", arg=REFERENCES),
            [CallScope("validate", "t"), PAY],
        ),
        (
            "Policies/Set",
            policies_pb2.SetPolicyRequest(table="t", name="p", start="validate", arg=REFERENCES),
            [CallScope("validate", "t"), PAY],
        ),
        ("Operations/StartGraph", operations_pb2.StartGraphRequest(starts=[JOIN]), [EVERYTHING]),
        (
            "Operations/StartGraph",
            operations_pb2.StartGraphRequest(
                starts=[
                    operations_pb2.StartGraphRequest.Start(type="copy", table="t"),
                    operations_pb2.StartGraphRequest.Start(
                        type="join", table="@cluster", options=operations_pb2.StartOptions(after=[AFTER])
                    ),
                    operations_pb2.StartGraphRequest.Start(type="join", table="hr.pay"),
                ]
            ),
            [CallScope("copy", "t"), CallScope("purge", "hr.pay"), CallScope("join", "hr.pay")],
        ),
        ("Operations/Counts", operations_pb2.CountsRequest(table="t", type="x"), [CallScope("x", "t")]),
        ("Operations/Cancel", operations_pb2.CancelRequest(op=OP), [CallScope("validate", "sales.orders")]),
        ("Operations/Confirm", operations_pb2.ConfirmRequest(external_id="x"), [EVERYTHING]),
        ("Operations/StartGraph", operations_pb2.StartGraphRequest(), [EVERYTHING]),
        ("Operations/Counts", operations_pb2.CountsRequest(), [EVERYTHING]),
        ("Operations/Counts", operations_pb2.CountsRequest(table="t"), [CallScope(None, "t")]),
        ("Tables/Add", tables_pb2.AddTableRequest(table=tables_pb2.Table(name="t")), [CallScope(None, "t")]),
        ("Policies/Set", policies_pb2.SetPolicyRequest(table="t", name="p", start="purge"), [CallScope("purge", "t")]),
        ("Claims/Own", claims_pb2.OwnRequest(types=m.limits_message({"copy": 1})), [CallScope("copy", None)]),
        ("Claims/Extend", claims_pb2.ExtendRequest(tokens=[TOKEN]), [CallScope("validate", "sales.orders")]),
        ("Claims/Return", claims_pb2.ReturnRequest(token=TOKEN), [CallScope("validate", "sales.orders")]),
        ("Nodes/Drain", nodes.DrainRequest(executor="e"), [EVERYTHING]),
    ],
)
def test_the_scope_of_a_call_is_what_it_concerns(call: str, request_: Any, scopes: list[CallScope]) -> None:
    assert list(RULES[call].scopes(request_)) == scopes


# --------------------------------------------------------------------- admission


@pytest.fixture
def guarded(tmp_path: Any) -> CallAdmission:
    path = tmp_path / "access.toml"
    path.write_text(FILE)
    return CallAdmission(AccessFile(path), AuditLog(tmp_path / "audit.jsonl"))


def ask(guarded: CallAdmission, call: str, request: Any, token: str | None = None) -> Any:
    with guarded.admit(call, request, CallerCredentials(token, (), "ipv4:127.0.0.1:9")) as admitted:
        return admitted, caller.get()


def test_a_call_without_an_identity_or_a_permission_is_refused_and_logged(
    guarded: CallAdmission, tmp_path: Any
) -> None:
    cancel = operations_pb2.CancelRequest(op=OP, request_id="r1")
    with pytest.raises(NotIdentified, match="send a bearer token, or use a client certificate"):
        ask(guarded, "Operations/Cancel", cancel)
    with pytest.raises(NotIdentified, match="belongs to no identity"):
        ask(guarded, "Operations/Cancel", cancel, "a wrong token of the tests")
    with pytest.raises(PermissionDenied, match="etl may not call Operations/Cancel here: it needs the role operator"):
        ask(guarded, "Operations/Cancel", cancel, "etl token of the tests")
    _, who = ask(guarded, "Operations/Cancel", cancel, "root token of the tests")
    assert (who.identity.name, who.admin) == ("root", True)
    lines = [m.loads(line) for line in (tmp_path / "audit.jsonl").read_text().splitlines()]
    assert [(one["identity"], one["verdict"], one["request_id"]) for one in lines] == [
        (None, "NotIdentified", "r1"),
        (None, "NotIdentified", "r1"),
        ("etl", "PermissionDenied", "r1"),
        ("root", "ok", "r1"),
    ]
    assert lines[2]["concerns"] == [{"type": "validate", "table": "sales.orders"}]
    assert (tmp_path / "audit.jsonl").stat().st_mode & 0o777 == 0o600
    assert "token" not in (tmp_path / "audit.jsonl").read_text()


def test_a_list_has_only_what_the_caller_may_see(tmp_path: Any) -> None:
    path = tmp_path / "access.toml"
    path.write_text(FILE.replace('role = "viewer"', 'role = "viewer"\ntables = ["sales.*"]'))
    guarded = CallAdmission(AccessFile(path))
    admitted, _ = ask(guarded, "Operations/List", operations_pb2.ListRequest(), "etl token of the tests")
    answer = operations_pb2.ListResponse()
    for op in (OP, "hr.pay/purge/1", "sales/validate/1"):
        answer.operations.add(op=op)
    assert [one.op for one in admitted.answer(answer).operations] == [OP]
    admitted, _ = ask(guarded, "Tables/List", tables_pb2.ListTablesRequest(), "etl token of the tests")
    tables = tables_pb2.ListTablesResponse(tables=[tables_pb2.Table(name="hr.pay"), tables_pb2.Table(name="sales.a")])
    assert [one.name for one in admitted.answer(tables).tables] == ["sales.a"]
    with pytest.raises(PermissionDenied):
        ask(guarded, "Operations/List", operations_pb2.ListRequest(), "nobody token of the tests")
    admitted, _ = ask(
        guarded, "Operations/GetPrepared", operations_pb2.GetPreparedRequest(external_id="x"), "etl token of the tests"
    )
    with pytest.raises(PermissionDenied, match="none of yours"):
        admitted.answer(operations_pb2.GetPreparedResponse(op="hr.pay/purge/1"))


def test_an_identity_makes_so_many_calls_a_second(guarded: CallAdmission, monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(call_admission.time, "monotonic", lambda: now)
    request = operations_pb2.GetRequest(op=OP)
    for _ in range(2):
        ask(guarded, "Operations/Get", request, "root token of the tests")
    with pytest.raises(LimitExceeded, match="root makes more than 2 calls a second"):
        ask(guarded, "Operations/Get", request, "root token of the tests")
    ask(guarded, "Operations/Get", request, "etl token of the tests")
    now += 0.5
    ask(guarded, "Operations/Get", request, "root token of the tests")
    with pytest.raises(LimitExceeded):
        ask(guarded, "Operations/Get", request, "root token of the tests")


def test_the_access_file_is_read_again_and_a_wrong_one_is_not_applied(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    now = 100.0
    monkeypatch.setattr(call_admission.time, "monotonic", lambda: now)
    path = tmp_path / "access.toml"
    path.write_text(FILE)
    found = AccessFile(path)
    for text, count, words in (("x", 4, "is not applied"), (FILE.split("[identities.nobody]")[0], 3, "read again")):
        path.write_text(text)
        now += 2
        assert len(found.current().identities) == count
        assert words in caplog.text or words == "read again"
    path.unlink()
    now += 2
    assert len(found.current().identities) == 3


def test_an_access_file_that_others_can_write_is_refused(tmp_path: Any) -> None:
    path = tmp_path / "access.toml"
    path.write_text(FILE)
    path.chmod(0o666)
    with pytest.raises(InvalidArgument, match=r"the access file .* is refused: it can be written by the group"):
        AccessFile(path)
    with pytest.raises(InvalidArgument, match="cannot read the access file"):
        AccessFile(tmp_path / "none")


LIMITED = FILE.replace('role = "viewer"', 'role = "viewer"\ntables = ["sales.*"]\ntypes = ["validate"]')


@pytest.fixture
def limited(tmp_path: Any) -> CallAdmission:
    """An admission whose identity etl may see operations of the type validate on the tables sales.*."""
    path = tmp_path / "limited.toml"
    path.write_text(LIMITED.replace('"compact"', '"export"'))
    return CallAdmission(AccessFile(path), AuditLog(tmp_path / "audit.jsonl"))


def test_a_reference_to_a_table_needs_its_viewer(limited: CallAdmission) -> None:
    start = operations_pb2.StartRequest(type="validate", table="sales.a", arg=REFERENCES)
    with pytest.raises(PermissionDenied):
        ask(limited, "Operations/Start", start, "etl token of the tests")
    start.arg.text = start.arg.text.replace("hr.pay", "sales.b")
    ask(limited, "Operations/Start", start, "etl token of the tests")


def test_counts_and_policies_have_only_the_types_of_the_caller(limited: CallAdmission) -> None:
    admitted, _ = ask(
        limited, "Operations/Counts", operations_pb2.CountsRequest(table="sales.a"), "etl token of the tests"
    )
    counts = operations_pb2.CountsResponse(
        counts=[operations_pb2.CountsResponse.Count(type=one) for one in ("validate", "purge")]
    )
    assert [one.type for one in admitted.answer(counts).counts] == ["validate"]
    policies = [
        policies_pb2.Policy(table="sales.a", name=one, definition=m.json_message({"start": one}))
        for one in ("validate", "purge")
    ]
    admitted, _ = ask(limited, "Policies/List", policies_pb2.ListPoliciesRequest(), "etl token of the tests")
    found = admitted.answer(policies_pb2.ListPoliciesResponse(policies=policies))
    assert [one.name for one in found.policies] == ["validate"]
    admitted, _ = ask(
        limited, "Policies/Get", policies_pb2.GetPolicyRequest(table="sales.a", name="p"), "etl token of the tests"
    )
    assert admitted.answer(policies[0]) is policies[0]
    with pytest.raises(PermissionDenied, match="a type that is none of yours"):
        admitted.answer(policies[1])


def test_the_policies_of_a_hidden_table_are_refused_before_it_is_looked_for(limited: CallAdmission) -> None:
    with pytest.raises(PermissionDenied):
        ask(limited, "Policies/List", policies_pb2.ListPoliciesRequest(table="hr.pay"), "etl token of the tests")


def test_executors_are_listed_without_the_work_for_operations_of_others(limited: CallAdmission) -> None:
    admitted, _ = ask(limited, "Nodes/List", nodes.ListNodesRequest(), "etl token of the tests")
    work = {OP: "reads", "hr.pay/purge/1": "deletes", "all operations": "waits"}
    answer = nodes.ListNodesResponse()
    answer.nodes.add(executor="e", record=m.json_message({"doing": work, "skipped": work, "work": work, "slots": 2}))
    record = m.json_value(admitted.answer(answer).nodes[0].record)
    assert record == {"doing": {OP: "reads"}, "skipped": {OP: "reads"}, "work": {OP: "reads"}, "slots": 2}


def test_an_open_call_ends_when_its_grant_does(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(call_admission.time, "monotonic", lambda: now)
    path = tmp_path / "access.toml"
    path.write_text(FILE)
    guarded = CallAdmission(AccessFile(path), AuditLog(tmp_path / "audit.jsonl"))
    watch = operations_pb2.WatchRequest(op="hr.pay/purge/1")
    for text, error in (
        (LIMITED, PermissionDenied),
        (FILE.replace(digest("etl token of the tests"), "0" * 64), NotIdentified),
    ):
        path.write_text(FILE)
        now += 2
        admission = guarded.admit("Operations/Watch", watch, CallerCredentials("etl token of the tests"))
        with pytest.raises(error), admission as admitted:
            admitted.check()
            path.write_text(text)
            now += 2
            admitted.check()
    lines = [m.loads(line) for line in (tmp_path / "audit.jsonl").read_text().splitlines()]
    assert [one["verdict"] for one in lines] == ["PermissionDenied", "NotIdentified"]


def test_an_identity_has_so_many_open_calls(guarded: CallAdmission, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "MOST_OPEN", 1)
    watch = operations_pb2.WatchRequest(op=OP)
    with guarded.admit("Operations/Watch", watch, CallerCredentials("etl token of the tests")):
        with pytest.raises(LimitExceeded, match="has 1 open calls"):
            ask(guarded, "Operations/Watch", watch, "etl token of the tests")
        ask(guarded, "Operations/Watch", watch, "root token of the tests")
    ask(guarded, "Operations/Watch", watch, "etl token of the tests")


def test_a_line_of_the_audit_log_has_a_bounded_length(guarded: CallAdmission, tmp_path: Any) -> None:
    long = "x" * 100_000
    for token in (None, "etl token of the tests"):
        with pytest.raises((NotIdentified, PermissionDenied)):
            start = operations_pb2.StartRequest(type=long, table=long)
            start.options.request_id = long
            ask(guarded, "Operations/Start", start, token)
    lines = (tmp_path / "audit.jsonl").read_text().splitlines()
    assert len(lines) == 2
    assert max(map(len, lines)) < 1_500


def test_a_call_that_must_be_logged_is_not_made_while_the_log_cannot_be_written(
    guarded: CallAdmission, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    full, cancel = True, operations_pb2.CancelRequest(op=OP)
    written = call_admission.os.write

    def write(file: int, data: bytes) -> int:
        if full:
            raise OSError(28, "No space left on device")
        return written(file, data[:10])

    monkeypatch.setattr(call_admission.os, "write", write)
    ask(guarded, "Operations/Cancel", cancel, "root token of the tests")
    with pytest.raises(ServiceUnavailable, match="cannot write its audit log"):
        ask(guarded, "Operations/Cancel", cancel, "root token of the tests")
    ask(guarded, "Operations/Get", operations_pb2.GetRequest(op=OP), "etl token of the tests")
    full = False
    with pytest.raises(PermissionDenied):
        ask(guarded, "Operations/Cancel", cancel, "etl token of the tests")
    lines = [m.loads(line) for line in (tmp_path / "audit.jsonl").read_text().splitlines()]
    assert [one["verdict"] for one in lines] == ["ok", "ServiceUnavailable", "PermissionDenied"]


def test_a_name_in_a_certificate_counts_as_its_own_kind_only() -> None:
    context: Any = SimpleNamespace(
        invocation_metadata=lambda: (("authorization", "Bearer x"),),
        peer=lambda: "ipv4:127.0.0.1:9",
        auth_context=lambda: {
            "x509_common_name": [b"me"],
            "x509_subject_alternative_name": [b"spiffe://ops", b"CN=root", b"URI:b", b"a@b.c"],
            "peer_uri": [b"spiffe://ops", b"CN=root"],
            "peer_dns": [b"URI:b"],
            "peer_email": [b"a@b.c"],
        },
    )
    found = credentials_of(context)
    assert found == CallerCredentials(
        "x", ["CN=me", "DNS:URI:b", "URI:spiffe://ops", "URI:CN=root"], "ipv4:127.0.0.1:9"
    )


OPS = ("sales.a/validate/1", "hr.pay/purge/1", "hr.pay/purge/2", "sales.a/validate/2", "hr.pay/purge/3")
TOKENS = {page_token(OperationRef.parse(op), 1): op for op in OPS}


class OfTwo:
    """A backend with a history of operations of two tables, and a policy."""

    def __init__(self) -> None:
        self.asked: list[tuple[int, str | None]] = []
        self.set: list[str] = []

    async def history(self, table: str | None, size: int, wanted: Any) -> HistoryPage:
        after = TOKENS.get(wanted.after)
        self.asked.append((size, after))
        ops = list(TOKENS.values())
        first = ops.index(after) + 1 if after else 0
        page = ops[first : first + size]
        token = list(TOKENS)[first + size - 1] if first + size < len(ops) else None
        return HistoryPage([ended(one) for one in page], token)

    async def policy(self, table: str, name: str) -> Any:
        if name == "new":
            raise NotFound("gone")
        return SimpleNamespace(policy=SimpleNamespace(start=name))

    async def set_policies(self, table: str, new: Any) -> Any:
        self.set += new
        raise NotFound("enough")


def ended(op: str) -> OperationResult:
    times = {"started": "2026-01-31T18:00:00.000Z", "finished": "2026-01-31T18:00:01.000Z"}
    return OperationResult.of(History(op=op, state=State.SUCCESS, total=1, success=1, failed=0, **times))


async def test_a_page_token_names_no_hidden_operation(limited: CallAdmission) -> None:
    backend: Any = OfTwo()
    calls, pages = services(backend)["distop.v1.Operations"], []
    token: str | None = None
    while True:
        request = operations_pb2.ListHistoryRequest(page_size=2, page_token=token)
        with limited.admit("Operations/ListHistory", request, CallerCredentials("etl token of the tests")) as admitted:
            answer = admitted.answer(await calls.ListHistory(request))
        pages.append([one.op for one in answer.operations])
        if not answer.HasField("next_page_token"):
            break
        token = answer.next_page_token
        assert TOKENS[token].startswith("sales.")
    assert pages == [["sales.a/validate/1", "sales.a/validate/2"], []]


async def test_a_page_of_the_history_ends_after_so_many_bytes(
    guarded: CallAdmission, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(handlers, "MOST_BYTES", 1)
    monkeypatch.setattr(handlers, "MOST_RECORDS", 2)
    backend = OfTwo()
    calls = services(backend)["distop.v1.Operations"]  # type: ignore[arg-type]

    class Channel:
        """The service, without a network."""

        async def call(self, method: str, message: Any, *, writes: bool) -> Any:
            with guarded.admit(method, message, CallerCredentials("etl token of the tests")) as admitted:
                return admitted.answer(await calls.ListHistory(message))

    remote = RemoteBackend(Channel())  # type: ignore[arg-type]
    page = await remote.history(None, 3, HistoryFilters())
    assert [one.op for one in page] == ["sales.a/validate/1", "hr.pay/purge/1", "hr.pay/purge/2"]
    assert backend.asked == [(2, None), (1, "hr.pay/purge/1")]
    rest = await remote.history(None, 10**10, HistoryFilters(after=page.after))
    assert ([one.op for one in rest], rest.after) == (["sales.a/validate/2", "hr.pay/purge/3"], None)


async def test_a_policy_is_not_replaced_by_an_admin_of_other_types(tmp_path: Any) -> None:
    path = tmp_path / "access.toml"
    path.write_text(FILE.replace('role = "submitter"', 'role = "admin"'))
    guarded, backend = CallAdmission(AccessFile(path)), OfTwo()
    calls = services(backend)["distop.v1.Policies"]  # type: ignore[arg-type]
    for name, error in (("purge", PermissionDenied), ("compact", NotFound), ("new", NotFound)):
        request = policies_pb2.SetPolicyRequest(table="sales.a", name=name, start="validate", every="1h")
        with (
            pytest.raises(error),
            guarded.admit("Policies/Set", request, CallerCredentials("etl token of the tests")),
        ):
            await calls.Set(request)
    assert backend.set == ["compact", "new"]


def test_a_short_token_identifies_nobody(tmp_path: Any) -> None:
    path = tmp_path / "access.toml"
    path.write_text(f'[identities.a]\ntoken_sha256 = ["{digest("short")}"]')
    with pytest.raises(NotIdentified, match="a token has at least 20 characters"):
        CallAdmission(AccessFile(path)).check_identity("Operations/Get", CallerCredentials("short"))


def test_an_audit_log_is_a_regular_file(tmp_path: Any) -> None:
    for name in ("no_reader", "with_reader"):
        path = tmp_path / name
        os.mkfifo(path)
        reader = os.open(path, os.O_RDONLY | os.O_NONBLOCK) if name == "with_reader" else None
        with pytest.raises(InvalidArgument, match="audit log"):
            AuditLog(path)
        if reader is not None:
            os.close(reader)
    (tmp_path / "link").symlink_to(tmp_path / "target")
    with pytest.raises(InvalidArgument, match="cannot open the audit log"):
        AuditLog(tmp_path / "link")


def test_an_audit_log_on_the_standard_output_never_waits_for_its_reader() -> None:
    """Containers log there. Here nobody reads, until no further line can be kept."""
    code = """
from pathlib import Path
from distop.errors import ServiceUnavailable
from distop.server.call_admission import NOBODY, AuditLog
log, refused = AuditLog(Path("-")), False
while not refused:
    log.write(NOBODY, "Operations/Cancel", [], "r1", "ok")
    try:
        log.check()
    except ServiceUnavailable:
        refused = True
"""
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as process:
        assert process.wait(60) == 0
        assert process.stdout is not None
        line, *_ = process.stdout.read().splitlines()
    assert json.loads(line)["call"] == "Operations/Cancel"
