"""Asks a verifier, a registered function or a URL, whether a sender's transaction was completed (C13).

Only URLs with a prefix of the setting ``verifier-url`` are requested, and never addresses of the node itself or of its
network's services. Only the classified answer is used; other text of the server is dropped.

It runs in the child, since the daemon does not run foreign code. The answer comes in time and has a bounded size: each
verifier runs in its own thread, which is abandoned if it hangs, and a connection is closed at its deadline.
"""

from __future__ import annotations

import errno
import http.client
import ipaddress
import json
import logging
import socket
import ssl
import threading
from contextlib import suppress
from importlib.metadata import entry_points
from typing import TYPE_CHECKING, Any
from urllib.parse import urlencode

from distop.decide import verifier_urls
from distop.errors import InvalidArgument, describe
from distop.protocol.prepared_operations import Unanswered
from distop.runtime import secret_settings

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from distop.decide.verifier_urls import VerifierUrl

    Verifier = Callable[[str, str], bool]

log = logging.getLogger("distop.child")

GROUP = "distop.verifiers"
"""The entry points: name → a callable (external id, operation's name) → bool."""
MAX_ANSWER = 64 * 1024
"""Maximum bytes of a URL's answer."""
MAX_HANGING = 16
"""Maximum concurrent verifications in one child; a hanging one keeps its thread."""
_TEXT = 300

_hanging = threading.Semaphore(MAX_HANGING)


class NoAnswer(Exception):
    """The verifier gave no usable answer.

    ``word``: the classified cause; ``detail``: text for this node's log, without text of the server.
    """

    def __init__(self, word: Unanswered, detail: str = "") -> None:
        super().__init__(f"{word}: {detail}" if detail else str(word))
        self.word = word


def verify(message: Mapping[str, Any], allowed: Sequence[str]) -> dict[str, Any]:
    """The result of the call. ``allowed``: the prefixes of URLs that may be asked."""
    limit = float(message["limit"])
    try:
        completed = _in_time(message["verify"], message["external_id"], message["op"], limit, allowed)
        return {"completed": completed, "why": ""}
    except NoAnswer as error:
        detail = " ".join(secret_settings.redact(str(error)).encode(errors="replace").decode().split())
        line, where = "Verifier %r gave no answer: %s", {"operation": message["op"]}
        log.warning(line, message["verify"], secret_settings.shortened(detail, _TEXT), extra=where)
        return {"completed": None, "why": str(error.word)}


def _in_time(verify: str, external_id: str, op: str, limit: float, allowed: Sequence[str]) -> bool:
    if not _hanging.acquire(blocking=False):
        raise NoAnswer(Unanswered.BUSY, f"{MAX_HANGING} verifications hang on this node")
    answers: list[bool | NoAnswer] = []
    done = threading.Event()

    def ask() -> None:
        try:
            answers.append(_ask(verify, external_id, op, limit, allowed))
        except NoAnswer as error:
            answers.append(error)
        except BaseException as error:
            answers.append(NoAnswer(Unanswered.FAILED, f"{type(error).__name__}: {describe(error)}"))
        finally:
            _hanging.release()
            done.set()

    threading.Thread(target=ask, name="verify", daemon=True).start()
    # A URL has its own time-out, which ends first.
    if not done.wait(limit + 1.0):
        raise NoAnswer(Unanswered.TIMEOUT, f"after {limit:g} s")
    answer = answers[0]
    if isinstance(answer, NoAnswer):
        raise answer
    return answer


def _ask(verify: str, external_id: str, op: str, limit: float, allowed: Sequence[str]) -> bool:
    if "://" in verify:
        return ask_url(verify, external_id, op, limit, allowed)
    found = registered(verify)(external_id, op)
    if not isinstance(found, bool):
        raise NoAnswer(Unanswered.NOT_AN_ANSWER, f"it returned {type(found).__name__}, not True or False")
    return found


def registered(name: str) -> Verifier:
    """The installed function of this name. Raises NoAnswer."""
    for entry in entry_points(group=GROUP, name=name):
        found: Verifier = entry.load()
        if not callable(found):
            raise NoAnswer(Unanswered.NOT_INSTALLED, f"{entry.value} is not a function")
        return found
    raise NoAnswer(Unanswered.NOT_INSTALLED, f"there is no entry point {name!r} in the group {GROUP}")


def ask_url(url: str, external_id: str, op: str, limit: float, allowed: Sequence[str]) -> bool:
    """Send ``GET`` to a URL with the external id and the operation as parameters. Raises NoAnswer.

    It uses no proxies of the environment, and follows no redirects.
    """
    try:
        asked = verifier_urls.parse(url)
        prefix = verifier_urls.allowing(asked, [verifier_urls.parse(one) for one in allowed])
    except InvalidArgument as error:
        raise NoAnswer(Unanswered.NOT_ALLOWED, str(error)) from None
    if prefix is None:
        raise NoAnswer(Unanswered.NOT_ALLOWED, "the URL matches no prefix of the setting verifier-url")
    target = f"{asked.path}?{urlencode({'external_id': external_id, 'op': op})}"
    connection = http.client.HTTPConnection(asked.host, asked.port, timeout=limit)
    with _ConnectionDeadline(limit) as deadline:
        try:
            deadline.sock = sock = _connect(asked, limit)
            if asked.scheme == "https":
                context = ssl.create_default_context()
                sock = context.wrap_socket(sock, server_hostname=asked.host, do_handshake_on_connect=False)
                deadline.sock = sock
                sock.do_handshake()
            connection.sock = sock
            connection.request("GET", target, headers={"Accept": "application/json", "Connection": "close"})
            return _answer(connection.getresponse())
        except (OSError, http.client.HTTPException, ValueError) as error:
            # The socket's own time-out, an error without errno, may come before the deadline.
            timed_out = deadline.passed or (isinstance(error, TimeoutError) and error.errno is None)
            raise NoAnswer(Unanswered.TIMEOUT if timed_out else _word(error), type(error).__name__) from None
        except NoAnswer as error:
            raise NoAnswer(Unanswered.TIMEOUT if deadline.passed else error.word, str(error)) from None
        finally:
            connection.close()


