"""The service with identities and TLS, as a process."""

from __future__ import annotations

import hashlib
import json
import os
import re
import signal
import time
from typing import TYPE_CHECKING, Any

import httpx
import jwt
import pytest
from cryptography.hazmat.primitives.asymmetric import rsa

import distop
from distop.errors import LimitExceeded, NotIdentified, PermissionDenied
from distop.protocol.records import TableRecord
from tests.integration.test_service import LIMIT, TABLE, Service
from tests.support.certificates import Certificates, make_certificates
from tests.support.command import distop_command  # noqa: F401
from tests.support.daemons import eventually

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from tests.support.command import Ran
    from tests.support.daemons import Daemons

pytestmark = [pytest.mark.etcd, pytest.mark.direct]

ETL, ROOT = "etl-token-of-this-test", "root-token-of-this-test"
GRANTS = """
[identities.etl]
token_sha256 = ["{etl}"]
[identities.root]
token_sha256 = ["{root}"]
[identities.machine]
certificates = ["CN=client"]
[[grants]]
to = ["etl", "machine"]
role = "{role}"
tables = ["t"]
[[grants]]
to = ["root"]
role = "admin"
"""


def grants(role: str = "submitter") -> str:
    etl, root = (hashlib.sha256(one.encode()).hexdigest() for one in (ETL, ROOT))
    return GRANTS.format(etl=etl, root=root, role=role)


@pytest.fixture
def certificates(tmp_path: Path) -> Certificates:
    return make_certificates(tmp_path)


@pytest.fixture
def access(tmp_path: Path) -> Path:
    path = tmp_path / "access.toml"
    path.write_text(grants())
    path.chmod(0o600)
    return path


@pytest.fixture
def service(group: Daemons, tmp_path: Path, access: Path, certificates: Certificates) -> Iterator[Service]:
    options = (
        *("--access", str(access), "--audit-log", str(tmp_path / "audit.jsonl")),
        *("--service-cert", certificates.server_cert, "--service-key", certificates.server_key),
    )
    found = Service(group.endpoint, tmp_path, options=options)
    yield found
    found.end(signal.SIGKILL)


def connected(service: Service, certificates: Certificates, **options: Any) -> distop.Client:
    return distop.connect(f"grpcs://127.0.0.1:{service.port}", ca_cert=certificates.ca, **options)


def test_callers_are_identified_by_their_tokens_and_may_do_what_is_granted(
    group: Daemons, service: Service, certificates: Certificates, tmp_path: Path
) -> None:
    group.start("e1")
    group.client.add_table(TableRecord("other", "parquet", str(tmp_path)), check=False)
    with connected(service, certificates, token=ETL) as client:
        op = client.start_operation("noop", TABLE, {"sleep": 1.0})
        assert op.status().submitter == "etl"
        with pytest.raises(PermissionDenied, match="etl may not call Operations/Start here"):
            client.start_operation("noop", "other")
        with pytest.raises(PermissionDenied, match="may not name another submitter"):
            client.start_operation("noop", TABLE, {}, submitter="somebody")
        with pytest.raises(PermissionDenied, match="it needs the role operator"):
            op.cancel()
        with pytest.raises(PermissionDenied, match="it needs the role admin"):
            client.remove_table(TABLE)
        assert [one.name for one in client.tables()] == [TABLE]
        assert op.wait(LIMIT).success
    with connected(service, certificates, token=ROOT) as client:
        assert {one.name for one in client.tables()} == {TABLE, "other"}
        assert client.start_operation("noop", TABLE, {}, submitter="somebody").status().submitter == "somebody"
        client.remove_table("other")
    for token in ("wrong", None):
        with connected(service, certificates, token=token) as client, pytest.raises(NotIdentified):
            client.operations()
    lines = [json.loads(line) for line in (tmp_path / "audit.jsonl").read_text().splitlines()]
    assert ("etl", "Operations/Start", "ok") in {(one["identity"], one["call"], one["verdict"]) for one in lines}
    assert {one["verdict"] for one in lines} == {"ok", "PermissionDenied", "NotIdentified"}
    assert not any(secret in (tmp_path / "audit.jsonl").read_text() for secret in (ETL, ROOT))


@pytest.mark.rotating
def test_a_certificate_identifies_a_caller_without_a_token(
    group: Daemons, tmp_path: Path, access: Path, certificates: Certificates
) -> None:
    options = (
        *("--access", str(access), "--client-ca", certificates.ca),
        *("--service-cert", certificates.server_cert, "--service-key", certificates.server_key),
    )
    service = Service(group.endpoint, tmp_path, options=options)
    own = {"cert": certificates.client_cert, "key": certificates.client_key}
    group.start("e1")
    try:
        with connected(service, certificates, **own) as client:
            assert client.start_operation("noop", TABLE).status().submitter == "machine"
        with connected(service, certificates, token=ETL, **own) as client:
            assert client.start_operation("noop", TABLE).status().submitter == "etl"
        with pytest.raises(distop.EtcdUnavailable, match="cannot be reached"):
            connected(service, certificates, token=ETL, connect_timeout=0.5)
    finally:
        service.end(signal.SIGKILL)


@pytest.mark.rotating
def test_a_changed_access_file_is_applied(service: Service, certificates: Certificates, access: Path) -> None:
    with connected(service, certificates, token=ETL) as client:
        client.operations()
        access.write_text(grants().replace(hashlib.sha256(ETL.encode()).hexdigest(), "0" * 64))

        def refused() -> bool:
            try:
                client.operations()
            except NotIdentified:
                return True
            return False

        eventually(refused, "the token is refused")
        access.write_text("nonsense")

        def is_logged() -> bool:
            return refused() and "is not applied" in service.text()

        eventually(is_logged, "the wrong file is logged", tail=service.text)


