"""Asking whether the transaction of a prepared operation's sender was completed (C13): a registered function, or a URL.

A URL is asked only below the prefixes of the setting ``verifier-url``, and never at an address of the node itself or of
its network's services. What a server says beyond yes or no goes nowhere: the answer is classified.

In the child, since the daemon runs no code of others. Whatever they do, there is an answer in time and of bounded size:
each is asked in a thread of its own, which is given up where it hangs; a connection is cut at its deadline.
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
"""Bytes of a URL's answer."""
MAX_HANGING = 16
"""Verifications that hang in one child, beyond which none is begun: they cost a thread each."""
_TEXT = 300

_hanging = threading.Semaphore(MAX_HANGING)


class NoAnswer(Exception):
    """Whether the transaction was completed is not known. ``word``: what is told of that; ``detail``: what this node's
    log has besides, and nothing of it is the server's text.
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
        log.warning(
            "%s: %r gave no answer: %s", message["op"], message["verify"], secret_settings.shortened(detail, _TEXT)
        )
        return {"completed": None, "why": str(error.word)}


def _in_time(verify: str, external_id: str, op: str, limit: float, allowed: Sequence[str]) -> bool:
    if not _hanging.acquire(blocking=False):
        raise NoAnswer(Unanswered.BUSY, f"{MAX_HANGING} verifications hang on this node")
    told: list[bool | NoAnswer] = []
    done = threading.Event()

    def ask() -> None:
        try:
            told.append(_ask(verify, external_id, op, limit, allowed))
        except NoAnswer as error:
            told.append(error)
        except BaseException as error:
            told.append(NoAnswer(Unanswered.FAILED, f"{type(error).__name__}: {describe(error)}"))
        finally:
            _hanging.release()
            done.set()

    threading.Thread(target=ask, name="verify", daemon=True).start()
    # A URL is cut off at its limit, and tells that itself.
    if not done.wait(limit + 1.0):
        raise NoAnswer(Unanswered.TIMEOUT, f"after {limit:g} s")
    answer = told[0]
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
    """The function that is installed under this name. Raises NoAnswer."""
    for entry in entry_points(group=GROUP, name=name):
        found: Verifier = entry.load()
        if not callable(found):
            raise NoAnswer(Unanswered.NOT_INSTALLED, f"{entry.value} is no function")
        return found
    raise NoAnswer(Unanswered.NOT_INSTALLED, f"there is no entry point of the group {GROUP}")


def ask_url(url: str, external_id: str, op: str, limit: float, allowed: Sequence[str]) -> bool:
    """``GET`` of it with both as parameters. Neither proxies of the environment nor redirects are followed. Raises
    NoAnswer.
    """
    try:
        asked = verifier_urls.parse(url)
        prefix = verifier_urls.allowing(asked, [verifier_urls.parse(one) for one in allowed])
    except InvalidArgument as error:
        raise NoAnswer(Unanswered.NOT_ALLOWED, str(error)) from None
    if prefix is None:
        raise NoAnswer(Unanswered.NOT_ALLOWED, "no prefix of the setting verifier-url is one of it")
    target = f"{asked.path}?{urlencode({'external_id': external_id, 'op': op})}"
    connection = http.client.HTTPConnection(asked.host, asked.port, timeout=limit)
    with _Cut(limit) as cut:
        try:
            cut.sock = sock = _connected(asked, limit)
            if asked.scheme == "https":
                context = ssl.create_default_context()
                cut.sock = sock = context.wrap_socket(sock, server_hostname=asked.host, do_handshake_on_connect=False)
                sock.do_handshake()
            connection.sock = sock
            connection.request("GET", target, headers={"Accept": "application/json", "Connection": "close"})
            return _answer(connection.getresponse())
        except (OSError, http.client.HTTPException, ValueError) as error:
            # A socket's own timeout, which has no number, may be the first of the two to be over.
            over = cut.over or (isinstance(error, TimeoutError) and error.errno is None)
            raise NoAnswer(Unanswered.TIMEOUT if over else _word(error), type(error).__name__) from None
        except NoAnswer as error:
            raise NoAnswer(Unanswered.TIMEOUT if cut.over else error.word, str(error)) from None
        finally:
            connection.close()


def _word(error: Exception) -> Unanswered:
    if isinstance(error, ssl.SSLError):
        return Unanswered.TLS
    # http.client's RemoteDisconnected is an OSError as well: then there was a connection.
    if isinstance(error, OSError) and not isinstance(error, http.client.HTTPException):
        return Unanswered.REFUSED
    return Unanswered.NOT_AN_ANSWER


def _connected(asked: VerifierUrl, limit: float) -> socket.socket:
    """A connection to one of the host's addresses. It is made to the very address that was checked: a name that is
    resolved again may lead elsewhere by then. Raises NoAnswer, OSError.
    """
    found = socket.getaddrinfo(asked.host, asked.port, type=socket.SOCK_STREAM)
    reached = [one for one in found if may_reach(asked.host, str(one[4][0]))]
    if not reached:
        raise NoAnswer(Unanswered.NOT_ALLOWED, "its host's address is the node's own, or of its network's services")
    wrong: OSError = OSError("no address")
    for family, kind, proto, _, address in reached:
        sock = socket.socket(family, kind, proto)
        sock.settimeout(limit)
        try:
            sock.connect(address)
        except OSError as error:
            sock.close()
            wrong = error
        else:
            return sock
    raise wrong


def may_reach(host: str, address: str) -> bool:
    """The address is no one of the node's own or of its network's services, unless the host is that address itself, as
    the executor's list then names it: the host of a URL is that of its prefix.
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
    """A socket can be bound to it, or it cannot be told: then no verifier is asked there. With ``ip_nonlocal_bind`` a
    socket can be bound to every address.
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
"""Besides link-local ones: what stands for the node itself, and where clouds serve its metadata and credentials. In
``64:ff9b:1::/48`` each network chooses where the IPv4 address stands."""


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
        raise NoAnswer(Unanswered.of(f"status {str(response.status)[0]}xx"), f"status {response.status}")
    body = response.read(MAX_ANSWER + 1)
    if len(body) > MAX_ANSWER:
        raise NoAnswer(Unanswered.NOT_AN_ANSWER, f"more than {MAX_ANSWER} bytes")
    try:
        told = json.loads(body)
    except (ValueError, RecursionError):
        raise NoAnswer(Unanswered.NOT_AN_ANSWER, "no JSON") from None
    completed = told.get("completed") if isinstance(told, dict) else None
    if not isinstance(completed, bool):
        raise NoAnswer(Unanswered.NOT_AN_ANSWER, 'neither {"completed": true} nor {"completed": false}')
    return completed
