"""Reads the outcomes of an operation's jobs page by page: while it runs, and until etcd has compacted them."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from distop.errors import Compacted, NotFound, no_operation
from distop.protocol.frozen import frozen
from distop.protocol.jobs import JobState, Outcome
from distop.protocol.keys import job_name
from distop.protocol.plan import Plan
from distop.protocol.record_reading import read
from distop.protocol.records import TableRecord
from distop.protocol.txn import Get
from distop.runtime import time_limit
from distop.services.operation_results import parsed
from distop.storage.places import Attempt, result_of, shared_of
from distop.storage.result_files import file_of, resolve
from distop.store.cluster_identity import read_space_id

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Sequence

    from distop.protocol.keys import Keys
    from distop.protocol.records import OperationRef
    from distop.protocol.txn import KeyValue
    from distop.storage.deletion import Place
    from distop.store.client import EtcdClient

_PAGE = 100
"""Ordinals in one read: each has an outcome of up to 64 KiB, and perhaps a checkpoint."""


@frozen
class JobResult:
    """The outcome of one job.

    ``partition``: its ordinal. ``name``: its partition. ``result``: its result, read from a file if it was too large
    for etcd (``file``: the path of that file, with its ``bytes`` and ``sha256``). ``error``: why it failed, or "".
    ``executor``, ``attempt``, ``started``, ``finished`` (RFC 3339): of the last attempt.
    """

    partition: int
    name: str
    success: bool
    result: Any = None
    error: str = ""
    executor: str = ""
    attempt: int = 0
    started: str = ""
    finished: str = ""
    file: Any = None


async def outcomes(
    etcd: EtcdClient, keys: Keys, ref: OperationRef, model: Any = None, shared_dir: str = "", start: int = 0
) -> AsyncGenerator[JobResult, None]:
    """The ended jobs from the ordinal ``start`` on, in the order of their ordinals; pages are read on demand.

    ``model``: a pydantic model to which each result is converted. ``shared_dir``: the path of the executors' shared
    directory on this machine; "": ``_distop/`` under the location of the operation's table.

    Raises NotFound (no such operation; it has ended and etcd has compacted its outcomes; a file that cannot be read
    from here), UnreadableRecord, InvalidArgument (a result does not fit the model).
    """
    history, state, plan = await etcd.read(
        Get(keys.history(ref)), Get(keys.of(ref, "state"), count_only=True), Get(keys.of(ref, "plan"))
    )
    if history.kv is None and not state.count:
        raise no_operation(ref)
    revision = history.kv.mod_revision - 1 if history.kv is not None else 0
    planned = plan.kv
    files = _Files(etcd, keys, ref, shared_dir)
    try:
        if revision:
            found = (await etcd.list(keys.of(ref, "plan"), keys.of(ref, "plan") + "\0", revision=revision)).kvs
            planned = found[0] if found else None
        count = read(Plan.decode, planned).count if planned is not None else 0
        for first in range(start, count, _PAGE):
            jobs = keys.jobs_between(ref, first, min(first + _PAGE, count))
            kvs: Sequence[KeyValue] = ()
            if not revision:
                ended, page = await etcd.read(Get(keys.history(ref)), Get(*jobs))
                kvs = page.kvs
                if ended.kv is not None:  # its keys may be deleted by now
                    revision = ended.kv.mod_revision - 1
            if revision:
                kvs = (await etcd.list(*jobs, revision=revision)).kvs
            for one, attempt in job_results(kvs, str(ref)):
                yield await files.resolved(one, attempt, model, revision)
    except Compacted:
        raise NotFound(
            f"the results of the jobs of {ref} are gone: etcd has compacted them since it ended. The report is kept in "
            "its history record"
        ) from None


def job_results(kvs: Sequence[KeyValue], op: str) -> list[tuple[JobResult, Attempt | None]]:
    """The ended jobs in these keys, each with the attempt in which an executor ended it.

    Results in files are not read. Raises UnreadableRecord.
    """
    states: dict[int, bool] = {}
    found: dict[int, tuple[JobResult, Attempt | None]] = {}
    for kv in kvs:
        ordinal, name = job_name(kv.key)
        if name == "state":
            states[ordinal] = kv.value == JobState.SUCCESS.encode()
    for kv in kvs:
        ordinal, name = job_name(kv.key)
        if name == "outcome" and ordinal in states:
            one = read(Outcome.decode, kv)
            attempt = Attempt.of_outcome(op, ordinal, one.fence, one.incarnation)
            found[ordinal] = (
                JobResult(
                    ordinal,
                    one.name,
                    states[ordinal],
                    one.result,
                    one.error,
                    one.executor,
                    one.attempt,
                    one.started,
                    one.finished,
                ),
                attempt,
            )
    return [
        found.get(ordinal) or (JobResult(ordinal, str(ordinal), well), None) for ordinal, well in sorted(states.items())
    ]


class _Files:
    """Reads the results of one operation that are in files."""

    def __init__(self, etcd: EtcdClient, keys: Keys, ref: OperationRef, shared_dir: str) -> None:
        self._etcd, self._keys, self._ref = etcd, keys, ref
        self._configured = shared_dir.rstrip("/")
        self._shared: Place | None = None

    async def resolved(self, one: JobResult, attempt: Attempt | None, model: Any, revision: int) -> JobResult:
        """``one`` with its result; the operation's keys are read at ``revision`` (0: now)."""
        what = f"the result of partition {one.name} of {self._ref}"
        pointer = file_of(one.result)
        if pointer is not None:
            shared = await self._shared_place(revision)
            where = result_of(shared, attempt).location if shared is not None and attempt is not None else ""
            try:
                result = await time_limit.in_thread(lambda: resolve(one.result, shared, attempt))
            except time_limit.TimeLimitExceeded:
                raise NotFound(
                    f"{what} is in the file {where}, which could not be read from here within {time_limit.LIMIT:g} s"
                ) from None
            one = replace(
                one, result=result, file={"path": where, "bytes": pointer["bytes"], "sha256": pointer["sha256"]}
            )
        return one if model is None else replace(one, result=parsed(model, one.result, what))

    async def _shared_place(self, revision: int) -> Place | None:
        if self._shared is None:
            table = None
            if not self._configured:
                key = self._keys.table(self._ref.table)  # not the copy in the spec, which a submitter can write
                found = (await self._etcd.list(key, f"{key}\0", revision=revision)).kvs
                table = read(TableRecord.decode, found[0]) if found else None
            self._shared = shared_of(self._configured, await read_space_id(self._etcd, self._keys), table)
        return self._shared
