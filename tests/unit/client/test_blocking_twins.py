"""The blocking classes offer what the asynchronous ones do."""

from __future__ import annotations

import inspect
from typing import Any

import pytest

from distop import aio, blocking

ASYNCIO_ONLY = {
    "Client": {
        "connect": "the blocking client connects when it is made",
        "etcd": "a connection belongs to its event loop",
        "keys": "for `etcd` alone",
        "jobs_changed": "for `aio.Worker`",
        "jobs_version": "for `aio.Worker`",
    },
    "Operation": {"remove_done_callback": "for `asyncio.wait`"},
    "Job": {"give_back": "for `aio.Worker`", "wait_lost": "blocking callers poll `lost`"},
    "Worker": {"forget": "for `aio.Job`", "held": "for `aio.Job`"},
}
"""Public members without a blocking twin, and why."""
BLOCKING_ONLY = {"Worker": {"actor"}}


def members(owner: type) -> dict[str, Any]:
    """Public members: a function's parameters with defaults, or the kind of another member."""
    return {
        name: [(p.name, p.kind, p.default) for p in inspect.signature(member).parameters.values()]
        if callable(member)
        else type(member)
        for name, member in inspect.getmembers(owner)
        if not name.startswith("_")
    }


@pytest.mark.parametrize("name", ASYNCIO_ONLY)
def test_a_blocking_class_has_the_methods_of_its_asynchronous_twin(name: str) -> None:
    asynchronous, twin = members(getattr(aio, name)), members(getattr(blocking, name))
    assert asynchronous.keys() - twin.keys() == ASYNCIO_ONLY[name].keys()
    assert twin.keys() - asynchronous.keys() == BLOCKING_ONLY.get(name, set())
    for common in asynchronous.keys() & twin.keys():
        assert twin[common] == asynchronous[common], common
