"""Endpoints and credentials: parsing, and the errors of invalid ones."""

from __future__ import annotations

import pytest

from distop.errors import InvalidArgument
from distop.store.connection_settings import Endpoint, EtcdConfig, parse_endpoint


@pytest.mark.parametrize(
    ("text", "endpoint"),
    [
        ("127.0.0.1:2379", Endpoint("127.0.0.1", 2379)),
        ("http://etcd-1.example:2379/", Endpoint("etcd-1.example", 2379, False)),
        ("https://etcd:12379", Endpoint("etcd", 12379, True)),
        (" [::1]:2379 ", Endpoint("[::1]", 2379)),
    ],
)
def test_an_endpoint_is_parsed(text: str, endpoint: Endpoint) -> None:
    assert parse_endpoint(text) == endpoint


@pytest.mark.parametrize("text", ["", "etcd", "etcd:", ":2379", "etcd:0", "etcd:70000", "ftp://etcd:1", "a b:1", "e:²"])
def test_an_invalid_endpoint_is_rejected(text: str) -> None:
    with pytest.raises(InvalidArgument, match="write host:port"):
        parse_endpoint(text)


def test_endpoints_may_be_separated_by_commas() -> None:
    assert EtcdConfig(("a:1, b:2", "c:3,")).endpoints == ("a:1", "b:2", "c:3")


@pytest.mark.parametrize(
    "fields",
    [
        {"endpoints": ()},
        {"endpoints": ("http://a:1", "https://b:2")},
        {"endpoints": ("http://a:1",), "ca_cert": "ca.pem"},
        {"cert": "c.pem"},
        {"username": "root"},
        {"password": "secret"},
        {"namespace": "a/b"},
        {"connect_timeout": 0.0},
    ],
)
def test_an_invalid_combination_of_settings_is_rejected(fields: dict[str, object]) -> None:
    with pytest.raises(InvalidArgument) as caught:
        EtcdConfig(**fields)  # type: ignore[arg-type]
    assert not str(caught.value).endswith("."), "it may be quoted in another sentence"


def test_the_password_is_not_shown() -> None:
    assert "secret" not in repr(EtcdConfig(username="root", password="secret"))
