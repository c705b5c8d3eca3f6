"""docs/internals/requirements.md names every requirement once, and only code and tests that exist; what
docs/internals/guarantees.md calls tested names tests, too.
"""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
ROW = re.compile(r"^\| ([PCLI])(\d+) \| (.+) \| (.+) \| (.+) \|$")
ELSEWHERE = {"P11", "P23"}  # said at the top of the document
LAST = {"P": 37, "C": 33, "L": 37, "I": 44}


def document() -> str:
    return (ROOT / "docs/internals/requirements.md").read_text()


def rows() -> list[tuple[str, str, str, str]]:
    """(number, requirement, code, test) of every row."""
    found = [ROW.match(line) for line in document().splitlines()]
    return [(match[1] + match[2], match[3], match[4], match[5]) for match in found if match]


def named(text: str) -> list[str]:
    """What stands in it as code."""
    return re.findall(r"`([^`]+)`", text)


def unexplained(text: str) -> list[str]:
    """Where "not yet" stands without a reason: a clause of at least two words behind a colon."""
    return re.findall(r".{0,40}(?<!\*)\bnot yet\b(?!: [^|;():]*\w [^|;():]*\w).{0,20}", " ".join(text.split()))


def test_every_number_stands_once_and_in_order() -> None:
    expected = [f"{letter}{n}" for letter, last in LAST.items() for n in range(1, last + 1)]
    assert [number for number, *_ in rows()] == [number for number in expected if number not in ELSEWHERE]


def missing(one: str) -> bool:
    """There is no such file, or in it no such test."""
    path, _, name = one.partition("::")
    file = ROOT / path
    return not file.exists() or (name != "" and f"def {name}(" not in file.read_text())


def test_what_is_named_exists() -> None:
    assert [
        f"{number}: {one}" for number, _, *columns in rows() for one in named(" ".join(columns)) if missing(one)
    ] == []


def whole_files(text: str) -> list[str]:
    """Test files of which no test is named, so that nobody knows what holds the row."""
    kept = re.sub(r"every test of `[^`]+`", "", text)
    return [one for one in named(kept) if one.startswith("tests/") and "test_" in one and "::test_" not in one]


def test_a_row_names_the_tests_that_hold_it() -> None:
    for number, _, _, tests in rows():
        assert whole_files(tests) == [], number
        assert tests == "—" or 1 <= len(named(tests)) <= 3, number


def test_what_is_guaranteed_names_the_tests_that_hold_it() -> None:
    text = (ROOT / "docs/internals/guarantees.md").read_text()
    found = re.findall(r"^\| (.+?) \| (.*`tests/.+) \|$", text, re.MULTILINE)
    assert len(found) > 20
    for what, tests in found:
        assert whole_files(tests) == [], what
        assert [one for one in named(tests) if one.startswith("tests/") and missing(one)] == [], what


def test_a_whole_file_is_noticed() -> None:
    assert whole_files("`tests/unit/test_a.py`, `tests/unit/test_b.py::test_c`") == ["tests/unit/test_a.py"]
    assert whole_files("every test of `tests/unit/test_a.py`, `tests/faults/conftest.py`, `scripts/soak`") == []


def test_a_test_that_does_not_exist_is_missed() -> None:
    assert not missing("tests/unit/repository/test_requirements_doc.py::test_what_is_named_exists")
    assert missing("tests/unit/repository/test_requirements_doc.py::test_what_is_named")
    assert missing("tests/unit/test_nothing.py")


def test_every_fault_is_listed_with_the_tests_that_cause_it() -> None:
    faults = re.findall(r"^\| F(\d+) \| (.+) \| (.+) \|$", document(), flags=re.MULTILINE)
    assert [number for number, _, _ in faults] == [str(n) for n in range(1, 44)]
    for number, how, tests in faults:
        assert how.startswith("not yet: ") == (tests == "—") == (not named(tests)), number
        assert [one for one in named(tests) if "::test_" not in one or missing(one)] == [], number


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
