"""Credentials that a machine, a container or a web identity gives, and requests for them that fail.

pyarrow's token service is the host that AWS_ENDPOINT_URL_STS names, else sts.REGION.amazonaws.com, always on port 443
and with a certificate of the system's authorities. So only obstore's requests can be served here.
"""

from __future__ import annotations

import contextlib
import datetime
import http.server
import ipaddress
import json
import re
import ssl
import threading
import uuid
from typing import TYPE_CHECKING
from urllib.parse import parse_qs, urlsplit

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from cryptography.x509.oid import NameOID

from distop.storage import storage_options
from distop.storage.opened_stores import open_store
from distop.storage.storage_access import storage_access_for
from distop.storage.store_errors import Denied, TimedOut
from tests.storage import servers
from tests.storage.faulty_http import FaultyProxy

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from tests.storage.faulty_http import Seen

KEYS = {
    "Code": "Success",
    "Type": "AWS-HMAC",
    "AccessKeyId": "of-the-machine",
    "SecretAccessKey": "s",
    "Token": "t",
    "LastUpdated": "2026-01-01T00:00:00Z",
    "Expiration": "2099-01-01T00:00:00Z",
}
pytestmark = pytest.mark.timeout(300)
ROLES = "/latest/meta-data/iam/security-credentials"
ANSWERS = {
    "/latest/api/token": "a-token",
    ROLES: "role",
    f"{ROLES}/role": json.dumps(KEYS),
    "/latest/meta-data/placement/availability-zone": "us-east-1a",
    "/container": json.dumps(KEYS),
}


def service(seen: Seen, forward: Callable[[bytes], bytes]) -> bytes:
    """The machine's service for credentials; other requests are for the store."""
    body = ANSWERS.get(seen.target.partition("?")[0].rstrip("/"))
    if body is None:
        return forward(seen.whole)
    headers = f"x-aws-ec2-metadata-token-ttl-seconds: 600\r\ncontent-length: {len(body)}\r\nconnection: close"
    return f"HTTP/1.1 200 OK\r\n{headers}\r\n\r\n{body}".encode()


@pytest.fixture
def proxy() -> Iterator[FaultyProxy]:
    with servers.moto() as served, FaultyProxy(served.port) as found:
        found.fault = service
        storage_options.configure(served.options(found.port))
        yield found


def signers(proxy: FaultyProxy) -> set[bytes]:
    """The access keys of the requests to the store; "": of one without a signature."""
    requests = [seen.whole for seen in proxy.seen if seen.target.startswith(f"/{servers.BUCKET}")]
    proxy.seen.clear()
    found = [re.search(rb"(?i)credential=([^/]+)/", whole) for whole in requests]
    return {one[1] if one else b"" for one in found}


