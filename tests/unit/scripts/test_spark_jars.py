"""A jar is used only if its SHA-256 is the one of its name."""

from __future__ import annotations

from pathlib import Path

import pytest

from scripts import spark_jars
from scripts.spark_jars import DELTA, ICEBERG, S3, Jar

ROOT = Path(__file__).parents[3]
NAME = ICEBERG.name


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "distop" / "jars"


def fetching(monkeypatch: pytest.MonkeyPatch, content: bytes) -> None:
    def fetch(jar: Jar, folder: Path) -> Path:
        file = folder / jar.name
        file.write_bytes(content)
        return file

    monkeypatch.setattr(spark_jars, "fetch", fetch)


def test_a_fetched_jar_that_differs_is_refused_and_not_kept(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fetching(monkeypatch, b"another jar")
    with pytest.raises(
        spark_jars.Unverified, match=f"{NAME} is refused: its SHA-256 is .*, not {spark_jars.SHA256[NAME]}"
    ):
        spark_jars.find(ICEBERG)
    assert [path.name for path in cache.iterdir()] == [".lock"]


def test_a_jar_that_was_changed_in_the_cache_is_refused(cache: Path) -> None:
    cache.mkdir(parents=True)
    (cache / NAME).write_bytes(b"another jar")
    with pytest.raises(spark_jars.Unverified, match="is refused: its SHA-256 is "):
        spark_jars.find(ICEBERG)


def test_a_jar_without_a_known_checksum_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    fetching(monkeypatch, b"any jar")
    with pytest.raises(spark_jars.Unverified, match="no SHA-256 of this name is known"):
        spark_jars.find(ICEBERG._replace(version="9.9.9"))


def test_a_jar_with_its_checksum_is_fetched_once(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fetching(monkeypatch, b"")
    empty = "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"
    monkeypatch.setitem(spark_jars.SHA256, NAME, empty)
    assert spark_jars.find(ICEBERG) == cache / NAME
    monkeypatch.setattr(spark_jars, "fetch", None)
    assert spark_jars.find(ICEBERG) == cache / NAME


def test_the_docs_have_the_checksums() -> None:
    text = (ROOT / "docs/reference/tables.md").read_text()
    for jar in (ICEBERG, *DELTA, *S3):
        assert f"{spark_jars.SHA256[jar.name]}  {jar.name}" in text
