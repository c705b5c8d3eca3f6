"""The global options, which may stand anywhere in the line, and the settings that they belong to."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

from distop.cli import output
from distop.errors import InvalidArgument
from distop.protocol.texts import shown
from distop.settings_file import NO_FILE, SettingsFile

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping, Sequence

    from distop.client.async_client import Client
    from distop.settings import Settings

T = TypeVar("T")

SETTINGS_OF_ALL = (
    *("etcd", "namespace", "user", "password_file", "cacert", "cert", "key", "connect_timeout"),
    *("log_level", "log_format"),
)
"""Settings that all commands take as options."""
VALUES = ("config", *(name.replace("_", "-") for name in SETTINGS_OF_ALL))
"""Global options that take a value."""
FLAGS = ("json", "debug")


class Interrupted(Exception):
    """Ctrl-C while an operation is started or waited for; the message says what is known of the operation."""


@dataclass(slots=True)
class Context:
    """The global options of this run."""

    json: bool = False
    debug: bool = False
    given: dict[str, str] = field(default_factory=dict)
    file: SettingsFile = NO_FILE
    behaviors: Mapping[str, str] = field(default_factory=dict)
    """Given by ``distop dev`` to its executor, not by an option: see ``ExecutorConfig.behaviors``."""

    def settings(self, **flags: Any) -> Settings:
        """The settings, with the flags of a command."""
        from distop.settings import Settings

        return Settings({**self.given, **flags}, file=self.file)

    def answer(self, document: Any, sentence: str) -> None:
        """Print the document with ``--json``, else the sentence."""
        if self.json:
            output.write_json(document)
        else:
            output.say(sentence)

    def with_client(self, work: Callable[[Client], Awaitable[T]], **flags: Any) -> T:
        """Connect, run ``work`` with the client, and disconnect. Raises what these raise."""
        from distop.cli.interrupts import run
        from distop.client.connection import Connecting
        from distop.settings import client_config

        config = client_config(self.settings(**flags))

        async def connected() -> T:
            async with Connecting(config) as client:
                return await work(client)

        return run(connected())


current = Context()
"""Set by ``main`` for each run."""


def take_globals(argv: Sequence[str]) -> tuple[Context, list[str]]:
    """Split a command line into the global options, which may stand anywhere before ``--``, and the rest.

    Raises InvalidArgument where an option has no value, or a flag has one.
    """
    context = Context()
    rest: list[str] = []
    words = iter(argv)
    for word in words:
        if word == "--":
            return context, [*rest, word, *words]
        name, equals, value = word.removeprefix("--").partition("=")
        if not word.startswith("--") or name not in (*VALUES, *FLAGS):
            rest.append(word)
        elif name in FLAGS:
            if equals:
                raise InvalidArgument(f"--{name} takes no value")
            setattr(context, name, True)
        else:
            if not equals:
                try:
                    value = next(words)
                except StopIteration:
                    raise InvalidArgument(f"--{name} needs a value") from None
            context.given[name.replace("-", "_")] = value
    return context, rest


def use(context: Context) -> None:
    """Set the options of this run."""
    for name in Context.__slots__:
        setattr(current, name, getattr(context, name))


def parse_argument(text: str | None) -> Any:
    """Read ``--arg``: JSON, or ``@FILE`` with JSON (``@-``: standard input). Raises InvalidArgument with the place."""
    if text is None:
        return None
    if text == "@":
        raise InvalidArgument("--arg @ needs the name of a file (@-: standard input)")
    return parse_file(text[1:], "the argument") if text.startswith("@") else _json(text, "--arg")


def parse_file(name: str, what: str) -> Any:
    """Read JSON from a file (``-``: standard input). Raises InvalidArgument with the place."""
    import sys
    from pathlib import Path

    where = f"{what} in {name}"
    try:
        text = sys.stdin.read() if name == "-" else Path(name).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        raise InvalidArgument(f"{where} cannot be read: {reason}") from None
    return _json(text, where)


def _json(text: str, where: str) -> Any:
    import json

    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise InvalidArgument(
            f"{where} is not valid JSON: {error.msg} at line {error.lineno}, column {error.colno}"
        ) from None
    except RecursionError:
        raise InvalidArgument(f"{where} is nested too deeply") from None
    except ValueError:
        raise InvalidArgument(f"{where} has a number with too many digits") from None


def parse_options(texts: Sequence[str] | None) -> Mapping[str, Any]:
    """Read ``--option K=V``: a value is JSON, else text. Raises InvalidArgument."""
    import json

    found: dict[str, Any] = {}
    for text in texts or ():
        key, equals, value = text.partition("=")
        if not equals or not key:
            raise InvalidArgument(f"--option must be written as K=V, not {shown(text)}")
        try:
            found[key] = json.loads(value)
        except (ValueError, RecursionError):
            found[key] = value
    return found
