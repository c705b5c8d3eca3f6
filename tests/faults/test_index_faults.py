"""Faults under ``build-index`` and ``drop-index`` on real daemons. After each the index is held against the data: each
row is found, and nothing else; and nothing is left of what was given up. The audit of etcd's history follows
(conftest.py).
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyiceberg.schema import Schema
from pyiceberg.types import LongType, NestedField, StringType

from distop.errors import NotFound
from distop.protocol.records import TableRecord
from distop.worker.guardian import session_members
from distop_behaviors.index import row_lookup
from distop_behaviors.index.index_folder import Folder
from distop_behaviors.index.key_lookup import _read_here, find
from tests.faults.held_index import DROP_MOMENTS, FULL, MOMENTS
from tests.faults.test_self_fencing import child_of, command
from tests.support import lake
from tests.support.daemons import SPARK
from tests.support.needs import need
from tests.support.processes import machine

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.support.daemons import Daemon, Daemons

pytestmark = [pytest.mark.etcd, pytest.mark.timeout(240), pytest.mark.rotating]

TABLE, TYPE = "rows", "held-index"
ROWS = 20
SOME = ["after-segment", "before-publish", "after-publish"]
"""In a job; and in the completion, around the one write by which readers see another index."""


class Indexed:
    """A table that grows, its index, and the signs by which builds of it are held and let go."""

    format = "parquet"

    def __init__(self, group: Daemons, root: Path) -> None:
        self._group = group
        self._root = root
        self.table = root / "table"
        self._written = self._signs = 0
        self.folder = root
        self._create()
        self.grow(3)
        group.client.add_table(TableRecord(TABLE, self.format, str(self.table), {"group_files": 2}))

    def _create(self) -> None:
        self.table.mkdir()

    def grow(self, files: int = 2, rows: int = ROWS) -> list[Path]:
        """Further files, whose keys no other has; and one key that all have."""
        made = []
        for n in range(self._written, self._written + files):
            keys = [*(f"key {n} {i}" for i in range(rows)), "all", None]
            made.append(self._write(n, pa.table({"k": keys, "n": [n] * len(keys)})))
        self._written += files
        return made

    def _write(self, n: int, rows: pa.Table) -> Path:
        path = self.table / f"{n}.parquet"
        pq.write_table(rows, path)
        return path

    def start(self, at: str = "", **arg: Any) -> Any:
        """A build that stands still at this moment."""
        return self._start(TYPE, at, columns=["k"], **arg)

    def drop(self, at: str = "") -> Any:
        """A drop of it that stands still at this moment."""
        return self._start("held-drop", at)

    def _start(self, type_name: str, at: str, **arg: Any) -> Any:
        self._signs += 1
        self.folder = self._root / f"signs-{self._signs}"
        self.folder.mkdir()
        return self._group.client.start_operation(
            type_name, TABLE, {"name": "i", "at": at, "folder": str(self.folder), **arg}
        )

    def held(self, at: str) -> int:
        """The process that stands there."""
        self._group.eventually((self.folder / at).exists, f"a build stands still {at}")
        return int((self.folder / at).read_text())

    def go(self) -> None:
        (self.folder / "go").touch()

    def files(self) -> list[str]:
        return sorted(str(path) for path in self.table.glob("*.parquet"))

    def data(self) -> dict[str, bytes]:
        """What the table is: all that does not belong to distop."""
        found = [path for path in self.table.rglob("*") if path.is_file()]
        return {str(path): path.read_bytes() for path in found if "_distop" not in path.relative_to(self.table).parts}

    def compare(self) -> None:
        """Every key is found in the rows that have it, which are read as the index names them, and no other row is."""
        data = pa.concat_tables([pq.ParquetFile(path).read() for path in self.files()]).to_pylist()
        keys = sorted({row["k"] for row in data} - {None})
        found = find(str(self.table), "i", [*keys, "nowhere"])
        assert not found.uncovered
        read = _read_here(found, row_lookup.LOCAL_BYTES).to_pylist()
        assert _sorted(read) == _sorted(row for row in data if row["k"] is not None)
        current = self.index.current()
        assert current is not None
        assert sum(run.rows for run in current.runs) == len(read), "each row once"
        assert sorted(f[0] for f in find(str(self.table), "i", [None]).files) == self.files()

    @property
    def index(self) -> Folder:
        return Folder(str(self.table), "i")

    def assert_clean(self) -> None:
        """Nothing is there but what kept generations name."""
        where = self.index
        generations = [where._read(int(path.stem)) for path in (where.root / "generations").iterdir()]
        assert {path.name for path in where.data.iterdir()} == {n.name for g in generations for n in g.named()}
        assert sorted(path.name for path in where.root.iterdir()) == ["data", "generations"]
        assert self.staged() == []

    def index_files(self) -> dict[Path, int]:
        """What the index takes, in bytes."""
        return {path: path.stat().st_size for path in self.index.root.rglob("*") if path.is_file()}

    def staged(self) -> list[Path]:
        return [path for path in (self.table / "_distop").glob("*/stage/**/*") if path.is_file()]


class IndexedIceberg(Indexed):
    """Each of its files is a commit. None is ever removed."""

    format = "iceberg"

    def _create(self) -> None:
        schema = Schema(NestedField(1, "k", StringType()), NestedField(2, "n", LongType()))
        self._rows = lake.Folder(self.table).new(schema)

    def _write(self, n: int, rows: pa.Table) -> Path:
        before = set(self.files())
        self._rows.append(rows)
        (path,) = set(self.files()) - before
        return Path(path)

    def files(self) -> list[str]:
        return sorted(str(path) for path in (self.table / "data").glob("*.parquet"))


def _sorted(rows: Any) -> list[tuple[str, int]]:
    return sorted((row["k"], row["n"]) for row in rows)


@pytest.fixture
def indexed(group: Daemons, tmp_path: Path, request: pytest.FixtureRequest) -> Indexed:
    """Of the class that a test has it parametrized with."""
    (tmp_path / "indexed").mkdir()
    kind: type[Indexed] = getattr(request, "param", Indexed)
    return kind(group, tmp_path / "indexed")


def holder(pid: int, daemons: list[Daemon]) -> Daemon:
    """The daemon whose child this process is."""
    (found,) = [daemon for daemon in daemons if pid in machine(daemon.pid)]
    return found


@pytest.mark.parametrize(
    ("indexed", "moments"),
    [
        pytest.param(Indexed, SOME, id="some"),
        pytest.param(Indexed, MOMENTS, id="all", marks=pytest.mark.slow),
        pytest.param(IndexedIceberg, ["before-publish", "after-publish"], id="iceberg", marks=pytest.mark.slow),
    ],
    indirect=["indexed"],
)
def test_an_executor_is_killed_at_each_commit_point(
    group: Daemons, indexed: Indexed, sample_env: dict[str, str], moments: list[str]
) -> None:
    """Before and after each: another one, or itself once it is there again, goes on."""
    both = group.start("ann", "bob", ttl=3, env=sample_env)
    for generation, at in enumerate(moments, 1):
        operation = indexed.start(at)
        struck = holder(indexed.held(at), both)
        struck.kill()
        indexed.go()
        struck.start()
        found = find(str(indexed.table), "i", ["all"]) if generation > 1 else None
        assert found is None or sorted(f[0] for f in found.files) == indexed.files(), "at no moment is a row missed"
        done = operation.wait(60)
        assert (done.state, done.report["generation"]) == ("success", generation), (at, group.tails())
        indexed.compare()
        group.await_ready(struck.name)
        indexed.grow()
    assert indexed.start().wait(60).state == "success"
    indexed.compare()
    indexed.assert_clean()


@pytest.mark.parametrize(
    "moments",
    [pytest.param(["after-publish"], id="some"), pytest.param(DROP_MOMENTS, id="all", marks=pytest.mark.slow)],
)
def test_an_executor_is_killed_at_each_commit_point_of_a_drop(
    group: Daemons, indexed: Indexed, sample_env: dict[str, str], moments: list[str]
) -> None:
    """The index is whole, and all is found by it, or it is gone; another one, or itself once it is there again, ends
    the drop, gives back all space, and says that there was an index.
    """
    both = group.start("ann", "bob", ttl=3, env=sample_env)
    for n, at in enumerate(moments):
        assert indexed.start().wait(60).report["generation"] == 2 * n + 1, group.tails()
        operation = indexed.drop(at)
        pid = indexed.held(at)
        struck = holder(pid, both)
        struck.kill()
        group.eventually(lambda pid=pid: not session_members(pid), "its child is dead")  # type: ignore[misc]
        if at == "before-publish":
            indexed.compare()
        else:
            with pytest.raises(NotFound, match="has no index 'i'"):
                find(str(indexed.table), "i", ["all"])
        struck.start()
        done = operation.wait(60)
        assert (done.state, done.report) == ("success", {"name": "i", "dropped": True}), (at, group.tails())
        assert [path.name for path in indexed.index_files()] == [f"{2 * n + 2:06}.json"], at
        assert indexed.staged() == [], at
        group.await_ready(struck.name)
    assert not indexed.drop().wait(60).report["dropped"]


@contextlib.contextmanager
def suspended(group: Daemons, struck: Daemon, pid: int, late: Path) -> Iterator[None]:
    """The machine of an executor stands still meanwhile. Its child ``pid`` wakes up first, and goes on to its end,
    which leaves the file ``late``: its guardian would kill it at once. Then the executor begins anew.
    """
    struck.suspend()
    try:
        yield
        os.kill(pid, signal.SIGCONT)
        group.eventually(late.exists, "it has gone on to its end")
    finally:
        struck.wake()
    group.eventually(lambda: not session_members(pid), "its child is dead", struck.name)
    group.eventually(lambda: struck.name in group.live(), "it begins anew", struck.name)


@pytest.mark.parametrize("at", [pytest.param("after-segment", marks=pytest.mark.slow), "before-publish"])
def test_a_machine_that_wakes_up_beside_its_successor(
    at: str, group: Daemons, indexed: Indexed, sample_env: dict[str, str]
) -> None:
    """Two executors on one job, and two coordinators on one completion: the former one goes on where it stood, once the
    operation, and another one after it, has ended.
    """
    both = group.start("ann", "bob", ttl=3, env=sample_env)
    assert indexed.start().wait(60).state == "success"
    indexed.grow()
    operation = indexed.start(at)
    pid = indexed.held(at)
    struck, late = holder(pid, both), indexed.folder / f"ended-{pid}"
    with suspended(group, struck, pid, late):
        late.unlink(missing_ok=True)  # by a neighbour of the job
        indexed.go()
        assert operation.wait(60).report["generation"] == 2, group.tails()
        indexed.compare()
        indexed.grow()
        assert indexed.start().wait(60).report["generation"] == 3
    newest = indexed.index.newest()
    assert newest is not None
    assert newest.number == 3
    indexed.compare()
    indexed.grow()
    assert indexed.start().wait(60).report["generation"] == 4
    indexed.compare()
    indexed.assert_clean()


@pytest.mark.slow  # at each change: tests/unit/behaviors/test_index_build.py, without processes
@pytest.mark.parametrize("at", ["before-publish", "before-data"])
def test_a_drop_on_a_machine_that_wakes_up_undoes_nothing_of_the_next_build(
    at: str, group: Daemons, indexed: Indexed, sample_env: dict[str, str]
) -> None:
    both = group.start("ann", "bob", ttl=3, env=sample_env)
    assert indexed.start().wait(60).state == "success"
    operation = indexed.drop(at)
    pid = indexed.held(at)
    struck, late = holder(pid, both), indexed.folder / f"ended-{pid}"
    with suspended(group, struck, pid, late):
        indexed.go()
        assert operation.wait(60).report == {"name": "i", "dropped": True}, group.tails()
        indexed.grow()
        assert indexed.start().wait(60).report["generation"] == 3
    indexed.compare()
    indexed.grow()
    assert indexed.start().wait(60).report["generation"] == 4
    indexed.compare()
    indexed.assert_clean()


def test_cancels_and_writers_in_the_middle(group: Daemons, indexed: Indexed, sample_env: dict[str, str]) -> None:
    """A cancel leaves the index as it was, whatever was done of the build. What a writer adds, replaces and removes is
    found at every moment.
    """
    group.start("ann", ttl=10, env=sample_env)
    assert indexed.start().wait(60).state == "success"
    for at in ("before-segment", "after-journal", "after-report"):
        made = indexed.grow()
        operation = indexed.start(at)
        indexed.held(at)
        operation.cancel()
        indexed.go()
        assert operation.wait(60).state == "cancelled", (at, group.tails())
        current = indexed.index.current()
        assert current is not None
        assert current.number == 1
        found = find(str(indexed.table), "i", ["all"])
        assert {f[0] for f in found.uncovered} >= {str(path) for path in made}
        indexed.assert_clean()
    for at in ("before-segment", "after-report", "before-publish"):
        operation = indexed.start(at)
        indexed.held(at)
        (path,) = indexed.grow(1)
        first, second, *_ = indexed.files()
        Path(first).unlink()
        keys = [*(f"{at} {i}" for i in range(ROWS + 7)), None]
        pq.write_table(pa.table({"k": keys, "n": [-1] * len(keys)}), second)
        indexed.go()
        assert operation.wait(60).state == "success", group.tails()
        for key, where in ((keys[3], second), (pq.read_table(path)["k"][0].as_py(), str(path))):
            assert where in {f[0] for f in find(str(indexed.table), "i", [key]).files}, (at, key)
        indexed.grow(1)
    assert indexed.start().wait(60).state == "success"
    indexed.compare()
    indexed.assert_clean()


@pytest.mark.slow  # at each change: tests/unit/behaviors/test_index_build.py, where nothing is cancelled
@pytest.mark.parametrize("dies", [False, True], ids=["goes-on", "dies"])
def test_cancels_and_writers_in_the_middle_of_a_drop(
    group: Daemons, indexed: Indexed, sample_env: dict[str, str], *, dies: bool
) -> None:
    """A cancel waits for what has begun, or comes with the end of its process. The index is whole, and finds all, or it
    is gone; the next drop gives back what is left of it, and the next build makes it. What a writer adds and removes
    meanwhile is nothing to a drop.
    """
    group.start("ann", ttl=10, env=sample_env)
    for at in ("before-publish", "after-publish", "before-data", "after-drop"):
        indexed.grow()
        assert indexed.start().wait(60).state == "success", group.tails()
        indexed.compare()
        operation = indexed.drop(at)
        pid = indexed.held(at)
        made = indexed.grow(1)
        Path(indexed.files()[0]).unlink()
        before = indexed.data()
        operation.cancel()
        if dies:
            os.kill(pid, signal.SIGKILL)
        indexed.go()
        assert operation.wait(60).state == "cancelled", (at, group.tails())
        assert indexed.data() == before, at
        if dies and at == "before-publish":
            found = find(str(indexed.table), "i", ["all"])
            assert sorted(f[0] for f in found.files) == indexed.files(), "what it does not know is read"
            assert {f[0] for f in found.uncovered} == {str(path) for path in made}
        else:
            with pytest.raises(NotFound, match="has no index 'i'"):
                find(str(indexed.table), "i", ["all"])
        again = indexed.drop().wait(60)
        assert (again.state, again.report["dropped"]) == ("success", dies and at == "before-publish"), group.tails()
        assert [path.suffix for path in indexed.index_files()] == [".json"], at
        assert indexed.staged() == [], at
        assert indexed.data() == before, at
    assert indexed.start().wait(60).state == "success"
    indexed.compare()
    indexed.assert_clean()


def test_a_disk_that_is_full(
    group: Daemons, indexed: Indexed, sample_env: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Files of more than a little fail for real, by the limit on what a process may write: first in a job, then in the
    completion. Nothing is lost, the space is given back, and the build goes on once there is some.
    """
    monkeypatch.setattr(row_lookup, "LOCAL_ROWS", 1_000_000)
    group.start("ann", ttl=10, env=sample_env)
    assert indexed.start().wait(60).state == "success"
    (large,) = indexed.grow(1, rows=60_000)
    for generation, at in enumerate(("before-segment", "before-merge"), 2):
        operation = indexed.start(at, refresh="full")
        indexed.held(at)
        before = indexed.index_files()
        (indexed.folder / "full").touch()
        indexed.go()
        group.eventually((indexed.folder / "failed").exists, "there is no space")
        assert indexed.index_files() == before
        assert str(large) in {f[0] for f in find(str(indexed.table), "i", ["all"]).files}
        if at == "before-segment":
            assert all(path.stat().st_size < FULL for path in indexed.staged())
        (indexed.folder / "full").unlink()
        done = operation.wait(60)
        assert (done.state, done.report["generation"]) == ("success", generation), group.tails()
        indexed.compare()
        indexed.assert_clean()


@pytest.mark.spark
@pytest.mark.slow
def test_a_jvm_that_is_killed_beside_a_build(group: Daemons, indexed: Indexed, sample_env: dict[str, str]) -> None:
    """A build needs no Spark, but its process may have one: it is replaced, and the job goes on."""
    need(shutil.which("java"), "Java 17 or newer: install openjdk-17-jre-headless")
    (ann,) = group.start("ann", ttl=10, env=sample_env, options=SPARK)
    arg = {"checks": [{"not_null": "n"}], "statistics": "never"}
    assert group.client.start_operation("validate", TABLE, arg).wait(120).state == "success", group.tails()
    operation = indexed.start("after-segment")
    pid = indexed.held("after-segment")
    (java,) = [pid for pid in session_members(child_of(ann)) if Path(command(pid).split()[0]).name == "java"]
    os.kill(java, signal.SIGKILL)
    group.eventually(lambda: not session_members(pid), "the child is gone with it", "ann")
    indexed.go()
    assert operation.wait(90).state == "success", group.tails()
    indexed.compare()
    indexed.grow()
    assert indexed.start().wait(60).state == "success"
    indexed.compare()
    indexed.assert_clean()
