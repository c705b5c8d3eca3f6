"""All kinds of faults at random, for as long as it is told: ``scripts/soak --minutes N --seed S``.

Three members of etcd with users, four executors (Spark in one of them), an actor, a stream of operations of every
kind, with commands to them, and workflows of clients (graphs, races for an id, limits, transactions, series). The plan
of faults depends on the seed alone, and so does each operation and workflow, and what is done to it; what they meet
depends on the machine as well. As it grows, etcd's history is audited by ``distop audit`` and by the second auditor
(``scripts/auditing``), which shares no code with distop; at the end everything is healed, every operation has to end
and to leave nothing behind, in etcd and in the work directories, what was written is compared with what the outcomes
name, and what clients were told with what stands in the history. In the second half two executors, the one with Spark
and another, are spared by the faults, and the latter by operations that cost a child its life, so that the memory of
their daemons and of its child can be followed.

Exit code 1 on a violation, on history that the audit did not see, on data that is not what it should be, on an answer
to a client that the history contradicts, on what a cleanup left behind, on an operation that does not end, or on memory
that grows; from 10 minutes on also where no job went on from a checkpoint, no planning or completion that failed on one
node was done by another, or what the workflows are for was never met; from 25 minutes on where no daemon's memory could
be judged.
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
    """A line of progress, with the seconds since the start."""
    print(f"{time.monotonic() - _BEGAN:7.1f}  {text}", file=sys.stderr, flush=True)


_BEGAN = time.monotonic()


def main() -> int:
    """Soak; the exit code."""
    parser = argparse.ArgumentParser(prog="scripts/soak", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--minutes", type=float, default=10.0, help="how long faults happen (10)")
    parser.add_argument("--seed", type=int, default=1, help="of everything that is drawn (1)")
    parser.add_argument("--ttl", type=int, default=6, help="the executors' time to live (6)")
    parser.add_argument("--no-spark", action="store_true", help="leave Spark out")
    parser.add_argument("--keep", action="store_true", help="keep the folder with the logs")
    parser.add_argument("--plan", action="store_true", help="print the plan of faults and the operations, and no more")
    given = parser.parse_args()
    os.environ["DISTOP_ACCEPT_ETCD_DEFECTS"] = "1"  # the etcd at hand may be one that daemons refuse
    folder = Path("/nowhere" if given.plan else tempfile.mkdtemp(prefix="distop-soak-"))
    cluster = SoakCluster(folder, given.ttl, spark=not given.no_spark)
    faults = Faults(cluster, given.seed, given.minutes * 60, say)
    print(f"plan of seed {given.seed}:", *faults.planned, sep="\n  ")
    if given.plan:
        for wish in (
            draw(given.seed, lane, number, folder) for lane in KINDS for number in range(2 * len(KINDS[lane]))
        ):
            acts = [f"{what} after {seconds:.1f} s" for seconds, what in wish.acts]
            print(f"  operation {wish.name}: {wish.kind} {wish.arg} {wish.policy or ''}", *acts, sep="; ")
        for lane, kinds in workflows.KINDS.items():
            for number in range(2 * len(kinds)):
                one = workflows.draw(given.seed, lane, number, folder)
                steps = [f"{what} after {seconds:.1f} s" for seconds, what in one.steps]
                print(f"  workflow {one.name}: {one.kind} × {one.copies} {[*map(str, one.parts)]}", *steps, sep="; ")
        return 0
    say(f"seed {given.seed}, {given.minutes:g} minutes, etcd {etcd_servers.use().name}, logs in {folder}")
    with cluster:
        stream = Stream(cluster, given.seed, say)
        clients = Clients(cluster, given.seed, say)
        problems = soak(cluster, stream, clients, faults, given.minutes * 60)
        say("the end: all that was started has to end")
        problems += stream.finish()
        problems += clients.finish()
        problems += cluster.finish()
        problems += clients.judge()
        if given.minutes * 60 >= LONG:
            problems += clients.missing()
        workflow_report = clients.report()
        problems += stream.left([daemon.log for daemon in cluster.daemons.values()])
    memory = cluster.memory.judge()
    problems += [judged.problem for judged in memory if judged.problem] + unjudged(memory, given.minutes * 60)
    if given.minutes * 60 >= LONG and not stream.resumed:
        problems.append("no job went on from a checkpoint")
    if given.minutes * 60 >= LONG and not stream.recovered:
        problems.append("nothing that failed on one node was planned or completed by another")
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
    """Faults, operations and workflows for so long, and the healing after them; what could not be healed."""
    follower = cluster.follower
    end = time.monotonic() + seconds
    stream.begin(seconds)
    clients.begin()
    faults.begin()
    second = cluster.second
    while time.monotonic() < end and follower.audit.violation is None and follower.failure is None:
        if second.auditor.violations or second.failure is not None:
            break
        faults.tend()
        cluster.measure()
        if stream.failure is not None:
            break
        time.sleep(0.1)
    say("healing everything")
    problems = faults.heal()
    clients.stop()
    stream.stop()
    return problems


def report(cluster: SoakCluster, stream: Stream, faults: Faults) -> None:
    """What was done, and what was checked."""

    def listed(counts: Counter[str]) -> str:
        return ", ".join(f"{name} {n}" for name, n in sorted(counts.items())) or "none"

    print(f"faults: {faults.total} of {len(faults.planned)} planned ({listed(faults.counts)})")
    print(f"members of etcd that ended by themselves, of a defect of this version: {faults.members.ended}")
    print(f"faults left out, since what they strike was struck already: {listed(faults.left_out)}")
    print(f"operations: {stream.started} started ({listed(stream.kinds())})")
    print(f"  they ended: {listed(stream.ended())}; commands: {listed(stream.commands)}")
    totals = cluster.follower.audit.totals
    print(
        f"audit: revisions {totals.first} to {totals.last}, {totals.changes:,} changes, {totals.operations:,} "
        f"operations, {totals.jobs:,} jobs, compacted unseen: {totals.lost or 'nothing'}"
    )
    print(cluster.second.summary())
    print(f"data: {stream.compared} outcomes compared with what they name, {stream.judged} whole reports of validate")
    late = cluster.standstills.late
    print(
        f"  lines that attempts wrote in the moment after their machine woke up, when others had begun: {len(late)}"
        + (f", the last {1000 * max(late):.0f} ms after it" if late else "")
    )
    print(
        f"  attempts that went on from a checkpoint: {stream.resumed}; operations that followed others: "
        f"{stream.followed}; starts that waited for another of their object: {stream.refused}; "
        f"operations whose cleanup failed and left something, which a log tells: {stream.garbage}; "
        f"operations that another node planned or completed: {stream.recovered}"
    )


if __name__ == "__main__":
    # Who ends it ends what it has started.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
