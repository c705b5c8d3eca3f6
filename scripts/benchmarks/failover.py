"""Failover time: how long jobs and operations stop when executors are killed or stopped while they run jobs.

In each round all executors hold jobs of one operation, and also the only job of several other operations, so that only
the completion of those is left for their coordinators. Then several executors are killed (or stopped) at once.
Measured from the signal, by etcd's events: until the last job of a victim is claimed by another executor, and until
the history record of an operation is written whose coordinator was a victim. The remaining executors have free slots,
because a job without a free slot would wait for one, whatever ended its first attempt. All of it is repeated for each
time to live; so is the measurement of sessions while etcd is frozen (:mod:`benchmarks.session_survival`).
"""

from __future__ import annotations

import asyncio
import json
import random
import threading
import time
from collections import defaultdict
from contextlib import aclosing
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks import holding, session_survival
from benchmarks.common import Cluster, EtcdProbe, Executor, Result, Row, cluster, install, median, report_progress
from distop.protocol import keys as K
from distop.protocol.keys import Keys
from distop.protocol.records import OperationRef, TableRecord
from distop.services.audit import Audit, history
from distop.store.client import EtcdClient
from distop.store.connection_settings import EtcdConfig
from distop.store.history import Revision

if TYPE_CHECKING:
    from collections.abc import Sequence

    from distop.client.async_operation import Operation
    from distop.protocol.revisioned import Change

EXECUTORS = 6
SLOTS = 16
JOBS = 24
"""Jobs of the operation whose claims are measured: four per executor if they are spread evenly."""
TABLES = 6
"""Number of operations whose completion is measured."""
VICTIMS = {"kill": 3, "stop": 2}
"""Number of executors that are killed or stopped in one round."""


@dataclass(slots=True)
class Samples:
    """Measurements of one kind of victim, in seconds."""

    claimed: list[float] = field(default_factory=list)
    """From a victim's end until the last of its jobs was claimed by another executor."""
    completed: list[float] = field(default_factory=list)
    """From a coordinator's end until the history record of its operation was written."""
    wasted: float = 0.0
    """Run time of lost attempts."""
    attempts: int = 0
    """Number of lost attempts."""


def run(runs: int = 50, ttl: Sequence[int] = (10,)) -> Result:
    """For each time to live: kill and stop executors until each kind has ``runs`` samples, then freeze etcd."""
    import tempfile

    result = Result("failover", {"runs": runs, "ttl": " ".join(map(str, ttl)), "executors": EXECUTORS})
    with tempfile.TemporaryDirectory(prefix="distop-holding-") as site:
        env = install(Path(site), holding.Holding)
        for one in ttl:
            options = ("--ttl", str(one), "--slots", str(SLOTS), "--shared-dir", f"{site}/{one}", "--log-level", "info")
            with cluster(EXECUTORS, *options, env=env) as bench:
                result.settings["etcd"] = EtcdProbe(bench.endpoint).version()
                _measure(bench, result, runs, one)
            result.rows.append(session_survival.measure(one))
    return result


def _measure(bench: Cluster, result: Result, runs: int, ttl: int) -> None:
    with Recorder(bench.endpoint) as recorder:
        rounds = Rounds(bench, recorder)
        by_kind = {kind: Samples() for kind in VICTIMS}
        for kind, samples in by_kind.items():
            while min(len(samples.claimed), len(samples.completed)) < runs:
                rounds.run(kind, samples, ttl)
                report_progress(
                    f"failover, TTL {ttl} s, {kind}: {len(samples.claimed)} executors, "
                    f"worst {max(samples.claimed, default=0):.2f} s; {len(samples.completed)} coordinators, "
                    f"worst {max(samples.completed, default=0):.2f} s (of {runs})"
                )
        bench.wait_for_cleanup()
    audit = asyncio.run(_audit(bench.endpoint))
    killed, stopped = by_kind["kill"], by_kind["stop"]
    prefix = f"TTL {ttl} s"
    result.samples |= {
        f"{prefix}: {kind}, {what}": getattr(samples, name)
        for kind, samples in by_kind.items()
        for what, name in (("jobs claimed again", "claimed"), ("completed", "completed"))
    }
    result.rows += [
        *_rows(f"{prefix}: executor killed (SIGKILL): all its jobs claimed again", killed.claimed, ttl + 1.0),
        *_rows(f"{prefix}: executor stopped (SIGTERM): all its jobs claimed again", stopped.claimed, 1.0),
        *_rows(f"{prefix}: coordinator killed (SIGKILL): operation completed", killed.completed, ttl + 1.0),
        *_rows(f"{prefix}: coordinator stopped (SIGTERM): operation completed", stopped.completed, 0.3),
        Row(f"{prefix}: violations in etcd's history", float(audit.violation is not None), "", 0.0, note=_note(audit)),
        Row(
            f"{prefix}: job outputs published twice", float(recorder.doubles), "", 0.0, note=f"of {recorder.outcomes:,}"
        ),
        Row(f"{prefix}: published outputs with the wrong content", float(recorder.wrong), "", 0.0),
        Row(f"{prefix}: job time wasted by kills", killed.wasted, "s", note=f"in {killed.attempts} attempts"),
        Row(f"{prefix}: job time wasted by stops", stopped.wasted, "s", note=f"in {stopped.attempts} attempts"),
    ]


