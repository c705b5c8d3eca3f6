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
from distop.server.call_admission import AccessFile, AuditLog, CallAdmission
from distop.server.grpc_server import GrpcServer
from distop.server.handlers import services
from distop.server.http_server import HttpServer
from distop.server.limits import IdentityLimits
from distop.server.operation_watches import OperationWatches
from distop.server.page.page_app import PageApp
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


class _ServiceComponents:
    """What a service works with before it listens. Raises InvalidArgument for files that cannot be used."""

    def __init__(self, config: ServiceConfig) -> None:
        file = AccessFile(Path(config.access)) if config.access else None
        audit = AuditLog(Path(config.audit_log)) if config.audit_log else None
        self.credentials = _Certificates(config).credentials() if config.cert else None
        client = config.client
        self.etcd, self.keys = EtcdClient(client.etcd), Keys(client.namespace)
        self.admission = CallAdmission(file, audit, IdentityLimits(OpenWorkReader(self.etcd, self.keys)))
        self.etcd.suggests_tables = not self.admission.identifies
        about = {"distop.namespace": client.namespace}
        self._telemetry = telemetry_settings.start("distop-service", about, config.telemetry, os.environ, log)
        if self._telemetry is not None and self._telemetry.traces:
            from distop.server.call_spans import CallSpans

            self.admission.spans = CallSpans(self._telemetry)
        self.backend = DirectBackend(self.etcd, self.keys, client.shared_dir)
        self.watches = OperationWatches(self.etcd, self.keys)

    async def close(self) -> None:
        """Close the connections to etcd and to the collector."""
        await self.watches.close()
        await self.backend.close()
        if self._telemetry is not None:
            await asyncio.to_thread(self._telemetry.close)


class _ServiceListeners:
    """The servers of gRPC and HTTP."""

    def __init__(self, config: ServiceConfig, components: _ServiceComponents) -> None:
        self._config = config
        self._credentials, self._watches = components.credentials, components.watches
        admission, handlers = components.admission, services(components.backend, components.watches)
        self._page = PageApp(handlers, admission, components.etcd, components.keys)
        self._grpc, self._http = GrpcServer(handlers, admission), HttpServer(handlers, admission, self._page)

    async def start(self) -> int:
        """Listen; returns the port of gRPC. Raises UsageError if an address cannot be used."""
        host, port = self._config.listen
        secured = " with TLS" if self._credentials else ""
        try:
            address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
            opened = await self._grpc.start(address, self._credentials)
        except OSError as error:
            raise UsageError(f"cannot listen on {host}:{port}: {error}") from None
        log.info("Serving gRPC on %s:%d%s", host, opened, secured)
        if self._config.http is not None:
            await self._start_http(*self._config.http, secured)
        return opened

    async def _start_http(self, host: str, port: int, secured: str) -> None:
        config = self._config
        try:
            opened = await self._http.start(host, port, config.cert, config.key, config.client_ca)
        except OSError as error:
            raise UsageError(f"cannot listen on {host}:{port}: {error}") from None
        scheme, named = "https" if secured else "http", f"[{host}]" if ":" in host else host
        log.info("Serving HTTP on %s:%d%s; the page is at %s://%s:%d/", host, opened, secured, scheme, named, opened)

    async def run(self, stopped: asyncio.Event) -> None:
        """Serve until the event, and then end the open calls in order."""
        while not stopped.is_set():
            with suppress(TimeoutError):
                async with asyncio.timeout(TLS_EVERY):
                    await stopped.wait()
            self._http.renew_tls()
        log.info("Stopping: new calls are refused, open ones have %g s", GRACE)
        self._watches.stop()
        await asyncio.gather(self._grpc.stop(GRACE), self._http.stop(GRACE))
        await self._page.close()


async def serve(config: ServiceConfig, ready: Callable[[int], None] = lambda port: None) -> None:
    """Serve until a signal. ``ready`` is called with the port.

    Raises InvalidArgument (the settings), EtcdUnavailable, PermissionDenied, UsageError (the address cannot be used).
    """
    config.check()
    components, stopped = _ServiceComponents(config), asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stopped.set)
    try:
        await components.backend.connect()
        listeners = _ServiceListeners(config, components)
        ready(await listeners.start())
        await listeners.run(stopped)
    finally:
        await components.close()
