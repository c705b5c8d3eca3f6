"""JSON Web Tokens: whom they identify, which ones are refused, and when the keys of an issuer are read."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import hmac
import json
import ssl
import time
from typing import TYPE_CHECKING, Any

import jwt
import pytest
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa

from distop.errors import InvalidArgument, NotIdentified, ServiceUnavailable
from distop.server import json_web_tokens
from distop.server.access import ServiceAccess, parse
from distop.server.call_admission import AccessFile, CallAdmission, CallerCredentials
from distop.server.json_web_tokens import keys_of
from tests.support.certificates import make_certificates

if TYPE_CHECKING:
    from pathlib import Path

RSA = rsa.generate_private_key(65537, 2048)
OTHER = rsa.generate_private_key(65537, 2048)
CURVE = ec.generate_private_key(ec.SECP256R1())
ISSUER, AUDIENCE = "https://login.example.com", "distop"


def public(key: Any, kid: str | None = "k1", **more: Any) -> dict[str, Any]:
    """The key in a key set."""
    kinds = {rsa.RSAPrivateKey: jwt.algorithms.RSAAlgorithm, ec.EllipticCurvePrivateKey: jwt.algorithms.ECAlgorithm}
    kind = next((found for one, found in kinds.items() if isinstance(key, one)), jwt.algorithms.OKPAlgorithm)
    found = kind.to_jwk(key.public_key(), as_dict=True)
    return {**found, **({} if kid is None else {"kid": kid}), **more}


def claims(**more: Any) -> dict[str, Any]:
    found = {"iss": ISSUER, "aud": AUDIENCE, "sub": "robot", "exp": time.time() + 600, **more}
    return {name: value for name, value in found.items() if value is not None}


def signed(key: Any = RSA, algorithm: str = "RS256", headers: Any = None, **more: Any) -> str:
    return jwt.encode(claims(**more), key, algorithm, headers={"kid": "k1"} if headers is None else headers)


def file_of(jwks: str, algorithms: str = '["RS256", "ES256"]') -> str:
    return f"""
