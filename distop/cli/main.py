"""The entry point of ``distop``: runs a command line and turns errors into messages and exit codes (a contract)."""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from types import MappingProxyType
from typing import TYPE_CHECKING

from distop import settings_file
from distop.cli.command_context import FLAGS, VALUES, GlobalOptions, Interrupted, current, take_globals, use
from distop.cli.output import Output, UnwritableOutput, drop_output, note
from distop.errors import DistopError, describe
from distop.protocol.texts import did_you_mean, one_line
from distop.runtime import gc_tuning, secret_settings

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

NONE: Mapping[str, str] = MappingProxyType({})
INTERRUPTED = 130
LONGEST_ERROR = 2_000
"""Maximum characters of an error message: the parser quotes whole arguments, of any length."""


def run(argv: Sequence[str], behaviors: Mapping[str, str] = NONE) -> int:
    """Run one command line; returns the exit code. ``behaviors``: see :func:`main`."""
    import typer

    from distop.cli.commands import commands

    # typer has its own copy of click, whose error classes are reached only through those that typer exports.
    click_error: type[Exception] = typer.BadParameter.__mro__[2]
    use(GlobalOptions(debug="--debug" in argv))
    try:
        context, rest = take_globals(argv)
        context.behaviors = behaviors
        context.file = settings_file.find(context.given.pop("config", "") or os.environ.get("DISTOP_CONFIG", ""))
        use(context)
        _configure_logs()
        code = commands(*rest[:1])(args=rest, prog_name="distop", standalone_mode=False)
        if code == INTERRUPTED:  # typer has caught the interrupt and returned its code
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
    except BrokenPipeError:  # the reader of the output has ended
        drop_output()
        return 0
    except UnwritableOutput as error:
        drop_output()
        return _fail(error, error.exit_code, str(error))
    except click_error as error:
        return _fail(error, 2, _usage(error))
    except DistopError as error:
        return _fail(error, error.exit_code, describe(error))
    except Exception as error:
        text = f"{type(error).__name__}: {describe(error)}".partition("\n")[0]
        return _fail(error, 1, f"{text} (this is a defect of distop: run it with --debug, and report the traceback)")


def _usage(error: Exception) -> str:
    """The message for a wrong command line, with the nearest option for an unknown one, and where to find help."""
    text = str(getattr(error, "format_message", error.__str__)()).replace("\n", " ").rstrip(".")
    where = getattr(error, "ctx", None)
    if where is None:
        return text
    if (option := getattr(error, "option_name", "")) and hasattr(error, "possibilities"):
        own = [name for parameter in where.command.params for name in parameter.opts if name.startswith("--")]
        text = f"No such option: {option}{did_you_mean(option, [*own, *(f'--{name}' for name in (*VALUES, *FLAGS))])}"
    return f"{text} (see `{where.command_path} --help`)"


def _fail(error: Exception, code: int, text: str) -> int:
    """Report an error on stderr; returns the exit code, which holds even if stderr cannot be written."""
    with suppress(OSError):
        _report(error, text)
    return code


def _report(error: Exception, text: str) -> None:
    if current.debug:
        import traceback

        for line in "".join(traceback.format_exception(error)).rstrip().split("\n"):
            note(secret_settings.redact(line))
    # Shortened last: escapes are characters too.
    note(f"error: {secret_settings.shortened(one_line(text), LONGEST_ERROR)}")


def _configure_logs() -> None:
    settings = current.settings()
    if not current.debug:
        # Before gRPC is loaded: it logs to stderr by itself, one line for each failed handshake.
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
    """Whether the setting was given: without it, commands log less than daemons."""
    return current.settings().given(name)


def main(behaviors: Mapping[str, str] = NONE) -> None:
    """Run the console script. ``behaviors``: given by ``distop dev`` to its executor (``ExecutorConfig.behaviors``)."""
    gc_tuning.tune_for_start()
    if sys.stdout is not None:
        sys.stdout = Output(sys.stdout)
    try:
        code = run(sys.argv[1:], behaviors)
    except KeyboardInterrupt:  # while the commands are imported
        note("interrupted")
        code = INTERRUPTED
    sys.exit(code)
