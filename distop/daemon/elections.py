"""Leader elections of a daemon: one coordinator per table and type, while there are open or pending operations.

An election is valid as long as its incarnation's node key exists; its mod revision is the fence in every coordinator
write. Candidates try one after the other in a common order, so that they do not race for one key, and the first one
need not wait.
"""

from __future__ import annotations

import asyncio
from itertools import islice
from typing import TYPE_CHECKING

from distop.clock import random, time
from distop.daemon.coordinator.coordinator_role import Coordinator
from distop.daemon.coordinator.election import Callbacks
from distop.daemon.coordinator.label_routing import ABSENT
from distop.decide import coordinator_ranking, work_shares
from distop.decide.view import ENDING_PHASES
from distop.errors import DistopError, SessionLost, describe
from distop.protocol import operation_transitions as t
from distop.protocol.behavior_declaration import Declaration
from distop.protocol.executor_nodes import refusal
from distop.protocol.json_codec import UNREADABLE
from distop.protocol.records import Phase
from distop.protocol.txn import Get, GetResult

if TYPE_CHECKING:
    from collections.abc import Collection, Container, Iterable, Sequence

    from distop.daemon.incarnation_context import Context
    from distop.protocol.records import Node, Subject
    from distop.protocol.revisioned import Seen

RACE_DELAY = 0.05
"""Seconds between the attempts of two candidates: each one has its turn, and the first one need not wait."""
IDLE_BEFORE_RESIGNING = 300.0
"""Seconds without an operation after which a coordinator resigns, so that idle tables need no watch."""
PAUSE_AFTER_FAILURE = (0.5, 2.0)
"""Minimum and maximum seconds of the random pause after a failed election or role."""
HAND_OVER_EVERY = 60.0
"""Minimum seconds between two resignations of a node because of failed calls.

If the calls fail on every node, the election must not move among the nodes without end.
"""
PASSED_ON = 5.0
"""Seconds for which a node that resigned in favor of nodes with other labels lets all others try first."""
TYPES_AT_ONCE = 100
"""Maximum number of declarations that are read together."""
ENDED_BY_ANYBODY = (*ENDING_PHASES, Phase.WAITING)
"""Phases of operations that may end without code of their type: cancelled, or waiting for a failed operation."""
ABANDONED_AT_ONCE = 16
"""Maximum number of subjects without code here, or of unserved tables, that this node coordinates at once.

Any submitter can write pending keys of unknown types, so the number of such subjects is unbounded.
"""
ABANDONED_TURN = 10.0
"""Seconds after which such a subject makes room for the next one."""
SOUGHT_AT_ONCE = 32
"""Maximum number of concurrent elections with their listings: more would delay the renewal of the session's lease."""
RESIGNED_KEPT = 600.0
"""Seconds after which every view shows a resignation: each poll lists all elections again."""


