"""Finds Chromium, and opens pages in it with Playwright: for tests, screenshots and the benchmark of the page."""

from __future__ import annotations

import os
import shutil
import time
from contextlib import contextmanager
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
VARIABLE = "DISTOP_CHROMIUM"


def program() -> str | None:
    """The path of Chromium: of the variable DISTOP_CHROMIUM, or on PATH."""
    chosen = os.environ.get(VARIABLE)
    return chosen or next((found for name in NAMES if (found := shutil.which(name))), None)


def problem() -> str | None:
    """What is missing to open pages here, and how to get it; None: nothing."""
    if find_spec("playwright") is None:
        return "the Python package playwright, which is in distop's extra `dev`"
    if program() is None:
        return f"Chromium: `apt-get install chromium` (Debian, Ubuntu), or set {VARIABLE} to its path"
    return None


@contextmanager
def chromium() -> Iterator[Any]:
    """A running Chromium without a window."""
    from playwright.sync_api import sync_playwright

    # Chromium's own sandbox needs user namespaces, which containers and root do not have; it opens our own pages only.
    with sync_playwright() as driver:
        opened = driver.chromium.launch(executable_path=program(), args=["--no-sandbox"])
        try:
            yield opened
        finally:
            opened.close()


def until(page: Any, expression: str, seconds: float = 120.0) -> None:
    """Wait until an expression is true in a page. Raises TimeoutError.

    Playwright's own function would evaluate it in the page, whose content security policy forbids that.
    """
    deadline = time.monotonic() + seconds
    while not page.evaluate(f"Boolean({expression})"):
        if time.monotonic() > deadline:
            raise TimeoutError(f"not within {seconds:g} s: {expression}")
        page.wait_for_timeout(20)


def heap_bytes(page: Any) -> int:
    """The bytes of JavaScript's heap that a page uses, after a collection of garbage."""
    session = page.context.new_cdp_session(page)
    session.send("HeapProfiler.collectGarbage")
    session.send("Performance.enable")
    metrics = {one["name"]: one["value"] for one in session.send("Performance.getMetrics")["metrics"]}
    session.detach()
    return int(metrics["JSHeapUsedSize"])
