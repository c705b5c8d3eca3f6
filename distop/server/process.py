"""The service's process: connects to etcd, serves until SIGTERM or SIGINT, and then ends the open calls in order."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import grpc

from distop.client.direct_backend import DirectBackend
from distop.errors import InvalidArgument, UsageError
from distop.protocol.frozen import frozen
from distop.protocol.keys import Keys
from distop.runtime import telemetry_settings
from distop.server.gate import AccessFile, AuditLog, CallGate
from distop.server.grpc_face import GrpcFace
from distop.server.handlers import services
from distop.server.limits import IdentityLimits
from distop.server.operation_watches import OperationWatches
from distop.server.page.page_app import PageApp
from distop.server.rest_face import RestFace
from distop.services.inspection.open_work import OpenWorkReader
from distop.store import tls_files
from distop.store.client import EtcdClient
from distop.store.connection_settings import EtcdConfig

if TYPE_CHECKING:
    from collections.abc import Callable

    from distop.settings import ClientConfig

log = logging.getLogger("distop.service")

GRACE = 10.0
"""Seconds for which open calls may go on after a signal."""
TLS_EVERY = 5.0
"""Seconds between two looks whether the TLS files of REST have changed. gRPC looks at each handshake."""
LOOPBACK = ("127.0.0.1", "::1", "localhost")


@frozen
class ServiceConfig:
    """The settings of a service.

    ``listen``: host and port of gRPC. ``http``: those of REST; None: it is not served. ``access``: the file with
    identities and grants; "": callers are not identified. ``audit_log``: the file for a line of JSON for each writing
    call and each refusal; "": none. ``cert``, ``key``: PEM files for TLS. ``client_ca``: a PEM file; every caller of
    gRPC must show a certificate that it has signed. ``telemetry``: a collector's URL; None: only if variables say so.
    """

    client: ClientConfig
    listen: tuple[str, int]
    access: str = ""
    audit_log: str = ""
    cert: str = ""
    key: str = ""
    client_ca: str = ""
    http: tuple[str, int] | None = None
    telemetry: str | None = None

    def check(self) -> None:
        """Raises InvalidArgument for settings that contradict each other, or that let strangers in."""
        if bool(self.cert) != bool(self.key):
            raise InvalidArgument("service-cert and service-key belong together: give both, or neither")
        if self.client_ca and not self.cert:
            raise InvalidArgument("client-ca needs TLS: give service-cert and service-key, too")
        if self.client_ca and not self.access:
            raise InvalidArgument("client-ca needs an access file, which says who the owners of certificates are")
        for host, _ in filter(None, (self.listen, self.http)):
            self._check_reach(host)

    def _check_reach(self, host: str) -> None:
        missing = [name for name, given in (("access", self.access), ("service-cert", self.cert)) if not given]
        if host not in LOOPBACK and missing:
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
    file = AccessFile(Path(config.access)) if config.access else None
    audit = AuditLog(Path(config.audit_log)) if config.audit_log else None
    credentials = _Certificates(config).credentials() if config.cert else None
    client, (host, port) = config.client, config.listen
    etcd, keys = EtcdClient(client.etcd), Keys(client.namespace)
    gate = CallGate(file, audit, IdentityLimits(OpenWorkReader(etcd, keys)))
    about = {"distop.namespace": client.namespace}
    telemetry = telemetry_settings.start("distop-service", about, config.telemetry, os.environ, log)
    if telemetry is not None and telemetry.traces:
        from distop.server.call_spans import CallSpans

        gate.spans = CallSpans(telemetry)
    etcd.suggests_tables = not gate.identifies
    backend = DirectBackend(etcd, keys, client.shared_dir)
    watches = OperationWatches(etcd, keys)
    stopped = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stopped.set)
    try:
        await backend.connect()
        handlers = services(backend, watches)
        page = PageApp(handlers, gate, etcd, backend.keys)
        face, rest = GrpcFace(handlers, gate), RestFace(handlers, gate, page)
        try:
            opened = await face.start(f"[{host}]:{port}" if ":" in host else f"{host}:{port}", credentials)
        except OSError as error:
            raise UsageError(f"cannot listen on {host}:{port}: {error}") from None
        log.info("Serving gRPC on %s:%d%s", host, opened, " with TLS" if credentials else "")
        if config.http is not None:
            at, wanted = config.http
            try:
                served = await rest.start(at, wanted, config.cert, config.key, config.client_ca)
            except OSError as error:
                raise UsageError(f"cannot listen on {at}:{wanted}: {error}") from None
            scheme, named = "https" if credentials else "http", f"[{at}]" if ":" in at else at
            log.info("Serving HTTP on %s:%d%s; the page is at %s://%s:%d/", at, served,
                     " with TLS" if credentials else "", scheme, named, served)  # fmt: skip
        ready(opened)
        while not stopped.is_set():
            with suppress(TimeoutError):
                async with asyncio.timeout(TLS_EVERY):
                    await stopped.wait()
            rest.renew_tls()
        log.info("Stopping: new calls are refused, open ones have %g s", GRACE)
        watches.stop()
        await asyncio.gather(face.stop(GRACE), rest.stop(GRACE))
        await page.close()
    finally:
        await watches.close()
        await backend.close()
        if telemetry is not None:
            await asyncio.to_thread(telemetry.close)
