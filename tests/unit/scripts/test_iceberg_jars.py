"""A jar is used only if its SHA-256 is the one of its name."""

from __future__ import annotations

from pathlib import Path

import pytest

from distop.tables.iceberg.iceberg_jar import VERSION
from scripts import iceberg_jars
from tests.support.lake import ARTIFACT

ROOT = Path(__file__).parents[3]
NAME = f"{ARTIFACT}-{VERSION}.jar"


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "distop" / "jars"


def fetching(monkeypatch: pytest.MonkeyPatch, content: bytes) -> None:
    def fetch(artifact: str, version: str, folder: Path) -> Path:
        file = folder / f"{artifact}-{version}.jar"
        file.write_bytes(content)
        return file

    monkeypatch.setattr(iceberg_jars, "fetch", fetch)


def test_a_fetched_jar_that_differs_is_refused_and_not_kept(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fetching(monkeypatch, b"another jar")
    with pytest.raises(
        iceberg_jars.Unverified, match=f"{NAME} is refused: its SHA-256 is .*, not {iceberg_jars.SHA256[NAME]}"
    ):
        iceberg_jars.find(ARTIFACT)
    assert [path.name for path in cache.iterdir()] == [".lock"]


def test_a_jar_that_was_changed_in_the_cache_is_refused(cache: Path) -> None:
    cache.mkdir(parents=True)
    (cache / NAME).write_bytes(b"another jar")
    with pytest.raises(iceberg_jars.Unverified, match="is refused: its SHA-256 is "):
        iceberg_jars.find(ARTIFACT)


def test_a_jar_without_a_known_checksum_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    fetching(monkeypatch, b"any jar")
    with pytest.raises(iceberg_jars.Unverified, match="no SHA-256 of this name is known"):
        iceberg_jars.find(ARTIFACT, "9.9.9")


def test_a_jar_with_its_checksum_is_fetched_once(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fetching(monkeypatch, b"")
    empty = "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"
    monkeypatch.setitem(iceberg_jars.SHA256, NAME, empty)
    assert iceberg_jars.find(ARTIFACT) == cache / NAME
    monkeypatch.setattr(iceberg_jars, "fetch", None)
    assert iceberg_jars.find(ARTIFACT) == cache / NAME


def test_the_docs_have_the_checksum() -> None:
    assert f"{iceberg_jars.SHA256[NAME]}  {NAME}" in (ROOT / "docs/reference/tables.md").read_text()
