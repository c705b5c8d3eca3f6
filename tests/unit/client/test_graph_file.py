"""Graphs as JSON: the operations that they describe, and the errors of invalid files."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from distop import After, Every
from distop.client.graph_file import OPTIONS, read_graph
from distop.client.graphs import Ended, Start, chain, chord, group, requests
from distop.errors import InvalidArgument
from distop.services.submission.graph_start import check
from tests.unit.support.model_submission import Etcd, run

if TYPE_CHECKING:
    from collections.abc import Callable


def op(name: str | None = None, **fields: Any) -> dict[str, Any]:
    return {"type": "noop", "table": "t", **({"name": name} if name else {}), **fields}


def shape(document: Any) -> tuple[list[str], list[tuple[int, int, str]]]:
    """The names of its operations in their order, or their types, and who waits for whom."""
    graph, names = read_graph(document)
    wanted, links = requests(graph, "g")
    check(wanted, links)
    return [names.get(one, one.type_name) for one in graph], sorted(links)


def test_a_document_equals_the_output_of_the_helpers() -> None:
    one: Callable[[], Start] = lambda: Start("noop", "t")  # noqa: E731
    for document, made in (
        (op(), group(one())),
        ([op(), op(), op()], group(one(), one(), one())),
        ({"group": [op(), op()]}, group(one(), one())),
        ({"chain": [op(), op(), op()]}, chain(one(), one(), one())),
        ({"chord": [[op(), op()], op()]}, chord([one(), one()], one())),
        ({"chain": [[op()] * 20, [op()] * 20]}, chain(*(group(*(one() for _ in range(20))) for _ in range(2)))),
    ):
        graph, _ = read_graph(document)
        assert [found.type_name for found in graph] == [found.type_name for found in made]
        assert requests(graph, None)[1] == requests(made, None)[1]
    assert shape({"chord": [[op("a"), op("b")], op("c")]}) == (["a", "b", "c"], [(0, 2, "success"), (1, 2, "success")])
    assert shape({"chain": [op("a"), [op("b"), {"chain": [op("c"), op("d")]}], op("e")]}) == (
        ["a", "b", "c", "d", "e"],
        [(0, 1, "success"), (0, 2, "success"), (1, 4, "success"), (2, 3, "success"), (3, 4, "success")],
    )


def test_operations_wait_for_each_other_by_name_and_for_others() -> None:
    after = ["b", {"op": "a", "on": "end"}, "t/noop/7", {"op": "t/index/x/8", "on": "end"}]
    document = [op("c", after=after), op("a"), op("b")]
    assert shape(document) == (["c", "a", "b"], [(1, 0, "end"), (2, 0, "success")])
    graph, _ = read_graph(document)
    waits, a, b = graph
    assert list(waits.after) == [b, Ended(a), After("t/noop/7", "success"), After("t/index/x/8", "end")]
    (wanted, *_), _ = requests(graph, None)
    assert [(str(one.ref), one.on) for one in wanted.after] == [("t/noop/7", "success"), ("t/index/x/8", "end")]


def test_an_operation_has_the_options_of_a_start() -> None:
    options: dict[str, Any] = {
        "partitions": ["p=1"], "request_id": "r", "failure_policy": "collect_all", "retry_attempts": 2,
        "labels": {"team": "a"}, "delay": 60, "priority": 3, "max_jobs": 4, "max_jobs_per_executor": 2,
        "max_failed": "2%", "time_limit": 60, "where": {"zone": "b"}, "id": "nightly", "on_duplicate": "refuse",
        "traceparent": "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01",
    }  # fmt: skip
    every = {"seconds": 5, "times": 3, "since": "start"}
    graph, _ = read_graph(op(arg={"x": 1}, every=every, not_before=None, one_off=False, **options))
    (start,) = graph
    assert start.options == {**options, "every": Every(5, times=3, since="start"), "one_off": False}
    assert set(start.options) | {"not_before"} == set(OPTIONS)
    ((wanted,), _) = requests(graph, None)
    assert (wanted.id, wanted.labels, wanted.options.max_jobs) == ("nightly", {"team": "a"}, 4)
    assert wanted.series is not None
    assert read_graph(op(every=7))[0].starts[0].options == {"every": 7}


DEEP: Any = op()
for _ in range(3_000):
    DEEP = [DEEP]


@pytest.mark.parametrize(
    ("document", "sentence"),
    [
        (5, "the graph must be an operation"),
        ([], "there is no operation to start"),
        ({"group": []}, "a group must be a list of steps"),
        ({}, "the graph: an operation needs a type"),
        ([op(), {"type": "noop"}], r"the graph\[1\]: an operation needs a table"),
        (op(colour="red"), "the graph: an operation has no field 'colour'"),
        ({"chain": [op()], "name": "x"}, "the graph: a chain has no other fields"),
        ({"chain": op()}, "a chain must be a list of steps"),
        ({"chain": [op(), "a"]}, r"the graph.chain\[1\] must be an operation .*, not 'a'"),
        ({"chord": [op(), op()]}, "a chord must be a list of its parts and the step after them"),
        ([op("a"), op("a")], r"the graph\[1\]: two operations of the graph have the name 'a'"),
        (op("a/b"), "a name must be a text without a slash"),
        (op(name=7), "a name must be a text without a slash"),
        (op(after="a"), "after must be a list of names or operations, not 'a'"),
        (op(after=["a"]), "it waits for 'a', but no operation of the graph has that name"),
        (op(after=[{"op": "a", "on": "whim"}]), "after takes names, operations, and"),
        (op(after=[{"of": "a"}]), "after takes names, operations, and"),
        (op(every={"times": 3}), "every must be a number of seconds, or have the fields seconds"),
        (op(every={"seconds": 3, "hours": 3}), "every has no field 'hours' .its fields: seconds"),
        (DEEP, "nested too deeply"),
    ],
)
def test_an_invalid_graph_is_refused_with_its_place(document: Any, sentence: str) -> None:
    with pytest.raises(InvalidArgument, match=sentence):
        read_graph(document)


@pytest.mark.parametrize(
    ("document", "sentence"),
    [
        ([op("a", after=["b"]), op("b", after=["a"])], "form a cycle"),
        (op("a", after=["a"]), "form a cycle"),
        ([op(request_id="r"), op(request_id="r")], "two operations of the graph have the request id 'r'"),
        (op(after=["t/noop"]), "is not an operation"),
        (op(priority="high"), "the priority must be a whole number"),
        (op(labels=["a"]), "label"),
        (op(partitions="p=1"), "partitions must be a list of names"),
        (op(not_before="tomorrow"), "is not a start time"),
        (op(every={"seconds": "5"}), "must be a number of seconds"),
        (op(type="no type"), "is not an operation type"),
    ],
)
def test_an_invalid_start_is_refused_without_reading_etcd(document: Any, sentence: str) -> None:
    with pytest.raises(InvalidArgument, match=sentence):
        shape(document)


def test_it_is_started_as_a_whole() -> None:
    async def work(etcd: Etcd) -> None:
        graph, _ = read_graph({"chain": [[op("a"), op("b")], op("c")]})
        ops = await etcd.client.start_operations(graph, request_id="g")
        assert [one.ref for one in ops] == ["t/noop/1", "t/noop/2", "t/noop/3"]
        again = await etcd.client.start_operations(read_graph({"chain": [[op(), op()], op()]})[0], request_id="g")
        assert [(one.ref, one.already_started) for one in again] == [(one.ref, True) for one in ops]

    run(work)
