"""The records of an operation that an executor reads before it serves it, and unreadable ones."""

from __future__ import annotations

import re
from typing import Any

import pytest

from distop.errors import NotFound, UnreadableRecord
from distop.protocol.behavior_declaration import Rules
from distop.protocol.identity import plan_digest
from distop.protocol.json_codec import SCHEMA_VERSION
from distop.protocol.keys import Keys
from distop.protocol.plan import PartitionPlan, Plan, chunked
from distop.protocol.records import OperationRef, Spec
from distop.protocol.txn import Put, Txn
from distop.services.open_operation import OpenOperation
from distop.testing import ModelStore

REF = OperationRef("t", "noop", "", 1)
KEYS = Keys()
CHUNKS = chunked([PartitionPlan(n, f"p={n}") for n in range(9)], 200)
SPEC = Spec("request", "", "tester", Rules())


class Reader:
    """A store with the records of an operation; ``changed`` replaces some of them."""

    def __init__(self, **changed: bytes) -> None:
        self.store = ModelStore()
        records = {
            "spec": SPEC.encode(),
            "arg": b"{}",
            "plan": Plan(9, "v", plan_digest(CHUNKS), len(CHUNKS)).encode(),
            **{f"plan.{n:06d}": chunk for n, chunk in enumerate(CHUNKS)},
            **changed,
        }
        root = KEYS.of(REF, "state").removesuffix("state")
        self.store.apply(Txn((), tuple(Put(root + name, value) for name, value in records.items() if value)))

    async def read(self, *gets: Any) -> list[Any]:
        return list(self.store.apply(Txn((), gets)).responses)

    async def list(self, first: str, after: str, page: int = 0) -> Any:
        (answer,) = self.store.apply(Txn((), (type(OpenOperation.records(KEYS, REF)[0])(first, after),))).responses
        return answer


async def load(**changed: bytes) -> OpenOperation:
    reader: Any = Reader(**changed)
    return await OpenOperation.load(reader, KEYS, REF, 1)


FEW = [b'[{"partition":0,"name":"a"}]', b'[{"partition":2,"name":"b"}]']
"""Two chunks of one job each; the number of the second one leaves a gap."""


def chunks_of(chunks: list[bytes]) -> dict[str, bytes]:
    return {f"plan.{n:06d}": chunk for n, chunk in enumerate(chunks)}


async def test_every_partition_of_a_plan_in_chunks_is_found() -> None:
    op = await load()
    assert len(CHUNKS) > 2
    assert [op.partition(n)["name"] for n in range(9)] == [f"p={n}" for n in range(9)]
    with pytest.raises(KeyError):
        op.partition(9)


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"spec": b"\xff"}, "the record at distOp.t.noop.1.spec cannot be read"),
        ({"arg": b"{oops"}, "the record at distOp.t.noop.1.arg cannot be read"),
        ({"plan": b"[]"}, "the record at distOp.t.noop.1.plan cannot be read"),
        ({"plan.000001": CHUNKS[0]}, "the plan of t/noop/1 does not match its digest"),
        (
            {"plan": Plan(9, "v", plan_digest([b"packed"]), 1).encode(), "plan.000000": b"packed"},
            "the plan of t/noop/1 has chunks in a form that this release does not know",
        ),
        *(
            (
                {"plan": Plan(count, "v", plan_digest(FEW), len(FEW)).encode(), **chunks_of(FEW)},
                f"the plan of t/noop/1 has chunks that do not contain its {count} jobs",
            )
            for count in (1_000_000, 2, 1)
        ),
        (
            {"spec": Spec("request", "", "tester", Rules(), version=SCHEMA_VERSION + 1).encode()},
            "a newer release of distop wrote t/noop/1",
        ),
    ],
)
async def test_the_error_names_the_unreadable_record(changed: dict[str, bytes], words: str) -> None:
    with pytest.raises(UnreadableRecord, match=re.escape(words)):
        await load(**changed)


async def test_an_operation_without_a_plan_is_not_found() -> None:
    with pytest.raises(NotFound):
        await load(plan=b"")


@pytest.mark.parametrize("gone", [range(len(CHUNKS)), range(1), range(1, len(CHUNKS))])
async def test_an_operation_that_is_cleaned_up_while_it_is_read_has_ended(gone: range) -> None:
    """The simulator found that it was reported as a plan that does not match its digest."""
    with pytest.raises(NotFound, match="has ended"):
        await load(**{f"plan.{n:06d}": b"" for n in gone})
