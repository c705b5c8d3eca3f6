"""Makes the pictures of the page for the documents (scripts/screenshots)."""

from __future__ import annotations

import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import browser
from page_scene import PageScene

if TYPE_CHECKING:
    from collections.abc import Sequence

IMAGES = Path(__file__).resolve().parents[1] / "docs" / "images"
SIZE = {"width": 1280, "height": 860}
_REPLACE = """(folder) => {
  const texts = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (texts.nextNode()) texts.currentNode.data = texts.currentNode.data.replaceAll(folder, "/data");
}"""
"""Puts a short folder in place of a temporary one."""
COMPLETE = "document.getElementById('map-canvas').dataset.complete === 'true'"


def _rows() -> Any:
    """The files of a small table; one amount is negative, and one id is missing."""
    import pyarrow

    for day in range(4):
        ids: list[int | None] = [day * 100 + n for n in range(100)]
        amounts = [float(n) for n in range(100)]
        if day == 2:
            ids[7], amounts[30] = None, -4.5
        yield pyarrow.table({"id": ids, "amount": amounts})


def _operations(scene: PageScene, *, spark: bool) -> dict[str, str]:
    """Runs what the pictures show; returns the operations by name."""
    client = scene.client
    scene.table("sales.orders", _rows())
    scene.table("sales.customers", _rows())
    scene.table("lake.events")
    scene.executors("spark-1", "spark-2", "spark-3")
    client.set_policy("check-daily", "sales.orders", start="noop", every="1d", arg={})
    for n, jobs in enumerate((3, 9, 5, 14, 7, 11)):
        wanted = {"jobs": jobs, "sleep": 0.05, "fail": ["1"] if n == 2 else []}
        client.start_operation("noop", "sales.orders", wanted).wait(timeout=200)
    found = {}
    if spark:
        checks = [{"not_null": "id"}, {"range": {"column": "amount", "min": 0}}]
        found["report"] = client.start_operation("validate", "sales.orders", {"checks": checks})
        found["report"].wait(timeout=400)
        certified = {"checks": checks[1:], "where": "id < 200"}
        client.start_operation("validate", "sales.customers", certified).wait(timeout=400)
    large = client.start_operation("noop", "lake.events", {"jobs": 100_000, "fail": ["31415", "77777"]})
    large.wait(timeout=600)
    running = client.start_operation(
        "noop", "lake.events", {"jobs": 240, "sleep": 0.7, "fail": ["40"]}, labels={"team": "lake"}
    )
    client.start_operation("noop", "sales.orders", {}, after=[running.ref])
    scene.until(lambda: running.status().jobs["success"], "the first jobs have ended")
    scene.kill("spark-3")
    scene.until(lambda: "spark-3" not in {node.executor for node in client.nodes().values()}, "spark-3 is gone")
    found |= {"large": large, "running": running}
    return {name: op.ref for name, op in found.items()}


def _take(scene: PageScene, ops: dict[str, str], folder: Path) -> None:
    pictures = [
        ("operations", "/operations", "light", False),
        ("operation", f"/operation?op={ops['running']}", "light", False),
        ("operation-dark", f"/operation?op={ops['running']}", "dark", False),
        ("large", f"/operation?op={ops['large']}", "light", False),
        ("table", "/table?name=sales.orders", "light", True),
        ("nodes", "/nodes", "light", False),
        ("start", "/start?type=validate&table=sales.orders", "light", False),
    ]
    if "report" in ops:
        pictures.append(("report", f"/operation?op={ops['report']}", "light", True))
    with browser.chromium() as chromium:
        for name, path, scheme, whole in pictures:
            context = chromium.new_context(viewport=SIZE, base_url=scene.url, color_scheme=scheme)
            page = context.new_page()
            page.goto(path)
            if path.startswith("/operation?"):
                browser.until(page, COMPLETE)
            if name in ("operation", "operation-dark"):
                marks = "(document.getElementById('timeline-canvas').dataset.marks || '').includes('takeover')"
                browser.until(page, marks)
            if name == "start":
                page.locator("#arg").fill('{\n  "checks": [\n    {"not_null": "id"}\n  ]\n}')
                browser.until(page, "document.getElementById('problem').className.includes('fits')")
            browser.until(page, "document.getElementById('live').textContent !== '' || !document.body.dataset.live")
            page.evaluate(_REPLACE, str(scene.folder))
            page.evaluate("document.activeElement && document.activeElement.blur()")
            page.screenshot(path=str(folder / f"page-{name}.png"), full_page=whole, animations="disabled")
            context.close()


def main(arguments: Sequence[str]) -> int:
    """Make the pictures in docs/images. ``--without-spark``: not that of a report, for which Spark has to start."""
    if missing := browser.problem():
        print(f"distop: this needs {missing}", file=sys.stderr)
        return 1
    folder = IMAGES
    folder.mkdir(parents=True, exist_ok=True)
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="distop-page-") as place, PageScene(Path(place), ttl=8) as scene:
        _take(scene, _operations(scene, spark="--without-spark" not in arguments), folder)
    for one in sorted(folder.glob("page-*.png")):
        print(f"{one.name}: {one.stat().st_size / 1000:.0f} kB")
    print(f"took {time.monotonic() - began:.0f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
