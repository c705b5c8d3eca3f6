"""The ranges of the requests that list a range in parts."""

from __future__ import annotations

import pytest

from distop.store.client import _prefix_end

LAST = b"a.z"


@pytest.mark.parametrize(
    ("key", "cut", "end"),
    [
        (b"a.b123\0", 1, b"a.b13"),
        (b"a.b123\0", 2, b"a.b2"),
        (b"a.b123", 3, b"a.c"),
        (b"a.b123\0", 5, LAST),  # "b" is beyond it
        (b"a.b123\0", 6, LAST),  # no prefix is left
        (b"a.b123\0", 7, LAST),
        (b"a.c", 1, LAST),
    ],
)
def test_a_request_covers_the_keys_that_share_a_prefix_with_the_last_key(key: bytes, cut: int, end: bytes) -> None:
    """etcd counts all keys of a range, so larger ranges cost more."""
    assert _prefix_end(key, cut, LAST) == end
