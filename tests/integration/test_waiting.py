"""Operations that wait for a time and for others, with real daemons on a real etcd, whose history is audited."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING

import pytest

from distop import After
from distop.errors import InvalidArgument, NotAllowed, NotFound, OperationStartError

if TYPE_CHECKING:
    from distop.blocking import Operation
    from tests.support.daemons import Daemons

pytestmark = pytest.mark.etcd

TABLE = "t"
LIMIT = 60


def noop(group: Daemons, sleep: float = 0, fail: bool = False, **options: object) -> Operation:
    return group.client.start_operation("noop", TABLE, {"sleep": sleep, "fail": ["0"] if fail else []}, **options)


def finished(op: Operation) -> datetime:
    return datetime.fromisoformat(op.wait(LIMIT).record["finished"])


def test_L16_a_chain_runs_in_its_order(group: Daemons) -> None:
    group.start("e1")
    group.start("e2")
    first = noop(group, sleep=0.3)
    second = noop(group, after=[first])
    third = group.client.start_operation("noop", "@cluster", {}, after=[second.ref, first.ref])
    assert third.status().state == "pending"
    assert finished(first) < finished(second) < finished(third)
    assert noop(group, after=[first]).wait(LIMIT).state == "success", "what is complete is waited for no more"


def test_L24_an_abort_cascades_to_all_successors_with_the_reason(group: Daemons) -> None:
    group.start("e1")
    bad = noop(group, sleep=0.2, fail=True)
    second = noop(group, after=[bad])
    third = noop(group, after=[second])
    whatever = noop(group, after=[After(bad.parts, "end")])
    ended = third.wait(LIMIT)
    assert (second.wait(LIMIT).state, ended.state) == ("cancelled", "cancelled")
    assert ended.record["cancel"] == {"reason": "aborted", "text": f"{second.ref} ended as cancelled"}
    assert second.wait(LIMIT).record["cancel"]["text"] == f"{bad.ref} ended as failed"
    assert whatever.wait(LIMIT).state == "success"
    with pytest.raises(OperationStartError, match="ended as failed, so an operation that waits for its success"):
        noop(group, after=[bad])


def test_L36_a_join_ends_with_the_last_of_those_it_waits_for(group: Daemons) -> None:
    group.start("e1")
    parts = [noop(group, sleep=0.1) for _ in range(40)]
    join = group.client.start_operation("join", "@cluster", after=parts)
    assert finished(join) >= max(finished(part) for part in parts)
    assert join.wait().jobs["total"] == 0


def test_P2_it_begins_at_its_time_and_one_that_has_passed_is_now(group: Daemons) -> None:
    group.start("e1")
    due = datetime.now(UTC) + timedelta(seconds=1.5)
    later = noop(group, not_before=due)
    assert later.status().state == "pending"
    assert noop(group, not_before="2020-01-01T00:00:00Z").wait(LIMIT).state == "success"
    assert later.status().state == "pending"
    assert finished(later) >= due
    for wrong in ("2030-01-01T00:00:00", "tomorrow"):
        with pytest.raises(InvalidArgument, match="zone|no time"):
            noop(group, not_before=wrong)


def test_P3_what_came_due_while_nobody_ran_is_done_once(group: Daemons) -> None:
    (first,) = group.start("e1")
    later = noop(group, delay=1.0)
    first.kill()
    due = datetime.now(UTC) + timedelta(seconds=1.0)
    group.start("e2")
    assert finished(later) >= due - timedelta(seconds=1)
    assert [one.op for one in group.client.history(TABLE)] == [later.ref]


def test_one_that_waits_is_cancelled_at_once_and_with_it_what_waits_for_it(group: Daemons) -> None:
    group.start("e1")
    waiting = noop(group, delay=3600)
    behind = noop(group, after=[waiting])
    with pytest.raises(NotAllowed, match="has not begun: it cannot be paused"):
        waiting.pause()
    waiting.cancel("not needed")
    ended = waiting.wait(LIMIT)
    assert (ended.state, ended.record["cancel"]["text"]) == ("cancelled", "not needed")
    assert behind.wait(LIMIT).state == "cancelled"
    with pytest.raises(NotAllowed, match="ended as cancelled"):
        waiting.cancel()


def test_a_dependency_on_nothing_is_refused(group: Daemons) -> None:
    group.start("e1")
    with pytest.raises(NotFound, match="no operation t/noop/999 to wait for"):
        noop(group, after=["t/noop/999"])
    assert noop(group).wait(LIMIT).op == "t/noop/1", "nothing was drawn for what was refused"
