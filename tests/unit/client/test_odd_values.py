"""Invalid values at every public entry of the client.

Wrong types, NaN, huge numbers, negative durations, NULs, lone surrogates and others: each is accepted, or refused with
one short error and without a write.
"""

from __future__ import annotations

import asyncio
import json
import math
import re
from collections.abc import Awaitable, Callable
from datetime import UTC, date, datetime, timedelta
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from distop import After, Every, Start
from distop.client.async_client import Client
from distop.client.connection_options import configure
from distop.client.graph_file import OPTIONS
from distop.errors import DistopError, InvalidArgument, UsageError
from distop.invariants.checker import check
from distop.protocol.behavior_declaration import Retry as RetryRule
from distop.protocol.json_codec import loads
from distop.protocol.record_reading import to_check, unreadable
from distop.protocol.records import OperationRef, TableRecord
from distop.services.claims.owned_jobs import Abort, Complete, Retry
from tests.unit.support.model_submission import KEYS, TABLE, Etcd

LONGEST_SENTENCE = 700
"""Characters of an error message that quotes a value."""
OPEN = f"{TABLE}/noop/1"
"""The operation that is in the store beforehand."""

HUGE = 10**5_000
"""It has more digits than Python turns into text."""
SURROGATE = re.compile(r"[\ud800-\udfff]")

texts = st.one_of(
    # Hypothesis leaves lone surrogates out of its texts unless it is asked for them.
    st.text(st.characters(exclude_categories=()), max_size=6),
    st.sampled_from(
        ["", " ", "\0", "a\0b", "a\nb", "\ud800", "x\udcffy", "/", "%", "@cluster", "1", "-1", "NaN", "🧩"]
    ),
    st.sampled_from(["x" * 300, "\u20ac" * 90, "a/b/1", OPEN, "2013-01-01T00:00:00", "9999-12-31T23:59Z"]),
)
numbers = st.one_of(
    st.integers(-3, 3),
    st.floats(width=16),
    st.sampled_from([math.nan, math.inf, -math.inf, -1.0, -0.0, 1e-320, 1e308, 10**30, -(10**30), 2**63]),
)
times = st.sampled_from(
    [
        *(datetime.min.replace(tzinfo=UTC), datetime.max.replace(tzinfo=UTC), date(2013, 1, 1)),
        *(datetime.fromisoformat("2013-01-01T00:00:00"), datetime.fromisoformat("9999-12-31T23:59:59")),
    ]
)


class Strange:
    """An object that cannot be shown, compared or counted."""

    def __repr__(self) -> str:
        raise RuntimeError("no repr")

    __hash__ = None  # type: ignore[assignment]


leaves = st.one_of(
    st.none(),
    st.booleans(),
    numbers,
    texts,
    times,
    st.binary(max_size=3),
    st.sampled_from([object, timedelta(1), Ellipsis, print, OperationRef(TABLE, "noop", "", 1), 1j, frozenset({"a"})]),
)
hashable = st.one_of(st.none(), numbers, texts)
odd = st.one_of(
    leaves,
    st.lists(leaves, max_size=3),
    st.lists(leaves, max_size=2).map(tuple),
    st.dictionaries(hashable, leaves, max_size=3),
    st.builds(After, leaves, leaves),
    st.builds(Every, leaves, leaves, leaves, leaves, leaves, leaves),
    st.builds(Start, leaves, leaves, leaves, st.lists(leaves, max_size=2), leaves),
    st.builds(Start, st.just("noop"), st.just(TABLE), options=st.dictionaries(st.sampled_from(OPTIONS), leaves)),
    st.builds(TableRecord, leaves, leaves, leaves, leaves),
    st.builds(TableRecord, texts, st.just("parquet"), texts, st.dictionaries(texts, leaves, max_size=1)),
    st.builds(RetryRule, leaves, leaves, leaves),
    st.builds(Complete, leaves),
    st.builds(Abort, leaves, leaves),
    st.builds(Retry, leaves),
)
"""Any value, and what a parameter of an API may be built of with such values inside."""


