"""Who may call what: identities, roles, and the permission that each call needs. Pure, but for the reading of the file.

The default is to deny. A role is granted for operation types and tables, in the file of the setting ``access``:

    [identities.etl]
    token_sha256 = ["…"]              # of bearer tokens
    certificates = ["CN=etl"]         # of client certificates: the subject's common name, or a SAN (DNS:…, URI:…)
    subjects = ["corp:etl"]           # of JSON Web Tokens: the name of the issuer, and the subject
    calls_per_second = 50
    open_operations = 100
    open_jobs = 10000
    argument_bytes = 65536

    [issuers.corp]
    issuer = "https://login.example.com"
    audience = "distop"
    jwks = "https://login.example.com/keys"     # or a file
    algorithms = ["RS256"]

    [[grants]]
    to = ["etl"]
    role = "submitter"
    tables = ["sales.*"]              # absent: all tables, and what belongs to none
    types = ["validate", "compact"]   # absent: all types
"""

from __future__ import annotations

import hashlib
import hmac
import re
import tomllib
from enum import StrEnum
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from distop.errors import InvalidArgument
from distop.protocol.executor_nodes import Serves, refusal
from distop.protocol.frozen import frozen
from distop.protocol.texts import one_line, shown
from distop.server.json_web_tokens import TokenIssuer, issuer

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

SHORTEST_TOKEN = 20
"""Minimum characters of a bearer token: a shorter one can be guessed by its hash."""
LARGEST_LIMIT = 1 << 40
"""Maximum value of a limit of an identity."""
_DIGEST = re.compile(r"[0-9a-f]{64}")
_ISSUER = re.compile(r"[A-Za-z0-9_-]{1,100}")


class CallerRole(StrEnum):
    """What an identity may do to the tables and types of a grant. Each role includes VIEWER."""

    VIEWER = "viewer"
    """Read operations, jobs, reports, nodes, tables and policies."""
    SUBMITTER = "submitter"
    """Start, prepare, confirm and abandon operations, claim jobs, emit events."""
    OPERATOR = "operator"
    """Change open operations (cancel, pause, alter), rerun ended ones, drain executors."""
    ADMIN = "admin"
    """All of these; change tables, types and policies, and name another submitter."""


INCLUDED: Mapping[CallerRole, frozenset[CallerRole]] = MappingProxyType(
    {
        CallerRole.VIEWER: frozenset({CallerRole.VIEWER}),
        CallerRole.SUBMITTER: frozenset({CallerRole.VIEWER, CallerRole.SUBMITTER}),
        CallerRole.OPERATOR: frozenset({CallerRole.VIEWER, CallerRole.OPERATOR}),
        CallerRole.ADMIN: frozenset(CallerRole),
    }
)


@frozen
class CallScope:
    """What a call concerns. None: everything, or nothing that has a type or a table."""

    type: str | None = None
    table: str | None = None
    role: CallerRole | None = None
    """The role that is needed for it; None: the call's."""


EVERYTHING = CallScope()


@frozen
class RoleGrant:
    """A role for some types and tables."""

    to: frozenset[str]
    role: CallerRole
    limits: Serves

    def permits(self, role: CallerRole, scope: CallScope) -> bool:
        """Whether it permits what needs this role for this scope."""
        if role not in INCLUDED[self.role]:
            return False
        if scope.table is None and self.limits.tables is not None:
            return False
        if scope.type is None and self.limits.types is not None and role is not CallerRole.VIEWER:
            return False
        if scope.type is not None and self.limits.types is not None and scope.type not in self.limits.types:
            return False
        # Without the type: executors serve joins on all tables, which callers must not see or cancel.
        return not refusal(self.limits, None, () if scope.table is None else (scope.table,))


@frozen
class CallerIdentity:
    """A caller. ``subjects``: of JSON Web Tokens, with the names of their issuers. A limit of 0: none."""

    name: str
    tokens: frozenset[str] = frozenset()
    certificates: frozenset[str] = frozenset()
    subjects: frozenset[tuple[str, str]] = frozenset()
    calls_per_second: float = 0.0
    open_operations: int = 0
    open_jobs: int = 0
    argument_bytes: int = 0


