"""Runs operations on real processes under random faults: ``scripts/soak --minutes N --seed S``.

There are three etcd members with users, four executors (one with Spark), an actor, a stream of operations of all kinds
with commands to them, and workflows of clients (graphs, races for an id, limits, transactions, series). The seed alone
determines the plan of faults, all operations and workflows, and the commands; their timing also depends on the machine.

``distop audit`` and the second auditor (``scripts/auditing``), which shares no code with distop, audit etcd's history
while it is written. At the end all faults are undone. Then all operations have to end and to leave nothing in etcd and
in work directories; the written data is compared with the outcomes, and the clients' answers with the history. In the
second half two executors are spared: faults spare the one with Spark and another one, and operations that kill their
child also spare the latter. So the memory of their daemons and of its child can be measured.

Exit code 1 for a violation, history that the audit missed, wrong data, a wrong answer to a client, output that a
cleanup left, an operation that does not end, or growing memory. From 10 minutes on also if no job resumed from a
checkpoint, no planning or completion that failed on one node was done by another one, or a situation that the workflows
exist for never occurred; from 25 minutes on if no daemon's memory could be judged.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # tests.support

from soaking import workflows
from soaking.clients import Clients
from soaking.cluster import SoakCluster
from soaking.faults import Faults
from soaking.memory import LONG, unjudged
from soaking.operations import KINDS, draw
from soaking.stream import Stream

from scripts import etcd_servers


def say(text: str) -> None:
    """Print a line of progress with the seconds since the start."""
    print(f"{time.monotonic() - _BEGAN:7.1f}  {text}", file=sys.stderr, flush=True)


_BEGAN = time.monotonic()


def main() -> int:
    """Run the soak; returns the exit code."""
    parser = argparse.ArgumentParser(prog="scripts/soak", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--minutes", type=float, default=10.0, help="duration of the faults (10)")
    parser.add_argument("--seed", type=int, default=1, help="seed of all random draws (1)")
    parser.add_argument("--ttl", type=int, default=6, help="time to live in seconds of the executors' sessions (6)")
    parser.add_argument("--no-spark", action="store_true", help="run without Spark")
    parser.add_argument("--keep", action="store_true", help="keep the folder with the logs")
    parser.add_argument("--plan", action="store_true", help="only print the planned faults, operations and workflows")
    given = parser.parse_args()
    os.environ["DISTOP_ACCEPT_ETCD_DEFECTS"] = "1"  # the available etcd may be a version that daemons refuse
    folder = Path("/nowhere" if given.plan else tempfile.mkdtemp(prefix="distop-soak-"))
    cluster = SoakCluster(folder, given.ttl, spark=not given.no_spark)
    faults = Faults(cluster, given.seed, given.minutes * 60, say)
    print(f"plan of seed {given.seed}:", *faults.planned, sep="\n  ")
    if given.plan:
        for one in (draw(given.seed, lane, number, folder) for lane in KINDS for number in range(2 * len(KINDS[lane]))):
            actions = [f"{what} after {seconds:.1f} s" for seconds, what in one.actions]
            print(f"  operation {one.name}: {one.kind} {one.arg} {one.policy or ''}", *actions, sep="; ")
        for lane, kinds in workflows.KINDS.items():
            for number in range(2 * len(kinds)):
                flow = workflows.draw(given.seed, lane, number, folder)
                steps = [f"{what} after {seconds:.1f} s" for seconds, what in flow.steps]
                print(
                    f"  workflow {flow.name}: {flow.kind} × {flow.copies} {[*map(str, flow.parts)]}", *steps, sep="; "
                )
        return 0
    say(f"seed {given.seed}, {given.minutes:g} minutes, etcd {etcd_servers.use().name}, logs in {folder}")
    with cluster:
        stream = Stream(cluster, given.seed, say)
        clients = Clients(cluster, given.seed, say)
        problems = soak(cluster, stream, clients, faults, given.minutes * 60)
        say("the end: waiting for the end of all operations")
        problems += stream.finish()
        problems += clients.finish()
        problems += cluster.finish()
        problems += clients.check()
        if given.minutes * 60 >= LONG:
            problems += clients.missing()
        workflow_report = clients.report()
        problems += stream.left([daemon.log for daemon in cluster.daemons.values()])
    memory = cluster.memory.judge()
    problems += [judged.problem for judged in memory if judged.problem] + unjudged(memory, given.minutes * 60)
    if given.minutes * 60 >= LONG and not stream.resumed:
        problems.append("no job resumed from a checkpoint")
    if given.minutes * 60 >= LONG and not stream.recovered:
        problems.append("no planning or completion that failed on one node was done by another one")
    report(cluster, stream, faults)
    print(*workflow_report, sep="\n")
    for judged in memory:
        print(f"memory: {judged.text}")
    for problem in problems:
        print(f"PROBLEM: {problem}")
    print("clean" if not problems else f"{len(problems)} problems; logs in {folder}")
    if not problems and not given.keep:
        shutil.rmtree(folder, ignore_errors=True)
    return 1 if problems else 0


def soak(cluster: SoakCluster, stream: Stream, clients: Clients, faults: Faults, seconds: float) -> list[str]:
    """Run faults, operations and workflows, then undo the faults. Returns the problems of undoing."""
    follower = cluster.follower
    end = time.monotonic() + seconds
    stream.begin(seconds)
    clients.begin()
    faults.begin()
    second = cluster.second
    while time.monotonic() < end and follower.audit.violation is None and follower.failure is None:
        if second.auditor.violations or second.failure is not None:
            break
        faults.step()
        cluster.measure()
        if stream.failure is not None:
            break
        time.sleep(0.1)
    say("undoing all faults")
    problems = faults.heal()
    clients.stop()
    stream.stop()
    return problems


def report(cluster: SoakCluster, stream: Stream, faults: Faults) -> None:
    """Print what was run and checked."""

    def listed(counts: Counter[str]) -> str:
        return ", ".join(f"{name} {n}" for name, n in sorted(counts.items())) or "none"

    print(f"faults: {faults.total} of {len(faults.planned)} planned ({listed(faults.counts)})")
    print(f"etcd members that crashed by a defect of this version: {faults.members.ended}")
    print(f"omitted faults, whose targets already had a fault: {listed(faults.left_out)}")
    print(f"operations: {stream.started} started ({listed(stream.kinds())})")
    print(f"  final states: {listed(stream.ended())}; commands: {listed(stream.commands)}")
    totals = cluster.follower.audit.totals
    print(
        f"audit: revisions {totals.first} to {totals.last}, {totals.changes:,} changes, {totals.operations:,} "
        f"operations, {totals.jobs:,} jobs, compacted before the audit: {totals.lost or 'nothing'}"
    )
    print(cluster.second.summary())
    print(f"data: {stream.compared} outcomes compared with their output, {stream.judged} complete reports of validate")
    late = cluster.suspensions.late
    print(
        f"  lines written by superseded attempts just after their machine resumed: {len(late)}"
        + (f", the last {1000 * max(late):.0f} ms after it" if late else "")
    )
    print(
        f"  attempts that resumed from a checkpoint: {stream.resumed}; follow-up operations: "
        f"{stream.followed}; starts that waited for another operation of their object: {stream.refused}; "
        f"operations with a logged cleanup failure and left output: {stream.garbage}; "
        f"operations that another node planned or completed: {stream.recovered}"
    )


if __name__ == "__main__":
    # SIGTERM also stops the started processes.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
