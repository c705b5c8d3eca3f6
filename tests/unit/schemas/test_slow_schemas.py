"""Schemas and arguments that are slow to check do not block the event loop."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest

from distop.errors import InvalidArgument
from distop.protocol.behavior_declaration import Declaration
from distop.protocol.json_codec import dumps
from distop.schemas import argument_schema
from distop.services.submission import insertion
from distop.services.submission.start_request import Request

BOMB = {
    "$defs": {f"a{n}": {"allOf": [{"$ref": f"#/$defs/a{n + 1}"}] * 2} for n in range(25)} | {"a25": {}},
    "$ref": "#/$defs/a0",
}
ITEMS = {"properties": {"a": {"items": {"type": "integer"}}}}
LARGE = {"properties": {f"p{n}": {"type": "string", "pattern": f"^a{n}$"} for n in range(200)}}


def threads_of(monkeypatch: pytest.MonkeyPatch, of_schema: dict[str, Any], arg: Any) -> list[bool]:
    """For each check, whether it ran on the thread of the event loop."""
    seen: list[bool] = []
    check, main = argument_schema.check_argument, threading.current_thread()

    def checked(*args: Any, **options: Any) -> Any:
        seen.append(threading.current_thread() is main)
        return check(*args, **options)

    monkeypatch.setattr(argument_schema, "check_argument", checked)
    declaration = Declaration("copy", arg_schema=of_schema)
    asyncio.run(insertion.object_found(declaration, Request("copy", "t", dumps(arg), "r", False, "me")))
    return seen


def test_a_slow_check_runs_off_the_event_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    assert threads_of(monkeypatch, ITEMS, {"a": [1] * 20}) == [True]
    assert threads_of(monkeypatch, ITEMS, {"a": [1] * 20_000})[-2:] == [True, False]


def test_a_check_with_too_many_steps_is_refused_off_the_event_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(argument_schema, "MAX_STEPS", 20_000)
    with pytest.raises(InvalidArgument, match="takes too long to check"):
        threads_of(monkeypatch, BOMB, {})
    with pytest.raises(argument_schema.TakesLong):
        argument_schema.check_argument("copy", BOMB, b"{}", steps=argument_schema.QUICK_STEPS)


def test_a_large_schema_is_prepared_off_the_event_loop_once(monkeypatch: pytest.MonkeyPatch) -> None:
    assert threads_of(monkeypatch, LARGE, {"p1": "a1"}) == [True, False]
    monkeypatch.undo()
    assert threads_of(monkeypatch, LARGE, {"p2": "a2"}) == [True]
