"""Removal of files below tables, shared directories, stages and indexes, by one function only."""

from __future__ import annotations

import ast
import logging
import os
import random
import re
import shutil
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from obstore.store import MemoryStore

from distop.errors import InvalidArgument, UnsafePath
from distop.protocol.plan import MAX_CHUNK_BYTES, PartitionPlan
from distop.protocol.records import TableRecord
from distop.storage import deletion, places, result_files
from distop.storage.deletion import Place, check_unlinked, delete, names
from distop.storage.object_store import scratch_name
from distop.storage.opened_stores import store_of
from distop.storage.places import (
    Attempt,
    instances,
    operation_path,
    remove_place,
    remove_place_or_log,
    result_of,
    series_of,
    shared_of,
    stage_of,
)
from distop.storage.remote_store import RemoteStore
from distop.storage.storage_options import bucket_of
from distop.worker.child_side import shared_files
from distop.worker.child_side.stage_sweeping import StageSweeper
from distop_behaviors.index.generation import Generation
from distop_behaviors.index.index_folder import Folder
from distop_behaviors.validate import file_lists
from tests.support.context import FakeContext
from tests.support.index_runs import root_of
from tests.support.slow_cases import mostly_slow
from tests.unit.support.source_trees import sources

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

LOG = logging.getLogger("tests.deletion")

REMOVES = {
    *("rmtree", "unlink", "rmdir", "remove", "removedirs", "delete_dir", "delete_dir_contents", "delete_file"),
    *("delete_root_dir_contents", "deleteFile", "deleteFiles", "dropTable", "drop_table", "purge_table", "move"),
    *("delete", "delete_files", "delete_data_files", "rename", "renames", "replace", "truncate", "ftruncate"),
    *("write_text", "write_bytes", "open_output_stream", "copy_file", "copy_files", "copyfile", "copytree"),
    *("deleteIfExists", "deleteQuietly", "forceDelete", "deleteRecursively", "deleteOnExit", "expire_snapshots"),
    *("overwrite", "O_TRUNC", "rm", "delete_many", "delete_folder", "delete_incomplete"),
}
"""Functions of Python, pyarrow, pyiceberg, Java and our stores that remove, rename or empty files."""
ALSO_OF_VALUES = {"remove", "move", "replace"}
"""Methods of lists, sets, texts and times have these names, too."""

ALLOWED = {
    "distop/storage/deletion.py": "the one function for folders on a disk",
    "distop/storage/places.py": "stages and results, by places that follow from operations",
    "distop/storage/store_check.py": "objects of the self-test, by names that it has made",
    "distop/services/storage_doctor.py": "an object that it has written",
    "distop/worker/child_side/shared_files.py": "files of killed processes, by their names",
    "distop/worker/child_side/stage_sweeping.py": "stages, and their files in tables, by places of operations",
    "behaviors/index/index_folder.py": "files of an index, by the names of operations and generations",
    "behaviors/index/segments.py": "files of an own stage, by their numbers",
    "behaviors/orphans/restoration.py": "the empty folders of a quarantine, by its operation",
    "behaviors/apply/staged_files.py": "stages and data files of attempts, by places that follow from operations",
    "distop/tables/staged_files.py": "stages and new files of attempts, by places that follow from operations",
    "distop/tables/parquet/folder_replacer.py": "stages of ended operations, by places that follow from operations",
    "distop/tables/iceberg/folder_publisher.py": "checksums that Hadoop keeps beside metadata files, by their names",
    "distop/tables/iceberg/iceberg_catalogs.py": "the entry of a table in a catalog, and no file",
    "distop/tables/iceberg/new_metadata.py": "manifests of an own transaction, in the table's folder of metadata",
    "distop/storage/object_store.py": "an object that it has written to read the store's time",
    "distop/storage/folder_store.py": "objects, by their keys below the store's folder",
    "distop/storage/listed_removal.py": "objects that its caller has listed, if they are unchanged",
    "distop/storage/remote_store.py": "objects, by their keys below the store's prefix",
    "distop/storage/files.py": "whole files, by fixed names and those of runs, in the work directory",
    "distop/daemon/local_jobs.py": "records of runs, by their own names, in a folder of the work directory",
    "distop/worker/daemon_side/child_logs.py": "logs of children, by their numbers, in the work directory",
    "distop/store/embedded.py": "the data folder that an embedded etcd has made for itself",
    "distop/testing/in_process_child.py": "a temporary folder that it has made, for a test's Spark",
    "distop/testing/operation_run.py": "a temporary folder that it has made, for a test's operation",
    "distop/cli/page/page_file.py": "the file that a person names with --html",
    "distop/cli/commands.py": "the name of a command",
    "distop/cli/policies.py": "the name of a command",
    "behaviors/export/export_completion.py": "its own record of pages, in the target",
    "behaviors/export/export_target.py": "markers and manifests by their names, in a target that it owns",
    "behaviors/export/folder_export.py": "the manifest of a folder by its name, in a target that it owns",
    "behaviors/export/folder_copier.py": "incomplete uploads, in a target that it owns",
    "behaviors/expire/__init__.py": "nothing itself: it names the function of its package",
    "distop/storage/folder_copies.py": "copies under names of their own, in the folder of a target",
    "distop/tables/parquet/folder_swap.py": "files of its own entries; old files through the deletion of listed files",
    "distop/server/handlers.py": "no file: a field of requests that is called replace",
    "distop/worker/spark_settings.py": "the file of settings, by its fixed name, in the work directory",
}