class Elections:
    """The elections and coordinator roles of one incarnation.

    ``idle``: seconds without an operation after which a role resigns.
    """

    def __init__(self, ctx: Context, idle: float = IDLE_BEFORE_RESIGNING) -> None:
        self._ctx = ctx
        self._idle = idle
        self._roles: dict[Subject, Coordinator] = {}
        self._on_table: dict[str, dict[Subject, Coordinator]] = {}
        """The roles by table."""
        self._work: dict[Subject, asyncio.Task[None]] = {}
        self._idle_since: dict[Subject, float] = {}
        self._resigned: dict[Subject, tuple[int, float]] = {}
        """Fences of resigned elections, with the time: a view that still shows such an election is outdated."""
        self._handed_over: dict[Subject, float] = {}
        """Time of the last resignation because of failed calls."""
        self._passed_on: dict[Subject, float] = {}
        """Time of the last resignation in favor of nodes with other labels."""
        self._confirmed: set[Subject] = set()
        """Roles whose election the view has shown."""
        self._without_code: dict[str, bool] = {}
        """Types that no executor offers → whether they are declared to have no code."""
        self._absent: dict[Subject, float] = {}
        """Subjects with operations to end but without a live node that serves them, and since when; oldest first."""
        self._turns: dict[Subject, float] = {}
        """Abandoned subjects that this node may coordinate now, and since when."""
        self._seeking = asyncio.Semaphore(SOUGHT_AT_ONCE)
        self._looked_up: set[str] = set()
        """Types whose declarations were read since the last poll."""
        self._lookup: asyncio.Task[None] | None = None
        self._stopping = False

    def _held(self, subject: Subject) -> Seen[str] | None:
        held = self._ctx.cluster.elections.get(subject)
        return held if held is not None and held.mod > self._resigned.get(subject, (0, 0.0))[0] else None

    def cluster_changed(self) -> None:
        """Examine all subjects, because nodes or anything else may have changed."""
        if self._stopping:
            return
        self._examine(sorted({*self._roles, *self._absent, *self._ctx.cluster.wanted_types()}))
        for role in list(self._roles.values()):
            role.cluster_changed()

    def subjects_changed(self, subjects: Collection[Subject]) -> None:
        """Examine subjects whose operations or elections changed, but no nodes.

        This is called several times per operation, and there may be thousands of tables: skip all other tables.
        """
        if self._stopping:
            return
        self._examine(sorted(subjects))
        for table in sorted({table for table, _ in subjects}):
            for role in list(self._on_table.get(table, {}).values()):
                role.table_changed()

    def holds_changed(self, ids: Collection[str]) -> None:
        """Notify all roles that these holds changed."""
        for role in list(self._roles.values()):
            role.holds_changed(ids)

    def _examine(self, subjects: Sequence[Subject]) -> None:
        """Start, keep or end the elections of these sorted subjects, and of abandoned ones whose turn changed."""
        turns = set(self._turns)
        self._note_absent(subjects)
        turns ^= self._abandoned()
        if not self._ctx.draining:
            wanted = {type_name for table, type_name in subjects if self._ctx.cluster.wants((table, type_name))}
            self._start_lookup(wanted)
        for subject in sorted(turns.union(subjects)) if turns else subjects:
            self._examine_one(subject)
        self._ctx.activity_changed()

    def _examine_one(self, subject: Subject) -> None:
        role, held = self._roles.get(subject), self._held(subject)
        if role is not None:
            if held is not None and held.mod == role.fence:
                self._confirmed.add(subject)
            if (held is None and subject in self._confirmed) or (held is not None and held.mod > role.fence):
                self._drop(subject)  # the election is gone, or was taken over by another node or a later write of mine
        if self._wanted(subject):
            self._idle_since.pop(subject, None)
            if subject in self._roles or subject in self._work:
                return
            if held is None or held.value == self._ctx.incarnation or not self._ctx.cluster.live(held.value):
                self._work[subject] = asyncio.ensure_future(self._seek(subject))
        elif (role := self._roles.get(subject)) is not None:
            unfit = self._ctx.draining or not self._coordinates(subject)
            if unfit and subject not in self._work:
                message = "Resigning as coordinator of %s on %s: another node can take over"
                self._ctx.log.info(message, subject[1], subject[0])
                self._give_up(subject, role.fence)
            else:
                self._idle_since.setdefault(subject, time.monotonic())

    @property
    def busy(self) -> bool:
        """Whether it has roles or pending elections."""
        return bool(self._roles or self._work)

    def _wanted(self, subject: Subject) -> bool:
        """Whether this node should coordinate the subject if no other node does.

        While it drains: only subjects with operations to end that no other node can coordinate, so that a cancel
        succeeds also when the last capable executor is drained.
        """
        if subject in self._turns:
            return True
        cluster, (table, type_name) = self._ctx.cluster, subject
        if self._ctx.draining:
            role = self._roles.get(subject)
            ending = cluster.any_in(subject, ENDING_PHASES) or (role is not None and role.ends_something)
            return ending and self._here(subject) and not cluster.capable(type_name, tables=(table,))
        return cluster.wants(subject) and self._coordinates(subject)

    def _note_absent(self, subjects: Sequence[Subject]) -> None:
        """Record which subjects are absent: they have operations to end, and no live node can coordinate them.

        Operations to end are cancelled, or wait for an operation that may have failed. A node cannot coordinate them
        without code of the type, or if it does not serve the table.
        """
        cluster, now = self._ctx.cluster, time.monotonic()
        ending = {s for s in subjects if cluster.any_in(s, ENDED_BY_ANYBODY) and not self._here(s)}
        if not ending and not self._absent:
            return
        known = {name for node in cluster.nodes.values() for name in self._named(node)}
        for subject in subjects:
            if subject in ending and self._missing(subject, known):
                self._absent.setdefault(subject, now)
            else:
                self._absent.pop(subject, None)

    def _abandoned(self) -> set[Subject]:
        """The abandoned subjects that this node may coordinate now.

        After a minute any daemon may end their operations: for :data:`ABANDONED_AT_ONCE` subjects at once, oldest
        first. A subject that does not end makes room for the next one.
        """
        now = time.monotonic()
        due = [s for s, since in islice(self._absent.items(), ABANDONED_AT_ONCE + 1) if now - since >= ABSENT]
        taken = due[:ABANDONED_AT_ONCE]
        self._turns = {s: self._turns.get(s, now) for s in taken}
        if len(due) > len(taken):
            for subject in [s for s, since in self._turns.items() if now - since >= ABANDONED_TURN]:
                del self._absent[subject]
                self._absent[subject] = now
        return set(taken)

    @staticmethod
    def _named(node: Node) -> Iterable[str]:
        return (*node.behaviors, *node.failing, *node.unable)

    def _missing(self, subject: Subject, known: Container[str]) -> bool:
        """Whether no live node may coordinate the subject. ``known``: all types in the records of live nodes."""
        (table, type_name), nodes = subject, self._ctx.cluster.nodes
        if self._has_code(type_name):
            if type_name not in known:
                return True
            return bool(coordinator_ranking.missing_executor(nodes, type_name, {}, (table,)))
        return all(refusal(node.serves, type_name, (table,)) for node in nodes.values())

    def _here(self, subject: Subject) -> bool:
        """Whether this node serves the subject, and the type's code is installed or does not exist."""
        table, type_name = subject
        known = type_name in self._ctx.types or not self._has_code(type_name)
        return known and self._ctx.admits(type_name, (table,))

    def _has_code(self, type_name: str) -> bool:
        """Whether the type may have code. False only if it is declared without code."""
        return not self._without_code.get(type_name, False)

    def _coordinates(self, subject: Subject) -> bool:
        """Whether this node may coordinate operations of the type on the table.

        It serves them, or the type has no code (actors run its jobs) and no executor offers it.
        """
        table, type_name = subject
        if type_name in self._ctx.types:
            return self._ctx.serves(type_name, (table,))
        return self._here(subject) and not self._ctx.cluster.capable(type_name)

    def _start_lookup(self, types: set[str]) -> None:
        """Start reading the declarations of types that are not installed here."""
        types = {name for name in types - self._ctx.types - self._looked_up if not self._ctx.cluster.capable(name)}
        if types and (self._lookup is None or self._lookup.done()):
            self._lookup = asyncio.ensure_future(self._look_up(sorted(types)[:TYPES_AT_ONCE]))

    async def _look_up(self, types: list[str]) -> None:
        keys = self._ctx.keys
        try:
            found = await self._ctx.client.read(*(Get(keys.behavior(name)) for name in types))
        except DistopError as error:
            self._ctx.log.debug("Cannot read declarations of behaviors; retrying at the next poll: %s", describe(error))
            return
        for name, answer in zip(types, found, strict=True):
            try:
                declared = Declaration.decode(answer.kv.value) if answer.kv is not None else None
            except UNREADABLE:
                declared = None
            self._without_code[name] = declared is not None and not declared.code
            self._looked_up.add(name)
        if not self._stopping:
            asyncio.get_running_loop().call_soon(self.cluster_changed)

    def poll(self) -> None:
        """Regular check: take over elections that name this incarnation, resign from idle ones."""
        if self._stopping:
            return
        now = time.monotonic()
        self._looked_up.clear()  # a type may be declared, or its code installed, at any time
        self._resigned = {s: one for s, one in self._resigned.items() if now - one[1] < RESIGNED_KEPT}
        self._handed_over = {s: at for s, at in self._handed_over.items() if now - at < HAND_OVER_EVERY}
        self._passed_on = {s: at for s, at in self._passed_on.items() if now - at < PASSED_ON}
        for subject, since in list(self._idle_since.items()):
            if now - since > self._idle and subject not in self._work:
                self._give_up(subject, self._roles[subject].fence)
        self.cluster_changed()
        for subject, held in list(self._ctx.cluster.elections.items()):
            known = subject in self._roles or subject in self._work or self._wanted(subject)
            if held.value == self._ctx.incarnation and not known and self._held(subject) is not None:
                self._give_up(subject, held.mod)  # not needed: an earlier resignation failed, or its answer was lost

    async def _seek(self, subject: Subject) -> None:
        ctx, (table, type_name) = self._ctx, subject
        capable = ctx.cluster.capable(type_name, tables=(table,)) or sorted(ctx.cluster.nodes)
        turn = min(work_shares.turn(capable, ctx.incarnation, f"{table}/{type_name}"), 20)
        lately = time.monotonic() - self._passed_on.get(subject, -PASSED_ON) < PASSED_ON
        if subject in self._handed_over or lately:
            turn += min(len(capable), 20)  # nodes that have not tried go first
        try:
            if turn:
                await asyncio.sleep(turn * RACE_DELAY)
            async with self._seeking:
                await self._take_up(subject)
        except SessionLost:
            pass  # the incarnation ends because of it
        except DistopError as error:
            ctx.log.warning("Cannot become coordinator of %s on %s; retrying: %s", type_name, table, error)
            self._drop(subject)
            await asyncio.sleep(random.uniform(*PAUSE_AFTER_FAILURE))
        except Exception:
            message = "Unexpected error while becoming coordinator of %s on %s; retrying"
            ctx.log.exception(message, type_name, table)
            self._drop(subject)
            await asyncio.sleep(random.uniform(*PAUSE_AFTER_FAILURE))
        finally:
            self._drop_work(subject)

    async def _take_up(self, subject: Subject) -> None:
        """Win the election, and start the role."""
        ctx, (table, type_name) = self._ctx, subject
        if not self._here(subject) and not await self._drop_strays(subject):
            await asyncio.sleep(RACE_DELAY)  # the events of the deletions are on their way
            return
        held = self._held(subject)
        if held is not None and held.value == ctx.incarnation:
            fence = held.mod  # an election of mine whose answer was lost
        elif held is not None and ctx.cluster.live(held.value):
            return
        else:
            seen, holder = (held.mod, held.value) if held is not None else (0, "")
            result = await ctx.commit(t.elect(ctx.keys, table, type_name, ctx.incarnation, seen, holder))
            fence = result.revision if result.succeeded else 0
            found = result.responses[0] if result.responses else None
            if not fence and isinstance(found, GetResult) and found.kv is not None:
                fence = found.kv.mod_revision if found.kv.value.decode() == ctx.incarnation else 0
            if not fence:
                await asyncio.sleep(RACE_DELAY)  # the winner's event is on its way
                return
        callbacks = Callbacks(
            failed=lambda error: self._failed(subject, fence, error),
            trouble=lambda: self._hand_over(subject, fence),
            elsewhere=lambda: self._pass_on(subject, fence),
        )
        role = Coordinator(ctx, table, type_name, fence, callbacks, only_ending=not self._here(subject))
        self._roles[subject] = self._on_table.setdefault(table, {})[subject] = role
        await role.start()
        if self._roles.get(subject) is role:
            ctx.log.info("Coordinating %s on %s", type_name, table)

    async def _drop_strays(self, subject: Subject) -> bool:
        """Delete pending keys without an operation, until one has an operation. Returns whether one has."""
        pending = self._ctx.cluster.pending
        for ref in pending.of(*subject):
            if pending.get(ref) in ENDED_BY_ANYBODY:
                result = await self._ctx.commit(t.drop_stray(self._ctx.keys, ref))
                found = result.responses[0]
                if not result.succeeded and isinstance(found, GetResult) and found.kv is not None:
                    return True
        return False

    def _drop_work(self, subject: Subject) -> None:
        self._work.pop(subject, None)
        if not self._ctx.lost.done():
            asyncio.get_running_loop().call_soon(self.subjects_changed, (subject,))

    def _failed(self, subject: Subject, fence: int, error: BaseException) -> None:
        """End a role that failed: any node, also this one after a pause, may win a new election."""
        role = self._roles.get(subject)
        if role is None or role.fence != fence:
            return
        message = "The coordinator of %s on %s failed; resigning: %s"
        self._ctx.log.error(message, subject[1], subject[0], describe(error), exc_info=error)
        self._drop(subject)
        if subject not in self._work and not self._stopping:
            self._give_up(subject, fence, random.uniform(*PAUSE_AFTER_FAILURE))

    def _hand_over(self, subject: Subject, fence: int) -> None:
        """Resign because a role's call to its child failed, which may succeed on another node."""
        role, now = self._roles.get(subject), time.monotonic()
        if role is None or role.fence != fence or subject in self._work or self._stopping:
            return
        lately = now - self._handed_over.get(subject, -HAND_OVER_EVERY) < HAND_OVER_EVERY
        if lately or not self._ctx.others(subject[1], (subject[0],)):
            return
        self._handed_over[subject] = now
        message = "Resigning as coordinator of %s on %s: a call failed here, and may succeed on another node"
        self._ctx.log.warning(message, subject[1], subject[0])
        self._give_up(subject, fence, random.uniform(*PAUSE_AFTER_FAILURE))

    def _pass_on(self, subject: Subject, fence: int) -> bool:
        """Resign because the next operation requires other labels; the other nodes try one after the other.

        False: the election is just being held, so it cannot resign now.
        """
        role = self._roles.get(subject)
        if role is None or role.fence != fence or self._stopping:
            return True
        if subject in self._work:
            return False
        self._passed_on[subject] = time.monotonic()
        message = "Resigning as coordinator of %s on %s: the next operation requires a node with other labels"
        self._ctx.log.info(message, subject[1], subject[0])
        self._give_up(subject, fence)
        return True

    def _give_up(self, subject: Subject, fence: int, pause: float = 0.0) -> None:
        self._drop(subject)
        self._work[subject] = asyncio.ensure_future(self._resign(subject, fence, pause))

    async def _resign(self, subject: Subject, fence: int, pause: float) -> None:
        """Resign, and start no election of the subject for ``pause`` seconds."""
        try:
            await self._commit_resignation(subject, fence)
            await asyncio.sleep(pause)
        except SessionLost:
            pass
        finally:
            self._drop_work(subject)

    async def _commit_resignation(self, subject: Subject, fence: int) -> None:
        try:
            await self._ctx.commit(t.resign(self._ctx.keys, *subject, fence))
            self._resigned[subject] = fence, time.monotonic()
        except SessionLost:
            raise
        except DistopError as error:
            message = "Cannot resign as coordinator of %s on %s; retrying at the next poll: %s"
            self._ctx.log.warning(message, subject[1], subject[0], error)

    def _drop(self, subject: Subject) -> None:
        role = self._roles.pop(subject, None)
        self._idle_since.pop(subject, None)
        self._confirmed.discard(subject)
        if role is not None:
            beside = self._on_table[subject[0]]
            del beside[subject]
            if not beside:
                del self._on_table[subject[0]]
            role.close()

    async def stop(self) -> None:
        """Resign from all elections, so that other nodes take over at once. Raises SessionLost."""
        self._stopping = True
        if self._lookup is not None:
            self._lookup.cancel()
        for work in self._work.values():
            work.cancel()
        await asyncio.gather(*self._work.values(), return_exceptions=True)
        roles, self._roles = self._roles, {}
        for subject, role in roles.items():
            await role.stop()
            await self._commit_resignation(subject, role.fence)

    def close(self) -> None:
        """Close all roles at once, without resigning."""
        self._stopping = True
        if self._lookup is not None:
            self._lookup.cancel()
        for work in self._work.values():
            work.cancel()
        for role in self._roles.values():
            role.close()
        self._roles.clear()
