"""The addresses in the URL of a service."""

from __future__ import annotations

import pytest

from distop.client.service_channel import ServiceChannel
from distop.errors import InvalidArgument


def target_of(url: str) -> set[str]:
    kind, _, addresses = ServiceChannel(url)._target.partition(":")
    return {kind, *addresses.split(",")}


def test_one_address_is_left_to_grpc() -> None:
    assert ServiceChannel("grpc://services.internal")._target == "services.internal:7781"


def test_several_addresses_are_those_of_one_channel() -> None:
    assert target_of("grpc://10.0.0.1,10.0.0.2:80,localhost:7") == {
        "ipv4",
        "10.0.0.1:7781",
        "10.0.0.2:80",
        "127.0.0.1:7",
    }
    assert target_of("grpc://[::1]:1,[fe80::2]:2") == {"ipv6", "[::1]:1", "[fe80::2]:2"}


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("grpc://a,b", "'a' is a name: give several services by IP addresses"),
        ("grpc://127.0.0.1,[::1]", "all of IPv4, or all of IPv6"),
        ("grpc://127.0.0.1,", "is not the URL of a service"),
        ("grpc://127.0.0.1,x@127.0.0.1", "is not the URL of a service"),
    ],
)
def test_wrong_addresses_are_refused(url: str, words: str) -> None:
    with pytest.raises(InvalidArgument, match=words.replace("[", r"\[")):
        ServiceChannel(url)


def test_a_token_is_not_sent_in_plain_text_to_any_address() -> None:
    with pytest.raises(InvalidArgument, match="would be sent as plain text"):
        ServiceChannel("grpc://127.0.0.1,10.0.0.1", token="x" * 20)
    assert ServiceChannel("grpc://127.0.0.1,127.0.0.2:1", token="")._target.startswith("ipv4:")
