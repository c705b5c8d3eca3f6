"""The service's process: connects to etcd, serves until SIGTERM or SIGINT, and then ends the open calls in order."""

from __future__ import annotations

import asyncio
import logging
import signal
from pathlib import Path
from typing import TYPE_CHECKING

import grpc

from distop.client.direct_backend import DirectBackend
from distop.errors import InvalidArgument, UsageError
from distop.protocol.frozen import frozen
from distop.protocol.keys import Keys
from distop.server.gate import AccessFile, AuditLog, CallGate
from distop.server.grpc_face import GrpcFace
from distop.server.handlers import services
from distop.store import tls_files
from distop.store.client import EtcdClient
from distop.store.connection_settings import EtcdConfig

if TYPE_CHECKING:
    from collections.abc import Callable

    from distop.settings import ClientConfig

log = logging.getLogger("distop.service")

GRACE = 10.0
"""Seconds for which open calls may go on after a signal."""
LOOPBACK = ("127.0.0.1", "::1", "localhost")


@frozen
class ServiceConfig:
    """The settings of a service.

    ``listen``: host and port. ``access``: the file with identities and grants; "": callers are not identified.
    ``audit_log``: the file for a line of JSON for each writing call and each refusal; "": none. ``cert``, ``key``: PEM
    files for TLS. ``client_ca``: a PEM file; every caller must show a certificate that it has signed.
    """

    client: ClientConfig
    listen: tuple[str, int]
    access: str = ""
    audit_log: str = ""
    cert: str = ""
    key: str = ""
    client_ca: str = ""

    def check(self) -> None:
        """Raises InvalidArgument for settings that contradict each other, or that let strangers in."""
        host = self.listen[0]
        if bool(self.cert) != bool(self.key):
            raise InvalidArgument("service-cert and service-key belong together: give both, or neither")
        if self.client_ca and not self.cert:
            raise InvalidArgument("client-ca needs TLS: give service-cert and service-key, too")
        if self.client_ca and not self.access:
            raise InvalidArgument("client-ca needs an access file, which says who the owners of certificates are")
        if host in LOOPBACK:
            return
        missing = [name for name, given in (("access", self.access), ("service-cert", self.cert)) if not given]
        if missing:
            raise InvalidArgument(
                f"others can reach {host}, so the service needs {' and '.join(missing)} there: without them it listens "
                "on 127.0.0.1 only"
            )


class _Certificates:
    """The service's TLS files, which are read again when they change. Raises InvalidArgument at first."""

    def __init__(self, config: ServiceConfig) -> None:
        self._files = EtcdConfig(ca_cert=config.client_ca or None, cert=config.cert, key=config.key)
        self._stamp = tls_files.stamp(self._files)
        self._first = self._read()

    def _read(self) -> grpc.ServerCertificateConfiguration:
        found = tls_files.read(self._files)
        assert found.key is not None  # both are given
        assert found.cert is not None
        return grpc.ssl_server_certificate_configuration([(found.key, found.cert)], found.ca)

    def credentials(self) -> grpc.ServerCredentials:
        """Credentials with the current files. A change that is not valid is logged, and not used."""
        return grpc.dynamic_ssl_server_credentials(
            self._first,
            self._changed,  # type: ignore[arg-type]  # None: nothing has changed
            require_client_authentication=bool(self._files.ca_cert),
        )

    def _changed(self) -> grpc.ServerCertificateConfiguration | None:
        if (stamp := tls_files.stamp(self._files)) == self._stamp:
            return None
        self._stamp = stamp
        try:
            found = self._read()
        except InvalidArgument as error:
            log.error("The changed TLS files are not used: %s", error)
            return None
        log.info("The TLS files were read again")
        return found


async def serve(config: ServiceConfig, ready: Callable[[int], None] = lambda port: None) -> None:
    """Serve until a signal. ``ready`` is called with the port.

    Raises InvalidArgument (the settings), EtcdUnavailable, PermissionDenied, UsageError (the address cannot be used).
    """
    config.check()
    gate = CallGate(
        AccessFile(Path(config.access)) if config.access else None,
        AuditLog(Path(config.audit_log)) if config.audit_log else None,
    )
    credentials = _Certificates(config).credentials() if config.cert else None
    client, (host, port) = config.client, config.listen
    backend = DirectBackend(EtcdClient(client.etcd), Keys(client.namespace), client.shared_dir)
    stopped = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stopped.set)
    try:
        await backend.connect()
        face = GrpcFace(services(backend), gate)
        try:
            opened = await face.start(f"[{host}]:{port}" if ":" in host else f"{host}:{port}", credentials)
        except OSError as error:
            raise UsageError(f"cannot listen on {host}:{port}: {error}") from None
        log.info("Serving gRPC on %s:%d%s", host, opened, " with TLS" if credentials else "")
        ready(opened)
        await stopped.wait()
        log.info("Stopping: new calls are refused, open ones have %g s", GRACE)
        await face.stop(GRACE)
    finally:
        await backend.close()
