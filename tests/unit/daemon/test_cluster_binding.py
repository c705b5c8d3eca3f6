"""The binding of a work directory to its cluster."""

from __future__ import annotations

import asyncio
import logging
import stat
from typing import TYPE_CHECKING

import pytest

from distop.daemon import cluster_binding as module
from distop.daemon.cluster_binding import Binding, BindingFile
from distop.errors import ClusterChanged, InvalidArgument, NotAllowed
from distop.store._proto import rpc_pb2 as rpc
from tests.support.etcd import until
from tests.unit.support.virtualtime import in_virtual_time

if TYPE_CHECKING:
    from pathlib import Path


def answer(binding: Binding, cluster: int, revision: int) -> None:
    """Receive a linearizable answer of an etcd."""
    header = rpc.ResponseHeader(cluster_id=cluster, revision=revision)
    binding.identity.see(header, "e1:2379", linearizable_after=binding.identity.revision)


async def bound(folder: Path, cluster: int, revision: int, namespace: str = "") -> None:
    binding = Binding.load(BindingFile(folder), namespace)
    answer(binding, cluster, revision)
    await binding.save()


async def test_the_binding_outlives_the_process(tmp_path: Path) -> None:
    await bound(tmp_path, 0xAB, 7)
    same = Binding.load(BindingFile(tmp_path), "")
    answer(same, 0xAB, 7)
    with pytest.raises(ClusterChanged, match=r"e1:2379 went back from revision 7 to 6: .* move the work directory .*/"):
        answer(same, 0xAB, 6)
    with pytest.raises(ClusterChanged):
        answer(same, 0xAB, 8)
    other = Binding.load(BindingFile(tmp_path), "")
    with pytest.raises(ClusterChanged, match=r"another cluster than before \(id cd, before: ab\).*--work-dir"):
        answer(other, 0xCD, 9)
    await other.save()
    assert Binding.load(BindingFile(tmp_path), "").identity.cluster_id == 0xAB, (
        "a rejected cluster does not change the binding"
    )


async def test_the_file_of_the_binding_is_private(tmp_path: Path) -> None:
    await bound(tmp_path, 1, 1)
    (file,) = tmp_path.iterdir()
    assert stat.S_IMODE(file.stat().st_mode) == 0o600


async def test_a_work_directory_of_another_namespace_is_refused(tmp_path: Path) -> None:
    await bound(tmp_path, 1, 1, "prod")
    with pytest.raises(NotAllowed, match="belongs to the namespace 'prod', but this executor serves no name"):
        Binding.load(BindingFile(tmp_path), "")
    assert Binding.load(BindingFile(tmp_path), "prod").identity.cluster_id == 1


@pytest.mark.parametrize(
    "data", [b"", b"{", b"[]", b'{"v":1}', b'{"v":1,"namespace":"","cluster_id":7,"revision":1}', b"\xff"]
)
def test_an_unreadable_binding_is_not_overwritten(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "cluster.json").write_bytes(data)
    with pytest.raises(InvalidArgument, match=r"cannot read .*cluster.json.* move the directory away"):
        Binding.load(BindingFile(tmp_path), "")


class Counted(BindingFile):
    """Counts the writes, and fails while it is ``full``."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.full = False
        self.tries = 0

    def write(self, data: bytes) -> None:
        self.tries += 1
        if self.full:
            raise OSError(28, "No space left on device")
        super().write(data)


async def test_the_binding_is_saved_only_on_changes_and_at_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(module, "EVERY", 0.0)
    file = Counted(tmp_path)
    binding, ended = Binding.load(file, ""), asyncio.Event()
    keeping = asyncio.ensure_future(binding.keep(ended))

    answer(binding, 1, 5)
    await until(lambda: file.tries == 1)
    await binding.save()
    assert file.tries == 1
    file.full = True
    with caplog.at_level(logging.WARNING, "distop.executor"):
        answer(binding, 1, 6)
        await until(lambda: file.tries >= 4)
    assert len(caplog.records) == 1, "it is logged once"
    file.full = False
    answer(binding, 1, 9)
    ended.set()
    await keeping
    assert Binding.load(BindingFile(tmp_path), "").identity.revision == 9


def test_the_revision_is_saved_regularly_but_not_on_each_change(tmp_path: Path) -> None:
    """After a kill, a restored etcd is only noticed by a saved revision."""

    async def main() -> None:
        file = Counted(tmp_path)
        binding, ended = Binding.load(file, ""), asyncio.Event()
        keeping = asyncio.ensure_future(binding.keep(ended))
        for second in range(60):
            answer(binding, 1, 5 + second)
            await asyncio.sleep(1.0)
        written = Binding.load(BindingFile(tmp_path), "").identity.revision
        assert written > 5
        assert file.tries <= 60
        keeping.cancel()

    in_virtual_time(main)
