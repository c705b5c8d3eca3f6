"""How much of an operation's work is done: by its plan, by the results of its jobs, and by executors' reports."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from distop.protocol.behavior_declaration import Declaration
from distop.protocol.frozen import frozen
from distop.protocol.jobs import Outcome
from distop.protocol.json_codec import loads, parse_time
from distop.protocol.plan import CHUNK_PAGE
from distop.protocol.record_reading import read
from distop.protocol.txn import Get
from distop.protocol.work_done import WorkDone

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from distop.protocol.keys import Keys
    from distop.protocol.plan import Plan
    from distop.protocol.records import Node, OperationRef
    from distop.services.inspection.reasons import View
    from distop.store.client import EtcdClient

MOST_CHUNKS = 8
"""Plans with more chunks (of half a megabyte) are not read: only their jobs are counted."""
MOST_RESULTS = 2_000
"""Maximum number of ended jobs whose results are read for what they have committed."""
_PAGE = 50
"""Outcomes that are read at once: each has up to 64 KiB."""
FIELD = "work"
"""The field of a result or report with its :class:`WorkDone`."""
LEAST_SECONDS = 1.0
"""Seconds before which no rate is calculated."""


@frozen
class KnownWork:
    """The work of an operation's jobs as etcd has it.

    ``total``: by the plan. ``ended``: of the ended jobs, by the plan, and ``since_gate``: of those that ended since the
    gate was written. ``committed``: by the results of ended jobs.
    """

    total: WorkDone = WorkDone()
    ended: WorkDone = WorkDone()
    since_gate: WorkDone = WorkDone()
    committed: WorkDone = WorkDone()


@frozen
class Rate:
    """The current work of an operation, for people, and the seconds that are left (None: unknown)."""

    work: Mapping[str, Any] | None = None
    seconds_left: float | None = None


class WorkReader:
    """Reads the work of one operation. It keeps what never changes."""

    def __init__(self) -> None:
        self._sizes: dict[int, WorkDone] | None = None
        self._total = WorkDone()
        self._reports: bool | None = None
        """Whether results have their work; None: it is not known yet."""
        self._read: set[int] = set()
        self._committed = WorkDone()

    async def known(
        self, etcd: EtcdClient, keys: Keys, ref: OperationRef, plan: Plan, ended: Iterable[int], behind: Iterable[int]
    ) -> KnownWork:
        """The work of the jobs. ``ended``: the ended jobs; ``behind``: those that ended since the gate was written.

        Raises UnreadableRecord.
        """
        if self._sizes is None:
            self._sizes = await _sizes(etcd, keys, ref, plan)
            self._total = sum(self._sizes.values(), WorkDone())
        if not self._sizes:
            return KnownWork()
        some, nothing = list(ended), WorkDone()
        await self._read_results(etcd, keys, ref, some)
        return KnownWork(
            self._total,
            sum((self._sizes.get(p, nothing) for p in some), nothing),
            sum((self._sizes.get(p, nothing) for p in behind), nothing),
            self._committed,
        )

    async def _read_results(self, etcd: EtcdClient, keys: Keys, ref: OperationRef, ended: list[int]) -> None:
        """Add what newly ended jobs have committed, if the declared results of the type have it."""
        if self._reports is None:
            kv = (await etcd.read(Get(keys.behavior(ref.type))))[0].kv
            schema = read(Declaration.decode, kv).result_schema if kv is not None else {}
            self._reports = FIELD in (schema.get("properties") or {})
        if not self._reports:
            return
        new = [p for p in ended if p not in self._read][: max(0, MOST_RESULTS - len(self._read))]
        for at in range(0, len(new), _PAGE):
            page = new[at : at + _PAGE]
            answers = await etcd.read(*(Get(keys.job(ref, p, "outcome")) for p in page))
            for p, answer in zip(page, answers, strict=True):
                if answer.kv is not None:
                    self._read.add(p)
                    self._committed += work_in(read(Outcome.decode, answer.kv).result)


async def _sizes(etcd: EtcdClient, keys: Keys, ref: OperationRef, plan: Plan) -> dict[int, WorkDone]:
    """Files and bytes of each job of the plan; {} if no job has any, or if the plan is too large to be read."""
    if plan.chunks > MOST_CHUNKS:
        return {}
    found: dict[int, WorkDone] = {}
    spilled = False
    for at in range(0, plan.chunks, CHUNK_PAGE):
        numbers = range(at, min(at + CHUNK_PAGE, plan.chunks))
        for answer in await etcd.read(*(Get(keys.chunk(ref, n)) for n in numbers)):
            if answer.kv is None:
                return {}  # it ends just now
            for row in read(loads, answer.kv):
                found[int(row["partition"])] = WorkDone(len(row.get("files", ())), int(row.get("bytes", 0)))
                spilled = spilled or "files_at" in row
    if spilled:  # the numbers of files are not in etcd
        found = {p: WorkDone(bytes=one.bytes) for p, one in found.items()}
    return found if any(found.values()) else {}


def work_in(value: Any) -> WorkDone:
    """The work in a result or a report; nothing if it has none."""
    return WorkDone.from_json(value.get(FIELD)) if isinstance(value, dict) else WorkDone()


def rate_of(view: View, since: float) -> Rate:
    """How much work is done now, and how fast. Pure. ``since``: when the first of the counted jobs began, or 0.

    While the coordinator plans or completes the operation, this is the work that its planning or completion reports.
    """
    if view.snapshot.work is None:
        return Rate()
    entries = list(_reported(view))
    reported = sum((done for _, done in entries), WorkDone())
    known = KnownWork() if view.coordinating else view.snapshot.work
    if not known.total and not (reported and (view.coordinating or view.total == 1)):
        return Rate()  # the work of ended jobs is not known
    of_files, of_bytes = known.total.files or reported.of_files, known.total.bytes or reported.of_bytes
    done, counted, committed = known.ended + reported, known.since_gate + reported, known.committed + reported
    began = [begin for begin in (since if known.total else 0.0, *(begin for begin, _ in entries)) if begin]
    seconds = max(0.0, view.now - min(began)) if began else 0.0
    work = {
        "files": min(done.files, of_files) if of_files else done.files,
        "bytes": min(done.bytes, of_bytes) if of_bytes else done.bytes,
        "of_files": of_files or None,
        "of_bytes": of_bytes or None,
        "files_per_second": _per_second(counted.files, seconds),
        "bytes_per_second": _per_second(counted.bytes, seconds),
        "commits": committed.commits,
        "committed_files": committed.committed_files,
        "committed_bytes": committed.committed_bytes,
    }
    return Rate(work, _left(work, "bytes") if of_bytes else _left(work, "files"))


def _reported(view: View) -> Iterable[tuple[float, WorkDone]]:
    """The reports of jobs that run now, or of the coordinator: the time of the first one, and the work."""
    snapshot, ref = view.snapshot, str(view.snapshot.ref)
    for incarnation, node in view.nodes.items():
        for one in _entries(node, ref):
            partition = one.get("partition")
            claim = snapshot.claims.get(partition) if isinstance(partition, int) else None
            held = claim is not None and claim.incarnation == incarnation
            if held or (partition == -1 and (view.coordinating or _holds(view, incarnation))):
                yield parse_time(str(one.get("since", ""))), WorkDone.from_json(one)


def _holds(view: View, incarnation: str) -> bool:
    return any(claim.incarnation == incarnation for claim in view.snapshot.claims.values())


def _entries(node: Node, ref: str) -> list[dict[str, Any]]:
    found = node.work.get(ref)
    return [one for one in found if isinstance(one, dict)] if isinstance(found, list) else []


def _per_second(amount: int, seconds: float) -> float | None:
    return round(amount / seconds, 1) if amount and seconds >= LEAST_SECONDS else None


def _left(work: Mapping[str, Any], what: str) -> float | None:
    rate, of = work[f"{what}_per_second"], work[f"of_{what}"]
    return max(0, of - work[what]) / rate if rate and of else None