def nested(depth: int) -> Any:
    """Lists in lists."""
    value: Any = 1
    for _ in range(depth):
        value = [value]
    return value


EXTREMES: dict[str, Callable[[], Any]] = {
    "a huge number": lambda: HUGE,
    "a huge negative number": lambda: -HUGE,
    "a huge number in a list": lambda: [HUGE],
    "a huge number in an object": lambda: {"a": HUGE},
    "a strange object": Strange,
    "a strange object in a list": lambda: [Strange()],
    "a deep list": lambda: nested(200),
    "a list too deep for JSON": lambda: nested(5_000),
    "a long text": lambda: "x" * 70_000,
    "a long list of long texts": lambda: ["x" * 70_000] * 3,
    "a large object": lambda: {"a": "x" * 600_000},
    "a large list": lambda: [f"p{n}" for n in range(70_000)],
}
"""By names, since Hypothesis cannot print them."""
extremes = st.sampled_from([f"<{name}>" for name in EXTREMES])


def real(value: Any) -> Any:
    return EXTREMES[value[1:-1]]() if isinstance(value, str) and value[1:-1] in EXTREMES else value


Call = Callable[..., Awaitable[Any]]


async def on_operation(client: Client, name: str, **given: Any) -> Any:
    return await getattr(client.operation(OPEN), name)(**given)


def of_operation(name: str) -> Call:
    return lambda client, **given: on_operation(client, name, **given)


def method(name: str) -> Call:
    async def call(client: Client, **given: Any) -> Any:
        answer = getattr(client, name)(**given)
        return await answer if asyncio.iscoroutine(answer) else answer

    return call


async def own_no_job(client: Client, **given: Any) -> Any:
    return await client.own_jobs(**given, max=0)


async def set_up(_: Client, /, **given: Any) -> Any:
    return configure(**given)


