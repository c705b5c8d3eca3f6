"""Manifests of staged output: what an outcome commits is what completion reads."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from distop.errors import InvalidArgument, NotFound, UnreadableRecord, UnsafePath
from distop.storage.deletion import Place
from distop.storage.opened_stores import store_of
from distop.storage.places import Attempt, make_table_data, stage_of, table_data
from distop.storage.stage_manifest import MANIFEST, StagedOutput, read_manifest, write_manifest

OP = "t/copy/3"


@pytest.fixture
def stage(tmp_path: Path) -> Place:
    made = stage_of(Place(str(tmp_path / "shared"), "c0ffee"), Attempt(OP, 0, 7, "inc"))
    store_of(made).put_new("rows/a.txt", b"one\ntwo\n")
    store_of(made).put_new("b.txt", b"three\n")
    return made


def test_a_manifest_lists_files_with_size_checksum_and_rows(stage: Place) -> None:
    committed = write_manifest(stage, {"rows/a.txt": 2, "b.txt": 1})
    assert (committed.files, committed.bytes, committed.rows) == (2, 14, 3)
    found = read_manifest(stage, StagedOutput.model_validate(committed.model_dump()))
    assert [(one.path, one.bytes, one.rows, len(one.sha256)) for one in found.files] == [
        ("b.txt", 6, 1, 64), ("rows/a.txt", 8, 2, 64),
    ]  # fmt: skip
    for file in found.files:
        found.check(file, contents=True)
    assert [found.read(file, limit=8) for file in found.files] == [b"three\n", b"one\ntwo\n"]
    assert found.place(found.files[1]).location == f"{stage.location}/rows/a.txt"


def test_a_second_process_of_one_attempt_replaces_the_manifest(stage: Place) -> None:
    first = write_manifest(stage, {"b.txt": None})
    second = write_manifest(stage, {"b.txt": None, "rows/a.txt": None})
    assert (first.rows, second.files) == (None, 2)
    assert len(read_manifest(stage, second).files) == 2
    with pytest.raises(UnreadableRecord, match="is not the one that the job's outcome has committed"):
        read_manifest(stage, first)


def test_a_manifest_without_checksums_reads_no_large_file(stage: Place) -> None:
    store_of(stage).put_new("large", bytes((8 << 20) + 1))
    for checksums in (True, False):
        committed = write_manifest(stage, {"b.txt": None, "large": 1}, checksums=checksums)
        found = read_manifest(stage, committed).files
        assert [(file.bytes, bool(file.sha256)) for file in found] == [(6, True), ((8 << 20) + 1, checksums)]


def test_a_changed_or_missing_file_is_noticed(stage: Place) -> None:
    found = read_manifest(stage, write_manifest(stage, {"rows/a.txt": 2, "b.txt": 1}))
    other, same_size = found.files
    path = Path(found.place(same_size).location)
    path.write_bytes(b"one\ntwa\n")
    found.check(same_size)
    for check in (lambda: found.check(same_size, contents=True), lambda: found.read(same_size, limit=100)):
        with pytest.raises(UnreadableRecord, match="has changed since its job has ended"):
            check()
    path.write_bytes(b"one")
    with pytest.raises(UnreadableRecord, match="has changed"):
        found.check(same_size)
    Path(found.place(other).location).unlink()
    with pytest.raises(NotFound, match="is missing"):
        found.check(other)


def test_only_regular_files_are_staged(stage: Place, tmp_path: Path) -> None:
    found = read_manifest(stage, write_manifest(stage, {"b.txt": 1}))
    [file] = found.files
    path = Path(found.place(file).location)
    (tmp_path / "secret").write_bytes(path.read_bytes())
    path.unlink()
    path.symlink_to(tmp_path / "secret")
    with pytest.raises(UnsafePath, match="it is a link or a device"):
        found.check(file)
    with pytest.raises(UnsafePath, match="it is a link or a device"):
        write_manifest(stage, {"b.txt": 1})
    for outside in ("../b.txt", "/etc/passwd", "rows/../../x"):
        with pytest.raises(UnsafePath):
            write_manifest(stage, {outside: None})
    with pytest.raises(InvalidArgument, match=r"gone\.txt.* does not exist"):
        write_manifest(stage, {"gone.txt": None})


def test_a_forged_manifest_names_no_file_outside(stage: Place, tmp_path: Path) -> None:
    """Its digest is in the outcome, which a submitter may write."""
    (tmp_path / "secret").write_text("secret")
    text = json.dumps({"v": 1, "files": [{"path": "../../../../../../../secret", "bytes": 6}]}).encode()
    store_of(stage).put(MANIFEST, text)
    import hashlib

    committed = StagedOutput(sha256=hashlib.sha256(text).hexdigest(), files=1, bytes=6)
    found = read_manifest(stage, committed)
    for use in (found.place, found.check, lambda file: found.read(file, limit=100)):
        with pytest.raises(UnsafePath):
            use(found.files[0])


def test_an_outcome_without_a_manifest_is_refused(stage: Place) -> None:
    committed = write_manifest(stage, {"b.txt": 1})
    with pytest.raises(InvalidArgument, match="an actor has returned it"):
        read_manifest(None, committed)
    (Path(stage.location) / MANIFEST).unlink()
    with pytest.raises(NotFound, match="there is no such file"):
        read_manifest(stage, committed)


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give a folder away")
def test_hole_2_a_manifest_that_another_user_may_have_written_is_not_read(stage: Place) -> None:
    committed = write_manifest(stage, {"b.txt": 1})
    Path(stage.location).chmod(0o777)
    with pytest.raises(UnsafePath, match="writable"):
        read_manifest(stage, committed)


def test_files_at_their_final_place_are_in_the_manifest(stage: Place, tmp_path: Path) -> None:
    shared = Place(str(tmp_path / "shared"), "c0ffee")
    data = table_data(stage, shared, "c0ffee", str(tmp_path / "t"))
    assert data.path == "data/distop-staged/c0ffee/t/copy/3/000000/7-inc"
    for _ in range(2):
        make_table_data(stage, data)
    store_of(data).put_new("x.parquet", b"12345")
    committed = write_manifest(stage, {"b.txt": None}, data=data, in_table={"x.parquet": 5})
    found = read_manifest(stage, committed, data)
    assert [(found.place(file).location, file.in_table) for file in found.files] == [
        (f"{stage.location}/b.txt", False),
        (f"{data.location}/x.parquet", True),
    ]
    for file in found.files:
        found.check(file, contents=True)
    with pytest.raises(InvalidArgument, match="has files in the table"):
        read_manifest(stage, committed)
    with pytest.raises(UnsafePath, match="is not a stage in"):
        table_data(Place(str(tmp_path), "shared/c0ffee"), shared, "c0ffee", str(tmp_path / "t"))


def test_hole_3_a_folder_in_the_table_that_no_attempt_has_made_is_not_used(stage: Place, tmp_path: Path) -> None:
    data = table_data(stage, Place(str(tmp_path / "shared"), "c0ffee"), "c0ffee", str(tmp_path / "t"))
    Path(data.location).mkdir(parents=True)
    with pytest.raises(FileExistsError, match="only its attempt may create it"):
        make_table_data(stage, data)
