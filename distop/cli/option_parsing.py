"""Typer commands with plainer help and a faster way to read the values of options."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from typer.core import TyperCommand, TyperGroup


class Command(TyperCommand):
    """A command whose help shows an argument as ``TABLE``; typer shows ``{TABLE}`` and ``TABLE <str>``."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        _read_plainly(self.get_params(ctx))
        return super().parse_args(ctx, args)

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        return [piece.strip("{}") for piece in super().collect_usage_pieces(ctx)]

    def format_options(self, ctx: Any, formatter: Any) -> None:
        for kind in ("argument", "option"):
            found = [p.get_help_record(ctx) for p in self.get_params(ctx) if p.param_type_name == kind]
            rows = [(row[0].removesuffix(" <str>"), row[1]) for row in found if row is not None]
            if rows:
                with formatter.section(f"{kind.capitalize()}s"):
                    formatter.write_dl(rows)


class CommandGroup(TyperGroup):
    """A group of commands."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        _read_plainly(self.get_params(ctx))
        return super().parse_args(ctx, args)


def _read_plainly(parameters: Iterable[Any]) -> None:
    """Read the values of these parameters without pydantic.

    Typer loads pydantic and builds a validator for each option, given or not: a third of a short command's CPU time.
    """
    for parameter in parameters:
        descriptor: Any = getattr(parameter, "type_descriptor", None)
        info: Any = getattr(descriptor, "parameter_info", None)
        # Releases of typer without pydantic have no descriptors; later ones may store them elsewhere.
        known = hasattr(info, "parser") and hasattr(descriptor, "annotation")
        if known and "process_value" not in vars(parameter):
            parameter.process_value = _reader(parameter, descriptor.annotation, info.parser)


def _reader(parameter: Any, kind: Any, parser: Any) -> Any:
    """A function that reads a value: a missing one is the default, a text stays a text, and a parser is called.

    Typer reads all other values, and reports missing ones.
    """
    usual = parameter.process_value

    def read(ctx: Any, value: Any) -> Any:
        if value is parameter.default and not parameter.required:
            return value if parameter.callback is None else parameter.callback(ctx, parameter, value)
        if parameter.callback is None and isinstance(value, str) and (parser is not None or kind is str):
            return value if parser is None else parser(value)
        if parameter.callback is None and parser is None and kind == list[str] and isinstance(value, list):
            return value
        return usual(ctx, value)

    return read
