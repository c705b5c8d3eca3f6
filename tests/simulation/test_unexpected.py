"""Errors that nobody expects are breaches: those that a log tells, and those that nobody asks for."""

from __future__ import annotations

import asyncio
import contextvars
import logging
import random

import pytest

from distop.errors import EtcdUnavailable, InvalidArgument, NotFound, SessionLost, UnreadableRecord, describe
from distop.runtime import logs
from tests.simulator.unexpected_errors import Listener, listening
from tests.simulator.virtual_loop import Process, VirtualLoop

Found = list[tuple[str, str, int]]


WAYS = ("as the exception", "in the text", "beside the text")


def heard(error: BaseException, way: str) -> Found:
    """What a listener finds where this is caught and logged."""
    found: Found = []
    log = logs.get("distop.executor", operation="a/check/1")
    with listening(Listener(lambda *told: found.append(told))):
        try:
            raise error
        except BaseException as caught:
            if way == "in the text":
                log.error("it broke: %s", caught, extra={"partition": 7})
            elif way == "beside the text":
                log.warning("it broke: %s", describe(caught), extra={"partition": 7, "error": caught})
            else:
                log.warning("it broke", exc_info=caught, extra={"partition": 7})
    return found


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    "error", [KeyError(6), TypeError("no"), InvalidArgument("a"), NotFound("b"), UnreadableRecord("c"), OSError("d")]
)
def test_what_only_a_mistake_can_cause_is_found_with_its_traceback(error: Exception, way: str) -> None:
    ((text, operation, partition),) = heard(error, way)
    assert text.startswith("it broke")
    assert f"{type(error).__name__}: {error}" in text
    assert "raise error" in text
    assert (operation, partition) == ("a/check/1", 7)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("error", [SessionLost("a"), EtcdUnavailable("b"), asyncio.CancelledError()])
def test_what_a_fault_can_cause_is_not(error: BaseException, way: str) -> None:
    assert heard(error, way) == []


def test_logging_is_as_it_was_afterwards() -> None:
    logger = logging.getLogger("distop")
    before = (logger.handlers[:], logger.level, logger.propagate)
    heard(KeyError(1), WAYS[0])
    assert (logger.handlers, logger.level, logger.propagate) == before


async def breaks(error: Exception) -> None:
    raise error


def test_a_task_that_broke_and_that_nobody_asks_for() -> None:
    loop = VirtualLoop(random.Random(1))
    process = Process("a")
    tasks = [
        loop.spawn(process, breaks(error), contextvars.Context()) for error in (KeyError(1), KeyError(2), SessionLost())
    ]
    loop.run(lambda: all(task.done() for task in tasks), 1.0)
    assert isinstance(tasks[0].exception(), KeyError)
    (unnoticed,) = loop.unnoticed()
    assert unnoticed.startswith("a: nobody retrieved the error of the task breaks\n")
    assert unnoticed.endswith("KeyError: 2")
    loop.end()
