"""Operations of the same id, with real daemons on a real etcd, whose history is audited."""

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
from tests.support.contract import dump, stand
from tests.support.daemons import distop_process

if TYPE_CHECKING:
    from distop.blocking import Operation
    from tests.support.daemons import Daemons

pytestmark = pytest.mark.etcd

TABLE = "t"
LIMIT = 60


@pytest.fixture
def purging(group: Daemons, sample_env: dict[str, str]) -> Daemons:  # noqa: F811
    """With a daemon that has ``purge``."""
    group.start("e1", env=sample_env)
    group.eventually(lambda: any(one.type_name == "purge" for one in group.client.behaviors()), "purge is known", "e1")
    group.await_ready("e1")
    return group


def purge(group: Daemons, path: str = "a", files: tuple[str, ...] = (), hold: str = "", **options: Any) -> Operation:
    return group.client.start_operation("purge", TABLE, {"path": path, "files": list(files), "hold": hold}, **options)


def ids(group: Daemons) -> dict[str, str]:
    return {key: op for key, op in dump(group.endpoint).items() if key.startswith("distOpUnique.")}


def running(group: Daemons, op: Operation) -> None:
    group.eventually(lambda: op.status().jobs.get("running") == 1, f"{op.ref} runs", "e1")


def test_L20_callers_that_race_to_replace_one_operation_are_all_started(purging: Daemons) -> None:
    """Each has its own client, since the starts of one client share transactions."""
    callers = 6

    def race(n: int) -> list[str]:
        policy = "replace" if n % 2 else "combine"
        with distop.connect(purging.endpoint) as client:
            return [
                client.start_operation(
                    "purge", TABLE, {"path": "a", "files": [f"{n}/{k}"]}, delay=60.0, on_duplicate=policy
                ).ref
                for k in range(10)
            ]

    with ThreadPoolExecutor(callers) as pool:
        started = [ref for refs in pool.map(race, range(callers)) for ref in refs]
    (last,) = [op.op for op in purging.client.operations()]
    assert len(started) == len(set(started)) == 10 * callers
    assert list(ids(purging).values()) == [last]
    purging.client.operation(last).cancel()


def test_P16_many_callers_of_one_id_share_one_operation_and_its_result(purging: Daemons, tmp_path: Any) -> None:
    sign = tmp_path / "go"
    with ThreadPoolExecutor(8) as pool:
        ops = list(pool.map(lambda n: purge(purging, files=(str(n),) if n == 0 else (), hold=str(sign)), range(8)))
    assert len({op.ref for op in ops}) == 1
    assert sum(not op.already_started for op in ops) == 1
    assert list(ids(purging).values()) == [ops[0].ref]
    other = purge(purging, path="b")
    assert other.ref != ops[0].ref
    sign.touch()
    results = [op.wait(LIMIT) for op in ops]
    assert {result.state for result in results} == {"success"}
    assert len({result.record["finished"] for result in results}) == 1
    assert other.wait(LIMIT).state == "success"
    assert ids(purging) == {}
    again = purge(purging)
    assert (again.already_started, again.wait(LIMIT).state) == (False, "success")


def test_P12_many_purges_and_one_cleanup_of_the_backend(purging: Daemons, tmp_path: Any) -> None:
    sign = tmp_path / "go"
    purges = [purge(purging, path=f"p{n % 3}", hold=str(sign)) for n in range(6)]
    cleanups = [
        purging.client.start_operation("clean-up", "@cluster", {"path": str(n), "hold": str(sign)}) for n in range(3)
    ]
    assert (len({op.ref for op in purges}), len({op.ref for op in cleanups})) == (3, 1)
    sign.touch()
    assert {op.wait(LIMIT).state for op in (*purges, *cleanups)} == {"success"}


def test_L20_replace_never_touches_what_is_in_process(purging: Daemons, tmp_path: Any) -> None:
    sign = tmp_path / "go"
    first = purge(purging, hold=str(sign))
    running(purging, first)
    before = stand(purging.endpoint)
    with pytest.raises(Incompatible, match=f"{first.ref} has the same id and is running, and it has started"):
        purge(purging, on_duplicate="replace")
    with pytest.raises(Incompatible, match=first.ref):
        purge(purging, on_duplicate="refuse")
    assert stand(purging.endpoint) == before, "nothing was written"
    sign.touch()
    assert first.wait(LIMIT).state == "success"


