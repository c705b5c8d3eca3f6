"""JSON Web Tokens of callers: signed by an issuer whose keys come from a file or a URL of the access file.

A token never names where its key is: the headers ``jku``, ``x5u``, ``jwk`` and ``x5c`` are ignored. Only algorithms
with public keys are allowed, so a public key is never taken for the secret of an HMAC.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import re
import ssl
from collections import OrderedDict
from importlib.util import find_spec
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from distop.clock import time
from distop.errors import InvalidArgument, NotIdentified, ServiceUnavailable, describe
from distop.protocol.frozen import frozen
from distop.protocol.json_codec import loads
from distop.protocol.texts import shown
from distop.settings_file import read_trusted
from distop.store.tls_files import file_stamp

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

log = logging.getLogger("distop.service")

ALGORITHMS = ("RS256", "RS384", "RS512", "PS256", "PS384", "PS512", "ES256", "ES384", "ES512", "EdDSA")
"""The algorithms that an issuer may allow. None of them has a shared secret."""
DEFAULT_ALGORITHMS = ("RS256", "ES256")
LONGEST_TOKEN = 8 << 10
"""Maximum characters of a token."""
LEEWAY = 30.0
"""Seconds by which the clocks of the issuer and of the service may differ."""
FRESH = 300.0
"""Seconds after which keys of a URL are read again."""
KEPT = 3600.0
"""Seconds for which keys of a URL are used while it cannot be read."""
PAUSE = 10.0
"""Minimum seconds between two reads of a URL, whatever tokens callers send."""
LOOK_EVERY = 1.0
"""Seconds between two looks whether a file of keys has changed."""
FETCH_TIMEOUT = 5.0
"""Seconds for a URL to answer."""
MOST_BYTES = 1 << 20
"""Maximum bytes of a set of keys."""
MOST_KEYS = 100
MOST_VERIFIED = 10_000
"""Maximum tokens whose signature is remembered as valid."""
LEAST_RSA_BITS = 2048
LOOPBACK = ("127.0.0.1", "::1", "localhost")
_OF_CURVE: Mapping[str, str] = MappingProxyType({"P-256": "ES256", "P-384": "ES384", "P-521": "ES512"})
_REQUIRED = ("exp", "iss", "aud", "sub")
_URL = re.compile(r"[!-~]{1,1000}")


@frozen
class TokenIssuer:
    """Who signs tokens. ``issuer`` and ``audience``: the claims that a token needs. ``jwks``: the path or URL of keys.

    ``ca``: a PEM file of the authority that signed the URL's certificate; "": those of the system.
    """

    name: str
    issuer: str
    audience: str
    jwks: str
    algorithms: tuple[str, ...] = DEFAULT_ALGORITHMS
    ca: str = ""

    @property
    def is_remote(self) -> bool:
        """Whether the keys come from a URL."""
        return "://" in self.jwks


def issuer(name: str, data: Mapping[str, Any], place: str) -> TokenIssuer:
    """The issuer in a table of the access file. Raises InvalidArgument, which names the place."""
    known = {"issuer", "audience", "jwks", "algorithms", "ca"}
    if unknown := sorted(data.keys() - known):
        raise InvalidArgument(f"{place}: {shown(unknown[0])} is not one of {', '.join(sorted(known))}")
    texts = {one: data.get(one, "" if one == "ca" else None) for one in ("issuer", "audience", "jwks", "ca")}
    for key, value in texts.items():
        if not isinstance(value, str) or not (value or key == "ca"):
            raise InvalidArgument(f"{place} needs {key}, a text")
    algorithms = data.get("algorithms", list(DEFAULT_ALGORITHMS))
    if not isinstance(algorithms, list) or not algorithms or not all(one in ALGORITHMS for one in algorithms):
        raise InvalidArgument(f"{place}: algorithms must be a list of some of {', '.join(ALGORITHMS)}")
    if find_spec("jwt") is None:
        raise InvalidArgument(f"{place}: tokens of issuers need PyJWT: pip install 'distop[server]'")
    found = TokenIssuer(name, algorithms=tuple(algorithms), **texts)
    if found.is_remote:
        _check_url(found.jwks, place)
    return found


def _check_url(url: str, place: str) -> None:
    try:
        parts = urlsplit(url)
        host, port = parts.hostname or "", parts.port
    except ValueError:
        host, port = "", None
    if not host or not _URL.fullmatch(url) or port == 0 or "@" in parts.netloc or parts.fragment:
        raise InvalidArgument(f"{place}: jwks is no URL such as https://host/keys")
    if parts.scheme != "https" and not (parts.scheme == "http" and host in LOOPBACK):
        raise InvalidArgument(f"{place}: jwks must be a file or a URL with https: others could replace its keys")


# ------------------------------------------------------------------------ keys


@frozen
class VerificationKey:
    """A public key, and the algorithms that it may verify."""

    key: Any
    algorithms: frozenset[str]


def keys_of(data: object) -> dict[str, VerificationKey]:
    """The keys of a JSON Web Key Set by their id ("": none). Keys that cannot verify signatures are left out.

    Raises InvalidArgument if it is no such set.
    """
    listed = data.get("keys") if isinstance(data, dict) else None
    if not isinstance(listed, list) or len(listed) > MOST_KEYS:
        raise InvalidArgument(f"it is no JSON Web Key Set of at most {MOST_KEYS} keys")
    found: dict[str, VerificationKey] = {}
    for one in listed:
        key = _verification_key(one) if isinstance(one, dict) else None
        name = one.get("kid", "") if isinstance(one, dict) else ""
        if key is None or not isinstance(name, str):
            continue
        if name in found:
            raise InvalidArgument(f"two of its keys have the id {shown(name)}")
        found[name] = key
    if not found:
        raise InvalidArgument("it has no public key for signatures")
    return found


def _verification_key(data: Mapping[str, Any]) -> VerificationKey | None:
    import jwt

    uses, kind = data.get("key_ops"), data.get("kty")
    if data.get("use", "sig") != "sig" or (isinstance(uses, list) and "verify" not in uses) or "d" in data:
        return None
    if kind == "RSA":
        possible = frozenset(one for one in ALGORITHMS if one[:2] in ("RS", "PS"))
    elif kind == "EC":
        possible = frozenset({_OF_CURVE[data["crv"]]}) if data.get("crv") in _OF_CURVE else frozenset()
    else:
        possible = frozenset({"EdDSA"}) if kind == "OKP" else frozenset()
    if "alg" in data:
        possible &= {data["alg"]}
    if not possible:
        return None
    try:
        key = jwt.PyJWK.from_dict(dict(data), sorted(possible)[0]).key
    except (jwt.PyJWTError, ValueError, TypeError, AttributeError) as error:
        log.warning("A key of an issuer is left out: %s", describe(error))
        return None
    if kind == "RSA" and key.key_size < LEAST_RSA_BITS:
        log.warning("A key of an issuer is left out: it has fewer than %d bits", LEAST_RSA_BITS)
        return None
    return VerificationKey(key, possible)


class KeySet:
    """The keys of an issuer, cached."""

    def __init__(self, of: TokenIssuer) -> None:
        self.of = of
        self.keys: Mapping[str, VerificationKey] = {}
        self._read_at: float | None = None
        self._tried_at: float | None = None
        self._stamp: Any = None
        self._reading: asyncio.Task[None] | None = None

    @property
    def is_current(self) -> bool:
        """Whether keys were read, and not too long ago."""
        return self._read_at is not None and (not self.of.is_remote or time.monotonic() - self._read_at < KEPT)

    async def renew(self, kid: str) -> None:
        """Read the keys if they are old or lack this id. Returns at once if they were tried to be read just now."""
        now = time.monotonic()
        pause = PAUSE if self.of.is_remote else LOOK_EVERY
        if self._reading is None:
            is_known = self.is_current and kid in self.keys
            is_fresh = self.of.is_remote and self._read_at is not None and now - self._read_at < FRESH
            if (is_known and is_fresh) or (self._tried_at is not None and now - self._tried_at < pause):
                return
            self._reading = asyncio.create_task(self._read())
            if is_known and self.of.is_remote:
                return  # the present keys are good until then
        elif self.is_current and kid in self.keys:
            return
        await asyncio.shield(self._reading)

    async def _read(self) -> None:
        try:
            async with asyncio.timeout(FETCH_TIMEOUT):
                await self._load()
        except TimeoutError:
            log.error("Cannot read the keys of the issuer %s: no answer within %g s", self.of.name, FETCH_TIMEOUT)
        except (OSError, ValueError, InvalidArgument) as error:  # ValueError: a host that is no name
            log.error("Cannot read the keys of the issuer %s: %s", self.of.name, describe(error))
        finally:
            self._tried_at = time.monotonic()
            self._reading = None

    async def _load(self) -> None:
        if self.of.is_remote:
            data = await fetched(self.of.jwks, self.of.ca)
        else:
            if (stamp := file_stamp(self.of.jwks)) == self._stamp and self.keys:
                return
            data = read_trusted(Path(self.of.jwks), "the file of keys")
            self._stamp = stamp
        if len(data) > MOST_BYTES:
            raise InvalidArgument(f"it has more than {MOST_BYTES} bytes")
        try:
            content = loads(data)
        except (ValueError, RecursionError):
            raise InvalidArgument("it is not valid JSON") from None
        # Unchanged keys stay the same objects, so that verified tokens stay verified.
        found = keys_of(content)
        self.keys = {kid: self._same(kid, key) for kid, key in found.items()}
        self._read_at = time.monotonic()

    def _same(self, kid: str, key: VerificationKey) -> VerificationKey:
        former = self.keys.get(kid)
        return former if former is not None and former.algorithms == key.algorithms and former.key == key.key else key


async def fetched(url: str, ca: str = "") -> bytes:
    """The body of a URL. It uses no proxy, and follows no redirect. Raises OSError, InvalidArgument."""
    import h11

    parts = urlsplit(url)
    host, secure = parts.hostname or "", parts.scheme == "https"
    context = ssl.create_default_context(cafile=ca or None) if secure else None
    reader, writer = await asyncio.open_connection(host, parts.port or (443 if secure else 80), ssl=context)
    try:
        connection, body = h11.Connection(h11.CLIENT), bytearray()
        target = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
        headers = [("Host", parts.netloc), ("Accept", "application/json"), ("Connection", "close")]
        request = h11.Request(method="GET", target=target, headers=headers)
        writer.write((connection.send(request) or b"") + (connection.send(h11.EndOfMessage()) or b""))
        while True:
            event = connection.next_event()
            if event is h11.NEED_DATA:
                connection.receive_data(await reader.read(64 << 10))
            elif isinstance(event, h11.Response) and event.status_code != 200:
                raise InvalidArgument(f"the URL answers with the status {event.status_code}")
            elif isinstance(event, h11.Data):
                body += event.data
                if len(body) > MOST_BYTES:
                    raise InvalidArgument(f"the answer has more than {MOST_BYTES} bytes")
            elif isinstance(event, h11.EndOfMessage):
                return bytes(body)
            elif not isinstance(event, h11.Response | h11.InformationalResponse):
                raise InvalidArgument("the URL has sent no whole answer")
    except h11.ProtocolError:
        raise InvalidArgument("the URL does not answer in HTTP") from None
    finally:
        writer.close()


# ---------------------------------------------------------------------- tokens


@frozen
class _Verified:
    """A token with a valid signature. ``until``: when it expires."""

    of: TokenIssuer
    key: VerificationKey
    kid: str
    subject: str
    until: float


class TokenVerifier:
    """Verifies the tokens of these issuers."""

    def __init__(self) -> None:
        self._sets: dict[str, KeySet] = {}
        self._verified: OrderedDict[bytes, _Verified] = OrderedDict()

    async def renew(self, issuers: Sequence[TokenIssuer], token: str) -> None:
        """Read the keys that this token may need. Does nothing for a token that no issuer could have made."""
        for name in self._sets.keys() - {one.name for one in issuers}:
            del self._sets[name]
        if (named := _named(issuers, token)) is not None:
            found, header = named
            await self._set(found).renew(header["kid"])

    def _set(self, of: TokenIssuer) -> KeySet:
        if (known := self._sets.get(of.name)) is None or known.of != of:
            known = self._sets[of.name] = KeySet(of)
        return known

    def subject(self, issuers: Sequence[TokenIssuer], token: str) -> tuple[str, str]:
        """The name of the issuer and the subject of a token. Raises NotIdentified; ServiceUnavailable without keys."""
        digest = hashlib.sha256(token.encode(errors="replace")).digest()
        if (known := self._verified.get(digest)) is not None:
            current = self._set(known.of)
            is_same = known.of in issuers and current.is_current and current.keys.get(known.kid) is known.key
            if is_same and time.time() < known.until:
                return known.of.name, known.subject
            del self._verified[digest]
        named = _named(issuers, token)
        if named is None:
            raise NotIdentified("the token is no JSON Web Token of an issuer of the service")
        of, header = named
        found = self._verify(of, header, token)
        self._verified[digest] = found
        while len(self._verified) > MOST_VERIFIED:
            self._verified.popitem(last=False)
        return of.name, found.subject

    def _verify(self, of: TokenIssuer, header: Mapping[str, Any], token: str) -> _Verified:
        import jwt

        current = self._set(of)
        if not current.is_current:
            raise ServiceUnavailable(f"the service cannot read the keys of the issuer {of.name}: call again later")
        kid, algorithm = header["kid"], header.get("alg")
        if not kid and len(current.keys) == 1:
            kid = next(iter(current.keys))
        key = current.keys.get(kid)
        if key is None:
            raise NotIdentified(f"the issuer {of.name} has no key with the id of the token")
        if algorithm not in of.algorithms or algorithm not in key.algorithms:
            raise NotIdentified(f"the algorithm of the token is not one that its key and the issuer {of.name} allow")
        try:
            claims = jwt.decode(
                token,
                key.key,
                algorithms=[algorithm],
                audience=of.audience,
                issuer=of.issuer,
                leeway=LEEWAY,
                options={"require": list(_REQUIRED)},
            )
        except (jwt.PyJWTError, ValueError, TypeError, RecursionError, OverflowError) as error:
            raise NotIdentified(f"the token is not valid: {_why(error)}") from None
        subject = claims["sub"]
        if not isinstance(subject, str) or not subject:
            raise NotIdentified("the token has no subject")
        return _Verified(of, key, kid, subject, float(claims["exp"]) + LEEWAY)


def _why(error: Exception) -> str:
    import jwt

    words: dict[type[Exception], str] = {
        jwt.ExpiredSignatureError: "it has expired",
        jwt.ImmatureSignatureError: "it is not valid yet",
        jwt.InvalidAudienceError: "it has another audience",
        jwt.InvalidSignatureError: "its signature is wrong",
        jwt.MissingRequiredClaimError: f"it needs the claims {', '.join(_REQUIRED)}",
    }
    return next((text for kind, text in words.items() if isinstance(error, kind)), "it cannot be read")


def _named(issuers: Sequence[TokenIssuer], token: str) -> tuple[TokenIssuer, dict[str, Any]] | None:
    """The issuer that a token names, and its header with a ``kid``; None for other tokens. Nothing is verified."""
    import jwt

    if not issuers or len(token) > LONGEST_TOKEN or token.count(".") != 2 or not token.isascii():
        return None
    try:
        header = jwt.get_unverified_header(token)
        claims = jwt.decode(token, options={"verify_signature": False})
    except (jwt.PyJWTError, ValueError, TypeError, RecursionError, OverflowError):
        return None
    kid = header.get("kid", "")
    if "crit" in header or not isinstance(kid, str):
        return None
    found = next((one for one in issuers if one.issuer == claims.get("iss")), None)
    return None if found is None else (found, {**header, "kid": kid})