START: dict[str, Any] = {
    "type_name": "noop",
    "table": TABLE,
    "arg": {"n": 1},
    **dict.fromkeys(
        ("partitions", "request_id", "failure_policy", "retry_attempts", "submitter", "labels", "not_before", "delay")
    ),
    **dict.fromkeys(("after", "priority", "max_jobs", "max_jobs_per_executor", "max_failed", "where", "every", "id")),
    "one_off": False,
    "on_duplicate": None,
}
PREPARE = {
    **{name: value for name, value in START.items() if name not in ("request_id", "every")},
    "external_id": "x-1",
    "verify": None,
    "verify_after": 60.0,
    "verify_attempts": 5,
    "verify_pause": 5.0,
}
RERUN = dict.fromkeys(("unfinished", "request_id", "failure_policy", "retry_attempts", "submitter", "labels"))
LIST = dict.fromkeys(("table", "type", "states", "labels"))
HISTORY = {**LIST, **dict.fromkeys(("op", "since", "until", "request_id", "after")), "limit": 3, "alarms": False}
TYPE: dict[str, Any] = {
    "type_name": "own",
    **dict.fromkeys(("arg_schema", "result_schema", "object_field")),
    "instances": "many",
    "conflicts_with": (),
    "can_fail": True,
    "retry": None,
    "lost": "retry",
    "failure_policy": "fail_fast",
    "description": "",
    "replace": False,
}
CONNECT = dict.fromkeys(
    ("endpoints", "client", "namespace", "username", "password", "ca_cert", "cert", "key", "connect_timeout")
)
CALLS: dict[str, tuple[Call, dict[str, Any]]] = {
    "configure": (set_up, CONNECT),
    "start_operation": (method("start_operation"), START),
    "start_operations": (method("start_operations"), {"starts": [Start("noop", TABLE)], "request_id": None}),
    "submission": (method("submission"), {"starts": [Start("noop", TABLE)], "request_id": None}),
    "transaction": (
        method("transaction"),
        {"compare": (), "success": (), "failure": (), "start": Start("noop", TABLE), "request_id": None},
    ),
    "add_dependencies": (method("add_dependencies"), {"pairs": [(OPEN, OPEN)]}),
    "prepare_operation": (method("prepare_operation"), PREPARE),
    "confirm": (method("confirm"), {"external_id": "x-1"}),
    "prepared_operation": (method("prepared_operation"), {"external_id": "x-1"}),
    "rerun": (method("rerun"), {"ref": OPEN, **RERUN}),
    "operation": (method("operation"), {"ref": OPEN}),
    "history": (method("history"), HISTORY),
    "drain": (method("drain"), {"executor": "e", "wait": False, "timeout": None}),
    "undrain": (method("undrain"), {"executor": "e"}),
    "register_type": (method("register_type"), TYPE),
    "own_jobs": (own_no_job, {"actor": "a", "types": ["noop"], "duration": 60.0}),
    "extend": (method("extend"), {"tokens": ["t"], "duration": 60.0}),
    "return_job": (method("return_job"), {"token": "t", "outcome": Complete()}),
    "add_table": (method("add_table"), {"record": TableRecord("u", "parquet", "/data"), "check": False}),
    "add_table, checked": (method("add_table"), {"record": TableRecord("u", "parquet", "/data")}),
    "remove_table": (method("remove_table"), {"name": TABLE}),
    "cancel": (of_operation("cancel"), {"text": ""}),
    "end_series": (of_operation("end_series"), {"text": ""}),
    "abandon": (of_operation("abandon"), {"text": ""}),
    "pause": (of_operation("pause"), {"now": False}),
    "alter": (of_operation("alter"), dict.fromkeys(("priority", "max_jobs", "max_jobs_per_executor", "max_failed"))),
    "rerun of an operation": (of_operation("rerun"), RERUN),
}
"""Each public call with arguments that fit."""


async def beforehand() -> Etcd:
    etcd = Etcd()
    await etcd.client.start_operation("noop", TABLE, request_id="before")
    return etcd


def check_sentence(error: BaseException) -> None:
    text = str(error)
    assert text.strip(), error
    assert "\n" not in text, text
    assert len(text) <= LONGEST_SENTENCE, text
    text.encode()


def check_store(etcd: Etcd) -> None:
    """Every record is readable UTF-8, and the invariants hold."""
    stored = etcd.store.listing()
    wanted = set(to_check(KEYS, [kv.key for kv in stored]))
    assert unreadable(KEYS, [kv for kv in stored if kv.key in wanted]) == []
    for kv in stored:
        assert kv.value == b"" or kv.key not in wanted or SURROGATE.search(repr_of(kv.value)) is None, kv
    assert [str(one) for one in check(KEYS, etcd.store.history)] == []


def repr_of(value: bytes) -> str:
    """The texts of a JSON value, as they come back."""
    try:
        return json.dumps(loads(value), ensure_ascii=False)
    except ValueError:
        return value.decode()


def try_call(name: str, changed: dict[str, Any]) -> None:
    call, fitting = CALLS[name]

    async def main() -> None:
        etcd = await beforehand()
        before = etcd.store.revision
        try:
            await call(etcd.client, **{**fitting, **{n: real(value) for n, value in changed.items()}})
        except DistopError as error:
            check_sentence(error)
            assert etcd.store.revision == before, f"refused, and written: {error}"
        check_store(etcd)

    asyncio.run(main())


@pytest.mark.parametrize("name", CALLS)
def test_an_odd_value_is_taken_or_refused_in_one_sentence_without_a_write(name: str) -> None:
    parameters = sorted(CALLS[name][1])

    @settings(deadline=None, suppress_health_check=list(HealthCheck))
    @given(st.dictionaries(st.sampled_from(parameters), odd | extremes, min_size=1, max_size=2))
    def prove(changed: dict[str, Any]) -> None:
        try_call(name, changed)

    prove()


