"""docs/requirements.md names every requirement once, and only code and tests that exist."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
ROW = re.compile(r"^\| ([PCLI])(\d+) \| (.+) \| (.+) \| (.+) \|$")
ELSEWHERE = {"P11", "P23"}  # said at the top of the document
LAST = {"P": 37, "C": 33, "L": 37, "I": 44}


def document() -> str:
    return (ROOT / "docs" / "requirements.md").read_text()


def rows() -> list[tuple[str, str, str, str]]:
    """(number, requirement, code, test) of every row."""
    found = [ROW.match(line) for line in document().splitlines()]
    return [(match[1] + match[2], match[3], match[4], match[5]) for match in found if match]


def unexplained(text: str) -> list[str]:
    """Where "not yet" stands without a reason: a clause of at least two words behind a colon."""
    return re.findall(r".{0,40}(?<!\*)\bnot yet\b(?!: [^|;():]*\w [^|;():]*\w).{0,20}", " ".join(text.split()))


def test_every_number_stands_once_and_in_order() -> None:
    expected = [f"{letter}{n}" for letter, last in LAST.items() for n in range(1, last + 1)]
    assert [number for number, *_ in rows()] == [number for number in expected if number not in ELSEWHERE]


def missing(named: str) -> bool:
    """There is no such file, or in it no such test."""
    path, _, name = named.partition("::")
    file = ROOT / path
    return not file.exists() or (name != "" and f"def {name}(" not in file.read_text())


def test_what_is_named_exists() -> None:
    assert [
        f"{number}: {named}"
        for number, _, *columns in rows()
        for named in re.findall(r"`([^`]+)`", " ".join(columns))
        if missing(named)
    ] == []


def test_a_test_that_does_not_exist_is_missed() -> None:
    assert not missing("tests/unit/test_requirements_doc.py::test_what_is_named_exists")
    assert missing("tests/unit/test_requirements_doc.py::test_what_is_named")
    assert missing("tests/unit/test_nothing.py")


def test_every_fault_is_listed_with_the_tests_that_cause_it() -> None:
    faults = re.findall(r"^\| F(\d+) \| (.+) \| (.+) \|$", document(), flags=re.MULTILINE)
    assert [number for number, _, _ in faults] == [str(n) for n in range(1, 44)]
    for number, how, tests in faults:
        named = re.findall(r"`([^`]+)`", tests)
        assert how.startswith("not yet: ") == (tests == "—") == (not named), number
        assert [one for one in named if "::test_" not in one or missing(one)] == [], number


def test_a_row_says_where_or_why_not() -> None:
    """Code and a test; or a reason; or that it is no requirement of distop's: a mark or a remark in its place."""
    for number, requirement, code, test in rows():
        if code.startswith("`"):
            assert test.startswith("`"), number
        else:
            assert test == "—", number
            assert code.startswith("not yet: ") or (code == "—" and requirement[0] in "[("), number


def test_what_is_not_yet_there_has_a_reason() -> None:
    assert unexplained(document()) == []


def test_a_reason_that_is_missing_is_missed() -> None:
    for text in ("| not yet |", "an index not yet; more", "(not yet)", "not yet:", "not yet: no", "not yet: | — |"):
        assert unexplained(text), text
    assert not unexplained("a copy not yet: it takes a hypervisor | **not yet** is meant literally")
