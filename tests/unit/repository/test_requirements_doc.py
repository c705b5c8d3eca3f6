"""docs/internals/requirements.md has every requirement once, and names existing code and tests.

So do the tested guarantees of docs/internals/guarantees.md.
"""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
ROW = re.compile(r"^\| ([PCLI])(\d+) \| (.+) \| (.+) \| (.+) \|$")
ELSEWHERE = {"P11", "P23"}  # explained at the top of the document
LAST = {"P": 37, "C": 33, "L": 37, "I": 44}


def document() -> str:
    return (ROOT / "docs/internals/requirements.md").read_text()


def rows() -> list[tuple[str, str, str, str]]:
    """(number, requirement, code, test) of every row."""
    found = [ROW.match(line) for line in document().splitlines()]
    return [(match[1] + match[2], match[3], match[4], match[5]) for match in found if match]


def named(text: str) -> list[str]:
    """The code spans of a text."""
    return re.findall(r"`([^`]+)`", text)


def unexplained(text: str) -> list[str]:
    """Each "not yet" without a reason: a clause of at least two words after a colon."""
    return re.findall(r".{0,40}(?<!\*)\bnot yet\b(?!: [^|;():]*\w [^|;():]*\w).{0,20}", " ".join(text.split()))


def test_every_number_is_listed_once_and_in_order() -> None:
    expected = [f"{letter}{n}" for letter, last in LAST.items() for n in range(1, last + 1)]
    assert [number for number, *_ in rows()] == [number for number in expected if number not in ELSEWHERE]


def missing(one: str) -> bool:
    """Whether the file, or the test in it, does not exist."""
    path, _, name = one.partition("::")
    file = ROOT / path
    return not file.exists() or (name != "" and f"def {name}(" not in file.read_text())


def test_named_code_and_tests_exist() -> None:
    assert [
        f"{number}: {one}" for number, _, *columns in rows() for one in named(" ".join(columns)) if missing(one)
    ] == []


def whole_files(text: str) -> list[str]:
    """Test files named without a test."""
    kept = re.sub(r"every test of `[^`]+`", "", text)
    return [one for one in named(kept) if one.startswith("tests/") and "test_" in one and "::test_" not in one]


def test_each_row_names_at_most_three_tests() -> None:
    for number, _, _, tests in rows():
        assert whole_files(tests) == [], number
        assert tests == "—" or 1 <= len(named(tests)) <= 3, number


def test_each_tested_guarantee_names_existing_tests() -> None:
    text = (ROOT / "docs/internals/guarantees.md").read_text()
    found = re.findall(r"^\| (.+?) \| (.*`tests/.+) \|$", text, re.MULTILINE)
    assert len(found) > 20
    for what, tests in found:
        assert whole_files(tests) == [], what
        assert [one for one in named(tests) if one.startswith("tests/") and missing(one)] == [], what


def test_a_test_file_without_a_test_is_found() -> None:
    assert whole_files("`tests/unit/test_a.py`, `tests/unit/test_b.py::test_c`") == ["tests/unit/test_a.py"]
    assert whole_files("every test of `tests/unit/test_a.py`, `tests/faults/conftest.py`, `scripts/soak`") == []


def test_a_missing_test_or_file_is_found() -> None:
    assert not missing("tests/unit/repository/test_requirements_doc.py::test_named_code_and_tests_exist")
    assert missing("tests/unit/repository/test_requirements_doc.py::test_named_code_and_tests")
    assert missing("tests/unit/test_nothing.py")


def test_every_fault_is_listed_with_the_tests_that_cause_it() -> None:
    faults = re.findall(r"^\| F(\d+) \| (.+) \| (.+) \|$", document(), flags=re.MULTILINE)
    assert [number for number, _, _ in faults] == [str(n) for n in range(1, 44)]
    for number, how, tests in faults:
        assert how.startswith("not yet: ") == (tests == "—") == (not named(tests)), number
        assert [one for one in named(tests) if "::test_" not in one or missing(one)] == [], number


def test_each_row_names_code_and_a_test_or_a_reason() -> None:
    """A row without a reason that is no requirement of distop starts with a mark or a remark."""
    for number, requirement, code, test in rows():
        if code.startswith("`"):
            assert test.startswith("`"), number
        else:
            assert test == "—", number
            assert code.startswith("not yet: ") or (code == "—" and requirement[0] in "[("), number


def test_each_not_yet_has_a_reason() -> None:
    assert unexplained(document()) == []


def test_a_not_yet_without_a_reason_is_found() -> None:
    for text in ("| not yet |", "an index not yet; more", "(not yet)", "not yet:", "not yet: no", "not yet: | — |"):
        assert unexplained(text), text
    assert not unexplained("a copy not yet: it takes a hypervisor | **not yet** is meant literally")
