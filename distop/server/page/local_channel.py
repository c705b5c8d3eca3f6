"""Calls of the service's own handlers, each admitted: the page's client is a remote client without a network."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from distop.client.remote_backend import RemoteBackend

if TYPE_CHECKING:
    from collections.abc import Mapping

    from distop.client.backend import Backend
    from distop.server.call_admission import CallAdmission, CallerCredentials


class LocalChannel:
    """The calls of one caller. It has the methods of a ServiceChannel."""

    def __init__(self, services: Mapping[str, Any], admission: CallAdmission, credentials: CallerCredentials) -> None:
        self._services = services
        self._admission = admission
        self.credentials = credentials

    async def connect(self, limit: float) -> None:
        """There is no connection."""

    async def close(self) -> None:
        """There is no connection."""

    async def call(self, method: str, request: Any, *, writes: bool, limit: float = 0.0) -> Any:
        """Call ``Service/Method``. Raises what the admission and the handler raise."""
        service, _, name = method.partition("/")
        handler = getattr(self._services[f"distop.v1.{service}"], name)
        with self._admission.admit(method, request, self.credentials) as admitted:
            return await admitted.run(handler)

    def may(self, method: str, request: Any) -> bool:
        """Whether the caller may make this call now. Nothing is logged or counted."""
        return self._admission.permits(method, request, self.credentials)

    def backend(self) -> Backend:
        """The calls as a client has them."""
        channel: Any = self
        return RemoteBackend(channel, identified=self._admission.identifies)
