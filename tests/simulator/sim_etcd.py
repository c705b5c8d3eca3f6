"""A simulated etcd cluster in memory: answers to requests, and the ends of leases (docs/internals/etcd-rules.md).

The store is one value (``ModelStore``): Raft is not simulated, only what clients see of it. Members may apply commits
late (``lag``), and stop or lose connection (``quorum``). Leases expire, and are renewed, only while a majority has a
leader. Each new leader extends all leases (L4).
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from distop.errors import EtcdRejected
from distop.protocol.supported_versions import parse_version
from distop.protocol.txn import MAX_REQUEST_BYTES, Flaw, Get, GetResult, KeyValue, Txn, TxnResult
from distop.store._proto import rpc_pb2 as rpc
from distop.testing.model_store import ModelStore
from tests.simulator import etcd_wire
from tests.simulator.database_space import GRANT_COST, Space, put_cost, size_of
from tests.simulator.etcd_users import DENIED, Users
from tests.simulator.etcd_watches import WatchServer
from tests.simulator.quorum import Quorum

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from distop.protocol.revisioned import Change
    from tests.simulator.quorum import Member
    from tests.simulator.virtual_loop import VirtualLoop

LEAST_TTL = 2
MAX_MESSAGE = MAX_REQUEST_BYTES + 512 * 1024
"""Maximum bytes of a request."""
EXPIRY_CHECK = 0.5
"""Seconds between two checks for expired leases (L4)."""
CLUSTER = 0xD15709
NO_SPACE = "etcdserver: mvcc: database space exceeded"


class StatusError(Exception):
    """An error answer: the name of the gRPC status, and etcd's text."""

    def __init__(self, code: str, detail: str) -> None:
        super().__init__(f"{detail} ({code})")
        self.code = code
        self.detail = detail


class NoLeader(Exception):
    """The request has to wait until the member has a leader."""


@dataclass(slots=True)
class Lease:
    """One lease, on the leader. ``waiting``: renewals that are answered at the revocation (L3)."""

    ttl: int
    expires: float
    waiting: list[Callable[[int], None]] = field(default_factory=list)