@pytest.mark.parametrize("source", ["instance", "container"])
def test_obstore_and_pyarrow_use_the_credentials_of_the_machine(
    source: str, proxy: FaultyProxy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    at = f"http://127.0.0.1:{proxy.port}"
    if source == "instance":
        monkeypatch.delenv("AWS_EC2_METADATA_DISABLED")
        monkeypatch.setenv("AWS_METADATA_ENDPOINT", at)  # obstore's name
        monkeypatch.setenv("AWS_EC2_METADATA_SERVICE_ENDPOINT", at)
    else:
        (tmp_path / "token").write_text("a-token")
        monkeypatch.setenv("AWS_CONTAINER_CREDENTIALS_FULL_URI", f"{at}/container")
        monkeypatch.setenv("AWS_CONTAINER_AUTHORIZATION_TOKEN_FILE", str(tmp_path / "token"))
    location = f"s3://{servers.BUCKET}/{uuid.uuid4().hex}"
    open_store(location).put_new("a", b"content")
    assert signers(proxy) == {b"of-the-machine"}
    filesystem, path = storage_access_for(f"{location}/a").pyarrow()
    with filesystem.open_input_stream(path) as file:
        assert file.read() == b"content"
    assert signers(proxy) == {b"of-the-machine"}


# ---- a web identity

ROLE = "arn:aws:iam::123456789012:role/reader"
ROLE_KEYS = b"""<AssumeRoleWithWebIdentityResponse xmlns="https://sts.amazonaws.com/doc/2011-06-15/">
<AssumeRoleWithWebIdentityResult><Credentials><AccessKeyId>of-the-role</AccessKeyId>
<SecretAccessKey>s</SecretAccessKey><SessionToken>t</SessionToken><Expiration>2099-01-01T00:00:00Z</Expiration>
</Credentials></AssumeRoleWithWebIdentityResult></AssumeRoleWithWebIdentityResponse>"""
REFUSAL = b"<ErrorResponse><Error><Code>InvalidIdentityToken</Code><Message>expired</Message></Error></ErrorResponse>"


class TokenService:
    """A token service with TLS. ``answer``: its status and body. ``requests``: their parameters."""

    def __init__(self, folder: Path) -> None:
        self.answer = (200, ROLE_KEYS)
        self.requests: list[dict[str, list[str]]] = []
        self.authority = folder / "authority.pem"
        certificate = folder / "certificate.pem"
        write_certificates(self.authority, certificate)
        service = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                service.requests.append(parse_qs(urlsplit(self.path).query))
                status, body = service.answer
                self.send_response(status)
                self.send_header("content-length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_: object) -> None:
                pass

        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(certificate)
        self._server.socket = context.wrap_socket(self._server.socket, server_side=True)
        self.url = f"https://127.0.0.1:{self._server.server_address[1]}"

    @contextlib.contextmanager
    def serving(self) -> Iterator[TokenService]:
        thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        thread.start()
        try:
            yield self
        finally:
            self._server.shutdown()
            thread.join()
            self._server.server_close()


def write_certificates(authority: Path, certificate: Path) -> None:
    """A new authority, and a certificate of it for 127.0.0.1 with its private key."""
    now, day = datetime.datetime.now(datetime.UTC), datetime.timedelta(days=1)
    keys = [ec.generate_private_key(ec.SECP256R1()) for _ in range(2)]
    issuer, subject = (x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)]) for name in ("authority", "sts"))

    def built(name: x509.Name, key: ec.EllipticCurvePrivateKey, extension: x509.ExtensionType) -> bytes:
        builder = x509.CertificateBuilder(issuer, name, key.public_key(), x509.random_serial_number())
        builder = builder.not_valid_before(now - day).not_valid_after(now + day).add_extension(extension, critical=True)
        return builder.sign(keys[0], hashes.SHA256()).public_bytes(Encoding.PEM)

    authority.write_bytes(built(issuer, keys[0], x509.BasicConstraints(ca=True, path_length=None)))
    host = x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))])
    private = keys[1].private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    certificate.write_bytes(built(subject, keys[1], host) + private)


@pytest.fixture
def tokens(tmp_path: Path, proxy: FaultyProxy, monkeypatch: pytest.MonkeyPatch) -> Iterator[TokenService]:
    """A token service that obstore's requests for the role of a web identity reach, and a store."""
    with TokenService(tmp_path).serving() as found:
        (tmp_path / "token").write_text("of-this-pod")
        monkeypatch.setenv("SSL_CERT_FILE", str(found.authority))
        monkeypatch.setenv("AWS_ENDPOINT_URL_STS", found.url)
        monkeypatch.setenv("AWS_WEB_IDENTITY_TOKEN_FILE", str(tmp_path / "token"))
        monkeypatch.setenv("AWS_ROLE_ARN", ROLE)
        monkeypatch.setenv("AWS_ROLE_SESSION_NAME", "distop")
        yield found


def test_obstore_uses_the_role_of_a_web_identity(tokens: TokenService, proxy: FaultyProxy) -> None:
    store = open_store(f"s3://{servers.BUCKET}/{uuid.uuid4().hex}")
    store.put_new("a", b"content")
    assert store.get("a", limit=100).data == b"content"
    assert signers(proxy) == {b"of-the-role"}
    [request] = tokens.requests  # the credentials are kept until they expire
    assert request["Action"] == ["AssumeRoleWithWebIdentity"]
    assert (request["RoleArn"], request["RoleSessionName"]) == ([ROLE], ["distop"])
    assert request["WebIdentityToken"] == ["of-this-pod"]