def removals(tree: ast.Module) -> Iterator[int]:
    """The lines that name a function that removes files; methods of values do not count."""
    of_values = {id(node.func) for node in ast.walk(tree) if isinstance(node, ast.Call) and not _of_a_path(node)}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            names = {alias.name for alias in node.names} & REMOVES
            if (
                names - ({"replace"} if node.module == "dataclasses" else set())
                and node.module != "distop.storage.deletion"
            ):
                yield node.lineno
        elif isinstance(node, ast.Attribute) and node.attr in REMOVES:
            owner = node.value.id if isinstance(node.value, ast.Name) else ""
            if owner in ("os", "shutil") or ((owner, node.attr) not in OURS and id(node) not in of_values):
                yield node.lineno
        elif isinstance(node, ast.Constant) and node.value in REMOVES - ALSO_OF_VALUES:
            yield node.lineno  # getattr(os, "unlink")
        elif _is_sql(node) or _opens_to_write(node):
            yield node.lineno


OURS = {("deletion", "delete")}
_SQL = re.compile(r"\s*(DROP|TRUNCATE|DELETE\s+FROM|INSERT\s+OVERWRITE)\b")


def _is_sql(node: ast.AST) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, str) and bool(_SQL.match(node.value))


def _opens_to_write(call: ast.AST) -> bool:
    """``open(path, "w")``, ``path.open("wb")``: the former content is lost."""
    if not isinstance(call, ast.Call):
        return False
    name = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
    modes = [one.value for one in (*call.args, *(k.value for k in call.keywords)) if isinstance(one, ast.Constant)]
    return name in ("open", "fdopen") and any(isinstance(mode, str) and _MODE.fullmatch(mode) for mode in modes)


_MODE = re.compile(r"[rwabt+]*w[rwabt+]*")


def _of_a_path(call: ast.Call) -> bool:
    """Whether a call may be of a path or a file system: ``path.replace(target)``, but not ``text.replace(old, new)``
    nor ``time.replace(tzinfo=UTC)``; ``fs.move(a, b)``, but not ``window.move(x)``; and not ``names.remove(name)``.
    """
    method = call.func.attr if isinstance(call.func, ast.Attribute) else ""
    if method == "replace":
        return len(call.args) == 1 and not call.keywords
    if method == "move":
        return len(call.args) == 2
    return method not in ALSO_OF_VALUES


