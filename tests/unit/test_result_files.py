"""Results in files: which file is read follows from the operation, the partition and the attempt, not from a record."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from distop import claims, large
from distop.claims.model import checked
from distop.errors import InvalidArgument, NotFound, UnreadableRecord
from distop.shared_folder import result_path

OP = "t/large/1"
DATA = b'{"text": "x"}'


def written(shared: Path, data: bytes = DATA) -> dict[str, Any]:
    return large.write(result_path(str(shared), OP, 0, 7, "inc"), data, 7)


def read(result: Any, shared: Path, incarnation: str = "inc") -> Any:
    return large.resolve(result, str(shared), OP, 0, incarnation)


def test_a_result_is_read_from_the_file_of_its_attempt(tmp_path: Path) -> None:
    told = written(tmp_path)
    assert told[large.POINTER].keys() == {"fence", "bytes", "sha256"}
    assert read(told, tmp_path) == {"text": "x"}
    assert large.path_of(told, str(tmp_path), OP, 0, "inc") == f"{tmp_path}/results/t/large/1/000000-7-inc.json"
    assert read({"text": "small"}, tmp_path) == {"text": "small"}
    with pytest.raises(NotFound, match="cannot be read from here"):
        read(told, tmp_path, "another")
    with pytest.raises(NotFound, match="DISTOP_SHARED_DIR"):
        large.resolve(told, "", OP, 0, "inc")


@pytest.mark.timeout(10)
@pytest.mark.parametrize("path", ["/dev/zero", "/etc/hostname", "http://127.0.0.1:9/", "s3://b/k?endpoint_override=x"])
def test_hole_9_the_path_in_a_record_is_not_read(tmp_path: Path, path: str) -> None:
    told = {large.POINTER: {"path": path, "bytes": 10, "sha256": "0" * 64}}
    with pytest.raises(UnreadableRecord, match="is void"):
        read(told, tmp_path)
    with pytest.raises(NotFound):
        read({large.POINTER: {**told[large.POINTER], "fence": 7}}, tmp_path)


@pytest.mark.parametrize(
    "field", [{"fence": "../../x"}, {"fence": True}, {"bytes": -1}, {"bytes": 1 << 40}, {"sha256": None}]
)
def test_hole_9_what_a_record_says_of_the_file_is_checked(tmp_path: Path, field: dict[str, Any]) -> None:
    told = written(tmp_path)[large.POINTER]
    with pytest.raises(UnreadableRecord, match="is void"):
        read({large.POINTER: {**told, **field}}, tmp_path)


def test_hole_9_a_job_that_an_actor_returned_has_no_file(tmp_path: Path) -> None:
    with pytest.raises(UnreadableRecord, match="no executor has written that"):
        read(written(tmp_path), tmp_path, incarnation="")


@pytest.mark.timeout(10)
def test_hole_9_only_a_regular_file_is_read_and_no_link_is_followed(tmp_path: Path) -> None:
    told = written(tmp_path)
    path = Path(large.path_of(told, str(tmp_path), OP, 0, "inc"))
    path.unlink()
    path.symlink_to("/dev/zero")
    with pytest.raises(NotFound, match="cannot be read from here"):
        read(told, tmp_path)
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(NotFound, match="no regular file"):
        read(told, tmp_path)
    path.unlink()
    elsewhere = tmp_path / "elsewhere"
    path.parent.rename(elsewhere)
    (elsewhere / path.name).write_bytes(DATA)
    path.parent.symlink_to(elsewhere)
    with pytest.raises(NotFound, match="cannot be read from here"):
        read(told, tmp_path)


def test_hole_9_no_more_than_the_recorded_bytes_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told = written(tmp_path)
    asked: list[int] = []
    real = large.read_regular

    def reading(folder: str, path: str, limit: int) -> bytes:
        asked.append(limit)
        return real(folder, path, limit)

    monkeypatch.setattr(large, "read_regular", reading)
    Path(large.path_of(told, str(tmp_path), OP, 0, "inc")).write_bytes(DATA * 1000)
    with pytest.raises(UnreadableRecord, match="its checksum is another one"):
        read(told, tmp_path)
    assert asked == [len(DATA)]
    monkeypatch.setattr(large, "MAX_BYTES", 5)
    with pytest.raises(ValueError, match="at most 5 are kept"):
        written(tmp_path)


@pytest.mark.parametrize("outcome", [claims.model.Complete, lambda result: claims.model.Abort("no", result)])
def test_hole_9_an_actor_cannot_return_a_result_that_names_a_file(outcome: Any) -> None:
    for result in ({large.POINTER: {"path": "/dev/zero", "bytes": 1, "sha256": ""}}, {large.POINTER: 1, "a": 2}):
        with pytest.raises(InvalidArgument, match="stands for a result in a file"):
            checked(outcome(result))
    assert checked(outcome({"a": 1})).result == {"a": 1}  # type: ignore[union-attr]
