"""How long nobody does a lost executor's work: executors are killed, and stopped in order, in the middle of jobs.

In each round one operation's jobs are held by all executors, and the one job of each of some other operations, so
that their coordinators have only the completion left. Then a few executors are killed (or stopped) at once; the clock
runs from the signal to the events that etcd tells: the last of a victim's jobs is claimed by another, and the record
of an operation whose coordinator was a victim is written. Those who take over have free slots: a job that finds none
waits for one, however it was lost. All of it for each time to live that is given, as is what sessions survive
(:mod:`benchmarks.surviving`).
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

from benchmarks import holding, surviving
from benchmarks.common import Cluster, Executor, Look, Result, Row, cluster, install, median, say
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
"""Jobs of the operation whose claims are looked at: four for each executor, if they share alike."""
TABLES = 6
"""Operations of which only the completion is left."""
VICTIMS = {"kill": 3, "stop": 2}
"""Executors that end in one round."""


@dataclass(slots=True)
class Samples:
    """Seconds."""

    claimed: list[float] = field(default_factory=list)
    """From a victim's end until the last of its jobs had another holder."""
    completed: list[float] = field(default_factory=list)
    """From a coordinator's end until the record of its operation was written."""
    wasted: float = 0.0
    """Seconds that jobs had run for nothing."""
    attempts: int = 0
    """Attempts that ended so."""


def run(runs: int = 50, ttl: Sequence[int] = (10,)) -> Result:
    """For each time to live: kill and stop executors until there are ``runs`` samples of each kind, and see what
    sessions survive.
    """
    import tempfile

    result = Result("failover", {"runs": runs, "ttl": " ".join(map(str, ttl)), "executors": EXECUTORS})
    with tempfile.TemporaryDirectory(prefix="distop-holding-") as site:
        env = install(Path(site), holding.Holding)
        for one in ttl:
            options = ("--ttl", str(one), "--slots", str(SLOTS), "--shared-dir", f"{site}/{one}", "--log-level", "info")
            with cluster(EXECUTORS, *options, env=env) as bench:
                result.settings["etcd"] = Look(bench.endpoint).version()
                _measure(bench, result, runs, one)
            result.rows.append(surviving.measure(one))
    return result


def _measure(bench: Cluster, result: Result, runs: int, ttl: int) -> None:
    with Recorder(bench.endpoint) as seen:
        trials = Trials(bench, seen)
        samples = {kind: Samples() for kind in VICTIMS}
        for kind, found in samples.items():
            while min(len(found.claimed), len(found.completed)) < runs:
                trials.round(kind, found, ttl)
                say(
                    f"failover, TTL {ttl} s, {kind}: {len(found.claimed)} executors, "
                    f"worst {max(found.claimed, default=0):.2f} s; {len(found.completed)} coordinators, "
                    f"worst {max(found.completed, default=0):.2f} s (of {runs})"
                )
        bench.quiet()
    audit = asyncio.run(_audit(bench.endpoint))
    killed, stopped = samples["kill"], samples["stop"]
    of = f"TTL {ttl} s"
    result.samples |= {
        f"{of}: {kind}, {what}": getattr(found, name)
        for kind, found in samples.items()
        for what, name in (("jobs claimed again", "claimed"), ("completed", "completed"))
    }
    result.rows += [
        *_rows(f"{of}: kill -9 of an executor: all its jobs claimed again", killed.claimed, ttl + 1.0),
        *_rows(f"{of}: SIGTERM of an executor: all its jobs claimed again", stopped.claimed, 1.0),
        *_rows(f"{of}: kill -9 of the coordinator: operation completed", killed.completed, ttl + 1.0),
        *_rows(f"{of}: SIGTERM of the coordinator: operation completed", stopped.completed, 0.3),
        Row(f"{of}: violations in etcd's history", float(audit.violation is not None), "", 0.0, note=_told(audit)),
        Row(f"{of}: job outputs published twice", float(seen.doubles), "", 0.0, note=f"of {seen.outcomes:,}"),
        Row(f"{of}: published outputs that are not the job's", float(seen.wrong), "", 0.0),
        Row(f"{of}: wasted by kills", killed.wasted, "s", note=f"of jobs' time, in {killed.attempts} attempts"),
        Row(f"{of}: wasted by stops", stopped.wasted, "s", note=f"of jobs' time, in {stopped.attempts} attempts"),
    ]


