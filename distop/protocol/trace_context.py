"""Trace context of an operation (W3C Trace Context), and the ids of its spans.

The ids follow from the operation, so that each process that works for it has the same trace, also after a crash, and a
span that is sent twice has one id. A ``traceparent`` comes from callers: records with an invalid one have none.
"""

from __future__ import annotations

import hashlib
import re
from typing import TYPE_CHECKING

from distop.protocol.frozen import frozen

if TYPE_CHECKING:
    from distop.protocol.records import OperationRef

SAMPLED = 1
"""The flag of a trace that is recorded."""
_FORM = re.compile(r"00-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})")
_LENGTH = 55


@frozen
class TraceContext:
    """A span, as a parent for others: its trace and itself in hexadecimal digits, and the trace's flags."""

    trace_id: str
    span_id: str
    flags: int = SAMPLED

    def __str__(self) -> str:
        """The form of the header ``traceparent``."""
        return f"00-{self.trace_id}-{self.span_id}-{self.flags:02x}"

    @property
    def sampled(self) -> bool:
        """Whether the caller records the trace."""
        return bool(self.flags & SAMPLED)

    def span(self, *parts: object) -> TraceContext:
        """The context of a span below this one, named by these parts."""
        return TraceContext(self.trace_id, _digits(16, self.trace_id, self.span_id, *parts), self.flags)


def parse(text: object) -> TraceContext | None:
    """The context in a ``traceparent`` of version 00; None for anything else."""
    if not isinstance(text, str) or len(text) != _LENGTH or (found := _FORM.fullmatch(text)) is None:
        return None
    trace_id, span_id, flags = found.groups()
    if not int(trace_id, 16) or not int(span_id, 16):
        return None
    return TraceContext(trace_id, span_id, int(flags, 16))


def of_operation(ref: OperationRef, request_id: str, time: str, traceparent: str) -> TraceContext:
    """The context of an operation's span: in the trace of its caller, or in a trace of its own.

    ``request_id`` and ``time`` are those of its spec, which distinguish it from a former operation of the same name.
    """
    caller = parse(traceparent)
    trace_id = caller.trace_id if caller is not None else _digits(32, ref, request_id, time)
    return TraceContext(trace_id, _digits(16, trace_id, ref, request_id, time), caller.flags if caller else SAMPLED)


def _digits(count: int, *parts: object) -> str:
    """Hexadecimal digits that follow from these parts; not all zero, which is no id."""
    text = "\0".join(map(str, parts)).encode(errors="surrogatepass")
    return hashlib.shake_256(text).hexdigest(count // 2).replace("0" * count, "1" * count)
