"""A poll stands behind every watch (P24, C23): an executor that no watch tells anything finds its work all the same."""

from __future__ import annotations

import json
from collections import Counter
from typing import TYPE_CHECKING

from distop.protocol.records import OperationRef
from distop.store import transport as wire
from distop.store._proto import rpc_pb2 as rpc
from tests.support.behaviors import sample_env  # noqa: F401
from tests.support.contract import dump
from tests.support.grpc_forwarder import Forwarder
from tests.support.replay import Written

if TYPE_CHECKING:
    from distop.store.embedded import EmbeddedEtcd
    from tests.support.daemons import Daemons


class MuteWatches(Forwarder):
    """Watches are created here, and then nothing comes: no event, and no answer to how far the server is.
    ``swallowed``: the events that clients were not told of.
    """

    def __init__(self, target: str) -> None:
        super().__init__(target)
        self.swallowed = 0

    def forwards_answer(self, method: str, answer: bytes) -> bool:
        if method != wire.WATCH.path:
            return True
        message = rpc.WatchResponse.FromString(answer)
        self.swallowed += len(message.events)
        return bool(message.created or message.canceled)


TABLE = "t"


def holders(group: Daemons) -> Counter[str]:
    """Executor → claims held now."""
    claims = [json.loads(value) for value in dump(group.endpoint, "distOpClaim.").values()]
    return Counter(claim["executor"] for claim in claims if "incarnation" in claim)


def test_an_executor_whose_watches_stay_silent_works_by_its_polls(
    group: Daemons,
    etcd: EmbeddedEtcd,
    sample_env: dict[str, str],  # noqa: F811
) -> None:
    """Jobs are found, reported and, where the operation is cancelled, stopped. The other executor hears everything, and
    coordinates: its own slots are full.
    """
    group.start("ann", env=sample_env)
    assert group.client.start_operation("sample", TABLE, {}).wait(60).state == "success", "ann coordinates from now on"
    with MuteWatches(etcd.endpoint) as front:
        bob = group.spawn("bob", "--etcd", front.endpoint, "--poll", "0.5", env=sample_env)
        group.await_ready("bob")
        names = list("abcd")
        operation = group.client.start_operation(
            "sample", TABLE, {"names": names, "does": dict.fromkeys(names, "hold")}
        )
        group.eventually(lambda: holders(group) == {"ann": 2, "bob": 2}, "bob found what ann has no slots for")
        for name in ("ann", "bob"):
            private = group.folder / name / "ops" / operation.ref
            group.eventually(private.exists, f"jobs run at {name}")
            (private / "go").touch()
        assert operation.wait(60).state == "success", group.tails()
        outcomes = Written(group.endpoint, OperationRef.parse(operation.ref)).outcomes
        assert Counter(json.loads(one)["executor"] for (one,) in outcomes.values()) == {"ann": 2, "bob": 2}
        waiting = group.client.start_operation("sample", TABLE, {"names": names, "does": dict.fromkeys(names, "wait")})
        group.eventually(lambda: holders(group) == {"ann": 2, "bob": 2}, "bob found the next as well")
        waiting.cancel()
        assert waiting.wait(60).state == "cancelled", group.tails()
        assert bob.stop() == 0
        assert front.swallowed, "there was something to be told"
