"""Operations started in a caller's own transaction, on real daemons; etcd's history is audited."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from distop import Start, chain
from distop.errors import InvalidArgument
from distop.protocol.txn import Delete, Get, GetResult, Put, absent, value_is

if TYPE_CHECKING:
    from distop.services.operation_results import Transaction
    from tests.support.daemons import Daemons

pytestmark = [pytest.mark.etcd, pytest.mark.direct, pytest.mark.rotating]

TABLE = "t"
LIMIT = 60


def noop(sleep: float = 0) -> Start:
    return Start("noop", TABLE, {"sleep": sleep})


def value(group: Daemons, key: str) -> bytes | None:
    """The value of one of the caller's keys, read in a transaction that does not commit."""
    done = group.client.transaction(compare=[absent("never"), value_is("never", b"")], failure=[Get(key)], start=noop())
    assert not done.committed
    answer = done.answers[0]
    assert isinstance(answer, GetResult)
    return answer.kv.value if answer.kv is not None else None


def test_C8_C9_operations_committed_with_the_callers_writes_run(group: Daemons) -> None:
    group.start("e1")
    done = group.client.transaction(
        compare=[absent("order")], success=[Put("order", b"paid")], start=chain(noop(0.2), noop())
    )
    assert done.committed
    first, second = done.operations
    assert second.wait(LIMIT).state == "success"
    assert first.wait(LIMIT).record["finished"] <= second.wait(LIMIT).record["finished"]
    assert value(group, "order") == b"paid"


def test_C10_a_failed_compare_of_the_caller_starts_no_operation(group: Daemons) -> None:
    group.start("e1")
    assert group.client.transaction(success=[Put("order", b"paid")], start=noop()).committed
    refused = group.client.transaction(
        compare=[absent("order")], success=[Put("order", b"again")], failure=[Get("order")], start=noop()
    )
    assert (refused.committed, refused.operations) == (False, [])
    assert refused.answers[0].kv.value == b"paid"
    with pytest.raises(InvalidArgument, match="colour"):
        group.client.transaction(success=[Put("order", b"no")], start=Start("noop", TABLE, {"colour": "red"}))
    group.eventually(lambda: not group.client.operations(), "the started operation has ended", "e1")
    assert len(group.client.history()) == 1


def test_C10_a_failure_branch_is_applied_once_for_each_request_id(group: Daemons) -> None:
    """Both branches write, and a receipt with the request id records that the branch was applied."""
    group.start("e1")

    def call(request_id: str | None) -> Transaction:
        return group.client.transaction(
            compare=[value_is("stock", b"1")],
            success=[Put("sold", b"1")],
            failure=[Put("refused", b"1"), Get("stock")],
            start=noop(),
            request_id=request_id,
        )

    assert [(done.committed, len(done.answers)) for done in (call(None), call("mine"))] == [(False, 2)] * 2
    refused = group.client.transaction(success=[Put("stock", b"1"), Delete("refused")], start=noop())
    again = call("mine")
    assert (again.committed, again.earlier, again.answers) == (False, True, ())
    assert value(group, "refused") is None, "the repeated call applied nothing"
    assert value(group, "sold") is None
    done = call(None)
    assert done.committed
    ended = {op.wait(LIMIT).op for op in (*refused.operations, *done.operations)}
    assert {one.op for one in group.client.history()} == ended


def test_C8_an_unused_submission_starts_nothing(group: Daemons) -> None:
    group.start("e1")
    found = group.client.submission([noop(), noop()])
    assert [str(ref) for ref in found.refs] == ["t/noop/1", "t/noop/2"]
    assert not found.stale()
    assert group.client.start_operation("noop", TABLE, {}).wait(LIMIT).op == "t/noop/1"
    assert found.stale()
    assert not found.committed()


WITH_ETCD3 = """
import sys
import distop, distop.compat
from distop import Start
endpoint = sys.argv[1]
host, _, port = endpoint.rpartition(":")
etcd3 = distop.compat.etcd3()
mine = etcd3.client(host=host, port=int(port))
client = distop.connect(endpoint)
t = mine.transactions

def submit(compare, put):
    while True:
        found = client.submission(Start("noop", "t", {}))
        compares, puts = found.etcd3(mine)
        look = [t.get("order")]
        done, answers = mine.transaction(compare=[*compare(), *compares], success=[*put, *puts], failure=look)
        if done or not found.stale():
            return done, answers, found

done, _, found = submit(lambda: [t.version("order") == 0], [t.put("order", "paid")])
assert done and found.committed()
op = client.operation(found.refs[0])
assert op.wait(60).state == "success"
done, answers, refused = submit(lambda: [t.version("order") == 0], [t.put("order", "again")])
assert not done and answers[0][0][0] == b"paid", (done, answers)
assert not refused.committed()
stale = client.submission(Start("noop", "t", {}))
client.start_operation("noop", "t", {}).wait(60)
compares, puts = stale.etcd3(mine)
done, _ = mine.transaction(compare=compares, success=puts, failure=[])
assert not done and stale.stale()
for compare in (lambda: [t.value("order") == "paid"], lambda: [t.create("order") > 0], lambda: [t.mod("order") > 1]):
    done, _, found = submit(compare, [t.put("seen", "1")])
    assert done
    assert client.operation(found.refs[0]).wait(60).state == "success"
print("ended", len(client.history("t")))
"""


