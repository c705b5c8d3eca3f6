"""Authentication of a simulated etcd, as far as clients see it: tokens that expire, and a role that is revoked."""

from __future__ import annotations

import re

DENIED = "etcdserver: permission denied"
STALE = "etcdserver: invalid auth token"
NEEDS_ROLE = frozenset({"/etcdserverpb.KV/Txn", "/etcdserverpb.KV/Range"})
"""Methods that always need the role. A lease can be granted without it, and revoked while it has no key."""
OPEN = frozenset({"/etcdserverpb.Auth/Authenticate", "/etcdserverpb.Lease/LeaseKeepAlive"})
"""Methods that need no token. Renewals are checked separately (:meth:`Users.renewal_refusal`)."""


def checks_renewals(version: tuple[int, ...]) -> bool:
    """Whether a renewal needs a token and a role for the lease's keys.

    See CVE-2026-33413.
    """
    return version >= (3, 6, 9) or (3, 5, 28) <= version < (3, 6) or (3, 4, 42) <= version < (3, 5)


_PERMISSIONS = re.compile(rb"permission denied|not permit|auth token")


def mentions_permissions(value: bytes) -> bool:
    """Whether a record gives a missing token or role as the cause of a failure. No record may."""
    return _PERMISSIONS.search(value) is not None


class Users:
    """One user. ``enabled``: requests need a token; ``denied``: the role is revoked."""

    def __init__(self, version: tuple[int, ...] = ()) -> None:
        self._checks_renewals = checks_renewals(version)
        self.enabled = False
        self.denied = False
        self._tokens: set[str] = set()
        self.refused = 0
        """Number of refused requests."""
        self._given = 0

    def authenticate(self) -> str:
        """Issue a new token."""
        self._given += 1
        token = f"token-{self._given}"
        self._tokens.add(token)
        return token

    def end_tokens(self) -> None:
        """Invalidate all tokens."""
        self._tokens.clear()

    def refusal(self, path: str, token: str) -> tuple[str, str] | None:
        """The status and text that refuse a request; None: it is admitted."""
        if not self.enabled or path in OPEN:
            return None
        if token in self._tokens and not (self.denied and path in NEEDS_ROLE):
            return None
        return self._refuse(token)

    def renewal_refusal(self, token: str, *, keys: bool) -> tuple[str, str] | None:
        """The status and text that refuse a renewal; None: it is admitted. ``keys``: the lease has keys."""
        if not self.enabled or not self._checks_renewals:
            return None
        if token in self._tokens and not (self.denied and keys):
            return None
        return self._refuse(token)

    def _refuse(self, token: str) -> tuple[str, str]:
        self.refused += 1
        return ("PERMISSION_DENIED", DENIED) if token in self._tokens else ("UNAUTHENTICATED", STALE)
