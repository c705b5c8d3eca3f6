"""Graphs of operations that are started together and wait for each other: ``chain``, ``group``, ``chord``.

a, b = Start("validate", "sales", {...}), Start("validate", "returns", {...})
client.start_operations(chain(group(a, b), Start("build-index", "sales", {...})))
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeAlias

from distop.errors import InvalidArgument
from distop.protocol.caller_values import text
from distop.protocol.executor_nodes import JOIN
from distop.protocol.records import CLUSTER_TABLE
from distop.protocol.texts import shown
from distop.schemas.argument_schema import encode_argument
from distop.services.submission.start_options import StartOptions
from distop.services.submission.start_request import Request, check_not_derived, request, whoami

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

WIDE = 16
"""Minimum number of edges between two steps that are replaced by a join."""


@dataclass(eq=False, slots=True, repr=False)
class Start:
    """An operation to start: the parameters of ``start_operation``.

    ``after`` may name operations of the same graph, besides existing ones. Each object is one operation, however often
    it is named.
    """

    type_name: str
    table: str
    arg: Any = None
    after: Sequence[Any] = ()
    options: Mapping[str, Any] = field(default_factory=dict)
    """Other options of ``start_operation``: ``partitions``, ``request_id``, ``not_before``, …"""

    def __repr__(self) -> str:
        return f"Start({shown(self.type_name)}, {shown(self.table)})"

    def waiting_for(self, others: Iterable[Start]) -> Start:
        """Add predecessors; returns itself."""
        self.after = (*self.after, *(one for one in others if one not in self.after))
        return self


@dataclass(frozen=True, slots=True)
class Ended:
    """In ``after``: an operation of the same graph to wait for, whatever its result."""

    start: Start


@dataclass(frozen=True, slots=True)
class Graph:
    """A graph of operations to start: all of them, those without predecessors, and those without successors."""

    starts: tuple[Start, ...]
    first: tuple[Start, ...]
    last: tuple[Start, ...]

    def __iter__(self) -> Iterator[Start]:
        return iter(self.starts)

    def __len__(self) -> int:
        return len(self.starts)


Step: TypeAlias = Start | Graph


def _graph(step: Any) -> Graph:
    if isinstance(step, Graph):
        return step
    if isinstance(step, Start):
        return Graph((step,), (step,), (step,))
    raise InvalidArgument(
        f"{shown(step)} is not an operation to start: give Start(type, table, argument), or a group of them"
    )


def steps(given: Step | Iterable[Start]) -> Iterable[Start]:
    """The operations of a list, a graph or a single start."""
    return (given,) if isinstance(given, Start) else given


def _check_fields(one: Start) -> None:
    """Raises InvalidArgument for a field of the wrong type.

    The values are checked with the request.
    """
    text(one.type_name, "the operation type")
    text(one.table, "the name of a table")
    if isinstance(one.after, str) or not isinstance(one.after, Iterable):
        raise InvalidArgument(f"{one!r}: after must be a list of operations, such as [{shown(one.after)}]")
    if not isinstance(one.options, Mapping) or not all(isinstance(name, str) for name in one.options):
        raise InvalidArgument(f"{one!r}: options must be a mapping of start options, not {shown(one.options)}")
    if "after" in one.options:
        raise InvalidArgument(f"{one!r}: after is a field of Start, not an option: move it there")


def requests(
    starts: Iterable[Start], request_id: str | None, who: str = ""
) -> tuple[list[Request], list[tuple[int, int, str]]]:
    """The requests of a graph, and its edges by their places: (predecessor, successor, ``on``).

    ``who``: the user who starts them. Raises InvalidArgument.
    """
    try:
        graph = list(dict.fromkeys(starts))
    except TypeError:
        raise InvalidArgument("a graph must be a list of operations to start: Start(type, table, argument)") from None
    for one in graph:
        _graph(one)
        _check_fields(one)
    if request_id is not None:
        if not (isinstance(request_id, str) and 0 < len(request_id) <= 190):
            raise InvalidArgument("the request id of a graph must be a text of 1 to 190 characters")
        check_not_derived(f"{request_id}#0", "with the number of a part, the request id of a graph")
    places = {id(one): n for n, one in enumerate(graph)}
    wanted: list[Request] = []
    links: dict[tuple[int, int], str] = {}
    who = who or whoami()
    for n, one in enumerate(graph):
        outside = []
        for pred in one.after:
            inner = pred.start if isinstance(pred, Ended) else pred
            if isinstance(inner, Start):
                if id(inner) not in places:
                    raise InvalidArgument(f"{one!r} waits for {inner!r}, which is not in the graph: add it")
                on = "end" if isinstance(pred, Ended) else "success"
                if links.setdefault((places[id(inner)], n), on) != on:
                    raise InvalidArgument(f"{one!r} waits for {inner!r} twice: wait for either its success or its end")
            else:
                outside.append(pred)
        options = {**one.options, "after": outside or None}
        if options.get("request_id") is None and request_id is not None:
            options["request_id"] = f"{request_id}#{n}"
        chosen = StartOptions.of(options, "graph")
        wanted.append(request(one.type_name, one.table, encode_argument(one.arg), chosen, who))
    return wanted, [(pred, succ, on) for (pred, succ), on in links.items()]


def group(*steps: Step) -> Graph:
    """Run these steps in parallel (L31)."""
    parts = [_graph(step) for step in steps]
    starts = tuple(dict.fromkeys(one for part in parts for one in part.starts))
    first = tuple(dict.fromkeys(one for part in parts for one in part.first))
    return Graph(starts, first, tuple(dict.fromkeys(one for part in parts for one in part.last)))


def chain(*steps: Step) -> Graph:
    """Run each step after the whole previous one has succeeded (L31)."""
    if not steps:
        raise InvalidArgument("a chain needs at least one step")
    before, *rest = [found for found in map(_graph, steps) if found.starts] or [Graph((), (), ())]
    for step in rest:
        joins: tuple[Start, ...] = ()
        if len(before.last) > 1 and len(step.first) > 1 and len(before.last) * len(step.first) >= WIDE:
            joins = (Start(JOIN, CLUSTER_TABLE, after=before.last),)
        for one in step.first:
            one.waiting_for(joins or before.last)
        before = Graph((*before.starts, *joins, *step.starts), before.first, step.last)
    return before


def chord(parts: Iterable[Step], then: Step) -> Graph:
    """Run ``then`` after all ``parts``, which run in parallel, have succeeded (L31)."""
    return chain(group(*parts), then)