def _rows(name: str, values: list[float], target: float) -> list[Row]:
    worst = f"worst of {len(values)}"
    return [Row(f"{name}, {worst}", max(values), "s", target), Row(f"{name}, median", median(values), "s")]


def _told(audit: Audit) -> str:
    totals = audit.totals
    told = f"revisions {totals.first} to {totals.last}, {totals.operations} operations, {totals.jobs} jobs"
    return str(audit.violation) if audit.violation is not None else told


async def _audit(endpoint: str) -> Audit:
    audit = Audit(Keys())
    async with EtcdClient(EtcdConfig((endpoint,))) as client, aclosing(history(client, Keys())) as steps:
        async for step in steps:
            audit.take(step)
    return audit


# ------------------------------------------------------------------ recorder


class Recorder:
    """Follows etcd's history in a thread of its own, and notes when it heard of what."""

    def __init__(self, endpoint: str) -> None:
        self._endpoint = endpoint
        self._keys = Keys()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._work, daemon=True)
        self.error: BaseException | None = None
        self.claims: dict[OperationRef, dict[int, list[tuple[float, dict[str, Any]]]]] = defaultdict(dict)
        """Operation → job → its claims, each with the time at which it was heard of."""
        self.records: dict[OperationRef, float] = {}
        self.coordinators: dict[str, str] = {}
        """Table → incarnation."""
        self.executors: dict[str, str] = {}
        """Incarnation → executor, of all that ever were."""
        self.outcomes = 0
        self.doubles = 0
        self.wrong = 0
        """Outcomes that name no file with what the job writes."""
        self._ended: set[str] = set()

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
                    heard = time.monotonic()
                    for change in step.changes:
                        self._note(change, heard)

    def _note(self, change: Change, heard: float) -> None:
        key = self._keys.parse(change.kv.key)
        if change.deleted:
            return
        if key.family == K.CLAIM and key.ref is not None:
            claim = json.loads(change.kv.value)
            self.claims[key.ref].setdefault(key.partition, []).append((heard, claim))
        elif key.family == K.HISTORY and key.ref is not None:
            self.records[key.ref] = heard
        elif key.family == K.COORDINATOR:
            self.coordinators[key.table] = change.kv.value.decode()
        elif key.family == K.NODE:
            self.executors[key.id] = json.loads(change.kv.value)["executor"]
        elif key.name == "outcome":
            self.outcomes += 1
            self.doubles += change.kv.key in self._ended
            self.wrong += not _names_output(json.loads(change.kv.value), str(key.ref), key.partition)
            self._ended.add(change.kv.key)

    def holders(self, ref: OperationRef) -> dict[int, tuple[float, str]]:
        """Job → since when, and by which incarnation it is held, as far as heard."""
        found = {}
        for partition, claims in list(self.claims[ref].items()):
            heard, claim = claims[-1]
            if "incarnation" in claim:
                found[partition] = (heard, str(claim["incarnation"]))
        return found


def _names_output(outcome: dict[str, Any], operation: str, partition: int) -> bool:
    file = Path((outcome.get("result") or {}).get("file", ""))
    return file.is_file() and file.read_text() == holding.content(operation, partition)


# -------------------------------------------------------------------- trials


