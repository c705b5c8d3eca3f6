"""Faults during ``build-index`` and ``drop-index`` on real daemons.

After each fault the index is compared with the data: a lookup must find exactly the rows with its key. Abandoned work
must leave no files. conftest.py audits etcd's history.
"""

from __future__ import annotations

import contextlib
import os
import re
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
from distop.storage.files import local_path
from distop.worker.guardian import session_members
from distop_behaviors.index import row_lookup
from distop_behaviors.index.index_folder import Folder
from distop_behaviors.index.key_lookup import _read_here, find
from tests.faults.held_index import DROP_MOMENTS, FULL, MOMENTS
from tests.faults.test_self_fencing import child_of, command
from tests.support import lake, stored_files
from tests.support.daemons import SPARK
from tests.support.needs import need
from tests.support.processes import machine

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.faults.s3_lake import S3Lake
    from tests.support.daemons import Daemon, Daemons

pytestmark = [pytest.mark.etcd, pytest.mark.timeout(240), pytest.mark.rotating]

TABLE, TYPE = "rows", "held-index"
ROWS = 20
SOME = ["after-segment", "before-publish", "after-publish"]
"""One moment in a job, and two in the completion: before and after the write that publishes the new index."""


class Indexed:
    """A growing table with an index, and the files that block and release its builds.

    ``location``: of the table, a path or a URL. ``root``: the local folder of the files that block its builds.
    """

    format = "parquet"

    def __init__(self, group: Daemons, root: Path, location: str = "") -> None:
        self._group = group
        self._root = root
        self.location = location or str(root / "table")
        self._written = self._starts = 0
        self.folder = root
        self._create()
        self.record = TableRecord(TABLE, self.format, self.location, {"group_files": 2})
        self.grow(3)
        group.client.add_table(self.record)

    def _create(self) -> None:
        pass

    def grow(self, files: int = 2, rows: int = ROWS) -> list[str]:
        """Add files. Each has its own keys, and one key that all files have."""
        made = []
        for n in range(self._written, self._written + files):
            keys = [*(f"key {n} {i}" for i in range(rows)), "all", None]
            made.append(self._write(n, pa.table({"k": keys, "n": [n] * len(keys)})))
        self._written += files
        return made

    def _write(self, n: int, rows: pa.Table) -> str:
        data = pa.BufferOutputStream()
        pq.write_table(rows, data)
        return stored_files.write(self.location, f"{n}.parquet", data.getvalue().to_pybytes())

    def start(self, at: str = "", **arg: Any) -> Any:
        """Start a build that blocks at this moment."""
        return self._start(TYPE, at, columns=["k"], **arg)

    def drop(self, at: str = "") -> Any:
        """Start a drop of the index that blocks at this moment."""
        return self._start("held-drop", at)

    def _start(self, type_name: str, at: str, **arg: Any) -> Any:
        self._starts += 1
        self.folder = self._root / f"start-{self._starts}"
        self.folder.mkdir()
        return self._group.client.start_operation(
            type_name, TABLE, {"name": "i", "at": at, "folder": str(self.folder), **arg}
        )

    def held(self, at: str) -> int:
        """Wait until a process blocks at this moment, and return its pid."""
        self._group.eventually((self.folder / at).exists, f"a process blocks {at}")
        return int((self.folder / at).read_text())

    def go(self) -> None:
        (self.folder / "go").touch()

    def files(self) -> list[str]:
        """The paths or URLs of the table's files."""
        return sorted(f"{self.location}/{key}" for key in self._keys() if self._is_data(key))

    def _keys(self) -> list[str]:
        return stored_files.keys(self.location)

    def _is_data(self, key: str) -> bool:
        return "/" not in key and key.endswith(".parquet")

    def data(self) -> dict[str, bytes]:
        """The table's own files and their content, without those of distop."""
        return {key: stored_files.read(self.location, key) for key in self._keys() if not key.startswith("_distop/")}

    def find(self, *keys: str | None) -> Any:
        return find(self.record, "i", keys)

    def assert_finds_all_rows(self) -> None:
        """Assert that the index finds exactly the rows of each key, and reads them where the index places them."""
        contents = [stored_files.read(self.location, key) for key in self._keys() if self._is_data(key)]
        data = pa.concat_tables([pq.read_table(pa.BufferReader(one)) for one in contents]).to_pylist()
        keys = sorted({row["k"] for row in data} - {None})
        found = self.find(*keys, "nowhere")
        assert not found.uncovered
        read = _read_here(found, row_lookup.LOCAL_BYTES).to_pylist()
        assert _sorted(read) == _sorted(row for row in data if row["k"] is not None)
        current = self.index.current()
        assert current is not None
        assert sum(run.rows for run in current.runs) == len(read), "each row is indexed once"
        assert sorted(f[0] for f in self.find(None).files) == self.files()

    @property
    def index(self) -> Folder:
        return Folder(self.location, "i")

    def assert_clean(self) -> None:
        """Assert that all files of the index belong to a kept generation."""
        where = self.index
        names = sorted(stored_files.keys(where.location))
        generations = [name for name in names if name.startswith("generations/")]
        named = {one.name for name in generations for one in where._read(int(Path(name).stem)).named()}
        assert names == sorted([*(f"data/{name}" for name in named), *generations])
        if (folder := local_path(where.location)) is not None:
            assert sorted(path.name for path in folder.iterdir()) == ["data", "generations"]
        self.assert_nothing_staged()

    def index_files(self) -> dict[str, int]:
        """The keys of the index's files and their sizes in bytes."""
        where = self.index.location
        return {key: len(stored_files.read(where, key)) for key in stored_files.keys(where)}

    def assert_nothing_staged(self) -> None:
        """Stages are removed after the end of an operation."""
        self._group.eventually(lambda: self.staged() == [], "the stages are removed")

    def staged(self) -> list[str]:
        """The keys of staged files. Those of a table in an object store are not beside it."""
        return [key for key in self._keys() if re.match(r"_distop/[^/]+/stage/", key)]