[issuers.corp]
issuer = "{ISSUER}"
audience = "{AUDIENCE}"
jwks = "{jwks}"
algorithms = {algorithms}
[identities.etl]
subjects = ["corp:robot"]
[identities.file]
token_sha256 = ["{hashlib.sha256(b"a.token.with.dots.in.a.file").hexdigest()}"]
[[grants]]
to = ["etl", "file"]
role = "viewer"
"""


class Keys:
    """A file of keys, and the admission of a service that trusts it."""

    def __init__(self, folder: Path, *keys: dict[str, Any], **options: Any) -> None:
        self.jwks, access = folder / "jwks.json", folder / "access.toml"
        self.write(*keys)
        access.write_text(file_of(str(self.jwks), **options))
        self.admission = CallAdmission(AccessFile(access))

    def write(self, *keys: dict[str, Any]) -> None:
        self.jwks.write_text(json.dumps({"keys": keys}))

    async def identity(self, token: str) -> str:
        return await identity(self.admission, token)


async def identity(admission: CallAdmission, token: str) -> str:
    """Whom a token identifies. Raises NotIdentified."""
    credentials = CallerCredentials(token)
    await admission.renew_keys(credentials)
    admission.check_identity("Tables/List", credentials)
    with admission.admit("Tables/List", None, credentials):
        found = admission._identify(admission._access(), credentials)
    assert found is not None
    return found.name


@pytest.fixture
def keys(tmp_path: Path) -> Keys:
    return Keys(tmp_path, public(RSA), public(CURVE, "curve"))


async def test_a_valid_token_identifies_its_subject(keys: Keys) -> None:
    assert await keys.identity(signed()) == "etl"
    assert await keys.identity(signed(aud=["other", AUDIENCE], nbf=time.time() - 5)) == "etl"
    assert await keys.identity(signed(CURVE, "ES256", {"kid": "curve"})) == "etl"
    assert await keys.identity("a.token.with.dots.in.a.file") == "file"


def hmac_of_the_public_key() -> str:
    """A token whose HMAC has the public key as its secret, which PyJWT itself refuses to make."""
    from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

    def text(data: bytes) -> str:
        return base64.urlsafe_b64encode(data).rstrip(b"=").decode()

    secret = RSA.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
    head = text(json.dumps({"alg": "HS256", "kid": "k1"}).encode()) + "." + text(json.dumps(claims()).encode())
    return f"{head}.{text(hmac.digest(secret, head.encode(), 'sha256'))}"


@pytest.mark.parametrize(
    ("token", "words"),
    [
        (lambda: signed(exp=time.time() - 60), "it has expired"),
        (lambda: signed(nbf=time.time() + 60), "not valid yet"),
        (lambda: signed(iat=time.time() + 600), "not valid yet"),
        (lambda: signed(aud="other"), "another audience"),
        (lambda: signed(iss="https://evil.example"), "no JSON Web Token of an issuer"),
        (lambda: signed(exp=None), "needs the claims"),
        (lambda: signed(aud=None), "needs the claims|another audience"),
        (lambda: signed(sub=None), "needs the claims"),
        (lambda: signed(sub=""), "no subject"),
        (lambda: signed(sub="somebody"), "belongs to no identity"),
        (lambda: signed(OTHER), "signature is wrong"),
        (lambda: signed(headers={"kid": "curve"}), "algorithm of the token"),
        (lambda: signed(RSA, "RS512"), "algorithm of the token"),
        (lambda: signed(RSA, "PS256"), "algorithm of the token"),
        (lambda: jwt.encode(claims(), None, "none", headers={"kid": "k1"}), "algorithm of the token"),
        (hmac_of_the_public_key, "algorithm of the token"),
        (lambda: jwt.encode(claims(), "s" * 64, "HS256", headers={"kid": "k1"}), "algorithm of the token"),
        (lambda: signed(headers={"kid": "other"}), "no key with the id"),
        (lambda: signed(headers={}), "no key with the id"),
        (lambda: signed(headers={"kid": "k1", "crit": ["x"]}), "no JSON Web Token of an issuer"),
        (lambda: signed() + "x" * 10_000, "no JSON Web Token of an issuer"),
        (lambda: signed()[:-40], "signature is wrong|no JSON Web Token"),
        (lambda: "a" * 10 + "." + "b" * 10 + ".c", "no JSON Web Token of an issuer"),
        (lambda: "[" * 3_000 + "." + "[" * 3_000 + ".c", "no JSON Web Token of an issuer"),
    ],
)
async def test_a_token_that_is_not_valid_identifies_nobody(keys: Keys, token: Any, words: str) -> None:
    with pytest.raises(NotIdentified, match=words) as caught:
        await keys.identity(token())
    assert ISSUER not in str(caught.value)


async def test_a_token_does_not_name_its_own_key(keys: Keys, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    async def fetched(url: str, ca: str = "") -> bytes:
        asked.append(url)
        return json.dumps({"keys": [public(OTHER, "evil")]}).encode()

    monkeypatch.setattr(json_web_tokens, "fetched", fetched)
    for name, value in (
        ("jku", "https://evil.example/keys"),
        ("x5u", "https://evil.example/x"),
        ("jwk", public(OTHER, "evil")),
        ("x5c", ["MIIB"]),
    ):
        for kid in ("evil", "k1"):
            with pytest.raises(NotIdentified):
                await keys.identity(signed(OTHER, headers={"kid": kid, name: value}))
    assert asked == []


async def test_a_token_that_has_expired_since_identifies_nobody(keys: Keys, monkeypatch: pytest.MonkeyPatch) -> None:
    token = signed()
    assert await keys.identity(token) == "etl"
    monkeypatch.setattr("distop.clock.time.time", lambda: time.time() + 3_600)
    monkeypatch.setattr(json_web_tokens, "LEEWAY", -3_600)
    with pytest.raises(NotIdentified, match="has expired"):
        await keys.identity(token)


async def test_a_key_that_was_removed_identifies_nobody(keys: Keys, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(json_web_tokens, "LOOK_EVERY", 0.0)
    token = signed()
    assert await keys.identity(token) == "etl"
    keys.write(public(OTHER))
    with pytest.raises(NotIdentified, match="signature is wrong"):
        await keys.identity(token)
    keys.jwks.write_text("nonsense")  # the last good keys stay
    assert await keys.identity(signed(OTHER)) == "etl"


async def test_one_key_without_an_id_verifies_tokens_without_one(tmp_path: Path) -> None:
    keys = Keys(tmp_path, public(RSA, None))
    assert await keys.identity(signed(headers={})) == "etl"


async def test_a_service_without_keys_answers_later(tmp_path: Path) -> None:
    keys = Keys(tmp_path)
    with pytest.raises(ServiceUnavailable, match="cannot read the keys of the issuer corp"):
        await keys.identity(signed())


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ([], "no JSON Web Key Set"),
        ({"keys": 5}, "no JSON Web Key Set"),
        ({"keys": [public(RSA)] * 101}, "at most 100 keys"),
        ({"keys": [public(RSA), public(OTHER)]}, "two of its keys have the id 'k1'"),
        ({"keys": []}, "no public key for signatures"),
        ({"keys": [{"kty": "oct", "k": "c2VjcmV0", "kid": "k1"}]}, "no public key for signatures"),
        ({"keys": [public(RSA, use="enc")]}, "no public key for signatures"),
        ({"keys": [public(RSA, key_ops=["encrypt"])]}, "no public key for signatures"),
        ({"keys": [public(RSA, alg="HS256")]}, "no public key for signatures"),
        ({"keys": [public(rsa.generate_private_key(65537, 1024))]}, "no public key for signatures"),
        ({"keys": [{**public(RSA), "n": "%"}, 5, {"kid": []}]}, "no public key for signatures"),
        ({"keys": [jwt.algorithms.RSAAlgorithm.to_jwk(RSA, as_dict=True)]}, "no public key for signatures"),
    ],
)
def test_a_wrong_key_set_is_refused(content: Any, words: str) -> None:
    with pytest.raises(InvalidArgument, match=words):
        keys_of(content)


def test_a_key_verifies_the_algorithms_of_its_kind_only() -> None:
    content = {
        "keys": [public(RSA, alg="PS256"), public(CURVE, "c"), public(ed25519.Ed25519PrivateKey.generate(), "e")]
    }
    assert {kid: set(key.algorithms) for kid, key in keys_of(content).items()} == {
        "k1": {"PS256"},
        "c": {"ES256"},
        "e": {"EdDSA"},
    }


# ------------------------------------------------------------------------- URLs


class Issuer:
    """A server of keys. ``answer``: the bytes of its next answers."""

    def __init__(self) -> None:
        self.reads = 0
        self.url = ""
        self.answer = b""
        self.serve(public(RSA))

    def serve(self, *keys: dict[str, Any]) -> None:
        body = json.dumps({"keys": keys}).encode()
        self.answer = b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(body) + body

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        self.reads += 1
        writer.write(self.answer)
        if self.answer:
            writer.close()

    async def start(self) -> asyncio.Server:
        server = await asyncio.start_server(self._answer, "127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/keys"
        return server


@pytest.fixture
async def remote() -> Any:
    found = Issuer()
    async with await found.start():
        yield found


@pytest.fixture
def guarded(tmp_path: Path, remote: Issuer) -> CallAdmission:
    access = tmp_path / "access.toml"
    access.write_text(file_of(remote.url))
    return CallAdmission(AccessFile(access))


async def test_keys_of_a_url_are_read_once(guarded: CallAdmission, remote: Issuer) -> None:
    assert await asyncio.gather(*(identity(guarded, signed()) for _ in range(20))) == ["etl"] * 20
    for n in range(50):
        with pytest.raises(NotIdentified):
            await identity(guarded, signed(headers={"kid": f"unknown {n}"}))
        with pytest.raises(NotIdentified):
            await identity(guarded, "no token of an issuer at all")
    assert remote.reads == 1


async def test_an_unknown_key_is_looked_up_after_a_pause(
    guarded: CallAdmission, remote: Issuer, monkeypatch: pytest.MonkeyPatch
) -> None:
    await identity(guarded, signed())
    remote.serve(public(RSA), public(OTHER, "k2"))
    with pytest.raises(NotIdentified, match="no key with the id"):
        await identity(guarded, signed(OTHER, headers={"kid": "k2"}))
    monkeypatch.setattr(json_web_tokens, "PAUSE", 0.0)
    assert await identity(guarded, signed(OTHER, headers={"kid": "k2"})) == "etl"
    assert remote.reads == 2


async def test_keys_are_used_for_a_time_while_the_url_fails(
    guarded: CallAdmission, remote: Issuer, monkeypatch: pytest.MonkeyPatch
) -> None:
    await identity(guarded, signed())
    remote.answer = b"HTTP/1.1 500 Oh\r\n\r\n"
    for name in ("PAUSE", "FRESH"):
        monkeypatch.setattr(json_web_tokens, name, 0.0)
    assert await identity(guarded, signed()) == "etl"
    monkeypatch.setattr(json_web_tokens, "KEPT", 0.0)
    with pytest.raises(ServiceUnavailable, match="cannot read the keys"):
        await identity(guarded, signed())


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (b"", "no answer within 0.05 s"),
        (b"HTTP/1.1 302 Found\r\nLocation: http://127.0.0.1:1/\r\n\r\n", "the status 302"),
        (b"nonsense", "does not answer in HTTP"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nshort", "does not answer in HTTP|no whole answer"),
        (b"HTTP/1.1 200 OK\r\n\r\n" + b" " * 200, "more than 100 bytes"),
        (b"HTTP/1.1 200 OK\r\n\r\n{", "not valid JSON"),
    ],
)
async def test_a_url_that_misbehaves_is_logged(
    guarded: CallAdmission,
    remote: Issuer,
    answer: bytes,
    words: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    import re

    remote.answer = answer
    monkeypatch.setattr(json_web_tokens, "FETCH_TIMEOUT", 0.05 if not answer else 30.0)
    monkeypatch.setattr(json_web_tokens, "MOST_BYTES", 100)
    with pytest.raises(ServiceUnavailable):
        await identity(guarded, signed())
    assert re.search(words, caplog.text), caplog.text


@pytest.mark.parametrize("trusted", [True, False])
async def test_a_url_with_tls_is_read_if_its_authority_is_trusted(
    tmp_path: Path, trusted: bool, caplog: pytest.LogCaptureFixture
) -> None:
    certificates, found = make_certificates(tmp_path), Issuer()
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(certificates.server_cert, certificates.server_key)
    async with await asyncio.start_server(found._answer, "127.0.0.1", 0, ssl=context) as server:
        url = f"https://127.0.0.1:{server.sockets[0].getsockname()[1]}/keys"
        ca = certificates.ca if trusted else certificates.other_ca
        (tmp_path / "access.toml").write_text(
            file_of(url).replace("[identities.etl]", f'ca = "{ca}"\n[identities.etl]')
        )
        admission = CallAdmission(AccessFile(tmp_path / "access.toml"))
        if trusted:
            assert await identity(admission, signed()) == "etl"
        else:
            with pytest.raises(ServiceUnavailable):
                await identity(admission, signed())
            assert "CERTIFICATE_VERIFY_FAILED" in caplog.text


# ------------------------------------------------------------------ access file


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("issuers = 5", "issuers must be tables"),
        ("[issuers.corp]\nissuer = 'a'", "issuer corp needs audience"),
        ("[issuers.corp]\nissuer = 'a'\naudience = 'b'\njwks = 'c'\nsecret = 'd'", "'secret' is not one of"),
        ("[issuers.'a b']\nissuer = 'a'", "a name has 1 to 100 letters"),
        (file_of("http://login.example.com/keys"), "a file or a URL with https"),
        (file_of("https://user@login.example.com/keys"), "no URL such as"),
        (file_of("https://"), "no URL such as"),
        (file_of("https://a:0/"), "no URL such as"),
        (file_of("https://a:x/"), "no URL such as"),
        (file_of("keys", '["none"]'), "algorithms must be a list of some of RS256"),
        (file_of("keys", '["HS256"]'), "algorithms must be a list of some of RS256"),
        (file_of("keys", "[]"), "algorithms must be a list of some of RS256"),
        (file_of("keys", '"RS256"'), "algorithms must be a list of some of RS256"),
        (file_of("keys").replace("corp:robot", "other:robot"), "'other:robot' must be ISSUER:SUBJECT"),
        (file_of("keys").replace("corp:robot", "corp:"), "'corp:' must be ISSUER:SUBJECT"),
        (file_of("keys") + f"[issuers.b]\nissuer = '{ISSUER}'\naudience = 'x'\njwks = 'y'", "have the same claim"),
        (
            file_of("keys") + "[identities.b]\nsubjects = ['corp:robot']",
            "have the same token or certificate or subject",
        ),
        ("[identities.a]\ncertificates = ['CN=a']\nopen_jobs = 0", "open_jobs must be a whole number above 0"),
        ("[identities.a]\ncertificates = ['CN=a']\nargument_bytes = true", "argument_bytes must be a whole number"),
        ("[identities.a]\ncertificates = ['CN=a']\nopen_operations = 1.5", "open_operations must be a whole number"),
    ],
)
def test_a_wrong_access_file_is_refused_in_one_sentence(text: str, words: str) -> None:
    with pytest.raises(InvalidArgument, match=words) as caught:
        parse(text, "the-file")
    assert "\n" not in str(caught.value)


def test_the_default_algorithms_have_no_shared_secret() -> None:
    text = file_of("keys").replace('algorithms = ["RS256", "ES256"]\n', "")
    found: ServiceAccess = parse(text, "f")
    assert found.issuers[0].algorithms == ("RS256", "ES256")
    assert not any(one.startswith(("HS", "none")) for one in json_web_tokens.ALGORITHMS)