class Trials:
    """One round after the other on one cluster."""

    def __init__(self, bench: Cluster, seen: Recorder) -> None:
        self._bench = bench
        self._seen = seen
        self._round = 0
        self._rng = random.Random(1)
        self._executors = {executor.name: executor for executor in bench.executors}
        for table in ("bench.jobs", *(f"bench.{n}" for n in range(TABLES))):
            bench.client.add_table(TableRecord(table, "parquet", "/nowhere"), check=False)

    def round(self, kind: str, found: Samples, ttl: int) -> None:
        """Start operations, end some executors, measure, and bring all back."""
        self._round += 1
        jobs, jobs_folder = self._start("bench.jobs", JOBS)
        completing = {f"bench.{n}": self._start(f"bench.{n}", 1) for n in range(TABLES)}
        refs = [OperationRef.parse(jobs.ref), *(OperationRef.parse(op.ref) for op, _ in completing.values())]
        self._await(lambda: [len(self._seen.holders(ref)) for ref in refs] == [JOBS, *[1] * TABLES], "all jobs held")
        victims = self._choose(refs[0], VICTIMS[kind])
        before = self._seen.holders(refs[0])
        waiting = self._prepare(completing, victims)
        ended: dict[str, float] = {}
        for executor in victims.values():
            ended[executor.name] = time.monotonic()
            executor.kill() if kind == "kill" else executor.tell_to_stop()
        lost = {name: [p for p, (_, inc) in before.items() if self._name(inc) == name] for name in ended}
        for table in waiting:
            (completing[table][1] / "go").touch()
        self._await(
            lambda: all(self._again(refs[0], victims, p) for jobs in lost.values() for p in jobs), "claims", ttl + 30
        )
        self._await(lambda: all(OperationRef.parse(completing[t][0].ref) in self._seen.records for t in waiting),
                    "completion", ttl + 30)  # fmt: skip
        for name, partitions in lost.items():
            if partitions:
                found.claimed.append(max(self._again(refs[0], victims, p) for p in partitions) - ended[name])
            found.attempts += len(partitions)
            found.wasted += sum(ended[name] - before[p][0] for p in partitions)
        for table, name in waiting.items():
            found.completed.append(self._seen.records[OperationRef.parse(completing[table][0].ref)] - ended[name])
        self._finish([(jobs, jobs_folder), *completing.values()], victims, kind)

    def _start(self, table: str, jobs: int) -> tuple[Operation, Path]:
        folder = self._bench.folder / "go" / f"{self._round}-{table}"
        folder.mkdir(parents=True)
        arg = {"jobs": jobs, "folder": str(folder)}
        return self._bench.client.start_operation("holding", table, arg), folder  # type: ignore[return-value]

    def _choose(self, ref: OperationRef, count: int) -> dict[str, Executor]:
        """Victims that hold jobs, those first that coordinate most; by incarnation."""
        holding_now = {inc for _, inc in self._seen.holders(ref).values()}
        coordinating = [self._name(inc) for table, inc in self._seen.coordinators.items() if table != "bench.jobs"]
        order = sorted(holding_now, key=lambda inc: (-coordinating.count(self._name(inc)), self._rng.random()))
        return {inc: self._executors[self._name(inc)] for inc in order[:count]}

    def _prepare(self, completing: dict[str, tuple[Operation, Path]], victims: dict[str, Executor]) -> dict[str, str]:
        """Table → the victim that coordinates it, where another executor holds the job. The other operations end now:
        nothing is to be measured on them.
        """
        waiting = {}
        for table, (op, folder) in completing.items():
            holder = self._seen.holders(OperationRef.parse(op.ref))[0][1]
            coordinator = self._seen.coordinators[table]
            if coordinator in victims and holder not in victims:
                waiting[table] = victims[coordinator].name
            else:
                (folder / "go").touch()
        rest = [OperationRef.parse(op.ref) for table, (op, _) in completing.items() if table not in waiting]
        self._await(lambda: all(ref in self._seen.records for ref in rest), "the other operations' end")
        return waiting

    def _again(self, ref: OperationRef, victims: dict[str, Executor], partition: int) -> float:
        """When a job that was a victim's was claimed by another; 0 as long as it was not."""
        for heard, claim in self._seen.claims[ref][partition]:
            if claim["attempt"] > 1 and "incarnation" in claim and claim["incarnation"] not in victims:
                return heard
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
        live = self._bench.client.nodes
        self._await(lambda: len({node.executor for node in live().values()}) == EXECUTORS, "all executors back")

    def _name(self, incarnation: str) -> str:
        return self._seen.executors[incarnation]

    def _await(self, condition: Any, what: str, seconds: float = 60.0) -> None:
        deadline = time.monotonic() + seconds
        while not condition():
            if self._seen.error is not None:
                raise RuntimeError("etcd's history could not be followed") from self._seen.error
            if time.monotonic() > deadline:
                raise RuntimeError(f"not within {seconds:g} s: {what}; see {self._bench.folder}")
            time.sleep(0.02)
