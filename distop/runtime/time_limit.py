"""Calls a function with a time limit and Ctrl-C support, in a thread or in a process.

Opening a location may hang for minutes, block signals, or abort the process (pyarrow's file systems do all three), and
Python cannot stop it. After the limit, a thread is abandoned, and a process is killed.
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
"""Default limit in seconds for opening a location."""

_KILLED_AFTER = 2.0
"""Seconds to wait for a killed process; one in an uninterruptible kernel call is left alone."""
_SPARE = 5.0
"""Seconds after the limit at which the process ends itself, in case its caller has died."""
_BEGIN = (
    "import json, sys; request = json.load(sys.stdin); sys.path[:] = request['path']; "
    "from distop.runtime.time_limit import answer; answer(request)"
)


class TimeLimitExceeded(Exception):
    """The call has not returned within its limit."""


class Aborted(Exception):
    """The process ended without an answer; the message has its last line of output."""


async def in_thread(function: Callable[[], T], limit: float | None = None) -> T:
    """Call the function in a new thread; returns its result or raises its error.

    Raises TimeLimitExceeded after ``limit`` (:data:`LIMIT`) seconds. The thread is then abandoned; it does not keep
    the interpreter from exiting.
    """
    loop = asyncio.get_running_loop()
    answered: asyncio.Future[T] = loop.create_future()

    def set_answer(value: Any, error: BaseException | None) -> None:
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
            loop.call_soon_threadsafe(set_answer, value, raised)

    threading.Thread(target=run, name="time-limited-call", daemon=True).start()
    try:
        async with asyncio.timeout(LIMIT if limit is None else limit):
            return await answered
    except TimeoutError:
        if not answered.cancelled():
            raise  # the function has raised it
        raise TimeLimitExceeded from None


async def in_process(function: str, argument: Any, limit: float | None = None) -> Any:
    """Call ``function`` (``module:name``) in a new Python process.

    ``argument`` and the result are JSON. The process has this one's environment and import path.

    Raises the function's DistopError, TimeLimitExceeded, and Aborted if the process ended without an answer.
    """
    seconds = LIMIT if limit is None else limit
    request = {"function": function, "argument": argument, "path": sys.path, "seconds": seconds + _SPARE}
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-P", "-c", _BEGIN),  # -P: no module of the current folder is imported
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        start_new_session=True,  # Ctrl-C in the terminal goes to the caller only, which kills this process
    )
    try:
        async with asyncio.timeout(seconds):
            output, errors_output = await process.communicate(json.dumps(request).encode())
    except TimeoutError:
        raise TimeLimitExceeded from None
    finally:
        await _end(process)
    return _answer(output, errors_output, process.returncode or 0)


def runs_python() -> bool:
    """Whether this process can start its own interpreter again (it is not embedded)."""
    return bool(sys.executable) and Path(sys.executable).name.startswith("python")


async def _end(process: asyncio.subprocess.Process) -> None:
    if process.returncode is None:
        with suppress(ProcessLookupError):
            process.kill()
        with suppress(TimeoutError):
            async with asyncio.timeout(_KILLED_AFTER):
                await process.wait()


def _answer(output: bytes, errors_output: bytes, code: int) -> Any:
    try:
        answer: Mapping[str, Any] = json.loads(output.splitlines()[-1])
    except (IndexError, ValueError):
        how = f"with {signal.Signals(-code).name}" if code < 0 else f"with exit code {code}"
        lines = [line.strip() for line in errors_output.decode(errors="replace").splitlines() if line.strip()]
        # C++ prints the exception of an abort in a line of this form.
        reasons = [line.removeprefix("what():").strip() for line in lines if line.startswith("what():")]
        raise Aborted(
            f"the process that opened it ended {how}: {(reasons or lines or ['no error output'])[-1]}"
        ) from None
    if "error" in answer:
        kind = getattr(errors, answer["error"], DistopError)
        raise kind(answer["text"])
    return answer["value"]


def answer(request: Mapping[str, Any]) -> None:
    """In the new process: call the function, and write its answer to the last line of stdout."""
    signal.setitimer(signal.ITIMER_REAL, request["seconds"])  # the default action also ends a process that is inside C
    module, _, name = request["function"].partition(":")
    try:
        found = {"value": getattr(import_module(module), name)(request["argument"])}
    except DistopError as error:
        found = {"error": type(error).__name__, "text": describe(error)}
    except Exception as error:
        found = {"error": "DistopError", "text": f"{type(error).__name__}: {describe(error)}"}
    sys.stdout.write("\n" + json.dumps(found) + "\n")
    sys.stdout.flush()
    os._exit(0)  # closing file systems may hang, too
