"""docs/internals/requirements.md names every requirement once, and only code and tests that exist; what
docs/internals/guarantees.md calls tested names tests, too.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[3]
ENTRY = re.compile(r"^\*\*([PCLIF])(\d+)\.\*\* ", re.MULTILINE)
"""The start of an entry: a requirement or a fault. A list of its code and tests, or of a reason, follows."""
ELSEWHERE = {"P11", "P23"}  # said at the top of the document
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


def rows() -> list[Entry]:
    """The requirements."""
    return entries("PCLI")


def named(text: str) -> list[str]:
    """What stands in it as code."""
    return re.findall(r"`([^`]+)`", text)


def unexplained(text: str) -> list[str]:
    """Where "not yet" stands without a reason: a clause of at least two words behind a colon."""
    return re.findall(r".{0,40}(?<!\*)\bnot yet\b(?!: [^|;():]*\w [^|;():]*\w).{0,20}", " ".join(text.split()))


def test_every_number_stands_once_and_in_order() -> None:
    expected = [f"{letter}{n}" for letter, last in LAST.items() for n in range(1, last + 1)]
    assert [one.number for one in rows()] == [number for number in expected if number not in ELSEWHERE]


def missing(one: str) -> bool:
    """There is no such file, or in it no such test."""
    path, _, name = one.partition("::")
    file = ROOT / path
    return not file.exists() or (name != "" and f"def {name}(" not in file.read_text())


def test_what_is_named_exists() -> None:
    assert [f"{one.number}: {name}" for one in rows() for name in named(" ".join([*one.code, *one.tests]))
            if missing(name)] == []  # fmt: skip
    tests = re.findall(r"`(tests/[^`]+)`", document())
    assert [name for name in tests if missing(name)] == []


def whole_files(text: str) -> list[str]:
    """Test files of which no test is named, so that nobody knows what holds the row."""
    kept = re.sub(r"every test of `[^`]+`", "", text)
    return [one for one in named(kept) if one.startswith("tests/") and "test_" in one and "::test_" not in one]


def test_a_row_names_the_tests_that_hold_it() -> None:
    for one in rows():
        assert whole_files(" ".join(one.tests)) == [], one.number
        assert len(one.tests) <= 3, one.number
        assert all(len(named(test)) == 1 for test in one.tests), one.number


def test_what_is_guaranteed_names_the_tests_that_hold_it() -> None:
    text = (ROOT / "docs/internals/guarantees.md").read_text()
    found = re.findall(r"^### (.+)\n\n((?:(?!#).+\n|\n)+?)\nTests:\n\n((?:[- ] .+\n)+)", text, re.MULTILINE)
    assert len(found) > 80
    assert len(found) == text.count("\nTests:\n")
    for what, _, tests in found:
        assert "`tests/" in tests, what
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
    faults = entries("F")
    assert [one.number for one in faults] == [f"F{n}" for n in range(1, FAULTS + 1)]
    for one in faults:
        assert one.text.startswith("not yet: ") == (one.tests == []), one.number
        assert not one.code, one.number
        assert not one.reasons, one.number
        assert all(len(named(test)) == 1 for test in one.tests), one.number
        assert [name for name in named(" ".join(one.tests)) if "::test_" not in name or missing(name)] == [], one.number


def test_a_row_says_where_or_why_not() -> None:
    """Code and a test; or a reason; or that it is no requirement of distop's: a mark or a remark in its place."""
    for one in rows():
        if one.code:
            assert len(one.code) == 1, one.number
            assert one.tests, one.number
            assert not one.reasons, one.number
        else:
            assert not one.tests, one.number
            assert [reason for reason in one.reasons if not reason.startswith("not yet: ")] == [], one.number
            assert len(one.reasons) == 1 or (not one.reasons and one.text[0] in "[("), one.number


def test_what_is_not_yet_there_has_a_reason() -> None:
    assert unexplained(document()) == []


def test_a_reason_that_is_missing_is_missed() -> None:
    for text in ("| not yet |", "an index not yet; more", "(not yet)", "not yet:", "not yet: no", "not yet: | — |"):
        assert unexplained(text), text
    assert not unexplained("a copy not yet: it takes a hypervisor | **not yet** is meant literally")
