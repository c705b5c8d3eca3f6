"""``distop``: the entry point, the list of commands, and how errors leave it (exit codes are a contract)."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperCommand

from distop.cli import audit, catalog, daemons, doctor, operations, starting
from distop.cli.context import Context, Interrupted, current, take_globals, use
from distop.cli.output import one_line
from distop.errors import DistopError, describe

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

# typer carries a click of its own; its errors are reached through what it exports.
_UsageError: type[Exception] = typer.BadParameter.__mro__[1]
_ClickError: type[Exception] = typer.BadParameter.__mro__[2]

INTERRUPTED = 130


class _Command(TyperCommand):
    """A command whose help has ``TABLE`` for an argument, where typer writes ``{TABLE}`` and ``TABLE <str>``."""

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        return [piece.strip("{}") for piece in super().collect_usage_pieces(ctx)]

    def format_options(self, ctx: Any, formatter: Any) -> None:
        for kind in ("argument", "option"):
            found = [p.get_help_record(ctx) for p in self.get_params(ctx) if p.param_type_name == kind]
            rows = [(row[0].removesuffix(" <str>"), row[1]) for row in found if row is not None]
            if rows:
                with formatter.section(f"{kind.capitalize()}s"):
                    formatter.write_dl(rows)


app = typer.Typer(
    name="distop",
    no_args_is_help=False,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Resilient distributed operations on tables.",
    epilog="The options above may stand anywhere in the line. Settings: flag, else DISTOP_<NAME>, else ./distop.toml.",
)
table = typer.Typer(help="Register tables.", rich_markup_mode=None, no_args_is_help=False)


@app.callback(invoke_without_command=True)
def _globals(
    context: typer.Context,
    json: Annotated[bool, typer.Option("--json", help="One JSON document on stdout, nothing else.")] = False,
    etcd: Annotated[str, typer.Option(metavar="ENDPOINTS", help="host:port, several with commas between.")] = "",
    namespace: Annotated[str, typer.Option(metavar="NS", help="What stands before all of distop's keys.")] = "",
    user: Annotated[str, typer.Option(metavar="NAME", help="etcd's user; the password: DISTOP_PASSWORD.")] = "",
    password_file: Annotated[str, typer.Option(metavar="FILE", help="A file that holds the password.")] = "",
    cacert: Annotated[str, typer.Option(metavar="FILE", help="The CA certificate of etcd.")] = "",
    cert: Annotated[str, typer.Option(metavar="FILE", help="Our certificate.")] = "",
    key: Annotated[str, typer.Option(metavar="FILE", help="The key of our certificate.")] = "",
    connect_timeout: Annotated[str, typer.Option(metavar="S", help="Seconds to wait for etcd (10).")] = "",
    log_level: Annotated[str, typer.Option(metavar="LEVEL", help="debug, info, warning, error, critical.")] = "",
    log_format: Annotated[str, typer.Option(metavar="F", help="text or json; always on stderr.")] = "",
    debug: Annotated[bool, typer.Option("--debug", help="Show tracebacks.")] = False,
    version: Annotated[bool, typer.Option("--version", help="Show the version.")] = False,
) -> None:
    # take_globals() has taken these out of the line; here they stand for --help.
    if version:
        from distop import __version__

        typer.echo(f"distop {__version__}")
        raise typer.Exit(0)
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())
        raise typer.Exit(2)


app.command(cls=_Command)(daemons.dev)
app.command(cls=_Command)(daemons.executor)
app.add_typer(table, name="table")
_MORE = "--json, --etcd and the other options of `distop --help` may stand here as well."
_OF_TABLES: tuple[Callable[..., None], ...] = (catalog.add, catalog.ls, catalog.rm)
_OTHERS: tuple[Callable[..., None], ...] = (
    *(starting.start, starting.apply, starting.rerun),
    *(operations.ls, operations.show, operations.why, operations.watch, operations.cancel),
    *(operations.pause, operations.resume, operations.alter, operations.history),
    *(catalog.nodes, catalog.drain, catalog.behaviors),
    *(audit.audit, doctor.doctor),
)
for command in _OF_TABLES:
    table.command(cls=_Command, epilog=_MORE)(command)
for command in _OTHERS:
    app.command(cls=_Command, epilog=_MORE)(command)


def run(argv: Sequence[str]) -> int:
    """One command line; returns the exit code."""
    use(Context(debug="--debug" in argv))
    try:
        context, rest = take_globals(argv)
        use(context)
        _configure_logs()
        code = app(args=rest, prog_name="distop", standalone_mode=False)
        if code == INTERRUPTED:  # typer has taken the interrupt for itself
            raise KeyboardInterrupt
        return code if isinstance(code, int) else 0
    except typer.Exit as error:
        return error.exit_code
    except Interrupted as error:
        print(one_line(str(error)), file=sys.stderr)
        return INTERRUPTED
    except (KeyboardInterrupt, typer.Abort):
        print("interrupted", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:
        # Whoever read our output has gone; Python would complain about it once more while it ends.
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return 0
    except _ClickError as error:
        return _fail(error, 2, _usage(error))
    except DistopError as error:
        return _fail(error, error.exit_code, describe(error))
    except Exception as error:
        text = f"{type(error).__name__}: {describe(error)}".partition("\n")[0]
        return _fail(error, 1, f"{text} (this is a defect of distop: run with --debug and report it)")


def _usage(error: Exception) -> str:
    text = str(getattr(error, "format_message", error.__str__)()).replace("\n", " ").rstrip(".")
    where = getattr(error, "ctx", None)
    return f"{text} (see `{where.command_path} --help`)" if where is not None else text


def _fail(error: Exception, code: int, text: str) -> int:
    if current.debug:
        import traceback

        traceback.print_exception(error)
    print(f"error: {one_line(text)}", file=sys.stderr)
    return code


def _configure_logs() -> None:
    settings = current.settings()
    if not current.debug:
        # Before gRPC is loaded: it writes what it does to stderr by itself, a line for each handshake that fails.
        os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    level = settings.get("log_level") if _chosen("log_level") else "warning"
    from distop import logs

    logs.configure("debug" if current.debug else level, settings.get("log_format"))


def _chosen(name: str) -> bool:
    """The setting was given somewhere; commands are otherwise quieter than daemons."""
    return current.settings().given(name)


def main() -> None:
    """The console script."""
    sys.exit(run(sys.argv[1:]))