class SimEtcd:
    """The simulated etcd cluster.

    ``committed(revision, changes, sender)`` is called at once for each revision, ``refused(flaw, sender)`` for each
    transaction that is rejected as invalid. ``election``: the election timeout in seconds. ``quota``: the maximum
    bytes of the database.
    """

    def __init__(
        self,
        loop: VirtualLoop,
        addresses: Sequence[str],
        *,
        version: str = "3.6.16",
        batch: int = 1000,
        election: float = 1.0,
        quota: int | None = None,
    ) -> None:
        self.loop = loop
        self.version = version
        self.store = ModelStore()
        self.quorum = Quorum(loop, addresses, election, self._extend_leases)
        self.quorum.led = self.catch_up
        self.members = self.quorum.members
        self.space = Space(loop, version, quota)
        self.leases: dict[int, Lease] = {}
        self.revoked: set[int] = set()
        self.compacted = 0
        self.late_revocation = 0.0
        """Seconds by which leases are revoked late (L4)."""
        self.renews_revoked = False
        """Renewals of revoked leases are acknowledged, as by old servers (L2)."""
        self.stale_answers = 0
        """Number of reads that were answered at an old revision."""
        self.never_stale: frozenset[str] = frozenset()
        """Senders that never get such an answer."""
        self.committed: Callable[[int, tuple[Change, ...], str], None] | None = None
        self.refused: Callable[[Flaw, str], None] | None = None
        self.watching = WatchServer(self, batch)
        self.users = Users(parse_version(version))
        self._versions: dict[str, list[KeyValue]] = {}
        self._expiring = False

    # ------------------------------------------------------------------ store

    @property
    def revision(self) -> int:
        return self.store.revision

    def header(self, member: Member) -> rpc.ResponseHeader:
        """The header of an answer at the latest revision."""
        return rpc.ResponseHeader(
            cluster_id=CLUSTER, member_id=member.id, revision=self.store.revision, raft_term=self.quorum.term
        )

    def preset(self, txn: Txn) -> None:
        """Write to the store before the simulation starts."""
        before = self.store.revision
        self.store.apply(txn)
        self._commit(before, "")

    def _commit(self, before: int, sender: str) -> None:
        """Publish a new revision, if a transaction has written one."""
        if self.store.revision == before:
            return
        revision, changes = self.store.history[-1]
        for change in changes:
            self._versions.setdefault(change.kv.key, []).append(change.kv)
            self.space.size += put_cost(change.kv.key, change.kv.value)
        if self.committed is not None:
            self.committed(revision, changes, sender)
        for member in self.members.values():
            if member.lag:
                self.loop.world_at(self.loop.now + member.lag, self._show, member, revision)
            else:
                self._show(member, revision)

    def _show(self, member: Member, revision: int) -> None:
        if member.led and revision > member.applied:
            member.applied = revision
            self.watching.advanced(member)

    def catch_up(self, member: Member) -> None:
        """Let a member with a leader apply all commits now."""
        self._show(member, self.store.revision)

    def _at(self, revision: int, get: Get) -> GetResult:
        """Read at a past revision."""
        if revision < self.compacted:
            raise StatusError("OUT_OF_RANGE", "etcdserver: mvcc: required revision has been compacted")
        if revision > self.store.revision:
            raise StatusError("OUT_OF_RANGE", "etcdserver: mvcc: required revision is a future revision")
        found: list[KeyValue] = []
        for key in sorted(self._versions):
            if key == get.key if not get.range_end else get.key <= key < get.range_end:
                past = self._versions[key]
                n = bisect_right(past, revision, key=lambda kv: kv.mod_revision)
                if n and past[n - 1].create_revision:  # not a deletion
                    found.append(past[n - 1])
        return cut(found, get)

    # --------------------------------------------------------------- requests

    def decode(self, path: str, request: Any) -> Any:
        """Decode or copy a request when it is sent, since the sender may change the message later."""
        if path == "/etcdserverpb.KV/Txn":
            if (size := request.ByteSize()) > MAX_MESSAGE:
                return size
            return etcd_wire.decode_txn(request)
        if path == "/etcdserverpb.KV/Range":
            return etcd_wire.decode_get(request), request.revision
        copy = type(request)()
        copy.CopyFrom(request)
        return copy

    def answer(self, member: Member, path: str, asked: Any, sender: str) -> Any:
        """Apply a request. Raises StatusError or NoLeader."""
        answer = _ANSWERS.get(path)
        if answer is None:
            raise StatusError("UNIMPLEMENTED", f"unknown method {path}")
        if not member.led and path not in _LOCAL:
            if path in _PATIENT or not self.quorum.knows_no_leader(member):
                raise NoLeader
            raise StatusError("UNAVAILABLE", "etcdserver: no leader")
        stale = self._stale(member, asked, sender)
        response = answer(self, member, asked, sender) if stale is None else stale
        response.header.CopyFrom(self.header(member))
        if stale is not None:
            response.header.revision = member.stale
        return response

    def _stale(self, member: Member, asked: Any, sender: str) -> Any:
        """The answer of a member that reads at an old revision (etcd#20418), or None."""
        if sender in self.never_stale or not self.compacted < member.stale < self.store.revision:
            return None
        if isinstance(asked, tuple) and not asked[1]:
            response: Any = etcd_wire.encode_range(self._at(member.stale, asked[0]))
        elif isinstance(asked, Txn) and not _writes(asked):
            everything = self._at(member.stale, Get("", range_end="\U0010ffff")).kvs
            response = etcd_wire.encode_txn(ModelStore.holding(member.stale, everything).apply(asked))
        else:
            return None
        self.stale_answers += 1
        return response

    def _txn(self, member: Member, txn: Any, sender: str) -> Any:
        if isinstance(txn, int):
            detail = f"grpc: received message larger than max ({txn} vs. {MAX_MESSAGE})"
            self._refuse(Flaw(detail, f"a transaction has {txn} bytes"), sender)
            raise StatusError("RESOURCE_EXHAUSTED", detail)
        before, fits = self.store.revision, self._admit(self.space.cost(txn))
        known = len(self.store.refused)
        try:
            result: TxnResult = self.store.apply(txn)
        except EtcdRejected as error:
            for one in self.store.refused[known:]:
                self._refuse(one, sender)
            raise StatusError(error.code, error.detail) from None
        self._commit(before, sender)
        self._account(fits)
        return etcd_wire.encode_txn(result)

    def _refuse(self, found: Flaw, sender: str) -> None:
        if self.refused is not None:
            self.refused(found, sender)

    def _admit(self, cost: int) -> bool:
        """Whether there is room for a request. Raises StatusError if the request is not applied."""
        fits = self.space.fits(cost)
        if self.space.refuses(cost):
            raise StatusError("RESOURCE_EXHAUSTED", NO_SPACE)
        return fits

    def _account(self, fits: bool) -> None:
        """Raise StatusError for a request that was applied without room (T8)."""
        if not fits and not self.space.alarm:
            self.space.overdrawn()
            raise StatusError("RESOURCE_EXHAUSTED", NO_SPACE)

    def _range(self, member: Member, asked: Any, sender: str) -> Any:
        get, revision = asked
        if revision and revision != self.store.revision:
            return etcd_wire.encode_range(self._at(revision, get))
        if revision and revision < self.compacted:
            raise StatusError("OUT_OF_RANGE", "etcdserver: mvcc: required revision has been compacted")
        return etcd_wire.encode_range(self.store._get(get))

    def _compact(self, member: Member, request: Any, sender: str) -> Any:
        if request.revision <= self.compacted:
            raise StatusError("OUT_OF_RANGE", "etcdserver: mvcc: required revision has been compacted")
        if request.revision > self.store.revision:
            raise StatusError("OUT_OF_RANGE", "etcdserver: mvcc: required revision is a future revision")
        self.compacted = request.revision
        return rpc.CompactionResponse()

    def _status(self, member: Member, request: Any, sender: str) -> Any:
        leader = self.quorum.leader.id if member.led and self.quorum.leader is not None else 0
        size = max(20480, self.space.size)
        return rpc.StatusResponse(version=self.version, leader=leader, raftTerm=self.quorum.term, dbSize=size)

    def _alarms(self, member: Member, request: Any, sender: str) -> Any:
        raised = [rpc.AlarmMember(memberID=member.id, alarm=rpc.NOSPACE)] if self.space.alarm else []
        if request.action == rpc.AlarmRequest.DEACTIVATE:
            self.space.disarm()
        return rpc.AlarmResponse(alarms=raised)

    def _defragment(self, member: Member, request: Any, sender: str) -> Any:
        """Shrink the database to the current keys and the history since the last compaction."""
        history = self.store.between(self.compacted + 1, self.store.revision)
        kept = size_of(self.store.listing()) + sum(size_of(one.kv for one in changes) for _, changes in history)
        self.space.size = min(self.space.size, kept)
        return rpc.DefragmentResponse()

    def _authenticate(self, member: Member, request: Any, sender: str) -> Any:
        return rpc.AuthenticateResponse(token=self.users.authenticate())

    def deny(self, denied: bool) -> None:
        """Revoke or grant the users' role. Existing watches continue."""
        self.users.denied, self.watching.refuses = denied, DENIED if denied else ""

    def _list_members(self, member: Member, request: Any, sender: str) -> Any:
        return rpc.MemberListResponse(
            members=[
                rpc.Member(ID=one.id, name=one.name, clientURLs=[f"http://{one.address}"])
                for one in self.members.values()
            ]
        )

    # ----------------------------------------------------------------- leases

    def _grant(self, member: Member, request: Any, sender: str) -> Any:
        fits = self._admit(GRANT_COST)
        try:
            self.store.grant(request.ID)
        except EtcdRejected as error:
            raise StatusError(error.code, error.detail) from None
        ttl = max(request.TTL, LEAST_TTL)
        self.leases[request.ID] = Lease(ttl, self.loop.now + ttl)
        if not self._expiring:
            self._expiring = True
            self.loop.world_at(self.loop.now + EXPIRY_CHECK, self._expire)
        self._account(fits)
        return rpc.LeaseGrantResponse(ID=request.ID, TTL=ttl)

    def _revoke(self, member: Member, request: Any, sender: str) -> Any:
        if request.ID not in self.leases:
            raise StatusError("NOT_FOUND", "etcdserver: requested lease not found")
        if self.users.denied and self.store.leases[request.ID]:
            raise StatusError("PERMISSION_DENIED", DENIED)
        self.end_lease(request.ID, sender)
        return rpc.LeaseRevokeResponse()

    def end_lease(self, lease: int, sender: str = "") -> None:
        """Revoke a lease: its keys are deleted in one transaction (L5)."""
        ended = self.leases.pop(lease)
        self.revoked.add(lease)
        before = self.store.revision
        self.store.expire(lease)
        self._commit(before, sender or "the expiry of a lease")
        for waiting in ended.waiting:
            waiting(0)

    def _expire(self) -> None:
        self._expiring = bool(self.leases)
        if self._expiring:
            self.loop.world_at(self.loop.now + EXPIRY_CHECK, self._expire)
        if self.quorum.leader is None:
            return  # only a leader expires leases
        for lease in [i for i, one in self.leases.items() if one.expires + self.late_revocation <= self.loop.now]:
            self.end_lease(lease)

    def _time_to_live(self, member: Member, request: Any, sender: str) -> Any:
        lease = self.leases.get(request.ID)
        if lease is None:
            return rpc.LeaseTimeToLiveResponse(ID=request.ID, TTL=-1)
        left = max(int(lease.expires - self.loop.now), 0)
        return rpc.LeaseTimeToLiveResponse(ID=request.ID, TTL=left, grantedTTL=lease.ttl)

    def renewal_refusal(self, lease_id: int, token: str) -> tuple[str, str] | None:
        """The status and text that refuse a renewal for missing rights; None: it is admitted."""
        return self.users.renewal_refusal(token, keys=bool(self.store.leases.get(lease_id)))

    def renew(self, lease_id: int, answer: Callable[[int], None]) -> None:
        """Renew a lease on the leader. ``answer(ttl)`` is called at once, or after the revocation of an expired lease
        (L3).
        """
        lease = self.leases.get(lease_id)
        if lease is None:
            answer(10 if self.renews_revoked and lease_id in self.revoked else 0)
        elif lease.expires <= self.loop.now:
            lease.waiting.append(answer)
        else:
            lease.expires = self.loop.now + lease.ttl
            answer(lease.ttl)

    def _extend_leases(self) -> None:
        """Give each lease a full TTL, as a new leader does (L4)."""
        for lease in self.leases.values():
            lease.expires = self.loop.now + lease.ttl
            waiting, lease.waiting = lease.waiting, []
            for answer in waiting:
                answer(lease.ttl)


