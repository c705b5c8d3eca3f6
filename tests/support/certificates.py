"""Certificates for TLS tests: an authority, a server on the loopback, a client, and another authority."""

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
        """Arguments of an etcd that uses TLS for clients."""
        return ["--cert-file", self.server_cert, "--key-file", self.server_key]

    @property
    def mutual_arguments(self) -> list[str]:
        """Arguments of an etcd that also requires client certificates."""
        return [*self.server_arguments, "--client-cert-auth", "--trusted-ca-file", self.ca]


def _name(text: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)])


def make_certificates(folder: Path) -> Certificates:
    """Create the certificates in ``folder``."""

    def write(name: str, data: bytes) -> str:
        path = folder / name
        path.write_bytes(data)
        return str(path)

    def certify(
        name: str,
        key: ec.EllipticCurvePrivateKey,
        issuer: str,
        issuer_key: ec.EllipticCurvePrivateKey,
        *extensions: tuple[x509.ExtensionType, bool],
    ) -> str:
        """Write a certificate with these extensions; each with whether it is critical."""
        now = datetime.datetime.now(datetime.UTC)
        builder = (
            x509.CertificateBuilder()
            .subject_name(_name(name))
            .issuer_name(_name(issuer))
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - datetime.timedelta(hours=1))
            .not_valid_after(now + datetime.timedelta(days=1))
        )
        for extension, critical in extensions:
            builder = builder.add_extension(extension, critical=critical)
        pem = builder.sign(issuer_key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)
        return write(f"{name}.pem", pem)

    def authority(name: str) -> tuple[ec.EllipticCurvePrivateKey, str]:
        key = ec.generate_private_key(ec.SECP256R1())
        usage = x509.KeyUsage(True, False, False, False, False, True, True, False, False)
        extensions = (x509.BasicConstraints(ca=True, path_length=None), True), (usage, True)
        return key, certify(name, key, name, key, *extensions)

    def issue(name: str) -> tuple[str, str]:
        key = ec.generate_private_key(ec.SECP256R1())
        names = x509.SubjectAlternativeName(
            [x509.DNSName("localhost"), x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]
        )
        both = x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH])
        pem = serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        certificate = certify(name, key, "distop-test-ca", ca_key, (names, False), (both, False))
        return certificate, write(f"{name}-key.pem", key.private_bytes(*pem))

    ca_key, ca = authority("distop-test-ca")
    _, other_ca = authority("distop-other-ca")
    return Certificates(ca, *issue("server"), *issue("client"), other_ca)