def _rows(name: str, values: list[float], target: float) -> list[Row]:
    worst = f"worst of {len(values)}"
    return [Row(f"{name}, {worst}", max(values), "s", target), Row(f"{name}, median", median(values), "s")]


def _note(audit: Audit) -> str:
    if audit.violation is not None:
        return str(audit.violation)
    totals = audit.totals
    return f"revisions {totals.first} to {totals.last}, {totals.operations} operations, {totals.jobs} jobs"


async def _audit(endpoint: str) -> Audit:
    audit = Audit(Keys())
    async with EtcdClient(EtcdConfig((endpoint,))) as client, aclosing(history(client, Keys())) as steps:
        async for step in steps:
            audit.take(step)
    return audit


# ------------------------------------------------------------------ recorder


class Recorder:
    """Follows etcd's history in a thread and records the times at which events arrive."""

    def __init__(self, endpoint: str) -> None:
        self._endpoint = endpoint
        self._keys = Keys()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._work, daemon=True)
        self.error: BaseException | None = None
        self.claims: dict[OperationRef, dict[int, list[tuple[float, dict[str, Any]]]]] = defaultdict(dict)
        """Operation → job → its claims, each with its time of arrival."""
        self.records: dict[OperationRef, float] = {}
        """Operation → the time at which its history record arrived."""
        self.coordinators: dict[str, str] = {}
        """Table → incarnation."""
        self.executors: dict[str, str] = {}
        """Incarnation → executor, including ended incarnations."""
        self.outcomes = 0
        self.doubles = 0
        """Outcomes that were written twice."""
        self.wrong = 0
        """Outcomes whose file is missing or has other content than the job writes."""
        self._outcome_keys: set[str] = set()

    def __enter__(self) -> Recorder:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._following.cancel)
        self._thread.join()

    def _work(self) -> None:
        self._following = self._loop.create_task(self._follow())
        try:
            self._loop.run_until_complete(self._following)
        except asyncio.CancelledError:
            pass
        except BaseException as error:
            self.error = error

    async def _follow(self) -> None:
        config = EtcdConfig((self._endpoint,))
        async with EtcdClient(config) as client, aclosing(history(client, self._keys, follow=True)) as steps:
            async for step in steps:
                if isinstance(step, Revision):
                    now = time.monotonic()
                    for change in step.changes:
                        self._record(change, now)

    def _record(self, change: Change, now: float) -> None:
        key = self._keys.parse(change.kv.key)
        if change.deleted:
            return
        if key.family == K.CLAIM and key.ref is not None:
            claim = json.loads(change.kv.value)
            self.claims[key.ref].setdefault(key.partition, []).append((now, claim))
        elif key.family == K.HISTORY and key.ref is not None:
            self.records[key.ref] = now
        elif key.family == K.COORDINATOR:
            self.coordinators[key.table] = change.kv.value.decode()
        elif key.family == K.NODE:
            self.executors[key.id] = json.loads(change.kv.value)["executor"]
        elif key.name == "outcome":
            self.outcomes += 1
            self.doubles += change.kv.key in self._outcome_keys
            self.wrong += not _output_is_correct(json.loads(change.kv.value), str(key.ref), key.partition)
            self._outcome_keys.add(change.kv.key)

    def holders(self, ref: OperationRef) -> dict[int, tuple[float, str]]:
        """Job → the time of its last claim and the incarnation that holds it, as of the last event."""
        holders = {}
        for partition, claims in list(self.claims[ref].items()):
            at, claim = claims[-1]
            if "incarnation" in claim:
                holders[partition] = (at, str(claim["incarnation"]))
        return holders


def _output_is_correct(outcome: dict[str, Any], operation: str, partition: int) -> bool:
    file = Path((outcome.get("result") or {}).get("file", ""))
    return file.is_file() and file.read_text() == holding.content(operation, partition)


# -------------------------------------------------------------------- rounds


