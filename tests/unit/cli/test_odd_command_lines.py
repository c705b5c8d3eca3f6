"""Odd texts in every argument and option of the command line (model of etcd).

Each is accepted, or refused with one sentence and a documented exit code.
"""

from __future__ import annotations

import asyncio
import io
import sys
from contextlib import redirect_stderr, redirect_stdout
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from typer.main import get_command

from distop.cli import command_context, main
from distop.cli.commands import commands
from tests.unit.client.test_odd_values import OPEN, beforehand, check_store

EXIT_CODES = range(7)
"""The exit codes of docs/contract.md, except that of an interrupt."""
NOT_TESTED = {"dev", "executor", "serve", "doctor", "audit", "show", "why", "watch", "access"}
"""Commands that start processes or read data that the model does not hold."""
WAITING = {"wait", "timeout", "help"}

words = st.one_of(
    st.text(st.characters(exclude_categories=(), exclude_characters="\0"), max_size=6),  # no argument holds a NUL
    st.sampled_from(["", " ", "-", "--", "-1", "nan", "inf", "-inf", "1e999", "9" * 5_000, "x" * 300, "a\nb", "🧩"]),
    st.sampled_from(["\udcff", "k=\udcff", "k=v", "=", "k=", '{"a": "\\ud800"}', "{}", "NaN", "[" * 5_000, "@", "@/"]),
    st.sampled_from(["t", "noop", "@cluster", OPEN, "t/noop/9", "a/b/0", "2013-01-01T00:00:00", "9999-12-31T23:59Z"]),
    st.sampled_from(["2013-01-01T00:00:00Z", "5%", "101%", "1h", "1e400d", "-5s", "https://[", "https://x/\udcff"]),
)


def parameters() -> dict[str, tuple[list[str], list[Any]]]:
    """The words and the parameters of each command."""
    found: dict[str, tuple[list[str], list[Any]]] = {}
    group: Any = get_command(commands())
    for name, command in group.commands.items():
        for inner, one in getattr(command, "commands", {"": command}).items():
            if name not in NOT_TESTED:
                found[f"{name} {inner}".strip()] = ([name, *filter(None, [inner])], one.params)
    return found


COMMANDS = parameters()


@pytest.fixture(autouse=True)
def _empty_stdin(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO(""))


def line(draw: Any, known: list[Any]) -> list[str]:
    argv: list[str] = []
    for one in known:
        if one.name in WAITING:
            continue
        argument = one.param_type_name == "argument"
        if not (argument or one.required or draw(st.integers(0, 4)) == 0):
            continue
        fitting = {"type_name": "noop", "table": "t", "op": OPEN, "name": "u"}.get(one.name)
        value = fitting if fitting is not None and draw(st.integers(0, 3)) else draw(words)
        if argument:
            argv.append(value)
        elif getattr(one, "is_flag", False):
            argv.append(one.opts[0])
        else:
            argv.append(f"{one.opts[0]}={value}")
    return argv


def run(argv: list[str]) -> tuple[int, str, str]:
    """The exit code, stdout and stderr, with strict UTF-8 as in a terminal."""
    out, err = (io.TextIOWrapper(io.BytesIO(), encoding="utf-8", errors=how) for how in ("strict", "backslashreplace"))
    with redirect_stdout(out), redirect_stderr(err):
        code = main.run(argv)
    out.flush()
    err.flush()
    return code, out.buffer.getvalue().decode(), err.buffer.getvalue().decode()  # type: ignore[attr-defined]


@pytest.mark.parametrize("name", COMMANDS)
def test_an_odd_command_line_is_accepted_or_refused_in_one_sentence(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    beginning, known = COMMANDS[name]

    @settings(deadline=None, suppress_health_check=list(HealthCheck))
    @given(st.data())
    def prove(data: st.DataObject) -> None:
        argv = [*beginning, *line(data.draw, known)]
        etcd = asyncio.run(beforehand())
        before = etcd.store.revision

        def with_client(_: Any, work: Any, **__: Any) -> Any:
            return asyncio.run(work(etcd.client))

        # The only function that connects to etcd; here it uses a client of the model.
        monkeypatch.setattr(command_context.GlobalOptions, "with_client", with_client)
        code, _, errors = run(argv)
        assert code in EXIT_CODES, (argv, code)
        assert "defect" not in errors, (argv, errors)
        if code:
            assert errors.count("\n") == 1, (argv, errors)
            assert errors.startswith("error: "), (argv, errors)
            assert len(errors) <= len("error: ") + main.LONGEST_ERROR + 1, (argv, errors)
            assert etcd.store.revision == before, (argv, errors)
        check_store(etcd)

    prove()