def test_C12_an_etcd3_client_adds_operations_to_its_own_transaction(group: Daemons) -> None:
    group.start("e1")
    ran = subprocess.run(
        [sys.executable, "-c", WITH_ETCD3, group.endpoint], capture_output=True, text=True, check=False, timeout=100
    )
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout == "ended 5\n"


WITH_AN_ID = """
import sys
import distop, distop.compat
from distop import Start
from distop.errors import Incompatible
etcd3 = distop.compat.etcd3()
host, _, port = sys.argv[1].rpartition(":")
mine, client = etcd3.client(host=host, port=int(port)), distop.connect(sys.argv[1])
start = Start("noop", "t", {}, options={"id": "nightly", "delay": 3600})

def commit(found):
    compares, puts = found.etcd3(mine)
    return mine.transaction(compare=compares, success=[mine.transactions.put("order", "paid"), *puts], failure=[])[0]

def free(found):
    return [one for one in found.etcd3(mine)[0] if one.key.startswith("distOpUnique")]

first, second = client.submission(start), client.submission(start)
assert len(free(first)) == 1 and mine.transaction(compare=free(first), success=[], failure=[])[0]
assert commit(first) and not commit(second) and second.stale() and not second.committed()
assert not mine.transaction(compare=free(second), success=[], failure=[])[0]
op = client.operation(first.refs[0])
try:
    client.submission(start)
except Incompatible as error:
    print(error)
op.cancel()
assert commit(client.submission(start))
print(*(one.op for one in client.operations()))
"""


def test_L9_an_etcd3_client_starts_an_operation_with_an_id(group: Daemons) -> None:
    group.start("e1")
    ran = subprocess.run(
        [sys.executable, "-c", WITH_AN_ID, group.endpoint], capture_output=True, text=True, check=False, timeout=100
    )
    assert ran.returncode == 0, ran.stderr
    refusal, left = ran.stdout.splitlines()
    assert refusal.startswith("noop on t was not started: t/noop/1 has the id 'nightly' and is pending")
    assert left == "t/noop/2"


WRITES = """
import sys
import distop
from distop import Start
from distop.protocol.txn import Get, Put, absent, value_is
client, me, count = distop.connect(sys.argv[1]), sys.argv[2], int(sys.argv[3])
print("connected", flush=True)
made = 0
while made < count:
    # The shared counter and the operation's own key are written together with the operation.
    seen = client.transaction(compare=[absent("counter")], success=[Put("counter", b"0")],
                              failure=[Get("counter")], start=Start("noop", "t", {}, options={"submitter": "first"}))
    if seen.committed:
        continue
    value = seen.answers[0].kv.value
    number = int(value) + 1
    done = client.transaction(
        compare=[value_is("counter", value)],
        success=[Put("counter", str(number).encode()), Put(f"made/{number}", me.encode())],
        start=Start("noop", "t", {}, options={"submitter": f"{me}/{number}"}),
    )
    if done.committed:
        made += 1
        print("made", number, done.operations[0].ref, flush=True)
"""


def writers(group: Daemons, number: int, each: int) -> list[subprocess.Popen[str]]:
    return [
        subprocess.Popen(
            [sys.executable, "-c", WRITES, group.endpoint, f"w{n}", str(each)], stdout=subprocess.PIPE, text=True
        )
        for n in range(number)
    ]


def submitters(group: Daemons) -> list[str]:
    """The submitters of all operations, once these have ended."""
    group.eventually(lambda: not group.client.operations(), "all operations have ended", "e1", seconds=60)
    return sorted(one.record["submitter"] for one in group.client.history(TABLE, limit=10_000))


def test_C9_C10_eight_writers_start_exactly_their_committed_operations(group: Daemons) -> None:
    group.start("e1")
    committed: dict[str, str] = {}
    for n, writer in enumerate(writers(group, 8, 6)):
        out, _ = writer.communicate(timeout=100)
        assert writer.returncode == 0
        made = [line.split() for line in out.splitlines() if line.startswith("made ")]
        assert len(made) == 6
        committed |= {f"w{n}/{number}": ref for _, number, ref in made}
    numbers = sorted(int(one.partition("/")[2]) for one in committed)
    assert numbers == list(range(1, 49)), "no update of the counter was lost"
    assert submitters(group) == sorted([*committed, "first"])
    assert value(group, "counter") == b"48"
    assert {one.op for one in group.client.history(TABLE, limit=100)} >= set(committed.values())


def test_C9_C10_a_killed_writer_has_committed_whole_transactions_only(group: Daemons) -> None:
    group.start("e1")
    acknowledged = 0
    for lines in (1, 2, 4, 7):
        (writer,) = writers(group, 1, 1_000)
        with writer:
            assert writer.stdout is not None
            for number, _ in enumerate(writer.stdout):
                if number == lines:
                    os.kill(writer.pid, signal.SIGKILL)
                acknowledged += number > 0
    done = submitters(group)
    count = int(value(group, "counter") or b"0")
    assert done == sorted([*(f"w0/{n}" for n in range(1, count + 1)), "first"])
    assert count >= acknowledged >= 4
    assert all(value(group, f"made/{n}") == b"w0" for n in range(1, count + 1))
