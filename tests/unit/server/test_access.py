"""Identities, roles and grants of the service, and the rule of each call."""

from __future__ import annotations

import hashlib
from itertools import product
from typing import Any

import pytest
from google.protobuf import descriptor_pool

from distop.client import service_messages as m
from distop.errors import InvalidArgument, NotIdentified, PermissionDenied
from distop.protocol.actor_claims import Token
from distop.protocol.records import OperationRef
from distop.server import access, gate
from distop.server.access import EVERYTHING, CallerRole, CallScope, parsed
from distop.server.gate import AccessFile, AuditLog, CallerProof, CallGate, TooManyCalls, caller
from distop.server.handlers import services
from distop.server.permissions import RULES
from distop.v1 import claims_pb2, operations_pb2, policies_pb2, tables_pb2
from distop.v1 import nodes_pb2 as nodes


def digest(token: str) -> str:
    return hashlib.sha256(token.encode()).hexdigest()


FILE = f"""
[identities.etl]
token_sha256 = ["{digest("etl token")}"]
[identities.ops]
certificates = ["CN=ops", "URI:spiffe://ops"]
[identities.root]
token_sha256 = ["{digest("root token")}"]
calls_per_second = 2
[identities.nobody]
token_sha256 = ["{digest("nobody token")}"]

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
ACCESS = parsed(FILE, "file")
WHO = {one.name: one for one in ACCESS.identities}


@pytest.mark.parametrize(
    ("token", "certificates", "name"),
    [
        ("etl token", (), "etl"),
        ("root token", ("CN=ops",), "root"),
        ("wrong", ("CN=ops",), None),
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
    assert all(access.OPEN.permits(None, role, EVERYTHING) for role in CallerRole)


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
        parsed(text, "the-file")
    assert str(caught.value).startswith("the-file")
    assert "\n" not in str(caught.value)


# ------------------------------------------------------------------------- calls


def test_each_call_has_a_rule() -> None:
    backend: Any = None
    calls = {
        f"{name.rpartition('.')[2]}/{method.name}"
        for name in services(backend)
        for method in descriptor_pool.Default().FindServiceByName(name).methods
    }
    assert set(RULES) == calls


READING = ("Get", "List", "Watch", "Why", "Counts", "Offer", "WaitForJobs")


def test_calls_that_write_need_more_than_a_viewer() -> None:
    for call, rule in RULES.items():
        reads = call.partition("/")[2].startswith(READING)
        assert rule.writes is not reads, call
        assert (rule.role is CallerRole.VIEWER) is (reads and call != "Claims/Offer"), call


OP = "sales.orders/validate/1"
TOKEN = str(Token(OperationRef.parse(OP), 0, 5, "0123456789abcdef"))
AFTER = operations_pb2.After(op="hr.pay/purge/1")


@pytest.mark.parametrize(
    ("call", "request_", "scopes"),
    [
        (
            "Operations/Start",
            operations_pb2.StartRequest(type="validate", table="t", options=operations_pb2.StartOptions(after=[AFTER])),
            [CallScope("validate", "t"), CallScope("purge", "hr.pay")],
        ),
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


# -------------------------------------------------------------------------- gate


@pytest.fixture
def guarded(tmp_path: Any) -> CallGate:
    path = tmp_path / "access.toml"
    path.write_text(FILE)
    return CallGate(AccessFile(path), AuditLog(tmp_path / "audit.jsonl"))


def ask(guarded: CallGate, call: str, request: Any, token: str | None = None) -> Any:
    with guarded.passing(call, request, CallerProof(token, (), "ipv4:127.0.0.1:9")) as passed:
        return passed, caller.get()


def test_a_call_without_an_identity_or_a_permission_is_refused_and_logged(guarded: CallGate, tmp_path: Any) -> None:
    cancel = operations_pb2.CancelRequest(op=OP, request_id="r1")
    with pytest.raises(NotIdentified, match="send a bearer token, or use a client certificate"):
        ask(guarded, "Operations/Cancel", cancel)
    with pytest.raises(NotIdentified, match="belongs to no identity"):
        ask(guarded, "Operations/Cancel", cancel, "wrong")
    with pytest.raises(PermissionDenied, match="etl may not call Operations/Cancel here: it needs the role operator"):
        ask(guarded, "Operations/Cancel", cancel, "etl token")
    _, who = ask(guarded, "Operations/Cancel", cancel, "root token")
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
    guarded = CallGate(AccessFile(path))
    passed, _ = ask(guarded, "Operations/List", operations_pb2.ListRequest(), "etl token")
    answer = operations_pb2.ListResponse()
    for op in (OP, "hr.pay/purge/1", "sales/validate/1"):
        answer.operations.add(op=op)
    assert [one.op for one in passed.answer(answer).operations] == [OP]
    passed, _ = ask(guarded, "Tables/List", tables_pb2.ListTablesRequest(), "etl token")
    tables = tables_pb2.ListTablesResponse(tables=[tables_pb2.Table(name="hr.pay"), tables_pb2.Table(name="sales.a")])
    assert [one.name for one in passed.answer(tables).tables] == ["sales.a"]
    with pytest.raises(PermissionDenied):
        ask(guarded, "Operations/List", operations_pb2.ListRequest(), "nobody token")
    passed, _ = ask(guarded, "Operations/GetPrepared", operations_pb2.GetPreparedRequest(external_id="x"), "etl token")
    with pytest.raises(PermissionDenied, match="none of yours"):
        passed.answer(operations_pb2.GetPreparedResponse(op="hr.pay/purge/1"))


def test_an_identity_makes_so_many_calls_a_second(guarded: CallGate, monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(gate.time, "monotonic", lambda: now)
    request = operations_pb2.GetRequest(op=OP)
    for _ in range(2):
        ask(guarded, "Operations/Get", request, "root token")
    with pytest.raises(TooManyCalls, match="root makes more than 2 calls a second"):
        ask(guarded, "Operations/Get", request, "root token")
    ask(guarded, "Operations/Get", request, "etl token")
    now += 0.5
    ask(guarded, "Operations/Get", request, "root token")
    with pytest.raises(TooManyCalls):
        ask(guarded, "Operations/Get", request, "root token")


def test_the_access_file_is_read_again_and_a_wrong_one_is_not_applied(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    now = 100.0
    monkeypatch.setattr(gate.time, "monotonic", lambda: now)
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