def test_pyarrow_needs_the_region_of_a_web_identity_in_the_environment(
    tokens: TokenService, proxy: FaultyProxy
) -> None:
    """As docs/how-to/store-data-on-s3.md says: with the region in the settings alone, it signs nothing."""
    location = f"s3://{servers.BUCKET}/{uuid.uuid4().hex}"
    open_store(location).put_new("a", b"content")
    proxy.seen.clear()
    filesystem, path = storage_access_for(f"{location}/a").pyarrow()
    with pytest.raises(OSError, match="ACCESS_DENIED"):
        filesystem.open_input_stream(path)
    assert signers(proxy) == {b""}


@pytest.mark.parametrize("status", [400, 403, 404, 409])
def test_a_write_without_credentials_is_refused(status: int, tokens: TokenService, proxy: FaultyProxy) -> None:
    """Nothing was sent to the store, so the outcome is known."""
    tokens.answer = (status, REFUSAL)
    store = open_store(f"s3://{servers.BUCKET}/{uuid.uuid4().hex}")
    for call in (lambda: store.put_new("a", b""), lambda: store.head("a"), lambda: store.put_large("a", [b"x"])):
        with pytest.raises(Denied, match=rf"no credentials: .* \(status {status} InvalidIdentityToken expired\)"):
            call()
    assert signers(proxy) == set()


def test_an_invalid_answer_of_the_token_service(tokens: TokenService) -> None:
    tokens.answer = (200, b"<html/>")
    with pytest.raises(Denied, match="no credentials: .*Invalid AssumeRoleWithWebIdentity response"):
        open_store(f"s3://{servers.BUCKET}/{uuid.uuid4().hex}").put_new("a", b"")


def test_a_token_file_that_cannot_be_read(tokens: TokenService, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_WEB_IDENTITY_TOKEN_FILE", "/not/there")
    with pytest.raises(Denied, match="no credentials: .*/not/there"):
        open_store(f"s3://{servers.BUCKET}/{uuid.uuid4().hex}").put_new("a", b"")


@pytest.mark.parametrize("trouble", ["error", "throttled", "down"])
def test_a_token_service_that_is_unavailable(
    trouble: str, tokens: TokenService, proxy: FaultyProxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The request is repeated; after the time limit it is known that nothing was written."""
    tokens.answer = (429 if trouble == "throttled" else 500, b"")
    if trouble == "down":
        monkeypatch.setenv("AWS_ENDPOINT_URL_STS", "https://127.0.0.1:1")
    store = open_store(f"s3://{servers.BUCKET}/{uuid.uuid4().hex}", limit=0.3)
    with pytest.raises(TimedOut, match="no credentials: .*given up after"):
        store.put_new("a", b"")
    assert signers(proxy) == set()


@pytest.mark.parametrize("status", ["500 No", "404 No"])
def test_a_write_without_the_credentials_of_a_container(
    status: str, proxy: FaultyProxy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "token").write_text("a-token")
    monkeypatch.setenv("AWS_CONTAINER_CREDENTIALS_FULL_URI", f"http://127.0.0.1:{proxy.port}/container")
    monkeypatch.setenv("AWS_CONTAINER_AUTHORIZATION_TOKEN_FILE", str(tmp_path / "token"))
    proxy.answer(status)
    store = open_store(f"s3://{servers.BUCKET}/{uuid.uuid4().hex}", limit=0.3)
    expected = TimedOut if status.startswith("5") else Denied
    with pytest.raises(expected, match=rf"no credentials .* gave none \(status {status[:3]}\)"):
        store.put_new("a", b"")


@pytest.mark.parametrize("status", ["500 No", "404 No"])
def test_a_write_without_the_credentials_of_the_instance(
    status: str, proxy: FaultyProxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("AWS_EC2_METADATA_DISABLED")
    monkeypatch.setenv("AWS_METADATA_ENDPOINT", f"http://127.0.0.1:{proxy.port}")
    proxy.answer(status)
    store = open_store(f"s3://{servers.BUCKET}/{uuid.uuid4().hex}", limit=0.3)
    expected = TimedOut if status.startswith("5") else Denied
    with pytest.raises(expected, match=rf"no credentials .* gave none \(status {status[:3]}\)"):
        store.put_new("a", b"")
