"""Errors of unusable certificates name the file, before etcd is asked."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from cryptography.hazmat.primitives import serialization

from distop.errors import InvalidArgument
from distop.store import certificates
from distop.store.connection_settings import EtcdConfig
from tests.support.certificates import Certificates, make_certificates
from tests.support.command import distop_command

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.support.command import Ran

__all__ = ["distop_command"]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    folder = tmp_path_factory.mktemp("certificates")
    made = make_certificates(folder)
    (folder / "garbage.pem").write_bytes(b"-----BEGIN CERTIFICATE-----\nnothing of it\n-----END CERTIFICATE-----\n")
    (folder / "empty.pem").write_bytes(b"")
    key = serialization.load_pem_private_key(Path(made.client_key).read_bytes(), None)
    secret = serialization.BestAvailableEncryption(b"secret")
    (folder / "locked.pem").write_bytes(
        key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, secret)
    )
    return made


def beside(made: Certificates, name: str) -> str:
    return str(Path(made.ca).with_name(name))


def config(**files: str) -> EtcdConfig:
    return EtcdConfig(("https://127.0.0.1:1",), **files)  # type: ignore[arg-type]


def test_matching_certificate_files_are_read(made: Certificates) -> None:
    found = certificates.read(config(ca_cert=made.ca, cert=made.client_cert, key=made.client_key))
    assert found.ca == Path(made.ca).read_bytes()
    assert found.key == Path(made.client_key).read_bytes()
    assert certificates.read(config()) == certificates.Certificates(None, None, None)


@pytest.mark.parametrize("name", ["garbage.pem", "empty.pem", "client-key.pem"])
def test_a_file_without_a_certificate_is_rejected(made: Certificates, name: str) -> None:
    path = beside(made, name)
    with pytest.raises(InvalidArgument, match=f"{name} contains no certificate"):
        certificates.read(config(ca_cert=path))
    with pytest.raises(InvalidArgument, match=f"{name} contains no certificate"):
        certificates.read(config(ca_cert=made.ca, cert=path, key=made.client_key))


def test_a_key_that_does_not_match_its_certificate_is_rejected(made: Certificates) -> None:
    with pytest.raises(InvalidArgument, match=r"server-key\.pem does not match the certificate in .*client\.pem"):
        certificates.read(config(cert=made.client_cert, key=made.server_key))
    for name in ("garbage.pem", "locked.pem", "distop-test-ca.pem"):
        with pytest.raises(InvalidArgument, match=name):
            certificates.read(config(cert=made.client_cert, key=beside(made, name)))


def test_an_invalid_certificate_file_is_a_usage_error(
    made: Certificates, distop_command: Callable[..., Ran], tmp_path: Path
) -> None:
    """There is no etcd, and it is not asked."""
    for argv in (("ls",), ("executor", "--work-dir", str(tmp_path)), ("doctor",)):
        for path in ("/no/such.pem", beside(made, "garbage.pem")):
            ran = distop_command(*argv, "--etcd", "https://127.0.0.1:1", "--cacert", path)
            assert (ran.code, path in ran.sentence) == (2, True), ran
