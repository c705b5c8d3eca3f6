"""The commands of ``distop``, and the options that all commands have."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from distop.cli import access, audit, daemons, doctor, history, operations, policies, prepare, registry, start
from distop.cli.command_context import SETTINGS_OF_ALL
from distop.cli.command_options import NOTHING, GivenOptions, setting_options
from distop.cli.option_parsing import Command, CommandGroup

if TYPE_CHECKING:
    from collections.abc import Callable

EVERYWHERE = (
    "These options are accepted anywhere on the command line. A setting is read from its option, else from "
    "DISTOP_<NAME>, else from the settings file."
)
MORE = "The options of `distop --help`, such as --json and --etcd, are accepted here too."
DAEMONS: tuple[Callable[..., None], ...] = (daemons.dev, daemons.executor, daemons.serve)
OF_TABLES: tuple[Callable[..., None], ...] = (registry.add, registry.ls, registry.rm)
OTHERS: tuple[Callable[..., None], ...] = (
    *(start.start, start.apply, start.rerun, prepare.prepare, prepare.confirm, prepare.abandon),
    *(operations.ls, operations.show, operations.why, operations.watch, operations.cancel),
    *(operations.pause, operations.resume, operations.alter, history.history),
    *(policies.autopilot, policies.emit),
    *(registry.nodes, registry.drain, registry.behaviors),
    *(access.access, audit.audit, doctor.doctor),
)
TABLE, POLICY = "table", "policy"


@setting_options(SETTINGS_OF_ALL)
def _globals(
    context: typer.Context,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON document on stdout, only.")] = False,
    config: Annotated[
        str, typer.Option(metavar="FILE", help="Settings file (./distop.toml if only you can change it).")
    ] = "",
    given: GivenOptions = NOTHING,
    debug: Annotated[bool, typer.Option("--debug", help="Show tracebacks.")] = False,
    version: Annotated[bool, typer.Option("--version", help="Show the version.")] = False,
) -> None:
    # take_globals() has removed these from the command line; here they only appear in --help.
    if version:
        from distop import __version__

        typer.echo(f"distop {__version__}")
        raise typer.Exit(0)
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())
        raise typer.Exit(2)


def commands(wanted: str = "") -> typer.Typer:
    """The app with all commands, or with the command ``wanted`` alone.

    Typer builds each command that it is given, with all its options, before it looks for the one to run.
    """
    app = typer.Typer(
        name="distop",
        cls=CommandGroup,
        no_args_is_help=False,
        add_completion=False,
        rich_markup_mode=None,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
        help="Resilient distributed operations on tables.",
        epilog=EVERYWHERE,
    )
    app.callback(invoke_without_command=True)(_globals)
    names = {TABLE, POLICY, *(command.__name__ for command in (*DAEMONS, *OTHERS))}
    chosen = {wanted} if wanted in names else names
    for command in DAEMONS:
        if command.__name__ in chosen:
            app.command(cls=Command)(command)
    if TABLE in chosen:
        table = typer.Typer(help="Register tables.", rich_markup_mode=None, no_args_is_help=False)
        for command in OF_TABLES:
            table.command(cls=Command, epilog=MORE)(command)
        app.add_typer(table, name=TABLE, cls=CommandGroup)
    if POLICY in chosen:
        help_of = "Start operations on tables by intervals, versions, events and conditions."
        policy = typer.Typer(help=help_of, rich_markup_mode=None, no_args_is_help=False)
        for name, command in policies.GROUP.items():
            policy.command(name, cls=Command, epilog=MORE)(command)
        app.add_typer(policy, name=POLICY, cls=CommandGroup)
    for command in OTHERS:
        if command.__name__ in chosen:
            app.command(cls=Command, epilog=MORE)(command)
    return app
