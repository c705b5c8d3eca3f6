"""Runs the command line in the test's process."""

from __future__ import annotations

import json
import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pytest

from distop.cli.main import run
from distop.cli.output import console

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


@dataclass(frozen=True)
class Ran:
    """The exit code and output of a command."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)

    @property
    def sentence(self) -> str:
        """The error message, which must be the only output, on one line."""
        assert self.out == "", f"output besides the error: {self.out}"
        assert self.err.startswith("error: "), self.err
        assert self.err.count("\n") == 1, f"more than one line: {self.err}"
        assert "Traceback" not in self.err
        return self.err.removeprefix("error: ").rstrip("\n")


@pytest.fixture
def distop_command(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Ran]]:
    """``distop_command("ls", "--json")`` → :class:`Ran`, without the DISTOP_ variables of the environment."""
    import os

    for name in os.environ:
        if name.startswith("DISTOP_"):
            monkeypatch.delenv(name)
    logger = logging.getLogger("distop")
    before = (logger.handlers[:], logger.level, logger.propagate)

    def command(*argv: str) -> Ran:
        console.cache_clear()
        capfd.readouterr()
        code = run(argv)
        printed = capfd.readouterr()
        return Ran(code, printed.out, printed.err)

    yield command
    console.cache_clear()
    for handler in logger.handlers:
        logging.getLogger().removeHandler(handler)
    logging.captureWarnings(False)
    logger.handlers[:], logger.level, logger.propagate = before
