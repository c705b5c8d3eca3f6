"""Faults of etcd: of its members, its disk space, its users, and what is done to it in keeping it."""

from __future__ import annotations

import asyncio
import threading
from typing import TYPE_CHECKING, Any

from distop.errors import DistopError
from distop.protocol.supported_versions import judge_etcd, parse_version
from distop.store import transport as wire
from distop.store._proto import rpc_pb2 as rpc
from distop.store.client import EtcdClient
from soaking.board import NotYet
from tests.support.etcd import compacted
from tests.support.users import WORKER, admin

if TYPE_CHECKING:
    import random
    from collections.abc import Callable

    from distop.store.embedded import EmbeddedEtcd
    from soaking.board import Board
    from soaking.cluster import SoakCluster
    from soaking.faults import Strike

ETCD = "etcd"
"""One fault of etcd at a time, so that it gets over each."""
KEPT = 300
"""Revisions that compaction leaves, so that the audit sees all of them."""
ROUGH = frozenset({"revoke the role"})
"""What cannot be done gently: sessions that read meanwhile end."""
UNNOTICED = 1.5
"""Seconds that a TTL of 6 s is not lost by: a renewal is due after 2 s, and the margin is 1 s."""


KNOWN_PANIC, MENDED = "unexpected error during txn", (3, 5, 5)
"""What etcd says as it ends because a client has given up a transaction of reads that is under way (etcd issue 14110),
and the release from which on it does not.
"""


class MemberFaults:
    """``strikes``: as :class:`soaking.executors.ExecutorFaults` has them."""

    def __init__(self, cluster: SoakCluster, board: Board, say: Callable[[str], None]) -> None:
        self._cluster = cluster
        self._board = board
        self._say = say
        self.ended = 0
        """Members that ended by themselves."""
        self.problems: list[str] = []
        """What is wrong with that."""
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
        return number if self._board.free(ETCD) else None

    # ---------------------------------------------------------------- members

    def _freeze_member(self, chance: random.Random, gentle: bool) -> str | None:
        number, seconds = self._member(chance), chance.uniform(0.3, 8.0)
        if number is None:
            return None
        self._pause(seconds, self._cluster.etcd.members[number])
        return f"{number} for {seconds:.1f} s"

    def _freeze_two(self, chance: random.Random, gentle: bool) -> str | None:
        """What is left has no quorum: it takes requests, and commits none."""
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

        self._board.later(seconds, resume, ETCD)

    def _slow_member(self, chance: random.Random, gentle: bool) -> str | None:
        """It stands still most of the time, and never for long: as one whose disk is slow."""
        number, seconds = self._member(chance), chance.uniform(2.0, 10.0)
        still, runs = chance.uniform(0.1, 0.6), chance.uniform(0.02, 0.2)
        if number is None:
            return None
        member, over = self._cluster.etcd.members[number], threading.Event()

        def stutter() -> None:
            while not over.is_set():
                member.pause()
                over.wait(still)
                member.resume()
                over.wait(runs)

        thread = threading.Thread(target=stutter, daemon=True)
        thread.start()

        def end() -> None:
            over.set()
            thread.join()
            member.resume()

        self._board.later(seconds, end, ETCD)
        return f"{number} for {seconds:.1f} s: {still:.2f} s still, {runs:.2f} s running"

    def _restart_member(self, chance: random.Random, gentle: bool) -> str | None:
        """In order."""
        number, seconds = self._member(chance), chance.uniform(0.5, 6.0)
        if number is None:
            return None
        member = self._cluster.etcd.members[number]
        member.halt()
        self._board.later(seconds, member.restart, ETCD)
        return f"{number} after {seconds:.1f} s"

    def _kill_member(self, chance: random.Random, gentle: bool) -> str | None:
        """It comes back with its data; where a crash of this version can lose some of that while others keep it (etcd
        issue 13766, for which daemons refuse it), as a new member with an empty disk.
        """
        number, seconds = self._member(chance), chance.uniform(0.5, 6.0)
        if number is None:
            return None
        self._cluster.etcd.members[number].kill()
        return f"{number}, {self._bring_back(number, seconds)}"

    def _bring_back(self, number: int, seconds: float) -> str:
        """Have a member that ended go on, as that may be."""
        etcd = self._cluster.etcd
        if judge_etcd(self._cluster.version, len(etcd.members)).level == "error":

            def replace() -> None:
                if not etcd.replace(number, self._cluster.etcdctl):
                    raise NotYet(f"member {number} is not replaced yet")

            self._board.later(seconds, replace, ETCD)
            return f"replaced by an empty one after {seconds:.1f} s"
        self._board.later(seconds, etcd.members[number].restart, ETCD)
        return f"started again after {seconds:.1f} s"

    def tend(self) -> None:
        """Bring back a member that ended by itself, as whatever keeps an etcd running does."""
        for number, member in enumerate(self._cluster.etcd.members):
            if self._board.free(ETCD) and not member.running:
                said = member.log_file.read_text(errors="replace")
                if not (KNOWN_PANIC in said and parse_version(self._cluster.version) < MENDED):
                    self.problems.append(f"member {number} of etcd ended by itself: {said[-2000:]}")
                self.ended += 1
                self._say(f"member {number} ended by itself, {self._bring_back(number, 1.0)}")

    # ------------------------------------------------------------ maintenance

    def _compact(self, chance: random.Random, gentle: bool) -> str | None:
        revision = self._cluster.follower.audit.totals.last - KEPT
        if revision < 1:
            return None
        return f"up to revision {revision}" if self._ask(lambda client: compacted(client, revision)) else None

    def _defragment(self, chance: random.Random, gentle: bool) -> str | None:
        """It answers nobody meanwhile."""
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

        self._board.later(seconds, disarm, ETCD)  # also where the answer gets lost
        return f"for {seconds:.1f} s" if self._ask(lambda c: set_alarm(c, rpc.AlarmRequest.ACTIVATE)) else None

    # ------------------------------------------------------------------ users

    def _forget_tokens(self, chance: random.Random, gentle: bool) -> str | None:
        """A password that is set anew ends all tokens of its user. (Those that nobody uses for some seconds end by
        themselves, as on members that nobody asked lately.)
        """
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

        self._board.later(seconds, give_back, ETCD)  # also where the answer gets lost
        revoke = rpc.AuthUserRevokeRoleRequest(name=user, role=role)
        told = self._ask(lambda client: admin(client, "UserRevokeRole", revoke))
        return f"for {seconds:.1f} s" if told else None

    # --------------------------------------------------------------- requests

    def _insist(self, work: Callable[[EtcdClient], Any]) -> None:
        if not self._ask(work):
            raise NotYet("etcd did not answer")

    def _ask(self, work: Callable[[EtcdClient], Any]) -> bool:
        """One request of root's; False where etcd did not answer in time."""

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
