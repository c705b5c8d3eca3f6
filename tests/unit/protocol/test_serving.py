"""Which types and tables an executor serves: the one decision, its settings, and who reads it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from distop.decide.coordinator_ranking import candidates, missing_executor, rank, unserved_tables
from distop.decide.view import ClusterView
from distop.errors import InvalidArgument, NotServed
from distop.protocol.dependencies import HoldState
from distop.protocol.executor_nodes import ALL, Serves, refusal
from distop.protocol.keys import Keys
from distop.protocol.plan import Gate, PartitionPlan, Pinned, Plan
from distop.protocol.prepared_operations import PreparedTerms
from distop.protocol.records import CLUSTER_TABLE, Node, TableRecord
from distop.protocol.txn import KeyValue
from distop.settings import Settings, executor_config
from distop.settings_file import SettingsFile
from distop.worker.child_side.call_handlers import Call
from distop.worker.child_side.environment import Environment
from distop.worker.child_side.runner import Run

SALES = Serves(tables=("sales.*", "hr.people"))


@pytest.mark.parametrize(
    ("serves", "type_name", "tables", "why"),
    [
        (ALL, "noop", ("sales.orders", CLUSTER_TABLE), ""),
        (SALES, "noop", ("sales.orders",), ""),
        (SALES, "noop", ("sales.eu.orders",), ""),
        (SALES, "noop", ("sales",), "it does not serve table sales"),
        (SALES, "noop", ("salesx.orders",), "it does not serve table salesx.orders"),
        (SALES, "noop", ("hr.people",), ""),
        (SALES, "noop", ("hr.people2",), "it does not serve table hr.people2"),
        (SALES, "noop", ("sales.orders", "hr.pay", "b"), "it does not serve the tables hr.pay, b"),
        (SALES, "noop", (CLUSTER_TABLE,), "it does not serve table @cluster"),
        (Serves(tables=(CLUSTER_TABLE,)), "noop", (CLUSTER_TABLE,), ""),
        (Serves(("noop",)), "noop", ("sales.orders",), ""),
        (Serves(("noop",)), "apply", (), "it does not serve the type apply"),
        (Serves(("noop",)), None, ("sales.orders",), ""),
        (Serves(("noop",), ("sales.*",)), "join", (CLUSTER_TABLE,), ""),
        (SALES, "noop", ("hr.\x1b[2J",), "it does not serve table hr.\\x1b[2J"),
    ],
)
def test_types_and_tables_that_are_not_listed_are_refused(
    serves: Serves, type_name: str | None, tables: tuple[str, ...], why: str
) -> None:
    assert refusal(serves, type_name, tables) == why


def config(file: SettingsFile | None = None, env: dict[str, str] | None = None, **flags: Any) -> Serves:
    settings = Settings(flags, env or {}, **({"file": file} if file is not None else {}))
    return executor_config(settings, {}).serves


def test_the_settings_come_from_a_flag_a_variable_or_the_file() -> None:
    assert config() == ALL
    assert config(types="validate, noop", tables="a.b,c.*") == Serves(("validate", "noop"), ("a.b", "c.*"))
    variables = {"DISTOP_TYPES": "noop", "DISTOP_TABLES": "a,a"}
    assert config(env=variables) == Serves(("noop",), ("a",))
    file = SettingsFile(Path("distop.toml"), {"types": ["noop"], "tables": ["a,b", "@cluster"]})
    assert config(file) == Serves(("noop",), ("a,b", "@cluster")), "a comma may stand in the name of a table"
    assert config(file, variables, types="apply") == Serves(("apply",), ("a",))


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"tables": "*"}, "--tables: '*' is neither a table nor a namespace"),
        ({"tables": ".*"}, "--tables: '.*' is neither"),
        ({"tables": "a.*.b"}, "--tables: 'a.*.b' is neither"),
        ({"tables": "a*"}, "--tables: 'a*' is neither"),
        ({"tables": "a..*"}, "--tables: 'a..*' is neither"),
        ({"tables": ""}, "--tables must be a table, a namespace or a list of them"),
        ({"tables": "a,,b"}, "--tables must be a table, a namespace or a list of them"),
        ({"tables": "a" * 300}, "--tables: the name"),
        ({"types": "1x"}, "--types: "),
        ({"types": ""}, "--types must be an operation type or a list of them"),
    ],
)
def test_bad_types_and_tables_are_refused_in_one_sentence(flags: dict[str, str], message: str) -> None:
    with pytest.raises(InvalidArgument) as refused:
        config(**flags)
    assert str(refused.value).startswith(message)
    assert "\n" not in str(refused.value)


def node(name: str, *tables: str, types: tuple[str, ...] | None = None) -> Node:
    return Node(name, "h", 1, ("noop",), serves=Serves(types, tables or None))


def test_the_node_record_lists_served_types_and_tables() -> None:
    one = node("e", "sales.*", types=("noop",))
    assert Node.decode(one.encode()) == one
    assert b'"types":["noop"],"tables":["sales.*"]' in one.encode()
    assert b"tables" not in node("e").encode()


def test_an_executor_that_does_not_serve_a_table_does_not_coordinate_there() -> None:
    nodes = {"a": node("a", "sales.*"), "b": node("b", "hr.*"), "c": Node("c", "h", 1, ("other",))}
    assert rank(nodes["a"], "noop", ("hr.pay",)) is None
    assert candidates(nodes, "noop", {}, ("hr.pay",)) == ["b"]
    assert missing_executor(nodes, "noop", {}, ("sales.orders",)) == ""
    assert missing_executor(nodes, "noop", {}, ("x",)) == "serves table x"
    assert missing_executor(nodes, "noop", {"zone": "a"}, ("x",)) == "serves table x and has the labels zone=a"
    assert missing_executor(nodes, "apply", {}, ("x",)) == "offers `apply`"
    both = ("sales.orders", "hr.pay")
    assert missing_executor(nodes, "noop", {}, both) == "serves the tables sales.orders, hr.pay"
    assert unserved_tables(nodes.values(), "noop", ("sales.orders", "x")) == ["x"]


def test_only_executors_that_serve_all_tables_are_capable() -> None:
    keys = Keys()
    view = ClusterView(keys)
    kvs = [
        KeyValue(keys.node(name), one.encode(), 1, 1, 1)
        for name, one in (("a", node("a", "sales.*")), ("b", node("b")), ("c", node("c", "sales.*", "hr.pay")))
    ]
    view.nodes.update({kv.key.rpartition(".")[2]: Node.decode(kv.value) for kv in kvs})
    assert view.capable("noop", None, ("sales.orders",)) == ["a", "b", "c"]
    assert view.capable("noop", None, ("sales.orders", "hr.pay")) == ["b", "c"]
    assert view.capable("noop", None, ("x",)) == ["b"]


def test_plan_and_gate_list_other_tables() -> None:
    plan = Plan(2, "v", "d", 1, beside=("hr.pay",))
    assert Plan.decode(plan.encode()) == plan
    gate = Gate(2, beside=("hr.pay",))
    assert Gate.decode(gate.encode()) == gate
    assert gate.tables("sales.orders") == ("sales.orders", "hr.pay")
    assert Gate(2).encode() == b'{"v":1,"count":2}'


# ------------------------------------------------------------- the child


class Said:
    """What the child sends."""

    def __init__(self) -> None:
        self.messages: list[Any] = []
        self.ends: list[tuple[int, str, str]] = []

    def send(self, message: Any) -> None:
        self.messages.append(message)

    send_later = send

    def ended(self, run: int, ordinal: int, kind: str, text: bytes, error: str, started: float) -> None:
        self.ends.append((ordinal, kind, error))

    def flush(self) -> None:
        pass

    def ask(self, message: Any, timeout: float) -> Any:
        return {"v": 1, "name": message["name"], "format": "parquet", "location": "/nowhere", "options": {}}


def child(tmp_path: Path, serves: Serves) -> tuple[Environment, Said]:
    answers = Said()
    settings = {"shared_dir": "", "verifier_urls": [], "space": "", "executor": "e1", "spark_master": "local[1]"}
    more = {"ttl": 10.0, "spark_conf": {}, "trusted_spark_catalogs": [], "behaviors": {}, "serves": serves.to_json()}
    return Environment({**settings, **more}, tmp_path, answers), answers  # type: ignore[arg-type]


ORDERS = TableRecord("sales.orders", "parquet", "/nowhere/orders")
PAY = TableRecord("hr.pay", "parquet", "/nowhere/pay")


def run(env: Environment, op: str, table: TableRecord | None, *beside: TableRecord, type_name: str = "noop") -> None:
    partition = PartitionPlan(0, "p", beside=tuple(Pinned(one) for one in beside))
    message = {
        "run": 1, "op": op, "type": type_name, "arg": {}, "table": table.to_json() if table else None,
        "items": [(partition.to_json(), 1, 5, None)], "batch": False, "cleanup": False, "cancelled": [],
        "careful": False, "deadline": 0.0, "incarnation": "i", "more": False,
    }  # fmt: skip
    Run(env, message, lambda why: None).run()


@pytest.mark.parametrize(
    ("op", "table", "beside", "why"),
    [
        ("hr.pay/noop/1", PAY, (), "it does not serve table hr.pay"),
        ("sales.orders/noop/1", ORDERS, (PAY,), "it does not serve table hr.pay"),
        # Whatever the name of the operation says: the record is what would be opened.
        ("sales.orders/noop/1", PAY, (), "it does not serve table hr.pay"),
        ("hr.pay/noop/1", ORDERS, (), "it does not serve table hr.pay"),
        ("@cluster/noop/1", None, (), "it does not serve table @cluster"),
    ],
)
def test_the_child_refuses_jobs_of_tables_that_are_not_served(
    tmp_path: Path, op: str, table: TableRecord | None, beside: tuple[TableRecord, ...], why: str
) -> None:
    env, answers = child(tmp_path, Serves(tables=("sales.*",)))
    env.behavior = lambda name: pytest.fail("its code is imported")  # type: ignore[method-assign]
    run(env, op, table, *beside)
    assert answers.ends == [(0, "refused", f"executor e1 refuses {op}: {why}")]


def test_the_child_refuses_types_that_are_not_served(tmp_path: Path) -> None:
    env, answers = child(tmp_path, Serves(("noop",)))
    assert "validate" not in env.installed
    run(env, "sales.orders/validate/1", ORDERS, type_name="validate")
    # The type that is asked for chooses the code, whatever the name of the operation says.
    run(env, "sales.orders/noop/1", ORDERS, type_name="validate")
    assert [error.partition(": ")[2] for _, _, error in answers.ends] == ["it does not serve the type validate"] * 2


CALLS: dict[str, dict[str, Any]] = {
    "plan": {"names": None},
    "complete": {"verdict": "success", "total": 1, "success": 1, "failed": 0},
    "cleanup": {"items": [], "incarnation": "i"},
    "sweep": {},
    "results": {"ops": ["hr.pay/noop/1"], "remove": True},
    "verify": {"external_id": "x", "verify": "https://nowhere", "limit": 1.0},
}


@pytest.mark.parametrize("kind", CALLS)
def test_the_child_refuses_calls_for_tables_that_are_not_served(tmp_path: Path, kind: str) -> None:
    env, answers = child(tmp_path, SALES)
    env.behavior = lambda name: pytest.fail("its code is imported")  # type: ignore[method-assign]
    record = PAY.to_json() if kind != "verify" else None
    message = {"t": kind, "call": 1, "op": "hr.pay/noop/1", "type": "noop", "arg": {}, "table": record, **CALLS[kind]}
    if kind in ("sweep", "results", "verify"):
        del message["type"]
    Call(env, message, lambda why: None).run()
    text = "executor e1 refuses hr.pay/noop/1: it does not serve table hr.pay"
    assert [(one["t"], one["kind"], one["message"]) for one in answers.messages] == [("failed", "transient", text)]


def test_the_child_refuses_the_cleanup_of_a_job_that_reads_an_unserved_table(tmp_path: Path) -> None:
    env, answers = child(tmp_path, Serves(tables=("sales.*",)))
    items = [(PartitionPlan(0, "p", beside=(Pinned(PAY),)).to_json(), 1, 5, None)]
    message = {"t": "cleanup", "call": 1, "op": "sales.orders/noop/1", "type": "noop", "arg": {}, "items": items}
    Call(env, {**message, "table": ORDERS.to_json(), "incarnation": "i"}, lambda why: None).run()
    assert "it does not serve table hr.pay" in answers.messages[0]["message"]


def test_planning_gets_no_record_of_an_unserved_table(tmp_path: Path) -> None:
    env, _ = child(tmp_path, Serves(tables=("sales.*",)))
    message = {"t": "plan", "call": 1, "op": "sales.orders/noop/1", "type": "noop", "arg": {}, "names": None}
    call = Call(env, {**message, "table": ORDERS.to_json()}, lambda why: None)
    assert call._other_table("sales.items").name == "sales.items"
    with pytest.raises(NotServed, match=r"it does not serve table hr\.pay"):
        call._other_table("hr.pay")


def test_a_prepared_operation_that_is_not_served_is_never_verified() -> None:
    from distop.daemon.incarnation_context import Context
    from distop.daemon.upkeep.prepared_verification import Verifying
    from distop.runtime.logs import get
    from distop.settings import ExecutorConfig
    from distop.store.connection_settings import EtcdConfig

    ctx = Context()
    ctx.cluster, ctx.incarnation, ctx.log = ClusterView(Keys()), "a", get()
    ctx.cluster.nodes.update({"a": node("a", "sales.*")})
    ctx.config = ExecutorConfig(EtcdConfig(), Path(), serves=Serves(tables=("sales.*",)))
    due = Verifying(ctx).due
    terms = PreparedTerms("x", "sales.orders/noop/1", "", verify="yes")
    assert terms.hold().state is HoldState.HELD
    assert due(terms, 100.0) <= 0
    assert due(replace(terms, op="hr.pay/noop/1"), 1e9) == float("inf")
    assert due(replace(terms, op="no operation"), 1e9) == float("inf")
