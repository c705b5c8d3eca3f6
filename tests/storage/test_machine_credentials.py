"""Credentials that a machine or a container gives: obstore and pyarrow sign with the same ones."""

from __future__ import annotations

import json
import re
import uuid
from typing import TYPE_CHECKING

import pytest

from distop.storage import storage_options
from distop.storage.opened_stores import open_store
from distop.storage.storage_access import storage_access_for
from tests.storage import servers
from tests.storage.faulty_http import FaultyProxy

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from tests.storage.faulty_http import Seen

KEYS = {
    "Code": "Success",
    "Type": "AWS-HMAC",
    "AccessKeyId": "of-the-machine",
    "SecretAccessKey": "s",
    "Token": "t",
    "LastUpdated": "2026-01-01T00:00:00Z",
    "Expiration": "2099-01-01T00:00:00Z",
}
pytestmark = pytest.mark.timeout(300)
ROLES = "/latest/meta-data/iam/security-credentials"
ANSWERS = {
    "/latest/api/token": "a-token",
    ROLES: "role",
    f"{ROLES}/role": json.dumps(KEYS),
    "/latest/meta-data/placement/availability-zone": "us-east-1a",
    "/container": json.dumps(KEYS),
}


def service(seen: Seen, forward: Callable[[bytes], bytes]) -> bytes:
    """The machine's service for credentials; other requests are for the store."""
    body = ANSWERS.get(seen.target.partition("?")[0].rstrip("/"))
    if body is None:
        return forward(seen.whole)
    headers = f"x-aws-ec2-metadata-token-ttl-seconds: 600\r\ncontent-length: {len(body)}\r\nconnection: close"
    return f"HTTP/1.1 200 OK\r\n{headers}\r\n\r\n{body}".encode()


@pytest.fixture
def proxy() -> Iterator[FaultyProxy]:
    with servers.moto() as served, FaultyProxy(served.port) as found:
        found.fault = service
        storage_options.configure(served.options(found.port))
        yield found


def signers(proxy: FaultyProxy) -> set[bytes]:
    """The access keys of the requests to the store; "": of one without a signature."""
    requests = [seen.whole for seen in proxy.seen if seen.target.startswith(f"/{servers.BUCKET}")]
    proxy.seen.clear()
    found = [re.search(rb"(?i)credential=([^/]+)/", whole) for whole in requests]
    return {one[1] if one else b"" for one in found}


@pytest.mark.parametrize("source", ["instance", "container"])
def test_obstore_and_pyarrow_use_the_credentials_of_the_machine(
    source: str, proxy: FaultyProxy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    at = f"http://127.0.0.1:{proxy.port}"
    if source == "instance":
        monkeypatch.delenv("AWS_EC2_METADATA_DISABLED")
        monkeypatch.setenv("AWS_METADATA_ENDPOINT", at)  # obstore's name
        monkeypatch.setenv("AWS_EC2_METADATA_SERVICE_ENDPOINT", at)
    else:
        (tmp_path / "token").write_text("a-token")
        monkeypatch.setenv("AWS_CONTAINER_CREDENTIALS_FULL_URI", f"{at}/container")
        monkeypatch.setenv("AWS_CONTAINER_AUTHORIZATION_TOKEN_FILE", str(tmp_path / "token"))
    location = f"s3://{servers.BUCKET}/{uuid.uuid4().hex}"
    open_store(location).put_new("a", b"content")
    assert signers(proxy) == {b"of-the-machine"}
    filesystem, path = storage_access_for(f"{location}/a").pyarrow()
    with filesystem.open_input_stream(path) as file:
        assert file.read() == b"content"
    assert signers(proxy) == {b"of-the-machine"}
