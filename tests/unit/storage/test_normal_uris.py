"""Normal forms of paths and URLs, and the coarser spellings."""

from __future__ import annotations

import pytest

from distop.errors import UnsafePath
from distop.storage.normal_uris import normal, spelling


@pytest.mark.parametrize(
    ("text", "form"),
    [
        ("/lake/t", "/lake/t"),
        ("file:/lake/t", "/lake/t"),
        ("file:///lake//t/./a/", "/lake/t/a"),
        ("FILE://localhost/lake/t", "/lake/t"),
        ("s3a://b/t/", "s3://b/t"),
        ("S3N://b/t", "s3://b/t"),
        ("s3://B/T", "s3://B/T"),
        ("gcs://b", "gs://b"),
        ("abfss://c@a.dfs.core.windows.net/t", "abfs://c@a.dfs.core.windows.net/t"),
        ("hdfs://nn:8020/t", "hdfs://nn:8020/t"),
        ("hdfs:///t", "hdfs:///t"),
        ("/lake/.t/..x/...", "/lake/.t/..x/..."),
        ("/lake/t\n/.\n", "/lake/t\n/.\n"),
        ("/lake/.", "/lake"),
        ("s3://b/./t", "s3://b/t"),
        ("s3://b//t", "s3://b/t"),
        ("/", "/"),
        ("/a b/%20/é/e\u0301", "/a b/%20/é/e\u0301"),
    ],
)
def test_equivalent_texts_have_one_form(text: str, form: str) -> None:
    assert str(normal(text)) == form


@pytest.mark.parametrize(
    "text",
    [
        "",
        "t/a",
        "~/t",
        "/t/../a",
        "s3://b/../a",
        "file://host/t",
        "s3:/b/t",
        "1:2",
        "/a\0b",
        "s3://b\0/t",
        "/t/..",
        "/..",
    ],
)
def test_other_texts_are_refused(text: str) -> None:
    with pytest.raises(UnsafePath):
        normal(text)


def test_a_folder_with_a_common_start_of_its_name_is_not_inside() -> None:
    table = normal("s3://b/t")
    assert table.has(normal("s3a://b/t/data/x"))
    for other in ("s3://b/t", "s3://b/t2/x", "s3://b/t.old/x", "s3://c/t/x", "gs://b/t/x", "s3://b/T/x"):
        assert not table.has(normal(other))


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("a b", "a%20b"),
        ("a%20b", "a%2520b"),
        ("caf\u00e9", "cafe\u0301"),
        ("caf%C3%A9", "cafe\u0301"),
        ("a//b", "a/b"),
        ("a/./b", "a/b"),
    ],
)
def test_texts_that_some_reader_takes_for_one_file_have_one_spelling(one: str, other: str) -> None:
    assert spelling(one) == spelling(other)


def test_case_is_part_of_a_spelling() -> None:
    assert spelling("a/B") != spelling("a/b")
