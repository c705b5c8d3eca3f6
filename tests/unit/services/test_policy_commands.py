"""Commands on policies, on the model of etcd: lost answers, and other users in between."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from distop.errors import OutcomeUnknown
from distop.protocol.keys import Keys
from distop.protocol.txn import Txn, TxnResult
from distop.services import policies
from tests.unit.support.model_submission import TABLE, Etcd, run

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

KEYS, NAME = Keys(), "nightly"


def client(etcd: Etcd) -> Any:
    return etcd


async def set_policy(etcd: Etcd, priority: int = 0, name: str = NAME) -> policies.PolicyStatus:
    wanted = policies.definition(name, "noop", {}, 60.0, (), None, {"priority": priority})
    (made,) = await policies.set_policies(client(etcd), KEYS, TABLE, {name: wanted})
    return made


async def there(etcd: Etcd) -> list[tuple[str, str, int]]:
    found = await policies.policies(client(etcd), KEYS, TABLE)
    return [(one.name, one.stage, one.policy.options.priority if one.policy is not None else 0) for one in found]


def answer_lost(etcd: Etcd, meanwhile: Callable[[], Awaitable[Any]]) -> None:
    """The next transaction is applied and its answer is lost; before it is sent again, somebody else acts."""

    async def fate(txn: Txn) -> TxnResult:
        assert etcd.store.apply(txn).succeeded
        await meanwhile()
        return replace(etcd.store.apply(txn), repeated=True)

    etcd.fates.append(fate)


def answered(etcd: Etcd, meanwhile: Callable[[], Awaitable[Any]]) -> None:
    """The next transaction is applied; before its sender does anything else, somebody else acts."""

    async def fate(txn: Txn) -> TxnResult:
        result = etcd.store.apply(txn)
        await meanwhile()
        return result

    etcd.fates.append(fate)


async def removed(etcd: Etcd) -> None:
    await policies.remove(client(etcd), KEYS, TABLE, NAME)


async def paused(etcd: Etcd) -> None:
    await policies.pause(client(etcd), KEYS, TABLE, NAME)


async def resumed(etcd: Etcd) -> None:
    await policies.resume(client(etcd), KEYS, TABLE, NAME)


async def nothing(etcd: Etcd) -> None:
    """Nobody else acts."""


def test_a_policy_that_was_removed_before_the_answer_is_not_made_again() -> None:
    async def work(etcd: Etcd) -> None:
        answer_lost(etcd, lambda: removed(etcd))
        with pytest.raises(OutcomeUnknown, match="whether nightly of the table 't' was set and then removed"):
            await set_policy(etcd)
        assert await there(etcd) == []
        answered(etcd, lambda: removed(etcd))
        assert (await set_policy(etcd)).stage == "active"
        assert await there(etcd) == []

    run(work)


@pytest.mark.parametrize(
    ("meanwhile", "left"),
    [
        (nothing, (NAME, "active", 1)),
        (paused, (NAME, "paused", 1)),
        (lambda etcd: set_policy(etcd, 7), (NAME, "active", 7)),
    ],
)
@pytest.mark.parametrize("fate", [answer_lost, answered])
@pytest.mark.parametrize("exists", [False, True])
def test_what_others_did_after_a_set_stays(
    meanwhile: Callable[[Etcd], Awaitable[Any]], left: tuple[str, str, int], fate: Callable[..., None], exists: bool
) -> None:
    async def work(etcd: Etcd) -> None:
        if exists:
            await set_policy(etcd)
        fate(etcd, lambda: meanwhile(etcd))
        assert (await set_policy(etcd, 1)).name == NAME
        assert await there(etcd) == [left]

    run(work)


@pytest.mark.parametrize("fate", [answer_lost, answered])
def test_a_pause_that_was_ended_by_another_user_is_not_repeated(fate: Callable[..., None]) -> None:
    async def work(etcd: Etcd) -> None:
        await set_policy(etcd)
        fate(etcd, lambda: resumed(etcd))
        await paused(etcd)
        assert await there(etcd) == [(NAME, "active", 0)]
        await paused(etcd)
        fate(etcd, lambda: paused(etcd))
        await resumed(etcd)
        assert await there(etcd) == [(NAME, "paused", 0)]

    run(work)


@pytest.mark.parametrize("fate", [answer_lost, answered])
def test_a_removal_leaves_a_policy_that_was_made_since(fate: Callable[..., None]) -> None:
    async def work(etcd: Etcd) -> None:
        await set_policy(etcd)
        fate(etcd, lambda: set_policy(etcd, 7))
        await removed(etcd)
        assert await there(etcd) == [(NAME, "active", 7)]

    run(work)


def test_only_a_transaction_that_makes_a_policy_writes_the_mark() -> None:
    async def work(etcd: Etcd) -> None:
        marks = []
        for step in (set_policy(etcd), set_policy(etcd, 1), paused(etcd), resumed(etcd), removed(etcd)):
            await step
            marks.append(etcd.store.mod(KEYS.policy_mark()))
        assert len(set(marks)) == 1
        await set_policy(etcd)
        assert etcd.store.mod(KEYS.policy_mark()) > marks[0]

    run(work)
