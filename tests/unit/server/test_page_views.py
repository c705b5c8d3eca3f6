"""The page: each view, who may see and do what, forms of other sites, texts that try to be HTML. Calls are scripted."""

from __future__ import annotations

import asyncio
import re
import shlex
from contextlib import asynccontextmanager
from html.parser import HTMLParser
from typing import TYPE_CHECKING, Any

import httpx
import pytest
import typer

from distop.cli.commands import commands
from distop.client import service_messages as m
from distop.errors import EtcdUnavailable, NotFound
from distop.protocol.behavior_declaration import Declaration
from distop.protocol.jobs import Outcome, Tried
from distop.protocol.json_codec import dumps
from distop.protocol.keys import Keys
from distop.protocol.policy import Evaluation, Policy, PolicyState, PolicyVerdict
from distop.protocol.records import History, Node, OperationRef, State, TableRecord
from distop.protocol.txn import KeyValue
from distop.server.call_admission import AccessFile, AuditLog, CallAdmission
from distop.server.handlers import services
from distop.server.http_server import HttpServer
from distop.server.page.page_app import HEADERS, PageApp
from distop.server.page.page_session import FORM_COOKIE, TOKEN_COOKIE
from distop.server.page.partition_reader import OperationPartitions, PartitionCache
from distop.server.page.partition_states import PartitionStates
from distop.services.inspection.reasons import Code, Reason
from distop.services.inspection.status import ended_status
from distop.services.inspection.why import Why
from distop.services.operation_results import OperationStatus
from distop.services.policies import PolicyStatus
from distop.store.client import Listing
from distop.v1 import (
    behaviors_pb2,
    nodes_pb2,
    operations_pb2,
    policies_pb2,
    tables_pb2,
)
from tests.unit.server.test_access import FILE

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Mapping
    from pathlib import Path

NAMES = tuple(services(None))  # type: ignore[arg-type]
ETL, ROOT, NOBODY = (f"{name} token of the tests" for name in ("etl", "root", "nobody"))
EVIL = "<script>alert('x')</script><img src=x onerror=alert(1)>\u202e"
OPEN, ENDED = "sales.orders/validate/2", "sales.orders/validate/1"
SCHEMA = {
    "type": "object",
    "required": ["jobs"],
    "additionalProperties": False,
    "properties": {
        "jobs": {"type": "integer", "description": EVIL, "default": 1},
        "mode": {"$ref": "#/$defs/Mode"},
        "strict": {"anyOf": [{"type": "boolean"}, {"type": "null"}]},
        "fail": {"type": "array", "items": {"type": "string"}},
    },
    "$defs": {"Mode": {"enum": ["fast", "slow"]}},
}


class Calls:
    """Handlers of one service that remember their requests, and answer what was scripted."""

    def __init__(self, name: str, asked: list[tuple[str, Any]], answers: Mapping[str, Any]) -> None:
        self._name, self._asked, self._answers = name, asked, answers

    def __getattr__(self, method: str) -> Any:
        async def call(request: Any) -> Any:
            self._asked.append((f"{self._name}/{method}", request))
            answer = self._answers[f"{self._name}/{method}"]
            if callable(answer):
                answer = answer(request)
            if isinstance(answer, Exception):
                raise answer
            made = type(answer)()
            made.CopyFrom(answer)
            return made

        return call


class EmptyEtcd:
    """An etcd that has the spec and the argument of each operation, and nothing else."""

    async def read(self, *gets: Any) -> list[Any]:
        return [_nothing() for _ in gets]

    async def list(self, start: str, end: str, **_: Any) -> Listing:
        found = ()
        if start.endswith(".arg"):
            found = (KeyValue(start, dumps({"checks": [EVIL]}), 5, 5),)
        return Listing(9, found)


def _nothing() -> Any:
    class Nothing:
        kv = None
        count = 0

    return Nothing()


