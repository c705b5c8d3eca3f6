"""Faults of etcd: members, disk space, users, and maintenance."""

from __future__ import annotations

import asyncio
import threading
from typing import TYPE_CHECKING, Any

from distop.errors import DistopError
from distop.protocol.supported_versions import judge_etcd, parse_version
from distop.store import transport as wire
from distop.store._proto import rpc_pb2 as rpc
from distop.store.client import EtcdClient
from soaking.repairs import NotYet
from tests.support.etcd import compacted
from tests.support.users import WORKER, admin

if TYPE_CHECKING:
    import random
    from collections.abc import Callable

    from distop.store.embedded import EmbeddedEtcd
    from soaking.cluster import SoakCluster
    from soaking.faults import Strike
    from soaking.repairs import Repairs

ETCD = "etcd"
"""The target of all faults of etcd: there is one at a time, so that etcd can recover."""
KEPT = 300
"""Revisions that a compaction keeps, so that the audit sees all of them."""
ROUGH = frozenset({"revoke the role"})
"""Kinds that cannot be gentle: sessions that read meanwhile end."""
UNNOTICED = 1.5
"""Seconds of an outage that loses no session with a TTL of 6 s: a renewal is due after 2 s, and the margin is 1 s."""


KNOWN_PANIC, MENDED = "unexpected error during txn", (3, 5, 5)
"""The log text of a crash after a client cancels a read transaction (etcd#14110), and the first fixed release."""