class IndexedIceberg(Indexed):
    """An Iceberg table with one commit for each file, whose files are never removed."""

    format = "iceberg"

    def _create(self) -> None:
        schema = Schema(NestedField(1, "k", StringType()), NestedField(2, "n", LongType()))
        self._rows = lake.Folder(Path(self.location)).new(schema)

    def _write(self, n: int, rows: pa.Table) -> str:
        before = set(self.files())
        self._rows.append(rows)
        (path,) = set(self.files()) - before
        return path

    def _is_data(self, key: str) -> bool:
        return re.fullmatch(r"data/[^/]+\.parquet", key) is not None


class IndexedOnS3(Indexed):
    """A table on S3."""


def _sorted(rows: Any) -> list[tuple[str, int]]:
    return sorted((row["k"], row["n"]) for row in rows)


@pytest.fixture
def indexed(lake_of_kind: S3Lake | None, group: Daemons, tmp_path: Path, request: pytest.FixtureRequest) -> Indexed:
    """A table of the class in the test's parameter, :class:`Indexed` by default."""
    (tmp_path / "indexed").mkdir()
    kind: type[Indexed] = getattr(request, "param", Indexed)
    return kind(group, tmp_path / "indexed", "" if lake_of_kind is None else f"{lake_of_kind.location}/table")


def daemon_of(pid: int, daemons: list[Daemon]) -> Daemon:
    """The daemon whose child is this process."""
    (found,) = [daemon for daemon in daemons if pid in machine(daemon.pid)]
    return found


@pytest.mark.parametrize(
    ("indexed", "moments"),
    [
        pytest.param(Indexed, SOME, id="some"),
        pytest.param(IndexedOnS3, SOME, id="s3"),
        pytest.param(IndexedOnS3, MOMENTS, id="s3-all", marks=pytest.mark.slow),
        pytest.param(Indexed, MOMENTS, id="all", marks=pytest.mark.slow),
        pytest.param(IndexedIceberg, ["before-publish", "after-publish"], id="iceberg", marks=pytest.mark.slow),
    ],
    indirect=["indexed"],
)
def test_a_build_survives_a_killed_executor_at_each_commit_point(
    group: Daemons, indexed: Indexed, sample_env: dict[str, str], moments: list[str]
) -> None:
    """Before and after each commit point, another executor or the restarted one continues."""
    both = group.start("ann", "bob", ttl=3, env=sample_env)
    for generation, at in enumerate(moments, 1):
        operation = indexed.start(at)
        victim = daemon_of(indexed.held(at), both)
        victim.kill()
        indexed.go()
        victim.start()
        found = indexed.find("all") if generation > 1 else None
        assert found is None or sorted(f[0] for f in found.files) == indexed.files(), (
            "lookups miss no rows after the kill"
        )
        done = operation.wait(60)
        assert (done.state, done.report["generation"]) == ("success", generation), (at, group.tails())
        indexed.assert_finds_all_rows()
        group.await_ready(victim.name)
        indexed.grow()
    assert indexed.start().wait(60).state == "success"
    indexed.assert_finds_all_rows()
    indexed.assert_clean()