@pytest.mark.parametrize(
    ("line", "removes"),
    [
        *((line, True) for line in ("io.delete(x)", "self._of(x).delete(x)", "f = io.delete", "from os import rename")),
        *((line, True) for line in ("path.rename(x)", "fs.rename(x, y)", "path.replace(x)", "os.replace(x, y)")),
        *((line, True) for line in ("os.truncate(x, 0)", "file.truncate()", "path.write_text(x)", "x.write_bytes(y)")),
        *((line, True) for line in ("map(path.replace, x)", "getattr(io, 'delete')", "os.remove(x)", "x.unlink()")),
        *((line, True) for line in ("from pyiceberg.catalog import delete_files", "from other import delete")),
        *((line, True) for line in ("fs.move(x, y)", "open(p, 'w')", "p.open('wb')", "os.open(p, os.O_TRUNC)")),
        *((line, True) for line in ("fs.open_output_stream(p)", "df.write.mode('overwrite')", "tx.overwrite(df)")),
        *((line, True) for line in ("jvm.java.nio.file.Files.deleteIfExists(p)", "spark.sql('DROP TABLE x')")),
        *((line, True) for line in ("run(['rm', '-rf', p])", "fs.copy_file(x, y)", "df.parquet(p, mode='overwrite')")),
        *((line, False) for line in ("open(p)", "open(p, 'rb')", "p.open('r')", "os.open(p, os.O_RDONLY)")),
        *(
            (line, False)
            for line in ("deletion.delete(x, y)", "from distop.storage.deletion import delete", "names.remove(x)")
        ),
        *((line, False) for line in ("text.replace(x, y)", "time.replace(tzinfo=x)", "replace(x, a=y)", "Delete(key)")),
        *((line, False) for line in ("from dataclasses import replace", "x = 'replace'")),
    ],
)
def test_lines_that_remove_files_are_found(line: str, removes: bool) -> None:
    assert bool(list(removals(ast.parse(line)))) is removes


def test_files_are_removed_by_one_function_only() -> None:
    found = {name: list(removals(tree)) for name, tree in sources()}
    assert len(found) > 300, "all modules are checked"
    assert {name: lines for name, lines in found.items() if lines and name not in ALLOWED} == {}
    assert [name for name in ALLOWED if not found[name]] == [], "exceptions that are not needed any more"


