"""Records: each is decoded to the encoded value, unknown fields are ignored, and limits hold."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from distop.errors import InvalidArgument
from distop.protocol import behavior_declaration, json_codec
from distop.protocol import jobs as j
from distop.protocol import plan as pl
from distop.protocol import records as m
from distop.protocol.identity import plan_digest

words = st.text(max_size=12)
names = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=12)
numbers = st.integers(0, 10**9)
counts = st.integers(0, pl.MAX_PARTITIONS)
json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | words, lambda x: st.lists(x) | st.dictionaries(words, x)
)
retries = st.builds(
    behavior_declaration.Retry,
    st.integers(0, 100),
    st.floats(0, 1e6, allow_nan=False),
    st.floats(0, 1e6, allow_nan=False),
)
rules = st.builds(
    behavior_declaration.Rules,
    st.booleans(),
    retries,
    st.sampled_from(["retry", "fail"]),
    st.sampled_from(["fail_fast", "collect_all"]),
    st.booleans(),
    st.booleans(),
    st.booleans(),
)
tables = st.builds(m.TableRecord, names, words, words, st.dictionaries(words, json_values, max_size=3))
schemas = st.dictionaries(words, json_values, max_size=3)
plans = st.builds(
    pl.PartitionPlan,
    numbers,
    names,
    numbers,
    st.lists(st.tuples(words, numbers, numbers), max_size=3).map(tuple),
    st.just(""),
    st.dictionaries(words, st.none() | words, max_size=2),
)
records = st.one_of(
    st.builds(
        behavior_declaration.Declaration,
        names, schemas, schemas, schemas, st.none() | names, st.sampled_from(["many", "one"]),
        st.lists(names, max_size=3).map(tuple), st.booleans(), retries, st.sampled_from(["retry", "fail"]),
        st.sampled_from(["fail_fast", "collect_all"]), st.booleans(), st.booleans(), st.booleans(), words,
    ),
    tables,
    st.builds(
        m.Spec, words, words, words, rules, st.none() | tables, st.none() | st.lists(names, max_size=3).map(tuple),
        st.booleans(), st.integers(1, 9),
    ),
    st.builds(pl.Plan, counts, words, words, counts),
    st.builds(pl.Gate, counts),
    st.builds(j.Claim, words, words, numbers, numbers, words, words),
    st.builds(j.Outcome, words, words, words, numbers, words, words, json_values, words),
    st.builds(
        m.Node, words, words, numbers, st.lists(names, max_size=3).map(tuple),
        st.dictionaries(words, words, max_size=2),
        words, numbers,
    ),
    st.builds(m.Cancel, words, words),
    st.builds(m.Attempts, numbers, words, words),
    st.builds(
        m.Decision, st.sampled_from(list(m.State)), numbers, numbers, numbers, words, numbers, words, words
    ),
    st.builds(
        m.History, words, st.sampled_from(list(m.State)), words, words, numbers, numbers, numbers, json_values,
        st.lists(st.dictionaries(words, json_values, max_size=2), max_size=2).map(tuple), words, words,
        st.none() | st.builds(m.Cancel, words, words),
    ),
)  # fmt: skip


@given(records)
def test_records_round_trip(record: object) -> None:
    value = record.encode()
    assert type(record).decode(value) == record
    assert json.loads(value)["v"] >= 1


@settings(max_examples=50)
@given(records, st.dictionaries(st.text(min_size=13), json_values, max_size=3))
def test_unknown_fields_are_ignored(record: object, more: dict[str, object]) -> None:
    data = {**json.loads(record.encode()), **more}
    assert type(record).decode(json_codec.dumps(data)) == record


@given(st.lists(plans, max_size=20))
def test_chunks_round_trip(partitions: list[pl.PartitionPlan]) -> None:
    chunks = pl.chunked(partitions, 400)
    assert [p for c in chunks for p in pl.decode_chunk(c)] == partitions
    assert all(len(c) <= 400 or len(pl.decode_chunk(c)) == 1 for c in chunks)
    assert pl.decode_chunk(pl.encode_chunk(partitions)) == partitions


def test_chunk_details() -> None:
    assert pl.chunked([]) == []
    far = pl.PartitionPlan(0, "p", 9, files_at="plans/7/0.json")
    assert pl.PartitionPlan.from_json(far.to_json()) == far
    assert "files" not in far.to_json()
    assert plan_digest([b"a", b"b"]) == plan_digest([b"ab"]) != plan_digest([b"b", b"a"])
    assert plan_digest([]) == "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"


def test_the_first_chunk_begins_with_the_first_job() -> None:
    chunks = pl.chunked([pl.PartitionPlan(n, f"p={n}") for n in range(3)], 50)
    assert pl.begin_with(pl.Plan(3, "", plan_digest(chunks), len(chunks)), chunks) == list(range(len(chunks)))
    with pytest.raises(ValueError, match="has chunks that do not contain its 3 jobs"):
        pl.begin_with(pl.Plan(3, "", plan_digest(chunks[1:]), len(chunks) - 1), chunks[1:])


@given(st.sets(st.integers(0, 300)))
def test_ranges_round_trip(ordinals: set[int]) -> None:
    assert json_codec.from_ranges(json_codec.to_ranges(ordinals)) == sorted(ordinals)


def test_ranges_as_text() -> None:
    assert json_codec.to_ranges([9, 3, 8, 7, 3]) == "3,7-9"
    assert json_codec.to_ranges([]) == ""
    assert json_codec.from_ranges("") == []


@given(st.builds(m.OperationRef, names, names, st.just("") | names, st.integers(1, 10**12)))
@example(m.OperationRef("a/b", "t", "50%", 7))
@example(m.OperationRef("%2F", "t", "/", 7))
@example(m.OperationRef("7", "t", "7", 7))
def test_refs_round_trip(ref: m.OperationRef) -> None:
    assert m.OperationRef.parse(str(ref)) == ref


def test_refs_as_text() -> None:
    assert str(m.OperationRef("a/b", "noop", "50%", 7)) == "a%2Fb/noop/50%25/7"
    assert str(m.OperationRef("nyc.flights", "validate", "", 7)) == "nyc.flights/validate/7"


@pytest.mark.parametrize("text", ["nyc%2Eflights/validate/7", "nyc.flights/%76alidate/7", "nyc%2eflights/validate/7"])
def test_a_ref_with_key_escapes_has_its_canonical_name(text: str) -> None:
    assert str(m.OperationRef.parse(text)) == "nyc.flights/validate/7"


@pytest.mark.parametrize(
    "text",
    [
        *("", "a", "a/b", "a/b/c", "a//7", "/b/7", "a/b/c/d/7", "a/b/-7", "a/b/٣", "a/b/7 ", "%FF/b/7"),
        *("a/b/007", "a/b/0", "a/b/" + "9" * 5000, "50%/b/7", "a%2/b/7", "a%zz/b/7"),
    ],
)
def test_invalid_refs_are_refused(text: str) -> None:
    with pytest.raises(InvalidArgument):
        m.OperationRef.parse(text)


def test_the_size_of_an_outcome_is_limited() -> None:
    def outcome(size: int) -> j.Outcome:
        return j.Outcome("p", "e", "i", 1, "", "", "x" * size)

    overhead = len(outcome(1).encode()) - 1
    assert len(outcome(j.MAX_OUTCOME_BYTES - overhead).encode()) == j.MAX_OUTCOME_BYTES
    with pytest.raises(InvalidArgument, match="put large results into a file"):
        outcome(j.MAX_OUTCOME_BYTES - overhead + 1).encode()


def test_errors_are_shortened_and_never_prevent_a_report() -> None:
    value = j.Outcome("p", "e", "i", 1, "", "", None, "begin" + "x" * 10**6 + "end").encode()
    error = j.Outcome.decode(value).error
    assert len(error) == json_codec.MAX_ERROR_TEXT
    assert error.startswith("begin")
    assert error.endswith("end")
    # A path that is no UTF-8 comes to Python as lone surrogates; the report must get through all the same.
    odd = j.Outcome("p", "e", "i", 1, "", "", None, "no such file: \udcff")
    assert j.Outcome.decode(odd.encode()) == odd


@given(st.floats(0, 4e9))
def test_times_round_trip(seconds: float) -> None:
    text = json_codec.rfc3339(seconds)
    assert text.endswith("Z")
    assert abs(json_codec.from_rfc3339(text) - seconds) < 0.0011


def test_times_as_text() -> None:
    assert json_codec.rfc3339(1356998400) == "2013-01-01T00:00:00.000Z"
    assert json_codec.from_rfc3339("2013-01-01T01:00:00+01:00") == 1356998400
    with pytest.raises(ValueError):
        json_codec.from_rfc3339("soon")


def test_retry() -> None:
    retry = behavior_declaration.Retry(3, 1.0, 60.0)
    assert [retry.delay(n) for n in (0, 1, 2, 3, 7, 10_000)] == [1, 1, 2, 4, 60, 60]
    assert behavior_declaration.Rules(retry=retry).at_limit(3)
    assert not behavior_declaration.Rules(retry=retry).at_limit(2)
    assert not behavior_declaration.Rules(retry=retry, can_fail=False).at_limit(99)


def test_states() -> None:
    assert {s for s in m.State if s.terminal} == {m.State.SUCCESS, m.State.FAILED, m.State.CANCELLED}
    assert j.Claim("e", "", 1, 0).waiting
    assert not j.Claim("e", "i", 1, 0).waiting


def test_the_text_of_failed_jobs_is_bounded() -> None:
    assert json_codec.failed_text([3, 7, 8, 9]) == ("3,7-9", False)
    assert json_codec.failed_text([]) == ("", False)
    assert json_codec.failed_text(range(1_000_000)) == ("0-999999", False)
    failed = range(0, 200_000, 2)
    text, truncated = json_codec.failed_text(failed)
    assert truncated
    assert len(text) <= json_codec.MAX_FAILED_BYTES
    kept = json_codec.from_ranges(text)
    assert kept == list(failed)[: len(kept)]
    assert len(kept) > 5_000
    decision = m.Decision(m.State.FAILED, 200_000, 100_000, 100_000, text, failed_truncated=True)
    assert m.Decision.decode(decision.encode()) == decision
    history = m.History("t/x/1", m.State.FAILED, "", "", 200_000, 100_000, 100_000, None, (), text)
    assert b"failed_truncated" not in history.encode()
    history = replace(history, failed_truncated=True)
    assert json_codec.loads(history.encode())["failed_truncated"] is True
    assert m.History.decode(history.encode()) == history