def test_L20_what_has_not_begun_is_replaced_and_its_dependents_hear_of_it(purging: Daemons) -> None:
    first = purge(purging, files=("x",), delay=3600)
    behind = purging.client.start_operation("noop", TABLE, {}, after=[first])
    second = purge(purging, files=("y",), on_duplicate="replace")
    ended = first.wait(LIMIT)
    told = {name: ended.record["cancel"][name] for name in ("reason", "text", "replaced_by")}
    assert (ended.state, told) == (
        "cancelled",
        {"reason": "aborted", "text": f"replaced by {second.ref}", "replaced_by": second.ref},
    )
    assert second.wait(LIMIT).report == {"files": ["y"]}
    assert behind.wait(LIMIT).record["cancel"]["text"] == f"{first.ref} ended as cancelled"


def test_L20_a_replacement_that_races_the_beginning_is_one_or_the_other(purging: Daemons) -> None:
    for n in range(15):
        first = purge(purging, path=f"p{n}", delay=0.05 + n / 200)
        try:
            second = purge(purging, path=f"p{n}", on_duplicate="replace")
        except Incompatible:
            assert first.wait(LIMIT).state == "success"
        else:
            assert second.wait(LIMIT).state == "success"
            cancelled = first.wait(LIMIT).record.get("cancel")  # none where it had ended before the second came
            assert cancelled is None or cancelled["replaced_by"] == second.ref
    assert ids(purging) == {}


def test_P16_arguments_are_combined_by_the_behaviors_rule(purging: Daemons, tmp_path: Any) -> None:
    sign = tmp_path / "go"
    first = purge(purging, files=("x",), hold=str(sign))
    running(purging, first)
    second = purge(purging, files=("y",), hold=str(sign), on_duplicate="combine")
    third = purge(purging, files=("z", "y"), hold=str(sign), on_duplicate="combine")
    assert third.status().state == "pending", "it waits for the one of its id that runs"
    assert list(ids(purging).values()) == [third.ref]
    sign.touch()
    assert first.wait(LIMIT).report == {"files": ["x"]}
    assert second.wait(LIMIT).record["cancel"]["replaced_by"] == third.ref
    ended = third.wait(LIMIT)
    assert ended.report == {"files": ["y", "z"]}
    assert ended.record["started"] <= first.wait(LIMIT).record["finished"] <= ended.record["finished"]
    waits = purge(purging, files=("x",), delay=3600)
    purging.eventually(lambda: len(dump(purging.endpoint, "distOpPending.")) == 1, "what has ended is cleaned up")
    before = stand(purging.endpoint)
    with pytest.raises(Incompatible, match="'hold' differs, and purge has no rule to combine it"):
        purge(purging, hold="elsewhere", on_duplicate="combine")
    assert stand(purging.endpoint) == before
    waits.cancel()


def test_the_id_outlives_a_daemon_and_goes_with_the_operation(
    group: Daemons,
    sample_env: dict[str, str],  # noqa: F811
) -> None:
    (first,) = group.start("e1", env=sample_env)
    op = purge(group, hold="/nowhere", id="nightly")
    running(group, op)
    first.kill()
    joined = purge(group, hold="/nowhere", id="nightly")
    assert joined.ref == op.ref, "it has not ended, though nobody runs it"
    group.start("e2", env=sample_env)
    op.cancel()
    assert op.wait(LIMIT).state == "cancelled"
    assert ids(group) == {}


def test_the_id_goes_back_to_what_runs_where_the_one_behind_it_is_cancelled(purging: Daemons, tmp_path: Any) -> None:
    sign = tmp_path / "go"
    first = purge(purging, files=("x",), hold=str(sign))
    running(purging, first)
    behind = purge(purging, files=("y",), hold=str(sign), on_duplicate="combine")
    assert list(ids(purging).values()) == [behind.ref]
    behind.cancel()
    assert behind.wait(LIMIT).state == "cancelled"
    assert list(ids(purging).values()) == [first.ref]
    last = purge(purging, files=("z",), hold=str(sign), delay=3600, on_duplicate="combine")
    sign.touch()
    assert first.wait(LIMIT).state == "success"
    assert list(ids(purging).values()) == [last.ref], "it waits on, for its time"
    last.cancel()
    assert ids(purging) == {}, "and whom it followed is gone"


