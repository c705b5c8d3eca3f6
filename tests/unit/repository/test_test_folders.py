"""The folders of unit tests mirror the packages."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
OTHERS = {"repository", "scripts", "simulator", "support", "behaviors"}
"""Folders for contracts of the source, for what is outside of distop, and for helpers."""


def folders(parent: Path, pattern: str) -> set[str]:
    return {path.name for path in parent.iterdir() if any(path.rglob(pattern))}


def test_each_package_has_a_folder_of_unit_tests_and_each_folder_a_package() -> None:
    packages = {name for name in folders(ROOT / "distop", "*.py") if not name.startswith("_")}
    assert folders(ROOT / "tests" / "unit", "*.py") - OTHERS == packages
