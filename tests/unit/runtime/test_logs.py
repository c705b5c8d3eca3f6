"""Log records: one line of text or one JSON document each, with context fields."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
from typing import Any

import pytest

from distop.protocol.json_codec import from_rfc3339
from distop.runtime import logs

WHERE = {"operation": "t/noop/1", "partition": 7, "attempt": 2, "executor": "ann", "incarnation": "0123"}


def formatted(style: str, message: str, *, level: str = "info", error: Exception | None = None, **fields: Any) -> str:
    """A warning in the format that ``configure`` sets."""
    before = logging.getLogger("distop").handlers[:], logging.getLogger().handlers[:]
    try:
        logs.configure(level, style)
        (sink,) = logging.getLogger("distop").handlers
    finally:
        logging.getLogger("distop").handlers[:], logging.getLogger().handlers[:] = before
        logging.captureWarnings(False)
    record = logging.LogRecord("distop.executor", logging.WARNING, __file__, 1, "%s", (message,), None)
    if error is not None:
        try:
            raise error
        except Exception as caught:
            record.exc_info = (type(caught), caught, caught.__traceback__)
    vars(record).update(fields)
    return sink.format(record)


def test_a_text_record_has_time_level_message_and_fields() -> None:
    time, level, rest = formatted("text", "the job  failed", **WHERE).split(maxsplit=2)
    assert time.endswith("Z")
    assert from_rfc3339(time) > 0
    assert level == "WARNING"
    assert rest == "the job  failed  [operation=t/noop/1 partition=7 attempt=2 executor=ann incarnation=0123]"


def test_a_json_record_has_its_fields_as_members() -> None:
    line = json.loads(formatted("json", "the job failed", **WHERE))
    assert from_rfc3339(line.pop("time")) > 0
    assert line == {"level": "warning", "logger": "distop.executor", "message": "the job failed", **WHERE}


def test_empty_and_unknown_fields_are_omitted() -> None:
    known = {"operation": "t/noop/1", "partition": 0, "attempt": None, "colour": "blue"}
    assert formatted("text", "x", **known).endswith("x  [operation=t/noop/1 partition=0]")
    assert json.loads(formatted("json", "x", **known)).keys() == {
        "time",
        "level",
        "logger",
        "message",
        "operation",
        "partition",
    }
    assert formatted("text", "x").endswith(" x")


MESSAGE = "it died; the end of its log:\n\nTraceback (most recent call last):\n  File x\r\nOSError: fire\u2028\n"


@pytest.mark.parametrize("level", ["info", "debug"])
def test_a_message_of_several_lines_is_one_line_of_text(level: str) -> None:
    line = formatted("text", MESSAGE, level=level, operation="t/noop/1")
    assert line.endswith("it died; the end of its log: … OSError: fire  [operation=t/noop/1]")
    assert len(line.splitlines()) == 1


def test_a_message_of_several_lines_is_whole_in_one_line_of_json() -> None:
    line = formatted("json", MESSAGE)
    assert len(line.splitlines()) == 1
    assert json.loads(line)["message"] == MESSAGE


@pytest.mark.parametrize("message", ["", "\n", " "])
def test_an_empty_message_is_one_line(message: str) -> None:
    assert len(formatted("text", message).splitlines()) == 1
    assert json.loads(formatted("json", message))["message"] == message


def test_an_error_in_a_text_record_is_one_sentence() -> None:
    line = formatted("text", "it failed", error=OSError("no space\nat all\nleft"), operation="t/noop/1")
    assert line.endswith("it failed (OSError: no space … left)  [operation=t/noop/1]")
    assert "Traceback" not in line


def test_a_text_record_has_the_traceback_at_level_debug() -> None:
    first, second, *rest = formatted("text", "it failed", level="debug", error=KeyError("a")).splitlines()
    assert first.endswith(" it failed")
    assert second == "  Traceback (most recent call last):"
    assert rest[-1] == "  KeyError: 'a'"


@pytest.mark.parametrize("level", ["info", "debug"])
def test_hole_9_no_text_forges_a_record_or_controls_the_terminal(level: str) -> None:
    forged = "x\n2026-01-01T00:00:00.000Z ERROR   forged\r\x1b[2J\x9b2J\u202e"
    text = formatted(
        "text", f"a {forged}", level=level, error=OSError(forged), operation=f"t/{forged}", executor=forged
    )
    first, *rest = text.split("\n")
    assert all(line.startswith("  ") for line in rest)
    assert not any(character in text for character in "\r\x1b\x9b\u202e")
    if level == "info":
        assert rest == []
    assert r"operation=t/x\n2026" in first


def test_a_json_record_has_the_traceback_as_a_field() -> None:
    line = formatted("json", "it failed", error=KeyError("a"))
    assert len(line.splitlines()) == 1
    assert json.loads(line)["exception"].startswith("Traceback (most recent call last):\n")


def test_a_json_record_is_ascii() -> None:
    line = formatted("json", "no file \udcff in 表", partition={1})
    assert line.isascii()
    assert json.loads(line)["message"] == "no file \udcff in 表"


def test_fields_of_a_logger_and_of_a_call_are_combined(caplog: pytest.LogCaptureFixture) -> None:
    log = logs.get("somewhere", executor="ann").bind(incarnation="0123")
    with caplog.at_level("INFO", "somewhere"):
        log.info("x", extra={"operation": "t/noop/1"})
        log.info("y")
    first, second = [{n: vars(record)[n] for n in logs.CONTEXT if n in vars(record)} for record in caplog.records]
    assert first == {"executor": "ann", "incarnation": "0123", "operation": "t/noop/1"}
    assert second == {"executor": "ann", "incarnation": "0123"}


LIBRARIES = """
import asyncio, logging, warnings
from distop.runtime import logs
async def fail():
    raise OSError("no such host")
