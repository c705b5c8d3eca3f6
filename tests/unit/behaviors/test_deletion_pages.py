"""Pages of deletions, and their rate."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from distop.behavior import JobCancelled
from distop_behaviors.orphans import deletion_pages
from distop_behaviors.orphans.deletion_pages import pages, wait_until
from distop_behaviors.orphans.text_digest import text_digest
from tests.support.context import FakeContext

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.parametrize(
    ("size", "rate", "sizes"),
    [(4, None, [4, 4, 2]), (4, 100.0, [4, 4, 2]), (4, 3.9, [3, 3, 3, 1]), (2, 0.5, [1] * 10), (20, None, [10])],
)
def test_pages_are_not_larger_than_the_files_of_a_second(
    tmp_path: Path, size: int, rate: float | None, sizes: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    waits: list[float] = []
    monkeypatch.setattr(deletion_pages.time, "monotonic", lambda: 1_000.0)
    monkeypatch.setattr(deletion_pages, "wait_until", lambda until, ctx: waits.append(until - 1_000))
    files = list(range(10))
    found = list(pages(files, size, rate, FakeContext(tmp_path)))
    assert [one for page in found for one in page] == files
    assert [len(page) for page in found] == sizes
    assert waits == ([] if rate is None else pytest.approx([count / rate for count in sizes]))
    assert list(pages(files, size, rate, FakeContext(tmp_path), first=1)) == found[1:]


def test_a_cancelled_job_gets_no_further_page_and_does_not_wait(tmp_path: Path) -> None:
    ctx = FakeContext(tmp_path)
    found = pages([1, 2], 1, None, ctx)
    assert next(found) == [1]
    ctx.stopped = True
    with pytest.raises(JobCancelled):
        next(found)
    with pytest.raises(JobCancelled):
        wait_until(float("inf"), ctx)


def test_a_digest_of_any_name_is_stable() -> None:
    """Purge's receipts and the lists of running operations have these."""
    assert text_digest("data/k=caf\u00e9", 8).hex() == "e90c52719ee7a997"
    assert len(text_digest("not UTF-8: \udcff", 16)) == 16