@pytest.mark.parametrize(
    ("indexed", "moments"),
    [
        pytest.param(Indexed, ["after-publish"], id="some"),
        pytest.param(Indexed, DROP_MOMENTS, id="all", marks=pytest.mark.slow),
        pytest.param(IndexedOnS3, ["after-publish"], id="s3"),
        pytest.param(IndexedOnS3, DROP_MOMENTS, id="s3-all", marks=pytest.mark.slow),
    ],
    indirect=["indexed"],
)
def test_a_drop_survives_a_killed_executor_at_each_commit_point(
    group: Daemons, indexed: Indexed, sample_env: dict[str, str], moments: list[str]
) -> None:
    """The index is complete or removed. Another executor or the restarted one finishes the drop, removes all files,
    and reports that there was an index.
    """
    both = group.start("ann", "bob", ttl=3, env=sample_env)
    for n, at in enumerate(moments):
        assert indexed.start().wait(60).report["generation"] == 2 * n + 1, group.tails()
        operation = indexed.drop(at)
        pid = indexed.held(at)
        victim = daemon_of(pid, both)
        victim.kill()
        group.eventually(lambda pid=pid: not session_members(pid), "its child is dead")  # type: ignore[misc]
        if at == "before-publish":
            indexed.assert_finds_all_rows()
        else:
            with pytest.raises(NotFound, match="has no index 'i'"):
                indexed.find("all")
        victim.start()
        done = operation.wait(60)
        assert (done.state, done.report) == ("success", {"name": "i", "dropped": True}), (at, group.tails())
        assert [*indexed.index_files()] == [f"generations/{2 * n + 2:06}.json"], at
        indexed.assert_nothing_staged()
        group.await_ready(victim.name)
    assert not indexed.drop().wait(60).report["dropped"]


@contextlib.contextmanager
def suspended_machine(group: Daemons, victim: Daemon, pid: int, late: Path) -> Iterator[None]:
    """Suspend the machine of an executor during the block.

    Afterwards its child ``pid`` wakes up first, before its guardian can kill it, and runs to its end, which creates the
    file ``late``. Then the executor wakes up and starts a new session.
    """
    victim.suspend()
    try:
        yield
        os.kill(pid, signal.SIGCONT)
        group.eventually(late.exists, "the child has run to its end")
    finally:
        victim.wake()
    group.eventually(lambda: not session_members(pid), "its child is dead", victim.name)
    group.eventually(lambda: victim.name in group.live(), "it has a new session", victim.name)


@pytest.mark.parametrize(
    ("indexed", "at"),
    [
        pytest.param(Indexed, "after-segment", id="after-segment", marks=pytest.mark.slow),
        pytest.param(Indexed, "before-publish", id="before-publish"),
        pytest.param(IndexedOnS3, "after-segment", id="s3-after-segment", marks=pytest.mark.slow),
        pytest.param(IndexedOnS3, "before-publish", id="s3-before-publish"),
    ],
    indirect=["indexed"],
)
def test_a_build_survives_a_process_that_wakes_up_after_its_takeover(
    at: str, group: Daemons, indexed: Indexed, sample_env: dict[str, str]
) -> None:
    """Two executors run one job, or two coordinators one completion: the previous process continues once the operation
    and the next one have ended.
    """
    both = group.start("ann", "bob", ttl=3, env=sample_env)
    assert indexed.start().wait(60).state == "success"
    indexed.grow()
    # Its jobs have at most two files, so they save no checkpoint: the child would wait for its suspended daemon.
    operation = indexed.start(at, segment_files=3)
    pid = indexed.held(at)
    victim, late = daemon_of(pid, both), indexed.folder / f"ended-{pid}"
    with suspended_machine(group, victim, pid, late):
        late.unlink(missing_ok=True)  # another job of the process may have created it
        indexed.go()
        assert operation.wait(60).report["generation"] == 2, group.tails()
        indexed.assert_finds_all_rows()
        indexed.grow()
        assert indexed.start().wait(60).report["generation"] == 3
    newest = indexed.index.newest()
    assert newest is not None
    assert newest.number == 3
    indexed.assert_finds_all_rows()
    indexed.grow()
    assert indexed.start().wait(60).report["generation"] == 4
    indexed.assert_finds_all_rows()
    indexed.assert_clean()


@pytest.mark.slow  # each run has tests/unit/behaviors/test_index_build.py, without processes
@pytest.mark.parametrize("at", ["before-publish", "before-data"])
def test_a_drop_that_wakes_up_late_changes_nothing_of_the_next_build(
    at: str, group: Daemons, indexed: Indexed, sample_env: dict[str, str]
) -> None:
    both = group.start("ann", "bob", ttl=3, env=sample_env)
    assert indexed.start().wait(60).state == "success"
    operation = indexed.drop(at)
    pid = indexed.held(at)
    victim, late = daemon_of(pid, both), indexed.folder / f"ended-{pid}"
    with suspended_machine(group, victim, pid, late):
        indexed.go()
        assert operation.wait(60).report == {"name": "i", "dropped": True}, group.tails()
        indexed.grow()
        assert indexed.start().wait(60).report["generation"] == 3
    indexed.assert_finds_all_rows()
    indexed.grow()
    assert indexed.start().wait(60).report["generation"] == 4
    indexed.assert_finds_all_rows()
    indexed.assert_clean()


