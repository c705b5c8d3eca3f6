"""Results in files: operation, partition and attempt determine the file, not a record."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from distop.errors import InvalidArgument, NotFound, UnreadableRecord
from distop.protocol.behavior_declaration import Rules
from distop.protocol.keys import Keys
from distop.protocol.records import OperationRef, Spec, TableRecord
from distop.protocol.txn import KeyValue
from distop.services.claims import owned_jobs
from distop.services.claims.owned_jobs import checked
from distop.services.inspection import outcomes
from distop.storage import result_files
from distop.storage.deletion import Place
from distop.storage.folder_store import FolderStore
from distop.storage.object_store import Content
from distop.storage.places import Attempt, result_of

OP = "t/large/1"
ATTEMPT = Attempt(OP, 0, 7, "inc")
DATA = b'{"text": "x"}'


def written(shared: Path, data: bytes = DATA) -> dict[str, Any]:
    return result_files.write(Place(str(shared)), ATTEMPT, data)


def path(shared: Path) -> Path:
    return Path(result_of(Place(str(shared)), ATTEMPT).location)


def read(result: Any, shared: Path, fence: Any = 7, incarnation: str = "inc") -> Any:
    return result_files.resolve(result, Place(str(shared)), Attempt.of_outcome(OP, 0, fence, incarnation))


def test_a_result_is_read_from_the_file_of_its_attempt(tmp_path: Path) -> None:
    pointer = written(tmp_path)
    assert pointer[result_files.POINTER].keys() == {"bytes", "sha256"}
    assert read(pointer, tmp_path) == {"text": "x"}
    assert path(tmp_path) == tmp_path / "results/t/large/1/000000-7-inc.json"
    assert read({"text": "small"}, tmp_path) == {"text": "small"}
    with pytest.raises(NotFound, match="cannot be read here"):
        read(pointer, tmp_path, incarnation="another")
    with pytest.raises(NotFound, match="DISTOP_SHARED_DIR"):
        result_files.resolve(pointer, None, ATTEMPT)


@pytest.mark.timeout(10)
@pytest.mark.parametrize("named", ["/dev/zero", "/etc/hostname", "http://127.0.0.1:9/", "s3://b/k?endpoint_override=x"])
def test_hole_9_the_path_in_a_record_is_not_read(tmp_path: Path, named: str) -> None:
    pointer = {result_files.POINTER: {"path": named, "bytes": 10, "sha256": "0" * 64}}
    with pytest.raises(NotFound):
        read(pointer, tmp_path)


@pytest.mark.parametrize("field", [{"bytes": -1}, {"bytes": True}, {"bytes": 1 << 40}, {"sha256": None}])
def test_hole_9_the_size_and_checksum_in_a_record_are_checked(tmp_path: Path, field: dict[str, Any]) -> None:
    pointer = written(tmp_path)[result_files.POINTER]
    with pytest.raises(UnreadableRecord, match="has an invalid"):
        read({result_files.POINTER: {**pointer, **field}}, tmp_path)


@pytest.mark.parametrize("fence", ["../../x", True, 0, None, -1])
def test_hole_9_an_invalid_fence_leads_to_no_file(tmp_path: Path, fence: Any) -> None:
    with pytest.raises(UnreadableRecord, match="has an invalid"):
        read(written(tmp_path), tmp_path, fence)


def test_hole_9_a_job_that_an_actor_returned_has_no_file(tmp_path: Path) -> None:
    with pytest.raises(UnreadableRecord, match="no executor has written it"):
        read(written(tmp_path), tmp_path, incarnation="")


@pytest.mark.timeout(10)
def test_hole_9_only_a_regular_file_is_read_and_no_link_is_followed(tmp_path: Path) -> None:
    pointer = written(tmp_path)
    file = path(tmp_path)
    file.unlink()
    file.symlink_to("/dev/zero")
    with pytest.raises(NotFound, match="cannot be read here"):
        read(pointer, tmp_path)
    file.unlink()
    os.mkfifo(file)
    with pytest.raises(NotFound, match="not a regular file"):
        read(pointer, tmp_path)
    file.unlink()
    elsewhere = tmp_path / "elsewhere"
    file.parent.rename(elsewhere)
    (elsewhere / file.name).write_bytes(DATA)
    file.parent.symlink_to(elsewhere)
    with pytest.raises(NotFound, match="cannot be read here"):
        read(pointer, tmp_path)


def test_hole_9_no_more_than_the_recorded_bytes_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pointer = written(tmp_path)
    asked: list[int] = []
    real = FolderStore.get

    def reading(store: FolderStore, key: str, *, limit: int) -> Content:
        asked.append(limit)
        return real(store, key, limit=limit)

    monkeypatch.setattr(FolderStore, "get", reading)
    path(tmp_path).write_bytes(DATA * 1000)
    with pytest.raises(UnreadableRecord, match="size or checksum has changed"):
        read(pointer, tmp_path)
    assert asked == [len(DATA)]
    monkeypatch.setattr(result_files, "MAX_BYTES", 5)
    with pytest.raises(ValueError, match="at most 5 are allowed"):
        written(tmp_path)


@pytest.mark.parametrize("outcome", [owned_jobs.Complete, lambda result: owned_jobs.Abort("no", result)])
def test_hole_9_an_actor_cannot_return_a_result_that_names_a_file(outcome: Any) -> None:
    for result in (
        {result_files.POINTER: {"path": "/dev/zero", "bytes": 1, "sha256": ""}},
        {result_files.POINTER: 1, "a": 2},
    ):
        with pytest.raises(InvalidArgument, match="is reserved for results in files"):
            checked(outcome(result))
    assert checked(outcome({"a": 1})).result == {"a": 1}  # type: ignore[union-attr]


async def test_results_are_found_by_the_registered_record_only() -> None:
    """A submitter can write the copy in the spec, which could choose any bucket or folder."""
    keys, ref = Keys(), OperationRef("t", "large", "", 1)
    forged = Spec("r", "", "", Rules(), table=TableRecord("t", "parquet", "s3://elsewhere/t"))
    there = {keys.of(ref, "spec"): forged.encode(), keys.table("t"): TableRecord("t", "parquet", "/data/t").encode()}

    async def listed(first: str, after: str, revision: int = 0) -> Any:
        assert revision == 7
        return SimpleNamespace(kvs=[KeyValue(key, value, 1, 1, 1) for key, value in there.items() if key == first])

    async def space(key: str) -> KeyValue:
        return KeyValue(keys.space(), b"0123456789abcdef" * 2, 1, 1, 1)

    etcd: Any = SimpleNamespace(list=listed, get=space)
    place = await outcomes._Files(etcd, keys, ref, "")._shared_place(7)
    assert place is not None
    assert place.location.startswith("/data/t/_distop/")
