"""Transactions that were built before another event, or whose copy is late (T9)."""

from __future__ import annotations

from dataclasses import replace

import pytest

from distop import chord
from distop.decide.due_operations import ended_waiting
from distop.errors import OperationStartError, OutcomeUnknown
from distop.invariants.checker import check
from distop.protocol import actor_claims, job_transitions, prepared_operations
from distop.protocol import operation_transitions as t
from distop.protocol import pending_operations as w
from distop.protocol.dependencies import GRAPH, Hold, HoldState
from distop.protocol.jobs import Claim
from distop.protocol.operation_options import Options
from distop.protocol.records import State
from distop.protocol.state_tables import JobStage
from distop.protocol.transaction_groups import merged
from distop.protocol.txn import Put, Txn, TxnResult
from distop.protocol.user_actions import Actions
from distop.services.submission import graph_start
from tests.support.world import TIME, planned
from tests.unit.protocol.test_operation_transitions import JOBS, ready, waiting, waiting_for_another
from tests.unit.services.test_graph_start import WHY, end_for_good, spec_of
from tests.unit.support.model_submission import KEYS, TABLE, Etcd, noop, run

MANY = 100
"""Operations of more than one transaction."""


# ------------------------------------------------------------------- options


def test_options_set_for_a_closed_gate_are_refused_once_it_is_open() -> None:
    """The gate would keep the former options, and claims would follow them."""
    world, ref = ready(planned_first=False)
    late = world.alter(ref, Options(max_jobs=1))
    world.do(world.plan(ref, JOBS))
    assert not world.store.apply(late).succeeded
    world.do(world.alter(ref, Options(max_jobs=1)))
    assert world.gate(ref).options == Options(max_jobs=1)


def test_of_two_alterations_that_saw_the_same_options_one_is_refused() -> None:
    """Both would be told that theirs hold."""
    for world, ref in (ready(), ready(planned_first=False)):
        late = world.alter(ref, Options(max_jobs=1))
        world.do(world.alter(ref, Options(priority=9)))
        assert not world.store.apply(late).succeeded
        assert world.op(ref).terms.options == Options(priority=9)


def test_a_begin_that_saw_the_former_options_is_refused() -> None:
    """It brings its plan, and would open its gate with those."""
    world, ref = waiting()
    late = world.begin_planned(ref)
    world.do(world.alter(ref, Options(max_jobs=1)))
    assert not world.store.apply(late).succeeded
    world.do(world.begin_planned(ref))
    assert world.gate(ref).options == Options(max_jobs=1)


def test_a_resume_that_saw_the_former_options_is_refused() -> None:
    """It opens the gate with those."""
    world, ref = ready()
    world.do(world.pause(ref))
    late = world.resume(ref)
    world.do(world.alter(ref, Options(max_jobs=1)))
    assert not world.store.apply(late).succeeded
    world.do(world.resume(ref))
    assert world.gate(ref).options == Options(max_jobs=1)


def test_the_audit_finds_a_gate_without_the_current_options() -> None:
    world, ref = ready()
    world.tamper(Put(world.keys.of(ref, "options"), Options(max_jobs=1).encode()))
    (fault,) = check(world.keys, world.store.history)
    assert fault.invariant == 16
    assert fault.text == f"the gate has {Options()}, expected {Options(max_jobs=1)}"


# ---------------------------------------------------------------------- plans


def test_a_late_copy_of_a_chunk_does_not_replace_a_newer_one() -> None:
    world, ref = ready(planned_first=False)
    late = world.chunk(ref, 0, b"[]")
    world.do(world.chunk(ref, 0, b'["planned again"]'))
    assert not world.store.apply(late).succeeded


def test_a_plan_is_refused_if_a_chunk_was_replaced() -> None:
    """The digest of the plan would not fit the chunks."""
    world, ref = ready(planned_first=False)
    plan, _ = planned(JOBS)
    written = world.do(world.chunk(ref, 0, b"[]")).revision
    world.do(world.chunk(ref, 0, b'["of another planning"]'))
    late = t.write_plan(world.keys, ref, world.election, plan, [written])
    assert not world.store.apply(late).succeeded


def test_a_second_plan_of_the_same_chunks_takes_no_job_from_its_holder() -> None:
    world, ref = ready(planned_first=False)
    plan, chunks = planned(JOBS)
    written = [world.do(world.chunk(ref, n, chunk)).revision for n, chunk in enumerate(chunks)]
    first = t.write_plan(world.keys, ref, world.election, plan, written)
    second = t.write_plan(world.keys, ref, world.election, plan, written)
    world.do(first)
    world.do(world.claim(ref, "b", [0]))
    fence = world.fence(ref, 0)
    assert not world.store.apply(second).succeeded
    assert world.fence(ref, 0) == fence


@pytest.mark.parametrize("what", ["plan", "chunk"])
def test_a_coordinator_that_resigned_plans_nothing(what: str) -> None:
    """Its node still exists."""
    world, ref = ready(planned_first=False)
    late = world.plan(ref) if what == "plan" else world.chunk(ref, 0, b"[]")
    world.do(world.resign())
    world.do(world.elect("b"))
    assert not world.store.apply(late).succeeded


