"""A service on the model of etcd, over gRPC and HTTP. Several may share one model."""

from __future__ import annotations

import hashlib
import json
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING, Any

import grpc
import httpx
from google.protobuf import descriptor_pool, message_factory

from distop.client.direct_backend import DirectBackend
from distop.protocol.keys import Keys
from distop.server.call_admission import AccessFile, AuditLog, CallAdmission
from distop.server.grpc_server import GrpcServer
from distop.server.handlers import services
from distop.server.http_server import HttpServer
from distop.server.limits import IdentityLimits
from distop.services.inspection.open_work import OpenWorkReader

if TYPE_CHECKING:
    from pathlib import Path
    from typing import Self

    from tests.unit.support.model_submission import Etcd

KEYS = Keys()


def token_of(name: str) -> str:
    """The token of an identity in these tests."""
    return f"the token of {name} in tests"


def identities(**limits: str) -> str:
    """Identities of an access file with their tokens. ``limits``: further lines of each."""
    return "".join(
        f'[identities.{name}]\ntoken_sha256 = ["{hashlib.sha256(token_of(name).encode()).hexdigest()}"]\n{more}\n'
        for name, more in limits.items()
    )


class ModelService:
    """A service. ``access``: the text of its access file; "": it identifies nobody."""

    def __init__(self, etcd: Etcd, folder: Path, access: str = "") -> None:
        self.etcd = etcd
        self.audit = folder / "audit.jsonl"
        if access:
            (folder / "access.toml").write_text(access)
        limits = IdentityLimits(OpenWorkReader(etcd, KEYS))  # type: ignore[arg-type]
        admission = CallAdmission(AccessFile(folder / "access.toml") if access else None, AuditLog(self.audit), limits)
        handlers = services(DirectBackend(etcd, KEYS))  # type: ignore[arg-type]
        self.grpc, self.rest = GrpcServer(handlers, admission), HttpServer(handlers, admission)
        self._open = AsyncExitStack()

    async def __aenter__(self) -> Self:
        port = await self.grpc.start("127.0.0.1:0")
        self._open.push_async_callback(self.grpc.stop, 0)
        self.channel = await self._open.enter_async_context(grpc.aio.insecure_channel(f"127.0.0.1:{port}"))
        transport = httpx.ASGITransport(self.rest)
        self.http = httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1")
        await self._open.enter_async_context(self.http)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._open.aclose()

    async def call(self, method: str, request: Any, who: str | None = None) -> Any:
        """The answer over gRPC. ``method``: its full name, as package.Service/Method."""
        service, _, name = method.partition("/")
        found = descriptor_pool.Default().FindServiceByName(service).methods_by_name[name]
        answer = message_factory.GetMessageClass(found.output_type)
        call = self.channel.unary_unary(f"/{method}", type(request).SerializeToString, answer.FromString)
        return await call(request, metadata=() if who is None else (("authorization", f"Bearer {token_of(who)}"),))

    async def code(self, method: str, request: Any, who: str | None = None) -> str:
        """The status over gRPC."""
        try:
            await self.call(method, request, who)
        except grpc.aio.AioRpcError as error:
            return error.code().name
        return "OK"

    async def ask(self, verb: str, path: str, data: Any = None, who: str | None = None) -> httpx.Response:
        """The answer over REST."""
        headers = {} if who is None else {"authorization": f"Bearer {token_of(who)}"}
        if data is None:
            return await self.http.request(verb, path, headers=headers)
        content = json.dumps(data).encode()
        return await self.http.request(
            verb, path, content=content, headers={**headers, "content-type": "application/json"}
        )

    def verdicts(self) -> list[tuple[str | None, str, str]]:
        """Identity, call and verdict of each line of the audit log."""
        lines = map(json.loads, self.audit.read_text().splitlines())
        return [(one["identity"], one["call"], one["verdict"]) for one in lines]