def job(n: int, outcome: Outcome, state: bytes) -> list[KeyValue]:
    key = f"distOp.t.n.1.{n:06d}"
    return [KeyValue(f"{key}.state", state, 3 + n), KeyValue(f"{key}.outcome", outcome.encode(), 3 + n)]


class ScriptedPartitions(OperationPartitions):
    """Partitions that are known: the first has failed twice, the second is open, the others are done."""

    def __init__(self) -> None:
        super().__init__(EmptyEtcd(), Keys(), OperationRef.parse(OPEN))  # type: ignore[arg-type]
        tried = (Tried(1, "node-a", "the executor was lost while it ran the job"), Tried(2, "node-b", EVIL))
        times = "2026-01-01T00:00:00Z", "2026-01-01T00:00:03Z"
        self.states = PartitionStates(4)
        self.states.add_jobs(job(0, Outcome(f"day={EVIL}", "node-b", "i", 2, *times, None, EVIL, tried), b"failed"))
        for n in (2, 3):
            self.states.add_jobs(job(n, Outcome(f"day={n}", "node-a", "i", 1, *times, {"rows": 5}), b"success"))
        self.complete, self.revision, self.version = True, 6, 1

    def begin(self) -> None:
        """They are read already."""

    async def details(self, ordinals: Any) -> Any:
        from distop.server.page.partition_details import PartitionDetails
        from distop.server.page.partition_states import PartitionStage

        assert self.states is not None
        return [
            PartitionDetails(n, f"day={EVIL}", PartitionStage(self.states.stage[n]), 2, "node-b", 0.0, 3.0, 5, EVIL,
                             (Tried(1, "node-a", EVIL),), 1, {"seen": EVIL})
            for n in ordinals
        ]  # fmt: skip


class ScriptedCache(PartitionCache):
    """Has the same partitions for each operation."""

    @asynccontextmanager
    async def reading(self, ref: OperationRef) -> AsyncIterator[OperationPartitions]:
        yield ScriptedPartitions()


def status(op: str = OPEN, **given: Any) -> OperationStatus:
    fields = {"waiting_for": f"executors that run {EVIL}", "labels": {"team": EVIL}, "submitter": EVIL, **given}
    jobs = {"total": 4, "success": 2, "failed": 1, "running": 0, "waiting": 1}
    return OperationStatus(op, "running", "open", jobs, "2026-01-01T00:00:00Z", 0.75, 60.0, **fields)


def history() -> History:
    sample = {"partition": EVIL, "file": f"/data/{EVIL}", "row_index": 3, "values": {EVIL: EVIL, "id": None}}
    check = {"name": EVIL, "check": {"not_null": EVIL}, "verdict": "violated", "violations": 1, "samples": [sample],
             "evidence": {"files_statistics": 1, "files_scanned": 2}}  # fmt: skip
    report = {"verdict": "violated", "rows": 10, "checks": [check], "version": "v7", "note": EVIL,
              "certificate": {"version": "v7", "checks": [{"name": EVIL}], "rows": 10}}  # fmt: skip
    return History(ENDED, State.FAILED, "2026-01-01T00:00:00Z", "2026-01-01T00:01:00Z", 4, 3, 1, report,
                   ({"partition": EVIL, "text": EVIL},), "0")  # fmt: skip