def test_a_late_copy_of_a_resignation_ends_no_other_election() -> None:
    world, _ = ready(planned_first=False)
    late = world.resign()
    world.do(late)
    world.do(world.elect("b"))
    assert not world.store.apply(late).succeeded


def test_a_former_coordinator_ends_no_pending_operation() -> None:
    world, ref = waiting()
    history = ended_waiting(ref, world.own_spec(ref), State.CANCELLED, TIME, WHY)
    late = w.end_waiting(world.keys, ref, world.mod(ref, "state"), history, WHY, world.election)
    world.do(world.resign())
    world.do(world.elect("b"))
    assert not world.store.apply(late).succeeded


def test_a_join_whose_dependency_is_not_seen_yet_does_not_end_with_a_cancelled_operation() -> None:
    """A coordinator ends both in one transaction."""
    world, join = waiting_for_another()
    cancelled = world.next_ref()
    world.do(world.submit(cancelled))
    assert not world.store.apply(merged([world.end_waiting(cancelled), world.joined(join)])).succeeded


# --------------------------------------------------------------------- claims


def test_an_actor_takes_no_job_of_a_live_holder() -> None:
    """Its view does not show that node yet, or any more."""
    world, ref = ready()
    world.do(world.claim(ref, "b", [0]))
    fence = world.fence(ref, 0)
    claim = Claim("w", "", 2, 1, actor="w", grant=f"{1:016x}", duration=5.0)
    taking = actor_claims.Taking(ref, world.store.mod(world.keys.gate(ref)), 0, claim, fence, dead="b")
    world.store.apply(actor_claims.own(world.keys, [taking]))
    assert world.fence(ref, 0) == fence
    world.die("b")
    world.do(actor_claims.own(world.keys, [taking]))


def test_each_of_several_lost_jobs_at_the_limit_fails() -> None:
    world, ref = ready()
    world.do(world.claim(ref, "b", range(JOBS)))
    world.die("b")
    one, other = (world.fail_lost(ref, "a", p) for p in range(JOBS))
    world.do(replace(one, success=(*one.success, *other.success)))
    assert [world.job_stage(ref, p) for p in range(JOBS)] == [JobStage.FAILED] * JOBS


def test_each_of_several_claims_of_an_actor_is_extended() -> None:
    world, ref = ready()
    for p in range(JOBS):
        world.do(world.own(ref, "w", p))
    one, other = (world.extend(ref, p) for p in range(JOBS))
    revision = world.do(replace(one, success=(*one.success, *other.success))).revision
    assert [world.fence(ref, p) for p in range(JOBS)] == [revision] * JOBS


# --------------------------------------------------------------------- limits


@pytest.mark.parametrize("lost", [False, True])
def test_an_extended_claim_of_an_actor_counts_against_the_limit_again(lost: bool) -> None:
    """It was overdue, so it did not count. ``lost``: a job of a dead executor is claimed."""
    world, ref = ready()
    world.do(world.own(ref, "w", 0))
    if lost:
        world.do(world.claim(ref, "b", [1]))
        world.die("b")
    world.do(world.alter(ref, Options(max_jobs=1)))
    want = job_transitions.Want(1, Claim("ex-a", "a", 1 + lost, int(lost), permit=0), world.fence(ref, 1), permit_mod=0)
    gate, overdue = world.store.mod(world.keys.gate(ref)), [(0, world.fence(ref, 0))]
    late = job_transitions.claim(world.keys, ref, gate, "a", [want], ["b"] if lost else [], overdue=overdue)
    world.do(world.extend(ref, 0))
    assert not world.store.apply(late).succeeded


# ------------------------------------------------------- held until confirmed


def test_confirming_an_aborted_operation_is_refused() -> None:
    """Its dependency has failed, but its hold still exists.

    Otherwise the sender would be told that the operation begins.
    """

    async def work(etcd: Etcd) -> None:
        before = await etcd.client.start_operation("noop", TABLE, {}, delay=60.0)
        op = await etcd.client.prepare_operation("noop", TABLE, {}, external_id="tx-17", after=[before])
        kv = etcd.store.get(KEYS.hold(prepared_operations.hold_id("tx-17")))
        assert kv is not None
        terms = prepared_operations.PreparedTerms.of(Hold.decode(kv.value))
        assert terms is not None
        late = prepared_operations.confirm(KEYS, op.parts, terms, kv.mod_revision)
        await end_for_good(etcd, before.parts)
        history = ended_waiting(op.parts, spec_of(etcd, op.ref), State.CANCELLED, TIME, WHY)
        mod = etcd.store.mod(KEYS.of(op.parts, "state"))
        assert etcd.store.apply(w.end_waiting(KEYS, op.parts, mod, history, WHY)).succeeded
        assert not etcd.store.apply(late).succeeded

    run(work)