class Rounds:
    """The rounds on one cluster."""

    def __init__(self, bench: Cluster, recorder: Recorder) -> None:
        self._bench = bench
        self._recorder = recorder
        self._round = 0
        self._rng = random.Random(1)
        self._executors = {executor.name: executor for executor in bench.executors}
        for table in ("bench.jobs", *(f"bench.{n}" for n in range(TABLES))):
            bench.client.add_table(TableRecord(table, "parquet", "/nowhere"), check=False)

    def run(self, kind: str, samples: Samples, ttl: int) -> None:
        """Start operations, kill or stop some executors, measure, and start those executors again."""
        self._round += 1
        jobs, jobs_folder = self._start("bench.jobs", JOBS)
        completing = {f"bench.{n}": self._start(f"bench.{n}", 1) for n in range(TABLES)}
        refs = [OperationRef.parse(jobs.ref), *(OperationRef.parse(op.ref) for op, _ in completing.values())]
        self._wait_for(
            lambda: [len(self._recorder.holders(ref)) for ref in refs] == [JOBS, *[1] * TABLES], "claims of all jobs"
        )
        victims = self._choose_victims(refs[0], VICTIMS[kind])
        before = self._recorder.holders(refs[0])
        measured = self._measured_tables(completing, victims)
        ended: dict[str, float] = {}
        for executor in victims.values():
            ended[executor.name] = time.monotonic()
            executor.kill() if kind == "kill" else executor.request_stop()
        lost = {name: [p for p, (_, inc) in before.items() if self._name(inc) == name] for name in ended}
        for table in measured:
            (completing[table][1] / "go").touch()
        self._wait_for(
            lambda: all(self._claimed_again(refs[0], victims, p) for jobs in lost.values() for p in jobs),
            "new claims of the lost jobs",
            ttl + 30,
        )
        self._wait_for(
            lambda: all(OperationRef.parse(completing[t][0].ref) in self._recorder.records for t in measured),
            "the history records",
            ttl + 30,
        )
        for name, partitions in lost.items():
            if partitions:
                last = max(self._claimed_again(refs[0], victims, p) for p in partitions)
                samples.claimed.append(last - ended[name])
            samples.attempts += len(partitions)
            samples.wasted += sum(ended[name] - before[p][0] for p in partitions)
        for table, name in measured.items():
            recorded = self._recorder.records[OperationRef.parse(completing[table][0].ref)]
            samples.completed.append(recorded - ended[name])
        self._finish([(jobs, jobs_folder), *completing.values()], victims, kind)

    def _start(self, table: str, jobs: int) -> tuple[Operation, Path]:
        folder = self._bench.folder / "go" / f"{self._round}-{table}"
        folder.mkdir(parents=True)
        arg = {"jobs": jobs, "folder": str(folder)}
        return self._bench.client.start_operation("holding", table, arg), folder  # type: ignore[return-value]

    def _choose_victims(self, ref: OperationRef, count: int) -> dict[str, Executor]:
        """Executors that hold jobs, by incarnation; those that coordinate most tables come first."""
        job_holders = {inc for _, inc in self._recorder.holders(ref).values()}
        coordinating = [self._name(inc) for table, inc in self._recorder.coordinators.items() if table != "bench.jobs"]
        order = sorted(job_holders, key=lambda inc: (-coordinating.count(self._name(inc)), self._rng.random()))
        return {inc: self._executors[self._name(inc)] for inc in order[:count]}

    def _measured_tables(
        self, completing: dict[str, tuple[Operation, Path]], victims: dict[str, Executor]
    ) -> dict[str, str]:
        """The tables whose coordinator is a victim while another executor holds the job, with the victim's name.

        Ends the operations on the other tables, which are not measured.
        """
        measured = {}
        for table, (op, folder) in completing.items():
            holder = self._recorder.holders(OperationRef.parse(op.ref))[0][1]
            coordinator = self._recorder.coordinators[table]
            if coordinator in victims and holder not in victims:
                measured[table] = victims[coordinator].name
            else:
                (folder / "go").touch()
        others = [OperationRef.parse(op.ref) for table, (op, _) in completing.items() if table not in measured]
        self._wait_for(lambda: all(ref in self._recorder.records for ref in others), "the end of the other operations")
        return measured

    def _claimed_again(self, ref: OperationRef, victims: dict[str, Executor], partition: int) -> float:
        """The time at which an executor that is no victim claimed a lost job; 0 before."""
        for at, claim in self._recorder.claims[ref][partition]:
            if claim["attempt"] > 1 and "incarnation" in claim and claim["incarnation"] not in victims:
                return at
        return 0.0

    def _finish(self, operations: list[tuple[Operation, Path]], victims: dict[str, Executor], kind: str) -> None:
        for _, folder in operations:
            (folder / "go").touch()
        for executor in victims.values():
            if kind == "stop":
                executor.stop()
            executor.start()
        for op, _ in operations:
            if op.wait(120).state != "success":
                raise RuntimeError(f"{op.ref} did not succeed")
        nodes = self._bench.client.nodes
        self._wait_for(lambda: len({node.executor for node in nodes().values()}) == EXECUTORS, "all executors")

    def _name(self, incarnation: str) -> str:
        return self._recorder.executors[incarnation]

    def _wait_for(self, condition: Any, what: str, seconds: float = 60.0) -> None:
        deadline = time.monotonic() + seconds
        while not condition():
            if self._recorder.error is not None:
                raise RuntimeError("Cannot follow etcd's history") from self._recorder.error
            if time.monotonic() > deadline:
                raise RuntimeError(f"Timed out after {seconds:g} s waiting for {what}; logs: {self._bench.folder}")
            time.sleep(0.02)
