"""Fixtures of all unit tests."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from distop.clock import source
from distop.runtime import secret_settings
from distop.storage import remote_store, storage_options
from distop.storage.remote_listing import RemoteListing
from distop.storage.storage_options import StorageOptions
from tests.unit.support.clock import StandingClock

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture
def clock() -> Iterator[StandingClock]:
    """A standing clock, with fixed random numbers, in place of the system's."""
    one = StandingClock()
    token = source.set(one)
    yield one
    source.reset(token)


@pytest.fixture
def short_time_limit(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Requests to S3 are repeated for a tenth of a second only. A listing, which ends at its limit, has more time."""
    storage_options.configure({"s3://": StorageOptions(time_limit=0.1)})
    monkeypatch.setattr(remote_store, "RemoteListing", lambda *most: RemoteListing(*most[:-1], limit=20.0))
    yield
    storage_options.configure({})


@pytest.fixture(autouse=True)
def no_hidden_secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    """Secrets that a test hides are forgotten before the next one."""
    monkeypatch.setattr(secret_settings, "_hidden", frozenset())
    monkeypatch.setattr(secret_settings, "_any_hidden", None)
