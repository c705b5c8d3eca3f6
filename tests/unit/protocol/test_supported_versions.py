"""Which servers and which Java are good enough."""

from __future__ import annotations

import pytest

from distop.protocol.supported_versions import (
    java_major,
    judge_etcd,
    judge_java,
    orders_requested_progress,
    parse_version,
)


@pytest.mark.parametrize(
    ("version", "members", "level", "words"),
    [
        ("3.5.33", 3, "ok", "etcd 3.5.33"),
        ("3.6.14", 3, "ok", ""),
        ("3.6.99", 3, "ok", ""),
        ("3.7.1", 1, "ok", ""),
        ("3.8.0", 3, "ok", ""),
        ("3.8.0-alpha.1", 3, "ok", ""),
        ("4.0.0", 3, "ok", ""),
        ("3.7.0", 3, "warning", "3.7.1"),
        ("3.5.32", 3, "warning", "update to 3.5.33"),
        ("3.6.1", 3, "warning", r"#20221\), renewals of revoked leases acknowledged, stale linearizable reads"),
        ("3.6.13", 3, "warning", r"known defects: watches that see more than their role allows\): update to 3.6.14"),
        ("3.5.1", 1, "warning", "development node"),
        ("3.5.1", 0, "warning", "development node"),
        ("3.5.0", 3, "error", "#13766.*update all 3 members"),
        ("3.5.2", 5, "error", "#13766"),
        ("3.5.3", 3, "warning", "not for production"),
        ("3.4.23", 1, "warning", "development node"),
        ("3.3.25", 1, "error", "too old"),
        ("2.3.8", 1, "error", "too old"),
        ("", 1, "warning", "not permitted"),
        ("garbage", 1, "warning", "garbage"),
    ],
)
def test_versions_of_etcd_are_judged(version: str, members: int, level: str, words: str) -> None:
    import re

    judged = judge_etcd(version, members)
    assert judged.level == level
    assert re.search(words, judged.text)


def test_defects_of_a_release_are_listed() -> None:
    assert "13766" not in judge_etcd("3.5.3", 1).text
    assert "14110" in judge_etcd("3.5.4", 1).text
    assert "14110" not in judge_etcd("3.5.5", 1).text
    assert "17529" in judge_etcd("3.4.23", 1).text
    assert "17529" not in judge_etcd("3.4.31", 1).text


@pytest.mark.parametrize(
    ("version", "members", "brief"),
    [
        ("3.5.33", 3, "etcd 3.5.33"),
        ("3.6.1", 3, "etcd 3.6.1 is not for production: update to 3.6.14 or newer"),
        ("3.5.1", 3, "etcd 3.5.1 can lose data after a crash: update all 3 members to 3.5.33 or newer"),
    ],
)
def test_the_brief_text_has_no_list_of_defects(version: str, members: int, brief: str) -> None:
    assert judge_etcd(version, members).brief == brief


def test_versions_are_parsed() -> None:
    assert parse_version("3.6.0-rc.1") == (3, 6, 0)
    assert parse_version("v3.5.1") == (3, 5, 1)
    assert parse_version("3.5") == ()


@pytest.mark.parametrize(
    ("text", "safe"),
    [("3.5.1", False), ("3.5.8", True), ("3.4.24", False), ("3.4.25", True), ("3.6.0", True), ("", False)],
)
def test_progress_is_requested_only_from_servers_that_order_it(text: str, safe: bool) -> None:  # W3
    assert orders_requested_progress(parse_version(text)) is safe


@pytest.mark.parametrize(
    ("output", "major", "level"),
    [
        ('openjdk version "17.0.9" 2023-10-17', 17, "ok"),
        ('openjdk version "21" 2023-09-19', 21, "ok"),
        ('java version "1.8.0_392"', 8, "error"),
        ('openjdk version "11.0.2"', 11, "error"),
        ("command not found", None, "error"),
    ],
)
def test_versions_of_java_are_judged(output: str, major: int | None, level: str) -> None:
    assert java_major(output) == major
    assert judge_java(output).level == level