@frozen
class ServiceAccess:
    """The content of the file. Without identities nobody is identified, and everything is permitted."""

    identities: tuple[CallerIdentity, ...] = ()
    grants: tuple[RoleGrant, ...] = ()
    issuers: tuple[TokenIssuer, ...] = ()

    @property
    def identifies(self) -> bool:
        """Whether callers are identified."""
        return bool(self.identities)

    def identity(self, token: str | None, certificates: Sequence[str]) -> CallerIdentity | None:
        """The caller with this bearer token, or with one of these names in its certificate; None: unknown."""
        if token is not None:
            digest = hashlib.sha256(token.encode(errors="replace")).hexdigest()
            found = [one for one in self.identities for own in one.tokens if hmac.compare_digest(own, digest)]
            return found[0] if found else None
        names = set(certificates)
        return next((one for one in self.identities if one.certificates & names), None)

    def of_subject(self, issuer_name: str, subject: str) -> CallerIdentity | None:
        """The identity that this issuer's tokens with this subject have; None: unknown."""
        return next((one for one in self.identities if (issuer_name, subject) in one.subjects), None)

    def permits(self, identity: CallerIdentity | None, role: CallerRole, scope: CallScope) -> bool:
        """Whether a caller may do what needs this role for this scope."""
        if not self.identifies:
            return True
        if identity is None:
            return False
        return any(identity.name in one.to and one.permits(role, scope) for one in self.grants)

    def has_role(self, identity: CallerIdentity | None, role: CallerRole) -> bool:
        """Whether a caller has this role for anything."""
        if not self.identifies:
            return True
        return identity is not None and any(identity.name in g.to and role in INCLUDED[g.role] for g in self.grants)


UNRESTRICTED = ServiceAccess()
"""The access of a service that identifies nobody."""


def parse(text: str, path: str) -> ServiceAccess:
    """The access in a file. Raises InvalidArgument, which names the file and the place."""
    try:
        data = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise InvalidArgument(f"{path} is not valid TOML: {error}") from None
    _known(data, {"identities", "grants", "issuers"}, path)
    named, listed = data.get("identities", {}), data.get("grants", [])
    if not isinstance(named, dict) or not all(isinstance(one, dict) for one in named.values()):
        raise InvalidArgument(f"{path}: identities must be tables, such as [identities.etl]")
    if not isinstance(listed, list) or not all(isinstance(one, dict) for one in listed):
        raise InvalidArgument(f"{path}: grants must be tables: [[grants]]")
    issuers = _issuers(data.get("issuers", {}), path)
    known = frozenset(one.name for one in issuers)
    identities = tuple(_identity(name, one, known, path) for name, one in named.items())
    if not identities:
        raise InvalidArgument(f"{path} has no identities: add one, or leave the setting out")
    _check_unique(identities, path)
    names = {one.name for one in identities}
    grants = tuple(_grant(one, names, f"{path}: grant {n}") for n, one in enumerate(listed, 1))
    return ServiceAccess(identities, grants, issuers)


def _issuers(data: object, path: str) -> tuple[TokenIssuer, ...]:
    if not isinstance(data, dict) or not all(isinstance(one, dict) for one in data.values()):
        raise InvalidArgument(f"{path}: issuers must be tables, such as [issuers.corp]")
    for name in data:
        if not _ISSUER.fullmatch(name):
            raise InvalidArgument(f"{path}: issuer {shown(name)}: a name has 1 to 100 letters, digits, - and _")
    found = tuple(issuer(name, one, f"{path}: issuer {name}") for name, one in data.items())
    if len({one.issuer for one in found}) < len(found):
        raise InvalidArgument(f"{path}: two issuers have the same claim `issuer`")
    return found