LONE = "a\ud800b"
DOORS: list[tuple[str, dict[str, Any]]] = [
    *((name, {"arg": {"where": LONE}}) for name in ("start_operation", "prepare_operation")),
    *((name, {"arg": {LONE: 1}}) for name in ("start_operation", "prepare_operation")),
    *((name, {"starts": [Start("noop", TABLE, [[LONE]])]}) for name in ("start_operations", "submission")),
    ("transaction", {"start": Start("noop", TABLE, LONE)}),
    *(
        ("start_operation", changed)
        for changed in (
            *({name: LONE} for name in ("table", "request_id", "submitter", "id")),
            *({"partitions": [LONE]}, {"labels": {"k": LONE}}, {"where": {"k": LONE}}, {"after": [f"{LONE}/noop/1"]}),
        )
    ),
    ("prepare_operation", {"external_id": LONE}),
    ("register_type", {"description": LONE}),
    ("register_type", {"arg_schema": {"description": LONE}}),
    ("own_jobs", {"actor": LONE}),
    ("return_job", {"outcome": Complete({"a": LONE})}),
    ("return_job", {"outcome": Abort(LONE)}),
    *(("add_table", {"record": TableRecord(*fields)}) for fields in ((LONE, "parquet", "/d"), ("u", LONE, "/d"))),
    *(
        ("add_table", {"record": TableRecord("u", "parquet", "/d", options)})
        for options in ({"partition_types": {"k": LONE}}, {LONE: 1})
    ),
    ("add_table", {"record": TableRecord("u", "parquet", f"/{LONE}")}),
    *((name, {"text": LONE}) for name in ("cancel", "end_series", "abandon")),
]


@pytest.mark.parametrize(("name", "changed"), DOORS, ids=lambda value: value if isinstance(value, str) else "")
def test_a_lone_surrogate_is_refused_at_every_entry(name: str, changed: dict[str, Any]) -> None:
    """Stored as an escape, it would break planning: a frame to the child is UTF-8."""
    call, fitting = CALLS[name]

    async def main() -> None:
        etcd = await beforehand()
        before = etcd.store.revision
        with pytest.raises(UsageError) as refused:
            await call(etcd.client, **{**fitting, **changed})
        check_sentence(refused.value)
        assert re.search("surrogate|must be printable", str(refused.value))
        assert etcd.store.revision == before

    asyncio.run(main())


def test_a_partition_that_is_named_twice_is_named_in_the_error() -> None:
    async def main() -> None:
        etcd = await beforehand()
        with pytest.raises(InvalidArgument, match="the partition 'b' is named twice"):
            await etcd.client.start_operation("noop", TABLE, {}, partitions=["a", "b", "b", "c"])

    asyncio.run(main())


@pytest.mark.parametrize("seconds", [-1, -0.001, -math.inf])
@pytest.mark.parametrize("name", ["delay", "every", "verify_after", "verify_pause"])
def test_a_negative_duration_is_refused(name: str, seconds: float) -> None:
    call, fitting = CALLS["prepare_operation" if name.startswith("verify") else "start_operation"]

    async def main() -> None:
        etcd = await beforehand()
        with pytest.raises(InvalidArgument, match="must be a number of seconds, 0 or more"):
            await call(etcd.client, **{**fitting, name: seconds})
        assert len(etcd.operations()) == 1

    asyncio.run(main())


def test_a_pair_of_escapes_and_a_written_backslash_are_no_lone_surrogate() -> None:
    async def main() -> None:
        etcd = await beforehand()
        await etcd.client.start_operation("noop", TABLE, {"pair": "\U0001f9e9", "text": "\\ud800", "both": "\\\\ud8"})
        assert len(etcd.operations()) == 2

    asyncio.run(main())