def answers() -> dict[str, Any]:
    behavior = Declaration("validate", SCHEMA, description=f"Validates {EVIL}.")
    node = Node(f"node-{EVIL}", "host", 4, ("validate",), {"zone": EVIL}, "1", doing={OPEN: EVIL}, unable={"x": EVIL})
    evaluation = Evaluation("2026-01-01T00:00:00Z", PolicyVerdict.NO, EVIL)
    policy = Policy("validate", "uid", {}, 60.0, when="")
    table = TableRecord("sales.orders", "parquet", f"/data/{EVIL}", {"note": EVIL})
    ended = m.operation_message(ended_status(OperationRef.parse(ENDED), history()))
    reasons = (Reason(Code.NO_EXECUTOR, EVIL, f"start an executor for {EVIL}"),)
    started = operations_pb2.StartResponse(op=OPEN)

    def get(request: Any) -> Any:
        return ended if request.op == ENDED else m.operation_message(status(request.op))

    return {
        "Operations/List": operations_pb2.ListResponse(operations=[m.operation_message(status())]),
        "Operations/ListHistory": operations_pb2.ListHistoryResponse(operations=[ended, ended]),
        "Operations/Get": get,
        "Operations/Why": lambda request: m.why_message(Why(request.op, status(request.op), reasons)),
        "Operations/Cancel": operations_pb2.CancelResponse(),
        "Operations/Pause": operations_pb2.PauseResponse(),
        "Operations/Resume": operations_pb2.ResumeResponse(),
        "Operations/Alter": operations_pb2.AlterResponse(),
        "Operations/Rerun": started,
        "Operations/Start": started,
        "Tables/List": tables_pb2.ListTablesResponse(tables=[m.table_message(table)]),
        "Behaviors/List": behaviors_pb2.ListBehaviorsResponse(behaviors=[m.behavior_message(behavior)]),
        "Nodes/List": nodes_pb2.ListNodesResponse(nodes=[m.node_message("i1", node)]),
        "Nodes/Drain": nodes_pb2.DrainResponse(state="draining"),
        "Nodes/Undrain": nodes_pb2.UndrainResponse(),
        "Policies/List": policies_pb2.ListPoliciesResponse(
            policies=[m.policy_message(PolicyStatus("sales.orders", EVIL, policy, PolicyState(kept=(evaluation,))))]
        ),
        "Policies/Pause": m.policy_message(PolicyStatus("sales.orders", "p", policy, PolicyState())),
    }


class Site:
    """The page of a service, and a browser. ``identified``: callers are identified, by the file of the other tests."""

    def __init__(self, folder: Path, *, identified: bool = False) -> None:
        self.asked: list[tuple[str, Any]] = []
        self.answers = answers()
        self.audit = folder / "audit.jsonl"
        file = None
        if identified:
            path = folder / "access.toml"
            path.write_text(FILE.replace("calls_per_second = 2", ""))
            file = AccessFile(path)
        admission = CallAdmission(file, AuditLog(self.audit))
        handlers = {name: Calls(name.rpartition(".")[2], self.asked, self.answers) for name in NAMES}
        etcd: Any = EmptyEtcd()
        self.page = PageApp(handlers, admission, etcd, Keys(), ScriptedCache(etcd, Keys()))
        self.server = HttpServer(handlers, admission, self.page)
        self.cookies = httpx.Cookies()
        self.form = "/login" if identified else "/start?type=validate&table=t"

    def send(self, verb: str, path: str, **given: Any) -> httpx.Response:
        """The answer to a request, with the cookies of the answers before."""

        async def sent() -> httpx.Response:
            transport = httpx.ASGITransport(self.server)
            async with httpx.AsyncClient(
                transport=transport, base_url="http://127.0.0.1", cookies=self.cookies
            ) as browser:
                answer = await browser.request(verb, path, **given)
                self.cookies = browser.cookies
                return answer

        return asyncio.run(sent())

    def get(self, path: str, **given: Any) -> httpx.Response:
        return self.send("GET", path, **given)

    def key(self) -> str:
        """The value of the hidden field of forms."""
        found = re.search(r'name="form_key" value="([0-9a-f]{64})"', self.get(self.form).text)
        assert found is not None
        return found[1]

    def post(self, path: str, **fields: str) -> httpx.Response:
        return self.send("POST", path, data={"form_key": self.key(), **fields})

    def log_in(self, token: str) -> httpx.Response:
        return self.post("/login", token=token, next="/operations")

    def calls(self) -> list[str]:
        return [name for name, _ in self.asked]


