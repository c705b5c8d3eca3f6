"""Runs the code and the commands of a page of the documents.

A fence with ``title="FILE"`` is written to that file. A fence ``python`` without a title is run as a program. A fence
``sh`` is run by bash; if its last command is ``distop dev``, that command runs in the background until the page ends,
and replaces an earlier one. A fence ``text`` is the expected output of the fence before it: the output must contain its
lines in this order, and ``…`` matches any text.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from pathlib import Path

_FENCE = re.compile(r'^```(\w+)(?: title="([^"]+)")?\n(.*?)^```$', re.MULTILINE | re.DOTALL)
_DEV = re.compile(r"^distop dev\b.*$\s*\Z", re.MULTILINE)
LIMIT = 300.0
"""Time limit in seconds for one fence, and for the start of an executor."""


class PageError(Exception):
    """A fence fails, or has another output than the page says."""


@dataclass(frozen=True)
class Fence:
    """One fence of a page. ``title``: its file name, or ""."""

    language: str
    title: str
    text: str


def fences(text: str, section: str = "") -> list[Fence]:
    """The fences of a page, or of one section (by its second-level heading), in order."""
    if section:
        _, found, after = text.partition(f"\n## {section}\n")
        if not found:
            raise PageError(f"the page has no section {section!r}")
        text = after.partition("\n## ")[0]
    return [Fence(*one) for one in _FENCE.findall(text)]


def run_page(
    text: str,
    folder: Path,
    env: Mapping[str, str],
    *,
    section: str = "",
    skip: Callable[[Fence], bool] = lambda _: False,
) -> None:
    """Run a page in an empty folder, without the fences for which ``skip`` is true. Raises PageError."""
    with contextlib.ExitStack() as stack:
        runner = _Runner(folder, dict(env), stack)
        for fence in fences(text, section):
            if not skip(fence):
                runner.run(fence)


class _Runner:
    def __init__(self, folder: Path, env: dict[str, str], stack: contextlib.ExitStack) -> None:
        self._folder = folder
        self._env = env
        self._page = stack
        self._dev = contextlib.ExitStack()
        stack.callback(lambda: self._dev.close())
        self._printed = ""

    def run(self, fence: Fence) -> None:
        if fence.title:
            (self._folder / fence.title).write_text(fence.text)
        elif fence.language == "sh":
            dev = _DEV.search(fence.text)
            if dev is not None:
                self._dev.close()
            before = fence.text[: dev.start()] if dev is not None else fence.text
            self._printed = self._ran("bash", "-euo", "pipefail", "-c", before) if before.strip() else ""
            if dev is not None:
                self._dev.enter_context(self._running(dev[0].partition("#")[0].strip()))
        elif fence.language == "python":
            self._printed = self._ran("python", "-c", fence.text)
        elif fence.language == "text":
            self._expect(fence.text)

    def _ran(self, *words: str) -> str:
        ran = subprocess.run(
            words, cwd=self._folder, env=self._env, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT, text=True, timeout=LIMIT, check=False,
        )  # fmt: skip
        if ran.returncode:
            raise PageError(f"exit code {ran.returncode} of:\n{words[-1]}\nwhich printed:\n{ran.stdout}")
        return ran.stdout

    def _expect(self, text: str) -> None:
        left = self._printed.splitlines()
        for line in text.splitlines():
            wanted = re.compile(".*".join(map(re.escape, line.split("…"))) + r"\s*")
            while left and not wanted.fullmatch(left[0].strip()):
                left.pop(0)
            if not left:
                raise PageError(f"{line!r} was not printed, or not in this order:\n{self._printed}")
            left.pop(0)

    @contextlib.contextmanager
    def _running(self, command: str) -> Iterator[None]:
        """Run ``distop dev``: enters when its executor is ready, and stops it with Ctrl-C."""
        log = self._folder / "dev.log"
        with log.open("w") as errors:
            running = subprocess.Popen(
                ["bash", "-c", f"exec {command}"], cwd=self._folder, env=self._env, stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE, stderr=errors, text=True,
            )  # fmt: skip
        try:
            assert running.stdout is not None
            name, _, endpoint = running.stdout.readline().removeprefix("export ").strip().partition("=")
            self._env[name] = endpoint
            until = time.monotonic() + LIMIT
            while "ready: " not in log.read_text():
                if running.poll() is not None or time.monotonic() > until:
                    raise PageError(f"{command} is not ready; its log:\n{log.read_text()}")
                time.sleep(0.2)
            yield
        finally:
            running.send_signal(signal.SIGINT)
            with contextlib.suppress(subprocess.TimeoutExpired):
                running.wait(60)
            running.kill()
            running.wait()


def environment(own: Mapping[str, str] = os.environ) -> dict[str, str]:
    """The environment variables without those of this clone: its modules and its settings."""
    gone = ("PYTHON", "DISTOP_", "VIRTUAL_ENV", "PYTEST_")
    return {name: value for name, value in own.items() if not name.startswith(gone)}
