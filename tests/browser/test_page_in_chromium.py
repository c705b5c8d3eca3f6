"""The page in a browser: each view, live updates, reconnects, many partitions, and texts that try to be HTML."""

from __future__ import annotations

import asyncio
import json
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import browser
import pytest
from page_scene import PageScene

from distop.protocol.keys import Keys
from distop.protocol.records import History, OperationRef, State
from distop.protocol.txn import Put, Txn
from distop.store.client import EtcdClient
from distop.store.connection_settings import EtcdConfig

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = [pytest.mark.browser, pytest.mark.etcd, pytest.mark.rotating, pytest.mark.timeout(300)]

EVIL = '<img src=x onerror="window.hacked=1"><script>window.hacked=1</script>'
RECORDED = """
window.received = [];
const Source = window.EventSource;
window.EventSource = class extends Source {
  constructor(url) {
    super(url);
    for (const kind of ["part", "map", "timeline", "end"])
      super.addEventListener(kind, (event) => window.received.push([kind, event.data, event.lastEventId]));
  }
};
"""
WAIT = 60_000


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PageScene]:
    if missing := browser.problem():
        pytest.skip(f"needs {missing}")
    with PageScene(tmp_path_factory.mktemp("page")) as found:
        found.executors("node-a", "node-b", slots=2)
        found.table("sales.orders")
        yield found


@pytest.fixture(scope="module")
def chromium(scene: PageScene) -> Iterator[Any]:
    with browser.chromium() as found:
        yield found


class Problems(list[str]):
    """What the browser complains about in a page."""

    def watch(self, page: Any) -> None:
        page.on("pageerror", lambda error: self.append(str(error)))
        page.on("console", lambda message: self.append(message.text) if message.type == "error" else None)


@pytest.fixture
def page(chromium: Any, scene: PageScene) -> Iterator[Any]:
    """A page of 1,280 pixels in which no script fails and nothing breaks the content security policy."""
    context = chromium.new_context(viewport={"width": 1280, "height": 900}, base_url=scene.url)
    opened, problems = context.new_page(), Problems()
    problems.watch(opened)
    opened.add_init_script(RECORDED)
    yield opened
    hacked = opened.evaluate("window.hacked")
    context.close()
    lost = ("ERR_CONNECTION_REFUSED", "ERR_INCOMPLETE_CHUNKED_ENCODING", "ERR_CONNECTION_RESET", "ERR_EMPTY_RESPONSE")
    assert [text for text in problems if not any(one in text for one in lost)] == []
    assert hacked is None


def totals(page: Any) -> list[int]:
    """The numbers of jobs in each state, summed over the cells of the map."""
    found: list[int] = page.evaluate(
        "[1,2,3,4,5].map((n) => distopMap.cells.reduce((sum, cell) => sum + (cell ? cell[n] : 0), 0))"
    )
    return found


def check_nothing_came_twice(page: Any) -> None:
    """Each event has changed something."""
    shown: dict[str, Any] = {}
    for kind, data, _ in page.evaluate("window.received"):
        found = json.loads(data)
        if kind == "part":
            assert shown.get(found["name"]) != found["html"], f"the part {found['name']} came twice"
            shown[found["name"]] = found["html"]
        elif kind == "map" and found["complete"]:
            for cell in found["changed"]:
                assert shown.get(f"cell {cell[0]}") != cell, f"the cell {cell} came twice"
                shown[f"cell {cell[0]}"] = cell


def until(page: Any, condition: str) -> None:
    browser.until(page, condition)


COMPLETE = "document.getElementById('map-canvas')?.dataset.complete === 'true'"
ENDED = "document.getElementById('live')?.textContent === 'ended'"  # null while a form leads to another page


def test_each_view_fits_the_window_in_both_colours(page: Any, scene: PageScene) -> None:
    ended = scene.client.start_operation("noop", "sales.orders", {"jobs": 6, "fail": ["2"]})
    ended.wait(timeout=100)
    paths = ("/operations", f"/operation?op={ended.ref}", "/tables", "/table?name=sales.orders", "/nodes", "/start",
             "/start?type=noop&table=sales.orders")  # fmt: skip
    papers = set()
    for scheme in ("light", "dark"):
        page.emulate_media(color_scheme=scheme)
        for path in paths:
            assert page.goto(path).status == 200
            assert page.locator("h1").count() == 1
            assert page.evaluate("document.documentElement.scrollWidth") <= 1280, path
        papers.add(page.evaluate("getComputedStyle(document.documentElement).backgroundColor"))
    assert len(papers) == 2


def test_the_map_and_the_list_of_a_cell_work_with_the_keyboard(page: Any, scene: PageScene) -> None:
    ended = scene.client.start_operation("noop", "sales.orders", {"jobs": 6, "fail": ["2"]})
    ended.wait(timeout=100)
    page.goto(f"/operation?op={ended.ref}")
    until(page, COMPLETE)
    page.locator("#map-canvas").focus()
    for key in ("ArrowRight", "ArrowRight", "ArrowRight"):
        page.keyboard.press(key)
    assert page.locator("#map-cell").inner_text().startswith("Partition 2: failed")
    page.keyboard.press("Enter")
    page.locator("#map-details table").wait_for(timeout=WAIT)
    assert "fails as the argument demands" in page.locator("#map-details").inner_text()
    for mode in ("duration", "rows", "attempts"):
        page.locator(f"input[name=mode][value={mode}]").check()
        assert page.evaluate("distopMap.mode") == mode


