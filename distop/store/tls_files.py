"""Reads and checks the TLS files of a connection: CA certificate, client certificate and private key (PEM).

gRPC reports an invalid file only as failed handshakes, until the connect time-out. So files are checked before use.
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
class TlsFiles:
    """The contents of the files; None for a file that is not configured."""

    ca: bytes | None
    key: bytes | None
    cert: bytes | None


NO_FILES = TlsFiles(None, None, None)
Stamp = tuple[tuple[int, int, int] | None, ...]
"""For each file (inode, size, modification time); None for a file that cannot be read."""


def stamp(config: EtcdConfig) -> Stamp:
    """A value that changes when a file is replaced or written."""
    return tuple(file_stamp(path) for path in (config.ca_cert, config.key, config.cert) if path)


def file_stamp(path: str) -> tuple[int, int, int] | None:
    """A value that changes when this file is replaced or written; None if it cannot be read."""
    try:
        found = Path(path).stat()
    except OSError:
        return None
    return (found.st_ino, found.st_size, found.st_mtime_ns)


def read(config: EtcdConfig) -> TlsFiles:
    """Read the files; check the certificates, and that the key belongs to them.

    Raises InvalidArgument, which names the file.
    """
    found = TlsFiles(_read(config.ca_cert), _read(config.key), _read(config.cert))
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
        raise InvalidArgument(f"cannot read the certificate file {path}: {error.strerror or error}") from None


def _check_certificate(path: str) -> None:
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(cafile=path)
    except ssl.SSLError:
        raise InvalidArgument(f"{path} contains no certificate in PEM format") from None


def _check_pair(cert: str, key: str) -> None:
    try:
        # Without an explicit password OpenSSL would prompt for one on the terminal.
        ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_cert_chain(cert, key, password=lambda: b"")
    except ssl.SSLError as error:
        if error.reason == "KEY_VALUES_MISMATCH":
            raise InvalidArgument(f"the private key in {key} does not match the certificate in {cert}") from None
        raise InvalidArgument(f"{key} contains no private key in PEM format without a password") from None
