"""The folders of unit tests mirror the packages."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
UNIT = ROOT / "tests" / "unit"
OTHERS = {"repository", "scripts", "simulator", "support", "behaviors"}
"""Folders for contracts of the source, for what is outside of distop, and for helpers."""


def folders(parent: Path) -> set[str]:
    """The folders below a folder that contain Python files."""
    return {path.parent.relative_to(parent).as_posix() for path in parent.rglob("*.py")} - {"."}


def test_each_package_has_unit_tests_in_a_folder_of_its_name() -> None:
    packages = {name.partition("/")[0] for name in folders(ROOT / "distop")} - {"v1"}  # generated
    assert packages <= folders(UNIT)


def test_each_folder_of_unit_tests_has_the_name_of_a_package() -> None:
    assert {name for name in folders(UNIT) if name not in OTHERS} <= folders(ROOT / "distop")


def test_each_package_of_tables_has_unit_tests_in_a_folder_of_its_name() -> None:
    formats = {name for name in folders(ROOT / "distop") if name.startswith("tables/")}
    assert formats <= folders(UNIT)
