"""Users of a simulated etcd, as far as clients see them: tokens that end, and a role that is taken away for a while."""

from __future__ import annotations

import re

DENIED = "etcdserver: permission denied"
STALE = "etcdserver: invalid auth token"
NEEDS_ROLE = frozenset({"/etcdserverpb.KV/Txn", "/etcdserverpb.KV/Range"})
"""What always looks at keys. (A lease can be granted and renewed without a role, and revoked while it has no key.)"""
OPEN = frozenset({"/etcdserverpb.Auth/Authenticate", "/etcdserverpb.Lease/LeaseKeepAlive"})
"""What is answered without a token."""


_TOLD = re.compile(rb"permission denied|not permit|auth token")


def tells_of_users(value: bytes) -> bool:
    """A record says that something failed for want of a token or of a role: no record may."""
    return _TOLD.search(value) is not None


class Users:
    """One user. ``enabled``: requests need a token; ``denied``: its role is taken away."""

    def __init__(self) -> None:
        self.enabled = False
        self.denied = False
        self._tokens: set[str] = set()
        self.refused = 0
        """Requests that were."""
        self._given = 0

    def authenticate(self) -> str:
        """A new token."""
        self._given += 1
        token = f"token-{self._given}"
        self._tokens.add(token)
        return token

    def end_tokens(self) -> None:
        """Whoever has one needs another."""
        self._tokens.clear()

    def refusal(self, path: str, token: str) -> tuple[str, str] | None:
        """How a request is refused; None: it is not."""
        if not self.enabled or path in OPEN:
            return None
        if token in self._tokens and not (self.denied and path in NEEDS_ROLE):
            return None
        self.refused += 1
        return ("PERMISSION_DENIED", DENIED) if token in self._tokens else ("UNAUTHENTICATED", STALE)
