"""What ``distop doctor`` thinks of what it finds."""

from __future__ import annotations

import pytest

from distop.cli.doctor import judge_space

MEBIBYTE = 1024 * 1024


@pytest.mark.parametrize(
    ("size", "quota", "status", "words"),
    [
        (1, 0, "ok", "no alarm, the database has 1.0 of 2,048 MiB (etcd's default quota"),
        (1638, 0, "ok", "1,638.0 of 2,048 MiB"),
        (1639, 0, "warning", "and then etcd takes no more writes: compact and defragment it"),
        (1639, 8192, "ok", "no alarm, the database has 1,639.0 of 8,192 MiB"),
        (7000, 8192, "warning", "the database has 7,000.0 of 8,192 MiB, and then"),
        (9000, 8192, "warning", "9,000.0 of 8,192 MiB"),
    ],
)
def test_an_etcd_that_is_nearly_full_is_warned_of_before_it_is(size: int, quota: int, status: str, words: str) -> None:
    found = judge_space(size * MEBIBYTE, quota * MEBIBYTE)
    assert (found.name, found.status) == ("space", status)
    assert words in found.text
