"""Options that several faces take: dataclass, type checker, signatures and command line have the same ones."""

from __future__ import annotations

import inspect
from dataclasses import fields
from typing import Any

import pytest
import typer.main

from distop import aio, blocking
from distop.cli.commands import commands
from distop.client.connection_options import ConnectionKeywords, ConnectionOptions, configure
from distop.services.claims.types_without_code import TypeKeywords, TypeOptions
from distop.services.inspection.history_filters import FILTERS, HistoryFilters, HistoryKeywords

FACES: list[tuple[Any, Any, tuple[Any, ...]]] = [
    (ConnectionOptions, ConnectionKeywords, (configure, aio.connect, blocking.connect)),
    (HistoryFilters, HistoryKeywords, (aio.Client.history, blocking.Client.history)),
    (TypeOptions, TypeKeywords, (aio.Client.register_type, blocking.Client.register_type)),
]


@pytest.mark.parametrize(("options", "keywords", "functions"), FACES)
def test_the_type_checker_and_the_signatures_have_the_same_options(
    options: Any, keywords: Any, functions: tuple[Any, ...]
) -> None:
    types = {one.name: one.type for one in fields(options)}
    assert {name: kind.__forward_arg__ for name, kind in keywords.__annotations__.items()} == types
    for function in functions:
        shown = inspect.signature(function).parameters
        assert not [one for one in shown.values() if one.kind is one.VAR_KEYWORD]
        assert {name: shown[name].annotation for name in types} == types


def test_the_command_line_has_the_same_filters() -> None:
    assert set(FILTERS) == {one.name for one in fields(HistoryFilters)}
    command: Any = typer.main.get_command(commands("history"))
    command = command.commands["history"] if hasattr(command, "commands") else command
    found = {one.opts[0]: one for one in command.params if one.param_type_name == "option"}
    for flag in FILTERS.values():
        assert (found[flag.name].help, found[flag.name].metavar or "") == (flag.help, flag.metavar)


def test_an_unknown_option_is_an_error() -> None:
    with pytest.raises(TypeError, match="'colour'"):
        configure(colour="red")  # type: ignore[misc]
