"""The types that a node serves after jobs showed that it cannot run some."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from distop.daemon.capability import LONGEST_PAUSE, MAY_RETURN, PAUSE, Capability
from distop.decide.view import ClusterView
from distop.protocol.keys import Keys
from distop.protocol.records import Node
from distop.runtime import logs

if TYPE_CHECKING:
    from tests.unit.support.clock import StandingClock

WHY = "Java 17 or newer is needed: no java is on the PATH"
ABLE = Node("ex", "host", 1, ("validate",))
UNABLE = replace(ABLE, behaviors=(), unable={"validate": WHY})


class Cluster:
    """These nodes and ``me``, whose capability is tested."""

    def __init__(self, **nodes: Node) -> None:
        self.view = ClusterView(Keys())
        self.view.nodes.update(me=replace(ABLE, executor="me"), **nodes)
        self.changes = 0
        self.mine = Capability(self.view, "me", logs.get(), self._changed)

    def _changed(self) -> None:
        self.changes += 1

    def becomes(self, incarnation: str, node: Node | None) -> None:
        before = dict(self.view.nodes)
        if node is None:
            del self.view.nodes[incarnation]
        else:
            self.view.nodes[incarnation] = node
        self.mine.nodes_changed(before)


@pytest.mark.usefixtures("clock")
def test_a_type_that_another_node_offers_is_left_to_that_node() -> None:
    cluster = Cluster(other=ABLE)
    assert cluster.mine.serves("validate")
    assert cluster.mine.cannot("validate", WHY)
    assert cluster.mine.cannot("validate", WHY), "each of its jobs reports it"
    assert cluster.mine.unable == {"validate": WHY}
    assert cluster.changes == 1
    assert not cluster.mine.serves("validate")
    assert cluster.mine.serves("noop")


@pytest.mark.usefixtures("clock")
def test_a_job_that_no_other_node_can_run_fails_at_once() -> None:
    assert not Cluster().mine.cannot("validate", WHY)
    assert not Cluster(other=UNABLE).mine.cannot("validate", WHY)
    # A drained node counts: its drain may end.
    drained = Cluster(other=ABLE)
    drained.view.drains.add("ex")
    assert drained.mine.cannot("validate", WHY)


@pytest.mark.usefixtures("clock")
def test_two_nodes_that_become_unable_at_once_do_not_wait_for_each_other() -> None:
    cluster = Cluster(other=ABLE)
    assert cluster.mine.cannot("validate", WHY)
    cluster.becomes("other", UNABLE)
    assert cluster.mine.serves("validate"), "the operation must get the error"
    assert not cluster.mine.cannot("validate", WHY)


def test_a_recently_gone_capable_node_still_counts(clock: StandingClock) -> None:
    cluster = Cluster(other=ABLE)
    cluster.becomes("other", None)
    assert cluster.mine.cannot("validate", WHY)
    assert not cluster.mine.serves("validate")
    clock.now += MAY_RETURN
    assert cluster.mine.serves("validate")
    assert not cluster.mine.cannot("validate", WHY)
    cluster.becomes("again", ABLE)
    assert not cluster.mine.serves("validate")


def test_types_of_gone_nodes_are_forgotten(clock: StandingClock) -> None:
    cluster = Cluster(other=replace(ABLE, behaviors=("former",)))
    cluster.becomes("other", None)
    clock.now += MAY_RETURN
    cluster.becomes("again", ABLE)
    assert not cluster.mine._gone


def test_the_pause_doubles_after_each_momentary_failure(clock: StandingClock) -> None:
    cluster, pauses = Cluster(other=ABLE), []
    for _ in range(7):
        assert cluster.mine.cannot_now("validate", WHY)
        assert not cluster.mine.serves("validate")
        began = clock.now
        while not cluster.mine.serves("validate"):
            assert cluster.mine.cannot_now("validate", WHY), "its other running jobs report it, too"
            clock.now += 1
            assert clock.now - began <= LONGEST_PAUSE
        assert not cluster.mine.unable
        pauses.append(clock.now - began)
    assert pauses == [PAUSE, 2 * PAUSE, 4 * PAUSE, 8 * PAUSE, 16 * PAUSE, LONGEST_PAUSE, LONGEST_PAUSE]
    assert cluster.changes == len(pauses)
    cluster.mine.succeeded("validate", began)
    assert cluster.mine.failing, "the job began before the failure"
    cluster.mine.succeeded("validate", clock.now)
    assert not cluster.mine.failing
    assert cluster.mine.cannot_now("validate", WHY)
    clock.now += PAUSE
    assert cluster.mine.serves("validate")


def test_a_type_that_no_other_node_offers_is_retried_on_this_node(clock: StandingClock) -> None:
    assert not Cluster().mine.cannot_now("validate", WHY)
    cluster = Cluster(other=ABLE)
    assert cluster.mine.cannot_now("validate", WHY)
    cluster.becomes("other", UNABLE)
    assert cluster.mine.serves("validate")
    assert not cluster.mine.cannot_now("validate", WHY)


def test_two_failing_nodes_do_not_pass_jobs_to_each_other_forever(clock: StandingClock) -> None:
    """An attempt may take longer than the longest pause of the other node."""
    cluster = Cluster(other=replace(ABLE, failing={"validate": WHY}))
    assert not cluster.mine.cannot_now("validate", WHY)
    assert cluster.mine.serves("validate")
    assert (cluster.mine.unable, cluster.mine.failing) == ({}, {"validate": WHY})
    clock.now += 2 * LONGEST_PAUSE
    assert not cluster.mine.cannot_now("validate", WHY)
    cluster.becomes("third", replace(ABLE, executor="third"))
    assert cluster.mine.cannot_now("validate", WHY)
    assert not cluster.mine.cannot_now("validate", WHY, given_back={"third"}), "that node could not run this job either"


@pytest.mark.usefixtures("clock")
def test_a_job_is_released_only_to_nodes_that_would_take_it() -> None:
    where = {"zone": "a"}
    assert not Cluster(other=ABLE).mine.cannot_now("validate", WHY, where)
    assert Cluster(other=replace(ABLE, labels={"zone": "a", "rack": "7"})).mine.cannot_now("validate", WHY, where)
    drained = Cluster(other=ABLE)
    drained.view.drains.add("ex")
    assert not drained.mine.cannot_now("validate", WHY)
    cluster = Cluster(other=ABLE, third=replace(ABLE, executor="third"))
    assert cluster.mine.cannot_now("validate", WHY)
    cluster.view.drains |= {"ex", "third"}
    assert cluster.mine.serves("validate"), "no other node serves it now"


@pytest.mark.usefixtures("clock")
def test_a_type_that_cannot_run_here_is_left_to_a_node_that_retries_it() -> None:
    trying = replace(ABLE, behaviors=(), unable={"validate": WHY}, failing={"validate": WHY})
    assert Cluster(other=trying).mine.cannot("validate", WHY)


def test_a_type_that_can_never_run_here_stays_unable(clock: StandingClock) -> None:
    cluster = Cluster(other=ABLE)
    assert cluster.mine.cannot_now("validate", "its JVM was killed")
    assert cluster.mine.cannot("validate", WHY)
    clock.now += LONGEST_PAUSE
    assert not cluster.mine.serves("validate")
    assert cluster.mine.unable == {"validate": WHY}


def test_a_node_record_holds_unable_and_failing_types() -> None:
    assert Node.decode(UNABLE.encode()) == UNABLE
    failing = replace(ABLE, failing={"validate": WHY})
    assert Node.decode(failing.encode()) == failing
    assert b"unable" not in ABLE.encode()