def test_cancels_and_writers_during_a_build_keep_the_index_correct(
    group: Daemons, indexed: Indexed, sample_env: dict[str, str]
) -> None:
    """A cancel leaves the index unchanged at any moment of the build. Lookups find files that a writer adds or replaces
    during the build.
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
        found = indexed.find("all")
        assert {f[0] for f in found.uncovered} >= set(made)
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
        for key, where in ((keys[3], second), (pq.read_table(path)["k"][0].as_py(), path)):
            assert where in {f[0] for f in indexed.find(key).files}, (at, key)
        indexed.grow(1)
    assert indexed.start().wait(60).state == "success"
    indexed.assert_finds_all_rows()
    indexed.assert_clean()


@pytest.mark.slow  # each run has tests/unit/behaviors/test_index_build.py, without cancels
@pytest.mark.parametrize("dies", [False, True], ids=["continues", "dies"])
def test_cancels_and_writers_during_a_drop_keep_the_index_whole_or_removed(
    group: Daemons, indexed: Indexed, sample_env: dict[str, str], *, dies: bool
) -> None:
    """A cancel waits for the running drop, or its process dies. The index is complete or removed. The next drop removes
    leftover files, and the next build creates the index again. A drop ignores changes by a writer.
    """
    group.start("ann", ttl=10, env=sample_env)
    for at in ("before-publish", "after-publish", "before-data", "after-drop"):
        indexed.grow()
        assert indexed.start().wait(60).state == "success", group.tails()
        indexed.assert_finds_all_rows()
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
            found = indexed.find("all")
            assert sorted(f[0] for f in found.files) == indexed.files(), "files outside the index are read"
            assert {f[0] for f in found.uncovered} == set(made)
        else:
            with pytest.raises(NotFound, match="has no index 'i'"):
                indexed.find("all")
        again = indexed.drop().wait(60)
        assert (again.state, again.report["dropped"]) == ("success", dies and at == "before-publish"), group.tails()
        assert [Path(key).suffix for key in indexed.index_files()] == [".json"], at
        indexed.assert_nothing_staged()
        assert indexed.data() == before, at
    assert indexed.start().wait(60).state == "success"
    indexed.assert_finds_all_rows()
    indexed.assert_clean()


def test_a_build_on_a_full_disk_keeps_the_index_and_continues_later(
    group: Daemons, indexed: Indexed, sample_env: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A limit on the file size of the process makes real writes fail, first in a job and then in the completion. The
    index is unchanged, staged files are removed, and the build continues once there is space.
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
        group.eventually((indexed.folder / "failed").exists, "a write has failed")
        assert indexed.index_files() == before
        assert large in {f[0] for f in indexed.find("all").files}
        if at == "before-segment":
            assert all(len(stored_files.read(indexed.location, key)) < FULL for key in indexed.staged())
        (indexed.folder / "full").unlink()
        done = operation.wait(60)
        assert (done.state, done.report["generation"]) == ("success", generation), group.tails()
        indexed.assert_finds_all_rows()
        indexed.assert_clean()


@pytest.mark.spark
@pytest.mark.slow
def test_a_build_survives_a_killed_jvm_in_its_process(
    group: Daemons, indexed: Indexed, sample_env: dict[str, str]
) -> None:
    """A build needs no Spark, but its process may have a JVM. The process is replaced, and the job runs again."""
    need(shutil.which("java"), "Java 17 or newer: install openjdk-17-jre-headless")
    (ann,) = group.start("ann", ttl=10, env=sample_env, options=SPARK)
    arg = {"checks": [{"not_null": "n"}], "statistics": "never"}
    assert group.client.start_operation("validate", TABLE, arg).wait(120).state == "success", group.tails()
    operation = indexed.start("after-segment")
    pid = indexed.held("after-segment")
    (java,) = [pid for pid in session_members(child_of(ann)) if Path(command(pid).split()[0]).name == "java"]
    os.kill(java, signal.SIGKILL)
    group.eventually(lambda: not session_members(pid), "the child has ended with its JVM", "ann")
    indexed.go()
    assert operation.wait(90).state == "success", group.tails()
    indexed.assert_finds_all_rows()
    indexed.grow()
    assert indexed.start().wait(60).state == "success"
    indexed.assert_finds_all_rows()
    indexed.assert_clean()
