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


def test_what_is_named_exists() -> None:
    missing = [
        f"{number}: {path}"
        for number, *columns in rows()
        for path in re.findall(r"`([^`]+)`", " ".join(columns))
        if not (ROOT / path.partition("::")[0]).exists()
    ]
    assert missing == []


def test_every_fault_is_listed() -> None:
    text = (ROOT / "docs" / "requirements.md").read_text()
    numbers = re.findall(r"^\| F(\d+) \|", text, flags=re.MULTILINE)
    assert numbers == [str(n) for n in range(1, 44)]
    named = re.findall(r"^\| F\d+ \|.*\| `(.+)` \|$", text, flags=re.MULTILINE)
    assert [path for line in named for path in line.split("`, `") if not (ROOT / path).exists()] == []


def test_a_column_says_where_or_not_yet() -> None:
    for number, *columns in rows():
        for column in columns:
            assert column in {"not yet", "—"} or column.startswith("`"), number