@pytest.fixture
def site(tmp_path: Path) -> Site:
    return Site(tmp_path)


@pytest.fixture
def guarded(tmp_path: Path) -> Site:
    return Site(tmp_path, identified=True)


VIEWS = (
    "/operations",
    "/operations?table=sales.orders&type=validate&state=running&state=failed",
    f"/operation?op={OPEN}",
    f"/operation?op={ENDED}",
    f"/partitions?op={OPEN}&first=0&after=4",
    "/tables",
    "/table?name=sales.orders",
    "/nodes",
    "/start",
    "/start?type=validate&table=sales.orders",
)


# ------------------------------------------------------------------------ views


@pytest.mark.parametrize("path", VIEWS)
def test_each_view_is_shown_without_anything_that_a_text_could_run(site: Site, path: str) -> None:
    answer = site.get(path)
    assert answer.status_code == 200, answer.text
    for name, value in HEADERS.items():
        assert answer.headers[name] == value
    assert "'unsafe" not in answer.headers["content-security-policy"]
    _check_inert(answer.text)


class Elements(HTMLParser):
    """The elements of a page, with their attributes."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.codes: list[str] = []
        self._in_code = False
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))
        self._in_code = tag == "code"

    def handle_data(self, data: str) -> None:
        if self._in_code:
            self.codes.append(data)

    def handle_endtag(self, tag: str) -> None:
        self._in_code = False


def _check_inert(html: str) -> None:
    """No text became an element or an attribute, nothing is inline, and nothing is loaded from elsewhere."""
    assert "\u202e" not in html
    for tag, attributes in Elements(html).found:
        assert not [name for name in attributes if name == "style" or name.startswith("on")]
        assert tag not in ("style", "iframe", "object", "embed", "base")
        assert tag != "script" or attributes == {"src": "/static/page.js", "defer": None}
        assert tag != "img" or attributes["src"] == "/static/icon.svg"
        for name in ("src", "href", "action"):
            value = attributes.get(name)
            assert value is None or value.startswith(("/", "#")), value


def test_the_list_says_why_an_operation_waits(site: Site) -> None:
    html = site.get("/operations").text
    assert "waits for executors that run &lt;script&gt;" in html
    assert 'aria-label="3 of 4 jobs ended"' in html
    assert OPEN in html
    assert ENDED in html


def test_filters_of_the_url_are_those_of_the_calls(site: Site) -> None:
    site.get("/operations?table=t&type=validate&state=running&state=failed")
    asked = dict(site.asked)
    listed, ended = asked["Operations/List"], asked["Operations/ListHistory"]
    assert (listed.table, listed.type, list(listed.states)) == ("t", "validate", ["running"])
    assert (ended.table, ended.type, list(ended.states)) == ("t", "validate", ["failed"])
    site.asked.clear()
    site.get("/operations?state=success")
    assert site.calls() == ["Operations/ListHistory"]
    assert site.get("/operations?state=nonsense").status_code == 400


def test_an_operation_shows_its_failed_partitions_first_with_their_story(site: Site) -> None:
    html = site.get(f"/operation?op={OPEN}").text
    assert html.index("Failed first") < html.index("Argument")
    assert "<b>attempt 1</b> on node-a" in html
    assert "taken over" in html
    assert "It waits for" in html


def test_an_ended_operation_shows_its_report_and_samples(site: Site) -> None:
    html = site.get(f"/operation?op={ENDED}").text
    assert "violating rows" in html
    assert "&lt;img src=x onerror=alert(1)&gt;" in html
    assert "Ended as failed" in html


def test_a_table_shows_versions_certificates_and_decisions(site: Site) -> None:
    html = site.get("/table?name=sales.orders").text
    for words in ("v7", "Certificates", "Policies", "last decisions", "<b>no</b>", 'class="chart"'):
        assert words in html
    site.answers |= {
        "Operations/ListHistory": operations_pb2.ListHistoryResponse(),
        "Operations/List": operations_pb2.ListResponse(),
    }
    assert site.get("/table?name=other").status_code == 404


def test_a_cell_lists_its_partitions(site: Site) -> None:
    html = site.get(f"/partitions?op={OPEN}&first=1&after=3").text
    assert html.count("<tr>") == 3
    assert site.get(f"/partitions?op={OPEN}&first=x&after=3").status_code == 400


@pytest.mark.parametrize(
    ("path", "status_code"), [("/nonsense", 404), ("/static/../page_app.py", 404), ("/operation?op=x", 400)]
)
def test_what_does_not_exist_is_not_found(site: Site, path: str, status_code: int) -> None:
    answer = site.get(path)
    assert (answer.status_code, answer.headers["x-frame-options"]) == (status_code, "DENY")


def test_the_page_says_that_etcd_does_not_answer(site: Site) -> None:
    site.answers["Operations/List"] = EtcdUnavailable(f"etcd does not answer {EVIL}")
    answer = site.get("/operations")
    assert (answer.status_code, "The service cannot answer now" in answer.text) == (503, True)
    _check_inert(answer.text)


def test_its_files_have_types(site: Site) -> None:
    for name, kind in (("page.css", "text/css"), ("page.js", "text/javascript"), ("icon.svg", "image/svg+xml")):
        answer = site.get(f"/static/{name}")
        assert answer.headers["content-type"].startswith(kind)
        assert "http://" not in answer.text.replace("http://www.w3.org/2000/svg", "")
        assert "https://" not in answer.text


# ------------------------------------------------------------------------ forms


@pytest.mark.parametrize(
    ("form", "fields", "call"),
    [
        ("cancel", {"op": OPEN, "text": "why"}, "Operations/Cancel"),
        ("pause", {"op": OPEN, "now": "1"}, "Operations/Pause"),
        ("resume", {"op": OPEN}, "Operations/Resume"),
        ("alter", {"op": OPEN, "priority": "7", "max_jobs": "", "max_failed": "2%"}, "Operations/Alter"),
        ("rerun", {"op": ENDED, "unfinished": "yes"}, "Operations/Rerun"),
        ("start", {"type": "validate", "table": "t", "arg": '{"jobs": 3}', "request_id": "r1"}, "Operations/Start"),
        ("drain", {"executor": "node-a"}, "Nodes/Drain"),
        ("undrain", {"executor": "node-a"}, "Nodes/Undrain"),
        ("pause-policy", {"table": "sales.orders", "name": "p"}, "Policies/Pause"),
    ],
)
def test_a_form_makes_the_call_of_its_command(site: Site, form: str, fields: dict[str, str], call: str) -> None:
    answer = site.post(f"/do/{form}", **fields)
    assert answer.status_code == 303, answer.text
    assert answer.headers["location"].startswith("/")
    request = dict(site.asked)[call]
    for name in ("op", "text", "type", "table", "executor", "name"):
        if name in fields:
            assert getattr(request, name) == fields[name]
    if form == "alter":
        assert (request.priority, request.max_failed, request.HasField("max_jobs")) == (7, "2%", False)
    if form == "start":
        assert (m.given_json(request, "arg"), request.options.request_id) == ({"jobs": 3}, "r1")
    assert call in site.audit.read_text()


@pytest.mark.parametrize("key", [None, "", "0" * 64, "é"])
def test_a_form_of_another_site_does_nothing(site: Site, key: str | None) -> None:
    site.key()
    site.asked.clear()
    data = {"op": OPEN, **({"form_key": key} if key is not None else {})}
    assert site.send("POST", "/do/cancel", data=data).status_code == 403
    stolen = site.key()
    site.cookies.delete(FORM_COOKIE)
    assert site.send("POST", "/do/cancel", data={"op": OPEN, "form_key": stolen}).status_code == 403
    headers = {"origin": "http://evil.example"}
    good = {"op": OPEN, "form_key": site.key()}
    assert site.send("POST", "/do/cancel", data=good, headers=headers).status_code == 403
    assert site.send("POST", "/do/cancel", json=good).status_code == 400
    assert "Operations/Cancel" not in site.calls()


def test_a_refused_action_says_why(site: Site) -> None:
    site.answers["Operations/Cancel"] = NotFound(f"there is no operation {EVIL}")
    answer = site.post("/do/cancel", op=OPEN)
    assert answer.status_code == 404
    _check_inert(answer.text)
    assert site.post("/do/alter", op=OPEN, priority="high").status_code == 400
    assert site.post("/do/nonsense").status_code == 404
    assert site.post("/do/start", type="validate", table="t", arg="{").status_code == 400


def test_the_form_of_a_start_has_the_fields_of_the_schema(site: Site) -> None:
    html = site.get("/start?type=validate&table=sales.orders").text
    kinds = dict(re.findall(r'data-field="(\w+)" data-kind="(\w+)"', html))
    assert kinds == {"jobs": "number", "mode": "text", "strict": "boolean", "fail": "json"}
    assert "<option>fast</option>" in html
    assert html.index('data-field="jobs"') < html.index('data-field="mode"')


@pytest.mark.parametrize(
    ("arg", "words"),
    [
        ('{"jobs": 3}', ""),
        ("{}", "jobs"),
        ('{"jobs": "x"}', "jobs"),
        ("{", "not valid JSON"),
        ('{"jobs": 1, "n": 2}', "n"),
    ],
)
def test_an_argument_is_checked_as_it_is_typed(site: Site, arg: str, words: str) -> None:
    found = site.post("/check", type="validate", arg=arg).json()["problem"]
    assert (found == "") if not words else (words in found)


def test_the_command_line_accepts_each_command_that_the_page_shows(site: Site) -> None:
    shown_commands: set[str] = set()
    for path in (*VIEWS, f"/operation?op={ENDED}"):
        found = Elements(site.get(path).text)
        shown_commands |= {text for text in found.codes if text.startswith("distop ")}
        for _, attributes in found.found:
            for name in ("data-command", "title"):
                if (text := attributes.get(name) or "").startswith("distop "):
                    shown_commands.add(text)
    names = {text.split()[1] for text in shown_commands}
    assert names >= {"cancel", "pause", "alter", "rerun", "drain", "policy", "start"}
    for text in shown_commands:
        plain = re.sub(r"\$'(?:\\.|[^'\\])*'", "NAME", text)  # bash's quotes, which shlex does not know
        name, *left = shlex.split(plain)[1:]
        command: Any = typer.main.get_command(commands(name))
        left = [name, *left]
        with command.make_context("distop", list(left)) as context:
            while hasattr(command, "commands"):
                _, command, left = command.resolve_command(context, left)
            command.make_context(name, left, parent=context).close()


# ------------------------------------------------------------- who may see and do what


def test_a_stranger_gets_the_form_to_log_in_and_nothing_else(guarded: Site) -> None:
    for path in VIEWS:
        answer = guarded.get(path)
        if path.startswith("/partitions"):
            assert answer.status_code == 401
            continue
        assert answer.status_code == 303
        assert answer.headers["location"].startswith("/login?next=%2F")
    assert guarded.get(f"/live?page=operation&query=op%3D{OPEN}").status_code == 401
    assert guarded.post("/do/cancel", op=OPEN).status_code == 401
    assert guarded.asked == []


def test_a_token_stays_in_a_cookie_that_scripts_cannot_read(guarded: Site) -> None:
    wrong = guarded.log_in("a wrong token of the tests")
    assert (wrong.status_code, TOKEN_COOKIE in wrong.cookies, "a wrong token" in wrong.text) == (401, False, False)
    found = guarded.log_in(ETL)
    assert (found.status_code, found.headers["location"]) == (303, "/operations")
    cookie = found.headers["set-cookie"]
    assert all(part in cookie for part in ("HttpOnly", "SameSite=strict", "Path=/"))
    assert ETL not in cookie
    html = guarded.get("/operations").text
    assert ETL not in html
    assert ">etl<" in html
    out = guarded.post("/logout")
    assert (out.status_code, out.headers["location"]) == (303, "/login")
    assert guarded.get("/operations").status_code == 303


@pytest.mark.parametrize(
    "where", ["//evil.example", "https://evil.example", "/\\evil.example", "javascript:alert(1)", ""]
)
def test_a_login_leads_to_no_other_site(guarded: Site, where: str) -> None:
    found = guarded.post("/login", token=ETL, next=where)
    assert found.headers["location"] == "/operations"


def test_the_cookie_of_the_page_is_no_proof_for_rest(guarded: Site) -> None:
    guarded.log_in(ETL)
    assert guarded.get("/v1/tables").status_code == 401


def test_a_page_shows_only_the_actions_that_the_role_allows(guarded: Site) -> None:
    guarded.log_in(ETL)
    html = guarded.get(f"/operation?op={OPEN}").text
    assert re.search(r'<button class="danger" disabled', html)
    refused = guarded.post("/do/cancel", op=OPEN)
    assert (refused.status_code, "Operations/Cancel" in guarded.calls()) == (403, False)
    assert '"verdict": "PermissionDenied"' in guarded.audit.read_text()
    started = guarded.post("/do/start", type="validate", table="sales.orders", arg="{}")
    assert started.status_code == 303
    assert dict(guarded.asked)["Operations/Start"].options.submitter == ""
    assert guarded.post("/do/start", type="validate", table="hr.pay", arg="{}").status_code == 403


def test_an_admin_may_cancel_and_the_page_says_so(guarded: Site) -> None:
    guarded.log_in(ROOT)
    html = guarded.get(f"/operation?op={OPEN}").text
    assert re.search(r'<button class="danger">Cancel', html)
    assert f"distop cancel {OPEN}" in html
    assert guarded.post("/do/cancel", op=OPEN).status_code == 303


def test_who_has_no_grant_sees_nothing(guarded: Site) -> None:
    guarded.log_in(NOBODY)
    for path in ("/operations", f"/operation?op={OPEN}", f"/partitions?op={OPEN}&first=0&after=1", "/tables", "/nodes"):
        assert guarded.get(path).status_code == 403, path
    assert guarded.asked == []


# ---------------------------------------------------------------------- other sites


def test_another_name_of_this_machine_is_refused_without_identities(site: Site, guarded: Site) -> None:
    assert site.get("/operations", headers={"host": "evil.example"}).status_code == 403
    guarded.log_in(ETL)
    assert guarded.get("/operations", headers={"host": "lake.example"}).status_code in (200, 303)


def test_a_link_of_another_site_is_followed_but_nothing_else_of_it(site: Site, guarded: Site) -> None:
    link = {"sec-fetch-site": "cross-site", "sec-fetch-dest": "document", "sec-fetch-mode": "navigate"}
    assert site.get("/operations", headers=link).status_code == 200
    assert site.get("/operations", headers={**link, "sec-fetch-dest": "iframe"}).status_code == 403
    assert site.get("/static/page.js", headers={**link, "sec-fetch-dest": "script"}).status_code == 403
    assert site.get("/v1/tables", headers=link).status_code == 403
    assert site.send("POST", "/do/cancel", data={"op": OPEN}, headers=link).status_code == 403
    # The browser leaves a cookie of SameSite=Strict out: the page is loaded again, by the page itself.
    answer = guarded.get("/login?next=/nodes", headers=link)
    assert '<meta http-equiv="refresh" content="0; url=/nodes">' in answer.text