@pytest.mark.parametrize("path", ["", "/", "/etc", "..", ".", "a/..", "a/../../b", "./a", "a//b", "a/", "a\0b"])
def test_a_path_that_does_not_lead_downwards_is_refused(path: str, tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    place = Place(str(tmp_path), "p")
    for act in (lambda: delete(place, path), lambda: store_of(place).head(path)):
        with pytest.raises(UnsafePath, match="is not a path below a folder"):
            act()
    if path:
        with pytest.raises(UnsafePath):
            delete(Place(str(tmp_path), path), "a")
    with pytest.raises(UnsafePath):
        Place("mem://bucket", "p").below(path)
    assert (tmp_path / "a").exists()


@pytest.mark.parametrize("anchor", ["", "/", "//", "file:///", "file:/", "/tmp/.."])
def test_the_root_is_refused_as_a_place(anchor: str) -> None:
    with pytest.raises(UnsafePath, match="never the root"):
        delete(Place(anchor), "distop-no-such-folder")


def test_an_unsafe_path_is_an_invalid_argument() -> None:
    assert issubclass(UnsafePath, InvalidArgument)
    assert UnsafePath.exit_code == 2


def test_a_link_is_removed_and_its_target_stays(tmp_path: Path) -> None:
    (tmp_path / "target" / "inner").mkdir(parents=True)
    (tmp_path / "p").mkdir()
    (tmp_path / "p" / "link").symlink_to(tmp_path / "target")
    place = Place(str(tmp_path), "p")
    with pytest.raises(UnsafePath, match="p/link is a symbolic link, which is not followed"):
        delete(place, "link/inner")
    with pytest.raises(UnsafePath):
        check_unlinked(place.below("link"))
    with pytest.raises(UnsafePath):
        names(place.below("link"))
    assert delete(place, "link")
    assert not delete(place, "link")
    assert (tmp_path / "target" / "inner").is_dir()


def test_a_folder_is_removed_with_the_empty_folders_above_it(tmp_path: Path) -> None:
    for name in ("a/b/c", "a/d", "e/f"):
        (tmp_path / "own" / name).mkdir(parents=True)
    store = store_of(Place(str(tmp_path), "own"))
    store.delete_folder("a/b/c")
    assert sorted(path.name for path in (tmp_path / "own" / "a").iterdir()) == ["d"]
    store.delete_folder("a/d")
    store.delete_folder("a/missing")
    assert [path.name for path in (tmp_path / "own").iterdir()] == ["e"]
    store.delete_folder("e/f")
    assert list((tmp_path / "own").iterdir()) == [], "the store's own folder stays"


def test_a_missing_place_has_no_names(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for place, path in (
        (Place(str(tmp_path / "none")), "a"),
        (Place(str(tmp_path), "x"), "a"),
        (Place(str(tmp_path)), "file/a"),
    ):
        assert not delete(place, path)
    assert names(Place(str(tmp_path), "file")) == names(Place(str(tmp_path), "none/x")) == []
    assert (tmp_path / "file").exists()


def test_only_a_regular_file_is_read_back(tmp_path: Path) -> None:
    (tmp_path / "p").mkdir()
    (tmp_path / "p" / "f").touch()
    (tmp_path / "p" / "link").symlink_to(tmp_path / "p" / "f")
    os.mkfifo(tmp_path / "p" / "pipe")
    store = store_of(Place(str(tmp_path), "p"))
    assert store.head("f").size == 0
    for name in ("link", "pipe"):
        with pytest.raises(UnsafePath, match="is not a regular file"):
            store.head(name)
    for name in ("none", "none/f"):
        with pytest.raises(FileNotFoundError):
            store.head(name)


def _linked(tmp_path: Path, name: str) -> tuple[Place, Path]:
    """A shared directory in which a link replaces a folder, and the target of the link."""
    place, outside = Place(str(tmp_path / "t"), "_distop/c0ffee"), tmp_path / "outside"
    (Path(place.location) / name).parent.mkdir(parents=True)
    outside.mkdir()
    (Path(place.location) / name).symlink_to(outside)
    return place, outside


def _spill(place: Place) -> None:
    files = tuple((f"/data/{'n' * 150}{n}", 1, 1) for n in range(MAX_CHUNK_BYTES // 160 + 1))
    shared_files.spill([PartitionPlan(0, "p", files=files)], place, "t/validate/1")


def _keep(place: Place) -> None:
    ctx = FakeContext(Path(place.anchor))
    ctx.shared, ctx.shared_dir = place, place.location
    file_lists.write_file_list("files-1", lambda: [("/t/a", 1, 1)], ctx)


def _result(place: Place) -> None:
    result_files.write(place, Attempt("t/validate/1", 0, 1, "inc"), b"{}")


def _stage(place: Place) -> None:
    with deletion.made_folder(stage_of(place, Attempt("t/validate/1", 0, 1, "inc"))):
        pass


@pytest.mark.parametrize(
    ("name", "writes"),
    [("plans", _spill), ("plans/t", _spill), ("certificates", _keep), ("results", _result), ("stage/t", _stage)],
)
def test_nothing_is_written_through_a_link(name: str, writes: Callable[[Place], None], tmp_path: Path) -> None:
    place, outside = _linked(tmp_path, name)
    with pytest.raises(UnsafePath, match=f"{name} is a symbolic link, which is not followed: put a folder there"):
        writes(place)
    assert list(outside.iterdir()) == []


@pytest.mark.parametrize("name", ["data", "generations"])
def test_no_index_is_published_through_a_link(name: str, tmp_path: Path) -> None:
    _, outside = _linked(tmp_path, "unused")
    index = Folder(str(tmp_path / "t"), "i")
    root_of(index).mkdir(parents=True)
    (root_of(index) / name).symlink_to(outside)
    with pytest.raises(UnsafePath, match=f"{name} is a symbolic link"):
        index.publish(Generation(1, "t/build-index/1"))
    assert list(outside.iterdir()) == []


def test_a_link_with_the_name_of_a_written_file_is_refused(tmp_path: Path) -> None:
    store, outside = store_of(Place(str(tmp_path / "new"), "a")), tmp_path / "outside"
    outside.write_text("of somebody else")
    store.put("b/c", b"one")
    store.put("b/c", b"two")
    assert (tmp_path / "new/a/b/c").read_bytes() == b"two"
    (tmp_path / "new/a/b/c").unlink()
    (tmp_path / "new/a/b/c").symlink_to(outside)
    with pytest.raises(UnsafePath, match="is a link"):
        store.put("b/c", b"three")
    assert outside.read_text() == "of somebody else"
    assert [path.name for path in (tmp_path / "new/a").rglob("*")] == ["b", "c"], "no temporary file is left"
    with pytest.raises(UnsafePath):
        store.put("../c", b"")
    (tmp_path / "new/a/d").write_text("a file")
    with pytest.raises(OSError, match="Not a directory"):
        store.put("d/c", b"")


def test_a_path_cannot_be_redirected_between_check_and_use(tmp_path: Path) -> None:
    """A folder on the path is swapped with a link to a foreign folder as fast as possible."""
    outside = tmp_path / "outside" / "q"
    outside.mkdir(parents=True)
    (outside / "kept").touch()
    (tmp_path / "p").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "outside")
    stop = threading.Event()

    def swap() -> None:
        while not stop.is_set():
            (tmp_path / "p").rename(tmp_path / "aside")
            (tmp_path / "link").rename(tmp_path / "p")
            (tmp_path / "p").rename(tmp_path / "link")
            (tmp_path / "aside").rename(tmp_path / "p")

    swapping = threading.Thread(target=swap)
    swapping.start()
    try:
        for _ in range(3000):
            remove_place_or_log(Place(str(tmp_path), "p/q"), logging.getLogger("tests.quiet"))
            remove_place_or_log(Place(str(tmp_path), "p/q/kept"), logging.getLogger("tests.quiet"))
            assert (outside / "kept").exists()
    finally:
        stop.set()
        swapping.join()


def test_two_concurrent_removals_both_succeed(tmp_path: Path) -> None:
    for n in range(20):
        for m in range(50):
            path = tmp_path / str(n) / str(m)
            path.mkdir(parents=True)
            (path / "f").touch()
        wrong: list[BaseException] = []

        def run(name: str, wrong: list[BaseException] = wrong) -> None:
            try:
                delete(Place(str(tmp_path)), name)
            except BaseException as error:
                wrong.append(error)

        threads = [threading.Thread(target=run, args=(str(n),)) for _ in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert wrong == []
        assert not (tmp_path / str(n)).exists()


# ---------------------------------------------------------------------- generated layouts

NAMES = [
    *("1", "2", "17", "a", "ab", "b", "stage", "plans", "_distop", "data", "index", "p=1", "%2E%2E", "..x", "...", " "),
    *("ä", "a\u0308", "日本", "a\nb", "a%2Fb", "-rf", "*", "~", "\udcff", "CON", "x" * 200),
]


def snapshot(root: Path, but: Path) -> dict[str, Any]:
    """Everything below a folder, except below ``but``: bytes, folders, and targets of links."""
    found: dict[str, Any] = {}
    for path in root.iterdir() if root != but else ():
        if path.is_symlink():
            found[str(path)] = ("link", path.readlink())
        elif path.is_dir():
            found |= {str(path): "folder"} if path != but else {}
            found |= snapshot(path, but)
        else:
            found[str(path)] = path.read_bytes()
    return found


def grow(rng: random.Random, folder: Path, root: Path, depth: int) -> None:
    for name in rng.sample(NAMES, rng.randint(1, 4)):
        path = folder / name
        if path.exists() or path.is_symlink():
            continue
        kind = rng.random()
        if kind < 0.15:
            target = rng.choice([root, root / "outside", folder, Path("/nowhere"), Path(".."), Path("../../outside")])
            path.symlink_to(target)
        elif kind < 0.4 or not depth:
            path.write_bytes(rng.randbytes(3))
        else:
            path.mkdir()
            grow(rng, path, root, depth - 1)


@pytest.mark.parametrize("block", mostly_slow(range(8), 2))
def test_a_byte_outside_the_place_never_changes(block: int, tmp_path: Path) -> None:
    """Layouts with nested tables, names with a common prefix, odd encodings, and links at each level."""
    for seed in range(block * 50, block * 50 + 50):
        rng = random.Random(seed)
        root = tmp_path / str(seed)
        outside = root / "outside"
        outside.mkdir(parents=True)
        grow(rng, outside, root, 2)
        way = [root / "tables", *(Path(n) for n in rng.sample(NAMES, 4))]
        path = way[0]
        path.mkdir()
        linked = rng.randrange(1, 8)
        for level, part in enumerate(way[1:], 1):
            grow(rng, path, root, 1)
            path = path / part
            if path.is_symlink() or path.is_file():
                path.unlink()
            elif level == linked and path.exists():
                shutil.rmtree(path)
            if level == linked:
                path.symlink_to(outside)
            else:
                path.mkdir(exist_ok=True)
        if not path.is_symlink():
            grow(rng, path, root, 2)
        place = Place(str(way[0]), "/".join(str(part) for part in way[1:]))
        own = Path(place.location)
        before = snapshot(root, own if linked > 4 else root / "none")
        try:
            there = names(place)
        except UnsafePath:
            there = []
            assert linked <= 4, seed
        for name in [
            *there,
            *rng.sample(NAMES, 5),
            "../ab",
            "/etc",
            "..",
            "",
            f"{rng.choice(NAMES)}/{rng.choice(NAMES)}",
        ]:
            try:
                delete(place, name)
            except (UnsafePath, OSError):
                continue
        assert snapshot(root, own if linked > 4 else root / "none") == before, seed
        if linked > 4:
            for name in names(place):
                delete(place, name)
            assert list(own.iterdir()) == [], seed


# ---------------------------------------------------------------------- object stores


class Bucket:
    """The bucket ``s3://b`` in memory."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._memory = MemoryStore()
        monkeypatch.setattr(places, "store_of", self.store_of)

    def store_of(self, place: Place) -> RemoteStore:
        return RemoteStore(place.location, self._memory, prefix=bucket_of(place.location).path)

    def put(self, *keys: str) -> None:
        for key in keys:
            self.store_of(Place("s3://b")).put_new(key, b"x")

    def files(self) -> list[str]:
        return [found.key for found in self.store_of(Place("s3://b")).list()]

    def names(self, place: Place) -> list[str]:
        found = self.store_of(place).list_folder()
        return [*found.folders, *(one.key for one in found.objects)]


@pytest.fixture
def bucket(monkeypatch: pytest.MonkeyPatch) -> Bucket:
    return Bucket(monkeypatch)


def test_a_common_prefix_is_not_a_folder(bucket: Bucket) -> None:
    bucket.put("a/b/1", "a/b/c/2", "a/bc/3", "a/b.4")
    place = Place("s3://b", "a")
    remove_place(place.below("bcd"))
    remove_place(place.below("b"))
    assert bucket.files() == ["a/b.4", "a/bc/3"]
    remove_place(place.below("b.4"))
    assert bucket.files() == ["a/b.4", "a/bc/3"], "an object is no folder"
    assert bucket.names(place) == ["bc", "b.4"]


def test_an_upload_that_a_killed_process_left_is_removed_with_its_folder(bucket: Bucket) -> None:
    bucket.put(f"a/b/{scratch_name()}", "a/c")
    remove_place(Place("s3://b", "a/b"))
    everything = bucket.store_of(Place("s3://b"))._list("", "")
    assert [found.key for found in everything] == ["a/c"]


@pytest.mark.parametrize("anchor", ["s3://", "s3:///", "s3:////"])
def test_a_store_without_a_bucket_is_refused_as_a_place(anchor: str) -> None:
    with pytest.raises(InvalidArgument, match="names no bucket"):
        remove_place(Place(anchor, "b"))


@pytest.mark.parametrize("anchor", ["s3://b/../c", "s3://b//c", "s3://b/./c"])
def test_an_ambiguous_url_is_refused_as_a_place(anchor: str) -> None:
    with pytest.raises(UnsafePath):
        remove_place(Place(anchor, "x"))


@pytest.mark.parametrize("seed", mostly_slow(range(100), 30))
def test_an_object_outside_the_place_never_changes(seed: int, bucket: Bucket) -> None:
    rng = random.Random(seed)
    plain = [n for n in NAMES if "\udcff" not in n and "\n" not in n]
    for _ in range(25):
        key = "/".join(rng.sample(plain, rng.randint(1, 4)))
        if not any(key == f or key.startswith(f"{f}/") or f.startswith(f"{key}/") for f in bucket.files()):
            bucket.put(key)
    place = Place("s3://b", "/".join(rng.sample(plain, rng.randint(1, 2))))
    own = f"{place.path}/"
    before = [f for f in bucket.files() if not f.startswith(own)]
    for name in [*bucket.names(place), *rng.sample(plain, 5), "..", "", "../a"]:
        try:
            remove_place(place.below(name))
        except (UnsafePath, OSError):
            continue
    assert [f for f in bucket.files() if not f.startswith(own)] == before


# ---------------------------------------------------------------------- places


def test_a_space_is_a_folder_of_the_shared_directory() -> None:
    table = TableRecord("t", "parquet", "/tables/t")
    assert shared_of("", "abc", table) == Place("/tables/t", "_distop/abc")
    assert shared_of("/shared/", "abc", table) == Place("/shared", "abc")
    assert shared_of("", "abc", TableRecord("t", "spark", "db.t")) is None
    assert shared_of("", "abc", TableRecord("t", "parquet", "s3://lake/t")) == Place("s3://lake/t", "_distop/abc")
    assert shared_of("", "abc", TableRecord("t", "parquet", "hdfs:///t")) is None
    assert shared_of("s3://lake/shared", "abc", TableRecord("t", "parquet", "hdfs:///t")) is not None


def test_hole_9_two_namespaces_in_one_folder_do_not_sweep_files_of_each_other(tmp_path: Path) -> None:
    table = TableRecord("t", "parquet", str(tmp_path))
    shared = [shared_of("", space, table) for space in ("a", "b", "c")]
    for n in range(1, 4):
        for place in shared:
            assert place is not None
            op = f"t/sample/{n}"
            stage = Path(stage_of(place, Attempt(op, 0, 5, "inc")).location)
            stage.mkdir(parents=True)
            (stage / "f").touch()
            result = result_of(place, Attempt(op, 0, 5, "inc"))
            for name in (result.location, f"{place.location}/plans/{operation_path(op)}/x"):
                Path(name).parent.mkdir(parents=True)
                Path(name).touch()
    one, two, three = shared
    assert one is not None
    before = [snapshot(Path(place.location), tmp_path / "none") for place in (two, three) if place is not None]
    assert shared_files.operations_with_files(one, ["t/sample/2"]) == ["t/sample/1", "t/sample/2"]
    for op in ("t/sample/1", "t/sample/2"):
        shared_files.remove_results(one, op)
        shared_files.remove_plans(one, op)
    for op in ("t/sample/1", "t/sample/2"):
        StageSweeper(op, one, "a", table, check=lambda: None, spark=lambda: None, log=LOG).remove_all()
    assert instances(series_of(one, "t/sample/9"), 9) == [3]
    assert len([path for path in Path(one.location).rglob("*") if path.is_file()]) == 3
    assert [snapshot(Path(p.location), tmp_path / "none") for p in (two, three) if p is not None] == before


def test_a_plan_that_names_a_file_list_of_another_operation_is_refused(tmp_path: Path) -> None:
    from distop.protocol.plan import PartitionPlan

    place = Place(str(tmp_path))
    (tmp_path / "plans" / "t" / "sample" / "1").mkdir(parents=True)
    (tmp_path / "plans" / "t" / "sample" / "1" / "l.json").write_text('[["/f", 1, 2]]')
    (tmp_path / "plans" / "t" / "sample" / "1" / "link.json").symlink_to(tmp_path / "secret")
    (tmp_path / "secret").write_text('[["/secret", 1, 2]]')
    read = PartitionPlan(0, "p", files_at="plans/t/sample/1/l.json")
    assert shared_files.with_files(read, place, "t/sample/1").files == (("/f", 1, 2),)
    for at in (
        *("secret", "../secret", "/etc/passwd", "plans/t/sample/1/../../../../secret", "plans/t/sample/1/link.json"),
        *("plans/t/sample/1/..", "plans/t/sample/1/"),
    ):
        with pytest.raises(UnsafePath):
            shared_files.with_files(PartitionPlan(0, "p", files_at=at), place, "t/sample/1")
    with pytest.raises(UnsafePath, match="which is not a file list of this operation"):
        shared_files.with_files(read, place, "t/sample/2")
