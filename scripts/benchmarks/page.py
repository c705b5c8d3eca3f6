"""The page of an operation with 100,000 partitions in Chromium: until its picture is drawn, and JavaScript's memory."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import browser
from page_scene import PageScene

from benchmarks.common import Row, median, report_progress

PARTITIONS = 100_000
AGAIN = 3
_MARKED = (
    "performance.getEntriesByName('map-complete').length && document.getElementById('live').textContent === 'ended'"
)
_TIMES = "['map-first', 'map-complete'].map((name) => performance.getEntriesByName(name)[0].startTime / 1000)"


def page_rows() -> list[Row]:
    """The rows of the page; none if there is no Chromium, which is reported."""
    if missing := browser.problem():
        report_progress(f"page: not measured, because this needs {missing}")
        return []
    with tempfile.TemporaryDirectory(prefix="distop-page-") as folder, PageScene(Path(folder)) as scene:
        scene.table("t")
        scene.executors("one", "two")
        op = scene.client.start_operation("noop", "t", {"jobs": PARTITIONS, "fail": ["77777"]})
        op.wait(timeout=600)
        with browser.chromium() as chromium:
            _open(chromium, f"{scene.url}/operations")  # the browser's own start is not measured
            first, whole, heap = _open(chromium, f"{scene.url}/operation?op={op.ref}")
            again = [_open(chromium, f"{scene.url}/operation?op={op.ref}")[:2] for _ in range(AGAIN)]
    report_progress(f"page: first picture after {first:.2f} s, complete after {whole:.2f} s")
    before = [f"{median(list(one)):.2f} s when read before" for one in zip(*again, strict=True)]
    name = f"page of {PARTITIONS:,} partitions"
    return [
        Row(f"{name}: first picture", first, "s", 1, note=before[0]),
        Row(f"{name}: complete", whole, "s", note=before[1]),
        Row(f"{name}: JavaScript's heap", heap / 1e6, "MB", 50),
    ]


def _open(chromium: Any, url: str) -> tuple[float, float, int]:
    """Seconds from the navigation until the first and the complete picture, and the bytes of the heap."""
    context = chromium.new_context(viewport={"width": 1280, "height": 900})
    try:
        page = context.new_page()
        page.goto(url)
        if "/operation?" not in url:
            return 0.0, 0.0, 0
        browser.until(page, _MARKED)
        first, whole = page.evaluate(_TIMES)
        return first, whole, browser.heap_bytes(page)
    finally:
        context.close()