class MemberFaults:
    """The faults of etcd. ``strikes``: as in :class:`soaking.executors.ExecutorFaults`."""

    def __init__(self, cluster: SoakCluster, repairs: Repairs, say: Callable[[str], None]) -> None:
        self._cluster = cluster
        self._repairs = repairs
        self._say = say
        self.ended = 0
        """Number of members that crashed by themselves."""
        self.problems: list[str] = []
        """Descriptions of crashes that are no known defect."""
        self.strikes: dict[str, Strike] = {
            "freeze a member": self._freeze_member,
            "slow a member": self._slow_member,
            "restart a member": self._restart_member,
            "kill a member": self._kill_member,
            "freeze two members": self._freeze_two,
            "freeze all of etcd": self._freeze_all,
            "compact": self._compact,
            "defragment a member": self._defragment,
            "raise the space alarm": self._alarm,
            "forget the tokens": self._forget_tokens,
            "revoke the role": self._revoke_role,
        }

    def _member(self, chance: random.Random) -> int | None:
        number = chance.randrange(len(self._cluster.etcd.members))
        return number if self._repairs.free(ETCD) else None

    # ---------------------------------------------------------------- members

    def _freeze_member(self, chance: random.Random, gentle: bool) -> str | None:
        number, seconds = self._member(chance), chance.uniform(0.3, 8.0)
        if number is None:
            return None
        self._pause(seconds, self._cluster.etcd.members[number])
        return f"{number} for {seconds:.1f} s"

    def _freeze_two(self, chance: random.Random, gentle: bool) -> str | None:
        """Without quorum, the remaining member accepts requests but commits none."""
        number, seconds = self._member(chance), chance.uniform(0.5, UNNOTICED if gentle else 8.0)
        if number is None:
            return None
        self._pause(seconds, *(m for n, m in enumerate(self._cluster.etcd.members) if n != number))
        return f"all but {number} for {seconds:.1f} s"

    def _freeze_all(self, chance: random.Random, gentle: bool) -> str | None:
        number, seconds = self._member(chance), chance.uniform(0.5, UNNOTICED if gentle else 1.5 * self._cluster.ttl)
        if number is None:
            return None
        self._pause(seconds, *self._cluster.etcd.members)
        return f"for {seconds:.1f} s"

    def _pause(self, seconds: float, *members: EmbeddedEtcd) -> None:
        for member in members:
            member.pause()

        def resume() -> None:
            for member in members:
                member.resume()

        self._repairs.later(seconds, resume, ETCD)

    def _slow_member(self, chance: random.Random, gentle: bool) -> str | None:
        """Pause a member most of the time, each time briefly, as a slow disk would."""
        number, seconds = self._member(chance), chance.uniform(2.0, 10.0)
        still, runs = chance.uniform(0.1, 0.6), chance.uniform(0.02, 0.2)
        if number is None:
            return None
        member, over = self._cluster.etcd.members[number], threading.Event()

        def pause_repeatedly() -> None:
            while not over.is_set():
                member.pause()
                over.wait(still)
                member.resume()
                over.wait(runs)

        thread = threading.Thread(target=pause_repeatedly, daemon=True)
        thread.start()

        def end() -> None:
            over.set()
            thread.join()
            member.resume()

        self._repairs.later(seconds, end, ETCD)
        return f"{number} for {seconds:.1f} s: {still:.2f} s still, {runs:.2f} s running"

    def _restart_member(self, chance: random.Random, gentle: bool) -> str | None:
        """Stop a member in order, and restart it."""
        number, seconds = self._member(chance), chance.uniform(0.5, 6.0)
        if number is None:
            return None
        member = self._cluster.etcd.members[number]
        member.halt()
        self._repairs.later(seconds, member.restart, ETCD)
        return f"{number} after {seconds:.1f} s"

    def _kill_member(self, chance: random.Random, gentle: bool) -> str | None:
        """Kill a member, and restart it with its data.

        A version whose crash may lose data on one member (etcd#13766; daemons refuse it) is replaced by a new, empty
        member.
        """
        number, seconds = self._member(chance), chance.uniform(0.5, 6.0)
        if number is None:
            return None
        self._cluster.etcd.members[number].kill()
        return f"{number}, {self._bring_back(number, seconds)}"

    def _bring_back(self, number: int, seconds: float) -> str:
        """Restart or replace an ended member; returns a description."""
        etcd = self._cluster.etcd
        if judge_etcd(self._cluster.version, len(etcd.members)).level == "error":

            def replace() -> None:
                if not etcd.replace(number, self._cluster.etcdctl):
                    raise NotYet(f"member {number} is not replaced yet")

            self._repairs.later(seconds, replace, ETCD)
            return f"replaced by an empty one after {seconds:.1f} s"
        self._repairs.later(seconds, etcd.members[number].restart, ETCD)
        return f"started again after {seconds:.1f} s"

    def step(self) -> None:
        """Restart a crashed member, as a process supervisor does."""
        for number, member in enumerate(self._cluster.etcd.members):
            if self._repairs.free(ETCD) and not member.running:
                log = member.log_file.read_text(errors="replace")
                if not (KNOWN_PANIC in log and parse_version(self._cluster.version) < MENDED):
                    self.problems.append(f"member {number} of etcd crashed: {log[-2000:]}")
                self.ended += 1
                self._say(f"member {number} crashed, {self._bring_back(number, 1.0)}")

    # ------------------------------------------------------------ maintenance

    def _compact(self, chance: random.Random, gentle: bool) -> str | None:
        revision = self._cluster.follower.audit.totals.last - KEPT
        if revision < 1:
            return None
        return f"up to revision {revision}" if self._ask(lambda client: compacted(client, revision)) else None

    def _defragment(self, chance: random.Random, gentle: bool) -> str | None:
        """Defragment a member, which blocks its requests meanwhile."""
        number = self._member(chance)
        if number is None:
            return None
        endpoint = self._cluster.etcd.members[number].endpoint
        return str(number) if self._cluster.etcdctl("--endpoints", endpoint, "defrag") is not None else None

    def _alarm(self, chance: random.Random, gentle: bool) -> str | None:
        seconds = chance.uniform(1.0, 10.0)
        if self._member(chance) is None:
            return None

        async def set_alarm(client: EtcdClient, action: Any) -> None:
            for member in await client.members():
                request = rpc.AlarmRequest(action=action, memberID=member.id, alarm=rpc.NOSPACE)
                await client.transport.unary(wire.ALARM, request, 3.0)

        def disarm() -> None:
            self._insist(lambda client: set_alarm(client, rpc.AlarmRequest.DEACTIVATE))

        self._repairs.later(seconds, disarm, ETCD)  # even if the answer is lost
        return f"for {seconds:.1f} s" if self._ask(lambda c: set_alarm(c, rpc.AlarmRequest.ACTIVATE)) else None

    # ------------------------------------------------------------------ users

    def _forget_tokens(self, chance: random.Random, gentle: bool) -> str | None:
        """Invalidate all tokens of a user by setting its password. Unused tokens also expire after some seconds."""
        request = rpc.AuthUserChangePasswordRequest(name=WORKER["username"], password=WORKER["password"])
        return "of all" if self._ask(lambda client: admin(client, "UserChangePassword", request)) else None

    def _revoke_role(self, chance: random.Random, gentle: bool) -> str | None:
        seconds = chance.uniform(0.5, 8.0)
        if self._member(chance) is None:
            return None
        user, role = WORKER["username"], "ours"

        def give_back() -> None:
            request = rpc.AuthUserGrantRoleRequest(user=user, role=role)
            self._insist(lambda client: admin(client, "UserGrantRole", request))

        self._repairs.later(seconds, give_back, ETCD)  # even if the answer is lost
        revoke = rpc.AuthUserRevokeRoleRequest(name=user, role=role)
        answered = self._ask(lambda client: admin(client, "UserRevokeRole", revoke))
        return f"for {seconds:.1f} s" if answered else None

    # --------------------------------------------------------------- requests

    def _insist(self, work: Callable[[EtcdClient], Any]) -> None:
        if not self._ask(work):
            raise NotYet("etcd did not answer")

    def _ask(self, work: Callable[[EtcdClient], Any]) -> bool:
        """Send one request as root; False: etcd did not answer in time."""

        async def ask() -> None:
            config = self._cluster.as_root(connect_timeout=3.0, request_timeout=2.0, read_timeout=3.0)
            async with EtcdClient(config) as client:
                await work(client)

        try:
            asyncio.run(ask())
        except (DistopError, wire.RequestFailed) as error:
            self._say(f"etcd did not answer: {str(error)[:80]}")
            return False
        return True