def _writes(txn: Txn) -> bool:
    """Whether a branch writes, so that the transaction goes through the Raft log."""
    return any(_writes(op) if isinstance(op, Txn) else not isinstance(op, Get) for op in (*txn.success, *txn.failure))


def cut(found: list[KeyValue], get: Get) -> GetResult:
    """The result of a read for the keys in its range."""
    if get.count_only:
        return GetResult((), False, len(found))
    kept = found[: get.limit] if get.limit else found
    kvs = [
        KeyValue(kv.key, b"", kv.mod_revision, kv.create_revision, kv.version, kv.lease) if get.keys_only else kv
        for kv in kept
    ]
    return GetResult(tuple(kvs), len(kept) < len(found), len(found))


_ANSWERS: dict[str, Callable[[SimEtcd, Member, Any, str], Any]] = {
    "/etcdserverpb.KV/Txn": SimEtcd._txn,
    "/etcdserverpb.KV/Range": SimEtcd._range,
    "/etcdserverpb.KV/Compact": SimEtcd._compact,
    "/etcdserverpb.Lease/LeaseGrant": SimEtcd._grant,
    "/etcdserverpb.Lease/LeaseRevoke": SimEtcd._revoke,
    "/etcdserverpb.Lease/LeaseTimeToLive": SimEtcd._time_to_live,
    "/etcdserverpb.Auth/Authenticate": SimEtcd._authenticate,
    "/etcdserverpb.Maintenance/Status": SimEtcd._status,
    "/etcdserverpb.Maintenance/Alarm": SimEtcd._alarms,
    "/etcdserverpb.Maintenance/Defragment": SimEtcd._defragment,
    "/etcdserverpb.Cluster/MemberList": SimEtcd._list_members,
}
_LOCAL = frozenset(
    {"/etcdserverpb.Maintenance/Status", "/etcdserverpb.Maintenance/Defragment", "/etcdserverpb.Cluster/MemberList"}
)
"""Methods that a member answers without a leader."""
_PATIENT = frozenset({"/etcdserverpb.Maintenance/Alarm", "/etcdserverpb.Auth/Authenticate"})
"""Methods that are sent without ``hasleader``, and so wait for a leader without limit (W8)."""
