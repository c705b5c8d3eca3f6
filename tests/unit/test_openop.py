"""What an executor reads of an operation before it claims."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from distop.core.declaration import Rules
from distop.core.digest import plan_digest
from distop.core.keys import Keys
from distop.core.model import OperationRef, Spec
from distop.core.plan import PartitionPlan, Plan, chunked
from distop.core.txn import Get, GetResult, KeyValue
from distop.errors import DistopError, NotFound
from distop.openop import OpenOperation

KEYS = Keys()
REF = OperationRef("t", "noop", "", 1)
CHUNKS = chunked([PartitionPlan(n, f"p={n}") for n in range(20)], 200)
PLAN = Plan(20, "v1", plan_digest(CHUNKS), len(CHUNKS))


class Etcd:
    """Answers the first read with the operation as it was, and the listing with the chunks that are left by then."""

    def __init__(self, left: list[bytes]) -> None:
        self._left = left

    async def read(self, *wanted: Get) -> list[GetResult]:
        stored = {
            KEYS.of(REF, "spec"): Spec("r", "", "", Rules()).encode(),
            KEYS.of(REF, "arg"): b"{}",
            KEYS.of(REF, "plan"): PLAN.encode(),
        }
        values = [stored.get(get.key, CHUNKS[0]) for get in wanted]
        return [GetResult((KeyValue(get.key, value, 1),), 1) for get, value in zip(wanted, values, strict=True)]

    async def list(self, *_: Any, **__: Any) -> Any:
        return SimpleNamespace(kvs=[KeyValue("", value, 1) for value in self._left])


async def load(left: list[bytes]) -> OpenOperation:
    etcd: Any = Etcd(left)
    return await OpenOperation.load(etcd, KEYS, REF, 1)


async def test_a_plan_in_several_chunks() -> None:
    op = await load(CHUNKS)
    assert [op.partition(p)["name"] for p in (0, 19)] == ["p=0", "p=19"]


@pytest.mark.parametrize("left", [[], CHUNKS[1:]])
async def test_an_operation_that_is_cleaned_up_while_it_is_read_has_ended(left: list[bytes]) -> None:
    """The simulator found that this was told as a plan that does not fit its digest."""
    with pytest.raises(NotFound, match="has ended meanwhile"):
        await load(left)


async def test_chunks_that_were_not_planned_are_told() -> None:
    with pytest.raises(DistopError, match="does not fit its digest"):
        await load([*CHUNKS[1:], CHUNKS[0]])
