"""A look at the policies of a table, on the model of etcd: a version that cannot be read, and what is written."""

from __future__ import annotations

import asyncio
import logging
import math
from itertools import count
from types import SimpleNamespace
from typing import Any

from distop.clock import time
from distop.daemon.evaluator.inputs import LOOKED_BACK, Inputs
from distop.daemon.evaluator.table_look import TableLook
from distop.decide.policy_evaluation import FIRST_PAUSE
from distop.protocol import policy as p
from distop.protocol.json_codec import rfc3339
from distop.protocol.keys import Keys
from distop.protocol.policy import Policy, PolicyState
from distop.protocol.record_reading import read_policy
from distop.protocol.records import History, Node, OperationRef, State, TableRecord
from distop.protocol.user_actions import NO_ACTIONS, Action
from distop.worker.daemon_side.requests import WorkerError
from tests.unit.support.model_submission import TABLE, Etcd, run

KEYS = Keys()


class Place:
    """An elected evaluator of a table. ``version``: what the child says of it; an exception: it cannot be read."""

    def __init__(self, etcd: Etcd) -> None:
        self.etcd = etcd
        self.version: str | Exception = "v1"
        etcd.put(KEYS.node("inc"), Node("ex", "h", 1, ()).encode())
        assert etcd.store.apply(p.elect(KEYS, TABLE, "inc", 0, "")).succeeded
        self.fence = etcd.store.mod(KEYS.policy_evaluator(TABLE))
        self.ctx: Any = SimpleNamespace(
            client=etcd,
            keys=KEYS,
            incarnation="inc",
            log=logging.getLogger("distop.test"),
            worker=SimpleNamespace(statistics=self._statistics),
            commit=etcd.commit,
        )

    async def _statistics(self, record: Any, names: list[str], small_bytes: int) -> Any:
        if isinstance(self.version, Exception):
            raise self.version
        return {"version": self.version, "statistics": dict.fromkeys(names, 1.0)}

    def policy(self, name: str, **fields: Any) -> None:
        seen = read_policy(*(self.etcd.store.get(get.key) for get in p.policy_reads(KEYS, TABLE, name)))
        mark, table = self.etcd.store.mod(KEYS.policy_mark()), self.etcd.store.mod(KEYS.table(TABLE))
        wanted = {name: (Policy("noop", f"uid of {name}", **fields), seen)}
        assert self.etcd.store.apply(p.set_policies(KEYS, TABLE, wanted, mark, table)).succeeded

    def state(self, name: str) -> PolicyState:
        kv = self.etcd.store.get(KEYS.policy_state(TABLE, name))
        assert kv is not None
        return PolicyState.decode(kv.value)

    def said(self, name: str) -> list[tuple[str, str]]:
        return [(one.verdict, one.why) for one in self.state(name).kept]

    async def look(self) -> None:
        await TableLook(self.ctx, TABLE, self.fence).look()


def test_an_unreadable_version_is_in_the_record_of_each_policy_that_waits_for_versions() -> None:
    async def work(etcd: Etcd) -> None:
        place = Place(etcd)
        place.policy("every-version", on=("version",), when="files > 5")
        place.policy("hourly", every=3_600.0, when="files > 5")
        place.policy("paused", on=("version",))
        seen = read_policy(*(etcd.store.get(get.key) for get in p.policy_reads(KEYS, TABLE, "paused")))
        assert etcd.store.apply(p.pause(KEYS, TABLE, "paused", seen, NO_ACTIONS)).succeeded
        await place.look()
        place.version = WorkerError("transient", "no such file: metadata/v3.json")
        before = etcd.store.revision
        await place.look()
        assert place.said("every-version")[1:] == [("failed", "cannot read version: no such file: metadata/v3.json")]
        for text in ("no such file: metadata/v3.json", "timed out after 31 s", "timed out after 32 s"):
            place.version = WorkerError("transient", text)
            await place.look()
        assert etcd.store.revision == before + 1, "a failure is written once"
        assert [why for _, why in place.said("hourly")] == ["the condition does not hold: files > 5"]
        assert place.said("paused") == []
        place.version = "v1"
        await place.look()
        assert place.said("every-version")[2:] == [("no", "the version can be read again")]
        place.version = "v2"
        await place.look()
        assert place.state("every-version").version == "v2"

    run(work)


def test_each_evaluation_names_its_evaluator() -> None:
    async def work(etcd: Etcd) -> None:
        place = Place(etcd)
        place.policy("starting", every=3_600.0)
        place.policy("waiting", on=("version",), when="snapshots > 1")
        await place.look()
        assert etcd.operations() == ["t/noop/1"]
        kept = [one for name in ("starting", "waiting") for one in place.state(name).kept]
        assert [one.evaluator for one in kept] == ["inc", "inc"]

    run(work)