def test_a_page_follows_an_operation_and_shows_a_takeover(page: Any, scene: PageScene) -> None:
    scene.executors("node-killed", slots=2)
    op = scene.client.start_operation("noop", "sales.orders", {"jobs": 60, "sleep": 1.5})
    page.goto(f"/operation?op={op.ref}")
    killed = "node-killed"
    until(page, f"distopTimeline.found && distopTimeline.found.rows.some((row) => row.executor === '{killed}')")
    scene.kill(killed)
    until(page, "(document.getElementById('timeline-canvas').dataset.marks || '').includes('takeover')")
    op.cancel()
    until(page, ENDED)
    assert "takeover" in page.locator("#timeline-marks").inner_text()
    assert "cancelled" in page.locator("#part-head").inner_text()
    check_nothing_came_twice(page)


def test_after_a_restart_of_the_service_nothing_is_missed_or_doubled(page: Any, scene: PageScene) -> None:
    op = scene.client.start_operation("noop", "sales.orders", {"jobs": 40, "sleep": 0.3})
    page.goto(f"/operation?op={op.ref}")
    until(page, f"({COMPLETE}) && distopMap.cells.some((cell) => cell && cell[2])")
    scene.restart_service(kill=True)
    until(page, "distopLive.opened >= 2")
    op.wait(timeout=100)
    until(page, ENDED)
    assert totals(page) == [0, 40, 0, 0, 0]
    numbers = page.locator("#part-head .numbers").inner_text()
    assert "40" in numbers
    assert "success" in page.locator("#part-head h1").inner_text()
    check_nothing_came_twice(page)


def test_the_list_of_operations_is_live(page: Any, scene: PageScene) -> None:
    page.goto("/operations?type=noop&state=running&state=success")
    op = scene.client.start_operation("noop", "sales.orders", {"jobs": 2, "sleep": 3})
    page.locator(f"#part-open >> text={op.ref}").wait_for(timeout=WAIT)
    page.locator(f"#part-ended >> text={op.ref}").wait_for(timeout=WAIT)
    assert "type=noop" in page.url
    check_nothing_came_twice(page)


def test_a_form_starts_an_operation_and_a_button_cancels_it(page: Any, scene: PageScene) -> None:
    page.goto("/start?type=noop&table=sales.orders")
    page.locator("[data-field=jobs]").fill("-3")
    until(page, "document.getElementById('problem').textContent.includes('jobs')")
    page.locator("[data-field=jobs]").fill("4")
    page.locator("[data-field=sleep]").fill("60")
    until(page, "document.getElementById('problem').className.includes('fits')")
    assert json.loads(page.locator("#arg").input_value()) == {"jobs": 4, "sleep": 60}
    assert "distop start noop sales.orders --arg" in page.locator("#start-command").inner_text()
    page.locator("button.main").click()
    page.wait_for_url("**/operation?op=**", timeout=WAIT)
    page.locator("form[action='/do/cancel'] input[name=text]").fill("it was a test")
    page.on("dialog", lambda dialog: dialog.accept())
    assert "--text 'it was a test'" in page.locator("form[action='/do/cancel'] code").inner_text()
    page.locator("form[action='/do/cancel'] button").click()
    until(page, ENDED)
    assert "Ended as cancelled: it was a test" in page.locator("#part-head").inner_text()


def test_texts_of_others_do_nothing(page: Any, scene: PageScene) -> None:
    scene.table(EVIL)
    op = scene.client.start_operation("noop", EVIL, {"jobs": 3, "fail": ["1"]}, labels={"note": EVIL})
    op.wait(timeout=100)
    with ThreadPoolExecutor(1) as thread:  # Playwright's own loop runs in this one
        thread.submit(asyncio.run, _write_evil_history(scene)).result()
    for path in ("/operations", f"/operation?op={quoted(op.ref)}", "/operation?op=sales.orders/validate/1", "/tables",
                 f"/table?name={quoted(EVIL)}", f"/start?type=noop&table={quoted(EVIL)}"):  # fmt: skip
        assert page.goto(path).status == 200, path
        if path.startswith("/operation?"):
            until(page, ENDED)
        assert page.locator("main img").count() == 0
        assert page.evaluate("window.hacked") is None
    assert page.goto("/operation?op=sales.orders/validate/1").status == 200
    assert "<img" in page.locator("#part-report").inner_text()


def quoted(text: str) -> str:
    from urllib.parse import quote

    return quote(text, safe="")


async def _write_evil_history(scene: PageScene) -> None:
    """An ended validation whose report has texts that try to be HTML."""
    sample = {"partition": EVIL, "file": EVIL, "row_index": 1, "values": {EVIL: EVIL}}
    check = {"name": EVIL, "check": {"not_null": EVIL}, "verdict": "violated", "violations": 1, "samples": [sample]}
    report = {"verdict": "violated", "rows": 3, "checks": [check], "note": {EVIL: [EVIL]}}
    ref, now = OperationRef.parse("sales.orders/validate/1"), "2026-01-01T00:00:00.000Z"
    record = History(str(ref), State.FAILED, now, now, 0, 0, 0, report, ({"partition": EVIL, "text": EVIL},))
    async with EtcdClient(EtcdConfig((scene.endpoint,))) as etcd:
        await etcd.commit(Txn((), (Put(Keys().history(ref), record.encode()),)))


def test_a_hundred_thousand_partitions_are_one_picture(
    page: Any, scene: PageScene, record_property: pytest.RecordProperty
) -> None:
    op = scene.client.start_operation("noop", "sales.orders", {"jobs": 100_000, "fail": ["77777"]})
    op.wait(timeout=200)
    page.goto(f"/operation?op={op.ref}")
    until(page, COMPLETE)
    until(page, ENDED)
    assert totals(page) == [0, 99_999, 0, 0, 1]
    assert page.evaluate("distopMap.cells.length") <= 2_400
    heap = browser.heap_bytes(page)
    assert heap < 50e6
    record_property("figures", f"100,000 partitions: {heap / 1e6:.1f} MB of JavaScript's heap")