def test_an_alteration_that_did_not_see_a_confirmation_keeps_it_on_record() -> None:
    """Both write the operation's record of actions."""

    async def work(etcd: Etcd) -> None:
        op = await etcd.client.prepare_operation("noop", TABLE, {}, external_id="tx-17")

        async def confirmed_before(txn: Txn) -> TxnResult:
            await etcd.client.confirm("tx-17")
            return etcd.store.apply(txn)

        etcd.fates.append(confirmed_before)
        await op.alter(priority=9)
        done = Actions.decode(etcd.value(KEYS.of(op.parts, "actions")) or b"")
        assert [one.action for one in done.kept] == ["confirm", "alter"]

    run(work)


@pytest.mark.parametrize("by_person", [True, False])
def test_a_late_cancel_writes_no_hold_for_a_confirmed_operation(by_person: bool) -> None:
    """A denied hold would remain under the external id, which is free again.

    The confirmation by a person writes the state again; that by an executor does not.
    """

    async def work(etcd: Etcd) -> None:
        op = await etcd.client.prepare_operation("noop", TABLE, {}, external_id="tx-17")
        hold = KEYS.hold(prepared_operations.hold_id("tx-17"))
        terms = prepared_operations.PreparedTerms.of(Hold.decode(etcd.value(hold) or b""))
        assert terms is not None
        history = ended_waiting(op.parts, spec_of(etcd, op.ref), State.CANCELLED, TIME, WHY)
        end = w.end_waiting(KEYS, op.parts, etcd.store.mod(KEYS.of(op.parts, "state")), history, WHY)
        late = prepared_operations.denied_with(KEYS, end, terms, etcd.store.mod(hold), "not wanted")
        if by_person:
            await etcd.client.confirm("tx-17")
        else:
            assert etcd.store.apply(prepared_operations.confirm(KEYS, op.parts, terms, etcd.store.mod(hold))).succeeded
        assert not etcd.store.apply(late).succeeded

    run(work)


# ----------------------------------------------------------- held as a graph


@pytest.fixture
def shown(monkeypatch: pytest.MonkeyPatch) -> None:
    """A slow caller: it refreshes its hold with each page."""
    monkeypatch.setattr(graph_start, "HOLD_EVERY", -1.0)


def hold_keys(etcd: Etcd) -> list[Hold]:
    return [Hold.decode(kv.value) for kv in etcd.store.range(*KEYS.family("distOpHold"))]


def given_up_before(etcd: Etcd, label: str) -> None:
    """A daemon denies the hold just before the first transaction with this label."""

    def fate(txn: Txn) -> TxnResult:
        if txn.label == label and (kvs := etcd.store.range(*KEYS.family("distOpHold"))):
            etcd.fates.clear()
            etcd.put(kvs[0].key, Hold(GRAPH, HoldState.DENIED, "nothing was seen of its caller").encode())
        return etcd.store.apply(txn)

    etcd.fates.extend([fate] * 20)


@pytest.mark.usefixtures("shown")
@pytest.mark.parametrize("label", ["start", "edges", "release_hold"])
def test_the_caller_of_a_given_up_graph_neither_holds_nor_releases_it(label: str) -> None:
    """Some of its operations may have ended since; the others would begin."""

    async def work(etcd: Etcd) -> None:
        given_up_before(etcd, label)
        with pytest.raises(OperationStartError, match="the graph was abandoned"):
            await etcd.client.start_operations(chord([noop() for _ in range(MANY)], noop()))
        assert [one.text for one in hold_keys(etcd)] == ["nothing was seen of its caller"]

    run(work)


@pytest.mark.usefixtures("shown")
@pytest.mark.parametrize(("label", "name"), [("start", "spec"), ("edges", "next")])
def test_a_caller_refreshes_its_hold_with_each_page_of_a_graph(label: str, name: str) -> None:
    async def work(etcd: Etcd) -> None:
        await etcd.client.start_operations(chord([noop() for _ in range(MANY)], noop()))
        pages = [txn for txn in etcd.committed if txn.label == label]
        written = [
            {KEYS.parse(one.kv.key).family for one in changes}
            for _, changes in etcd.store.history
            if any(KEYS.parse(one.kv.key).name == name for one in changes)
        ]
        assert len(pages) == len(written) > 1
        assert all("distOpHold" in families for families in written)

    run(work)


def test_an_unknown_release_of_a_graph_is_not_denied() -> None:
    """The graph's operations may have begun."""

    async def work(etcd: Etcd) -> None:
        def fate(txn: Txn) -> TxnResult:
            result = etcd.store.apply(txn)
            if txn.label == "release_hold":
                raise OutcomeUnknown("etcd stopped answering")
            return result

        etcd.fates.extend([fate] * 20)
        with pytest.raises(OutcomeUnknown):
            await etcd.client.start_operations([noop() for _ in range(MANY)])
        assert etcd.requests[-1] == "deny"
        assert hold_keys(etcd) == []

    run(work)
