"""Asking whether the transaction of a prepared operation's sender was completed (C13): a registered function, or a URL.

In the child, since the daemon runs no code of others. Whatever they do, there is an answer in time and of bounded size:
each is asked in a thread of its own, which is given up where it hangs; a connection is cut at its deadline.
"""

from __future__ import annotations

import http.client
import json
import logging
import socket
import ssl
import threading
from contextlib import suppress
from importlib.metadata import entry_points
from typing import TYPE_CHECKING, Any
from urllib.parse import urlencode, urlsplit

from distop.core.codec import shorten
from distop.errors import describe

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    Verifier = Callable[[str, str], bool]

log = logging.getLogger("distop.child")

GROUP = "distop.verifiers"
"""The entry points: name → a callable (external id, operation's name) → bool."""
MAX_ANSWER = 64 * 1024
"""Bytes of a URL's answer."""
MAX_HANGING = 16
"""Verifications that hang in one child, beyond which none is begun: they cost a thread each."""
_TEXT = 300

_hanging = threading.Semaphore(MAX_HANGING)


class Unanswered(Exception):
    """Whether the transaction was completed is not known."""


def verify(message: Mapping[str, Any]) -> dict[str, Any]:
    """The result of the call."""
    limit = float(message["limit"])
    try:
        return {"completed": _in_time(message["verify"], message["external_id"], message["op"], limit), "why": ""}
    except Unanswered as error:
        why = shorten(" ".join(str(error).encode(errors="replace").decode().split()), _TEXT)
        log.warning("%s: %s could not tell: %s", message["op"], message["verify"], why)
        return {"completed": None, "why": why}


def _in_time(verify: str, external_id: str, op: str, limit: float) -> bool:
    if not _hanging.acquire(blocking=False):
        raise Unanswered(f"{MAX_HANGING} verifications hang on this node")
    told: list[bool | Unanswered] = []
    done = threading.Event()

    def ask() -> None:
        try:
            told.append(_ask(verify, external_id, op, limit))
        except Unanswered as error:
            told.append(error)
        except BaseException as error:
            told.append(Unanswered(f"{type(error).__name__}: {describe(error)}"))
        finally:
            _hanging.release()
            done.set()

    threading.Thread(target=ask, name="verify", daemon=True).start()
    # A URL is cut off at its limit, and tells that itself.
    if not done.wait(limit + 1.0):
        raise Unanswered(f"no answer within {limit:g} s")
    answer = told[0]
    if isinstance(answer, Unanswered):
        raise answer
    return answer


def _ask(verify: str, external_id: str, op: str, limit: float) -> bool:
    if "://" in verify:
        return ask_url(verify, external_id, op, limit)
    found = registered(verify)(external_id, op)
    if not isinstance(found, bool):
        raise Unanswered(f"the verifier {verify} returned {type(found).__name__}, not True or False")
    return found


def registered(name: str) -> Verifier:
    """The function that is installed under this name. Raises Unanswered."""
    for entry in entry_points(group=GROUP, name=name):
        found: Verifier = entry.load()
        if not callable(found):
            raise Unanswered(f"the verifier {name} ({entry.value}) is no function")
        return found
    raise Unanswered(f"no verifier {name!r} is installed on this node (entry points of the group {GROUP})")


def ask_url(url: str, external_id: str, op: str, limit: float) -> bool:
    """``GET`` of it with both as parameters. Neither proxies of the environment nor redirects are followed. Raises
    Unanswered.
    """
    parts = urlsplit(url)
    host, port = parts.hostname or "", parts.port or (443 if parts.scheme == "https" else 80)
    target = f"{parts.path or '/'}?{urlencode({'external_id': external_id, 'op': op})}"
    connection = http.client.HTTPConnection(host, parts.port, timeout=limit)
    late = f"no answer within {limit:g} s"
    with _Cut(limit) as cut:
        try:
            cut.sock = sock = socket.create_connection((host, port), timeout=limit)
            if parts.scheme == "https":
                context = ssl.create_default_context()
                cut.sock = sock = context.wrap_socket(sock, server_hostname=host, do_handshake_on_connect=False)
                sock.do_handshake()
            connection.sock = sock
            connection.request("GET", target, headers={"Accept": "application/json", "Connection": "close"})
            return _answer(connection.getresponse())
        except (OSError, http.client.HTTPException, ValueError) as error:
            # A socket's own timeout, which has no number, may be the first of the two to be over.
            over = cut.over or (isinstance(error, TimeoutError) and error.errno is None)
            raise Unanswered(late if over else f"{type(error).__name__}: {describe(error)}") from None
        except Unanswered as error:
            raise Unanswered(late if cut.over else str(error)) from None
        finally:
            connection.close()


class _Cut:
    """Ends a connection at its deadline, whatever trickles in: a socket's own timeout is one for each read."""

    def __init__(self, limit: float) -> None:
        self.sock: socket.socket | None = None
        self.over = False
        self._timer = threading.Timer(limit, self._cut)
        self._timer.daemon = True

    def _cut(self) -> None:
        self.over = True
        if self.sock is not None:
            with suppress(OSError):
                self.sock.shutdown(socket.SHUT_RDWR)

    def __enter__(self) -> _Cut:
        self._timer.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._timer.cancel()
        if self.sock is not None:
            self.sock.close()


def _answer(response: http.client.HTTPResponse) -> bool:
    if response.status != http.client.OK:
        where = " (redirects are not followed)" if 300 <= response.status < 400 else ""
        raise Unanswered(f"it answered {response.status} {response.reason}{where}")
    body = response.read(MAX_ANSWER + 1)
    if len(body) > MAX_ANSWER:
        raise Unanswered(f"its answer has more than {MAX_ANSWER} bytes")
    try:
        told = json.loads(body)
    except (ValueError, RecursionError):
        raise Unanswered("its answer is no JSON") from None
    completed = told.get("completed") if isinstance(told, dict) else None
    if not isinstance(completed, bool):
        raise Unanswered('its answer is not {"completed": true} or {"completed": false}')
    return completed
