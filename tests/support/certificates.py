"""Certificates for the TLS tests: an authority, a server on the loopback, a client."""

from __future__ import annotations

import datetime
import ipaddress
from dataclasses import dataclass
from typing import TYPE_CHECKING

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

if TYPE_CHECKING:
    from pathlib import Path


@dataclass(frozen=True)
class Certificates:
    """Paths of PEM files."""

    ca: str
    server_cert: str
    server_key: str
    client_cert: str
    client_key: str
    other_ca: str

    @property
    def server_arguments(self) -> list[str]:
        """What makes an etcd speak TLS to clients."""
        return ["--cert-file", self.server_cert, "--key-file", self.server_key]

    @property
    def mutual_arguments(self) -> list[str]:
        """What makes it want a client certificate as well."""
        return [*self.server_arguments, "--client-cert-auth", "--trusted-ca-file", self.ca]


def _name(text: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)])


def _builder(name: str, issuer: str, key: ec.EllipticCurvePublicKey) -> x509.CertificateBuilder:
    now = datetime.datetime.now(datetime.UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(_name(name))
        .issuer_name(_name(issuer))
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(hours=1))
        .not_valid_after(now + datetime.timedelta(days=1))
    )


def make_certificates(folder: Path) -> Certificates:
    """Write them below ``folder``."""

    def write(name: str, data: bytes) -> str:
        path = folder / name
        path.write_bytes(data)
        return str(path)

    def write_key(name: str, key: ec.EllipticCurvePrivateKey) -> str:
        pem = serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        return write(name, key.private_bytes(*pem))

    def authority(name: str) -> tuple[ec.EllipticCurvePrivateKey, str]:
        key = ec.generate_private_key(ec.SECP256R1())
        usage = x509.KeyUsage(True, False, False, False, False, True, True, False, False)
        certificate = (
            _builder(name, name, key.public_key())
            .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
            .add_extension(usage, critical=True)
            .sign(key, hashes.SHA256())
        )
        return key, write(f"{name}.pem", certificate.public_bytes(serialization.Encoding.PEM))

    ca_key, ca = authority("distop-test-ca")
    _, other_ca = authority("distop-other-ca")

    def issue(name: str) -> tuple[str, str]:
        key = ec.generate_private_key(ec.SECP256R1())
        names = x509.SubjectAlternativeName(
            [x509.DNSName("localhost"), x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]
        )
        both = x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH])
        certificate = (
            _builder(name, "distop-test-ca", key.public_key())
            .add_extension(names, critical=False)
            .add_extension(both, critical=False)
            .sign(ca_key, hashes.SHA256())
        )
        pem = certificate.public_bytes(serialization.Encoding.PEM)
        return write(f"{name}.pem", pem), write_key(f"{name}-key.pem", key)

    return Certificates(ca, *issue("server"), *issue("client"), other_ca)