@pytest.mark.rotating
def test_changed_certificates_are_used(service: Service, certificates: Certificates, tmp_path: Path) -> None:
    """A client that trusts only the new authority is served once the files are replaced."""
    folder = tmp_path / "new"
    folder.mkdir()
    new = make_certificates(folder)
    with pytest.raises(distop.EtcdUnavailable):
        connected(service, new, token=ETL, connect_timeout=0.5)
    for source, target in ((new.server_cert, certificates.server_cert), (new.server_key, certificates.server_key)):
        os.replace(source, target)  # noqa: PTH105

    def served() -> bool:
        try:
            with connected(service, new, token=ETL, connect_timeout=1) as client:
                client.operations()
        except distop.EtcdUnavailable:
            return False
        return True

    eventually(served, "the new certificate is used", tail=service.text)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--service-cert", "x"), "service-cert and service-key belong together"),
        (("--client-ca", "x"), "client-ca needs TLS"),
        (("--service-cert", "x", "--service-key", "y", "--client-ca", "z"), "client-ca needs an access file"),
        (("--access", "/nowhere/access.toml"), "cannot read the access file /nowhere/access.toml"),
        (("--audit-log", "/nowhere/audit"), "cannot open the audit log /nowhere/audit"),
        (("--listen", "0.0.0.0:0", "--service-cert", "x", "--service-key", "y"), "the service needs access there"),
    ],
)
def test_wrong_settings_are_refused(
    distop_command: Callable[..., Ran],  # noqa: F811
    options: tuple[str, ...],
    words: str,
) -> None:
    ran = distop_command("serve", "--etcd", "127.0.0.1:1", *options)
    assert (ran.code, words in ran.err) == (2, True), ran.err


@pytest.mark.rotating
def test_a_json_web_token_identifies_a_caller_over_grpc_and_http(group: Daemons, tmp_path: Path) -> None:
    key = rsa.generate_private_key(65537, 2048)
    public = {**jwt.algorithms.RSAAlgorithm.to_jwk(key.public_key(), as_dict=True), "kid": "k1"}
    (tmp_path / "jwks.json").write_text(json.dumps({"keys": [public]}))
    access = tmp_path / "access.toml"
    access.write_text(f"""
[issuers.corp]
issuer = "https://login.example.com"
audience = "distop"
jwks = "{tmp_path / "jwks.json"}"
[identities.robot]
subjects = ["corp:robot-7"]
[[grants]]
to = ["robot"]
role = "submitter"
tables = ["{TABLE}"]
""")
    access.chmod(0o600)
    claims = {"iss": "https://login.example.com", "aud": "distop", "sub": "robot-7", "exp": time.time() + 600}
    token = jwt.encode(claims, key, "RS256", headers={"kid": "k1"})
    stranger = jwt.encode({**claims, "sub": "robot-8"}, key, "RS256", headers={"kid": "k1"})
    options = ("--access", str(access), "--http", "127.0.0.1:0", "--audit-log", str(tmp_path / "audit.jsonl"))
    service = Service(group.endpoint, tmp_path, options=options)
    group.start("e1")
    try:
        with distop.connect(service.url, token=token) as client:
            op = client.start_operation("noop", TABLE)
            assert (op.status().submitter, op.wait(LIMIT).success) == ("robot", True)
        with distop.connect(service.url, token=stranger) as client, pytest.raises(NotIdentified):
            client.operations()
        found_url = re.search(r"Serving HTTP on .*127\.0\.0\.1:(\d+)", service.text())
        assert found_url is not None
        url = f"http://127.0.0.1:{found_url[1]}/v1/operations"
        for shown, status in ((token, 200), (stranger, 401)):
            found = httpx.get(url, params={"table": TABLE}, headers={"authorization": f"Bearer {shown}"})
            assert found.status_code == status, found.text
        assert token not in (tmp_path / "audit.jsonl").read_text() + service.text()
    finally:
        service.end(signal.SIGKILL)


@pytest.mark.rotating
def test_two_services_limit_the_open_operations_of_an_identity_together(group: Daemons, tmp_path: Path) -> None:
    access = tmp_path / "access.toml"
    access.write_text(grants().replace("[identities.root]", "open_operations = 2\n[identities.root]"))
    access.chmod(0o600)
    services = [Service(group.endpoint, tmp_path, options=("--access", str(access))) for _ in range(2)]
    group.start("e1")
    try:
        with distop.connect(services[0].url, token=ETL) as one, distop.connect(services[1].url, token=ETL) as other:
            ops = [client.start_operation("noop", TABLE, {"sleep": 60.0}) for client in (one, other)]
            for client in (one, other):
                with pytest.raises(LimitExceeded, match="etl has 2 open operations, and may have 2"):
                    client.start_operation("noop", TABLE)
            with distop.connect(services[0].url, token=ROOT) as root:
                root.operation(ops[0].ref).cancel()
            ops[0].wait(LIMIT)
            assert other.start_operation("noop", TABLE).wait(LIMIT).success
    finally:
        for service in services:
            service.end(signal.SIGKILL)


def test_a_token_is_not_sent_as_plain_text_to_another_machine() -> None:
    with pytest.raises(distop.InvalidArgument, match="would be sent as plain text: use grpcs://"):
        distop.connect("grpc://192.0.2.1:1", token=ETL)
    with pytest.raises(distop.InvalidArgument, match="token is an option of a connection to a service"):
        distop.connect("127.0.0.1:1", token=ETL)