def test_a_rerun_has_the_id_of_what_it_runs_again(purging: Daemons, tmp_path: Any) -> None:
    sign = tmp_path / "go"
    first = purge(purging, hold=str(sign))
    running(purging, first)
    first.cancel()
    assert first.wait(LIMIT).state == "cancelled"
    other = purge(purging, hold=str(sign))
    before = ids(purging)
    with pytest.raises(Incompatible, match=f"{other.ref} has the same id"):
        first.rerun()
    assert ids(purging) == before
    sign.touch()
    assert other.wait(LIMIT).state == "success"
    again = first.rerun().wait(LIMIT)
    assert (again.state, again.record["id"]) == ("success", first.wait(LIMIT).record["id"])


def test_P3_a_series_of_an_id_is_one_series_whoever_starts_it(purging: Daemons) -> None:
    """Also between two of it, when nothing of it runs or waits."""
    started = [purge(purging, every=0.3) for _ in range(20)]
    assert all(op.already_started for op in started[1:])

    def third() -> bool:
        return len(purging.client.history(TABLE)) >= 3

    purging.eventually(third, "it has come again twice", "e1")
    assert len(ids(purging)) <= 1
    purging.eventually(lambda: _cancelled(purging), "the series is over", "e1")
    numbers = sorted(OperationRef.parse(one.op).instance for one in purging.client.history(TABLE, limit=1000))
    assert numbers == list(range(1, len(numbers) + 1)), "one after the other, and nobody beside"


def _cancelled(group: Daemons) -> bool:
    for one in group.client.operations():
        if one.state == "pending":
            try:
                group.client.operation(one.op).cancel()
            except distop.NotAllowed:  # it has begun meanwhile
                return False
    return not group.client.operations() and group.client.history(TABLE)[0].state == "cancelled"


def test_L19_a_graph_with_a_duplicate_is_refused_as_a_whole_or_joins_it(purging: Daemons, tmp_path: Any) -> None:
    sign = tmp_path / "go"
    first = purge(purging, hold=str(sign))
    arg = {"path": "a", "files": [], "hold": str(sign)}
    before = stand(purging.endpoint)
    with pytest.raises(Incompatible, match=first.ref):
        purging.client.start_operations(
            [Start("noop", TABLE, {}), Start("purge", TABLE, arg, options={"on_duplicate": "refuse"})]
        )
    with pytest.raises(InvalidArgument, match="have the same id"):
        purging.client.start_operations([Start("purge", TABLE, {"path": "c"}), Start("purge", TABLE, {"path": "c"})])
    after = stand(purging.endpoint)
    assert {k: v for k, v in after[1].items() if "purge" not in k} == {
        k: v for k, v in before[1].items() if "purge" not in k
    }
    standing, last = purging.client.start_operations(chain(Start("purge", TABLE, arg), Start("noop", TABLE, {})))
    assert (standing.ref, standing.already_started) == (first.ref, True)
    assert last.status().state == "pending"
    sign.touch()
    assert last.wait(LIMIT).record["finished"] >= first.wait(LIMIT).record["finished"]


def test_L9_what_is_prepared_has_its_id_until_it_ends(purging: Daemons) -> None:
    prepare = purging.client.prepare_operation
    first = prepare("purge", TABLE, {"path": "a"}, external_id="tx-1", verify_after=3600)
    assert list(ids(purging).values()) == [first.ref], "as its behavior computes it"
    before = stand(purging.endpoint)
    for arg in ({"path": "a"}, {"path": "a", "files": ["x"]}):
        with pytest.raises(Incompatible, match=f"{first.ref} has the same id and is pending"):
            prepare("purge", TABLE, arg, external_id="tx-2")
    with pytest.raises(Incompatible, match=f"{first.ref} .* it is held until it is confirmed"):
        purge(purging, on_duplicate="replace")
    refused = distop_process(
        purging, *("prepare", "purge", TABLE, "--arg", '{"path": "a"}', "--external-id", "tx-2", "--json")
    )
    assert (refused.returncode, refused.stdout) == (5, "")
    assert f"{first.ref} has the same id" in refused.stderr
    assert stand(purging.endpoint) == before, "nothing was written"
    assert purge(purging).ref == first.ref, "who starts one joins it"
    purging.client.confirm("tx-1")
    assert first.wait(LIMIT).state == "success"
    assert ids(purging) == {}
    given_up = prepare("purge", TABLE, {"path": "a"}, external_id="tx-2", verify_after=0.2)
    assert given_up.wait(LIMIT).alarm
    assert ids(purging) == {}, "nobody confirmed it"
    words = ("prepare", "noop", TABLE, "--external-id", "tx-3", "--id", "nightly")
    assert distop_process(purging, *words).returncode == 0
    assert [key.rpartition(".")[2] for key in ids(purging)] == ["nightly"]
    purging.client.prepared_operation("tx-3").abandon()
    assert purge(purging).wait(LIMIT).state == "success"
    assert ids(purging) == {}


