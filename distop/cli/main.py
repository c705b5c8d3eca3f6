"""``distop``: the entry point, and how errors leave it (exit codes are a contract)."""

from __future__ import annotations

import os
import sys
from types import MappingProxyType
from typing import TYPE_CHECKING

from distop import settings_file
from distop.cli.command_context import Context, Interrupted, current, take_globals, use
from distop.cli.output import note
from distop.errors import DistopError, describe
from distop.protocol.texts import one_line
from distop.runtime import gc_tuning, secret_settings

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

NONE: Mapping[str, str] = MappingProxyType({})
INTERRUPTED = 130
LONGEST_ERROR = 2_000
"""Characters of an error message: the parser quotes whole arguments, however long they are."""


def run(argv: Sequence[str], behaviors: Mapping[str, str] = NONE) -> int:
    """One command line; returns the exit code. ``behaviors``: of :func:`main`."""
    import typer

    from distop.cli.commands import commands

    # typer carries a click of its own; its errors are reached through what it exports.
    click_error: type[Exception] = typer.BadParameter.__mro__[2]
    use(Context(debug="--debug" in argv))
    try:
        context, rest = take_globals(argv)
        context.behaviors = behaviors
        context.file = settings_file.find(context.given.pop("config", "") or os.environ.get("DISTOP_CONFIG", ""))
        use(context)
        _configure_logs()
        code = commands(*rest[:1])(args=rest, prog_name="distop", standalone_mode=False)
        if code == INTERRUPTED:  # typer has taken the interrupt for itself
            raise KeyboardInterrupt
        return code if isinstance(code, int) else 0
    except typer.Exit as error:
        return error.exit_code
    except Interrupted as error:
        note(str(error))
        return INTERRUPTED
    except (KeyboardInterrupt, typer.Abort):
        note("interrupted")
        return INTERRUPTED
    except BrokenPipeError:
        # Whoever read our output has gone; Python would complain about it once more while it ends.
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return 0
    except click_error as error:
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

        for line in "".join(traceback.format_exception(error)).rstrip().split("\n"):
            note(secret_settings.redact(line))
    note(f"error: {secret_settings.shortened(one_line(text), LONGEST_ERROR)}")  # escapes count, too
    return code


def _configure_logs() -> None:
    settings = current.settings()
    if not current.debug:
        # Before gRPC is loaded: it writes what it does to stderr by itself, a line for each handshake that fails.
        os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    level = settings.get("log_level") if _chosen("log_level") else "warning"
    from distop.runtime import logs

    logs.configure("debug" if current.debug else level, settings.get("log_format"))
    log = logs.get("distop.settings")
    if current.file.ignored:
        log.warning("%s", current.file.ignored)
    else:
        log.debug("%s", current.file.text)


def _chosen(name: str) -> bool:
    """The setting was given somewhere; commands are otherwise quieter than daemons."""
    return current.settings().given(name)


def main(behaviors: Mapping[str, str] = NONE) -> None:
    """The console script. ``behaviors``: what ``distop dev`` gives its executor (``ExecutorConfig.behaviors``)."""
    gc_tuning.begin()
    sys.exit(run(sys.argv[1:], behaviors))
