"""docs/reference/keys.md lists the key families of distop.protocol.keys, and no other ones."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from distop.protocol import keys as K

PAGE = (Path(__file__).parents[3] / "docs/reference/keys.md").read_text()
KEYS = re.findall(r"^\| `([^`]+)`", PAGE, re.MULTILINE)
FAMILIES = {value for name, value in vars(K).items() if name.isupper() and str(value).startswith(K.OP)}


def test_each_key_family_is_documented_and_each_documented_one_exists() -> None:
    assert {K.OP, K.CLAIM, K.SPACE} < FAMILIES
    assert {row.replace("<root>", K.OP).partition(".")[0] for row in KEYS} == FAMILIES


EXAMPLES = {
    "<root>": "distOp.<table>.<type>[.<object>].<instance>",
    "<…>": "<table>.<type>",
    "<table>": "nyc%2Eflights",
    "<type>": "noop",
    "[.<object>]": ".o",
    "<instance>": "1",
    "<partition>": "000000",
    "<number>": "000000",
    "<chunk>": "000000",
    "<edge>": "0" * 20,
    "<n>": "0",
}


@pytest.mark.parametrize("documented", KEYS)
def test_each_documented_key_can_be_parsed(documented: str) -> None:
    key = documented
    for placeholder, example in EXAMPLES.items():
        key = key.replace(placeholder, example)
    key = re.sub(r"<[^>]+>", "x", key)
    assert K.Keys().parse(key).family == documented.replace("<root>", K.OP).partition(".")[0]


def test_each_reserved_word_is_documented() -> None:
    (words,) = re.findall(r"reserved words\s+`([^`]+)`", PAGE)
    assert set(words.split()) == K.RESERVED
