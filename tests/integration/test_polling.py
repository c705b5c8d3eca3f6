"""P24, C23: every watch is backed by a poll, so that an executor with silent watches still finds its work."""

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
    """Creates watches, and then drops their events and progress notifications. ``dropped`` counts the events."""

    def __init__(self, target: str) -> None:
        super().__init__(target)
        self.dropped = 0

    def forwards_answer(self, method: str, answer: bytes) -> bool:
        if method != wire.WATCH.path:
            return True
        message = rpc.WatchResponse.FromString(answer)
        self.dropped += len(message.events)
        return bool(message.created or message.canceled)


TABLE = "t"


def holders(group: Daemons) -> Counter[str]:
    """The number of claims that each executor holds."""
    claims = [json.loads(value) for value in dump(group.endpoint, "distOpClaim.").values()]
    return Counter(claim["executor"] for claim in claims if "incarnation" in claim)


def test_an_executor_with_silent_watches_works_by_polling(
    group: Daemons,
    etcd: EmbeddedEtcd,
    sample_env: dict[str, str],  # noqa: F811
) -> None:
    """It finds, reports and (after a cancel) stops jobs. The other executor has working watches and full slots, and it
    coordinates.
    """
    group.start("ann", env=sample_env)
    assert group.client.start_operation("sample", TABLE, {}).wait(60).state == "success", "ann becomes coordinator"
    with MuteWatches(etcd.endpoint) as front:
        bob = group.spawn("bob", "--etcd", front.endpoint, "--poll", "0.5", env=sample_env)
        group.await_ready("bob")
        names = list("abcd")
        operation = group.client.start_operation(
            "sample", TABLE, {"names": names, "does": dict.fromkeys(names, "hold")}
        )
        group.eventually(
            lambda: holders(group) == {"ann": 2, "bob": 2}, "bob claims the jobs for which ann has no slots"
        )
        for name in ("ann", "bob"):
            private = group.folder / name / "ops" / operation.ref
            group.eventually(private.exists, f"jobs run at {name}")
            (private / "go").touch()
        assert operation.wait(60).state == "success", group.tails()
        outcomes = Written(group.endpoint, OperationRef.parse(operation.ref)).outcomes
        assert Counter(json.loads(one)["executor"] for (one,) in outcomes.values()) == {"ann": 2, "bob": 2}
        waiting = group.client.start_operation("sample", TABLE, {"names": names, "does": dict.fromkeys(names, "wait")})
        group.eventually(lambda: holders(group) == {"ann": 2, "bob": 2}, "bob claims jobs of the next operation")
        waiting.cancel()
        assert waiting.wait(60).state == "cancelled", group.tails()
        assert bob.stop() == 0
        assert front.dropped, "the proxy dropped events"
