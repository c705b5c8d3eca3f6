"""Graphs of operations: their dependencies, and the checks that need no etcd."""

from __future__ import annotations

import pytest

from distop import After, Ended, Start, chain, chord, group
from distop.client.graphs import WIDE, requests
from distop.errors import InvalidArgument
from distop.protocol.records import OperationRef
from distop.services.submission.graph_start import MAX_GRAPH, check


def noop(**options: object) -> Start:
    return Start("noop", "t", {}, options=options)


def edges(graph: object) -> set[tuple[int, int, str]]:
    return set(requests(graph, None)[1])  # type: ignore[arg-type]


def test_L31_a_chain_waits_step_by_step() -> None:
    a, b, c = noop(), noop(), noop()
    assert edges(chain(a, group(b, c))) == {(0, 1, "success"), (0, 2, "success")}
    d, e, f = noop(), noop(), noop()
    assert edges(chord([d, e], f)) == {(0, 2, "success"), (1, 2, "success")}


def test_L36_wide_steps_are_connected_by_a_join() -> None:
    first, second = group(*(noop() for _ in range(WIDE))), group(*(noop() for _ in range(WIDE)))
    graph = chain(first, second)
    joins = [one for one in graph if one.type_name == "join"]
    assert len(joins) == 1
    assert len(edges(graph)) == 2 * WIDE


def test_an_end_is_another_edge_than_a_success() -> None:
    a = noop()
    b = Start("noop", "t", after=[Ended(a)])
    assert edges([a, b]) == {(0, 1, "end")}
    wanted, links = requests([b.waiting_for([]), a], None)
    assert links == [(1, 0, "end")]
    assert wanted[0].after == ()
    outside = Start("noop", "t", after=["t/noop/7", After(OperationRef("t", "noop", "", 8))])
    assert [str(one.ref) for one in requests([outside], None)[0][0].after] == ["t/noop/7", "t/noop/8"]


@pytest.mark.parametrize(
    ("graph", "sentence"),
    [
        ([], "the list is empty"),
        ([1], "is not an operation to start"),
        ([Start("noop", "t", after=[noop()])], "which is not in the graph"),
        ([noop(colour="red")], "'colour' is not an option of an operation of a graph .its options: partitions"),
        ([noop(prioritty=3)], "did you mean 'priority'"),
        ([noop(after=[])], "after is a field of Start"),
        ([noop(request_id="one"), noop(request_id="one")], "have the request id 'one'"),
        (7, "a graph must be a list"),
    ],
    ids=str,
)
def test_an_invalid_graph_is_refused(graph: object, sentence: str) -> None:
    with pytest.raises(InvalidArgument, match=sentence):
        check(*requests(graph, None))  # type: ignore[arg-type]


def test_a_cycle_is_refused_and_names_one_of_it() -> None:
    a = noop()
    b = Start("noop", "other", after=[a])
    a.waiting_for([b])
    with pytest.raises(InvalidArgument, match="form a cycle, which contains noop on"):
        check(*requests([a, b], None))


def test_a_graph_with_too_many_operations_is_refused() -> None:
    wanted, links = requests([noop() for _ in range(MAX_GRAPH + 1)], None)
    with pytest.raises(InvalidArgument, match="the graph has 100001 operations"):
        check(wanted, links)


def test_L19_the_requests_of_a_graph_have_ids_by_their_places() -> None:
    wanted, _ = requests([noop(), noop(request_id="mine")], "nightly")
    assert [(one.request_id, one.own_id) for one in wanted] == [("nightly#0", True), ("mine", True)]


def test_a_step_without_operations_keeps_the_order() -> None:
    a, b = noop(), noop()
    assert edges(chain(a, group(), b)) == {(0, 1, "success")}
    assert edges(chain(group(), a, chain(group(), b))) == {(0, 1, "success")}
    assert len(chain(group())) == 0


def test_a_chord_has_no_join_before_a_single_step() -> None:
    assert len(chord([noop() for _ in range(2 * WIDE)], noop())) == 2 * WIDE + 1


def test_predecessors_can_be_given_in_each_form_and_an_unknown_event_is_refused() -> None:
    for name in ("t/noop/8", OperationRef("t", "noop", "", 8)):
        (found,) = requests([Start("noop", "t", after=[After(name, "end")])], None)[0][0].after  # type: ignore[arg-type]
        assert found == After(OperationRef("t", "noop", "", 8), "end")
    with pytest.raises(InvalidArgument, match="'sucess' is not an event to wait for"):
        requests([Start("noop", "t", after=[After("t/noop/8", "sucess")])], None)  # type: ignore[arg-type]
