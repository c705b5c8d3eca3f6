"""Operations with the same id, on real daemons and a real etcd, whose history is audited."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import pytest

import distop
from distop import Start, chain
from distop.errors import Incompatible, InvalidArgument
from distop.protocol.records import OperationRef
from distop.protocol.txn import Put
from tests.support.behaviors import sample_env  # noqa: F401
from tests.support.contract import dump, revision_and_keys
from tests.support.daemons import distop_process

if TYPE_CHECKING:
    from distop.blocking import Operation
    from tests.support.daemons import Daemons

pytestmark = [pytest.mark.etcd, pytest.mark.rotating]

TABLE = "t"
LIMIT = 60


@pytest.fixture
def purge_group(group: Daemons, sample_env: dict[str, str]) -> Daemons:  # noqa: F811
    """A group with a daemon that offers ``purge-path``."""
    group.start("e1", env=sample_env)
    group.eventually(
        lambda: any(one.type_name == "purge-path" for one in group.client.behaviors()), "purge-path is published", "e1"
    )
    group.await_ready("e1")
    return group


def purge(group: Daemons, path: str = "a", files: tuple[str, ...] = (), hold: str = "", **options: Any) -> Operation:
    return group.client.start_operation(
        "purge-path", TABLE, {"path": path, "files": list(files), "hold": hold}, **options
    )


def ids(group: Daemons) -> dict[str, str]:
    return {key: op for key, op in dump(group.endpoint).items() if key.startswith("distOpUnique.")}


def await_running(group: Daemons, op: Operation) -> None:
    group.eventually(lambda: op.status().jobs.get("running") == 1, f"a job of {op.ref} runs", "e1")


def test_L20_concurrent_replacements_of_one_operation_are_all_started(purge_group: Daemons) -> None:
    """Each caller has its own client, since the starts of one client share transactions."""
    callers = 6

    def race(n: int) -> list[str]:
        policy = "replace" if n % 2 else "combine"
        with distop.connect(purge_group.endpoint) as client:
            return [
                client.start_operation(
                    "purge-path", TABLE, {"path": "a", "files": [f"{n}/{k}"]}, delay=60.0, on_duplicate=policy
                ).ref
                for k in range(10)
            ]

    with ThreadPoolExecutor(callers) as pool:
        started = [ref for refs in pool.map(race, range(callers)) for ref in refs]
    (last,) = [op.op for op in purge_group.client.operations()]
    assert len(started) == len(set(started)) == 10 * callers
    assert list(ids(purge_group).values()) == [last]
    purge_group.client.operation(last).cancel()


def test_P16_callers_with_one_id_share_one_operation_and_its_result(purge_group: Daemons, tmp_path: Any) -> None:
    release_file = tmp_path / "go"
    with ThreadPoolExecutor(8) as pool:
        ops = list(
            pool.map(lambda n: purge(purge_group, files=(str(n),) if n == 0 else (), hold=str(release_file)), range(8))
        )
    assert len({op.ref for op in ops}) == 1
    assert sum(not op.already_started for op in ops) == 1
    assert list(ids(purge_group).values()) == [ops[0].ref]
    other = purge(purge_group, path="b")
    assert other.ref != ops[0].ref
    release_file.touch()
    results = [op.wait(LIMIT) for op in ops]
    assert {result.state for result in results} == {"success"}
    assert len({result.record["finished"] for result in results}) == 1
    assert other.wait(LIMIT).state == "success"
    assert ids(purge_group) == {}
    again = purge(purge_group)
    assert (again.already_started, again.wait(LIMIT).state) == (False, "success")


def test_P12_purges_share_an_operation_per_path_and_cleanups_share_one(purge_group: Daemons, tmp_path: Any) -> None:
    release_file = tmp_path / "go"
    purges = [purge(purge_group, path=f"p{n % 3}", hold=str(release_file)) for n in range(6)]
    cleanups = [
        purge_group.client.start_operation("clean-up", "@cluster", {"path": str(n), "hold": str(release_file)})
        for n in range(3)
    ]
    assert (len({op.ref for op in purges}), len({op.ref for op in cleanups})) == (3, 1)
    release_file.touch()
    assert {op.wait(LIMIT).state for op in (*purges, *cleanups)} == {"success"}


def test_L20_a_running_operation_is_not_replaced(purge_group: Daemons, tmp_path: Any) -> None:
    release_file = tmp_path / "go"
    first = purge(purge_group, hold=str(release_file))
    await_running(purge_group, first)
    before = revision_and_keys(purge_group.endpoint)
    with pytest.raises(Incompatible, match=f"{first.ref} has the same id and is running, and it has started"):
        purge(purge_group, on_duplicate="replace")
    with pytest.raises(Incompatible, match=first.ref):
        purge(purge_group, on_duplicate="refuse")
    assert revision_and_keys(purge_group.endpoint) == before, "nothing was written"
    release_file.touch()
    assert first.wait(LIMIT).state == "success"


def test_L20_a_pending_operation_is_replaced_and_its_dependents_are_cancelled(purge_group: Daemons) -> None:
    first = purge(purge_group, files=("x",), delay=3600)
    dependent = purge_group.client.start_operation("noop", TABLE, {}, after=[first])
    second = purge(purge_group, files=("y",), on_duplicate="replace")
    ended = first.wait(LIMIT)
    cancel = {name: ended.record["cancel"][name] for name in ("reason", "text", "replaced_by")}
    assert (ended.state, cancel) == (
        "cancelled",
        {"reason": "aborted", "text": f"replaced by {second.ref}", "replaced_by": second.ref},
    )
    assert second.wait(LIMIT).report == {"files": ["y"]}
    assert dependent.wait(LIMIT).record["cancel"]["text"] == f"{first.ref} ended as cancelled"


def test_L20_a_replacement_races_the_start_with_one_outcome(purge_group: Daemons) -> None:
    for n in range(15):
        first = purge(purge_group, path=f"p{n}", delay=0.05 + n / 200)
        try:
            second = purge(purge_group, path=f"p{n}", on_duplicate="replace")
        except Incompatible:
            assert first.wait(LIMIT).state == "success"
        else:
            assert second.wait(LIMIT).state == "success"
            cancelled = first.wait(LIMIT).record.get("cancel")  # None if it ended before the replacement
            assert cancelled is None or cancelled["replaced_by"] == second.ref
    assert ids(purge_group) == {}


def test_P16_arguments_are_combined_by_the_rule_of_the_behavior(purge_group: Daemons, tmp_path: Any) -> None:
    release_file = tmp_path / "go"
    first = purge(purge_group, files=("x",), hold=str(release_file))
    await_running(purge_group, first)
    second = purge(purge_group, files=("y",), hold=str(release_file), on_duplicate="combine")
    third = purge(purge_group, files=("z", "y"), hold=str(release_file), on_duplicate="combine")
    assert third.status().state == "pending", "it waits for the running operation with its id"
    assert list(ids(purge_group).values()) == [third.ref]
    release_file.touch()
    assert first.wait(LIMIT).report == {"files": ["x"]}
    assert second.wait(LIMIT).record["cancel"]["replaced_by"] == third.ref
    ended = third.wait(LIMIT)
    assert ended.report == {"files": ["y", "z"]}
    assert ended.record["started"] <= first.wait(LIMIT).record["finished"] <= ended.record["finished"]
    waiting_operation = purge(purge_group, files=("x",), delay=3600)
    purge_group.eventually(
        lambda: len(dump(purge_group.endpoint, "distOpPending.")) == 1, "the ended operations are cleaned up"
    )
    before = revision_and_keys(purge_group.endpoint)
    with pytest.raises(Incompatible, match="'hold' differs, and purge-path has no rule to combine it"):
        purge(purge_group, hold="elsewhere", on_duplicate="combine")
    assert revision_and_keys(purge_group.endpoint) == before
    waiting_operation.cancel()


def test_the_id_survives_a_killed_daemon_and_is_released_at_the_end(
    group: Daemons,
    sample_env: dict[str, str],  # noqa: F811
) -> None:
    (first,) = group.start("e1", env=sample_env)
    op = purge(group, hold="/nowhere", id="nightly")
    await_running(group, op)
    first.kill()
    joined = purge(group, hold="/nowhere", id="nightly")
    assert joined.ref == op.ref, "it has not ended, although no executor is left"
    group.start("e2", env=sample_env)
    op.cancel()
    assert op.wait(LIMIT).state == "cancelled"
    assert ids(group) == {}


def test_the_id_returns_to_the_running_operation_when_the_pending_one_is_cancelled(
    purge_group: Daemons, tmp_path: Any
) -> None:
    release_file = tmp_path / "go"
    first = purge(purge_group, files=("x",), hold=str(release_file))
    await_running(purge_group, first)
    dependent = purge(purge_group, files=("y",), hold=str(release_file), on_duplicate="combine")
    assert list(ids(purge_group).values()) == [dependent.ref]
    dependent.cancel()
    assert dependent.wait(LIMIT).state == "cancelled"
    assert list(ids(purge_group).values()) == [first.ref]
    last = purge(purge_group, files=("z",), hold=str(release_file), delay=3600, on_duplicate="combine")
    release_file.touch()
    assert first.wait(LIMIT).state == "success"
    assert list(ids(purge_group).values()) == [last.ref], "it still waits for its start time"
    last.cancel()
    assert ids(purge_group) == {}, "the operation before it has ended, too"


def test_a_rerun_has_the_id_of_its_operation(purge_group: Daemons, tmp_path: Any) -> None:
    release_file = tmp_path / "go"
    first = purge(purge_group, hold=str(release_file))
    await_running(purge_group, first)
    first.cancel()
    assert first.wait(LIMIT).state == "cancelled"
    other = purge(purge_group, hold=str(release_file))
    before = ids(purge_group)
    with pytest.raises(Incompatible, match=f"{other.ref} has the same id"):
        first.rerun()
    assert ids(purge_group) == before
    release_file.touch()
    assert other.wait(LIMIT).state == "success"
    again = first.rerun().wait(LIMIT)
    assert (again.state, again.record["id"]) == ("success", first.wait(LIMIT).record["id"])


def test_P3_starts_of_a_series_with_one_id_share_one_series(purge_group: Daemons) -> None:
    """This holds also between two operations of the series, when none of it is pending or running."""
    started = [purge(purge_group, every=0.3) for _ in range(20)]
    assert all(op.already_started for op in started[1:])

    def third() -> bool:
        return len(purge_group.client.history(TABLE)) >= 3

    purge_group.eventually(third, "two more operations of the series have ended", "e1")
    assert len(ids(purge_group)) <= 1
    purge_group.eventually(lambda: _series_cancelled(purge_group), "the series has ended", "e1")
    numbers = sorted(OperationRef.parse(one.op).instance for one in purge_group.client.history(TABLE, limit=1000))
    assert numbers == list(range(1, len(numbers) + 1)), "the series has no other operations"


def _series_cancelled(group: Daemons) -> bool:
    for one in group.client.operations():
        if one.state == "pending":
            try:
                group.client.operation(one.op).cancel()
            except distop.NotAllowed:  # it has started in the meantime
                return False
    return not group.client.operations() and group.client.history(TABLE)[0].state == "cancelled"


def test_L19_a_graph_with_a_duplicate_is_refused_whole_or_joins_it(purge_group: Daemons, tmp_path: Any) -> None:
    release_file = tmp_path / "go"
    first = purge(purge_group, hold=str(release_file))
    arg = {"path": "a", "files": [], "hold": str(release_file)}
    before = revision_and_keys(purge_group.endpoint)
    with pytest.raises(Incompatible, match=first.ref):
        purge_group.client.start_operations(
            [Start("noop", TABLE, {}), Start("purge-path", TABLE, arg, options={"on_duplicate": "refuse"})]
        )
    with pytest.raises(InvalidArgument, match="have the same id"):
        purge_group.client.start_operations(
            [Start("purge-path", TABLE, {"path": "c"}), Start("purge-path", TABLE, {"path": "c"})]
        )
    after = revision_and_keys(purge_group.endpoint)
    assert {k: v for k, v in after[1].items() if "purge-path" not in k} == {
        k: v for k, v in before[1].items() if "purge-path" not in k
    }
    standing, last = purge_group.client.start_operations(
        chain(Start("purge-path", TABLE, arg), Start("noop", TABLE, {}))
    )
    assert (standing.ref, standing.already_started) == (first.ref, True)
    assert last.status().state == "pending"
    release_file.touch()
    assert last.wait(LIMIT).record["finished"] >= first.wait(LIMIT).record["finished"]


def test_L9_a_prepared_operation_has_its_id_until_it_ends(purge_group: Daemons) -> None:
    prepare = purge_group.client.prepare_operation
    first = prepare("purge-path", TABLE, {"path": "a"}, external_id="tx-1", verify_after=3600)
    assert list(ids(purge_group).values()) == [first.ref], "the id is the one that its behavior computes"
    before = revision_and_keys(purge_group.endpoint)
    for arg in ({"path": "a"}, {"path": "a", "files": ["x"]}):
        with pytest.raises(Incompatible, match=f"{first.ref} has the same id and is pending"):
            prepare("purge-path", TABLE, arg, external_id="tx-2")
    with pytest.raises(Incompatible, match=f"{first.ref} .* it is held until it is confirmed"):
        purge(purge_group, on_duplicate="replace")
    refused = distop_process(
        purge_group, *("prepare", "purge-path", TABLE, "--arg", '{"path": "a"}', "--external-id", "tx-2", "--json")
    )
    assert (refused.returncode, refused.stdout) == (5, "")
    assert f"{first.ref} has the same id" in refused.stderr
    assert revision_and_keys(purge_group.endpoint) == before, "nothing was written"
    assert purge(purge_group).ref == first.ref, "a start joins it"
    purge_group.client.confirm("tx-1")
    assert first.wait(LIMIT).state == "success"
    assert ids(purge_group) == {}
    unconfirmed = prepare("purge-path", TABLE, {"path": "a"}, external_id="tx-2", verify_after=0.2)
    assert unconfirmed.wait(LIMIT).alarm
    assert ids(purge_group) == {}, "the unconfirmed operation has ended"
    words = ("prepare", "noop", TABLE, "--external-id", "tx-3", "--id", "nightly")
    assert distop_process(purge_group, *words).returncode == 0
    assert [key.rpartition(".")[2] for key in ids(purge_group)] == ["nightly"]
    purge_group.client.prepared_operation("tx-3").abandon()
    assert purge(purge_group).wait(LIMIT).state == "success"
    assert ids(purge_group) == {}


@pytest.mark.direct
def test_L9_an_operation_started_in_a_callers_transaction_has_its_id(purge_group: Daemons, tmp_path: Any) -> None:
    release_file = tmp_path / "go"
    start = Start("purge-path", TABLE, {"path": "a", "hold": str(release_file)})
    early = purge_group.client.submission(start)
    done = purge_group.client.transaction(success=[Put("order", b"1")], start=start)
    (first,) = done.operations
    assert list(ids(purge_group).values()) == [first.ref]
    assert early.stale(), "another operation has the id by now"
    for submit in (
        lambda: purge_group.client.transaction(success=[Put("order", b"2")], start=start),
        lambda: purge_group.client.submission(start),
    ):
        with pytest.raises(Incompatible, match=f"{first.ref} has the same id and is (pending|running)"):
            submit()
    await_running(purge_group, first)
    assert purge(purge_group, hold=str(release_file)).ref == first.ref, "a start joins it"
    assert dump(purge_group.endpoint, "order") == {"order": "1"}
    release_file.touch()
    assert first.wait(LIMIT).state == "success"
    assert ids(purge_group) == {}
    assert purge_group.client.transaction(success=[Put("order", b"2")], start=start).committed


@pytest.mark.direct
def test_L9_one_of_several_transactions_with_one_id_is_committed(purge_group: Daemons, tmp_path: Any) -> None:
    release_file = tmp_path / "go"
    start = Start("purge-path", TABLE, {"path": "a", "hold": str(release_file)})

    def commit(n: int) -> str:
        try:
            (op,) = purge_group.client.transaction(success=[Put(f"order/{n}", b"")], start=start).operations
        except Incompatible:
            return ""
        return op.ref

    with ThreadPoolExecutor(8) as pool:
        done = list(pool.map(commit, range(8)))
    assert len([ref for ref in done if ref]) == 1
    assert len(dump(purge_group.endpoint, "order/")) == 1
    release_file.touch()
    assert purge_group.client.operation(max(done)).wait(LIMIT).state == "success"


def test_L9_the_command_line_joins_refuses_and_replaces_duplicates(purge_group: Daemons) -> None:
    words = ("start", "noop", TABLE, "--delay", "3600", "--id", "nightly", "--json")
    first = distop_process(purge_group, *words)
    assert first.returncode == 0, first.stderr
    name = TABLE + "/noop/1"
    joined = distop_process(purge_group, "start", "noop", TABLE, "--id", "nightly")
    assert (joined.returncode, joined.stdout) == (0, f"already started: {name} (pending){os.linesep}")
    refused = distop_process(purge_group, "start", "noop", TABLE, "--id", "nightly", "--on-duplicate", "refuse")
    assert refused.returncode == 5
    assert f"{name} has the id 'nightly' and is pending" in refused.stderr
    for invalid, sentence in (
        (("--id", "@x"), "starts with @"),
        (("--on-duplicate", "merge", "--id", "x"), "join, refuse, replace, combine"),
        (("--one-off", "--id", "x"), "a one-off has no id"),
        (("--on-duplicate", "join"), "noop computes no id"),
        (("--id", "x", "--on-duplicate", "combine"), "noop declares no rule"),
    ):
        run = distop_process(purge_group, "start", "noop", TABLE, *invalid)
        assert (run.returncode, run.stdout) == (2, "")
        assert sentence in run.stderr
        assert run.stderr.count("\n") == 1
    replaced = distop_process(
        purge_group, "start", "noop", TABLE, "--id", "nightly", "--on-duplicate", "replace", "--wait"
    )
    assert replaced.returncode == 0, replaced.stderr
    shown = distop_process(purge_group, "show", name).stdout
    assert "nightly" in shown
    assert f"aborted: replaced by {TABLE}/noop/2" in shown
