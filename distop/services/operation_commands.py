"""Commands on one operation: cancel, pause, resume, alter, abandon, and the end of its series."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from distop.clock import time
from distop.decide.due_operations import ended_waiting
from distop.decide.operation_view import NOTHING
from distop.errors import InvalidArgument, NotAllowed, NotFound, UnreadableRecord, no_operation
from distop.protocol import operation_transitions as t
from distop.protocol import pending_operations as w
from distop.protocol.caller_values import text as check_text
from distop.protocol.dependencies import GRAPH, Hold, HoldState
from distop.protocol.json_codec import rfc3339, shorten
from distop.protocol.operation_options import DEFAULT, Options, Terms
from distop.protocol.plan import Gate, Plan
from distop.protocol.prepared_operations import PreparedTerms as Prepared
from distop.protocol.prepared_operations import denied_with
from distop.protocol.record_reading import read
from distop.protocol.record_reading import word as word_of
from distop.protocol.records import Cancel, Decision, History, Phase, Spec, State
from distop.protocol.state_tables import Event, states_before
from distop.protocol.texts import shown
from distop.protocol.txn import Get
from distop.protocol.user_actions import NO_ACTIONS, Action, Actions
from distop.services.submission import series_lookup, two_phase
from distop.services.submission.contention import pause
from distop.services.submission.option_values import refuse_unowned
from distop.services.submission.start_request import acting
from distop.services.submission.two_phase import never_ran
from distop.store.connection_settings import WRITE_LIMIT

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping

    from distop.protocol.keys import Keys
    from distop.protocol.records import OperationRef
    from distop.protocol.txn import GetResult, KeyValue, Txn
    from distop.store.client import EtcdClient

_LONGEST_CANCEL_TEXT = 1_000
_END_OF_ONE = 60.0
"""Seconds to wait for an ending operation of a series, to cancel the next one."""


class _Ended(Exception):
    """The records of the operation were deleted since its state was read."""


class OperationCommands:
    """Commands on one operation. Each reads its state, and writes under the guard of what was read."""

    def __init__(self, etcd: EtcdClient, keys: Keys, ref: OperationRef) -> None:
        self._etcd = etcd
        self._keys = keys
        self._ref = ref

    async def cancel(self, text: str = "") -> None:
        """Cancel the operation. Raises NotAllowed, NotFound, OutcomeUnknown."""
        why = self._cancel_record(shorten(check_text(text, "the reason of a cancel"), _LONGEST_CANCEL_TEXT))

        async def step(state: State, mod: int, planned: bool, phase: bytes) -> Txn | None:
            if state is State.PENDING:
                return await self._end_pending(mod, why)
            if state is State.CANCELLING:
                await self._check_cancelled()
                return None
            return t.cancel(self._keys, self._ref, mod, why)

        await self._command("cancelled", step, why)

    async def _check_cancelled(self) -> None:
        """Raises NotAllowed if the operation is stopping for another reason than a cancel."""
        kv = await self._etcd.get(self._keys.of(self._ref, "cancel"))
        if kv is not None and read(Cancel.decode, kv).reason == "failed":
            raise NotAllowed(
                f"{self._ref} is stopping because its jobs failed, and can no longer be cancelled: it ends after its "
                "completion code"
            )

    async def end_series(self, text: str = "") -> str:
        """Cancel the active operation of the series; returns its name. Raises NotAllowed, NotFound, OutcomeUnknown."""
        check_text(text, "the reason of a cancel")
        first = await series_lookup.first_of(self._etcd, self._keys, self._ref)
        began, tries = time.monotonic(), 0
        while (ref := await series_lookup.latest_of(self._etcd, self._keys, first)) is not None:
            try:
                await OperationCommands(self._etcd, self._keys, ref).cancel(text)
                return str(ref)
            except (NotAllowed, NotFound) as error:
                if time.monotonic() - began > _END_OF_ONE:
                    raise NotAllowed(f"could not end the series: {error}; call again") from None
                tries += 1
                await asyncio.sleep(pause(tries))
        raise NotAllowed(f"the series that started with {first} has ended")

    def _cancel_record(self, text: str) -> Cancel:
        """The record of a cancel by this client."""
        return Cancel("user", text, by=acting(self._etcd), time=rfc3339(time.time()))

    async def _actions_so_far(self) -> Actions:
        """The actions on the operation. Read after its state, which every action writes as well."""
        kv = await self._etcd.get(self._keys.of(self._ref, "actions"))
        return read(Actions.decode, kv) if kv is not None else NO_ACTIONS

    async def _with_action(
        self, action: str, before: Mapping[str, Any] = NOTHING, after: Mapping[str, Any] = NOTHING
    ) -> Actions:
        """The actions on the operation, with one more by this client."""
        new = Action.change(rfc3339(time.time()), action, acting(self._etcd), before, after)
        return (await self._actions_so_far()).and_then(new)

    async def _end_pending(self, mod: int, why: Cancel, *, held: bool = False) -> Txn:
        """The transaction that ends a pending operation.

        Raises NotAllowed while its graph is being inserted, and (``held``) if its hold is gone.
        """
        keys, ref = self._keys, self._ref
        kv = await self._etcd.get(keys.of(ref, "spec"))
        if kv is None:
            raise _Ended
        spec = read(Spec.decode, kv)
        kv = await self._etcd.get(keys.hold(spec.hold)) if spec.hold else None
        record = read(Hold.decode, kv) if kv is not None else None
        if record is None and held:
            raise NotAllowed(f"{self._ref} was confirmed: to stop it, cancel it")
        void = record is not None and record.kind == GRAPH
        if record is not None and void and record.state is HoldState.HELD:
            raise NotAllowed(
                f"{self._ref} belongs to a graph that is still being inserted: cancel it after the insertion"
            )
        terms = Prepared.of(record) if record is not None else None
        if terms is not None and terms.op != str(ref):
            # Somebody wrote the hold of another operation into this one's spec.
            terms = None
            if held:
                raise NotAllowed(f"{self._ref} was not prepared: to stop it, cancel it")
        alarm = record.text if record is not None and terms is not None and terms.alarm else ""
        actions = await self._actions_so_far()
        history = ended_waiting(
            ref, spec, State.CANCELLED, rfc3339(time.time()), why, alarm, void=void, actions=actions
        )
        end = w.end_waiting(keys, ref, mod, history, why)
        if kv is None or record is None or terms is None or record.state is not HoldState.HELD:
            return end
        return denied_with(keys, end, terms, kv.mod_revision, why.text or "it was cancelled")

    async def abandon(self, text: str = "") -> None:
        """Abandon the prepared operation. Raises NotAllowed, NotFound, OutcomeUnknown."""
        reason = check_text(text, "the reason") or "its sender abandoned it"
        why = self._cancel_record(shorten(reason, _LONGEST_CANCEL_TEXT))
        external_id = await two_phase.held_by(self._etcd, self._keys, self._ref)
        if external_id is None:
            raise NotAllowed(f"{self._ref} was not prepared: to stop it, cancel it")

        async def step(state: State, mod: int, planned: bool, phase: bytes) -> Txn | None:
            if state is State.PENDING:
                return await self._end_pending(mod, why, held=True)
            raise NotAllowed(f"{self._ref} was confirmed: to stop it, cancel it")

        try:
            await self._command("abandoned", step)
        except NotAllowed:
            kv = await self._etcd.get(self._keys.history(self._ref))
            if kv is None or not never_ran(read(History.decode, kv)):
                raise

    async def pause(self, *, now: bool = False) -> None:
        """Pause the operation; ``now``: stop its running jobs. Raises as :meth:`cancel` does."""
        if not isinstance(now, bool):
            raise InvalidArgument(f"now must be True or False, not {shown(now)}")

        async def step(state: State, mod: int, planned: bool, phase: bytes) -> Txn | None:
            if state is State.PAUSED and (not now or phase == Phase.HALTED.encode()):
                return None
            if state not in (State.RUNNING, State.PAUSED):
                begun = " and has not started" if state is State.PENDING else ""
                raise NotAllowed(f"{self._ref} is {state}{begun}: it cannot be paused")
            actions = await self._with_action("pause --now" if now else "pause")
            return t.pause(self._keys, self._ref, mod, now=now, seen=state, actions=actions)

        await self._command("paused", step)

    async def resume(self) -> None:
        """Resume a paused operation. Raises as :meth:`cancel` does."""

        async def step(state: State, mod: int, planned: bool, phase: bytes) -> Txn | None:
            if state is State.RUNNING:
                return None
            if state is not State.PAUSED:
                raise NotAllowed(f"{self._ref} is {state}: it cannot be resumed")
            terms, _, _ = await self._terms()
            return t.resume(self._keys, self._ref, mod, planned, terms, await self._with_action("resume"))

        await self._command("resumed", step)

    async def alter(self, wanted: Mapping[str, Any]) -> None:
        """Change options of the operation (``StartOptions``). Raises InvalidArgument, and as :meth:`cancel` does."""

        async def step(state: State, mod: int, planned: bool, phase: bytes) -> Txn | None:
            if state not in states_before(Event.ALTER):
                raise NotAllowed(f"{self._ref} is {state}: it cannot be altered")
            terms, opened, code = await self._terms()
            if not code:
                refuse_unowned(self._ref.type, DEFAULT.altered(wanted))
            new = terms.options.altered(wanted)
            if new == terms.options:
                return None
            before = {name: getattr(terms.options, name) for name in wanted}
            actions = await self._with_action("alter", before, wanted)
            return t.alter(self._keys, self._ref, state, mod, new, opened, actions)

        await self._command("altered", step)

    async def _terms(self) -> tuple[Terms, tuple[Gate, int] | None, bool]:
        """Its terms, its gate with the mod revision (None: no gate), and whether executors may have code for it.

        Raises _Ended.
        """
        keys, ref = self._keys, self._ref
        spec, given, gate, plan = await self._etcd.read(
            Get(keys.of(ref, "spec")), Get(keys.of(ref, "options")), Get(keys.gate(ref)), Get(keys.of(ref, "plan"))
        )
        if spec.kv is None:
            raise _Ended
        written = read(Spec.decode, spec.kv)
        options, mod = (read(Options.decode, given.kv), given.kv.mod_revision) if given.kv is not None else (DEFAULT, 0)
        opened = (Gate.decode(gate.kv.value), gate.kv.mod_revision) if gate.kv is not None else None
        beside = read(Plan.decode, plan.kv).beside if plan.kv is not None else ()
        return Terms(options, mod, written.where, beside), opened, written.rules.code

    async def _command(
        self, done: str, step: Callable[[State, int, bool, bytes], Awaitable[Txn | None]], why: Cancel | None = None
    ) -> None:
        """Run a command on the operation's current state.

        ``why``: the record that a cancel writes. It identifies this client's cancel if the answer was lost and the
        operation has ended since.
        """
        keys, ref = self._keys, self._ref
        repeated, ended = False, 0
        while True:
            state, decision, plan, history, pending = await self._etcd.read(
                *(Get(keys.of(ref, name)) for name in ("state", "decision", "plan")),
                Get(keys.history(ref)),
                Get(keys.pending(ref)),
            )
            record = read(History.decode, history.kv) if repeated and history.kv is not None else None
            if record is not None and why is not None and record.cancel == why:
                return
            word = self._going_on(done, state, decision, history)
            phase = pending.kv.value if pending.kv is not None else b""
            try:
                txn = await step(read(word_of(State), word), word.mod_revision, plan.kv is not None, phase)
            except _Ended:
                if word.mod_revision == ended:
                    raise UnreadableRecord(
                        f"the record at {keys.of(ref, 'spec')} is missing, and {ref} has not ended"
                    ) from None
                ended = word.mod_revision
                continue
            if txn is None:
                return
            result = await self._etcd.commit(txn, deadline=WRITE_LIMIT)
            if result.succeeded:
                return
            repeated = repeated or result.repeated
            # Somebody else changed its state, or an earlier copy of ours did: what stands there now decides.

    def _going_on(self, done: str, state: GetResult, decision: GetResult, history: GetResult) -> KeyValue:
        """The state of an operation that has not ended. Raises NotFound, NotAllowed."""
        if history.kv is not None:
            record = read(History.decode, history.kv)
            raise NotAllowed(f"{self._ref} ended as {record.state} at {record.finished}: it can no longer be {done}")
        if state.kv is None:
            raise no_operation(str(self._ref))
        if decision.kv is not None:
            verdict = read(Decision.decode, decision.kv).verdict
            raise NotAllowed(f"{self._ref} is completing as {verdict}: it can no longer be {done}")
        return state.kv
