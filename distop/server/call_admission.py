"""Admission of calls: identifies callers, checks their permissions and limits, and keeps the audit log."""

from __future__ import annotations

import json
import logging
import os
import stat
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from functools import partial
from typing import TYPE_CHECKING, Any

from distop.client.service_messages import request_id_of
from distop.clock import time
from distop.errors import (
    DistopError,
    InvalidArgument,
    NotIdentified,
    PermissionDenied,
    ServiceUnavailable,
)
from distop.protocol.frozen import frozen
from distop.protocol.json_codec import rfc3339
from distop.server import access
from distop.server.access import CallerIdentity, CallerRole, ServiceAccess
from distop.server.json_web_tokens import TokenVerifier
from distop.server.limits import IdentityLimits
from distop.server.permissions import RULES
from distop.settings_file import read_trusted
from distop.store.tls_files import file_stamp

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterator, Sequence
    from contextlib import AbstractContextManager
    from pathlib import Path

    from distop.server.access import CallScope
    from distop.server.call_spans import CallSpans
    from distop.server.permissions import CallRule

log = logging.getLogger("distop.service")

MOST_TEXT = 200
"""Characters of a caller's text in a line of the audit log."""
STDOUT = "-"
"""The name of an audit log that is the standard output."""
MOST_UNWRITTEN = 1 << 20
"""Bytes of lines that wait for an audit log which cannot be written."""
LOOK_EVERY = 1.0
"""Seconds between two looks whether the access file has changed."""


@frozen
class CurrentCaller:
    """Who calls. ``identity`` None: the service identifies nobody."""

    identity: CallerIdentity | None
    peer: str
    admin: bool = False
    may_see: Callable[[CallScope], bool] = lambda scope: True
    """Whether it has the role of the call for another scope."""
    admit_nested: Callable[[str, Any], AbstractContextManager[AdmittedCall]] | None = None
    """Admits another call of the same caller."""


NOBODY = CurrentCaller(None, "")
caller: ContextVar[CurrentCaller] = ContextVar("caller", default=NOBODY)
"""The caller of the current call, for the handlers."""


@frozen
class CallerCredentials:
    """What identifies a caller: a bearer token, and the names in a verified client certificate."""

    token: str | None = None
    certificates: Sequence[str] = ()
    peer: str = ""


