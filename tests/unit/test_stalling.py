"""When a Spark session that has work counts as one that gets none of it done."""

from __future__ import annotations

from distop.core.model import Node
from distop.worker.stalling import Activity, Stall

WAITING = Activity(jobs=1, stages={7: 3})


def stalled(*seen: Activity) -> float:
    """Seconds after looks that are five seconds apart."""
    stall = Stall()
    for one in seen:
        stall.add(one, 5.0)
    return stall.seconds


def test_a_session_whose_tasks_neither_run_nor_end_is_stalled() -> None:
    assert stalled(Activity(jobs=1, stages={7: 0}), Activity(jobs=1, stages={7: 0})) == 10
    assert stalled(WAITING) == 0, "tasks of it have ended, perhaps just now"
    assert stalled(WAITING, WAITING, WAITING) == 10


def test_work_of_others_that_comes_meanwhile_is_no_progress() -> None:
    assert stalled(*(Activity(jobs=n, stages=dict.fromkeys(range(n), 0)) for n in range(1, 6))) == 25


def test_task_progress_resets_the_stall_timer() -> None:
    for moved in (
        Activity(),
        Activity(jobs=1, running=True),
        Activity(jobs=1, stages={7: 4}),
        Activity(jobs=1, stages={8: 0}),
        Activity(jobs=2, stages={7: 3, 8: 1}),
    ):
        assert stalled(WAITING, WAITING, moved) == 0, moved
        assert stalled(WAITING, WAITING, moved, moved) == (5.0 if moved.stages else 0.0), moved


def test_a_node_record_tells_what_its_spark_waits_for() -> None:
    node = Node("ann", "h", 1, ("noop",), spark="no cores from Spark: x")
    assert Node.decode(node.encode()) == node
    assert b"spark" not in Node("ann", "h", 1, ("noop",)).encode()