def test_hours_since_the_last_success_of_a_type() -> None:
    async def work(etcd: Etcd) -> None:
        place, now = Place(etcd), time.time()
        found: Any = Inputs(place.ctx, TableRecord(TABLE, "parquet", "/data"))
        assert math.isinf(await found._since_success("compact", now))

        def ended(number: int, state: State, hours: float, type_name: str = "compact") -> None:
            ref = OperationRef(TABLE, type_name, "", number)
            finished = rfc3339(now - 3_600 * hours)
            etcd.put(KEYS.history(ref), History(str(ref), state, finished, finished, 0, 0, 0).encode())

        ended(1, State.SUCCESS, 50.0)
        ended(2, State.SUCCESS, 30.0)
        ended(3, State.FAILED, 20.0)
        ended(4, State.CANCELLED, 10.0)
        ended(1, State.SUCCESS, 1.0, "compact-more")
        etcd.put(KEYS.history(OperationRef(TABLE, "compact", "", 5)), b"{")
        assert round(await found._since_success("compact", now) / 3_600, 3) == 30.0
        for number in range(6, 6 + LOOKED_BACK):
            ended(number, State.FAILED, 5.0)
        assert math.isinf(await found._since_success("compact", now)), "the last ten failed"
        ended(1, State.SUCCESS, 7.0, "Compact_Table_Job")
        for name in ("compact", "Compact_Table_Job"):
            assert round(await found._since_success(name, now) / 3_600, 3) == 7.0

    asyncio.run(work(Etcd()))


def test_a_success_under_another_name_of_the_type_ends_the_pause_after_failures() -> None:
    async def work(etcd: Etcd) -> None:
        place, now, policy = Place(etcd), time.time(), Policy("compact", "uid of keep", on=("version",))
        found: Any = Inputs(place.ctx, TableRecord(TABLE, "parquet", "/data"))

        def ended(type_name: str, state: State, seconds_ago: float) -> str:
            ref, finished = OperationRef(TABLE, type_name, "", 1), rfc3339(now - seconds_ago)
            record = History(str(ref), state, finished, finished, 0, 0, 0, submitter="policy:keep")
            etcd.put(KEYS.history(ref), record.encode())
            return str(ref)

        last = ended("compact", State.FAILED, 20.0)
        ended("Compact_Table_Job", State.SUCCESS, 30.0)
        assert (await found._failures("keep", policy, last))[0] == 1
        ended("Compact_Table_Job", State.SUCCESS, 10.0)
        assert await found._failures("keep", policy, last) == (0, 0.0)

    asyncio.run(work(Etcd()))


def test_an_operation_that_fails_is_started_again_after_a_pause_which_doubles() -> None:
    """One unreadable file and one append a minute started an operation on each version."""

    async def work(etcd: Etcd) -> None:
        place, now, versions = Place(etcd), time.time(), count(1)
        place.policy("keep", on=("version",), when="files > 0")

        def ended(number: int, state: State, seconds_ago: float, by: str = "policy:keep") -> None:
            ref, finished = OperationRef(TABLE, "noop", "", number), rfc3339(now - seconds_ago)
            etcd.put(KEYS.history(ref), History(str(ref), state, finished, finished, 0, 0, 0, submitter=by).encode())

        async def looked() -> tuple[int, str]:
            """The number of started operations after a look at a new version, and the verdict."""
            place.version = f"v{next(versions)}"
            await place.look()
            return len(etcd.operations()), place.said("keep")[-1][0]

        assert await looked() == (1, "started")
        ended(1, State.FAILED, FIRST_PAUSE - 30)
        assert await looked() == (1, "waits")
        until = rfc3339(now - FIRST_PAUSE + 30 + FIRST_PAUSE)
        assert place.said("keep")[-1][1] == f"the last one of its operations failed: it starts none before {until}"
        assert place.state("keep").version == "v1", "the trigger stays due"
        ended(1, State.FAILED, FIRST_PAUSE + 1)
        assert await looked() == (2, "started")
        ended(2, State.FAILED, FIRST_PAUSE + 1)
        assert await looked() == (2, "waits")
        assert place.said("keep")[-1][1].startswith("the last 2 of its operations failed")
        ended(2, State.FAILED, 2 * FIRST_PAUSE + 1)
        assert await looked() == (3, "started")
        ended(3, State.FAILED, 0.0)
        ended(4, State.SUCCESS, 0.0, "ann")
        assert await looked() == (4, "started"), "somebody else's operation has succeeded since"
        ended(4, State.CANCELLED, 0.0)
        assert await looked() == (5, "started"), "a cancelled operation has not failed"

    asyncio.run(work(Etcd()))


def test_a_command_on_a_policy_ends_the_pause_after_failures() -> None:
    async def work(etcd: Etcd) -> None:
        place, now = Place(etcd), time.time()
        place.policy("keep", on=("version",))
        await place.look()
        ref, finished = OperationRef(TABLE, "noop", "", 1), rfc3339(now - 20.0)
        failed = History(str(ref), State.FAILED, finished, finished, 0, 0, 0, submitter="policy:keep")
        etcd.put(KEYS.history(ref), failed.encode())
        place.version = "v2"
        await place.look()
        assert place.said("keep")[-1][0] == "waits"
        actions = NO_ACTIONS
        for change, name, ago in ((p.pause, "pause_policy", 15.0), (p.resume, "resume_policy", 10.0)):
            seen = read_policy(*(etcd.store.get(get.key) for get in p.policy_reads(KEYS, TABLE, "keep")))
            actions = actions.and_then(Action(rfc3339(now - ago), name, "ann"))
            assert etcd.store.apply(change(KEYS, TABLE, "keep", seen, actions)).succeeded
        await place.look()
        assert place.said("keep")[-1][0] == "started"

    asyncio.run(work(Etcd()))