def _identity(name: str, data: Mapping[str, Any], issuers: frozenset[str], path: str) -> CallerIdentity:
    place = f"{path}: identity {shown(name)}"
    limits = ("open_operations", "open_jobs", "argument_bytes")
    _known(data, {"token_sha256", "certificates", "subjects", "calls_per_second", *limits}, place)
    if not name or one_line(name) != name or len(name) > 200:
        raise InvalidArgument(f"{place}: a name has 1 to 200 printable characters")
    tokens, certificates = _texts(data, "token_sha256", place), _texts(data, "certificates", place)
    for one in tokens:
        if not _DIGEST.fullmatch(one):
            raise InvalidArgument(f"{place}: token_sha256 has SHA-256 digests of tokens, of 64 hexadecimal digits")
    subjects = frozenset(_subject(one, issuers, place) for one in _texts(data, "subjects", place))
    if not tokens and not certificates and not subjects:
        raise InvalidArgument(f"{place} has neither token_sha256 nor certificates nor subjects: nobody could be it")
    rate = data.get("calls_per_second", 0)
    if isinstance(rate, bool) or not isinstance(rate, int | float) or not 0 <= rate <= 1_000_000:
        raise InvalidArgument(f"{place}: calls_per_second must be a number from 0 to a million, not {shown(rate)}")
    numbers = [_limit(data, one, place) for one in limits]
    return CallerIdentity(name, frozenset(tokens), frozenset(certificates), subjects, float(rate), *numbers)


def _subject(text: str, issuers: frozenset[str], place: str) -> tuple[str, str]:
    name, _, subject = text.partition(":")
    if name not in issuers or not subject:
        raise InvalidArgument(f"{place}: the subject {shown(text)} must be ISSUER:SUBJECT, of one of the issuers")
    return name, subject


def _limit(data: Mapping[str, Any], name: str, place: str) -> int:
    value = data.get(name, 0)
    if name in data and (isinstance(value, bool) or not isinstance(value, int) or not 0 < value <= LARGEST_LIMIT):
        raise InvalidArgument(
            f"{place}: {name} must be a whole number above 0, not {shown(value)}: leave it out for none"
        )
    return int(value)


def _check_unique(identities: Iterable[CallerIdentity], path: str) -> None:
    """Raises InvalidArgument if a token or a certificate belongs to two identities."""
    owners: dict[str, str] = {}
    for one in identities:
        for credential in (*one.tokens, *one.certificates, *(":".join(one) for one in one.subjects)):
            if owners.setdefault(credential, one.name) != one.name:
                raise InvalidArgument(
                    f"{path}: the identities {shown(owners[credential])} and {shown(one.name)} have the same token or "
                    "certificate or subject"
                )


def _grant(data: Mapping[str, Any], names: set[str], place: str) -> RoleGrant:
    _known(data, {"to", "role", "tables", "types"}, place)
    to = _texts(data, "to", place)
    if unknown := [one for one in to if one not in names]:
        raise InvalidArgument(f"{place}: {shown(unknown[0])} is not one of the identities")
    if not to:
        raise InvalidArgument(f"{place} is to nobody: name identities in `to`")
    try:
        role = CallerRole(str(data.get("role")))
    except ValueError:
        raise InvalidArgument(
            f"{place}: role must be one of {', '.join(CallerRole)}, not {shown(data.get('role'))}"
        ) from None
    limits = {name: _texts(data, name, place) for name in ("tables", "types") if name in data}
    if any(not found for found in limits.values()):
        raise InvalidArgument(f"{place}: an empty list grants nothing: leave `tables` or `types` out for all of them")
    if bad := [one for one in limits.get("tables", ()) if "*" in one and not re.fullmatch(r"[^*]+\.\*", one)]:
        raise InvalidArgument(f"{place}: {shown(bad[0])} is neither a table's name nor a prefix such as sales.*")
    return RoleGrant(frozenset(to), role, Serves.from_json(limits))


def _known(data: Mapping[str, Any], names: set[str], place: str) -> None:
    if unknown := sorted(data.keys() - names):
        raise InvalidArgument(f"{place}: {shown(unknown[0])} is not one of {', '.join(sorted(names))}")


def _texts(data: Mapping[str, Any], name: str, place: str) -> tuple[str, ...]:
    found = data.get(name, [])
    if not isinstance(found, list) or not all(isinstance(one, str) and one for one in found):
        raise InvalidArgument(f"{place}: {name} must be a list of texts")
    return tuple(found)
