"""docs/internals/requirements.md has every requirement once, and names existing code and tests.

So do the tested guarantees of docs/internals/guarantees.md.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[3]
ENTRY = re.compile(r"^\*\*([PCLIF])(\d+)\.\*\* ", re.MULTILINE)
"""The start of an entry: a requirement or a fault. A list of its code and tests, or of a reason, follows."""
ELSEWHERE = {"P11", "P23"}  # explained at the top of the document
LAST = {"P": 37, "C": 33, "L": 37, "I": 44}
FAULTS = 43


class Entry(NamedTuple):
    """A requirement or a fault: its sentences, and the items of its list without their words "code" and "test"."""

    number: str
    text: str
    code: list[str]
    tests: list[str]
    reasons: list[str]


def document() -> str:
    return (ROOT / "docs/internals/requirements.md").read_text()


def entries(letters: str) -> list[Entry]:
    """The entries of these letters, in the order of the document."""
    page = document()
    starts = list(ENTRY.finditer(page))
    found = []
    for start, after in zip(starts, [*starts[1:], None], strict=True):
        part = page[start.end() : after.start() if after else len(page)].partition("\n## ")[0]
        sentences, _, rest = part.partition("\n\n")
        lines = " ".join(rest.split("\n\n")[0].split()) if rest.startswith("- ") else ""
        items = [one for one in re.split(r"(?:^| )- (?=code: |test: |not yet)", lines) if one]
        kinds = {kind: [one for one in items if one.startswith(kind)] for kind in ("code: ", "test: ", "not yet")}
        assert sum(map(len, kinds.values())) == len(items), start[0]
        found.append(Entry(start[1] + start[2], " ".join(sentences.split()), *kinds.values()))
    return [one for one in found if one.number[0] in letters]


def requirements() -> list[Entry]:
    return entries("PCLI")


def named(text: str) -> list[str]:
    """The code spans of a text."""
    return re.findall(r"`([^`]+)`", text)


def unexplained(text: str) -> list[str]:
    """Each "not yet" without a reason: a clause of at least two words after a colon."""
    return re.findall(r".{0,40}(?<!\*)\bnot yet\b(?!: [^|;():]*\w [^|;():]*\w).{0,20}", " ".join(text.split()))


def test_every_number_is_listed_once_and_in_order() -> None:
    expected = [f"{letter}{n}" for letter, last in LAST.items() for n in range(1, last + 1)]
    assert [one.number for one in requirements()] == [number for number in expected if number not in ELSEWHERE]


def missing(one: str) -> bool:
    """Whether the file, or the test in it, does not exist."""
    path, _, name = one.partition("::")
    file = ROOT / path
    return not file.exists() or (name != "" and f"def {name}(" not in file.read_text())


def test_named_code_and_tests_exist() -> None:
    assert [f"{one.number}: {name}" for one in requirements() for name in named(" ".join([*one.code, *one.tests]))
            if missing(name)] == []  # fmt: skip
    tests = re.findall(r"`(tests/[^`]+)`", document())
    assert [name for name in tests if missing(name)] == []


def whole_files(text: str) -> list[str]:
    """Test files named without a test."""
    kept = re.sub(r"every test of `[^`]+`", "", text)
    return [one for one in named(kept) if one.startswith("tests/") and "test_" in one and "::test_" not in one]


def test_each_requirement_names_at_most_three_tests() -> None:
    for one in requirements():
        assert whole_files(" ".join(one.tests)) == [], one.number
        assert len(one.tests) <= 3, one.number
        assert all(len(named(test)) == 1 for test in one.tests), one.number


def test_each_tested_guarantee_names_existing_tests() -> None:
    text = (ROOT / "docs/internals/guarantees.md").read_text()
    found = re.findall(r"^### (.+)\n\n((?:(?!#).+\n|\n)+?)\nTests:\n\n((?:[- ] .+\n)+)", text, re.MULTILINE)
    assert len(found) > 80
    assert len(found) == text.count("\nTests:\n")
    for what, _, tests in found:
        assert "`tests/" in tests, what
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
    faults = entries("F")
    assert [one.number for one in faults] == [f"F{n}" for n in range(1, FAULTS + 1)]
    for one in faults:
        assert one.text.startswith("not yet: ") == (one.tests == []), one.number
        assert not one.code, one.number
        assert not one.reasons, one.number
        assert all(len(named(test)) == 1 for test in one.tests), one.number
        assert [name for name in named(" ".join(one.tests)) if "::test_" not in name or missing(name)] == [], one.number


def test_each_requirement_names_code_and_a_test_or_a_reason() -> None:
    """An entry without a reason that is no requirement of distop starts with a mark or a remark."""
    for one in requirements():
        if one.code:
            assert len(one.code) == 1, one.number
            assert one.tests, one.number
            assert not one.reasons, one.number
        else:
            assert not one.tests, one.number
            assert [reason for reason in one.reasons if not reason.startswith("not yet: ")] == [], one.number
            assert len(one.reasons) == 1 or (not one.reasons and one.text[0] in "[("), one.number


def test_each_not_yet_has_a_reason() -> None:
    assert unexplained(document()) == []


def test_a_not_yet_without_a_reason_is_found() -> None:
    for text in ("| not yet |", "an index not yet; more", "(not yet)", "not yet:", "not yet: no", "not yet: | — |"):
        assert unexplained(text), text
    assert not unexplained("a copy not yet: it takes a hypervisor | **not yet** is meant literally")
