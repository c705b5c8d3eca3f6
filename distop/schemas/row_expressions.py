"""What can be refused in a row expression without Spark's parser: a condition in Spark SQL on one row.

The executor decides on Spark's parsed tree. This module reads the words of the text only, so that most refusals are
reported at submission. It must never refuse what the executor accepts.
"""

from __future__ import annotations

import re
from itertools import takewhile
from typing import TYPE_CHECKING, NamedTuple

from distop.protocol.texts import did_you_mean, shown

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable

_LEXEME = re.compile(
    r"""(?P<space>\s+|--(?:\\\r?\n|[^\r\n])*)
    |(?P<comment>/\*)
    |(?P<string>[rR](?:'[^']*'|"[^"]*")|'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*")
    |`(?P<quoted>(?:[^`]|``)*)`
    |(?P<number>\d\w*)
    |(?P<word>\w+)
    |(?P<unclear>['"`$])
    |(?P<sign>.)""",
    re.VERBOSE | re.DOTALL,
)
_BEGINS_WITH_A_YEAR = re.compile(r"[+-]?[0-9]{4,}(?![0-9:])")
"""The start of a date or timestamp literal that names its day. Spark reads no year with fewer digits."""
_BLANK = "".join(c for c in map(chr, range(0x3001)) if c.isspace() or c < "!" or "\x7f" <= c < "\xa0")
"""Characters that Spark strips from such a text."""
_CLOCK_TEXT = re.compile(
    r"(?i:now|today|tomorrow|yesterday)\s*"
    r"(?:Z|[A-Z]{2,3}(?:[0-9][A-Z]{3})?|(?:UTC|GMT|UT)?[+-][0-9:]+|[A-Z]\w+/[\w/+-]+)?"
)
"""A text that Spark reads as the current time in a date or timestamp, with or without a time zone.

It does not end with :data:`_BLANK`: two adjacent repetitions of the same characters would take quadratic time.
"""
_COMMENT_MARK = re.compile(r"/\*|\*/")

_BEFORE_PARENTHESIS = frozenset(
    {
        *("and", "or", "not", "in", "like", "ilike", "rlike", "regexp", "between", "escape", "is", "distinct", "from"),
        *("case", "when", "then", "else", "div", "cast", "try_cast", "as", "for", "both", "leading", "trailing"),
        *("placing", "interval", "collate", "timestampadd", "timestampdiff", "date_add", "date_diff"),
        *("dec", "numeric", "varchar", "character", "timestamp_ltz", "timestamp_ntz"),
    }
)
"""Words of Spark's grammar that a parenthesis may follow without being the name of a function."""
_QUANTIFIERS = frozenset({"any", "some", "all"})
_LIKE = frozenset({"like", "ilike"})
_QUERY = frozenset({"from", "table", "values", "with", "map", "reduce"})
_INFIX = frozenset(
    {"and", "or", "not", "in", "is", "like", "ilike", "rlike", "regexp", "between", "div", "collate", "as", "xor"}
)
_TYPED = frozenset({"date", "timestamp", "timestamp_ltz", "timestamp_ntz"})
_AROUND_TEXT = frozenset(
    {"is", "not", "null", "and", "or", "in", "like", "ilike", "rlike", "regexp", "between", "true", "false"}
)
"""Words that are not columns in an expression with texts in double quotes."""
_CLOCK = frozenset(
    {
        *("now", "getdate", "sysdate", "curdate", "localtimestamp"),
        *("current_date", "current_time", "current_timestamp", "sysdatetime", "getutcdate", "sysutcdatetime"),
    }
)
"""Functions of the clock, in Spark and in other databases."""
_CONSTRUCTS = {"over": "a window", "identifier": "IDENTIFIER", "values": "a subquery", "table": "a table"}
LIST_AT = "distop behaviors validate --json"
"""The command that prints the list of allowed functions."""


class _Token(NamedTuple):
    """``kind``: ``word``, ``quoted`` (a name in back quotes), ``string``, ``number`` or ``sign``."""

    kind: str
    text: str


def unlisted(name: str, functions: Collection[str]) -> str:
    """The sentence about a function that is not allowed."""
    if name.lower() in _CLOCK:
        return f"the expression uses {shown(name)}, which depends on the time: write the date with digits"
    hint = did_you_mean(name, sorted({*functions} - {name.lower()}))
    return f"the expression uses {shown(name)}, which is not on the list of allowed functions{hint}: {LIST_AT}"


def construct(what: str) -> str:
    """The sentence about a part of Spark's grammar that is not allowed."""
    return f"the expression has {what}, which is not allowed: it must read one row with listed functions only"


