"""Which files of a table may be deleted."""

from __future__ import annotations

import pytest

from distop.errors import UnsafePath
from distop.storage.deletion_scope import DeletionScope


@pytest.mark.parametrize(
    ("place", "path", "key"),
    [
        ("/lake/t", "/lake/t/a", "a"),
        ("/lake/t/", "file:/lake/t/a/b c/é", "a/b c/é"),
        ("/lake/t", "file:///lake/t/day=2024-01-01 10%3A00/x", "day=2024-01-01 10%3A00/x"),
        ("s3://b/t", "s3a://b/t/_change_data/x", "_change_data/x"),
        ("s3a://b/t/", "s3://b/t/A", "A"),
    ],
)
def test_a_file_below_the_place_has_a_key(place: str, path: str, key: str) -> None:
    assert DeletionScope(place).key_of(path) == key


@pytest.mark.parametrize(
    "path",
    [
        "/lake/t",
        "/lake/t/",
        "/lake/t/a/",
        "/lake/t2/a",
        "/lake/T/a",
        "/lake/a",
        "/lake/t/../t2/a",
        "/lake/t/a//b",
        "/lake/t/./a",
        "s3://lake/t/a",
        "file://other/lake/t/a",
        "t/a",
        "/lake/t/_distop/index/i/data/x",
        "/lake/t/_distop",
        "/lake/t/%2e%2e/t2/a",
        "/lake/t/a%252F%252e%252e%252Fb",
        "/lake/t/a%2F%2Fb",
        "/lake/t/a\nb",
    ],
)
def test_any_other_path_is_refused(path: str) -> None:
    with pytest.raises(UnsafePath):
        DeletionScope("/lake/t").key_of(path)


@pytest.mark.parametrize("place", ["/", "file:///", "s3://b", "s3://b/", "//", "lake/t"])
def test_nothing_is_deleted_below_a_root(place: str) -> None:
    with pytest.raises(UnsafePath):
        DeletionScope(place)


@pytest.mark.parametrize("other", ["/lake/t/inner", "file:/lake", "/lake/t/", "/lake/t/a/b"])
def test_nessie_12363_nothing_is_deleted_where_another_table_may_have_files(other: str) -> None:
    """The sweep of one content deleted live files of another one with the same base location."""
    with pytest.raises(UnsafePath, match="another table's folder"):
        DeletionScope("/lake/t", [other])


def test_other_tables_beside_the_place_do_not_matter() -> None:
    assert DeletionScope("/lake/t", ["/lake/t2", "s3://lake/t", "/lake/T"]).key_of("/lake/t/a") == "a"
