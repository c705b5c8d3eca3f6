"""Checks reruns by etcd's history: the partitions that a rerun had to take, and those that it took."""

from __future__ import annotations

from typing import TYPE_CHECKING

from distop.protocol.frozen import frozen
from distop.protocol.jobs import JobState
from distop.protocol.json_codec import loads
from distop.protocol.records import CLUSTER_TABLE, WHOLE, History, OperationRef, Spec, State
from tests.simulator import simulated_behaviors

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from distop.protocol.keys import Keys
    from distop.testing.model_store import ModelStore


@frozen
class Rerun:
    """A rerun that a client requested.

    ``what``: the ``failed`` partitions of ``op``, or also the ``unfinished`` ones. ``again``: the started operation;
    "": it was refused, with the error ``why``.
    """

    op: str
    what: str
    again: str = ""
    why: str = ""


def judge(store: ModelStore, keys: Keys, reruns: Sequence[Rerun]) -> Iterator[tuple[str, str, str]]:
    """(key, text, operation) of each breach."""
    if not reruns:
        return
    written = {
        change.kv.key: change.kv.value for _, changes in store.history for change in changes if not change.deleted
    }
    for one in reruns:
        ref = OperationRef.parse(one.op)
        expected = _expected(written, keys, ref, one.what)
        if not one.again:
            if expected:
                yield keys.history(ref), f"the partitions {sorted(expected)} are not run again: {one.why}", one.op
            continue
        place = keys.of(OperationRef.parse(one.again), "spec")
        spec = Spec.decode(written[place])
        every = (WHOLE,) if ref.table == CLUSTER_TABLE else ()
        if spec.rerun_of != one.op or set(spec.partitions or every) != expected:
            text = f"rerun of {spec.rerun_of} over {spec.partitions}; expected {one.op} over {sorted(expected)}"
            yield place, text, one.again


def _expected(written: Mapping[str, bytes], keys: Keys, ref: OperationRef, what: str) -> set[str]:
    """The names of the partitions that the rerun has to take."""
    if keys.of(ref, "plan") not in written:
        return set()
    spec, arg = Spec.decode(written[keys.of(ref, "spec")]), loads(written[keys.of(ref, "arg")])
    every = what == "unfinished" or History.decode(written[keys.history(ref)]).state is State.CANCELLED
    chosen = set()
    names = [WHOLE] if ref.table == CLUSTER_TABLE else simulated_behaviors.partitions(arg, spec.partitions)
    for p, name in enumerate(names):
        state = written.get(keys.job(ref, p, "state"), b"").decode()
        if state == JobState.FAILED or (every and not state):
            chosen.add(name)
    return chosen
