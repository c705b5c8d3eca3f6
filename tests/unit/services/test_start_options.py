"""StartOptions is the one list of the options of a start: every face has the same ones."""

from __future__ import annotations

import inspect
from dataclasses import fields, replace
from typing import Any

import pytest
import typer.main

from distop import aio, blocking
from distop.cli.commands import commands
from distop.client.graph_file import OPTIONS as GRAPH_FIELDS
from distop.client.graphs import Start, requests
from distop.errors import InvalidArgument
from distop.protocol.records import OperationRef
from distop.protocol.texts import shown
from distop.services.submission import start_options as so
from distop.services.submission.option_values import After, Every
from distop.services.submission.start_options import StartOptions, options
from distop.services.submission.start_request import request
from tests.unit.support.clock import StandingClock

NAMES = {one.name for one in fields(StartOptions)}
VALUES: dict[str, Any] = {
    "partitions": ["p=1"], "request_id": "r", "failure_policy": "collect_all", "retry_attempts": 2, "time_limit": 60,
    "submitter": "me", "labels": {"team": "a"}, "not_before": "2126-01-31T18:00:00Z", "delay": 60,
    "after": ["t/noop/7"], "priority": 3, "max_jobs": 4, "max_jobs_per_executor": 2, "max_failed": "2%",
    "where": {"zone": "b"}, "every": 5, "id": "nightly", "one_off": True, "on_duplicate": "refuse",
    "traceparent": "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01",
}  # fmt: skip
"""A value of each option."""
UNSPOKEN = {"submitter"}
"""Options that the command line and a graph file lack: who calls is the submitter."""
KEYWORDS: dict[str, Any] = {
    "start": so.StartKeywords,
    "prepare": so.PrepareKeywords,
    "rerun": so.RerunKeywords,
    "alter": so.AlterKeywords,
}
FACES = [
    *((face.Client.start_operation, "start") for face in (aio, blocking)),
    *((face.Client.prepare_operation, "prepare") for face in (aio, blocking)),
    *((face.Client.rerun, "rerun") for face in (aio, blocking)),
    *((face.Operation.rerun, "rerun") for face in (aio, blocking)),
    *((face.Operation.alter, "alter") for face in (aio, blocking)),
    (blocking.start_operation, "start"),
]


def test_a_start_takes_all_options() -> None:
    assert set(options("start")) == set(VALUES) == NAMES
    assert set(options("graph")) == NAMES


@pytest.mark.parametrize("verb", KEYWORDS)
def test_the_type_checker_reads_the_same_options(verb: Any) -> None:
    types = {one.name: one.type for one in fields(StartOptions)}
    found = {name: kind.__forward_arg__ for name, kind in KEYWORDS[verb].__annotations__.items()}
    assert found == {name: types[name] for name in options(verb)}


@pytest.mark.parametrize(("function", "verb"), FACES)
def test_clients_show_the_same_options_in_their_signatures(function: Any, verb: Any) -> None:
    shown_ = inspect.signature(function).parameters
    wanted = {one.name: (one.default, one.type) for one in fields(StartOptions) if one.name in options(verb)}
    assert {name: (one.default, one.annotation) for name, one in shown_.items() if name in wanted} == wanted
    own = {"self", "type_name", "table", "arg", "ref", "unfinished", "external_id"}
    assert {name for name in shown_ if not name.startswith("verify")} - own == set(wanted)


@pytest.mark.parametrize("verb", ["start", "prepare", "rerun", "apply", "alter"])
def test_the_command_line_has_the_same_options(verb: Any) -> None:
    command: Any = typer.main.get_command(commands(verb))
    command = command.commands[verb] if hasattr(command, "commands") else command
    found = {one.opts[0]: one for one in command.params if one.param_type_name == "option"}
    assert {name for name, one in options(verb).items() if not one.flags} <= UNSPOKEN
    for flag in (flag for one in options(verb).values() for flag in one.flags):
        assert (found[flag.name].help, found[flag.name].metavar or "") == (flag.help, flag.metavar)
    elsewhere = {flag.name for one in options("start").values() for flag in one.flags}
    elsewhere -= {flag.name for one in options(verb).values() for flag in one.flags}
    assert not elsewhere & set(found)


def test_a_graph_file_has_the_same_options() -> None:
    assert {*GRAPH_FIELDS, "after"} == set(options("graph")) - UNSPOKEN


@pytest.mark.parametrize("name", VALUES)
def test_each_option_reaches_the_request(name: str, clock: StandingClock) -> None:
    plain = request("noop", "t", b"{}", StartOptions(request_id="same"), "who")
    chosen = replace(StartOptions(request_id="same"), **{name: VALUES[name]})
    assert request("noop", "t", b"{}", chosen, "who") != plain
    given = {key: value for key, value in {name: VALUES[name]}.items() if key != "after"}
    after = VALUES["after"] if name == "after" else ()
    ((in_graph,), _) = requests([Start("noop", "t", {}, after, {"request_id": "same", **given})], None, "who")
    assert in_graph == request("noop", "t", b"{}", chosen, "who")


@pytest.mark.parametrize("verb", ["start", "prepare", "graph", "rerun", "apply", "alter"])
def test_an_unknown_option_is_refused_with_the_nearest_name(verb: Any) -> None:
    for wrong, hint in (
        ("on_duplicat", "on_duplicate"),
        ("prioritty", "priority"),
        ("retry_attempt", "retry_attempts"),
    ):
        with pytest.raises(InvalidArgument) as refused:
            StartOptions.of({wrong: 1}, verb)
        assert (f"did you mean {hint!r}?" in str(refused.value)) is (hint in options(verb))
    with pytest.raises(InvalidArgument, match="its options: "):
        StartOptions.of({"colour": "red"}, verb)


def test_an_option_of_another_verb_is_refused() -> None:
    with pytest.raises(InvalidArgument, match="'every' is not an option of a prepared operation"):
        StartOptions.of({"every": 5}, "prepare")


@pytest.mark.parametrize("name", sorted(NAMES))
def test_a_bad_value_is_refused_in_one_sentence_with_the_value(name: str) -> None:
    wrong = object()
    with pytest.raises(InvalidArgument) as refused:
        request("noop", "t", b"{}", StartOptions(**{name: wrong}), "who")
    text = str(refused.value)
    assert "\n" not in text
    assert shown(wrong)[:10] in text or name in ("request_id", "id")


def test_options_that_were_not_given_are_left_out() -> None:
    assert StartOptions().given() == {}
    assert StartOptions.of(VALUES).given() == VALUES
    assert StartOptions(one_off=False, max_jobs=0).given() == {"max_jobs": 0}
    assert StartOptions(after=["t/noop/7"], every=5).checked() == {
        "after": (After(OperationRef("t", "noop", "", 7)),),
        "every": Every(5),
    }
