"""Calls with a time limit that an interrupt ends: in a thread, or in a process of their own.

What opens a location may hang for minutes, hold signals back, or abort its process (pyarrow's file systems do all
three), and nothing in Python can stop it. A thread is abandoned then, a process is killed.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import threading
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from distop import errors
from distop.errors import DistopError, describe

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

T = TypeVar("T")

LIMIT = 60.0
"""Seconds for which a location may keep a caller waiting."""

_KILLED_AFTER = 2.0
"""Seconds in which a killed process ends; one in a kernel call that cannot be interrupted is left alone."""
_SPARE = 5.0
"""Seconds beyond the limit after which the process ends itself, should its caller have died."""
_BEGIN = (
    "import json, sys; asked = json.load(sys.stdin); sys.path[:] = asked['path']; "
    "from distop.bounded import answer; answer(asked)"
)


class TimeLimit(Exception):
    """The call has not returned within its limit."""


class Aborted(Exception):
    """The process of the call ended without an answer; the message is the last that it said."""


async def in_thread(function: Callable[[], T], limit: float | None = None) -> T:
    """What the function returns or raises. TimeLimit where it takes longer than ``limit`` (:data:`LIMIT`) seconds: the
    thread is abandoned then, and does not keep the interpreter from ending.
    """
    loop = asyncio.get_running_loop()
    answered: asyncio.Future[T] = loop.create_future()

    def tell(value: Any, error: BaseException | None) -> None:
        if answered.done():
            return
        if error is None:
            answered.set_result(value)
        else:
            answered.set_exception(error)

    def run() -> None:
        value, raised = None, None
        try:
            value = function()
        except BaseException as error:
            raised = error
        with suppress(RuntimeError):  # the loop was closed meanwhile
            loop.call_soon_threadsafe(tell, value, raised)

    threading.Thread(target=run, name="bounded-call", daemon=True).start()
    try:
        async with asyncio.timeout(LIMIT if limit is None else limit):
            return await answered
    except TimeoutError:
        if not answered.cancelled():
            raise  # the function's own
        raise TimeLimit from None


async def in_process(function: str, argument: Any, limit: float | None = None) -> Any:
    """What ``function`` (``module:name``) returns for ``argument``, both JSON, in a new Python process with this one's
    environment and import path.

    Raises the DistopError that it raises; TimeLimit; Aborted where the process ended without an answer.
    """
    seconds = LIMIT if limit is None else limit
    asked = {"function": function, "argument": argument, "path": sys.path, "seconds": seconds + _SPARE}
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-P", "-c", _BEGIN),  # -P: no module of the current folder is imported
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        start_new_session=True,  # Ctrl-C in the terminal is the caller's, who kills it
    )
    try:
        async with asyncio.timeout(seconds):
            told, complained = await process.communicate(json.dumps(asked).encode())
    except TimeoutError:
        raise TimeLimit from None
    finally:
        await _end(process)
    return _answer(told, complained, process.returncode or 0)


def runs_python() -> bool:
    """The interpreter of this process can be started again: it is a Python of its own, and not embedded."""
    return bool(sys.executable) and Path(sys.executable).name.startswith("python")


async def _end(process: asyncio.subprocess.Process) -> None:
    if process.returncode is None:
        with suppress(ProcessLookupError):
            process.kill()
        with suppress(TimeoutError):
            async with asyncio.timeout(_KILLED_AFTER):
                await process.wait()


def _answer(told: bytes, complained: bytes, code: int) -> Any:
    try:
        answer: Mapping[str, Any] = json.loads(told.splitlines()[-1])
    except (IndexError, ValueError):
        how = f"with {signal.Signals(-code).name}" if code < 0 else f"with exit code {code}"
        said = [line.strip() for line in complained.decode(errors="replace").splitlines() if line.strip()]
        # C++ tells the exception of an abort in a line of this form.
        reasons = [line.removeprefix("what():").strip() for line in said if line.startswith("what():")]
        raise Aborted(
            f"the process that opened it ended {how}: {(reasons or said or ['no error output'])[-1]}"
        ) from None
    if "error" in answer:
        kind = getattr(errors, answer["error"], DistopError)
        raise kind(answer["text"])
    return answer["value"]


def answer(asked: Mapping[str, Any]) -> None:
    """In the process: call the function, and write its answer as the last line of stdout."""
    signal.setitimer(signal.ITIMER_REAL, asked["seconds"])  # its default action ends a process that is inside C as well
    module, _, name = asked["function"].partition(":")
    try:
        told = {"value": getattr(import_module(module), name)(asked["argument"])}
    except DistopError as error:
        told = {"error": type(error).__name__, "text": describe(error)}
    except Exception as error:
        told = {"error": "DistopError", "text": f"{type(error).__name__}: {describe(error)}"}
    sys.stdout.write("\n" + json.dumps(told) + "\n")
    sys.stdout.flush()
    os._exit(0)  # file systems that were opened may take as long to close
