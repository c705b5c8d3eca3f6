"""Graphs of operations as JSON, for callers that are no Python program (``distop start --graph``).

A *step* is an operation, ``{"type": …, "table": …}``, or several: ``{"chain": [step, …]}``, ``{"group": [step, …]}``,
``{"chord": [[step, …], step]}``, or a list, which is a group. An operation may have a ``name``, by which the ``after``
of others waits for it; ``arg``; and the options of a start.
"""

from __future__ import annotations

from dataclasses import fields
from typing import TYPE_CHECKING, Any

from distop.client.graphs import Ended, Graph, Start, chain, chord, group
from distop.errors import InvalidArgument
from distop.protocol.texts import did_you_mean, shown
from distop.services.submission.option_values import After, Every
from distop.services.submission.start_options import options

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

OPTIONS = tuple(name for name in options("graph") if name not in ("after", "submitter"))
"""The options of ``start_operation``; ``after`` may name operations of the graph."""
_OF_OPERATION = ("name", "type", "table", "arg", "after", *OPTIONS)
_OF_EVERY = tuple(field.name for field in fields(Every))
_SHAPES = ("chain", "group", "chord")


def read_graph(document: Any) -> tuple[Graph, dict[Start, str]]:
    """The graph of a JSON document, and its operations by name.

    Raises InvalidArgument, with the place.
    """
    reader = _Reader()
    try:
        graph = reader.step(document, "the graph")
    except RecursionError:
        raise InvalidArgument("the graph is nested too deeply") from None
    if not graph.starts:
        raise InvalidArgument("there is no operation to start: the graph is empty")
    reader.connect()
    return graph, {start: name for name, start in reader.named.items()}


class _Reader:
    def __init__(self) -> None:
        self.named: dict[str, Start] = {}
        self._after: list[tuple[Start, list[Any], str]] = []

    def step(self, value: Any, place: str) -> Graph:
        if isinstance(value, list):
            return group(*self._steps(value, place))
        if not isinstance(value, dict):
            raise InvalidArgument(
                f"{place} must be an operation (an object with type and table), a chain, a group, a chord or a list "
                f"of these, not {shown(value)}"
            )
        shapes = [name for name in _SHAPES if name in value]
        if not shapes:
            return group(self._operation(value, place))
        if len(value) > 1:
            raise InvalidArgument(f"{place}: a {shapes[0]} has no other fields: remove them")
        shape, given = shapes[0], value[shapes[0]]
        if not isinstance(given, list) or not given:
            raise InvalidArgument(f"{place}: a {shape} must be a list of steps, not {shown(given)}")
        inside = f"{place}.{shape}"
        if shape != "chord":
            return (chain if shape == "chain" else group)(*self._steps(given, inside))
        if len(given) != 2 or not isinstance(given[0], list):
            raise InvalidArgument(
                f"{place}: a chord must be a list of its parts and the step after them: [[step, …], step]"
            )
        return chord(self._steps(given[0], f"{inside}[0]"), self.step(given[1], f"{inside}[1]"))

    def _steps(self, values: Sequence[Any], place: str) -> list[Graph]:
        return [self.step(one, f"{place}[{n}]") for n, one in enumerate(values)]

    def _operation(self, value: Mapping[str, Any], place: str) -> Start:
        for field in value:
            if field not in _OF_OPERATION:
                raise InvalidArgument(
                    f"{place}: an operation has no field {shown(field)}"
                    f"{did_you_mean(field, (*_OF_OPERATION, *_SHAPES))}"
                )
        for field in ("type", "table"):
            if not isinstance(value.get(field), str):
                raise InvalidArgument(f"{place}: an operation needs a {field}, as a text")
        given = {name: value[name] for name in OPTIONS if value.get(name) is not None}
        if isinstance(every := given.get("every"), dict):
            given["every"] = _every(every, place)
        start = Start(value["type"], value["table"], value.get("arg"), options=given)
        if (name := value.get("name")) is not None:
            self._add_name(name, start, place)
        after = value.get("after")
        if after is not None and not isinstance(after, list):
            raise InvalidArgument(f"{place}: after must be a list of names or operations, not {shown(after)}")
        self._after.append((start, after or [], place))
        return start

    def _add_name(self, name: Any, start: Start, place: str) -> None:
        if not isinstance(name, str) or not name or "/" in name:
            raise InvalidArgument(f"{place}: a name must be a text without a slash, not {shown(name)}")
        if name in self.named:
            raise InvalidArgument(f"{place}: two operations of the graph have the name {shown(name)}")
        self.named[name] = start

    def connect(self) -> None:
        """Resolve the names in ``after``; a name may precede the operation that has it."""
        for start, after, place in self._after:
            start.after = (*start.after, *(self._waited_for(one, place) for one in after))

    def _waited_for(self, one: Any, place: str) -> Any:
        name, on = one, "success"
        if isinstance(one, dict) and one.keys() <= {"op", "on"}:
            name, on = one.get("op"), one.get("on", "success")
        if not isinstance(name, str) or on not in ("success", "end"):
            raise InvalidArgument(
                f'{place}: after takes names, operations, and {{"op": …, "on": "success"}} or {{"op": …, "on": '
                f'"end"}}, not {shown(one)}'
            )
        if "/" in name:
            return After(name, on)  # type: ignore[arg-type]  # it is read where the start is checked
        if name not in self.named:
            raise InvalidArgument(
                f"{place}: it waits for {shown(name)}, but no operation of the graph has that "
                f"name{did_you_mean(name, self.named)}"
            )
        return Ended(self.named[name]) if on == "end" else self.named[name]


def _every(value: Mapping[str, Any], place: str) -> Every:
    unknown = [name for name in value if name not in _OF_EVERY]
    if unknown:
        raise InvalidArgument(
            f"{place}: every has no field {shown(unknown[0])}{did_you_mean(unknown[0], _OF_EVERY, 'its fields')}"
        )
    if "seconds" not in value:
        raise InvalidArgument(f"{place}: every must be a number of seconds, or have the fields {', '.join(_OF_EVERY)}")
    return Every(**value)
