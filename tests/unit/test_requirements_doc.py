"""docs/requirements.md names every requirement once, and only code and tests that exist."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
ROW = re.compile(r"^\| ([PCLI])(\d+) \| (.+) \| (.+) \| (.+) \|$")
ELSEWHERE = {"P11", "P23"}  # said at the top of the document
LAST = {"P": 37, "C": 33, "L": 37, "I": 44}


def rows() -> list[tuple[str, str, str]]:
    """(number, code, test) of every row."""
    found = [ROW.match(line) for line in (ROOT / "docs" / "requirements.md").read_text().splitlines()]
    return [(match[1] + match[2], match[4], match[5]) for match in found if match]


def test_every_number_stands_once_and_in_order() -> None:
    expected = [f"{letter}{n}" for letter, last in LAST.items() for n in range(1, last + 1)]
    assert [number for number, _, _ in rows()] == [number for number in expected if number not in ELSEWHERE]


def missing(named: str) -> bool:
    """There is no such file, or in it no such test."""
    path, _, name = named.partition("::")
    file = ROOT / path
    return not file.exists() or (name != "" and f"def {name}(" not in file.read_text())


def test_what_is_named_exists() -> None:
    assert [
        f"{number}: {named}"
        for number, *columns in rows()
        for named in re.findall(r"`([^`]+)`", " ".join(columns))
        if missing(named)
    ] == []


def test_a_test_that_does_not_exist_is_missed() -> None:
    assert not missing("tests/unit/test_requirements_doc.py::test_what_is_named_exists")
    assert missing("tests/unit/test_requirements_doc.py::test_what_is_named")
    assert missing("tests/unit/test_nothing.py")


def test_every_fault_is_listed_with_the_tests_that_cause_it() -> None:
    text = (ROOT / "docs" / "requirements.md").read_text()
    faults = re.findall(r"^\| F(\d+) \| (.+) \| (.+) \|$", text, flags=re.MULTILINE)
    assert [number for number, _, _ in faults] == [str(n) for n in range(1, 44)]
    for number, how, tests in faults:
        named = re.findall(r"`([^`]+)`", tests)
        assert (how == "—") == (tests == "not yet") == (not named), number
        assert [one for one in named if "::test_" not in one or missing(one)] == [], number


def test_a_column_says_where_or_not_yet() -> None:
    for number, *columns in rows():
        for column in columns:
            assert column in {"not yet", "—"} or column.startswith("`"), number
