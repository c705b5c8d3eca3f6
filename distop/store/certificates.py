"""The PEM files of a connection, read and checked before gRPC sees them: it tells of a wrong one only by a handshake
that fails, again and again, until the time for connecting is over.
"""

from __future__ import annotations

import ssl
from pathlib import Path
from typing import TYPE_CHECKING

from distop.errors import InvalidArgument
from distop.protocol.frozen import frozen

if TYPE_CHECKING:
    from distop.store.connection_settings import EtcdConfig


@frozen
class Certificates:
    """The contents of the files; None where there is none."""

    ca: bytes | None
    key: bytes | None
    cert: bytes | None


Stamp = tuple[tuple[int, int, int] | None, ...]
"""Of each file (inode, size, time of its last change), None where it cannot be read."""


def stamp(config: EtcdConfig) -> Stamp:
    """What differs once a file was replaced or written."""
    return tuple(_stamp(path) for path in (config.ca_cert, config.key, config.cert) if path)


def _stamp(path: str) -> tuple[int, int, int] | None:
    try:
        found = Path(path).stat()
    except OSError:
        return None
    return (found.st_ino, found.st_size, found.st_mtime_ns)


def read(config: EtcdConfig) -> Certificates:
    """Read the files, and check that they hold certificates, and a key that fits. Raises InvalidArgument, which names
    the file.
    """
    found = Certificates(_read(config.ca_cert), _read(config.key), _read(config.cert))
    for path in (config.ca_cert, config.cert):
        if path:
            _check_certificate(path)
    if config.cert and config.key:
        _check_pair(config.cert, config.key)
    return found


def _read(path: str | None) -> bytes | None:
    if not path:
        return None
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise InvalidArgument(f"the certificate file {path} cannot be read: {error.strerror or error}") from None


def _check_certificate(path: str) -> None:
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(cafile=path)
    except ssl.SSLError:
        raise InvalidArgument(f"the file {path} holds no certificate in PEM form") from None


def _check_pair(cert: str, key: str) -> None:
    try:
        # Without a password of ours OpenSSL would ask the terminal for one.
        ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_cert_chain(cert, key, password=lambda: b"")
    except ssl.SSLError as error:
        if error.reason == "KEY_VALUES_MISMATCH":
            raise InvalidArgument(f"the key in {key} does not belong to the certificate in {cert}") from None
        raise InvalidArgument(f"the file {key} holds no private key in PEM form without a password") from None
