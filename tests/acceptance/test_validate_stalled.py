"""A file that stops answering during validate: its job fails soon, and no check gets a verdict."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

import pytest

from distop.behavior import TableUnavailable
from distop.tables.parquet import page_headers
from distop.tables.reading import parquet_footers
from distop_behaviors.validate import Validate
from tests.support.context import run_operation
from tests.support.damaged import KINDS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from distop.behavior import TableRecord
    from tests.acceptance.checked import Table
    from tests.support.context import FakeContext

pytestmark = [pytest.mark.spark, pytest.mark.timeout(120)]

READING = 2
"""The number of checks of a file while its footer is read."""
NOT_NULL, UNIQUE = {"not_null": "name"}, {"unique": "id"}


class Stalling:
    """Wraps a function that hangs after ``after`` calls, until :attr:`over` is set."""

    def __init__(self, function: Callable[..., Any], after: int) -> None:
        self.over = threading.Event()
        self._function = function
        self._left = after

    def __call__(self, *args: Any) -> Any:
        self._left -= 1
        if self._left < 0:
            self.over.wait()
        return self._function(*args)


@pytest.fixture
def stall(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[Any, str, int], None]]:
    """``stall(module, name, after)``: make a function hang after ``after`` calls."""
    monkeypatch.setattr(parquet_footers, "CHECKED_AFTER", 0.05)
    monkeypatch.setattr(parquet_footers, "READ_TIMEOUT", 0.5)
    made: list[Stalling] = []

    def one(module: Any, name: str, after: int) -> None:
        made.append(Stalling(getattr(module, name), after))
        monkeypatch.setattr(module, name, made[-1])

    yield one
    for each in made:
        each.over.set()


@pytest.mark.parametrize(
    ("kind", "check", "arg", "after"),
    [
        pytest.param("sound", NOT_NULL, {"sample": 0}, READING, id="counted"),
        pytest.param("sound", NOT_NULL, {"sample": 3}, READING + 1, id="sampled"),
        pytest.param("corrupt-pages", NOT_NULL, {"sample": 0}, READING, id="broken"),
        pytest.param("rows-left-out", NOT_NULL, {"sample": 0}, READING, id="misread"),
        pytest.param("sound", UNIQUE, {"sample": 0}, READING, id="keys"),
    ],
)
def test_a_file_that_stops_answering_gives_no_verdict(
    kind: str, check: dict[str, Any], arg: dict[str, Any], after: int, table: Table, stall: Callable[..., None]
) -> None:
    table.directory.mkdir(parents=True, exist_ok=True)
    KINDS[kind](table.directory / "a.parquet")
    stall(parquet_footers, "unchanged", after)
    with pytest.raises(TableUnavailable, match=r"a\.parquet did not answer within 0\.5 s"):
        table.run(check, statistics="never", **arg)


@pytest.mark.parametrize("check", [NOT_NULL, UNIQUE], ids=["rows", "keys"])
def test_pages_that_stop_answering_give_no_verdict(
    check: dict[str, Any], table: Table, stall: Callable[..., None]
) -> None:
    def again(record: TableRecord) -> FakeContext:
        context: FakeContext = table.context(record)
        context.again = True
        return context

    table.directory.mkdir(parents=True, exist_ok=True)
    KINDS["sound"](table.directory / "a.parquet")
    stall(page_headers, "open_regular", 0)
    argument = {"checks": [check], "statistics": "never"}
    with pytest.raises(TableUnavailable, match=r"a\.parquet did not answer within 0\.5 s"):
        run_operation(Validate(), table.record, argument, again)