async def main():
    task = asyncio.ensure_future(fail())
    await asyncio.wait([task])
    del task  # its exception was not retrieved
logs.configure("warning", "text")
logs.configure("info", STYLE)
asyncio.run(main())
warnings.warn("this is old", stacklevel=1)
logging.getLogger("grpc").info("a connection")
logs.get().info("ready")
logs.get().debug("unheard")
"""


def log_of(style: str) -> list[str]:
    """The log of a process in which libraries log, too."""
    program = f"STYLE = {style!r}\n{LIBRARIES}"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == ""
    return done.stderr.splitlines()


def test_records_of_libraries_are_json_too() -> None:
    lines = [json.loads(line) for line in log_of("json")]
    assert [(line["logger"], line["level"]) for line in lines] == [
        ("asyncio", "error"),
        ("py.warnings", "warning"),
        ("distop", "info"),
    ]
    assert "OSError: no such host" in lines[0]["exception"]


def test_records_of_libraries_are_one_line_of_text_each() -> None:
    failed, old, ready = log_of("text")
    assert "Task exception was never retrieved" in failed
    assert failed.endswith("(OSError: no such host)")
    assert "this is old" in old
    assert ready.endswith("INFO    ready")


def test_harmless_errors_of_grpc_in_closed_loops_are_not_logged(capsys: pytest.CaptureFixture[str]) -> None:
    own, others = logging.getLogger("distop"), logging.getLogger()
    before = own.handlers[:], own.level, own.propagate, others.handlers[:]
    try:
        logs.configure("info", "text")
        error, closed = logging.getLogger("asyncio").error, RuntimeError("Event loop is closed")
        error("Exception in callback PollerCompletionQueue._handle_events()", exc_info=BlockingIOError(11, "again"))
        error("Exception in callback PollerCompletionQueue._handle_events()", exc_info=closed)
        assert capsys.readouterr().err == ""
        error("Exception in callback PollerCompletionQueue._handle_events()", exc_info=OSError("something else"))
        error("Exception in callback PollerCompletionQueue._handle_events()", exc_info=RuntimeError("something else"))
        error("Exception in callback work()", exc_info=BlockingIOError(11, "again"))
        error("Exception in callback work()", exc_info=closed)
        assert len(capsys.readouterr().err.splitlines()) == 4
    finally:
        own.handlers[:], own.level, own.propagate, others.handlers[:] = before
