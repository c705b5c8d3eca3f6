"""The lock of Python packages has a hash for every file, no index, and matches pyproject.toml."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest
from lock import FILES, ROOT, entries, problems

A = "a" * 64


@pytest.fixture
def copied(tmp_path: Path) -> Path:
    shutil.copytree(ROOT / "requirements", tmp_path / "requirements")
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    return tmp_path


def test_the_lock_matches_pyproject() -> None:
    assert problems() == []


@pytest.mark.parametrize("file", FILES)
def test_each_locked_package_has_hashes_and_no_file_names_an_index(file: str) -> None:
    text = (ROOT / "requirements" / f"{file}.txt").read_text()
    assert entries(text)
    assert re.search(r"://|--(extra-)?index-url|--find-links|--trusted-host", text) is None


@pytest.mark.parametrize(
    "line", ["a==1", "a>=1 \\\n    --hash=sha256:" + A, "--index-url x", "a @ file:///a", "a==1 \\\n    --hash=md5:aa"]
)
def test_a_line_without_version_and_hash_is_refused(copied: Path, line: str) -> None:
    with (copied / "requirements" / "dev.txt").open("a") as file:
        file.write(line + "\n")
    [sentence] = problems(copied)
    assert sentence.startswith("requirements/dev.txt: not a pinned version with SHA-256 hashes: ")


def test_differences_from_pyproject_are_reported(copied: Path) -> None:
    project = copied / "pyproject.toml"
    project.write_text(project.read_text().replace('"rich>=13.7"', '"rich>=1000", "left-pad>=1"'))
    with (copied / "requirements" / "dev.txt").open("a") as file:
        file.write(f"unneeded==1 \\\n    --hash=sha256:{A}\n")
    found = problems(copied)
    assert any(re.fullmatch(r"rich is locked at \S+, but pyproject.toml wants rich>=1000", one) for one in found), found
    assert "left-pad>=1 of pyproject.toml is not locked" in found
    assert "unneeded is locked, but no package needs it" in found


def test_a_runtime_package_in_the_development_lock_is_reported(copied: Path) -> None:
    run, dev = (copied / "requirements" / f"{name}.txt" for name in ("run", "dev"))
    [rich] = [entry for entry in entries(run.read_text()) if entry.name == "rich"]
    run.write_text(run.read_text().replace(rich.text, ""))
    dev.write_text(dev.read_text() + rich.text)
    assert any(one.startswith("rich is in requirements/dev.txt, but ") for one in problems(copied))
