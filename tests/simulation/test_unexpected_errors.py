"""Unexpected errors are breaches: logged ones, and those of tasks whose result is never retrieved."""

from __future__ import annotations

import asyncio
import contextvars
import logging
import random

import pytest

from distop.errors import EtcdUnavailable, InvalidArgument, NotFound, SessionLost, UnreadableRecord, describe
from distop.runtime import logs
from tests.simulator.unexpected_errors import ErrorListener, listening
from tests.simulator.virtual_loop import Process, VirtualLoop

Found = list[tuple[str, str, int]]


WAYS = ("as the exception", "in the text", "beside the text")


def heard(error: BaseException, way: str) -> Found:
    """What a listener finds when this error is caught and logged."""
    found: Found = []
    log = logs.get("distop.executor", operation="a/check/1")
    with listening(ErrorListener(lambda *error: found.append(error))):
        try:
            raise error
        except BaseException as caught:
            if way == "in the text":
                log.error("it failed: %s", caught, extra={"partition": 7})
            elif way == "beside the text":
                log.warning("it failed: %s", describe(caught), extra={"partition": 7, "error": caught})
            else:
                log.warning("it failed", exc_info=caught, extra={"partition": 7})
    return found


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    "error", [KeyError(6), TypeError("no"), InvalidArgument("a"), NotFound("b"), UnreadableRecord("c"), OSError("d")]
)
def test_an_error_that_only_a_bug_can_cause_is_found_with_its_traceback(error: Exception, way: str) -> None:
    ((text, operation, partition),) = heard(error, way)
    assert text.startswith("it failed")
    assert f"{type(error).__name__}: {error}" in text
    assert "raise error" in text
    assert (operation, partition) == ("a/check/1", 7)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("error", [SessionLost("a"), EtcdUnavailable("b"), asyncio.CancelledError()])
def test_an_error_that_a_fault_can_cause_is_not_found(error: BaseException, way: str) -> None:
    assert heard(error, way) == []


def test_logging_is_restored() -> None:
    logger = logging.getLogger("distop")
    before = (logger.handlers[:], logger.level, logger.propagate)
    heard(KeyError(1), WAYS[0])
    assert (logger.handlers, logger.level, logger.propagate) == before


async def fail(error: Exception) -> None:
    raise error


def test_a_task_error_that_is_never_retrieved_is_found() -> None:
    loop = VirtualLoop(random.Random(1))
    process = Process("a")
    tasks = [
        loop.spawn(process, fail(error), contextvars.Context()) for error in (KeyError(1), KeyError(2), SessionLost())
    ]
    loop.run(lambda: all(task.done() for task in tasks), 1.0)
    assert isinstance(tasks[0].exception(), KeyError)
    (lost,) = loop.lost_task_errors()
    assert lost.startswith("a: the error of the task fail was never retrieved\n")
    assert lost.endswith("KeyError: 2")
    loop.end()