def refusal(text: str, functions: Collection[str]) -> str | None:
    """Why the expression is refused; None if only Spark's parser can decide. ``functions``: in lower case."""
    tokens = _tokens(text)
    if tokens is None:
        return None
    before = last = _Token("sign", "")
    for n, token in enumerate(tokens):
        following = tokens[n + 1] if n + 1 < len(tokens) else _Token("sign", "")
        why = None
        if token.kind == "word" and token.text.lower() == "select" and last.text != ".":
            hint = "" if last == ("sign", "(") else " (write a column of this name in back quotes)"
            why = construct(f"a subquery{hint}")
        elif token.kind == "string":
            following_texts = map(tokens.__getitem__, range(n, len(tokens)))
            why = _of_time(last, following_texts) or clock_text(token.text.lstrip("rR")[1:-1])
        elif token == ("sign", "("):
            why = _call(before, last, functions) or _query(tokens[n + 1 : n + 3])
        elif token.kind == "word" and token.text.lower() == "using" and following.kind == "string":
            why = construct("USING")
        if why is not None:
            return why
        before, last = last, token
    return text_alone(text) if tokens and _names_none(tokens) else None


def clock_text(text: str) -> str | None:
    """Why a text, without its quotes, is refused: a check of it would be certified for ever, and asks for the time."""
    if _CLOCK_TEXT.fullmatch(text.strip(_BLANK)) is None:
        return None
    return (
        f"the expression has the text {shown(text)}, which Spark takes for the time beside a date or a timestamp: "
        f"write the date with digits; a column of texts is compared with it by RLIKE '^{text.strip()}$'"
    )


def text_alone(text: str) -> str | None:
    """Why an expression that names no column is refused: it has a text in double quotes, elsewhere in SQL a name."""
    quoted = [one.text for one in _tokens(text) or () if one.kind == "string" and one.text.startswith('"')]
    if not quoted:
        return None
    return f"the expression names no column, and {shown(quoted[0])} is a text: write names of columns in back quotes"


def _names_none(tokens: list[_Token]) -> bool:
    """No word can be the name of a column."""
    after = [*tokens[1:], _Token("sign", "")]
    return not any(
        token.kind == "quoted"
        or (token.kind == "word" and token.text.lower() not in _AROUND_TEXT and following != ("sign", "("))
        for token, following in zip(tokens, after, strict=True)
    )


def _tokens(text: str) -> list[_Token] | None:
    """The tokens of the text, without spaces and comments; None if the end of a token is unclear."""
    found = []
    at = 0
    while at < len(text):
        match = _LEXEME.match(text, at)
        assert match is not None
        kind, at = str(match.lastgroup), match.end()
        if kind == "comment":
            depth = 1
            while depth:
                mark = _COMMENT_MARK.search(text, at)
                if mark is None:
                    return None
                depth, at = depth + (1 if mark[0] == "/*" else -1), mark.end()
        elif kind == "unclear":
            return None
        elif kind == "quoted":
            found.append(_Token(kind, match["quoted"].replace("``", "`")))
        elif kind != "space":
            found.append(_Token(kind, match[0]))
    return found


def _call(before: _Token, name: _Token, functions: Collection[str]) -> str | None:
    """Why a name in front of a parenthesis is refused, or None. ``before``: the token in front of the name."""
    if name.kind not in ("word", "quoted"):
        return None
    if before == ("sign", "."):
        return unlisted(f"….{name.text}", functions)
    lower = name.text.lower()
    if name.kind == "word":
        if lower in _CONSTRUCTS:
            return construct(_CONSTRUCTS[lower])
        if lower in _BEFORE_PARENTHESIS or (lower in _QUANTIFIERS and before.text.lower() in _LIKE):
            return None
        if lower in _QUANTIFIERS and before.kind == "sign" and before.text in "=<>":
            use = "IN (…) for a list of values, array_contains, exists or forall for an array"
            return construct(f"a comparison with {lower.upper()} (use {use})")
    return None if lower in functions else unlisted(name.text, functions)


def _query(inside: list[_Token]) -> str | None:
    """Refuse a query in parentheses that starts with another word than SELECT. ``inside``: its first two tokens."""
    if len(inside) < 2 or inside[0].kind != "word" or inside[0].text.lower() not in _QUERY:
        return None
    second = inside[1]
    if second.kind == "sign" or (second.kind == "word" and second.text.lower() in _INFIX):
        return None
    return construct("a subquery")


def _of_time(name: _Token, following: Iterable[_Token]) -> str | None:
    """Refuse a literal that depends on the current time, such as DATE 'today' or TIMESTAMP '12:30'.

    Spark's parser replaces it by a value of that moment. ``following``: the tokens after the name; Spark joins the
    texts at their start.
    """
    if name.kind != "word" or name.text.lower() not in _TYPED:
        return None
    texts = list(takewhile(lambda token: token.kind == "string", following))
    written = "".join(token.text.lstrip("rR")[1:-1] for token in texts).strip()
    if _BEGINS_WITH_A_YEAR.match(written) and "\\" not in written:
        return None
    literal = " ".join([name.text, *(token.text for token in texts)])
    return f"the expression has {literal}, which depends on the time: write the date with digits"