class AccessFile:
    """The access in a file, which is read again when it changes. An invalid change is logged, and not applied.

    Raises InvalidArgument at first.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._stamp, self._looked = file_stamp(str(path)), time.monotonic()
        self._current = self._read()

    def current(self) -> ServiceAccess:
        """The access that is in force."""
        if time.monotonic() - self._looked >= LOOK_EVERY:
            self._looked = time.monotonic()
            if (stamp := file_stamp(str(self._path))) != self._stamp:
                self._stamp = stamp
                try:
                    self._current = self._read()
                    log.info("The access file was read again", extra={"path": str(self._path)})
                except InvalidArgument as error:
                    log.error("The changed access file is not applied: %s", error)
        return self._current

    def _read(self) -> ServiceAccess:
        try:
            text = read_trusted(self._path, "the access file").decode()
        except UnicodeDecodeError:
            raise InvalidArgument(f"cannot read the access file {self._path}: it is not UTF-8") from None
        return access.parse(text, str(self._path))


class AuditLog:
    """A file with a line of JSON for each call that may change something, and for each refusal.

    ``path``: the file; ``-``: the standard output, as containers log. Lines that cannot be written wait in memory.
    Raises InvalidArgument if it cannot be opened.
    """

    def __init__(self, path: Path) -> None:
        self._unwritten = b""
        if str(path) == STDOUT:
            self._file = 1
            os.set_blocking(self._file, False)  # a reader that stops must not stop the service
            return
        try:
            # O_NONBLOCK: opening a named pipe must not block.
            flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
            self._file = os.open(path, flags, 0o600)
        except OSError as error:
            raise InvalidArgument(f"cannot open the audit log {path}: {error.strerror or error}") from None
        if not stat.S_ISREG(os.fstat(self._file).st_mode):
            os.close(self._file)
            raise InvalidArgument(f"the audit log {path} is not a regular file")

    def check(self) -> None:
        """Raises ServiceUnavailable while lines cannot be written: calls that cannot be logged must not be made."""
        if self._unwritten and not self._flushed():
            raise ServiceUnavailable("the service cannot write its audit log, and makes no call that must be logged")

    def write(self, who: CurrentCaller, call: str, scopes: Sequence[CallScope], request_id: str, verdict: str) -> None:
        """Append a line."""
        line = {
            "time": rfc3339(time.time()),
            "identity": who.identity.name if who.identity is not None else None,
            "peer": who.peer,
            "call": call[:MOST_TEXT],
            "concerns": [{"type": _cut(one.type), "table": _cut(one.table)} for one in scopes[:20]],
            "request_id": request_id[:MOST_TEXT],
            "verdict": verdict,
        }
        if len(self._unwritten) < MOST_UNWRITTEN:
            self._unwritten += json.dumps(line).encode() + b"\n"
        self._flushed()

    def _flushed(self) -> bool:
        """Whether all lines are written."""
        try:
            while self._unwritten:
                self._unwritten = self._unwritten[os.write(self._file, self._unwritten) :]
        except OSError as error:
            log.error("Cannot write the audit log: %s; refusing calls that must be logged", error.strerror or error)
            return False
        return True


def _cut(text: str | None) -> str | None:
    return None if text is None else text[:MOST_TEXT]


class CallAdmission:
    """Admits or refuses each call before its handler runs."""

    def __init__(
        self, file: AccessFile | None = None, audit: AuditLog | None = None, limits: IdentityLimits | None = None
    ) -> None:
        self._file = file
        self._audit = audit
        self._limits = limits or IdentityLimits()
        self._tokens = TokenVerifier()
        self.spans: CallSpans | None = None
        """Sends a span for each call; None: traces are not exported."""

    @property
    def identifies(self) -> bool:
        """Whether callers are identified."""
        return self._file is not None

    async def renew_keys(self, credentials: CallerCredentials) -> None:
        """Read the keys of issuers that :meth:`check_identity` may need for this token."""
        if credentials.token is not None and (issuers := self._access().issuers):
            await self._tokens.renew(issuers, credentials.token)

    def check_identity(self, call: str, credentials: CallerCredentials) -> None:
        """Raises NotIdentified, before anything of a request is read; ServiceUnavailable without keys of an issuer."""
        try:
            self._identify(self._access(), credentials)
        except (NotIdentified, ServiceUnavailable) as error:
            self.log_refusal(call, credentials, error)
            raise

    def log_refusal(self, call: str, credentials: CallerCredentials, error: DistopError) -> None:
        """Log a request that was refused before its message was read."""
        self._log(CurrentCaller(None, credentials.peer), call, [], None, type(error).__name__)

    def _access(self) -> ServiceAccess:
        return self._file.current() if self._file is not None else access.UNRESTRICTED

    @contextmanager
    def admit(self, call: str, request: Any, credentials: CallerCredentials) -> Iterator[AdmittedCall]:
        """Admit a call for the length of the block, and log its verdict.

        Raises NotIdentified, PermissionDenied, LimitExceeded, and InvalidArgument for a request that names nothing.
        """
        rule, allowed = RULES[call], self._access()
        who = CurrentCaller(None, credentials.peer)
        scopes: list[CallScope] = []

        def may_see(scope: CallScope) -> bool:
            return allowed.permits(identity, rule.role, scope)

        def check(current: ServiceAccess) -> None:
            """Raises NotIdentified and PermissionDenied if the caller may not make the call now."""
            found = self._identify(current, credentials)
            if not _allows(current, found, rule, scopes):
                raise PermissionDenied(f"{_name(found)} may not call {call} here: it needs the role {rule.role}")

        try:
            identity = self._identify(allowed, credentials)
            admin = allowed.permits(identity, CallerRole.ADMIN, access.EVERYTHING)
            who = CurrentCaller(
                identity, credentials.peer, admin, may_see, partial(self.admit, credentials=credentials)
            )
            self._limits.check_call(identity)
            scopes = list(rule.scopes(request))
            check(allowed)
            if rule.writes and self._audit is not None:
                self._audit.check()
        except DistopError as error:
            self._log(who, call, scopes, request, type(error).__name__)
            raise
        caller.set(who)  # each call has a task of its own
        verdict = "unknown"
        try:
            spans = self.spans
            with self._limits.open_call(identity), nullcontext() if spans is None else spans.span(call, request):
                yield AdmittedCall(rule, request, may_see, lambda: check(self._access()), identity, self._limits)
            verdict = "ok"
        except DistopError as error:
            verdict = type(error).__name__
            raise
        finally:
            if rule.writes or verdict in ("PermissionDenied", "NotIdentified"):
                self._log(who, call, scopes, request, verdict)

    def identity(self, credentials: CallerCredentials) -> CallerIdentity | None:
        """The caller; None: callers are not identified. Raises NotIdentified."""
        return self._identify(self._access(), credentials)

    def permits(self, call: str, request: Any, credentials: CallerCredentials) -> bool:
        """Whether a call would be admitted now, but for limits. Nothing is logged or counted."""
        rule, allowed = RULES[call], self._access()
        try:
            identity, scopes = self._identify(allowed, credentials), list(rule.scopes(request))
        except (NotIdentified, InvalidArgument):
            return False
        return _allows(allowed, identity, rule, scopes)

    def _identify(self, allowed: ServiceAccess, credentials: CallerCredentials) -> CallerIdentity | None:
        if not allowed.identifies:
            return None
        if credentials.token is not None and len(credentials.token) < access.SHORTEST_TOKEN:
            raise NotIdentified(f"a token has at least {access.SHORTEST_TOKEN} characters")
        found = allowed.identity(credentials.token, credentials.certificates)
        if found is None and credentials.token is not None and allowed.issuers:
            found = allowed.of_subject(*self._tokens.subject(allowed.issuers, credentials.token))
        if found is None:
            given = credentials.token is not None or credentials.certificates
            raise NotIdentified(
                "the token or certificate belongs to no identity of the service"
                if given
                else "the service identifies its callers: send a bearer token, or use a client certificate"
            )
        return found

    def _log(self, who: CurrentCaller, call: str, scopes: Sequence[CallScope], request: Any, verdict: str) -> None:
        if self._audit is not None:
            self._audit.write(who, call, scopes, request_id_of(request), verdict)


@frozen
class AdmittedCall:
    """A call that was admitted."""

    _rule: CallRule
    _request: Any
    _may_see: Callable[[CallScope], bool]
    _check: Callable[[], None]
    _identity: CallerIdentity | None = None
    _limits: IdentityLimits | None = None

    async def run(self, handler: Callable[[Any], Awaitable[Any]]) -> Any:
        """The answer of the handler, within the limits of the caller. Raises LimitExceeded."""
        new = () if self._rule.starts is None else tuple(self._rule.starts(self._request))
        if self._limits is None or not new:
            return self.answer(await handler(self._request))
        async with self._limits.starting(self._identity, new):
            return self.answer(await handler(self._request))

    def answer(self, message: Any) -> Any:
        """The answer without what the caller may not see."""
        if self._rule.waits:
            self._check()
        if self._rule.filter_list is not None:
            self._rule.filter_list(message, self._may_see)
        if self._rule.filter_answer is not None:
            self._rule.filter_answer(message, self._may_see, self._request)
        return message

    def check(self) -> None:
        """Raises NotIdentified and PermissionDenied if the caller may no longer make the call."""
        self._check()


def _allows(
    allowed: ServiceAccess, identity: CallerIdentity | None, rule: CallRule, scopes: Sequence[CallScope]
) -> bool:
    """Whether a caller has the role of the rule, and that of each scope.

    The answer of a list is filtered, so its scope of everything needs no grant for everything.
    """
    needed = [one for one in scopes if rule.filter_list is None or one != access.EVERYTHING]
    return allowed.has_role(identity, rule.role) and all(
        allowed.permits(identity, one.role or rule.role, one) for one in needed
    )


def _name(identity: CallerIdentity | None) -> str:
    return identity.name if identity is not None else "the caller"
