"""Certificates of callers over HTTP."""

from __future__ import annotations

import ssl
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import httpx
import pytest

from distop.server.call_admission import AccessFile, CallAdmission
from distop.server.http_server import HttpServer, certificate_names
from distop.v1 import tables_pb2
from tests.support.certificates import Certificates, make_certificates
from tests.unit.server.test_http_server import NAMES, Scripted
from tests.unit.support.model_service import identities, token_of

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

ACCESS = (
    identities(etl="")
    + """
[identities.machine]
certificates = ["CN=client"]
[[grants]]
to = ["etl"]
role = "admin"
[[grants]]
to = ["machine"]
role = "viewer"
"""
)


@asynccontextmanager
async def served(folder: Path, certificates: Certificates) -> AsyncIterator[str]:
    """The URL of a service that identifies callers by certificates, too."""
    (folder / "access.toml").write_text(ACCESS)
    scripted = Scripted()
    scripted.answers |= {"List": tables_pb2.ListTablesResponse(), "Remove": tables_pb2.RemoveTableResponse()}
    server = HttpServer(dict.fromkeys(NAMES, scripted), CallAdmission(AccessFile(folder / "access.toml")))
    port = await server.start(
        "127.0.0.1", 0, certificates.server_cert, certificates.server_key, client_ca=certificates.ca
    )
    try:
        yield f"https://127.0.0.1:{port}"
    finally:
        await server.stop(10)


def trusting(certificates: Certificates, own: Certificates | None = None) -> ssl.SSLContext:
    context = ssl.create_default_context(cafile=certificates.ca)
    if own is not None:
        context.load_cert_chain(own.client_cert, own.client_key)
    return context


async def test_a_certificate_identifies_a_caller_without_a_token(tmp_path: Path) -> None:
    certificates = make_certificates(tmp_path)
    token = {"authorization": f"Bearer {token_of('etl')}"}
    async with served(tmp_path, certificates) as url:
        async with httpx.AsyncClient(base_url=url, verify=trusting(certificates, certificates)) as client:
            assert (await client.get("/v1/tables")).status_code == 200
            assert (await client.delete("/v1/tables/t")).status_code == 403, "the machine is a viewer"
            assert (await client.delete("/v1/tables/t", headers=token)).status_code == 200, "a token comes first"
        async with httpx.AsyncClient(base_url=url, verify=trusting(certificates)) as client:
            assert (await client.get("/v1/tables")).status_code == 401
            assert (await client.get("/v1/tables", headers=token)).status_code == 200


async def test_a_certificate_of_another_authority_is_refused(tmp_path: Path) -> None:
    certificates, folder = make_certificates(tmp_path), tmp_path / "other"
    folder.mkdir()
    strangers = make_certificates(folder)
    async with served(tmp_path, certificates) as url:
        async with httpx.AsyncClient(base_url=url, verify=trusting(certificates, strangers)) as client:
            with pytest.raises(httpx.TransportError):
                await client.get("/v1/tables")


def test_the_names_of_a_certificate_have_their_kinds() -> None:
    certificate = {
        "subject": ((("organizationName", "CN=root"),), (("commonName", "me"),)),
        "subjectAltName": (("DNS", "URI:b"), ("URI", "spiffe://ops"), ("email", "a@b.c"), ("IP Address", "::1")),
    }
    assert certificate_names(certificate) == ["CN=me", "DNS:URI:b", "URI:spiffe://ops"]