def test_L9_what_a_callers_transaction_starts_has_its_id(purging: Daemons, tmp_path: Any) -> None:
    sign = tmp_path / "go"
    start = Start("purge", TABLE, {"path": "a", "hold": str(sign)})
    early = purging.client.submission(start)
    done = purging.client.transaction(success=[Put("order", b"1")], start=start)
    (first,) = done.operations
    assert list(ids(purging).values()) == [first.ref]
    assert early.stale(), "the id is another's by now"
    for submit in (
        lambda: purging.client.transaction(success=[Put("order", b"2")], start=start),
        lambda: purging.client.submission(start),
    ):
        with pytest.raises(Incompatible, match=f"{first.ref} has the same id and is (pending|running)"):
            submit()
    running(purging, first)
    assert purge(purging, hold=str(sign)).ref == first.ref, "who starts one joins it"
    assert dump(purging.endpoint, "order") == {"order": "1"}
    sign.touch()
    assert first.wait(LIMIT).state == "success"
    assert ids(purging) == {}
    assert purging.client.transaction(success=[Put("order", b"2")], start=start).committed


def test_L9_of_many_transactions_of_one_id_one_is_committed(purging: Daemons, tmp_path: Any) -> None:
    sign = tmp_path / "go"
    start = Start("purge", TABLE, {"path": "a", "hold": str(sign)})

    def commit(n: int) -> str:
        try:
            (op,) = purging.client.transaction(success=[Put(f"order/{n}", b"")], start=start).operations
        except Incompatible:
            return ""
        return op.ref

    with ThreadPoolExecutor(8) as pool:
        done = list(pool.map(commit, range(8)))
    assert len([ref for ref in done if ref]) == 1
    assert len(dump(purging.endpoint, "order/")) == 1
    sign.touch()
    assert purging.client.operation(max(done)).wait(LIMIT).state == "success"


def test_L9_the_command_line_joins_refuses_and_replaces(purging: Daemons) -> None:
    words = ("start", "noop", TABLE, "--delay", "3600", "--id", "nightly", "--json")
    first = distop_process(purging, *words)
    assert first.returncode == 0, first.stderr
    name = TABLE + "/noop/1"
    joined = distop_process(purging, "start", "noop", TABLE, "--id", "nightly")
    assert (joined.returncode, joined.stdout) == (0, f"already started: {name} (pending){os.linesep}")
    refused = distop_process(purging, "start", "noop", TABLE, "--id", "nightly", "--on-duplicate", "refuse")
    assert refused.returncode == 5
    assert f"{name} has the id 'nightly' and is pending" in refused.stderr
    for wrong, sentence in (
        (("--id", "@x"), "starts with @"),
        (("--on-duplicate", "merge", "--id", "x"), "join, refuse, replace, combine"),
        (("--one-off", "--id", "x"), "a one-off has no id"),
        (("--on-duplicate", "join"), "noop computes no id"),
        (("--id", "x", "--on-duplicate", "combine"), "noop declares no rule"),
    ):
        run = distop_process(purging, "start", "noop", TABLE, *wrong)
        assert (run.returncode, run.stdout) == (2, "")
        assert sentence in run.stderr
        assert run.stderr.count("\n") == 1
    replaced = distop_process(purging, "start", "noop", TABLE, "--id", "nightly", "--on-duplicate", "replace", "--wait")
    assert replaced.returncode == 0, replaced.stderr
    shown = distop_process(purging, "show", name).stdout
    assert "nightly" in shown
    assert f"aborted: replaced by {TABLE}/noop/2" in shown
