"""Trace contexts are read strictly, and the ids of an operation's spans follow from the operation."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from distop.protocol import trace_context
from distop.protocol.behavior_declaration import Rules
from distop.protocol.json_codec import dumps, loads
from distop.protocol.records import OperationRef, Spec
from distop.protocol.trace_context import TraceContext, of_operation, parse

CALLER = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"
REF = OperationRef("t", "noop", "", 1)


@pytest.mark.parametrize(
    "text",
    [
        None, 7, "", CALLER[:-1], f"{CALLER}-", CALLER.upper(), f"{CALLER}\n", f" {CALLER}"[:55],
        CALLER.replace("00-", "01-", 1), CALLER.replace("00-", "ff-", 1), CALLER.replace("-01", "-0g"),
        f"00-{'0' * 32}-00f067aa0ba902b7-01", f"00-4bf92f3577b34da6a3ce929d0e0e4736-{'0' * 16}-01",
        CALLER.replace("4", "\u0664", 1), "x" * 10**6,
    ],
)  # fmt: skip
def test_anything_but_a_traceparent_of_version_00_is_ignored(text: Any) -> None:
    assert parse(text) is None


@given(st.integers(1, 2**128 - 1), st.integers(1, 2**64 - 1), st.integers(0, 255))
def test_a_traceparent_is_read_and_written_unchanged(trace: int, span: int, flags: int) -> None:
    text = f"00-{trace:032x}-{span:016x}-{flags:02x}"
    assert str(parse(text)) == text


def test_flags_are_those_of_the_caller() -> None:
    assert parse(CALLER) == TraceContext("4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7", 1)
    unsampled = parse(CALLER[:-2] + "00")
    assert unsampled is not None
    assert not unsampled.sampled
    assert not of_operation(REF, "r", "now", str(unsampled)).span("plan").sampled


def test_an_operation_is_in_the_trace_of_its_caller_or_in_its_own() -> None:
    found, own = of_operation(REF, "r", "now", CALLER), of_operation(REF, "r", "now", "")
    assert (found.trace_id, found.flags) == (CALLER[3:35], 1)
    assert found == of_operation(REF, "r", "now", CALLER), "each process has the same"
    assert own.trace_id not in (found.trace_id, of_operation(REF, "r", "later", "").trace_id)
    others = [OperationRef("t", "noop", "", 2), OperationRef("t", "noop", "x", 1)]
    spans = [found, *(of_operation(ref, "r", "now", CALLER) for ref in others), found.span("plan", 1)]
    spans += [found.span("run", *job) for job in ((1, 1), (1, 2), (11, 1), (1, 11))]
    assert len({one.span_id for one in spans}) == len(spans)
    assert all(parse(str(one)) == one for one in spans), "they are valid themselves"


def test_ids_are_never_zero(monkeypatch: pytest.MonkeyPatch) -> None:
    class Zero:
        def hexdigest(self, length: int) -> str:
            return "00" * length

    monkeypatch.setattr(trace_context.hashlib, "shake_256", lambda text: Zero())
    assert parse(str(of_operation(REF, "", "", ""))) is not None


def test_a_spec_keeps_a_valid_traceparent_only() -> None:
    spec = Spec("r", "now", "me", Rules(), traceparent=CALLER)
    assert Spec.decode(spec.encode()) == spec
    forged = dumps({**loads(spec.encode()), "traceparent": ["x"]})
    assert Spec.decode(forged).traceparent == ""
    assert b"traceparent" not in Spec("r", "now", "me", Rules()).encode()