def _word(error: Exception) -> Unanswered:
    if isinstance(error, ssl.SSLError):
        return Unanswered.TLS
    # http.client's RemoteDisconnected is also an OSError, but then there was a connection.
    if isinstance(error, OSError) and not isinstance(error, http.client.HTTPException):
        return Unanswered.REFUSED
    return Unanswered.NOT_AN_ANSWER


def _connect(asked: VerifierUrl, limit: float) -> socket.socket:
    """Connect to one of the host's allowed addresses. Raises NoAnswer, OSError.

    It connects to the checked address itself: a second DNS lookup could return another address.
    """
    found = socket.getaddrinfo(asked.host, asked.port, type=socket.SOCK_STREAM)
    allowed = [one for one in found if may_reach(asked.host, str(one[4][0]))]
    if not allowed:
        raise NoAnswer(Unanswered.NOT_ALLOWED, "the host's address belongs to the node or to its network's services")
    last_error: OSError = OSError("no address")
    for family, kind, proto, _, address in allowed:
        sock = socket.socket(family, kind, proto)
        sock.settimeout(limit)
        try:
            sock.connect(address)
        except OSError as error:
            sock.close()
            last_error = error
        else:
            return sock
    raise last_error


def may_reach(host: str, address: str) -> bool:
    """Whether a verifier at an address may be asked: not one of the node itself or of its network's services.

    Such an address is allowed if the URL's host is the address itself, because then the executor's list of prefixes
    names it.
    """
    found = ipaddress.ip_address(address.partition("%")[0])
    try:
        return ipaddress.ip_address(host) == found or not _is_special(found)
    except ValueError:
        return not _is_special(found) or (host == "localhost" and found.is_loopback)


def _is_special(address: ipaddress.IPv4Address | ipaddress.IPv6Address) -> bool:
    if isinstance(address, ipaddress.IPv6Address):
        inner = [*(address.teredo or ()), *filter(None, (address.ipv4_mapped, address.sixtofour))]
        if any(address in network for network in _TRANSLATED):
            inner.append(ipaddress.IPv4Address(int(address) & 0xFFFF_FFFF))
        if any(map(_is_special, inner)):
            return True
    kinds = (address.is_loopback, address.is_link_local, address.is_unspecified, address.is_multicast)
    return any(kinds) or any(address in network for network in _SERVICES) or _is_own(address)


def _is_own(address: ipaddress.IPv4Address | ipaddress.IPv6Address) -> bool:
    """Whether a socket can be bound to the address. Also true if that is unknown.

    With ``ip_nonlocal_bind`` a socket can be bound to every address.
    """
    try:
        with socket.socket(socket.AF_INET if address.version == 4 else socket.AF_INET6, socket.SOCK_DGRAM) as sock:
            sock.bind((str(address), 0))
    except OSError as error:
        return error.errno != errno.EADDRNOTAVAIL
    return True


_TRANSLATED = [*map(ipaddress.IPv6Network, ("64:ff9b::/96", "::/96", "::ffff:0:0:0/96"))]
"""IPv6 addresses whose last 32 bits are an IPv4 address."""
_SERVICES: list[ipaddress.IPv4Network | ipaddress.IPv6Network] = [
    *map(ipaddress.IPv4Network, ("0.0.0.0/8", "192.0.0.0/24", "100.100.100.200/32", "168.63.129.16/32", "240.0.0.0/4")),
    *map(ipaddress.IPv6Network, ("fec0::/10", "fd00:ec2::/32", "64:ff9b:1::/48")),
]
"""Addresses, besides link-local ones, of the node itself, and of cloud services with its metadata and credentials.

In ``64:ff9b:1::/48`` each network chooses the position of the IPv4 address.
"""


class _ConnectionDeadline:
    """Shuts a connection down at its deadline. A socket's own time-out applies to each single read."""

    def __init__(self, limit: float) -> None:
        self.sock: socket.socket | None = None
        self.passed = False
        self._timer = threading.Timer(limit, self._shut_down)
        self._timer.daemon = True

    def _shut_down(self) -> None:
        self.passed = True
        if self.sock is not None:
            with suppress(OSError):
                self.sock.shutdown(socket.SHUT_RDWR)

    def __enter__(self) -> _ConnectionDeadline:
        self._timer.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._timer.cancel()
        if self.sock is not None:
            self.sock.close()


def _answer(response: http.client.HTTPResponse) -> bool:
    if response.status != http.client.OK:
        raise NoAnswer(Unanswered.of(f"status {str(response.status)[0]}xx"), f"status {response.status}")
    body = response.read(MAX_ANSWER + 1)
    if len(body) > MAX_ANSWER:
        raise NoAnswer(Unanswered.NOT_AN_ANSWER, f"the answer has more than {MAX_ANSWER} bytes")
    try:
        answer = json.loads(body)
    except (ValueError, RecursionError):
        raise NoAnswer(Unanswered.NOT_AN_ANSWER, "the answer is not JSON") from None
    completed = answer.get("completed") if isinstance(answer, dict) else None
    if not isinstance(completed, bool):
        raise NoAnswer(Unanswered.NOT_AN_ANSWER, 'neither {"completed": true} nor {"completed": false}')
    return completed
